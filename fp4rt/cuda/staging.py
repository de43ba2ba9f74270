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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from fp4rt.cuda import driver as door
from fp4rt.cuda.driver import call, quiet, relaxed, wait_for

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fp4rt.cuda.memory import Memory

STAGING_THREADS, PIECE_BYTES, STAGING_SLOTS = 8, 2 << 20, 4
"""Most threads that copy ordinary arrays in one direction, what each copies at a time, and the
pieces of pinned memory that are used in turn, each with room for one piece of every thread.

One thread of an H200's host copies 6 GB/s and 8 copy 41; 16 are no faster. The bus takes 53."""
SLOT_BYTES = STAGING_THREADS * PIECE_BYTES
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
        self._pinned = PinnedMemory(memory, SLOT_BYTES)
        self.address = self._pinned.address
        self.bytes = self._pinned.array()
        self._idle = True
        flags = door.driver.CUevent_flags
        kinds = int(flags.CU_EVENT_DISABLE_TIMING) | int(flags.CU_EVENT_BLOCKING_SYNC)
        with memory.context.current():
            self.event = call(door.driver.cuEventCreate, kinds)

    def wait(self) -> None:
        """Wait until the last copy is done."""
        if not self._idle:
            wait_for(door.driver.cuEventQuery, self.event, door.driver.cuEventSynchronize)
            self._idle = True

    def copy(self, function: Any, dst: int, src: int, nbytes: int, stream: Any) -> None:
        """Queue a copy to or from this piece, and the event that marks its end."""
        try:
            call(function, dst, src, nbytes, stream)
        finally:  # also if Ctrl-C came in between, for the copy may have been queued
            quiet(door.driver.cuEventRecord, self.event, stream)
            self._idle = False


