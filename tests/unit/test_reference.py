"""The oracle against sums written out, one number at a time."""

import ml_dtypes
import numpy as np
import pytest

from fp4rt import reference
from fp4rt.nvfp4 import Nvfp4Array, dequantize, quantize, stack


def bytes_operand(rows, k, code_byte=0x11, scale_byte=0x38):
    values = np.full((rows, k // 2), code_byte, np.uint8)
    return Nvfp4Array.from_parts(values, np.full((rows, k // 16), scale_byte, np.uint8), 1.0)


def with_scale(q, row, block, byte):
    scales = q.scales.view(np.uint8).copy()
    scales[row, block] = byte
    return Nvfp4Array.from_parts(q.values, scales, q.global_scale)


def loops(a, b, alpha):
    a, b = dequantize(a, np.float64).tolist(), dequantize(b, np.float64).tolist()
    return [[alpha * sum(x * y for x, y in zip(u, v, strict=True)) for v in b] for u in a]


def test_list_form_against_loops(rng):
    a = [quantize(rng.standard_normal((m, k))) for m, k in ((3, 40), (1, 16), (2, 17))]
    b = [quantize(rng.standard_normal((n, k))) for n, k in ((2, 40), (4, 16), (1, 17))]
    alpha = [1.0, -0.5, 2.0]
    got = reference.grouped_gemm(a, b, alpha=alpha)
    assert [d.shape for d in got] == [(3, 2), (1, 4), (2, 1)]
    for d, a_g, b_g, alpha_g in zip(got, a, b, alpha, strict=True):
        assert d.dtype == np.float64 and np.abs(d).max() > 0
        np.testing.assert_allclose(d, loops(a_g, b_g, alpha_g), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sizes", [[2, 3, 1], [0, 6, 0], [6, 0, 0], [0, 0, 6], [1, 0, 5]], ids=str)
def test_ragged_form_is_the_list_form_of_its_groups(sizes, rng):
    x, w = quantize(rng.standard_normal((6, 48))), quantize(rng.standard_normal((3, 5, 48)))
    got = reference.grouped_gemm(x, w, sizes, [1, 2, 3])
    assert got.shape == (6, 5)
    start = 0
    for g, size in enumerate(sizes):
        rows = x[start : start + size]
        want = np.reshape(loops(rows, w[g], g + 1), (size, 5))
        np.testing.assert_allclose(got[start : start + size], want, rtol=1e-12, atol=1e-12)
        start += size


@pytest.mark.parametrize("sizes", [[], [0], [0, 0, 0]])
def test_nothing_to_do(sizes):
    x, w = quantize(np.zeros((0, 32))), quantize(np.zeros((len(sizes), 4, 32)))
    assert reference.grouped_gemm(x, w, sizes).shape == (0, 4)
    assert reference.grouped_gemm([], []) == []


def test_each_group_uses_its_own_global_scale_and_alpha():
    x = quantize(np.ones((4, 16)))
    w = stack([quantize(np.full((2, 16), v)) for v in (1.0, 0.5, 0.25, 0.125)])
    got = reference.grouped_gemm(x, w, [1, 1, 1, 1], alpha=[1, 2, 4, 8])
    np.testing.assert_allclose(got, np.full((4, 2), 16.0), rtol=1e-6)
    assert len(set(w.global_scale.tolist())) == 4


def test_alpha_may_be_one_number_or_left_out():
    x, w = bytes_operand(2, 16, 0x22), [bytes_operand(1, 16, 0x22)]
    assert reference.grouped_gemm([x], w)[0].tolist() == [[16], [16]]
    assert reference.grouped_gemm([x], w, alpha=0.5)[0].tolist() == [[8], [8]]


def test_two_groups_of_halves_are_64_and_a_nan_scale_spoils_one_row():
    a = [bytes_operand(128, 256), bytes_operand(128, 256)]
    b = [bytes_operand(128, 256), bytes_operand(128, 256)]
    for d in reference.grouped_gemm(a, b):
        np.testing.assert_array_equal(d, np.full((128, 128), 64.0))
    spoilt, other = reference.grouped_gemm([with_scale(a[0], 0, 0, 0x7F), a[1]], b)
    assert np.isnan(spoilt[0]).all()
    np.testing.assert_array_equal(spoilt[1:], np.full((127, 128), 64.0))
    np.testing.assert_array_equal(other, np.full((128, 128), 64.0))
    large, _ = reference.grouped_gemm([with_scale(a[0], 0, 0, 0x78), a[1]], b)
    np.testing.assert_array_equal(large[0], np.full(128, 1084.0))
    np.testing.assert_array_equal(large[1:], np.full((127, 128), 64.0))


def test_every_scale_block_uses_its_own_scale():
    a = with_scale(bytes_operand(1, 32, 0x22), 0, 1, 0x40)
    assert reference.grouped_gemm([a], [bytes_operand(1, 32, 0x22)])[0].tolist() == [[48]]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32], ids=str)
def test_plain_rows_are_taken_as_they_are(dtype, rng):
    x = rng.integers(-8, 8, (3, 20)).astype(dtype)
    w = quantize(rng.standard_normal((2, 20)))
    (got,) = reference.grouped_gemm([x], [w])
    want = x.astype(np.float64) @ dequantize(w, np.float64).T
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


def test_results_round_once_to_an_output_type():
    exact = reference.grouped_gemm(
        [bytes_operand(1, 16, 0x22)], [bytes_operand(1, 16, 0x22)], alpha=(1 + 2**-11) / 16
    )[0]
    assert exact.item() == 1 + 2**-11
    assert reference.round_to(exact, np.float16).item() == 1
    assert reference.round_to(exact * 1e6, np.float16).item() == np.inf


@pytest.mark.parametrize("sizes", [[1, 1], [3, 1], [4, -1], [1, 1, 1]], ids=str)
def test_group_sizes_that_do_not_fit(sizes):
    x, w = quantize(np.ones((3, 16))), quantize(np.ones((2, 4, 16)))
    with pytest.raises(ValueError):
        reference.grouped_gemm(x, w, sizes)


def test_k_must_agree():
    with pytest.raises(ValueError, match="mismatch"):
        reference.grouped_gemm([quantize(np.ones((3, 16)))], [quantize(np.ones((2, 17)))])
