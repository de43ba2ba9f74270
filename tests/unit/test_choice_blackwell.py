"""Which Blackwell variant runs a problem: a pure function, for any problem and device."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4rt import abi
from fp4rt.choice import choose
from fp4rt.device import NoKernelError
from fp4rt.model import SHAPE_SETS, TileShape
from fp4rt.problem import Problem

VARIANTS = {variant.name: variant for variant in abi.VARIANTS}


def named(name, **changes):
    sizes, n, k = SHAPE_SETS[name]
    return Problem(((n, k),) * len(sizes), sum(sizes), "nvfp4", "float16", **changes)


def short(choice):
    return choice.variant.removeprefix("grouped_gemm_sm_100f_")


@given(
    st.lists(
        st.tuples(st.integers(0, 9000), st.integers(0, 500).map(lambda k: 16 * k)), max_size=9
    ),
    st.integers(0, 5000),
    st.sampled_from(["float16", "bfloat16", "float32"]),
    st.integers(1, 200),
)
@settings(deadline=None, max_examples=60)
def test_every_problem_gets_a_launchable_variant(shapes, max_m, out_dtype, sm_count):
    problem = Problem(tuple(shapes), max_m, "nvfp4", out_dtype)
    choice = choose("sm_100f", sm_count, problem)
    shape = TileShape.of(VARIANTS[choice.variant])
    assert VARIANTS[choice.variant].arch == "sm_100f"
    assert 8 <= choice.max_tile_rows <= shape.max_rows and choice.max_tile_rows % 8 == 0
    assert choice.grid % shape.cluster == 0
    assert shape.cluster <= choice.grid <= sm_count
    assert choice == choose("sm_100f", sm_count, problem)


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("D1", "n32"),
        ("G2", "split2_n32"),
        ("P1", "pair_n256"),
        ("G1", "pair_n256"),
        ("S3", "pair_n128"),
    ],
)
def test_small_groups_take_low_tiles_and_large_ones_pairs(name, variant):
    assert short(choose("sm_100f", 148, named(name))) == variant


@pytest.mark.parametrize(
    ("groups", "rows", "n", "k", "variant"),
    [
        (1, 1, 64, 16384, "split4_n32"),  # one tile: four SMs share its K
        (32, 48, 128, 16384, "split2_n32"),
        (32, 384, 64, 16384, "m128x64"),  # fewer columns than 128 weight rows
        (8, 96, 8192, 16384, "m128x256"),
        (8, 1024, 128, 16384, "n64"),
        (2, 4096, 16384, 16384, "pair_n256"),
    ],
)
def test_each_kind_of_tile_has_its_problems(groups, rows, n, k, variant):
    problem = Problem(((n, k),) * groups, groups * rows, "nvfp4", "float16")
    assert short(choose("sm_100f", 148, problem)) == variant


def test_a_single_sm_cannot_hold_a_pair():
    assert not short(choose("sm_100f", 1, named("P1"))).startswith("pair")


def test_a_b300_takes_the_same_images():
    assert choose("sm_103a", 148, named("S1")) == choose("sm_100a", 148, named("S1"))


def test_16_bit_rows_have_no_blackwell_kernel():
    problem = Problem(((64, 64),), 8, "float16", "float16")
    with pytest.raises(NoKernelError, match=r"fp4rt\.quantize"):
        choose("sm_100f", 148, problem)


def test_batch_invariance_forbids_a_split_along_k():
    assert short(choose("sm_100f", 148, named("G2", batch_invariant=True))) == "n32"
