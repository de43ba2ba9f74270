"""What fp4rt is compared with on a GPU, and what the GPU can do at most, through CuPy if installed.

CuPy is no dependency: without it the ceilings come from a copy and from a documented figure, and
there is nothing to compare with. Work is queued on a stream of fp4rt's and captured into its
graphs, so everything is timed in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from fp4rt.cublas import WORKSPACE_BYTES, Cublas, loaded_library
from fp4rt.device import Device, Graph
from fp4rt.timing import Repeat, Timing, by_events, by_replay, interleaved
from fp4rt.workload import LAUNCHES, Operands, copies_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

DOCUMENTED_FLOPS = 717e12
"""Fp16 multiply-add rate of cuBLAS on an H200, 8192³ with NVFP4-valued data, power-limited."""
READ_PER_COPY = 4.6 / 4.31
"""Reading goes faster than copying by this, as measured on an H200."""
COPY_BYTES = 2 << 30
MATMUL = 8192

CUDA_SOURCE = r"""
typedef unsigned int u32; typedef unsigned short u16; typedef unsigned long long u64;

__device__ float from_half_bits(u16 bits) {
  float x; asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits)); return x;
}
__device__ u16 to_half_bits(float x) {
  u16 bits; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); return bits;
}

// One scale block a thread: 16 codes and an E4M3 scale to 16 halves.
extern "C" __global__ void dequantize(const uint2* values, const unsigned char* scales,
                                      uint4* out, u64 blocks) {
  u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= blocks) return;
  u32 byte = scales[i];
  float scale = from_half_bits((byte & 0x80) << 8 | (byte & 0x7f) << 7) * 256.0f * 16384.0f;
  uint2 codes = values[i];
  u32 words[2] = {codes.x, codes.y}, result[8];
  for (int w = 0; w < 2; ++w)
    for (int pair = 0; pair < 4; ++pair) {
      u32 halves = 0;
      for (int e = 0; e < 2; ++e) {
        u32 code = words[w] >> (8 * pair + 4 * e) & 15;
        u16 bits = (code & 8) << 12 | (code & 7) << 9;
        halves |= (u32)to_half_bits(from_half_bits(bits) * scale) << (16 * e);
      }
      result[4 * w + pair] = halves;
    }
  out[2 * i] = make_uint4(result[0], result[1], result[2], result[3]);
  out[2 * i + 1] = make_uint4(result[4], result[5], result[6], result[7]);
}

// Reads everything; `never` is 0, which the compiler can't know, so nothing is written.
extern "C" __global__ void read_all(const uint4* data, u64 count, u32* sink, u32 never) {
  u32 sum = 0;
  u64 step = (u64)gridDim.x * blockDim.x;
  u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  for (; i + 3 * step < count; i += 4 * step) {
    uint4 a = data[i], b = data[i + step], c = data[i + 2 * step], d = data[i + 3 * step];
    sum ^= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w;
    sum ^= c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
  }
  for (; i < count; i += step) sum ^= data[i].x ^ data[i].y ^ data[i].z ^ data[i].w;
  if (never) *sink = sum;
}
"""


@dataclass(frozen=True)
class Ceilings:
    """What the GPU can do at most.

    Attributes
    ----------
    read, flops
        Bytes read per second; fp16 multiply-add FLOPs per second: the roofline's two sides.
    read_source, flops_source
        Where they are from.
    rates
        Every rate that was measured, by what was done: a `Timing` of rates, not of seconds.
    """

    read: float
    flops: float
    read_source: str
    flops_source: str
    rates: dict[str, Timing]


def find_cupy() -> Any:
    """Return CuPy, or None if it isn't installed or finds no GPU."""
    try:
        cupy = import_module("cupy")
        return cupy if cupy.cuda.runtime.getDeviceCount() > 0 else None
    except Exception:  # a broken installation is as good as none, and fails in many ways
        return None


