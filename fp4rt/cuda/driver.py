"""The one checked door to the CUDA driver; the only file that imports ``cuda.bindings``.

Every driver call of fp4rt goes through `call`, which returns what the driver returned or raises
with the call's name, the CUresult's name and text, and what to try. `quiet` is its twin for
clean-up code, where nothing may be raised. Neither works before `init`, so importing this module
touches no driver and needs no cuda-python.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, TracebackType
from typing import Any

from fp4rt.device import ClosedError, DriverError

MIN_DRIVER = 13000
"""Lowest driver API version that fp4rt runs on, in the driver's own number: CUDA 13.0."""

NEED_DRIVER = "fp4rt needs an NVIDIA driver for CUDA 13.0 or newer (release 580 or newer)"

FORKED = (
    "this process was forked from one that had used CUDA, and CUDA does not survive a fork; "
    "start workers with multiprocessing.get_context('spawn'), or open the device after the fork"
)

RESTART = (
    "a kernel that ran earlier made an error that ends this process's use of the GPU: every later "
    "call fails the same way, so restart the process; to find the kernel, run it under "
    "compute-sanitizer, or with CUDA_LAUNCH_BLOCKING=1"
)

STICKY = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        "ILLEGAL_ADDRESS",
        "LAUNCH_TIMEOUT",
        "ASSERT",
        "HARDWARE_STACK_ERROR",
        "ILLEGAL_INSTRUCTION",
        "MISALIGNED_ADDRESS",
        "INVALID_ADDRESS_SPACE",
        "INVALID_PC",
        "LAUNCH_FAILED",
        "ECC_UNCORRECTABLE",
        "CONTAINED",
        "TENSOR_MEMORY_LEAK",
    )
)

ADVICE = {
    "CUDA_ERROR_NOT_INITIALIZED": "if this process was forked, use the 'spawn' start method",
    "CUDA_ERROR_NO_DEVICE": "no GPU is visible; check nvidia-smi and CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "the kernel module and libcuda differ; reboot",
    "CUDA_ERROR_CONTEXT_IS_DESTROYED": "other code reset the GPU; close the device and reopen it",
    "CUDA_ERROR_INVALID_CONTEXT": "other code reset the GPU; close the device and reopen it",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "the image is for another GPU; rebuild with `python build.py`",
    "CUDA_ERROR_INVALID_IMAGE": "the image is damaged or newer than the driver; rebuild it",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "the image is newer than the driver; update the driver",
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": "use fewer threads, or a kernel with fewer registers",
    "CUDA_ERROR_STREAM_CAPTURE_UNJOINED": (
        "another stream joined the capture and was not joined back: record an event on it and let "
        "the capturing stream wait for that event"
    ),
    "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED": (
        "something that can't be captured was done on the stream; capture again without it"
    ),
    "CUDA_ERROR_STREAM_CAPTURE_ISOLATION": (
        "an event recorded before the capture can't be waited for inside it; wait before"
    ),
}

# Set by `init`. Any, because cuda.bindings is compiled and has no usable type information.
driver: Any = None
version = 0

forked: list[bool] = []
"""Not empty in a process that was forked after CUDA was in use; a list, so that every module sees
the same one and launches can look at it for next to nothing."""

_init_lock = threading.Lock()


def _after_fork() -> None:
    forked.append(True)


def _import_bindings() -> ModuleType:
    try:
        from cuda.bindings import driver as bindings
    except ImportError as error:
        raise DriverError(
            f"cuda-python is not installed ({error}); install it with `pip install cuda-python`"
        ) from error
    return bindings  # type: ignore[no-any-return]


def init() -> None:
    """Load cuda.bindings and initialise the driver, once a process.

    Raises
    ------
    DriverError
        If cuda-python or the driver is missing, too old, or finds no GPU; the text says which.
    ClosedError
        If this process was forked from one that had used CUDA.
    """
    global driver, version
    if forked:
        raise ClosedError(FORKED)
    if driver is not None:
        return
    with _init_lock:
        bindings = _import_bindings()
        try:
            (code,) = bindings.cuInit(0)
        except RuntimeError as error:  # what the bindings raise if libcuda.so.1 can't be loaded
            raise DriverError(
                f"no NVIDIA driver was found on this machine: libcuda can't be loaded; "
                f"{NEED_DRIVER} ({error})"
            ) from error
        if code:
            raise _error(bindings, bindings.cuInit, code)
        code, found = bindings.cuDriverGetVersion()
        if code:
            raise _error(bindings, bindings.cuDriverGetVersion, code)
        check_version(found)
        os.register_at_fork(after_in_child=_after_fork)
        version = found
        driver = bindings


