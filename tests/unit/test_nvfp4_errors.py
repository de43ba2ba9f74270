"""Bad input to the NVFP4 operand: each message names the value, the rule and a fix that works."""

import pickle

import ml_dtypes
import numpy as np
import pytest

import fp4rt
from fp4rt import codes, layout
from fp4rt.nvfp4 import (
    Nvfp4Array,
    dequantize,
    global_scale_from_divisor,
    load,
    quantize,
    save,
    stack,
)

VALUES = np.full((4, 16), 0x22, np.uint8)  # four rows of K = 32 ones
SCALES = np.full((4, 2), 0x38, np.uint8)


def ones(values=VALUES, scales=SCALES, global_scale=1.0, k=None):
    return Nvfp4Array.from_parts(values, scales, global_scale, k)


MASKED = np.ma.masked_equal(np.zeros((2, 8), np.uint8), 1)


def test_the_parts_that_the_tests_spoil_are_good():
    np.testing.assert_array_equal(dequantize(ones()), np.ones((4, 32)))


# --- x ---


@pytest.mark.parametrize(
    ("x", "match"),
    [
        (np.ones((2, 16), np.int32), "int32.*astype"),
        (np.ones((2, 16), np.uint8), "uint8.*astype"),
        (np.ones((2, 16), bool), "bool.*astype"),
        (np.ones((2, 16), np.complex64), "complex64.*x.real"),
        (np.ones((2, 16), object), "object.*astype"),
        (np.full((2, 16), "1"), "astype"),
        (np.ones((2, 16), np.longdouble), "astype"),
        (np.ones((2, 16), ml_dtypes.float8_e4m3fn), "float8_e4m3fn.*astype"),
        (np.ones((2, 16), ml_dtypes.bfloat16).view("V2"), r"\.view\(ml_dtypes.bfloat16\)"),
        (np.ones((2, 16), ">f4"), "byte order.*newbyteorder"),
        (np.ones((2, 16), ">f8"), "byte order.*newbyteorder"),
        (np.ma.masked_invalid(np.ones((2, 16))), "mask.*filled"),
        ("text", "astype"),
        (None, "object"),
    ],
)
def test_x_of_another_type(x, match):
    with pytest.raises(TypeError, match=match):
        quantize(x)


def test_the_advice_on_types_works():
    x = np.ones((2, 16), ">f4")
    assert quantize(x.astype(x.dtype.newbyteorder("="))).shape == (2, 16)
    lost = np.ones((2, 16), ml_dtypes.bfloat16).view("V2")
    assert dequantize(quantize(lost.view(ml_dtypes.bfloat16)))[0, 0] == 1


@pytest.mark.parametrize("shape", [(), (16,), (2, 2, 2, 16)])
def test_x_with_the_wrong_number_of_axes(shape):
    x = np.ones(shape)
    with pytest.raises(ValueError, match=r"must be \(rows, K\) or \(G, rows, K\): use x.reshape"):
        quantize(x)
    assert quantize(x.reshape(1, -1) if x.ndim < 2 else x.reshape(-1, *x.shape[-2:]))


@pytest.mark.parametrize("shape", [(2, 0), (0, 0), (2, 3, 0)])
def test_x_without_k(shape):
    with pytest.raises(ValueError, match="K is 0; K must be at least 1"):
        quantize(np.ones(shape))


def test_rows_of_different_lengths():
    with pytest.raises(ValueError, match=r"rows differ in length.*pad the rows with zeros"):
        quantize([[1.0, 2.0], [3.0]])
    assert quantize([[1.0, 2.0], [3.0, 0.0]]).shape == (2, 2)


def test_no_numbers_at_all():
    with pytest.raises(ValueError, match=r"shape \(0,\)"):
        quantize([])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"scope": "row"}, "scope is 'row'"),
        ({"nan": "ignore"}, "nan is 'ignore'"),
        ({"scope": "group"}, "scope is 'group' but x has shape"),
        ({"two_level": False, "global_scale": 1.0}, "leave global_scale out"),
    ],
)
def test_bad_options(options, match):
    with pytest.raises(ValueError, match=match):
        quantize(np.ones((2, 16)), **options)


# --- global_scale ---


