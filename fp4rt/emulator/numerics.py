"""Number formats and dot products of the matrix units.

Where a result is not exact, the unit's own rounding is applied: for the warp and warpgroup
instructions as measured on an H200 (bit for bit on random data), for block-scaled FP4 by the
bit-accurate model of Blackwell in microsoft/MMA-Sim (arXiv 2511.10909).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .memory import Violation

Array = NDArray[Any]
NAN32 = np.uint32(0x7FFFFFFF)
_FRACTION_BITS = 35


def _small_float(exponent_bits: int, mantissa_bits: int) -> NDArray[np.float64]:
    """Return the value of every code of a float format with no infinities and no NaN."""
    count = 1 << (1 + exponent_bits + mantissa_bits)
    bias = (1 << (exponent_bits - 1)) - 1
    codes = np.arange(count)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    fraction = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    magnitude = np.where(
        exponent > 0, (1 + fraction) * 2.0 ** (exponent - bias), fraction * 2.0 ** (1 - bias)
    )
    return np.asarray(np.where(codes >= count // 2, -magnitude, magnitude))


def _table(dtype: Any) -> NDArray[np.float64]:
    return np.asarray(np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64))


# Value of each 8-bit code; narrower formats repeat, so that unused high bits do not matter.
_TABLES: dict[str, NDArray[np.float64]] = {
    "e2m1": np.tile(_small_float(2, 1), 16),
    "e2m3": np.tile(_small_float(2, 3), 4),
    "e3m2": np.tile(_small_float(3, 2), 4),
    "e4m3": _table(ml_dtypes.float8_e4m3fn),
    "e5m2": _table(ml_dtypes.float8_e5m2),
    "s8": _table(np.int8),
    "u8": _table(np.uint8),
    # The unsigned scale type ignores the sign bit; 0x7f and 0xff are NaN.
    "ue4m3": np.abs(_table(ml_dtypes.float8_e4m3fn)),
    "ue8m0": np.append(2.0 ** (np.arange(255) - 127.0), np.nan),
    "e2m1 in bits 5-2": np.tile(np.repeat(_small_float(2, 1), 4), 4),
    "e2m3 in 8 bits": np.tile(_small_float(2, 3), 4),
    "e3m2 in 8 bits": np.tile(_small_float(3, 2), 4),
}
# Exponent of each scale code, a subnormal's being that of the smallest normal.
_SCALE_EXPONENTS: dict[str, NDArray[np.int64]] = {
    "ue4m3": np.maximum((np.arange(256) & 0x7F) >> 3, 1) - 7,
    "ue8m0": np.arange(256) - 127,
}
BITS: dict[str, int] = {
    "e2m1": 4, "s4": 4, "u4": 4, "e2m3": 6, "e3m2": 6, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8,
    "f16": 16, "bf16": 16, "tf32": 32, "f32": 32, "f64": 64, "e2m1 in bits 5-2": 8,
    "e2m3 in 8 bits": 8, "e3m2 in 8 bits": 8,
}  # fmt: skip


def decode(data: NDArray[np.uint8], dtype: str) -> NDArray[np.float64]:
    """Return the values of packed elements.

    Parameters
    ----------
    data
        Bytes, shape (..., nbytes), elements in ascending order from the lowest bit.
    dtype
        ``"f16"``, ``"bf16"``, ``"tf32"``, ``"f32"``, ``"f64"``, ``"e4m3"``, ``"e5m2"``, ``"s8"``,
        ``"u8"``, or packed 4-bit ``"e2m1"``, ``"s4"``, ``"u4"``.

    Examples
    --------
    >>> decode(np.array([0x72, 0x0F], np.uint8), "e2m1").tolist()
    [1.0, 6.0, -6.0, 0.0]
    """
    data = np.ascontiguousarray(data)
    if dtype in ("e2m1", "s4", "u4"):
        nibbles = np.stack([data & 15, data >> 4], axis=-1).reshape(*data.shape[:-1], -1)
        if dtype == "e2m1":
            return np.asarray(_TABLES["e2m1"][nibbles])
        if dtype == "s4":
            return np.asarray((nibbles ^ 8).astype(np.float64) - 8.0)
        return np.asarray(nibbles.astype(np.float64))
    if dtype in _TABLES:
        return np.asarray(_TABLES[dtype][data])
    if dtype == "f16":
        return np.asarray(data.view(np.float16).astype(np.float64))
    if dtype == "bf16":
        return np.asarray(data.view(ml_dtypes.bfloat16).astype(np.float64))
    if dtype == "tf32":  # the unit ignores the low 13 bits
        return (data.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    if dtype in ("f32", "f64"):
        return data.view(np.float32 if dtype == "f32" else np.float64).astype(np.float64)
    raise Violation(f"matrix element type .{dtype} is not emulated")


def bit_product(a: NDArray[np.uint32], b: NDArray[np.uint32], operation: str) -> Any:
    """Return the number of bits set in every row of A ``xor`` or ``and`` every row of B.

    Parameters
    ----------
    a, b
        Words of bits along K, shapes (M, words) and (N, words).

    Examples
    --------
    >>> rows = np.array([[7], [1]], np.uint32)
    >>> bit_product(rows, rows, "xor").tolist()
    [[0, 2], [2, 0]]
    """
    both = {"xor": np.bitwise_xor, "and": np.bitwise_and}[operation]
    return np.bitwise_count(both(a[:, None, :], b[None, :, :])).sum(axis=2, dtype=np.int64)


def decode_padded(data: NDArray[np.uint8], dtype: str) -> NDArray[np.float64]:
    """Return the values of 8-bit-container elements as kinds f8f6f4 and mxf8f6f4 lay them out.

    4- and 6-bit types come as 16 packed elements followed by padding up to 16 bytes (the
    ``b4x16_p64`` and ``b6x16_p32`` tensor-map types).
    """
    bits = BITS[dtype]
    if bits == 8:
        return np.asarray(_TABLES[dtype][data])
    groups = data.reshape(*data.shape[:-1], -1, 16)[..., : 2 * bits]
    flat = np.unpackbits(groups, axis=-1, bitorder="little")
    codes = flat.reshape(*data.shape[:-1], -1, bits) @ (1 << np.arange(bits))
    return np.asarray(_TABLES[dtype][codes])


def round_f32(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """Round float64 to float32 toward zero; overflow is infinite, NaN 0x7fffffff, zero positive."""
    with np.errstate(over="ignore", invalid="ignore"):
        result = values.astype(np.float32)
        away = np.isfinite(result) & (np.abs(result.astype(np.float64)) > np.abs(values))
        result = np.where(away, np.nextafter(result, np.float32(0)), result) + np.float32(0)
    result.view(np.uint32)[np.isnan(values)] = NAN32
    return np.asarray(result)


@dataclass(frozen=True)
class Rounding:
    """How a matrix unit adds up one instruction's products and its accumulator.

    Attributes
    ----------
    fraction_bits
        The terms are aligned to the largest exponent among them and cut, toward zero, after this
        many fractional bits; None sums exactly.
    result_bits
        Fraction bits of a float32 result.
    nearest
        Round the result to nearest even instead of toward zero.
    """

    fraction_bits: int | None = 25
    result_bits: int = 23
    nearest: bool = False


# Measured on an H200, bit for bit on random data: wgmma and mma.sync of f16 and tf32; wgmma of
# 8-bit floats; mma.sync of 8-bit floats. bf16 and the kinds of tcgen05 are taken to be like f16
# (MMA-Sim says so).
TRUNCATED = Rounding()
WGMMA_FP8 = Rounding(13, 13)
MMA_FP8 = Rounding(None, nearest=True)


def dot(
    a: NDArray[np.float64],
    b: NDArray[np.float64],
    d: Array | None,
    d_type: str,
    *,
    saturate: bool = False,
    rounding: Rounding = TRUNCATED,
) -> Array:
    """Return ``a @ b.T + d`` as one matrix instruction gives it.

    Parameters
    ----------
    a, b
        Values, shapes (M, K) and (N, K).
    d
        Accumulator, shape (M, N), or None for zero.
    d_type
        ``"f32"``, ``"f16"`` (rounded to nearest), ``"s32"`` (wraps unless `saturate`) or ``"f64"``.
    rounding
        How float32 results are added up and rounded.
    """
    if d_type == "f64":
        return _fma_chain(a, b, np.zeros((len(a), len(b))) if d is None else d)
    with np.errstate(invalid="ignore", over="ignore"):
        total = a @ b.T
        finite = bool(np.isfinite(total).all())
        if not finite:  # BLAS may not keep NaN and infinity apart; spell it out
            total = (a[:, None, :] * b[None, :, :]).sum(axis=2)
        if d is not None:
            total = total + d.astype(np.float64)
        if d_type == "f16":
            return (total + 0.0).astype(np.float16)
        if d_type == "s32":
            whole = total.astype(np.int64)
            if saturate:
                whole = np.clip(whole, -(1 << 31), (1 << 31) - 1)
            return whole.astype(np.int32)
        if rounding.nearest:
            return (total + 0.0).astype(np.float32)
        if rounding.fraction_bits is not None and finite:
            before = np.zeros(total.shape) if d is None else d.astype(np.float64)
            _align(total, a, b, before, rounding.fraction_bits)
        result = round_f32(total)
        if rounding.result_bits < 23:
            cut = np.uint32(0xFFFFFFFF << (23 - rounding.result_bits) & 0xFFFFFFFF)
            bits = result.view(np.uint32)
            bits[np.isfinite(result)] &= cut
    return result


def _bounds(values: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the exponents of the highest and of the lowest set bit (0: far apart, inverted)."""
    mantissa, exponent = np.frexp(values)
    whole = np.abs(np.ldexp(mantissa, 53)).astype(np.int64)
    lowest = np.frexp((whole & -whole).astype(np.float64))[1] - 54 + exponent
    zero = values == 0
    return np.where(zero, -9999, exponent - 1), np.where(zero, 9999, lowest)


