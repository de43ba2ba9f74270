"""The Hopper kernels' own PTX, executed under several schedules (eight with --full), bit for bit.

Every case goes through a plan's buffers and launches; `hopper.run` fills what lies beside the data
with NaN and checks that it stays.
"""

import ml_dtypes
import numpy as np
import pytest
from helpers import exact_operand
from hopper import KINDS, NVFP4, VARIANTS, assert_nan_stays, rows_of, run

from fp4rt import reference
from fp4rt.device import NoKernelError
from fp4rt.emulator import EmulatorDevice
from fp4rt.emulator.launch import Launch
from fp4rt.library import Library

pytestmark = pytest.mark.slow

TYPES = [np.float16, ml_dtypes.bfloat16, np.float32]
NATURAL = dict(reversed(KINDS))
"""The kind of rows that a variant is for."""


@pytest.fixture(scope="module")
def emulator(schedules):
    """Every launch under several schedules, whose results must agree."""
    try:
        Library().images("sm_90a")
    except NoKernelError as error:
        pytest.skip(str(error))
    with EmulatorDevice("sm_90a", **schedules) as device:
        yield device


def check(results, a, b, alpha, out_dtype):
    exact = reference.grouped_gemm(a, b, alpha=alpha)
    for g, (d, e) in enumerate(zip(results, exact, strict=True)):
        e = reference.round_to(e, out_dtype)
        unsigned = f"u{np.dtype(out_dtype).itemsize}"
        np.testing.assert_array_equal(d.view(unsigned), e.view(unsigned), f"group {g}")
    assert any(np.any(d.astype(np.float32)) for d in results)


@pytest.mark.parametrize("variant", VARIANTS)
def test_groups_with_their_own_shapes(emulator, variant, rng):
    """Several tiles a CTA, an empty group, odd N, K that ends inside a step, inside a stage."""
    sizes, shapes = [9, 0, 2], [(136, 80), (8, 16), (7, 272)]
    a = [rows_of(NATURAL[variant], rng, (m, k)) for m, (_, k) in zip(sizes, shapes, strict=True)]
    b = [exact_operand(rng, shape) for shape in shapes]
    out_dtype = TYPES[list(VARIANTS).index(variant) % 3]
    alpha = np.array([0.5, 1, -2])
    results = run(
        emulator, variant, a, b, alpha=alpha, out_dtype=out_dtype, max_tile_rows=8, grid=2
    )
    check(results, a, b, alpha, out_dtype)


@pytest.mark.parametrize("variant", ["skinny", "skinny_bf16"])
def test_ctas_that_share_a_tile(emulator, variant, rng):
    """Three tiles of three stages on two CTAs: the second goes on from the sums of the first."""
    a, b = [rows_of(NATURAL[variant], rng, (3, 768))], [exact_operand(rng, (520, 768))]
    check(run(emulator, variant, a, b, out_dtype=np.float32, grid=2), a, b, [1], np.float32)


@pytest.mark.parametrize("variant", ["skinny", "skinny_bf16"])
def test_ctas_that_share_a_tile_start_in_any_order(variant, rng, monkeypatch):
    """The last one first, and alone: whom a CTA waits for must have run before."""
    by_index = Launch._bases_by_index
    monkeypatch.setattr(Launch, "_bases", lambda launch: iter([*by_index(launch)][::-1]))
    a, b = [rows_of(NATURAL[variant], rng, (3, 512))], [exact_operand(rng, (520, 512))]
    with EmulatorDevice("sm_90a", sm_count=1, hang_limit=100_000) as device:
        check(run(device, variant, a, b, out_dtype=np.float32, grid=2), a, b, [1], np.float32)


@pytest.mark.parametrize("variant", NVFP4)
def test_fp16_rows(emulator, variant, rng):
    a, b = [rng.integers(-8, 9, (3, 64)).astype(np.float16)], [exact_operand(rng, (16, 64))]
    check(run(emulator, variant, a, b), a, b, [1], np.float16)


@pytest.mark.parametrize("variant", NVFP4)
def test_nan_stays_in_its_row_and_column(emulator, variant, rng):
    assert_nan_stays(emulator, variant, "nvfp4", rng, m=5, n=24, k=64)
