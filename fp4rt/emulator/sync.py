"""Synchronisation and warp-wide instructions: barriers, fences, shuffles, votes, cp.async."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from .clocks import SyncClock
from .launch import AsyncOp
from .load_store import memory_address
from .mbarrier import Mbarrier
from .program import Decoder, Getter, Handler, register
from .ptx import Instruction, Not, Operand, Pair, Reg, Sink
from .warp import Fragment, Mask

if TYPE_CHECKING:
    from .machine import Cluster
    from .warp import Warp

_BITS = np.uint32(1) << np.arange(32, dtype=np.uint32)
FULL = 0xFFFFFFFF


def bits_of(mask: Any) -> int:
    """Return bool[32] as an integer."""
    return int(np.packbits(mask, bitorder="little").view("<u4")[0])


def lanes_of(bits: int) -> Any:
    """Return an integer as bool[32]."""
    return (np.uint32(bits) & _BITS) != 0


# ------------------------------------------------------------------------------ CTA barriers


class Phase:
    """One use of a barrier: who has arrived, and what they release."""

    def __init__(self, warps: list[Warp], clock: SyncClock, count: int | None) -> None:
        self.warps, self.clock, self.count = warps, clock, count
        self.arrived: dict[Any, Any] = {}
        self.threads = 0
        self.done = False
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
                self.done = all(self._complete(w) for w in self.warps)
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
            return None
        lanes = w.active(m)
        want = int(mask_of(w)[w.first(m)])
        _member(w, lanes, want)
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
            w.machine.poke()
            return None
        return w.block(
            f"the lanes {want:#010x} of its warp at bar.warp.sync (here: {here[want]:#010x})", ready
        )

    return run


def _member(w: Warp, lanes: Any, want: int) -> None:
    outside = bits_of(lanes) & ~want
    if outside:
        raise w.fault(
            f"lanes {outside:#010x} execute a .sync instruction whose membermask {want:#010x} does "
            "not name them"
        )


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
    return lambda w, m: w.agent.fence()


# --------------------------------------------------------------------- shuffles, votes, match


Groups = list[tuple[Any, int]]


def _all_here(w: Warp, frag: Fragment, want: int) -> bool:
    return (want & bits_of(w.live) & ~bits_of(frag.lanes())) == 0


def _membership(d: Decoder, op: Operand) -> Callable[[Any, Mask], Groups | bool]:
    """Return a function giving (lanes, membermask) groups, or True if the warp must wait."""
    mask_of = d.read(op, "u32")

    def groups(w: Warp, m: Mask) -> Groups | bool:
        masks = mask_of(w)
        if m is None:
            first = int(masks[0])
            if first == FULL and bool((masks == np.uint32(FULL)).all()):
                return [(np.ones(32, bool), FULL)]
        active = w.active(m)
        found: Groups = []
        left = active.copy()
        while left.any():
            want = int(masks[left.argmax()])
            lanes = active & (masks == np.uint32(want))
            left &= ~lanes
            _member(w, lanes, want)
            missing = want & bits_of(w.live) & ~bits_of(lanes)
            if missing:
                frag = w.frag
                here = bits_of(frag.lanes())
                if missing & here:
                    raise w.fault(
                        f"membermask {want:#010x} names lanes {missing & here:#010x}, which do "
                        "not execute the instruction with that mask"
                    )
                name = w.instruction_text(w.at)
                why = f"lanes {missing:#010x}, which its membermask {want:#010x} names, at {name}"
                return w.gather(why, partial(_all_here, w, frag, want))
            found.append((lanes, want))
        return found

    return groups


@register("shfl.sync")
def _shfl(ins: Instruction, d: Decoder) -> Handler:
    mode = ins.parts[2]
    d.need(mode in ("up", "down", "bfly", "idx") and ins.parts[-1] == "b32")
    dst, a, b, c, mask = ins.operands
    first, second = (dst.first, dst.second) if isinstance(dst, Pair) else (dst, Sink())
    put, put_pred = d.write(first, "b32"), d.write(second, "pred")
    source, lane_arg, clamp_arg = d.read(a, "b32"), d.read(b, "b32"), d.read(c, "b32")
    member = _membership(d, mask)
    lane = np.arange(32)

    def run(w: Warp, m: Mask) -> Any:
        groups = member(w, m)
        if groups is True:
            return True
        bval = (lane_arg(w) & np.uint32(31)).astype(np.int64)
        cval = clamp_arg(w).astype(np.int64)
        segment, clamp = (cval >> 8) & 31, cval & 31
        top = (lane & segment) | (clamp & ~segment & 31)
        low = lane & segment
        if mode == "up":
            j = lane - bval
            ok = j >= top
        elif mode == "down":
            j = lane + bval
            ok = j <= top
        elif mode == "bfly":
            j = lane ^ bval
            ok = j <= top
        else:
            j = low | (bval & ~segment & 31)
            ok = j <= top
        j = np.where(ok, j, lane) & 31
        values = source(w)[j]
        assert isinstance(groups, list)
        for lanes, _ in groups:
            # A lane that does not take part gives an undefined value.
            values = np.where(lanes & ~lanes[j], np.uint32(0x7FBADBAD), values)
        put(w, values, m)
        put_pred(w, ok, m)
        return None

    return run


@register("vote.sync")
def _vote(ins: Instruction, d: Decoder) -> Handler:
    mode = ins.parts[2]
    dst, a, mask = ins.operands
    flip = isinstance(a, Not)
    get = d.read(a.operand if isinstance(a, Not) else a, "pred")
    put = d.write(dst, "b32" if mode == "ballot" else "pred")
    member = _membership(d, mask)

    def run(w: Warp, m: Mask) -> Any:
        groups = member(w, m)
        if groups is True:
            return True
        assert isinstance(groups, list)
        value = ~get(w) if flip else get(w)
        for lanes, _ in groups:
            mine = value[lanes]
            if mode == "ballot":
                out: Any = np.uint32(bits_of(value & lanes))
            elif mode == "all":
                out = bool(mine.all())
            elif mode == "any":
                out = bool(mine.any())
            else:
                out = bool(mine.all() or not mine.any())
            put(w, out, None if lanes.all() else lanes)
        return None

    return run


@register("match.any.sync", "match.all.sync")
def _match(ins: Instruction, d: Decoder) -> Handler:
    everyone = ins.parts[1] == "all"
    dst, a, mask = ins.operands
    first, second = (dst.first, dst.second) if isinstance(dst, Pair) else (dst, Sink())
    put, put_pred = d.write(first, "b32"), d.write(second, "pred")
    get = d.read(a, ins.parts[-1])
    member = _membership(d, mask)

    def run(w: Warp, m: Mask) -> Any:
        groups = member(w, m)
        if groups is True:
            return True
        assert isinstance(groups, list)
        values = get(w)
        out = np.zeros(32, np.uint32)
        same = np.zeros(32, bool)
        for lanes, _ in groups:
            if everyone:
                equal = bool((values[lanes] == values[lanes.argmax()]).all())
                out[lanes] = bits_of(lanes) if equal else 0
                same[lanes] = equal
            else:
                for value in np.unique(values[lanes]):
                    hit = lanes & (values == value)
                    out[hit] = bits_of(hit)
        put(w, out, m)
        put_pred(w, same, m)
        return None

    return run


@register("redux.sync")
def _redux(ins: Instruction, d: Decoder) -> Handler:
    op, type_ = ins.parts[2], ins.parts[-1]
    dst, a, mask = ins.operands
    get, put = d.read(a, type_), d.write(dst, type_)
    member = _membership(d, mask)
    table: dict[str, Callable[[Any], Any]] = {
        "add": lambda v: np.add.reduce(v, dtype=v.dtype),
        "min": np.min,
        "max": np.max,
        "and": np.bitwise_and.reduce,
        "or": np.bitwise_or.reduce,
        "xor": np.bitwise_xor.reduce,
    }
    fn = table[op]
    if type_ == "f32":
        nan = "NaN" in ins.parts
        pick: Any = {
            "min": np.min if nan else np.fmin.reduce,
            "max": np.max if nan else np.fmax.reduce,
        }
        fn = pick[op]
    absolute = "abs" in ins.parts

    def run(w: Warp, m: Mask) -> Any:
        groups = member(w, m)
        if groups is True:
            return True
        assert isinstance(groups, list)
        values = np.abs(get(w)) if absolute else get(w)
        for lanes, _ in groups:
            put(w, fn(values[lanes]), None if lanes.all() else lanes)
        return None

    return run


@register("elect.sync")
def _elect(ins: Instruction, d: Decoder) -> Handler:
    dst, mask = ins.operands
    assert isinstance(dst, Pair)
    put, put_pred = d.write(dst.first, "b32"), d.write(dst.second, "pred")
    member = _membership(d, mask)

    def run(w: Warp, m: Mask) -> Any:
        groups = member(w, m)
        if groups is True:
            return True
        assert isinstance(groups, list)
        for lanes, _ in groups:
            leader = int(lanes.argmax())  # the lowest lane, as measured on hardware
            chosen = np.zeros(32, bool)
            chosen[leader] = True
            where = None if lanes.all() else lanes
            put(w, np.uint32(leader), where)
            put_pred(w, chosen, where)
        return None

    return run


@register("activemask")
def _activemask(ins: Instruction, d: Decoder) -> Handler:
    put = d.write(ins.operands[0], "b32")
    return lambda w, m: put(w, np.uint32(bits_of(w.active(m))), m)


# ---------------------------------------------------------------------------------- cp.async


class CopyGroups:
    """The non-bulk asynchronous copies of one warp."""

    def __init__(self) -> None:
        self.open: list[tuple[AsyncOp, Any]] = []
        self.groups: list[tuple[list[AsyncOp], Any]] = []

    @staticmethod
    def of(w: Warp) -> CopyGroups:
        """Return the warp's groups."""
        found: CopyGroups | None = w.state.get("cp.async")
        if found is None:
            found = w.state["cp.async"] = CopyGroups()
        return found


