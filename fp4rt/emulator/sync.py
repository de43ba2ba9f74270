"""Barriers of a warp, a CTA and a cluster, and fences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .clocks import SyncClock
from .lanes import bits_of, member
from .program import Decoder, Getter, Handler, register
from .ptx import Instruction, Not
from .warp import Mask

if TYPE_CHECKING:
    from .machine import Cluster
    from .warp import Warp

# ------------------------------------------------------------------------------ CTA barriers


class Phase:
    """One use of a barrier: who has arrived, and what they release."""

    def __init__(self, warps: list[Warp], clock: SyncClock, count: int | None) -> None:
        self.warps, self.clock, self.count = warps, clock, count
        self.arrived: dict[Any, Any] = {}
        self.threads = 0
        self.done = False
        self.last_missing: Warp | None = None  # asked first: a phase is checked at every turn
        self.values: list[tuple[Any, Any]] = []

    def arrive(self, w: Warp, lanes: Any, threads: int) -> None:
        """Add the lanes of a warp, counted as `threads` threads."""
        before = self.arrived.get(w)
        if before is not None:
            lanes = lanes | before
        self.arrived[w] = lanes.copy()
        self.threads += threads

    def check(self) -> bool:
        """Return whether everybody is here."""
        if not self.done:
            if self.count is not None:
                self.done = self.threads >= self.count
            else:
                if self.last_missing is not None and not self._complete(self.last_missing):
                    return False
                self.last_missing = next((w for w in self.warps if not self._complete(w)), None)
                self.done = self.last_missing is None
        return self.done

    def _complete(self, w: Warp) -> bool:
        if not w.live_count:
            return True
        here = self.arrived.get(w)
        return here is not None and 1 not in (w.live & ~here).tobytes()

    def missing(self) -> str:
        """Say who has not arrived."""
        if self.count is not None:
            return f"{self.threads} of {self.count} threads have arrived"
        names = [w.name for w in self.warps if not self._complete(w)]
        return f"not arrived: {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}"


def _phase(w: Warp, index: int, count: int | None, what: str) -> Phase:
    barriers = w.cta.barriers
    phase: Phase | None = barriers.get(index)
    if phase is None or phase.check():
        phase = barriers[index] = Phase(w.cta.warps, w.cluster.new_clock(), count)
    elif phase.count != count:
        raise w.fault(
            f"{what}: barrier {index} is in use with a thread count of "
            f"{phase.count or 'all'}, this warp says {count or 'all'}"
        )
    return phase


@register("bar.sync", "bar.arrive", "bar.red", "bar.cta", "barrier.sync", "barrier.arrive",
          "barrier.red", "barrier.cta")  # fmt: skip
def _bar(ins: Instruction, d: Decoder) -> Handler:
    parts = [p for p in ins.parts if p != "cta"]
    aligned = parts[0] == "bar" or "aligned" in parts
    kind = parts[1]
    ops = list(ins.operands)
    put = None
    if kind == "red":
        put = d.write(ops.pop(0), "u32" if "popc" in parts else "pred")
    index_of = d.read(ops.pop(0), "u32")
    source: Getter | None = None
    flip = False
    if kind == "red":
        last = ops.pop()
        flip = isinstance(last, Not)
        source = d.read(last.operand if isinstance(last, Not) else last, "pred")
    count_of = d.read(ops.pop(0), "u32") if ops else None
    d.need(kind != "arrive" or count_of is not None, "bar.arrive needs a thread count")
    if aligned:
        d.whole_warp(exited=True)
    op = next((p for p in parts if p in ("popc", "and", "or")), "")

    def run(w: Warp, m: Mask) -> Any:
        lane = w.first(m)
        index = int(index_of(w)[lane])
        count = int(count_of(w)[lane]) if count_of is not None else None
        if index > 15:
            raise w.fault(f"barrier {index}: there are 16 barriers, 0 to 15")
        if count is not None and (count == 0 or count % 32):
            raise w.fault(f"barrier {index}: thread count {count} is no multiple of the warp size")
        lanes = w.active(m)
        phase = _phase(w, index, count, ins.opcode)
        n = 32 if aligned or m is None else int(np.count_nonzero(lanes))
        phase.arrive(w, lanes, n)
        if count is not None and phase.threads > count:
            raise w.fault(
                f"barrier {index}: {phase.threads} threads arrive, but its count is {count}"
            )
        if source is not None:
            value = source(w)
            phase.values.append(((~value if flip else value), lanes.copy()))
        w.agent.release(phase.clock)
        w.machine.poke()
        if kind == "arrive":
            return None

        def then() -> None:
            w.agent.acquire(phase.clock)
            if put is not None:
                put(w, _reduce(op, phase.values), m)

        return w.block(lambda: f"barrier {index} ({phase.missing()})", phase.check, then)

    return run


def _reduce(op: str, values: list[tuple[Any, Any]]) -> Any:
    hits = [v[lanes] for v, lanes in values]
    if op == "popc":
        return np.uint32(sum(int(np.count_nonzero(h)) for h in hits))
    if op == "and":
        return all(bool(h.all()) for h in hits)
    return any(bool(h.any()) for h in hits)


@register("bar.warp.sync")
def _bar_warp(ins: Instruction, d: Decoder) -> Handler:
    mask_of = d.read(ins.operands[0], "u32")

    def run(w: Warp, m: Mask) -> Any:
        if m is None:
            w.agent.gather(stores=True)
            return None
        lanes = w.active(m)
        want = int(mask_of(w)[w.first(m)])
        member(w, lanes, want)
        here = w.state.setdefault("bar.warp", {})
        here[want] = here.get(want, 0) | bits_of(lanes)
        mine: list[int] = [0]

        def ready() -> bool:
            if mine[0]:
                return True
            live = bits_of(w.live) & want
            if here.get(want, 0) & live == live:
                mine[0] = 1
                return True
            return False

        token = object()
        waiters = w.state.setdefault("bar.warp.tokens", {}).setdefault(want, [])
        waiters.append((token, mine))
        if ready():
            for _, flag in waiters:
                flag[0] = 1
            waiters.clear()
            here[want] = 0
            if bits_of(w.live) & ~want == 0:
                w.agent.gather(stores=True)
            else:
                w.agent.sync_lanes(want)
            w.machine.poke()
            return None
        return w.block(
            f"the lanes {want:#010x} of its warp at bar.warp.sync (here: {here[want]:#010x})", ready
        )

    return run


# --------------------------------------------------------------------------- cluster barrier


class ClusterBarrier:
    """barrier.cluster of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.warps = [w for cta in cluster.ctas for w in cta.warps]
        self.phase = Phase(self.warps, cluster.new_clock(), None)
        self.waiting: dict[tuple[Any, int], Phase] = {}

    @staticmethod
    def of(cluster: Cluster) -> ClusterBarrier:
        """Return the cluster's barrier."""
        found: ClusterBarrier | None = cluster.state.get("barrier.cluster")
        if found is None:
            found = cluster.state["barrier.cluster"] = ClusterBarrier(cluster)
        return found


