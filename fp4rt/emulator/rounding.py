"""Correctly rounded floating-point arithmetic on arrays, in every rounding mode.

The trick throughout: compute in float64, find the rounding error of that exactly (Dekker, Knuth),
set the last bit of the float64 if it was inexact ("round to odd", Boldo and Melquiond), and round
the result once more to the narrower format. float64 itself falls back on exact fractions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

F16, F32, F64 = np.float16, np.float32, np.float64
U16, U32 = np.uint16, np.uint32
NAN = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF}
SMALLEST_NORMAL = {"f16": 2.0**-14, "bf16": 2.0**-126, "f32": 2.0**-126, "f64": 2.0**-1022}


def bf16_to_f32(bits: Any) -> Any:
    """Return the float32 values of bfloat16 bit patterns (uint16)."""
    return (bits.astype(U32) << U32(16)).view(F32)


def f32_to_bf16(values: Any) -> Any:
    """Return bfloat16 bit patterns (uint16), ties to even, of float32 values."""
    bits = np.ascontiguousarray(values).view(U32)
    rounded = (bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))) >> U32(16)
    return np.where(values != values, U16(0x7FFF), rounded.astype(U16))


def add_bf16(a: Any, b: Any) -> Any:
    """Return the rounded sum of bfloat16 bit patterns."""
    return round_to(two_sum(bf16_to_f32(a).astype(F64), bf16_to_f32(b).astype(F64)), "bf16", "rn")


def odd(total: Any, error: Any) -> Any:
    """Return `total + error` rounded to odd, where `error` is the exact rest of `total`."""
    bits = total.view(np.int64)
    inexact = (error != 0) & np.isfinite(total) & ((bits & 1) == 0) & (error == error)
    if 1 not in inexact.tobytes():
        return total
    step = np.where((error > 0) == (total > 0), 1, -1)
    # total == 0 with an error cannot happen: a sum that cancels is exact.
    return (bits + np.where(inexact, step, 0)).view(F64)


def _exact_sum(a: Any, b: Any) -> tuple[Any, Any]:
    """Return the rounded sum and its error (Knuth)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def two_sum(a: Any, b: Any) -> Any:
    """Return a + b of float64 arrays, rounded to odd."""
    return odd(*_exact_sum(a, b))


def _exact_product(a: Any, b: Any) -> tuple[Any, Any]:
    """Return the rounded product and its error (Dekker), far from overflow and underflow."""
    parts = []
    for x in (a, b):
        scaled = x * 134217729.0  # 2^27 + 1
        high = scaled - (scaled - x)
        parts += [high, x - high]
    ah, al, bh, bl = parts
    product = a * b
    return product, ((ah * bh - product) + ah * bl + al * bh) + al * bl


def _fma_nearest(a: Any, b: Any, c: Any) -> tuple[Any, Any]:
    """Return a * b + c of float64 arrays, rounded to nearest, and where that is sure to hold.

    The two errors are added with rounding to odd (Boldo and Melquiond, "Emulation of FMA").
    """
    plain = a * b + c
    middle = [(np.abs(x) > 1e-120) & (np.abs(x) < 1e120) for x in (a, b, c)]
    safe = middle[0] & middle[1] & middle[2]
    simple = (a == 0) | (b == 0) | ~(np.isfinite(a) & np.isfinite(b) & np.isfinite(c))
    simple |= (c == 0) & middle[0] & middle[1]
    product, low = _exact_product(a, b)
    total, error = _exact_sum(c, low)
    high, rest = _exact_sum(product, total)
    return np.where(safe, high + two_sum(error, rest), plain), safe | simple


