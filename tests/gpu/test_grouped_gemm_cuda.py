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
from hopper import KINDS, VARIANTS, Bound, assert_nan_stays, max_rows, rows_of, run

import fp4rt
from fp4rt import reference

pytestmark = pytest.mark.gpu

TESTS = Path(__file__).parents[1]
TOOL_OPTIONS = {
    # Counting a kernel's parameters ends in an error of the driver.
    "memcheck": ("--report-api-errors", "no"),
    # The default report is made when the device is closed, which sanitize_hopper.py does not.
    "racecheck": ("--racecheck-report", "hazard", "--show-backtrace", "no", "--print-limit", "9"),
}
TYPES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)]
EVERY_KIND = pytest.mark.parametrize(("variant", "kind"), KINDS)


@pytest.fixture(autouse=True)
def _hopper_only(gpu):
    if gpu.arch != "sm_90a":
        pytest.skip(f"the GPU is {gpu.arch}, not sm_90a")


def as_float64(rows):
    return fp4rt.dequantize(rows, np.float64) if hasattr(rows, "scales") else rows.astype("f8")


def bits(array):
    return array.view(f"u{array.dtype.itemsize}")


def random_problem(rng):
    """Group sizes with empty groups, and per-group (N, K) up to a few tiles."""
    groups = int(rng.choice([1, 2, 3, 9]))
    largest = int(rng.choice([1, 9, 40, 300]))
    sizes = np.where(rng.random(groups) < 0.2, 0, rng.integers(1, largest + 1, groups))
    n = rng.integers(1, int(rng.choice([40, 300, 600])), groups)
    k = 16 * rng.integers(1, int(rng.choice([5, 40, 70])), groups)
    return sizes, n, k


