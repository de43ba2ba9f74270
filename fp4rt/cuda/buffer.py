"""Typed buffers of device memory, and what other libraries see of them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from fp4rt import interop
from fp4rt.cuda import driver as door
from fp4rt.cuda.driver import call
from fp4rt.cuda.memory import Allocation
from fp4rt.cuda.staging import pinned_owner
from fp4rt.device import Buffer, ClosedError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fp4rt.cuda.device import CudaDevice


class _Handle:
    """What a buffer shares with its views: the allocation, until the buffer is closed."""

    __slots__ = ("allocation",)

    def __init__(self, allocation: Allocation) -> None:
        self.allocation: Allocation | None = allocation


class CudaBuffer(Buffer):
    """A typed, C-contiguous range of device memory.

    Offers DLPack, the CUDA array interface (version 3) and ``__array__``. The protocols can't name
    every dtype of ml_dtypes: where they can't, importers see unsigned integers of the same size.
    """

    def __init__(
        self,
        device: CudaDevice,
        handle: _Handle,
        offset: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        *,
        is_view: bool,
    ) -> None:
        self.device: CudaDevice = device
        self.shape = shape
        self.dtype = dtype
        self._handle = handle
        self._offset = offset
        self._is_view = is_view
        self._closed = False

    @classmethod
    def of(
        cls,
        device: CudaDevice,
        allocation: Allocation,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
    ) -> CudaBuffer:
        """Return the buffer that owns `allocation`."""
        return cls(device, _Handle(allocation), 0, shape, dtype, is_view=False)

    @property
    def allocation(self) -> Allocation:
        """The allocation; ClosedError if the buffer, its root or the device was closed."""
        allocation = self._handle.allocation
        if allocation is None or self._closed or self.device.closed:
            raise ClosedError(f"the buffer {self.shape} {self.dtype} was closed; allocate another")
        if door.forked:
            raise ClosedError(door.FORKED)
        return allocation

    @property
    def address(self) -> int:  # type: ignore[override]
        """Device address of the first byte; 0 for an empty allocation."""
        return self.allocation.address + self._offset

    @property
    def readonly(self) -> bool:
        """Whether another library owns the memory and shared it for reading only."""
        return self.allocation.readonly

    def _check_open(self) -> None:
        # Spelled out, since every launch asks it of every operand.
        memory = self.device.memory
        if self._closed or self._handle.allocation is None or memory.closed or door.forked:
            _ = self.allocation  # says which

    def _window(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> CudaBuffer:
        place = self._offset + offset
        return CudaBuffer(self.device, self._handle, place, shape, dtype, is_view=True)

    def to_numpy(self, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Copy to host memory, complete on return, after all work queued on any stream.

        Parameters
        ----------
        out
            C-contiguous, writable array of the same dtype and size; a new one if None.

        Raises
        ------
        RuntimeError
            If this thread is capturing: nothing is computed until the graph is launched.
        """
        address = self.address
        if out is None:
            out = np.empty(self.shape, self.dtype)
        check_target(out, self)
        if any(r.thread == threading.get_ident() for r in self.device.memory.recordings()):
            raise RuntimeError(
                "to_numpy inside a capture: nothing is computed until the graph is launched; "
                "end the capture, launch the graph, then call to_numpy"
            )
        if out.nbytes:
            flat, pinned = out.reshape(-1).view(np.uint8), pinned_owner(out) is not None
            self.device.memory.read(flat, address, pinned=pinned)
        return out

    def close(self) -> None:
        """Free the memory. Closing twice is harmless; closing a view only closes the view."""
        self._closed = True
        if not self._is_view:
            self._handle.allocation = None

    # What other libraries see

    def _export(self) -> None:
        """Note that streams which fp4rt doesn't know may use the memory from now on."""
        captures = self.device.memory.recordings()
        own = self.device.stream.state.recording
        if own is not None or any(r.thread == threading.get_ident() for r in captures):
            raise BufferError("a buffer can't be handed over during a capture; end it first")
        block = self.allocation.block
        if block is not None:
            block.exported = True

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        self._export()
        stream = self.device.stream
        with self.device.context.current():
            self.device.memory.order(stream.handle)
        return {
            "shape": self.shape,
            "typestr": interop.plain_dtype(self.dtype).str,
            "data": (self.address if self.size else 0, self.readonly),
            "strides": None,
            "version": 3,
            "stream": int(stream.handle),
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return (interop.DL_CUDA, self.device.ordinal)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Return a DLPack capsule that shares the memory and keeps it alive.

        Parameters
        ----------
        stream
            The consumer's stream, which is made to wait for the buffer's data: None or 1 for the
            legacy default stream, 2 for the per-thread one, -1 to wait for nothing.
        max_version
            Newest DLPack version that the consumer knows.
        dl_device
            Where the consumer wants the data: this GPU, or ``(1, 0)`` for host memory.
        copy
            True for memory of its own; False to fail where that would be needed.

        Raises
        ------
        BufferError
            If the data can't be offered in this way; the message says what can.
        """
        if dl_device is not None and tuple(dl_device) == (interop.DL_CPU, 0):
            if copy is False:
                raise BufferError("device memory reaches the host only by a copy")
            return interop.export_host(self.to_numpy(), max_version)
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"the buffer is on {self.device.name}; copy it to {dl_device} first")
        if stream is not None and (stream < -1 or stream == 0):
            raise BufferError(
                f"DLPack stream {stream} is ambiguous; use 1 (legacy default), 2 (per thread), "
                "-1 (no synchronisation) or a stream's handle"
            )
        if copy:
            source = self.device.alloc(self.shape, self.dtype)
            with self.device.context.current():
                self.device.memory.order(self.device.stream.handle)
            self.device.stream.copy(source, self)
        else:
            source = self
        source._export()
        if stream != -1:
            consumer = door.driver.CUstream(1 if stream is None else stream)
            with self.device.context.current():
                self.device.memory.order(consumer)
        return interop.export_device(
            source.allocation,
            address=source.address if source.size else 0,
            shape=source.shape,
            dtype=source.dtype,
            device=source.__dlpack_device__(),
            readonly=source.readonly,
            copied=bool(copy),
            max_version=max_version,
        )


def check_array(array: NDArray[Any], buffer: Buffer, what: str) -> None:
    """Raise unless `array` holds as many elements of the same dtype as `buffer`."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"the {what} must be a numpy array, got {type(array).__name__}")
    if array.dtype != buffer.dtype:
        raise ValueError(
            f"the {what} is {array.dtype} and the buffer {buffer.dtype}; use .view or .astype"
        )
    if array.size != buffer.size:
        raise ValueError(
            f"the {what} has {array.size} elements and the buffer {buffer.size}; slice one of them"
        )


def check_target(array: NDArray[Any], buffer: Buffer) -> None:
    """Raise unless `buffer` can be copied into `array`."""
    check_array(array, buffer, "destination")
    if not array.flags.writeable:
        raise ValueError("the destination is read-only")
    if not array.flags.c_contiguous:
        raise ValueError("the destination must be C-contiguous; download and copy over")


def is_device_memory(address: int, ordinal: int) -> bool:
    """Whether `address` is memory of GPU number `ordinal`."""
    cu = door.driver
    kinds = cu.CUpointer_attribute
    code, kind = cu.cuPointerGetAttribute(kinds.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)
    if code or int(kind) != int(cu.CUmemorytype.CU_MEMORYTYPE_DEVICE):
        return False
    where = call(cu.cuPointerGetAttribute, kinds.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address)
    return int(where) == ordinal