def fma(a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c rounded to odd; a * b must be exact in float64."""
    return two_sum(a * b, c)


def _bump(values: Any, up: Any) -> Any:
    return np.nextafter(values, np.where(up, values.dtype.type(np.inf), values.dtype.type(-np.inf)))


def round_to(x: Any, kind: str, mode: str) -> Any:
    """Round float64 values (exact, or rounded to odd) to a narrower format.

    Parameters
    ----------
    x
        float64 array.
    kind
        ``"f16"``, ``"bf16"`` (returned as uint16 bits) or ``"f32"``.
    mode
        ``"rn"``, ``"rna"`` (ties away), ``"rz"``, ``"rm"`` (down) or ``"rp"`` (up).
    """
    if kind == "bf16":
        return _round_bits(x, 16, mode)
    dtype: Any = F16 if kind == "f16" else F32
    r = x.astype(dtype)
    if mode == "rn":
        return r
    back = r.astype(F64)
    if mode == "rz":
        wrong, up = np.abs(back) > np.abs(x), x < 0
    elif mode == "rm":
        wrong, up = back > x, np.zeros(x.shape, bool)
    else:
        wrong, up = back < x, np.ones(x.shape, bool)
    return np.where(wrong, _bump(r, up), r) if wrong.any() else r


def _round_bits(x: Any, drop: int, mode: str) -> Any:
    """Round float64 values to float32 with its low `drop` bits cut (bf16: 16, tf32: 13)."""
    # Rounding to odd keeps what the second rounding needs to know.
    f = np.ascontiguousarray(x.astype(F32))
    back = f.astype(F64)
    bits = f.view(U32).copy()
    above = np.abs(back) > np.abs(x)
    bits = bits - above  # toward zero (inf becomes the largest finite value)
    bits = bits | (bits.view(F32).astype(F64) != x)
    bits = np.where(np.isinf(x) | np.isnan(x), f.view(U32), bits).astype(U32)
    low, half = U32((1 << drop) - 1), U32(1 << (drop - 1))
    rest = bits & low
    cut = bits & ~low
    negative = bits >> U32(31) != 0
    if mode == "rn":
        up = (rest > half) | ((rest == half) & ((bits >> U32(drop)) & U32(1) == 1))
    elif mode == "rna":
        up = rest >= half
    elif mode == "rz":
        up = np.zeros(x.shape, bool)
    else:
        up = (rest != 0) & (negative if mode == "rm" else ~negative)
    out = np.where(up, cut + U32(1 << drop), cut).astype(U32)
    out = np.where(np.isinf(x), f.view(U32), out).astype(U32)
    if drop == 16:
        return np.where(np.isnan(x), U16(0x7FFF), (out >> U32(16)).astype(U16))
    return np.where(np.isnan(x), U32(0x7FFFFFFF), out).astype(U32)


def round_tf32(x: Any, mode: str) -> Any:
    """Round float64 values to tf32, as float32 bits (uint32) with 13 zero bits."""
    return _round_bits(x, 13, mode)


def quotient(a: Any, b: Any) -> Any:
    """Return a / b of float64 arrays holding float32 values, rounded to odd."""
    q = a / b
    return _exact_side(q, np.sign(a - q * b) * np.sign(b))


def square_root(a: Any) -> Any:
    """Return the square root of float64 arrays holding float32 values, rounded to odd."""
    q = np.sqrt(a)
    return _exact_side(q, np.sign(a - q * q))


def _exact_side(q: Any, side: Any) -> Any:
    """Round to odd the lanes whose float64 result happens to be a float32 value.

    Only there can the next rounding go wrong, and only there is `side` exact: the product of two
    float32 values is a float64 value.
    """
    doubtful = (q.astype(F32).astype(F64) == q) & np.isfinite(q) & (q != 0)
    return odd(q, np.where(doubtful, side, 0.0))


def float64_exact(op: str, args: list[Any], mode: str) -> Any:
    """Return float64 add, mul, fma, div or sqrt in any rounding mode, by exact fractions."""
    operations: dict[str, Callable[..., Any]] = {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul": lambda a, b: a * b,
        "fma": lambda a, b, c: a * b + c,
        "div": lambda a, b: a / b,
        "sqrt": np.sqrt,
    }
    plain = operations[op](*args)
    if mode == "rn" and op != "fma":
        return plain
    out = np.array(plain, F64)
    doubtful: Any = range(len(out))
    if op == "fma" and mode == "rn":
        out, sure = _fma_nearest(*args)
        doubtful = np.flatnonzero(~sure)
    for i in doubtful:
        values = [float(a[i]) for a in args]
        if not all(math.isfinite(v) for v in values):
            continue
        if op == "sqrt":
            if values[0] > 0:
                out[i] = _directed_sqrt(values[0], mode)
            continue
        if op == "div" and values[1] == 0:
            continue
        f = [Fraction(v) for v in values]
        exact = {
            "add": lambda f=f: f[0] + f[1],
            "sub": lambda f=f: f[0] - f[1],
            "mul": lambda f=f: f[0] * f[1],
            "fma": lambda f=f: f[0] * f[1] + f[2],
            "div": lambda f=f: f[0] / f[1],
        }[op]()
        if exact == 0:
            signs = [math.copysign(1, v) for v in values]
            if op == "fma":
                signs = [signs[0] * signs[1], signs[2]]
            if op == "sub":
                signs[1] = -signs[1]
            if op in ("add", "sub", "fma") and signs[0] != signs[1]:
                out[i] = -0.0 if mode == "rm" else 0.0
            elif op in ("add", "sub", "fma"):
                out[i] = math.copysign(0.0, signs[0])
            continue
        out[i] = _fraction(exact, mode, float(plain[i]))
    return out


def _fraction(exact: Fraction, mode: str, sign_of: float) -> float:
    try:
        r = float(exact)
    except OverflowError:
        r = math.inf if exact > 0 else -math.inf
    if r == 0:
        r = math.copysign(0.0, 1 if exact > 0 else -1)
    if mode == "rn":
        return r
    above = (math.isinf(r) and r > 0) or (math.isfinite(r) and Fraction(r) > exact)
    below = (math.isinf(r) and r < 0) or (math.isfinite(r) and Fraction(r) < exact)
    if above and (mode == "rm" or (mode == "rz" and exact > 0)):
        return math.nextafter(r, -math.inf)
    if below and (mode == "rp" or (mode == "rz" and exact < 0)):
        return math.nextafter(r, math.inf)
    return r


def _directed_sqrt(value: float, mode: str) -> float:
    r = math.sqrt(value)
    square = Fraction(r) ** 2
    if square > value and mode in ("rm", "rz"):
        return math.nextafter(r, 0.0)
    if square < value and mode == "rp":
        return math.nextafter(r, math.inf)
    return r
