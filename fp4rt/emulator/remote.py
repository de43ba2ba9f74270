"""st.async and red.async: writes to shared memory of the cluster that report to an mbarrier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .atomics import OPERATIONS
from .launch import AsyncOp
from .load_store import rounds
from .machine import Cta
from .mbarrier import Mbarrier
from .program import Decoder, Handler, register
from .ptx import TYPE_BYTES, Instruction, Vec
from .warp import Mask

if TYPE_CHECKING:
    from .warp import Warp

_UINT: dict[int, Any] = {4: np.uint32, 8: np.uint64}
_WORDS = {
    "async", "weak", "relaxed", "cluster", "shared::cluster", "mbarrier::complete_tx::bytes",
    "v2", "v4",
}  # fmt: skip


@register("st.async", "red.async")
def _async(ins: Instruction, d: Decoder) -> Handler:
    reduce = next((p for p in ins.parts if p in OPERATIONS), "")
    if "global" in ins.parts:
        raise d.unsupported("only the forms on shared memory of a cluster are emulated")
    d.need(set(ins.parts[1:-1]) <= {*_WORDS, reduce}, "modifiers")
    d.need("mbarrier::complete_tx::bytes" in ins.parts, "needs .mbarrier::complete_tx::bytes")
    kind = ins.parts[-1]
    unit = TYPE_BYTES[kind]
    d.need(unit in _UINT, f"type .{kind}")
    dst, value, bar = ins.operands
    items = value.items if isinstance(value, Vec) else (value,)
    get = [d.read(op, f"b{unit * 8}") for op in items]
    size = unit * len(items)
    to, barrier = d.shared_address(dst), d.shared_address(bar)
    apply = OPERATIONS[reduce](kind) if reduce else None

    def run(w: Warp, m: Mask) -> None:
        lanes = w.lanes(m)
        targets, bars = to(w)[lanes], barrier(w)[lanes]
        values = np.stack([g(w)[lanes] for g in get], axis=1)
        for address in np.unique(bars):
            pick = bars == address
            mbarrier = Mbarrier.at(w, int(address))
            places = [w.cluster.resolve(w, int(t), size, size) for t in targets[pick]]
            cta = mbarrier.cta
            if any(place[0] is not cta for place in places):
                raise w.fault(f"{ins.opcode}: the data and the mbarrier are in different CTAs")
            offsets = np.array([place[1] for place in places])
            _submit(w, ins, cta, offsets, values[pick], mbarrier, apply)

    return run


def _submit(
    w: Warp, ins: Instruction, cta: Cta, offsets: Any, values: Any, bar: Mbarrier, apply: Any
) -> None:
    unit = values.dtype.itemsize
    size = unit * values.shape[1]
    where = (offsets[:, None] + np.arange(size)).reshape(-1)
    agent = w.cluster.agent(("st.async", cta.rank, bar.offset), f"{ins.opcode} to {bar}")
    shared = cta.shared

    def move(op: AsyncOp) -> None:
        if not apply:
            shared.data[where] = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        else:
            words = shared.views[unit]
            index = offsets // unit
            for pick in rounds(index):
                before = words[index[pick]][:, None]
                words[index[pick]] = apply(before, values[pick])[:, 0]
            shared.note_atomic(agent, where)
        op.release(bar.clock)
        bar.complete_tx(len(where))

    w.machine.submit(
        AsyncOp(
            kind=ins.parts[0] + ".async",
            text=f"{ins.opcode} {len(where)} bytes",
            issuer=w,
            agent=agent,
            # Reductions may meet in one word, so they have no exclusive footprint.
            writes=[] if apply else [(shared, where)],
            run=move,
            proxy="",
        )
    )
    w.machine.count("bytes.shared.remote", len(where))
