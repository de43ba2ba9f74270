"""quantize and dequantize against an implementation of one number at a time; the operand type."""

import io
import struct
import tracemalloc
from bisect import bisect_left
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4rt import codes, nvfp4
from fp4rt.nvfp4 import Nvfp4Array, dequantize, quantize

BF16 = ml_dtypes.bfloat16
FLT_MAX = float(np.finfo(np.float32).max)
TINY = 2.0**-126

# --- the scalar implementation: Python floats, rounded to float32 after each operation ---

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
E4M3 = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64).tolist()


def middles(table):
    return [(low + high) / 2 for low, high in pairwise(table)]


E2M1_MIDDLES, E4M3_MIDDLES = middles(E2M1), middles(E4M3)


def f32(x):
    """Round to float32; a float64 quotient or product of float32 numbers rounds right this way."""
    try:
        return struct.unpack("f", struct.pack("f", x))[0]
    except OverflowError:
        return float("inf")


def nearest_even(between, x):
    i = bisect_left(between, x)
    return i + (i & 1) if i < len(between) and x == between[i] else i


def scalar_global_scale(amax):
    return max(f32(amax / 2688), TINY) if amax else 1.0


def scalar_quantize(x, global_scale):
    """Codes and scale bytes of float32 numbers in whole scale blocks, one number at a time."""
    values, scales = [], []
    x = x.ravel().tolist()
    signs = np.signbit(x).tolist()
    six_global = f32(6 * global_scale)
    for start in range(0, len(x), 16):
        block = x[start : start + 16]
        amax = max(map(abs, block))
        scale = nearest_even(E4M3_MIDDLES, min(f32(amax / six_global), 448.0))
        scales.append(scale)
        step = f32(E4M3[scale] * global_scale)
        for value, sign in zip(block, signs[start : start + 16], strict=True):
            code = nearest_even(E2M1_MIDDLES, f32(abs(value) / step)) if scale else 0
            values.append(code + 8 * (sign and scale > 0))
    return values, scales


def assert_same_as_scalar(q, x, global_scale):
    values, scales = scalar_quantize(np.asarray(x, np.float32), global_scale)
    assert np.all(q.global_scale == np.float32(global_scale))
    np.testing.assert_array_equal(q.scales.view(np.uint8).ravel(), scales)
    np.testing.assert_array_equal(codes.unpack(q.values).ravel(), values)


def same_bits(p, q):
    return (
        p.shape == q.shape
        and p.values.tobytes() == q.values.tobytes()
        and p.scales.tobytes() == q.scales.tobytes()
        and np.array_equal(p.global_scale, q.global_scale)
    )


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def finite_bfloat16():
    patterns = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(BF16)
    return patterns[np.isfinite(patterns.astype(np.float32))]


# --- quantize, byte for byte ---


@pytest.mark.slow
def test_a_million_random_float32(rng):
    x = normal(rng, 1000, 1008) * np.exp(2 * normal(rng, 1000, 1))
    assert_same_as_scalar(quantize(x), x, scalar_global_scale(float(np.abs(x).max())))


def test_every_finite_bfloat16_in_range_at_scale_one():
    every = finite_bfloat16()
    x = every[np.abs(every.astype(np.float32)) <= 6]
    x = np.concatenate([x, np.zeros(-len(x) % 15, BF16)]).reshape(-1, 15)
    x = np.concatenate([np.full((len(x), 1), 6, BF16), x], axis=1)  # makes each block's scale 1
    q = quantize(x, two_level=False)
    assert (q.scales.view(np.uint8) == 0x38).all()
    assert_same_as_scalar(q, x, 1.0)
    want = x.astype(np.float32).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    np.testing.assert_array_equal(codes.unpack(q.values), want)


@pytest.mark.parametrize("two_level", [True, False])
def test_every_finite_bfloat16(two_level):
    x = finite_bfloat16().reshape(-1, 16)
    g = scalar_global_scale(float(np.abs(x.astype(np.float32)).max())) if two_level else 1.0
    assert_same_as_scalar(quantize(x, two_level=two_level), x, g)