@register("barrier.cluster.arrive")
def _cluster_arrive(ins: Instruction, d: Decoder) -> Handler:
    relaxed = "relaxed" in ins.parts
    d.need(set(ins.parts[3:]) <= {"aligned", "release", "relaxed"})
    if "aligned" in ins.parts:
        d.whole_warp(exited=True)

    def run(w: Warp, m: Mask) -> Any:
        barrier = ClusterBarrier.of(w.cluster)
        if barrier.phase.check():
            barrier.phase = Phase(barrier.warps, w.cluster.new_clock(), None)
        phase = barrier.phase
        lanes = w.active(m)
        pending: dict[int, Phase] = w.state.setdefault("cluster.pending", {})
        for lane in w.lanes(m):
            if int(lane) in pending:
                raise w.fault(
                    "barrier.cluster.arrive twice with no barrier.cluster.wait in between"
                )
            pending[int(lane)] = phase
        phase.arrive(w, lanes, int(np.count_nonzero(lanes)))
        if not relaxed:
            w.agent.release(phase.clock)
        w.machine.poke()

    return run


@register("barrier.cluster.wait")
def _cluster_wait(ins: Instruction, d: Decoder) -> Handler:
    d.need(set(ins.parts[3:]) <= {"aligned", "acquire"})
    if "aligned" in ins.parts:
        d.whole_warp(exited=True)

    def run(w: Warp, m: Mask) -> Any:
        pending: dict[int, Phase] = w.state.setdefault("cluster.pending", {})
        lanes = [int(lane) for lane in w.lanes(m)]
        if any(lane not in pending for lane in lanes):
            raise w.fault("barrier.cluster.wait with no barrier.cluster.arrive before it")
        phase = pending[lanes[0]]

        def then() -> None:
            for lane in lanes:
                pending.pop(lane, None)
            w.agent.acquire(phase.clock)

        return w.block(lambda: f"the cluster barrier ({phase.missing()})", phase.check, then)

    return run


# ------------------------------------------------------------------------------------ fences


@register("membar", "fence")
def _fence(ins: Instruction, d: Decoder) -> Handler:
    parts = ins.parts[1:]
    if parts[0] == "proxy":
        kind = parts[1]
        if kind.startswith("async"):
            if kind == "async.global" or (len(parts) > 2 and parts[2] == "global"):
                return lambda w, m: None
            return lambda w, m: w.agent.proxy_fence()
        d.need(kind == "alias" or kind.startswith("tensormap"), f"proxy {kind}")
        return lambda w, m: None
    known = {"cta", "cluster", "gpu", "gl", "sys", "sc", "acq_rel", "acquire", "release"}
    d.need(all(p in known or p.startswith("sync_restrict") for p in parts))
    return lambda w, m: w.agent.fence(0 if m is None else w.acting())
