"""Grouped GEMM on whatever device the `device` fixture yields, against the float64 oracle."""

import gc

import ml_dtypes
import numpy as np
import pytest
from helpers import exact_operand, oracle

import fp4rt
from fp4rt import reference

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32]


def bits(array):
    return array.view(f"u{array.dtype.itemsize}")


def assert_same(actual, expected):
    """Bit equality, for the custom dtypes and NaN too."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    wrong = np.flatnonzero(bits(actual) != bits(expected))
    assert wrong.size == 0, f"{wrong.size} of {actual.size} differ, first at {wrong[:5]}"


def run_ragged(device, a, b, sizes, **kwargs):
    """One call with a NaN-filled output; the rest of the array around it must stay as it was."""
    dtype = np.dtype(kwargs.pop("out_dtype", np.float16))
    m, n = int(np.sum(sizes)), b.shape[-2]
    guarded = np.full((m + 2, n), np.nan, dtype)
    out = guarded[1:-1]
    result = fp4rt.grouped_gemm(device, a, b, sizes, out=out, **kwargs)
    assert result is out
    assert np.isnan(guarded[[0, -1]].astype(np.float32)).all(), "rows beside the output changed"
    return out


SIZES = [[3, 1], [0, 4], [4, 0], [2, 0, 2], [0, 0, 5], [1], [0], [0, 0], [5, 0, 130, 127, 128]]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_ragged_groups_are_exact(device, sizes, rng):
    a = exact_operand(rng, (sum(sizes), 96))
    b = exact_operand(rng, (len(sizes), 40, 96))
    alpha = 2.0 ** rng.integers(-2, 3, len(sizes))
    out = run_ragged(device, a, b, sizes, alpha=alpha)
    assert_same(out, oracle(a, b, sizes, alpha))
    if sum(sizes):
        assert np.any(out != 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_output_dtypes(device, dtype, rng):
    a, b = exact_operand(rng, (9, 64)), exact_operand(rng, (3, 21, 64))
    out = run_ragged(device, a, b, [4, 0, 5], alpha=0.75, out_dtype=dtype)
    assert_same(out, oracle(a, b, [4, 0, 5], 0.75, dtype))


# Every pair of (m, n), (n, k) and (m, k) once: a Latin square.
ODD = [
    (m, n, k)
    for i, m in enumerate((1, 3, 127, 129))
    for n, k in zip((1, 7, 8, 105), np.roll((16, 48, 80, 272), i).tolist(), strict=True)
]


@pytest.mark.parametrize(("m", "n", "k"), ODD)
def test_odd_shapes_are_exact(device, m, n, k, rng):
    a, b = exact_operand(rng, (m, k)), exact_operand(rng, (1, n, k))
    assert_same(run_ragged(device, a, b, [m]), oracle(a, b, [m]))


def test_lists_have_their_own_shapes(device, rng):
    shapes = [(96, 128, 256), (1, 1, 16), (0, 5, 32), (33, 70, 48), (2, 0, 64)]
    a = [exact_operand(rng, (m, k)) for m, n, k in shapes]
    b = [exact_operand(rng, (n, k)) for m, n, k in shapes]
    alpha = [1, 2, 3, 0.5, 1]
    results = fp4rt.grouped_gemm(device, a, b, alpha=alpha, out_dtype=np.float32)
    assert [r.shape for r in results] == [(m, n) for m, n, k in shapes]
    expected = reference.grouped_gemm(a, b, alpha=alpha)
    for result, exact in zip(results, expected, strict=True):
        assert_same(result, reference.round_to(exact, np.float32))


def test_one_matrix_each(device, rng):
    a, b = exact_operand(rng, (5, 32)), exact_operand(rng, (6, 32))
    assert_same(fp4rt.grouped_gemm(device, a, b), oracle(a, fp4rt.stack([b]), [5]))


def test_no_groups_at_all(device):
    a = fp4rt.quantize(np.zeros((0, 32), np.float32))
    b = fp4rt.quantize(np.zeros((0, 8, 32), np.float32))
    assert fp4rt.grouped_gemm(device, a, b, []).shape == (0, 8)
    assert fp4rt.grouped_gemm(device, [], []) == []


def constant_operand(shape, *, scale=0x38, code=0x11):
    values = np.full((*shape[:-1], shape[-1] // 2), code, np.uint8)
    scales = np.full((*shape[:-1], shape[-1] // 16), scale, np.uint8)
    return values, scales


@pytest.mark.parametrize(("scale", "expected"), [(0x38, 64.0), (0x78, 1084.0), (0x7F, np.nan)])
def test_one_scale_reaches_one_row(device, scale, expected):
    a_values, a_scales = constant_operand((256, 256))
    a_scales[0, 0] = scale
    b_values, b_scales = constant_operand((2, 128, 256))
    a = fp4rt.Nvfp4Array.from_parts(a_values, a_scales, 1.0)
    b = fp4rt.Nvfp4Array.from_parts(b_values, b_scales, 1.0)
    out = run_ragged(device, a, b, [128, 128], out_dtype=np.float32)
    np.testing.assert_array_equal(out[0], np.float32(expected))
    np.testing.assert_array_equal(out[1:], np.float32(64.0))


@pytest.mark.parametrize("group", [0, 1])
def test_nan_in_a_weight_scale_reaches_one_column_of_one_group(device, group):
    a_values, a_scales = constant_operand((10, 64))
    b_values, b_scales = constant_operand((2, 12, 64))
    b_scales[group, 3, 2] = 0x7F
    a = fp4rt.Nvfp4Array.from_parts(a_values, a_scales, 1.0)
    b = fp4rt.Nvfp4Array.from_parts(b_values, b_scales, 1.0)
    out = run_ragged(device, a, b, [4, 6], out_dtype=np.float32)
    poisoned = np.zeros((10, 12), bool)
    poisoned[(slice(0, 4), slice(4, 10))[group], 3] = True
    np.testing.assert_array_equal(np.isnan(out), poisoned)
    np.testing.assert_array_equal(out[~poisoned], np.float32(16.0))


def test_block_scales_change_within_one_row(device):
    a_values, a_scales = constant_operand((4, 512), code=0x22)
    a_scales[:, 1::2] = 0x40  # 1 and 2 in turn
    b_values, b_scales = constant_operand((1, 4, 512), code=0x22)
    a = fp4rt.Nvfp4Array.from_parts(a_values, a_scales, 1.0)
    b = fp4rt.Nvfp4Array.from_parts(b_values, b_scales, 1.0)
    np.testing.assert_array_equal(run_ragged(device, a, b, [4]), np.float16(768))


@pytest.mark.parametrize("negative", ["a", "b", "both"])
def test_negative_scales_count(device, negative, rng):
    a, b = exact_operand(rng, (5, 64)), exact_operand(rng, (2, 8, 64))

    def flipped(operand):  # the sign of every other scale block
        scales = operand.scales.view(np.uint8).copy()
        scales[..., ::2] |= 0x80
        return fp4rt.Nvfp4Array.from_parts(operand.values, scales, 1.0)

    a = a if negative == "b" else flipped(a)
    b = b if negative == "a" else flipped(b)
    assert_same(run_ragged(device, a, b, [2, 3]), oracle(a, b, [2, 3]))


def test_fp16_overflow_gives_infinity(device):
    a_values, a_scales = constant_operand((2, 64), code=0x77, scale=0x7E)
    a_values[1] = 0xFF
    b_values, b_scales = constant_operand((1, 3, 64), code=0x77, scale=0x7E)
    a = fp4rt.Nvfp4Array.from_parts(a_values, a_scales, 1.0)
    b = fp4rt.Nvfp4Array.from_parts(b_values, b_scales, 1.0)
    out = run_ragged(device, a, b, [2])
    np.testing.assert_array_equal(out, np.float16([[np.inf] * 3, [-np.inf] * 3]))


def test_a_rows_bits_do_not_depend_on_the_batch(device, rng):
    x = rng.standard_normal((150, 160)).astype(np.float32)
    a = fp4rt.quantize(x)
    b = fp4rt.quantize(rng.standard_normal((2, 24, 160)).astype(np.float32))
    whole = run_ragged(device, a, b, [0, 150], out_dtype=np.float32)
    for start, stop in [(0, 1), (149, 150), (7, 14), (64, 150)]:
        part = run_ragged(device, a[start:stop], b, [0, stop - start], out_dtype=np.float32)
        assert_same(part, whole[start:stop])
    mixed = run_ragged(device, a, b, [60, 90], out_dtype=np.float32)
    assert_same(mixed[60:], whole[60:])


def test_global_scales_multiply(device, rng):
    a, b = exact_operand(rng, (6, 64)), exact_operand(rng, (4, 9, 64))
    factors = np.float32([1, 0.5, 0.25, 0.125])
    scaled = fp4rt.Nvfp4Array.from_parts(b.values, b.scales, factors)
    together = run_ragged(device, a, scaled, [2, 1, 0, 3], out_dtype=np.float32)
    alone = run_ragged(device, a, b, [2, 1, 0, 3], alpha=factors, out_dtype=np.float32)
    assert_same(together, alone)


def test_capacity_and_replaced_inputs(device, rng):
    b = exact_operand(rng, (3, 16, 48))
    with fp4rt.GroupedGemmPlan(device, b, max_m=20) as plan:
        for sizes in ([7, 7, 6], [0, 1, 0], [20, 0, 0], [0, 0, 0]):
            a = exact_operand(rng, (sum(sizes), 48))
            plan.set_inputs(a, sizes)
            plan.launch()
            assert_same(plan.output(), oracle(a, b, sizes))
        with pytest.raises(ValueError, match="21 rows exceed the plan's max_m = 20"):
            plan.set_inputs(exact_operand(rng, (21, 48)), [7, 7, 7])
        plan.launch()
        assert plan.output().shape == (0, 16)
    with pytest.raises(fp4rt.ClosedError):
        plan.launch()


def test_an_output_in_fortran_order(device, rng):
    a, b = exact_operand(rng, (9, 32)), exact_operand(rng, (1, 5, 32))
    out = np.full((9, 5), np.nan, np.float16, order="F")
    fp4rt.grouped_gemm(device, a, b, [9], out=out)
    assert_same(np.ascontiguousarray(out), oracle(a, b, [9]))


def test_a_graph_replays_with_new_rows_and_sizes(device, rng):
    b = exact_operand(rng, (4, 24, 64))
    with fp4rt.GroupedGemmPlan(device, b, max_m=24, out_dtype=np.float32) as plan:
        graph = plan.capture()
        for sizes in ([6, 6, 6, 6], [1, 0, 23, 0], [0, 0, 0, 24], [0, 0, 0, 0], [2, 3, 0, 1]):
            a = exact_operand(rng, (sum(sizes), 64))
            plan.set_inputs(a, sizes)
            graph.launch()
            assert_same(plan.output(), oracle(a, b, sizes, out_dtype=np.float32))


def test_a_graph_outlives_the_callers_arrays(device, rng):
    b = exact_operand(rng, (2, 16, 32))
    x = rng.integers(-2, 3, (5, 32)).astype(np.float16)
    a = fp4rt.quantize(x, global_scale=0.5)
    expected = oracle(a, b, [2, 3])
    plan = fp4rt.GroupedGemmPlan(device, b, max_m=5)
    plan.set_inputs(a, [2, 3])
    graph = plan.capture()
    del a, b, x
    gc.collect()
    graph.launch()
    assert_same(plan.output(), expected)
    plan.close()


def test_plans_of_one_shape_do_not_mix(device, rng):
    operands = [exact_operand(rng, (2, 8, 32)) for _ in range(3)]
    a = exact_operand(rng, (4, 32))
    plans = [fp4rt.GroupedGemmPlan(device, b, max_m=4) for b in operands]
    graphs = [plan.capture() for plan in plans]
    for plan in plans:
        plan.set_inputs(a, [1, 3])
    for _ in range(2):
        for graph in graphs:
            graph.launch()
    for plan, b in zip(plans, operands, strict=True):
        assert_same(plan.output(), oracle(a, b, [1, 3]))
        plan.close()


def test_a_result_is_the_callers_own(device, rng):
    a, b = exact_operand(rng, (4, 32)), exact_operand(rng, (2, 8, 32))
    expected = oracle(a, b, [1, 3])
    with fp4rt.GroupedGemmPlan(device, b, max_m=4) as plan:
        plan.set_inputs(a, [1, 3])
        plan.launch()
        plan.output()[:] = 0
        assert_same(plan.output(), expected)


def test_a_scale_beyond_float32_is_refused(device, rng, recwarn):
    """As a float32 it would be infinite, and a sum of 0 would become NaN."""
    a, b = exact_operand(rng, (4, 32)), exact_operand(rng, (2, 8, 32))
    large = fp4rt.Nvfp4Array.from_parts(b.values, b.scales, np.float32([1e30, 1]))
    with pytest.raises(ValueError, match=r"is 1e\+40 in group 0; it must be finite in float32"):
        fp4rt.grouped_gemm(device, a, large, [2, 2], alpha=1e10)
    used = fp4rt.grouped_gemm(device, a, large, [0, 4], alpha=[1e10, 1])  # group 0 is empty
    assert_same(used, oracle(a, b, [0, 4]))
    assert not recwarn.list


def test_the_callers_numpy_error_state_does_not_matter(device, rng):
    x = 1e-20 * rng.uniform(1, 2, (5, 40)).astype(np.float32)  # no sum cancels
    x[0] = 0
    w = 1e20 * rng.uniform(1, 2, (2, 9, 40)).astype(np.float32)
    with np.errstate(all="raise"):
        a, b = fp4rt.quantize(x), fp4rt.quantize(w)
        fp4rt.dequantize(a, np.float16)
        infinite = fp4rt.grouped_gemm(device, a, b, [2, 3], alpha=1e30)
        zero = fp4rt.grouped_gemm(device, a, b, [2, 3], alpha=1e-60)
    np.testing.assert_array_equal(np.isinf(infinite), np.arange(5)[:, None].repeat(9, 1) > 0)
    assert not zero.any()


def test_a_result_that_nothing_computed(device, rng):
    """A captured graph that was not launched since `set_inputs`."""
    a, b = exact_operand(rng, (4, 32)), exact_operand(rng, (2, 8, 32))
    with fp4rt.GroupedGemmPlan(device, b, max_m=4) as plan:
        graph = plan.capture()
        for sizes in ([1, 3], [4, 0]):
            plan.set_inputs(a, sizes)
            with pytest.raises(ValueError, match="nothing was computed from these inputs yet"):
                plan.output()
            graph.launch()
            assert_same(plan.output(), oracle(a, b, sizes))
