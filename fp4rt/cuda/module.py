"""Modules and kernels: cubins loaded eagerly, and launches prepared once."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from fp4rt.cuda import driver as door
from fp4rt.cuda.driver import call, quiet, relaxed
from fp4rt.cuda.memory import Memory
from fp4rt.device import ClosedError, Dim3, Kernel, LaunchConfig, Module

if TYPE_CHECKING:
    from fp4rt.cuda.device import CudaDevice

MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_BLOCK = (1024, 1024, 64)
PORTABLE_CLUSTER = 8
DEFAULT_SHARED = 48 << 10
"""Shared memory that a launch gets without asking for more."""


_NEVER = object()
"""The key of no stream."""


class _Function:
    """One entry point: the driver's handle and the facts in the image."""

    def __init__(self, handle: Any) -> None:
        cu = door.driver
        self.handle = handle
        call(cu.cuFuncLoad, handle)  # so that nothing is loaded later, inside a capture
        attribute = cu.CUfunction_attribute

        def fact(name: str) -> int:
            key = getattr(attribute, f"CU_FUNC_ATTRIBUTE_{name}")
            return int(call(cu.cuFuncGetAttribute, key, handle))

        self.num_registers = fact("NUM_REGS")
        self.local_bytes = fact("LOCAL_SIZE_BYTES")
        self.shared_bytes = fact("SHARED_SIZE_BYTES")
        self.max_threads = fact("MAX_THREADS_PER_BLOCK")
        self.params: list[tuple[int, int]] = []
        while True:
            code, offset, size = cu.cuFuncGetParamInfo(handle, len(self.params))
            if code == cu.CUresult.CUDA_ERROR_INVALID_VALUE:
                break
            if code:
                raise door.failure(cu.cuFuncGetParamInfo, code)
            self.params.append((offset, size))
        self.dynamic_limit = DEFAULT_SHARED - self.shared_bytes
        self.any_cluster = False


class _Unload:
    """Unloads an image, once nothing runs it any more."""

    __slots__ = ("_handle", "_memory")

    def __init__(self, memory: Memory, handle: Any) -> None:
        self._memory = memory
        self._handle = handle
        memory.owned.add(self)

    def __call__(self) -> None:
        if self in self._memory.owned:
            self._memory.owned.discard(self)
            with relaxed():
                quiet(door.driver.cuModuleUnload, self._handle)


class Image:
    """A cubin loaded on one device; shared by every `CudaModule` that loaded the same bytes."""

    def __init__(self, memory: Memory, data: bytes) -> None:
        cu = door.driver
        with memory.context.current(), relaxed():
            handle = call(cu.cuModuleLoadData, data)
            finalizer = weakref.finalize(self, memory.retire, _Unload(memory, handle))
            finalizer.atexit = False
            count = call(cu.cuModuleGetFunctionCount, handle)
            handles = call(cu.cuModuleEnumerateFunctions, count, handle) if count else []
            names = [call(cu.cuFuncGetName, h).decode() for h in handles]
            self.functions = dict(
                sorted((n, _Function(h)) for n, h in zip(names, handles, strict=True))
            )


class CudaModule(Module):
    """A loaded cubin."""

    def __init__(self, device: CudaDevice, image: Image) -> None:
        self.device: CudaDevice = device
        self._image: Image | None = image

    def kernel(self, name: str) -> CudaKernel:
        """Return the entry point `name`; ValueError lists the names there are."""
        self.device.check_open()
        if self._image is None:
            raise ClosedError("the module is closed; load the image again")
        function = self._image.functions.get(name)
        if function is None:
            raise ValueError(
                f"no kernel {name!r} in this image; it has {', '.join(self._image.functions)}"
            )
        return CudaKernel(self.device, self._image, name, function)

    def close(self) -> None:
        """Unload the image once its kernels are gone."""
        self._image = None