def test_every_e2m1_tie():
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    row = np.concatenate([ties, -ties, [6, -6]])[np.newaxis]
    q = quantize(row, two_level=False)
    even = [0, 2, 2, 4, 4, 6, 6]
    want = [*even, *(code + 8 for code in even), 7, 15]
    np.testing.assert_array_equal(codes.unpack(q.values)[0], want)


def test_every_e4m3_tie():
    ties = np.array(E4M3_MIDDLES, np.float32)
    below, above = np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(999))
    x = np.zeros((3 * len(ties), 16), np.float32)
    x[:, 5] = 6 * np.concatenate([ties, below, above])  # 6 · tie is exact
    q = quantize(x, two_level=False)
    assert_same_as_scalar(q, x, 1.0)
    even = np.arange(126) + np.arange(126) % 2
    np.testing.assert_array_equal(q.scales.view(np.uint8)[:126, 0], even)


@pytest.mark.parametrize("exponent", [*range(-149, -100, 6), *range(-100, 128, 40), 120, 125, 127])
def test_every_magnitude_of_amax(exponent, rng):
    x = np.ldexp(rng.uniform(-1, 1, (8, 64)), exponent).astype(np.float32)
    g = scalar_global_scale(float(np.abs(x).max()))
    q = quantize(x)
    assert_same_as_scalar(q, x, g)
    assert TINY <= q.global_scale <= FLT_MAX / 2688 * (1 + 1e-7)
    assert np.isfinite(dequantize(q)).all()


def test_the_largest_float32_comes_back():
    x = np.full((1, 16), FLT_MAX, np.float32)
    x[0, 1] = -FLT_MAX
    got = dequantize(quantize(x))
    np.testing.assert_allclose(got, x, rtol=1e-6)


def test_the_smallest_float32_becomes_zero_without_a_nan():
    q = quantize(np.full((1, 16), 2.0**-149, np.float32))
    assert q.global_scale == TINY
    assert not q.values.any() and not q.scales.view(np.uint8).any()


@pytest.mark.parametrize("g", [TINY, 1e-30, 1e-3, 3.0, float(nvfp4.GLOBAL_SCALE_MAX)])
def test_a_given_global_scale(g, rng):
    x = normal(rng, 4, 64) * np.float32(g) * 100
    assert_same_as_scalar(quantize(x, global_scale=g), x, float(np.float32(g)))


def test_a_global_scale_too_small_for_the_data_saturates(rng):
    x = normal(rng, 4, 64)
    x *= 100 / np.abs(x).max()
    x[:, ::16] = 100
    q = quantize(x, global_scale=10 / 2688)
    assert (q.scales.view(np.uint8) == 0x7E).all()
    assert dequantize(q).max() == np.float32(2688) * np.float32(10 / 2688)


def test_extreme_numbers_under_a_tiny_global_scale():
    x = np.array([[FLT_MAX, -FLT_MAX] + [1e-38] * 14], np.float32)
    q = quantize(x, global_scale=TINY)
    assert codes.unpack(q.values)[0, :3].tolist() == [7, 15, 0]


def test_zeros():
    q = quantize(np.zeros((32, 64), np.float32))
    assert q.global_scale == 1
    assert not q.values.any() and not q.scales.view(np.uint8).any()
    assert not dequantize(q).any()


def test_zero_blocks_beside_others_are_zero_and_change_nothing(rng):
    x = normal(rng, 6, 64)
    x[0, 0] = 10.0  # the largest stays, and with it the global scale
    full = quantize(x)
    y = x.copy()
    y[2] = 0
    y[4, 16:32] = -0.0
    q = quantize(y)
    assert not dequantize(q)[2].any() and not dequantize(q)[4, 16:32].any()
    assert not q.values[2].any() and not q.values[4, 8:16].any(), "signs of zeros in a zero block"
    assert same_bits(q[[0, 1, 3, 5]], full[[0, 1, 3, 5]])


def test_small_data_keeps_its_precision(rng):
    x = normal(rng, 64, 256) * np.float32(1e-4)
    q = quantize(x)
    assert np.mean((codes.unpack(q.values) & 7) != 0) > 0.8
    error = np.sqrt(np.mean((dequantize(q) - x) ** 2) / np.mean(x**2))
    assert 0 < error < 0.12


def test_single_level_scaling(rng):
    x = normal(rng, 8, 64)
    q = quantize(x, two_level=False)
    assert q.global_scale == 1
    assert_same_as_scalar(q, x, 1.0)


