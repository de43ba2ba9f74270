"""Grouped GEMM as one call.

``D_g = alpha_g · A_g · B_gᵀ`` for every group g. There is no second way to compute it: a call uses
a plan once, a new one on the cpu and one from the cache (`fp4rt.one_call`) elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from fp4rt import arguments, one_call
from fp4rt.device import Buffer, Device
from fp4rt.device import device as open_device
from fp4rt.nvfp4 import Nvfp4Array
from fp4rt.plan import GroupedGemmPlan, Outputs
from fp4rt.rows import DeviceRows, Rows
from fp4rt.weights import DeviceWeights

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike, NDArray

    Result = NDArray[Any] | Buffer | Outputs


@overload
def grouped_gemm(
    device: Device | str,
    a: Rows,
    b: Nvfp4Array | Sequence[Nvfp4Array] | DeviceWeights,
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
    a: DeviceRows,
    b: Nvfp4Array | Sequence[Nvfp4Array] | DeviceWeights,
    group_sizes: ArrayLike | None = None,
    *,
    alpha: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    out: Buffer | None = None,
    stream: object = None,
    batch_invariant: bool = False,
) -> Buffer: ...


@overload
def grouped_gemm(
    device: Device | str,
    a: Sequence[Rows],
    b: Nvfp4Array | Sequence[Nvfp4Array] | DeviceWeights,
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
    a: Rows | DeviceRows | Sequence[Rows],
    b: Nvfp4Array | Sequence[Nvfp4Array] | DeviceWeights,
    group_sizes: ArrayLike | None = None,
    *,
    alpha: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    out: NDArray[Any] | Buffer | Sequence[NDArray[Any]] | None = None,
    stream: object = None,
    batch_invariant: bool = False,
) -> Result:
    """Return ``alpha_g · A_g · B_gᵀ`` for every group g.

    Parameters
    ----------
    device
        A `Device`, or the name of one: ``"auto"``, ``"cuda:0"``, ``"emulator:sm_90a"``, ``"cpu"``.
    a
        Activations: rows of all groups concatenated, (M, K); or a list of (M_g, K_g). Each is an
        `Nvfp4Array`, or fp16 or bf16 rows where the device has a kernel for them. Concatenated
        rows may be on the device (`DeviceRows`); the result then stays there.
    b
        Weights: a (G, N, K) stack, one (N, K) operand, or a list of (N_g, K_g) operands; or what
        `fp4rt.upload_weights` put on the device.
    group_sizes
        Integers (G,): rows of each group, in order, adding up to M. Only with concatenated rows.
    alpha
        A number, or one per group; default 1.
    out_dtype
        float16 (default), bfloat16 or float32; default that of `out` if it is given.
    out
        Array or list of arrays that takes the result; for rows on the device, a `Buffer`.
    stream
        Where the work is queued: None for the device's own stream, a `Stream`, an integer handle,
        or any object with ``__cuda_stream__``.
    batch_invariant
        Give a row the same bits whatever else is in the batch, across kernel variants too.

    Returns
    -------
    numpy.ndarray, list of numpy.ndarray, or Buffer
        (M, N) for concatenated rows, a list of (M_g, N_g) for lists. For rows on the device a
        `Buffer` (M, N), ready in the order of the stream; anything else is complete on return.

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
    options: dict[str, Any] = {
        "alpha": alpha,
        "out_dtype": out_dtype,
        "out": out,
        "stream": stream,
        "batch_invariant": batch_invariant,
    }
    if isinstance(device, str):
        with open_device(device) as opened:
            return _compute(opened, a, b, group_sizes, options)
    if not isinstance(device, Device):
        raise TypeError(
            f"device must be a Device or the name of one, such as 'auto', got {device!r}"
        )
    return _compute(device, a, b, group_sizes, options)


def _compute(
    device: Device, a: Any, b: Any, group_sizes: ArrayLike | None, options: dict[str, Any]
) -> Result:
    run = _with_new_plan if device.image_kind is None else one_call.run
    result: Result = run(device, a, b, group_sizes, **options)
    return result


def _with_new_plan(
    device: Device,
    a: Any,
    b: Any,
    group_sizes: ArrayLike | None,
    *,
    alpha: ArrayLike | None,
    out_dtype: DTypeLike | None,
    out: Any,
    stream: object,
    batch_invariant: bool,
) -> Any:
    """Do what `grouped_gemm` promises, where a plan costs nothing to make."""
    weights = b if isinstance(b, DeviceWeights) else arguments.as_weights(b)
    inputs = arguments.as_inputs(a, group_sizes, weights.facts)
    on_device = isinstance(inputs.rows, DeviceRows)
    target = device.as_stream(stream)
    if not on_device:
        arguments.refuse_capture(target, "grouped_gemm of operands on the host")
    dtype = one_call.result_dtype(out, out_dtype)
    shapes = inputs.result_shapes(weights.facts)
    if out is not None and on_device:
        arguments.check_result_buffer(device, out, shapes[0][0] * shapes[0][1], dtype)
    elif out is not None:
        arguments.check_targets(inputs, shapes, dtype, (), out)
    plan = GroupedGemmPlan(
        device,
        b,
        max_m=inputs.total,
        alpha=alpha,
        out_dtype=dtype,
        activations=inputs.activations if inputs.sizes.size else "nvfp4",
        batch_invariant=batch_invariant,
    )
    with plan:
        if isinstance(a, DeviceRows) and target.capturing:
            result = device.alloc(shapes[0], dtype) if out is None else out
            plan.record(a, group_sizes, result, target)
            return result
        result = plan.run(a, group_sizes, out=out, stream=target)
        if out is None and on_device:
            result = device.upload(result)
        return result


def empty_pinned(
    device: Device, shape: int | Sequence[int], dtype: DTypeLike = np.uint8
) -> NDArray[Any]:
    """Return an uninitialised array in page-locked memory, for fast copies to and from a device.

    The GPU copies from and to such arrays itself: operands made of them
    (`Nvfp4Array.from_parts`) and results that go to them (`out=`) take no detour. Page-locking
    takes about 0.4 ms a megabyte, so keep such arrays; too many of them leave the system short of
    memory.

    Parameters
    ----------
    device
        An open `Device`; on the cpu and the emulators the memory is ordinary.
    shape, dtype
        As for `numpy.empty`.

    Examples
    --------
    >>> import fp4rt
    >>> with fp4rt.device("cpu") as dev:
    ...     fp4rt.empty_pinned(dev, (2, 3), np.float16).shape
    (2, 3)
    """
    if not isinstance(device, Device):
        raise TypeError(f"device must be an open Device, got {device!r}; use fp4rt.device(name)")
    return device.empty_pinned(shape, dtype)
