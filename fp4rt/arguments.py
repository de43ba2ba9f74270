"""What callers pass, checked once for every device.

Each function returns an argument in the one form that the rest works with, or raises what the
caller is told: the value, the rule and one that would work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.lib.array_utils import byte_bounds

from fp4rt.codes import real_numbers, refuse_masked
from fp4rt.device import Buffer, Device, Stream
from fp4rt.nvfp4 import Nvfp4Array
from fp4rt.problem import OUT_DTYPES, Inputs, WeightFacts, Weights
from fp4rt.rows import DeviceRows, Rows, checked_rows

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike, NDArray


class OnDevice(Protocol):
    """Something that is on a device."""

    @property
    def device(self) -> Device:
        """Where."""

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Its parts: first address, and the one after the last."""

    def check_open(self) -> None:
        """Raise ClosedError if its memory was given back."""


def as_weights(b: object) -> Weights:
    """Normalise B: one (N, K) operand, a (G, N, K) stack, or a list of (N_g, K_g) operands."""
    if isinstance(b, Nvfp4Array):
        if len(b.shape) == 2:
            return Weights((b,), b.shape[0], single=True)
        return Weights(tuple(b[g] for g in range(b.shape[0])), b.shape[1], stack=b)
    if isinstance(b, np.ndarray):
        raise TypeError(
            f"b is a plain {b.dtype} array of shape {b.shape}; quantize it first: fp4rt.quantize(b)"
        )
    if not isinstance(b, Sequence) or isinstance(b, (str, bytes)):
        raise TypeError(f"b must be an Nvfp4Array or a list of them, got {type(b).__name__}")
    for g, group in enumerate(b):
        if not isinstance(group, Nvfp4Array):
            raise TypeError(
                f"b[{g}] must be an Nvfp4Array, got {type(group).__name__}; use fp4rt.quantize"
            )
        if len(group.shape) != 2:
            raise ValueError(f"b[{g}] must have shape (N, K), got {group.shape}")
    shapes = {group.shape for group in b}
    width = next(iter(shapes))[0] if len(shapes) == 1 else None
    return Weights(tuple(b), width)


def _array(given: ArrayLike, name: str, wanted: str) -> NDArray[Any]:
    try:
        return np.asarray(given)
    except ValueError as error:  # a nested list whose parts differ in length
        raise ValueError(f"{name} is {given!r}; it must be {wanted}") from error


def _check_k(name: str, a: Rows | DeviceRows, weights: WeightFacts, g: int) -> None:
    k, (n, wanted) = a.shape[1], weights.shapes[g]
    if k == wanted:
        return
    hint = "A and B of a group must have the same logical K"
    if 2 * k == wanted or k == 2 * wanted:
        hint += "; K counts elements, not packed bytes (two elements per byte)"
    elif k == n:
        hint += f"; B is (N, K), here {(n, wanted)}: for a @ b, quantize b's transpose"
    raise ValueError(f"{name} has K = {k}, b of group {g} has K = {wanted}: {hint}")


def checked_sizes(group_sizes: ArrayLike, num_groups: int, m: int) -> NDArray[np.int64]:
    """Return group sizes as int64 (G,), or raise ValueError or TypeError with the rule broken."""
    refuse_masked(group_sizes, "group_sizes")
    if isinstance(group_sizes, (set, frozenset, dict)):
        raise TypeError(
            f"group_sizes is a {type(group_sizes).__name__}, which has no order of groups; give a "
            f"list of {num_groups} integers"
        )
    if isinstance(group_sizes, (list, tuple)):
        for g, size in enumerate(group_sizes):
            if isinstance(size, (bool, np.bool_)):
                raise TypeError(
                    f"group_sizes must be integers, got bool: [{g}] is {size}; use {int(size)} "
                    "for that number of rows"
                )
    sizes = _array(group_sizes, "group_sizes", f"{num_groups} integers, one per group")
    if sizes.size == 0:
        sizes = sizes.astype(np.int64)
    if sizes.dtype.kind not in "iu" or (sizes.dtype == np.uint64 and (sizes >> 63).any()):
        for g, size in enumerate(np.array(group_sizes, object).flat):
            if isinstance(size, int) and size >= 2**63:  # numpy has no one type for such integers
                raise ValueError(
                    f"group_sizes[{g}] = {size}, but a has {m} rows; sizes must add up to them"
                )
            if isinstance(size, int) and size < -(2**63):
                raise ValueError(
                    f"group_sizes[{g}] = {size} is negative; an empty group has 0 rows"
                )
    if sizes.dtype.kind not in "iu":
        raise TypeError(
            f"group_sizes must be integers, got {sizes.dtype}; use "
            "np.array(list(group_sizes), np.int64)"
        )
    if sizes.ndim != 1:
        raise ValueError(
            f"group_sizes must have shape ({num_groups},), got {sizes.shape}; give one integer "
            "per group"
        )
    if len(sizes) != num_groups:
        raise ValueError(
            f"group_sizes has {len(sizes)} entries for {num_groups} groups of weights; "
            "give one per group, 0 for an empty one"
        )
    sizes = sizes.astype(np.int64)
    if (sizes < 0).any():
        g = int(np.argmax(sizes < 0))
        raise ValueError(f"group_sizes[{g}] = {sizes[g]} is negative; an empty group has 0 rows")
    total = sum(int(size) for size in sizes)  # Python's integers: no overflow
    if total != m:
        raise ValueError(f"group_sizes add up to {total}, but a has {m} rows; they must agree")
    return sizes


