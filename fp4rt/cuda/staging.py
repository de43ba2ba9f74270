"""Page-locked host memory: what users ask for, and what copies of ordinary arrays go through.

The GPU copies from page-locked ("pinned") memory while the host goes on. An ordinary array is
therefore copied to pinned memory first, piece by piece, and its owner may change it at once.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from fp4rt.cuda import driver as door
from fp4rt.cuda.driver import call, quiet, relaxed, wait_for

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fp4rt.cuda.memory import Memory

STAGING_THREADS, SLOTS_PER_THREAD, STAGING_BYTES = 8, 3, 2 << 20
"""Most threads that copy ordinary arrays in one direction, the pieces of pinned memory that each
uses in turn, and their size.

One thread of an H200's host copies 6 GB/s and 8 copy 41; 16 are no faster. The bus takes 53. To
pass Python's lock on takes some 30 microseconds, so small pieces are slow."""
SMALLEST_BYTES = 256 << 10
"""Pieces are not made smaller than this for the sake of more threads."""


class PinnedMemory:
    """Page-locked host memory, seen by numpy through ``__array_interface__``."""

    def __init__(self, memory: Memory, nbytes: int) -> None:
        memory.collect()
        with memory.context.current(), relaxed():
            self.address = int(
                call(
                    door.driver.cuMemHostAlloc,
                    max(nbytes, 1),
                    door.driver.CU_MEMHOSTALLOC_PORTABLE,
                )
            )
        self.__array_interface__ = {
            "shape": (max(nbytes, 1),),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }
        memory.pinned.add(self.address)
        finalizer = weakref.finalize(self, memory.retire, _FreeHost(memory, self.address))
        finalizer.atexit = False

    def array(self) -> NDArray[np.uint8]:
        """Return the bytes as an array that keeps this object alive."""
        return np.asarray(self)


class _FreeHost:
    __slots__ = ("_address", "_memory")

    def __init__(self, memory: Memory, address: int) -> None:
        self._memory = memory
        self._address = address

    def __call__(self) -> None:
        self._memory.pinned.discard(self._address)  # before another thread can be given it
        with relaxed():
            quiet(door.driver.cuMemFreeHost, self._address)


