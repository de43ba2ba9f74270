"""What is to be computed: groups, shapes and scalars.

`Weights` and `Inputs` are operands group by group; `WeightFacts` is what is known of weights
without their data, wherever that is; `Problem` is the frozen description from which a kernel
variant is chosen. `fp4rt.arguments` makes them of what callers pass.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from fp4rt.nvfp4 import SCALE_BLOCK, Nvfp4Array
from fp4rt.rows import BFLOAT16, DeviceRows, Rows, copied

if TYPE_CHECKING:
    from numpy.typing import NDArray

OUT_DTYPES = (np.dtype(np.float16), BFLOAT16, np.dtype(np.float32))


@dataclass(frozen=True)
class Problem:
    """The facts that decide which kernel variant runs.

    Parameters
    ----------
    shapes
        (N, K) of each group, K padded to whole scale blocks.
    max_m
        Most rows that all groups have together.
    activations
        ``"nvfp4"``, ``"float16"`` or ``"bfloat16"``.
    out_dtype
        ``"float16"``, ``"bfloat16"`` or ``"float32"``.
    batch_invariant
        Whether a row's bits must not depend on the variant either (no split along K).
    """

    shapes: tuple[tuple[int, int], ...]
    max_m: int
    activations: str
    out_dtype: str
    batch_invariant: bool = False

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return len(self.shapes)

    @property
    def out_numpy(self) -> np.dtype[Any]:
        """The numpy dtype of the result."""
        return next(dtype for dtype in OUT_DTYPES if dtype.name == self.out_dtype)


class ShapesKey:
    """Stands for the shapes of all groups in the key of a cache, so that they are hashed once."""


_shapes_keys: weakref.WeakValueDictionary[tuple[tuple[int, int], ...], ShapesKey] = (
    weakref.WeakValueDictionary()
)


@dataclass(frozen=True)
class WeightFacts:
    """What is known of B without its data.

    Parameters
    ----------
    shapes
        (N, K) of each group, K logical.
    global_scales
        Each group's global scale, float64 (G,).
    width
        The N of all groups, or None if they differ, so that no one array can hold the result.
    single
        Whether B was one matrix, which needs no group sizes.
    """

    shapes: tuple[tuple[int, int], ...]
    global_scales: NDArray[np.float64]
    width: int | None
    single: bool = False

    @property
    def facts(self) -> WeightFacts:
        """These facts."""
        return self

    @cached_property
    def padded_shapes(self) -> tuple[tuple[int, int], ...]:
        """(N, K) of each group, K in whole scale blocks."""
        return tuple((n, -(-k // SCALE_BLOCK) * SCALE_BLOCK) for n, k in self.shapes)

    @cached_property
    def key(self) -> ShapesKey:
        """The one object that stands for these padded shapes, for as long as somebody keeps it."""
        return _shapes_keys.setdefault(self.padded_shapes, ShapesKey())


@dataclass(frozen=True)
class Weights:
    """B of every group, as 2-D operands on the host.

    Parameters
    ----------
    groups
        One (N_g, K_g) operand per group.
    width
        The N of all groups, or None if they differ, so that no one array can hold the result.
    single
        Whether B was one matrix, which needs no group sizes.
    stack
        All groups as one operand, if they were given so.
    """

    groups: tuple[Nvfp4Array, ...]
    width: int | None
    single: bool = False
    stack: Nvfp4Array | None = None

    @property
    def global_scales(self) -> NDArray[np.float64]:
        """Each group's global scale, shape (G,)."""
        return np.array([float(group.global_scale) for group in self.groups], np.float64)

    @property
    def facts(self) -> WeightFacts:
        """What is known of them without their data."""
        shapes = tuple((group.shape[0], group.k) for group in self.groups)
        return WeightFacts(shapes, self.global_scales, self.width, self.single)


@dataclass(frozen=True)
class Inputs:
    """A of one call: rows of all groups concatenated (`ragged`), or one operand per group.

    `sizes` is the number of rows of each group, int64 (G,).
    """

    rows: Rows | DeviceRows | tuple[Rows, ...]
    sizes: NDArray[np.int64]

    @property
    def ragged(self) -> bool:
        """Whether all rows are in one operand, and the result will be one array."""
        return not isinstance(self.rows, tuple)

    @property
    def total(self) -> int:
        """Rows of all groups together."""
        if isinstance(self.rows, tuple):
            return sum(part.shape[0] for part in self.rows)
        return self.rows.shape[0]

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """First row of each group in the concatenation, and the total, shape (G + 1,)."""
        return np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)

    @property
    def activations(self) -> str:
        """``"nvfp4"``, ``"float16"`` or ``"bfloat16"``."""
        first = self.rows[0] if isinstance(self.rows, tuple) else self.rows
        if isinstance(first, DeviceRows):
            return first.activations
        return "nvfp4" if isinstance(first, Nvfp4Array) else str(first.dtype)

    def group(self, g: int) -> Rows:
        """Return the rows of group `g`, which are on the host."""
        if isinstance(self.rows, tuple):
            return self.rows[g]
        assert not isinstance(self.rows, DeviceRows)
        return self.rows[int(self.offsets[g]) : int(self.offsets[g + 1])]

    def result_shapes(self, weights: Weights | WeightFacts) -> list[tuple[int, int]]:
        """Return the shape of the one result, or of each group's."""
        facts = weights.facts
        if self.ragged:
            return [(self.total, facts.width or 0)]
        return [(int(m), n) for m, (n, _) in zip(self.sizes, facts.shapes, strict=True)]

    def copy(self) -> Inputs:
        """Return inputs on the host that do not change when the caller's arrays do."""
        if isinstance(self.rows, tuple):
            return replace(self, rows=tuple(copied(rows) for rows in self.rows))
        if isinstance(self.rows, DeviceRows):
            return replace(self, rows=self.rows.to_host())
        return replace(self, rows=copied(self.rows))

    def global_scales(self, num_groups: int) -> NDArray[np.float64]:
        """Return the global scale of each group's rows, 1 for 16-bit rows."""
        operands = self.rows if isinstance(self.rows, tuple) else (self.rows,) * num_groups
        return np.array(
            [1.0 if isinstance(a, np.ndarray) else float(a.global_scale) for a in operands],
            np.float64,
        )