def _align(
    total: NDArray[np.float64],
    a: NDArray[np.float64],
    b: NDArray[np.float64],
    d: NDArray[np.float64],
    fraction_bits: int,
) -> None:
    """Replace the sums in which aligning the terms loses bits.

    A term's exponent is the sum of its factors' (a product of mantissas is not normalised).
    """
    top_a, low_a = _bounds(a)
    top_b, low_b = _bounds(b)
    top_d, low_d = _bounds(d)
    top = np.maximum(top_a.max(axis=1)[:, None] + top_b.max(axis=1), top_d)
    low = np.minimum(low_a.min(axis=1)[:, None] + low_b.min(axis=1), low_d)
    rows, columns = np.nonzero(top - low > fraction_bits)
    if not len(rows):
        return
    products = a[rows] * b[columns]
    exponents = np.where(products == 0, -9999, top_a[rows] + top_b[columns])
    before = d[rows, columns]
    highest = np.maximum(exponents.max(axis=1), top_d[rows, columns])
    scale = np.ldexp(1.0, (fraction_bits - np.maximum(highest, -900)).astype(np.int32))
    terms = np.trunc(products * scale[:, None]).sum(axis=1) + np.trunc(before * scale)
    total[rows, columns] = terms / scale


def _fma_chain(a: Array, b: Array, d: Array) -> Array:
    """Return float64 ``fma(a, b, …)`` over ascending k, as an H200 does (measured)."""
    total = d.copy()
    for k in range(a.shape[1]):
        for i, j in np.ndindex(total.shape):
            x, y, z = float(a[i, k]), float(b[j, k]), float(total[i, j])
            if math.isfinite(x) and math.isfinite(y) and math.isfinite(z):
                exact = Fraction(x) * Fraction(y) + Fraction(z)
                total[i, j] = float(exact) if exact else x * y + z
            else:
                total[i, j] = x * y + z
    return total


