"""Launch the Blackwell kernel without a plan.

So grids can be small, padding can be poisoned, and outputs lie between canaries.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np

import build
import fp4rt
from fp4rt import abi, layout, reference
from fp4rt.device import LaunchConfig, TensorMap
from fp4rt.library import Library

SOURCE = Path(build.__file__).parent / "cuda_src" / "sm_100a" / "grouped_gemm.cu"
PREFIX = "grouped_gemm_sm_100f_"
VARIANTS = {v.name.removeprefix(PREFIX): v for v in abi.VARIANTS if v.arch == "sm_100f"}
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
OUTPUTS = {np.dtype(np.float16): 0, BFLOAT16: 1, np.dtype(np.float32): 2}
CANARY = 0xA5
GUARD = 64  # canary elements before and after D


@dataclass
class Loaded:
    """A variant on a device."""

    device: object
    variant: abi.Variant
    facts: abi.KernelFacts
    gemm: object

    @property
    def max_rows(self):
        return 128 if self.variant.macros["TOKENS_ON_M"] else self.variant.macros["TILE_N"]


def compiled(name, source=SOURCE):
    """Compile a variant, or another source with its macros; build.py may have done it before."""
    if source is SOURCE and (image := built(name)):
        return image
    folders = (SOURCE.parent,)
    macros = VARIANTS[name].macros
    return build.compile_source(source, "sm_100f", macros=macros, include_dirs=folders, strict=True)


@cache
def built(name):
    """The image that build.py made of a variant; None if there is none from these sources."""
    variant = VARIANTS[name]
    record = build.read_manifest(build.OUTPUT).get(variant.name)
    job = build.variant_jobs([variant], build.SOURCES)[variant.name]
    if record is None or not build.is_current(job, record, record["nvcc"], build.OUTPUT):
        return None
    cubin, ptx = (build.OUTPUT / f"{variant.name}.{kind}" for kind in ("cubin", "ptx"))
    return build.Image(cubin, ptx, Library(build.OUTPUT).find(variant.name).kernels)


def load(device, name, image=None, mutate=lambda ptx: ptx):
    """Load a variant's PTX, or another image of it, after `mutate` changed the text."""
    variant, image = VARIANTS[name], image or compiled(name)
    module = device.load(mutate(image.ptx.read_text()).encode())
    facts = image.kernels["grouped_gemm"]
    return Loaded(device, variant, facts, module.kernel("grouped_gemm"))


