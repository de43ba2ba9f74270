"""Grouped GEMM: a plan that can be run many times, and the call that uses one once.

``D_g = alpha_g · A_g · B_gᵀ`` for every group g. The plan checks everything, keeps the weights
where its device wants them, and runs either on BLAS (the cpu) or on kernels.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fp4rt import blas
from fp4rt.device import ClosedError, Device, Stream
from fp4rt.device import device as open_device
from fp4rt.kernels import KernelPlan
from fp4rt.nvfp4 import Nvfp4Array
from fp4rt.problem import (
    Inputs,
    Problem,
    Rows,
    Weights,
    as_inputs,
    as_weights,
    check_disjoint,
    check_out,
    checked_alpha,
    checked_out_dtype,
)

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike, NDArray

Outputs = list["NDArray[Any]"]


class GroupedGemmPlan:
    """Grouped GEMM with fixed weights, for any group sizes up to a capacity.

    Parameters
    ----------
    device
        A `Device`, or the name of one (``"auto"``, ``"cuda:0"``, …), which the plan then owns.
    weights
        B: a (G, N, K) stack, one (N, K) operand, or a list of (N_g, K_g) operands. The plan keeps
        what it needs; the caller may drop them.
    max_m
        Most rows that all groups have together.
    alpha
        A number, or one per group; multiplies the result.
    out_dtype
        ``float16`` (default), ``bfloat16`` (from ml_dtypes) or ``float32``.
    activations
        ``"nvfp4"``, or ``"float16"`` or ``"bfloat16"`` for 16-bit rows (weight-only quantisation).
    batch_invariant
        Give a row the same bits whichever variant would otherwise be chosen.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described; the message names the value, the rule and a fix.
    NoKernelError
        If no kernel was built for the device, or none takes this problem.

    Examples
    --------
    >>> import numpy as np, fp4rt
    >>> weights = fp4rt.quantize(np.ones((2, 8, 32), np.float32))
    >>> with fp4rt.GroupedGemmPlan("cpu", weights, max_m=4) as plan:
    ...     plan.set_inputs(fp4rt.quantize(np.ones((3, 32), np.float32)), [1, 2])
    ...     plan.launch()
    ...     plan.output()[:, 0]
    array([32., 32., 32.], dtype=float16)
    """

    def __init__(
        self,
        device: Device | str,
        weights: Nvfp4Array | Sequence[Nvfp4Array],
        *,
        max_m: int,
        alpha: ArrayLike | None = None,
        out_dtype: DTypeLike = np.float16,
        activations: str = "nvfp4",
        batch_invariant: bool = False,
    ) -> None:
        if isinstance(max_m, bool) or not isinstance(max_m, (int, np.integer)) or max_m < 0:
            raise ValueError(f"max_m must be an integer of at least 0, got {max_m!r}")
        if activations not in ("nvfp4", "float16", "bfloat16"):
            raise ValueError(
                f"activations must be 'nvfp4', 'float16' or 'bfloat16', got {activations!r}"
            )
        self.weights: Weights = as_weights(weights)
        self.alpha = checked_alpha(alpha, len(self.weights.groups))
        self.out_dtype = checked_out_dtype(out_dtype)
        self.problem = Problem(
            shapes=tuple((w.shape[0], 2 * w.values.shape[-1]) for w in self.weights.groups),
            max_m=int(max_m),
            activations=activations,
            out_dtype=self.out_dtype.name,
            batch_invariant=batch_invariant,
        )
        self._owns_device = isinstance(device, str)
        self.device = open_device(device) if isinstance(device, str) else device
        self._lock = threading.RLock()
        self._inputs: Inputs | None = None
        self._results: Outputs | None = None
        self._closed = False
        self._kernels: KernelPlan | None = None
        if self.device.image_kind is not None:
            try:
                self._kernels = KernelPlan(self.device, self.weights, self.problem)
            except BaseException:
                if self._owns_device:
                    self.device.close()
                raise

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the plan is closed; make a new GroupedGemmPlan")

    def set_inputs(self, a: Rows | Sequence[Rows], group_sizes: ArrayLike | None = None) -> None:
        """Give the rows of the next launches.

        Parameters
        ----------
        a
            Rows of all groups, concatenated: an NVFP4 operand of shape (M, K), or fp16 or bf16
            rows; or a list with one operand per group.
        group_sizes
            Integers (G,): rows of each group, adding up to M. Not given with a list.

        Raises
        ------
        TypeError, ValueError
            If they do not fit the plan; the inputs given before stay in force.
        """
        inputs = as_inputs(a, group_sizes, self.weights)
        if inputs.sizes.size and inputs.activations != self.problem.activations:
            raise TypeError(
                f"the plan was made for {self.problem.activations} activations, "
                f"got {inputs.activations}"
            )
        total = int(inputs.sizes.sum())
        if total > self.problem.max_m:
            raise ValueError(
                f"{total} rows exceed the plan's max_m = {self.problem.max_m}; "
                "make a plan with a larger max_m"
            )
        with self._lock:
            self._check_open()
            if self._kernels is not None:
                self._kernels.set_inputs(inputs, self._scales(inputs), self.device.stream)
            self._inputs = inputs
            self._results = None

    def launch(self, stream: Stream | None = None) -> None:
        """Compute the result of the current inputs."""
        with self._lock:
            self._check_open()
            self._results = self._run(None, stream)

    def output(self) -> NDArray[Any] | Outputs:
        """Return the last launch's result: one (M, N) array, or a list of them for list inputs."""
        with self._lock:
            self._check_open()
            if self._inputs is None or self._results is None:
                raise ValueError("nothing was computed yet; call set_inputs and launch first")
            return self._results[-1] if self._inputs.ragged else self._results

    def compute(
        self, out: NDArray[Any] | Sequence[NDArray[Any]] | None = None
    ) -> NDArray[Any] | Outputs:
        """Launch and return the result, in `out` if given (checked before anything is written)."""
        with self._lock:
            self._check_open()
            self._results = self._run(out)
            return self.output()

    def _targets(
        self, inputs: Inputs, out: NDArray[Any] | Sequence[NDArray[Any]] | None
    ) -> Outputs:
        sources = [*self.weights.groups]
        rows = inputs.rows
        sources += list(rows) if isinstance(rows, tuple) else [rows]  # type: ignore[list-item]
        if inputs.ragged:
            shapes = [(int(inputs.sizes.sum()), self.weights.width or 0)]
            given: Sequence[Any] | None = None if out is None else [out]
        else:
            pairs = zip(inputs.sizes, self.weights.groups, strict=True)
            shapes = [(int(m), w.shape[0]) for m, w in pairs]
            given = out  # type: ignore[assignment]
            if out is not None and (not isinstance(out, Sequence) or len(out) != len(shapes)):
                raise ValueError(f"out must be a list of {len(shapes)} arrays, one per group")
        if given is None:
            return [np.empty(shape, self.out_dtype) for shape in shapes]
        for g, (target, shape) in enumerate(zip(given, shapes, strict=True)):
            name = "out" if inputs.ragged else f"out[{g}]"
            check_out(target, shape, self.out_dtype, sources, name)
        check_disjoint(given)
        return list(given)

    def _scales(self, inputs: Inputs) -> NDArray[np.float64]:
        """Return what multiplies each group: alpha and both global scales."""
        scales = self.alpha * self.weights.global_scales
        return scales * inputs.global_scales(self.problem.num_groups)

    def _run(
        self, out: NDArray[Any] | Sequence[NDArray[Any]] | None, stream: Stream | None = None
    ) -> Outputs:
        inputs = self._inputs
        if inputs is None:
            raise ValueError("the plan has no inputs yet; call set_inputs first")
        targets = self._targets(inputs, out)
        if self._kernels is not None:
            stream = stream or self.device.stream
            self._kernels.launch(stream)
            self._kernels.read(targets, stream)
            return targets
        scales = self._scales(inputs)
        offsets = inputs.offsets
        for g, weights in enumerate(self.weights.groups):
            if inputs.ragged:
                target = targets[0][offsets[g] : offsets[g + 1]]
            else:
                target = targets[g]
            blas.group_gemm(inputs.group(g), weights, float(scales[g]), target)
        return targets

    def close(self) -> None:
        """Release what the plan holds; closing twice is harmless."""
        with self._lock:
            if self._kernels is not None and not self._closed:
                self._kernels.close()
            self._closed = True
            self._inputs = self._results = None
            if self._owns_device:
                self.device.close()

    def __enter__(self) -> GroupedGemmPlan:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        shapes = sorted(set(self.problem.shapes))
        text = str(shapes[0]) if len(shapes) == 1 else f"{len(shapes)} shapes"
        return (
            f"<grouped GEMM plan: {self.problem.num_groups} groups, (N, K) {text}, "
            f"max_m {self.problem.max_m}, {self.problem.activations} -> {self.out_dtype.name} "
            f"on {self.device.name}>"
        )


