"""Happens-before, tracked with vector clocks (Lamport; FastTrack's epochs).

The agents of a cluster are its warps (generic proxy) and its asynchronous units (async proxy). Time
counts releases: what an agent did up to the time of a release is ordered before whatever acquires
it. When some lanes of a warp release, that covers what the other lanes did only up to the warp's
last synchronisation: bar.warp.sync or a barrier for stores; for loads, whose registers must be
there by then, any instruction that the whole warp executes together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .machine import Cluster

PENDING = np.iinfo(np.int32).max
"""The time of an access that is still in flight."""

ALWAYS = PENDING - 1
LANES = 32
ANY_LANE = LANES
"""Stands for a lane where a whole warp or an asynchronous unit makes an access."""


class Times:
    """Times for each agent, up to which its work is ordered before something.

    Attributes
    ----------
    all
        The four below as the rows of one array.
    known, ordered
        For generic accesses of the lanes that released, and for accesses through the async proxy,
        which need a ``fence.proxy.async`` on the way from generic-proxy writes.
    stored, loaded
        For stores and loads of all lanes.
    """

    __slots__ = ("all", "known", "loaded", "ordered", "stored")

    def __init__(self, capacity: int) -> None:
        self._use(np.zeros((4, capacity), np.int32))

    def _use(self, times: Any) -> None:
        self.all = times
        self.known, self.ordered, self.stored, self.loaded = times

    def grow(self, more: int) -> None:
        """Make room for `more` agents."""
        self._use(np.concatenate([self.all, np.zeros((4, more), np.int32)], axis=1))

    def join(self, other: Times) -> None:
        """Take over what `other` knows."""
        np.maximum(self.all, other.all, out=self.all)


class SyncClock(Times):
    """What a synchronisation object passes on."""

    __slots__ = ()


class Agent(Times):
    """Something that accesses shared memory: a warp, or an asynchronous unit.

    Its times are those up to which another agent's work happens before this one's next step. Its
    own `stored` and `loaded` are those of its last synchronisation of all lanes; `synced` has that
    of each lane with some others. `heard` is when it last acquired what it released itself.
    """

    __slots__ = (
        "cluster", "fenced", "generic", "heard", "index", "name", "seen", "synced",
    )  # fmt: skip

    def __init__(self, cluster: Cluster, index: int, name: str, generic: bool) -> None:
        super().__init__(cluster.capacity)
        self.cluster, self.index, self.name, self.generic = cluster, index, name, generic
        self.known[index] = ALWAYS
        self.fenced: SyncClock | None = None
        self.seen: SyncClock | None = None
        self.heard = 0
        self.synced = np.zeros(LANES + 1, np.int32)

    def release(self, clock: SyncClock, lanes: int = 0) -> None:
        """Pass what this agent has done and knows on to `clock`.

        `lanes` are the bits of the lanes that do; 0 stands for all.
        """
        index, machine = self.index, self.cluster.machine
        np.maximum(clock.all, self.all, out=clock.all)
        clock.known[index] = machine.time
        if lanes:
            self.cluster.releasers[index] |= lanes
        else:
            clock.stored[index] = clock.loaded[index] = machine.time
        machine.time += 1

    def acquire(self, clock: SyncClock) -> None:
        """Order everything that `clock` knows before this agent's next step."""
        index = self.index
        self.heard = max(self.heard, int(clock.known[index]))
        np.maximum(self.all, clock.all, out=self.all)
        self.known[index] = ALWAYS

    def gather(self, stores: bool) -> None:
        """Order the loads of all lanes of a warp before its next step, perhaps the stores too."""
        index, machine = self.index, self.cluster.machine
        self.loaded[index] = machine.time
        if stores:
            self.stored[index] = machine.time
        machine.time += 1

    def sync_lanes(self, lanes: int) -> None:
        """Order what some lanes (bits) of a warp have done before the next step of each of them."""
        machine = self.cluster.machine
        for lane in range(LANES):
            if lanes >> lane & 1:
                self.synced[lane] = machine.time
        self.cluster.releasers[self.index] |= lanes
        machine.time += 1

    def proxy_fence(self) -> None:
        """fence.proxy.async: what is known to generic accesses is known to async ones."""
        machine = self.cluster.machine
        np.maximum(self.ordered, self.known, out=self.ordered)
        self.ordered[self.index] = machine.time
        machine.time += 1

    def fence(self, lanes: int = 0) -> None:
        """fence.acq_rel or stronger: later strong writes release, earlier strong reads acquire."""
        if self.seen is not None:
            self.acquire(self.seen)
        self.fenced = self.cluster.new_clock()
        self.release(self.fenced, lanes)

    def strong_write(self, clock: SyncClock, release: bool, lanes: int = 0) -> None:
        """A strong write or atomic by `lanes` on the location that `clock` belongs to."""
        if release:
            self.release(clock, lanes)
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