@pytest.mark.parametrize("two_level", [True, False])
def test_the_error_is_at_most_one_step(two_level, rng):
    x = normal(rng, 64, 256)
    q = quantize(x, two_level=two_level)
    step = np.repeat(codes.E4M3_VALUES[q.scales.view(np.uint8)], 16, axis=1) * q.global_scale
    error = np.abs(dequantize(q) - x)
    assert (error <= step * np.float32(1.0001)).all()
    assert error.max() > 0


def test_one_amax_for_a_stack_or_one_a_group(rng):
    x = normal(rng, 3, 4, 32) * np.array([1, 10, 100], np.float32)[:, None, None]
    whole = quantize(x)
    assert np.ndim(whole.global_scale) == 0
    assert whole.global_scale == np.float32(np.abs(x).max()) / np.float32(2688)
    each = quantize(x, scope="group")
    assert each.global_scale.shape == (3,)
    for g in range(3):
        assert same_bits(each[g], quantize(x[g]))
        assert same_bits(whole[g], quantize(x[g], global_scale=whole.global_scale))


def test_global_scales_may_be_given_in_any_shape(rng):
    x = normal(rng, 3, 4, 32)
    want = quantize(x, global_scale=0.25)
    for g in (np.float64(0.25), np.array(0.25), np.array([0.25]), [0.25] * 3):
        q = quantize(x, global_scale=g)
        assert q.values.tobytes() == want.values.tobytes()
        assert np.all(np.asarray(q.global_scale) == 0.25)


# --- types, strides, sizes ---


@pytest.mark.parametrize("dtype", [np.float16, BF16, np.float64], ids=str)
def test_input_types_are_taken_as_their_float32_value(dtype, rng):
    x = normal(rng, 5, 70).astype(dtype)
    assert same_bits(quantize(x), quantize(x.astype(np.float32)))


def test_lists_and_read_only_arrays_are_taken(rng):
    x = normal(rng, 3, 32)
    want = quantize(x)
    x.flags.writeable = False
    assert same_bits(quantize(x), want)
    assert same_bits(quantize(x.tolist()), want)


def views():
    base = np.random.default_rng(7).standard_normal((6, 10, 80)).astype(np.float32)
    return {
        "transposed": base[0].T,
        "every second row": base[0][::2],
        "reversed": base[0][:, ::-1],
        "rows reversed": base[:, ::-1],
        "Fortran": np.asfortranarray(base[0]),
        "Fortran stack": np.asfortranarray(base),
        "broadcast": np.broadcast_to(base[0, 0], (4, 80)),
        "offset": base[1:, 3:, 5:71],
        "axes swapped": base.transpose(2, 0, 1),
        "unaligned": np.frombuffer(b"\0" + base[0].tobytes(), np.uint8)[1:]
        .view(np.float32)
        .reshape(10, 80),
    }


@pytest.mark.parametrize("name", views())
def test_any_strides(name):
    x = views()[name]
    q = quantize(x)
    assert same_bits(q, quantize(np.ascontiguousarray(x)))
    assert q.shape == x.shape