class Problem:
    """Buffers of one problem, laid out as a plan does but with poison wherever nothing belongs.

    0xFF (codes of -6, NaN scales) is in A's rows beyond the last group, between K and the row
    pitch, and in blocks of weights beyond N (codes also beyond K). D lies between canaries.
    """

    def __init__(self, loaded, weights, max_m, *, alpha=None, out_dtype=np.float16, max_rows=None):
        self.loaded, device = loaded, loaded.device
        self.weights, self.max_m = weights, max_m
        self.out_dtype = np.dtype(out_dtype)
        self.max_rows = max_rows or loaded.max_rows
        groups = np.zeros(len(weights), abi.GROUP.dtype)
        self.kept = []
        for g, w in enumerate(weights):
            values = device.upload(layout.blackwell_blocks(poisoned(w.values, 128)))
            scales = layout.blackwell_scales(poisoned(w.scales.view(np.uint8), 1)).data
            scales = device.upload(scales.copy())
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
        p["a_scales"] = self.a_scales.address
        p["d"] = self.d.address + GUARD * self.out_dtype.itemsize
        p["total_m"], p["num_groups"] = max_m, len(weights)
        p["output_type"] = OUTPUTS[self.out_dtype]
        p["max_tile_rows"], p["a_pitch"] = self.max_rows, self.pitch
        self.params = p

    def fill(self, inputs):
        """Upload the inputs, and poison everything else."""
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
        stream.fill(self.d, CANARY)

    def config(self, grid):
        """Launch shape with `grid` CTAs or clusters of them."""
        facts = self.loaded.facts
        return LaunchConfig(
            (grid * facts.cluster[0], 1, 1),
            tuple(facts.max_threads),
            shared_bytes=facts.dynamic_shared_bytes,
            cluster=tuple(facts.cluster),
            programmatic=True,
        )

    def launch(self, grid=2):
        """Queue the kernel."""
        self.loaded.device.stream.launch(self.loaded.gemm, self.config(grid), self.params)

    def read(self, inputs):
        """Return each group's D, after checking that nothing beside it was written."""
        d = self.d.to_numpy()
        results, at = [], GUARD
        for a, w in zip(inputs, self.weights, strict=True):
            shape = (a.shape[0], w.shape[0])
            results.append(d[at : at + shape[0] * shape[1]].reshape(shape))
            at += shape[0] * shape[1]
        for outside in (d[:GUARD], d[at:]):
            assert (outside.view(np.uint8) == CANARY).all(), "written outside D"
        return results

    def run(self, inputs, grid=2):
        """Launch on `inputs` and return each group's D."""
        self.fill(inputs)
        self.launch(grid)
        self.loaded.device.synchronize()
        return self.read(inputs)

    def expected(self, inputs):
        """The float64 result of each group."""
        return [
            reference.grouped_gemm(a, fp4rt.stack([w]), [a.shape[0]], float(alpha))
            for a, w, alpha in zip(inputs, self.weights, self.alpha, strict=True)
        ]

    def compare_closely(self, inputs, results):
        """Compare fp16 results of any scales with the oracle: within 1 ulp unless sums cancel.

        A result is the fp32 sum, times alpha, rounded to fp16: off by half an ulp and by what fp32
        lost. Where that is at most half an ulp, it is within 1 ulp. With T = sum(abs(a * b)), which
        no partial sum exceeds, and P the largest product of two scales, fp32 loses at most

        - 2^-23 T for each K of 64, whose sum is cut to 24 bits, and 5 * 2^-35 P, as its four blocks
          and the sum so far are cut to 35 bits behind the leading one's exponent (tcgen05.mma);
        - 2^-24 T for each part that is added to the first one (splits), and for the factor alpha.

        Only where a sum is less than some 2^-9 of T is that more than half an ulp.
        """
        splits = self.loaded.variant.macros["SPLITS"]
        for g, (got, want) in enumerate(zip(results, self.expected(inputs), strict=True)):
            a, b = inputs[g], self.weights[g]
            total = np.abs(fp4rt.dequantize(a, np.float64)) @ np.abs(
                fp4rt.dequantize(b, np.float64).T
            )
            largest = [
                np.maximum(x.scales.astype(np.float64).max(axis=1, initial=0), 2.0**-6)
                for x in (a, b)
            ]
            steps = -(-int(self.k[g]) // 64)
            lost = steps * (2.0**-23 * total + 5 * 2.0**-35 * np.outer(*largest))
            lost = abs(float(self.alpha[g])) * (lost + splits * 2.0**-24 * total)
            lost *= 1 + 2.0**-10  # T is that of sums which were cut
            ulp = np.spacing(np.maximum(np.abs(want.astype(np.float16)), np.abs(got)))
            ulp = ulp.astype(np.float64)
            off = np.abs(got.astype(np.float64) - want)
            assert np.isfinite(got).all() and (off <= ulp / 2 + lost).all(), f"group {g}"
            no_cancelling = lost <= ulp / 2
            assert (off[no_cancelling] <= ulp[no_cancelling]).all(), f"group {g}"
            assert no_cancelling.mean() > 0.9, f"group {g}: {no_cancelling.mean()}"

    def compare(self, inputs, results):
        """Compare with the oracle bit for bit."""
        for g, (got, want) in enumerate(zip(results, self.expected(inputs), strict=True)):
            np.testing.assert_array_equal(
                got.astype(np.float32), want.astype(self.out_dtype).astype(np.float32), f"group {g}"
            )

    def check(self, inputs, **launch):
        """Run and compare."""
        self.compare(inputs, self.run(inputs, **launch))


def poisoned(rows, width):
    """Rows of a weight matrix padded with 0xFF to whole blocks and a multiple of `width` bytes."""
    missing = [(0, -len(rows) % layout.BLACKWELL_ROWS), (0, -rows.shape[1] % width)]
    return np.pad(rows, missing, constant_values=0xFF)


def operand(rng, rows, k):
    """All 16 codes; scales of 1/2, 1 and 2: sums are exact in fp32 in any order."""
    values = rng.integers(0, 256, (rows, k // 2), dtype=np.uint8)
    scales = rng.choice(np.array([0x30, 0x38, 0x40], np.uint8), (rows, k // 16))
    return fp4rt.Nvfp4Array.from_parts(values, scales, 1.0)


def any_operand(rng, rows, k):
    """All 16 codes and all 127 finite scales."""
    values = rng.integers(0, 256, (rows, k // 2), dtype=np.uint8)
    scales = rng.integers(0, 0x7F, (rows, k // 16), dtype=np.uint8)
    return fp4rt.Nvfp4Array.from_parts(values, scales, 1.0)


def random_problem(rng, sizes, shapes, make=operand):
    """Inputs and weights of groups with `sizes` rows and `shapes` (N, K)."""
    return (
        [make(rng, m, k) for m, (_, k) in zip(sizes, shapes, strict=True)],
        [make(rng, n, k) for n, k in shapes],
    )