def block_scaled_dot(
    a: NDArray[np.float64],
    b: NDArray[np.float64],
    a_scales: NDArray[np.uint8],
    b_scales: NDArray[np.uint8],
    scale_type: str,
    d: NDArray[np.float32] | None,
) -> NDArray[np.float32]:
    """Return the block-scaled product of one matrix instruction, bit for bit as modelled.

    Each block's sum is exact; its exponent is that of its two scales, whatever the sum. The terms
    and `d` are aligned to the largest exponent, cut to 35 fractional bits toward zero, added
    exactly, and the result is rounded to float32 toward zero (MMA-Sim; not verified on hardware
    here). The model has 25 fractional bits for the 8-bit kinds; for them inputs need 25 too.

    Parameters
    ----------
    a, b
        Element values, shapes (M, K) and (N, K).
    a_scales, b_scales
        Scale codes, shapes (M, blocks) and (N, blocks).
    scale_type
        ``"ue4m3"`` or ``"ue8m0"``.
    d
        Accumulator, shape (M, N), or None for zero.
    """
    sa, sb = _TABLES[scale_type][a_scales], _TABLES[scale_type][b_scales]
    ea, eb = _SCALE_EXPONENTS[scale_type][a_scales], _SCALE_EXPONENTS[scale_type][b_scales]
    size = a.shape[1] // a_scales.shape[1]
    terms = _Terms(a, b, sa, sb, ea, eb, size)
    # Terms are multiples of 2 ** (exponent - 8): where the exponents of an output are this close
    # none is cut, and a float64 product over all of K is exact (always so for E4M3 scales).
    close = _FRACTION_BITS - 8
    spread = ea.max() + eb.max() - ea.min() - eb.min()
    with np.errstate(invalid="ignore", over="ignore"):
        if (spread > close and scale_type == "ue8m0") or not (_are_halves(a) and _are_halves(b)):
            rows, columns = np.indices((len(a), len(b))).reshape(2, -1)
            return terms.aligned(rows, columns, d).reshape(len(a), len(b))
        result = (a * np.repeat(sa, size, axis=1)) @ (b * np.repeat(sb, size, axis=1)).T
        top = ea.max(axis=1)[:, None] + eb.max(axis=1)
        bottom = ea.min(axis=1)[:, None] + eb.min(axis=1)
        cut = top - bottom > close
        if d is not None:
            result += d
            exponent = _exponent(d)
            cut |= (exponent < top - 12) & (d != 0) | (exponent > bottom + close)
        rounded = round_f32(result)
        if cut.any():
            rows, columns = np.nonzero(cut)
            rounded[rows, columns] = terms.aligned(rows, columns, d)
        return rounded


