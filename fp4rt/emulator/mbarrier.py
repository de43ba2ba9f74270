"""mbarrier: the object on which threads and asynchronous operations meet.

A phase completes when no arrival is pending and the transaction count is zero; the object then
starts the next phase with its initial count. State is kept beside shared memory, whose eight
bytes hold a pattern, so that an overwritten object is noticed. Source: PTX ISA, "mbarrier".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .clocks import SyncClock
from .memory import Violation
from .program import Decoder, Handler, register
from .ptx import Instruction, Mem, Sink

if TYPE_CHECKING:
    from .machine import Cta
    from .warp import Mask, Warp


MAX_COUNT = (1 << 20) - 1
PATTERN = np.frombuffer(b"mbarrier", np.uint8)
_TOKEN = 0xB << 60


class Mbarrier:
    """One mbarrier object.

    Attributes
    ----------
    count
        Arrivals that a phase expects.
    pending
        Arrivals still expected in the current phase.
    tx
        Transactions (bytes) expected and not yet complete; negative while completions are ahead
        of the expect_tx that announces them.
    phase
        Number of phases completed so far; its lowest bit is the parity of the current phase.
    clock
        What the arrivals of the current phase release.
    completed
        What a thread that observes the last completed phase acquires.
    """

    def __init__(self, cta: Cta, offset: int, count: int) -> None:
        if not 1 <= count <= MAX_COUNT:
            raise Violation(f"mbarrier.init with count {count}; it must be in 1 .. {MAX_COUNT}")
        self.cta, self.offset = cta, offset
        self.count = self.pending = count
        self.tx = self.phase = 0
        self.clock: SyncClock = cta.cluster.new_clock()
        self.completed: SyncClock = cta.cluster.new_clock()
        self.live = True
        self.init_fenced = False
        self.initialiser: Warp | None = None

    # -- finding

    @staticmethod
    def at(w: Warp, address: int, window: str = "cluster") -> Mbarrier:
        """Return the object at a shared address, checked for use by warp `w`."""
        cta, offset = w.cluster.resolve(w, address, 8, 8, window)
        return Mbarrier.of(w, cta, offset)

    @staticmethod
    def of(w: Warp, cta: Cta, offset: int) -> Mbarrier:
        """Return the object at an offset of a CTA's window, checked for use by warp `w`."""
        found: Mbarrier | None = _table(cta).get(offset)
        if found is None:
            raise Violation(
                f"no mbarrier was initialised at offset {offset:#x} of CTA rank {cta.rank}"
            )
        if not np.array_equal(cta.shared.data[offset : offset + 8], PATTERN):
            raise Violation(f"{found} was overwritten by something else")
        cta.shared.check_sync_object(w, offset)
        return found

    def check_async(self, w: Warp) -> None:
        """Check that an asynchronous operation issued by `w` may signal this object.

        Its initialisation must be visible to the async proxy: ``fence.mbarrier_init`` or
        ``fence.proxy.async`` after ``mbarrier.init``, then a barrier towards other threads.
        """
        if self.init_fenced or "unfenced-mbarrier-init" in w.machine.allow:
            return
        shared = self.cta.shared
        try:
            where = slice(self.offset, self.offset + 8)
            shared.check(w.agent, lambda array: array[where], False, "async")
        except Violation:
            raise Violation(
                f"an asynchronous operation signals {self}, whose mbarrier.init is not fenced: "
                "put fence.mbarrier_init.release.cluster (or fence.proxy.async) after it"
            ) from None

    def __str__(self) -> str:
        return f"mbarrier at +{self.offset:#x} of CTA rank {self.cta.rank}"

    def describe(self) -> str:
        """Say what the object waits for."""
        tx = f", {self.tx} bytes" if self.tx else ""
        return (
            f"{self} (phase {self.phase}, parity {self.phase & 1}; {self.pending} of {self.count} "
            f"arrivals{tx} pending)"
        )

    # -- changing

    def check_live(self) -> None:
        """Raise if the object was invalidated."""
        if not self.live:
            raise Violation(f"{self} is used after mbarrier.inval")

    def reserve(self) -> None:
        """Expect one arrival more in this phase (cp.async.mbarrier.arrive without .noinc)."""
        self.check_live()
        if self.pending == MAX_COUNT:
            raise Violation(f"{self}: pending count exceeds {MAX_COUNT}")
        self.pending += 1

    def arrive(self, count: int = 1, *, drop: bool = False, complete: bool = True) -> int:
        """Arrive `count` times; return the state token of the phase before.

        Parameters
        ----------
        count
            Number of arrivals, at least 1.
        drop
            Also lower the count of later phases (arrive_drop).
        complete
            False for ``.noComplete``: the arrival must not complete the phase.
        """
        self.check_live()
        token = self.token()
        if not 1 <= count <= MAX_COUNT:
            raise Violation(f"{self}: arrival count {count}; it must be in 1 .. {MAX_COUNT}")
        if count > self.pending:
            raise Violation(
                f"{self}: {count} arrivals with {self.pending} pending of {self.count} in phase "
                f"{self.phase}; more arrivals than mbarrier.init announced"
            )
        self.pending -= count
        if drop:
            self.count -= count
        if not complete and self.pending == 0 and self.tx == 0:
            raise Violation(f"{self}: an arrival with .noComplete completes phase {self.phase}")
        if self.pending == 0 and self.tx < 0:
            raise Violation(
                f"{self}: all arrivals of phase {self.phase} are in, but {-self.tx} more bytes "
                "were completed than expect_tx announced"
            )
        self._advance()
        return token

    noinc_arrive = arrive

    def expect_tx(self, count: int) -> None:
        """Expect `count` more transactions in the current phase."""
        self.check_live()
        if not 0 <= count <= MAX_COUNT or self.tx + count > MAX_COUNT:
            raise Violation(
                f"{self}: expect_tx of {count} bytes with {self.tx} expected; the transaction "
                f"count must stay within {MAX_COUNT}"
            )
        self.tx += count

    def complete_tx(self, count: int) -> None:
        """Complete `count` transactions."""
        self.check_live()
        self.tx -= count
        if self.tx < -MAX_COUNT:
            raise Violation(f"{self}: transaction count {self.tx} is below -{MAX_COUNT}")
        if self.tx < 0 and self.pending == 0:
            raise Violation(
                f"{self}: {-self.tx} more bytes completed in phase {self.phase} than expect_tx "
                "announced"
            )
        self._advance()

    def _advance(self) -> None:
        if self.pending == 0 and self.tx == 0:
            self.phase += 1
            self.pending = self.count
            self.completed.join(self.clock)
            self.cta.machine.poke()
            self.cta.machine.trace(str(self), f"phase {self.phase - 1}", "i")

    # -- asking

    def token(self) -> int:
        """Return the opaque 64-bit state."""
        return _TOKEN | (self.phase & 0xFFFFFFFF) << 20 | self.pending

    def done_parity(self, parity: int) -> bool:
        """Whether the phase of this parity has completed (the current phase has not)."""
        return (self.phase & 1) != (parity & 1)

    def done_token(self, token: int) -> bool:
        """Whether the phase in which `token` was made has completed."""
        self.check_live()
        if token >> 60 != 0xB:
            raise Violation(f"{self}: {token:#018x} is no state that an mbarrier.arrive returned")
        behind = (self.phase - (token >> 20)) & 0xFFFFFFFF
        if behind > 1:
            raise Violation(
                f"{self}: the state belongs to phase {token >> 20 & 0xFFFFFFFF} and the current "
                f"phase is {self.phase}; only the current and the preceding phase can be tested"
            )
        return behind == 1


