"""E2M1 and E4M3 codes, packing and output rounding, against definitions written another way."""

from bisect import bisect_left
from fractions import Fraction
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fp4rt import codes

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
E4M3 = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64).tolist()


def nearest_even(table, x):
    """Index of the entry of `table` nearest to x ≥ 0; of two equally near, the even index."""
    middles = [(low + high) / 2 for low, high in pairwise(table)]
    i = bisect_left(middles, x)
    return i + (i & 1) if i < len(middles) and x == middles[i] else i


def around(numbers):
    """Each number and its float32 neighbours."""
    numbers = np.asarray(numbers, np.float32)
    below, above = np.nextafter(numbers, np.float32(-1)), np.nextafter(numbers, np.float32(1e9))
    return np.concatenate([below, numbers, above])


def finite_bfloat16():
    patterns = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(ml_dtypes.bfloat16)
    return patterns[np.isfinite(patterns.astype(np.float32))]


# --- E2M1 ---


def test_e2m1_of_every_finite_bfloat16():
    x = finite_bfloat16()
    want = [
        nearest_even(E2M1, abs(v)) | 8 * s
        for v, s in zip(x.astype(float).tolist(), np.signbit(x.astype(float)), strict=True)
    ]
    assert len(x) == 2 * 255 * 128
    np.testing.assert_array_equal(codes.encode_e2m1(x), want)


def test_e2m1_agrees_with_ml_dtypes_on_every_finite_bfloat16():
    x = finite_bfloat16()
    want = x.astype(np.float32).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    np.testing.assert_array_equal(codes.encode_e2m1(x), want)


@pytest.mark.parametrize("sign", [1, -1])
def test_e2m1_ties_go_to_the_even_code(sign):
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    want = np.array([0, 2, 2, 4, 4, 6, 6]) + (8 if sign < 0 else 0)
    np.testing.assert_array_equal(codes.encode_e2m1(sign * ties), want)


def test_e2m1_beside_ties():
    middles = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    x = around(middles)
    np.testing.assert_array_equal(codes.encode_e2m1(x), [nearest_even(E2M1, v) for v in x.tolist()])


def test_e2m1_of_float64_is_not_rounded_to_float32_first():
    assert codes.encode_e2m1(0.25 + 2**-40) == 1
    assert codes.encode_e2m1(0.75 - 2**-40) == 1


@pytest.mark.parametrize("x", [6.5, 7, 100, 2.41592e9, 1e30, np.inf])
def test_e2m1_saturates(x):
    assert codes.encode_e2m1(x) == 0x7
    assert codes.encode_e2m1(-x) == 0xF


def test_e2m1_refuses_nan_and_names_it():
    with pytest.raises(ValueError, match=r"x\[1, 0\] is nan"):
        codes.encode_e2m1([[1, 2], [np.nan, np.nan]])


def test_e2m1_codes_decode_and_encode_back():
    every = np.arange(16)
    values = codes.decode_e2m1(every)
    assert values.dtype == np.float32
    assert values.tolist() == [*E2M1, *(-v for v in E2M1)]
    assert np.signbit(values[8])
    np.testing.assert_array_equal(codes.encode_e2m1(values), every)


# --- E4M3 ---


def test_e4m3_decodes_all_256_bytes():
    every = np.arange(256).astype(np.uint8)
    got = codes.decode_e4m3(every)
    want = every.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(got, want)
    assert np.flatnonzero(np.isnan(got)).tolist() == [0x7F, 0xFF]
    finite = ~np.isnan(got)
    np.testing.assert_array_equal(np.signbit(got)[finite], (every > 127)[finite])


def test_e4m3_of_typed_bytes_is_the_same():
    every = np.arange(256).astype(np.uint8)
    typed = codes.decode_e4m3(every.view(ml_dtypes.float8_e4m3fn))
    assert typed.tobytes() == codes.decode_e4m3(every).tobytes()


@pytest.mark.parametrize("round_", [codes.encode_e4m3, codes.round_e4m3], ids=["64", "32"])
def test_e4m3_at_and_beside_every_tie_and_value(round_):
    middles = [(low + high) / 2 for low, high in pairwise(E4M3)]
    x = np.minimum(np.abs(around([*middles, *E4M3])), np.float32(448))
    np.testing.assert_array_equal(round_(x), [nearest_even(E4M3, v) for v in x.tolist()])


def test_e4m3_float32_rounding_of_random_bits(rng):
    x = rng.integers(0, 0x43E00001, 20000, dtype=np.uint32).view(np.float32)
    np.testing.assert_array_equal(codes.round_e4m3(x), [nearest_even(E4M3, v) for v in x.tolist()])


@pytest.mark.parametrize("x", [448, 449, 464, 465, 480, 5376, 1e30, np.inf])
def test_e4m3_clamps_and_is_never_nan(x):
    assert codes.encode_e4m3(x) == 0x7E


def test_e4m3_of_float64_is_rounded_once():
    tie = 1 + 1 / 16
    assert codes.encode_e4m3(tie) == 0x38
    assert codes.encode_e4m3(tie + 2**-40) == 0x39