def as_inputs(
    a: Rows | DeviceRows | Sequence[Rows],
    group_sizes: ArrayLike | None,
    b: Weights | WeightFacts,
) -> Inputs:
    """Normalise A against B: ragged rows with `group_sizes`, or a list with one operand a group."""
    weights = b.facts
    num_groups = len(weights.shapes)
    if isinstance(a, (list, tuple)):
        if group_sizes is not None:
            raise ValueError("group_sizes goes with concatenated rows; a list has its own sizes")
        if len(a) != num_groups:
            raise ValueError(
                f"a has {len(a)} operands, b has {num_groups} groups; give one operand per group, "
                "of 0 rows for an empty one"
            )
        rows = tuple(checked_rows(item, f"a[{g}]") for g, item in enumerate(a))
        kinds = {"nvfp4" if isinstance(item, Nvfp4Array) else str(item.dtype) for item in rows}
        if len(kinds) > 1:
            raise TypeError(f"all of a must be of one kind, got {', '.join(sorted(kinds))}")
        for g, item in enumerate(rows):
            _check_k(f"a[{g}]", item, weights, g)
        return Inputs(rows, np.array([item.shape[0] for item in rows], np.int64))
    ragged = a if isinstance(a, DeviceRows) else checked_rows(a, "a")
    if weights.width is None and num_groups:
        shapes = sorted(set(weights.shapes))
        raise ValueError(
            f"b's groups differ in shape ({shapes[0]}, {shapes[1]}, …), so one array can't hold "
            "the result; pass a as a list with one operand per group"
        )
    m = ragged.shape[0]
    plain = plain_sizes(group_sizes, num_groups, m)
    if plain is not None:
        _check_k("a", ragged, weights, 0)
        return Inputs(ragged, np.array(plain, np.int64))
    if group_sizes is None:
        if not weights.single:
            raise ValueError(
                f"b has {num_groups} groups: give group_sizes, the rows of a in each group"
            )
        group_sizes = [m]
    sizes = checked_sizes(group_sizes, num_groups, m)
    if num_groups:
        _check_k("a", ragged, weights, 0)
    return Inputs(ragged, sizes)


def checked_alpha(alpha: ArrayLike | None, num_groups: int) -> NDArray[np.float64]:
    """Return alpha as float64 (G,) from None, a number, or one number per group."""
    if alpha is None:
        return np.ones(num_groups, np.float64)
    given = real_numbers(alpha, "alpha", f"real numbers: a number, or {num_groups} numbers")
    values = given.astype(np.float64)
    if values.shape not in ((), (1,), (num_groups,)):
        raise ValueError(
            f"alpha must be a number or have shape ({num_groups},), got {given.shape}; give one "
            "number, or one per group"
        )
    if not np.isfinite(values).all():
        raise ValueError(f"alpha must be finite, got {values[~np.isfinite(values)].flat[0]}")
    return np.array(np.broadcast_to(values, (num_groups,)))


