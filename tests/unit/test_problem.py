"""Bad calls of grouped_gemm: refused with the value, the rule and a fix, before any write."""

import time

import ml_dtypes
import numpy as np
import pytest
from helpers import exact_operand

import fp4rt
from fp4rt import arguments


@pytest.fixture
def a(rng):
    return exact_operand(rng, (6, 32))


@pytest.fixture
def b(rng):
    return exact_operand(rng, (3, 8, 32))


def refuse(error, match, *args, **kwargs):
    """The call raises, and an output passed with it keeps its NaN filling."""
    with pytest.raises(error, match=match):
        fp4rt.grouped_gemm("cpu", *args, **kwargs)
    out = kwargs.get("out")
    if isinstance(out, np.ndarray) and out.dtype.kind == "f":
        assert np.isnan(out).all()


@pytest.mark.parametrize(
    ("sizes", "error", "match"),
    [
        ([7, -1, 0], ValueError, r"group_sizes\[1\] = -1 is negative"),
        ([2, 2], ValueError, "2 entries for 3 groups"),
        ([2, 2, 1, 1], ValueError, "4 entries for 3 groups"),
        ([2, 2, 3], ValueError, "add up to 7, but a has 6 rows"),
        ([2, 2, 1], ValueError, "add up to 5, but a has 6 rows"),
        ([2.0, 2.0, 2.0], TypeError, "must be integers, got float64"),
        ([True, True, True], TypeError, "must be integers, got bool"),
        ([[2, 2, 2]], ValueError, "must have shape"),
        ([2**62, 2**62, 2**63 - 1], ValueError, "add up to"),
        (np.array([5, 2**63, 0], np.uint64), ValueError, rf"\[1\] = {2**63}, but a has 6 rows"),
        ([5, 0, 2**63], ValueError, rf"\[2\] = {2**63}, but a has 6 rows; sizes must add up"),
        ([2**64, 0, 5], ValueError, rf"\[0\] = {2**64}, but a has 6 rows"),
        (6, ValueError, "must have shape"),
        ([2, [2], 2], ValueError, "must be 3 integers"),
        (None, ValueError, "give group_sizes"),
    ],
    ids=str,
)
def test_group_sizes(a, b, sizes, error, match):
    refuse(error, match, a, b, sizes, out=np.full((6, 8), np.nan, np.float16))


def test_different_k(a, rng):
    refuse(
        ValueError, "a has K = 32, b of group 0 has K = 48", a, exact_operand(rng, (1, 8, 48)), [6]
    )


def test_packed_k_is_not_logical_k(a, rng):
    match = "K counts elements, not packed bytes"
    refuse(ValueError, match, a, exact_operand(rng, (1, 8, 64)), [6])


def test_weights_the_other_way_round(a, rng):
    match = "for a @ b, quantize b's transpose"
    refuse(ValueError, match, a, exact_operand(rng, (1, 32, 80)), [6])


@pytest.mark.parametrize(
    ("sizes", "error", "match"),
    [
        ([4, 1, True], TypeError, r"integers, got bool: \[2\] is True; use 1"),
        ((4, np.False_, 2), TypeError, r"integers, got bool: \[1\] is False; use 0"),
        ([True, False, True], TypeError, r"integers, got bool: \[0\] is True"),
        ([-(2**70), 1, 5], ValueError, rf"group_sizes\[0\] = -{2**70} is negative; an empty"),
        ({1, 2, 3}, TypeError, "group_sizes is a set, which has no order of groups; give a list"),
        ({1: 2, 3: 4, 5: 6}, TypeError, "group_sizes is a dict, which"),
        (np.ma.array([2, 2, 2]), TypeError, "group_sizes is a masked array"),
    ],
)
def test_odd_group_sizes(a, b, sizes, error, match):
    refuse(error, match, a, b, sizes)


@pytest.mark.parametrize(
    ("alpha", "error", "match"),
    [
        (10**400, ValueError, "alpha must be finite, got inf"),
        ([1, -(10**400), 1], ValueError, "alpha must be finite, got -inf"),
        (True, TypeError, "alpha is True .bool.; it must be real numbers: a number, or 3 numbers"),
        (np.ma.array([1.0, 1, 1]), TypeError, "alpha is a masked array"),
        ([1, 2], ValueError, r"got \(2,\); give one number, or one per group"),
    ],
)
def test_odd_alpha(a, b, alpha, error, match):
    refuse(error, match, a, b, [2, 2, 2], alpha=alpha)