def made_with(global_scale):
    return {
        "from_parts": lambda: ones(global_scale=global_scale),
        "quantize": lambda: quantize(np.ones((2, 16)), global_scale=global_scale),
        "divisor": lambda: global_scale_from_divisor(global_scale),
    }


@pytest.mark.parametrize("maker", ["from_parts", "quantize", "divisor"])
@pytest.mark.parametrize("bad", [0, -0.0, -1.5, np.inf, -np.inf, np.nan, 1e-60, 1e60])
def test_a_global_scale_that_is_not_positive_and_finite(maker, bad):
    with pytest.raises(ValueError, match=r"must be positive and finite in float32: 1.0") as caught:
        made_with(bad)[maker]()
    assert str(float(bad)) in str(caught.value) or str(bad) in str(caught.value)


@pytest.mark.parametrize("kind", [np.int8, np.float16, np.float64, ml_dtypes.bfloat16, ">f4"])
def test_a_global_scale_of_any_real_type(kind):
    for make in made_with(np.array(2, kind)).values():
        made = make()
        scale = made.global_scale if isinstance(made, Nvfp4Array) else made
        assert scale.dtype == np.float32
        assert scale in (2, 0.5)


@pytest.mark.parametrize("maker", ["from_parts", "quantize"])
@pytest.mark.parametrize("bad", ["1", True, 1j, [None], np.float32])
def test_a_global_scale_that_is_no_number(maker, bad):
    with pytest.raises(TypeError, match=r"global_scale is .*positive number"):
        made_with(bad)[maker]()


@pytest.mark.parametrize("bad", [[1.0, 2.0], [], [[1.0]]])
def test_global_scales_of_the_wrong_length(bad):
    with pytest.raises(ValueError, match=r"global_scale has shape .* takes 1 number"):
        ones(global_scale=bad)
    if bad != [1.0, 2.0]:
        return
    with pytest.raises(ValueError, match=r"shape \(2,\); this operand takes 1 number or 3 of them"):
        quantize(np.ones((3, 2, 16)), global_scale=bad)


def test_the_bad_global_scale_of_a_stack_is_named():
    with pytest.raises(ValueError, match=r"global_scale\[1\] is 0.0"):
        quantize(np.ones((3, 2, 16)), global_scale=[1.0, 0.0, np.nan])


@pytest.mark.parametrize("bad", [1e-40, 1e36, 3e38])
def test_a_global_scale_beyond_what_quantize_takes(bad):
    with pytest.raises(ValueError, match=r"quantize takes 1.17.*e-38 to 1.26.*e.35"):
        quantize(np.ones((2, 16)), global_scale=bad)


def test_a_divisor_whose_reciprocal_is_infinite():
    with pytest.raises(ValueError, match="1 / divisor is inf"):
        global_scale_from_divisor(1e-40)


# --- values and k ---


@pytest.mark.parametrize(
    ("values", "match"),
    [
        (VALUES.view(np.int8), r"int8.*\.view\(np.uint8\)"),
        (VALUES.view("V1"), r"\|V1.*\.view\(np.uint8\)"),
        (np.ones((4, 32), np.float32), "float32.*quantize"),
        (np.ones((4, 32), ml_dtypes.float4_e2m1fn), r"float4_e2m1fn.*pack\(values\)"),
        (VALUES.astype(np.int64), r"int64.*\.astype\(np.uint8\)"),
        (None, "object"),
    ],
)
def test_values_of_another_type(values, match):
    with pytest.raises(TypeError, match=match):
        ones(values)


def test_the_advice_on_values_works():
    unpacked = np.ones((4, 32), np.float32).astype(ml_dtypes.float4_e2m1fn)
    np.testing.assert_array_equal(dequantize(ones(codes.pack(unpacked))), np.ones((4, 32)))
    np.testing.assert_array_equal(dequantize(ones(VALUES.view("V1").view(np.uint8))), 1)
    listed = np.asarray(VALUES.tolist())
    np.testing.assert_array_equal(dequantize(ones(listed.astype(np.uint8))), 1)


