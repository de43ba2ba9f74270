"""TMA tensor maps: what they describe, and their rules, checked before any device sees a map.

`check` applies every rule of ``cuTensorMapEncodeTiled`` (CUDA Driver API, "Tensor Map Object
Management") to a `TensorMap`, so that a mistake names its rule instead of ending in
``CUDA_ERROR_INVALID_VALUE``. The CUDA device and the emulator share it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Swizzle = Literal["none", "32B", "64B", "128B"]


@dataclass(frozen=True)
class TensorMap:
    """A TMA tensor map in the driver's own terms, dimension 0 innermost.

    The rules are those of ``cuTensorMapEncodeTiled``; `Device.encode_tensor_map` checks every one
    of them before the driver sees the map, and names the rule that is broken.

    Parameters
    ----------
    address
        Device address of element (0, …, 0).
    dtype
        Element type in the driver's naming without its prefix: ``"uint8"``, ``"uint16"``,
        ``"uint32"``, ``"int32"``, ``"uint64"``, ``"int64"``, ``"float16"``, ``"float32"``,
        ``"float64"``, ``"bfloat16"``, ``"16u4_align8b"`` or ``"16u4_align16b"``.
    global_dim
        Extent of each dimension, in elements. Rank 1 to 5.
    global_strides
        Bytes between neighbours along dimensions 1 and up (rank - 1 entries).
    box_dim
        Extent of the box that one copy moves, in elements.
    element_strides
        Step between elements of the box; empty means 1 everywhere.
    swizzle, l2_promotion, oob_fill
        As in the driver: ``"none"``/``"32B"``/``"64B"``/``"128B"``,
        ``"none"``/``"64B"``/``"128B"``/``"256B"``, ``"zero"``/``"nan"``.
    """

    address: int
    dtype: str
    global_dim: tuple[int, ...]
    global_strides: tuple[int, ...]
    box_dim: tuple[int, ...]
    element_strides: tuple[int, ...] = ()
    swizzle: Swizzle = "none"
    l2_promotion: Literal["none", "64B", "128B", "256B"] = "none"
    oob_fill: Literal["zero", "nan"] = "zero"


MAX_RANK = 5
MAX_BOX = 256
MAX_ELEMENT_STRIDE = 8
MAX_STRIDE = 1 << 40
MAX_DIM = 1 << 32
MAX_BOX_BYTES = 227 * 1024
"""Most shared memory of a CTA. A larger box can't be copied; the driver refuses it too, apart from
boxes that are larger only by a little or by the ignored element stride of dimension 0."""
SWIZZLE_BYTES = {"none": 0, "32B": 32, "64B": 64, "128B": 128}


@dataclass(frozen=True)
class ElementType:
    """How one element type lies in memory.

    Parameters
    ----------
    global_bits, shared_bits
        Bits of one element in global memory and in the shared-memory image. They differ only for
        ``16u4_align16b``, which pads every 8 bytes of values to 16.
    is_float
        Whether out-of-bounds elements may be filled with NaN.
    """

    global_bits: int
    shared_bits: int
    is_float: bool = False


ELEMENT_TYPES: dict[str, ElementType] = {
    "uint8": ElementType(8, 8),
    "uint16": ElementType(16, 16),
    "uint32": ElementType(32, 32),
    "int32": ElementType(32, 32),
    "uint64": ElementType(64, 64),
    "int64": ElementType(64, 64),
    "float16": ElementType(16, 16, True),
    "float32": ElementType(32, 32, True),
    "float64": ElementType(64, 64, True),
    "bfloat16": ElementType(16, 16, True),
    "16u4_align8b": ElementType(4, 4),
    "16u4_align16b": ElementType(4, 8),
}


def box_shape(tensor_map: TensorMap) -> tuple[int, ...]:
    """Return the number of elements that one copy moves along each dimension, innermost first.

    With an element stride `s` the copy takes every s-th element of the box, so it moves
    ``ceil(box / s)`` of them. The stride of dimension 0 is ignored by the hardware.

    Examples
    --------
    >>> box_shape(TensorMap(0, "uint8", (64, 8), (64,), (32, 6), (1, 2)))
    (32, 3)
    """
    strides = tensor_map.element_strides or (1,) * len(tensor_map.box_dim)
    return tuple(
        box if i == 0 else -(-box // step)
        for i, (box, step) in enumerate(zip(tensor_map.box_dim, strides, strict=True))
    )


def box_bytes(tensor_map: TensorMap) -> int:
    """Return the bytes of one copy's shared-memory image: what it counts on its mbarrier.

    Examples
    --------
    >>> box_bytes(TensorMap(0, "16u4_align8b", (512, 128), (256,), (256, 64)))
    8192
    """
    count = 1
    for extent in box_shape(tensor_map):
        count *= extent
    return count * ELEMENT_TYPES[tensor_map.dtype].shared_bits // 8


def check(tensor_map: TensorMap, arch: str = "") -> None:
    """Raise if `tensor_map` breaks a rule of ``cuTensorMapEncodeTiled``.

    Parameters
    ----------
    tensor_map
        The map to check.
    arch
        Architecture that will use it (``"sm_90a"``); empty applies the rules common to all.
        4-bit types need sm_100 or newer: an H200's driver refuses every such map.

    Raises
    ------
    TypeError
        If a field that counts something is not an integer.
    ValueError
        If a rule is broken; the text gives the value, the rule and a value that would work.

    Examples
    --------
    >>> check(TensorMap(4096, "uint8", (128, 64), (128,), (128, 8), swizzle="128B"))
    >>> check(TensorMap(4096, "uint8", (128, 64), (120,), (128, 8)))
    Traceback (most recent call last):
        ...
    ValueError: tensor map: global_strides[0] is 120; strides are multiples of 16 bytes: use 128
    """
    _check_type(tensor_map, arch)
    _check_extents(tensor_map)
    _check_box(tensor_map)


def _fail(text: str) -> None:
    raise ValueError(f"tensor map: {text}")


def _check_type(tm: TensorMap, arch: str) -> None:
    if tm.dtype not in ELEMENT_TYPES:
        _fail(f"dtype {tm.dtype!r} is unknown; use one of {', '.join(ELEMENT_TYPES)}")
    if tm.dtype.startswith("16u4") and arch.startswith("sm_9"):
        _fail(
            f"dtype {tm.dtype!r} needs sm_100 or newer, and this device is {arch}; "
            "use 'uint8' with dimension 0 and the box halved"
        )
    if tm.swizzle not in SWIZZLE_BYTES:
        _fail(f"swizzle {tm.swizzle!r} is unknown; use one of {', '.join(SWIZZLE_BYTES)}")
    if tm.l2_promotion not in ("none", "64B", "128B", "256B"):
        _fail(f"l2_promotion {tm.l2_promotion!r} is unknown; use 'none', '64B', '128B' or '256B'")
    if tm.oob_fill not in ("zero", "nan"):
        _fail(f"oob_fill {tm.oob_fill!r} is unknown; use 'zero' or 'nan'")
    if tm.oob_fill == "nan" and not ELEMENT_TYPES[tm.dtype].is_float:
        _fail(f"oob_fill 'nan' needs a floating-point dtype, got {tm.dtype!r}; use 'zero'")
    if tm.dtype == "16u4_align16b" and tm.swizzle not in ("none", "128B"):
        _fail(f"swizzle {tm.swizzle!r} with dtype '16u4_align16b'; use 'none' or '128B'")


def _integers(name: str, values: tuple[int, ...], count: int, low: int, high: int) -> None:
    """Check that `values` are `count` integers in ``low .. high``."""
    if len(values) != count:
        _fail(f"{name} has {len(values)} entries; this rank needs {count}")
    for i, value in enumerate(values):
        try:
            number = value.__index__()
        except (AttributeError, TypeError):
            raise TypeError(
                f"tensor map: {name}[{i}] is {value!r}; it must be an integer"
            ) from None
        if not low <= number <= high:
            _fail(f"{name}[{i}] is {number}; it must be in {low} .. {high}")


def _check_extents(tm: TensorMap) -> None:
    rank = len(tm.global_dim)
    if not 1 <= rank <= MAX_RANK:
        _fail(f"global_dim has {rank} entries; the rank must be in 1 .. {MAX_RANK}")
    padded = tm.dtype == "16u4_align16b"
    align = 32 if padded else 16
    _integers("address", (tm.address,), 1, 0, (1 << 64) - 1)
    if tm.address % align:
        _fail(
            f"address {tm.address:#x} must be a multiple of {align} bytes: "
            f"use {tm.address // align * align:#x} or {-(-tm.address // align) * align:#x}"
        )
    _integers("global_dim", tm.global_dim, rank, 1, MAX_DIM)
    multiple = 128 if padded else 2 if tm.dtype == "16u4_align8b" else 1
    if tm.global_dim[0] % multiple:
        _fail(
            f"global_dim[0] is {tm.global_dim[0]}; with dtype {tm.dtype!r} it is a multiple of "
            f"{multiple}: use {-(-tm.global_dim[0] // multiple) * multiple}"
        )
    _integers("global_strides", tm.global_strides, rank - 1, 0, MAX_STRIDE - 1)
    for i, stride in enumerate(tm.global_strides):
        if stride % align:
            _fail(
                f"global_strides[{i}] is {stride}; strides are multiples of {align} bytes: "
                f"use {-(-stride // align) * align}"
            )


def _check_box(tm: TensorMap) -> None:
    rank = len(tm.global_dim)
    _integers("box_dim", tm.box_dim, rank, 1, MAX_BOX)
    if tm.element_strides:
        _integers("element_strides", tm.element_strides, rank, 1, MAX_ELEMENT_STRIDE)
    bits = ELEMENT_TYPES[tm.dtype].shared_bits
    inner_bits = tm.box_dim[0] * bits
    if box_bytes(tm) > MAX_BOX_BYTES:
        _fail(
            f"box_dim {tm.box_dim} has {box_bytes(tm)} bytes; a box fits into the "
            f"{MAX_BOX_BYTES} bytes of shared memory that a CTA can have: use a smaller one"
        )
    if tm.dtype == "16u4_align16b":
        if tm.box_dim[0] != 128:
            _fail(f"box_dim[0] is {tm.box_dim[0]}; with dtype '16u4_align16b' it must be 128")
        return
    if inner_bits % 128:
        step = 128 // bits
        _fail(
            f"box_dim[0] is {tm.box_dim[0]}, which is {inner_bits / 8:g} bytes of {tm.dtype}; "
            f"it is a multiple of 16 bytes: use {-(-tm.box_dim[0] // step) * step}"
        )
    span = SWIZZLE_BYTES[tm.swizzle]
    if span and inner_bits > span * 8:
        _fail(
            f"box_dim[0] is {tm.box_dim[0]}, which is {inner_bits // 8} bytes of {tm.dtype}; "
            f"swizzle {tm.swizzle!r} allows {span}: use {span * 8 // bits}"
        )
