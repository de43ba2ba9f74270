"""ldmatrix, stmatrix and movmatrix: 8x8 matrices of 16-bit elements across a warp.

Lane t holds elements (t / 4, 2 * (t % 4)) and the next one of each matrix; with ``.trans`` the
matrix is transposed on the way. Source: PTX ISA, "Warp-level matrix load instruction".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .load_store import load_lanes, store_lanes
from .program import Decoder, Handler, register
from .ptx import Instruction
from .warp import Mask

if TYPE_CHECKING:
    from .warp import Warp

_LANES = np.arange(32)


def _shape(ins: Instruction, d: Decoder) -> tuple[int, bool, str]:
    parts = ins.parts
    d.need(parts[1:3] == ("sync", "aligned"))
    if parts[3] != "m8n8" or parts[-1] != "b16":
        raise d.unsupported("only m8n8 matrices of 16-bit elements are emulated")
    d.need(set(parts[5:-1]) <= {"trans", "shared", "shared::cta"})
    space = "shared" if {"shared", "shared::cta"} & set(parts) else "generic"
    return int(parts[4][1:]), "trans" in parts, space


@register("ldmatrix")
def _ldmatrix(ins: Instruction, d: Decoder) -> Handler:
    count, transposed, space = _shape(ins, d)
    put = d.writes(ins.operands[0], "b32")
    d.need(len(put) == count, "destination vector")
    address = d.address(ins.operands[1])
    lanes = _LANES[: 8 * count]
    d.whole_warp()

    def run(w: Warp, m: Mask) -> None:
        got = load_lanes(w, lanes, address(w)[: 8 * count], 16, 2, space)
        matrices = got.reshape(count, 8, 8)
        if transposed:
            matrices = matrices.transpose(0, 2, 1)
        words = np.ascontiguousarray(matrices).view(np.uint32).reshape(count, 32)
        for i, setter in enumerate(put):
            setter(w, words[i], m)

    return run


@register("stmatrix")
def _stmatrix(ins: Instruction, d: Decoder) -> Handler:
    count, transposed, space = _shape(ins, d)
    get = d.reads(ins.operands[1], "b32")
    d.need(len(get) == count, "source vector")
    address = d.address(ins.operands[0])
    lanes = _LANES[: 8 * count]
    d.whole_warp()

    def run(w: Warp, m: Mask) -> None:
        words = np.stack([g(w) for g in get])
        matrices: Any = words.view(np.uint16).reshape(count, 8, 8)
        if transposed:
            matrices = matrices.transpose(0, 2, 1)
        rows = np.ascontiguousarray(matrices).reshape(8 * count, 8)
        store_lanes(w, lanes, address(w)[: 8 * count], rows, 16, space)

    return run


@register("movmatrix.sync.aligned.m8n8.trans.b16")
def _movmatrix(ins: Instruction, d: Decoder) -> Handler:
    get, put = d.read(ins.operands[1], "b32"), d.write(ins.operands[0], "b32")
    d.whole_warp()

    def run(w: Warp, m: Mask) -> None:
        matrix = get(w).view(np.uint16).reshape(8, 8)
        put(w, np.ascontiguousarray(matrix.T).view(np.uint32).reshape(32), m)

    return run
