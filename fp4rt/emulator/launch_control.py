"""clusterlaunchcontrol: a running cluster takes over the work of one that has not started.

The 16-byte response is opaque to programs; here it holds the first CTA's index and a flag. Source:
PTX ISA, "clusterlaunchcontrol.try_cancel" and "clusterlaunchcontrol.query_cancel".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .launch import AsyncOp
from .mbarrier import Mbarrier
from .program import Decoder, Handler, register
from .ptx import Instruction
from .warp import Mask

if TYPE_CHECKING:
    from .warp import Warp

_GRANTED = 0x600D


@register("clusterlaunchcontrol.try_cancel")
def _try_cancel(ins: Instruction, d: Decoder) -> Handler:
    everyone = any(part.startswith("multicast") for part in ins.parts)
    allowed = {"async", "shared::cta", "mbarrier::complete_tx::bytes", "multicast::cluster::all"}
    d.need(set(ins.parts[2:-1]) <= allowed and ins.parts[-1] == "b128", "modifiers")
    response, barrier = (d.shared_address(op) for op in ins.operands)

    def run(w: Warp, m: Mask) -> None:
        for lane in w.lanes(m):
            answer = w.launch.take_over()
            words = np.array([*(answer or (0, 0, 0)), _GRANTED if answer else 0], np.uint32)
            cta, offset = w.cluster.resolve(w, int(response(w)[lane]), 16, 16, "cta")
            own = Mbarrier.at(w, int(barrier(w)[lane]), "cta")
            for target in w.cluster.ctas if everyone else [cta]:
                bar = Mbarrier.of(w, target, own.offset)
                _submit(w, ins.opcode, target.shared, offset, words, bar)

    return run


def _submit(w: Warp, text: str, shared: Any, offset: int, words: Any, bar: Mbarrier) -> None:
    where = slice(offset, offset + 16)

    def deliver(op: AsyncOp) -> None:
        shared.data[where] = words.view(np.uint8)
        op.release(bar.clock)
        bar.complete_tx(16)

    agent = w.cluster.agent(("launch control", shared.rank, bar.offset), f"{text} to {bar}")
    bar.check_async(w)
    w.machine.submit(
        AsyncOp(
            kind="launch control",
            text=text,
            issuer=w,
            agent=agent,
            writes=[(shared, where)],
            run=deliver,
        )
    )


@register("clusterlaunchcontrol.query_cancel")
def _query_cancel(ins: Instruction, d: Decoder) -> Handler:
    what = ins.parts[2]
    file, row = d.row(ins.operands[1], "b128")

    def words(w: Warp) -> Any:
        return w.files[file][row].view(np.uint32).reshape(32, 4)

    if what == "is_canceled":
        put = d.write(ins.operands[0], "pred")
        return lambda w, m: put(w, words(w)[:, 3] == _GRANTED, m)
    base, _, axis = what.partition("::")
    d.need(base == "get_first_ctaid", what)
    puts = d.writes(ins.operands[0], "b32")
    columns = ["xyz".index(axis)] if axis else list(range(len(puts)))
    d.need(len(puts) == len(columns), "destination")

    def run(w: Warp, m: Mask) -> None:
        response = words(w)
        if (response[w.lanes(m), 3] != _GRANTED).any():
            raise w.fault("get_first_ctaid of a response that grants nothing; ask is_canceled")
        for setter, column in zip(puts, columns, strict=True):
            setter(w, response[:, column] if column < 3 else np.uint32(0), m)

    return run
