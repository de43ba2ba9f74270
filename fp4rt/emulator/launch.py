"""Kernel launches, and the asynchronous operations that their instructions start."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fp4rt.device import EmulatorFault, LaunchConfig

from .clocks import Agent, SyncClock
from .memory import PARAM_WINDOW, Allocation
from .shared import Shared

if TYPE_CHECKING:
    from .machine import Cluster, Machine
    from .program import Program
    from .warp import Place, Warp


START_WINDOW = 64
"""Clusters from which the next to start is drawn."""


@dataclass(eq=False)
class AsyncOp:
    """An operation that an instruction started and that completes later.

    Parameters
    ----------
    kind, text
        For traces and messages.
    issuer
        The warp that issued it (None for a chained operation; then `context` says who).
    agent
        Who does its shared-memory accesses; see `Cluster.agent`.
    run
        Moves the data; called at completion, when the written bytes count as valid already.
    queue
        Operations with one key complete in order; None means in any order.
    reads, writes
        Shared-memory footprints: (Shared, slice or int array of byte offsets).
    signals
        Windows with an mbarrier at which it will arrive; a CTA must not exit before that.
    carry_issuer
        Whether `release` also passes on what the issuer knew at issue.
    proxy
        ``"async"``, or ``""`` for accesses through the generic proxy (non-bulk cp.async).
    """

    kind: str
    text: str
    issuer: Warp | None
    agent: Agent
    run: Callable[[AsyncOp], None]
    queue: Hashable | None = None
    reads: list[tuple[Shared, Any]] = field(default_factory=list)
    writes: list[tuple[Shared, Any]] = field(default_factory=list)
    signals: list[Shared] = field(default_factory=list)
    carry_issuer: bool = False
    proxy: str = "async"
    done: bool = False
    done_time: int = 0
    due: float = 0.0
    serial: int = 0
    context: Place | None = None
    snapshot: SyncClock | None = None
    cluster: Cluster | None = None
    launch: Launch | None = None
    has_waited: bool = False
    lanes: int = 0

    def describe(self) -> str:
        """Return what it is and who issued it."""
        return f"{self.text} (issued by {self.context})"

    def release(self, clock: SyncClock) -> None:
        """Pass "this operation is done" on to `clock`."""
        machine = self.agent.cluster.machine
        if self.carry_issuer and self.snapshot is not None:
            clock.join(self.snapshot)
        clock.all[:, self.agent.index] = machine.time
        machine.time += 1

    def acquire_by(self, w: Warp) -> None:
        """Order the finished operation before the next step of `w`."""
        times = w.agent.all[:, self.agent.index]
        np.maximum(times, self.done_time, out=times)

    def fault(self, message: str) -> EmulatorFault:
        """Return a fault that names the issuing instruction."""
        return EmulatorFault(f"{message}\n  in the asynchronous operation {self.describe()}")


class Launch:
    """A kernel launch in progress."""

    def __init__(
        self,
        machine: Machine,
        program: Program,
        config: LaunchConfig,
        params: bytes,
        previous: Launch | None = None,
    ) -> None:
        self.machine, self.program, self.config = machine, program, config
        self.name = program.name
        self.previous = previous
        machine.serial += 1
        base = PARAM_WINDOW + (machine.serial % 0x8000 << 16)
        self.params = Allocation(base, len(params), "the kernel parameters", readonly=True)
        self.params.data[: len(params)] = np.frombuffer(params, np.uint8)
        self.params.valid[: len(params)] = 1
        self.shared_bytes = program.shared_size(config.shared_bytes)
        self.counts = [0] * len(program.steps)
        self.left = self._bases()
        self.next_base = next(self.left, None)
        self.unfinished = int(np.prod(config.grid, dtype=np.int64))
        self.untriggered = self.unfinished
        self.clusters_alive = 0

    def _bases(self) -> Iterator[tuple[int, int, int]]:
        """First CTA of each cluster in the order of their start, of which CUDA promises nothing.

        By index, as hardware does it, in every second launch; otherwise one of the next few.
        """
        order = random.Random(hash(self.machine.rng.getstate()[1]))  # leaves the schedule alone
        if order.random() < 0.5:
            yield from self._bases_by_index()
            return
        near: list[tuple[int, int, int]] = []
        for base in self._bases_by_index():
            near.append(base)
            if len(near) == START_WINDOW:
                yield near.pop(order.randrange(len(near)))
        order.shuffle(near)
        yield from near

    def _bases_by_index(self) -> Iterator[tuple[int, int, int]]:
        (gx, gy, gz), (cx, cy, cz) = self.config.grid, self.config.cluster
        for z in range(0, gz, cz):
            for y in range(0, gy, cy):
                for x in range(0, gx, cx):
                    yield x, y, z

    def take_over(self) -> tuple[int, int, int] | None:
        """Cancel a cluster that has not started; return its first CTA's index, or None."""
        base = self.next_base
        if base is None:
            return None
        self.next_base = next(self.left, None)
        size = int(np.prod(self.config.cluster))
        self.unfinished -= size
        self.untriggered -= size
        self.machine.poke()
        return base

    @property
    def finished(self) -> bool:
        """Whether every CTA has exited."""
        return self.unfinished == 0

    def may_start(self) -> bool:
        """Whether its CTAs may be placed now."""
        before = self.previous
        return before is None or before.finished or before.untriggered == 0
