"""Conversions that sm_90a lacks (E2M1, E2M3, E3M2, UE8M0), and pairs of floats, against numpy."""

import ml_dtypes
import numpy as np
import pytest
import wide
from instruction_cases import Case, inputs, ptx

from fp4rt.emulator import ptx as grammar
from fp4rt.emulator.program import Program


def results(case, values=None):
    module = grammar.parse(ptx([case]).replace("sm_90a", "sm_100a"))
    return wide.evaluate(Program(module, case.entry, {}, "sm_100a"), case, values)


def braces(text):
    """Escape braces, but not those of the operands."""
    for mark in "dabc":
        text = text.replace(f"<{mark}>", f"%{mark}")
    return text.replace("{", "{{").replace("}", "}}")


def floats(case):
    return [x.view(np.float32).astype(np.float64) for x in inputs(case)]


def nearest(values, dtype, largest):
    """Round float64 values to a small format through float32, saturating; NaN gives the largest."""
    values = np.where(np.isnan(values), largest, np.clip(values, -largest, largest))
    return values.astype(np.float32).astype(dtype)


@pytest.mark.parametrize("relu", [False, True])
def test_e2m1_from_f32(relu):
    op = "cvt.rn.satfinite.relu" if relu else "cvt.rn.satfinite"
    text = braces(
        "{ .reg .b8 %x; " + op + ".e2m1x2.f32 %x, <a>, <b>; mov.b32 <d>, {%x,%x,%x,%x}; }"
    )
    case = Case(f"e2m1.{relu}", text, "b32", ("f32", "f32"), 8192)
    high, low = floats(case)
    if relu:
        high, low = np.where(high <= 0, 0.0, high), np.where(low <= 0, 0.0, low)
    codes = [nearest(v, ml_dtypes.float4_e2m1fn, 6.0).view(np.uint8) for v in (low, high)]
    byte = codes[0] | codes[1] << 4
    got = results(case).view(np.uint8).reshape(-1, 4)
    assert (got == got[:, :1]).all()
    assert np.array_equal(got[:, 0], byte)


def test_e2m1_ties_go_to_even():
    from fp4rt.emulator.convert import encode_small

    x = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.0001, 7.0, np.nan, -0.25, -0.2])
    assert encode_small(x, "e2m1").tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 7, 7, 8, 8]


def test_e2m1_to_f16():
    text = braces("{ .reg .b8 %x, %y; mov.b16 {%x, %y}, <a>; cvt.rn.f16x2.e2m1x2 <d>, %x; }")
    case = Case("e2m1.to.f16", text, "f16x2", ("b16",), 65536)
    got = results(case).view(np.float16).reshape(-1, 2)
    byte = (inputs(case)[0] & 0xFF).astype(np.uint8)
    for half, codes in ((0, byte & 15), (1, byte >> 4)):
        want = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float16)
        assert np.array_equal(got[:, half], want)


@pytest.mark.parametrize(
    ("name", "dtype", "largest"),
    [("e2m3", ml_dtypes.float6_e2m3fn, 7.5), ("e3m2", ml_dtypes.float6_e3m2fn, 28.0)],
)
def test_six_bit_formats(name, dtype, largest):
    text = f"cvt.rn.satfinite.{name}x2.f32 {{d}}, {{a}}, {{b}};"
    case = Case(f"{name}.from", text, "b16", ("f32", "f32"), 4096)
    high, low = floats(case)
    codes = [nearest(v, dtype, largest).view(np.uint8).astype(np.uint16) for v in (low, high)]
    assert np.array_equal(results(case), codes[0] | codes[1] << 8)
    case = Case(f"{name}.to", f"cvt.rn.f16x2.{name}x2 {{d}}, {{a}};", "f16x2", ("b16",), 65536)
    got = results(case).view(np.float16).reshape(-1, 2)
    for half in (0, 1):
        code = (inputs(case)[0] >> (8 * half) & 63).astype(np.uint8)
        assert np.array_equal(got[:, half], code.view(dtype).astype(np.float16))


@pytest.mark.parametrize("mode", ["rz", "rp"])
def test_scales_that_are_powers_of_two(mode):
    text = f"cvt.{mode}.satfinite.ue8m0x2.f32 {{d}}, {{a}}, {{b}};"
    case = Case(f"ue8m0.{mode}", text, "b16", ("positive", "positive"), 4096)
    got = results(case)
    for half, x in ((1, floats(case)[0]), (0, floats(case)[1])):
        power = np.floor(np.log2(x)) if mode == "rz" else np.ceil(np.log2(x))
        assert np.array_equal(got >> (8 * half) & 255, (power + 127).astype(np.uint16))


@pytest.mark.parametrize("op", ["add", "mul", "fma"])
def test_pairs_of_floats(op):
    third = ", {c}" if op == "fma" else ""
    operands = "{d}, {a}, {b}" + third + ";"
    count = 3 if third else 2
    case = Case(f"{op}.f32x2", f"{op}.rn.f32x2 {operands}", "b64", ("b64",) * count, 512)
    got = results(case)
    for half in ("lo", "hi"):
        shift = np.uint64(32 if half == "hi" else 0)
        parts = [(x >> shift).astype(np.uint32) for x in inputs(case)]
        single = Case("one", f"{op}.rn.f32 {operands}", "f32", ("b32",) * count, 512)
        want = results(single, parts)
        assert np.array_equal((got >> shift).astype(np.uint32), want)