class CudaKernel(Kernel):
    """An entry point of a loaded cubin; keeps it loaded."""

    def __init__(self, device: CudaDevice, image: Image, name: str, function: _Function) -> None:
        if len(function.params) > 1:
            raise ValueError(
                f"kernel {name} takes {len(function.params)} parameters; fp4rt launches kernels "
                "that take one struct, `const __grid_constant__ Params p`"
            )
        self.device: CudaDevice = device
        self.name = name
        self.function = function
        self.num_registers = function.num_registers
        self.local_bytes = function.local_bytes
        self.shared_bytes = function.shared_bytes
        self.max_threads = function.max_threads
        self.params_bytes = function.params[0][1] if function.params else 0
        self._image = image
        # The last launch, replaced as a whole: configuration, key of the stream, the driver call
        # less its parameters, the parameters if they were bytes, the pointer to them,
        # and the address of that.
        self.prepared: tuple[Any, ...] = (None, _NEVER, None, None, None, 0)

    def params_of(self, params: bytes | np.void) -> bytes:
        """Return `params` as bytes of the size that the image asks for."""
        data = params if isinstance(params, bytes) else params.tobytes()
        if len(data) != self.params_bytes:
            raise ValueError(
                f"kernel {self.name} takes {self.params_bytes} bytes of parameters, got "
                f"{len(data)}; rebuild with `python build.py` if the struct changed"
            )
        return data

    def prepare(self, config: LaunchConfig, stream: Any) -> Callable[[int, int], tuple[Any, ...]]:
        """Check `config` and return the driver call that launches it, less its parameters."""
        self.device.check_open()
        check_config(self, config, self.device.max_shared)
        cu, function = door.driver, self.function
        ctas = config.cluster[0] * config.cluster[1] * config.cluster[2]
        attribute = cu.CUfunction_attribute
        with self.device.context.current():
            if config.shared_bytes > function.dynamic_limit:
                key = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                call(cu.cuFuncSetAttribute, function.handle, key, config.shared_bytes)
                function.dynamic_limit = config.shared_bytes
            if ctas > PORTABLE_CLUSTER and not function.any_cluster:
                key = attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
                call(cu.cuFuncSetAttribute, function.handle, key, 1)
                function.any_cluster = True
        launch: Callable[[int, int], tuple[Any, ...]]
        if ctas == 1 and not config.programmatic:
            launch = functools.partial(
                cu.cuLaunchKernel,
                function.handle,
                *config.grid,
                *config.block,
                config.shared_bytes,
                stream,
            )
        else:
            described = _launch_config(config, stream)
            launch = functools.partial(cu.cuLaunchKernelEx, described, function.handle)
        return launch


def _launch_config(config: LaunchConfig, stream: Any) -> Any:
    cu = door.driver
    described = cu.CUlaunchConfig()
    described.gridDimX, described.gridDimY, described.gridDimZ = config.grid
    described.blockDimX, described.blockDimY, described.blockDimZ = config.block
    described.sharedMemBytes = config.shared_bytes
    described.hStream = stream
    kinds = cu.CUlaunchAttributeID
    attributes = []
    if config.cluster != (1, 1, 1):
        cluster = cu.CUlaunchAttribute()
        cluster.id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dim = cluster.value.clusterDim
        dim.x, dim.y, dim.z = config.cluster
        attributes.append(cluster)
    if config.programmatic:
        early = cu.CUlaunchAttribute()
        early.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        attributes.append(early)
    described.attrs = attributes
    described.numAttrs = len(attributes)
    return described


def check_config(kernel: Kernel, config: LaunchConfig, max_shared: int) -> None:
    """Raise ValueError or TypeError if no GPU could launch `kernel` with `config`.

    Parameters
    ----------
    kernel
        Gives `max_threads` and the static `shared_bytes`.
    max_shared
        Most shared memory that a CTA may have on this GPU, in bytes.
    """
    _check_dim3("grid", config.grid, MAX_GRID)
    _check_dim3("block", config.block, MAX_BLOCK)
    _check_dim3("cluster", config.cluster, (16, 16, 16))
    threads = config.block[0] * config.block[1] * config.block[2]
    if threads > kernel.max_threads:
        raise ValueError(
            f"block {config.block} has {threads} threads; kernel {kernel.name} takes at most "
            f"{kernel.max_threads}"
        )
    for axis, (ctas, cluster) in enumerate(zip(config.grid, config.cluster, strict=True)):
        if ctas % cluster:
            raise ValueError(
                f"grid {config.grid} is not a whole number of clusters {config.cluster} along "
                f"axis {axis}; use {-(-ctas // cluster) * cluster}"
            )
    size = config.cluster[0] * config.cluster[1] * config.cluster[2]
    if size > 16:
        raise ValueError(f"cluster {config.cluster} has {size} CTAs; a cluster has at most 16")
    if not 0 <= config.shared_bytes <= max_shared - kernel.shared_bytes:
        raise ValueError(
            f"shared_bytes is {config.shared_bytes}; kernel {kernel.name} uses "
            f"{kernel.shared_bytes} bytes itself, so it must be in "
            f"0 .. {max_shared - kernel.shared_bytes}"
        )


def _check_dim3(what: str, dim: Dim3, limit: Dim3) -> None:
    if not isinstance(dim, tuple) or len(dim) != 3:
        raise TypeError(f"{what} must be a tuple of three ints, got {dim!r}")
    for value, most in zip(dim, limit, strict=True):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TypeError(f"{what} must hold ints, got {value!r} in {dim!r}")
        if not 1 <= value <= most:
            raise ValueError(f"{what} is {dim}; each extent must be in 1 .. its limit in {limit}")
