"""Happens-before, tracked with vector clocks (Lamport; FastTrack's epochs).

The agents of a cluster are its warps (generic proxy) and its asynchronous units (async proxy). Time
counts releases: what an agent did up to the time of a release is ordered before whatever acquires
it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .machine import Cluster

PENDING = np.iinfo(np.int32).max
"""The time of an access that is still in flight."""

ALWAYS = PENDING - 1


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
        self.known[index] = ALWAYS
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
        self.known[self.index] = ALWAYS
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
