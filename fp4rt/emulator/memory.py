"""Address spaces with the strict checks: bounds, alignment, initialisation and data races.

Global memory is a map of allocations, shared memory one window per CTA, local memory one strip per
thread. Each byte has a *valid* flag (fresh memory is poison). Shared memory also has a shadow that
remembers who wrote and read each byte last; an access that no barrier orders after a conflicting
one is a data race. Order is tracked with vector clocks (Lamport; FastTrack's epochs) over the
agents of a cluster: its warps (generic proxy) and its asynchronous units (async proxy).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

if TYPE_CHECKING:
    from .machine import AsyncOp, Cluster, Warp

U8 = np.uint8
Bytes = "NDArray[np.uint8]"

SHARED_RESERVED = 1024
"""Bytes at the start of every shared window that belong to the system."""

SHARED_WINDOW = 0x7FFF << 32
LOCAL_WINDOW = 0x7FFE << 32
PARAM_WINDOW = 0x7FFD << 32

_UINT = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_VALID = {1: 0x01, 2: 0x0101, 4: 0x01010101, 8: 0x0101010101010101}
_PENDING = np.iinfo(np.int32).max
_ALWAYS = _PENDING - 1
_TRUE = 1
_STRONG = 0x8000


class Violation(Exception):
    """A rule was broken; whoever knows the instruction turns it into an EmulatorFault."""


def overlaps(found: Iterable[Any]) -> bool:
    """Return whether anything was found."""
    return any(True for _ in found)


# ------------------------------------------------------------------------------ global memory


class Allocation:
    """A range of device memory: its bytes and, for each, whether it was ever written."""

    __slots__ = ("base", "data", "live", "name", "readonly", "size", "valid", "valids", "views")

    def __init__(
        self, base: int, size: int, name: str, *, valid: bool = False, readonly: bool = False
    ) -> None:
        padded = (size + 31) // 16 * 16
        self.base, self.size, self.name = base, size, name
        self.data = np.full(padded, 0xCB, np.uint8)
        self.valid = np.full(padded, 1 if valid else 0, np.uint8)
        self.readonly, self.live = readonly, True
        self.views = {n: self.data.view(t) for n, t in _UINT.items()}
        self.valids = {n: self.valid.view(t) for n, t in _UINT.items()}


class GlobalMemory:
    """The device's address space: global and constant variables, buffers, kernel parameters."""

    FIRST = 0x2_0000_0000
    GUARD = 4096

    def __init__(self, *, check_valid: bool = True) -> None:
        self.check_valid = check_valid
        self.allocations: list[Allocation] = []
        self.bases: list[int] = []
        self.next = self.FIRST
        self.recent: Allocation | None = None

    def alloc(self, size: int, name: str, *, valid: bool = False, align: int = 256) -> Allocation:
        """Return a new range; at least `GUARD` unmapped bytes lie between any two."""
        align = max(align, 256)
        base = -(-self.next // align) * align
        self.next = base + size + self.GUARD
        return self.map(Allocation(base, size, name, valid=valid))

    def map(self, allocation: Allocation) -> Allocation:
        """Add an allocation that brings its own address."""
        at = bisect_right(self.bases, allocation.base)
        self.bases.insert(at, allocation.base)
        self.allocations.insert(at, allocation)
        return allocation

    def free(self, allocation: Allocation) -> None:
        """Unmap; a later access is a fault that names the allocation."""
        at = bisect_right(self.bases, allocation.base) - 1
        del self.bases[at], self.allocations[at]
        allocation.live = False
        if self.recent is allocation:
            self.recent = None

    def find(self, address: int, size: int = 1) -> Allocation:
        """Return the allocation that holds the bytes, or raise `Violation`."""
        at = bisect_right(self.bases, address) - 1
        if at >= 0:
            hit = self.allocations[at]
            if address + size <= hit.base + hit.size:
                return hit
            if address < hit.base + hit.size + self.GUARD:
                raise Violation(
                    f"global access of {size} bytes at {address:#x} is out of bounds: {hit.name} "
                    f"has {hit.size} bytes at {hit.base:#x}, the access starts at byte "
                    f"{address - hit.base}"
                )
        if at + 1 < len(self.bases) and self.bases[at + 1] - address <= self.GUARD:
            hit = self.allocations[at + 1]
            raise Violation(
                f"global access at {address:#x} is out of bounds: it starts "
                f"{hit.base - address} bytes before {hit.name} ({hit.size} bytes at {hit.base:#x})"
            )
        raise Violation(f"global access of {size} bytes at {address:#x} hits no live allocation")

    # -- lane accesses: addresses uint64[n], one naturally aligned element of `size` bytes each

    def _locate(self, addresses: Any, size: int) -> tuple[Allocation, Any] | None:
        """Return the allocation and offsets if all lanes hit one, otherwise None."""
        hit = self.recent
        if hit is None or not hit.base <= int(addresses[0]) < hit.base + hit.size:
            hit = self.recent = self.find(int(addresses[0]), size)
        offsets = addresses - np.uint64(hit.base)
        if hit.size < size or _TRUE in (offsets > np.uint64(hit.size - size)).tobytes():
            return None
        return hit, offsets

    def _each(self, addresses: Any, size: int) -> Iterable[tuple[Allocation, Any, Any]]:
        located = self._locate(addresses, size)
        if located is not None:
            yield located[0], located[1], slice(None)
            return
        left = np.ones(len(addresses), bool)
        while left.any():
            hit = self.find(int(addresses[left.argmax()]), size)
            offsets = addresses - np.uint64(hit.base)
            inside = left & (offsets <= np.uint64(max(hit.size - size, 0)))
            yield hit, offsets[inside], inside
            left &= ~inside

    def load(self, addresses: Any, size: int, unit: int) -> Any:
        """Return the elements as uint[n, size/unit]; `size` is also the alignment."""
        if _TRUE in ((addresses & np.uint64(size - 1)) != 0).tobytes():
            _misaligned("global", addresses, size)
        out = np.empty((len(addresses), size // unit), _UINT[unit])
        wide = unit if size == unit else min(size, 8)
        for hit, offsets, where in self._each(addresses, size):
            index = (offsets // np.uint64(wide)).astype(np.int64)
            if size > wide:
                index = index[:, None] + np.arange(size // wide)
            if _TRUE in (hit.valids[wide][index] != _VALID[wide]).tobytes():
                self._uninitialised(hit, offsets, size)
            got = hit.views[wide][index]
            out[where] = got.reshape(len(got), -1).view(_UINT[unit])
        return out

    def store(self, addresses: Any, values: Any, size: int) -> None:
        """Store uint[n, size/unit] elements."""
        if _TRUE in ((addresses & np.uint64(size - 1)) != 0).tobytes():
            _misaligned("global", addresses, size)
        wide = min(size, 8)
        data = np.ascontiguousarray(values).view(_UINT[wide])
        for hit, offsets, where in self._each(addresses, size):
            if hit.readonly:
                raise Violation(f"store to {hit.name}, which is read-only")
            index = (offsets // np.uint64(wide)).astype(np.int64)
            if size > wide:
                index = index[:, None] + np.arange(size // wide)
            part = data[where]
            hit.views[wide][index] = part.reshape(index.shape)
            hit.valids[wide][index] = _VALID[wide]

    def _uninitialised(self, hit: Allocation, offsets: Any, size: int) -> None:
        if not self.check_valid:
            return
        for lane, offset in enumerate(offsets):
            bad = hit.valid[int(offset) : int(offset) + size] == 0
            if bad.any():
                raise Violation(
                    f"read of uninitialised global memory: byte {int(offset) + int(bad.argmax())} "
                    f"of {hit.name} ({hit.size} bytes), active lane number {lane}"
                )

    # -- blocks

    def read(self, w: Warp | None, address: int, nbytes: int) -> Any:
        """Return a copy of `nbytes` initialised bytes."""
        del w
        if nbytes == 0:
            return np.zeros(0, np.uint8)
        hit = self.find(address, nbytes)
        at = address - hit.base
        if 0 in hit.valid[at : at + nbytes].tobytes():
            self._uninitialised(hit, [at], nbytes)
        return hit.data[at : at + nbytes].copy()

    def write(self, w: Warp | None, address: int, values: Any) -> None:
        """Write bytes."""
        del w
        data = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        if len(data) == 0:
            return
        hit = self.find(address, len(data))
        if hit.readonly:
            raise Violation(f"store to {hit.name}, which is read-only")
        at = address - hit.base
        hit.data[at : at + len(data)] = data
        hit.valid[at : at + len(data)] = 1

    def gather(self, w: Warp | None, addresses: Any, size: int) -> Any:
        """Return uint8[n, size]: `size` bytes at each address, of any alignment."""
        del w
        addresses = np.asarray(addresses, np.uint64)
        out = np.empty((len(addresses), size), np.uint8)
        steps = np.arange(size)
        if not len(addresses):
            return out
        for hit, offsets, where in self._each(addresses, size):
            index = offsets.astype(np.int64)[:, None] + steps
            if 0 in hit.valid[index].tobytes():
                self._uninitialised(hit, offsets, size)
            out[where] = hit.data[index]
        return out

    def scatter(self, w: Warp | None, addresses: Any, values: Any) -> None:
        """Write uint8[n, size] at each address."""
        del w
        addresses = np.asarray(addresses, np.uint64)
        if not len(addresses):
            return
        steps = np.arange(values.shape[1])
        for hit, offsets, where in self._each(addresses, values.shape[1]):
            if hit.readonly:
                raise Violation(f"store to {hit.name}, which is read-only")
            index = offsets.astype(np.int64)[:, None] + steps
            hit.data[index] = values[where]
            hit.valid[index] = 1


def _misaligned(space: str, addresses: Any, size: int) -> NoReturn:
    address = next(int(a) for a in addresses if int(a) % size)
    raise Violation(f"misaligned {space} access: address {address:#x} is no multiple of {size}")


# ------------------------------------------------------------------------------- local memory


class Local:
    """Local (and function parameter) memory of a warp: `size` bytes for each lane."""

    def __init__(self, size: int, name: str = "local", *, check_valid: bool = True) -> None:
        self.size, self.name, self.check_valid = size, name, check_valid
        self.stride = (size + 15) // 16 * 16
        self.data = np.full(32 * self.stride, 0xCB, np.uint8)
        self.valid = np.zeros(32 * self.stride, np.uint8)
        self.views = {n: self.data.view(t) for n, t in _UINT.items()}
        self.valids = {n: self.valid.view(t) for n, t in _UINT.items()}
        self.lane_base = np.arange(32, dtype=np.int64) * self.stride

    def _index(self, lanes: Any, offsets: Any, size: int, wide: int) -> Any:
        if _TRUE in ((offsets < 0) | (offsets > self.size - size)).tobytes():
            bad = next(int(o) for o in offsets if not 0 <= o <= self.size - size)
            raise Violation(
                f"{self.name} access of {size} bytes at offset {bad} is out of bounds: a thread "
                f"has {self.size} bytes"
            )
        if _TRUE in (offsets % size != 0).tobytes():
            _misaligned(self.name, offsets, size)
        index = (self.lane_base[lanes] + offsets) // wide
        return index[:, None] + np.arange(size // wide) if size > wide else index

    def load(self, lanes: Any, offsets: Any, size: int, unit: int) -> Any:
        """Return uint[n, size/unit] for the lanes, each at its own offset."""
        wide = min(size, 8)
        index = self._index(lanes, offsets, size, wide)
        if self.check_valid and _TRUE in (self.valids[wide][index] != _VALID[wide]).tobytes():
            raise Violation(f"read of uninitialised {self.name} memory at offset {int(offsets[0])}")
        got = self.views[wide][index]
        return got.reshape(len(got), -1).view(_UINT[unit])

    def store(self, lanes: Any, offsets: Any, values: Any, size: int) -> None:
        """Store uint[n, size/unit]."""
        wide = min(size, 8)
        index = self._index(lanes, offsets, size, wide)
        self.views[wide][index] = (
            np.ascontiguousarray(values).view(_UINT[wide]).reshape(index.shape)
        )
        self.valids[wide][index] = _VALID[wide]


# ------------------------------------------------------------------------------ happens-before


class SyncClock:
    """What a synchronisation object passes on: for each agent, up to when its work is ordered."""

    __slots__ = ("known", "ordered")

    def __init__(self, capacity: int) -> None:
        self.known = np.zeros(capacity, np.int32)
        self.ordered = np.zeros(capacity, np.int32)

    def join(self, other: SyncClock) -> None:
        """Take over what `other` knows."""
        np.maximum(self.known, other.known, out=self.known)
        np.maximum(self.ordered, other.ordered, out=self.ordered)


class Agent:
    """Something that accesses shared memory: a warp, or an asynchronous unit.

    `known[v]` is the time up to which agent v's work happens before this agent's next step;
    `ordered[v]` the same for accesses through the async proxy, which need a
    ``fence.proxy.async`` on the way from generic-proxy writes.
    """

    def __init__(self, cluster: Cluster, index: int, name: str, generic: bool) -> None:
        self.cluster, self.index, self.name, self.generic = cluster, index, name, generic
        self.known = np.zeros(cluster.capacity, np.int32)
        self.ordered = np.zeros(cluster.capacity, np.int32)
        self.known[index] = _ALWAYS
        self.fenced: SyncClock | None = None
        self.seen: SyncClock | None = None

    def release(self, clock: SyncClock) -> None:
        """Pass everything this agent has done and knows on to `clock`."""
        machine = self.cluster.machine
        np.maximum(clock.known, self.known, out=clock.known)
        clock.known[self.index] = machine.time
        np.maximum(clock.ordered, self.ordered, out=clock.ordered)
        machine.time += 1

    def acquire(self, clock: SyncClock) -> None:
        """Order everything that `clock` knows before this agent's next step."""
        np.maximum(self.known, clock.known, out=self.known)
        self.known[self.index] = _ALWAYS
        np.maximum(self.ordered, clock.ordered, out=self.ordered)

    def proxy_fence(self) -> None:
        """fence.proxy.async: what is known to generic accesses is known to async ones."""
        machine = self.cluster.machine
        np.maximum(self.ordered, self.known, out=self.ordered)
        self.ordered[self.index] = machine.time
        machine.time += 1

    def fence(self) -> None:
        """fence.acq_rel or stronger: later strong writes release, earlier strong reads acquire."""
        if self.seen is not None:
            self.acquire(self.seen)
        self.fenced = self.cluster.new_clock()
        self.release(self.fenced)

    def strong_write(self, clock: SyncClock, release: bool) -> None:
        """A strong write or atomic on the location that `clock` belongs to."""
        if release:
            self.release(clock)
        elif self.fenced is not None:
            clock.join(self.fenced)

    def strong_read(self, clock: SyncClock, acquire: bool) -> None:
        """A strong read or atomic on the location that `clock` belongs to."""
        if acquire:
            self.acquire(clock)
        else:
            if self.seen is None:
                self.seen = self.cluster.new_clock()
            self.seen.join(clock)

    def async_limit(self) -> Any:
        """Return the view that accesses through the async proxy have."""
        generic = self.cluster.generic
        return np.where(generic[: len(self.known)], self.ordered, self.known)


# ------------------------------------------------------------------------------ shared memory

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

    def __init__(self, cluster: Cluster, rank: int, size: int, *, race_check: bool) -> None:
        self.cluster, self.rank = cluster, rank
        self.check_valid = "uninitialised-shared" not in cluster.machine.allow
        self.size = size
        padded = (size + 127) // 128 * 128
        self.data = np.full(padded, 0xCB, np.uint8)
        self.valid = np.zeros(padded, np.uint8)
        self.views = {n: self.data.view(t) for n, t in _UINT.items()}
        self.valids = {n: self.valid.view(t) for n, t in _UINT.items()}
        self.race_check = race_check
        self.write_time = np.zeros(padded, np.int32)
        self.writer = np.zeros(padded, np.uint16)
        self.read_time: dict[int, Any] = {}  # (agent << 1 | strong) -> int32[padded]
        self.last_read: dict[int, int] = {}
        self.pending: list[AsyncOp] = []
        self.location_clocks: dict[int, SyncClock] = {}

    # -- selections: (array -> view, index): rows of `size` bytes, a slice, or byte offsets

    def check(self, agent: Agent, pick: Callable[[Any], Any], write: bool, mode: str) -> None:
        """Raise `Violation` if the access is not ordered after every conflicting one.

        `mode` is ``""`` (weak generic), ``"strong"`` or ``"async"``.
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
        if not write:
            return
        known = agent.known
        for key, last in self.last_read.items():
            reader = key >> 1
            if reader == agent.index or last <= known[reader] or (mode == "strong" and key & 1):
                continue
            bad = pick(self.read_time[key]) > known[reader]
            if _TRUE in bad.tobytes():
                self._race(agent, pick, bad, "read", write, mode, reader)

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
        if when == _PENDING:
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

    def note_read(self, agent: Agent, pick_set: Callable[[Any, int], None], strong: bool) -> None:
        """Remember a read."""
        key = agent.index << 1 | strong
        times = self.read_time.get(key)
        if times is None:
            times = self.read_time[key] = np.zeros(len(self.data), np.int32)
        time = self.cluster.machine.time
        pick_set(times, time)
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
        if _TRUE in ((offsets < SHARED_RESERVED) | (offsets > self.size - size)).tobytes():
            bad = next(int(o) for o in offsets if not SHARED_RESERVED <= o <= self.size - size)
            raise Violation(
                f"shared access of {size} bytes at offset {bad:#x} is out of bounds: the CTA has "
                f"{self.size - SHARED_RESERVED} bytes at {SHARED_RESERVED:#x}..{self.size:#x}"
            )
        if _TRUE in (offsets & (size - 1) != 0).tobytes():
            _misaligned("shared", offsets, size)
        return offsets // size

    def load(self, w: Warp, offsets: Any, size: int, unit: int, *, strong: bool = False) -> Any:
        """Return uint[n, size/unit] at int64[n] offsets."""
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
                agent, lambda a: a.reshape(-1, size)[rows], False, "strong" if strong else ""
            )

            def mark(times: Any, time: int) -> None:
                times.reshape(-1, size)[rows] = time

            self.note_read(agent, mark, strong)
        got: Any = self.data.reshape(-1, size)[rows].view(_UINT[unit])
        return got

    def store(self, w: Warp, offsets: Any, values: Any, size: int, *, strong: bool = False) -> None:
        """Store uint[n, size/unit] at int64[n] offsets."""
        rows = self._rows(offsets, size)
        self._count(offsets, size, "store")
        if self.race_check:
            agent = w.agent
            self.check(agent, lambda a: a.reshape(-1, size)[rows], True, "strong" if strong else "")
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
        if low < SHARED_RESERVED or high >= self.size:
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
                self._mark_read(op, where, _PENDING)
        for shared, where in op.writes:
            if shared is not self:
                continue
            self._bounds(where)
            if self.race_check:
                self._check_async(op, issuer, where, True)
                self.write_time[where] = _PENDING
                self.writer[where] = op.agent.index
            self.valid[where] = 0
        self.pending.append(op)

    def _check_async(self, op: AsyncOp, issuer: Agent, where: Any, write: bool) -> None:
        # Accesses by the op's own agent are ordered by its queue, if it has one.
        saved = issuer.known[op.agent.index]
        if op.queue is not None:
            issuer.known[op.agent.index] = _PENDING
        try:
            self.check(issuer, lambda a: a[where], write, op.proxy)
        finally:
            issuer.known[op.agent.index] = saved

    def _mark_read(self, op: AsyncOp, where: Any, time: int) -> None:
        key = op.agent.index << 1
        times = self.read_time.get(key)
        if times is None:
            times = self.read_time[key] = np.zeros(len(self.data), np.int32)
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
                        self._mark_read(other, where, _PENDING)
                for shared, where in other.writes:
                    if shared is self:
                        self.write_time[where] = _PENDING
                        self.valid[where] = 0
        if mine and not busy:
            self.last_read[op.agent.index << 1] = time


def _offsets(where: Any) -> Any:
    return np.arange(where.start, where.stop) if isinstance(where, slice) else where.reshape(-1)