@register("cp.async.ca", "cp.async.cg")
def _cp_async(ins: Instruction, d: Decoder) -> Handler:
    from .load_store import _Modifiers

    level = ins.parts[2]
    dst, src, size_op, *rest = ins.operands
    size = d.constant(size_op)
    d.need(size in ((4, 8, 16) if level == "ca" else (16,)), f"cp-size {size}")
    hint = "L2::cache_hint" in ins.parts
    if hint:
        rest.pop()
    src_size: Getter | None = None
    ignore: Getter | None = None
    if rest:
        if isinstance(rest[0], Reg) and rest[0].type == "pred":
            ignore = d.read(rest[0], "pred")
        else:
            src_size = d.read(rest[0], "u32")
    to = d.shared_address(dst)
    mods = _Modifiers(d, ("global", "b32"))
    origin = memory_address(d, src, mods)

    def run(w: Warp, m: Mask) -> None:
        lanes = w.lanes(m)
        memory = w.machine.memory
        targets, sources = to(w)[lanes], origin(w)[lanes]
        counts = np.full(len(lanes), size)
        if src_size is not None:
            counts = src_size(w)[lanes].astype(np.int64)
            if (counts > size).any():
                raise w.fault(f"cp.async with src-size {counts.max()} above cp-size {size}")
        if ignore is not None:
            counts = np.where(ignore(w)[lanes], 0, counts)
        if (sources[counts > 0] % np.uint64(size) != 0).any():
            raise w.fault(f"cp.async source address is no multiple of {size}")
        offsets = []
        for target in targets:
            offsets.append(w.cluster.resolve(w, int(target), size, size, "cta")[1])
        where = (np.array(offsets)[:, None] + np.arange(size)).reshape(-1)
        for source, count in zip(sources, counts, strict=True):
            if count:
                memory.find(int(source), int(count))
        shared = w.cta.shared

        def move(op: AsyncOp) -> None:
            block = np.zeros((len(lanes), size), np.uint8)
            for n in np.unique(counts[counts > 0]):
                pick = counts == n
                block[pick, :n] = memory.gather(None, sources[pick], int(n))
            shared.data[where] = block.reshape(-1)

        op = AsyncOp(
            kind="cp.async",
            text=f"{ins.opcode} {len(lanes)} x {size} bytes",
            issuer=w,
            agent=w.cluster.agent(("cp.async", w.cta.rank, w.index), f"cp.async of {w.name}"),
            queue=("cp.async", id(w)),
            writes=[(shared, where)],
            run=move,
            proxy="",
        )
        w.machine.submit(op)
        w.machine.count("bytes.cp.async", int(counts.sum()))
        CopyGroups.of(w).open.append((op, w.active(m).copy()))

    return run


