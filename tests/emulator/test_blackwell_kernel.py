"""The Blackwell kernels' own PTX, executed: grouped GEMM bit for bit, and nothing else written.

``--full`` runs everything with every variant, at full size and under eight schedules.
"""

import math
import struct
from pathlib import Path

import numpy as np
import pytest
from blackwell_launch import (
    OUTPUTS,
    SOURCE,
    VARIANTS,
    Problem,
    any_operand,
    compiled,
    load,
    operand,
    random_problem,
)
from helpers import FULL

import build
import fp4rt
from fp4rt.device import LaunchConfig
from fp4rt.emulator import EmulatorDevice
from fp4rt.emulator.launch import Launch

pytestmark = pytest.mark.nvcc
HOLDER = Path(__file__).parents[1] / "kernels" / "tmem_holder.cu"


def some(*names):
    """Variants for a test, or all in a long run."""
    return pytest.mark.parametrize("name", list(VARIANTS) if FULL else names)


@pytest.fixture(scope="module")
def emulator():
    """A few schedules of every launch, whose results must agree."""
    with EmulatorDevice("sm_100a", seeds=8 if FULL else 2) as device:
        yield device


@pytest.fixture(scope="module")
def thorough(schedules):
    """Some of eight schedules of every launch."""
    with EmulatorDevice("sm_100a", **schedules) as device:
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
ONE_EACH = [
    *("n32", "n64", "n128", "n256", "pair_n128"),
    *("m128x64", "m128x128", "split2_n32", "split4_n32", "pair_n256"),
]
PAIRS = [
    (case, name)
    for case, chosen in enumerate(ONE_EACH)
    for name in (VARIANTS if FULL else [chosen])
]


def task_case(case):
    """Sizes and shapes of a case; the largest at half of M and N, but for long runs."""
    sizes, n, k = CASES[case]
    if not FULL and sum(map(math.prod, zip(sizes, n, strict=True))) > 120_000:
        sizes, n = [m // 2 for m in sizes], [columns // 2 for columns in n]
    return sizes, list(zip(n, k, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("case", "name"), PAIRS)
def test_task_cases(thorough, rng, name, case):
    sizes, shapes = task_case(case)
    inputs, weights = random_problem(rng, sizes, shapes)
    Problem(load(thorough, name), weights, sum(sizes)).check(inputs, grid=2)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "name"), PAIRS if FULL else [(3, "pair_n256")])
def test_task_cases_with_any_scales(thorough, rng, name, case):
    sizes, shapes = task_case(case)
    inputs, weights = random_problem(rng, sizes, shapes, any_operand)
    alpha = [2.0**-12] * len(sizes)  # the largest sums are some 2^27
    problem = Problem(load(thorough, name), weights, sum(sizes), alpha=alpha)
    problem.compare_closely(inputs, problem.run(inputs, grid=2))


@pytest.mark.parametrize("name", VARIANTS)
def test_odd_shapes(emulator, rng, name):
    shapes = [(1, 16), (7, 48), (105, 80), (129, 272), (33, 1040), (264, 48)]
    inputs, weights = random_problem(rng, [7, 1, 33, 3, 129, 40], shapes)
    Problem(load(emulator, name), weights, 213).check(inputs, grid=1)


@pytest.mark.parametrize("grid", [1, 2, 3])
@some("n64")
def test_small_grids_walk_all_tiles(emulator, rng, name, grid):
    inputs, weights = random_problem(rng, [70, 0, 5, 40], [(300, 64)] * 4)
    Problem(load(emulator, name), weights, 115).check(inputs, grid=grid)


@some("n32", "pair_n256", "split2_n32", "m128x64")
def test_replay_with_other_sizes(emulator, rng, name):
    shapes = [(136, 64), (24, 96), (257, 16)]
    weights = [operand(rng, n, k) for n, k in shapes]
    problem = Problem(load(emulator, name), weights, 90)
    for sizes in ([0, 0, 0], [90, 0, 0], [0, 0, 1], [30, 30, 30], [0, 89, 1], [1, 0, 2]):
        inputs = [operand(rng, m, k) for m, (_, k) in zip(sizes, shapes, strict=True)]
        problem.check(inputs)


@some("n32")
def test_hundreds_of_groups_of_a_few_rows(emulator, rng, name):
    """The scheduler looks through 32 groups at a time, and through a part of that at the end."""
    count = 300 if FULL else 100
    sizes = np.where(rng.random(count) < 0.1, 0, rng.integers(1, 4, count)).tolist()
    inputs, weights = random_problem(rng, sizes, [(8, 32)] * count)
    Problem(load(emulator, name), weights, sum(sizes)).check(inputs, grid=3)


