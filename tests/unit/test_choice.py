"""Which variant runs what: the rule is pure, so the whole table fits here."""

import pytest

from fp4rt import abi
from fp4rt.choice import choose
from fp4rt.device import NoKernelError
from fp4rt.problem import Problem

NAMES = {v.name: v for v in abi.VARIANTS}
SMS = 132


def problem(groups, n, k, m, activations="nvfp4", **kwargs):
    return Problem(((n, k),) * groups, m, activations, "float16", **kwargs)


HOPPER = [
    # groups, N, K, rows, variant
    (8, 4096, 7168, 1024, "medium"),
    (8, 7168, 2048, 1024, "medium"),
    (2, 3072, 4096, 512, "medium"),
    (2, 4096, 1536, 512, "medium"),
    (8, 4096, 7168, 8192, "medium"),
    (1, 4096, 4096, 4096, "medium"),
    (32, 4096, 7168, 1536, "large"),
    (32, 4096, 7168, 32, "skinny"),
    (32, 4096, 7168, 272, "skinny"),
    (1, 8192, 8192, 16, "skinny_split"),
    (1, 1, 16, 1, "skinny_split"),
    (0, 0, 0, 0, "skinny_split"),
]


@pytest.mark.parametrize(("groups", "n", "k", "m", "variant"), HOPPER)
def test_hopper_regimes(groups, n, k, m, variant):
    choice = choose("sm_90a", SMS, problem(groups, n, k, m))
    assert choice.variant == f"grouped_gemm_sm_90a_{variant}"


@pytest.mark.parametrize(("groups", "n", "k", "m", "variant"), HOPPER)
@pytest.mark.parametrize("activations", ["nvfp4", "float16", "bfloat16"])
@pytest.mark.parametrize("sms", [1, 4, 114, 132])
def test_every_hopper_choice_can_be_launched(groups, n, k, m, variant, activations, sms):
    choice = choose("sm_90a", sms, problem(groups, n, k, m, activations))
    macros = NAMES[choice.variant].macros
    assert macros["BFLOAT16"] == (activations == "bfloat16")
    assert 8 <= choice.max_tile_rows <= macros.get("MAX_ROWS", 16)
    assert choice.max_tile_rows % 8 == 0
    assert choice.grid >= 1
    assert choice.grid % macros.get("SPLITS", 1) == 0
    assert 1 <= choice.prepare_grid <= 3 * sms


@pytest.mark.parametrize(
    ("groups", "n", "k", "m", "rows"),
    [
        (8, 4096, 7168, 1024, 256),  # several rounds: as tall as the groups
        (2, 3072, 4096, 512, 128),  # 96 tiles: one round
        (1, 4096, 4096, 300, 80),  # 128 tiles: one round
        (1, 128, 4096, 200, 8),  # one block of columns: as many tiles as there can be
    ],
)
def test_medium_tiles_fill_the_sms(groups, n, k, m, rows):
    assert choose("sm_90a", SMS, problem(groups, n, k, m)).max_tile_rows == rows


@pytest.mark.parametrize("m", [1, 16, 300, 100_000])
def test_batch_invariant_plans_never_split_k(m):
    choice = choose("sm_90a", SMS, problem(4, 512, 512, m, batch_invariant=True))
    assert "SPLITS" not in NAMES[choice.variant].macros


def test_no_16_bit_rows_on_blackwell():
    with pytest.raises(NoKernelError, match="quantize"):
        choose("sm_100f", 148, problem(4, 512, 512, 8, "bfloat16"))


def test_unknown_architecture():
    with pytest.raises(NoKernelError, match="sm_80"):
        choose("sm_80", 108, problem(4, 512, 512, 8))
