"""Page-locked host memory: what users ask for, and what copies of ordinary arrays go through.

The GPU copies from page-locked ("pinned") memory while the host goes on. An ordinary array is
therefore copied to pinned memory first, piece by piece, and its owner may change it at once.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from fp4rt.cuda import driver as door
from fp4rt.cuda.driver import call, quiet, relaxed, wait_for

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fp4rt.cuda.memory import Memory

STAGING_SLOTS, STAGING_BYTES = 4, 4 << 20
"""Pinned memory through which copies of ordinary arrays go, in pieces."""


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
        self.event = call(
            door.driver.cuEventCreate, door.driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
        )

    def wait(self) -> None:
        """Wait until the last copy is done."""
        wait_for(door.driver.cuEventQuery, self.event)

    def copy(self, function: Any, dst: int, src: int, nbytes: int, stream: Any) -> None:
        """Queue a copy to or from this piece, and the event that marks its end."""
        try:
            call(function, dst, src, nbytes, stream)
        finally:  # also if Ctrl-C came in between, for the copy may have been queued
            quiet(door.driver.cuEventRecord, self.event, stream)


class Staging:
    """A few pieces of pinned memory that copies of ordinary arrays take turns to use."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._slots: queue.SimpleQueue[Slot] | None = None
        self._lock = threading.Lock()

    def _open(self) -> queue.SimpleQueue[Slot]:
        with self._lock:
            if self._slots is None:
                slots: queue.SimpleQueue[Slot] = queue.SimpleQueue()
                for _ in range(STAGING_SLOTS):
                    slots.put(Slot(self._memory))
                self._slots = slots
            return self._slots

    def upload(self, address: int, data: NDArray[np.uint8], stream: Any) -> None:
        """Copy flat `data` to the device; it may be changed as soon as this returns."""
        cu = door.driver
        slots = self._slots or self._open()
        for start in range(0, data.size, STAGING_BYTES):
            piece = data[start : start + STAGING_BYTES]
            slot = slots.get()
            try:
                slot.wait()
                slot.bytes[: piece.size] = piece
                target = address + start
                slot.copy(cu.cuMemcpyHtoDAsync, target, slot.address, piece.size, stream)
            finally:
                slots.put(slot)

    def download(self, data: NDArray[np.uint8], address: int, stream: Any) -> None:
        """Copy from the device into flat `data`, complete on return."""
        cu = door.driver
        slots = self._slots or self._open()
        pending: deque[tuple[Slot, NDArray[np.uint8]]] = deque()
        try:
            for start in range(0, data.size, STAGING_BYTES):
                piece = data[start : start + STAGING_BYTES]
                if len(pending) == 2 or (pending and slots.empty()):
                    self._finish(*pending[0])
                    slots.put(pending.popleft()[0])
                slot = self._next(slots, blocking=not pending)
                if slot is None:  # another thread took it; never wait while holding one
                    self._finish(*pending[0])
                    slot = pending.popleft()[0]
                pending.append((slot, piece))
                slot.wait()
                source = address + start
                slot.copy(cu.cuMemcpyDtoHAsync, slot.address, source, piece.size, stream)
            for slot, piece in pending:
                self._finish(slot, piece)
        finally:
            for slot, _ in pending:
                slots.put(slot)

    @staticmethod
    def _next(slots: queue.SimpleQueue[Slot], *, blocking: bool) -> Slot | None:
        try:
            return slots.get(block=blocking)
        except queue.Empty:
            return None

    @staticmethod
    def _finish(slot: Slot, piece: NDArray[np.uint8]) -> None:
        wait_for(door.driver.cuEventQuery, slot.event)
        piece[...] = slot.bytes[: piece.size]

    def close(self) -> None:
        """Drop the staging memory; copies that are still running have been waited for."""
        slots, self._slots = self._slots, None
        while slots is not None and not slots.empty():
            quiet(door.driver.cuEventDestroy, slots.get().event)