@pytest.mark.parametrize("bad", [-1.0, np.nan, -np.inf])
def test_e4m3_refuses_what_is_no_scale(bad):
    with pytest.raises(ValueError, match=rf"x\[1\] is {bad}"):
        codes.encode_e4m3([0.0, bad])


@pytest.mark.parametrize(
    "dtype", [np.int8, np.float16, np.float32, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu]
)
def test_e4m3_bytes_of_another_type_are_refused(dtype):
    with pytest.raises(TypeError, match="E4M3"):
        codes.decode_e4m3(np.ones(3, dtype))


# --- packing ---


def test_the_even_element_is_in_the_low_nibble():
    assert codes.pack([1, 2]).tolist() == [0x21]
    assert codes.pack([1, 2], even="high").tolist() == [0x12]


@pytest.mark.parametrize("even", ["low", "high"])
def test_pack_is_the_inverse_of_unpack_for_all_bytes(even):
    every = np.arange(256).astype(np.uint8).reshape(8, 32)
    np.testing.assert_array_equal(codes.pack(codes.unpack(every, even=even), even=even), every)


@given(hnp.arrays(np.uint8, hnp.array_shapes(max_dims=4, max_side=6), elements=st.integers(0, 15)))
def test_unpack_is_the_inverse_of_pack(x):
    x = np.concatenate([x, x[..., ::-1]], axis=-1)
    np.testing.assert_array_equal(codes.unpack(codes.pack(x)), x)


def test_pack_takes_float4_arrays():
    x = np.array([0.5, -6.0, 1.5, 0.0], np.float32)
    assert codes.pack(x.astype(ml_dtypes.float4_e2m1fn)).tolist() == [0xF1, 0x03]


def test_pack_and_unpack_take_strided_arrays():
    x = np.arange(16, dtype=np.int64).reshape(2, 8)[:, ::-1]
    np.testing.assert_array_equal(codes.pack(x), codes.pack(x.copy()))
    packed = np.asfortranarray(codes.pack(x))
    np.testing.assert_array_equal(codes.unpack(packed), x)


@pytest.mark.parametrize(
    ("bad", "error", "match"),
    [
        ([0, 16], ValueError, r"codes\[1\] is 16"),
        ([-1, 0], ValueError, r"codes\[0\] is -1"),
        ([1, 2, 3], ValueError, r"shape \(3,\).*even"),
        ([1.0, 2.0], TypeError, "encode_e2m1"),
        (3, ValueError, r"shape \(\)"),
    ],
)
def test_pack_refuses_bad_codes(bad, error, match):
    with pytest.raises(error, match=match):
        codes.pack(bad)


def test_nibble_order_must_be_known():
    with pytest.raises(ValueError, match="'big'"):
        codes.pack([1, 2], even="big")


@pytest.mark.parametrize("bad", [np.zeros(4, np.int8), np.uint8(3)])
def test_unpack_refuses_other_types(bad):
    with pytest.raises(TypeError, match="uint8"):
        codes.unpack(bad)


# --- round_to ---


def exact_rounding(x, significand_bits, smallest_exponent, largest):
    """Round one float64 to nearest even, in exact arithmetic."""
    if x == 0 or not np.isfinite(x):
        return x
    exact = Fraction(x)
    exponent = max(np.frexp(x)[1] - significand_bits, smallest_exponent)
    quantum = Fraction(2) ** int(exponent)
    rounded = round(exact / quantum) * quantum  # Python rounds halves to even
    return np.copysign(np.inf if abs(rounded) > largest else float(rounded), x)


FORMATS = {
    np.dtype(np.float16): (11, -24, 65504.0),
    np.dtype(ml_dtypes.bfloat16): (8, -133, (2 - 2**-7) * 2.0**127),
    np.dtype(np.float32): (24, -149, float(np.finfo(np.float32).max)),
}


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_round_to_is_exact_on_ties_and_their_neighbours(dtype, rng):
    bits, lowest, largest = FORMATS[dtype]
    kept = rng.integers(0, 1 << bits, 300).astype(np.float64)
    exponents = rng.integers(lowest, 128 - bits, 300)
    ties = (kept + 0.5) * 2.0**exponents
    single = 2.0 ** (exponents - 30)  # lost on the way through float32
    x = np.concatenate([ties, ties + single, ties - single, [0.0, largest, 1e300, 1e-300, np.inf]])
    x = np.concatenate([x, -x])
    got = codes.round_to(x, dtype)
    assert got.dtype == dtype
    want = [exact_rounding(v, bits, lowest, largest) for v in x.tolist()]
    np.testing.assert_array_equal(got.astype(np.float64), want)
    np.testing.assert_array_equal(np.signbit(got.astype(np.float64)), np.signbit(x))


@pytest.mark.parametrize("dtype", [*FORMATS, np.float64], ids=str)
def test_round_to_keeps_nan_and_shape(dtype):
    got = codes.round_to(np.array([[np.nan], [1.5]]), dtype)
    assert got.shape == (2, 1) and np.isnan(got.astype(float)[0, 0]) and got[1, 0] == 1.5
    assert codes.round_to(1.5, dtype).shape == ()
    assert codes.round_to(np.empty((0, 3)), dtype).shape == (0, 3)


def test_round_to_refuses_other_types():
    with pytest.raises(TypeError, match="int8"):
        codes.round_to(1.0, np.int8)