class Cupy:
    """CuPy on a stream of fp4rt's.

    Parameters
    ----------
    device
        A CUDA device.
    cupy
        The module.
    """

    def __init__(self, device: Device, cupy: Any) -> None:
        self.device = device
        self.np = cupy
        cupy.cuda.Device(int(device.name.partition(":")[2] or 0)).use()
        stream: Any = device.stream
        self._stream = cupy.cuda.ExternalStream(int(stream.__cuda_stream__()[1]))
        module = cupy.RawModule(code=CUDA_SOURCE)
        self._dequantize = module.get_function("dequantize")
        self._read_all = module.get_function("read_all")
        with self.on_stream():  # loads cuBLAS
            cupy.matmul(cupy.ones((16, 16), cupy.float16), cupy.ones((16, 16), cupy.float16))
            self._workspace = cupy.empty(WORKSPACE_BYTES, cupy.uint8)
        library = loaded_library()
        if library is None:
            raise RuntimeError("CuPy multiplied without cuBLAS; it can't be compared with")
        address = int(self._workspace.data.ptr)
        self._cublas = Cublas(library, int(stream.__cuda_stream__()[1]), address)

    def matmul(self, a: Any, b: Any, d: Any) -> None:
        """Queue D (M, N) = A (M, K) · B (N, K)ᵀ on contiguous fp16 arrays."""
        first, second, third = (int(array.data.ptr) for array in (a, b, d))
        self._cublas.gemm(first, second, third, a.shape[0], b.shape[0], a.shape[1])

    @property
    def version(self) -> str:
        """CuPy's version."""
        return str(self.np.__version__)

    def on_stream(self) -> AbstractContextManager[Any]:
        """Return a context in which CuPy queues its work on fp4rt's stream."""
        context: AbstractContextManager[Any] = self._stream
        return context

    def dequantize(self, values: Any, scales: Any, out: Any) -> None:
        """Queue decoding packed codes (…, K / 2) and scales to fp16 (…, K)."""
        blocks = scales.size
        grid = (math.ceil(blocks / 256),)
        self._dequantize(grid, (256,), (values, scales, out, np.uint64(blocks)))

    def read_all(self, data: Any, sink: Any) -> None:
        """Queue reading every byte of `data`."""
        grid = (8 * self.device.sm_count,)
        args = (data, np.uint64(data.nbytes // 16), sink, np.uint32(0))
        self._read_all(grid, (256,), args)

    def capture(self, work: Callable[[], None]) -> Graph:
        """Run `work` once, then capture it into a graph."""
        with self.on_stream():
            work()
            self.device.stream.synchronize()
            with self.device.stream.capture() as capture:
                work()
        return capture.graph

    def close(self) -> None:
        """Destroy the cuBLAS handle."""
        self.device.synchronize()
        self._cublas.close()

    def free(self) -> None:
        """Give CuPy's cached memory back."""
        self.device.synchronize()
        self.np.get_default_memory_pool().free_all_blocks()


def measure_ceilings(device: Device, cupy: Cupy | None, seconds: float, windows: int) -> Ceilings:
    """Measure copying, and with CuPy reading and fp16 matrix multiplication too."""
    stream = device.stream
    source, target = (device.alloc(COPY_BYTES) for _ in range(2))
    stream.fill(source, 0x55)
    things: dict[str, Repeat] = {
        "copy": by_events(stream, lambda: stream.copy(target, source)),
    }
    amounts = {"copy": 2.0 * COPY_BYTES, "read": 1.0 * COPY_BYTES, "fp16 matmul": 2.0 * MATMUL**3}
    kept: list[Any] = [source, target]
    if cupy is not None:
        xp = cupy.np
        with cupy.on_stream():
            data, sink = xp.zeros(COPY_BYTES, xp.uint8), xp.zeros(1, xp.uint32)
            square = []
            for _ in range(2):
                codes = xp.random.randint(0, 256, (MATMUL, MATMUL // 2), xp.uint8)
                scales = xp.random.randint(0x28, 0x40, (MATMUL, MATMUL // 16), xp.uint8)
                square.append(xp.empty((MATMUL, MATMUL), xp.float16))
                cupy.dequantize(codes, scales, square[-1])
            product = xp.empty((MATMUL, MATMUL), xp.float16)
        reading = cupy.capture(lambda: cupy.read_all(data, sink))
        multiplying = cupy.capture(lambda: cupy.matmul(square[0], square[1], product))
        things["read"] = by_replay(stream, reading, 1)
        things["fp16 matmul"] = by_replay(stream, multiplying, 1)
        kept += [data, sink, square, product]
    times = interleaved(things, seconds, windows)
    rates = {
        name: Timing(tuple(amounts[name] / t for t in timing.windows))
        for name, timing in times.items()
    }
    for buffer in (source, target):
        buffer.close()
    del kept
    if cupy is None:
        return Ceilings(
            rates["copy"].median * READ_PER_COPY,
            DOCUMENTED_FLOPS,
            f"{READ_PER_COPY:.3f} × the copy measured here (CuPy is not installed)",
            "documented for an H200, not measured here (CuPy is not installed)",
            rates,
        )
    cupy.free()
    return Ceilings(
        max(rates["read"].median, rates["copy"].median),
        rates["fp16 matmul"].median,
        "measured here",
        "measured here, cuBLAS through CuPy",
        rates,
    )


class CupyPeers:
    """cuBLAS in fp16 on operands dequantised beforehand, and dequantising followed by that.

    Parameters
    ----------
    cupy
        CuPy on the device.
    operands
        What is multiplied.
    """

    def __init__(self, cupy: Cupy, operands: Operands) -> None:
        self._cupy, self._operands = cupy, operands
        xp, shapes = cupy.np, operands.shapes
        groups = len(shapes.sizes)
        dense_bytes = (shapes.rows + groups * shapes.n) * shapes.k * 2
        self.copies = copies_of(shapes, dense_bytes)
        self.launches = math.ceil(LAUNCHES / self.copies) * self.copies
        ends = np.cumsum(shapes.sizes)
        self._spans = [(int(e) - m, int(e)) for e, m in zip(ends, shapes.sizes, strict=True)]
        self._sets: list[tuple[Any, ...]] = []
        with cupy.on_stream():
            packed = [
                xp.asarray(part)
                for q in (operands.a, operands.b)
                for part in (q.values, q.scales.view(np.uint8))
            ]
            for _ in range(self.copies):
                weights = [xp.repeat(part[None], groups, axis=0) for part in packed[2:]]
                rows = [part.copy() for part in packed[:2]]
                dense_a = xp.empty((shapes.rows, shapes.k), xp.float16)
                dense_b = xp.empty((groups, shapes.n, shapes.k), xp.float16)
                d = xp.empty((shapes.rows, shapes.n), xp.float16)
                self._sets.append((rows, weights, dense_a, dense_b, d))
                self._decode(self._sets[-1])
        plain, decoding = self._multiply, self._decode_and_multiply
        self.graphs: dict[str, Graph] = {
            "dequantise + cuBLAS fp16": cupy.capture(lambda: self._all(decoding)),
            "cuBLAS fp16, dequantised before": cupy.capture(lambda: self._all(plain)),
        }

    def _all(self, work: Callable[[tuple[Any, ...]], None]) -> None:
        for i in range(self.launches):
            work(self._sets[i % self.copies])

    def _decode(self, arrays: tuple[Any, ...]) -> None:
        rows, weights, dense_a, dense_b, _ = arrays
        self._cupy.dequantize(rows[0], rows[1], dense_a)
        self._cupy.dequantize(weights[0], weights[1], dense_b)

    def _multiply(self, arrays: tuple[Any, ...]) -> None:
        _, _, dense_a, dense_b, d = arrays
        for g, (start, end) in enumerate(self._spans):
            if end > start:
                self._cupy.matmul(dense_a[start:end], dense_b[g], d[start:end])

    def _decode_and_multiply(self, arrays: tuple[Any, ...]) -> None:
        self._decode(arrays)
        self._multiply(arrays)

    def wrong(self, name: str) -> str | None:
        """Replay a graph over results filled with NaN; return what is wrong with it, or None."""
        with self._cupy.on_stream():
            for arrays in self._sets:
                arrays[-1].fill(np.nan)
        self.graphs[name].launch(self._cupy.device.stream)
        self._cupy.device.stream.synchronize()
        d: NDArray[np.float16] = self._cupy.np.asnumpy(self._sets[-1][-1])
        return self._operands.wrong(d, ulps=2)

    def close(self) -> None:
        """Free the arrays."""
        for graph in self.graphs.values():
            graph.close()
        self._sets.clear()
        self._cupy.free()
