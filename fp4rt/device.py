"""The seam: what the runtime needs from a device, and nothing more.

Everything above this module (plans, the command line, tests, notebooks) speaks to a `Device` and
its `Stream`. Three devices implement the verbs: ``fp4rt.cuda`` (the CUDA driver API),
``fp4rt.emulator`` (the kernels' own PTX, executed in numpy) and ``fp4rt.cpu`` (numpy and BLAS, no
kernels at all). They are found by name, and imported only when asked for, so ``import fp4rt``
touches no driver.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import numpy as np

from fp4rt import html
from fp4rt.errors import (
    ClosedError,
    DriverError,
    EmulatorFault,
    NoKernelError,
    OutOfMemoryError,
)
from fp4rt.tensor_map import TensorMap

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray


__all__ = [
    "Attached",
    "AttachedT",
    "Buffer",
    "Capture",
    "ClosedError",
    "Device",
    "DeviceInfo",
    "Dim3",
    "DriverError",
    "EmulatorFault",
    "Event",
    "Graph",
    "Kernel",
    "LaunchConfig",
    "MemInfo",
    "Module",
    "NoKernelError",
    "OutOfMemoryError",
    "Stream",
    "TensorMap",
    "checked_dtype",
    "checked_shape",
    "device",
    "devices",
]

Dim3 = tuple[int, int, int]


@dataclass(frozen=True)
class LaunchConfig:
    """How a kernel is launched.

    Parameters
    ----------
    grid, block
        Number of CTAs and of threads in a CTA, each along x, y, z.
    shared_bytes
        Dynamic shared memory of a CTA, in bytes.
    cluster
        CTAs in a cluster along x, y, z; (1, 1, 1) means no cluster attribute.
    programmatic
        Programmatic dependent launch: the kernel may start before its predecessor in the stream
        has finished, and orders itself with ``griddepcontrol.wait``.
    """

    grid: Dim3
    block: Dim3
    shared_bytes: int = 0
    cluster: Dim3 = (1, 1, 1)
    programmatic: bool = False


@dataclass(frozen=True)
class MemInfo:
    """Device memory in bytes: free, total, held by fp4rt's cache, used by live buffers."""

    free: int
    total: int
    held: int
    used: int


def checked_shape(shape: int | Sequence[int]) -> tuple[int, ...]:
    """Return `shape` as a tuple of ints; TypeError or ValueError if it cannot be one."""
    if (
        type(shape) is tuple
        and all(type(item) is int and item > 0 for item in shape)
        and math.prod(shape) < 1 << 62
    ):
        return shape  # the short way, since allocations count microseconds
    if not isinstance(shape, (int, np.integer, Sequence, np.ndarray)):
        raise TypeError(f"shape must be an integer or a tuple of them, got {shape!r}")
    items = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
    for item in items:
        if isinstance(item, bool) or not isinstance(item, (int, np.integer)):
            raise TypeError(f"shape must hold integers, got {item!r} in {shape!r}")
        if item < 0:
            raise ValueError(f"shape must not hold negative extents, got {shape!r}")
    if math.prod(int(item) for item in items if item) >= 1 << 62:
        raise ValueError(f"shape {shape!r} has 2**62 elements or more; no device has the memory")
    return tuple(int(item) for item in items)


def checked_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """Return `dtype`; TypeError for Python objects, ValueError for a foreign byte order."""
    try:
        kind = np.dtype(dtype)
    except TypeError as error:
        raise TypeError(f"dtype is {dtype!r}, which numpy doesn't know") from error
    if kind.hasobject:
        raise TypeError(f"dtype {kind} holds Python objects, which a device can't")
    if not kind.isnative:
        raise ValueError(
            f"dtype {kind.str} has the other byte order; convert with "
            f".astype({kind.newbyteorder('=').str!r})"
        )
    return kind