@pytest.mark.parametrize("sizes", [[1.0, 2.0, 3.0], "123", np.array([1, 2, 3], object)])
def test_the_advice_on_group_sizes_works(a, b, sizes):
    with pytest.raises(TypeError, match=r"use np.array\(list\(group_sizes\), np.int64\)"):
        fp4rt.grouped_gemm("cpu", a, b, sizes)
    assert fp4rt.grouped_gemm("cpu", a, b, np.array(list(sizes), np.int64)).shape == (6, 8)


INTEGERS = ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", ">i4", ">u8"]


@pytest.mark.parametrize("kind", INTEGERS)
def test_group_sizes_of_every_integer_type(a, b, kind):
    expected = fp4rt.grouped_gemm("cpu", a, b, [1, 2, 3])
    spread = np.array([3, 0, 2, 0, 1], kind)[::-2]
    np.testing.assert_array_equal(fp4rt.grouped_gemm("cpu", a, b, spread), expected)


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int8, np.complex64, object])
def test_activations_of_other_types(b, kind):
    refuse(TypeError, "quantize", np.zeros((6, 32), kind), b, [2, 2, 2])


def test_activations_in_another_byte_order(b):
    x = np.ones((6, 32), ">f2")
    refuse(TypeError, "'>f2', not in this machine's byte order", x, b, [2, 2, 2])
    native = x.astype(x.dtype.newbyteorder("="))
    assert fp4rt.grouped_gemm("cpu", native, b, [2, 2, 2]).shape == (6, 8)


def test_masked_arrays(a, b):
    rows = np.ma.array(np.ones((6, 32), np.float16))
    refuse(TypeError, "a is a masked array.*pass a.data", rows, b, [2, 2, 2])
    fp4rt.grouped_gemm("cpu", rows.data, b, [2, 2, 2])
    out = np.ma.array(np.full((6, 8), np.nan, np.float16))
    refuse(TypeError, "out is a masked array.*pass out.data", a, b, [2, 2, 2], out=out)
    fp4rt.grouped_gemm("cpu", a, b, [2, 2, 2], out=out.data)


def test_plain_weights(a):
    refuse(TypeError, "quantize it first", a, np.zeros((3, 8, 32), np.float32), [2, 2, 2])


def test_weights_of_another_type(a):
    refuse(TypeError, "must be an Nvfp4Array or a list", a, 3, [2, 2, 2])
    refuse(TypeError, r"b\[1\] must be an Nvfp4Array", [a, a], [a, None])


def test_a_stack_as_activations(b):
    refuse(ValueError, r"must have shape \(M, K\)", b, b, [2, 2, 2])


def test_lists_of_different_lengths(a, b):
    refuse(ValueError, "a has 2 operands, b has 3 groups", [a, a], b)


def test_a_list_with_group_sizes(a, b):
    refuse(ValueError, "a list has its own sizes", [a, a, a], b, [6, 6, 6])


def test_one_array_for_groups_of_different_width(a, rng):
    b = [exact_operand(rng, (8, 32)), exact_operand(rng, (9, 32))]
    refuse(ValueError, "pass a as a list", a, b, [3, 3])


def test_mixed_activations(a):
    refuse(TypeError, "all of a must be of one kind", [a, np.zeros((2, 32), np.float16)], [a, a])


@pytest.mark.parametrize(
    ("alpha", "error", "match"),
    [
        (np.nan, ValueError, "must be finite, got nan"),
        ([1, np.inf, 1], ValueError, "must be finite, got inf"),
        ([1, 2], ValueError, r"shape \(3,\), got \(2,\)"),
        ("2", TypeError, "real numbers"),
        (1j, TypeError, "real numbers"),
        ([1, [2], 3], ValueError, "a number, or 3 numbers"),
        (1e300, ValueError, "is 1e\\+300 in group 0; it must be finite in float32"),
        ([1, 1, -1e39], ValueError, "in group 2"),
    ],
    ids=str,
)
def test_alpha(a, b, alpha, error, match):
    refuse(error, match, a, b, [2, 2, 2], alpha=alpha)


@pytest.mark.parametrize("dtype", [np.float64, np.int32, ml_dtypes.float8_e4m3fn, "foo", 3, ">f2"])
def test_out_dtype(a, b, dtype):
    refuse(TypeError, "must be float16, bfloat16 or float32", a, b, [2, 2, 2], out_dtype=dtype)


def test_out_of_the_wrong_shape(a, b):
    out = np.full((6, 9), np.nan, np.float16)
    refuse(ValueError, r"must have shape \(6, 8\), got \(6, 9\)", a, b, [2, 2, 2], out=out)


