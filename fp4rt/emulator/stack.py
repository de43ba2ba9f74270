"""Local memory taken while a program runs: alloca, stacksave, stackrestore.

Every lane has a stack of `STACK_BYTES` behind its fixed frames; fresh bytes are poison. What a
function took is given back when it returns. Source: PTX ISA, "Stack Manipulation Instructions".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .program import STACK_BYTES, Decoder, Handler, register
from .ptx import Instruction
from .warp import Mask

if TYPE_CHECKING:
    from .warp import Warp


def pointers(w: Warp) -> Any:
    """Return int64[32]: each lane's first free byte of local memory."""
    found = w.state.get("stack")
    if found is None:
        found = w.state["stack"] = np.full(32, w.program.local_size - STACK_BYTES, np.int64)
    return found


@register("alloca")
def _alloca(ins: Instruction, d: Decoder) -> Handler:
    d.need(ins.parts[1:] == ("u64",), "32-bit addresses")
    put, size = d.write(ins.operands[0], "u64"), d.read(ins.operands[1], "u64")
    align = d.constant(ins.operands[2]) if len(ins.operands) == 3 else 8

    def run(w: Warp, m: Mask) -> None:
        top = pointers(w)
        start = -(-top // align) * align
        end = start + size(w).astype(np.int64)
        for lane in w.lanes(m):
            low, high = int(start[lane]), int(end[lane])
            if not low <= high <= w.local.size:
                raise w.fault(
                    f"alloca of {high - low} bytes: a lane's stack has {STACK_BYTES} bytes, "
                    f"{w.local.size - low} of them free"
                )
            at = int(w.local.lane_base[lane])
            w.local.valid[at + low : at + high] = 0
        np.copyto(top, end, where=w.active(m))
        put(w, start.astype(np.uint64), m)

    return run


@register("stacksave")
def _save(ins: Instruction, d: Decoder) -> Handler:
    put = d.write(ins.operands[0], "u64")
    return lambda w, m: put(w, pointers(w).astype(np.uint64), m)


@register("stackrestore")
def _restore(ins: Instruction, d: Decoder) -> Handler:
    get = d.read(ins.operands[0], "u64")

    def run(w: Warp, m: Mask) -> None:
        saved = get(w).astype(np.int64)
        if (saved > pointers(w))[w.active(m)].any():
            raise w.fault("stackrestore of a pointer that no stacksave of this function gave")
        np.copyto(pointers(w), saved, where=w.active(m))

    return run
