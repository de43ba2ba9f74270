"""tcgen05: Tensor Memory management, copies, loads and stores, fences, commits.

mma, cp, shift and commit of one thread form a queue that completes in order at later moments of the
scheduler's choice. Who may touch what when is checked at issue (`tmem_order`); data move at
completion. Source: PTX ISA, "TensorCore 5th Generation Family Instructions".

Two rules can be relaxed (`EmulatorDevice(allow=…)`), to look at kernels that hardware forgives:
``"unallocated-tmem"`` lets a CTA use columns that it did not allocate, ``"unordered-tcgen05"``
skips the order checks of `tmem_order` (data still move late: a missing wait shows in the result).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .descriptors import addresses, decode_tcgen05
from .fragments import cp_lanes, tmem_fragment, tmem_registers
from .launch import AsyncOp
from .mbarrier import Mbarrier
from .memory import Violation
from .program import Decoder, Handler, register
from .ptx import Instruction
from .tags import Result, Tags
from .tensor_core import check_bounds
from .tmem import Store, TensorMemory, split_address
from .tmem_order import NEVER, Order, Rect, ThreadOrder, Touch

if TYPE_CHECKING:
    from .machine import Cta
    from .warp import Mask, Warp


# --------------------------------------------------------------------------------- bookkeeping


def tensor_memory(cta: Cta) -> TensorMemory:
    """Return a CTA's part of its multiprocessor's Tensor Memory.

    The two CTAs of a pair never share one multiprocessor, so each parity has its own cells.
    """
    found: TensorMemory | None = cta.state.get("tmem")
    if found is None:
        key = ("tmem", cta.rank & 1)
        store = cta.sm.state.setdefault(key, Store())
        found = cta.state["tmem"] = TensorMemory(
            store, strict="unallocated-tmem" not in cta.machine.allow
        )

        def check_exit() -> None:
            if found is not None and found.allocations:
                raise cta.fault(
                    f"the CTA exits with Tensor Memory not freed: {found.describe()}; "
                    "tcgen05.dealloc is missing"
                )

        cta.at_exit.append(check_exit)
    return found


def order(cta: Cta) -> Order:
    """Return the touches on a CTA's Tensor Memory."""
    found: Order | None = cta.state.get("tmem order")
    if found is None:
        strict = "unordered-tcgen05" not in cta.machine.allow
        found = cta.state["tmem order"] = Order(strict=strict)
    return found


def cta_group(ins: Instruction, d: Decoder) -> int:
    """Return 1 or 2."""
    for part in ins.parts:
        if part.startswith("cta_group::"):
            return int(part[-1])
    raise d.unsupported("no .cta_group")


def group_ctas(w: Warp, group: int, *, alive: bool = True) -> list[Cta]:
    """Return the CTAs that an instruction acts on, even rank first, after checking the group.

    `alive` asks that both CTAs of a pair still run; a dealloc does not need its peer.
    """
    first = w.cta.state.setdefault("cta_group", group)
    if first != group:
        raise Violation(
            f"cta_group::{group} after cta_group::{first}; all tcgen05 instructions of a kernel "
            "must use one"
        )
    if group == 1:
        return [w.cta]
    ctas = w.cluster.ctas
    if len(ctas) % 2:
        raise Violation(f"cta_group::2 in a cluster of {len(ctas)} CTAs; it needs pairs")
    even = w.cta.rank & ~1
    for cta in ctas[even : even + 2]:
        if alive and not cta.live_warps:
            raise Violation(f"cta_group::2 while CTA rank {cta.rank} of the pair has exited")
    return ctas[even : even + 2]


def uniform(values: Any, what: str) -> int:
    """Return an operand that every lane of the warp must give alike."""
    first = int(values[0])
    if (values != values[0]).any():
        raise Violation(f"{what} differs between the lanes of the warp")
    return first