@pytest.mark.parametrize("k", [1, 7, 15, 16, 17, 31, 40, 1000])
def test_ragged_k_is_padded_with_zeros_and_remembered(k, rng):
    x = normal(rng, 3, k)
    q = quantize(x)
    whole = -(-k // 16) * 16
    assert q.shape == (3, k) and q.k == k
    assert q.values.shape == (3, whole // 2) and q.scales.shape == (3, whole // 16)
    padded = np.pad(x, ((0, 0), (0, whole - k)))
    assert same_bits(quantize(padded), Nvfp4Array.from_parts(q.values, q.scales, q.global_scale))
    np.testing.assert_array_equal(dequantize(q), dequantize(quantize(padded))[:, :k])


@pytest.mark.parametrize("shape", [(0, 32), (0, 4, 32), (3, 0, 32), (0, 0, 17)])
def test_no_rows_and_no_groups(shape):
    q = quantize(np.zeros(shape, np.float32))
    assert q.shape == shape and q.global_scale == 1
    assert dequantize(q).shape == shape


@pytest.mark.parametrize("shape", [(3, 200_000), (5, 70_001), (70_000, 3), (40, 3, 1000)])
def test_shapes_of_many_tiles(shape, rng):
    x = normal(rng, *shape)
    q = quantize(x)
    last = (slice(-1, None),) * (len(shape) - 1)
    part = quantize(x[last], global_scale=q.global_scale)
    assert part.values.tobytes() == q.values[last].tobytes()
    np.testing.assert_array_equal(dequantize(q)[last], dequantize(part))
    step = np.repeat(codes.E4M3_VALUES[q.scales.view(np.uint8)], 16, axis=-1)[..., : shape[-1]]
    assert (np.abs(dequantize(q) - x) <= step * q.global_scale * np.float32(1.0001)).all()


def test_scratch_memory_is_bounded(rng):
    x = normal(rng, 1024, 4096)
    tracemalloc.start()
    try:
        q = quantize(x)
        quantize_peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        dequantize(q)
        dequantize_peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert quantize_peak < 0.4 * x.nbytes  # the result is 0.14 of it
    assert dequantize_peak < 1.2 * x.nbytes


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 9),
    k=st.integers(1, 70),
    seed=st.integers(0, 2**32 - 1),
    spread=st.floats(0, 30),
    g=st.none() | st.floats(1e-6, 1e6),
)
def test_rows_do_not_depend_on_each_other(rows, k, seed, spread, g):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, k)) * np.exp(spread * rng.standard_normal((rows, k)))
    x = np.clip(x, -FLT_MAX, FLT_MAX).astype(np.float32)
    q = quantize(x, global_scale=g)
    whole = np.pad(x, ((0, 0), (0, -k % 16)))
    assert_same_as_scalar(q, whole, float(q.global_scale))
    for r in range(rows):
        one = quantize(x[r : r + 1], global_scale=q.global_scale)
        assert same_bits(one, q[r : r + 1])


# --- NaN and infinity ---


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, BF16], ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("options", [{}, {"two_level": False}, {"global_scale": 2.0}], ids=str)
def test_the_first_nan_or_infinity_is_named(dtype, bad, options):
    x = np.ones((3, 50), dtype)
    x[1, 33] = x[2, 0] = bad
    with pytest.raises(ValueError, match=rf"x\[1, 33\] is {bad}"):
        quantize(x, **options)


def test_a_nan_in_a_stack_of_many_tiles_is_named():
    x = np.ones((3, 40, 3000), np.float32)[:, ::-1]
    x[2, 35, 2999] = np.nan
    with pytest.raises(ValueError, match=r"x\[2, 35, 2999\] is nan"):
        quantize(x)
    assert quantize(np.where(np.isfinite(x), x, 0)).shape == x.shape, "the message's own advice"


def test_float64_beyond_float32_is_named():
    x = np.ones((2, 16))
    x[1, 3] = -1e39
    with pytest.raises(ValueError, match=r"x\[1, 3\] is -1e\+39, beyond float32"):
        quantize(x)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_propagates_to_its_block_only(bad, rng):
    x = normal(rng, 4, 64)
    want = quantize(x)
    y = x.copy()
    y[1, 20] = bad
    assert np.abs(np.delete(x.ravel(), 64 + 20)).max() == np.abs(x).max()
    q = quantize(y, nan="propagate")
    assert q.global_scale == want.global_scale
    got, clean = dequantize(q), dequantize(want)
    assert q.scales.view(np.uint8)[1, 1] == 0x7F
    assert np.isnan(got[1, 16:32]).all()
    got[1, 16:32] = clean[1, 16:32]
    np.testing.assert_array_equal(got, clean)


def test_nothing_but_nan_propagates_too():
    q = quantize(np.full((1, 16), np.nan), nan="propagate")
    assert q.global_scale == 1 and np.isnan(dequantize(q)).all()


# --- dequantize ---


def test_all_scale_bytes_and_codes_dequantize():
    every = np.tile(np.arange(16), (256, 1))
    scales = np.arange(256).astype(np.uint8)[:, np.newaxis]
    q = Nvfp4Array.from_parts(codes.pack(every), scales, 1.0)
    e4m3 = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    e2m1 = np.array([*E2M1, *(-v for v in E2M1)])
    for dtype in (np.float32, np.float64, np.float16, BF16):
        got = dequantize(q, dtype)
        assert got.dtype == dtype
        np.testing.assert_array_equal(got.astype(np.float64), e2m1 * e4m3, err_msg=str(dtype))


