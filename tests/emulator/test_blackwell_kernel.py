"""The Blackwell kernels' own PTX, executed: grouped GEMM bit for bit, and nothing else written.

The launches are put together here and not by a plan, so that grids can be small, padding can be
filled with NaN, and outputs can lie between canaries.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import build
import fp4rt
from fp4rt import abi, layout, reference
from fp4rt.device import LaunchConfig, TensorMap
from fp4rt.emulator import EmulatorDevice

pytestmark = pytest.mark.nvcc

SOURCE = Path(build.__file__).parent / "cuda_src" / "sm_100a" / "grouped_gemm.cu"
VARIANTS = {
    v.name.removeprefix("grouped_gemm_sm_100f_"): v for v in abi.VARIANTS if v.arch == "sm_100f"
}
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
OUTPUTS = {np.dtype(np.float16): 0, BFLOAT16: 1, np.dtype(np.float32): 2}
CANARY = 0xA5
GUARD = 64  # canary elements before and after D


@dataclass
class Loaded:
    """A variant on a device."""

    device: object
    variant: abi.Variant
    facts: dict
    prepare: object
    gemm: object

    @property
    def max_rows(self):
        return 128 if self.variant.macros["TOKENS_ON_M"] else self.variant.macros["TILE_N"]


def load(device, name):
    variant = VARIANTS[name]
    image = build.compile_source(SOURCE, "sm_100f", macros=variant.macros, strict=True)
    module = device.load(image.ptx.read_bytes())
    return Loaded(
        device, variant, image.kernels, module.kernel("prepare"), module.kernel("grouped_gemm")
    )


class Problem:
    """Buffers of one problem, laid out as a plan does but with poison wherever nothing belongs.

    A's rows beyond the last group, the bytes between K and the row pitch, and unused workspace hold
    0xFF (codes of -6, NaN scales); D lies between canaries.
    """

    def __init__(self, loaded, weights, max_m, *, alpha=None, out_dtype=np.float16, max_rows=None):
        self.loaded, device = loaded, loaded.device
        self.weights, self.max_m = weights, max_m
        self.out_dtype = np.dtype(out_dtype)
        self.max_rows = max_rows or loaded.max_rows
        groups = np.zeros(len(weights), abi.GROUP.dtype)
        self.kept = []
        for g, w in enumerate(weights):
            values = device.upload(layout.blackwell_blocks(w.values.reshape(w.shape[0], -1)))
            scales = device.upload(layout.blackwell_scales(w.scales.view(np.uint8)).data.copy())
            self.kept += [values, scales]
            groups[g] = (values.address, scales.address, w.shape[0], 2 * w.values.shape[-1])
        self.k = groups["k"]
        self.pitch = max(-(-int(self.k.max(initial=16)) // 32) * 32, 32)
        self.alpha = np.ones(len(weights), np.float32) if alpha is None else np.float32(alpha)
        self.groups = device.upload(groups)
        self.sizes = device.upload(np.zeros(len(weights), np.int32))
        self.alphas = device.upload(self.alpha)
        self.rows = max_m + 40
        self.a_values = device.alloc((self.rows, self.pitch // 2), np.uint8)
        self.a_scales = device.alloc((self.rows, self.pitch // 16), np.uint8)
        prepared = layout.blackwell_prepared_bytes(
            max_m, len(weights), int(self.k.max(initial=16)), self.max_rows
        )
        self.prepared = device.alloc(max(prepared, 16), np.uint8)
        self.starts = device.alloc(len(weights), abi.GROUP_START.dtype)
        self.schedule = device.alloc(1, np.uint32)
        n_max = max((w.shape[0] for w in weights), default=0)
        self.d = device.alloc(max_m * n_max + 2 * GUARD, self.out_dtype)
        tensor_map = TensorMap(
            self.a_values.address,
            "uint8",
            (self.pitch // 2, self.rows),
            (self.pitch // 2,),
            (128, 32),
            swizzle="128B",
            l2_promotion="256B",
        )
        p = np.zeros((), abi.PARAMS.dtype)
        p["tensor_map_a"] = np.frombuffer(device.encode_tensor_map(tensor_map), np.uint8)
        p["groups"], p["group_sizes"] = self.groups.address, self.sizes.address
        p["alpha"], p["a_values"] = self.alphas.address, self.a_values.address
        p["a_scales"], p["a_prepared"] = self.a_scales.address, self.prepared.address
        p["group_starts"], p["schedule"] = self.starts.address, self.schedule.address
        p["d"] = self.d.address + GUARD * self.out_dtype.itemsize
        p["total_m"], p["num_groups"] = max_m, len(weights)
        p["output_type"] = OUTPUTS[self.out_dtype]
        p["max_tile_rows"], p["a_pitch"] = self.max_rows, self.pitch
        self.params = p

    def run(self, inputs, grid=2, prepare_grid=1):
        """Fill everything that is not an input with poison, launch, check the canaries.

        Returns the list of each group's D.
        """
        stream = self.loaded.device.stream
        values = np.full(self.a_values.shape, 0xFF, np.uint8)
        scales = np.full(self.a_scales.shape, 0xFF, np.uint8)
        row = 0
        for a in inputs:
            m = a.shape[0]
            values[row : row + m, : a.values.shape[-1]] = a.values
            scales[row : row + m, : a.scales.shape[-1]] = a.scales.view(np.uint8)
            row += m
        assert row <= self.max_m
        stream.upload(self.a_values, values)
        stream.upload(self.a_scales, scales)
        stream.upload(self.sizes, np.array([a.shape[0] for a in inputs], np.int32))
        stream.fill(self.prepared, 0xFF)
        stream.fill(self.starts, 0xFF)
        stream.fill(self.d, CANARY)
        facts = self.loaded.facts
        for name, kernel, ctas in (
            ("prepare", self.loaded.prepare, prepare_grid),
            ("grouped_gemm", self.loaded.gemm, grid * self.loaded.variant.macros["CTAS"]),
        ):
            config = LaunchConfig(
                (ctas, 1, 1),
                tuple(facts[name].max_threads),
                shared_bytes=facts[name].dynamic_shared_bytes,
                cluster=tuple(facts[name].cluster),
                programmatic=name == "grouped_gemm",
            )
            stream.launch(kernel, config, self.params)
        stream.synchronize()
        d = self.d.to_numpy()
        results, at = [], GUARD
        for a, w in zip(inputs, self.weights, strict=True):
            shape = (a.shape[0], w.shape[0])
            results.append(d[at : at + shape[0] * shape[1]].reshape(shape))
            at += shape[0] * shape[1]
        for outside in (d[:GUARD], d[at:]):
            assert (outside.view(np.uint8) == CANARY).all(), "written outside D"
        return results

    def expected(self, inputs):
        """The float64 result of each group."""
        return [
            reference.grouped_gemm(a, fp4rt.stack([w]), [a.shape[0]], float(alpha))
            for a, w, alpha in zip(inputs, self.weights, self.alpha, strict=True)
        ]

    def check(self, inputs, **launch):
        """Run, and compare with the oracle bit for bit."""
        results = self.run(inputs, **launch)
        for g, (got, want) in enumerate(zip(results, self.expected(inputs), strict=True)):
            np.testing.assert_array_equal(
                got.astype(np.float32), want.astype(self.out_dtype).astype(np.float32), f"group {g}"
            )
        return results


def operand(rng, rows, k):
    """All 16 codes; scales of 1/2, 1 and 2: sums are exact in fp32 in any order."""
    values = rng.integers(0, 256, (rows, k // 2), dtype=np.uint8)
    scales = rng.choice(np.array([0x30, 0x38, 0x40], np.uint8), (rows, k // 16))
    return fp4rt.Nvfp4Array.from_parts(values, scales, 1.0)


def random_problem(rng, sizes, shapes):
    return (
        [operand(rng, m, k) for m, (_, k) in zip(sizes, shapes, strict=True)],
        [operand(rng, n, k) for n, k in shapes],
    )


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
ALL_VARIANTS = os.environ.get("FP4RT_ALL_VARIANTS") == "1"  # every case with every variant
PAIRS = [
    (case, name)
    for case in range(len(CASES))
    for i, name in enumerate(VARIANTS)
    if ALL_VARIANTS or i == case % len(VARIANTS)
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "name"), PAIRS)
def test_task_cases(thorough, rng, name, case):
    sizes, n, k = CASES[case]
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


@pytest.mark.parametrize("name", ["n32", "pair_n256", "m128x64"])
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
    assert (np.abs(got.astype(np.float64) - want) <= ulp).all()


@pytest.mark.parametrize("name", VARIANTS)
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


def test_images_have_what_the_kernel_needs_and_nothing_local():
    for name, variant in VARIANTS.items():
        image = build.compile_source(SOURCE, "sm_100f", macros=variant.macros, strict=True)
        facts, ptx = image.kernels["grouped_gemm"], image.ptx.read_text()
        units = max(variant.macros["TILE_N"] // 128, 1)
        assert ptx.count(".kind::mxf4nvf4.block_scale.block16") == 4 * units, name
        assert ptx.count("32x128b.warpx4") == 4 * (1 + units), name
        assert ptx.count("cp.async.bulk.tensor.2d") >= 1, name
        assert facts.local_bytes == facts.spill_bytes == 0, name
        assert facts.registers <= 128 and facts.dynamic_shared_bytes <= 232448, name
        assert tuple(facts.max_threads) == (192, 1, 1), name
        assert tuple(facts.cluster) == (variant.macros["CTAS"], 1, 1), name
