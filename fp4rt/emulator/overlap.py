"""Global memory shared by kernels that overlap programmatically.

A kernel launched with programmatic dependent launch may run before its predecessor in the stream
has finished. A thread must not touch bytes that an earlier kernel of the chain writes, nor write
bytes that one reads, before it has executed griddepcontrol.wait or a barrier has ordered it after
a thread that has. Waits are remembered by warp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .memory import Allocation, Violation

if TYPE_CHECKING:
    from .launch import AsyncOp, Launch
    from .warp import Warp


class Overlap:
    """Who of a chain of launches read and wrote which bytes of global memory."""

    def __init__(self, launches: list[Launch]) -> None:
        self.launches = launches
        self.number = {id(launch): i for i, launch in enumerate(launches)}
        self.readers: dict[int, Any] = {}
        self.writers: dict[int, Any] = {}
        self.early_readers: dict[int, Any] = {}
        self.early_writers: dict[int, Any] = {}

    def _flags(self, table: dict[int, Any], hit: Allocation) -> Any:
        found = table.get(hit.base)
        if found is None:
            # one bit for each launch of the chain
            found = table[hit.base] = np.zeros(len(hit.data), np.uint64)
        return found

    def note(
        self, actor: Warp | AsyncOp, hit: Allocation, offsets: Any, size: int, write: bool
    ) -> None:
        """Check and remember an access of `size` bytes at each offset."""
        launch = actor.launch
        assert launch is not None
        index = self.number[id(launch)]
        where = np.asarray(offsets).astype(np.int64)[:, None] + np.arange(size)
        bit = np.uint64(1 << index)
        if index and not actor.has_waited:
            before = np.uint64((1 << index) - 1)
            conflict = self._flags(self.writers, hit)[where] & before
            if write:
                conflict = conflict | (self._flags(self.readers, hit)[where] & before)
            if conflict.any():
                self._fail(launch, hit, where, conflict, write)
            early = self._flags(self.early_writers if write else self.early_readers, hit)
            early[where] |= bit
        after = np.uint64(((1 << 64) - 1) & ~((2 << index) - 1))
        conflict = self._flags(self.early_writers, hit)[where] & after
        if write:
            conflict = conflict | (self._flags(self.early_readers, hit)[where] & after)
        if conflict.any():
            self._fail(launch, hit, where, conflict, write)
        table = self.writers if write else self.readers
        self._flags(table, hit)[where] |= bit

    def _fail(
        self, launch: Launch, hit: Allocation, where: Any, conflict: Any, write: bool
    ) -> None:
        at = int(np.flatnonzero(conflict.reshape(-1))[0])
        bits = int(conflict.reshape(-1)[at])
        other = self.launches[bits.bit_length() - 1]
        verb = "writes" if write else "reads"
        raise Violation(
            f"kernel {launch.name} {verb} byte {int(where.reshape(-1)[at])} of {hit.name}, "
            f"which kernel {other.name} of the same programmatic chain uses too, with no "
            "griddepcontrol.wait of the later one before it"
        )