def grouped_gemm(
    device: Device | str,
    a: Rows | Sequence[Rows],
    b: Nvfp4Array | Sequence[Nvfp4Array],
    group_sizes: ArrayLike | None = None,
    *,
    alpha: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    out: NDArray[Any] | Sequence[NDArray[Any]] | None = None,
    batch_invariant: bool = False,
) -> NDArray[Any] | Outputs:
    """Return ``alpha_g · A_g · B_gᵀ`` for every group g.

    Parameters
    ----------
    device
        A `Device`, or the name of one: ``"auto"``, ``"cuda:0"``, ``"emulator:sm_90a"``, ``"cpu"``.
    a
        Activations: rows of all groups concatenated, (M, K); or a list of (M_g, K_g). Each is an
        `Nvfp4Array`, or fp16 or bf16 rows where the device has a kernel for them.
    b
        Weights: a (G, N, K) stack, one (N, K) operand, or a list of (N_g, K_g) operands.
    group_sizes
        Integers (G,): rows of each group, in order, adding up to M. Only with concatenated rows.
    alpha
        A number, or one per group; default 1.
    out_dtype
        float16 (default), bfloat16 or float32; default that of `out` if it is given.
    out
        Array or list of arrays that takes the result.
    batch_invariant
        Give a row the same bits whatever else is in the batch, across kernel variants too.

    Returns
    -------
    numpy.ndarray or list of numpy.ndarray
        (M, N) for concatenated rows, a list of (M_g, N_g) for lists.

    Raises
    ------
    TypeError, ValueError
        For arguments that are not as described; nothing has been written then.
    NoKernelError, DriverError, OutOfMemoryError
        If the device can't run it.

    Examples
    --------
    >>> import numpy as np, fp4rt
    >>> x = fp4rt.quantize(np.ones((3, 32), np.float32))
    >>> w = fp4rt.quantize(np.ones((2, 4, 32), np.float32))
    >>> fp4rt.grouped_gemm("cpu", x, w, group_sizes=[1, 2], alpha=[1, 0.5])
    array([[32., 32., 32., 32.],
           [16., 16., 16., 16.],
           [16., 16., 16., 16.]], dtype=float16)
    """
    if out_dtype is None:
        first = out[0] if isinstance(out, (list, tuple)) and out else out
        out_dtype = first.dtype if isinstance(first, np.ndarray) else np.float16
    weights = as_weights(b)
    inputs = as_inputs(a, group_sizes, weights)
    plan = GroupedGemmPlan(
        device,
        b,
        max_m=int(inputs.sizes.sum()),
        alpha=alpha,
        out_dtype=out_dtype,
        activations=inputs.activations if inputs.sizes.size else "nvfp4",
        batch_invariant=batch_invariant,
    )
    with plan:
        plan.set_inputs(a, group_sizes)
        return plan.compute(out)
