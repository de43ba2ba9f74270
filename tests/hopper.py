"""Runs one Hopper variant by name, with poison wherever nothing belongs."""

import numpy as np

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
POISONED = ("a_values", "a_scales", "a_prepared", "group_starts", "schedule", "partial_sums", "d")
SPARE_ROWS = 3


def max_rows(name):
    """The tallest tile of a variant."""
    return VARIANTS[name].macros.get("MAX_ROWS", 16)


def make_plan(device, name, b, m, *, activations, out_dtype, max_tile_rows=None, grid=2):
    """A plan of one variant with room for m + SPARE_ROWS rows."""
    weights = as_weights(b)
    problem = Problem(
        shapes=tuple((w.shape[0], 2 * w.values.shape[-1]) for w in weights.groups),
        max_m=m + SPARE_ROWS,
        activations=activations,
        out_dtype=np.dtype(out_dtype).name,
    )
    rows = max_tile_rows or max_rows(name)
    choice = Choice(VARIANTS[name].name, rows, grid, 1)
    return weights, KernelPlan(device, weights, problem, choice)


def run(device, name, a, b, sizes=None, *, alpha=None, out_dtype=np.float16, **options):
    """Return each group's D; everything beside D must still be poison.

    A's rows beyond the last group, its bytes between K and the pitch, and all workspace hold 0xFF
    before the launch: codes of -6, NaN scales, NaN values.
    """
    inputs = as_inputs(a, sizes, as_weights(b))
    m = int(inputs.sizes.sum())
    weights, plan = make_plan(
        device, name, b, m, activations=inputs.activations, out_dtype=out_dtype, **options
    )
    stream = device.stream
    for buffer in POISONED:
        flags = buffer == "schedule" and "partial_sums" in plan._buffers  # which must be zero
        if buffer in plan._buffers and not flags:
            stream.fill(plan._buffers[buffer], 0xFF)
    scales = np.ones(len(sizes) if sizes is not None else len(a)) if alpha is None else alpha
    scales = scales * weights.global_scales * inputs.global_scales(len(weights.groups))
    plan.set_inputs(inputs, scales, stream)
    plan.launch(stream)
    flat = plan._buffers["d"].to_numpy()
    shapes = [(int(s), w.shape[0]) for s, w in zip(inputs.sizes, weights.groups, strict=True)]
    ends = np.cumsum([rows * columns for rows, columns in shapes])
    plan.close()
    assert (flat[ends[-1] :].view(np.uint8) == 0xFF).all(), "bytes behind D changed"
    starts = [0, *ends[:-1]]
    return [flat[s:e].reshape(shape) for s, e, shape in zip(starts, ends, shapes, strict=True)]