def pinned_owner(array: NDArray[Any]) -> PinnedMemory | None:
    """Return the pinned memory that `array` is a view of, or None."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, PinnedMemory) else None


class Slot:
    """One piece of staging memory, and the copy that last used it."""

    def __init__(self, memory: Memory) -> None:
        self._pinned = PinnedMemory(memory, STAGING_BYTES)
        self.address = self._pinned.address
        self.bytes = self._pinned.array()
        flags = door.driver.CUevent_flags
        kinds = int(flags.CU_EVENT_DISABLE_TIMING) | int(flags.CU_EVENT_BLOCKING_SYNC)
        with memory.context.current():
            self.event = call(door.driver.cuEventCreate, kinds)

    def wait(self) -> None:
        """Wait until the last copy is done."""
        wait_for(door.driver.cuEventQuery, self.event, door.driver.cuEventSynchronize)

    def copy(self, function: Any, dst: int, src: int, nbytes: int, stream: Any) -> None:
        """Queue a copy to or from this piece, and the event that marks its end."""
        try:
            call(function, dst, src, nbytes, stream)
        finally:  # also if Ctrl-C came in between, for the copy may have been queued
            quiet(door.driver.cuEventRecord, self.event, stream)


class Ring:
    """Pieces of pinned memory for copies in one direction, and the threads that serve them.

    Both are made when they are first needed.
    """

    def __init__(self, memory: Memory, name: str) -> None:
        self._memory = memory
        self._name = name
        self._lock = threading.Lock()
        self._free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        self._made = 0
        self._threads: ThreadPoolExecutor | None = None

    @contextmanager
    def _slots(self, count: int) -> Iterator[list[Slot]]:
        """Have up to `count` pieces, whose last copies may still be under way."""
        slots = [self._take()]
        try:
            while len(slots) < count and (slot := self._take_if_free()) is not None:
                slots.append(slot)
            yield slots
        finally:
            for slot in slots:
                self._free.put(slot)

    def _take(self) -> Slot:
        slot = self._take_if_free()
        return self._free.get() if slot is None else slot

    def _take_if_free(self) -> Slot | None:
        try:
            return self._free.get_nowait()
        except queue.Empty:
            pass
        with self._lock:
            new = self._made < STAGING_THREADS * SLOTS_PER_THREAD
            self._made += new
        if not new:
            return None
        try:
            return Slot(self._memory)
        except BaseException:
            with self._lock:
                self._made -= 1
            raise

    def share(self, copy: Callable[[range, list[Slot]], None], nbytes: int) -> None:
        """Call ``copy(starts, slots)`` for all pieces of `nbytes`, in several threads.

        A thread has pieces that lie behind each other (their size is the step of `starts`), and
        memory that it uses in turn.
        """
        threads = min(STAGING_THREADS, os.cpu_count() or 1)
        even = -(-nbytes // threads)
        size = min(max(-(-even // SMALLEST_BYTES) * SMALLEST_BYTES, SMALLEST_BYTES), STAGING_BYTES)
        pieces = -(-nbytes // size)
        workers = min(threads, pieces)

        def part(worker: int) -> None:
            first, last = pieces * worker // workers, pieces * (worker + 1) // workers
            with self._slots(min(SLOTS_PER_THREAD, last - first)) as slots:
                copy(range(first * size, last * size, size), slots)

        if workers == 1:
            part(0)
            return
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(threads, f"fp4rt-{self._name}")
            executor = self._threads
        futures = [executor.submit(self._in_thread, part, i) for i in range(workers)]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()
            wait(futures)  # none may go on reading or writing the caller's array

    def _in_thread(self, function: Callable[[int], None], i: int) -> None:
        with self._memory.context.current():
            function(i)

    def close(self) -> None:
        """Drop the memory; copies that are still running have been waited for."""
        with self._lock:
            if self._threads is not None:
                self._threads.shutdown(wait=False)
                self._threads = None
        while not self._free.empty():
            quiet(door.driver.cuEventDestroy, self._free.get().event)


class Staging:
    """Copies of ordinary arrays, piece by piece through pinned memory."""

    def __init__(self, memory: Memory) -> None:
        self._up, self._down = Ring(memory, "up"), Ring(memory, "down")

    def upload(self, address: int, data: NDArray[np.uint8], stream: Any) -> None:
        """Copy flat `data` to the device; it may be changed as soon as this returns."""

        def put(starts: range, slots: list[Slot]) -> None:
            for start, slot in zip(starts, itertools.cycle(slots), strict=False):
                piece = data[start : start + starts.step]
                slot.wait()
                slot.bytes[: piece.size] = piece
                target = address + start
                slot.copy(door.driver.cuMemcpyHtoDAsync, target, slot.address, piece.size, stream)

        self._up.share(put, data.size)

    def download(self, data: NDArray[np.uint8], address: int, stream: Any) -> None:
        """Copy from the device into flat `data`, complete on return."""

        def get(starts: range, slots: list[Slot]) -> None:
            coming: deque[tuple[Slot, NDArray[np.uint8]]] = deque()
            for start, slot in zip(starts, itertools.cycle(slots), strict=False):
                if len(coming) == len(slots):
                    take(*coming.popleft())
                piece = data[start : start + starts.step]
                slot.wait()
                source = address + start
                slot.copy(door.driver.cuMemcpyDtoHAsync, slot.address, source, piece.size, stream)
                coming.append((slot, piece))
            while coming:
                take(*coming.popleft())

        def take(slot: Slot, piece: NDArray[np.uint8]) -> None:
            slot.wait()
            piece[...] = slot.bytes[: piece.size]

        self._down.share(get, data.size)

    def close(self) -> None:
        """Drop the staging memory."""
        self._up.close()
        self._down.close()
