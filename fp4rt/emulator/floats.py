"""Floating-point arithmetic: f32, f64, f16, bf16 and their packed forms.

add, sub, mul, fma, div.rn, sqrt.rn and rcp.rn are correctly rounded, as PTX requires. The
``.approx`` functions are evaluated in float64 and rounded once; PTX allows the hardware 1 to 2
units in the last place (2^-22 relative for ex2 and lg2, 2^-20.5 absolute for sin and cos, 2^-11
relative for tanh), so a GPU's results may differ from these by that much.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from . import alu
from .program import Decoder, Handler, register
from .ptx import Instruction, Operand
from .rounding import (
    SMALLEST_NORMAL,
    bf16_to_f32,
    float64_exact,
    fma,
    quotient,
    round_to,
    square_root,
    two_sum,
)

if TYPE_CHECKING:
    from .warp import Warp  # noqa: F401 (what `Handler` takes: documentation resolves it here)

F16, F32, F64 = np.float16, np.float32, np.float64
FLOATS = {"f16", "f16x2", "bf16", "bf16x2", "f32", "f32x2", "f64"}
MODES = {"rn", "rz", "rm", "rp"}
_REGISTER = {"f16": "u16", "bf16": "u16", "f16x2": "u32", "bf16x2": "u32", "f32": "f32",
             "f32x2": "u64", "f64": "f64"}  # fmt: skip
_NAN32 = np.uint32(0x7FFFFFFF).view(F32)


def widen(values: Any, kind: str) -> Any:
    """Return register contents as float64, packed halves side by side."""
    if kind in ("f16", "f16x2"):
        return values.view(F16).astype(F64)
    if kind in ("bf16", "bf16x2"):
        return bf16_to_f32(values.view(np.uint16)).astype(F64)
    if kind in ("f32", "f32x2"):
        return values.view(F32).astype(F64)
    return values


def narrow(x: Any, kind: str, mode: str = "rn") -> Any:
    """Round float64 values to a format and return register contents; NaN becomes canonical."""
    if kind in ("bf16", "bf16x2"):
        bits = round_to(x, "bf16", mode)
        return bits.view(np.uint32) if kind == "bf16x2" else bits
    if kind in ("f16", "f16x2"):
        bits = round_to(x, "f16", mode).view(np.uint16)
        bits = np.where(np.isnan(x), np.uint16(0x7FFF), bits)
        return bits.view(np.uint32) if kind == "f16x2" else bits
    if kind in ("f32", "f32x2"):
        r = np.where(np.isnan(x), _NAN32, round_to(x, "f32", mode))
        return r.view(np.uint64) if kind == "f32x2" else r
    return x


def _base(kind: str) -> str:
    return kind.removesuffix("x2")


def _flush(x: Any, kind: str) -> Any:
    return np.where(np.abs(x) < SMALLEST_NORMAL[_base(kind)], np.copysign(0.0, x), x)


class _Float:
    """Modifiers of a floating-point instruction."""

    def __init__(self, ins: Instruction, d: Decoder, extra: set[str] | None = None) -> None:
        self.kind = ins.parts[-1]
        mods = alu.modifiers(d, ins, {"ftz", "sat", "relu", "oob", *MODES, *(extra or set())})
        self.mods = mods
        self.mode = next((m for m in mods if m in MODES), "rn")
        self.ftz, self.sat, self.relu = "ftz" in mods, "sat" in mods, "relu" in mods
        self.plain = not (self.ftz or self.sat or self.relu) and self.mode == "rn"


def evaluate(
    d: Decoder, ins: Instruction, f: _Float, fn: Callable[..., Any], sources: list[Operand]
) -> Handler:
    """Return a handler: float64 in, `fn` to odd-rounded float64, one rounding out."""
    kind, reg = f.kind, _REGISTER[f.kind]
    base = _base(kind)

    def run(*values: Any) -> Any:
        wide = [widen(v, kind) for v in values]
        if f.ftz:
            wide = [_flush(v, kind) for v in wide]
        x = fn(*wide)
        if f.relu:
            x = np.where(np.signbit(x) & (x == x), 0.0, x)
        if f.sat:
            x = np.where(x > 0, np.minimum(x, 1.0), 0.0)
        if f.ftz:
            # The hardware flushes results that are subnormal after rounding.
            r = narrow(x, kind, f.mode)
            back = widen(r, kind)
            if kind == "f64":
                return r
            small = (np.abs(back) < SMALLEST_NORMAL[base]) & (back != 0)
            if small.any():
                return narrow(np.where(small, np.copysign(0.0, back), back), kind)
            return r
        return narrow(x, kind, f.mode)

    return alu.compute(d, run, ins.operands[0], reg, [(op, reg) for op in sources])


def _half(op: Any) -> Callable[[Any, Any], Any]:
    """Return `op` on f16 or f16x2 registers: numpy rounds once, through an innocuous float32."""

    def run(a: Any, b: Any) -> Any:
        r = op(a.view(F16), b.view(F16))
        bits = r.view(np.uint16)
        bad = r != r
        if 1 in bad.tobytes():
            bits = np.where(bad, np.uint16(0x7FFF), bits)
        return bits.view(a.dtype)

    return run


def _canonical(r: Any) -> Any:
    bad = r != r
    return np.where(bad, _NAN32, r) if 1 in bad.tobytes() else r


def _add(ins: Instruction, d: Decoder, subtract: bool) -> Handler:
    if ins.parts[-1] not in FLOATS:
        return alu.integer_add(ins, d, subtract)
    if ins.parts[-2] == "f32":
        return _mixed(ins, d, "sub" if subtract else "add")
    f = _Float(ins, d)
    src = list(ins.operands[1:])
    if f.kind == "f32" and f.plain:
        op = np.subtract if subtract else np.add
        return alu.compute(
            d, lambda a, b: _canonical(op(a, b)), ins.operands[0], "f32", [(s, "f32") for s in src]
        )
    if f.kind in ("f16", "f16x2") and f.plain:
        half = _half(np.subtract if subtract else np.add)
        return alu.uniform(d, ins, half, _REGISTER[f.kind])
    if f.kind == "f64":
        return _double(ins, d, f, "sub" if subtract else "add")
    if subtract:
        return evaluate(d, ins, f, _signed(lambda a, b: two_sum(a, -b), f.mode), src)
    return evaluate(d, ins, f, _signed(two_sum, f.mode), src)


def _signed(fn: Callable[[Any, Any], Any], mode: str) -> Callable[[Any, Any], Any]:
    """Give an exact zero sum the sign that rounding down wants."""
    if mode != "rm":
        return fn

    def run(a: Any, b: Any) -> Any:
        x = fn(a, b)
        return np.where(
            (x == 0) & ~((a == 0) & (b == 0) & ~np.signbit(a) & ~np.signbit(b)), -0.0, x
        )

    return run


def _mixed(ins: Instruction, d: Decoder, op: str) -> Handler:
    """add/sub/fma.f32.f16 (or .bf16): the last source and the result are f32."""
    narrow_kind = ins.parts[-1]
    d.need(narrow_kind in ("f16", "bf16"), "source type")
    mode = next((p for p in ins.parts if p in MODES), "rn")
    sat = "sat" in ins.parts
    d.need(set(ins.parts[1:-2]) <= {*MODES, "sat"})
    dst, *src = ins.operands
    reg = _REGISTER[narrow_kind]

    def run(*values: Any) -> Any:
        a = widen(values[0], narrow_kind)
        c = widen(values[-1], "f32")
        if op == "fma":
            x = fma(a, widen(values[1], narrow_kind), c)
        else:
            x = two_sum(a, -c if op == "sub" else c)
        if sat:
            x = np.where(x > 0, np.minimum(x, 1.0), 0.0)
        return narrow(x, "f32", mode)

    kinds = [reg] * (len(src) - 1) + ["f32"]
    return alu.compute(d, run, dst, "f32", list(zip(src, kinds, strict=True)))


def _double(ins: Instruction, d: Decoder, f: _Float, op: str) -> Handler:
    def run(*values: Any) -> Any:
        return float64_exact(op, list(values), f.mode)

    return alu.uniform(d, ins, run, "f64")


@register("add")
def _add_family(ins: Instruction, d: Decoder) -> Handler:
    return _add(ins, d, False)


@register("sub")
def _sub_family(ins: Instruction, d: Decoder) -> Handler:
    return _add(ins, d, True)


@register("mul")
def _mul(ins: Instruction, d: Decoder) -> Handler:
    if ins.parts[-1] not in FLOATS:
        return alu.integer_mul(ins, d, False)
    f = _Float(ins, d)
    if f.kind == "f64":
        return _double(ins, d, f, "mul")
    if f.kind == "f32" and f.plain:
        return alu.uniform(d, ins, lambda a, b: _canonical(a * b), "f32")
    if f.kind in ("f16", "f16x2") and f.plain:
        return alu.uniform(d, ins, _half(np.multiply), _REGISTER[f.kind])
    return evaluate(d, ins, f, lambda a, b: a * b, list(ins.operands[1:]))


@register("mad", "fma")
def _mad(ins: Instruction, d: Decoder) -> Handler:
    if ins.parts[-1] not in FLOATS:
        return alu.integer_mul(ins, d, True)
    if ins.parts[-2] == "f32":
        return _mixed(ins, d, "fma")
    f = _Float(ins, d)
    if f.kind == "f64":
        return _double(ins, d, f, "fma")
    return evaluate(d, ins, f, fma, list(ins.operands[1:]))


@register("div")
def _div(ins: Instruction, d: Decoder) -> Handler:
    if ins.parts[-1] not in FLOATS:
        alu.modifiers(d, ins, set())
        return alu.uniform(d, ins, alu.truncated_div, ins.parts[-1])
    f = _Float(ins, d, {"approx", "full"})
    if f.kind == "f64":
        return _double(ins, d, f, "div")
    approximate = f.mods & {"approx", "full"}
    return evaluate(
        d, ins, f, (lambda a, b: a / b) if approximate else quotient, list(ins.operands[1:])
    )


@register("neg", "abs")
def _neg(ins: Instruction, d: Decoder) -> Handler:
    kind = ins.parts[-1]
    if kind not in FLOATS:
        return alu.integer_unary(ins, d)
    mods = alu.modifiers(d, ins, {"ftz"})
    negate = ins.parts[0] == "neg"
    op: Any = np.negative if negate else np.abs
    if kind == "f64":  # a NaN stays as it is
        return alu.uniform(d, ins, lambda a: np.where(np.isnan(a), a, op(a)), kind)
    if kind == "f32":
        ftz = "ftz" in mods
        return alu.uniform(d, ins, lambda a: _canonical(op(alu.flush(a) if ftz else a)), kind)
    sign: Any = np.uint32(0x80008000) if kind.endswith("x2") else np.uint16(0x8000)
    infinity = np.uint16(0x7C00 if kind.startswith("f16") else 0x7F80)

    def run(a: Any) -> Any:
        halves = (a ^ sign if negate else a & ~sign).view(np.uint16)
        bad = (halves & np.uint16(0x7FFF)) > infinity
        return np.where(bad, np.uint16(0x7FFF), halves).view(a.dtype)

    return alu.uniform(d, ins, run, _REGISTER[kind])


@register("min", "max")
def _extreme(ins: Instruction, d: Decoder) -> Handler:
    kind = ins.parts[-1]
    if kind not in FLOATS:
        return alu.integer_extreme(ins, d)
    mods = alu.modifiers(d, ins, {"ftz", "NaN", "xorsign", "abs"})
    least = ins.parts[0] == "min"
    reg = _REGISTER[kind]
    ftz, xorsign, absolute = "ftz" in mods, "xorsign" in mods, "abs" in mods

    def run(*values: Any) -> Any:
        wide = [widen(v, kind) for v in values]
        if ftz:
            wide = [_flush(v, kind) for v in wide]
        inputs = [np.abs(v) for v in wide] if absolute else wide
        x = inputs[0]
        for y in inputs[1:]:
            # -0 is less than +0.
            first = np.where(x == y, np.signbit(x) == least, (x < y) == least)
            first = np.where(y != y, True, np.where(x != x, False, first))
            x = np.where(first, x, y)
        if "NaN" in mods:
            for y in inputs:
                x = np.where(y != y, np.nan, x)
        if xorsign:
            negative = np.signbit(wide[0]) ^ np.signbit(wide[1])
            x = np.where(np.isnan(x), x, np.where(negative, -np.abs(x), np.abs(x)))
        return narrow(x, kind)

    return alu.uniform(d, ins, run, reg)


@register("copysign")
def _copysign(ins: Instruction, d: Decoder) -> Handler:
    return alu.uniform(d, ins, lambda a, b: np.copysign(b, a), ins.parts[-1])


@register("testp")
def _testp(ins: Instruction, d: Decoder) -> Handler:
    kind = ins.parts[-1]
    tiny = SMALLEST_NORMAL[kind]
    tests: dict[str, Callable[[Any], Any]] = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda a: a == a,
        "notanumber": lambda a: a != a,
        "normal": lambda a: np.isfinite(a) & ((np.abs(a) >= tiny) | (a == 0)),  # as measured
        "subnormal": lambda a: (np.abs(a) < tiny) & (a != 0),
    }
    return alu.uniform(d, ins, tests[ins.parts[1]], kind, "pred")


# ---------------------------------------------------------------------------- transcendental


def _range_sin(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda a: np.where(np.isinf(a), np.nan, fn(np.where(np.isinf(a), 0.0, a)))


_UNARY: dict[str, Callable[[Any], Any]] = {
    "rcp": lambda a: 1.0 / a,
    "sqrt": np.sqrt,
    "rsqrt": lambda a: 1.0 / np.sqrt(a),
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": _range_sin(np.sin),
    "cos": _range_sin(np.cos),
    "tanh": np.tanh,
}


@register("rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh")
def _special(ins: Instruction, d: Decoder) -> Handler:
    f = _Float(ins, d, {"approx"})
    name = ins.parts[0]
    src = list(ins.operands[1:])
    if f.kind == "f64":
        if "approx" in f.mods:
            return alu.uniform(d, ins, lambda a: _upper(_UNARY[name](a)), "f64")
        if name == "rcp":
            return alu.uniform(
                d, ins, lambda a: float64_exact("div", [np.ones_like(a), a], f.mode), "f64"
            )
        return _double(ins, d, f, "sqrt")
    if "approx" not in f.mods:
        exact: Callable[[Any], Any] = (
            square_root if name == "sqrt" else lambda a: quotient(np.ones_like(a), a)
        )
        return evaluate(d, ins, f, exact, src)
    return evaluate(d, ins, f, _UNARY[name], src)


def _upper(x: Any) -> Any:
    """Keep the upper word only, as the f64 approximations do."""
    return (x.view(np.uint64) & np.uint64(0xFFFFFFFF00000000)).view(F64)
