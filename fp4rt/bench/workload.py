"""What is benchmarked: shapes, what they cost at least, and plans with operands on the device."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from ml_dtypes import finfo

from fp4rt import reference
from fp4rt.bench.timing import Repeat, by_replay
from fp4rt.choice import Choice
from fp4rt.codes import round_to
from fp4rt.device import Device, Graph
from fp4rt.kernels import KernelPlan
from fp4rt.model import SHAPE_SETS
from fp4rt.nvfp4 import Nvfp4Array
from fp4rt.problem import Inputs, Problem
from fp4rt.verify import error_bound
from fp4rt.weights import DeviceWeights, upload_weights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import DTypeLike, NDArray

ROTATED_BYTES = 3 * 60_000_000
"""Least bytes that are touched before an operand is used again: three times an H200's L2 cache."""
LAUNCHES = 16
"""Least launches in a captured graph, so that what a replay itself costs is spread over them."""


@dataclass(frozen=True)
class Shapes:
    """A named grouped GEMM: rows of each group, and the N and K that all groups have.

    Examples
    --------
    >>> s = Shapes("tiny", (3, 0, 5), 8, 32)
    >>> s.rows, s.flops, s.nvfp4_bytes
    (8, 4096, 560)
    """

    name: str
    sizes: tuple[int, ...]
    n: int
    k: int

    @property
    def rows(self) -> int:
        """Rows of all groups."""
        return sum(self.sizes)

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.rows * self.n * self.k

    @property
    def nvfp4_bytes(self) -> int:
        """Bytes of A, of the weights of groups that have rows, and of D in fp16, each once."""
        weight_rows = sum(self.n for size in self.sizes if size)
        return (self.rows + weight_rows) * self.k * 9 // 16 + 2 * self.rows * self.n

    @property
    def problem(self) -> Problem:
        """The problem for NVFP4 operands and fp16 results."""
        shapes = ((self.n, self.k),) * len(self.sizes)
        return Problem(shapes, self.rows, "nvfp4", "float16")

    def roofline(self, bytes_per_second: float, flops_per_second: float) -> float:
        """Return the least seconds that memory and matrix unit allow."""
        return max(self.nvfp4_bytes / bytes_per_second, self.flops / flops_per_second)

    def describe(self) -> str:
        """Return one line for people."""
        return (
            f"{len(self.sizes)} groups, {self.rows} rows, N {self.n}, K {self.k}: "
            f"{self.nvfp4_bytes / 1e6:.1f} MB, {self.flops / 1e9:.1f} GFLOP"
        )


def named_sets(names: Sequence[str]) -> list[Shapes]:
    """Return shape sets of `fp4rt.model.SHAPE_SETS` by name; ValueError lists the names.

    Examples
    --------
    >>> named_sets(["G2"])
    [Shapes(name='G2', sizes=(16,), n=8192, k=8192)]
    """
    unknown = [name for name in names if name not in SHAPE_SETS]
    if unknown:
        raise ValueError(f"there is no shape set {unknown[0]!r}; choose of {', '.join(SHAPE_SETS)}")
    return [Shapes(name, *SHAPE_SETS[name]) for name in names]


