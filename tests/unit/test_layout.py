"""Memory orders: every layout there and back, offsets, padding, and bytes in the wrong order."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp4rt import layout
from fp4rt.layout import SwizzledScales, swizzle_scales, unswizzle_scales
from fp4rt.nvfp4 import Nvfp4Array, dequantize, quantize

ROWS = [0, 1, 31, 32, 33, 127, 128, 129, 200]
COLS = [1, 3, 4, 5, 7]


def distinct(*shape):
    """Scale bytes that differ from their neighbours and are never 0."""
    return (np.arange(np.prod(shape, dtype=int)) % 251 + 1).astype(np.uint8).reshape(shape)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("cols", COLS)
@pytest.mark.parametrize("leading", [(), (3,), (0,)])
def test_there_and_back(leading, rows, cols):
    scales = distinct(*leading, rows, cols)
    swizzled = swizzle_scales(scales)
    back = unswizzle_scales(swizzled)
    assert (swizzled.rows, swizzled.cols) == (rows, cols)
    assert back.dtype == ml_dtypes.float8_e4m3fn
    np.testing.assert_array_equal(back.view(np.uint8), scales)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("cols", COLS)
def test_each_byte_is_where_the_formula_says_and_padding_is_zero(rows, cols):
    scales = distinct(rows, cols)
    data = swizzle_scales(scales).data
    assert data.shape == (layout.swizzled_size(rows, cols),)
    offsets = layout.swizzled_offset(*np.indices((rows, cols)), cols)
    np.testing.assert_array_equal(data[offsets], scales)
    padding = np.ones(len(data), bool)
    padding[offsets] = False
    assert padding.sum() == len(data) - rows * cols
    assert not data[padding].any()


@pytest.mark.parametrize(
    ("row", "col", "offset"),
    [(0, 0, 0), (1, 0, 16), (32, 0, 4), (0, 1, 1), (0, 4, 512), (128, 0, 1024), (70, 6, 618)],
)
def test_offsets_of_eight_columns(row, col, offset):
    scales = np.zeros((256, 8), np.uint8)
    scales[row, col] = 0x7E
    assert np.flatnonzero(swizzle_scales(scales).data).tolist() == [offset]
    assert layout.swizzled_offset(row, col, 8) == offset


def test_a_group_of_a_stack_is_padded_on_its_own():
    scales = distinct(3, 129, 5)
    stacked = swizzle_scales(scales).data
    assert stacked.shape == (3, 2 * 2 * 512)
    for g in range(3):
        np.testing.assert_array_equal(stacked[g], swizzle_scales(scales[g]).data)


@given(st.integers(0, 300), st.integers(0, 20), st.integers(0, 2**32 - 1))
def test_any_bytes_there_and_back(rows, cols, seed):
    scales = np.random.default_rng(seed).integers(0, 256, (rows, cols), dtype=np.uint8)
    typed = scales.view(ml_dtypes.float8_e4m3fn)
    swizzled = swizzle_scales(typed)
    assert unswizzle_scales(swizzled).tobytes() == scales.tobytes()
    again = swizzle_scales(unswizzle_scales(swizzled))
    assert again.data.tobytes() == swizzled.data.tobytes()


@pytest.mark.parametrize("order", ["Fortran", "reversed", "strided"])
def test_any_strides(order):
    scales = distinct(140, 6)
    strided = {
        "Fortran": np.asfortranarray(scales),
        "reversed": scales[::-1, ::-1].copy()[::-1, ::-1],
        "strided": np.repeat(scales, 2, axis=1)[:, ::2],
    }[order]
    np.testing.assert_array_equal(swizzle_scales(strided).data, swizzle_scales(scales).data)


def test_padding_of_foreign_bytes_does_not_reach_the_result():
    scales = distinct(200, 3)
    data = swizzle_scales(scales).data.copy()
    data[data == 0] = 0x7F
    back = unswizzle_scales(SwizzledScales(data, 200, 3))
    np.testing.assert_array_equal(back.view(np.uint8), scales)


def test_an_operand_from_swizzled_scales(rng):
    q = quantize(rng.standard_normal((200, 48)))
    foreign = np.frombuffer(swizzle_scales(q.scales).data.tobytes(), np.uint8)
    swizzled = SwizzledScales(foreign, 200, 3)
    back = Nvfp4Array.from_parts(q.values, unswizzle_scales(swizzled), q.global_scale)
    np.testing.assert_array_equal(dequantize(back), dequantize(q))


# --- bytes in the wrong order, or of the wrong size or type ---


def test_a_plain_array_is_never_taken_for_swizzled():
    linear = distinct(128, 4)  # 512 bytes in either order
    with pytest.raises(TypeError, match=r"ndarray.*SwizzledScales\(data, rows, cols\)"):
        unswizzle_scales(linear)


def test_swizzled_scales_are_never_taken_for_linear():
    swizzled = swizzle_scales(distinct(128, 4))
    for call in (np.asarray, swizzle_scales, np.ravel):
        with pytest.raises(TypeError, match="swizzled order; call unswizzle_scales"):
            call(swizzled)


@pytest.mark.parametrize("size", [200 * 3, 256 * 3, 200 * 4, 1023, 2048])
def test_bytes_that_are_not_padded(size):
    with pytest.raises(ValueError, match=r"200 rows and 3 scale columns.*\(1024,\) bytes"):
        SwizzledScales(np.zeros(size, np.uint8), 200, 3)
    assert SwizzledScales(np.zeros(1024, np.uint8), 200, 3).data.shape == (1024,)


@pytest.mark.parametrize("shape", [(256, 4), (2, 1, 1024), ()])
def test_bytes_that_are_not_flat(shape):
    with pytest.raises(ValueError, match=r"use .reshape"):
        SwizzledScales(np.zeros(shape, np.uint8), 200, 3)


@pytest.mark.parametrize("dtype", [np.int8, np.float32, ml_dtypes.float8_e8m0fnu, "V1"])
def test_scales_of_another_type(dtype):
    with pytest.raises(TypeError, match="E4M3"):
        swizzle_scales(np.zeros((4, 2), dtype))
    with pytest.raises(TypeError, match="E4M3"):
        SwizzledScales(np.zeros(512, dtype), 4, 2)


@pytest.mark.parametrize("shape", [(8,), (), (1, 2, 3, 4)])
def test_linear_scales_of_another_shape(shape):
    with pytest.raises(ValueError, match=r"\(rows, cols\) or \(G, rows, cols\)"):
        swizzle_scales(np.zeros(shape, np.uint8))


@pytest.mark.parametrize(
    ("rows", "cols", "error"),
    [(-1, 4, ValueError), (4, -1, ValueError), (4.0, 4, TypeError), (True, 4, TypeError)],
)
def test_bad_logical_shapes(rows, cols, error):
    with pytest.raises(error, match=r"rows is|cols is"):
        SwizzledScales(np.zeros(512, np.uint8), rows, cols)


def test_swizzled_scales_are_read_only_and_show_their_shape():
    swizzled = swizzle_scales(distinct(2, 200, 3))
    assert repr(swizzled) == "SwizzledScales(2 groups, rows=200, cols=3, 2048 bytes)"
    with pytest.raises(ValueError, match="read-only"):
        swizzled.data[0] = 1