class Buffer(ABC):
    """A typed, C-contiguous range of device memory with an owner.

    Views made by `view`, `reshape` and indexing keep the allocation alive. A buffer is freed when
    it is closed, or when the last reference to it and its views goes away; the memory is then
    reused only by work that comes later in the order of the streams that used it.
    """

    device: Device
    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.size * self.dtype.itemsize

    @abstractmethod
    def _check_open(self) -> None:
        """Raise ClosedError if the buffer or its device was closed."""

    @abstractmethod
    def _window(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Self:
        """Return a view of the given bytes, which lie inside and are aligned."""

    def sub(self, offset: int, shape: int | Sequence[int], dtype: DTypeLike) -> Self:
        """Return a typed window that starts `offset` bytes in; ValueError if it does not fit."""
        self._check_open()
        dims, kind = checked_shape(shape), checked_dtype(dtype)
        if isinstance(offset, bool) or not isinstance(offset, (int, np.integer)):
            raise TypeError(f"offset must be an integer number of bytes, got {offset!r}")
        nbytes = math.prod(dims) * kind.itemsize
        if offset < 0 or offset + nbytes > self.nbytes:
            raise ValueError(
                f"window of {nbytes} bytes at offset {offset} does not fit a buffer of "
                f"{self.nbytes} bytes"
            )
        if nbytes and (self.address + offset) % kind.alignment:
            raise ValueError(
                f"offset {offset} is not a multiple of the {kind.alignment} bytes that {kind} "
                f"is aligned to"
            )
        return self._window(offset, dims, kind)

    def view(self, dtype: DTypeLike) -> Self:
        """Return the same bytes as another dtype, with numpy's rules for the last axis."""
        kind = np.dtype(dtype)
        if not kind.itemsize:
            raise ValueError(f"a buffer can't be viewed as {kind}, which has no bytes; give a size")
        if self.shape:
            last = self.shape[-1] * self.dtype.itemsize
            if last % kind.itemsize:
                raise ValueError(f"last axis of {last} bytes is not a whole number of {kind}")
            return self.sub(0, (*self.shape[:-1], last // kind.itemsize), kind)
        if kind.itemsize != self.dtype.itemsize:
            raise ValueError(f"a 0-d {self.dtype} can't be viewed as {kind}: sizes differ")
        return self.sub(0, (), kind)

    def reshape(self, *shape: int) -> Self:
        """Return the same elements with another shape; one extent may be -1."""
        dims = np.empty(self.shape, dtype=np.void).reshape(*shape).shape
        return self.sub(0, dims, self.dtype)

    def __getitem__(self, rows: int | slice) -> Self:
        """Return rows of the first axis: an index, or a slice with step 1."""
        if not self.shape:
            raise IndexError("a 0-d buffer has no rows")
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        if isinstance(rows, slice):
            start, stop, step = rows.indices(self.shape[0])
            if step != 1:
                raise ValueError(f"slices of a buffer need step 1, got {step}")
            count = max(stop - start, 0)
            return self.sub(start * row if count else 0, (count, *self.shape[1:]), self.dtype)
        if isinstance(rows, bool) or not isinstance(rows, (int, np.integer)):
            raise TypeError(f"a buffer takes one integer or slice of its rows, got {rows!r}")
        if not -self.shape[0] <= rows < self.shape[0]:
            raise IndexError(f"row {rows} of a buffer of {self.shape[0]} rows")
        index = range(self.shape[0])[rows]
        return self.sub(index * row, self.shape[1:], self.dtype)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d buffer")
        return self.shape[0]

    def to_numpy(self, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Copy to host memory, complete on return.

        Parameters
        ----------
        out
            C-contiguous, writable array of the same dtype and size; a new one if None.
        """
        self._check_open()
        if out is None:
            out = np.empty(self.shape, self.dtype)
        self.device.stream.download(out, self)
        return out

    def __array__(
        self, dtype: np.dtype[Any] | None = None, copy: bool | None = None
    ) -> NDArray[Any]:
        if copy is False:
            raise ValueError("a device buffer reaches numpy only by a copy; use .to_numpy()")
        return self.to_numpy().astype(dtype or self.dtype, copy=False)

    def __repr__(self) -> str:
        return f"<buffer {self.shape} {self.dtype} on {self.device.name}>"

    @abstractmethod
    def close(self) -> None:
        """Free the memory. Closing twice is harmless; closing a view only closes the view."""


class Kernel(ABC):
    """An entry point of a loaded module.

    The facts come from the image itself: registers and local memory per thread, static shared
    memory per CTA, the most threads a CTA may have, and the parameters' total size in bytes.
    """

    device: Device
    name: str
    num_registers: int
    local_bytes: int
    shared_bytes: int
    max_threads: int
    params_bytes: int


class Module(ABC):
    """A loaded image; kernels keep it loaded."""

    device: Device

    @abstractmethod
    def kernel(self, name: str) -> Kernel:
        """Return the entry point `name`; ValueError lists the names there are."""

    @abstractmethod
    def close(self) -> None:
        """Unload the image once its kernels are gone."""


class Event(ABC):
    """A point in a stream."""

    @abstractmethod
    def done(self) -> bool:
        """Whether everything before the event has finished."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for the event on the host."""

    @abstractmethod
    def elapsed_since(self, start: Event) -> float:
        """Return seconds from `start` to this event; both must be timed and finished."""


class Graph(ABC):
    """Captured work that replays as one launch and keeps alive everything it touches."""

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether `close` was called."""

    @abstractmethod
    def launch(self, stream: Stream | None = None) -> None:
        """Replay on `stream` (the device's own stream if None)."""

    @abstractmethod
    def upload(self, stream: Stream | None = None) -> None:
        """Move the graph to the device ahead of its first launch."""

    @abstractmethod
    def set_params(
        self, index: int, params: bytes | np.void, *, keep: Sequence[Buffer] | None = None
    ) -> None:
        """Replace the parameters of the captured kernel launch number `index` (capture order).

        The graph then keeps alive the buffers that they point into, or only those in `keep`.
        """

    @abstractmethod
    def set_copy(self, index: int, dst: Buffer | NDArray[Any], src: Buffer | NDArray[Any]) -> None:
        """Replace both ends of the captured copy number `index` (same kind and size)."""

    @abstractmethod
    def debug_dot(self) -> str:
        """Return the graph in GraphViz's language."""

    @abstractmethod
    def close(self) -> None:
        """Destroy the graph and let go of what it kept alive."""


class Capture:
    """What a ``with stream.capture() as capture`` block yields; `graph` is set when it ends.

    The graph keeps alive what the captured verbs were given, and every buffer whose address stands
    in a kernel's parameters. What a kernel reaches in another way, such as through a table of
    addresses in device memory, is given to `keep`.
    """

    graph: Graph

    def __init__(self) -> None:
        self.kept: list[object] = []

    def keep(self, *objects: object) -> None:
        """Keep `objects` alive as long as the graph."""
        self.kept.extend(objects)


class Stream(ABC):
    """An ordered queue of device work.

    Each verb returns as soon as the work is queued, unless it says otherwise. The caller may
    change or drop any argument as soon as a verb has returned; only arrays from
    `Device.empty_pinned` are copied in stream order, so they must not be changed before that.
    """

    device: Device

    def alloc(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Buffer:
        """Return uninitialised memory that this stream will use first; elsewhere it comes later.

        `Device.alloc` returns memory for any stream, which may take longer.
        """
        return self.device.alloc(shape, dtype)

    @abstractmethod
    def _check_open(self) -> None:
        """Raise ClosedError once the stream or its device is closed."""

    @abstractmethod
    def upload(self, dst: Buffer, src: NDArray[Any]) -> None:
        """Copy `src` (numpy, any strides, same dtype and size) to the device."""

    def upload_all(self, pairs: Sequence[tuple[Buffer, NDArray[Any]]]) -> None:
        """Do as `upload` for each pair (dst, src)."""
        for dst, src in pairs:
            self.upload(dst, src)

    @abstractmethod
    def download(self, dst: NDArray[Any], src: Buffer) -> None:
        """Copy to `dst` (numpy, C-contiguous, writable). Complete on return, unless pinned."""

    @abstractmethod
    def copy(self, dst: Buffer, src: Buffer) -> None:
        """Copy between buffers of one device; the ranges must not overlap."""

    def prepare_upload(self, dst: Buffer, src: NDArray[Any]) -> Callable[[], None]:
        """Return a function that uploads what `src` holds when it is called.

        For small arrays that are uploaded time and again: the checks are made once.
        """
        return partial(self.upload, dst, src)

    def prepare_copy(self, dst: Buffer, src: Buffer) -> Callable[[], None]:
        """Return a function that copies `src` to `dst` each time it is called."""
        return partial(self.copy, dst, src)

    @abstractmethod
    def fill(self, dst: Buffer, byte: int) -> None:
        """Set every byte of `dst`."""

    @abstractmethod
    def launch(self, kernel: Kernel, config: LaunchConfig, params: bytes | np.void) -> None:
        """Launch `kernel` with one parameter struct, given as its bytes or a numpy record."""

    @abstractmethod
    def on_launch(self, call: Callable[[], None]) -> None:
        """Call `call` now, or, during a capture, at every launch of the graph; on the host."""

    @property
    @abstractmethod
    def capturing(self) -> bool:
        """Whether verbs are recorded instead of done."""

    @abstractmethod
    def record(self, *, timed: bool = False) -> Event:
        """Return an event that marks this point."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Hold later work until `event` is done, without blocking the host."""

    @abstractmethod
    def after(self, other: Stream) -> None:
        """Hold later work until what `other` has queued so far is done; it may be closed."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait on the host until everything queued has finished."""

    @abstractmethod
    @contextmanager
    def capture(self) -> Iterator[Capture]:
        """Record the verbs called in the block into a `Graph` instead of doing them."""
        yield Capture()

    @abstractmethod
    def close(self) -> None:
        """Finish the queued work and destroy the stream."""


class Attached(ABC):
    """What a layer above keeps with a device, such as plans to be used again."""

    @abstractmethod
    def clear(self) -> None:
        """Free what can be made again: the device is closed, or needs the memory."""


AttachedT = TypeVar("AttachedT", bound=Attached)


class Device(ABC):
    """A place where kernels run.

    Attributes
    ----------
    name
        As given to `device`: ``"cuda:0"``, ``"emulator:sm_90a"``, ``"cpu"``.
    arch
        The architecture of the images that it loads (``"sm_90a"``); ``"cpu"`` where there are none.
    image_kind
        ``"cubin"``, ``"ptx"``, or None where there are no kernels.
    sm_count
        Number of multiprocessors.
    """

    name: str
    arch: str
    image_kind: Literal["cubin", "ptx"] | None
    sm_count: int

    @property
    @abstractmethod
    def stream(self) -> Stream:
        """The device's own stream, used where no other is given."""

    @abstractmethod
    def new_stream(self) -> Stream:
        """Return a further stream."""

    def as_stream(self, stream: object = None) -> Stream:
        """Return `stream` as a `Stream` of this device; None is the device's own.

        A CUDA device also takes the handle of a CUDA stream as an int, and any object with
        ``__cuda_stream__``.

        Raises
        ------
        TypeError, ValueError
            If it is no stream, or one of another device.
        ClosedError
            If the stream or the device is closed.
        """
        if stream is None:
            return self.stream
        if not isinstance(stream, Stream):
            raise TypeError(f"expected None or a stream of {self.name}, got {stream!r}")
        if stream.device is not self:
            raise ValueError(
                f"the stream belongs to {stream.device.name}, opened apart from this {self.name}; "
                "use a stream of the device that the call is for"
            )
        stream._check_open()
        return stream

    @abstractmethod
    def alloc(self, shape: int | Sequence[int], dtype: DTypeLike = np.uint8) -> Buffer:
        """Return uninitialised device memory."""

    @abstractmethod
    def empty_pinned(self, shape: int | Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
        """Return uninitialised host memory from which copies run asynchronously."""

    @abstractmethod
    def is_pinned(self, array: NDArray[Any]) -> bool:
        """Whether `array` is, or is a view of, memory from `empty_pinned`."""

    def upload(self, array: NDArray[Any]) -> Buffer:
        """Return a new buffer that holds `array`."""
        if not isinstance(array, np.ndarray | np.generic):
            raise TypeError(
                f"array must be a numpy array, got {type(array).__name__}; use np.array(…, dtype)"
            )
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError("array is a masked array, whose mask would be lost; pass array.data")
        buffer = self.alloc(array.shape, array.dtype)
        self.stream.upload(buffer, array)
        return buffer

    def as_buffer(self, array: object, stream: object = None) -> Buffer:
        """Return `array` as a buffer of this device, without a copy where that is possible.

        Parameters
        ----------
        array
            A `Buffer` of this device, a numpy array (copied), or, on a CUDA device, anything with
            ``__dlpack__`` or ``__cuda_array_interface__``: C-contiguous, on the same GPU, shared
            and kept alive.
        stream
            The stream that will use the buffer first: it waits for the array's producer.

        Raises
        ------
        TypeError, ValueError
            If the array cannot be used; the message says what to do.
        """
        if isinstance(array, Buffer):
            if array.device is not self:
                raise ValueError(
                    f"the buffer is on {array.device.name}, opened apart from this {self.name}; "
                    "copy through the host: .to_numpy()"
                )
            array._check_open()
            return array
        if not isinstance(array, (np.ndarray, np.generic)):
            raise TypeError(
                f"{self.name} takes numpy arrays and its own buffers, got {type(array).__name__}"
            )
        target = self.as_stream(stream)
        buffer = self.alloc(array.shape, array.dtype)
        target.upload(buffer, np.asarray(array))
        return buffer

    @abstractmethod
    def load(self, image: bytes) -> Module:
        """Load an image of `image_kind`; the bytes are checked before the driver sees them."""

    @abstractmethod
    def encode_tensor_map(self, tensor_map: TensorMap) -> bytes:
        """Return the 128 bytes that a kernel takes for `tensor_map`."""

    @abstractmethod
    def mem_info(self) -> MemInfo:
        """Return how much memory there is and who has it."""

    def attached(self, kind: type[AttachedT]) -> AttachedT:
        """Return the one `kind` that is kept with the device, made at the first call."""
        found = self._attached().get(kind)
        if found is None:
            found = self._attached().setdefault(kind, kind())
        assert isinstance(found, kind)
        return found

    def _attached(self) -> dict[type[Attached], Attached]:
        found: dict[type[Attached], Attached] = self.__dict__.setdefault("_attached_by_kind", {})
        return found

    def clear_attached(self) -> bool:
        """Free what is kept with the device; return whether there was anything."""
        found = list(self._attached().values())
        for each in found:
            each.clear()
        return bool(found)

    @abstractmethod
    def trim(self) -> None:
        """Give cached memory back."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until every stream of this device has finished."""

    @abstractmethod
    def close(self) -> None:
        """Finish and release everything; buffers and plans of this device become unusable."""

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<fp4rt device {self.name} ({self.arch}, {self.sm_count} SMs)>"

    def _repr_html_(self) -> str:
        """Show it in a notebook: what it is, what it loads, and its memory."""
        try:
            self.as_stream()  # a closed device says so
            info = self.mem_info()
            memory = (
                f"{html.size(info.used)} in buffers, {html.size(info.held)} held in reserve, "
                f"{html.size(info.free)} of {html.size(info.total)} free"
            )
        except (ClosedError, DriverError) as error:
            memory = str(error).splitlines()[0]
        kernels = self.image_kind is not None
        return html.card(
            f"Device {self.name}",
            {
                "architecture": self.arch if kernels else None,
                "loads": f"{self.image_kind} images" if kernels else "no kernels: numpy and BLAS",
                "multiprocessors" if kernels else "threads": self.sm_count,
                "memory": memory,
            },
        )


_MODULES = {"cuda": "fp4rt.cuda", "emulator": "fp4rt.emulator", "cpu": "fp4rt.cpu"}


@dataclass(frozen=True)
class DeviceInfo:
    """One line of `devices`: a name, whether it can be used, and what it is or why it cannot."""

    name: str
    available: bool
    detail: str
    facts: dict[str, Any] = field(default_factory=dict)

    def _repr_html_(self) -> str:
        """Show it in a notebook."""
        can = "usable" if self.available else "not usable"
        return html.card(f"Device {self.name}: {can}", {"detail": self.detail} | self.facts)


def device(name: str = "auto") -> Device:
    """Open a device by name.

    Parameters
    ----------
    name
        ``"cuda:N"`` (``"cuda"`` means 0), ``"emulator:ARCH"``, ``"cpu"``, or ``"auto"``: the first
        CUDA device if one works and a kernel was built for it, otherwise the cpu.

    Raises
    ------
    ValueError
        If the name is none of these.
    DriverError, NoKernelError
        If the device cannot be used; the message says what is missing.

    Examples
    --------
    >>> import fp4rt
    >>> with fp4rt.device("cpu") as dev:
    ...     print(dev.name, dev.image_kind)
    cpu None
    """
    if not isinstance(name, str):
        raise TypeError(f"device name must be a str, got {type(name).__name__}")
    if name == "auto":
        usable = [info.name for info in devices() if info.available]
        name = next((n for n in usable if n.startswith("cuda")), "cpu")
    kind, _, index = name.partition(":")
    if kind not in _MODULES or (kind == "cpu" and index):
        raise ValueError(f"unknown device {name!r}; use 'cuda:N', 'emulator:ARCH', 'cpu' or 'auto'")
    opened: Device = import_module(_MODULES[kind]).open_device(index)
    return opened


def devices() -> list[DeviceInfo]:
    """List every device there is, and for each one that cannot be used, why.

    Examples
    --------
    >>> import fp4rt
    >>> [info.available for info in fp4rt.devices() if info.name == "cpu"]
    [True]
    """
    found: list[DeviceInfo] = []
    for module in _MODULES.values():
        found.extend(import_module(module).list_devices())
    return found
