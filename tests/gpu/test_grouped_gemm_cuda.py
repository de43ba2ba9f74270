"""Grouped GEMM on a Hopper GPU: every variant, random problems, replay, size, and the sanitizer."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from helpers import exact_operand
from hopper import NVFP4, VARIANTS, max_rows, run

import fp4rt
from fp4rt import reference

pytestmark = pytest.mark.gpu

TESTS = Path(__file__).parents[1]
API_ERRORS = {
    "memcheck": ("--report-api-errors", "no")
}  # counting a kernel's parameters ends in one
TYPES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)]


@pytest.fixture(autouse=True)
def _hopper_only(gpu):
    if gpu.arch != "sm_90a":
        pytest.skip(f"the GPU is {gpu.arch}, not sm_90a")


def rows_maker(variant, rng):
    """Makes operands A of one kind that the variant takes."""
    dtype = ml_dtypes.bfloat16 if variant.endswith("_bf16") else np.float16
    if dtype is np.float16 and rng.random() < 0.7:
        return lambda shape: exact_operand(rng, shape)
    return lambda shape: rng.integers(-8, 9, shape).astype(dtype)


def random_problem(rng):
    """Group sizes with empty groups, and per-group (N, K) up to a few tiles."""
    groups = int(rng.choice([1, 2, 3, 9]))
    largest = int(rng.choice([1, 9, 40, 300]))
    sizes = np.where(rng.random(groups) < 0.2, 0, rng.integers(1, largest + 1, groups))
    n = rng.integers(1, int(rng.choice([40, 300, 600])), groups)
    k = 16 * rng.integers(1, int(rng.choice([5, 40, 70])), groups)
    return sizes, n, k


@pytest.mark.parametrize("variant", VARIANTS)
def test_random_problems_are_exact(gpu, variant, rng):
    """Integer-valued data: every sum is exact in fp32, so D is the oracle's, rounded once."""
    for _ in range(25):
        sizes, n, k = random_problem(rng)
        rows = rows_maker(variant, rng)
        a = [rows(shape) for shape in zip(sizes, k, strict=True)]
        b = [exact_operand(rng, shape) for shape in zip(n, k, strict=True)]
        alpha = rng.choice([0.5, 1, 2, -1], len(sizes))
        out_dtype = TYPES[rng.integers(3)]
        height = int(rng.integers(1, max_rows(variant) // 8 + 1)) * 8
        grid = 2 * int(rng.integers(1, 67))
        results = run(
            gpu, variant, a, b, alpha=alpha, out_dtype=out_dtype, max_tile_rows=height, grid=grid
        )
        exact = reference.grouped_gemm(a, b, alpha=alpha)
        for g, (d, e) in enumerate(zip(results, exact, strict=True)):
            unsigned = f"u{out_dtype.itemsize}"
            np.testing.assert_array_equal(
                d.view(unsigned),
                reference.round_to(e, out_dtype).view(unsigned),
                f"group {g} of sizes {sizes}, N {n}, K {k}, height {height}, grid {grid}",
            )


@pytest.mark.parametrize("variant", NVFP4)
def test_real_data_is_within_the_bound_of_fp32_sums(gpu, variant, rng):
    """|D - exact| <= (K + 2) 2^-23 sum |a b| + half an ulp of the output.

    K + 1 fp32 additions in any order, each of which may truncate instead of round (2^-23 of the
    partial sum, which is at most sum |a b|), and one multiplication by the scale.
    """
    k = 7168
    a = fp4rt.quantize(rng.standard_normal((33, k)).astype(np.float32))
    b = fp4rt.stack([fp4rt.quantize(rng.standard_normal((200, k)).astype(np.float32))])
    d = run(gpu, variant, a, b, [33], out_dtype=np.float32)[0].astype(np.float64)
    x, w = fp4rt.dequantize(a, np.float64), fp4rt.dequantize(b[0], np.float64)
    bound = (k + 2) * 2.0**-23 * (np.abs(x) @ np.abs(w).T)
    error = np.abs(d - x @ w.T)
    assert (error <= bound).all()
    assert np.median(error / bound) < 0.02, "far worse than fp32 sums usually are"


@pytest.mark.parametrize("variant", NVFP4)
def test_a_rows_bits_do_not_depend_on_the_batch(gpu, variant, rng):
    k, n = 1024, 300
    x = fp4rt.quantize(rng.standard_normal((150, k)).astype(np.float32))
    b = fp4rt.quantize(rng.standard_normal((3, n, k)).astype(np.float32))
    whole = run(gpu, variant, x, b, [0, 150, 0], out_dtype=np.float32)[1]
    for rows, sizes in ((slice(40, 41), [0, 1, 0]), (slice(36, 59), [5, 11, 7])):
        part = run(gpu, variant, x[rows], b, sizes, out_dtype=np.float32)
        start = rows.start + sizes[0]
        middle = part[1].view(np.uint32)
        np.testing.assert_array_equal(middle, whole[start : start + sizes[1]].view(np.uint32))


def test_batch_invariant_plans_agree_across_variants(gpu, rng):
    """Medium and large add in the same order; batch_invariant uses no other variant."""
    x = fp4rt.quantize(rng.standard_normal((40, 2048)).astype(np.float32))
    b = fp4rt.quantize(rng.standard_normal((1, 520, 2048)).astype(np.float32))
    results = [run(gpu, v, x, b, [40], out_dtype=np.float32)[0] for v in ("medium", "large")]
    np.testing.assert_array_equal(results[0].view(np.uint32), results[1].view(np.uint32))


def test_512_groups(gpu, rng):
    sizes = rng.integers(0, 20, 512)
    a = exact_operand(rng, (int(sizes.sum()), 64))
    b = exact_operand(rng, (512, 24, 64))
    d = fp4rt.grouped_gemm(gpu, a, b, sizes, out_dtype=np.float32)
    np.testing.assert_array_equal(d, reference.grouped_gemm(a, b, sizes).astype(np.float32))


@pytest.mark.parametrize("max_m", [60, 400])
def test_a_graph_replayed_with_new_sizes(gpu, max_m, rng):
    """One capture, 1000 size vectors; the sizes are read on the device."""
    groups, n, k = 6, 136, 160
    b = exact_operand(rng, (groups, n, k))
    with fp4rt.GroupedGemmPlan(gpu, b, max_m=max_m, out_dtype=np.float32) as plan:
        a = exact_operand(rng, (max_m, k))
        plan.set_inputs(a, np.diff([0, *sorted(rng.integers(0, max_m, groups - 1)), max_m]))
        graph = plan.capture()
        for _ in range(1000):
            m = int(rng.integers(0, max_m + 1))
            sizes = np.diff([0, *sorted(rng.integers(0, m + 1, groups - 1)), m])
            plan.set_inputs(a[:m], sizes)
            graph.launch()
            exact = reference.grouped_gemm(a[:m], b, sizes).astype(np.float32)
            np.testing.assert_array_equal(plan.output(), exact, f"sizes {sizes}")


def test_weights_beyond_2_to_the_31_elements(gpu, rng):
    """One group whose B has 2^31 + 2^20 elements, packed once: its ends are right."""
    k, n = 4096, (2**31 + 2**20) // 4096
    block = exact_operand(rng, (n // 64, k))
    values = np.tile(block.values, (64 + 1, 1))[:n]
    scales = np.tile(block.scales.view(np.uint8), (64 + 1, 1))[:n]
    b = fp4rt.Nvfp4Array.from_parts(values[None], scales[None], 1.0)
    a = exact_operand(rng, (3, k))
    d = fp4rt.grouped_gemm(gpu, a, b, [3], out_dtype=np.float32)
    (exact,) = reference.grouped_gemm([a], [block])
    np.testing.assert_array_equal(d, np.tile(exact, 65)[:, :n].astype(np.float32))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck", "initcheck"])
def test_sanitizer_is_clean(tool, variant):
    if tool == "racecheck":
        pytest.skip(
            "the process ends in a segmentation fault under racecheck (CUDA 13.0), cause unknown"
        )
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on PATH")
    script = TESTS / "gpu" / "sanitize_hopper.py"
    environment = {**os.environ, "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"}
    done = subprocess.run(
        [
            *(sanitizer, "--tool", tool, "--error-exitcode", "99", *API_ERRORS.get(tool, ())),
            *(sys.executable, str(script), variant),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "done" in done.stdout
