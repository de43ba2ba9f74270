"""Execution: warps, CTAs and clusters under a seeded scheduler.

A warp is one step object: its registers are numpy rows over 32 lanes, its lanes are split into
*fragments* (lanes at one program counter with one call stack). The scheduler picks a runnable warp
or a pending asynchronous operation at random, so every run with another seed is another legal
interleaving; a program that never gets anywhere is reported with the list of who waits for what.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Hashable
from typing import Any, NoReturn

import numpy as np

from fp4rt.device import EmulatorFault

from .clocks import ANY_LANE, Agent, SyncClock
from .launch import AsyncOp, Launch
from .memory import Allocation, GlobalMemory, Violation
from .overlap import Overlap
from .shared import SHARED_RESERVED, Shared
from .warp import Warp

SHARED_PER_SM = 228 * 1024


class Cta:
    """A thread block: shared memory, barriers, warps."""

    def __init__(self, cluster: Cluster, rank: int, ctaid: tuple[int, int, int], sm: Sm) -> None:
        self.cluster, self.rank, self.ctaid, self.sm = cluster, rank, ctaid, sm
        self.launch = launch = cluster.launch
        self.machine = cluster.machine
        x, y, z = launch.config.block
        self.threads: int = x * y * z
        self.name = str(ctaid).replace(" ", "")
        self.shared = Shared(
            cluster,
            rank,
            launch.shared_bytes + SHARED_RESERVED,
            race_check=cluster.machine.race_check,
            scratch=launch.program.uses_special("%reserved_smem_offset"),
        )
        self.barriers: dict[int, Any] = {}
        self.at_exit: list[Callable[[], None]] = []
        self.state: dict[Any, Any] = {}
        self.warps: list[Warp] = []
        self.live_warps = 0
        self.triggered = False

    def start(self) -> None:
        """Create the warps."""
        self.warps = [Warp(self, i) for i in range(-(-self.threads // 32))]
        self.live_warps = len(self.warps)
        self.machine.runnable.extend(self.warps)

    def fault(self, message: str) -> EmulatorFault:
        """Return a fault that names the CTA."""
        return EmulatorFault(f"{message}\n  at kernel {self.launch.name}, CTA {self.name}")


class Sm:
    """A multiprocessor: what its resident CTAs share."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.state: dict[Any, Any] = {}
        self.ctas = 0
        self.threads = 0
        self.shared_bytes = 0