@pytest.mark.parametrize("shape", [(), (16,), (2, 2, 4, 16), (4, 0)])
def test_values_of_another_shape(shape):
    with pytest.raises(ValueError, match=r"must be \(rows, K / 2\) or \(G, rows, K / 2\)"):
        ones(np.zeros(shape, np.uint8))


@pytest.mark.parametrize("row_bytes", [1, 4, 12, 20])
def test_k_that_is_no_whole_number_of_scale_blocks(row_bytes):
    values = np.zeros((4, row_bytes), np.uint8)
    with pytest.raises(ValueError, match=f"{row_bytes} bytes per row.*multiple of 16") as caught:
        ones(values)
    padded = -(-row_bytes // 8) * 8
    assert f"append zero bytes up to {padded} per row and pass k={2 * row_bytes}" in str(
        caught.value
    )
    scales = np.full((4, padded // 8), 0x38, np.uint8)
    q = ones(np.pad(values, ((0, 0), (0, padded - row_bytes))), scales, k=2 * row_bytes)
    assert q.shape == (4, 2 * row_bytes)


@pytest.mark.parametrize("k", [16, 0, -1, 33, 64])
def test_k_that_does_not_fit_the_values(k):
    with pytest.raises(ValueError, match=f"k is {k}.*16 bytes per row, which is 32") as caught:
        ones(k=k)
    assert ("packed K" in str(caught.value)) == (k == 16)
    assert str(caught.value).endswith("pass k=32") and ones(k=32).k == 32


@pytest.mark.parametrize("k", [32.0, "32", [32]])
def test_k_that_is_no_integer(k):
    with pytest.raises(TypeError, match="K is an integer, such as 32"):
        ones(k=k)


@pytest.mark.parametrize("k", [17, 24, 31])
def test_padding_that_is_not_zero(k):
    with pytest.raises(
        ValueError, match=rf"element \[0, {k}\] of values is not zero, but K is {k}"
    ):
        ones(k=k)
    values = codes.unpack(VALUES)
    values[:, k:] = 8  # a zero with a sign is a zero
    assert ones(codes.pack(values), k=k).shape == (4, k)


# --- scales ---


@pytest.mark.parametrize(
    ("dtype", "match"),
    [
        (np.int8, r"int8.*\.view\(np.uint8\)"),
        (np.float16, "float16.*encode_e4m3"),
        (np.float32, "float32.*encode_e4m3"),
        (ml_dtypes.float8_e5m2, "float8_e5m2"),
        (ml_dtypes.float8_e8m0fnu, "float8_e8m0fnu.*scale of MXFP4"),
        (np.int64, r"int64.*\.astype\(np.uint8\)"),
        (ml_dtypes.float8_e4m3, "float8_e4m3"),
        (ml_dtypes.float8_e4m3fnuz, "float8_e4m3fnuz"),
        ("V1", r"V1.*\.view\(ml_dtypes.float8_e4m3fn\)"),
        (object, "object"),
    ],
)
def test_scales_of_another_type(dtype, match):
    scales = SCALES.view(dtype) if dtype == "V1" else np.ones((4, 2)).astype(dtype)
    with pytest.raises(TypeError, match=match):
        ones(scales=scales)


def test_the_advice_on_scales_works():
    typed = SCALES.view(ml_dtypes.float8_e4m3fn)
    for scales in (
        codes.encode_e4m3(np.ones((4, 2), np.float16)),
        SCALES.view("V1").view(ml_dtypes.float8_e4m3fn),
        typed,
        SCALES.astype(np.int64).astype(np.uint8),
        codes.encode_e4m3(np.ones((4, 2), ml_dtypes.float8_e5m2)),
        codes.encode_e4m3(np.ones((4, 2), ml_dtypes.float8_e4m3)),
    ):
        q = ones(scales=scales)
        assert q.scales.dtype == ml_dtypes.float8_e4m3fn
        np.testing.assert_array_equal(dequantize(q), np.ones((4, 32)))


@pytest.mark.parametrize("shape", [(4, 1), (4, 3), (2, 4), (8,), (1, 4, 2), (4,), ()])
def test_scales_of_another_shape(shape):
    with pytest.raises(ValueError, match=r"scales has shape .*\(4, 2\)"):
        ones(scales=np.full(shape, 0x38, np.uint8))


@pytest.mark.parametrize("shape", [(512,), (128, 4), (32, 4, 4)])
def test_scales_that_seem_swizzled(shape):
    swizzled = layout.swizzle_scales(SCALES).data.reshape(shape)
    with pytest.raises(ValueError, match=r"swizzled.*unswizzle_scales"):
        ones(scales=swizzled)
    back = layout.SwizzledScales(swizzled.ravel(), 4, 2)
    np.testing.assert_array_equal(dequantize(ones(scales=layout.unswizzle_scales(back))), 1)


def test_swizzled_scales_are_not_taken_where_the_bytes_would_fit():
    scales = np.arange(512).astype(np.uint8).reshape(128, 4)
    values = np.zeros((128, 32), np.uint8)
    with pytest.raises(TypeError, match="swizzled order; call unswizzle_scales"):
        ones(values, layout.swizzle_scales(scales))


def test_unpacked_values_are_recognised():
    with pytest.raises(ValueError, match=r"unpacked.*use pack\(values\)"):
        ones(codes.unpack(VALUES))


def test_a_stack_needs_scales_for_each_group():
    values = np.zeros((3, 4, 16), np.uint8)
    with pytest.raises(ValueError, match=r"makes \(3, 4, 2\)"):
        ones(values, SCALES)


# --- the rest ---


def test_what_does_not_stack():
    q = quantize(np.ones((2, 16)))
    with pytest.raises(ValueError, match="nothing to stack"):
        stack([])
    with pytest.raises(TypeError, match=r"operands\[1\] is a ndarray; call quantize"):
        stack([q, np.ones((2, 16))])
    for other in (quantize(np.ones((3, 16))), quantize(np.ones((2, 15)))):
        with pytest.raises(ValueError, match=r"operands\[1\] has shape .*list instead"):
            stack([q, other])
    with pytest.raises(ValueError, match="only 2-D operands"):
        stack([quantize(np.ones((1, 2, 16)))])


@pytest.mark.parametrize("bad", [np.ones((2, 16)), None])
def test_dequantize_of_something_else(bad):
    with pytest.raises(TypeError, match="dequantize takes what quantize returns"):
        dequantize(bad)


@pytest.mark.parametrize("dtype", [np.int32, ml_dtypes.float8_e4m3fn, complex, "foo", 3])
def test_dequantize_to_another_type(dtype):
    with pytest.raises(TypeError, match="use float32, float64, float16 or bfloat16"):
        dequantize(ones(), dtype)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Nvfp4Array.from_parts(MASKED, np.ones((2, 1), np.uint8), 1.0),
        lambda: Nvfp4Array.from_parts(np.zeros((2, 8), np.uint8), MASKED[:, :1], 1.0),
        lambda: ones(global_scale=np.ma.masked_equal([1.0], 2)),
        lambda: quantize(np.ma.masked_equal(np.ones((2, 16)), 2)),
        lambda: codes.pack(MASKED),
        lambda: layout.swizzle_scales(MASKED),
    ],
)
def test_masked_arrays(make):
    with pytest.raises(TypeError, match="is a masked array, whose mask would be lost; "):
        make()


@pytest.mark.parametrize("bad", [10**400, -(10**400), -1, 0])
def test_integers_that_are_no_global_scale(bad):
    with pytest.raises(ValueError, match="it must be positive and finite in float32"):
        ones(global_scale=bad)


@pytest.mark.parametrize("good", [10**30, ml_dtypes.float8_e4m3fn(2), ml_dtypes.float8_e5m2(2)])
def test_numbers_of_odd_types_are_global_scales(good):
    assert ones(global_scale=good).global_scale == np.float32(float(good))


def test_a_ragged_global_scale():
    with pytest.raises(ValueError, match=r"global_scale is \[\[1\], \[1, 2\]\]; it must be"):
        ones(global_scale=[[1], [1, 2]])


def test_ragged_codes():
    with pytest.raises(ValueError, match="codes is a list whose rows differ in length"):
        codes.pack([[1, 2], [3]])


@pytest.mark.parametrize("bad", ["no", 1, None, np.ones(2)])
def test_a_flag_that_is_none(bad):
    with pytest.raises(TypeError, match="two_level must be True or False"):
        quantize(np.ones((2, 16)), two_level=bad)


def test_a_choice_that_is_no_text():
    with pytest.raises(ValueError, match=r"scope is .*; it is one of"):
        quantize(np.ones((2, 16)), scope=np.ones(2))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"k": np.array([16])}, "k is .*must be one integer"),
        ({"k": np.array(15.5)}, "k is .*must be one integer"),
        ({"k": np.array("x")}, "k is .*must be one integer"),
        ({"k": np.array(True)}, "k is .*must be one integer"),
        ({"k": np.array(99)}, "damaged.*k is 99"),
        ({"format": np.array([1, 2])}, "format and order are no text"),
        ({"order": np.array(1)}, "format and order are no text"),
        ({"values": np.zeros((2, 8), np.float32)}, "damaged.*values is float32"),
        ({"scales": np.zeros((3, 1), np.uint8)}, "damaged.*scales has shape"),
        ({"global_scale": np.array("a")}, "damaged.*global_scale"),
    ],
)
def test_files_with_odd_parts(tmp_path, change, match):
    file = tmp_path / "odd.npz"
    save(file, ones())
    with np.load(file) as archive:
        parts = {**archive, **change}
    np.savez(file, **parts)
    with pytest.raises(ValueError, match=rf"odd.npz.*{match}"):
        load(file)