def _table(cta: Cta) -> dict[int, Mbarrier]:
    table: dict[int, Mbarrier] = cta.state.setdefault("mbarriers", {})
    return table


# ------------------------------------------------------------------------------- instructions


def _semantics(ins: Instruction, d: Decoder, default: str) -> bool:
    """Return whether the instruction orders memory: anything but ``.relaxed``."""
    for part in ins.parts[2:]:
        if part in ("release", "acquire") and part != default:
            raise d.unsupported(f".{part} on this instruction")
    return "relaxed" not in ins.parts


@register("mbarrier.init")
def _init(ins: Instruction, d: Decoder) -> Handler:
    address = d.shared_address(ins.operands[0])
    count = d.read(ins.operands[1], "u32")

    def run(w: Warp, m: Mask) -> None:
        for lane in w.lanes(m):
            cta, offset = w.cluster.resolve(w, int(address(w)[lane]), 8, 8, "cta")
            old = _table(cta).get(offset)
            if old is not None:
                raise Violation(f"mbarrier.init over the live {old}; mbarrier.inval it first")
            cta.shared.write_bytes(w, slice(offset, offset + 8), PATTERN)
            new = _table(cta)[offset] = Mbarrier(cta, offset, int(count(w)[lane]))
            new.initialiser = w

    return run


@register("mbarrier.inval")
def _inval(ins: Instruction, d: Decoder) -> Handler:
    address = d.shared_address(ins.operands[0])

    def run(w: Warp, m: Mask) -> None:
        for lane in w.lanes(m):
            old = Mbarrier.at(w, int(address(w)[lane]), "cta")
            old.live = False
            del _table(old.cta)[old.offset]
            old.cta.shared.write_bytes(w, slice(old.offset, old.offset + 8), 0xCB)
            old.cta.shared.valid[old.offset : old.offset + 8] = 0

    return run


