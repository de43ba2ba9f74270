"""Video instructions: on bytes, halves and words of registers, alone or two and four at a time.

Source: PTX ISA, "Scalar Video Instructions" and "SIMD Video Instructions". A source selects parts
(``.b2``, ``.h0``; SIMD: a digit for each lane out of both sources), which are extended by its type;
the result may be saturated, merged into parts of a third source, or combined with it.

An H200 agrees, except where ptxas's own code for the scalar forms departs from the ISA: saturation
of shifts, of unsigned differences and of merged parts, and merging into a part other than the
lowest. Here the ISA holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .program import Decoder, Getter, Handler, register
from .ptx import Instruction, Neg, Operand, Select
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
_SECONDARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add, "min": np.minimum, "max": np.maximum,
}  # fmt: skip


def lanes(values: Any, kind: str, width: int) -> Any:
    """Return uint32 values as int64[n, lanes], signed if `kind` starts with s."""
    bits = 32 // width
    parts = (values[:, None] >> (bits * np.arange(width, dtype=np.uint32))).astype(S64)
    return _extend(parts & ((1 << bits) - 1), kind, bits)


def _extend(values: Any, kind: str, bits: int) -> Any:
    if kind[0] == "s":
        return np.where(values >> (bits - 1), values - (1 << bits), values)
    return values


def _clip(values: Any, kind: str, bits: int) -> Any:
    low = -(1 << (bits - 1)) if kind[0] == "s" else 0
    return np.clip(values, low, low + (1 << bits) - 1)


def _split(op: Operand) -> tuple[Operand, str]:
    """Return an operand without its selector, and the selector."""
    return (op.register, op.selector) if isinstance(op, Select) else (op, "")


# ---------------------------------------------------------------------------------------- SIMD


def _simd_source(d: Decoder, ops: list[Operand], which: int, kind: str, width: int) -> Getter:
    """Return a getter of int64[32, width]: lanes of the pair of sources that a selector picks."""
    letter = "h" if width == 2 else "b"
    a, b = (d.read(_split(op)[0], "u32") for op in ops)
    text = _split(ops[which])[1]
    default = range(which * width, (which + 1) * width)
    picks = [int(digit) for digit in reversed(text[1:])] if text else list(default)
    d.need(len(picks) == width and (not text or text[0] == letter), f"selector .{text}")
    d.need(max(picks) < 2 * width, f"selector .{text}")
    if not text:
        own = b if which else a
        return lambda w: lanes(own(w), kind, width)
    return lambda w: np.concatenate([lanes(x(w), kind, width) for x in (a, b)], axis=1)[:, picks]


@register(*(f"{op}{n}" for op in (*_OPERATIONS, "vset") for n in (2, 4)))
def _simd(ins: Instruction, d: Decoder) -> Handler:
    name, width = ins.parts[0][:-1], int(ins.parts[0][-1])
    bits = 32 // width
    parts = list(ins.parts[1:])
    add = "add" in parts
    sat = "sat" in parts
    compare = next((p for p in parts if p in _COMPARE), "")
    kinds = [p for p in parts if p in ("u32", "s32")]
    d.need(set(parts) <= {"add", "sat", "u32", "s32", *_COMPARE})
    d.need(len(kinds) == (2 if name == "vset" else 3))
    out = "u32" if name == "vset" else kinds[0]
    dst, mask = _split(ins.operands[0])
    sources = list(ins.operands[1:3])
    a, b = (_simd_source(d, sources, i, kinds[i - 2], width) for i in (0, 1))
    c = d.read(ins.operands[3], "u32")
    put = d.write(dst, "u32")
    fn = _COMPARE[compare] if name == "vset" else _OPERATIONS[name]
    chosen = np.array([not mask or str(i) in mask[1:] for i in range(width)])
    d.need(bool(chosen.any()), f"mask .{mask}")

    def run(w: Warp, m: Mask) -> None:
        value = fn(a(w), b(w)).astype(S64)
        if sat:
            value = _clip(value, out, bits)
        third = c(w)
        if add:
            put(w, (value[:, chosen].sum(axis=1) + third.astype(S64)).astype(np.uint32), m)
            return
        value = np.where(chosen, value, lanes(third, "u32", width))
        packed = ((value & ((1 << bits) - 1)) << (bits * np.arange(width))).sum(axis=1)
        put(w, packed.astype(np.uint32), m)

    return run


# -------------------------------------------------------------------------------------- scalar


def _width(selector: str) -> tuple[int, int]:
    """Return (bits, shift) of a scalar selector."""
    if not selector:
        return 32, 0
    bits = 8 if selector[0] == "b" else 16
    return bits, bits * int(selector[1:])


def _source(d: Decoder, op: Operand, kind: str) -> Getter:
    """Return a getter of int64[32]: the selected part, extended by its type."""
    plain, selector = _split(op)
    get = d.read(plain, "u32")
    bits, shift = _width(selector)
    d.need(shift < 32, f"selector .{selector}")
    return lambda w: _extend(get(w).astype(S64) >> shift & ((1 << bits) - 1), kind, bits)


def _finish(d: Decoder, ins: Instruction, kind: str) -> Callable[[Warp, Any, Mask], None]:
    """Return what saturates a result, combines it with the third source and writes it."""
    dst, selector = _split(ins.operands[0])
    bits, shift = _width(selector)
    secondary = next((_SECONDARY[p] for p in ins.parts[1:] if p in _SECONDARY), None)
    third = ins.operands[3] if len(ins.operands) == 4 else None
    d.need((third is not None) == (bool(selector) or secondary is not None), "a third source")
    c = d.read(third, kind) if third is not None else None
    put = d.write(dst, "u32")
    sat = "sat" in ins.parts

    def finish(w: Warp, value: Any, m: Mask) -> None:
        if sat:
            value = _clip(value, kind, bits)
        if c is not None:
            other = c(w).astype(S64)
            if secondary is not None:
                value = secondary(_extend(value & 0xFFFFFFFF, kind, 32), other)
            else:
                part = ((1 << bits) - 1) << shift
                value = (value << shift & part) | (other & ~part)
        put(w, (value & 0xFFFFFFFF).astype(np.uint32), m)

    return finish


@register(*(name for name in _OPERATIONS if name != "vavrg"), "vshl", "vshr", "vset")
def _scalar(ins: Instruction, d: Decoder) -> Handler:
    name, parts = ins.parts[0], ins.parts[1:]
    kinds = [p for p in parts if p in ("u32", "s32")]
    allowed = {"u32", "s32", "sat", "clamp", "wrap", *_SECONDARY}
    if name == "vset":
        compare = next((p for p in parts if p in _COMPARE), "")
        allowed |= {compare}
        kinds = ["u32", *kinds]
        fn = _COMPARE[compare]
    elif name in ("vshl", "vshr"):
        limit = "wrap" in parts

        def fn(x: Any, n: Any) -> Any:
            n = n & 31 if limit else np.minimum(n, 32)
            return x << n if name == "vshl" else x >> n

    else:
        fn = _OPERATIONS[name]
    d.need(set(parts) <= allowed and len(kinds) == 3)
    a, b = (_source(d, ins.operands[i], kinds[i]) for i in (1, 2))
    finish = _finish(d, ins, kinds[0])
    return lambda w, m: finish(w, fn(a(w), b(w)).astype(S64), m)


@register("vmad")
def _vmad(ins: Instruction, d: Decoder) -> Handler:
    parts = ins.parts[1:]
    kinds = [p for p in parts if p in ("u32", "s32")]
    d.need(len(kinds) == 3 and set(parts) <= {"u32", "s32", "sat", "po", "shr7", "shr15"})
    plain: list[Operand] = []
    negative: list[bool] = []
    for op in ins.operands[1:4]:
        negative.append(isinstance(op, Neg))
        plain.append(op.operand if isinstance(op, Neg) else op)
    a, b = (_source(d, plain[i], kinds[i + 1]) for i in (0, 1))
    flip = negative[0] != negative[1]
    signed = "s32" in kinds[1:] or flip or negative[2]
    c = d.read(plain[2], "s32" if signed else "u32")
    shift = 7 if "shr7" in parts else 15 if "shr15" in parts else 0
    low, high = (-(2**31), 2**31 - 1) if signed else (0, 2**32 - 1)
    put = d.write(ins.operands[0], "u32")

    def one(x: int, y: int, z: int) -> int:
        product = x * y
        one = int("po" in parts)
        if not one and flip:
            product, one = ~product, 1
        elif not one and negative[2]:
            z, one = ~z, 1
        result = (product + z + one) >> shift
        if "sat" in parts:
            result = min(max(result, low), high)
        return result & 0xFFFFFFFF

    def run(w: Warp, m: Mask) -> None:
        triples = zip(a(w).tolist(), b(w).tolist(), c(w).tolist(), strict=True)
        put(w, np.array([one(*triple) for triple in triples], np.uint32), m)

    return run
