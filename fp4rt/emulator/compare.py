"""Comparison, selection and moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .alu import U32, U64, compute, flush
from .program import DTYPES, Decoder, Handler, register
from .ptx import TYPE_BYTES, Instruction, Not, Operand, Pair, Reg, Sink, Vec
from .warp import Mask

if TYPE_CHECKING:
    from .warp import Warp

Function = Callable[..., Any]
_COMPARE: dict[str, Function] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater,
    "hs": np.greater_equal,
}  # fmt: skip
_ORDERED = {"eq", "lt", "le", "gt", "ge"}


def _float_compare(name: str) -> Function:
    if name == "num":
        return lambda a, b: (a == a) & (b == b)
    if name == "nan":
        return lambda a, b: (a != a) | (b != b)
    if name == "ne":
        return lambda a, b: (a != b) & (a == a) & (b == b)
    if name in _ORDERED:
        return _COMPARE[name]
    base = _COMPARE["ne" if name == "neu" else name[:2]]
    return lambda a, b: base(a, b) | (a != a) | (b != b)


def comparison(d: Decoder, name: str, type_: str, ftz: bool) -> tuple[Function, str]:
    """Return (function of two sources, their type) for a setp/set comparison."""
    if type_ in ("f32", "f64", "f16"):
        fn = _float_compare(name)
        if ftz and type_ == "f32":
            return (lambda a, b: fn(flush(a), flush(b))), type_
        return fn, type_
    if type_ == "bf16":
        from .rounding import bf16_to_f32

        fn = _float_compare(name)
        return (lambda a, b: fn(bf16_to_f32(a), bf16_to_f32(b))), "u16"
    if type_ in ("f16x2", "bf16x2"):
        fn = _float_compare(name)
        if type_ == "f16x2":
            return (lambda a, b: fn(a.view(np.float16), b.view(np.float16))), "u32"
        from .rounding import bf16_to_f32

        return (
            lambda a, b: fn(bf16_to_f32(a.view(np.uint16)), bf16_to_f32(b.view(np.uint16)))
        ), "u32"
    d.need(name in _COMPARE and type_ in DTYPES, f"comparison .{name}.{type_}")
    if name in ("lo", "ls", "hi", "hs"):
        type_ = "u" + type_[1:]
    return _COMPARE[name], type_


_BOOL: dict[str, Function] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _pred(d: Decoder, op: Operand) -> Callable[[Any], Any]:
    if isinstance(op, Not):
        inner = d.read(op.operand, "pred")
        return lambda w: ~inner(w)
    return d.read(op, "pred")


@register("setp")
def _setp(ins: Instruction, d: Decoder) -> Handler:
    name = ins.parts[1]
    boolean = next((p for p in ins.parts[2:-1] if p in _BOOL), None)
    d.need(set(ins.parts[2:-1]) <= {"ftz", *_BOOL})
    fn, type_ = comparison(d, name, ins.parts[-1], "ftz" in ins.parts)
    dst, a, b, *rest = ins.operands
    pair = isinstance(dst, Pair)
    packed = ins.parts[-1] in ("f16x2", "bf16x2")
    if not pair and boolean is None and not packed:
        return compute(d, fn, dst, "pred", [(a, type_), (b, type_)])
    first, second = (dst.first, dst.second) if isinstance(dst, Pair) else (dst, Sink())
    put, put2 = d.write(first, "pred"), d.write(second, "pred")
    x, y = d.read(a, type_), d.read(b, type_)
    c = _pred(d, rest[0]) if boolean else None
    join = _BOOL[boolean] if boolean else None

    def run(w: Warp, m: Mask) -> None:
        hit = fn(x(w), y(w))
        hits = (hit[0::2], hit[1::2]) if packed else (hit, ~hit)
        if join is not None and c is not None:
            other = c(w)
            hits = (join(hits[0], other), join(hits[1], other))
        put(w, hits[0].copy(), m)
        put2(w, hits[1], m)

    return run


@register("set")
def _set(ins: Instruction, d: Decoder) -> Handler:
    name = ins.parts[1]
    out, source = ins.parts[-2], ins.parts[-1]
    boolean = next((p for p in ins.parts[2:-2] if p in _BOOL), None)
    fn, type_ = comparison(d, name, source, "ftz" in ins.parts)
    dst, a, b, *rest = ins.operands
    x, y = d.read(a, type_), d.read(b, type_)
    put = d.write(dst, "u16" if out in ("f16", "bf16") else out)
    c = _pred(d, rest[0]) if boolean else None
    true: Any = {"f32": np.float32(1), "f16": np.uint16(0x3C00), "bf16": np.uint16(0x3F80),
                 "f16x2": 0x3C00, "bf16x2": 0x3F80}.get(out, -1)  # fmt: skip
    kind = type(true)
    packed = source in ("f16x2", "bf16x2")

    def run(w: Warp, m: Mask) -> None:
        hit = fn(x(w), y(w))
        if c is not None and boolean is not None:
            other = c(w)
            hit = _BOOL[boolean](hit, np.repeat(other, 2) if packed else other)
        if packed:
            value = 0xFFFF if true == -1 else true
            put(w, np.where(hit, value, 0).astype(np.uint16).view(U32), m)
        elif true == -1:
            dtype = DTYPES[out]
            put(w, np.where(hit, ~dtype(0), dtype(0)), m)
        else:
            put(w, np.where(hit, true, kind(0)), m)

    return run


@register("selp")
def _selp(ins: Instruction, d: Decoder) -> Handler:
    dst, a, b, p = ins.operands
    type_ = ins.parts[-1]
    if isinstance(p, Not):
        p, a, b = p.operand, b, a
    return compute(
        d, lambda x, y, c: np.where(c, x, y), dst, type_, [(a, type_), (b, type_), (p, "pred")]
    )


@register("slct")
def _slct(ins: Instruction, d: Decoder) -> Handler:
    type_, cond = ins.parts[-2], ins.parts[-1]
    ftz = "ftz" in ins.parts
    dst, a, b, c = ins.operands

    def pick(x: Any, y: Any, z: Any) -> Any:
        if ftz:
            z = flush(z)
        return np.where(z >= 0, x, y)

    return compute(d, pick, dst, type_, [(a, type_), (b, type_), (c, cond)])


@register("mov")
def _mov(ins: Instruction, d: Decoder) -> Handler:
    type_ = ins.parts[-1]
    d.need(len(ins.parts) == 2)
    dst, src = ins.operands
    if isinstance(dst, Vec):
        return _unpack(dst, src, type_, d)
    if isinstance(src, Vec):
        return _pack(dst, src, type_, d)
    if type_ == "b128":
        get, (file, row) = d.read(src, "b128"), d.row(dst, "b128")

        def wide(w: Warp, m: Mask) -> None:
            lanes = w.lanes(m)
            w.files[file][row][lanes] = get(w)[lanes]

        return wide
    if isinstance(src, Not):
        return compute(d, np.invert, dst, type_, [(src.operand, "pred")])
    file, row = d.row(dst, type_)
    file2, row2 = d.row(src, type_)

    def run(w: Warp, m: Mask) -> None:
        if m is None:
            w.files[file][row][:] = w.files[file2][row2]
        else:
            np.copyto(w.files[file][row], w.files[file2][row2], where=m)

    return run


def _element(type_: str, n: int) -> tuple[int, str]:
    size = TYPE_BYTES[type_] // n
    return size, {1: "b16", 2: "b16", 4: "b32", 8: "b64"}[size]


def _unpack(dst: Vec, src: Operand, type_: str, d: Decoder) -> Handler:
    n = len(dst.items)
    size, kind = _element(type_, n)
    dtype = {1: np.uint8, 2: np.uint16, 4: U32, 8: U64}[size]
    get = d.read(src, type_)
    put = []
    for op in dst.items:
        if isinstance(op, Reg) and TYPE_BYTES[op.type] != size and size == 1:
            put.append(d.write(op, f"b{max(TYPE_BYTES[op.type], 2) * 8}"))
        else:
            put.append(d.write(op, kind))

    def run(w: Warp, m: Mask) -> None:
        parts = get(w).view(dtype).reshape(-1, n).copy()
        for i, setter in enumerate(put):
            setter(w, parts[:, i], m)

    return run


def _pack(dst: Operand, src: Vec, type_: str, d: Decoder) -> Handler:
    n = len(src.items)
    size, kind = _element(type_, n)
    dtype = {1: np.uint8, 2: np.uint16, 4: U32, 8: U64}[size]
    get = []
    for op in src.items:
        if isinstance(op, Reg) and size == 1:
            get.append(d.read(op, f"b{max(TYPE_BYTES[op.type], 2) * 8}"))
        else:
            get.append(d.read(op, kind))
    file, row = d.row(dst, type_)
    whole = {2: np.uint16, 4: U32, 8: U64, 16: U64}[TYPE_BYTES[type_]]

    def run(w: Warp, m: Mask) -> None:
        value = np.stack([g(w).astype(dtype) for g in get], axis=1).view(whole)
        if type_ == "b128":
            lanes = w.lanes(m)
            w.files[file][row][lanes] = value[lanes]
        elif m is None:
            w.files[file][row][:] = value[:, 0]
        else:
            np.copyto(w.files[file][row], value[:, 0], where=m)

    return run