class Cluster:
    """CTAs that share a window of shared memory, and the agents that touch it."""

    def __init__(self, launch: Launch, base: tuple[int, int, int], sms: list[Sm]) -> None:
        self.launch = launch
        self.machine = launch.machine
        self.base = base
        self.agents: list[Agent] = []
        self.keys: dict[Hashable, Agent] = {}
        self.clocks: list[SyncClock] = []
        self.state: dict[Any, Any] = {}
        self.pending: set[AsyncOp] = set()
        self.waits: dict[int, int] = {}  # agent: time of its first griddepcontrol.wait
        size = launch.config.cluster
        warps = -(-int(np.prod(launch.config.block)) // 32)
        self.capacity = len(sms) * (warps + 16) + 16
        self.generic = np.zeros(self.capacity, bool)
        # For each agent, the lanes that released for themselves alone; bit ANY_LANE is set.
        self.releasers = np.full(self.capacity, 1 << ANY_LANE, np.int64)
        self.ctas: list[Cta] = []
        for rank, sm in enumerate(sms):
            x, y, z = rank % size[0], rank // size[0] % size[1], rank // (size[0] * size[1])
            ctaid = (base[0] + x, base[1] + y, base[2] + z)
            self.ctas.append(Cta(self, rank, ctaid, sm))
        for cta in self.ctas:
            cta.start()

    def agent(self, key: Hashable, name: str = "") -> Agent:
        """Return the agent for `key`, new if need be; ("warp", rank, index) is a warp's."""
        agent = self.keys.get(key)
        if agent is None:
            index = len(self.agents)
            if index == self.capacity:
                self._grow()
            generic = isinstance(key, tuple) and key[0] == "warp"
            if generic and isinstance(key, tuple):
                name = f"warp {key[2]} of CTA rank {key[1]}"
            agent = Agent(self, index, name or f"asynchronous unit {key}", generic)
            self.generic[index] = generic
            self.agents.append(agent)
            self.keys[key] = agent
        return agent

    def new_clock(self) -> SyncClock:
        """Return a clock for a new synchronisation object."""
        clock = SyncClock(self.capacity)
        self.clocks.append(clock)
        return clock

    def _grow(self) -> None:
        more = self.capacity
        self.capacity += more
        for holder in (*self.agents, *self.clocks):
            holder.grow(more)
        self.generic = np.concatenate([self.generic, np.zeros(more, bool)])
        fresh = np.full(more, 1 << ANY_LANE, np.int64)
        self.releasers = np.concatenate([self.releasers, fresh])

    def resolve(
        self, w: Warp, address: int, size: int, align: int, window: str = "cluster"
    ) -> tuple[Cta, int]:
        """Return the CTA and offset of one shared address; raise the fault if it is not legal."""
        rank, offset = address >> 24, address & 0xFFFFFF
        if rank >= len(self.ctas) or address < 0:
            raise w.fault(
                f"shared address {address:#x} names CTA rank {rank}, but the cluster has "
                f"{len(self.ctas)} CTAs"
            )
        cta = self.ctas[rank]
        if window == "cta" and cta is not w.cta:
            raise w.fault(
                f"shared::cta access at {address:#x} lies in the window of CTA rank {rank}, not in "
                f"its own (rank {w.cta.rank}); use .shared::cluster"
            )
        if offset % align:
            raise w.fault(f"misaligned shared address {address:#x}: must be a multiple of {align}")
        if offset < cta.shared.first or offset + size > cta.shared.size:
            raise w.fault(
                f"shared access of {size} bytes at {address:#x} is out of bounds: the CTA has "
                f"{cta.shared.size - SHARED_RESERVED} bytes at {SHARED_RESERVED:#x}.."
                f"{cta.shared.size:#x}"
            )
        if cta is not w.cta and not cta.live_warps:
            raise w.fault(
                f"access to shared memory of CTA rank {rank}, which has exited; keep it alive with "
                "a cluster barrier"
            )
        return cta, offset


class Machine:
    """The multiprocessors, the memory and the scheduler of one device.

    Parameters
    ----------
    sm_count
        Number of multiprocessors.
    seed
        Seed of the schedule.
    schedule
        ``"random"`` (asynchronous operations take a random time), ``"eager"`` (they complete as
        soon as they may), ``"lazy"`` (only when nothing can run but what polls), ``"mixed"`` (one
        of these for each operation).
    race_check
        Whether shared memory is checked for data races.
    trace
        Whether events are recorded.
    hang_limit
        Instructions after which a launch that makes no visible progress counts as hung.
    """

    def __init__(
        self,
        sm_count: int,
        *,
        seed: int = 0,
        schedule: str = "mixed",
        race_check: bool = True,
        trace: bool = False,
        hang_limit: int = 3_000_000,
        allow: frozenset[str] = frozenset(),
    ) -> None:
        self.sms = [Sm(i) for i in range(sm_count)]
        self.memory = GlobalMemory(check_valid="uninitialised-global" not in allow)
        self.rng = random.Random(seed)
        self.schedule = schedule
        self.race_check = race_check
        self.allow = allow
        self.tracing = trace
        self.hang_limit = hang_limit
        self.events: list[tuple[int, str, str, str, Any]] = []
        self.counters: Counter[str] = Counter()
        self.output: list[str] = []
        self.heap: dict[int, Allocation] = {}
        self.time = 1
        self.steps = 0
        self.readings = 0  # of clocks
        self.serial = 0
        self.op_serial = 0
        self.dirty = False
        self.progress = 0
        self.runnable: list[Warp] = []
        self.sleeping: list[Warp] = []
        self.queues: dict[Hashable, deque[AsyncOp]] = {}
        self.launches: list[Launch] = []

    # -- services

    def chance(self, probability: float) -> bool:
        """Return True with this probability."""
        return self.rng.random() < probability

    def poke(self) -> None:
        """Note that something changed that a sleeping warp may wait for."""
        self.dirty = True
        self.progress = self.steps

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter."""
        self.counters[name] += amount

    def trace(self, track: str, name: str, phase: str, args: Any = None) -> None:
        """Record an event at the present step, if tracing is on."""
        if self.tracing:
            self.events.append((self.steps, track, name, phase, args))

    def submit(self, op: AsyncOp) -> None:
        """Check and queue an asynchronous operation."""
        issuer = op.issuer
        if issuer is not None:
            op.context = issuer.where()
            op.cluster, op.launch = issuer.cluster, issuer.launch
            op.has_waited, op.lanes = issuer.has_waited, issuer.acting()
            if op.carry_issuer:
                op.snapshot = issuer.cluster.new_clock()
                issuer.agent.release(op.snapshot, op.lanes)
        else:
            op.cluster = op.agent.cluster
        windows: list[Shared] = []
        for shared, _ in [*op.reads, *op.writes]:
            if shared not in windows:
                windows.append(shared)
                shared.begin(op)
        op.cluster.pending.add(op)
        self.op_serial += 1
        op.serial = self.op_serial
        op.due = self._due()
        key = ("op", op.serial) if op.queue is None else op.queue
        self.queues.setdefault(key, deque()).append(op)
        self.counters[f"async.{op.kind}"] += 1
        self.progress = self.steps
        self.trace(f"async {op.kind}", op.text, "issue", op.serial)

    def _due(self) -> float:
        mode = self.schedule
        if mode == "mixed":
            mode = self.rng.choice(("eager", "random", "lazy"))
        if mode == "eager":
            return 0.0
        if mode == "lazy":
            return float("inf")
        return self.steps + self.rng.expovariate(1 / 400)

    def _complete(self, key: Hashable) -> None:
        queue = self.queues[key]
        op = queue.popleft()
        if not queue:
            del self.queues[key]
        windows: list[Shared] = []
        for shared, _ in [*op.reads, *op.writes]:
            if shared not in windows:
                windows.append(shared)
                shared.finish(op)
        op.done_time = self.time
        if op.issuer is not None:
            self.memory.actor = op
        try:
            op.run(op)
        except Violation as error:
            raise op.fault(str(error)) from None
        op.done = True
        self.time += 1
        if op.cluster is not None:
            op.cluster.pending.discard(op)
        self.poke()
        self.trace(f"async {op.kind}", op.text, "complete", op.serial)

    # -- launching

    def _place(self) -> None:
        for launch in self.launches:
            if not launch.may_start():
                return
            size = int(np.prod(launch.config.cluster))
            while launch.next_base is not None:
                sms = self._room(launch, size)
                if sms is None:
                    break
                base = launch.next_base
                launch.next_base = next(launch.left, None)
                launch.clusters_alive += 1
                Cluster(launch, base, sms)

    def _room(self, launch: Launch, size: int) -> list[Sm] | None:
        threads = int(np.prod(launch.config.block))
        need = launch.shared_bytes + SHARED_RESERVED
        chosen: list[Sm] = []
        for _ in range(size):
            free = [
                sm
                for sm in self.sms
                if sm.threads + threads <= 2048
                and sm.shared_bytes + need <= SHARED_PER_SM
                and sm.ctas < 32
            ]
            if not free:
                for sm in chosen:
                    self._vacate(sm, threads, need)
                return None
            sm = min(free, key=lambda s: (s.ctas, s.index))
            sm.ctas += 1
            sm.threads += threads
            sm.shared_bytes += need
            chosen.append(sm)
        return chosen

    @staticmethod
    def _vacate(sm: Sm, threads: int, need: int) -> None:
        sm.ctas -= 1
        sm.threads -= threads
        sm.shared_bytes -= need

    def warp_done(self, w: Warp) -> None:
        """Note that a warp's last lane has exited."""
        cta, launch = w.cta, w.launch
        cta.live_warps -= 1
        if cta.live_warps:
            return
        for hook in cta.at_exit:
            hook()
        for op in w.cluster.pending:
            for shared, _ in [*op.reads, *op.writes]:
                if shared is cta.shared:
                    raise cta.fault(
                        "the CTA exits while an operation on its shared memory is in flight: "
                        f"{op.describe()}"
                    )
            if any(shared is cta.shared for shared in op.signals):
                raise cta.fault(
                    "the CTA exits while an operation that will arrive at its mbarrier is in "
                    f"flight: {op.describe()}"
                )
        self._vacate(cta.sm, cta.threads, launch.shared_bytes + SHARED_RESERVED)
        if not cta.triggered:
            self.trigger(cta)
        launch.unfinished -= 1
        if not any(other.live_warps for other in w.cluster.ctas):
            launch.clusters_alive -= 1
        self.poke()

    def trigger(self, cta: Cta) -> None:
        """griddepcontrol.launch_dependents, or exit: this CTA lets the next kernel start."""
        if not cta.triggered:
            cta.triggered = True
            cta.launch.untriggered -= 1
            self.poke()

    # -- the scheduler

    def execute(self, launches: list[Launch]) -> None:
        """Run the launches (each may overlap its predecessor programmatically) to the end."""
        self.launches = launches
        self.runnable, self.sleeping, self.queues = [], [], {}
        for sm in self.sms:
            sm.ctas = sm.threads = sm.shared_bytes = 0
            sm.state.clear()
        for launch in launches:
            self.memory.map(launch.params)
        self.progress = self.steps
        self.memory.overlap = Overlap(launches) if len(launches) > 1 else None
        try:
            with np.errstate(all="ignore"):
                self._place()
                self._loop()
        finally:
            self.memory.overlap = self.memory.actor = None
            for launch in launches:
                self.memory.free(launch.params)
                self._tally(launch)
            self.launches = []
            self.runnable, self.sleeping, self.queues = [], [], {}

    def _loop(self) -> None:
        rng, runnable = self.rng, self.runnable
        last_place = -1
        while True:
            if self.dirty:
                self.dirty = False
                self._wake()
                left = sum(launch.unfinished for launch in self.launches) + sum(
                    launch.untriggered for launch in self.launches
                )
                if left != last_place:
                    last_place = left
                    self._place()
            spinning = self.steps - self.progress > _PATIENCE
            if self.queues and self._async_turn(spinning or not runnable):
                continue
            if not runnable:
                if self.dirty:
                    continue
                if all(launch.finished for launch in self.launches):
                    return
                self._stuck()
            at = rng.randrange(len(runnable)) if len(runnable) > 1 else 0
            w = runnable[at]
            w.run(rng.choice(_QUANTA))
            if not w.runnable():
                runnable[at] = runnable[-1]
                runnable.pop()
                if w.live_count:
                    self.sleeping.append(w)
                    self.dirty = True
            if self.steps - self.progress > self.hang_limit:
                self._hung()

    def _async_turn(self, idle: bool) -> bool:
        ready = [key for key, queue in self.queues.items() if queue[0].due <= self.steps]
        if not ready and idle and not self.dirty:
            ready = list(self.queues)
        if not ready:
            return False
        self._complete(self.rng.choice(ready))
        return True

    def _wake(self) -> None:
        for w in [*self.sleeping, *self.runnable]:
            if len(w.fragments) == 1:  # nearly always; and most who wait go on waiting
                only = w.fragments[0].wait
                if only is None or not only.ready():
                    continue
            asleep = not w.runnable()
            for frag in list(w.fragments):
                wait = frag.wait
                if wait is None:
                    continue
                if len(w.fragments) > 1 and wait.gather:
                    w.merge()
                if not wait.ready():
                    continue
                frag.wait = None
                if wait.then is not None:
                    w.frag, w.at = frag, wait.at
                    try:
                        wait.then()
                    except Violation as error:
                        raise w.fault(str(error)) from None
                self.progress = self.steps
                self.trace(w.track, w.instruction_text(wait.at), "wake")
            if asleep and w.runnable():
                self.sleeping.remove(w)
                self.runnable.append(w)

    def _waits(self) -> tuple[list[str], list[str]]:
        lines: list[str] = []
        gathers: list[str] = []
        for w in [*self.sleeping, *self.runnable]:
            for frag in w.fragments:
                w.frag = frag
                if frag.wait is None:
                    lines.append(f"  {w.where(frag.pc)}\n    is running")
                    continue
                wait = frag.wait
                why = wait.why() if callable(wait.why) else wait.why
                lines.append(f"  {w.where(wait.at)}\n    waits for {why}")
                if wait.gather:
                    gathers.append(f"{why}\n  at {w.where(wait.at)}")
        return lines, gathers

    def _stuck(self) -> NoReturn:
        lines, gathers = self._waits()
        if not lines:
            launch = next(launch for launch in self.launches if not launch.finished)
            raise EmulatorFault(
                f"kernel {launch.name}: a cluster of {launch.config.cluster} CTAs with "
                f"{launch.shared_bytes} bytes of shared memory each does not fit on "
                f"{len(self.sms)} SMs; open the device with a larger sm_count"
            )
        head = "deadlock: every warp waits and no asynchronous operation is pending"
        if gathers:
            head = f"deadlock: {gathers[0]}"
        shown = lines[:40]
        if len(lines) > len(shown):
            shown.append(f"  ... and {len(lines) - len(shown)} more")
        raise EmulatorFault(head + "\nwho waits for what:\n" + "\n".join(shown))

    def _hung(self) -> NoReturn:
        lines, _ = self._waits()
        raise EmulatorFault(
            f"no progress: {self.hang_limit} instructions ran and nothing that another warp could "
            "see has changed (raise hang_limit for long computations)\nwho waits for what:\n"
            + "\n".join(lines[:40])
        )

    def _tally(self, launch: Launch) -> None:
        for ins, count in zip(launch.program.instructions, launch.counts, strict=True):
            if count:
                self.counters[f"instructions.{ins.parts[0]}"] += count
                self.counters["instructions"] += count


_PATIENCE = 10_000
"""Instructions without progress after which warps are taken to spin on what a lazy asynchronous
operation will bring, and it completes."""
_QUANTA = (1, 2, 4, 8, 16, 32, 64, 128)