@EVERY_KIND
def test_random_problems_are_exact(gpu, variant, kind, rng):
    """Integer-valued data: every sum is exact in fp32, so D is the oracle's, rounded once."""
    for i in range(24):
        sizes, n, k = random_problem(rng)
        a = [rows_of(kind, rng, shape) for shape in zip(sizes, k, strict=True)]
        b = [exact_operand(rng, shape) for shape in zip(n, k, strict=True)]
        alpha = rng.choice([0.5, 1, 2, -1], len(sizes))
        out_dtype = TYPES[i % 3]
        height = int(rng.integers(1, max_rows(variant) // 8 + 1)) * 8
        grid = 2 * int(rng.integers(1, rng.choice([67, 150])))  # more than fit, too
        results = run(
            gpu, variant, a, b, alpha=alpha, out_dtype=out_dtype, max_tile_rows=height, grid=grid
        )
        exact = reference.grouped_gemm(a, b, alpha=alpha)
        for g, (d, e) in enumerate(zip(results, exact, strict=True)):
            np.testing.assert_array_equal(
                bits(d),
                bits(reference.round_to(e, out_dtype)),
                f"group {g} of sizes {sizes}, N {n}, K {k}, height {height}, grid {grid}",
            )


@EVERY_KIND
def test_real_data_is_within_the_bound_of_fp32_sums(gpu, variant, kind, rng):
    """|D - exact| <= (K + 2) 2^-23 sum |a b| + half an ulp of the output.

    K + 1 fp32 additions in any order, each of which may truncate instead of round (2^-23 of the
    partial sum, which is at most sum |a b|), and one multiplication by the scale.
    """
    k = 7168
    a = rows_of(kind, rng, (33, k), exact=False)
    b = fp4rt.stack([fp4rt.quantize(rng.standard_normal((200, k)).astype(np.float32))])
    d = run(gpu, variant, a, b, [33], out_dtype=np.float32)[0].astype(np.float64)
    x, w = as_float64(a), as_float64(b[0])
    bound = (k + 2) * 2.0**-23 * (np.abs(x) @ np.abs(w).T)
    error = np.abs(d - x @ w.T)
    assert (error <= bound).all()
    assert np.median(error / bound) < 0.02, "far worse than fp32 sums usually are"


@EVERY_KIND
def test_a_rows_bits_do_not_depend_on_the_batch(gpu, variant, kind, rng):
    """Nor on the number of CTAs, which decides where shares of the work are cut along K."""
    k, n = 1024, 300
    x = rows_of(kind, rng, (150, k), exact=False)
    b = fp4rt.quantize(rng.standard_normal((3, n, k)).astype(np.float32))
    whole = run(gpu, variant, x, b, [0, 150, 0], out_dtype=np.float32)[1]
    for rows, sizes, grid in (
        (slice(40, 41), [0, 1, 0], 2),
        (slice(36, 59), [5, 11, 7], 6),
        (slice(0, 150), [1, 148, 1], 132),
        (slice(17, 150), [0, 133, 0], 14),
    ):
        part = run(gpu, variant, x[rows], b, sizes, out_dtype=np.float32, grid=grid)
        start = rows.start + sizes[0]
        np.testing.assert_array_equal(bits(part[1]), bits(whole[start : start + sizes[1]]))


@EVERY_KIND
def test_nan_stays_in_its_row_and_column(gpu, variant, kind, rng):
    for m, n, k in ((5, 24, 64), (33, 130, 80), (257, 300, 1040)):
        assert_nan_stays(gpu, variant, kind, rng, m=m, n=n, k=k)


@EVERY_KIND
def test_the_same_bits_every_time(gpu, variant, kind, rng):
    """On one stream, on four in turn, and with another problem's launches beside."""
    sizes, n, k = [40, 0, 3, 100, 16], 520, 2048
    a = rows_of(kind, rng, (sum(sizes), k), exact=False)
    b = fp4rt.quantize(rng.standard_normal((5, n, k)).astype(np.float32))
    streams = [gpu.new_stream() for _ in range(4)]
    options = {"out_dtype": np.float32, "grid": gpu.sm_count}
    with (
        Bound(gpu, variant, a, b, sizes, **options) as bound,
        Bound(gpu, variant, a[9:], b, [31, *sizes[1:]], **options) as other,
    ):
        bound.launch(gpu.stream)
        first = np.concatenate([d.reshape(-1) for d in bound.results()])
        assert np.isfinite(first).all()
        for i in range(200):
            stream = gpu.stream if i < 100 else streams[i % 4]
            bound.plan.order(stream)
            bound.poison(stream)
            other.launch(streams[(i + 1) % 4])
            bound.launch(stream)
            gpu.synchronize()
            again = np.concatenate([d.reshape(-1) for d in bound.results()])
            np.testing.assert_array_equal(bits(again), bits(first), f"launch {i}")


def test_kernels_that_wait_for_each_other_do_not_stop():
    """Plans on many streams, whose CTAs want the same SMs; a process of its own can be ended."""
    script = TESTS / "gpu" / "crowd_hopper.py"
    environment = {**os.environ, "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "done" in done.stdout


def test_batch_invariant_plans_agree_across_variants(gpu, rng):
    """Medium and large add in the same order; batch_invariant uses no other variant."""
    x = fp4rt.quantize(rng.standard_normal((40, 2048)).astype(np.float32))
    b = fp4rt.quantize(rng.standard_normal((1, 520, 2048)).astype(np.float32))
    results = [run(gpu, v, x, b, [40], out_dtype=np.float32)[0] for v in ("medium", "large")]
    np.testing.assert_array_equal(results[0].view(np.uint32), results[1].view(np.uint32))


@EVERY_KIND
def test_a_graph_replayed_with_new_sizes(gpu, variant, kind, rng):
    """One capture, 1000 size vectors; the sizes are read on the device."""
    groups, n, k, max_m = 6, 136, 160, 200
    a, b = rows_of(kind, rng, (max_m, k)), exact_operand(rng, (groups, n, k))
    products = np.stack(reference.grouped_gemm([a] * groups, list(b))).astype(np.float32)
    with fp4rt.GroupedGemmPlan(
        gpu,
        b,
        max_m=max_m,
        out_dtype=np.float32,
        activations=kind,
        variant=variant.removesuffix("_bf16"),
    ) as plan:
        graph = plan.capture()
        for _ in range(1000):
            m = int(rng.choice([max_m, rng.integers(0, max_m + 1)]))
            sizes = np.diff([0, *sorted(rng.integers(0, m + 1, groups - 1)), m])
            plan.set_inputs(a[:m], sizes)
            plan.poison_output()
            graph.launch()
            expected = products[np.repeat(np.arange(groups), sizes), np.arange(m)]
            np.testing.assert_array_equal(plan.output(), expected, f"sizes {sizes}")


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck", "initcheck"])
def test_sanitizer_is_clean(tool):
    """On cases of every variant; one process, for the tools take a second to start."""
    if tool == "racecheck":
        pytest.skip(
            "racecheck (CUDA 13.0 and 13.5) does not see a __syncwarp that ptxas made a NOP of, so "
            "what 31 lanes read or write before lane 0 arrives at an mbarrier counts as a hazard"
        )
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on PATH")
    script = TESTS / "gpu" / "sanitize_hopper.py"
    environment = {**os.environ, "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"}
    done = subprocess.run(
        [
            *(sanitizer, "--tool", tool, "--error-exitcode", "99", *TOOL_OPTIONS.get(tool, ())),
            *(sys.executable, str(script), *VARIANTS),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert done.stdout.count("clean so far") == len(VARIANTS)
    none = "RACECHECK SUMMARY: 0 hazards" if tool == "racecheck" else "ERROR SUMMARY: 0 errors"
    assert none in done.stdout, done.stdout[-4000:]
