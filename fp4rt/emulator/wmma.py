"""wmma: matrix fragments whose layout across a warp is the implementation's own affair.

Here element e of a matrix (row by row) is slot e of the fragment, slots counted over lanes, then
registers, then elements of a register; slots that remain are zero. Sums are formed in float64 and
rounded once (PTX leaves their order open). Source: PTX ISA, "Warp-level matrix instructions".
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from .floats import narrow, widen
from .load_store import load_lanes, store_lanes
from .numerics import bit_product, decode
from .program import Decoder, Handler, register
from .ptx import Instruction, Vec
from .warp import Mask

if TYPE_CHECKING:
    from .warp import Warp

_BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "f32": 4, "f64": 8, "s8": 1, "u8": 1, "s32": 4}
_PER_WORD = {"s4": 8, "u4": 8, "b1": 32}
_BYTES |= dict.fromkeys(_PER_WORD, 4)  # elements below a byte are moved as words along K
_DTYPE: dict[str, Any] = {
    "f16": np.uint16, "bf16": np.uint16, "tf32": np.uint32, "f32": np.uint32, "f64": np.uint64,
    "s8": np.int8, "u8": np.uint8, "s32": np.int32, "s4": np.uint32, "u4": np.uint32,
    "b1": np.uint32,
}  # fmt: skip
_UINT: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SPACES = {"global": "global", "shared": "shared", "shared::cta": "shared"}
_SHAPES = {(16, 16, 16), (32, 8, 16), (8, 32, 16), (16, 16, 8), (8, 8, 4), (8, 8, 32), (8, 8, 128)}


def _shape(ins: Instruction, d: Decoder) -> tuple[int, int, int]:
    for part in ins.parts:
        match = re.fullmatch(r"m(\d+)n(\d+)k(\d+)", part)
        if match:
            found = (int(match[1]), int(match[2]), int(match[3]))
            d.need(found in _SHAPES, f"shape {part}")
            return found
    raise d.unsupported("no shape")


def _matrix_shape(which: str, shape: tuple[int, int, int]) -> tuple[int, int]:
    m, n, k = shape
    return {"a": (m, k), "b": (k, n)}.get(which, (m, n))


def _register_bits(kind: str) -> str:
    return "b64" if kind == "f64" else "b32"


@register("wmma.load")
def _load(ins: Instruction, d: Decoder) -> Handler:
    which, layout, kind = ins.parts[2], ins.parts[5], ins.parts[-1]
    rows, columns = _matrix_shape(which, _shape(ins, d))
    d.need(kind in _BYTES and which in "abc" and layout in ("row", "col"))
    per = _PER_WORD.get(kind, 1)
    if per > 1:
        d.need(layout == ("row" if which == "a" else "col"), "layout of elements below a byte")
        rows, columns = (rows, columns // per) if which == "a" else (rows // per, columns)
    space = next((_SPACES[p] for p in ins.parts if p in _SPACES), "generic")
    dst, src, *stride = ins.operands
    put = d.writes(dst, _register_bits(kind))
    address = d.address(src)
    step = d.read(stride[0], "u32") if stride else None
    dtype, size = _DTYPE[kind], _BYTES[kind]
    word = np.uint64 if kind == "f64" else np.uint32
    d.whole_warp()

    def run(w: Warp, m: Mask) -> None:
        lead = columns if layout == "row" else rows
        if step is not None:
            lead = int(step(w)[0]) // per
        where = _places(int(address(w)[0]), rows, columns, layout, lead, size)
        got = _each(lambda lanes, part: load_lanes(w, lanes, part, size, size, space), where)
        slots = np.zeros(32 * len(put) * (np.dtype(word).itemsize // size), dtype)
        slots[: rows * columns] = got.reshape(-1).view(dtype)
        words = slots.view(word).reshape(32, len(put))
        for i, setter in enumerate(put):
            setter(w, words[:, i], m)

    return run


def _places(base: int, rows: int, columns: int, layout: str, lead: int, size: int) -> Any:
    r, c = np.arange(rows)[:, None], np.arange(columns)
    index = r * lead + c if layout == "row" else c * lead + r
    return (base + index * size).reshape(-1).astype(np.uint64)


def _each(access: Any, addresses: Any) -> Any:
    """Access elements 32 at a time, as lanes do; return what was read."""
    lanes = np.arange(32)
    parts = [
        access(lanes[: len(addresses[i : i + 32])], addresses[i : i + 32])
        for i in range(0, len(addresses), 32)
    ]
    return np.concatenate([p for p in parts if p is not None]) if parts[0] is not None else None


@register("wmma.store")
def _store(ins: Instruction, d: Decoder) -> Handler:
    layout, kind = ins.parts[5], ins.parts[-1]
    rows, columns = _matrix_shape("d", _shape(ins, d))
    d.need(kind in _BYTES and layout in ("row", "col"))
    space = next((_SPACES[p] for p in ins.parts if p in _SPACES), "generic")
    dst, src, *stride = ins.operands
    get = d.reads(src, _register_bits(kind))
    address = d.address(dst)
    step = d.read(stride[0], "u32") if stride else None
    size = _BYTES[kind]
    d.whole_warp()

    def run(w: Warp, m: Mask) -> None:
        lead = int(step(w)[0]) if step is not None else (columns if layout == "row" else rows)
        where = _places(int(address(w)[0]), rows, columns, layout, lead, size)
        words = np.stack([g(w) for g in get], axis=1)
        values = words.reshape(-1).view(_UINT[size])[: rows * columns]
        for i in range(0, len(where), 32):
            part = where[i : i + 32]
            lanes = np.arange(len(part))
            store_lanes(w, lanes, part, values[i : i + 32, None], size, space)

    return run


@register("wmma.mma")
def _mma(ins: Instruction, d: Decoder) -> Handler:
    m_, n_, k_ = _shape(ins, d)
    kinds = [p for p in ins.parts[5:] if p in _BYTES]
    if len(kinds) == 2:  # .dtype.ctype, f16 inputs
        kinds = [kinds[0], "f16", "f16", kinds[1]]
    d.need(len(kinds) == 4, "types")
    out, a_kind, b_kind, c_kind = kinds
    dst, a, b, c = ins.operands
    get = [
        d.reads(op, _register_bits(kind)) for op, kind in ((a, a_kind), (b, b_kind), (c, c_kind))
    ]
    put = d.writes(dst, _register_bits(out))
    d.need(isinstance(dst, Vec))
    saturate = "satfinite" in ins.parts
    integer = out == "s32"
    small = a_kind in _PER_WORD
    operation = "and" if "and" in ins.parts else "xor"
    d.need(a_kind in ("b1", "s4", "u4") or b_kind not in _PER_WORD, "types")
    d.whole_warp()

    def small_product(w: Warp) -> Any:
        words = [np.ascontiguousarray(np.stack([g(w) for g in get[i]]).reshape(-1)) for i in (0, 1)]
        left = words[0].reshape(m_, -1)
        right = np.ascontiguousarray(words[1].reshape(-1, n_).T)
        if a_kind == "b1":
            return bit_product(left, right, operation)
        kinds = zip((left, right), (a_kind, b_kind), strict=True)
        a_, b_ = (decode(x.view(np.uint8), kind).astype(np.int64) for x, kind in kinds)
        return a_ @ b_.T

    def matrix(w: Warp, i: int, kind: str, rows: int, columns: int) -> Any:
        words = np.stack([g(w) for g in get[i]], axis=1).reshape(-1)
        values = words.view(_DTYPE[kind])[: rows * columns].reshape(rows, columns)
        if integer:
            return values.astype(np.int64)
        if kind == "tf32":  # the low 13 bits do not take part
            values = values & np.uint32(0xFFFFE000)
        if kind == "f64":
            return values.view(np.float64)
        flat = np.ascontiguousarray(values).reshape(-1)
        kind = "f32" if kind == "tf32" else kind
        return widen(flat, kind).reshape(rows, columns)

    def run(w: Warp, m: Mask) -> None:
        if small:
            total = small_product(w)
        else:
            total = matrix(w, 0, a_kind, m_, k_) @ matrix(w, 1, b_kind, k_, n_)
        total = total + matrix(w, 2, c_kind, m_, n_)
        if integer:
            if saturate:
                total = np.clip(total, -(2**31), 2**31 - 1)
            flat = total.astype(np.int32).reshape(-1)
        elif out == "f64":
            flat = total.reshape(-1).view(np.uint64)
        else:
            flat = narrow(total.reshape(-1), out)
            flat = flat.view(np.uint32) if out == "f32" else flat
        word = np.uint64 if out == "f64" else np.uint32
        slots = np.zeros(32 * len(put) * (np.dtype(word).itemsize // _BYTES[out]), flat.dtype)
        slots[: m_ * n_] = flat
        words = slots.view(word).reshape(32, len(put))
        for i, setter in enumerate(put):
            setter(w, words[:, i], m)

    return run
