"""Tensor maps in the emulator: their 128 bytes, and which bytes a box copy moves.

The image is the emulator's own (the driver's is opaque); fields sit at fixed places so that
``tensormap.replace`` can change them. Semantics follow the PTX ISA, "Tensors" (tiled mode), and
measurements on an H200: a box is written innermost dimension first, rows one swizzle span apart if
there is a swizzle and densely if not, then its addresses are swizzled; elements out of bounds are
filled, and count like the others.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import numpy as np
from numpy.typing import NDArray

from fp4rt.device import TensorMap
from fp4rt.tensor_map import ELEMENT_TYPES, SWIZZLE_BYTES, Swizzle, box_shape, check

from .descriptors import swizzle
from .memory import Violation

MAGIC = b"fp4rtmap"
# magic, address, 4 strides, 5 extents - 1, 5 box extents - 1, 5 element strides - 1,
# element type, rank - 1, swizzle, fill, promotion; zeros up to 128 bytes
_FORMAT = struct.Struct("<8sQ4Q5I5B5B5B")
# Fields that tensormap.replace can change: byte offset, width, entries, what is subtracted.
_PLACES: dict[str, tuple[int, int, int, int]] = {
    "global_address": (8, 8, 1, 0),
    "global_stride": (16, 8, 4, 0),
    "global_dim": (48, 4, 5, 1),
    "box_dim": (68, 1, 5, 1),
    "element_stride": (73, 1, 5, 1),
    "elemtype": (78, 1, 1, 0),
    "rank": (79, 1, 1, 0),
    "swizzle_mode": (80, 1, 1, 0),
    "fill_mode": (81, 1, 1, 0),
}

# Codes of tensormap.replace .elemtype, .swizzle_mode and .fill_mode (PTX ISA), which are also the
# driver's enumerations except for float types.
ELEMENT_CODES: dict[int, str] = {
    0: "uint8", 1: "uint16", 2: "uint32", 3: "int32", 4: "uint64", 5: "int64", 6: "float16",
    7: "float32", 9: "float64", 10: "bfloat16", 13: "16u4_align8b", 14: "16u4_align16b",
}  # fmt: skip
SWIZZLE_CODES: dict[int, str] = {0: "none", 1: "32B", 2: "64B", 3: "128B"}
_FILLS = ("zero", "nan")
_PROMOTIONS = ("none", "64B", "128B", "256B")
# What an H200 fills out-of-bounds elements with where the map asks for NaN, in every float type.
_NAN = np.uint16(0x7FF7)


def encode_tensor_map(tensor_map: TensorMap, arch: str = "") -> bytes:
    """Return the 128 bytes that an emulated kernel takes for `tensor_map`.

    Raises
    ------
    ValueError
        If the map breaks a rule of ``cuTensorMapEncodeTiled``.
    """
    check(tensor_map, arch)
    return _pack(tensor_map)


def _code(table: dict[int, str], name: str) -> int:
    return next(code for code, value in table.items() if value == name)


def _pad(values: tuple[int, ...], count: int) -> tuple[int, ...]:
    return values + (0,) * (count - len(values))


def _pack(tm: TensorMap) -> bytes:
    rank = len(tm.global_dim)
    steps = tm.element_strides or (1,) * rank
    image = _FORMAT.pack(
        MAGIC,
        tm.address,
        *_pad(tm.global_strides, 4),
        *_pad(tuple(d - 1 for d in tm.global_dim), 5),
        *_pad(tuple(b - 1 for b in tm.box_dim), 5),
        *_pad(tuple(s - 1 for s in steps), 5),
        _code(ELEMENT_CODES, tm.dtype),
        rank - 1,
        _code(SWIZZLE_CODES, tm.swizzle),
        _FILLS.index(tm.oob_fill),
        _PROMOTIONS.index(tm.l2_promotion),
    )
    return image.ljust(128, b"\0")


def _unpack(image: bytes) -> TensorMap:
    if image[:8] != MAGIC:
        raise Violation(
            f"these 128 bytes are no tensor map of the emulator (they start with {image[:8]!r}); "
            "make them with Device.encode_tensor_map"
        )
    fields = _FORMAT.unpack(image[: _FORMAT.size])
    code, rank, mode, fill, promotion = fields[21:26]
    if code not in ELEMENT_CODES or mode not in SWIZZLE_CODES or rank > 4 or fill > 1:
        raise Violation("tensor map with an illegal element type, swizzle mode, rank or fill mode")
    rank += 1
    return TensorMap(
        address=fields[1],
        dtype=ELEMENT_CODES[code],
        global_dim=tuple(d + 1 for d in fields[6 : 6 + rank]),
        global_strides=tuple(fields[2 : 2 + rank - 1]),
        box_dim=tuple(b + 1 for b in fields[11 : 11 + rank]),
        element_strides=tuple(s + 1 for s in fields[16 : 16 + rank]),
        swizzle=cast(Swizzle, SWIZZLE_CODES[mode]),
        l2_promotion=_PROMOTIONS[promotion],  # type: ignore[arg-type]
        oob_fill=_FILLS[fill],  # type: ignore[arg-type]
    )


@lru_cache(maxsize=1024)
def decode_tensor_map(image: bytes) -> TensorMap:
    """Return the map in 128 bytes, checked again (a kernel may have patched them)."""
    tensor_map = _unpack(image)
    try:
        check(tensor_map)
    except ValueError as error:
        raise Violation(str(error)) from None
    return tensor_map


def replace_field(image: bytes, field: str, ordinal: int, value: int) -> bytes:
    """Return a map's bytes with one field changed: ``tensormap.replace``.

    Parameters
    ----------
    image
        The 128 bytes; rules are checked when the map is used, not here.
    field
        ``"global_address"``, ``"rank"``, ``"box_dim"``, ``"global_dim"``, ``"global_stride"``,
        ``"element_stride"``, ``"elemtype"``, ``"swizzle_mode"``, ``"fill_mode"``,
        ``"interleave_layout"`` or ``"swizzle_atomicity"``.
    ordinal
        Dimension, for the fields that have one, else 0.
    value
        The new value: bytes for strides, rank - 1 for the rank, the codes of the PTX ISA for
        types and modes.
    """
    if image[:8] != MAGIC:
        _unpack(image)
    if field in ("interleave_layout", "swizzle_atomicity"):
        if value:
            raise Violation(f"tensormap.replace.{field} to {value} is not emulated; only 0 is")
        return image
    if field not in _PLACES:
        raise Violation(f"tensormap.replace.{field} does not exist")
    at, width, entries, less = _PLACES[field]
    if not 0 <= ordinal < entries:
        raise Violation(f"tensormap.replace.{field} ordinal is {ordinal}; it has {entries} entries")
    stored = value - less
    if not 0 <= stored < 1 << (8 * width):
        raise Violation(f"tensormap.replace.{field} to {value}, which no tensor map can hold")
    at += ordinal * width
    return image[:at] + stored.to_bytes(width, "little") + image[at + width :]


@dataclass(frozen=True)
class Box:
    """The bytes of one box copy.

    Parameters
    ----------
    coordinates
        Where the box starts.
    rows
        Global address of each row's first in-bounds element, int64, shape (rows,).
    inside
        Which rows lie in bounds.
    first, last
        Byte range of each row, in global memory's packing, that is in bounds.
    row_bytes
        Bytes of a row in shared memory.
    offsets
        Shared address of each byte of the rows, swizzled.
    """

    tensor_map: TensorMap
    coordinates: tuple[int, ...]
    rows: NDArray[np.int64]
    inside: NDArray[np.bool_]
    first: int
    last: int
    row_bytes: int
    offsets: NDArray[np.int64]

    @property
    def nbytes(self) -> int:
        """Bytes that complete_tx counts: every element of the box, in bounds or not."""
        return len(self.offsets)

    def background(self) -> NDArray[np.uint8]:
        """Return the image (rows, row_bytes) with the out-of-bounds value everywhere."""
        image = np.zeros((len(self.rows), self.row_bytes), np.uint8)
        if self.tensor_map.oob_fill == "nan":
            image.view(np.uint16)[:] = _NAN
        return image

    def place(self, image: NDArray[np.uint8], data: NDArray[np.uint8]) -> None:
        """Put global bytes (inside rows, last - first) into the image."""
        if self.tensor_map.dtype == "16u4_align16b":
            groups = image.reshape(len(image), -1, 16)[:, :, :8].reshape(len(image), -1)
            groups[self.inside, self.first : self.last] = data
            image.reshape(len(image), -1, 16)[:, :, :8] = groups.reshape(len(image), -1, 8)
        else:
            image[self.inside, self.first : self.last] = data

    def take(self, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the image bytes that are stored to the in-bounds rows.

        A store clips whole units of 16 bytes: where a row of the tensor ends within one, the bytes
        after its end are overwritten too (measured on an H200; loads clip single elements).
        """
        return image[self.inside, self.first : -(-self.last // 16) * 16]


def box(
    tensor_map: TensorMap,
    coordinates: tuple[int, ...],
    address: int,
    gather_rows: tuple[int, ...] = (),
) -> Box:
    """Work out one box copy.

    Parameters
    ----------
    tensor_map
        The map.
    coordinates
        Signed element coordinates of the box's first element, innermost first.
    address
        Shared-memory address (offset in the CTA's window) of the image: 128-byte aligned.
    gather_rows
        For ``tile::gather4`` and ``tile::scatter4``: the four row coordinates, which replace
        dimension 1; the box then has one row.

    Raises
    ------
    Violation
        On a misaligned address, or a coordinate that the element type does not allow.
    """
    tm = tensor_map
    rank = len(tm.global_dim)
    if address % 128:
        raise Violation(
            f"shared address {address:#x} of a tensor copy must be a multiple of 128: use "
            f"{address // 128 * 128:#x} or {-(-address // 128) * 128:#x}"
        )
    if gather_rows:
        if rank != 2 or tm.box_dim[1] != 1:
            raise Violation(
                f"gather4/scatter4 needs a map of rank 2 with a box of one row, got rank {rank}, "
                f"box {tm.box_dim}"
            )
    elif len(coordinates) != rank:
        raise Violation(
            f"{len(coordinates)} coordinates for a tensor map of rank {rank}; they must agree"
        )
    kind = ELEMENT_TYPES[tm.dtype]
    shape = box_shape(tm)
    c0, n0 = coordinates[0], shape[0]
    # PTX says 128 for align16b. That the others start on 16 bytes stands in no manual: on an H200
    # any other coordinate, also outside the tensor, ends in an illegal instruction (measured with
    # 8-bit elements, inferred for 4-bit ones).
    multiple = 128 if tm.dtype == "16u4_align16b" else max(128 // kind.global_bits, 1)
    if c0 % multiple:
        raise Violation(
            f"coordinate 0 is {c0}; with dtype {tm.dtype!r} it must be a multiple of {multiple}"
        )
    steps = tm.element_strides or (1,) * rank
    position = np.zeros(1, np.int64)
    inside = np.ones(1, bool)
    for i in range(1, rank):
        if gather_rows:
            c = np.array(gather_rows, np.int64)
        else:
            c = coordinates[i] + np.arange(shape[i], dtype=np.int64) * steps[i]
        ok = (c >= 0) & (c < tm.global_dim[i])
        position = (position[None, :] + c[:, None] * tm.global_strides[i - 1]).reshape(-1)
        inside = (inside[None, :] & ok[:, None]).reshape(-1)
    low, high = max(0, -c0), min(n0, tm.global_dim[0] - c0)
    if high <= low:
        low = high = 0
        inside = np.zeros_like(inside)
    bits = kind.global_bits
    rows = tm.address + position + (c0 + low) * bits // 8
    row_bytes = n0 * kind.shared_bits // 8
    # With a swizzle every row starts on a new span, however narrow the box (measured on an H200).
    pitch = max(row_bytes, SWIZZLE_BYTES[tm.swizzle])
    linear = address + pitch * np.arange(len(rows))[:, None] + np.arange(row_bytes)
    offsets = swizzle(linear.reshape(-1), tm.swizzle)
    where = (c0, *(gather_rows or coordinates[1:]))
    return Box(tm, where, rows, inside, low * bits // 8, high * bits // 8, row_bytes, offsets)
