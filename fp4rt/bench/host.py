"""Benchmarks of the host: formats, layouts, BLAS, and what a call costs in Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fp4rt import progress
from fp4rt.bench.report import Result, SetResult
from fp4rt.bench.timing import Repeat, Timing, by_clock, interleaved
from fp4rt.bench.workload import Operands, Shapes, check
from fp4rt.device import Device
from fp4rt.gemm import grouped_gemm
from fp4rt.layout import blackwell_blocks, hopper_blocks, swizzle_scales, unswizzle_scales
from fp4rt.nvfp4 import Nvfp4Array, dequantize, quantize
from fp4rt.plan import GroupedGemmPlan

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Operations:
    """What is timed on the host.

    Attributes
    ----------
    calls
        By name: what is called, the bytes it is credited with, and its FLOPs if it multiplies.
    run
        Returns the grouped GEMM's result, to be checked.
    close
        Frees the plan.
    """

    calls: dict[str, tuple[Callable[[], object], int, int | None]]
    run: Callable[[], NDArray[np.float16]]
    close: Callable[[], None]


def operations(dev: Device, operands: Operands) -> Operations:
    """Return the operations of a machine without a GPU on one shape set.

    The grouped GEMM of a plan (weights known beforehand) and of one call, next to numpy's fp32
    products of operands dequantised beforehand; then quantising, dequantising and the layouts, of
    one group's weights.
    """
    shapes, b = operands.shapes, operands.b
    weights = [b] * len(shapes.sizes)
    plan = GroupedGemmPlan(dev, weights, max_m=shapes.rows)
    plan.set_inputs(operands.a, shapes.sizes)
    a32, b32 = dequantize(operands.a), dequantize(b)
    ends = np.cumsum(shapes.sizes)
    spans = [slice(end - size, end) for end, size in zip(ends, shapes.sizes, strict=True)]
    swizzled = swizzle_scales(b.scales)

    def matmuls() -> None:
        for span in spans:
            np.matmul(a32[span], b32.T)

    def run() -> NDArray[np.float16]:
        plan.launch()
        d = plan.output()
        assert isinstance(d, np.ndarray)
        return d

    nbytes, flops = shapes.nvfp4_bytes, shapes.flops
    packed = b.values.nbytes + b.scales.nbytes
    calls: dict[str, tuple[Callable[[], object], int, int | None]] = {
        "plan.launch()": (plan.launch, nbytes, flops),
        "grouped_gemm(…)": (
            lambda: grouped_gemm(dev, operands.a, weights, shapes.sizes),
            nbytes,
            flops,
        ),
        "np.matmul fp32, dequantised before": (matmuls, nbytes, flops),
        "quantize(fp32 B of one group)": (lambda: quantize(b32), b32.nbytes + packed, None),
        "dequantize(B) to fp32": (lambda: dequantize(b), packed + b32.nbytes, None),
        "swizzle_scales": (lambda: swizzle_scales(b.scales), 2 * b.scales.nbytes, None),
        "unswizzle_scales": (lambda: unswizzle_scales(swizzled), 2 * b.scales.nbytes, None),
        "hopper_blocks": (lambda: hopper_blocks(b.values, b.scales), 2 * packed, None),
        "blackwell_blocks": (lambda: blackwell_blocks(b.values), 2 * b.values.nbytes, None),
    }
    return Operations(calls, run, plan.close)


def bench_host(
    dev: Device, sets: Sequence[Shapes], *, seconds: float, windows: int
) -> Iterator[SetResult]:
    """Time the operations of a machine without a GPU on each shape set.

    Raises
    ------
    WrongResultError
        If a sample of the grouped GEMM's result isn't right.
    """
    for number, shapes in enumerate(sets):
        progress.show(f"{shapes.name} ({number + 1} of {len(sets)}): {shapes.describe()}")
        operands = Operands.random(shapes)
        found = operations(dev, operands)
        try:
            check(operands.wrong(found.run()), shapes, "grouped_gemm")
            things = {name: by_clock(call) for name, (call, _, _) in found.calls.items()}
            times = interleaved(things, seconds, windows)
        finally:
            found.close()
        results = (
            Result(name, "host", times[name], nbytes, flops)
            for name, (_, nbytes, flops) in found.calls.items()
        )
        yield SetResult(shapes, tuple(results))


def overheads(dev: Device, *, seconds: float, windows: int) -> dict[str, Timing]:
    """Return what calls cost the host, with operands so small that little else counts.

    Queued work is waited for after every 50 calls, outside the timing.
    """
    rng = np.random.default_rng(0)

    def operand(*shape: int) -> Nvfp4Array:
        return quantize(rng.standard_normal(shape).astype(np.float32))

    a, b, sizes = operand(8, 64), operand(2, 16, 64), [3, 5]
    with GroupedGemmPlan(dev, b, max_m=8) as plan:
        plan.set_inputs(a, sizes)
        graph = plan.capture()

        def launch_and_output() -> None:
            plan.launch()
            plan.output()

        calls: dict[str, Callable[[], object]] = {
            "plan.launch()": plan.launch,
            "graph.launch()": graph.launch,
            "plan.set_inputs(a, sizes)": lambda: plan.set_inputs(a, sizes),
            "launch and output": launch_and_output,
            "grouped_gemm(dev, a, b, sizes)": lambda: grouped_gemm(dev, a, b, sizes),
        }
        things = {name: _queued(dev, call) for name, call in calls.items()}
        times = interleaved(things, seconds, windows)
        graph.close()
    return times


def _queued(dev: Device, call: Callable[[], object], batch: int = 50) -> Repeat:
    """Time calls on the host, in batches short enough not to fill the stream's queue."""
    timed = by_clock(call)

    def run(count: int) -> float:
        taken = 0.0
        while count > 0:
            taken += timed.run(min(count, batch))
            dev.synchronize()
            count -= batch
        return taken

    return Repeat(run)