@some("n128", "pair_n128", "m128x128")
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


@some("n32", "pair_n256", "split4_n32")
def test_long_k_goes_round_the_ring(emulator, rng, name):
    inputs, weights = random_problem(rng, [17], [(140, 7168)])
    Problem(load(emulator, name), weights, 17, out_dtype=np.float32).check(inputs, grid=1)


def filled_launch(device, rng, name):
    """A problem with its inputs, and the launch of its kernel."""
    inputs, weights = random_problem(rng, [5, 70], [(300, 64), (130, 96)])
    problem = Problem(load(device, name), weights, 75)
    problem.fill(inputs)
    device.synchronize()
    program, params = problem.loaded.gemm.program, problem.params.tobytes()
    return problem, inputs, Launch(device.machine, program, problem.config(2), params)


@pytest.mark.parametrize(
    ("names", "sm_count"), [(("n64", "n64"), 2), (("n32", "pair_n128"), 5), (("pair_n256",) * 2, 2)]
)
def test_two_kernels_at_once(rng, names, sm_count):
    """Neither waits for what the other holds, on fewer SMs than both want and on enough."""
    for seed in range(2):
        with EmulatorDevice("sm_100a", sm_count=sm_count, seed=seed) as device:
            work = [filled_launch(device, rng, name) for name in names]
            device.machine.execute([launch for _, _, launch in work])
            for problem, inputs, _ in work:
                problem.compare(inputs, problem.read(inputs))


@pytest.mark.parametrize("first", ["stranger", "gemm"])
@some("n64", "pair_n128")
def test_beside_a_stranger_that_holds_tensor_memory(rng, name, first):
    """Its CTAs share our SMs; whoever comes second waits for the columns and gets them."""
    image = build.compile_source(HOLDER, "sm_100f", include_dirs=(SOURCE.parents[1],))
    for seed in range(8 if FULL else 2):
        with EmulatorDevice("sm_100a", sm_count=4, seed=seed) as device:
            problem, inputs, launch = filled_launch(device, rng, name)
            kernel = device.load(image.ptx.read_bytes()).kernel("hold")
            out = device.alloc(8 * 32, np.uint32)
            params = struct.pack("<IiQ", 256, 500, out.address)
            config = LaunchConfig((8, 1, 1), (32, 1, 1))
            stranger = Launch(device.machine, kernel.program, config, params)
            both = [stranger, launch] if first == "stranger" else [launch, stranger]
            device.machine.execute(both)
            problem.compare(inputs, problem.read(inputs))


def test_chains_of_two_plans_on_one_stream(emulator, rng):
    """Each launch starts before the one in front has ended."""
    problems = []
    for name in ("n32", "pair_n256"):
        inputs, weights = random_problem(rng, [40, 3], [(136, 80), (24, 272)])
        problem = Problem(load(emulator, name), weights, 43)
        problem.fill(inputs)
        problems.append((problem, inputs))
    for problem, _ in problems * 2:
        problem.launch()
    emulator.synchronize()
    for problem, inputs in problems:
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
        macros = variant.macros
        units = max(macros["TILE_N"] // 128, 1)
        assert ptx.count(".kind::mxf4nvf4.block_scale.block16") == 4 * units, name
        assert ptx.count("32x128b.warpx4") == 4 * (1 + units), name
        assert ptx.count("cp.async.bulk.tensor.2d") >= 1, name
        assert facts.local_bytes == facts.spill_bytes == 0, name
        assert facts.registers <= (144 if macros["TILE_N"] == 256 else 128), name
        # One CTA on an SM of 228 KiB, which has Tensor Memory for one; the ring fills most of it.
        assert 114 * 1024 < facts.dynamic_shared_bytes <= 227 * 1024, name
        n_rows = macros["TILE_N"] // macros["CTAS"]
        stage = 128 * 144 + n_rows * 128 + units * 2048  # values and scales of 256 K
        parts = (macros["SPLITS"] - 1) * macros["TILE_N"] * 512
        rest = facts.dynamic_shared_bytes - macros["STAGES"] * stage - parts
        assert 0 <= rest <= 8192 + 1024, name  # rows of D to be stored, and barriers
        scale_warps = min((macros["STAGES"] + 1) // 2, 4)
        assert tuple(facts.max_threads) == (32 * (6 + scale_warps), 1, 1), name
        cluster = macros["CTAS"] * macros["SPLITS"]
        assert tuple(facts.cluster) == (cluster, 1, 1), name