class Round:
    """Bytes that go through one slot as one copy of the GPU; threads copy pieces of them.

    Attributes
    ----------
    address
        Where the bytes are on the device.
    data
        The bytes on the host.
    pieces
        What one thread copies at a time.
    """

    def __init__(self, address: int, data: NDArray[np.uint8], threads: int) -> None:
        self.address, self.data = address, data
        step = max(-(-data.size // threads), SMALLEST_BYTES)
        self.pieces = [slice(at, min(at + step, data.size)) for at in range(0, data.size, step)]
        self._done = itertools.count(1)
        self._queued = threading.Event()

    def finished_one(self) -> bool:
        """Note that a piece is copied, and return whether it was the last one."""
        return next(self._done) == len(self.pieces)

    def set_queued(self) -> None:
        """Note that the GPU's copy is queued, or never will be."""
        self._queued.set()

    def wait_queued(self) -> None:
        """Wait until the GPU's copy is queued."""
        if not self._queued.is_set():
            self._queued.wait()


class Work:
    """Rounds that go through some slots in turn: round i through slot i modulo their number.

    Any number of threads do it together, and each takes the next piece that nobody has. So all
    pieces of earlier rounds are in the hands of somebody who is at work, and waiting for them ends.

    The threads share Python's lock, and to pass it on takes 10 microseconds or more: the one that
    finishes a round queues the GPU's copy for all, and nobody waits for what others saw happen.
    """

    def __init__(self, rounds: list[Round], slots: list[Slot], stream: Any) -> None:
        self.rounds, self.slots, self.stream = rounds, slots, stream
        self.pieces = [(i, piece) for i, each in enumerate(rounds) for piece in each.pieces]
        self._next = itertools.count()
        self._given_up = False

    def give_up(self) -> None:
        """Let all threads end soon."""
        self._given_up = True
        for each in self.rounds:
            each.set_queued()

    def _taken(self) -> Iterator[tuple[int, Round, Slot, slice]]:
        """Take piece after piece: its round and that one's number and slot, and which bytes."""
        for n in self._next:
            if n >= len(self.pieces) or self._given_up:
                return
            i, piece = self.pieces[n]
            yield i, self.rounds[i], self._slot(i), piece

    def _slot(self, i: int) -> Slot:
        return self.slots[i % len(self.slots)]

    def upload(self) -> None:
        """Take part in copies to the device."""
        for i, each, slot, piece in self._taken():
            if i >= len(self.slots):
                self.rounds[i - len(self.slots)].wait_queued()
            if self._given_up:
                return
            slot.wait()
            slot.bytes[piece] = each.data[piece]
            if each.finished_one():
                self._queue(i, door.driver.cuMemcpyHtoDAsync, each.address, slot.address)

    def download(self) -> None:
        """Take part in copies from the device."""
        for i, each, slot, piece in self._taken():
            each.wait_queued()
            if self._given_up:
                return
            slot.wait()
            each.data[piece] = slot.bytes[piece]
            if each.finished_one() and i + len(self.slots) < len(self.rounds):
                self.fetch(i + len(self.slots))

    def fetch(self, i: int) -> None:
        """Queue the GPU's copy of round `i` from the device; its slot is free."""
        address = self._slot(i).address
        self._queue(i, door.driver.cuMemcpyDtoHAsync, address, self.rounds[i].address)

    def _queue(self, i: int, function: Any, dst: int, src: int) -> None:
        each = self.rounds[i]
        self._slot(i).copy(function, dst, src, each.data.size, self.stream)
        each.set_queued()


class Ring:
    """Slots for copies in one direction, and the threads that serve them.

    Both are made when they are first needed.
    """

    def __init__(self, memory: Memory, name: str) -> None:
        self._memory = memory
        self._name = name
        self._lock, self._turn = threading.Lock(), threading.Lock()
        self._free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        self._made = 0
        self._threads: ThreadPoolExecutor | None = None
        self.width = min(STAGING_THREADS, os.cpu_count() or 1)

    @contextmanager
    def slots(self, count: int) -> Iterator[list[Slot]]:
        """Have up to `count` slots, whose last copies may still be under way.

        They are given to one work at a time: with fewer than there are, work would go on half as
        fast, beside another one that waits for its turn anyway.
        """
        slots: list[Slot] = []
        try:
            with self._turn:
                while len(slots) < min(count, STAGING_SLOTS):
                    slots.append(self._take())
            yield slots
        finally:
            for slot in slots:
                self._free.put(slot)

    def _take(self) -> Slot:
        try:
            return self._free.get_nowait()
        except queue.Empty:
            pass
        with self._lock:
            new = self._made < STAGING_SLOTS
            self._made += new
        if not new:
            return self._free.get()
        try:
            return Slot(self._memory)
        except BaseException:
            with self._lock:
                self._made -= 1
            raise

    def rounds(self, address: int, data: NDArray[np.uint8]) -> list[Round]:
        """Cut flat `data`, which belongs at `address` on the device."""
        starts = range(0, data.size, SLOT_BYTES)
        return [Round(address + at, data[at : at + SLOT_BYTES], self.width) for at in starts]

    def run(self, work: Work, take_part: Callable[[], None]) -> None:
        """Call ``take_part()``, and if there is enough to do in other threads too."""
        helpers = min(self.width, len(work.pieces)) - 1
        futures: list[Future[None]] = []
        try:
            if helpers:
                pool = self._pool()
                futures += [pool.submit(_help, work, take_part) for _ in range(helpers)]
            take_part()
        except BaseException:
            work.give_up()
            raise
        finally:
            started = [future for future in futures if not future.cancel()]
            wait(started)  # none may go on reading or writing the caller's array
        for future in started:
            future.result()

    def _pool(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._threads is None:
                name, enter = f"fp4rt-{self._name}", self._memory.context.enter
                self._threads = ThreadPoolExecutor(self.width, name, initializer=enter)
            return self._threads

    def close(self) -> None:
        """Drop the memory; copies that are still running have been waited for."""
        with self._lock:
            if self._threads is not None:
                self._threads.shutdown(wait=False)
                self._threads = None
        while not self._free.empty():
            quiet(door.driver.cuEventDestroy, self._free.get().event)


def _help(work: Work, take_part: Callable[[], None]) -> None:
    try:
        take_part()
    except BaseException:
        work.give_up()  # the others would wait for this one
        raise


class Staging:
    """Copies of ordinary arrays through pinned memory."""

    def __init__(self, memory: Memory) -> None:
        self._up, self._down = Ring(memory, "up"), Ring(memory, "down")

    def upload(self, pairs: Sequence[tuple[int, NDArray[np.uint8]]], stream: Any) -> None:
        """Copy flat arrays to addresses on the device; they may be changed on return."""
        rounds = [each for address, data in pairs for each in self._up.rounds(address, data)]
        with self._up.slots(len(rounds)) as slots:
            work = Work(rounds, slots, stream)
            self._up.run(work, work.upload)

    def download(self, data: NDArray[np.uint8], address: int, stream: Any) -> None:
        """Copy from the device into flat `data`, complete on return."""
        rounds = self._down.rounds(address, data)
        with self._down.slots(len(rounds)) as slots:
            work = Work(rounds, slots, stream)
            for i, slot in enumerate(slots[: len(rounds)]):
                slot.wait()
                work.fetch(i)
            self._down.run(work, work.download)

    def close(self) -> None:
        """Drop the staging memory."""
        self._up.close()
        self._down.close()
