"""The Blackwell kernels' own PTX, executed: grouped GEMM bit for bit, and nothing else written."""

import math
import os

import numpy as np
import pytest
from blackwell_launch import OUTPUTS, VARIANTS, Problem, compiled, load, operand, random_problem

import fp4rt
from fp4rt.emulator import EmulatorDevice
from fp4rt.emulator.launch import Launch

pytestmark = pytest.mark.nvcc


@pytest.fixture(scope="module")
def emulator():
    """Two schedules of every launch, whose results must agree."""
    with EmulatorDevice("sm_100a", seeds=2) as device:
        yield device


@pytest.fixture(scope="module")
def thorough():
    """Eight schedules of every launch."""
    with EmulatorDevice("sm_100a", seeds=8) as device:
        yield device


# Sizes (m, n, k) of the groups in the test cases of the public competition task (gpu-mode,
# nvfp4_group_gemm, task.yml).
CASES = [
    ([96, 128], [128, 256], [128, 512]),
    ([256, 72], [512, 384], [256, 256]),
    ([128, 128], [128, 256], [128, 512]),
    ([80, 128, 256], [384, 256, 128], [256, 512, 128]),
    ([64, 72, 96], [128, 384, 512], [384, 512, 128]),
    ([64, 256, 128], [768, 128, 256], [512, 512, 128]),
    ([128, 128, 64], [256, 512, 512], [768, 128, 768]),
    ([128] * 4, [128] * 4, [128] * 4),
    ([40, 56, 384, 512], [512, 384, 256, 128], [256] * 4),
    ([512, 384, 256, 128], [256] * 4, [512, 128, 512, 128]),
]
# Every case with every variant and at full size, for a long run; otherwise one variant a case, and
# the largest cases at half of M and N.
ALL_VARIANTS = os.environ.get("FP4RT_ALL_VARIANTS") == "1"
ONE_EACH = [
    *("n32", "n64", "n128", "n256", "pair_n128"),
    *("m128x64", "m128x128", "split2_n32", "m128x256", "pair_n256"),
]
PAIRS = [
    (case, name)
    for case, chosen in enumerate(ONE_EACH)
    for name in (VARIANTS if ALL_VARIANTS else [chosen])
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "name"), PAIRS)
def test_task_cases(thorough, rng, name, case):
    sizes, n, k = CASES[case]
    if not ALL_VARIANTS and sum(map(math.prod, zip(sizes, n, strict=True))) > 120_000:
        sizes, n = [m // 2 for m in sizes], [columns // 2 for columns in n]
    inputs, weights = random_problem(rng, sizes, list(zip(n, k, strict=True)))
    Problem(load(thorough, name), weights, sum(sizes)).check(inputs, grid=2)


@pytest.mark.parametrize("name", VARIANTS)
def test_odd_shapes(emulator, rng, name):
    shapes = [(1, 16), (7, 48), (105, 80), (129, 272), (33, 1040), (264, 48)]
    inputs, weights = random_problem(rng, [7, 1, 33, 3, 129, 40], shapes)
    Problem(load(emulator, name), weights, 213).check(inputs, grid=1)


@pytest.mark.parametrize("grid", [1, 2, 3])
def test_small_grids_walk_all_tiles(emulator, rng, grid):
    inputs, weights = random_problem(rng, [70, 5, 40], [(300, 64)] * 3)
    Problem(load(emulator, "n64"), weights, 115).check(inputs, grid=grid, prepare_grid=grid)


@pytest.mark.parametrize("name", ["n32", "pair_n256", "split2_n32", "m128x64"])
def test_replay_with_other_sizes(emulator, rng, name):
    shapes = [(136, 64), (24, 96), (257, 16)]
    weights = [operand(rng, n, k) for n, k in shapes]
    problem = Problem(load(emulator, name), weights, 90)
    for sizes in ([0, 0, 0], [90, 0, 0], [0, 0, 1], [30, 30, 30], [0, 89, 1], [1, 0, 2]):
        inputs = [operand(rng, m, k) for m, (_, k) in zip(sizes, shapes, strict=True)]
        problem.check(inputs)


def test_three_hundred_groups_of_a_few_rows(emulator, rng):
    sizes = rng.integers(0, 4, 300).tolist()
    inputs, weights = random_problem(rng, sizes, [(8, 32)] * 300)
    Problem(load(emulator, "n32"), weights, sum(sizes)).check(inputs, grid=3)


@pytest.mark.parametrize("name", ["n128", "pair_n128", "m128x128"])
@pytest.mark.parametrize("n", [136, 135], ids=["vector", "scalar"])
@pytest.mark.parametrize("out_dtype", OUTPUTS, ids=str)
def test_alpha_and_output_types(emulator, rng, name, n, out_dtype):
    inputs, weights = random_problem(rng, [3, 50], [(n, 64)] * 2)
    problem = Problem(load(emulator, name), weights, 53, alpha=[-0.5, 2.0], out_dtype=out_dtype)
    problem.check(inputs, grid=1)


def test_fp16_overflows_to_infinity(emulator):
    def ones(rows):
        return constant_operand(rows, 64, code=7, scale=0x60)  # 6 * 32

    (result,) = Problem(load(emulator, "n32"), [ones(8)], 8).run([ones(8)], grid=1)
    assert np.isposinf(result).all()


def constant_operand(rows, k, code, scale):
    values = np.full((rows, k // 2), code * 0x11, np.uint8)
    return fp4rt.Nvfp4Array.from_parts(values, np.full((rows, k // 16), scale, np.uint8), 1.0)


@pytest.mark.parametrize("name", VARIANTS)
def test_nan_scale_reaches_its_row_or_column_only(emulator, rng, name):
    inputs, weights = random_problem(rng, [20, 9], [(70, 80)] * 2)
    a_scales, b_scales = inputs[0].scales.view(np.uint8).copy(), weights[1].scales.view(np.uint8)
    a_scales[13, 4] = 0x7F
    inputs[0] = fp4rt.Nvfp4Array.from_parts(inputs[0].values, a_scales, 1.0)
    b_scales = b_scales.copy()
    b_scales[69, 0] = 0x7F
    weights[1] = fp4rt.Nvfp4Array.from_parts(weights[1].values, b_scales, 1.0)
    first, second = Problem(load(emulator, name), weights, 29).run(inputs, grid=1)
    expected_first, expected_second = np.zeros((20, 70), bool), np.zeros((9, 70), bool)
    expected_first[13], expected_second[:, 69] = True, True
    np.testing.assert_array_equal(np.isnan(first), expected_first)
    np.testing.assert_array_equal(np.isnan(second), expected_second)


@pytest.mark.parametrize("name", ["n256", "pair_n256"])
def test_random_scales_within_one_ulp(thorough, rng, name):
    def any_scales(rows, k):
        values = rng.integers(0, 256, (rows, k // 2), dtype=np.uint8)
        scales = rng.integers(0, 0x50, (rows, k // 16), dtype=np.uint8)  # up to 8
        return fp4rt.Nvfp4Array.from_parts(values, scales, 1.0)

    inputs, weights = [any_scales(150, 320)], [any_scales(130, 320)]
    problem = Problem(load(thorough, name), weights, 150)
    (got,), (want,) = problem.run(inputs), problem.expected(inputs)
    assert np.isfinite(got).all() and np.abs(want).max() > 100
    ulp = np.spacing(np.abs(want).astype(np.float16)).astype(np.float64)
    magnitude = np.abs(fp4rt.dequantize(inputs[0])) @ np.abs(fp4rt.dequantize(weights[0])).T
    accumulated = 5 * 2.0**-23 * magnitude  # five truncations to fp32, seen where sums cancel
    assert (np.abs(got.astype(np.float64) - want) <= ulp + accumulated).all()


@pytest.mark.parametrize("name", [n for n, v in VARIANTS.items() if v.macros["SPLITS"] == 1])
def test_a_row_has_the_same_bits_in_every_batch_and_variant(emulator, rng, name):
    rng = np.random.default_rng(7)
    values = rng.integers(0, 256, (70, 96), dtype=np.uint8)
    scales = rng.integers(0, 0x60, (70, 12), dtype=np.uint8)
    rows = fp4rt.Nvfp4Array.from_parts(values, scales, 1.0)
    weights = [fp4rt.Nvfp4Array.from_parts(values[:40], scales[:40], 1.0)]
    loaded = load(emulator, name)
    (alone,) = Problem(load(emulator, "n32"), weights, 1, out_dtype=np.float32).run([rows[69:70]])
    (batch,) = Problem(loaded, weights, 70, out_dtype=np.float32).run([rows])
    np.testing.assert_array_equal(batch[69], alone[0])


@pytest.mark.parametrize("name", ["n32", "pair_n256", "split4_n32"])
def test_long_k_goes_round_the_ring(emulator, rng, name):
    inputs, weights = random_problem(rng, [17], [(140, 7168)])
    Problem(load(emulator, name), weights, 17, out_dtype=np.float32).check(inputs, grid=1)


@pytest.mark.parametrize(
    ("names", "sm_count"), [(("n64", "n64"), 2), (("n32", "pair_n128"), 5), (("pair_n256",) * 2, 2)]
)
def test_two_kernels_at_once(rng, names, sm_count):
    """Neither waits for what the other holds, on fewer SMs than both want and on enough."""
    for seed in range(2):
        with EmulatorDevice("sm_100a", sm_count=sm_count, seed=seed) as device:
            pairs = []
            for name in names:
                inputs, weights = random_problem(rng, [5, 70], [(300, 64), (130, 96)])
                problem = Problem(load(device, name), weights, 75)
                problem.fill(inputs)
                prepare = problem.config("prepare", 1)
                device.stream.launch(problem.loaded.prepare, prepare, problem.params)
                pairs.append((problem, inputs))
            device.synchronize()
            launches = [
                Launch(
                    device.machine,
                    problem.loaded.gemm.program,
                    problem.config("grouped_gemm", 2),
                    problem.params.tobytes(),
                )
                for problem, _ in pairs
            ]
            device.machine.execute(launches)
            for problem, inputs in pairs:
                problem.compare(inputs, problem.read(inputs))


@pytest.mark.parametrize("i", range(len(VARIANTS)), ids=list(VARIANTS))
def test_extreme_schedules(rng, i):
    """Asynchronous work at once, as late as possible, or anywhere between."""
    name, schedule = list(VARIANTS)[i], ("eager", "lazy", "random")[i % 3]
    with EmulatorDevice("sm_100a", schedule=schedule) as device:
        inputs, weights = random_problem(rng, [70, 0, 140], [(200, 336), (8, 16), (130, 80)])
        Problem(load(device, name), weights, 210).check(inputs, grid=1)


def test_images_have_what_the_kernel_needs_and_nothing_local():
    for name, variant in VARIANTS.items():
        image = compiled(name)
        facts, ptx = image.kernels["grouped_gemm"], image.ptx.read_text()
        units = max(variant.macros["TILE_N"] // 128, 1)
        assert ptx.count(".kind::mxf4nvf4.block_scale.block16") == 4 * units, name
        assert ptx.count("32x128b.warpx4") == 4 * (1 + units), name
        assert ptx.count("cp.async.bulk.tensor.2d") >= 1, name
        assert facts.local_bytes == facts.spill_bytes == 0, name
        assert facts.registers <= 128 and facts.dynamic_shared_bytes <= 232448, name
        assert tuple(facts.max_threads) == (192, 1, 1), name
        cluster = variant.macros["CTAS"] * variant.macros["SPLITS"]
        assert tuple(facts.cluster) == (cluster, 1, 1), name