def plain_sizes(group_sizes: object, num_groups: int, m: int) -> list[int] | None:
    """Return group sizes as a list if they are right and plain integers; None for the long way.

    `checked_sizes` is the long way: it takes more, and says what is wrong.

    Examples
    --------
    >>> plain_sizes([1, 2, 0], 3, 3), plain_sizes([1, 2], 3, 3), plain_sizes([4, -1], 2, 3)
    ([1, 2, 0], None, None)
    """
    if type(group_sizes) is np.ndarray:  # a masked array takes the long way
        if group_sizes.ndim != 1 or group_sizes.dtype.kind not in "iu":
            return None
        group_sizes = group_sizes.tolist()
    if type(group_sizes) is not list or len(group_sizes) != num_groups or not num_groups:
        return None
    if set(map(type, group_sizes)) != {int} or min(group_sizes) < 0 or sum(group_sizes) != m:
        return None
    return group_sizes


def combined_scales(
    alpha: NDArray[np.float64], weights: WeightFacts, inputs: Inputs
) -> tuple[NDArray[np.float64], bool]:
    """Return alpha times both global scales of each group, and if that holds for any group sizes.

    It does not where one is not finite in float32, which only an empty group may have (0 then).

    Raises
    ------
    ValueError
        If that of another group is not finite in float32.
    """
    scales = alpha * weights.global_scales * inputs.global_scales(len(alpha))
    with np.errstate(over="ignore", under="ignore"):
        bad = ~np.isfinite(scales.astype(np.float32))
    if not bad.any():
        return scales, True
    wrong = bad & (inputs.sizes > 0)
    if wrong.any():
        g = int(np.argmax(wrong))
        raise ValueError(
            f"alpha times the global scales of a and b is {scales[g]:.6g} in group {g}; it "
            "must be finite in float32 (at most 3.4e38): give a smaller alpha"
        )
    scales[bad] = 0
    return scales, False


def checked_flag(value: object, name: str) -> bool:
    """Return a bool from True, False or numpy's; TypeError for anything else."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def checked_out_dtype(dtype: DTypeLike, name: str = "out_dtype") -> np.dtype[Any]:
    """Return the output dtype; TypeError unless it is float16, bfloat16 or float32."""
    try:
        kind = np.dtype(np.float16 if dtype is None else dtype)  # None is float64 to numpy
    except TypeError as error:
        raise TypeError(
            f"{name} must be float16, bfloat16 or float32, got {dtype!r}, which is no dtype"
        ) from error
    if kind not in OUT_DTYPES:
        raise TypeError(f"{name} must be float16, bfloat16 or float32, got {kind}")
    return kind


def check_out(out: object, shape: tuple[int, int], dtype: np.dtype[Any], name: str) -> None:
    """Raise unless `out` is an array that can take a result of `shape` and `dtype`."""
    if not isinstance(out, np.ndarray):
        raise TypeError(f"{name} must be a numpy array, got {type(out).__name__}")
    refuse_masked(out, name)
    if out.shape != shape:
        raise ValueError(
            f"{name} must have shape {shape}, got {out.shape}; pass np.empty({shape}, "
            f"{dtype.name!r}), or leave it out"
        )
    if out.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, as out_dtype says, got {out.dtype}")
    if not out.flags.writeable:
        raise ValueError(f"{name} is read-only; pass a writable array")
    if _overlaps_itself(out):
        raise ValueError(
            f"{name} overlaps itself (its strides are {out.strides}); pass an array of its own "
            "memory"
        )


def check_result_buffer(device: Device, out: object, size: int, dtype: np.dtype[Any]) -> None:
    """Raise unless `out` is a buffer of `device` that has room for `size` elements of `dtype`."""
    if not isinstance(out, Buffer):
        raise TypeError(f"out must be a Buffer of {device.name}, got {type(out).__name__}")
    if out.device is not device:
        raise ValueError(f"out is on {out.device.name}, opened apart from this {device.name}")
    out._check_open()
    if out.dtype != dtype:
        raise TypeError(f"out must be {dtype}, as out_dtype says, got {out.dtype}")
    if out.size < size:
        raise ValueError(
            f"out has {out.size} elements, but the result has {size}; pass "
            f"device.alloc({size}, {dtype.name!r}), or a larger one"
        )
    if getattr(out, "readonly", False):
        raise ValueError("out is read-only: its owner shared it so; pass another buffer")


def check_apart(start: int, nbytes: int, *operands: OnDevice | None) -> None:
    """Raise ValueError if a result at this address lies where an operand is."""
    end = start + nbytes
    for operand in operands:
        for first, last in () if operand is None else operand.spans:
            if first < end and start < last and nbytes and first < last:
                what = "the rows" if isinstance(operand, DeviceRows) else "the weights"
                raise ValueError(f"out overlaps {what} on the device; pass memory of its own")


def refuse_capture(stream: Stream, call: str) -> None:
    """Raise RuntimeError on a stream that captures: `call` returns a result, and there is none."""
    if stream.capturing:
        raise RuntimeError(
            f"{call} inside a capture: it returns a result, but nothing is computed until the "
            "graph is launched; capture a plan's launch and call plan.output afterwards"
        )


def _overlaps_itself(out: NDArray[Any]) -> bool:
    """Whether elements share bytes; also True for strides so odd that it can't be ruled out."""
    if out.size == 0:
        return False
    reach = out.itemsize
    for step, extent in sorted((abs(s), n) for s, n in zip(out.strides, out.shape, strict=True)):
        if extent > 1 and step < reach:
            return True
        reach += step * (extent - 1)
    return False