def _are_halves(values: NDArray[np.float64]) -> bool:
    """Whether elements are multiples of 1/2 no larger than 6, as E2M1 is."""
    doubled = 2 * values
    return bool((doubled == np.rint(doubled)).all() and np.abs(values).max() <= 6)


def _exponent(d: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the float32 exponent, a subnormal's being that of the smallest normal."""
    return np.maximum((d.view(np.uint32) >> 23 & 0xFF).astype(np.int64), 1) - 127


@dataclass
class _Terms:
    """The blocks of a block-scaled product: elements, scale values, scale exponents."""

    a: NDArray[np.float64]
    b: NDArray[np.float64]
    sa: NDArray[np.float64]
    sb: NDArray[np.float64]
    ea: NDArray[np.int64]
    eb: NDArray[np.int64]
    size: int

    def aligned(
        self, rows: NDArray[np.int64], columns: NDArray[np.int64], d: NDArray[np.float32] | None
    ) -> NDArray[np.float32]:
        """Return the outputs at (rows, columns) by aligning, cutting and adding."""
        left = self.a.reshape(len(self.a), -1, self.size)[rows]
        right = self.b.reshape(len(self.b), -1, self.size)[columns]
        parts = np.einsum("pbk,pbk->pb", left, right) * self.sa[rows] * self.sb[columns]
        top = np.max(self.ea[rows] + self.eb[columns], axis=1)
        if d is not None:
            before = d[rows, columns]
            top = np.maximum(top, _exponent(before))
        scale = np.ldexp(1.0, (_FRACTION_BITS - top).astype(np.int32))
        total = np.trunc(parts * scale[:, None]).sum(axis=1)
        if d is not None:
            total += np.trunc(before.astype(np.float64) * scale)
        return round_f32(total / scale)
