"""Hopper variants where offsets pass 2**31 and 2**32, and with very many groups.

Operands repeat a block of rows, which is copied on the GPU, so that they are made in no time and
the result is known everywhere.
"""

import ml_dtypes
import numpy as np
import pytest
from helpers import exact_operand, oracle
from hopper import KINDS, VARIANTS, rows_of, run

import fp4rt
from fp4rt import reference

pytestmark = pytest.mark.gpu

EVERY_KIND = pytest.mark.parametrize(("variant", "kind"), KINDS)
TYPES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)]


@pytest.fixture(autouse=True)
def _hopper_only(gpu):
    if gpu.arch != "sm_90a":
        pytest.skip(f"the GPU is {gpu.arch}, not sm_90a")


def repeated(gpu, block, rows):
    """A buffer of so many rows, those of `block` over and over."""
    out = gpu.alloc((rows, block.shape[1]), block.dtype)
    gpu.stream.upload(out[: len(block)], block)
    filled = len(block)
    while filled < rows:
        more = min(filled, rows - filled)
        gpu.stream.copy(out[filled : filled + more], out[:more])
        filled += more
    return out


def repeated_rows(gpu, block, rows):
    """Rows of A on the GPU, those of `block` over and over."""
    if isinstance(block, np.ndarray):
        return fp4rt.DeviceRows.from_parts(gpu, repeated(gpu, block, rows))
    parts = [repeated(gpu, part, rows) for part in (block.values, block.scales.view(np.uint8))]
    return fp4rt.DeviceRows.from_parts(gpu, *parts)


def repeated_weights(gpu, block, groups, n):
    """Weights of `groups` groups, whose n rows each go on where the group before ended."""
    parts = [
        repeated(gpu, part, groups * n).reshape(groups, n, part.shape[1])
        for part in (block.values, block.scales.view(np.uint8))
    ]
    return fp4rt.DeviceWeights.from_parts(gpu, *parts)


def make_plan(gpu, weights, rows, variant, out_dtype):
    return fp4rt.GroupedGemmPlan(
        gpu,
        weights,
        max_m=rows.shape[0],
        activations=rows.activations,
        out_dtype=out_dtype,
        variant=variant.removesuffix("_bf16"),
    )


@EVERY_KIND
def test_a_beyond_2_to_the_32_elements(gpu, variant, kind, rng):
    """Packed codes beyond 2**31 bytes, 16-bit rows (prepared ones too) beyond 2**33."""
    block, k, n, last = 512, 4096, 24, 7
    m = 2049 * block
    few, b = rows_of(kind, rng, (block, k)), exact_operand(rng, (3, n, k))
    sizes = [0, m - last, last]
    rows = repeated_rows(gpu, few, m)
    with make_plan(gpu, b, rows, variant, np.float32) as plan:
        plan.set_inputs(rows, sizes)
        plan.poison_output()
        plan.launch()
        d = plan.output()
    first, second = (oracle([few], [b[g]], None, out_dtype=np.float32)[0] for g in (1, 2))
    assert (d[:-block].reshape(-1, block, n) == first).all()
    np.testing.assert_array_equal(d[-block:-last], first[:-last])
    np.testing.assert_array_equal(d[-last:], second[-last:])


@pytest.fixture(scope="module")
def large_weights(gpu):
    """Two groups, 2**32 elements together, packed on the GPU from plain order; and their block."""
    block = exact_operand(np.random.default_rng(0), (509, 4096))
    n = 524_801
    with repeated_weights(gpu, block, 2, n) as weights:
        yield weights, block, n


@EVERY_KIND
def test_b_beyond_2_to_the_32_elements(gpu, large_weights, variant, kind, rng):
    weights, block, n = large_weights
    a = rows_of(kind, rng, (3, 4096))
    rows = fp4rt.upload_rows(gpu, a)
    with make_plan(gpu, weights, rows, variant, np.float32) as plan:
        plan.set_inputs(rows, [1, 2])
        plan.poison_output()
        plan.launch()
        d = plan.output()
    (few,) = oracle([a], [block], None, out_dtype=np.float32)
    column = np.arange(2 * n) % len(block.values)
    np.testing.assert_array_equal(d[0], few[0, column[:n]])
    np.testing.assert_array_equal(d[1:], few[1:, column[n:]])


@EVERY_KIND
def test_d_beyond_2_to_the_31_elements(gpu, variant, kind, rng):
    """The last group's part begins there too; rows before and behind D stay what they were."""
    m, n, k, last = 137 * 512, 68 * 512, 64, 300
    out_dtype = TYPES[list(VARIANTS).index(variant) % 3]
    few, block = rows_of(kind, rng, (512, k)), exact_operand(rng, (512, k))
    rows, weights = repeated_rows(gpu, few, m), repeated_weights(gpu, block, 3, n)
    memory = gpu.alloc((m + 2, n), out_dtype)
    gpu.stream.fill(memory, 0xFF)
    with make_plan(gpu, weights, rows, variant, out_dtype) as plan:
        plan.rebind(out=memory[1:-1])
        plan.set_inputs(rows, [m - last, 0, last])
        plan.launch()
        gpu.synchronize()
    (expected,) = oracle([few], [block], None, out_dtype=out_dtype)
    unsigned = f"u{out_dtype.itemsize}"
    edges = [0, 2**31 // n, 2**30 // n, 2**32 // (n * out_dtype.itemsize), m - last - 2, m - 4]
    for row in [*edges, *rng.integers(0, m - 4, 50)]:
        found = memory[1 + row : 5 + row].to_numpy().view(unsigned)
        wanted = expected[np.arange(row, row + 4) % 512].view(unsigned)
        assert (found.reshape(4, -1, 512) == wanted[:, None]).all(), f"rows from {row}"
    for row in (0, m + 1):
        assert (memory[row].to_numpy().view(unsigned) == np.iinfo(unsigned).max).all()
    for buffer in (memory, weights):
        buffer.close()


@EVERY_KIND
def test_512_groups(gpu, variant, kind, rng):
    sizes = rng.integers(0, 20, 512)
    alpha = 2.0 ** rng.integers(-2, 3, 512)
    a = rows_of(kind, rng, (int(sizes.sum()), 64))
    b = exact_operand(rng, (512, 24, 64))
    options = {"alpha": alpha, "out_dtype": np.float32, "grid": gpu.sm_count}
    results = run(gpu, variant, a, b, sizes, **options)
    exact = np.split(reference.grouped_gemm(a, b, sizes, alpha), np.cumsum(sizes)[:-1])
    for g, (d, e) in enumerate(zip(results, exact, strict=True)):
        np.testing.assert_array_equal(d, e.astype(np.float32), f"group {g}")


@pytest.mark.parametrize("rows", [1, 40, 300], ids="{} rows at most".format)
def test_4096_groups(gpu, rows, rng):
    sizes = np.where(rng.random(4096) < 0.3, 0, rng.integers(1, rows + 1, 4096))
    a, b = exact_operand(rng, (int(sizes.sum()), 32)), exact_operand(rng, (4096, 9, 32))
    d = fp4rt.grouped_gemm(gpu, a, b, sizes, out_dtype=np.float32)
    np.testing.assert_array_equal(d, reference.grouped_gemm(a, b, sizes).astype(np.float32))
