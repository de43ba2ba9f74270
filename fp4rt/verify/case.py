"""One problem of the self-test, and the data that its seeds stand for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from fp4rt.nvfp4 import Nvfp4Array, stack
from fp4rt.problem import OUT_DTYPES
from fp4rt.rows import Rows

MAX_EXACT_K = 7280
"""Largest K at which 144 · K, in units of 1/16, stays below 2**24."""


@dataclass(frozen=True)
class Case:
    """One problem, all of it: the same fields give the same bytes on every machine.

    Parameters
    ----------
    sizes, shapes, seeds
        For each group: rows, (N, K), and what its data is drawn from. A group's first rows are the
        same whatever M and N are.
    ragged
        Whether rows are passed concatenated with group sizes (all shapes are equal then), or as
        lists.
    activations
        ``"nvfp4"``, ``"float16"`` or ``"bfloat16"``.
    out_dtype
        ``"float16"``, ``"bfloat16"`` or ``"float32"``.
    exact
        Whether every partial sum is exact in float32.
    alpha
        One per group.
    batch_invariant
        As for `fp4rt.grouped_gemm`.
    graph
        Whether the launch is captured and replayed.
    variant
        The kernel variant that must run it, by its short name; None for the one that is chosen.

    Examples
    --------
    >>> case = Case(sizes=(2, 0), shapes=((3, 32), (3, 32)), seeds=(1, 2))
    >>> a, b = case.operands()
    >>> a.shape, b.shape, case.flops
    ((2, 32), (2, 3, 32), 384)
    """

    sizes: tuple[int, ...]
    shapes: tuple[tuple[int, int], ...]
    seeds: tuple[int, ...]
    ragged: bool = True
    activations: str = "nvfp4"
    out_dtype: str = "float16"
    exact: bool = True
    alpha: tuple[float, ...] = field(default=())
    batch_invariant: bool = False
    graph: bool = False
    variant: str | None = None

    def __post_init__(self) -> None:
        if not self.alpha:
            object.__setattr__(self, "alpha", (1.0,) * len(self.sizes))
        if not len(self.sizes) == len(self.shapes) == len(self.seeds) == len(self.alpha):
            raise ValueError("sizes, shapes, seeds and alpha must have one entry per group")
        if self.ragged and len(set(self.shapes)) != 1:
            raise ValueError(f"ragged groups need one shape and at least one group: {self.shapes}")

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return sum(2 * m * n * k for m, (n, k) in zip(self.sizes, self.shapes, strict=True))

    @property
    def elements(self) -> int:
        """Elements of A and B."""
        return sum((m + n) * k for m, (n, k) in zip(self.sizes, self.shapes, strict=True))

    @property
    def out_numpy(self) -> np.dtype[Any]:
        """The numpy dtype of the result."""
        return next(dtype for dtype in OUT_DTYPES if dtype.name == self.out_dtype)

    @property
    def group_sizes(self) -> tuple[int, ...] | None:
        """What goes with concatenated rows; None for lists."""
        return self.sizes if self.ragged else None

    def operands(self) -> tuple[Any, Any]:
        """Return A and B, as `fp4rt.grouped_gemm` takes them."""
        return self.joined(*self.groups())

    def joined(self, a: list[Rows], b: list[Nvfp4Array]) -> tuple[Any, Any]:
        """Return the operands that each group's A and B make up."""
        if not self.ragged:
            return a, b
        if self.activations != "nvfp4":
            return np.concatenate([np.asarray(rows) for rows in a]), stack(b)
        parts = [rows for rows in a if isinstance(rows, Nvfp4Array)]
        values = np.concatenate([rows.values for rows in parts])
        scales = np.concatenate([rows.scales.view(np.uint8) for rows in parts])
        return Nvfp4Array.from_parts(values, scales, parts[0].global_scale), stack(b)

    def groups(self) -> tuple[list[Rows], list[Nvfp4Array]]:
        """Return each group's A and B."""
        a: list[Rows] = []
        for m, (_, k), seed in zip(self.sizes, self.shapes, self.seeds, strict=True):
            rows_seed = (self.seeds[0], 9) if self.ragged else (seed, 9)  # the global scale's
            if self.activations == "nvfp4":
                a.append(_operand((seed, 0), rows_seed, m, k, self.exact))
            else:
                dtype = np.float16 if self.activations == "float16" else ml_dtypes.bfloat16
                rng = np.random.default_rng((seed, 0))
                a.append(
                    rng.integers(-8, 9, (m, k)).astype(dtype)
                    if self.exact
                    else rng.standard_normal((m, k)).astype(dtype)
                )
        b = [
            _operand((seed, 1), (seed, 8), n, k, self.exact)
            for (n, k), seed in zip(self.shapes, self.seeds, strict=True)
        ]
        return a, b

    def snippet(self, device_name: str) -> str:
        """Return a program that runs the problem and prints what is wrong."""
        return (
            "import fp4rt\n"
            "from fp4rt.verify import Case, check\n"
            "\n"
            f"case = {self!r}\n"
            f"with fp4rt.device({device_name!r}) as dev:\n"
            "    print(check(dev, case))  # None if right\n"
            "    a, b = case.operands()\n"
            "    print(fp4rt.grouped_gemm(\n"
            "        dev, a, b, case.group_sizes, alpha=case.alpha, out_dtype=case.out_numpy,\n"
            "        batch_invariant=case.batch_invariant,\n"
            "    ))\n"
        )


def _operand(
    seed: tuple[int, int], scale_seed: tuple[int, int], rows: int, k: int, exact: bool
) -> Nvfp4Array:
    """Random codes; scales are 1/2, 1 and 2 if `exact`, otherwise any from 2**-4 to 30."""
    values = np.random.default_rng((*seed, 0)).integers(0, 256, (rows, k // 2), dtype=np.uint8)
    choices = np.array([0x30, 0x38, 0x40] if exact else range(0x18, 0x60), np.uint8)
    picked = np.random.default_rng((*seed, 1)).integers(0, len(choices), (rows, k // 16))
    scale = np.random.default_rng(scale_seed).uniform(-3, 3)
    return Nvfp4Array.from_parts(
        values, choices[picked], np.float32(2.0 ** (round(scale) if exact else scale))
    )
