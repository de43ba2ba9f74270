"""Buffers, streams and graphs in host memory, for the devices that have no driver.

The cpu and the emulator share them. Work is done as soon as it is queued, so events are always
done; a captured graph is the recorded list of calls. Addresses look like a GPU's: allocations are
256-byte aligned, far apart, and never reused, so a stale address is always found out.
"""

from __future__ import annotations

import bisect
import math
import os
import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fp4rt.device import (
    Buffer,
    Capture,
    ClosedError,
    Device,
    Event,
    Graph,
    Kernel,
    LaunchConfig,
    MemInfo,
    OutOfMemoryError,
    Stream,
    checked_dtype,
    checked_shape,
)

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

ALIGNMENT = 256
GUARD = 1 << 20  # unmapped bytes between allocations


@dataclass
class Allocation:
    """One allocation: its address, its bytes, and which of them have been written."""

    address: int
    data: NDArray[np.uint8]
    written: NDArray[np.bool_] | None = None
    closed: bool = False


class Hold:
    """Keeps an allocation mapped: its buffer has one, shared with the graphs that touch it."""

    def __init__(self, allocation: Allocation) -> None:
        self.start, self.end = allocation.address, allocation.address + allocation.data.size


class HostBuffer(Buffer):
    """A `Buffer` whose bytes are a numpy array."""

    device: HostDevice

    def __init__(
        self,
        device: HostDevice,
        allocation: Allocation,
        offset: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        root: HostBuffer | None = None,
    ) -> None:
        self.device = device
        self.allocation = allocation
        self.offset = offset
        self.address = allocation.address + offset
        self.shape = shape
        self.dtype = dtype
        self._root = root
        self._closed = False
        self.hold: Hold | None = None
        if root is None:
            self.hold = Hold(allocation)
            device.holds.add(self.hold)
            weakref.finalize(self.hold, device.free, allocation)

    @property
    def array(self) -> NDArray[Any]:
        """The buffer's elements, shared, not copied."""
        self._check_open()
        window = self.allocation.data[self.offset : self.offset + self.nbytes]
        return window.view(self.dtype).reshape(self.shape)

    def mark_written(self) -> None:
        """Note that every byte of the buffer now has a value."""
        if self.allocation.written is not None:
            self.allocation.written[self.offset : self.offset + self.nbytes] = True

    def check_written(self) -> None:
        """Raise ValueError if some byte of the buffer never got a value."""
        if self.allocation.written is not None:
            written = self.allocation.written[self.offset : self.offset + self.nbytes]
            if not written.all():
                first = int(np.argmin(written))
                raise ValueError(
                    f"byte {first} of a {self.nbytes}-byte buffer at {self.address:#x} is read "
                    "but was never written; fill or upload it first"
                )

    def _check_open(self) -> None:
        if self._closed or (self._root or self)._closed or self.device.closed:
            raise ClosedError(f"buffer at {self.address:#x} on {self.device.name} is closed")

    def _window(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> HostBuffer:
        root = self._root or self
        return HostBuffer(self.device, self.allocation, self.offset + offset, shape, dtype, root)

    def close(self) -> None:
        self._closed = True
        self.hold = None


class HostMemory:
    """Allocations by address."""

    def __init__(self, base: int, *, poison: int | None = None) -> None:
        self._next = base
        self._poison = poison
        self._starts: list[int] = []
        self._allocations: list[Allocation] = []
        self.used = 0

    def allocate(self, nbytes: int) -> Allocation:
        """Return `nbytes` of fresh memory: poisoned and unwritten, or plain uninitialised."""
        data = np.empty(nbytes, np.uint8)
        written = None
        if self._poison is not None:
            data.fill(self._poison)
            written = np.zeros(nbytes, np.bool_)
        allocation = Allocation(self._next, data, written)
        self._next += -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT + GUARD
        self._starts.append(allocation.address)
        self._allocations.append(allocation)
        self.used += nbytes
        return allocation

    def free(self, allocation: Allocation) -> None:
        """Forget an allocation; doing so twice is harmless."""
        if allocation.closed:
            return
        allocation.closed = True
        self.used -= allocation.data.size
        index = bisect.bisect_left(self._starts, allocation.address)
        del self._starts[index], self._allocations[index]

    def find(self, address: int, nbytes: int) -> Allocation | None:
        """Return the allocation that holds all of ``[address, address + nbytes)``, or None."""
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        allocation = self._allocations[index]
        inside = address + nbytes <= allocation.address + allocation.data.size
        return allocation if inside else None


class HostEvent(Event):
    """A point that has passed already."""

    def __init__(self, *, timed: bool) -> None:
        self._time = time.perf_counter() if timed else None

    def done(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def elapsed_since(self, start: Event) -> float:
        if not isinstance(start, HostEvent):
            raise TypeError(f"start is an event of another device: {start!r}")
        if self._time is None or start._time is None:
            raise ValueError("both events must be recorded with timed=True")
        return self._time - start._time


@dataclass
class _Launch:
    stream: HostStream
    kernel: Kernel
    config: LaunchConfig
    params: bytes
    kept: list[Hold]

    def __call__(self) -> None:
        self.stream.device.run_kernel(self.kernel, self.config, self.params)


@dataclass
class _Copy:
    dst: HostBuffer | NDArray[Any]
    src: HostBuffer | NDArray[Any]

    def __call__(self) -> None:
        if isinstance(self.src, HostBuffer):
            self.src.check_written()
            source = self.src.array
        else:
            source = self.src
        if isinstance(self.dst, HostBuffer):
            self.dst.array[...] = source.reshape(self.dst.shape)
            self.dst.mark_written()
        else:
            self.dst[...] = source.reshape(self.dst.shape)


@dataclass
class _Fill:
    dst: HostBuffer
    byte: int

    def __call__(self) -> None:
        self.dst.array.reshape(-1).view(np.uint8).fill(self.byte)
        self.dst.mark_written()


@dataclass
class HostGraph(Graph):
    """A recorded list of calls."""

    device: HostDevice
    calls: list[Callable[[], None]] = field(default_factory=list)
    kept: list[object] = field(default_factory=list)
    hooks: list[Callable[[], None]] = field(default_factory=list)
    is_closed: bool = False

    @property
    def closed(self) -> bool:
        return self.is_closed

    def _check_open(self) -> None:
        if self.is_closed or self.device.closed:
            raise ClosedError(f"graph on {self.device.name} is closed")

    def launch(self, stream: Stream | None = None) -> None:
        self._check_open()
        target = self.device.stream if stream is None else self.device.own_stream(stream)
        if target.capturing:
            raise RuntimeError(
                "a graph can't be launched inside a capture; call what it was captured from again"
            )
        for call in self.calls:
            target.do(call)
        for hook in self.hooks:
            hook()

    def upload(self, stream: Stream | None = None) -> None:
        self._check_open()

    def _nth(self, kind: type, index: int) -> Any:
        self._check_open()
        found = [call for call in self.calls if isinstance(call, kind)]
        if not 0 <= index < len(found):
            raise ValueError(
                f"graph has {len(found)} nodes of kind {kind.__name__.strip('_').lower()}, "
                f"index {index} is out of range"
            )
        return found[index]

    def set_params(
        self, index: int, params: bytes | np.void, *, keep: Sequence[Buffer] | None = None
    ) -> None:
        node = self._nth(_Launch, index)
        node.params = checked_params(node.kernel, params)
        if keep is None:
            node.kept = self.device.holders(node.params)
        else:
            node.kept = [b.hold for b in keep if isinstance(b, HostBuffer) and b.hold is not None]

    def set_copy(self, index: int, dst: Buffer | NDArray[Any], src: Buffer | NDArray[Any]) -> None:
        node = self._nth(_Copy, index)
        for new, old, end in ((dst, node.dst, "destination"), (src, node.src, "source")):
            if isinstance(new, HostBuffer) != isinstance(old, HostBuffer):
                raise ValueError(f"the {end} must stay on the same side (host or device)")
            if new.nbytes != old.nbytes:
                raise ValueError(f"the {end} had {old.nbytes} bytes, got {new.nbytes}")
        if isinstance(src, np.ndarray) and not self.device.is_pinned(src):
            src = src.copy()
        node.dst, node.src = dst, src

    def debug_dot(self) -> str:
        names = [type(call).__name__.strip("_").lower() for call in self.calls]
        lines = [f'  n{i} [label="{i}: {name}"];' for i, name in enumerate(names)]
        lines += [f"  n{i} -> n{i + 1};" for i in range(len(names) - 1)]
        return "\n".join(["digraph {", *lines, "}"])

    def close(self) -> None:
        self.is_closed = True
        self.calls, self.kept, self.hooks = [], [], []


def checked_params(kernel: Kernel, params: bytes | np.void) -> bytes:
    """Return `params` as bytes; ValueError if the kernel's parameters have another size."""
    data = params if isinstance(params, bytes) else params.tobytes()
    if len(data) != kernel.params_bytes:
        raise ValueError(
            f"kernel {kernel.name} takes {kernel.params_bytes} bytes of parameters, "
            f"got {len(data)}; rebuild with `python build.py` if the struct changed"
        )
    return data


class HostStream(Stream):
    """A `Stream` whose work is done when it is queued."""

    def __init__(self, device: HostDevice) -> None:
        self.device: HostDevice = device
        self._recording: list[Callable[[], None]] | None = None
        self._hooks: list[Callable[[], None]] = []
        self._closed = False

    def do(self, call: Callable[[], None]) -> None:
        """Run `call` now, or record it during a capture."""
        self._check_open()
        if self._recording is not None:
            self._recording.append(call)
        else:
            call()

    def _check_open(self) -> None:
        if self._closed or self.device.closed:
            raise ClosedError(f"stream on {self.device.name} is closed")

    def _own(self, buffer: Buffer) -> HostBuffer:
        if not isinstance(buffer, HostBuffer):
            raise TypeError(f"expected a buffer of {self.device.name}, got {type(buffer).__name__}")
        if buffer.device is not self.device:
            raise ValueError(
                f"the buffer is on {buffer.device.name} (another open device) and the stream on "
                f"{self.device.name}; copy through the host: .to_numpy()"
            )
        buffer._check_open()
        return buffer

    def upload(self, dst: Buffer, src: NDArray[Any]) -> None:
        target = self._own(dst)
        _check_same(src, target, "source")
        if self._recording is not None and not self.device.is_pinned(src):
            src = src.copy()
        self.do(_Copy(target, src))

    def download(self, dst: NDArray[Any], src: Buffer) -> None:
        source = self._own(src)
        _check_same(dst, source, "destination")
        if not dst.flags.writeable:
            raise ValueError("destination is read-only")
        if self._recording is not None and not self.device.is_pinned(dst):
            raise RuntimeError(
                "a download inside a capture needs pinned memory; use device.empty_pinned"
            )
        self.do(_Copy(dst, source))

    def copy(self, dst: Buffer, src: Buffer) -> None:
        target, source = self._own(dst), self._own(src)
        if target.nbytes != source.nbytes:
            raise ValueError(f"sizes differ: {target.nbytes} and {source.nbytes} bytes")
        if target.address < source.address + source.nbytes and (
            source.address < target.address + target.nbytes
        ):
            raise ValueError("source and destination overlap; copy through a third buffer")
        flat = (target.nbytes,)
        self.do(_Copy(target.sub(0, flat, np.uint8), source.sub(0, flat, np.uint8)))

    def fill(self, dst: Buffer, byte: int) -> None:
        if isinstance(byte, bool) or not isinstance(byte, (int, np.integer)):
            raise TypeError(f"byte must be an int, got {byte!r}")
        if not 0 <= byte <= 255:
            raise ValueError(f"byte must be in 0..255, got {byte}")
        self.do(_Fill(self._own(dst), byte))

    def launch(self, kernel: Kernel, config: LaunchConfig, params: bytes | np.void) -> None:
        if not isinstance(kernel, Kernel):
            raise TypeError(f"expected a kernel of {self.device.name}, got {kernel!r}")
        if kernel.device is not self.device:
            raise ValueError(f"kernel {kernel.name} belongs to {kernel.device.name}")
        data = checked_params(kernel, params)
        kept = [] if self._recording is None else self.device.holders(data)
        self.do(_Launch(self, kernel, config, data, kept))

    def on_launch(self, call: Callable[[], None]) -> None:
        if self._recording is None:
            call()
        else:
            self._hooks.append(call)

    @property
    def capturing(self) -> bool:
        return self._recording is not None

    def record(self, *, timed: bool = False) -> HostEvent:
        return HostEvent(timed=timed)

    def wait(self, event: Event) -> None:
        if not isinstance(event, HostEvent):
            raise TypeError(f"expected an event of {self.device.name}, got {event!r}")

    def after(self, other: Stream) -> None:
        self.wait(HostEvent(timed=False))

    def synchronize(self) -> None:
        if self._recording is not None:
            raise RuntimeError("synchronize inside a capture: end the capture first")

    @contextmanager
    def capture(self) -> Iterator[Capture]:
        if self._recording is not None:
            raise RuntimeError("the stream is already capturing")
        result, self._recording, self._hooks = Capture(), [], []
        try:
            yield result
            kept = [k.hold if isinstance(k, HostBuffer) else k for k in result.kept]
            result.graph = HostGraph(self.device, self._recording, kept, self._hooks)
        finally:
            self._recording = None

    def close(self) -> None:
        self._closed = True


def _check_same(array: NDArray[Any], buffer: HostBuffer, what: str) -> None:
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{what} must be a numpy array, got {type(array).__name__}")
    if array.dtype != buffer.dtype:
        raise ValueError(
            f"{what} is {array.dtype}, the buffer {buffer.dtype}; use .view or .astype"
        )
    if array.size != buffer.size:
        raise ValueError(f"{what} has {array.size} elements, the buffer {buffer.size}")


class HostDevice(Device):
    """What the cpu and the emulator have in common.

    Any thread may use it: `lock` lets one at a time change the memory.
    """

    def __init__(self, base: int, *, poison: int | None = None) -> None:
        self.memory = HostMemory(base, poison=poison)
        self.closed = False
        self.lock = threading.RLock()
        self.holds: weakref.WeakSet[Hold] = weakref.WeakSet()
        self._stream = HostStream(self)
        self._pinned: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    @property
    def stream(self) -> HostStream:
        self.check_open()
        return self._stream

    def new_stream(self) -> HostStream:
        self.check_open()
        return HostStream(self)

    def own_stream(self, stream: Stream) -> HostStream:
        """Return `stream` if it is one of this device's; ValueError otherwise."""
        if not isinstance(stream, HostStream) or stream.device is not self:
            raise ValueError(f"stream {stream!r} does not belong to {self.name}")
        return stream

    def check_open(self) -> None:
        """Raise ClosedError after `close`."""
        if self.closed:
            raise ClosedError(f"device {self.name} is closed; open it again with fp4rt.device")

    def alloc(self, shape: int | Sequence[int], dtype: DTypeLike = np.uint8) -> HostBuffer:
        self.check_open()
        dims, kind = checked_shape(shape), checked_dtype(dtype)
        nbytes = math.prod(dims) * kind.itemsize
        with self.lock:
            try:
                allocation = self.memory.allocate(nbytes)
            except MemoryError as error:
                info = self.mem_info()
                raise OutOfMemoryError(
                    f"{nbytes:,} bytes were asked of {self.name}, which has {info.free:,} free and "
                    f"{info.used:,} in use; close buffers and plans, or make them smaller"
                ) from error
            return HostBuffer(self, allocation, 0, dims, kind)

    def free(self, allocation: Allocation) -> None:
        """Give an allocation back; doing so twice is harmless."""
        with self.lock:
            self.memory.free(allocation)

    def empty_pinned(self, shape: int | Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
        self.check_open()
        dims, kind = checked_shape(shape), checked_dtype(dtype)
        data = np.empty(math.prod(dims) * kind.itemsize, np.uint8)
        self._pinned[id(data)] = data
        return data.view(kind).reshape(dims)

    def holders(self, params: bytes) -> list[Hold]:
        """Return what keeps mapped what 8-byte words of `params` point into.

        That of closed buffers too, which a graph may still have.
        """
        words = np.frombuffer(params, np.uint64, len(params) // 8)
        with self.lock:
            return [
                hold for hold in self.holds if np.any((words >= hold.start) & (words < hold.end))
            ]

    def is_pinned(self, array: NDArray[Any]) -> bool:
        """Whether `array` is, or is a view of, memory from `empty_pinned`."""
        base: Any = array
        while base is not None:
            if self._pinned.get(id(base)) is base:
                return True
            base = getattr(base, "base", None)
        return False

    @abstractmethod
    def run_kernel(self, kernel: Kernel, config: LaunchConfig, params: bytes) -> None:
        """Execute a launch."""

    def mem_info(self) -> MemInfo:
        page = os.sysconf("SC_PAGE_SIZE")
        free, total = (os.sysconf(name) * page for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"))
        return MemInfo(free=free, total=total, held=0, used=self.memory.used)

    def trim(self) -> None:
        """Free what is kept with the device; nothing else is cached."""
        self.clear_attached()

    def synchronize(self) -> None:
        self.check_open()

    def close(self) -> None:
        self.clear_attached()
        self.closed = True