def check_version(found: int) -> None:
    """Raise DriverError if the driver's API version, such as 12040, is below `MIN_DRIVER`."""
    if found < MIN_DRIVER:
        raise DriverError(
            f"the NVIDIA driver is too old: it offers CUDA {found // 1000}.{found % 1000 // 10}, "
            f"and {NEED_DRIVER}; update the driver"
        )


def call(function: Callable[..., tuple[Any, ...]], *args: Any) -> Any:
    """Call the driver and return its result: a value, a tuple of values, or None.

    Raises
    ------
    DriverError
        If the driver reports an error or does not have the function.
    ClosedError
        In a process forked after CUDA was in use.
    """
    if forked:
        raise ClosedError(FORKED)
    try:
        result = function(*args)
    except RuntimeError as error:  # what the bindings raise for a symbol that libcuda lacks
        raise DriverError(f"{function.__name__}: {error}; {NEED_DRIVER}") from error
    if result[0]:
        raise _error(driver, function, result[0])
    return result[1] if len(result) == 2 else result[1:] or None


def quiet(function: Callable[..., tuple[Any, ...]], *args: Any) -> None:
    """Call the driver and ignore its answer: for clean-up, which must not raise."""
    if not forked:
        function(*args)


def failure(function: Callable[..., tuple[Any, ...]], code: Any) -> Exception:
    """Return the exception for `code`, which `function` answered."""
    return ClosedError(FORKED) if forked else _error(driver, function, code)


def _error(bindings: Any, function: Callable[..., Any], code: Any) -> DriverError:
    name, text = str(getattr(code, "name", code)), "unknown error"
    status, found = bindings.cuGetErrorString(code)
    if not status and found:
        text = found.decode()
    advice = RESTART if name in STICKY else ADVICE.get(name, "")
    call_name = getattr(function, "__name__", str(function))
    error = DriverError(f"{call_name} failed: {name} ({text})" + (f"; {advice}" if advice else ""))
    error.code = name
    return error


class Context:
    """The primary context of one GPU, retained.

    ``with context.current():`` makes it current for a few calls and leaves the thread as it was.
    """

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.gpu = call(driver.cuDeviceGet, ordinal)
        self.handle = call(driver.cuDevicePrimaryCtxRetain, self.gpu)
        self.address = int(self.handle)

    def current(self) -> _Current:
        """Return a context manager; entering costs one query if the context is current already."""
        return _Current(self)

    def enter(self) -> None:
        """Make it current for good in a thread of fp4rt's own."""
        call(driver.cuCtxSetCurrent, self.handle)

    def release(self) -> None:
        """Let go of the primary context; other libraries may hold it still."""
        quiet(driver.cuDevicePrimaryCtxRelease, self.gpu)


class _Current:
    __slots__ = ("_context", "_pushed")

    def __init__(self, context: Context) -> None:
        self._context = context
        self._pushed = False

    def __enter__(self) -> None:
        if forked:
            raise ClosedError(FORKED)
        code, found = driver.cuCtxGetCurrent()
        if code:
            raise failure(driver.cuCtxGetCurrent, code)
        if int(found) != self._context.address:
            call(driver.cuCtxPushCurrent, self._context.handle)
            self._pushed = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pushed:
            quiet(driver.cuCtxPopCurrent)


@contextmanager
def relaxed() -> Iterator[None]:
    """Keep calls that synchronise from breaking a capture that another library has begun."""
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = call(driver.cuThreadExchangeStreamCaptureMode, mode)
    try:
        yield
    finally:
        quiet(driver.cuThreadExchangeStreamCaptureMode, before)


def wait_for(
    query: Callable[..., tuple[Any, ...]],
    handle: Any,
    block: Callable[..., tuple[Any, ...]] | None = None,
) -> None:
    """Wait until ``query(handle)`` no longer answers "not ready".

    A wait inside the driver can't be interrupted. This one polls: without a pause for a
    millisecond, since most waits are short, then with pauses of up to a millisecond, so that Ctrl-C
    is noticed. Other threads run during each query and pause.

    Ctrl-C reaches the main thread only. Other threads wait in ``block(handle)``, if that is given:
    threads that poll would keep the others from Python's lock.
    """
    if forked:
        raise ClosedError(FORKED)
    if block is not None and threading.current_thread() is not threading.main_thread():
        call(block, handle)
        return
    not_ready = driver.CUresult.CUDA_ERROR_NOT_READY
    started = time.perf_counter()
    while True:
        (code,) = query(handle)
        if not code:
            return
        if code != not_ready:
            raise failure(query, code)
        waited = time.perf_counter() - started
        if waited > 0.001:
            time.sleep(min(waited / 20, 0.001))
