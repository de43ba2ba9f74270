"""Timing: windows of many repetitions, with the things that are compared taking turns.

A GPU is limited by its power, so its speed drifts with what ran before. Each thing is therefore
timed in several windows, one after another in turn, there and back, and each window begins with
some repetitions that aren't timed. What is reported is the median window with the fastest and the
slowest.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fp4rt.device import Graph, Stream

CALIBRATION = 0.02
"""Seconds that are repeated to find out how long one repetition takes."""
SETTLING = 0.25
"""Part of a window's length that is repeated before it: what ran before leaves its clock behind."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one call, averaged over each of several windows.

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

    def text(self) -> str:
        """Return the median with its spread, in µs, or in ms from 10 ms on.

        Examples
        --------
        >>> Timing((2e-6, 1e-6, 4e-6)).text()
        '2.0 µs (1.0 – 4.0)'
        """
        unit, scale = ("ms", 1e3) if self.median >= 0.01 else ("µs", 1e6)
        median, low, high = (t * scale for t in (self.median, self.low, self.high))
        return f"{median:.1f} {unit} ({low:.1f} – {high:.1f})"


@dataclass(frozen=True)
class Repeat:
    """What is timed.

    Attributes
    ----------
    run
        Does it as often as its argument says, and returns the seconds that all of it took.
    calls
        How many calls one repetition consists of.
    """

    run: Callable[[int], float]
    calls: int = 1


def interleaved(
    things: Mapping[str, Repeat],
    seconds: float,
    windows: int,
    around: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> dict[str, Timing]:
    """Time every thing in `windows` windows of about `seconds`, in turn.

    Parameters
    ----------
    things
        What is timed, by name.
    seconds, windows
        Length of a window, and how many each thing has.
    around
        Makes a context in which a window of the thing of that name is timed.

    Examples
    --------
    >>> once, many = Repeat(lambda n: 0.001 * n), Repeat(lambda n: 0.01 * n, calls=10)
    >>> times = interleaved({"once": once, "many": many}, 0.1, 3)
    >>> [round(t.median, 6) for t in times.values()]
    [0.001, 0.001]
    """
    counts = {}
    for name, thing in things.items():
        thing.run(1)
        once = thing.run(2) / 2
        count = _count(min(seconds, CALIBRATION), once)
        if count > 2:
            once = thing.run(count) / count
        counts[name] = _count(seconds, once)
    taken: dict[str, list[float]] = {name: [] for name in things}
    for number in range(windows):
        order = list(things.items())
        for name, thing in reversed(order) if number % 2 else order:
            thing.run(max(1, round(counts[name] * SETTLING)))
            with around(name):
                taken[name].append(thing.run(counts[name]) / counts[name] / thing.calls)
    return {name: Timing(tuple(times)) for name, times in taken.items()}


def _count(seconds: float, once: float) -> int:
    """Repetitions that together take at least `seconds`."""
    return max(1, math.ceil(seconds / max(once, 1e-9)))


def by_clock(call: Callable[[], object]) -> Repeat:
    """Return what repeats `call`, timed on the host."""

    def run(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            call()
        return time.perf_counter() - start

    return Repeat(run)


def by_events(stream: Stream, queue: Callable[[], object], calls: int = 1) -> Repeat:
    """Return what repeats `queue`, which queues that many calls, timed on the device."""

    def run(count: int) -> float:
        start = stream.record(timed=True)
        for _ in range(count):
            queue()
        end = stream.record(timed=True)
        end.synchronize()
        return end.elapsed_since(start)

    return Repeat(run, calls)


def by_replay(stream: Stream, graph: Graph, calls: int = 1) -> Repeat:
    """Return what replays `graph`, which holds that many calls."""
    return by_events(stream, lambda: graph.launch(stream), calls)