class Pipe:
    """The queue of mma, cp, shift and commit of one thread."""

    def __init__(self, w: Warp, lane: int) -> None:
        self.key = ("tcgen05", w.cta.rank, w.index, lane)
        self.queue = (*self.key, id(w.cluster))
        self.agent = w.cluster.agent(
            self.key, f"tcgen05 operations of warp {w.index} lane {lane}, CTA rank {w.cta.rank}"
        )
        self.touches: list[Touch] = []

    @staticmethod
    def of(w: Warp, lane: int) -> Pipe:
        """Return the queue of a lane of `w`."""
        key = ("tcgen05 pipe", lane)
        found: Pipe | None = w.state.get(key)
        if found is None:
            found = w.state[key] = Pipe(w, lane)
        return found

    def submit(
        self,
        w: Warp,
        kind: str,
        text: str,
        run: Callable[[], None],
        touches: list[tuple[Cta, str, bool, Rect]],
        reads: list[tuple[Any, Any]],
    ) -> None:
        """Check and queue an operation; `touches` are (CTA, role, write, rectangle)."""
        made = []
        for cta, role, write, rect in touches:
            touch = Touch(text, role, True, self.key, w, self.agent, write, rect)
            order(cta).access(touch)
            made.append(touch)
        self.touches.extend(made)

        def complete(op: AsyncOp) -> None:
            run()
            for touch in made:
                touch.done = w.machine.time

        w.machine.submit(AsyncOp(kind, text, w, self.agent, complete, self.queue, reads))
        w.machine.count(kind)


# ------------------------------------------------------------------------- fences, commit, waits


@register("tcgen05.fence::before_thread_sync")
def _fence_before(ins: Instruction, d: Decoder) -> Handler:
    def run(w: Warp, m: Mask) -> None:
        ThreadOrder.of(w).fence_before(w)

    return run


@register("tcgen05.fence::after_thread_sync")
def _fence_after(ins: Instruction, d: Decoder) -> Handler:
    def run(w: Warp, m: Mask) -> None:
        ThreadOrder.of(w).fence_after(w)

    return run


@register("tcgen05.commit")
def _commit(ins: Instruction, d: Decoder) -> Handler:
    """Signal an mbarrier once everything this thread has queued is complete."""
    group = cta_group(ins, d)
    d.need("mbarrier::arrive::one" in ins.parts)
    barrier = d.shared_address(ins.operands[0])
    multicast = "multicast::cluster" in ins.parts
    mask = d.read(ins.operands[1], "u16") if multicast else None
    d.need(len(ins.operands) == 1 + multicast)

    def run(w: Warp, m: Mask) -> None:
        group_ctas(w, group)
        for lane in w.lanes(m):
            lane = int(lane)
            cta, offset = w.cluster.resolve(w, int(barrier(w)[lane]), 8, 8)
            ctas = [cta]
            if mask is not None:
                chosen = int(mask(w)[lane])
                if chosen == 0 or chosen >> len(w.cluster.ctas):
                    raise Violation(
                        f"tcgen05.commit multicast mask {chosen:#06x} in a cluster of "
                        f"{len(w.cluster.ctas)} CTAs; its bits are ranks"
                    )
                ctas = [c for c in w.cluster.ctas if chosen >> c.rank & 1]
            bars = [Mbarrier.of(w, c, offset) for c in ctas]
            for bar in bars:
                bar.check_async(w)
            _submit_commit(w, Pipe.of(w, lane), ins.opcode, bars)

    return run


def _submit_commit(w: Warp, pipe: Pipe, text: str, bars: list[Mbarrier]) -> None:
    for touch in pipe.touches:
        touch.committed = True
    pipe.touches = []
    ThreadOrder.of(w).fence_before(w)  # implied by commit

    def complete(op: AsyncOp) -> None:
        for bar in bars:
            op.release(bar.clock)
            bar.arrive()

    names = ", ".join(map(str, bars))
    w.machine.submit(
        AsyncOp(
            "tcgen05.commit",
            f"{text} -> {names}",
            w,
            pipe.agent,
            complete,
            pipe.queue,
            signals=[bar.cta.shared for bar in bars],
            carry_issuer=True,
        )
    )


