"""A GPU behind the CUDA driver API."""

from __future__ import annotations

import functools
import hashlib
import math
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fp4rt import interop
from fp4rt import tensor_map as rules
from fp4rt.cuda import driver as door
from fp4rt.cuda.buffer import CudaBuffer, is_device_memory
from fp4rt.cuda.driver import Context, call
from fp4rt.cuda.image import check_cubin
from fp4rt.cuda.memory import Memory
from fp4rt.cuda.module import CudaModule, Image
from fp4rt.cuda.staging import PinnedMemory, pinned_owner
from fp4rt.cuda.stream import CudaStream
from fp4rt.device import (
    Buffer,
    ClosedError,
    Device,
    DriverError,
    MemInfo,
    OutOfMemoryError,
    Stream,
    TensorMap,
    checked_dtype,
    checked_shape,
)

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

LEGACY_STREAM = 1
"""The driver's handle of the default stream that synchronises with others; 0 is ambiguous."""


class CudaDevice(Device):
    """One GPU: its primary context, its memory pool and its own stream.

    Parameters
    ----------
    ordinal
        Number of the GPU among those that the process sees.
    """

    image_kind = "cubin"

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.name = f"cuda:{ordinal}"
        facts = gpu_facts(ordinal)
        self.arch: str = facts["arch"]
        self.sm_count: int = facts["sm_count"]
        self.max_shared: int = facts["max_shared"]
        if not facts["memory_pools"]:
            raise DriverError(
                f"{self.name} ({facts['name']}) has no memory pools; fp4rt needs them"
            )
        self.context = Context(ordinal)
        try:
            self.memory = Memory(self.context, self.name)
        except BaseException:
            self.context.release()
            raise
        self._finalizer = weakref.finalize(self, self.memory.abandon)
        self._finalizer.atexit = False
        self._images: weakref.WeakValueDictionary[bytes, Image] = weakref.WeakValueDictionary()
        self._load_lock = threading.Lock()
        self.own_stream = CudaStream(self)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self.memory.closed

    def check_open(self) -> None:
        """Raise ClosedError after `close`, and in a forked process."""
        if self.memory.closed:
            raise ClosedError(f"device {self.name} is closed; open it again with fp4rt.device")
        if door.forked:
            raise ClosedError(door.FORKED)

    @property
    def stream(self) -> CudaStream:
        """The device's own stream, used where no other is given."""
        return self.own_stream

    def new_stream(self) -> CudaStream:
        """Return a further stream. It does not synchronise with the legacy default stream."""
        self.check_open()
        return CudaStream(self)

    def as_stream(self, stream: object = None) -> CudaStream:
        """Return `stream` as a `Stream` of this device.

        Parameters
        ----------
        stream
            None (the device's own), a stream of this device, the handle of a CUDA stream as an int
            (1 is the legacy default stream, 2 the per-thread one), or an object with
            ``__cuda_stream__``. Streams of other code must stay alive while they are used.

        Raises
        ------
        TypeError, ValueError
            If it is no stream, or one of another GPU.
        """
        self.check_open()
        if stream is None:
            return self.own_stream
        if isinstance(stream, Stream):
            found = super().as_stream(stream)
            assert isinstance(found, CudaStream)
            return found
        handle = interop.stream_handle(stream)
        foreign = CudaStream(self, foreign=handle)
        if handle > 2:
            with self.context.current():
                owner = call(door.driver.cuStreamGetCtx, foreign.handle)
            if int(owner) != self.context.address:
                raise ValueError(
                    f"stream {handle:#x} belongs to another context than {self.name}'s primary one"
                )
        return foreign

    def alloc(self, shape: int | Sequence[int], dtype: DTypeLike = np.uint8) -> CudaBuffer:
        """Return uninitialised device memory, usable on any stream at once."""
        self.check_open()
        dims, kind = checked_shape(shape), checked_dtype(dtype)
        nbytes = math.prod(dims) * kind.itemsize
        try:
            allocation = self.memory.allocate(nbytes)
        except OutOfMemoryError:
            if not self.clear_attached():
                raise
            allocation = self.memory.allocate(nbytes)
        return CudaBuffer.of(self, allocation, dims, kind)

    def empty_pinned(self, shape: int | Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
        """Return uninitialised page-locked host memory.

        Copies from and to it run in stream order while the host goes on, so it must not be changed
        or read before they are done. A graph that captured such a copy reads the array anew at
        every launch.
        """
        self.check_open()
        dims, kind = checked_shape(shape), checked_dtype(dtype)
        nbytes = math.prod(dims) * kind.itemsize
        return PinnedMemory(self.memory, nbytes).array()[:nbytes].view(kind).reshape(dims)

    def is_pinned(self, array: NDArray[Any]) -> bool:
        """Whether `array` is, or is a view of, memory from `empty_pinned`."""
        return pinned_owner(array) is not None

    def upload(self, array: NDArray[Any]) -> CudaBuffer:
        """Return a new buffer that holds `array`; complete on return, so any stream may use it."""
        self.check_open()
        if not isinstance(array, (np.ndarray, np.generic)):
            raise TypeError(f"expected a numpy array, got {type(array).__name__}; use as_buffer")
        source = np.asarray(array)
        buffer = self.alloc(source.shape, source.dtype)
        if source.nbytes:
            flat = np.ascontiguousarray(source).reshape(-1).view(np.uint8)
            self.memory.load(buffer.address, flat, pinned=pinned_owner(flat) is not None)
        return buffer

    def as_buffer(self, array: object, stream: object = None) -> Buffer:
        """Return `array` as a buffer of this device, without a copy where that is possible.

        Parameters
        ----------
        array
            A buffer of this device, a numpy array (copied), or an object with ``__dlpack__`` or
            ``__cuda_array_interface__``: C-contiguous, on this GPU, shared and kept alive.
        stream
            The stream that will use the buffer first: it waits for the array's producer.

        Raises
        ------
        TypeError, ValueError
            If the array can't be used; the message says what to do.
        """
        self.check_open()
        if isinstance(array, Buffer):
            return super().as_buffer(array)
        if isinstance(array, (np.ndarray, np.generic)):
            return self.upload(np.asarray(array))
        consumer = self.as_stream(stream)
        if consumer.state.recording is not None:
            raise RuntimeError("a foreign array can't be taken over inside a capture; do it before")
        with self.context.current():
            found = interop.import_array(array, int(consumer.handle), self.ordinal)
        consumer._used()  # it waits for the producer, and whoever waits for it does so too
        nbytes = math.prod(found.shape) * found.dtype.itemsize
        address = found.address if nbytes else 0
        allocation = self.memory.adopt(address, nbytes, found.owner, found.readonly)
        return CudaBuffer.of(self, allocation, found.shape, found.dtype)

    def load(self, image: bytes) -> CudaModule:
        """Load a cubin, all of it at once, so that nothing is loaded later inside a capture.

        The same bytes are loaded once; they stay as long as a module or kernel of them is alive.

        Raises
        ------
        TypeError, ValueError
            If it is not a whole cubin.
        NoKernelError
            If it is for another architecture.
        """
        self.check_open()
        check_cubin(image, self.arch)
        data = bytes(image)
        key = hashlib.sha256(data).digest()
        with self._load_lock:
            loaded = self._images.get(key)
            if loaded is None:
                loaded = self._images[key] = Image(self.memory, data)
        return CudaModule(self, loaded)

    def encode_tensor_map(self, tensor_map: TensorMap) -> bytes:
        """Return the 128 bytes that a kernel takes for a tensor map.

        Every rule of ``cuTensorMapEncodeTiled`` is checked first, and that the address is memory
        of this GPU.
        """
        self.check_open()
        rules.check(tensor_map, self.arch)
        if not is_device_memory(tensor_map.address, self.ordinal):
            raise ValueError(
                f"tensor map: address {tensor_map.address:#x} is not memory of {self.name}: it is "
                "host memory, another GPU's, or was freed; use a live buffer's address"
            )
        cu = door.driver
        rank = len(tensor_map.global_dim)
        steps = tensor_map.element_strides or (1,) * rank
        with self.context.current():
            encoded = call(
                cu.cuTensorMapEncodeTiled,
                _named(cu.CUtensorMapDataType, "DATA_TYPE", tensor_map.dtype),
                rank,
                tensor_map.address,
                [cu.cuuint64_t(n) for n in tensor_map.global_dim],
                [cu.cuuint64_t(n) for n in tensor_map.global_strides or (0,)],
                [cu.cuuint32_t(n) for n in tensor_map.box_dim],
                [cu.cuuint32_t(n) for n in steps],
                cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
                _named(cu.CUtensorMapSwizzle, "SWIZZLE", tensor_map.swizzle),
                _named(cu.CUtensorMapL2promotion, "L2_PROMOTION", tensor_map.l2_promotion),
                cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE
                if tensor_map.oob_fill == "zero"
                else cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA,
            )
        return np.array([int(word) for word in encoded.opaque], np.uint64).tobytes()

    def mem_info(self) -> MemInfo:
        """Return how much memory there is and who has it."""
        self.check_open()
        return self.memory.info()

    def trim(self) -> None:
        """Wait until dropped memory is free, and give the cache back to the driver."""
        self.check_open()
        self.clear_attached()
        self.memory.trim()

    def synchronize(self) -> None:
        """Wait until every stream of this device has finished; Ctrl-C ends the wait."""
        self.check_open()
        if self.memory.recordings():
            raise RuntimeError("a stream is capturing, so nothing runs; end the capture first")
        self.memory.drain()

    def close(self) -> None:
        """Finish and release everything; buffers and plans of this device become unusable.

        Pinned arrays, and buffers that other libraries were given, stay valid until dropped.
        """
        if not (self.closed or door.forked):
            self.clear_attached()
        self._finalizer.detach()
        self.memory.close()


def _named(kind: Any, group: str, name: str) -> Any:
    spelled = name.upper()
    if group == "L2_PROMOTION" and name != "none":
        spelled = f"L2_{spelled}"
    return getattr(kind, f"CU_TENSOR_MAP_{group}_{spelled}")


@functools.cache
def gpu_facts(ordinal: int) -> dict[str, Any]:
    """Return what the driver says about a GPU, without making a context."""
    cu = door.driver
    gpu = call(cu.cuDeviceGet, ordinal)

    def fact(name: str) -> int:
        key = getattr(cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(call(cu.cuDeviceGetAttribute, key, gpu))

    major, minor = fact("COMPUTE_CAPABILITY_MAJOR"), fact("COMPUTE_CAPABILITY_MINOR")
    name = call(cu.cuDeviceGetName, 128, gpu)
    return {
        "name": name.split(b"\0")[0].decode(),
        "arch": f"sm_{major}{minor}" + ("a" if major >= 9 else ""),
        "compute_capability": (major, minor),
        "sm_count": fact("MULTIPROCESSOR_COUNT"),
        "max_shared": fact("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        "memory_bytes": int(call(cu.cuDeviceTotalMem, gpu)),
        "memory_pools": bool(fact("MEMORY_POOLS_SUPPORTED")),
        "bus_id": call(cu.cuDeviceGetPCIBusId, 32, gpu).split(b"\0")[0].decode(),
        "driver": f"{door.version // 1000}.{door.version % 1000 // 10}",
    }