def test_dequantize_rounds_once(rng):
    q = quantize(normal(rng, 8, 64), global_scale=np.float32(1 / 2700))
    exact = dequantize(q, np.float64)
    e4m3 = np.repeat(q.scales.astype(np.float64), 16, axis=1)
    e2m1 = nvfp4.decode(q.values, np.full(q.scales.shape, 0x38, np.uint8)).astype(np.float64)
    np.testing.assert_array_equal(exact, e2m1 * e4m3 * float(q.global_scale))
    np.testing.assert_array_equal(dequantize(q), exact.astype(np.float32))
    np.testing.assert_array_equal(dequantize(q, np.float16), exact.astype(np.float16))
    bf16 = codes.round_to(exact, BF16)
    assert dequantize(q, BF16).tobytes() == bf16.tobytes()


def test_small_scales_are_not_flushed():
    scales = np.array([[0x01, 0x02, 0x04, 0x7E]], np.uint8)
    q = Nvfp4Array.from_parts(np.full((1, 32), 0x22, np.uint8), scales, 1.0)
    for dtype in (np.float32, BF16, np.float16):
        got = dequantize(q, dtype)[0, ::16].astype(float).tolist()
        assert got == [2**-9, 2**-8, 2**-7, 448]


def test_float16_overflows_to_infinity():
    q = Nvfp4Array.from_parts(np.full((1, 8), 0xF7, np.uint8), np.uint8([[0x7E]]), 1e3)
    assert dequantize(q, np.float16)[0, :2].tolist() == [np.inf, -np.inf]


def test_decode_leaves_out_the_global_scale(rng):
    q = quantize(normal(rng, 5, 48))
    out = np.full((5, 96), np.nan, np.float32)[:, ::2]
    assert nvfp4.decode(q.values, q.scales, out=out) is out
    np.testing.assert_array_equal(out * q.global_scale, dequantize(q))
    with pytest.raises(ValueError, match=r"shape \(5, 47\); it must be float32, \(5, 48\)"):
        nvfp4.decode(q.values, q.scales, out=out[:, :47])


def test_negative_scales_fold_into_the_values(rng):
    values = rng.integers(0, 256, (256, 8), dtype=np.uint8)
    q = Nvfp4Array.from_parts(values, np.arange(256).astype(np.uint8)[:, np.newaxis], 0.5)
    folded = nvfp4.fold_scale_signs(q)
    assert not np.signbit(folded.scales.astype(np.float32)).any()
    assert not (folded.scales.view(np.uint8) & 0x80).any()
    np.testing.assert_array_equal(dequantize(folded), dequantize(q))
    assert nvfp4.fold_scale_signs(folded) is folded


# --- conventions ---


def test_multiplier_and_divisor_conventions_agree(rng):
    x = normal(rng, 16, 64)
    x *= np.float32(100) / np.abs(x).max()
    q = quantize(x)
    model_opt = Nvfp4Array.from_parts(q.values, q.scales, np.float32(100 / 2688))
    divisor = nvfp4.global_scale_from_divisor(np.float32(2688 / 100))
    other = Nvfp4Array.from_parts(q.values, q.scales, divisor)
    assert float(model_opt.global_scale) == pytest.approx(0.0372024, rel=1e-5)
    assert np.abs(dequantize(model_opt)).max() > 99
    np.testing.assert_allclose(dequantize(other), dequantize(model_opt), rtol=1e-6)


def test_divisors_of_a_stack():
    got = nvfp4.global_scale_from_divisor([1.0, 2.0, 4.0])
    assert got.dtype == np.float32 and got.tolist() == [1, 0.5, 0.25]


# --- the operand ---


