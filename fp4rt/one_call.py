"""One grouped GEMM on a device with kernels: a plan from the cache, used once more."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fp4rt import arguments, transfer
from fp4rt.device import Buffer, Device, Stream
from fp4rt.kernels import KernelPlan, as_float32
from fp4rt.nvfp4 import Nvfp4Array
from fp4rt.plan_cache import PlanCache
from fp4rt.problem import Inputs, Problem, WeightFacts, Weights
from fp4rt.rows import DeviceRows, Rows
from fp4rt.weights import DeviceWeights

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike, NDArray

FLOAT16 = np.dtype(np.float16)


def result_dtype(out: object, out_dtype: DTypeLike | None) -> np.dtype[Any]:
    """Return the output dtype: the one asked for, otherwise that of `out`, otherwise float16."""
    if out_dtype is not None:
        return arguments.checked_out_dtype(out_dtype)
    first = out[0] if isinstance(out, (list, tuple)) and out else out
    if isinstance(first, (np.ndarray, Buffer)):
        return arguments.checked_out_dtype(first.dtype, "out")
    return FLOAT16


def run(
    device: Device,
    a: Rows | DeviceRows | Sequence[Rows],
    b: Nvfp4Array | Sequence[Nvfp4Array] | DeviceWeights,
    group_sizes: ArrayLike | None,
    *,
    alpha: ArrayLike | None,
    out_dtype: DTypeLike | None,
    out: Any,
    stream: object,
    batch_invariant: bool,
) -> Any:
    """Do what `fp4rt.grouped_gemm` promises, on a device with kernels."""
    if type(a) is DeviceRows and type(b) is DeviceWeights and alpha is None:
        found = _again(device, a, b, group_sizes, out_dtype, out, stream, batch_invariant)
        if found is not None:
            return found
    weights = b if isinstance(b, DeviceWeights) else arguments.as_weights(b)
    if isinstance(weights, DeviceWeights):
        arguments.check_device(device, weights, "b")
    facts = weights.facts
    dtype = result_dtype(out, out_dtype)
    invariant = arguments.checked_flag(batch_invariant, "batch_invariant")
    inputs = _inputs(a, group_sizes, facts)
    if isinstance(inputs.rows, DeviceRows):
        arguments.check_device(device, inputs.rows, "a")
    num_groups = len(facts.shapes)
    m = inputs.total
    factors = None if alpha is None else arguments.checked_alpha(alpha, num_groups)
    on_device = isinstance(inputs.rows, DeviceRows)
    target = device.as_stream(stream)
    if not on_device:
        arguments.refuse_capture(target, "grouped_gemm of operands on the host")
    shapes = inputs.result_shapes(facts)
    if on_device and out is not None:
        size = shapes[0][0] * shapes[0][1]
        arguments.check_result_buffer(device, out, size, dtype)
        assert isinstance(inputs.rows, DeviceRows)
        resident_b = weights if isinstance(weights, DeviceWeights) else None
        arguments.check_apart(out.address, size * dtype.itemsize, inputs.rows, resident_b)
    elif out is not None:
        operands: tuple[Nvfp4Array, ...] = ()
        if isinstance(weights, Weights):
            operands = weights.groups if weights.stack is None else (weights.stack,)
        out = arguments.check_targets(inputs, shapes, dtype, operands, out)

    activations = inputs.activations if num_groups else "nvfp4"
    resident = isinstance(weights, DeviceWeights)
    key = (facts.key, m, activations, dtype, invariant, resident, on_device)
    scale_key = None
    if factors is None and isinstance(weights, DeviceWeights):
        scale_key = (weights.generation, _scale_of(inputs.rows))
    call = _Call(device, weights, inputs, factors, scale_key, target)
    cache = None if target.capturing else device.attached(PlanCache)
    plan = None if cache is None else cache.take(key)
    try:
        if plan is None:
            problem = Problem(facts.padded_shapes, m, activations, dtype.name, invariant)
            plan = call.new_plan(problem, own_rows=not on_device)
        if on_device:
            result = target.alloc(shapes[0], dtype) if out is None else out
            call.on_device(plan, result)
        else:
            results = call.on_host(plan, shapes, out)
            result = results[0] if inputs.ragged else results
    except BaseException:
        if plan is not None:
            plan.close()
        raise
    if cache is not None:
        plan.unbind()
        cache.give(key, plan)
    return result


def _inputs(
    a: Rows | DeviceRows | Sequence[Rows], group_sizes: ArrayLike | None, facts: WeightFacts
) -> Inputs:
    if isinstance(a, DeviceRows) and facts.width is not None and a.k == facts.shapes[0][1]:
        sizes = arguments.plain_sizes(group_sizes, len(facts.shapes), a.shape[0])
        if sizes is not None:
            return Inputs(a, np.array(sizes, np.int64))
    return arguments.as_inputs(a, group_sizes, facts)


def _scale_of(rows: object) -> Hashable:
    """Return the scale of all rows for a key, where it is one number."""
    if isinstance(rows, (DeviceRows, Nvfp4Array)):
        return float(rows.global_scale)
    return 1.0 if isinstance(rows, np.ndarray) else object()


def _again(
    device: Device,
    a: DeviceRows,
    b: DeviceWeights,
    group_sizes: ArrayLike | None,
    out_dtype: DTypeLike | None,
    out: Any,
    stream: object,
    batch_invariant: bool,
) -> Buffer | None:
    """Do a call like an earlier one with operands on the device; None where that can't be.

    `run` does the same and more; here every microsecond counts.
    """
    facts, m = b.facts, a.shape[0]
    sizes = arguments.plain_sizes(group_sizes, b.num_groups, m)
    if sizes is None or b.device is not device or a.kind[0] is not device:
        return None
    if facts.width is None or a.k != facts.shapes[0][1] or type(batch_invariant) is not bool:
        return None
    a.check_open()
    b.check_open()
    dtype = FLOAT16
    if out_dtype is not None or out is not None:
        dtype = result_dtype(out, out_dtype)
    if out is not None:
        arguments.check_result_buffer(device, out, m * facts.width, dtype)
        arguments.check_apart(out.address, m * facts.width * dtype.itemsize, a, b)
    target = device.as_stream(stream)
    if target.capturing:
        return None
    cache = device.attached(PlanCache)
    key = (facts.key, m, a.activations, dtype, batch_invariant, True, True)
    plan = cache.take_if(key, (b.generation, a.global_scale))
    if plan is None:
        return None
    try:
        result = target.alloc((m, facts.width), dtype) if out is None else out
        plan.bind_weights(b)
        plan.bind_rows(a)
        plan.bind_result(result)
        plan.set_scalars(sizes, None, target)
        plan.launch(target)
    except BaseException:
        plan.close()
        raise
    plan.unbind()
    cache.give(key, plan)
    return result


class _Call:
    """What one call is about; its methods use a plan for it."""

    def __init__(
        self,
        device: Device,
        weights: Weights | DeviceWeights,
        inputs: Inputs,
        factors: NDArray[np.float64] | None,
        scale_key: Hashable,
        stream: Stream,
    ) -> None:
        self.device, self.weights, self.inputs = device, weights, inputs
        self.factors, self.scale_key, self.stream = factors, scale_key, stream
        self.facts = weights.facts

    def new_plan(self, problem: Problem, *, own_rows: bool) -> KernelPlan:
        """Return a plan whose weights, if it has room for them, are not there yet."""
        if isinstance(self.weights, DeviceWeights):
            return KernelPlan(
                self.device, self.weights, problem, own_rows=own_rows, own_result=own_rows
            )
        room = DeviceWeights(self.device, self.facts)
        plan = KernelPlan(self.device, room, problem, own_rows=own_rows, own_result=own_rows)
        plan.own_weights()
        return plan

    def alphas(self, plan: KernelPlan) -> NDArray[np.float32] | None:
        """Return alpha times both global scales of each group, None if the plan has them."""
        if self.scale_key is not None and plan.scale_key == self.scale_key:
            return None
        factors = self.factors
        if factors is None:
            factors = np.ones(len(self.facts.shapes), np.float64)
        scales, lasting = arguments.combined_scales(factors, self.facts, self.inputs)
        plan.scale_key = self.scale_key if lasting else None
        return as_float32(scales)

    def bind(self, plan: KernelPlan) -> None:
        """Have the weights in place, or bound."""
        if isinstance(self.weights, DeviceWeights):
            plan.bind_weights(self.weights)
        else:
            plan.order(self.stream)
            plan.own_weights().fill(self.weights, self.stream)

    def on_device(self, plan: KernelPlan, result: Buffer) -> None:
        """Queue the call for rows and a result that are on the device."""
        rows = self.inputs.rows
        assert isinstance(rows, DeviceRows)
        alphas = self.alphas(plan)
        self.bind(plan)
        plan.bind_rows(rows)
        plan.bind_result(result)
        plan.set_scalars(self.inputs.sizes, alphas, self.stream)
        plan.launch(self.stream)

    def on_host(
        self,
        plan: KernelPlan,
        shapes: list[tuple[int, int]],
        targets: list[NDArray[Any]] | None,
    ) -> list[NDArray[Any]]:
        """Move the operands, launch, and return the result."""
        alphas = self.alphas(plan)
        moved = None if isinstance(self.weights, DeviceWeights) else self.weights
        if transfer.worthwhile(plan, self.inputs, moved, self.stream):
            fresh = targets is None
            if targets is None:
                targets = [np.empty(shape, plan.out_dtype) for shape in shapes]
            if isinstance(self.weights, DeviceWeights):
                plan.bind_weights(self.weights)
            plan.set_scalars(self.inputs.sizes, alphas, self.stream)
            transfer.run(plan, self.inputs, moved, targets, self.stream, fresh=fresh)
            return targets
        self.bind(plan)
        plan.send_rows(self.inputs, alphas, self.stream)
        plan.launch(self.stream)
        return plan.read(shapes, targets, self.stream)
