"""Execution: warps, CTAs and clusters under a seeded scheduler.

A warp is one step object: its registers are numpy rows over 32 lanes, its lanes are split into
*fragments* (lanes at one program counter with one call stack). The scheduler picks a runnable warp
or a pending asynchronous operation at random, so every run with another seed is another legal
interleaving; a program that never gets anywhere is reported with the list of who waits for what.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from fp4rt.device import EmulatorFault, LaunchConfig

from .memory import (
    PARAM_WINDOW,
    SHARED_RESERVED,
    Agent,
    Allocation,
    GlobalMemory,
    Local,
    Shared,
    SyncClock,
    Violation,
)

if TYPE_CHECKING:
    from .program import Program

Mask = Any
"""None (all 32 lanes) or bool[32]."""

FILES = ("pred", "u16", "s16", "f16", "u32", "s32", "f32", "u64", "s64", "f64", "b128")
"""Register files of a warp: the same storage under several dtypes, in the order of `Warp.files`."""

ALL = b"\x01" * 32
NONE = b"\x00" * 32
SHARED_PER_SM = 228 * 1024
POISON32 = 0x7FBADBAD


@dataclass(slots=True)
class Wait:
    """Why a fragment sleeps, when it wakes, and what happens then."""

    why: str | Callable[[], str]
    ready: Callable[[], bool]
    then: Callable[[], None] | None
    at: int
    gather: bool = False


@dataclass(slots=True, eq=False)
class Fragment:
    """Lanes of a warp that share a program counter and a call stack."""

    pc: int
    mask: Mask
    count: int
    frame: Any = None
    wait: Wait | None = None

    def lanes(self) -> Any:
        """Return the lanes as bool[32]."""
        return np.ones(32, bool) if self.mask is None else self.mask


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
    carry_issuer: bool = False
    proxy: str = "async"
    done: bool = False
    done_time: int = 0
    due: float = 0.0
    serial: int = 0
    context: str = ""
    snapshot: SyncClock | None = None
    cluster: Cluster | None = None

    def describe(self) -> str:
        """Return what it is and who issued it."""
        return f"{self.text} (issued by {self.context})"

    def release(self, clock: SyncClock) -> None:
        """Pass "this operation is done" on to `clock`."""
        machine = self.agent.cluster.machine
        if self.carry_issuer and self.snapshot is not None:
            clock.join(self.snapshot)
        clock.known[self.agent.index] = machine.time
        machine.time += 1

    def acquire_by(self, w: Warp) -> None:
        """Order the finished operation before the next step of `w`."""
        index = self.agent.index
        w.agent.known[index] = max(int(w.agent.known[index]), self.done_time)

    def fault(self, message: str) -> EmulatorFault:
        """Return a fault that names the issuing instruction."""
        return EmulatorFault(f"{message}\n  in the asynchronous operation {self.describe()}")


class Warp:
    """32 lanes: registers, fragments, and the surroundings an instruction may ask for."""

    def __init__(self, cta: Cta, index: int) -> None:
        self.cta = cta
        self.cluster: Cluster = cta.cluster
        self.machine: Machine = cta.cluster.machine
        self.launch = cta.launch
        self.program = cta.launch.program
        self.index = index
        self.agent: Agent = self.cluster.agent(("warp", cta.rank, index))
        self.state: dict[Any, Any] = {}
        first = index * 32
        self.thread_count = min(32, cta.threads - first)
        self.live = np.arange(32) < self.thread_count
        self.live_count = self.thread_count
        mask = None if self.thread_count == 32 else self.live.copy()
        self.frag = Fragment(self.program.start, mask, self.thread_count)
        self.fragments = [self.frag]
        self.at = self.program.start
        strict = "uninitialised-local" not in self.machine.allow
        self.local = Local(self.program.local_size, check_valid=strict)
        self.params = Local(self.program.param_size, "call parameter", check_valid=strict)
        self.files = self.program.registers(self)
        self.steps = self.program.steps
        self.written: dict[tuple[str, str], Any] = {}

    # -- what handlers use

    def active(self, m: Mask) -> Any:
        """Return the mask as bool[32]."""
        return np.ones(32, bool) if m is None else m

    def first(self, m: Mask) -> int:
        """Return the lowest active lane."""
        return 0 if m is None else int(m.argmax())

    def lanes(self, m: Mask) -> Any:
        """Return the indices of the active lanes."""
        return _LANES if m is None else np.flatnonzero(m)

    def spin(self) -> bool:
        """Give the other warps a turn after this instruction; return it from the handler."""
        return True

    def block(
        self,
        why: str | Callable[[], str],
        ready: Callable[[], bool],
        then: Callable[[], None] | None = None,
    ) -> bool:
        """Sleep until `ready()`, then call `then()` and go on after this instruction."""
        if ready():
            if then is not None:
                then()
            return False
        self.frag.wait = Wait(why, ready, then, self.at)
        self.machine.trace(self.name, self.instruction_text(self.at), "wait")
        return True

    @property
    def name(self) -> str:
        """Return which warp this is."""
        return f"CTA {self.cta.name} warp {self.index}"

    def where(self, at: int | None = None) -> str:
        """Return where the warp is: kernel, CTA, warp, lanes, PTX line and source line."""
        at = self.at if at is None else at
        ins = self.program.instructions[at]
        mask = self.frag.lanes()
        lanes = sum(1 << int(i) for i in np.flatnonzero(mask))
        source = f", source {ins.source}" if ins.source else ""
        return (
            f"kernel {self.launch.name}, CTA {self.cta.name}, warp {self.index}, lanes "
            f"{lanes:#010x}, PTX line {ins.line}{source}: {ins.text}"
        )

    def fault(self, message: str) -> EmulatorFault:
        """Return a fault for the present instruction."""
        return EmulatorFault(f"{message}\n  at {self.where()}")

    def instruction_text(self, at: int) -> str:
        """Return the opcode at a program counter."""
        return self.program.instructions[at].opcode

    # -- control flow

    def split(self, target: int, taken: Any) -> None:
        """Send the lanes `taken` of the present fragment to `target`."""
        frag = self.frag
        rest = frag.lanes() & ~taken
        count = int(np.count_nonzero(taken))
        other = Fragment(target, taken.copy(), count, frag.frame)
        frag.mask, frag.count = rest, frag.count - count
        self.fragments.append(other)

    def leave(self, m: Mask) -> None:
        """End the lanes `m` of the present fragment."""
        frag = self.frag
        gone = frag.lanes() & self.active(m)
        self.live &= ~gone
        self.live_count = int(np.count_nonzero(self.live))
        frag.mask = frag.lanes() & ~gone
        frag.count = int(np.count_nonzero(frag.mask))
        if not frag.count:
            self.fragments.remove(frag)
        self.machine.poke()
        if not self.live_count:
            self.machine.warp_done(self)

    def gather(self, why: str, ready: Callable[[], bool] | None = None) -> bool:
        """Wait before the present instruction until the warp's other live lanes get here."""
        frag = self.frag
        frag.pc = self.at
        if ready is None:

            def ready() -> bool:
                return frag.count == self.live_count

        frag.wait = Wait(why, ready, None, self.at, gather=True)
        return True

    def merge(self) -> None:
        """Join fragments that are at one place with one call stack."""
        places: dict[tuple[int, Any], Fragment] = {}
        for frag in list(self.fragments):
            if frag.wait is not None and not frag.wait.gather:
                continue
            key = (frag.pc, frag.frame)
            other = places.get(key)
            if other is None:
                places[key] = frag
                continue
            if frag.wait is not None:  # keep the one that waits to be joined
                other, frag = frag, other
                places[key] = other
            mask = other.lanes() | frag.lanes()
            other.count += frag.count
            other.mask = None if other.count == 32 else mask
            self.fragments.remove(frag)
            if other.wait is not None:
                self.machine.poke()

    def runnable(self) -> bool:
        """Whether some fragment can run."""
        return any(frag.wait is None for frag in self.fragments)

    def run(self, budget: int) -> None:
        """Execute up to `budget` instructions of one fragment."""
        if len(self.fragments) > 1:
            self.merge()
        ready = [frag for frag in self.fragments if frag.wait is None]
        if not ready:
            return
        frag = ready[0]
        if len(ready) > 1:
            if self.machine.chance(0.1):
                frag = self.machine.rng.choice(ready)
            else:
                frag = min(ready, key=lambda f: f.pc)
        self.frag = frag
        steps, counts = self.steps, self.launch.counts
        m, pc, left = frag.mask, frag.pc, budget
        try:
            if len(self.fragments) == 1:
                while left:
                    left -= 1
                    counts[pc] += 1
                    self.at = pc
                    frag.pc = pc + 1
                    if steps[pc](self, m):
                        break
                    pc = frag.pc
            else:
                meet = {f.pc for f in self.fragments if f is not frag}
                while left:
                    left -= 1
                    counts[pc] += 1
                    self.at = pc
                    frag.pc = pc + 1
                    if steps[pc](self, m):
                        break
                    pc = frag.pc
                    if pc in meet:
                        break
        except Violation as error:
            raise self.fault(str(error)) from None
        self.machine.steps += budget - left