def test_every_damaged_byte_of_a_file_is_a_value_error(tmp_path):
    """Or it does not matter, such as that of a time stamp."""
    file = tmp_path / "damaged.npz"
    save(file, ones())
    good = file.read_bytes()
    refused = 0
    for at in range(len(good)):
        for flip in (0x01, 0x80, 0xFF):
            file.write_bytes(good[:at] + bytes([good[at] ^ flip]) + good[at + 1 :])
            try:
                load(file)
            except ValueError as error:
                assert "damaged.npz" in str(error)
                refused += 1
    assert refused > len(good)


@pytest.mark.parametrize("length", [0, 1, 3, 30, 200, 700])
def test_a_file_cut_short(tmp_path, length):
    file = tmp_path / "short.npz"
    save(file, ones())
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(ValueError, match=r"short\.npz"):
        load(file)


@pytest.mark.parametrize("bad", [None, 3])
def test_a_stack_of_no_list(bad):
    with pytest.raises(TypeError, match=r"operands is .*; give a list"):
        stack(bad)


def test_a_stack_of_stacks():
    with pytest.raises(ValueError, match=r"operands\[0\] has shape .*; only 2-D operands stack"):
        stack([stack([ones(), ones()])])


def test_a_copy_by_pickle_is_read_only_too():
    for operand in (ones(), stack([ones(), ones()])):
        again = pickle.loads(pickle.dumps(operand))
        assert dequantize(again).tobytes() == dequantize(operand).tobytes()
        for part in (again.values, again.scales):
            assert not part.flags.writeable
        assert not getattr(again.global_scale, "flags", part.flags).writeable


def test_strided_parts_are_taken_in_order():
    values = np.random.default_rng(1).integers(0, 256, (4, 16), dtype=np.uint8)
    want = dequantize(ones(values))
    wide = np.repeat(np.repeat(values, 2, axis=0), 2, axis=1)[::2, ::2]
    for strided in (np.asfortranarray(values), wide):
        q = ones(strided, np.asfortranarray(SCALES))
        assert q.values.flags.c_contiguous
        np.testing.assert_array_equal(dequantize(q), want)
    broadcast = np.broadcast_to(SCALES[0, 0], (4, 2))
    np.testing.assert_array_equal(dequantize(ones(values, broadcast)), want)
    np.testing.assert_array_equal(dequantize(ones(values[::-1, :], SCALES[::-1])), want[::-1])


def test_none_is_the_default_dtype_everywhere():
    q = ones()
    assert dequantize(q, None).dtype == np.float32
    with fp4rt.GroupedGemmPlan("cpu", q, max_m=2, out_dtype=None) as plan:
        assert plan.out_dtype == np.float16
    assert fp4rt.grouped_gemm("cpu", q, q, out_dtype=None).dtype == np.float16
