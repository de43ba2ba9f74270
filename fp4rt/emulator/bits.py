"""Bit instructions: counting, fields, logic, shifts and byte permutations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .alu import S64, U32, U64, compute, modifiers, uniform
from .program import DTYPES, Decoder, Handler, register
from .ptx import TYPE_BYTES, Imm, Instruction, Not, Pair
from .warp import Mask

if TYPE_CHECKING:
    from .warp import Warp

Function = Callable[..., Any]


def popcount(a: Any) -> Any:
    """Return the number of set bits."""
    return np.bitwise_count(a)


def leading_zeros(a: Any) -> Any:
    """Return the number of leading zero bits of unsigned values."""
    bits = a.dtype.itemsize * 8
    x = a.copy()
    shift = 1
    while shift < bits:
        x |= x >> x.dtype.type(shift)
        shift *= 2
    return (bits - np.bitwise_count(x)).astype(U32)


def reverse_bits(a: Any) -> Any:
    """Return the bits in reverse order."""
    n = a.dtype.itemsize
    bits = np.unpackbits(a.view(np.uint8).reshape(-1, n), axis=1, bitorder="little")
    return np.packbits(bits[:, ::-1], axis=1, bitorder="little").reshape(-1).view(a.dtype)


@register("popc", "clz")
def _popc(ins: Instruction, d: Decoder) -> Handler:
    fn = popcount if ins.parts[0] == "popc" else leading_zeros
    return uniform(d, ins, fn, "u" + ins.parts[-1][1:], "u32")


@register("brev")
def _brev(ins: Instruction, d: Decoder) -> Handler:
    return uniform(d, ins, reverse_bits, ins.parts[-1])


@register("bfind")
def _bfind(ins: Instruction, d: Decoder) -> Handler:
    type_ = ins.parts[-1]
    amount = "shiftamt" in modifiers(d, ins, {"shiftamt"})
    bits = TYPE_BYTES[type_] * 8

    def find(a: Any) -> Any:
        if type_[0] == "s":
            a = np.where(a < 0, ~a, a)
        zeros = leading_zeros(np.ascontiguousarray(a).view(DTYPES["u" + type_[1:]]))
        found = zeros if amount else U32(bits - 1) - zeros
        return np.where(zeros == bits, U32(0xFFFFFFFF), found)

    return uniform(d, ins, find, type_, "u32")


@register("fns")
def _fns(ins: Instruction, d: Decoder) -> Handler:
    def find(mask: Any, base: Any, offset: Any) -> Any:
        out = np.full(len(mask), 0xFFFFFFFF, U32)
        for lane in range(len(mask)):
            bits, start, n = int(mask[lane]), int(base[lane]), int(offset[lane])
            if n == 0:
                if start < 32 and bits >> start & 1:
                    out[lane] = start
                continue
            places = range(start, 32) if n > 0 else range(min(start, 31), -1, -1)
            hits = [i for i in places if bits >> i & 1]
            if len(hits) >= abs(n):
                out[lane] = hits[abs(n) - 1]
        return out

    dst, mask, base, offset = ins.operands
    return compute(d, find, dst, "u32", [(mask, "u32"), (base, "u32"), (offset, "s32")])


@register("bfe")
def _bfe(ins: Instruction, d: Decoder) -> Handler:
    type_ = ins.parts[-1]
    bits = TYPE_BYTES[type_] * 8
    unsigned = DTYPES["u" + type_[1:]]

    def extract(a: Any, pos: Any, length: Any) -> Any:
        pos, length = (pos & U32(0xFF)).astype(S64), (length & U32(0xFF)).astype(S64)
        u = a.view(unsigned)
        top = np.minimum(pos + length - 1, bits - 1)
        sign = (u >> np.maximum(top, 0).astype(unsigned)) & unsigned(1)
        if type_[0] == "u":
            sign = np.zeros_like(sign)
        sign = np.where(length == 0, unsigned(0), sign)
        moved = np.where(pos >= bits, unsigned(0), u >> np.minimum(pos, bits - 1).astype(unsigned))
        mask = _low_mask(np.minimum(length, np.maximum(bits - pos, 0)), unsigned)
        out = (moved & mask) | np.where(sign != 0, ~mask, unsigned(0))
        return out.view(a.dtype)

    dst, a, b, c = ins.operands
    return compute(d, extract, dst, type_, [(a, type_), (b, "u32"), (c, "u32")])


def _low_mask(length: Any, dtype: Any) -> Any:
    bits = np.dtype(dtype).itemsize * 8
    full = ~dtype(0)
    short = np.minimum(length, bits - 1).astype(dtype)
    return np.where(length >= bits, full, (dtype(1) << short) - dtype(1))


@register("bfi")
def _bfi(ins: Instruction, d: Decoder) -> Handler:
    type_ = "u" + ins.parts[-1][1:]
    dtype = DTYPES[type_]
    bits = TYPE_BYTES[type_] * 8

    def insert(a: Any, b: Any, pos: Any, length: Any) -> Any:
        pos, length = (pos & U32(0xFF)).astype(S64), (length & U32(0xFF)).astype(S64)
        length = np.minimum(length, np.maximum(bits - pos, 0))
        shift = np.minimum(pos, bits - 1).astype(dtype)
        mask = np.where(pos >= bits, dtype(0), _low_mask(length, dtype) << shift)
        return (b & ~mask) | ((a << shift) & mask)

    dst, a, b, c, e = ins.operands
    return compute(d, insert, dst, type_, [(a, type_), (b, type_), (c, "u32"), (e, "u32")])


@register("bmsk")
def _bmsk(ins: Instruction, d: Decoder) -> Handler:
    wrap = "wrap" in modifiers(d, ins, {"wrap", "clamp"})

    def make(pos: Any, length: Any) -> Any:
        if wrap:
            pos, length = pos & U32(31), length & U32(31)
        p, n = pos.astype(S64), length.astype(S64)
        mask = _low_mask(np.minimum(n, 64), U64)
        return np.where(p >= 32, U32(0), (mask << np.minimum(p, 32).astype(U64)).astype(U32))

    return uniform(d, ins, make, "u32")


@register("szext")
def _szext(ins: Instruction, d: Decoder) -> Handler:
    type_ = ins.parts[-1]
    wrap = "wrap" in modifiers(d, ins, {"wrap", "clamp"})

    def extend(a: Any, length: Any) -> Any:
        n = (length & U32(31) if wrap else np.minimum(length, U32(32))).astype(S64)
        mask = _low_mask(n, U32)
        sign = np.where(n > 0, (a.view(U32) >> np.maximum(n - 1, 0).astype(U32)) & U32(1), 0)
        out = a.view(U32) & mask
        if type_ == "s32":
            out = np.where(sign != 0, out | ~mask, out)
        return out.astype(U32).view(a.dtype)

    dst, a, b = ins.operands
    return compute(d, extend, dst, type_, [(a, type_), (b, "u32")])


@register("and", "or", "xor", "not", "cnot")
def _logic(ins: Instruction, d: Decoder) -> Handler:
    type_ = ins.parts[-1]
    d.need(type_ in ("pred", "b16", "b32", "b64") and len(ins.parts) == 2)
    name = ins.parts[0]
    if name == "cnot":
        return uniform(d, ins, lambda a: a == 0, type_)
    fn: Any = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert}
    fn = fn[name]
    if type_ == "pred" and any(isinstance(op, Not) for op in ins.operands):
        flips = [isinstance(op, Not) for op in ins.operands[1:]]
        plain = [op.operand if isinstance(op, Not) else op for op in ins.operands[1:]]

        def flipped(*values: Any) -> Any:
            return fn(*(~v if flip else v for v, flip in zip(values, flips, strict=True)))

        return compute(d, flipped, ins.operands[0], "pred", [(op, "pred") for op in plain])
    return uniform(d, ins, fn, type_)


@register("lop3")
def _lop3(ins: Instruction, d: Decoder) -> Handler:
    boolean = next((p for p in ins.parts[1:] if p in ("or", "and")), None)
    dst, a, b, c, table_op, *rest = ins.operands
    table = d.constant(table_op)
    fn = _lookup(table)
    if boolean is None:
        return compute(d, fn, dst, "b32", [(op, "b32") for op in (a, b, c)])
    assert isinstance(dst, Pair)
    get = [d.read(op, "b32") for op in (a, b, c)]
    put, put_pred = d.write(dst.first, "b32"), d.write(dst.second, "pred")
    last, flip = (rest[0].operand, True) if isinstance(rest[0], Not) else (rest[0], False)
    q = d.read(last, "pred")

    def run(w: Warp, m: Mask) -> None:
        value = fn(*(g(w) for g in get))
        other = ~q(w) if flip else q(w)
        hit = (value != 0) | other if boolean == "or" else (value != 0) & other
        put(w, value, m)
        put_pred(w, hit, m)

    return run


def _lookup(table: int) -> Function:
    """Return the bitwise function of three inputs with this truth table."""
    known: dict[int, Function] = {
        0xC0: lambda a, b, c: a & b,
        0xFC: lambda a, b, c: a | b,
        0x3C: lambda a, b, c: a ^ b,
        0x80: lambda a, b, c: a & b & c,
        0xFE: lambda a, b, c: a | b | c,
        0x96: lambda a, b, c: a ^ b ^ c,
        0xEA: lambda a, b, c: (a & b) | c,
        0xF8: lambda a, b, c: a | (b & c),
        0x6A: lambda a, b, c: (a & b) ^ c,
        0x78: lambda a, b, c: a ^ (b & c),
        0xE2: lambda a, b, c: (a & b) | (c & ~b),
        0xCA: lambda a, b, c: (a & b) | (c & ~a),
        0xB8: lambda a, b, c: (a & ~b) | (c & b),
        0xE8: lambda a, b, c: (a & b) | (c & (a | b)),
        0xA8: lambda a, b, c: (a | b) & c,
        0xE0: lambda a, b, c: a & (b | c),
        0x0C: lambda a, b, c: ~a & b,
        0x30: lambda a, b, c: a & ~b,
        0xAC: lambda a, b, c: (~a & b) | (a & c),
    }
    if table in known:
        return known[table]

    def general(a: Any, b: Any, c: Any) -> Any:
        out = np.zeros_like(a)
        for i in range(8):
            if table >> i & 1:
                term = (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
                out |= term
        return out

    return general


@register("shl", "shr")
def _shift(ins: Instruction, d: Decoder) -> Handler:
    type_ = ins.parts[-1]
    dtype = DTYPES[type_]
    bits = TYPE_BYTES[type_] * 8
    left = ins.parts[0] == "shl"
    dst, a, b = ins.operands
    op = np.left_shift if left else np.right_shift
    signed = dtype(0).dtype.kind == "i"
    if isinstance(b, Imm):
        amount = b.value & 0xFFFFFFFF
        if amount >= bits:
            if left or not signed:
                return compute(d, np.zeros_like, dst, type_, [(a, type_)])
            amount = bits - 1
        step = dtype(amount)
        return compute(d, lambda x: op(x, step), dst, type_, [(a, type_)])

    def shift(x: Any, n: Any) -> Any:
        if left or not signed:
            moved = op(x, np.minimum(n, U32(bits - 1)).astype(dtype))
            return np.where(n >= bits, dtype(0), moved)
        return op(x, np.minimum(n, U32(bits - 1)).astype(dtype))

    return compute(d, shift, dst, type_, [(a, type_), (b, "u32")])


@register("shf")
def _shf(ins: Instruction, d: Decoder) -> Handler:
    _, direction, mode, _ = ins.parts
    d.need(direction in ("l", "r") and mode in ("clamp", "wrap"))

    def funnel(a: Any, b: Any, c: Any) -> Any:
        n = (c & U32(31) if mode == "wrap" else np.minimum(c, U32(32))).astype(U64)
        both = (b.astype(U64) << U64(32)) | a
        if direction == "l":
            return ((both << n) >> U64(32)).astype(U32)
        return (both >> n).astype(U32)

    return uniform(d, ins, funnel, "u32")


_PRMT = {
    "f4e": lambda c: [c, c + 1, c + 2, c + 3],
    "b4e": lambda c: [c, (c - 1) & 7, (c - 2) & 7, (c - 3) & 7],
    "rc8": lambda c: [c, c, c, c],
    "ecl": lambda c: [c, max(c, 1), max(c, 2), 3],
    "ecr": lambda c: [0, min(c, 1), min(c, 2), c],
    "rc16": lambda c: [2 * (c & 1), 2 * (c & 1) + 1] * 2,
}


def _fixed_permutation(selector: int) -> Function:
    """Return the byte permutation of two words for one selector."""
    nibbles = [selector >> (4 * i) & 0xF for i in range(4)]
    order = [n & 7 for n in nibbles]
    signs = [i for i, n in enumerate(nibbles) if n & 8]

    def fixed(x: Any, y: Any) -> Any:
        pool = np.empty((max(len(x), len(y)), 8), np.uint8)
        pool[:, :4] = x.view(np.uint8).reshape(-1, 4)
        pool[:, 4:] = y.view(np.uint8).reshape(-1, 4)
        out = pool[:, order]
        for i in signs:
            out[:, i] = np.where(out[:, i] & 0x80, 0xFF, 0)
        return np.ascontiguousarray(out).reshape(-1).view(U32)

    return fixed


@register("prmt")
def _prmt(ins: Instruction, d: Decoder) -> Handler:
    mode = ins.parts[2] if len(ins.parts) == 3 else None
    dst, a, b, c = ins.operands
    if mode is not None:
        table = np.array([[i & 7 for i in _PRMT[mode](s)] for s in range(4)])

        def by_mode(x: Any, y: Any, sel: Any) -> Any:
            pool = np.concatenate(
                [x.view(np.uint8).reshape(-1, 4), y.view(np.uint8).reshape(-1, 4)], 1
            )
            picks = table[sel & U32(3)]
            return np.take_along_axis(pool, picks, 1).reshape(-1).view(U32)

        return uniform(d, ins, by_mode, "u32")
    if isinstance(c, Imm):
        return compute(d, _fixed_permutation(c.value), dst, "u32", [(a, "u32"), (b, "u32")])
    known: dict[int, Function] = {}

    def general(x: Any, y: Any, sel: Any) -> Any:
        if 0 not in (sel == sel[0]).tobytes():
            selector = int(sel[0]) & 0xFFFF
            if selector not in known:
                known[selector] = _fixed_permutation(selector)
            return known[selector](x, y)
        pool = np.concatenate([x.view(np.uint8).reshape(-1, 4), y.view(np.uint8).reshape(-1, 4)], 1)
        nibbles = (sel[:, None] >> (4 * np.arange(4, dtype=U32))) & U32(15)
        out = np.take_along_axis(pool, (nibbles & U32(7)).astype(np.intp), 1)
        out = np.where(nibbles & U32(8), np.where(out & 0x80, 0xFF, 0), out).astype(np.uint8)
        return np.ascontiguousarray(out).reshape(-1).view(U32)

    return uniform(d, ins, general, "u32")
