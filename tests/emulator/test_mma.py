"""mma.sync of every type with raw fragments, and the block-scaled forms with their selectors."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from emulated import Emulated, launch

from fp4rt.device import EmulatorFault
from fp4rt.emulator.numerics import block_scaled_dot, decode

pytestmark = pytest.mark.nvcc

PARAMS = np.dtype(
    [("a", "<u8"), ("b", "<u8"), ("c", "<u8"), ("d", "<u8"), ("scales", "<u8"),
     ("byte_a", "<u2"), ("thread_a", "<u2"), ("byte_b", "<u2"), ("thread_b", "<u2")],
)  # fmt: skip
TYPES = {
    "f16": np.float16, "bf16": ml_dtypes.bfloat16, "tf32": np.float32, "s8": np.int8,
    "u8": np.uint8, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2,
}  # fmt: skip
RESULTS = {"f32": np.float32, "f16": np.float16, "s32": np.int32}
CASES = {
    "f16_k16": ("f16", "f16", 16, "f32"),
    "bf16_k16": ("bf16", "bf16", 16, "f32"),
    "f16_k8": ("f16", "f16", 8, "f32"),
    "f16_k16_f16": ("f16", "f16", 16, "f16"),
    "f16_k8_f16": ("f16", "f16", 8, "f16"),
    "tf32_k8": ("tf32", "tf32", 8, "f32"),
    "tf32_k4": ("tf32", "tf32", 4, "f32"),
    "s8_k32": ("s8", "s8", 32, "s32"),
    "u8_s8_k16": ("u8", "s8", 16, "s32"),
    "s8_k32_sat": ("s8", "s8", 32, "s32"),
    "e4m3_k32": ("e4m3", "e4m3", 32, "f32"),
    "e5m2_e4m3_k32": ("e5m2", "e4m3", 32, "f32"),
}


def words_a(values):
    """A registers by the ISA's formulas: values (16, k bytes)."""
    registers = values.shape[1] // 8  # of 4 bytes: two rows of 16
    lane, reg, i = np.mgrid[0:32, 0:registers, 0:4]
    row = lane // 4 + 8 * (reg % 2)
    return values[row, 4 * (lane % 4) + i + 16 * (reg // 2)]


def words_b(values):
    """B registers: values (8, k bytes), one row for each column of B."""
    registers = values.shape[1] // 16
    lane, reg, i = np.mgrid[0:32, 0:registers, 0:4]
    return values[lane // 4, 4 * (lane % 4) + i + 16 * reg]


def accumulator(matrix, words=None):
    """D registers of a (16, 8) matrix, or the matrix that registers hold."""
    lane, i = np.mgrid[0:32, 0:4]
    row, column = lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2
    if words is None:
        return np.ascontiguousarray(matrix[row, column])
    out = np.zeros_like(matrix)
    out[row, column] = words.view(matrix.dtype).reshape(32, 4)
    return out


def as_bytes(values):
    return np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)


def run(device, entry, a, b, c, arch="sm_90a", scales=None, selectors=(0, 0, 0, 0)):
    """Run one mma on byte matrices a (16, .) and b (8, .); return D."""
    params = np.zeros((), PARAMS)
    held = [
        device.upload(np.ascontiguousarray(x)) for x in (words_a(a), words_b(b), accumulator(c))
    ]
    params["a"], params["b"], params["c"] = (x.address for x in held)
    d = device.alloc(accumulator(c).shape, c.dtype)
    params["d"] = d.address
    if scales is not None:
        held.append(device.upload(scales))
        params["scales"] = held[-1].address
    for name, value in zip(("byte_a", "thread_a", "byte_b", "thread_b"), selectors, strict=True):
        params[name] = value
    launch(device, "emu_mma.cu", arch, entry, params.tobytes(), block=32)
    return accumulator(c, d.to_numpy())


def run_case(device, entry):
    """Run a plain case; return (result, expected)."""
    a_type, b_type, k, d_type = CASES[entry]
    rng = np.random.default_rng(9)
    a = rng.integers(0 if a_type == "u8" else -4, 5, (16, k)).astype(TYPES[a_type])
    b = rng.integers(-4, 5, (8, k)).astype(TYPES[b_type])
    c = rng.integers(-50, 50, (16, 8)).astype(RESULTS[d_type])
    if entry == "s8_k32_sat":
        c[0], c[1] = np.iinfo(np.int32).max, np.iinfo(np.int32).min
    want = a.astype(np.float64) @ b.astype(np.float64).T + c
    if d_type == "s32":
        want = np.clip(want, -(2.0**31), 2.0**31 - 1)
    return run(device, entry, as_bytes(a), as_bytes(b), c), want.astype(RESULTS[d_type])


@pytest.mark.parametrize("entry", CASES)
def test_integers_are_exact(entry):
    result, want = run_case(Emulated(), entry)
    np.testing.assert_array_equal(result, want)


def run_f64(device):
    rng = np.random.default_rng(10)
    a, b, c = rng.standard_normal((8, 4)), rng.standard_normal((8, 4)), rng.standard_normal((8, 8))
    held = [device.upload(x) for x in (a, b, c)]
    d = device.alloc((8, 8), np.float64)
    params = np.zeros((), PARAMS)
    params["a"], params["b"], params["c"] = (x.address for x in held)
    params["d"] = d.address
    launch(device, "emu_mma.cu", "sm_90a", "f64_k4", params.tobytes(), block=32)
    want = c.copy()
    for i, j, k in np.ndindex(8, 8, 4):
        want[i, j] = float(Fraction(a[i, k]) * Fraction(b[j, k]) + Fraction(want[i, j]))
    return d.to_numpy(), want


def test_f64_is_a_chain_of_fused_multiply_adds():
    result, want = run_f64(Emulated())
    np.testing.assert_array_equal(result, want)


@pytest.mark.parametrize(("entry", "k"), [("f64_m16_k4", 4), ("f64_m16_k8", 8)])
def test_f64_of_16_rows(entry, k):
    result, want = run_f64_m16(Emulated(), entry, k)
    np.testing.assert_array_equal(result, want)


def run_f64_m16(device, entry, k):
    """m16n8k4 and m16n8k8 with integers, by the ISA's fragment formulas."""
    rng = np.random.default_rng(20)
    a, b, c = (rng.integers(-9, 9, s).astype(np.float64) for s in ((16, k), (8, k), (16, 8)))
    lane, i = np.mgrid[0:32, 0 : k // 2]
    held = [device.upload(a[lane // 4 + 8 * (i % 2), lane % 4 + 4 * (i // 2)])]
    lane, i = np.mgrid[0:32, 0 : k // 4]
    held += [device.upload(b[lane // 4, lane % 4 + 4 * i]), device.upload(accumulator(c))]
    d = device.alloc((32, 4), np.float64)
    params = np.zeros((), PARAMS)
    params["a"], params["b"], params["c"] = (x.address for x in held)
    params["d"] = d.address
    launch(device, "emu_mma.cu", "sm_90a", entry, params.tobytes(), block=32)
    return accumulator(c, d.to_numpy()), a @ b.T + c


def test_narrow_elements_take_a_byte_each():
    rng = np.random.default_rng(21)
    a = rng.integers(0, 16, (16, 32), dtype=np.uint8)
    b = rng.integers(0, 64, (8, 32), dtype=np.uint8)
    c = rng.integers(-5, 5, (16, 8)).astype(np.float32)
    want = (
        a.view(ml_dtypes.float4_e2m1fn).astype(float)
        @ b.view(ml_dtypes.float6_e3m2fn).astype(float).T
    )
    result = run(Emulated(), "f8f6f4", a << 2, b, c, "sm_120a")
    np.testing.assert_array_equal(result, want + c)


SCALED = {
    "nvfp4": ("e2m1", "e2m1", "ue4m3", 4, [(0, t, 0, u) for t in (0, 1) for u in range(4)]),
    "mxfp4": ("e2m1", "e2m1", "ue8m0", 2, [(x, 1, 2 - x, 3) for x in (0, 2)]),
    "mxfp8": ("e4m3", "e5m2", "ue8m0", 1, [(x, x % 2, 3 - x, x) for x in range(4)]),
}


@pytest.mark.parametrize("entry", SCALED)
def test_block_scales_are_taken_from_the_selected_lanes_and_bytes(entry):
    a_type, b_type, scale_type, count, selections = SCALED[entry]
    rng = np.random.default_rng(11)
    a = rng.integers(0, 0x78, (16, 32), dtype=np.uint8)
    b = rng.integers(0, 0x78, (8, 32), dtype=np.uint8)
    c = rng.integers(-5, 5, (16, 8)).astype(np.float32)
    low, high = (0x20, 0x60) if scale_type == "ue4m3" else (120, 134)
    codes = rng.integers(low, high, (2, 32, 4), dtype=np.uint8)  # operand, lane, byte
    for byte_a, thread_a, byte_b, thread_b in selections:
        row, column = np.arange(16), np.arange(8)
        sa = codes[0, 4 * (row % 8) + 2 * thread_a + row // 8, byte_a:][:, :count]
        sb = codes[1, 4 * column + thread_b, byte_b:][:, :count]
        want = block_scaled_dot(decode(a, a_type), decode(b, b_type), sa, sb, scale_type, c)
        result = run(
            Emulated(), entry, a, b, c, "sm_120a", codes.reshape(2, 128),
            (byte_a, thread_a, byte_b, thread_b),
        )  # fmt: skip
        np.testing.assert_array_equal(result, want)


@pytest.mark.parametrize(
    ("entry", "selectors"),
    [("nvfp4", (1, 0, 0, 0)), ("nvfp4", (0, 2, 0, 0)), ("mxfp4", (0, 0, 1, 0)),
     ("mxfp8", (0, 0, 0, 4))],
)  # fmt: skip
def test_illegal_selectors(entry, selectors):
    zeros = np.zeros((16, 32), np.uint8)
    with pytest.raises(EmulatorFault, match="byte id"):
        run(
            Emulated(), entry, zeros, zeros[:8], np.zeros((16, 8), np.float32), "sm_120a",
            np.zeros((2, 128), np.uint8), selectors,
        )  # fmt: skip
