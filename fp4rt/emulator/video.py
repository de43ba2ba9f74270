"""Video instructions: SIMD within a 32-bit register (vadd2 … vset4) and their scalar forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .program import Decoder, Handler, register
from .ptx import Instruction
from .warp import Mask

if TYPE_CHECKING:
    from .warp import Warp

S64 = np.int64
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal,
}  # fmt: skip
_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "vadd": np.add,
    "vsub": np.subtract,
    "vabsdiff": lambda a, b: np.abs(a - b),
    "vmin": np.minimum,
    "vmax": np.maximum,
    "vavrg": lambda a, b: (a + b + (a + b >= 0)) >> 1,
}


def lanes(values: Any, kind: str, width: int) -> Any:
    """Return uint32 values as int64[n, lanes], signed if `kind` starts with s."""
    bits = 32 // width
    parts = (values[:, None] >> (bits * np.arange(width, dtype=np.uint32))).astype(S64)
    parts &= (1 << bits) - 1
    if kind[0] == "s":
        parts = np.where(parts >> (bits - 1), parts - (1 << bits), parts)
    return parts


@register(*(f"{op}{n}" for op in (*_OPERATIONS, "vset") for n in (2, 4)))
def _simd(ins: Instruction, d: Decoder) -> Handler:
    name, width = ins.parts[0][:-1], int(ins.parts[0][-1])
    bits = 32 // width
    parts = list(ins.parts[1:])
    add = "add" in parts
    sat = "sat" in parts
    compare = next((p for p in parts if p in _COMPARE), "")
    kinds = [p for p in parts if p in ("u32", "s32")]
    d.need(set(parts) <= {"add", "sat", "u32", "s32", *_COMPARE}, "selectors of video operands")
    d.need(len(kinds) == (2 if name == "vset" else 3))
    out = "u32" if name == "vset" else kinds[0]
    a_kind, b_kind = kinds[-2:]
    a, b, c = (d.read(op, "u32") for op in ins.operands[1:4])
    put = d.write(ins.operands[0], "u32")
    fn = _COMPARE[compare] if name == "vset" else _OPERATIONS[name]
    low = -(1 << (bits - 1)) if out == "s32" else 0
    high = low + (1 << bits) - 1

    def run(w: Warp, m: Mask) -> None:
        value = fn(lanes(a(w), a_kind, width), lanes(b(w), b_kind, width)).astype(S64)
        if sat:
            value = np.clip(value, low, high)
        if add:
            put(w, (value.sum(axis=1) + c(w).astype(S64)).astype(np.uint32), m)
            return
        packed = ((value & ((1 << bits) - 1)) << (bits * np.arange(width))).sum(axis=1)
        put(w, packed.astype(np.uint32), m)

    return run
