"""The analytic model: its arithmetic, and that it schedules as the kernel does."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4rt import model

SPEED_OF_LIGHT = {"S1": 18.833, "S2": 10.667, "S3": 2.406, "S4": 1.525}
SIZES = st.lists(st.integers(0, 700), max_size=12)


def problem(name):
    sizes, n, k = model.SHAPE_SETS[name]
    return sizes, [(n, k)] * len(sizes)


@pytest.mark.parametrize("name", SPEED_OF_LIGHT)
def test_speed_of_light_is_the_published_one(name):
    assert round(model.speed_of_light(*problem(name)) * 1e6, 3) == SPEED_OF_LIGHT[name]


@pytest.mark.parametrize("n", range(8, 129, 8))
def test_matrix_instruction_follows_the_measured_points(n):
    measured = {64: 48, 80: 52, 96: 56, 112: 60, 128: 64}
    cycles = float(model.mma_cycles(np.array(n)))
    assert cycles == measured.get(n, cycles)
    assert cycles >= n / 2


@given(SIZES, st.sampled_from(model.variants()), st.integers(1, 600))
@settings(deadline=None)
def test_tiles_cover_every_element_once(sizes, shape, n):
    t = model.tiles(sizes, [(n, 64)] * len(sizes), shape, shape.max_rows)
    assert int((t.rows * t.columns).sum()) == sum(sizes) * n
    assert (t.rows >= 1).all() and (t.rows <= shape.max_rows).all()
    assert (t.columns >= 1).all() and (t.columns <= shape.columns).all()
    assert int((t.columns * t.first_of_weights).sum()) == n * sum(size > 0 for size in sizes)
    assert int((t.rows * t.first_of_rows).sum()) == sum(sizes)


@given(SIZES, st.sampled_from(model.variants()))
@settings(deadline=None)
def test_tiles_come_tallest_first(sizes, shape):
    t = model.tiles(sizes, [(256, 64)] * len(sizes), shape, shape.max_rows)
    heights = [model.tile_rows(size, shape.max_rows) for size in sizes if size]
    assert t.rows.max(initial=0) <= max(heights, default=0)
    full = t.rows[t.rows % 8 == 0]
    assert len(t.rows) == 0 or full.size == 0 or t.rows[0] > max(heights) - 8


@given(SIZES, st.sampled_from(model.variants()))
@settings(deadline=None)
def test_no_variant_beats_the_speed_of_light(sizes, shape):
    shapes = [(512, 1024)] * len(sizes)
    p = model.predict(sizes, shapes, shape)
    assert p.seconds > model.speed_of_light(sizes, shapes)
    assert 0 <= p.mma_share < 1


@given(st.integers(1, 64), st.integers(0, 2000))
def test_typical_sizes_add_up(groups, rows):
    sizes = model.typical_sizes(rows, groups)
    assert len(sizes) == groups and sum(sizes) == rows and max(sizes) - min(sizes) <= 1


def test_an_empty_group_costs_nothing():
    shape = model.variants()[0]
    some = model.predict([5, 9], [(512, 1024)] * 2, shape)
    more = model.predict([0, 5, 0, 9, 0], [(512, 1024)] * 5, shape)
    assert some == more


def test_no_work_costs_the_launches_only():
    p = model.predict([0, 0], [(512, 1024)] * 2, model.variants()[0])
    assert p.seconds == model.B200.launch
    assert (p.tiles, p.rounds, p.dram_bytes) == (0, 0, 0)
    p = model.predict([0, 0], [(512, 1024)] * 2, model.HOPPER["medium"], model.H200)
    assert p.seconds == model.H200.launch + model.H200.prepare


def test_a_short_ring_of_stages_waits_for_loads():
    machine = replace(model.B200, dram=float("inf"))

    def stage(stages):
        shape = model.TileShape("n32", False, 32, stages)
        short, long = (model.predict([8], [(8, k)], shape, machine).seconds for k in (2**16, 2**17))
        return (long - short) * machine.clock / 2**8

    assert stage(2) == pytest.approx(machine.load_cycles / 2)
    assert stage(9) == pytest.approx((128 * 144 + 32 * 128 + 8 * 16) / machine.ingest)


@pytest.mark.parametrize("name", model.SHAPE_SETS)
def test_the_choice_is_the_fastest_prediction(name):
    sizes, shapes = problem(name)
    chosen = model.best(sizes, shapes)
    assert all(
        chosen.seconds <= model.predict(sizes, shapes, shape).seconds + 1e-12
        for shape in model.variants()
    )


def test_decode_takes_the_deepest_ring_and_prefill_the_largest_tile():
    assert model.best(*problem("D1")).shape.tile_n == 32
    assert model.best(*problem("P1")).shape.tile_n == 256


def test_the_choice_needs_a_candidate():
    with pytest.raises(ValueError, match="at least one"):
        model.best([1], [(8, 16)], candidates=[])


def test_every_shape_set_has_its_groups():
    assert [len(model.SHAPE_SETS[s][0]) for s in ("S1", "S2", "S3", "S4")] == [8, 8, 2, 2]
    assert sum(model.SHAPE_SETS["D2"][0]) == 2 * sum(range(1, 17))


# The Hopper kernels on an H200, as they were when their steps were measured, not as they are now
# (cuda_src/sm_90a/NOTES.md): variant and most rows of a tile, µs of
# both kernels in graph replays, and by how many percent the model was off. Nothing is fitted to
# these times: steps, DRAM reads, expansion of A and launches were measured by themselves. What it
# leaves out makes it low: filling the first stages (2 to 4 µs), the power limit (P1, G1), and the
# latency and decoding of the skinny kernel, of which it knows the bytes only (D1, D2).
MEASURED = {
    "S1": ("medium", 256, 124.0, -4),
    "S2": ("medium", 256, 65.0, -9),
    "S3": ("medium", 128, 31.0, -9),
    "S4": ("medium", 128, 18.4, -23),
    "P1": ("large", 128, 733.0, -9),
    "G1": ("large", 128, 218.0, -11),
    "D1": ("skinny", 16, 138.0, -14),
    "D2": ("skinny", 16, 155.0, -22),
}


@pytest.mark.parametrize("name", MEASURED)
def test_what_holds_on_hopper_too_agrees_with_measured_kernels(name):
    variant, max_rows, measured, off = MEASURED[name]
    shape = model.HOPPER[variant]
    p = model.predict(*problem(name), shape, model.H200, max_rows=max_rows)
    assert 100 * (p.seconds * 1e6 / measured - 1) == pytest.approx(off, abs=1)
    assert p.seconds * 1e6 == pytest.approx(measured, rel=0.25)


def test_rounds_back_and_forth_even_out_tall_and_low_tiles():
    pair = model.TileShape("pair", False, 256, 4, ctas=2)
    two_pairs = replace(model.B200, sm_count=4, epilogue_cycles=0.0)

    def seconds(sizes, shape=pair):
        return model.predict(sizes, [(256, 4096)] * len(sizes), shape, two_pairs).seconds

    heights = (256, 192, 128, 64)
    fixed = two_pairs.table_cycles + two_pairs.load_cycles + two_pairs.mma_latency_cycles
    fixed = two_pairs.launch + fixed / two_pairs.clock
    work = [seconds([m]) - fixed for m in heights]
    back, forth = seconds(heights), seconds(heights, replace(pair, back_and_forth=False))
    assert back - fixed == pytest.approx(max(work[0] + work[3], work[1] + work[2]))
    assert forth - fixed == pytest.approx(work[0] + work[2])
    assert back < forth


@pytest.mark.parametrize("name", model.SHAPE_SETS)
def test_an_even_spread_is_the_least(name):
    for shape in (*model.variants(), model.REFERENCE_TILE):
        p = model.predict(*problem(name), shape)
        assert model.speed_of_light(*problem(name)) < p.balanced <= p.seconds * (1 + 1e-9)


# Tiles that were considered for variants, and schemes that divide the last round's work.
CONSIDERED = [
    model.TileShape("n96", False, 96, 7),
    model.TileShape("n192", False, 192, 5),
    model.TileShape("pair_n64", False, 64, 8, ctas=2),
    model.TileShape("pair_n192", False, 192, 5, ctas=2),
    model.TileShape("split2_n64", False, 64, 6, splits=2),
    model.TileShape("split4_n64", False, 64, 4, splits=4),
    model.TileShape("split2_n128", False, 128, 4, splits=2),
    model.TileShape("split8_n32", False, 32, 6, splits=8),
]


@pytest.mark.parametrize("name", model.SHAPE_SETS)
def test_no_variant_that_was_left_out_would_win(name):
    chosen = model.best(*problem(name)).seconds
    assert model.best(*problem(name), candidates=CONSIDERED).seconds > 0.995 * chosen


def test_only_one_set_would_gain_from_dividing_the_last_round():
    """At most a tenth on S3 and G1, if it cost nothing; on the others 1 %."""
    gains = {}
    for name in model.SHAPE_SETS:
        p = model.best(*problem(name))
        gains[name] = 1 - p.balanced / p.seconds
    assert {name for name, gain in gains.items() if gain > 0.015} == {"S3", "G1"}
    assert max(gains.values()) < 0.12


def test_report_has_every_set_and_variant():
    head, rule, *rows = model.report().splitlines()
    assert [row.split()[1] for row in rows] == list(model.SHAPE_SETS)
    width = 4 + len(model.variants())
    assert all(row.count("|") == width + 1 for row in (head, rule, *rows))
    assert "18.833" in rows[0] and "1.525" in rows[3]


def test_readme_has_the_predictions_of_the_model():
    readme = Path(model.__file__).parents[1] / "README.md"
    if not readme.exists():
        pytest.skip("an installed package has no README")
    section = readme.read_text().partition("## Blackwell: predicted")[2].partition("\n## ")[0]
    found = [[cell.strip(" `") for cell in line.split("|")] for line in section.splitlines()]
    cells = {row[1]: row[2:6] for row in found if len(row) == 7}
    for line in model.report().splitlines()[2:]:
        name, light, start, chosen = (cell.strip() for cell in line.split("|")[1:5])
        assert cells[name] == [light, start, *chosen.split(": ")]
