"""The oracle: grouped GEMM as plain float64 numpy, which every device is compared with.

Operands are dequantised exactly, products and sums are float64 (products of two operands have at
most 12 significant bits beside their global scales), and nothing is rounded to an output dtype;
`round_to` does that, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fp4rt.codes import round_to as round_to
from fp4rt.nvfp4 import Nvfp4Array, dequantize

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

Rows = Nvfp4Array | np.ndarray


def grouped_gemm(
    a: Rows | Sequence[Rows],
    b: Nvfp4Array | Sequence[Nvfp4Array],
    group_sizes: ArrayLike | None = None,
    alpha: ArrayLike | None = None,
) -> Any:
    """Compute ``D_g = alpha_g · A_g · B_gᵀ`` for every group g, in float64.

    Parameters
    ----------
    a
        With group_sizes: (M, K), the rows of all groups concatenated. Without: one (M_g, K_g) a
        group. Each an `Nvfp4Array`, or an array of fp16 or bf16 (or other) numbers.
    b
        With group_sizes: (G, N, K). Without: one (N_g, K_g) a group.
    group_sizes
        Rows of a in each group, (G,).
    alpha
        One number, or (G,) of them; 1 by default.

    Returns
    -------
    ndarray of float64 (M, N), or without group_sizes a list of (M_g, N_g)

    Raises
    ------
    ValueError
        If numbers of groups, of rows or K disagree.

    Examples
    --------
    >>> from fp4rt.nvfp4 import quantize
    >>> x, w = quantize(np.ones((3, 32))), quantize(np.ones((2, 4, 32)))
    >>> grouped_gemm(x, w, [1, 2], alpha=[1, 0.5])[:, 0].round(3)
    array([32., 16., 16.])
    """
    if group_sizes is None:
        alphas = np.broadcast_to(np.asarray(1.0 if alpha is None else alpha, np.float64), len(b))
        groups = zip(a, b, alphas, strict=True)
        with np.errstate(invalid="ignore", over="ignore", under="ignore"):
            return [alpha_g * (_float64(a_g) @ _float64(b_g).T) for a_g, b_g, alpha_g in groups]
    sizes = np.asarray(group_sizes, np.int64)
    if sizes.sum() != a.shape[0] or (sizes < 0).any():  # type: ignore[union-attr]
        raise ValueError(f"group_sizes {group_sizes} must be ≥ 0 and sum to the {len(a)} rows of a")
    rows: Any = [a[end - size : end] for size, end in zip(sizes, np.cumsum(sizes), strict=True)]
    nothing = np.empty((0, b.shape[1]))  # type: ignore[union-attr]
    return np.concatenate([nothing, *grouped_gemm(rows, b, alpha=alpha)])


def _float64(x: Any) -> NDArray[np.float64]:
    if isinstance(x, Nvfp4Array):
        return dequantize(x, np.float64)
    return np.asarray(x).astype(np.float64)
