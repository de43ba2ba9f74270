"""cuBLAS's matrix product, called directly: CuPy refuses to call it while a stream is captured."""

from __future__ import annotations

import ctypes
from pathlib import Path

R_16F, COMPUTE_32F, DEFAULT_ALGORITHM, OP_N, OP_T = 2, 68, -1, 0, 1
"""Of cudaDataType_t, cublasComputeType_t, cublasGemmAlgo_t and cublasOperation_t."""
WORKSPACE_BYTES = 32 << 20
"""What NVIDIA recommends for Hopper."""


def loaded_library() -> Path | None:
    """Return the cuBLAS that this process has loaded, or None.

    Examples
    --------
    >>> loaded_library() is None or loaded_library().exists()
    True
    """
    for line in Path("/proc/self/maps").read_text("utf-8").splitlines():
        path = Path(line.rpartition(" ")[2])
        if path.name.startswith("libcublas.so"):
            return path
    return None


class Cublas:
    """A cuBLAS handle on one stream.

    Parameters
    ----------
    library
        The shared library.
    stream
        Handle of the stream.
    workspace
        Device address of `WORKSPACE_BYTES`, which must outlive the handle.
    """

    def __init__(self, library: Path, stream: int, workspace: int) -> None:
        self._library = ctypes.CDLL(str(library))
        self._handle = ctypes.c_void_p()
        self._call("cublasCreate_v2", ctypes.byref(self._handle))
        self._call("cublasSetStream_v2", self._handle, ctypes.c_void_p(stream))
        address, size = ctypes.c_void_p(workspace), ctypes.c_size_t(WORKSPACE_BYTES)
        self._call("cublasSetWorkspace_v2", self._handle, address, size)

    def _call(self, name: str, *args: object) -> None:
        status = getattr(self._library, name)(*args)
        if status:
            raise RuntimeError(f"{name} failed with cublasStatus_t {status}")

    def gemm(self, a: int, b: int, d: int, m: int, n: int, k: int) -> None:
        """Queue D (m, n) = A (m, k) · B (n, k)ᵀ: fp16, row-major, at these addresses.

        cuBLAS is column-major, so this is its Dᵀ (n, m) = B · Aᵀ.
        """
        one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self._call(
            "cublasGemmEx",
            self._handle,
            OP_T,
            OP_N,
            n,
            m,
            k,
            ctypes.byref(one),
            ctypes.c_void_p(b),
            R_16F,
            k,
            ctypes.c_void_p(a),
            R_16F,
            k,
            ctypes.byref(zero),
            ctypes.c_void_p(d),
            R_16F,
            n,
            COMPUTE_32F,
            DEFAULT_ALGORITHM,
        )

    def close(self) -> None:
        """Destroy the handle."""
        if self._handle:
            self._call("cublasDestroy_v2", self._handle)
            self._handle = ctypes.c_void_p()
