"""Timing: windows of many repetitions, with the things that are compared taking turns.

A GPU is limited by its power, so its speed drifts with what ran before. Each thing is therefore
timed in several windows, one after another in turn, and what is reported is the median window with
the fastest and the slowest.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fp4rt.device import Graph, Stream


@dataclass(frozen=True)
class Timing:
    """Seconds of one repetition, averaged over each of several windows.

    Examples
    --------
    >>> t = Timing((2.0, 1.0, 4.0))
    >>> t.median, t.low, t.high
    (2.0, 1.0, 4.0)
    """

    windows: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median window's."""
        return statistics.median(self.windows)

    @property
    def low(self) -> float:
        """The fastest window's."""
        return min(self.windows)

    @property
    def high(self) -> float:
        """The slowest window's."""
        return max(self.windows)


Repeat = Callable[[int], float]
"""Does something that many times and returns the seconds that all of them took."""


def interleaved(things: Mapping[str, Repeat], seconds: float, windows: int) -> dict[str, Timing]:
    """Time every thing in `windows` windows of at least about `seconds`, in turn.

    Examples
    --------
    >>> times = interleaved({"a": lambda n: 0.001 * n, "b": lambda n: 0.01 * n}, 0.1, 3)
    >>> [round(t.median, 6) for t in times.values()]
    [0.001, 0.01]
    """
    counts = {}
    for name, repeat in things.items():
        repeat(1)
        few = max(repeat(2) / 2, 1e-9)
        count = math.ceil(min(seconds, 0.02) / few)
        once = max(repeat(count) / count, 1e-9) if count > 1 else few
        counts[name] = max(1, math.ceil(seconds / once))
    taken: dict[str, list[float]] = {name: [] for name in things}
    for _ in range(windows):
        for name, repeat in things.items():
            taken[name].append(repeat(counts[name]) / counts[name])
    return {name: Timing(tuple(times)) for name, times in taken.items()}


def by_clock(call: Callable[[], object]) -> Repeat:
    """Return what repeats `call` and times it on the host."""

    def repeat(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            call()
        return time.perf_counter() - start

    return repeat


def by_events(stream: Stream, call: Callable[[], object], per_call: int = 1) -> Repeat:
    """Return what repeats `call`, which queues `per_call` repetitions, timed on the device."""

    def repeat(count: int) -> float:
        start = stream.record(timed=True)
        for _ in range(count):
            call()
        end = stream.record(timed=True)
        end.synchronize()
        return end.elapsed_since(start) / per_call

    return repeat


def by_replay(stream: Stream, graph: Graph, per_replay: int) -> Repeat:
    """Return what replays `graph`, which holds `per_replay` repetitions."""
    return by_events(stream, lambda: graph.launch(stream), per_replay)
