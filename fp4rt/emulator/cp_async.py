"""cp.async: non-bulk copies from global to shared memory, and their groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .launch import AsyncOp
from .load_store import memory_address
from .mbarrier import Mbarrier
from .program import Decoder, Getter, Handler, register
from .ptx import Instruction, Reg
from .warp import Mask

if TYPE_CHECKING:
    from .warp import Warp


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