def check_device(device: Device | str, operand: OnDevice, name: str) -> None:
    """Raise unless an operand is on this very device, and still there."""
    if operand.device is not device:
        here = device if isinstance(device, str) else f"this {device.name}"
        raise ValueError(
            f"{name} is on {operand.device.name}, opened apart from {here}; give the device that "
            "it is on, or upload it to this one"
        )
    operand.check_open()


def check_targets(
    inputs: Inputs,
    shapes: list[tuple[int, int]],
    dtype: np.dtype[Any],
    operands: Sequence[Nvfp4Array],
    out: object,
) -> list[NDArray[Any]]:
    """Return the arrays that take a result on the host; raise if they can't.

    Parameters
    ----------
    inputs, shapes
        What is multiplied, and the results' shapes.
    dtype
        Their type.
    operands
        Weights on the host, which may not share memory with `out`.
    out
        What the caller gave: an array, or a list with one for each group.
    """
    if inputs.ragged:
        given: Sequence[Any] = [out]
    elif isinstance(out, Sequence) and len(out) == len(shapes):
        given = out
    else:
        raise ValueError(f"out must be a list of {len(shapes)} arrays, one per group")
    rows = inputs.rows if isinstance(inputs.rows, tuple) else (inputs.rows,)
    on_host = [part for part in rows if not isinstance(part, DeviceRows)]
    for g, (target, shape) in enumerate(zip(given, shapes, strict=True)):
        check_out(target, shape, dtype, "out" if inputs.ragged else f"out[{g}]")
    check_disjoint(given, [*operands, *on_host])
    return list(given)


def check_disjoint(outputs: Sequence[NDArray[Any]], sources: Sequence[Rows]) -> None:
    """Raise ValueError if an output shares memory with another one, or with an operand.

    Arrays that lie between each other's rows, such as the columns of one matrix, are apart.
    """
    given = [
        part
        for source in sources
        for part in (
            (source,) if isinstance(source, np.ndarray) else (source.values, source.scales)
        )
    ]
    if len(outputs) == 1 and not any(np.may_share_memory(outputs[0], part) for part in given):
        return
    operands: dict[tuple[Any, ...], NDArray[Any]] = {}
    for part in given:  # one operand may stand for many groups
        operands[part.ctypes.data, part.shape, part.strides] = part
    arrays = [*enumerate(outputs), *((-1, part) for part in operands.values())]
    spans = [(*byte_bounds(array), g, array) for g, array in arrays if array.size]
    spans.sort(key=lambda span: span[0])
    begun: list[tuple[int, int, NDArray[Any]]] = []  # those that may reach further on
    for start, end, g, array in spans:
        begun = [other for other in begun if other[0] > start]
        for _, other_g, other in begun:
            low, high = sorted((g, other_g))
            if high < 0 or not _share_memory(array, other):
                continue
            if low < 0:
                name = "out" if len(outputs) == 1 else f"out[{high}]"
                raise ValueError(f"{name} overlaps an operand; pass an array of its own memory")
            raise ValueError(f"out[{high}] overlaps out[{low}]; give each its own memory")
        begun.append((end, g, array))


def _share_memory(a: NDArray[Any], b: NDArray[Any]) -> bool:
    try:
        return bool(np.shares_memory(a, b, max_work=100_000))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