@register("cp.async.commit_group")
def _commit_group(ins: Instruction, d: Decoder) -> Handler:
    def run(w: Warp, m: Mask) -> None:
        groups = CopyGroups.of(w)
        lanes = w.active(m)
        mine = [op for op, mask in groups.open if (mask & lanes).any()]
        groups.open = [(op, mask) for op, mask in groups.open if not (mask & lanes).any()]
        groups.groups.append((mine, lanes.copy()))

    return run


@register("cp.async.wait_group", "cp.async.wait_all")
def _wait_group(ins: Instruction, d: Decoder) -> Handler:
    everything = ins.parts[2] == "wait_all"
    allowed = 0 if everything else d.constant(ins.operands[0])

    def run(w: Warp, m: Mask) -> Any:
        groups = CopyGroups.of(w)
        lanes = w.active(m)
        newer = np.zeros(32, int)
        ops: list[AsyncOp] = []
        for members, mask in reversed(groups.groups):
            hit = mask & lanes
            if (hit & (newer >= allowed)).any():
                ops.extend(members)
            newer += hit
        if everything:
            ops.extend(op for op, mask in groups.open if (mask & lanes).any())

        def then() -> None:
            for op in ops:
                op.acquire_by(w)
            if len(groups.groups) > 64:  # the oldest are done and waited for
                while groups.groups and all(op.done for op in groups.groups[0][0]):
                    groups.groups.pop(0)

        return w.block(
            lambda: f"{sum(not op.done for op in ops)} cp.async copies",
            lambda: all(op.done for op in ops),
            then,
        )

    return run


@register("cp.async.mbarrier.arrive")
def _cp_async_arrive(ins: Instruction, d: Decoder) -> Handler:
    keep = "noinc" in ins.parts
    address = d.shared_address(ins.operands[0])

    def run(w: Warp, m: Mask) -> None:
        lanes = w.lanes(m)
        where = address(w)[lanes]
        agent = w.cluster.agent(("cp.async", w.cta.rank, w.index), f"cp.async of {w.name}")
        for target in np.unique(where):
            barrier = Mbarrier.at(w, int(target))
            count = int(np.count_nonzero(where == target))
            if not keep:
                for _ in range(count):
                    barrier.reserve()

            def arrive(op: AsyncOp, barrier: Mbarrier = barrier, count: int = count) -> None:
                op.release(barrier.clock)
                barrier.arrive(count)

            w.machine.submit(
                AsyncOp(
                    kind="cp.async arrive",
                    text=ins.opcode,
                    issuer=w,
                    agent=agent,
                    queue=("cp.async", id(w)),
                    run=arrive,
                    carry_issuer=True,
                )
            )

    return run
