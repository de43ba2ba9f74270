"""Every rule the Blackwell kernels keep, broken once: the emulator must notice."""

import re

import numpy as np
import pytest
from blackwell_launch import SOURCE, Problem, compiled, load, random_problem

from fp4rt.device import EmulatorFault
from fp4rt.emulator import EmulatorDevice

pytestmark = [pytest.mark.nvcc, pytest.mark.slow]


@pytest.fixture(scope="module")
def emulator():
    with EmulatorDevice("sm_100a", seeds=2) as device:
        yield device


def work(device, name, aligned=False, **loading):
    """One CTA, or pair, walks several tiles of uneven groups; all of their K has padding."""
    rng = np.random.default_rng(3)
    shapes = [(130, 592), (64, 16), (260, 144), (70, 1040), (140, 48)]
    if aligned:  # rows of D are stored in 16-byte pieces
        shapes = [(n // 8 * 8, k) for n, k in shapes]
    inputs, weights = random_problem(rng, [70, 0, 32, 150, 9], shapes)
    Problem(load(device, name, **loading), weights, 261).check(inputs, grid=1)


def drop(pattern, kernel="grouped_gemm"):
    """Remove the instructions that match from one kernel's PTX."""

    def mutate(ptx):
        start = ptx.index(f".entry {kernel}(")
        end = ptx.find(".entry", start + 1)
        end = len(ptx) if end < 0 else end
        body, count = re.subn(rf"(?m)^\s*{pattern}[^;]*;", "", ptx[start:end])
        assert count, f"no {pattern}"
        return ptx[:start] + body + ptx[end:]

    return mutate


def replace(old, new):
    def mutate(ptx):
        assert re.search(old, ptx), f"no {old}"
        return re.sub(old, new, ptx)

    return mutate


PTX_MUTANTS = {
    "no wait for a load of Tensor Memory": drop(r"tcgen05\.wait::ld"),
    "no fence before a hand-over": drop(r"tcgen05\.fence::before_thread_sync"),
    "no fence after a hand-over": drop(r"tcgen05\.fence::after_thread_sync"),
    "too few columns allocated": replace(r"mov\.b32 (%r\d+), 512;", r"mov.b32 \1, 256;"),
    "Tensor Memory not freed": drop(r"tcgen05\.dealloc"),
    "barriers not fenced": drop(r"fence\.mbarrier_init"),
    "scales not shown to the async proxy": drop(r"fence\.proxy\.async"),
    "no commit": drop(r"tcgen05\.commit"),
}


@pytest.mark.parametrize("mutant", PTX_MUTANTS)
def test_instruction_is_missed(emulator, mutant):
    with pytest.raises((EmulatorFault, AssertionError)):
        work(emulator, "n128", mutate=PTX_MUTANTS[mutant])


SOURCE_MUTANTS = {
    "accumulator overwritten early": (
        "n128",
        "wait_pair(&s.acc_empty[acc.slot()], acc.phase() ^ 1);",
        "",
    ),
    "accumulator read early": ("n128", "wait_pair(&s.acc_full[acc.slot()], acc.phase());", ""),
    "stage overwritten early": (
        "n128",
        "wait_pair(&s.empty[ring.slot()], ring.phase() ^ 1);\n      if (leader)",
        "if (leader)",
    ),
    "stage read early": ("n128", "wait_pair(&s.full[ring.slot()], ring.phase());", ""),
    "too many bytes announced": (
        "n128",
        "arrive_expect_tx(full, bytes)",
        "arrive_expect_tx(full, bytes + 16)",
    ),
    "old accumulator added": ("n128", "!(first && atom == 0)", "true"),
    "scales of the first 64 K for all": ("n128", "scales + atom * 4,\n", "scales,\n"),
    "scales of the second unit for both": (
        "n256",
        "scales + 16 + (u * 4 + atom) * 4 + half",
        "scales + 16 + (4 + atom) * 4",
    ),
    "half block of weights ignored": ("m128x64", "* 4 + half", "* 4"),
    "type code of another kind": (
        "n128",
        "kCtas>(tile_n.of_unit(u))",
        "kCtas>(tile_n.of_unit(u)) + 512",
    ),
    "columns beyond N stored": ("n128", "m < (kTokensOnM ? tile.rows : columns)", "true"),
    "rows beyond the group stored": (
        "n128",
        "(kTokensOnM ? columns : tile.rows) : 0",
        "(kTokensOnM ? columns : kTileN) : 0",
    ),
    "a row taken for an aligned one": ("n128", "block) | (n * element)) % 16", "block)) % 16"),
    "every tile taken twice in odd rounds": (
        "n64",
        "tile_of_round(round), tile); ++round",
        "tile_of_round(round & ~1), tile); ++round",
    ),
    "a stage without its scales": (
        "n128",
        "pair_rank() == 0 ? 3 : 2);",
        "pair_rank() == 0 ? 2 : 1);",
    ),
    "scales of the first rows for all": ("n128", "step = 32 * pitch", "step = 0 * pitch"),
    "scales of the first block for both": ("n256", "rows[j], 1);", "rows[j], 0);"),
    "scales of another group's rows": (
        "n64",
        "first_row * pitch, pitch",
        "tile.first_row * pitch, pitch",
    ),
    "scales stored early": (
        "n128",
        "wait_pair(&s.empty[ring.slot()], ring.phase() ^ 1);\n          store",
        "store",
    ),
    "results at another group's place": (
        "n64",
        "(elements + tile.first_row * n",
        "(tile.first_row * n",
    ),
    "pair's stages not passed on": ("pair_n128", "i < found; ++i, ring", "i < 0; ring"),
    "pair's stages passed on without order": ("pair_n128", "ptx::fence_acq_rel_cluster();", ""),
    "pair starts before its barriers": (
        "pair_n128",
        "sync_cluster();\n  ptx::tcgen05_fence_after",
        "__syncthreads();\n  ptx::tcgen05_fence_after",
    ),
    "parts added before they are there": (
        "split2_n32",
        "ptx::mbarrier_wait_cluster(&s.parts_full, phase);",
        "",
    ),
    "parts overwritten before they are read": (
        "split2_n32",
        "ptx::mbarrier_wait_cluster(&s.parts_empty, phase ^ 1);",
        "",
    ),
    "a split's second part left out": ("split2_n32", "__uint_as_float(acc[j]) + s.", "0 * s."),
    "scales beyond K not zero": ("n128", "if (column + j < valid) word", "word"),
    "scales beyond the tile not zero": ("n128", "count = rows - lane", "count = 128"),
}


ALIGNED_MUTANTS = {
    "pieces of columns beyond N stored": ("n128", "piece < columns ?", "true ?"),
    "rows beyond the group stored in pieces": ("n128", "? tile.rows - lane / 4", "? tile.rows"),
    "pieces transposed the wrong way": (
        "n128",
        "pairs[2 * b], pairs[2 * b + 1],",
        "pairs[2 * b + 1], pairs[2 * b],",
    ),
}


@pytest.mark.parametrize("mutant", [*SOURCE_MUTANTS, *ALIGNED_MUTANTS])
def test_changed_source_is_caught(emulator, tmp_path, mutant):
    name, old, new = (SOURCE_MUTANTS | ALIGNED_MUTANTS)[mutant]
    changed = 0
    for path in (SOURCE, SOURCE.with_name("scales.cuh")):
        text = path.read_text()
        mutated = text.replace(old, new, 1)
        changed += mutated != text
        (tmp_path / path.name).write_text(mutated)
    assert changed
    image = compiled(name, tmp_path / SOURCE.name)
    with pytest.raises((EmulatorFault, AssertionError)):
        work(emulator, name, mutant in ALIGNED_MUTANTS, image=image)


@pytest.mark.parametrize("name", ["n128", "n256", "m128x64", "pair_n128", "split2_n32"])
@pytest.mark.parametrize("aligned", [False, True])
def test_the_unchanged_kernel_passes(name, aligned):
    with EmulatorDevice("sm_100a") as device:
        work(device, name, aligned)


@pytest.mark.parametrize("waits", [True, False])
def test_a_launch_waits_for_the_one_in_front(emulator, waits):
    """Both write to one D. The second is ready long before the first has ended."""
    rng = np.random.default_rng(4)
    mutate = (lambda ptx: ptx) if waits else drop(r"griddepcontrol\.wait")
    loaded = load(emulator, "n32", mutate=mutate)
    problems = []
    for k in (2048, 16):
        inputs, weights = random_problem(rng, [40], [(64, k)])
        problems.append((Problem(loaded, weights, 40), inputs))
    (first, rows), (last, last_rows) = problems
    first.params["d"] = last.params["d"]
    first.fill(rows)
    last.fill(last_rows)
    first.launch(1)
    last.launch(1)
    if waits:
        emulator.synchronize()
        last.compare(last_rows, last.read(last_rows))
    else:
        with pytest.raises((EmulatorFault, AssertionError)):
            emulator.synchronize()
            last.compare(last_rows, last.read(last_rows))
