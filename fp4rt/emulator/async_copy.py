"""Bulk copies: what all have in common, and the one-dimensional ones (see `tensor_copy`).

Every copy is an `AsyncOp`: it is checked when it is issued, moves its bytes when the scheduler
chooses, and then signals an mbarrier (loads) or counts as done in its bulk group (stores). A store
has two steps, reading shared memory and writing global memory, because ``wait_group.read`` waits
for the first only. Source: PTX ISA, "cp.async.bulk" and "cp.async.bulk.tensor".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .launch import AsyncOp
from .mbarrier import Mbarrier
from .memory import Violation
from .program import Decoder, Handler, register
from .ptx import Instruction

if TYPE_CHECKING:
    from .machine import Cta
    from .warp import Mask, Warp


_REDUCE_TYPES: dict[str, Any] = {
    "u32": np.uint32, "b32": np.uint32, "s32": np.int32, "u64": np.uint64, "b64": np.uint64,
    "s64": np.int64, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32,
    "f64": np.float64, "uint8": np.uint8, "uint16": np.uint16, "uint32": np.uint32,
    "int32": np.int32, "uint64": np.uint64, "int64": np.int64, "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64,
}  # fmt: skip
REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")


def reduce_bytes(
    operation: str, dtype: str, old: NDArray[np.uint8], new: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    """Return ``old operation new`` element by element, as bytes.

    Parameters
    ----------
    operation
        ``"add"``, ``"min"``, ``"max"``, ``"inc"``, ``"dec"``, ``"and"``, ``"or"``, ``"xor"``.
    dtype
        A PTX type or a tensor map's element type.
    """
    if dtype not in _REDUCE_TYPES:
        raise Violation(f"reduction on elements of type {dtype} is not emulated")
    kind = _REDUCE_TYPES[dtype]
    a = np.ascontiguousarray(old).view(kind)
    b = np.ascontiguousarray(new).view(kind)
    if operation in ("and", "or", "xor", "inc", "dec") and np.dtype(kind).kind not in "ui":
        raise Violation(f"reduction .{operation} does not exist for type {dtype}")
    with np.errstate(over="ignore", invalid="ignore"):
        if operation == "add":
            result = a + b
        elif operation in ("min", "max"):
            result = np.fmin(a, b) if operation == "min" else np.fmax(a, b)
        elif operation == "inc":
            result = np.where(a >= b, 0, a + 1)
        elif operation == "dec":
            result = np.where((a == 0) | (a > b), b, a - 1)
        else:
            ufunc = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
            result = ufunc[operation](a, b)
    return np.ascontiguousarray(result.astype(kind)).view(np.uint8).reshape(np.shape(old))


# ------------------------------------------------------------------------------- bulk groups


class Store:
    """A copy out of shared memory: done reading, then done altogether."""

    def __init__(self) -> None:
        self.read: AsyncOp | None = None
        self.read_done = False
        self.done = False


class BulkGroups:
    """The bulk groups of one thread."""

    def __init__(self) -> None:
        self.open: list[Store] = []
        self.committed: deque[list[Store]] = deque()

    @staticmethod
    def of(w: Warp, lane: int) -> BulkGroups:
        """Return the groups of a lane of `w`."""
        key = ("bulk groups", lane)
        found: BulkGroups | None = w.state.get(key)
        if found is None:
            found = w.state[key] = BulkGroups()
        return found


def submit_store(
    w: Warp,
    lane: int,
    kind: str,
    text: str,
    reads: list[tuple[Any, Any]],
    collect: Callable[[], Any],
    write: Callable[[Any], None],
) -> None:
    """Queue a copy out of shared memory: `collect` reads it, `write` changes its destination."""
    store = Store()
    agent = w.cluster.agent(
        ("bulk store", w.cta.rank, w.index, lane),
        f"bulk stores of warp {w.index} lane {lane}, CTA rank {w.cta.rank}",
    )
    machine = w.machine

    def second(data: Any) -> Callable[[AsyncOp], None]:
        def run(op: AsyncOp) -> None:
            write(data)
            store.done = True

        return run

    def first(op: AsyncOp) -> None:
        data = collect()
        store.read_done = True
        machine.submit(AsyncOp(kind, text, None, agent, second(data), context=op.context))

    store.read = AsyncOp(kind, text, w, agent, first, reads=reads)
    machine.submit(store.read)
    BulkGroups.of(w, lane).open.append(store)


@register("cp.async.bulk.commit_group")
def _commit_group(ins: Instruction, d: Decoder) -> Handler:
    def run(w: Warp, m: Mask) -> None:
        for lane in w.lanes(m):
            groups = BulkGroups.of(w, int(lane))
            groups.committed.append(groups.open)
            groups.open = []

    return run


@register("cp.async.bulk.wait_group")
def _wait_group(ins: Instruction, d: Decoder) -> Handler:
    left = d.constant(ins.operands[0])
    read_only = "read" in ins.parts

    def run(w: Warp, m: Mask) -> Any:
        waited = [
            store
            for lane in w.lanes(m)
            for group in list(BulkGroups.of(w, int(lane)).committed)[: -left or None]
            for store in group
        ]

        def ready() -> bool:
            return all(s.read_done if read_only else s.done for s in waited)

        def then() -> None:
            for store in waited:
                assert store.read is not None
                store.read.acquire_by(w)
            for lane in w.lanes(m):
                groups = BulkGroups.of(w, int(lane)).committed
                while groups and all(s.done for s in groups[0]):
                    groups.popleft()

        return w.block(f"all but {left} bulk groups{' to be read' * read_only}", ready, then)

    return run


# ---------------------------------------------------------------------------------- signals


def _signal_rank(dest: int, bar_rank: int, pair: bool) -> int:
    """Return the CTA whose mbarrier a copy into CTA `dest` signals.

    Without ``.cta_group::2`` it is the destination's own; with it the one of the destination's
    pair that has the parity of the given mbarrier's CTA (inferred for multicast).
    """
    return (dest & ~1) | (bar_rank & 1) if pair else dest


def targets(
    w: Warp, cta: Cta, bar_address: int, mask: int | None, pair: bool
) -> list[tuple[Cta, Mbarrier]]:
    """Return destination CTAs and their mbarriers of a load."""
    bar_cta, bar_offset = w.cluster.resolve(w, bar_address, 8, 8)
    ctas = w.cluster.ctas
    if mask is None:
        ranks = [cta.rank]
    else:
        if mask == 0 or mask >> len(ctas):
            raise Violation(
                f"multicast mask {mask:#06x} in a cluster of {len(ctas)} CTAs; its bits are ranks"
            )
        ranks = [rank for rank in range(len(ctas)) if mask >> rank & 1]
    if mask is None and not pair and bar_cta is not cta:
        raise Violation(
            f"the mbarrier is in CTA rank {bar_cta.rank} and the destination in rank {cta.rank}; "
            "both must be in one CTA (or use .cta_group::2 with its pair)"
        )
    if mask is None and pair and bar_cta.rank ^ cta.rank not in (0, 1):
        raise Violation(
            f"the mbarrier is in CTA rank {bar_cta.rank}, which is no pair of the destination's "
            f"rank {cta.rank}"
        )
    result = []
    for rank in ranks:
        if not ctas[rank].live_warps:
            raise Violation(f"copy into shared memory of CTA rank {rank}, which has exited")
        bar = Mbarrier.of(w, ctas[_signal_rank(rank, bar_cta.rank, pair)], bar_offset)
        bar.check_async(w)
        result.append((ctas[rank], bar))
    return result


def submit_load(
    w: Warp,
    kind: str,
    text: str,
    bar: Mbarrier,
    nbytes: int,
    run: Callable[[], None],
    writes: list[tuple[Any, Any]],
    reads: list[tuple[Any, Any]] | None = None,
) -> None:
    """Queue a copy into shared memory that completes on an mbarrier.

    `run` moves the bytes; `nbytes` is what complete_tx counts; `writes` and `reads` are the
    shared-memory footprints.
    """
    agent = w.cluster.agent(("tma", bar.cta.rank, bar.offset), f"copies that complete on the {bar}")

    def complete(op: AsyncOp) -> None:
        run()
        op.release(bar.clock)
        bar.complete_tx(nbytes)

    text = f"{text}, {nbytes} bytes -> CTA rank {writes[0][0].rank}"
    w.machine.submit(AsyncOp(kind, text, w, agent, complete, reads=reads or [], writes=writes))
    w.machine.count(f"bytes.{kind}", nbytes)


# ----------------------------------------------------------------------- one-dimensional copies


def _check_bulk(size: int, **addresses: int) -> None:
    for name, address in addresses.items():
        if address % 16:
            raise Violation(f"bulk copy: {name} {address:#x} must be a multiple of 16 bytes")
    if size % 16:
        raise Violation(f"bulk copy of {size} bytes; the size must be a multiple of 16")


@register("cp.async.bulk", "cp.reduce.async.bulk")
def _bulk(ins: Instruction, d: Decoder) -> Handler:
    reduce = ins.parts[1] == "reduce"
    operation = next((p for p in ins.parts[4:] if p in REDUCTIONS), "") if reduce else ""
    if reduce and not operation:
        raise d.unsupported("no reduction operation")
    dtype = ins.parts[-1] if reduce else ""
    at = 4 if reduce else 3
    dst, src = ins.parts[at], ins.parts[at + 1]
    if dst == "global":
        return _bulk_store(ins, d, operation, dtype)
    if dst not in ("shared::cluster", "shared::cta"):
        raise d.unsupported(f"destination {dst}")
    return _bulk_load(ins, d, src, operation, dtype)


def _bulk_load(ins: Instruction, d: Decoder, src: str, operation: str, dtype: str) -> Handler:
    window = "cluster" if "shared::cluster" in ins.parts else "cta"
    target = d.shared_address(ins.operands[0])
    from_global = src == "global"
    source = d.address(ins.operands[1]) if from_global else d.shared_address(ins.operands[1])
    amount = d.read(ins.operands[2], "u32")
    barrier = d.shared_address(ins.operands[3])
    multicast = "multicast::cluster" in ins.parts
    mask = d.read(ins.operands[4], "u16") if multicast else None

    def run(w: Warp, m: Mask) -> None:
        for lane in w.lanes(m):
            lane = int(lane)
            size, origin = int(amount(w)[lane]), int(source(w)[lane])
            to = int(target(w)[lane])
            _check_bulk(size, source=origin, destination=to)
            cta, offset = w.cluster.resolve(w, to, max(size, 1), 16, window)
            chosen = None if mask is None else int(mask(w)[lane])
            for dest, bar in targets(w, cta, int(barrier(w)[lane]), chosen, False):
                where = slice(offset, offset + size)
                if from_global:
                    _load_bytes(w, ins.opcode, origin, where, dest, bar)
                else:
                    _copy_shared(w, ins.opcode, origin, where, dest, bar, operation, dtype)

    return run


def _load_bytes(w: Warp, text: str, origin: int, where: slice, dest: Cta, bar: Mbarrier) -> None:
    size = where.stop - where.start
    memory, shared = w.machine.memory, dest.shared

    def move() -> None:
        shared.data[where] = memory.read(w, origin, size)

    submit_load(w, "bulk load", text, bar, size, move, [(shared, where)])


def _copy_shared(
    w: Warp,
    text: str,
    origin: int,
    where: slice,
    dest: Cta,
    bar: Mbarrier,
    operation: str,
    dtype: str,
) -> None:
    size = where.stop - where.start
    source, at = w.cluster.resolve(w, origin, max(size, 1), 16, "cta")
    taken = slice(at, at + size)
    if operation and not dest.shared.valid[where].all():
        raise Violation("cp.reduce.async.bulk into uninitialised shared memory")

    def move() -> None:
        new = source.shared.data[taken]
        if operation:
            new = reduce_bytes(operation, dtype, dest.shared.data[where], new)
        dest.shared.data[where] = new

    submit_load(
        w, "shared copy", text, bar, size, move, [(dest.shared, where)], [(source.shared, taken)]
    )


def _bulk_store(ins: Instruction, d: Decoder, operation: str, dtype: str) -> Handler:
    if "bulk_group" not in ins.parts:
        raise d.unsupported("a store completes in a bulk group")
    target = d.address(ins.operands[0])
    source = d.shared_address(ins.operands[1])
    amount = d.read(ins.operands[2], "u32")
    masked = d.read(ins.operands[-1], "u16") if "cp_mask" in ins.parts else None

    def run(w: Warp, m: Mask) -> None:
        for lane in w.lanes(m):
            lane = int(lane)
            size, to, origin = (int(get(w)[lane]) for get in (amount, target, source))
            chosen = None if masked is None else int(masked(w)[lane])
            _check_bulk(size, source=origin, destination=to)
            cta, offset = w.cluster.resolve(w, origin, max(size, 1), 16, "cta")
            _store_bytes(
                w, lane, ins.opcode, to, cta, slice(offset, offset + size), operation, dtype, chosen
            )

    return run


def _store_bytes(
    w: Warp,
    lane: int,
    text: str,
    to: int,
    cta: Cta,
    where: slice,
    operation: str,
    dtype: str,
    chosen: int | None,
) -> None:
    """Store bytes; `chosen` is the mask of .cp_mask: bit i takes byte i of every 16."""
    memory, shared = w.machine.memory, cta.shared
    size = where.stop - where.start

    def collect() -> Any:
        return shared.data[where].copy()

    def write(data: Any) -> None:
        if operation:
            data = reduce_bytes(operation, dtype, memory.read(w, to, size), data)
        if chosen is None:
            memory.write(w, to, data)
            return
        for at in range(size):
            if chosen >> at % 16 & 1:
                memory.write(w, to + at, data[at : at + 1])

    kind = "bulk reduce" if operation else "bulk store"
    submit_store(w, lane, kind, f"{text}, {size} bytes", [(shared, where)], collect, write)
    w.machine.count(f"bytes.{kind}", size)


@register("cp.async.bulk.prefetch")
def _prefetch(ins: Instruction, d: Decoder) -> Handler:
    source = d.address(ins.operands[0])
    amount = d.read(ins.operands[1], "u32")

    def run(w: Warp, m: Mask) -> None:
        for lane in w.lanes(m):
            address, size = int(source(w)[lane]), int(amount(w)[lane])
            _check_bulk(size, source=address)
            w.machine.memory.find(address, max(size, 1))

    return run
