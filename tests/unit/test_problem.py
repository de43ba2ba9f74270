"""Bad calls of grouped_gemm: refused with the value, the rule and a fix, before any write."""

import ml_dtypes
import numpy as np
import pytest
from helpers import exact_operand

import fp4rt


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
        (np.array([2**63 + 1, 0, 5], np.uint64), ValueError, "beyond 64 signed bits"),
        (6, ValueError, "must have shape"),
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


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int8, np.complex64, object])
def test_activations_of_other_types(b, kind):
    refuse(TypeError, "quantize", np.zeros((6, 32), kind), b, [2, 2, 2])


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
    ],
    ids=str,
)
def test_alpha(a, b, alpha, error, match):
    refuse(error, match, a, b, [2, 2, 2], alpha=alpha)


@pytest.mark.parametrize("dtype", [np.float64, np.int32, ml_dtypes.float8_e4m3fn])
def test_out_dtype(a, b, dtype):
    refuse(TypeError, "must be float16, bfloat16 or float32", a, b, [2, 2, 2], out_dtype=dtype)


def test_out_of_the_wrong_shape(a, b):
    out = np.full((6, 9), np.nan, np.float16)
    refuse(ValueError, r"must have shape \(6, 8\), got \(6, 9\)", a, b, [2, 2, 2], out=out)


def test_out_of_the_wrong_dtype(a, b):
    out = np.full((6, 8), np.nan, np.float32)
    refuse(TypeError, "out must be float16", a, b, [2, 2, 2], out=out, out_dtype=np.float16)


def test_read_only_out(a, b):
    out = np.full((6, 8), np.nan, np.float16)
    out.flags.writeable = False
    refuse(ValueError, "read-only", a, b, [2, 2, 2], out=out)


def test_out_that_overlaps_itself(a, b):
    out = np.lib.stride_tricks.as_strided(np.full(8, np.nan, np.float16), (6, 8), (0, 2))
    refuse(ValueError, "overlaps itself", a, b, [2, 2, 2], out=out)


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


def test_plan_before_inputs(a, b):
    with fp4rt.GroupedGemmPlan("cpu", b, max_m=6) as plan:
        with pytest.raises(ValueError, match="call set_inputs first"):
            plan.launch()
        with pytest.raises(ValueError, match="call set_inputs first"):
            plan.output()
        plan.set_inputs(a, [2, 2, 2])
        with pytest.raises(ValueError, match="call launch first"):
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
