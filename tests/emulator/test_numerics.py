"""Formats and dot products of the matrix units against exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from fp4rt.emulator.numerics import block_scaled_dot, decode, decode_padded, dot, round_f32


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("e4m3", ml_dtypes.float8_e4m3fn),
        ("e5m2", ml_dtypes.float8_e5m2),
        ("s8", np.int8),
        ("ue8m0", ml_dtypes.float8_e8m0fnu),
    ],
)
def test_8_bit_formats_match_ml_dtypes(name, dtype):
    codes = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(decode(codes, name), codes.view(dtype).astype(np.float64))


@pytest.mark.parametrize(
    ("name", "dtype", "bits"),
    [
        ("e2m1", ml_dtypes.float4_e2m1fn, 4),
        ("e2m3", ml_dtypes.float6_e2m3fn, 6),
        ("e3m2", ml_dtypes.float6_e3m2fn, 6),
    ],
)
def test_padded_containers_match_ml_dtypes(name, dtype, bits):
    codes = np.resize(np.arange(1 << bits, dtype=np.uint8), 64)
    image = np.zeros((4, 16), np.uint8)
    for group in range(4):
        word = sum(int(c) << (bits * i) for i, c in enumerate(codes[16 * group :][:16]))
        image[group] = np.frombuffer(word.to_bytes(16, "little"), np.uint8)
    image[:, 2 * bits :] = 0xFF  # padding is never looked at
    expected = codes.view(dtype).astype(np.float64)
    np.testing.assert_array_equal(decode_padded(image.reshape(1, 64), name)[0], expected)


def test_packed_e2m1_has_element_0_in_the_low_nibble():
    assert decode(np.array([0xA3], np.uint8), "e2m1").tolist() == [1.5, -1.0]


def test_packed_s4():
    assert decode(np.array([0x8F], np.uint8), "s4").tolist() == [-1.0, -8.0]


def test_tf32_ignores_the_low_bits():
    word = np.array([0x3F801FFF], np.uint32)
    assert decode(word.view(np.uint8), "tf32").tolist() == [1.0]


def test_unsigned_scales_ignore_the_sign_and_keep_nan():
    values = decode(np.array([0x38, 0xB8, 0x7F, 0xFF, 0x80], np.uint8), "ue4m3")
    np.testing.assert_array_equal(values, [1.0, 1.0, np.nan, np.nan, 0.0])


def test_round_toward_zero():
    tiny = 2.0**-30
    values = np.array([1 + tiny, -1 - tiny, 1 - tiny, 2.0**-149 * 1.5, np.inf, np.nan, 2.0**128])
    result = round_f32(values)
    below = np.nextafter(np.float32(1), np.float32(0))
    assert result[:5].tolist() == [1.0, -1.0, below, 2.0**-149, np.inf]
    assert result.view(np.uint32)[5] == 0x7FFFFFFF
    assert result[6] == np.inf


def test_dot_of_integers_is_exact_in_every_type():
    rng = np.random.default_rng(1)
    a, b = rng.integers(-8, 8, (16, 32)), rng.integers(-8, 8, (8, 32))
    d = rng.integers(-100, 100, (16, 8))
    for name, dtype in (("f32", np.float32), ("f16", np.float16), ("s32", np.int32)):
        result = dot(a.astype(float), b.astype(float), d.astype(dtype), name)
        assert result.dtype == dtype
        np.testing.assert_array_equal(result, a @ b.T + d)


def test_dot_keeps_infinity_and_nan_to_their_rows():
    a, b = np.ones((4, 16)), np.ones((4, 16))
    a[1, 3], b[2, 5] = np.inf, np.nan
    result = dot(a, b, None, "f32")
    assert np.isnan(result[:, 2]).all()
    assert np.isinf(result[1, [0, 1, 3]]).all()
    assert (result[[0, 2, 3]][:, [0, 1, 3]] == 16).all()


def _modelled(a, b, sa, sb, d):
    """The documented model in exact rational arithmetic, one output element."""

    def exponent(code):
        return max((int(code) & 0x7F) >> 3, 1) - 7

    terms = []
    for i in range(4):
        total = sum(
            Fraction(x) * Fraction(y)
            for x, y in zip(a[16 * i :][:16], b[16 * i :][:16], strict=True)
        )
        scales = decode(np.array([sa[i], sb[i]], np.uint8), "ue4m3")
        terms.append(
            (total * Fraction(scales[0]) * Fraction(scales[1]), exponent(sa[i]) + exponent(sb[i]))
        )
    field = int(np.float32(d).view(np.uint32)) >> 23 & 0xFF
    terms.append((Fraction(float(d)), max(field, 1) - 127))
    unit = Fraction(2) ** (max(e for _, e in terms) - 35)
    total = sum(int(t / unit) for t, _ in terms) * unit  # int() truncates toward zero
    return round_f32(np.array([float(total)]))[0]


@pytest.mark.parametrize(("low", "high"), [(0, 0x7F), (0x08, 0x70), (0x30, 0x48)])
def test_block_scaled_dot_is_the_documented_model_bit_for_bit(low, high):
    rng = np.random.default_rng(high)
    codes_a = rng.integers(0, 256, (8, 32), dtype=np.uint8)
    codes_b = rng.integers(0, 256, (7, 32), dtype=np.uint8)
    sa = rng.integers(low, high, (8, 4), dtype=np.uint8)
    sb = rng.integers(low, high, (7, 4), dtype=np.uint8)
    d = (rng.standard_normal((8, 7)) * 10.0 ** rng.integers(-9, 9, (8, 7))).astype(np.float32)
    d[0, 0] = 0
    a, b = decode(codes_a, "e2m1"), decode(codes_b, "e2m1")
    result = block_scaled_dot(a, b, sa, sb, "ue4m3", d)
    for m in range(8):
        for n in range(7):
            assert result[m, n] == _modelled(a[m], b[n], sa[m], sb[n], d[m, n])


def test_nan_scale_poisons_its_row_only_even_against_zero():
    a, b = np.zeros((4, 64)), np.ones((3, 64))
    sa, sb = np.full((4, 4), 0x38, np.uint8), np.full((3, 4), 0x38, np.uint8)
    sa[2, 1] = 0x7F
    result = block_scaled_dot(a, b, sa, sb, "ue4m3", None)
    assert (result.view(np.uint32)[2] == 0x7FFFFFFF).all()
    assert (result[[0, 1, 3]] == 0).all()


def test_block_scaled_dot_with_power_of_two_scales():
    a, b = np.full((2, 64), 1.5), np.full((2, 64), -2.0)
    sa = np.array([[127, 128], [126, 255]], np.uint8)
    sb = np.array([[127, 127], [130, 127]], np.uint8)
    result = block_scaled_dot(a, b, sa, sb, "ue8m0", np.ones((2, 2), np.float32))
    assert result[0].tolist() == [1 - 96 - 192, 1 - 96 * 8 - 192]
    assert np.isnan(result[1]).all()
