"""wmma: the warp-level matrix API of CUDA C++ (``nvcuda::wmma``).

Which element sits in which register is not specified by the ISA; here element e of lane l is
number ``l * count + e`` of the row-major matrix, again from the start where a fragment holds more
registers than the matrix has elements. Source: PTX ISA, "wmma.load", "wmma.mma", "wmma.store".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .memory import SHARED_WINDOW, Violation
from .numerics import BITS, decode, dot
from .program import Decoder, Getter, Handler, register
from .ptx import Instruction

if TYPE_CHECKING:
    from .warp import Mask, Warp

_SIZES = {"f16": 2, "bf16": 2, "tf32": 4, "s8": 1, "u8": 1, "f32": 4, "s32": 4}
_ACCUMULATORS: dict[str, Any] = {"f16": np.float16, "f32": np.float32, "s32": np.int32}


def _shape(ins: Instruction, d: Decoder) -> tuple[int, int, int]:
    for part in ins.parts:
        if part[0] == "m" and part[1:2].isdigit():
            m, rest = part[1:].split("n")
            n, k = rest.split("k")
            return int(m), int(n), int(k)
    raise d.unsupported("no shape")


def _extent(which: str, shape: tuple[int, int, int]) -> tuple[int, int]:
    """Return (rows, columns) of A, B or C and D."""
    m, n, k = shape
    return {"a": (m, k), "b": (k, n)}.get(which, (m, n))


def _spread(count: int, rows: int, columns: int) -> NDArray[np.int64]:
    """Return the element number of each fragment element, shape (32, count)."""
    return np.arange(32 * count).reshape(32, count) % (rows * columns)


def _lines(
    w: Warp, address: int, stride: int, extent: tuple[int, int], column_major: bool, size: int
) -> tuple[bool, NDArray[np.int64], int]:
    """Return (in shared memory?, address of each contiguous line, bytes of a line)."""
    rows, columns = extent
    lines, length = (columns, rows) if column_major else (rows, columns)
    in_shared = address >> 32 in (0, SHARED_WINDOW >> 32)
    if address % 16:  # a 32-byte alignment is asked for some types; 16 holds for all of them
        raise Violation(f"wmma address {address:#x} must be a multiple of 16 bytes")
    if stride * size % 16 and lines > 1:
        raise Violation(
            f"wmma stride of {stride} elements; rows must be multiples of 16 bytes apart"
        )
    where = address + stride * size * np.arange(lines, dtype=np.int64)
    return in_shared, where, length * size


def _offsets(w: Warp, where: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    start = [w.cluster.resolve(w, int(a) & 0xFFFFFFFF, length, 16, "cta")[1] for a in where]
    return (np.array(start)[:, None] + np.arange(length)).reshape(-1)


def _operands(ins: Instruction, d: Decoder, at: int) -> tuple[Getter, Any]:
    """Return getters of the address and the stride."""
    stride = d.read(ins.operands[2], "u32") if len(ins.operands) > 2 else None
    return d.address(ins.operands[at]), stride


def _layout(ins: Instruction, d: Decoder) -> bool:
    """Return whether the matrix is column-major in memory."""
    d.need("row" in ins.parts or "col" in ins.parts, "no layout")
    return "col" in ins.parts


@register("wmma.load")
def _load(ins: Instruction, d: Decoder) -> Handler:
    d.whole_warp()
    which, dtype = ins.parts[2], ins.parts[-1]
    extent = _extent(which, _shape(ins, d))
    column_major = _layout(ins, d)
    d.need(dtype in _SIZES, f"element type {dtype}")
    size = _SIZES[dtype]
    out = d.writes(ins.operands[0], "b32")
    address, stride = _operands(ins, d, 1)
    spread = _spread(len(out) * 4 // size, *extent)

    def run(w: Warp, m: Mask) -> None:
        pitch = int(stride(w)[0]) if stride else extent[0 if column_major else 1]
        shared, where, length = _lines(w, int(address(w)[0]), pitch, extent, column_major, size)
        if shared:
            data = w.cta.shared.read_bytes(w, _offsets(w, where, length)).reshape(-1, length)
        else:
            data = w.machine.memory.gather(w, where, length)
        matrix = data.reshape(len(where), -1, size)
        if column_major:
            matrix = matrix.transpose(1, 0, 2)
        words = matrix.reshape(-1, size)[spread].reshape(32, -1).view(np.uint32)
        for i, put in enumerate(out):
            put(w, words[:, i], None)

    return run


@register("wmma.store")
def _store(ins: Instruction, d: Decoder) -> Handler:
    d.whole_warp()
    dtype = ins.parts[-1]
    extent = _extent("d", _shape(ins, d))
    column_major = _layout(ins, d)
    d.need(dtype in _ACCUMULATORS, f"element type {dtype}")
    size = _SIZES[dtype]
    values = d.reads(ins.operands[1], "b32")
    address, stride = _operands(ins, d, 0)
    spread = _spread(len(values) * 4 // size, *extent)

    def run(w: Warp, m: Mask) -> None:
        words = np.stack([get(w) for get in values], axis=1)
        matrix = np.zeros((extent[0] * extent[1], size), np.uint8)
        matrix[spread] = np.ascontiguousarray(words).view(np.uint8).reshape(32, -1, size)
        shaped = matrix.reshape(*extent, size)
        if column_major:
            shaped = shaped.transpose(1, 0, 2)
        pitch = int(stride(w)[0]) if stride else extent[0 if column_major else 1]
        shared, where, length = _lines(w, int(address(w)[0]), pitch, extent, column_major, size)
        data = np.ascontiguousarray(shaped).reshape(-1, length)
        if shared:
            w.cta.shared.write_bytes(w, _offsets(w, where, length), data.reshape(-1))
        else:
            w.machine.memory.scatter(w, where, data)

    return run


@register("wmma.mma")
def _mma(ins: Instruction, d: Decoder) -> Handler:
    """Multiply fragments; the layout qualifiers only say how they were loaded."""
    d.whole_warp()
    shape = _shape(ins, d)
    types = [p for p in ins.parts if p in _SIZES]
    if len(types) == 2:  # .dtype.ctype with f16 operands
        d_type, a_type, b_type, c_type = types[0], "f16", "f16", types[1]
    else:
        d.need(len(types) == 4, "element types")
        d_type, a_type, b_type, c_type = types
    out = d.writes(ins.operands[0], "b32")
    parts = [d.reads(op, "b32") for op in ins.operands[1:4]]
    saturate = "satfinite" in ins.parts

    def run(w: Warp, m: Mask) -> None:
        a = _gather(w, parts[0], a_type, _extent("a", shape))
        b = _gather(w, parts[1], b_type, _extent("b", shape))
        c = _gather(w, parts[2], c_type, _extent("c", shape))
        kind = _ACCUMULATORS[c_type]
        result = dot(a, b.T, c.astype(kind), d_type, saturate=saturate)
        spread = _spread(len(out) * 4 // _SIZES[d_type], shape[0], shape[1])
        words = np.ascontiguousarray(result.reshape(-1)[spread]).view(np.uint32)
        for i, put in enumerate(out):
            put(w, words[:, i], None)
        w.machine.count("wmma")

    return run


def _gather(
    w: Warp, registers: list[Getter], dtype: str, extent: tuple[int, int]
) -> NDArray[np.float64]:
    """Return the values of a fragment as a matrix."""
    words = np.stack([get(w) for get in registers], axis=1)
    if dtype == "s32":
        values = words.view(np.int32).astype(np.float64)
    else:
        values = decode(words.view(np.uint8).reshape(32, -1), dtype)
    matrix = np.zeros(extent[0] * extent[1])
    matrix[_spread(len(registers) * 32 // max(BITS.get(dtype, 32), 8), *extent)] = values
    return matrix.reshape(extent)