@register("tcgen05.wait::ld", "tcgen05.wait::st")
def _wait(ins: Instruction, d: Decoder) -> Handler:
    d.whole_warp()
    kind = ins.parts[1][-2:]

    def run(w: Warp, m: Mask) -> Any:
        moves: list[_Move] = w.state.get(("tcgen05 moves", kind), [])

        def then() -> None:
            for move in moves:
                move.touch.done = w.machine.time
                move.result.waited = True
            w.machine.time += 1
            w.state["tcgen05 moves", kind] = []
            if kind == "ld":
                Tags.of(w).deliver(w)

        return w.block(f"its tcgen05.{kind}", lambda: all(x.result.done for x in moves), then)

    return run


# ------------------------------------------------------------------------------ loads and stores


class _Move:
    """A ld or st that was issued and not yet waited for."""

    def __init__(self, result: Result, touch: Touch) -> None:
        self.result, self.touch = result, touch


@register("tcgen05.ld.sync", "tcgen05.st.sync")
def _ld_st(ins: Instruction, d: Decoder) -> Handler:
    d.whole_warp()
    parts = ins.parts
    load = parts[1] == "ld"
    shape, times = parts[4], parts[5]
    num = int(times[1:])
    count = tmem_registers(shape, num)
    packed = ("pack::16b" if load else "unpack::16b") in parts
    operands = list(ins.operands)
    registers = operands.pop(0) if load else operands.pop(-1)
    where = d.address(operands[0])
    split = d.constant(operands[1]) if shape == "16x32bx2" else 0
    d.need(len(operands) == (2 if shape == "16x32bx2" else 1))
    puts = d.writes(registers, "b32") if load else []
    gets = [] if load else d.reads(registers, "b32")
    if max(len(puts), len(gets)) != count:
        raise d.illegal(f".{shape}.{times} takes {count} registers, got {len(puts or gets)}")
    lanes, columns = tmem_fragment(shape, num, split, packed)
    high, wide = int(lanes.max()) + 1, int(columns.max()) + 1
    name = f"tcgen05.{parts[1]}.{shape}.{times}"

    def run(w: Warp, m: Mask) -> None:
        lane, column = split_address(uniform(where(w), f"the address of {name}"))
        window = 32 * (w.index % 4)
        allowed = (window,) if high == 32 else (window, window + 16)
        if lane not in allowed:
            raise Violation(
                f"{name} at lane {lane}: warp {w.index} may access lanes {window}-{window + 31} "
                f"only, so the address must have lane {' or '.join(map(str, allowed))}"
            )
        memory = tensor_memory(w.cta)
        memory.check(name, lane, high, column, wide)
        rect = (lane, high, column, wide)
        stream = ("tcgen05 ld st", w.cta.rank, w.index)
        role = "accumulator" if load else "cells"
        touch = Touch(name, role, False, stream, w, w.agent, not load, rect)
        order(w.cta).access(touch)
        result = Result()
        words = None if load else np.stack([get(w) for get in gets], axis=1)

        def complete(op: AsyncOp) -> None:
            if words is None:
                cells = memory.read(name, lanes + lane, columns + column)
                result.words = _pack(cells) if packed else cells
            else:
                memory.write(lanes + lane, columns + column, _unpack(words) if packed else words)
                result.words = words

        agent = w.cluster.agent(stream, f"tcgen05.ld and st of warp {w.index}")
        # In order among themselves is one legal order; nothing may depend on it (see the touches).
        w.machine.submit(AsyncOp(f"tcgen05.{parts[1]}", name, w, agent, complete))
        w.state.setdefault(("tcgen05 moves", parts[1]), []).append(_Move(result, touch))
        tags = Tags.of(w)
        for i, put in enumerate(puts):
            put(w, tags.new(result, i), None)
        w.machine.count(f"tcgen05.{parts[1]}")

    return run


