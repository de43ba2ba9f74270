"""Streams and events."""

from __future__ import annotations

import ctypes
import functools
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from fp4rt.cuda import driver as door
from fp4rt.cuda.buffer import CudaBuffer, check_array, check_target
from fp4rt.cuda.driver import call, quiet, wait_for
from fp4rt.cuda.graph import CudaGraph, Recording, check_copy, snapshot
from fp4rt.cuda.memory import Memory, StreamState
from fp4rt.cuda.module import CudaKernel
from fp4rt.cuda.staging import pinned_owner
from fp4rt.device import Buffer, Capture, ClosedError, Event, Kernel, LaunchConfig, Stream

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fp4rt.cuda.device import CudaDevice

SMALL_BYTES = 32 << 10
"""Up to this size the driver itself takes a copy of an ordinary array before it returns, without
waiting for the stream (CUDA driver API, "API synchronization behavior"; measured on an H200)."""

# The driver takes the address of an array of pointers to parameters. With one parameter that is the
# address of a pointer, and a c_char_p is a pointer to the bytes that it is made of and keeps.
_Pointer = ctypes.c_char_p
_address_of = ctypes.addressof


class CudaEvent(Event):
    """A point in a stream."""

    def __init__(self, stream: CudaStream, *, timed: bool) -> None:
        cu = door.driver
        kinds = cu.CUevent_flags
        flags = kinds.CU_EVENT_DEFAULT if timed else kinds.CU_EVENT_DISABLE_TIMING
        self.device: CudaDevice = stream.device
        self.timed = timed
        self.recording: Recording | None = stream.state.recording
        self.handle = call(cu.cuEventCreate, flags)
        finalizer = weakref.finalize(self, _destroy_event, self.device.memory, self.handle)
        finalizer.atexit = False
        call(cu.cuEventRecord, self.handle, stream.handle)

    def _check(self) -> None:
        self.device.check_open()
        if self.recording is not None:
            raise RuntimeError(
                "the event was recorded inside a capture, so it never happens on its own; "
                "record one on the stream that the graph is launched on"
            )

    def done(self) -> bool:
        """Whether everything before the event has finished."""
        self._check()
        cu = door.driver
        (code,) = cu.cuEventQuery(self.handle)
        if code == cu.CUresult.CUDA_ERROR_NOT_READY:
            return False
        if code:
            raise door.failure(cu.cuEventQuery, code)
        return True

    def synchronize(self) -> None:
        """Wait for the event on the host; Ctrl-C ends the wait."""
        self._check()
        cu = door.driver
        with self.device.context.current():
            wait_for(cu.cuEventQuery, self.handle, cu.cuEventSynchronize)

    def elapsed_since(self, start: Event) -> float:
        """Return seconds from `start` to this event; both must be timed and finished."""
        self._check()
        if not isinstance(start, CudaEvent):
            raise TypeError(f"start is an event of another kind of device: {start!r}")
        start._check()
        if not (self.timed and start.timed):
            raise ValueError("both events must be recorded with timed=True")
        if not (self.done() and start.done()):
            raise ValueError("both events must have happened; call synchronize() on them first")
        with self.device.context.current():
            return float(call(door.driver.cuEventElapsedTime, start.handle, self.handle)) / 1e3


def _destroy_event(memory: Memory, handle: Any) -> None:
    if not (memory.closed or door.forked):
        quiet(door.driver.cuEventDestroy, handle)


