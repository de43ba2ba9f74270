"""A warp: registers, the fragments its lanes are split into, and what an instruction may ask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fp4rt.device import EmulatorFault

from .clocks import Agent
from .lanes import bits_of
from .memory import Local, Violation

if TYPE_CHECKING:
    from .machine import Cluster, Cta, Machine

Mask = Any
"""None (all 32 lanes) or bool[32]."""

FILES = ("pred", "u16", "s16", "f16", "u32", "s32", "f32", "u64", "s64", "f64", "b128")
"""Register files of a warp: the same storage under several dtypes, in the order of `Warp.files`."""

ALL = b"\x01" * 32
NONE = b"\x00" * 32
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
    """Lanes of a warp that share a program counter and a call stack.

    Until step `held` of the machine, the warp's other fragments go first.
    """

    pc: int
    mask: Mask
    count: int
    frame: Any = None
    wait: Wait | None = None
    held: float = 0.0

    def lanes(self) -> Any:
        """Return the lanes as bool[32]."""
        return np.ones(32, bool) if self.mask is None else self.mask


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """An instruction of a warp and the lanes at it; few are ever shown, so the text comes last."""

    warp: Warp
    at: int
    lanes: Any

    def __str__(self) -> str:
        """Return kernel, CTA, warp, lanes, PTX line and source line."""
        w, ins = self.warp, self.warp.program.instructions[self.at]
        lanes = sum(1 << int(i) for i in np.flatnonzero(self.lanes))
        source = f", source {ins.source}" if ins.source else ""
        return (
            f"kernel {w.launch.name}, CTA {w.cta.name}, warp {w.index}, lanes "
            f"{lanes:#010x}, PTX line {ins.line}{source}: {ins.text}"
        )


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
        # Unoptimised code copies whole objects, with bytes that nobody has written.
        strict = not self.program.module.debug and "uninitialised-local" not in self.machine.allow
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
        if self.machine.tracing:
            what = why() if callable(why) else why
            self.machine.trace(self.track, self.instruction_text(self.at), "wait", what)
        return True

    def acting(self) -> int:
        """Return the bits of the lanes that execute the present instruction; 0 if all live ones."""
        lanes = self.frag.lanes()
        ins = self.program.instructions[self.at]
        if ins.guard is not None:
            register, negated = ins.guard
            name = self.program.owner[self.at].name
            p = self.files[0][self.program.rows.of("pred", (name, register.name))]
            lanes = lanes & (~p if negated else p)
        return 0 if np.count_nonzero(lanes) == self.live_count else bits_of(lanes)

    def note_wait(self) -> None:
        """Remember a griddepcontrol.wait."""
        self.cluster.waits.setdefault(self.agent.index, self.machine.time)

    @property
    def has_waited(self) -> bool:
        """Whether a griddepcontrol.wait, by it or by another warp, is ordered before its work."""
        known = self.agent.known
        return any(time <= known[index] for index, time in self.cluster.waits.items())

    @property
    def name(self) -> str:
        """Return which warp this is."""
        return f"CTA {self.cta.name} warp {self.index}"

    @property
    def track(self) -> str:
        """Return its name in traces, where kernels may overlap."""
        return f"{self.launch.name} {self.name}"

    def where(self, at: int | None = None) -> Place:
        """Return where the warp is."""
        return Place(self, self.at if at is None else at, self.frag.lanes().copy())

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

    def drift(self) -> None:
        """Leave some lanes behind for a while: only synchronisation keeps a warp together."""
        rng, frag = self.machine.rng, self.fragments[0]
        if frag.wait is not None or frag.count < 2:
            return
        lanes = np.flatnonzero(frag.lanes())
        chosen = lanes[: rng.randrange(1, len(lanes))] if rng.random() < 0.5 else lanes[1:]
        if rng.random() < 0.5:
            chosen = np.setdiff1d(lanes, chosen)
        late = np.zeros(32, bool)
        late[chosen] = True
        self.frag = frag
        self.split(frag.pc, late)
        self.fragments[-1].held = self.machine.steps + rng.expovariate(1 / 2000)

    def runnable(self) -> bool:
        """Whether some fragment can run."""
        for frag in self.fragments:  # noqa: SIM110 (a loop is faster)
            if frag.wait is None:
                return True
        return False

    def run(self, budget: int) -> None:
        """Execute up to `budget` instructions of one fragment."""
        if len(self.fragments) > 1:
            self.merge()
        elif self.machine.schedule == "random" and self.machine.chance(_DRIFT):
            self.drift()
        ready = [frag for frag in self.fragments if frag.wait is None]
        if not ready:
            return
        frag = ready[0]
        if len(ready) > 1:
            ready = [f for f in ready if f.held <= self.machine.steps] or ready
            if self.machine.chance(0.1):
                frag = self.machine.rng.choice(ready)
            else:
                frag = min(ready, key=_place)
        self.frag = frag
        self.machine.memory.actor = self
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


def _place(frag: Fragment) -> tuple[int, int]:
    """Return a key that sorts fragments so that those furthest behind come first.

    They meet again as hardware lets them: where branches join, and at the return of a function.
    """
    return (0 if frag.frame is None else -frag.frame.depth), frag.pc


_LANES = np.arange(32)
_DRIFT = 1 / 64
"""How often lanes of a warp drift apart, for each time that a warp is chosen to run."""
