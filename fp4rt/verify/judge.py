"""Runs a problem and compares every element with what it must be."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4rt import reference
from fp4rt.codes import round_to
from fp4rt.device import Device, DriverError, EmulatorFault
from fp4rt.nvfp4 import Nvfp4Array, dequantize
from fp4rt.plan import GroupedGemmPlan
from fp4rt.rows import Rows

from .case import Case


def error_bound(a: Rows, b: Nvfp4Array, alpha: float) -> NDArray[np.float64]:
    """Return how far a float32 sum of the group's products may be from the exact one, (M, N).

    Products are exact: at most 11 + 6 significant bits. A matrix instruction aligns its products
    and the running sum (17 addends for every 16 of K at worst) to the largest and may cut each,
    which loses less than 2**-23 of a number that is at most S = Σ|a·b|; a sum in BLAS loses less.
    Eight more such steps cover partial sums of a split K, the float32 product of alpha and both
    global scales, and the multiplication by it. With u = 2**-23 and n = K + ⌈K / 16⌉ + 8, the
    error is at most ``n·u / (1 - n·u) · |alpha| · S`` (Higham, Accuracy and Stability, lemma 3.1).

    Examples
    --------
    >>> codes, scales = np.full((1, 8), 0x22, np.uint8), np.full((1, 1), 56, np.uint8)
    >>> one = Nvfp4Array.from_parts(codes, scales, 1)
    >>> round(float(error_bound(one, one, 1.0)[0, 0] / 2**-23))  # n = 25, S = 16
    400
    """
    magnitude_a, magnitude_b = (
        np.abs(dequantize(x, np.float64) if isinstance(x, Nvfp4Array) else x.astype(np.float64))
        for x in (a, b)
    )
    k = magnitude_a.shape[1]
    n = k + math.ceil(k / 16) + 8
    unit = n * 2.0**-23 / (1 - n * 2.0**-23)
    bound: NDArray[np.float64] = unit * abs(alpha) * (magnitude_a @ magnitude_b.T)
    return bound


def multiply(dev: Device, case: Case, a: Any, b: Any) -> list[NDArray[Any]]:
    """Run a case through a plan; the result is one array, or one per group.

    Where the result goes is filled with NaN first, on the device and on the host.
    """
    with GroupedGemmPlan(
        dev,
        b,
        max_m=sum(case.sizes),
        alpha=case.alpha,
        out_dtype=case.out_numpy,
        activations=case.activations,
        batch_invariant=case.batch_invariant,
        variant=case.variant,
    ) as plan:
        graph = plan.capture() if case.graph else None
        plan.set_inputs(a, case.group_sizes)
        plan.poison_output()
        if graph is None:
            plan.launch()
        else:
            graph.launch()
        if case.ragged:
            out = np.full((sum(case.sizes), case.shapes[0][0]), np.nan, case.out_numpy)
            plan.output(out)
            return [out]
        outs = [
            np.full((m, n), np.nan, case.out_numpy)
            for m, (n, _) in zip(case.sizes, case.shapes, strict=True)
        ]
        plan.output(outs)
        return outs


Run = Callable[[Device, Case, Any, Any], list[NDArray[Any]]]
"""Computes the result of a case from A and B, in the form of `multiply`."""


def check(dev: Device, case: Case, run: Run | None = None) -> str | None:
    """Return None if `run` (default `multiply`) gives the right result, otherwise what is wrong.

    A fault or an error of the device is a finding too, not an exception.

    Examples
    --------
    >>> case = Case(sizes=(3, 0, 2), shapes=((5, 48),) * 3, seeds=(1, 2, 3))
    >>> from fp4rt.device import device
    >>> with device("cpu") as cpu:
    ...     print(check(cpu, case))
    None
    """
    a_groups, b_groups = case.groups()
    a, b = case.joined(a_groups, b_groups)
    try:
        results = (run or multiply)(dev, case, a, b)
    except (DriverError, EmulatorFault, ArithmeticError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    if case.ragged:
        results = np.split(results[0], np.cumsum(case.sizes)[:-1])
    exact = reference.grouped_gemm(a_groups, b_groups, alpha=case.alpha)
    for g, (found, sums) in enumerate(zip(results, exact, strict=True)):
        if found.shape != sums.shape or found.dtype != case.out_numpy:
            return (
                f"group {g}: {found.dtype} {found.shape} instead of {case.out_dtype} {sums.shape}"
            )
        if case.exact:
            low = high = round_to(sums, case.out_numpy)
            unsigned = f"u{found.dtype.itemsize}"
            right = found.view(unsigned) == low.view(unsigned)
        else:
            bound = error_bound(a_groups[g], b_groups[g], case.alpha[g])
            low, high = (round_to(end, case.out_numpy) for end in (sums - bound, sums + bound))
            right = (found >= low) & (found <= high)
        if not right.all():
            row, column = (int(i) for i in np.argwhere(~right)[0])
            expected = f"{low[row, column]}"
            if not case.exact:
                expected = f"{low[row, column]} to {high[row, column]}"
            return (
                f"group {g} (rows {case.sizes[g]}, N, K {case.shapes[g]}): {(~right).sum()} of "
                f"{right.size} elements wrong; first ({row}, {column}) is {found[row, column]}, "
                f"expected {expected}"
            )
    return None
