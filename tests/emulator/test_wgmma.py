"""wgmma in every type, swizzle and majorness, with raw register fragments.

Inputs are small integers, so that the result is exact whatever the order of the sum. The cases run
on any device; on an H200 they check layouts and fragments against the hardware.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
from emulated import Emulated, launch

from fp4rt.device import EmulatorFault

pytestmark = pytest.mark.nvcc

PARAMS = np.dtype(
    [("image", "<u8"), ("a", "<u8"), ("d_in", "<u8"), ("d_out", "<u8"), ("a_desc", "<u8"),
     ("b_desc", "<u8"), ("image_bytes", "<u4"), ("use_d", "<u4"), ("steps", "<u4"),
     ("a_step", "<u4"), ("b_step", "<u4"), ("pad", "<u4")],
)  # fmt: skip
TYPES = {
    "f16": np.float16, "bf16": ml_dtypes.bfloat16, "tf32": np.float32, "s8": np.int8,
    "u8": np.uint8, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2,
}  # fmt: skip
MODES = {"none": 0, "128B": 1, "64B": 2, "32B": 3}
SPAN = {"none": 16, "32B": 32, "64B": 64, "128B": 128}


@dataclass(frozen=True)
class Case:
    """One kernel entry and the layouts it is tried with."""

    entry: str
    n: int
    a: str
    b: str
    d: str = "f32"
    a_mn: bool = False
    b_mn: bool = False
    negate: int = 1
    registers: bool = False


CASES = [
    Case("f16_n8", 8, "f16", "f16"),
    Case("f16_n24", 24, "f16", "f16"),
    Case("f16_n64", 64, "f16", "f16"),
    Case("f16_n64_ta", 64, "f16", "f16", a_mn=True),
    Case("f16_n64_tb", 64, "f16", "f16", b_mn=True, negate=-1),
    Case("f16_n128", 128, "f16", "f16", negate=-1),
    Case("bf16_n256", 256, "bf16", "bf16"),
    Case("f16_n8_f16", 8, "f16", "f16", d="f16"),
    Case("tf32_n64", 64, "tf32", "tf32"),
    Case("e4m3_n64", 64, "e4m3", "e4m3"),
    Case("e5m2_e4m3_n8", 8, "e5m2", "e4m3"),
    Case("s8_n64", 64, "s8", "s8", d="s32"),
    Case("u8_s8_n8", 8, "u8", "s8", d="s32"),
    Case("rs_f16_n64", 64, "f16", "f16", registers=True),
    Case("rs_f16_n64_tb", 64, "f16", "f16", b_mn=True, registers=True),
    Case("rs_e4m3_n64", 64, "e4m3", "e4m3", registers=True),
    Case("rs_tf32_n8", 8, "tf32", "tf32", registers=True),
    Case("rs_s8_n8", 8, "s8", "s8", d="s32", registers=True),
]


def place(values, mode, mn_major, image, start):
    """Lay a (rows, K) operand of any number of k-steps out at `start`; return its descriptor.

    Written from the PTX figures: 8-row atoms of one span, 16-byte chunks exclusive-ored with the
    128-byte line number modulo the chunks of a span.
    """
    size = values.dtype.itemsize
    rows, k = values.shape
    span = SPAN[mode]
    data = np.ascontiguousarray(values).view(np.uint8).reshape(rows, k, size)
    lines = span // size  # elements of one span
    if not mn_major:
        width = 16 if mode == "none" else span
        columns = k * size // width
        if mode == "none":  # core matrices of 8 x 16 bytes, those of one K column together
            sbo, lbo = 128, rows * 16
        else:
            sbo, lbo = 8 * span, 16
            assert columns == 1
    elif mode == "none":
        sbo, lbo = 128, (rows * size // 16) * 128  # next 8 of M/N, next 8 of K
    else:
        sbo, lbo = 8 * span, (k // 8) * 8 * span  # next 8 of K, next span of M/N
    r, c, e = np.mgrid[0:rows, 0:k, 0:size]
    byte = c * size + e
    if not mn_major and mode == "none":
        at = (r // 8) * sbo + (r % 8) * 16 + (byte // 16) * lbo + byte % 16
    elif not mn_major:
        at = (r // 8) * sbo + (r % 8) * span + byte
    elif mode == "none":
        at = (r // 8) * sbo + (c // 8) * lbo + (c % 8) * 16 + (r % 8) * size + e
    else:
        at = (r // lines) * lbo + (c // 8) * sbo + (c % 8) * span + (r % lines) * size + e
    address = start + at
    if mode != "none":
        address ^= ((address >> 7) & (span // 16 - 1)) << 4
    image[address] = data
    return start >> 4 | (lbo >> 4) << 16 | (sbo >> 4) << 32 | MODES[mode] << 62


def fragment_a(values):
    """A registers of 128 threads, from the PTX figures for 32-bit registers of `per` elements."""
    per = 4 // values.dtype.itemsize
    t, reg, i = np.mgrid[0:128, 0:4, 0:per]
    row = 16 * (t // 32) + t % 32 // 4 + 8 * (reg % 2)
    column = per * (t % 4) + 4 * per * (reg // 2) + i
    return np.ascontiguousarray(values[row, column]).reshape(128, -1).view(np.uint32)


def fragment_d(matrix, inverse=None):
    """D registers of 128 threads; with `inverse` (registers) return the matrix instead."""
    n = matrix.shape[1]
    t, i = np.mgrid[0:128, 0 : n // 2]
    row = 16 * (t // 32) + t % 32 // 4 + 8 * (i // 2 % 2)
    column = 8 * (i // 4) + 2 * (t % 4) + i % 2
    if inverse is None:
        return np.ascontiguousarray(matrix[row, column]).view(np.uint32)
    out = np.zeros_like(matrix)
    out[row, column] = inverse.view(matrix.dtype)
    return out


def run(device, case, mode, steps=1, use_d=True, fault=0, seed=0):
    """Run a case; return (result, expected)."""
    rng = np.random.default_rng(seed)
    dtype_a, dtype_b = TYPES[case.a], TYPES[case.b]
    k = 32 // np.dtype(dtype_a).itemsize
    low = 0 if case.a == "u8" else -4
    a = rng.integers(low, 5, (64, k * steps)).astype(dtype_a)
    b = rng.integers(-4, 5, (case.n, k * steps)).astype(dtype_b)
    accumulator = {"f32": np.float32, "f16": np.float16, "s32": np.int32}[case.d]
    d = rng.integers(-50, 50, (64, case.n)).astype(accumulator)
    image = np.zeros(40 * 1024, np.uint8)
    params = np.zeros((), PARAMS)
    if case.registers:
        registers = fragment_a(a)
    else:
        registers = np.zeros((128, 4), np.uint32)
        params["a_desc"] = place(a, mode, case.a_mn, image, 0)
    params["b_desc"] = place(b, mode, case.b_mn, image, 8 * 1024)
    buffers = [device.upload(x) for x in (image, registers, fragment_d(d))]
    out = device.upload(np.full_like(fragment_d(d), 0x7FC01234))
    params["image"], params["a"], params["d_in"] = (x.address for x in buffers)
    params["d_out"], params["image_bytes"] = out.address, image.nbytes
    params["use_d"], params["steps"] = use_d, fault or steps
    params["a_step"] = params["b_step"] = 2  # 32 bytes of K
    launch(device, "emu_wgmma.cu", "sm_90a", case.entry, params.tobytes(), shared=image.nbytes)
    result = fragment_d(d, out.to_numpy())
    want = case.negate * (a.astype(np.float64) @ b.astype(np.float64).T) + use_d * d
    return result, want.astype(accumulator)


def modes(case):
    """Layouts that a case's majorness allows for one K step of 32 bytes."""
    return ["32B"] if not (case.a_mn or case.b_mn) else ["none", "32B", "64B", "128B"]


