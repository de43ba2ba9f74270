"""Copies by tensor map, and the instructions that change tensor maps.

Source: PTX ISA, "cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor", "tensormap.replace".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .async_copy import REDUCTIONS, reduce_bytes, submit_load, submit_store, targets
from .mbarrier import Mbarrier
from .memory import Violation
from .program import Decoder, Handler, register
from .ptx import Instruction, Mem, Operand, Vec
from .tensor_box import Box, box, decode_tensor_map, replace_field

if TYPE_CHECKING:
    from .machine import Cta
    from .warp import Mask, Warp

# ----------------------------------------------------------------------------- tensor copies


class _MapOperand:
    """``[tensorMap, {c0, c1, …}]``."""

    def __init__(self, op: Operand, d: Decoder, mode: str) -> None:
        if not isinstance(op, Mem) or len(op.extra) != 1 or not isinstance(op.extra[0], Vec):
            raise d.unsupported("a tensor operand is [map, {coordinates}]")
        self.address = d.address(Mem(op.base, op.offset))
        self.coordinates = d.reads(op.extra[0], "s32")
        self.mode = mode

    def box(self, w: Warp, lane: int, shared: int) -> Box:
        """Read the map and work out the copy for a lane."""
        address = int(self.address(w)[lane])
        tensor_map = decode_tensor_map(_read_map(w, address))
        values = tuple(int(get(w)[lane]) for get in self.coordinates)
        if self.mode:
            return box(tensor_map, values[:1], shared, values[1:])
        return box(tensor_map, values, shared)


def _read_map(w: Warp, address: int) -> bytes:
    if address % 64:
        raise Violation(f"tensor map at {address:#x}; its address must be a multiple of 64")
    return bytes(w.machine.memory.read(w, address, 128))


def _mode(ins: Instruction, d: Decoder) -> str:
    """Return "" for tile mode, or "gather4"/"scatter4"."""
    for part in ins.parts:
        if part.startswith("im2col"):
            raise d.unsupported("im2col modes are not emulated")
        if part in ("tile::gather4", "tile::scatter4"):
            return part.partition("::")[2]
    return ""


@register("cp.async.bulk.tensor")
def _tensor(ins: Instruction, d: Decoder) -> Handler:
    if ins.parts[5] == "global":
        return _tensor_store(ins, d, "")
    return _tensor_load(ins, d)


@register("cp.reduce.async.bulk.tensor")
def _tensor_reduce(ins: Instruction, d: Decoder) -> Handler:
    operation = next((p for p in ins.parts if p in REDUCTIONS), "")
    if not operation:
        raise d.unsupported("no reduction operation")
    return _tensor_store(ins, d, operation)


def _tensor_load(ins: Instruction, d: Decoder) -> Handler:
    mode = _mode(ins, d)
    multicast = "multicast::cluster" in ins.parts
    pair = "cta_group::2" in ins.parts
    window = "cluster" if "shared::cluster" in ins.parts else "cta"
    if "mbarrier::complete_tx::bytes" not in ins.parts:
        raise d.unsupported("a load completes on an mbarrier")
    target = d.shared_address(ins.operands[0])
    source = _MapOperand(ins.operands[1], d, mode)
    barrier = d.shared_address(ins.operands[2])
    mask = d.read(ins.operands[3], "u16") if multicast else None

    def run(w: Warp, m: Mask) -> None:
        for lane in w.lanes(m):
            lane = int(lane)
            cta, offset = w.cluster.resolve(w, int(target(w)[lane]), 16, 1, window)
            plan = source.box(w, lane, offset)
            chosen = None if mask is None else int(mask(w)[lane])
            for dest, bar in targets(w, cta, int(barrier(w)[lane]), chosen, pair):
                _load_box(w, ins.opcode, plan, dest, bar)

    return run


def _load_box(w: Warp, text: str, plan: Box, dest: Cta, bar: Mbarrier) -> None:
    memory, shared = w.machine.memory, dest.shared

    def move() -> None:
        image = plan.background()
        if plan.inside.any():
            data = memory.gather(w, plan.rows[plan.inside], plan.last - plan.first)
            plan.place(image, data)
        shared.data[plan.offsets] = image.reshape(-1)

    submit_load(w, "tensor load", text, bar, plan.nbytes, move, [(shared, plan.offsets)])


def _tensor_store(ins: Instruction, d: Decoder, operation: str) -> Handler:
    mode = _mode(ins, d)
    if "bulk_group" not in ins.parts:
        raise d.unsupported("a store completes in a bulk group")
    target = _MapOperand(ins.operands[0], d, mode)
    source = d.shared_address(ins.operands[1])

    def run(w: Warp, m: Mask) -> None:
        for lane in w.lanes(m):
            lane = int(lane)
            cta, offset = w.cluster.resolve(w, int(source(w)[lane]), 16, 1, "cta")
            plan = target.box(w, lane, offset)
            _store_box(w, lane, ins.opcode, plan, cta, operation)

    return run


def _store_box(w: Warp, lane: int, text: str, plan: Box, cta: Cta, operation: str) -> None:
    memory, shared, dtype = w.machine.memory, cta.shared, plan.tensor_map.dtype
    if min(plan.coordinates) < 0:  # an illegal instruction on an H200, whichever the dimension
        raise Violation(
            f"tensor store to coordinates {plan.coordinates}; they must not be negative"
        )
    if dtype == "16u4_align16b" or (operation and dtype.startswith("16u4")):
        raise Violation(
            f"tensor {'reductions' if operation else 'stores'} of {dtype!r} do not exist"
        )

    def collect() -> Any:
        return plan.take(shared.data[plan.offsets].reshape(len(plan.rows), -1)).copy()

    def write(data: Any) -> None:
        rows = plan.rows[plan.inside]
        if not len(rows):
            return
        if operation:
            old = memory.gather(w, rows, data.shape[1])
            data = reduce_bytes(operation, dtype, old, data)
        memory.scatter(w, rows, data)

    kind = "tensor reduce" if operation else "tensor store"
    submit_store(w, lane, kind, text, [(shared, plan.offsets)], collect, write)
    w.machine.count(f"bytes.{kind}", plan.nbytes)


@register("cp.async.bulk.prefetch.tensor")
def _tensor_prefetch(ins: Instruction, d: Decoder) -> Handler:
    source = _MapOperand(ins.operands[0], d, _mode(ins, d))

    def run(w: Warp, m: Mask) -> None:
        for lane in w.lanes(m):
            source.box(w, int(lane), 0)

    return run


# -------------------------------------------------------------------------------- tensor maps


@register("prefetch.tensormap", "prefetch.param.tensormap", "prefetch.const.tensormap")
def _prefetch_map(ins: Instruction, d: Decoder) -> Handler:
    address = d.address(ins.operands[0])

    def run(w: Warp, m: Mask) -> None:
        for lane in w.lanes(m):
            _read_map(w, int(address(w)[lane]))

    return run


@register("tensormap.replace.tile")
def _replace(ins: Instruction, d: Decoder) -> Handler:
    field = ins.parts[3]
    in_shared = ins.parts[4].startswith("shared")
    where = d.shared_address(ins.operands[0]) if in_shared else d.address(ins.operands[0])
    has_ordinal = len(ins.operands) == 3
    ordinal = d.constant(ins.operands[1]) if has_ordinal else 0
    value = d.read(ins.operands[-1], "u64" if ins.parts[-1] == "b64" else "u32")

    def run(w: Warp, m: Mask) -> None:
        for lane in w.lanes(m):
            address, new = int(where(w)[lane]), int(value(w)[lane])
            if in_shared:
                cta, offset = w.cluster.resolve(w, address, 128, 64, "cta")
                part = slice(offset, offset + 128)
                image = bytes(cta.shared.read_bytes(w, part))
                image = replace_field(image, field, ordinal, new)
                cta.shared.write_bytes(w, part, np.frombuffer(image, np.uint8))
            else:
                image = replace_field(_read_map(w, address), field, ordinal, new)
                w.machine.memory.write(w, address, np.frombuffer(image, np.uint8))

    return run


@register("tensormap.cp_fenceproxy")
def _cp_fenceproxy(ins: Instruction, d: Decoder) -> Handler:
    d.whole_warp()
    target, source = d.address(ins.operands[0]), d.shared_address(ins.operands[1])
    if d.constant(ins.operands[2]) != 128:
        raise d.unsupported("the size must be 128")

    def run(w: Warp, m: Mask) -> None:
        lane = w.first(m)
        cta, offset = w.cluster.resolve(w, int(source(w)[lane]), 128, 128, "cta")
        image = cta.shared.read_bytes(w, slice(offset, offset + 128))
        w.machine.memory.write(w, int(target(w)[lane]), image)

    return run
