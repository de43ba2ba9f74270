"""Functions that CUDA C++ calls but no module defines: printf, assert, malloc, free."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .load_store import load_lanes
from .program import Decoder, Handler
from .ptx import Args, Operand, Sym
from .warp import Mask

if TYPE_CHECKING:
    from .warp import Warp

Argument = Callable[["Warp", int], int]


def _argument(d: Decoder, op: Operand, size: int) -> Argument:
    if isinstance(op, Sym):
        at = d.program.param_offsets[d.function.name, op.name]

        def from_memory(w: Warp, lane: int) -> int:
            return int(w.params.load(np.array([lane]), np.array([at]), size, size)[0, 0])

        return from_memory
    get = d.read(op, f"b{size * 8}")
    return lambda w, lane: int(get(w)[lane])


def _result(d: Decoder, results: Args, size: int) -> Callable[[Any, int, int], None]:
    if not results.items:
        return lambda w, lane, value: None
    op = results.items[0]
    if isinstance(op, Sym):
        at = d.program.param_offsets[d.function.name, op.name]
        dtype = {4: np.uint32, 8: np.uint64}[size]

        def to_memory(w: Warp, lane: int, value: int) -> None:
            w.params.store(np.array([lane]), np.array([at]), np.array([[value]], dtype), size)

        return to_memory
    file, row = d.row(op, f"b{size * 8}")

    def to_register(w: Warp, lane: int, value: int) -> None:
        w.files[file][row][lane] = value

    return to_register


def _bytes(w: Warp, lane: int, address: int, size: int) -> bytes:
    where = np.array([lane])
    addresses = np.arange(address, address + size, dtype=np.uint64)
    parts = [load_lanes(w, where, addresses[i : i + 1], 1, 1, "generic") for i in range(size)]
    return b"".join(part.tobytes() for part in parts)


def _string(w: Warp, lane: int, address: int) -> str:
    found = bytearray()
    while len(found) < 4096:
        byte = _bytes(w, lane, address + len(found), 1)
        if byte == b"\0":
            break
        found += byte
    return found.decode(errors="replace")


_CONVERSION = re.compile(r"%([-+ #0]*)(\*|\d+)?(?:\.(\*|\d+))?(hh|h|ll|l|j|z|t|L)?([a-zA-Z%])")


def _format(w: Warp, lane: int, text: str, address: int) -> str:
    at = address

    def take(size: int) -> bytes:
        nonlocal at
        at = -(-at // size) * size
        data = _bytes(w, lane, at, size)
        at += size
        return data

    def convert(match: re.Match[str]) -> str:
        flags, width, precision, length, kind = match.groups()
        if kind == "%":
            return "%"
        if width == "*":
            width = str(struct.unpack("<i", take(4))[0])
        if precision == "*":
            precision = str(struct.unpack("<i", take(4))[0])
        spec = f"%{flags}{width or ''}{'.' + precision if precision else ''}"
        if kind in "eEfFgGaA":
            value = struct.unpack("<d", take(8))[0]
            return str(value.hex() if kind in "aA" else (spec + kind) % value)
        if kind == "s":
            return (spec + "s") % _string(w, lane, struct.unpack("<Q", take(8))[0])
        if kind == "p":
            return f"{struct.unpack('<Q', take(8))[0]:#x}"
        wide = length in ("l", "ll", "j", "z", "t")
        signed = kind in "dic"
        number = int.from_bytes(take(8 if wide else 4), "little", signed=signed)
        if kind == "c":
            return chr(number & 0xFF)
        return str((spec + ("d" if kind in "diu" else kind)) % number)

    return _CONVERSION.sub(convert, text)


def _vprintf(d: Decoder, args: Args, results: Args) -> Handler:
    text, values = (_argument(d, op, 8) for op in args.items)
    done = _result(d, results, 4)

    def run(w: Warp, m: Mask) -> None:
        for lane in w.lanes(m):
            line = _format(w, int(lane), _string(w, lane, text(w, lane)), values(w, lane))
            w.machine.output.append(line)
            done(w, lane, 0)

    return run


def _assertfail(d: Decoder, args: Args, results: Args) -> Handler:
    sizes = (8, 8, 4, 8, 8)
    get = [_argument(d, op, size) for op, size in zip(args.items, sizes, strict=True)]

    def run(w: Warp, m: Mask) -> None:
        lane = w.first(m)
        message, file = (_string(w, lane, get[i](w, lane)) for i in (0, 1))
        raise w.fault(f"assertion failed: {message} ({file}:{get[2](w, lane)}, lane {lane})")

    return run


def _malloc(d: Decoder, args: Args, results: Args) -> Handler:
    size = _argument(d, args.items[0], 8)
    done = _result(d, results, 8)

    def run(w: Warp, m: Mask) -> None:
        for lane in w.lanes(m):
            block = w.machine.memory.alloc(size(w, lane), "device malloc", align=16)
            w.machine.heap[block.base] = block
            done(w, lane, block.base)

    return run


def _free(d: Decoder, args: Args, results: Args) -> Handler:
    pointer = _argument(d, args.items[0], 8)

    def run(w: Warp, m: Mask) -> None:
        for lane in w.lanes(m):
            address = pointer(w, lane)
            if address:
                block = w.machine.heap.pop(address, None)
                if block is None:
                    raise w.fault(f"free of {address:#x}, which malloc did not return")
                w.machine.memory.free(block)

    return run


BUILTINS: dict[str, Callable[[Decoder, Args, Args], Handler]] = {
    "vprintf": _vprintf,
    "__assertfail": _assertfail,
    "malloc": _malloc,
    "free": _free,
}