_LANES = np.arange(32)


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
        size = launch.config.cluster
        warps = -(-int(np.prod(launch.config.block)) // 32)
        self.capacity = len(sms) * (warps + 16) + 16
        self.generic = np.zeros(self.capacity, bool)
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
        more = np.zeros(self.capacity, np.int32)
        self.capacity *= 2
        holders: list[Agent | SyncClock] = [*self.agents, *self.clocks]
        for holder in holders:
            holder.known = np.concatenate([holder.known, more])
            holder.ordered = np.concatenate([holder.ordered, more])
        self.generic = np.concatenate([self.generic, more.astype(bool)])

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
        if offset < SHARED_RESERVED or offset + size > cta.shared.size:
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


class Sm:
    """A multiprocessor: what its resident CTAs share."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.state: dict[Any, Any] = {}
        self.ctas = 0
        self.threads = 0
        self.shared_bytes = 0


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
        (gx, gy, gz), (cx, cy, cz) = self.config.grid, self.config.cluster
        for z in range(0, gz, cz):
            for y in range(0, gy, cy):
                for x in range(0, gx, cx):
                    yield x, y, z

    @property
    def finished(self) -> bool:
        """Whether every CTA has exited."""
        return self.unfinished == 0

    def may_start(self) -> bool:
        """Whether its CTAs may be placed now."""
        before = self.previous
        return before is None or before.finished or before.untriggered == 0


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
        soon as they may), ``"lazy"`` (only when nothing else can run), ``"mixed"`` (one of these
        for each operation).
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
            op.cluster = issuer.cluster
            if op.carry_issuer:
                op.snapshot = issuer.cluster.new_clock()
                issuer.agent.release(op.snapshot)
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
        try:
            with np.errstate(all="ignore"):
                self._place()
                self._loop()
        finally:
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
            if self.queues and self._async_turn(not runnable):
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
                self.trace(w.name, w.instruction_text(wait.at), "wake")
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


_QUANTA = (1, 2, 4, 8, 16, 32, 64, 128)
