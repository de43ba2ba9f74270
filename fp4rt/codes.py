"""Numbers and bits: E2M1 and E4M3 codes, two codes to a byte, correctly rounded output.

E2M1 has a sign, 2 exponent bits and 1 mantissa bit: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives
(OCP Microscaling Formats specification 1.0, table 5.3.3). E4M3 is OCP's FP8 E4M3: bias 7, largest
value 448, NaN at 0x7F and 0xFF, no infinity. ml_dtypes supplies the dtypes but not the rounding:
its casts take NaN to a zero in E2M1 and do not saturate in E4M3.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike, NDArray

E2M1_MAX = 6.0
E4M3_MAX = 448.0
NAN_SCALE = 0x7F
"""E4M3 byte of NaN; with the sign bit, 0xFF, it is one too."""
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = (np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16), BFLOAT16)
"""The types that data may have outside of NVFP4."""


def _e4m3_value(byte: int) -> float:
    sign, exponent, mantissa = 1 - (byte >> 7) * 2.0, byte >> 3 & 15, byte & 7
    if byte & 0x7F == NAN_SCALE:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return float(sign * (8 + mantissa) * 2.0 ** (exponent - 10))


E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1_VALUES = np.concatenate([E2M1_VALUES, -E2M1_VALUES])
E4M3_VALUES = np.array([_e4m3_value(byte) for byte in range(256)], np.float32)


@cache
def scaled_pairs() -> NDArray[np.uint64]:
    """Return both elements of every packed byte times every scale, one 8-byte entry each.

    Entry ``scale << 8 | byte`` holds two float32, element 2i first: one look-up decodes and scales
    two elements (512 KiB, made on first use).
    """
    pairs = np.stack([np.tile(E2M1_VALUES, 16), np.repeat(E2M1_VALUES, 16)], axis=1)
    scaled = E4M3_VALUES[:, np.newaxis, np.newaxis] * pairs
    return scaled.astype(np.float32, copy=False).reshape(-1, 2).view(np.uint64).ravel()


@cache
def scale_high_bytes() -> NDArray[np.uint64]:
    """Return, for every scale, the high bytes of the `scaled_pairs` index of its block's 8 bytes.

    Row `scale` of the (256, 2) result is eight 16-bit words ``scale << 8``.
    """
    return np.repeat(np.arange(256, dtype=np.uint16) << 8, 8).view(np.uint64).reshape(256, 2)


def encode_e2m1(x: ArrayLike) -> NDArray[np.uint8]:
    """Round to the nearest E2M1 number, ties to even, saturating at ±6.

    Parameters
    ----------
    x
        Numbers of any shape. Infinities saturate; the sign of a zero is kept.

    Returns
    -------
    ndarray of uint8
        Codes 0 to 15, one per number, bit 3 being the sign.

    Raises
    ------
    ValueError
        If x holds a NaN, which E2M1 cannot express.

    Examples
    --------
    >>> encode_e2m1([0.25, 0.75, 2.5, 100.0, -0.25])
    array([0, 2, 4, 7, 8], dtype=uint8)
    """
    x = np.asarray(x).astype(np.float64)
    if np.isnan(x).any():
        index = index_text(np.argwhere(np.isnan(x))[0])
        raise ValueError(f"x{index} is nan; E2M1 has no code for it, so replace it first")
    codes = round_e2m1(np.abs(x))
    codes |= np.signbit(x).astype(np.uint8) << np.uint8(3)
    return codes


def decode_e2m1(codes: ArrayLike) -> NDArray[np.float32]:
    """Give the float32 numbers that E2M1 codes 0 to 15 stand for.

    Raises
    ------
    TypeError, ValueError
        If a code is no integer, or outside 0..15.

    Examples
    --------
    >>> decode_e2m1([1, 7, 10])
    array([ 0.5,  6. , -1. ], dtype=float32)
    """
    return E2M1_VALUES[_checked_codes(codes)]


def encode_e4m3(x: ArrayLike) -> NDArray[np.uint8]:
    """Round numbers ≥ 0 to the nearest E4M3 number, ties to even, clamped to 448, never NaN.

    Returns
    -------
    ndarray of uint8
        E4M3 bytes, 0x00 to 0x7E.

    Raises
    ------
    ValueError
        If x holds a NaN or a negative number, which cannot be a scale.

    Examples
    --------
    >>> [hex(byte) for byte in encode_e4m3([0.0, 1.0, 448.0, 465.0])]
    ['0x0', '0x38', '0x7e', '0x7e']
    """
    x = np.asarray(x).astype(np.float64)
    bad = ~(x >= 0)
    if bad.any():
        index = np.argwhere(bad)[0]
        raise ValueError(
            f"x{index_text(index)} is {x[tuple(index)]}; a scale is a number ≥ 0: use np.abs"
        )
    # Rounding to 4 significant bits (or to 2^-9) in float64 first keeps float64 input exact.
    x = np.minimum(x, E4M3_MAX)
    quantum = np.ldexp(1.0, np.maximum(np.frexp(x)[1], -5) - 4)
    return round_e4m3((np.rint(x / quantum) * quantum).astype(np.float32))


def decode_e4m3(scales: ArrayLike) -> NDArray[np.float32]:
    """Give the float32 numbers that E4M3 bytes (uint8 or float8_e4m3fn) stand for.

    Raises
    ------
    TypeError
        If the bytes have another dtype.

    Examples
    --------
    >>> decode_e4m3(np.array([0x38, 0x7E, 0x01], np.uint8))
    array([1.000000e+00, 4.480000e+02, 1.953125e-03], dtype=float32)
    """
    return E4M3_VALUES[scale_bytes(scales)]


def pack(codes: ArrayLike, *, even: Literal["low", "high"] = "low") -> NDArray[np.uint8]:
    """Put two E2M1 codes in a byte, along the last axis.

    Parameters
    ----------
    codes
        Integers 0 to 15, or a float4_e2m1fn array, of shape (..., K) with K even.
    even
        The nibble that takes elements 0, 2, 4, …. fp4rt itself uses ``"low"`` everywhere;
        ``"high"`` is for bytes of other programs.

    Returns
    -------
    ndarray of uint8, shape (..., K / 2)

    Raises
    ------
    TypeError, ValueError
        If a code is no integer in 0..15, or K is odd.

    Examples
    --------
    >>> hex(pack([1, 2])[0])
    '0x21'
    """
    codes = _checked_codes(codes)
    if codes.ndim == 0 or codes.shape[-1] % 2:
        raise ValueError(
            f"codes has shape {codes.shape}; its last axis must be even: append a code 0"
        )
    low, high = (0, 1) if _is_low(even) else (1, 0)
    return codes[..., low::2] | codes[..., high::2] << np.uint8(4)


def unpack(values: ArrayLike, *, even: Literal["low", "high"] = "low") -> NDArray[np.uint8]:
    """Take the two E2M1 codes out of each byte; the inverse of `pack`.

    Parameters
    ----------
    values
        uint8 of shape (..., K / 2).
    even
        The nibble that holds elements 0, 2, 4, ….

    Returns
    -------
    ndarray of uint8, shape (..., K)

    Examples
    --------
    >>> unpack(np.array([0x21], np.uint8))
    array([1, 2], dtype=uint8)
    """
    values = np.asarray(values)
    if values.dtype != np.uint8 or values.ndim == 0:
        raise TypeError(
            f"values is {values.dtype} of shape {values.shape}; packed values are a uint8 array "
            "of at least one axis: use .view(np.uint8) for another one-byte type"
        )
    low, high = (0, 1) if _is_low(even) else (1, 0)
    codes = np.empty((*values.shape[:-1], 2 * values.shape[-1]), np.uint8)
    codes[..., low::2] = values & 15
    codes[..., high::2] = values >> 4
    return codes


def round_to(x: ArrayLike, dtype: DTypeLike) -> NDArray[Any]:
    """Round float64 numbers once, to nearest even, to an output dtype.

    A plain ``astype(bfloat16)`` goes through float32 and so rounds twice: 1 + 2**-8 + 2**-30
    becomes 1 instead of 1 + 2**-7. Here the step through float32 rounds to odd, which
    leaves the second rounding right (S. Boldo, G. Melquiond, "When double rounding is odd", 2005).

    Parameters
    ----------
    x
        float64 of any shape.
    dtype
        float16, bfloat16, float32 or float64.

    Returns
    -------
    ndarray of dtype
        Numbers beyond the range are ±infinity.

    Examples
    --------
    >>> float(round_to(1 + 2**-8 + 2**-30, ml_dtypes.bfloat16))
    1.0078125
    """
    x = np.asarray(x, np.float64)
    dtype = checked_float_dtype(dtype)
    with np.errstate(over="ignore", under="ignore"):
        if dtype != BFLOAT16:
            return x.astype(dtype)
        single = np.atleast_1d(x.astype(np.float32))
        rounded_up = np.abs(single) > np.abs(x)
        single = np.where(rounded_up, np.nextafter(single, np.float32(0)), single)
        inexact = (single != x) & ~np.isnan(x)
        single.view(np.uint32)[...] |= inexact.astype(np.uint32)
        return single.astype(dtype).reshape(x.shape)


# --- the same without checks, for whole tiles ---


def round_e2m1(magnitude: NDArray[Any]) -> NDArray[np.uint8]:
    """Round numbers ≥ 0 to E2M1 codes 0..7: the count of midpoints passed, ties to even."""
    codes = (magnitude > 0.25).view(np.uint8)
    for midpoint, compare in (
        (0.75, np.greater_equal),
        (1.25, np.greater),
        (1.75, np.greater_equal),
        (2.5, np.greater),
        (3.5, np.greater_equal),
        (5.0, np.greater),
    ):
        codes += compare(magnitude, midpoint).view(np.uint8)
    return codes


def round_e4m3(x: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Round float32 numbers in 0..448 to E4M3 bytes, to nearest even."""
    bits = x.view(np.uint32)
    # Normal: round to 3 mantissa bits by carry, then change the exponent bias from 127 to 7.
    normal = ((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - (120 << 3)
    subnormal = np.rint(x * np.float32(512))  # steps of 2^-9; 8 of them is the smallest normal
    return np.where(x >= np.float32(2.0**-6), normal, subnormal).astype(np.uint8)


# --- checks ---


def checked_float_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """Take one of `FLOATS`, in any spelling."""
    try:
        checked = np.dtype(dtype)
    except TypeError as error:
        raise TypeError(
            f"dtype is {dtype!r}, which is none; use float32, float64, float16 or bfloat16"
        ) from error
    if checked not in FLOATS:
        raise TypeError(f"dtype is {checked}; use float32, float64, float16 or bfloat16")
    return checked


def _checked_codes(codes: ArrayLike) -> NDArray[np.uint8]:
    refuse_masked(codes, "codes")
    try:
        codes = np.asarray(codes)
    except ValueError as error:
        raise ValueError(
            "codes is a list whose rows differ in length; it must be an array: pad the rows with 0"
        ) from error
    if codes.dtype == ml_dtypes.float4_e2m1fn:
        return codes.view(np.uint8) & np.uint8(15)
    if codes.size and codes.dtype.kind not in "iu":
        raise TypeError(
            f"codes is {codes.dtype}; E2M1 codes are integers 0 to 15: use encode_e2m1 for numbers"
        )
    bad = (codes < 0) | (codes > 15)
    if bad.any():
        index = np.argwhere(bad)[0]
        raise ValueError(
            f"codes{index_text(index)} is {codes[tuple(index)]}; E2M1 codes are 0 to 15: use "
            "unpack for packed bytes"
        )
    return codes.astype(np.uint8)


def _is_low(even: str) -> bool:
    if even not in ("low", "high"):
        raise ValueError(f"even is {even!r}; it is the nibble of the even elements: 'low', 'high'")
    return even == "low"


def refuse_masked(array: object, name: str) -> None:
    """Raise TypeError for a masked array."""
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array, whose mask would be lost; pass {name}.data")


def real_numbers(given: ArrayLike, name: str, wanted: str) -> NDArray[Any]:
    """Take real numbers of any type; Python integers beyond numpy's become float64.

    Raises
    ------
    TypeError, ValueError
        If they are none, with the value and what is `wanted`.
    """
    refuse_masked(given, name)
    try:
        array = np.asarray(given)
    except ValueError as error:  # a nested list whose parts differ in length
        raise ValueError(f"{name} is {given!r}; it must be {wanted}") from error
    if array.dtype == object and all(type(number) in (int, float) for number in array.flat):
        floats = [_to_float(number) for number in array.flat]
        array = np.array(floats, np.float64).reshape(array.shape)
    kind = array.dtype.kind
    if kind == "b" or (kind not in "iuf" and not np.can_cast(array.dtype, np.float32)):
        raise TypeError(f"{name} is {given!r} ({array.dtype}); it must be {wanted}")
    return array


def _to_float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def scale_bytes(scales: ArrayLike) -> NDArray[np.uint8]:
    """Take E4M3 scales as uint8, without changing a byte."""
    refuse_masked(scales, "scales")
    scales = np.asarray(scales)
    if scales.dtype == E4M3:
        return scales.view(np.uint8)
    if scales.dtype != np.uint8:
        fix = view_hint(scales.dtype, "ml_dtypes.float8_e4m3fn") if scales.itemsize == 1 else ""
        if not fix and scales.dtype.kind == "f":
            fix = "use encode_e4m3 to round numbers to E4M3"
        if not fix and scales.itemsize > 1 and scales.dtype.kind in "iu":
            fix = "if these are E4M3 bytes, use .astype(np.uint8)"
        if scales.dtype == ml_dtypes.float8_e8m0fnu:
            fix = "E8M0 is the scale of MXFP4, one per 32 elements: dequantize that, then quantize"
        raise TypeError(
            f"scales is {scales.dtype}; NVFP4 scales are E4M3, as float8_e4m3fn or as its bytes in "
            f"uint8: {fix or 'if these are E4M3 bytes, use .view(np.uint8)'}"
        )
    return scales


def view_hint(dtype: np.dtype[Any], wanted: str) -> str:
    """Say what to do with an array whose custom dtype numpy lost (as np.save does)."""
    if dtype in ("V1", "V2"):
        return f"if numpy lost its type on the way (np.save does that), use .view({wanted})"
    return ""


def index_text(index: Any) -> str:
    """Spell an index for a message: "[2, 5]", or "" for a number without axes."""
    return "[" + ", ".join(str(int(i)) for i in index) + "]" if len(index) else ""
