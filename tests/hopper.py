"""Runs one Hopper variant by name, with poison wherever nothing belongs."""

import numpy as np
from helpers import exact_operand

import fp4rt
from fp4rt import abi
from fp4rt.arguments import as_inputs, as_weights
from fp4rt.choice import Choice
from fp4rt.kernels import KernelPlan
from fp4rt.problem import Problem

VARIANTS = {
    v.name.removeprefix("grouped_gemm_sm_90a_"): v
    for v in abi.VARIANTS
    if v.arch == "sm_90a" and "grouped_gemm" in v.kernels
}
NVFP4 = [name for name in VARIANTS if not name.endswith("_bf16")]
KINDS = [
    (variant, kind)
    for variant in VARIANTS
    for kind in (["bfloat16"] if variant.endswith("_bf16") else ["nvfp4", "float16"])
]
"""Every variant with every kind of rows that it takes."""
POISONED = ("a_values", "a_scales", "a_prepared", "group_starts", "schedule", "partial_sums")
SPARE_ROWS = 3
CANARY = 4096
"""Bytes."""


def max_rows(name):
    """The tallest tile of a variant."""
    return VARIANTS[name].macros.get("MAX_ROWS", 16)


def rows_of(kind, rng, shape, *, exact=True):
    """Operand A of a kind; if `exact`, small integers or what sums exactly like them."""
    if kind == "nvfp4":
        if exact:
            return exact_operand(rng, shape)
        return fp4rt.quantize(rng.standard_normal(shape).astype(np.float32))
    drawn = rng.integers(-8, 9, shape) if exact else rng.standard_normal(shape)
    return drawn.astype(kind)


class Bound:
    """One variant bound to one problem, with poison wherever nothing belongs.

    A's rows beyond the last group, its bytes between K and the pitch, and all workspace hold 0xFF
    (codes of -6, NaN scales, NaN values); so do D, the rows behind it, and `CANARY` bytes before
    and after.
    """

    def __init__(
        self,
        device,
        name,
        a,
        b,
        sizes=None,
        *,
        alpha=None,
        out_dtype=np.float16,
        max_tile_rows=None,
        grid=2,
    ):
        weights = as_weights(b)
        inputs = as_inputs(a, sizes, weights)
        problem = Problem(
            shapes=tuple((w.shape[0], 2 * w.values.shape[-1]) for w in weights.groups),
            max_m=int(inputs.sizes.sum()) + SPARE_ROWS,
            activations=inputs.activations,
            out_dtype=np.dtype(out_dtype).name,
        )
        choice = Choice(VARIANTS[name].name, max_tile_rows or max_rows(name), grid, 1)
        self.plan = plan = KernelPlan(device, weights, problem, choice, own_result=False)
        nbytes = max(plan.result_size, 1) * plan.out_dtype.itemsize
        self.memory = device.alloc(nbytes + 2 * CANARY)
        self.d = self.memory.sub(CANARY, max(plan.result_size, 1), plan.out_dtype)
        plan.bind_result(self.d)
        self.shapes = [
            (int(m), w.shape[0]) for m, w in zip(inputs.sizes, weights.groups, strict=True)
        ]
        stream = device.stream
        for buffer in POISONED:
            flags = buffer == "schedule" and "partial_sums" in plan._buffers  # which must be zero
            if buffer in plan._buffers and not flags:
                stream.fill(plan._buffers[buffer], 0xFF)
        self.poison(stream)
        scales = np.ones(len(self.shapes)) if alpha is None else alpha
        scales = scales * weights.global_scales * inputs.global_scales(len(self.shapes))
        plan.set_inputs(inputs, scales, stream)

    def poison(self, stream):
        """Fill D and what is beside it with NaN."""
        stream.fill(self.memory, 0xFF)

    def launch(self, stream):
        """Queue the kernels."""
        self.plan.launch(stream)

    def results(self):
        """Return each group's D, after a look at what must not have changed."""
        memory = self.memory.to_numpy()
        sizes = [rows * columns for rows, columns in self.shapes]
        end = CANARY + sum(sizes) * self.plan.out_dtype.itemsize
        assert (memory[:CANARY] == 0xFF).all(), "bytes before D changed"
        assert (memory[end:] == 0xFF).all(), "bytes behind D changed"
        parts = np.split(memory[CANARY:end].view(self.plan.out_dtype), np.cumsum(sizes)[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def close(self):
        self.plan.close()
        self.memory.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


def run(device, name, *operands, **options):
    """Return each group's D of one launch of `Bound`."""
    with Bound(device, name, *operands, **options) as bound:
        bound.launch(device.stream)
        return bound.results()


def with_nan_scale(operand, row, block, byte):
    """An operand that has a NaN in one scale."""
    scales = operand.scales.view(np.uint8).copy()
    scales[row, block] = byte
    return fp4rt.Nvfp4Array.from_parts(operand.values, scales, 1.0)


def assert_nan_stays(device, name, kind, rng, *, m, n, k):
    """A NaN in A reaches its row, a NaN scale of B its column, and neither anything else."""
    row, column = m - 2, n // 2 - 1
    a, b = rows_of(kind, rng, (m, k)), exact_operand(rng, (n, k))
    clean = run(device, name, [a], [b])[0]
    if kind == "nvfp4":
        dirty_a = with_nan_scale(a, row, k // 16 - 2, 0x7F)
    else:
        dirty_a = a.copy()
        dirty_a[row, k // 2] = np.nan
    dirty = run(device, name, [dirty_a], [with_nan_scale(b, column, 0, 0xFF)])[0]
    touched = np.zeros((m, n), bool)
    touched[row], touched[:, column] = True, True
    np.testing.assert_array_equal(np.isnan(dirty.astype(np.float32)), touched)
    np.testing.assert_array_equal(dirty[~touched], clean[~touched])
