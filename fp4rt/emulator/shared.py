"""Shared memory: one window per CTA, with a shadow that remembers who used each byte last.

An access that no barrier orders after a conflicting one is a data race, and so is one to bytes that
an asynchronous operation in flight still reads or writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from .clocks import ANY_LANE, PENDING, Agent, SyncClock
from .memory import UINT, Violation, misaligned

if TYPE_CHECKING:
    from .launch import AsyncOp
    from .machine import Cluster
    from .warp import Warp

SHARED_RESERVED = 1024
"""Bytes at the start of every shared window that belong to the system."""
SHARED_SCRATCH = 512
"""Offset of the part of them that libraries may use (``%reserved_smem_offset_1``), zeroed at the
start: cooperative groups keep the barriers of tiles of several warps there."""

_TRUE = 1
_STRONG = 0x8000

_CONFLICTS: dict[tuple[int, bytes], int] = {}


def bank_conflicts(offsets: Any, size: int) -> int:
    """Return how many extra wavefronts one shared access of up to 32 lanes takes.

    There are 32 banks of 4 bytes; lanes that read one word share it. Accesses of 8 and 16 bytes
    are served for 16 and 8 lanes at a time.

    Examples
    --------
    >>> import numpy as np
    >>> bank_conflicts(np.arange(32) * 4, 4), bank_conflicts(np.arange(32) * 128, 4)
    (0, 31)
    """
    lanes = 32 if size <= 4 else 128 // size
    extra = 0
    for first in range(0, len(offsets), lanes):
        part = offsets[first : first + lanes]
        words = np.unique(part[:, None] // 4 + np.arange(max(size // 4, 1)))
        extra += int(np.bincount(words % 32).max()) - 1
    return extra


class Shared:
    """The shared window of one CTA, indexed by offset (the first 1024 bytes are reserved)."""

    def __init__(
        self, cluster: Cluster, rank: int, size: int, *, race_check: bool, scratch: bool = False
    ) -> None:
        self.cluster, self.rank = cluster, rank
        self.first = SHARED_SCRATCH if scratch else SHARED_RESERVED
        self.check_valid = "uninitialised-shared" not in cluster.machine.allow
        self.size = size
        padded = (size + 127) // 128 * 128
        self.data = np.full(padded, 0xCB, np.uint8)
        self.valid = np.zeros(padded, np.uint8)
        self.data[self.first : SHARED_RESERVED] = 0
        self.valid[self.first : SHARED_RESERVED] = 1
        self.views = {n: self.data.view(t) for n, t in UINT.items()}
        self.valids = {n: self.valid.view(t) for n, t in UINT.items()}
        self.race_check = race_check
        self.write_time = np.zeros(padded, np.int32)
        self.writer = np.zeros(padded, np.uint16)
        self.write_lane = np.full(padded, ANY_LANE, np.uint8)
        self.read_time: dict[int, Any] = {}  # (agent << 1 | strong) -> int32[padded]
        self.read_lane: dict[int, Any] = {}
        self.last_read: dict[int, int] = {}
        self.pending: list[AsyncOp] = []
        self.location_clocks: dict[int, SyncClock] = {}

    # -- selections: (array -> view, index): rows of `size` bytes, a slice, or byte offsets

    def check(
        self, agent: Agent, pick: Callable[[Any], Any], write: bool, mode: str, lanes: Any = 0
    ) -> None:
        """Raise `Violation` if the access is not ordered after every conflicting one.

        `mode` is ``""`` (weak generic), ``"strong"`` or ``"async"``; `lanes` are the bits of the
        agent's lanes that make the access, 0 for all of them, or a lane for each row.
        """
        limit = agent.async_limit() if mode == "async" else agent.known
        when = pick(self.write_time)
        who = pick(self.writer)
        index = who & (_STRONG - 1)
        bad = when > limit[index]
        if mode == "strong":
            bad &= who < _STRONG
        if _TRUE in bad.tobytes():
            self._race(agent, pick, bad, "write", write, mode)
        if mode != "strong":
            late = when > agent.stored[index]
            if _TRUE in late.tobytes():
                late &= self.cluster.generic[index] & (who < _STRONG)
                self._check_lanes(agent, pick, late, index, when, self.write_lane, lanes, write)
        if not write:
            return
        known, loaded = agent.known, agent.loaded
        for key, last in self.last_read.items():
            reader = key >> 1
            if last <= loaded[reader] or (mode == "strong" and key & 1):
                continue
            times = pick(self.read_time[key])
            if reader != agent.index and last > known[reader]:
                bad = times > known[reader]
                if _TRUE in bad.tobytes():
                    self._race(agent, pick, bad, "read", write, mode, reader)
            if mode != "strong" and not key & 1 and self.cluster.generic[reader]:
                late = times > loaded[reader]
                if _TRUE in late.tobytes():
                    lane = self.read_lane[key]
                    self._check_lanes(agent, pick, late, reader, times, lane, lanes, write, True)

    def _check_lanes(
        self,
        agent: Agent,
        pick: Callable[[Any], Any],
        late: Any,
        index: Any,
        when: Any,
        lane_of: Any,
        lanes: Any,
        write: bool,
        earlier_read: bool = False,
    ) -> None:
        """Raise `Violation` for earlier accesses by other lanes than those that are ordered.

        They are marked `late`, made by the agents `index` and not older than their warps' last
        synchronisation of all lanes.
        """
        lane = pick(lane_of)
        released = self.cluster.releasers[index] >> lane & 1 != 0
        own = index == agent.index
        if isinstance(lanes, int):
            mine = (lanes >> lane.astype(np.int64) & 1 != 0) if lanes else np.ones_like(late)
        else:
            mine = lane == (lanes[:, None] if lane.ndim > 1 else lanes)
        mine = mine | (lane == ANY_LANE) | (when <= agent.synced[lane])
        fine = np.where(own, mine | (released & (when <= agent.heard)), released)
        bad = late & ~fine
        if _TRUE in bad.tobytes():
            at = int(np.flatnonzero(bad.reshape(-1))[0])
            offset = int(pick(np.arange(len(self.data), dtype=np.int32)).reshape(-1)[at])
            other = int(np.broadcast_to(index, bad.shape).reshape(-1)[at])
            raise Violation(
                f"data race: {'write to' if write else 'read of'} shared memory of CTA rank "
                f"{self.rank} at offset {offset:#x} by {agent.name} is not ordered after the "
                f"{'read' if earlier_read else 'write'} by lane {int(lane.reshape(-1)[at])} of "
                f"{self.cluster.agents[other].name}; no bar.warp.sync lies between that lane and "
                "the others of its warp"
            )

    def _race(
        self,
        agent: Agent,
        pick: Callable[[Any], Any],
        bad: Any,
        earlier: str,
        write: bool,
        mode: str,
        reader: int = -1,
    ) -> NoReturn:
        at = int(np.flatnonzero(np.asarray(bad).reshape(-1))[0])
        offset = int(pick(np.arange(len(self.data), dtype=np.int32)).reshape(-1)[at])
        when = int(self.read_time_at(reader, offset) if earlier == "read" else 0) or int(
            self.write_time[offset]
        )
        other = reader if earlier == "read" else int(self.writer[offset]) & (_STRONG - 1)
        name = self.cluster.agents[other].name
        what = "write to" if write else "read of"
        where = f"shared memory of CTA rank {self.rank} at offset {offset:#x}"
        if earlier == "read":
            when = self.read_time_at(other, offset)
        if when == PENDING:
            op = self._pending_at(offset, earlier == "write")
            verb = "writes" if earlier == "write" else "reads"
            text = f"{op.describe()}" if op else name
            raise Violation(
                f"{what} {where} that an operation in flight still {verb}: {text}; wait for its "
                "completion first"
            )
        if (
            earlier == "write"
            and mode == "async"
            and when <= int(agent.known[other])
            and self.cluster.agents[other].generic
        ):
            raise Violation(
                f"async-proxy {what} {where} after a generic-proxy write by {name} with no "
                "fence.proxy.async in between"
            )
        raise Violation(
            f"data race: {what} {where} by {agent.name} is not ordered after the {earlier} by "
            f"{name}; no barrier or mbarrier lies between them"
        )

    def read_time_at(self, reader: int, offset: int) -> int:
        """Return when `reader` last read the byte (0: never)."""
        times = [int(self.read_time[key][offset]) for key in self.read_time if key >> 1 == reader]
        return max(times, default=0)

    def _pending_at(self, offset: int, write: bool) -> AsyncOp | None:
        for op in self.pending:
            for shared, where in op.writes if write else op.reads:
                if shared is self and offset in _offsets(where):
                    return op
        return None

    def note_read(
        self,
        agent: Agent,
        pick_set: Callable[[Any, Any], None],
        strong: bool,
        lanes: Any = ANY_LANE,
    ) -> None:
        """Remember a read; of several lanes that read one byte, the last."""
        key = agent.index << 1 | strong
        times = self.read_time.get(key)
        if times is None:
            times = self.read_time[key] = np.zeros(len(self.data), np.int32)
            self.read_lane[key] = np.full(len(self.data), ANY_LANE, np.uint8)
        time = self.cluster.machine.time
        pick_set(times, time)
        pick_set(self.read_lane[key], lanes)
        self.last_read[key] = time

    # -- lane accesses

    def _count(self, offsets: Any, size: int, direction: str) -> None:
        counters = self.cluster.machine.counters
        counters[f"bytes.shared.{direction}"] += len(offsets) * size
        key = (size, (offsets - (int(offsets[0]) & ~127)).tobytes())
        extra = _CONFLICTS.get(key)
        if extra is None:
            extra = _CONFLICTS[key] = bank_conflicts(offsets, size)
            if len(_CONFLICTS) > 20000:
                _CONFLICTS.clear()
        if extra:
            counters["bank_conflicts"] += extra

    def _rows(self, offsets: Any, size: int) -> Any:
        if _TRUE in ((offsets < self.first) | (offsets > self.size - size)).tobytes():
            bad = next(int(o) for o in offsets if not self.first <= o <= self.size - size)
            raise Violation(
                f"shared access of {size} bytes at offset {bad:#x} is out of bounds: the CTA has "
                f"{self.size - SHARED_RESERVED} bytes at {SHARED_RESERVED:#x}..{self.size:#x}"
            )
        if _TRUE in (offsets & (size - 1) != 0).tobytes():
            misaligned("shared", offsets, size)
        return offsets // size

    def load(
        self, w: Warp, lanes: Any, offsets: Any, size: int, unit: int, *, strong: bool = False
    ) -> Any:
        """Return uint[n, size/unit] at int64[n] offsets, one for each of the lanes."""
        rows = self._rows(offsets, size)
        self._count(offsets, size, "load")
        if self.check_valid and 0 in self.valid.reshape(-1, size)[rows].tobytes():
            flat = self.valid.reshape(-1, size)[rows]
            at = np.argwhere(flat == 0)[0]
            raise Violation(
                f"read of uninitialised shared memory at offset {int(offsets[at[0]] + at[1]):#x}"
            )
        if self.race_check:
            agent = w.agent
            self.check(
                agent,
                lambda a: a.reshape(-1, size)[rows],
                False,
                "strong" if strong else "",
                lanes,
            )

            def mark(array: Any, values: Any) -> None:
                array.reshape(-1, size)[rows] = values

            self.note_read(agent, mark, strong, lanes[:, None])
        got: Any = self.data.reshape(-1, size)[rows].view(UINT[unit])
        return got

    def store(
        self, w: Warp, lanes: Any, offsets: Any, values: Any, size: int, *, strong: bool = False
    ) -> None:
        """Store uint[n, size/unit] at int64[n] offsets, one for each of the lanes."""
        rows = self._rows(offsets, size)
        self._count(offsets, size, "store")
        if self.race_check:
            agent = w.agent
            self.check(
                agent, lambda a: a.reshape(-1, size)[rows], True, "strong" if strong else "", lanes
            )
            self.write_lane.reshape(-1, size)[rows] = lanes[:, None]
            self.write_time.reshape(-1, size)[rows] = self.cluster.machine.time
            self.writer.reshape(-1, size)[rows] = agent.index | (_STRONG if strong else 0)
        self.data.reshape(-1, size)[rows] = (
            np.ascontiguousarray(values).view(np.uint8).reshape(len(rows), size)
        )
        self.valid.reshape(-1, size)[rows] = 1

    def note_atomic(self, agent: Agent, where: Any) -> None:
        """Remember an atomic write at byte offsets by an asynchronous unit."""
        self._initialised(where)
        if self.race_check:
            self.write_time[where] = self.cluster.machine.time
            self.writer[where] = agent.index | _STRONG

    def location_clock(self, offset: int) -> SyncClock:
        """Return the clock of a location that strong operations synchronise through."""
        clock = self.location_clocks.get(offset)
        if clock is None:
            clock = self.location_clocks[offset] = self.cluster.new_clock()
        return clock

    # -- block accesses by a warp

    def _bounds(self, where: Any) -> None:
        low, high = (
            (where.start, where.stop - 1)
            if isinstance(where, slice)
            else (int(where.min()), int(where.max()))
        )
        if low < self.first or high >= self.size:
            raise Violation(
                f"shared access at offsets {low:#x}..{high:#x} is out of bounds: the CTA has "
                f"{self.size - SHARED_RESERVED} bytes at {SHARED_RESERVED:#x}..{self.size:#x}"
            )

    def read_bytes(self, w: Warp, where: Any, *, strong: bool = False) -> Any:
        """Return bytes at a slice or at byte offsets, as a generic-proxy read by warp `w`."""
        self._bounds(where)
        self._initialised(where)
        if self.race_check:
            self.check(w.agent, lambda a: a[where], False, "strong" if strong else "")
            self.note_read(w.agent, lambda a, t: a.__setitem__(where, t), strong)
        return self.data[where].copy()

    def write_bytes(self, w: Warp, where: Any, values: Any, *, strong: bool = False) -> None:
        """Write bytes at a slice or at byte offsets, as a generic-proxy write by warp `w`."""
        self._bounds(where)
        if self.race_check:
            self.check(w.agent, lambda a: a[where], True, "strong" if strong else "")
            self.write_time[where] = self.cluster.machine.time
            self.write_lane[where] = ANY_LANE
            self.writer[where] = w.agent.index | (_STRONG if strong else 0)
        self.data[where] = values
        self.valid[where] = 1

    def check_sync_object(self, w: Warp, offset: int, size: int = 8) -> None:
        """Check that a sync object's bytes are initialised, and that this is ordered before `w`."""
        where = slice(offset, offset + size)
        self._bounds(where)
        self._initialised(where)
        if self.race_check:
            self.check(w.agent, lambda a: a[where], False, "strong")

    def _initialised(self, where: Any) -> None:
        flags = self.valid[where]
        if self.check_valid and 0 in flags.tobytes():
            offsets = _offsets(where)
            bad = int(offsets[int(np.argmin(flags))])
            op = self._pending_at(bad, True)
            if op is not None:
                raise Violation(
                    f"read of shared memory at offset {bad:#x} that an operation in flight still "
                    f"writes: {op.describe()}"
                )
            raise Violation(f"read of uninitialised shared memory at offset {bad:#x}")

    # -- asynchronous operations

    def begin(self, op: AsyncOp) -> None:
        """Check the footprint of `op` in this window against its issuer and mark it in flight."""
        issuer = op.issuer.agent if op.issuer is not None else op.agent
        for shared, where in op.reads:
            if shared is not self:
                continue
            self._bounds(where)
            self._initialised(where)
            if self.race_check:
                self._check_async(op, issuer, where, False)
                self._mark_read(op, where, PENDING)
        for shared, where in op.writes:
            if shared is not self:
                continue
            self._bounds(where)
            if self.race_check:
                self._check_async(op, issuer, where, True)
                self.write_time[where] = PENDING
                self.write_lane[where] = ANY_LANE
                self.writer[where] = op.agent.index
            self.valid[where] = 0
        self.pending.append(op)

    def _check_async(self, op: AsyncOp, issuer: Agent, where: Any, write: bool) -> None:
        # Accesses by the op's own agent are ordered by its queue, if it has one.
        times = issuer.all[:, op.agent.index]
        saved = times.copy()
        if op.queue is not None:
            times[:] = PENDING
        try:
            self.check(issuer, lambda a: a[where], write, op.proxy, op.lanes)
        finally:
            times[:] = saved

    def _mark_read(self, op: AsyncOp, where: Any, time: int) -> None:
        key = op.agent.index << 1
        times = self.read_time.get(key)
        if times is None:
            times = self.read_time[key] = np.zeros(len(self.data), np.int32)
            self.read_lane[key] = np.full(len(self.data), ANY_LANE, np.uint8)
        times[where] = time
        self.last_read[key] = max(self.last_read.get(key, 0), time)

    def finish(self, op: AsyncOp) -> None:
        """Mark the footprint of `op` as done at the present time."""
        self.pending.remove(op)
        time = self.cluster.machine.time
        for shared, where in op.writes:
            if shared is self:
                self.valid[where] = 1
                if self.race_check:
                    self.write_time[where] = time
        if not self.race_check:
            return
        mine = [where for shared, where in op.reads if shared is self]
        for where in mine:
            self._mark_read(op, where, time)
        busy = False
        for other in self.pending:
            if other.agent is op.agent:
                for shared, where in other.reads:
                    if shared is self:
                        busy = True
                        self._mark_read(other, where, PENDING)
                for shared, where in other.writes:
                    if shared is self:
                        self.write_time[where] = PENDING
                        self.valid[where] = 0
        if mine and not busy:
            self.last_read[op.agent.index << 1] = time


def _offsets(where: Any) -> Any:
    return np.arange(where.start, where.stop) if isinstance(where, slice) else where.reshape(-1)