def read_shapes(path: Path) -> list[Shapes]:
    """Read shapes from JSON: ``{"mine": {"sizes": [3, 0, 5], "n": 4096, "k": 7168}, …}``.

    Raises
    ------
    ValueError
        If the file can't be read or holds something else; the message says what.
    """
    try:
        entries = json.loads(path.read_text("utf-8"), object_pairs_hook=_once)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read shapes from {str(path)!r}: {error}") from error
    example = '{"mine": {"sizes": [3, 0, 5], "n": 4096, "k": 7168}}'
    if not isinstance(entries, dict) or not entries:
        raise ValueError(f"{str(path)!r} must hold an object such as {example}")
    found = []
    for name, entry in entries.items():
        if not isinstance(entry, dict) or set(entry) != {"sizes", "n", "k"}:
            raise ValueError(f"shape set {name!r} must have sizes, n and k, as in {example}")
        sizes, n, k = entry["sizes"], entry["n"], entry["k"]
        counts = [*sizes, n, k] if isinstance(sizes, list) else [None]
        if not all(type(count) is int and count >= 0 for count in counts) or not sum(sizes):
            raise ValueError(f"shape set {name!r} must hold counts, and some rows, as in {example}")
        if n == 0 or k == 0 or k % 16:
            raise ValueError(
                f"shape set {name!r}: n must be positive and k a multiple of 16, got {n} and {k}"
            )
        found.append(Shapes(name, tuple(sizes), n, k))
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict; ValueError for a name that is there twice, of which json keeps the last."""
    made: dict[str, Any] = {}
    for name, value in pairs:
        if name in made:
            raise ValueError(f"{name!r} is there twice; give each its own name")
        made[name] = value
    return made


@dataclass(frozen=True)
class Operands:
    """Random operands of a shape: A (rows, K), and one B (N, K) that every group has a copy of.

    Codes are uniform, scales uniform among the E4M3 numbers from 0.25 to 1.875.
    """

    shapes: Shapes
    a: Nvfp4Array
    b: Nvfp4Array

    @classmethod
    def random(cls, shapes: Shapes, seed: int = 0) -> Operands:
        """Draw operands."""
        rng = np.random.default_rng(seed)

        def operand(rows: int) -> Nvfp4Array:
            values = rng.integers(0, 256, (rows, shapes.k // 2), dtype=np.uint8)
            scales = rng.integers(0x28, 0x40, (rows, shapes.k // 16), dtype=np.uint8)
            return Nvfp4Array.from_parts(values, scales, 1.0)

        return cls(shapes, operand(shapes.rows), operand(shapes.n))

    @cached_property
    def _sample(
        self,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
        """Rows and columns of D, and the least and largest sums there that are right."""
        rng = np.random.default_rng(1)
        rows, columns = (
            np.unique([0, extent - 1, *rng.integers(0, extent, 60)])
            for extent in (self.shapes.rows, self.shapes.n)
        )
        a, b = self.a[rows], self.b[columns]
        (exact,) = reference.grouped_gemm([a], [b])
        bound = error_bound(a, b, 1.0)
        return rows, columns, exact - bound, exact + bound

    def wrong(
        self, d: NDArray[Any], *, rounded: DTypeLike = np.float16, ulps: int = 0
    ) -> str | None:
        """Return None if a sample of a result is as exact as float32 sums are.

        Parameters
        ----------
        d
            The result, (rows, N), of any float type.
        rounded
            What the sums were rounded to.
        ulps
            How many units in the last place of `rounded` more are allowed: what is lost where
            partial sums are rounded too.
        """
        rows, columns, least, greatest = self._sample
        kind = np.dtype(rounded)
        low, high = (round_to(end, kind).astype(np.float64) for end in (least, greatest))
        found = d[np.ix_(rows, columns)].astype(np.float64)
        eps = float(finfo(kind).eps)  # type: ignore[no-untyped-call]
        slack = ulps * eps * np.maximum(np.abs(low), np.abs(high))
        right = (found >= low - slack) & (found <= high + slack)
        if right.all():
            return None
        i, j = (int(x) for x in np.argwhere(~right)[0])
        return (
            f"{(~right).sum()} of {right.size} sampled elements wrong: ({rows[i]}, {columns[j]}) "
            f"is {found[i, j]}, expected {low[i, j]} to {high[i, j]}"
        )


class WrongResultError(RuntimeError):
    """A result was wrong, so its time means nothing."""


def check(wrong: str | None, shapes: Shapes, name: str) -> None:
    """Raise `WrongResultError` if something is wrong."""
    if wrong is not None:
        raise WrongResultError(f"{name} on {shapes.name} is wrong, so it isn't timed: {wrong}")


class Rotation:
    """Plans of one variant over copies of the operands, launched in turn by one graph.

    Parameters
    ----------
    device
        A device with kernels.
    operands
        What is multiplied.
    choice
        The variant, and how it is launched.
    copies
        Copies of the weights, of which each plan gets one; variants may share them.
    """

    def __init__(
        self,
        device: Device,
        operands: Operands,
        choice: Choice,
        copies: Sequence[DeviceWeights],
    ) -> None:
        shapes = operands.shapes
        self._operands = operands
        inputs = Inputs(operands.a, np.array(shapes.sizes, np.int64))
        self.plans: list[KernelPlan] = []
        self.graph: Graph | None = None
        try:
            for weights in copies:
                plan = KernelPlan(device, weights, shapes.problem, choice)
                self.plans.append(plan)
                plan.set_inputs(inputs, np.ones(len(shapes.sizes)), device.stream)
            rounds = math.ceil(LAUNCHES / len(self.plans))
            self.launches = rounds * len(self.plans)
            with device.stream.capture() as capture:
                capture.keep(self.plans)
                for plan in self.plans * rounds:
                    plan.launch(device.stream)
            self.graph = capture.graph
        except BaseException:
            self.close()
            raise

    @property
    def repeat(self) -> Repeat:
        """What is timed."""
        assert self.graph is not None
        return by_replay(self.plans[0].device.stream, self.graph, self.launches)

    def wrong(self) -> str | None:
        """Run every plan once, over a result poisoned with NaN; return what is wrong, or None."""
        shapes = self._operands.shapes
        for plan in self.plans:
            plan.poison_output(plan.device.stream)
        self.repeat.run(1)
        for plan in (self.plans[0], self.plans[-1]):
            (d,) = plan.read([(shapes.rows, shapes.n)], None, plan.device.stream)
            found = self._operands.wrong(d)
            if found:
                return found
        return None

    def close(self) -> None:
        """Free the graph and the buffers."""
        if self.graph is not None:
            self.graph.close()
        for plan in self.plans:
            plan.close()


def upload_copies(device: Device, operands: Operands) -> list[DeviceWeights]:
    """Return as many copies of the weights as make a rotation, each in memory of its own."""
    groups = [operands.b] * len(operands.shapes.sizes)
    return [upload_weights(device, groups) for _ in range(copies_of(operands.shapes))]


def copies_of(shapes: Shapes, bytes_per_copy: int | None = None) -> int:
    """Return how many copies of the operands together exceed `ROTATED_BYTES`, two at least.

    Examples
    --------
    >>> [copies_of(s) for s in named_sets(["S1", "S4"])]
    [2, 16]
    """
    return max(2, math.ceil(ROTATED_BYTES / (bytes_per_copy or shapes.nvfp4_bytes)))