def _pack(cells: Any) -> Any:
    """.pack::16b: the low halves of two columns in one register."""
    return cells[..., 0] & 0xFFFF | (cells[..., 1] & 0xFFFF) << 16


def _unpack(words: Any) -> Any:
    """.unpack::16b: two cells, upper halves zero (the ISA does not say what they hold)."""
    return np.stack([words & 0xFFFF, words >> 16], axis=-1)


# ------------------------------------------------------------------------------------- cp, shift


@register("tcgen05.cp")
def _cp(ins: Instruction, d: Decoder) -> Handler:
    group = cta_group(ins, d)
    shape = ins.parts[3]
    multicast = next((p for p in ins.parts if p.startswith("warpx")), "")
    if any(p.startswith("b8x16") for p in ins.parts):
        raise d.unsupported("decompression while copying")
    width, lanes = cp_lanes(shape, multicast)
    rows = lanes.shape[1]
    where = d.address(ins.operands[0])
    descriptor = d.read(ins.operands[1], "b64")
    name = f"tcgen05.cp.{shape}{'.' + multicast if multicast else ''}"
    columns = width // 4
    span = int(lanes.max()) + 1

    def run(w: Warp, m: Mask) -> None:
        for lane in w.lanes(m):
            lane = int(lane)
            base, column = split_address(int(where(w)[lane]))
            place = decode_tcgen05(int(descriptor(w)[lane]))
            table = addresses(place, rows, width, "K")
            chunks = np.unique(table >> 4) << 4
            ctas = group_ctas(w, group)
            for cta in ctas:
                check_bounds(cta, chunks, f"the source of {name}")
                tensor_memory(cta).check(name, base, span, column, columns)
            rect = (base, span, column, columns)

            def move(
                ctas: Any = ctas, table: Any = table, base: int = base, c: int = column
            ) -> None:
                for cta in ctas:
                    words = cta.shared.data[table].view(np.uint32)
                    for copy in lanes:
                        cells = np.arange(columns) + c
                        tensor_memory(cta).write(copy[:, None] + base, cells[None, :], words)

            touches = [(cta, "scale factors", True, rect) for cta in ctas]
            reads = [(cta.shared, table.reshape(-1)) for cta in ctas]
            Pipe.of(w, lane).submit(w, "tcgen05.cp", name, move, touches, reads)

    return run


@register("tcgen05.shift")
def _shift(ins: Instruction, d: Decoder) -> Handler:
    """Move rows down by one: lane i takes lane i + 1 of its 32 lanes, 8 columns (inferred)."""
    group = cta_group(ins, d)
    d.need("down" in ins.parts)
    where = d.address(ins.operands[0])

    def run(w: Warp, m: Mask) -> None:
        for lane in w.lanes(m):
            lane = int(lane)
            base, column = split_address(int(where(w)[lane]))
            if base % 32:
                raise Violation(f"tcgen05.shift at lane {base}; it must be a multiple of 32")
            ctas = group_ctas(w, group)
            for cta in ctas:
                tensor_memory(cta).check("tcgen05.shift", base, 32, column, 8)

            def move(ctas: Any = ctas, base: int = base, c: int = column) -> None:
                cells = np.arange(c, c + 8)[None, :]
                rows = np.arange(base, base + 31)[:, None]
                for cta in ctas:
                    memory = tensor_memory(cta)
                    memory.write(rows, cells, memory.read("tcgen05.shift", rows + 1, cells))

            touches = [(cta, "operand A", True, (base, 32, column, 8)) for cta in ctas]
            Pipe.of(w, lane).submit(w, "tcgen05.shift", "tcgen05.shift", move, touches, [])

    return run


__all__ = ["NEVER", "Pipe", "cta_group", "group_ctas", "order", "tensor_memory", "uniform"]
