"""Integer, bit, predicate, comparison and move instructions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .program import DTYPES, FILE, Decoder, Handler, register
from .ptx import TYPE_BYTES, Imm, Instruction, Not, Operand, Pair, Reg, Sink, Vec
from .warp import Mask

if TYPE_CHECKING:
    from .warp import Warp

U32, U64, S32, S64 = np.uint32, np.uint64, np.int32, np.int64
ONE64 = np.uint64(1)
Function = Callable[..., Any]


def compute(
    d: Decoder, fn: Function, dst: Operand, out: str, sources: list[tuple[Operand, str]]
) -> Handler:
    """Return a handler for ``dst = fn(*sources)``, lane by lane."""
    rows = [d.row(op, type_) for op, type_ in sources]
    if isinstance(dst, Sink):
        return lambda w, m: None
    if not isinstance(dst, Reg):
        raise d.illegal("destination must be a register")
    file, row = d.row(dst, out)
    copyto = np.copyto
    if len(rows) == 1:
        ((fa, ra),) = rows

        def run1(w: Warp, m: Mask) -> None:
            f = w.files
            if m is None:
                f[file][row][:] = fn(f[fa][ra])
            else:
                copyto(f[file][row], fn(f[fa][ra]), where=m)

        return run1
    if len(rows) == 2:
        (fa, ra), (fb, rb) = rows
        if isinstance(fn, np.ufunc) and file == fa == fb:

            def direct(w: Warp, m: Mask) -> None:
                f = w.files[file]
                if m is None:
                    fn(f[ra], f[rb], out=f[row])
                else:
                    copyto(f[row], fn(f[ra], f[rb]), where=m)

            return direct

        def run2(w: Warp, m: Mask) -> None:
            f = w.files
            if m is None:
                f[file][row][:] = fn(f[fa][ra], f[fb][rb])
            else:
                copyto(f[file][row], fn(f[fa][ra], f[fb][rb]), where=m)

        return run2

    def run(w: Warp, m: Mask) -> None:
        f = w.files
        value = fn(*[f[file_][row_] for file_, row_ in rows])
        if m is None:
            f[file][row][:] = value
        else:
            copyto(f[file][row], value, where=m)

    return run


def uniform(d: Decoder, ins: Instruction, fn: Function, type_: str, out: str = "") -> Handler:
    """Return a handler where all sources have one type."""
    return compute(d, fn, ins.operands[0], out or type_, [(op, type_) for op in ins.operands[1:]])


def modifiers(d: Decoder, ins: Instruction, allowed: set[str]) -> set[str]:
    """Return the parts between the opcode and the type; fault on an unknown one."""
    found = set(ins.parts[1:-1])
    d.need(found <= allowed, f"modifier {', '.join(sorted(found - allowed))}")
    return found


def halves(fn: Function) -> Function:
    """Return `fn` applied to both 16-bit halves of 32-bit values, given as the right view."""

    def packed(*values: Any) -> Any:
        return np.ascontiguousarray(fn(*values)).view(U32)

    return packed


def packed16(fn: Function, dtype: Any) -> Function:
    """Return `fn` on 16-bit pairs packed in uint32."""
    return lambda *values: np.ascontiguousarray(fn(*(v.view(dtype) for v in values))).view(U32)


# ------------------------------------------------------------------------------ add, multiply


def _cc(d: Decoder) -> int:
    return d.program.rows.of("pred", (d.function.name, "%cc"))


def _saturate(wide: Any) -> Any:
    return np.clip(wide, -(2**31), 2**31 - 1).astype(S32)


def integer_add(ins: Instruction, d: Decoder, subtract: bool) -> Handler:
    """Decode add/sub of integers."""
    type_ = ins.parts[-1]
    mods = modifiers(d, ins, {"cc", "sat"})
    op = np.subtract if subtract else np.add
    if "cc" in mods:
        return _carry(ins, d, op is np.subtract, False)
    if type_ in ("u16x2", "s16x2"):
        return uniform(d, ins, packed16(op, np.uint16), "b32")
    if "sat" in mods:
        d.need(type_ == "s32", "saturation is for .s32")
        return uniform(d, ins, lambda a, b: _saturate(op(a.astype(S64), b)), "s32")
    return uniform(d, ins, op, "u" + type_[1:])


def _carry(ins: Instruction, d: Decoder, subtract: bool, use: bool) -> Handler:
    type_ = "u" + ins.parts[-1][1:]
    flag = _cc(d)
    a, b = d.read(ins.operands[1], type_), d.read(ins.operands[2], type_)
    put = d.write(ins.operands[0], type_)
    sets = "cc" in ins.parts

    def run(w: Warp, m: Mask) -> None:
        x, y = a(w), b(w)
        carry = w.files[0][flag].astype(x.dtype) if use else x.dtype.type(0)
        if subtract:
            out = x - y - carry
            over = (x < y) | ((x == y) & (carry != 0))
        else:
            out = x + y + carry
            over = (out < x) | ((out == x) & (carry != 0))
        if sets:
            np.copyto(w.files[0][flag], over, where=w.active(m))
        put(w, out, m)

    return run


@register("addc", "subc")
def _addc(ins: Instruction, d: Decoder) -> Handler:
    modifiers(d, ins, {"cc"})
    return _carry(ins, d, ins.parts[0] == "subc", True)


def mul_hi(a: Any, b: Any) -> Any:
    """Return the high half of the full product of equal integer types."""
    bits = a.dtype.itemsize * 8
    if bits < 64:
        wide = S64 if a.dtype.kind == "i" else U64
        return ((a.astype(wide) * b.astype(wide)) >> wide(bits)).astype(a.dtype)
    low, shift = U64(0xFFFFFFFF), U64(32)
    ua, ub = a.view(U64), b.view(U64)
    a0, a1, b0, b1 = ua & low, ua >> shift, ub & low, ub >> shift
    mid = a1 * b0 + (a0 * b0 >> shift)
    mid2 = a0 * b1 + (mid & low)
    high = a1 * b1 + (mid >> shift) + (mid2 >> shift)
    if a.dtype.kind == "i":
        high = high - np.where(a < 0, ub, U64(0)) - np.where(b < 0, ua, U64(0))
    return high.view(a.dtype)


_WIDER = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}


def integer_mul(ins: Instruction, d: Decoder, add: bool) -> Handler:
    """Decode mul/mad of integers."""
    type_ = ins.parts[-1]
    mods = modifiers(d, ins, {"lo", "hi", "wide", "sat", "cc"})
    dst, *src = ins.operands
    if "wide" in mods:
        wide = _WIDER[type_]
        dtype = DTYPES[wide]
        if add:
            return compute(
                d, lambda a, b, c: a.astype(dtype) * b.astype(dtype) + c, dst, wide,
                [(src[0], type_), (src[1], type_), (src[2], wide)],
            )  # fmt: skip
        return compute(d, lambda a, b: a.astype(dtype) * b, dst, wide, [(op, type_) for op in src])
    if "cc" in mods:
        return _mad_carry(ins, d, False)
    if "hi" in mods:
        if "sat" in mods:
            return uniform(d, ins, lambda a, b, c: _saturate(mul_hi(a, b).astype(S64) + c), type_)
        if add:
            return uniform(d, ins, lambda a, b, c: mul_hi(a, b) + c, type_)
        return uniform(d, ins, mul_hi, type_)
    d.need("lo" in mods, "needs .lo, .hi or .wide")
    if add:
        return uniform(d, ins, lambda a, b, c: a * b + c, "u" + type_[1:])
    return uniform(d, ins, np.multiply, "u" + type_[1:])


def _mad_carry(ins: Instruction, d: Decoder, use: bool) -> Handler:
    type_ = ins.parts[-1]
    flag = _cc(d)
    sets = "cc" in ins.parts
    hi = "hi" in ins.parts
    a, b, c = (d.read(op, type_) for op in ins.operands[1:])
    put = d.write(ins.operands[0], "u" + type_[1:])

    def run(w: Warp, m: Mask) -> None:
        x, y = a(w), b(w)
        product = (mul_hi(x, y) if hi else x * y).view(DTYPES["u" + type_[1:]])
        addend = c(w).view(product.dtype)
        carry = w.files[0][flag].astype(product.dtype) if use else product.dtype.type(0)
        out = product + addend + carry
        over = (out < product) | ((out == product) & (carry != 0) & (addend != 0))
        if sets:
            np.copyto(w.files[0][flag], over, where=w.active(m))
        put(w, out, m)

    return run


@register("madc")
def _madc(ins: Instruction, d: Decoder) -> Handler:
    modifiers(d, ins, {"cc", "lo", "hi"})
    return _mad_carry(ins, d, True)


@register("mul24", "mad24")
def _mul24(ins: Instruction, d: Decoder) -> Handler:
    type_ = ins.parts[-1]
    mods = modifiers(d, ins, {"lo", "hi", "sat"})
    hi = "hi" in mods

    def product(a: Any, b: Any) -> Any:
        if type_ == "s32":
            x, y = (a.astype(S64) << 40) >> 40, (b.astype(S64) << 40) >> 40
        else:
            x, y = a.astype(S64) & 0xFFFFFF, b.astype(S64) & 0xFFFFFF
        return (x * y) >> (16 if hi else 0)

    def narrow(wide: Any) -> Any:
        return wide.astype(U64).astype(U32).view(DTYPES[type_])

    if ins.parts[0] == "mul24":
        return uniform(d, ins, lambda a, b: narrow(product(a, b)), type_)
    if "sat" in mods:
        return uniform(
            d, ins, lambda a, b, c: _saturate(narrow(product(a, b)).astype(S64) + c), type_
        )
    return uniform(d, ins, lambda a, b, c: narrow(product(a, b)) + c, type_)


def truncated_div(a: Any, b: Any) -> Any:
    """Return the quotient rounded toward zero; all ones where the divisor is 0."""
    if a.dtype.kind == "u":
        return np.where(b == 0, ~a.dtype.type(0), a // np.where(b == 0, a.dtype.type(1), b))
    unsigned = DTYPES[f"u{a.dtype.itemsize * 8}"]
    x, y = np.where(a < 0, -a, a).view(unsigned), np.where(b < 0, -b, b).view(unsigned)
    q = (x // np.where(y == 0, unsigned(1), y)).view(a.dtype)
    q = np.where((a < 0) != (b < 0), -q, q)
    return np.where(b == 0, a.dtype.type(-1), q)


@register("rem")
def _rem(ins: Instruction, d: Decoder) -> Handler:
    modifiers(d, ins, set())
    return uniform(
        d, ins, lambda a, b: np.where(b == 0, a, a - truncated_div(a, b) * b), ins.parts[-1]
    )


@register("sad")
def _sad(ins: Instruction, d: Decoder) -> Handler:
    return uniform(d, ins, lambda a, b, c: c + np.where(a < b, b - a, a - b), ins.parts[-1])


@register("dp4a", "dp2a")
def _dp(ins: Instruction, d: Decoder) -> Handler:
    parts = list(ins.parts)
    four = parts[0] == "dp4a"
    a_type, b_type = parts[-2], parts[-1]
    half = None if four else parts[1]
    d.need(four or half in ("lo", "hi"), "dp2a needs .lo or .hi")
    out = "s32" if "s32" in (a_type, b_type) else "u32"
    a_parts = (np.int8 if a_type == "s32" else np.uint8) if four else (
        np.int16 if a_type == "s32" else np.uint16
    )  # fmt: skip
    b_parts = np.int8 if b_type == "s32" else np.uint8

    def dot(a: Any, b: Any, c: Any) -> Any:
        x = a.view(a_parts).reshape(-1, 4 if four else 2).astype(S64)
        y = b.view(b_parts).reshape(-1, 4).astype(S64)
        if half is not None:
            y = y[:, :2] if half == "lo" else y[:, 2:]
        total = (x * y).sum(axis=1).astype(S32).view(U32) + c.view(U32)
        return total.view(c.dtype)

    dst, a, b, c = ins.operands
    return compute(d, dot, dst, out, [(a, "u32"), (b, "u32"), (c, out)])


def integer_unary(ins: Instruction, d: Decoder) -> Handler:
    """Decode abs/neg of integers."""
    return uniform(d, ins, np.negative if ins.parts[0] == "neg" else np.abs, ins.parts[-1])


def integer_extreme(ins: Instruction, d: Decoder) -> Handler:
    """Decode min/max of integers."""
    type_ = ins.parts[-1]
    mods = modifiers(d, ins, {"relu"})
    pick = np.minimum if ins.parts[0] == "min" else np.maximum
    if type_ in ("u16x2", "s16x2"):
        base: Any = packed16(pick, DTYPES[type_[:3]])
        if "relu" in mods:
            base = packed16(lambda a, b: np.maximum(pick(a, b), 0), np.int16)
        return uniform(d, ins, base, "b32")
    if "relu" in mods:
        return uniform(d, ins, lambda a, b: np.maximum(pick(a, b), 0), type_)
    return uniform(d, ins, pick, type_)


# -------------------------------------------------------------------------------------- bits


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
        nibbles = [c.value >> (4 * i) & 0xF for i in range(4)]
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

        return compute(d, fixed, dst, "u32", [(a, "u32"), (b, "u32")])

    def general(x: Any, y: Any, sel: Any) -> Any:
        pool = np.concatenate([x.view(np.uint8).reshape(-1, 4), y.view(np.uint8).reshape(-1, 4)], 1)
        nibbles = (sel[:, None] >> (4 * np.arange(4, dtype=U32))) & U32(15)
        out = np.take_along_axis(pool, (nibbles & U32(7)).astype(np.intp), 1)
        out = np.where(nibbles & U32(8), np.where(out & 0x80, 0xFF, 0), out).astype(np.uint8)
        return np.ascontiguousarray(out).reshape(-1).view(U32)

    return uniform(d, ins, general, "u32")


# -------------------------------------------------------------------- compare, select, move

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


def flush(a: Any) -> Any:
    """Return float32 values with subnormals replaced by zeros of the same sign."""
    small = np.abs(a) < np.float32(1.17549435e-38)
    return np.where(small, np.copysign(np.float32(0), a), a)


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
    true: Any = {"f32": np.float32(1), "f16": 0x3C00, "bf16": 0x3F80, "f16x2": 0x3C00,
                 "bf16x2": 0x3F80}.get(out, -1)  # fmt: skip
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
            put(w, np.where(hit, true, type(true)(0)), m)

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


__all__ = ["FILE", "compute", "flush", "modifiers", "packed16", "uniform"]
