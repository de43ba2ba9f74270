"""Integer arithmetic, and what every arithmetic family needs to decode itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .program import DTYPES, Decoder, Handler, register
from .ptx import Instruction, Operand, Reg, Sink
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
        flags = w.files[0][flag]
        if subtract:
            # The flag is the carry of x + ~y + 1: set where nothing was borrowed, as measured.
            borrow = (~flags).astype(x.dtype) if use else x.dtype.type(0)
            out = x - y - borrow
            over = (x > y) | ((x == y) & (borrow == 0))
        else:
            carry = flags.astype(x.dtype) if use else x.dtype.type(0)
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


def flush(a: Any) -> Any:
    """Return float32 values with subnormals replaced by zeros of the same sign."""
    small = np.abs(a) < np.float32(1.17549435e-38)
    return np.where(small, np.copysign(np.float32(0), a), a)