class CudaStream(Stream):
    """An ordered queue of work on one GPU.

    Parameters
    ----------
    device
        The owner.
    foreign
        The handle of a stream that other code owns; None makes a new one.
    """

    def __init__(self, device: CudaDevice, foreign: int | None = None) -> None:
        cu = door.driver
        self.device: CudaDevice = device
        self.foreign = foreign is not None
        self._open = True
        with device.context.current():
            if foreign is None:
                handle = call(cu.cuStreamCreate, cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
            else:
                handle = cu.CUstream(foreign)
            self.handle: Any = handle
            self.state: StreamState = StreamState(handle, foreign=self.foreign)
        if foreign is None:
            device.memory.add_stream(self.state)
            weakref.finalize(self, device.memory.remove_stream, self.state).atexit = False
        else:
            memory, event = device.memory, self.state.event
            weakref.finalize(self, _destroy_event, memory, event).atexit = False

    def __cuda_stream__(self) -> tuple[int, int]:
        self._check_open()
        return (0, int(self.handle))

    def __repr__(self) -> str:
        return f"<stream {int(self.handle):#x} on {self.device.name}>"

    def _check_open(self) -> None:
        if not self._open or self.device.closed:
            raise ClosedError(f"the stream on {self.device.name} is closed")
        if door.forked:
            raise ClosedError(door.FORKED)

    def _foreign_capture(self) -> bool:
        """Whether other code captures its own stream just now."""
        if not self.foreign:
            return False
        status = call(door.driver.cuStreamIsCapturing, self.handle)
        return bool(status != door.driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)

    def _used(self) -> None:
        """Note that work was queued, for the order in which memory is let go."""
        if not self.foreign:
            if self.state.recording is None:
                self.state.dirty = True
        elif not self._foreign_capture():
            with self.device.context.current():
                self.device.memory.follow(self.state)

    def _target(self, buffer: Buffer, *, writing: bool) -> CudaBuffer:
        if not isinstance(buffer, CudaBuffer):
            raise TypeError(f"expected a buffer of {self.device.name}, got {type(buffer).__name__}")
        if buffer.device is not self.device:
            raise ValueError(
                f"the buffer is on {buffer.device.name} (another open device) and the stream on "
                f"{self.device.name}; copy through the host"
            )
        if writing and buffer.readonly:
            raise ValueError("the buffer is read-only: its owner shared it so; copy it first")
        return buffer

    def alloc(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> CudaBuffer:
        """Return uninitialised memory that this stream will use first; elsewhere it comes later.

        If memory of that size was dropped lately and only this stream may still use it, it is
        taken again at once: nothing has to be waited for, not even by the GPU.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        allocation = self.device.memory.allocate_again(nbytes, self.state)
        if allocation is None:
            buffer = self.device.alloc(shape, dtype)
            if not self.foreign:
                self.device.memory.keep_when_dropped(buffer.allocation)
            return buffer
        return CudaBuffer.of(self.device, allocation, shape, dtype)

    def upload(self, dst: Buffer, src: NDArray[Any]) -> None:
        """Copy `src` (numpy, any strides, same dtype and size) to the device."""
        self._check_open()
        target = self._target(dst, writing=True)
        check_array(src, target, "source")
        address = target.address
        if target.nbytes == 0:
            return
        if self._foreign_capture():
            raise RuntimeError(
                "an upload can't join a capture that other code has begun: it would have to keep "
                "a copy of the array; upload before, or capture with fp4rt's own stream"
            )
        recording = self.state.recording
        pinned = pinned_owner(src) if src.flags.c_contiguous else None
        if pinned is None and recording is None:
            flat = np.ascontiguousarray(src).reshape(-1).view(np.uint8)
            with self.device.context.current():
                if flat.size <= SMALL_BYTES:
                    where = flat.__array_interface__["data"][0]
                    call(door.driver.cuMemcpyHtoDAsync, address, where, flat.size, self.handle)
                else:
                    self.device.memory.staging.upload([(address, flat)], self.handle)
            self._used()
            return
        source = src if pinned is not None else snapshot(self.device.memory, src)
        with self.device.context.current():
            call(
                door.driver.cuMemcpyHtoDAsync,
                address,
                source.__array_interface__["data"][0],
                target.nbytes,
                self.handle,
            )
        if recording is not None:
            recording.add_copy(self.handle, "upload", target, source)
        self._used()

    def upload_all(self, pairs: Sequence[tuple[Buffer, NDArray[Any]]]) -> None:
        """Do as `upload` for each pair (dst, src); ordinary arrays take less time together."""
        self._check_open()
        staged = []
        for dst, src in pairs:
            pinned = pinned_owner(src) is not None and src.flags.c_contiguous
            if pinned or dst.nbytes <= SMALL_BYTES or self.capturing:
                self.upload(dst, src)
            else:
                target = self._target(dst, writing=True)
                check_array(src, target, "source")
                flat = np.ascontiguousarray(src).reshape(-1).view(np.uint8)
                staged.append((target.address, flat))
        if staged:
            with self.device.context.current():
                self.device.memory.staging.upload(staged, self.handle)
            self._used()

    def download(self, dst: NDArray[Any], src: Buffer) -> None:
        """Copy to `dst` (numpy, C-contiguous, writable). Complete on return, unless pinned."""
        self._check_open()
        source = self._target(src, writing=False)
        check_target(dst, source)
        address = source.address
        pinned = pinned_owner(dst)
        capturing = self.state.recording is not None or self._foreign_capture()
        if capturing and pinned is None:
            raise RuntimeError(
                "a result can't be copied to ordinary memory inside a capture: nothing is computed "
                "until the graph is launched; download after the launch, or into an array from "
                "device.empty_pinned"
            )
        if source.nbytes == 0:
            return
        with self.device.context.current():
            if pinned is None:
                flat = dst.reshape(-1).view(np.uint8)
                self.device.memory.staging.download(flat, address, self.handle)
            else:
                call(
                    door.driver.cuMemcpyDtoHAsync,
                    dst.__array_interface__["data"][0],
                    address,
                    source.nbytes,
                    self.handle,
                )
        if self.state.recording is not None:
            self.state.recording.add_copy(self.handle, "download", dst, source)
        self._used()

    def copy(self, dst: Buffer, src: Buffer) -> None:
        """Copy between buffers of one device; the ranges must not overlap."""
        self._check_open()
        target, source = self._target(dst, writing=True), self._target(src, writing=False)
        check_copy(target, source)
        if target.nbytes == 0:
            return
        with self.device.context.current():
            call(
                door.driver.cuMemcpyDtoDAsync,
                target.address,
                source.address,
                target.nbytes,
                self.handle,
            )
        if self.state.recording is not None:
            self.state.recording.add_copy(self.handle, "copy", target, source)
        self._used()

    def prepare_upload(self, dst: Buffer, src: NDArray[Any]) -> Callable[[], None]:
        """Return a function that uploads what `src` holds when it is called."""
        target = self._target(dst, writing=True)
        check_array(src, target, "source")
        general = functools.partial(self.upload, dst, src)
        small = src.flags.c_contiguous and 0 < src.nbytes <= SMALL_BYTES
        if not small or pinned_owner(src) is not None:
            return general
        where = src.__array_interface__["data"][0]
        copy = functools.partial(
            door.driver.cuMemcpyHtoDAsync, target.address, where, src.nbytes, self.handle
        )
        return self._prepared(copy, general, target.allocation)

    def prepare_copy(self, dst: Buffer, src: Buffer) -> Callable[[], None]:
        """Return a function that copies `src` to `dst` each time it is called."""
        target, source = self._target(dst, writing=True), self._target(src, writing=False)
        check_copy(target, source)
        general = functools.partial(self.copy, dst, src)
        if target.nbytes == 0:
            return general
        copy = functools.partial(
            door.driver.cuMemcpyDtoDAsync,
            target.address,
            source.address,
            target.nbytes,
            self.handle,
        )
        return self._prepared(copy, general, target.allocation, source.allocation)

    def _prepared(
        self, copy: Callable[[], tuple[Any, ...]], general: Callable[[], None], *kept: object
    ) -> Callable[[], None]:
        """Return `copy`, or `general` where more has to be done: captures, streams of others."""
        state, key, forked = self.state, self.state.key, door.forked

        def again(_kept: object = kept) -> None:
            if state.key is not key or not state.direct or forked:
                general()
                return
            (code,) = copy()
            if code:  # it may have been the lack of a current context
                general()
            state.dirty = True

        return again

    def fill(self, dst: Buffer, byte: int) -> None:
        """Set every byte of `dst`."""
        self._check_open()
        if isinstance(byte, bool) or not isinstance(byte, (int, np.integer)):
            raise TypeError(f"byte must be an int, got {byte!r}")
        if not 0 <= byte <= 255:
            raise ValueError(f"byte must be in 0 .. 255, got {byte}")
        target = self._target(dst, writing=True)
        address = target.address
        if target.nbytes == 0:
            return
        with self.device.context.current():
            call(door.driver.cuMemsetD8Async, address, int(byte), target.nbytes, self.handle)
        if self.state.recording is not None:
            self.state.recording.keep(target)
        self._used()

    def launch(self, kernel: Kernel, config: LaunchConfig, params: bytes | np.void) -> None:
        """Launch `kernel` with one parameter struct, given as its bytes or a numpy record."""
        # Short on purpose: this is most of what a launch costs beyond the driver. A launch that was
        # made before is recognised by the identity of its parts, and its checks hold still. The
        # context is not made current first: stream and function name theirs, and where the driver
        # asks for it nevertheless, the launch is repeated with it.
        state = self.state
        try:
            known, key, launch, last, pointer, address = kernel.prepared  # type: ignore[attr-defined]
        except AttributeError:
            self._refuse(kernel)
        if known is not config or key is not state.key or door.forked:
            launch, last = self._prepare(kernel, config), None
        if params is last and last is not None:
            data = last
        else:
            data = params if isinstance(params, bytes) else params.tobytes()
            if len(data) != kernel.params_bytes:
                kernel.params_of(data)  # type: ignore[attr-defined]
            pointer = _Pointer(data)
            address = _address_of(pointer)
            if data is params:  # a record may change and still be the same object
                prepared = (config, state.key, launch, data, pointer, address)
                kernel.prepared = prepared  # type: ignore[attr-defined]
        (code,) = launch(address, 0)
        if code:
            self._again(launch, address, code)
        if state.direct:
            state.dirty = True
        elif state.recording is not None:
            state.recording.add_kernel(self.handle, kernel, config, data)
        else:
            self._used()

    def _prepare(self, kernel: Kernel, config: LaunchConfig) -> Any:
        self._check_open()
        if not isinstance(kernel, CudaKernel) or kernel.device is not self.device:
            self._refuse(kernel)
        launch = kernel.prepare(config, self.handle)
        kernel.prepared = (config, self.state.key, launch, None, None, 0)
        return launch

    def _refuse(self, kernel: Kernel) -> NoReturn:
        self._check_open()
        if not isinstance(kernel, CudaKernel):
            raise TypeError(f"expected a kernel of {self.device.name}, got {kernel!r}")
        raise ValueError(
            f"kernel {kernel.name} was loaded on {kernel.device.name} (another open device); "
            f"load its image on this one"
        )

    def _again(self, launch: Any, address: int, code: Any) -> None:
        errors = door.driver.CUresult
        if code in (errors.CUDA_ERROR_INVALID_CONTEXT, errors.CUDA_ERROR_INVALID_HANDLE):
            with self.device.context.current():
                (code,) = launch(address, 0)
        if code:
            raise door.failure(launch.func, code)

    def on_launch(self, call: Callable[[], None]) -> None:
        """Call `call` now, or, during a capture, at every launch of the graph; on the host.

        While other code captures its own stream, it is called now and not again.
        """
        if self.state.recording is None:
            call()
        else:
            self.state.recording.hooks.append(call)

    @property
    def capturing(self) -> bool:
        """Whether verbs are recorded instead of done, by fp4rt or by the stream's owner."""
        return self.state.recording is not None or (self.foreign and self._foreign_capture())

    def record(self, *, timed: bool = False) -> CudaEvent:
        """Return an event that marks this point."""
        self._check_open()
        if timed and self.state.recording is not None:
            raise RuntimeError("an event inside a capture can't be timed; time the graph's launch")
        with self.device.context.current():
            event = CudaEvent(self, timed=timed)
        if self.state.recording is not None:
            self.state.recording.keep(event)
        return event

    def wait(self, event: Event) -> None:
        """Hold later work until `event` is done, without blocking the host.

        Waiting for an event that was recorded inside a capture makes this stream part of it.
        """
        self._check_open()
        if not isinstance(event, CudaEvent):
            raise TypeError(f"expected an event of a CUDA device, got {event!r}")
        event.device.check_open()
        own, other = self.state.recording, event.recording
        if other is not None and other.ended:
            raise RuntimeError("the event was recorded inside a capture that has ended")
        if own is not None and other is not own:
            raise RuntimeError(
                "the event was recorded outside the capture; wait for it before the capture"
            )
        if other is not None and own is None:
            with self.device.memory.joined():
                call(door.driver.cuStreamWaitEvent, self.handle, event.handle, 0)
                other.join(self.state)
            return
        with self.device.context.current():
            call(door.driver.cuStreamWaitEvent, self.handle, event.handle, 0)
        self._used()

    def after(self, other: Stream) -> None:
        """Hold later work until what `other` has queued so far is done; it may be closed."""
        if other is self or not isinstance(other, CudaStream):
            return
        self._check_open()
        state = other.state
        if state.key is None or state.recording is not None:
            return  # a closed stream has finished; what is being captured does not run
        with self.device.context.current():
            if not other.foreign:  # other code's stream: its event marks fp4rt's last use of it
                call(door.driver.cuEventRecord, state.event, state.handle)
            call(door.driver.cuStreamWaitEvent, self.handle, state.event, 0)
        self._used()

    def synchronize(self) -> None:
        """Wait on the host until everything queued has finished; Ctrl-C ends the wait."""
        self._check_open()
        if self.state.recording is not None or self._foreign_capture():
            raise RuntimeError("the stream is capturing, so nothing runs; end the capture first")
        with self.device.context.current():
            cu = door.driver
            wait_for(cu.cuStreamQuery, self.handle, cu.cuStreamSynchronize)
        self.device.memory.collect()

    @contextmanager
    def capture(self) -> Iterator[Capture]:
        """Record the verbs called in the block into a `Graph` instead of doing them.

        The capture is of the *relaxed* mode: only what is queued on this stream, and on streams
        that wait for its events, is captured. Other calls of this or any thread, such as an
        allocation or the finalizer of an old buffer, happen as usual and can't end the capture.
        What would have to wait for captured work raises before the driver sees it.

        Raises
        ------
        RuntimeError
            If the stream is capturing already.
        DriverError
            If the capture can't become a graph. The stream is usable afterwards.
        """
        self._check_open()
        if self.foreign:
            raise RuntimeError("other code owns this stream; capture with a stream of fp4rt's")
        if self.state.recording is not None:
            raise RuntimeError("the stream is capturing already")
        cu, memory = door.driver, self.device.memory
        recording = Recording(memory, threading.get_ident())
        with memory.joined():
            mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            call(cu.cuStreamBeginCapture, self.handle, mode)
            recording.join(self.state)
        capture = Capture()
        try:
            yield capture
            for thing in capture.kept:
                recording.keep(thing)
        except BaseException:
            recording.end()
            if not door.forked:
                code, graph = cu.cuStreamEndCapture(self.handle)
                if not code and int(graph):
                    quiet(cu.cuGraphDestroy, graph)
            raise
        try:
            with self.device.context.current():
                graph = call(cu.cuStreamEndCapture, self.handle)
        finally:
            recording.end()
        capture.graph = CudaGraph(self.device, graph, recording)

    def close(self) -> None:
        """Finish the queued work and destroy the stream."""
        if not self._open or self.device.closed or door.forked:
            self._open = False
            return
        if self is self.device.stream:
            raise ValueError("the device's own stream is closed with the device")
        if not self.foreign:
            self.synchronize()
            self.device.memory.remove_stream(self.state)
        self._open, self.state.key = False, None