def test_out_of_the_wrong_dtype(a, b):
    out = np.full((6, 8), np.nan, np.float32)
    refuse(TypeError, "out must be float16", a, b, [2, 2, 2], out=out, out_dtype=np.float16)


@pytest.mark.parametrize("kind", [np.float64, np.int16, ">f4"])
def test_out_of_a_dtype_that_no_result_has(a, b, kind):
    out = np.ones((6, 8), kind)
    with pytest.raises(TypeError, match="out must be float16, bfloat16 or float32, got"):
        fp4rt.grouped_gemm("cpu", a, b, [2, 2, 2], out=out)
    assert (out == 1).all()


def test_read_only_out(a, b):
    out = np.full((6, 8), np.nan, np.float16)
    out.flags.writeable = False
    refuse(ValueError, "read-only", a, b, [2, 2, 2], out=out)


@pytest.mark.parametrize("strides", [(0, 2), (2, 0), (2, 2), (14, 2), (2, 10), (-2, 2), (1, 16)])
def test_out_that_overlaps_itself(a, b, strides):
    memory = np.full(60, np.nan, np.float16)
    out = np.lib.stride_tricks.as_strided(memory[10:], (6, 8), strides)
    with pytest.raises(ValueError, match="overlaps itself"):
        fp4rt.grouped_gemm("cpu", a, b, [2, 2, 2], out=out)
    assert np.isnan(memory).all()


def test_outputs_with_any_strides_of_their_own(a, b):
    expected = fp4rt.grouped_gemm("cpu", a, b, [2, 2, 2])
    memory = np.full((14, 20), np.nan, np.float16)
    fields = np.zeros((6, 8), [("other", "u1"), ("out", "f2")])  # unaligned
    outs = [memory[:6, :8], memory[::-2, ::-2][:6, :8], memory.T[2:8, 2:10], fields["out"]]
    for out in outs:
        assert fp4rt.grouped_gemm("cpu", a, b, [2, 2, 2], out=out) is out
        np.testing.assert_array_equal(out, expected)
    assert not fields["other"].any()


def test_outputs_side_by_side_in_one_matrix(a):
    """Columns of one array lie between each other's rows, and do not overlap."""
    memory = np.full((6, 21), np.nan, np.float16)
    outs = [memory[:, :6], memory[:, 6:12], memory[:, 12:18]]
    fp4rt.grouped_gemm("cpu", [a] * 3, [a] * 3, out=outs)
    expected = fp4rt.grouped_gemm("cpu", a, a)
    np.testing.assert_array_equal(memory[:, :18], np.tile(expected, 3))
    assert np.isnan(memory[:, 18:]).all()
    outs[1] = memory[:, 5:11]
    refuse(ValueError, r"out\[1\] overlaps out\[0\]", [a] * 3, [a] * 3, out=outs)


def test_an_output_beside_the_rows_in_one_matrix(a, b):
    memory = np.full((6, 40), np.nan, np.float16)
    memory[:, :32] = fp4rt.dequantize(a)
    fp4rt.grouped_gemm("cpu", memory[:, :32], b, [2, 2, 2], out=memory[:, 32:])
    np.testing.assert_array_equal(memory[:, :32], fp4rt.dequantize(a))
    np.testing.assert_array_equal(memory[:, 32:], fp4rt.grouped_gemm("cpu", a, b, [2, 2, 2]))


def test_checking_many_outputs_takes_no_time():
    """4096 groups with an output each: pair by pair this took minutes."""
    rows = [np.zeros((1, 16), np.float16) for _ in range(4096)]
    outs = list(np.zeros((4096, 1, 4), np.float16))
    start = time.process_time()
    arguments.check_disjoint(outs, rows)
    arguments.check_disjoint(outs, rows[:1] * 4096)
    assert time.process_time() - start < 2


def test_out_that_overlaps_an_operand(b, rng):
    memory = np.zeros(6 * 8 * 2, np.uint8)
    values = memory.reshape(6, 16)
    a = fp4rt.Nvfp4Array.from_parts(values, np.full((6, 2), 0x38, np.uint8), 1.0)
    out = memory.view(np.float16).reshape(6, 8)
    if np.may_share_memory(a.values, out):  # from_parts may copy, which is as good
        with pytest.raises(ValueError, match="overlaps an operand"):
            fp4rt.grouped_gemm("cpu", a, b, [2, 2, 2], out=out)
    rows = np.zeros((6, 32), np.float16)
    with pytest.raises(ValueError, match="overlaps an operand"):
        fp4rt.grouped_gemm("cpu", rows, b, [2, 2, 2], out=rows[:, :8])