def test_groups_rows_and_stacks(rng):
    x = normal(rng, 4, 6, 40)
    q = quantize(x, scope="group")
    assert len(q) == 4 and q.ndim == 3
    groups = list(q)
    assert [g.shape for g in groups] == [(6, 40)] * 4
    assert same_bits(nvfp4.stack(groups), q)
    assert same_bits(q[-1], groups[3]) and same_bits(q[np.int64(2)], groups[2])
    assert same_bits(q[1:3], nvfp4.stack(groups[1:3]))
    assert same_bits(q[[3, 0]], nvfp4.stack([groups[3], groups[0]]))
    assert same_bits(q[np.array([True, False, False, True])], q[[0, 3]])
    a = groups[0]
    np.testing.assert_array_equal(dequantize(a[2:5]), dequantize(a)[2:5])
    np.testing.assert_array_equal(dequantize(a[::-2]), dequantize(a)[::-2])
    np.testing.assert_array_equal(dequantize(a[[5, 5, 1]]), dequantize(a)[[5, 5, 1]])
    assert a[3:3].shape == (0, 40) and a[[]].shape == (0, 40)
    assert a[::-2].values.flags.c_contiguous


def test_groups_of_a_stack_with_one_global_scale_share_it(rng):
    q = quantize(normal(rng, 3, 2, 16))
    assert all(g.global_scale == q.global_scale for g in q)


@pytest.mark.parametrize("bad", [1.0, "a", True, (0, 1), None, [[0]], [0.5]])
def test_bad_indices(bad):
    with pytest.raises(TypeError, match="index"):
        quantize(np.ones((2, 3, 16)))[bad]


def test_a_row_keeps_its_axis():
    q = quantize(np.ones((3, 16)))
    with pytest.raises(TypeError, match="use q\\[i : i \\+ 1\\]"):
        q[1]
    with pytest.raises(TypeError, match="one group"):
        iter(q)
    with pytest.raises(IndexError):
        quantize(np.ones((2, 3, 16)))[2]


def test_an_operand_is_read_only_and_does_not_pass_for_an_array():
    q = quantize(np.ones((3, 16)))
    with pytest.raises(ValueError, match="read-only"):
        q.values[0, 0] = 1
    with pytest.raises(AttributeError):
        q.k = 8
    with pytest.raises(TypeError, match="dequantize"):
        np.asarray(q)
    with pytest.raises(TypeError, match="quantized already"):
        quantize(q)


def test_repr_tells_shape_scale_and_size(rng):
    q = quantize(np.ones((2, 3, 40), np.float32), global_scale=[0.5, 2.0])
    assert repr(q) == ("Nvfp4Array(shape=(2, 3, 40), global_scale=2 numbers in 0.5..2, 170 bytes)")
    assert q.nbytes == 2 * 3 * (24 + 3) + 8
    assert repr(quantize(np.ones((0, 2, 16)), scope="group")).count("0 numbers") == 1


@pytest.mark.parametrize("shape", [(3, 40), (2, 3, 16), (0, 16)])
@pytest.mark.parametrize("scope", ["tensor", "group"])
def test_save_and_load(tmp_path, shape, scope, rng):
    if len(shape) == 2 and scope == "group":
        scope = "tensor"
    q = quantize(normal(rng, *shape), scope=scope)
    path = tmp_path / "weights.any"
    nvfp4.save(path, q)
    assert [p.name for p in tmp_path.iterdir()] == ["weights.any"]
    for back in (nvfp4.load(path), nvfp4.load(str(path))):
        assert same_bits(back, q)
        assert back.scales.dtype == ml_dtypes.float8_e4m3fn
        assert np.shape(back.global_scale) == np.shape(q.global_scale)


def test_save_to_an_open_file_and_keep_nan_scales():
    q = quantize(np.full((1, 16), np.nan), nan="propagate")
    file = io.BytesIO()
    nvfp4.save(file, q)
    file.seek(0)
    assert same_bits(nvfp4.load(file), q)


def test_load_refuses_other_files(tmp_path):
    np.savez(tmp_path / "x.npz", values=np.zeros(3))
    np.save(tmp_path / "x.npy", np.zeros(3))
    (tmp_path / "x.txt").write_text("not an archive")
    (tmp_path / "x.zip").write_bytes(b"PK\x03\x04 cut short")
    for name in ("x.npz", "x.npy", "x.txt", "x.zip"):
        with pytest.raises(ValueError, match=f"{name} is no operand file"):
            nvfp4.load(tmp_path / name)
    with pytest.raises(TypeError, match="ndarray; call quantize"):
        nvfp4.save(tmp_path / "y", np.zeros((2, 16)))
    assert not (tmp_path / "y").exists()
