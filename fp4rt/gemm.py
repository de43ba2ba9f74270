"""Grouped GEMM: a plan that can be run many times, and the call that uses one once.

``D_g = alpha_g · A_g · B_gᵀ`` for every group g. The plan checks everything, keeps the weights
where its device wants them, and runs either on BLAS (the cpu) or on kernels.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from fp4rt import html
from fp4rt.blas import BlasPlan
from fp4rt.choice import Choice, forced
from fp4rt.device import ClosedError, Device, Graph, NoKernelError
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
    checked_flag,
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
    variant
        A kernel variant by its short name (``"medium"``), for tests and measurements; by default
        `fp4rt.choice.choose` picks one.

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
        variant: str | None = None,
    ) -> None:
        if isinstance(max_m, bool) or not isinstance(max_m, (int, np.integer)) or max_m < 0:
            raise ValueError(f"max_m must be an integer of at least 0, got {max_m!r}")
        if activations not in ("nvfp4", "float16", "bfloat16"):
            raise ValueError(
                f"activations must be 'nvfp4', 'float16' or 'bfloat16', got {activations!r}"
            )
        if not isinstance(device, (str, Device)):
            raise TypeError(
                f"device must be a Device or the name of one, such as 'auto', got {device!r}"
            )
        self.weights: Weights = as_weights(weights)
        self.alpha = checked_alpha(alpha, len(self.weights.groups))
        self.out_dtype = checked_out_dtype(out_dtype)
        self.problem = Problem(
            shapes=tuple((w.shape[0], 2 * w.values.shape[-1]) for w in self.weights.groups),
            max_m=int(max_m),
            activations=activations,
            out_dtype=self.out_dtype.name,
            batch_invariant=checked_flag(batch_invariant, "batch_invariant"),
        )
        self._owns_device = isinstance(device, str)
        self.device = open_device(device) if isinstance(device, str) else device
        self._lock = threading.RLock()
        self._inputs: Inputs | None = None
        self._launched = False
        self._closed = False
        try:
            self.device.as_stream()  # a closed device says so
            if self.device.image_kind is None and variant is not None:
                raise NoKernelError(f"{self.device.name} has no kernel variants; leave variant out")
            if self.device.image_kind is not None and max_m >= 2**31:
                raise ValueError(
                    f"max_m is {max_m}; kernels count rows in 32 bits, so use at most {2**31 - 1}"
                )
            self._path: BlasPlan | KernelPlan = (
                BlasPlan(self.weights, self.problem)
                if self.device.image_kind is None
                else KernelPlan(self.device, self.weights, self.problem, self._choice(variant))
            )
        except BaseException:
            if self._owns_device:
                self.device.close()
            raise

    def _choice(self, variant: str | None) -> Choice | None:
        if variant is None:
            return None
        return forced(variant, self.device.arch, self.device.sm_count, self.problem)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the plan is closed; make a new GroupedGemmPlan")

    def set_inputs(
        self,
        a: Rows | Sequence[Rows],
        group_sizes: ArrayLike | None = None,
        *,
        stream: object = None,
    ) -> None:
        """Give the rows of the next launches.

        Parameters
        ----------
        a
            Rows of all groups, concatenated: an NVFP4 operand of shape (M, K), or fp16 or bf16
            rows; or a list with one operand per group.
        group_sizes
            Integers (G,): rows of each group, adding up to M. Not given with a list.
        stream
            Where the copies are queued; the caller may change its arrays on return.

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
        scales = self._scales(inputs)
        with self._lock:
            self._check_open()
            self._path.set_inputs(inputs, scales, self.device.as_stream(stream))
            self._inputs = inputs
            self._launched = False

    def _scales(self, inputs: Inputs) -> NDArray[np.float64]:
        """Return alpha times both global scales of each group, 0 for an empty one."""
        scales = self.alpha * self.weights.global_scales
        scales = scales * inputs.global_scales(self.problem.num_groups)
        scales[inputs.sizes == 0] = 0
        with np.errstate(over="ignore", under="ignore"):
            bad = ~np.isfinite(scales.astype(np.float32))
        if bad.any():
            g = int(np.argmax(bad))
            raise ValueError(
                f"alpha times the global scales of a and b is {scales[g]:.6g} in group {g}; it "
                "must be finite in float32 (at most 3.4e38): give a smaller alpha"
            )
        return scales

    def launch(self, stream: object = None) -> None:
        """Compute the result of the current inputs, in the order of `stream`."""
        with self._lock:
            self._checked_inputs()
            target = self.device.as_stream(stream)
            self._path.launch(target)
            target.on_launch(self._mark_launched)

    def _mark_launched(self) -> None:
        self._launched = True

    def capture(self, stream: object = None) -> Graph:
        """Return a graph that computes the result of the inputs that are current when it runs.

        Inputs, group sizes included, are given by `set_inputs` between replays; the graph need not
        be captured again. It keeps the plan alive, and its buffers even when the plan is closed.
        """
        with self._lock:
            self._check_open()
            target = self.device.as_stream(stream)
            with target.capture() as capture:
                capture.keep(self, *self._path.buffers)
                self._path.launch(target)
                target.on_launch(self._mark_launched)
            return capture.graph

    @overload
    def output(self, out: None = None, stream: object = None) -> Any: ...

    @overload
    def output(self, out: NDArray[Any], stream: object = None) -> NDArray[Any]: ...

    @overload
    def output(self, out: Sequence[NDArray[Any]], stream: object = None) -> Outputs: ...

    def output(
        self,
        out: NDArray[Any] | Sequence[NDArray[Any]] | None = None,
        stream: object = None,
    ) -> Any:
        """Return the result of the last launch, or of the last replay of a captured graph.

        Parameters
        ----------
        out
            Array (M, N) that takes the result; a list of them for list inputs.
        stream
            The stream of the launch; the result is complete on return.

        Returns
        -------
        numpy.ndarray or list of numpy.ndarray
            One (M, N) array for concatenated rows, a list of (M_g, N_g) for lists.
        """
        with self._lock:
            inputs = self._checked_inputs()
            if not self._launched:
                raise ValueError(
                    "nothing was computed from these inputs yet; call launch, or launch the graph"
                )
            shapes = inputs.result_shapes(self.weights)
            targets = None if out is None else self._checked_targets(inputs, shapes, out)
            results = self._path.read(shapes, targets, self.device.as_stream(stream))
            return results[0] if inputs.ragged else results

    def poison_output(self, stream: object = None) -> None:
        """Fill the result on the device with NaN, so that what a launch leaves out shows.

        For tests; on the cpu every launch has a new result anyway.
        """
        with self._lock:
            self._check_open()
            if isinstance(self._path, KernelPlan):
                self._path.poison_output(self.device.as_stream(stream))

    def _checked_inputs(self) -> Inputs:
        self._check_open()
        if self._inputs is None:
            raise ValueError("the plan has no inputs yet; call set_inputs first")
        return self._inputs

    def _checked_targets(
        self,
        inputs: Inputs,
        shapes: list[tuple[int, int]],
        out: NDArray[Any] | Sequence[NDArray[Any]],
    ) -> Outputs:
        if inputs.ragged:
            given: Sequence[Any] = [out]
        elif isinstance(out, Sequence) and len(out) == len(shapes):
            given = out
        else:
            raise ValueError(f"out must be a list of {len(shapes)} arrays, one per group")
        rows = inputs.rows if isinstance(inputs.rows, tuple) else (inputs.rows,)
        for g, (target, shape) in enumerate(zip(given, shapes, strict=True)):
            check_out(target, shape, self.out_dtype, "out" if inputs.ragged else f"out[{g}]")
        check_disjoint(given, [*self.weights.groups, *rows])
        return list(given)

    def check_output(self, out: NDArray[Any] | Sequence[NDArray[Any]]) -> None:
        """Raise unless `out` can take the result of the current inputs; see `output`."""
        inputs = self._checked_inputs()
        self._checked_targets(inputs, inputs.result_shapes(self.weights), out)

    @property
    def nbytes(self) -> int:
        """Bytes that the plan owns on its device, or holds on the cpu."""
        return self._path.nbytes

    def close(self) -> None:
        """Release what the plan holds; closing twice is harmless."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._inputs = None
                self._path.close()
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
            f"max_m {self.problem.max_m}, {self.problem.activations} -> {self.out_dtype.name}, "
            f"{self._path.name} on {self.device.name}, {self.nbytes} bytes>"
        )

    def _repr_html_(self) -> str:
        """Show it in a notebook: its problem, what runs it, and what it was given."""
        shapes = sorted(set(self.problem.shapes))
        listed = ", ".join(str(shape) for shape in shapes[:4]) + ", …" * (len(shapes) > 4)
        inputs = "none yet"
        if self._closed:
            inputs = "none: the plan is closed"
        elif self._inputs is not None:
            sizes = self._inputs.sizes
            inputs = f"{sizes.sum()} rows; groups of {_listed(sizes)}"
        return html.card(
            "Grouped GEMM plan",
            {
                "groups": self.problem.num_groups,
                "(N, K)": listed,
                "capacity": f"{self.problem.max_m} rows",
                "inputs": inputs,
                "types": f"{self.problem.activations} × nvfp4 -> {self.out_dtype.name}",
                "runs": f"{self._path.name} on {self.device.name}",
                "bytes": f"{html.size(self.nbytes)} of weights and buffers",
            },
        )


def _listed(sizes: NDArray[Any], most: int = 12) -> str:
    """Write group sizes, not all if there are many."""
    text = ", ".join(str(size) for size in sizes[:most].tolist())
    return text + f", … ({sizes.size} groups)" * (sizes.size > most)


@overload
def grouped_gemm(
    device: Device | str,
    a: Rows,
    b: Nvfp4Array | Sequence[Nvfp4Array],
    group_sizes: ArrayLike | None = None,
    *,
    alpha: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    out: NDArray[Any] | None = None,
    stream: object = None,
    batch_invariant: bool = False,
) -> NDArray[Any]: ...


@overload
def grouped_gemm(
    device: Device | str,
    a: Sequence[Rows],
    b: Nvfp4Array | Sequence[Nvfp4Array],
    group_sizes: None = None,
    *,
    alpha: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    out: Sequence[NDArray[Any]] | None = None,
    stream: object = None,
    batch_invariant: bool = False,
) -> Outputs: ...


def grouped_gemm(
    device: Device | str,
    a: Rows | Sequence[Rows],
    b: Nvfp4Array | Sequence[Nvfp4Array],
    group_sizes: ArrayLike | None = None,
    *,
    alpha: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    out: NDArray[Any] | Sequence[NDArray[Any]] | None = None,
    stream: object = None,
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
    stream
        Where the work is queued: None for the device's own stream, a `Stream`, an integer handle,
        or any object with ``__cuda_stream__``.
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
        out_dtype = np.float16
        if isinstance(first, np.ndarray):
            out_dtype = checked_out_dtype(first.dtype, "out")
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
        plan.set_inputs(a, group_sizes, stream=stream)
        if out is not None:
            plan.check_output(out)
        plan.launch(stream)
        return plan.output(out, stream)