@register("fence.mbarrier_init")
def _fence_init(ins: Instruction, d: Decoder) -> Handler:
    """Make this thread's mbarrier.init visible to the async proxy and to the cluster."""

    def run(w: Warp, m: Mask) -> None:
        for found in _table(w.cta).values():
            if found.initialiser is w:
                found.init_fenced = True

    return run


@register("mbarrier.arrive", "mbarrier.arrive_drop")
def _arrive(ins: Instruction, d: Decoder) -> Handler:
    parts = ins.parts
    drop = parts[1] == "arrive_drop"
    expect = "expect_tx" in parts
    complete = "noComplete" not in parts
    ordering = _semantics(ins, d, "release")
    operands = list(ins.operands)
    state = None
    if not isinstance(operands[0], Mem):
        if not isinstance(operands[0], Sink):
            state = d.write(operands[0], "u64")
        operands.pop(0)
    address = d.shared_address(operands[0])
    amount = d.read(operands[1], "u32") if len(operands) > 1 else None
    window = "cluster" if "shared::cluster" in parts else "cta"

    def run(w: Warp, m: Mask) -> None:
        where = address(w)
        values = amount(w) if amount is not None else None
        tokens = np.zeros(32, np.uint64)
        for lane in w.lanes(m):
            bar = Mbarrier.at(w, int(where[lane]), window)
            if state is not None and bar.cta is not w.cta:
                raise Violation(f"mbarrier.arrive on the remote {bar} cannot return a state")
            w.agent.strong_write(bar.clock, ordering, 1 << int(lane))
            value = 1 if values is None else int(values[lane])
            if expect:
                bar.expect_tx(value)
                value = 1
            tokens[lane] = bar.arrive(value, drop=drop, complete=complete)
        if state is not None:
            state(w, tokens, m)
        w.machine.poke()

    return run


@register("mbarrier.expect_tx", "mbarrier.complete_tx")
def _tx(ins: Instruction, d: Decoder) -> Handler:
    address = d.shared_address(ins.operands[0])
    amount = d.read(ins.operands[1], "u32")
    expect = ins.parts[1] == "expect_tx"

    def run(w: Warp, m: Mask) -> None:
        for lane in w.lanes(m):
            bar = Mbarrier.at(w, int(address(w)[lane]))
            count = int(amount(w)[lane])
            bar.expect_tx(count) if expect else bar.complete_tx(count)

    return run


@register("mbarrier.pending_count")
def _pending_count(ins: Instruction, d: Decoder) -> Handler:
    result = d.write(ins.operands[0], "u32")
    state = d.read(ins.operands[1], "u64")

    def run(w: Warp, m: Mask) -> None:
        tokens = state(w)
        for lane in w.lanes(m):
            if int(tokens[lane]) >> 60 != 0xB:
                raise Violation(f"{int(tokens[lane]):#018x} is no mbarrier state")
        result(w, (tokens & np.uint64(MAX_COUNT)).astype(np.uint32), m)

    return run


@register("mbarrier.test_wait", "mbarrier.try_wait")
def _wait(ins: Instruction, d: Decoder) -> Handler:
    """Test a phase; try_wait may sleep until it completes, and sometimes gives up early."""
    blocking = ins.parts[1] == "try_wait"
    by_parity = "parity" in ins.parts
    ordering = _semantics(ins, d, "acquire")
    result = d.write(ins.operands[0], "pred")
    address = d.shared_address(ins.operands[1])
    wanted = d.read(ins.operands[2], "u32" if by_parity else "u64")

    def run(w: Warp, m: Mask) -> bool:
        where, values = address(w).tolist(), wanted(w).tolist()
        groups: dict[tuple[int, int], list[int]] = {}
        for lane in w.lanes(m):
            groups.setdefault((where[lane], values[lane]), []).append(lane)
        waits = [(lanes, Mbarrier.at(w, at, "cta"), v) for (at, v), lanes in groups.items()]

        def done(bar: Mbarrier, value: int) -> bool:
            return bar.done_parity(value) if by_parity else bar.done_token(value)

        def finish() -> None:
            passed = np.zeros(32, bool)
            for lanes, bar, value in waits:
                bar.check_live()
                if done(bar, value):
                    passed[lanes] = True
                    if ordering:
                        w.agent.acquire(bar.completed)
            result(w, passed, m)

        def ready() -> bool:
            for _, bar, value in waits:  # noqa: SIM110 (a loop is faster)
                if not bar.live or done(bar, value):
                    return True
            return False

        def why() -> str:
            return " and ".join(
                dict.fromkeys(
                    f"{bar.describe()}"
                    + (f" with parity {value & 1}" if by_parity else " with a state")
                    for _, bar, value in waits
                )
            )

        if not blocking or w.machine.chance(0.05):
            finish()
            return w.spin()
        return w.block(why, ready, finish)

    return run
