"""Conversions from fp32 at every exponent and at every tie, against numpy and ml_dtypes.

What a format with p bits after the point makes of a number depends on its sign, its exponent, its
first p + 1 bits after the point (one more decides a tie) and on whether any later bit is set. So
all of these, with the later bits zero or their lowest set, are every case there is, subnormal
results, overflow, infinities and NaNs included. For integers: every exponent, all first four bits
after the point, and the bits next to where the integer ends.
"""

import ml_dtypes
import numpy as np
import pytest
from instruction_cases import Case
from test_conversions import results

EXPONENTS = np.arange(512, dtype=np.uint32)[:, None, None] << np.uint32(23)  # with the sign above


def every_case(bits):
    """Return float32 numbers, as uint32, for a format with `bits` bits after the point."""
    kept = bits + 1
    first = np.arange(1 << kept, dtype=np.uint32)[None, :, None] << np.uint32(23 - kept)
    later = np.array([0, 1], np.uint32)[None, None, :]
    return (EXPONENTS | first | later).reshape(-1)


def run(text, out, words, inputs=1):
    """Return the results of one instruction for all words."""
    case = Case("f32", text, out, ("f32",) * inputs, len(words))
    return results(case, [words] * inputs)


def toward_zero(nearest, exact):
    """Return the numbers of a 16-bit format that lie next to `exact` on the side of zero."""
    over = np.abs(nearest.astype(np.float64)) > np.abs(exact)
    return np.where(over, nearest.view(np.uint16) - np.uint16(1), nearest.view(np.uint16))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["rn", "rz"])
@pytest.mark.parametrize(
    ("name", "dtype", "bits"), [("f16", np.float16, 10), ("bf16", ml_dtypes.bfloat16, 7)]
)
def test_to_16_bits(name, dtype, bits, mode):
    words = every_case(bits)
    with np.errstate(all="ignore"):
        x = words.view(np.float32)
        want = x.astype(dtype)
        if mode == "rz":
            finite = np.isfinite(x)
            want = np.where(finite, toward_zero(want, x.astype(np.float64)), want.view(np.uint16))
        want = np.where(np.isnan(x), np.uint16(0x7FFF), want.view(np.uint16))
    got = run(f"cvt.{mode}.{name}.f32 {{d}}, {{a}};", name, words)
    np.testing.assert_array_equal(got, want)
    words, want = words[::7], want[::7]  # the packed form shares the rounding
    pair = run(f"cvt.{mode}.{name}x2.f32 {{d}}, {{a}}, {{b}};", f"{name}x2", words, 2)
    np.testing.assert_array_equal(pair, want.astype(np.uint32) * np.uint32(0x10001))


@pytest.mark.parametrize("mode", ["rn", "rna"])
def test_to_tf32(mode):
    words = every_case(10)
    words = words[~np.isnan(words.view(np.float32))]
    tie = np.uint32(0x0FFF) + (words >> np.uint32(13) & np.uint32(1))
    rounded = words + (np.uint32(0x1000) if mode == "rna" else tie)
    want = np.where(np.isinf(words.view(np.float32)), words, rounded) & np.uint32(0xFFFFE000)
    got = run(f"cvt.{mode}.tf32.f32 {{d}}, {{a}};", "b32", words)
    np.testing.assert_array_equal(got & np.uint32(0xFFFFE000), want)


@pytest.mark.parametrize(
    ("name", "dtype", "bits", "largest", "nan"),
    [
        ("e4m3", ml_dtypes.float8_e4m3fn, 3, 448.0, 0x7F),
        ("e5m2", ml_dtypes.float8_e5m2, 2, 57344.0, 0x7F),
        ("e2m3", ml_dtypes.float6_e2m3fn, 3, 7.5, 0x1F),
        ("e3m2", ml_dtypes.float6_e3m2fn, 2, 28.0, 0x1F),
    ],
)
def test_to_eight_and_six_bits(name, dtype, bits, largest, nan):
    words = every_case(bits)
    x = words.view(np.float32)
    with np.errstate(all="ignore"):
        clipped = np.clip(x, -np.float32(largest), np.float32(largest))
        code = np.where(np.isnan(x), 0, clipped).astype(dtype).view(np.uint8)
    want = np.where(np.isnan(x), np.uint16(nan), code.astype(np.uint16))
    got = run(f"cvt.rn.satfinite.{name}x2.f32 {{d}}, {{a}}, {{b}};", "b16", words, 2)
    np.testing.assert_array_equal(got, want * np.uint16(0x101))


def test_to_e2m1():
    words = every_case(1)
    x = words.view(np.float32)
    with np.errstate(all="ignore"):
        clipped = np.where(np.isnan(x), 6, np.clip(x, -6, 6)).astype(np.float32)
        code = clipped.astype(ml_dtypes.float4_e2m1fn).view(np.uint8).astype(np.uint32)
    text = (
        "{{ .reg .b8 %x; cvt.rn.satfinite.e2m1x2.f32 %x, {a}, {b};"
        " mov.b32 {d}, {{%x, %x, %x, %x}}; }}"
    )
    np.testing.assert_array_equal(run(text, "b32", words, 2), code * np.uint32(0x11111111))


ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@pytest.mark.parametrize("mode", ROUND)
@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64"])
def test_to_integers(kind, mode):
    first = np.arange(16, dtype=np.uint32)[None, :, None] << np.uint32(19)
    places = 1 << np.arange(0, 19, dtype=np.uint32)
    later = np.unique(np.concatenate([[0], places, places - 1, places | places >> 1, places + 1]))
    words = (EXPONENTS | first | later.astype(np.uint32)[None, None, :]).reshape(-1)
    words = words[~np.isnan(words.view(np.float32))]
    x = words.view(np.float32).astype(np.float64)
    info = np.iinfo(f"{'i' if kind[0] == 's' else 'u'}{int(kind[1:]) // 8}")
    whole = ROUND[mode](x)
    inside = (whole >= float(info.min)) & (whole < 2.0 * (info.max // 2 + 1))
    want = np.where(inside, whole, 0).astype(info.dtype)
    want[~inside & (x < 0)] = info.min
    want[~inside & (x > 0)] = info.max
    got = run(f"cvt.{mode}.{kind}.f32 {{d}}, {{a}};", kind, words)
    np.testing.assert_array_equal(got.view(info.dtype), want)