def all_runs():
    """Every (case, mode, steps, use_d) that makes sense."""
    for case in CASES:
        for mode in ("none", "32B", "64B", "128B"):
            mixed = case.a_mn or case.b_mn
            if mixed and not (case.a_mn and case.b_mn) and not case.registers:
                if mode in ("none", "32B"):  # K-major partner: one span of K is 32 bytes
                    yield case, mode, 1, True
            elif mixed or mode == "none":
                yield case, mode, 1, mode != "none"
            else:
                steps = SPAN[mode] // 32
                yield case, mode, 1 if case.registers else steps, True


RUNS = [r for r in all_runs() if not (r[0].registers and not r[0].b_mn and r[1] in ("64B", "128B"))]


def name(value):
    return value.entry if isinstance(value, Case) else str(value)


@pytest.mark.parametrize(("case", "mode", "steps", "use_d"), RUNS, ids=name)
def test_wgmma(case, mode, steps, use_d):
    result, want = run(Emulated(seed=steps), case, mode, steps, use_d)
    np.testing.assert_array_equal(result, want)


BROKEN = {
    1: "no fence.proxy.async",
    2: "data race|uninitialised",
    3: "no wgmma.fence",
    4: "different numbers of wgmma|fewer|whole-warp",
    5: "stored before the wgmma.wait_group|never waited for",
    6: "stored before the wgmma.wait_group|in flight|data race",
}


@pytest.mark.parametrize("fault", BROKEN)
@pytest.mark.parametrize("seed", [0, 1])
def test_broken_rules_are_reported(fault, seed):
    with pytest.raises(EmulatorFault, match=BROKEN[fault]):
        run(Emulated(seed=seed), Case("broken", 8, "f16", "f16"), "32B", fault=fault)