def test_overlapping_list_outputs(a):
    out = np.full((6, 6), np.nan, np.float16)
    refuse(ValueError, r"out\[1\] overlaps out\[0\]", [a, a], [a, a], out=[out, out])


def test_out_list_of_the_wrong_length(a):
    refuse(ValueError, "list of 2 arrays", [a, a], [a, a], out=[np.zeros((6, 6), np.float16)])


@pytest.mark.parametrize("max_m", [-1, 1.5, None, True])
def test_capacity(b, max_m):
    with pytest.raises(ValueError, match="max_m must be an integer"):
        fp4rt.GroupedGemmPlan("cpu", b, max_m=max_m)


@pytest.mark.parametrize("given", [None, 0, fp4rt.Device, b"cpu"])
def test_something_that_is_no_device(a, b, given):
    with pytest.raises(
        TypeError, match="device must be a Device or the name of one, such as 'auto'"
    ):
        fp4rt.grouped_gemm(given, a, b, [2, 2, 2])


@pytest.mark.parametrize("flag", ["no", 1, None, np.ones(2, bool)])
def test_a_flag_that_is_no_bool(a, b, flag):
    refuse(TypeError, "must be True or False", a, b, [2, 2, 2], batch_invariant=flag)


def test_a_closed_device(a, b):
    dev = fp4rt.device("cpu")
    plan = fp4rt.GroupedGemmPlan(dev, b, max_m=6)
    plan.set_inputs(a, [2, 2, 2])
    graph = plan.capture()
    plan.launch()
    dev.close()
    for call in (
        plan.launch,
        plan.output,
        plan.capture,
        graph.launch,
        lambda: plan.set_inputs(a, [2, 2, 2]),
        lambda: fp4rt.GroupedGemmPlan(dev, b, max_m=6),
        lambda: dev.empty_pinned(3, np.uint8),
    ):
        with pytest.raises(fp4rt.ClosedError, match="closed"):
            call()
    plan.close()


def test_plan_before_inputs(a, b):
    with fp4rt.GroupedGemmPlan("cpu", b, max_m=6) as plan:
        with pytest.raises(ValueError, match="call set_inputs first"):
            plan.launch()
        with pytest.raises(ValueError, match="call set_inputs first"):
            plan.output()
        plan.set_inputs(a, [2, 2, 2])
        with pytest.raises(ValueError, match="call launch, or launch the graph"):
            plan.output()


def test_a_refused_input_leaves_the_plan_as_it_was(a, b):
    with fp4rt.GroupedGemmPlan("cpu", b, max_m=6) as plan:
        plan.set_inputs(a, [2, 2, 2])
        plan.launch()
        before = plan.output().copy()
        with pytest.raises(ValueError, match="add up to"):
            plan.set_inputs(a, [2, 2, 3])
        plan.launch()
        np.testing.assert_array_equal(plan.output(), before)


@pytest.mark.parametrize("name", ["gpu", "cpu:0", "cuda:x", "", "emulator:sm_10"])
def test_unknown_devices(a, b, name):
    with pytest.raises((ValueError, fp4rt.NoKernelError)):
        fp4rt.grouped_gemm(name, a, b, [2, 2, 2])


def test_sixteen_bit_rows(b, rng):
    x = rng.integers(-4, 5, (6, 32)).astype(np.float32)
    expected = fp4rt.grouped_gemm("cpu", fp4rt.quantize(x, global_scale=1.0), b, [2, 2, 2])
    for kind in (np.float16, ml_dtypes.bfloat16):
        got = fp4rt.grouped_gemm("cpu", x.astype(kind), b, [2, 2, 2])
        assert got.dtype == np.float16
        assert (got != 0).any()
        exact = x @ fp4rt.dequantize(b).reshape(24, 32).T
        np.testing.assert_array_equal(got[:2], exact[:2, :8].astype(np.float16))
    assert expected.shape == (6, 8)


def test_an_output_without_elements(a):
    """Its strides mean nothing: numpy gives (0, 2) for shape (6, 0)."""
    b = fp4rt.Nvfp4Array.from_parts(np.zeros((0, 16), np.uint8), np.zeros((0, 2), np.uint8), 1.0)
    out = np.empty((6, 0), np.float16)
    assert fp4rt.grouped_gemm("cpu", a, b, out=out) is out
