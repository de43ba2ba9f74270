"""Plans that one-call grouped GEMMs leave for the next call of the same kind.

A plan in the cache holds memory of its own and nothing of the caller's: operands and results that
are on the device are bound for one call, operands on the host are copied anew at each. So a hit can
never show old data, whatever was changed or dropped since, and a key need not name an address.

A call takes a plan out, so that no other thread has it, and gives it back when it has queued its
work; the plan itself orders what comes next behind that. What goes beyond the bounds is closed,
least recently used first.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fp4rt.device import Attached, Device

MAX_ENTRIES, MAX_BYTES = 64, 1 << 30
"""Bounds of a new cache: plans, and the bytes of device memory that they own together."""


class Reusable(Protocol):
    """What a cache holds: plans."""

    scale_key: Hashable

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that it owns."""

    def close(self) -> None:
        """Free them."""


_caches: weakref.WeakSet[PlanCache] = weakref.WeakSet()
_caches_lock = threading.Lock()


class PlanCache(Attached):
    """The plans of one device that wait for their next call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: OrderedDict[int, tuple[Hashable, Reusable]] = OrderedDict()
        self._by_key: dict[Hashable, list[int]] = {}
        self._next = 0
        self.max_entries, self.max_bytes = MAX_ENTRIES, MAX_BYTES
        self.nbytes = self.hits = self.misses = self.evictions = 0
        with _caches_lock:
            _caches.add(self)

    def __len__(self) -> int:
        return len(self._idle)

    def take(self, key: Hashable) -> Any:
        """Return a plan that fits, which is the caller's until it gives it back; None if none."""
        with self._lock:
            numbers = self._by_key.get(key)
            if not numbers:
                self.misses += 1
                return None
            self.hits += 1
            return self._remove(numbers[-1])

    def take_if(self, key: Hashable, scale_key: Hashable) -> Any:
        """Return a plan as `take` does, if its scales are those; None and no miss otherwise."""
        with self._lock:
            numbers = self._by_key.get(key)
            if not numbers or self._idle[numbers[-1]][1].scale_key != scale_key:
                return None
            self.hits += 1
            return self._remove(numbers[-1])

    def take_spare(self, key: Hashable) -> Any:
        """Return a plan as `take` does, for work that is no call and counts neither way."""
        with self._lock:
            numbers = self._by_key.get(key)
            return self._remove(numbers[-1]) if numbers else None

    def give(self, key: Hashable, plan: Reusable, *, spare: bool = False) -> None:
        """Keep a plan for the next call, as the most recently used one.

        A `spare` one only takes the room that others leave: it goes before all of them.
        """
        if plan.nbytes > self.max_bytes:  # it would push out all others for nothing
            self.evictions += 1
            plan.close()
            return
        with self._lock:
            self._next += 1
            self._idle[self._next] = (key, plan)
            self._by_key.setdefault(key, []).append(self._next)
            if spare:
                self._idle.move_to_end(self._next, last=False)
            self.nbytes += plan.nbytes
            evicted = self._beyond_bounds()
        for old in evicted:
            old.close()

    def _remove(self, number: int) -> Reusable:
        key, plan = self._idle.pop(number)
        numbers = self._by_key[key]
        numbers.remove(number)
        if not numbers:
            del self._by_key[key]
        self.nbytes -= plan.nbytes
        return plan

    def _beyond_bounds(self) -> list[Reusable]:
        evicted = []
        while len(self._idle) > self.max_entries or self.nbytes > self.max_bytes:
            evicted.append(self._remove(next(iter(self._idle))))
        self.evictions += len(evicted)
        return evicted

    def resize(self, max_entries: int, max_bytes: int) -> None:
        """Change the bounds; what is beyond them goes at once."""
        with self._lock:
            self.max_entries, self.max_bytes = max_entries, max_bytes
            evicted = self._beyond_bounds()
        for old in evicted:
            old.close()

    def clear(self) -> None:
        """Close every plan that waits."""
        with self._lock:
            plans = [plan for _, plan in self._idle.values()]
            self._idle.clear()
            self._by_key.clear()
            self.nbytes = 0
        for plan in plans:
            plan.close()


@dataclass(frozen=True)
class CacheInfo:
    """What `cache_info` returns: counters since the device was opened, and what waits now.

    Attributes
    ----------
    hits, misses
        Calls that found a plan, and that had to make one.
    evictions
        Plans that were closed because of the bounds.
    entries, nbytes
        Plans that wait, and the bytes of device memory that they own.
    max_entries, max_bytes
        The bounds of each device's cache.
    """

    hits: int
    misses: int
    evictions: int
    entries: int
    nbytes: int
    max_entries: int
    max_bytes: int
    _caches: tuple[PlanCache, ...]

    def clear(self) -> None:
        """Close the plans that wait; the counters go on."""
        for cache in self._caches:
            cache.clear()

    def resize(self, *, max_entries: int | None = None, max_bytes: int | None = None) -> None:
        """Change the bounds of each device's cache; 0 keeps nothing.

        Raises
        ------
        ValueError
            If a bound is negative.
        TypeError
            If a bound is no integer.
        """
        for name, value in (("max_entries", max_entries), ("max_bytes", max_bytes)):
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise TypeError(f"{name} is {value!r}; it must be an integer, such as 64")
            if value < 0:
                raise ValueError(f"{name} is {value}; it must be 0 or more")
        for cache in self._caches:
            cache.resize(
                cache.max_entries if max_entries is None else int(max_entries),
                cache.max_bytes if max_bytes is None else int(max_bytes),
            )

    def __repr__(self) -> str:
        return (
            f"CacheInfo(hits={self.hits}, misses={self.misses}, evictions={self.evictions}, "
            f"entries={self.entries}/{self.max_entries}, bytes={self.nbytes:,}/{self.max_bytes:,})"
        )


def cache_info(device: Device | None = None) -> CacheInfo:
    """Say what the plan cache behind `grouped_gemm` did and holds; also to clear or bound it.

    What `GroupedGemmPlan.map` leaves for the next pipeline takes only room that calls leave.
    Only devices with kernels have one: on the cpu a plan costs nothing to make.

    Parameters
    ----------
    device
        Of this device; None for all open ones together.

    Examples
    --------
    >>> import fp4rt
    >>> with fp4rt.device("cpu") as dev:
    ...     info = fp4rt.cache_info(dev)
    >>> info
    CacheInfo(hits=0, misses=0, evictions=0, entries=0/64, bytes=0/1,073,741,824)
    >>> info.clear()
    """
    if device is not None and not isinstance(device, Device):
        raise TypeError(
            f"device must be an open Device or None, got {device!r}; use fp4rt.device(name)"
        )
    if device is None:
        with _caches_lock:
            caches = tuple(_caches)
    else:
        caches = (device.attached(PlanCache),)
    return CacheInfo(
        hits=sum(cache.hits for cache in caches),
        misses=sum(cache.misses for cache in caches),
        evictions=sum(cache.evictions for cache in caches),
        entries=sum(len(cache) for cache in caches),
        nbytes=sum(cache.nbytes for cache in caches),
        max_entries=max((cache.max_entries for cache in caches), default=MAX_ENTRIES),
        max_bytes=max((cache.max_bytes for cache in caches), default=MAX_BYTES),
        _caches=caches,
    )
