"""The BLAS path of a plan: what the cpu device computes.

Operands are decoded without their global scales, which is exact in fp32, a panel of B's rows at a
time, so the scratch memory is one group's A, one panel of B and their product. The scalars
(alpha and both global scales) multiply the fp32 sum once, as the GPU kernels do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from fp4rt.host import HostBuffer, HostStream
from fp4rt.nvfp4 import Nvfp4Array, decode
from fp4rt.problem import Inputs, Problem, Weights
from fp4rt.rows import DeviceRows, Rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fp4rt.device import Buffer, Graph, Stream
    from fp4rt.weights import DeviceWeights

PANEL_BYTES = 1 << 24
"""fp32 bytes of B decoded at a time: enough for BLAS to run at full rate."""

THIN_ROWS = 192
"""Up to this many rows of A, BLAS is faster with B on the left (a quarter at 64 rows) and the
result is small enough to transpose. The sums are the same: over K, in order."""

ROW_STEP = 16
SMALLEST_PRODUCT = 1 << 21
"""BLAS libraries take other code paths for vectors and for small products, which add in another
order. Every product is padded with zero rows to at least this many multiply-adds, and to steps of
16 rows and columns, so that a row's bits do not depend on how many rows are beside it."""


def _padded(extent: int) -> int:
    return -(-extent // ROW_STEP) * ROW_STEP


def _decoded(operand: Nvfp4Array, out: NDArray[np.float32]) -> None:
    """Fill `out` with e2m1 · e4m3 of `operand`, K in whole scale blocks, and zero rows beyond."""
    rows = operand.shape[0]
    decode(operand.values, operand.scales, out=out[:rows])
    out[rows:] = 0


def group_gemm(a: Rows, b: Nvfp4Array, scale: float, out: NDArray[Any]) -> None:
    """Compute ``out = scale · a · bᵀ`` for one group, leaving out both global scales.

    Parameters
    ----------
    a
        NVFP4 operand or fp16/bf16 rows, logical shape (M, K).
    b
        NVFP4 operand, logical shape (N, K).
    scale
        alpha times both global scales; applied in fp32, or in fp64 where fp32 can't hold it.
    out
        Array (M, N) of float16, bfloat16 or float32; written in full.
    """
    m, n = out.shape
    if m == 0 or n == 0:
        return
    k = 2 * b.values.shape[-1]
    panels = -(-4 * n * k // PANEL_BYTES)
    panel = _padded(-(-n // panels))
    rows = max(_padded(m), _padded(-(-SMALLEST_PRODUCT // (panel * k))))
    left = np.empty((rows, k), np.float32)
    if isinstance(a, Nvfp4Array):
        _decoded(a, left)
    else:
        left[:m, : a.shape[1]] = a
        left[m:] = left[:, a.shape[1] :] = 0
    info = np.finfo(np.float32)
    fits = scale == 0 or float(info.tiny) <= abs(scale) <= float(info.max)
    factor = np.float32(scale) if fits else np.float64(scale)
    right = np.empty((panel, k), np.float32)
    thin = rows <= THIN_ROWS
    if thin:
        left = np.asfortranarray(left)
        product = np.empty((panel, rows), np.float32).T
    else:
        product = np.empty((rows, panel), np.float32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for start in range(0, n, panel):
            target = out[:, start : start + panel]
            _decoded(b[start : start + panel], right)
            # In place where the product has the shape and type of the result.
            direct = not thin and target.shape == product.shape and target.dtype == np.float32
            result = target if direct else product
            if thin:
                np.matmul(right, left.T, out=result.T)
            else:
                np.matmul(left, right.T, out=result)
            np.multiply(result, factor, out=result, casting="same_kind")
            if not direct:
                target[...] = product[:m, : target.shape[1]]


@dataclass
class _State:
    """What a computation reads and writes: the plan's, and that of the graphs it was captured in.

    `views` are the arrays behind rows on the device, which outlive the buffers.
    """

    weights: Weights
    dtype: np.dtype[Any]
    inputs: Inputs | None = None
    views: tuple[NDArray[Any], ...] = ()
    scales: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    results: list[NDArray[Any]] | None = None

    def take(
        self,
        inputs: Inputs,
        views: tuple[NDArray[Any], ...],
        scales: NDArray[np.float64] | None,
    ) -> None:
        self.inputs, self.views, self.results = inputs, views, None
        if scales is not None:
            self.scales = scales

    def rescale(self, scales: NDArray[np.float64]) -> None:
        self.scales, self.results = scales, None

    def compute(self) -> None:
        inputs = self.inputs
        if inputs is None:
            raise ValueError("the plan has no inputs yet; call set_inputs first")
        if isinstance(inputs.rows, DeviceRows):
            inputs = replace(inputs, rows=inputs.rows.as_operand(*self.views))
        shapes = inputs.result_shapes(self.weights)
        results = [np.empty(shape, self.dtype) for shape in shapes]
        for g, weights in enumerate(self.weights.groups):
            if inputs.ragged:
                target = results[0][inputs.offsets[g] : inputs.offsets[g + 1]]
            else:
                target = results[g]
            group_gemm(inputs.group(g), weights, float(self.scales[g]), target)
        self.results = results

    def deliver(self, target: NDArray[Any]) -> None:
        assert self.results is not None
        target[...] = self.results[0].reshape(target.shape)


class BlasPlan:
    """The computation of one plan on a device without kernels.

    Parameters
    ----------
    weights
        B of every group; held, not copied.
    problem
        Shapes, capacity and types.
    """

    name = "BLAS"

    def __init__(self, weights: Weights | DeviceWeights, problem: Problem) -> None:
        self._problem = problem
        self.resident = None if isinstance(weights, Weights) else weights
        self._rows: DeviceRows | None = None
        self._state = _State(self._on_host(weights), problem.out_numpy)

    def _on_host(self, weights: Weights | DeviceWeights) -> Weights:
        if isinstance(weights, Weights):
            return weights
        weights.check_open()
        assert weights.host is not None, "the cpu has its weights on the host"
        return weights.host

    @property
    def operands(self) -> tuple[Nvfp4Array, ...]:
        """What of the caller's the plan reads at a launch."""
        return self._state.weights.groups

    @property
    def nbytes(self) -> int:
        """Bytes of the weights that the plan holds."""
        return sum(group.nbytes for group in self._state.weights.groups)

    def set_inputs(
        self, inputs: Inputs, scales: NDArray[np.float64] | None, stream: Stream
    ) -> None:
        """Take a copy of the rows, group sizes and each group's scale.

        Rows on the device are read at the launch; no scales means those of before.
        """
        rows = inputs.rows
        views: tuple[NDArray[Any], ...] = ()
        if isinstance(rows, DeviceRows):
            views = tuple(part.array for part in rows.buffers if isinstance(part, HostBuffer))
        else:
            inputs = inputs.copy()
        _do(stream, partial(self._state.take, inputs, views, scales))
        self._rows = rows if isinstance(rows, DeviceRows) else None

    def sibling(self) -> BlasPlan:
        """Return another path with the same weights."""
        return BlasPlan(self.resident or self._state.weights, self._problem)

    def retire(self) -> None:
        """End a sibling's use."""
        self.close()

    def send_rows(self, inputs: Inputs, scales: NDArray[np.float64] | None, stream: Stream) -> None:
        """Do as `set_inputs`."""
        self.set_inputs(inputs, scales, stream)

    def set_scales(self, scales: NDArray[np.float64], stream: Stream) -> None:
        """Change each group's scale."""
        _do(stream, partial(self._state.rescale, scales))

    def bind_weights(self, weights: DeviceWeights) -> None:
        """Use other weights of the same shapes from now on."""
        self._state.weights, self._state.results = self._on_host(weights), None
        self.resident = weights

    def capture(self, stream: Stream, hook: Callable[[], None], *keep: object) -> Graph:
        """Return a graph of the computation, which calls `hook` when it is launched."""
        with stream.capture() as capture:
            capture.keep(*keep)
            self.launch(stream)
            stream.on_launch(hook)
        return capture.graph

    def launch(self, stream: Stream) -> None:
        """Compute, or record the computation during a capture."""
        self.check_bound()
        _do(stream, self._state.compute)

    def check_bound(self, *, but: str = "") -> None:
        """Raise ClosedError if something that launches use was closed, `but` left out."""
        if self.resident is not None:
            self.resident.check_open()
        if self._rows is not None and but != "rows":
            self._rows.check_open()

    def deliver(self, target: Buffer, stream: Stream) -> None:
        """Write the one result to a buffer of its size, in the order of `stream`."""
        assert isinstance(target, HostBuffer)
        _do(stream, partial(self._state.deliver, target.array))

    def read(
        self,
        shapes: list[tuple[int, int]],
        targets: list[NDArray[Any]] | None,
        stream: Stream,
    ) -> list[NDArray[Any]]:
        """Return a copy of the last result, in `targets` if given."""
        results = self._state.results
        if results is None or [result.shape for result in results] != shapes:
            raise ValueError(
                "nothing was computed from these inputs yet; call launch, or launch the graph"
            )
        if targets is None:
            return [result.copy() for result in results]
        for target, result in zip(targets, results, strict=True):
            target[...] = result
        return targets

    def close(self) -> None:
        """Let go of weights, inputs and the result; graphs have them still."""
        self._state = _State(Weights((), None), self._state.dtype)
        self.resident = self._rows = None


def _do(stream: Stream, call: Callable[[], None]) -> None:
    assert isinstance(stream, HostStream), "a device without kernels has host streams"
    stream.do(call)
