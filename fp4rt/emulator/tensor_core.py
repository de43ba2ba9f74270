"""Matrix units of a warp and of a warpgroup: mma.sync and wgmma.

mma.sync is synchronous. A wgmma is an asynchronous operation of each of the four warps (rows 16 q
to 16 q + 15 belong to warp q); its results reach the registers at wgmma.wait_group. Until then the
accumulator registers hold tags (see `tags`). Source: PTX ISA, "mma" and "wgmma.mma_async".
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .descriptors import Major, SharedDescriptor, addresses, decode_wgmma
from .fragments import a_fragment, b_fragment, d_fragment
from .launch import AsyncOp
from .memory import Violation
from .numerics import (
    BITS,
    MMA_FP8,
    TRUNCATED,
    WGMMA_FP8,
    bit_product,
    block_scaled_dot,
    decode,
    dot,
)
from .program import Decoder, Getter, Handler, register
from .ptx import Instruction, Not, Vec
from .tags import Result, Tags, register_block

if TYPE_CHECKING:
    from .machine import Cta
    from .warp import Mask, Warp

_ELEMENTS = frozenset(BITS) | {"b1"}
# 4- and 6-bit elements of kinds f8f6f4 and mxf8f6f4 take a byte each; CUTLASS (fp4_shift_A) shows
# that E2M1 lies in bits 5-2 of it.
_CONTAINERS = {"e2m1": "e2m1 in bits 5-2", "e2m3": "e2m3 in 8 bits", "e3m2": "e3m2 in 8 bits"}


@lru_cache(maxsize=1024)
def operand_addresses(
    descriptor: SharedDescriptor, rows: int, k_bytes: int, major: Major, element: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return every byte's address (rows, k_bytes), and one address in each 16 bytes touched."""
    table = addresses(descriptor, rows, k_bytes, major, element)
    return table, np.unique(table >> 4) << 4


def footprint(w: Warp, table: NDArray[np.int64], chunks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the byte offsets with which an operand read is checked against other accesses.

    One byte stands for its 16 most of the time, every byte now and then: whole tiles are written
    in units of at least 16 bytes, so this finds the same races at a fraction of the cost.
    """
    return table.reshape(-1) if w.machine.chance(1 / 16) else chunks


def check_bounds(cta: Cta, chunks: NDArray[np.int64], what: str) -> None:
    """Check that an operand lies in the CTA's shared memory."""
    low, high = int(chunks[0]), int(chunks[-1]) + 16
    if low < 1024 or high > cta.shared.size:
        raise Violation(
            f"{what} covers shared offsets {low:#x}..{high:#x}; the CTA has "
            f"{0x400:#x}..{cta.shared.size:#x}"
        )


# ------------------------------------------------------------------------------------- mma.sync


def _types(ins: Instruction, d: Decoder) -> tuple[str, str, str, str]:
    """Return the types of D, A, B, C: the first four type names of the opcode."""
    found = [p for p in ins.parts if p in _ELEMENTS or p == "s32"]
    d.need(len(found) >= 4, "four element types")
    return found[0], found[1], found[2], found[3]


@register("mma.sync")
def _mma(ins: Instruction, d: Decoder) -> Handler:
    d.whole_warp()
    parts = ins.parts
    kind = next((p for p in parts if p.startswith("kind::")), "")
    shape = next(p for p in parts if p[0] == "m" and p[1:2].isdigit())
    m, rest = shape[1:].split("n")
    n, k = (int(x) for x in rest.split("k"))
    if "f64" in parts:
        return _mma_f64(ins, d, shape)
    if (int(m), n) not in ((16, 8), (8, 8)):
        raise d.unsupported(f"shape {shape}")
    d_type, a_type, b_type, c_type = _types(ins, d)
    if "b1" in (a_type, b_type):
        return _mma_bits(ins, d, int(m), k)
    if int(m) == 8 and d_type != "s32":
        raise d.unsupported("the shape is Volta's own; use m16n8k8 or m16n8k16")
    if kind in ("kind::f8f6f4", "kind::mxf8f6f4"):
        a_type, b_type = (_CONTAINERS.get(x, x) for x in (a_type, b_type))
    per = 32 // BITS[a_type]
    a = d.reads(ins.operands[1], "b32")
    b = d.reads(ins.operands[2], "b32")
    d.need(len(a) * per * 32 == int(m) * k, "registers of A")
    d.need(len(b) * per * 32 == 8 * k, "registers of B")
    c = d.reads(ins.operands[3], "b32")
    out = d.writes(ins.operands[0], "b32")
    scales = _scales(ins, d, kind, k) if "block_scale" in parts else None
    saturate = "satfinite" in parts
    rounding = MMA_FP8 if BITS[a_type] == 8 else TRUNCATED

    def run(w: Warp, m: Mask) -> None:
        left = _gather(w, a, a_fragment(len(a), per), 16, k, a_type)
        right = _gather(w, b, b_fragment(len(b), per), 8, k, b_type)
        acc = _gather_d(w, c, c_type, 8)
        if scales is not None:
            a_scales, b_scales, scale_type = scales(w)
            result: Any = block_scaled_dot(left, right, a_scales, b_scales, scale_type, acc)
        else:
            result = dot(left, right, acc, d_type, saturate=saturate, rounding=rounding)
        _scatter_d(w, out, result, d_type)
        w.machine.count("mma.sync")

    return run


def _mma_bits(ins: Instruction, d: Decoder, rows: int, k: int) -> Handler:
    """Single bits: the number of them set in A xor (or and) B, 32 along K to a register."""
    a, b, c = (d.reads(op, "b32") for op in ins.operands[1:4])
    out = d.writes(ins.operands[0], "b32")
    operation = "and" if "and" in ins.parts else "xor"
    d.need("popc" in ins.parts and (len(a), len(b)) == (rows * k // 1024, k // 128), "registers")
    place_a, place_b = a_fragment(len(a), 1), b_fragment(len(b), 1)

    def run(w: Warp, m: Mask) -> None:
        left, right = np.zeros((16, k // 32), np.uint32), np.zeros((8, k // 32), np.uint32)
        left[place_a] = np.stack([get(w) for get in a], axis=1)[..., None]
        right[place_b] = np.stack([get(w) for get in b], axis=1)[..., None]
        total = bit_product(left, right, operation) + _gather_d(w, c, "s32", 8)
        _scatter_d(w, out, total.astype(np.int32), "s32")
        w.machine.count("mma.sync")

    return run


def _gather(
    w: Warp, registers: list[Getter], fragment: Any, rows: int, k: int, dtype: str
) -> NDArray[np.float64]:
    """Return the (rows, k) operand that a warp's registers hold."""
    words = np.stack([get(w) for get in registers], axis=1)  # (32, registers)
    values = decode(words[..., None].view(np.uint8).reshape(32, len(registers), 4), dtype)
    matrix = np.zeros((rows, k))
    matrix[fragment[0], fragment[1]] = values
    return matrix


_D_TYPES: dict[str, Any] = {"f32": np.float32, "s32": np.int32, "f16": np.float16}


def _gather_d(w: Warp, registers: list[Getter], dtype: str, columns: int) -> Any:
    """Return a warp's (16, columns) accumulator."""
    words = np.stack([get(w) for get in registers], axis=1)
    return _unpack_d(words, dtype, columns)


def _unpack_d(words: NDArray[np.uint32], dtype: str, columns: int) -> Any:
    values = np.ascontiguousarray(words).view(_D_TYPES[dtype])  # f16: two per register
    matrix = np.zeros((16, columns), values.dtype)
    matrix[d_fragment(values.shape[1])] = values
    return matrix


def _pack_d(matrix: Any, dtype: str, values_each: int = 0) -> NDArray[np.uint32]:
    """Return registers (32, count) of a (16, columns) accumulator (or of its first 8 rows)."""
    place = d_fragment(values_each or matrix.shape[1] // 2)
    values = matrix.astype(_D_TYPES[dtype], copy=False)[place]
    return np.ascontiguousarray(values).view(np.uint32)


def _scatter_d(w: Warp, registers: list[Any], matrix: Any, dtype: str) -> None:
    words = _pack_d(matrix, dtype, len(registers) * (2 if dtype == "f16" else 1))
    for i, put in enumerate(registers):
        put(w, words[:, i], None)


def _scales(ins: Instruction, d: Decoder, kind: str, k: int) -> Any:
    """Return a function (warp) -> (A scale codes, B scale codes, type).

    Row g of A takes its scales from lane 4 g + 2 t, row g + 8 from the next lane, column g of B
    from lane 4 g + t, where t is the thread id given; the byte id is the first byte used (PTX ISA
    "Block Scaling for mma.sync"; lanes as in CUTLASS mma_traits_sm120.hpp).
    """
    scale_type = ins.parts[-1]
    blocks = {"scale_vec::1X": 1, "scale_vec::2X": 2, "scale_vec::4X": 4}
    default = {"kind::mxf8f6f4": 1, "kind::mxf4": 2}.get(kind, 0)
    count = next((blocks[p] for p in ins.parts if p in blocks), default)
    d.need(scale_type in ("ue4m3", "ue8m0") and count > 0, "scale type and .scale_vec")
    if (scale_type == "ue4m3" and count != 4) or (kind == "kind::mxf4" and count != 2):
        raise d.unsupported(f"{scale_type} with {count} scales per row")
    data = [d.reads(ins.operands[i], "b32")[0] for i in (4, 6)]
    ids = []
    for at in (5, 7):
        op = ins.operands[at]
        items = op.items if isinstance(op, Vec) else (op,)
        ids.append([d.read(item, "u16") for item in items])

    def collect(w: Warp) -> tuple[Any, Any, str]:
        codes = []
        for which, rows in ((0, 16), (1, 8)):
            byte, thread = (int(get(w)[0]) for get in ids[which])
            legal = {1: (0, 1, 2, 3), 2: (0, 2), 4: (0,)}[count]
            if byte not in legal or thread >= (2 if which == 0 else 4):
                raise Violation(
                    f"mma block scaling: byte id {byte}, thread id {thread}; byte ids are {legal} "
                    f"and thread ids below {2 if which == 0 else 4} here"
                )
            row = np.arange(rows)
            lane = 4 * (row % 8) + (2 * thread + row // 8 if which == 0 else thread)
            words = data[which](w)[lane]
            codes.append(words[:, None].view(np.uint8)[:, byte : byte + count])
        return codes[0], codes[1], scale_type

    return collect


def _mma_f64(ins: Instruction, d: Decoder, shape: str) -> Handler:
    """float64: m8n8k4 has one element per lane of A and B; m16n8k4, 8, 16 as 32-bit elements."""
    shapes = {"m8n8k4": (8, 4), "m16n8k4": (16, 4), "m16n8k8": (16, 8), "m16n8k16": (16, 16)}
    if shape not in shapes or ins.parts.count("f64") < 4:
        raise d.unsupported(f"shape {shape}")
    rows, depth = shapes[shape]
    a, b = d.reads(ins.operands[1], "f64"), d.reads(ins.operands[2], "f64")
    c, out = d.reads(ins.operands[3], "f64"), d.writes(ins.operands[0], "f64")
    d.need((len(a), len(b), len(c)) == (rows * depth // 32, depth // 4, rows // 4))
    place_a, place_b = a_fragment(len(a), 1), b_fragment(len(b), 1)
    place_d = d_fragment(len(c))

    def run(w: Warp, m: Mask) -> None:
        left, right, acc = np.zeros((rows, depth)), np.zeros((8, depth)), np.zeros((rows, 8))
        left[place_a] = np.stack([get(w) for get in a], axis=1)[..., None]
        right[place_b] = np.stack([get(w) for get in b], axis=1)[..., None]
        acc[place_d] = np.stack([get(w) for get in c], axis=1)
        result = dot(left, right, acc, "f64")[place_d]
        for i, put in enumerate(out):
            put(w, result[:, i], None)
        w.machine.count("mma.sync")

    return run


# ---------------------------------------------------------------------------------------- wgmma


class _Wgmmas:
    """A warp's wgmma state: results by tag, open and committed groups, the last fence."""

    def __init__(self, w: Warp) -> None:
        self.open: list[Result] = []
        self.committed: deque[list[Result]] = deque()
        self.fence: NDArray[np.uint32] | None = None
        self.fenced = False
        self.agent = w.cluster.agent(
            ("wgmma", w.cta.rank, w.index), f"wgmma of warp {w.index}, CTA rank {w.cta.rank}"
        )
        self.issued = 0
        w.cta.at_exit.append(self.check_exit)
        self.warp = w

    @staticmethod
    def of(w: Warp) -> _Wgmmas:
        found: _Wgmmas | None = w.state.get("wgmma")
        if found is None:
            found = w.state["wgmma"] = _Wgmmas(w)
        return found

    def check_exit(self) -> None:
        if self.open or any(not g.done for group in self.committed for g in group):
            raise self.warp.cta.fault(
                f"warp {self.warp.index} exits with wgmma operations that were never waited for"
            )
        first = self.warp.index // 4 * 4
        states = {w.index: w.state.get("wgmma") for w in self.warp.cta.warps[first : first + 4]}
        counts = {index: state.issued if state else 0 for index, state in states.items()}
        if len(set(counts.values())) > 1:
            raise self.warp.cta.fault(
                f"the warps of a warpgroup executed different numbers of wgmma: {counts}"
            )


@register("wgmma.fence")
def _wgmma_fence(ins: Instruction, d: Decoder) -> Handler:
    d.whole_warp()

    def run(w: Warp, m: Mask) -> None:
        state = _Wgmmas.of(w)
        state.fence, state.fenced = register_block(w).copy(), True

    return run


@register("wgmma.commit_group")
def _wgmma_commit(ins: Instruction, d: Decoder) -> Handler:
    d.whole_warp()

    def run(w: Warp, m: Mask) -> None:
        state = _Wgmmas.of(w)
        state.committed.append(state.open)
        state.open = []

    return run


@register("wgmma.wait_group")
def _wgmma_wait(ins: Instruction, d: Decoder) -> Handler:
    d.whole_warp()
    left = d.constant(ins.operands[0])

    def run(w: Warp, m: Mask) -> Any:
        state = _Wgmmas.of(w)
        waited = [g for group in list(state.committed)[: -left or None] for g in group]

        def then() -> None:
            for each in waited:
                assert each.op is not None
                each.op.acquire_by(w)
                each.waited = True
            state.fenced = False
            while len(state.committed) > left:
                state.committed.popleft()
            Tags.of(w).deliver(w)

        return w.block(f"all but {left} wgmma groups", lambda: all(g.done for g in waited), then)

    return run


def _flag(d: Decoder, op: Any) -> Any:
    """Return a getter of a predicate operand that must agree between the lanes."""
    negated = isinstance(op, Not)
    get = d.read(op.operand if isinstance(op, Not) else op, "pred")

    def value(w: Warp) -> bool:
        flags = get(w)
        if flags.any() != flags.all():
            raise Violation("wgmma scale-d differs between the lanes of the warp")
        return bool(flags[0]) != negated

    return value


_K_BITS = 256


@register("wgmma.mma_async")
def _wgmma(ins: Instruction, d: Decoder) -> Handler:
    d.whole_warp()
    parts = ins.parts
    if parts[2] == "sp" or "satfinite" in parts:
        raise d.unsupported("sparse or saturating wgmma")
    shape = next(p for p in parts if p.startswith("m64"))
    n, k = (int(x) for x in shape[4:].split("k"))
    at = parts.index(shape)
    d_type, a_type, b_type = parts[at + 1 : at + 4]
    d.need(d_type in _D_TYPES and {a_type, b_type} <= set(BITS), "element types")
    d.need(8 <= n <= 256 and n % 8 == 0, "N")
    bits = BITS[a_type]
    d.need(k * bits == _K_BITS, "K")
    out = d.writes(ins.operands[0], "b32")
    acc = d.reads(ins.operands[0], "b32")
    d.need(len(out) == n // 2 // (2 if d_type == "f16" else 1), "accumulator registers")
    from_registers = isinstance(ins.operands[1], Vec)
    a_words = d.reads(ins.operands[1], "b32") if from_registers else []
    a_desc = None if from_registers else d.read(ins.operands[1], "b64")
    b_desc = d.read(ins.operands[2], "b64")
    use_d = _flag(d, ins.operands[3])
    rest = [_signed(d.constant(op)) for op in ins.operands[4:]]
    integer = a_type in ("s8", "u8")
    negate = (1, 1) if integer else (rest[0], rest[1])
    d.need(set(negate) <= {1, -1}, "imm-scale")
    majors = rest[2 if not integer else 0 :]
    d.need(set(majors) <= {0, 1} and (not majors or bits == 16), "imm-trans")
    a_major: Major = "MN" if not from_registers and majors and majors[0] else "K"
    b_major: Major = "MN" if majors and majors[-1] else "K"
    element, k_bytes, per = max(bits // 8, 1), _K_BITS // 8, 32 // bits
    rounding = WGMMA_FP8 if bits == 8 else TRUNCATED

    def run(w: Warp, m: Mask) -> None:
        state = _Wgmmas.of(w)
        if state.fence is None:
            raise Violation("wgmma.mma_async with no wgmma.fence before it")
        _same_in_warpgroup(w, state, ins, None if a_desc is None else _uniform(a_desc(w)), b_desc)
        shared = w.cta.shared
        quarter = w.index % 4
        reads = []
        captured = None
        a_table = None
        if a_desc is None:
            captured = np.stack([get(w) for get in a_words], axis=1)
            _check_fence(w, state, captured, a_words, "A")
        else:
            place = decode_wgmma(_uniform(a_desc(w)))
            a_table, _ = operand_addresses(place, 64, k_bytes, a_major, element)
            a_table = a_table[16 * quarter : 16 * quarter + 16]
            chunks = np.unique(a_table >> 4) << 4
            check_bounds(w.cta, chunks, "wgmma operand A")
            reads.append((shared, footprint(w, a_table, chunks)))
        place = decode_wgmma(_uniform(b_desc(w)))
        b_table, chunks = operand_addresses(place, n, k_bytes, b_major, element)
        check_bounds(w.cta, chunks, "wgmma operand B")
        reads.append((shared, footprint(w, b_table, chunks)))
        inputs = _inputs(w, state, acc) if use_d(w) else None
        result = Result()

        def complete(op: AsyncOp) -> None:
            if captured is not None:
                now = np.stack([get(w) for get in a_words], axis=1)
                if not np.array_equal(now, captured):
                    raise Violation(
                        "a register of operand A was changed before wgmma.wait_group said that "
                        "the wgmma had read it"
                    )
                left = np.zeros((16, k))
                data = decode(captured[..., None].view(np.uint8).reshape(32, -1, 4), a_type)
                left[a_fragment(len(a_words), per)] = data
            else:
                left = decode(shared.data[a_table], a_type)
            right = decode(shared.data[b_table], b_type)
            before = None
            if inputs is not None:
                before = _unpack_d(inputs(), d_type, n)
            total = dot(negate[0] * left, negate[1] * right, before, d_type, rounding=rounding)
            result.words = _pack_d(total, d_type)

        queue = ("wgmma", w.cta.rank, w.index, id(w.cluster))
        result.op = AsyncOp("wgmma", ins.opcode, w, state.agent, complete, queue, reads)
        w.machine.submit(result.op)
        state.open.append(result)
        tags = Tags.of(w)
        for i, put in enumerate(out):
            put(w, tags.new(result, i), None)
        w.machine.count("wgmma")

    return run


def _signed(value: int) -> int:
    """Return an immediate as the 32-bit integer it stands for."""
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


def _uniform(values: Any) -> int:
    """Return a descriptor, which must be the same in every lane."""
    first = int(values[0])
    if (values != values[0]).any():
        raise Violation("a matrix descriptor differs between the lanes of the warp")
    return first


def _same_in_warpgroup(
    w: Warp, state: _Wgmmas, ins: Instruction, a: int | None, b_desc: Getter
) -> None:
    """Check that the four warps of a warpgroup issue one sequence of wgmma."""
    if len(w.cta.warps) < w.index // 4 * 4 + 4:
        raise Violation("wgmma in a warpgroup of fewer than 4 warps")
    record = (ins.line, a, _uniform(b_desc(w)))
    key = ("wgmma sequence", w.index // 4)
    sequence: list[Any] = w.cta.state.setdefault(key, [])
    if state.issued < len(sequence):
        other = sequence[state.issued]
        if other != record:
            raise Violation(
                f"the warps of a warpgroup execute different wgmma: number {state.issued} is at "
                f"PTX line {other[0]} with descriptors {other[1:]} in another warp and at line "
                f"{record[0]} with {record[1:]} here"
            )
    else:
        sequence.append(record)
    state.issued += 1


def _check_fence(
    w: Warp, state: _Wgmmas, words: NDArray[np.uint32], registers: list[Getter], what: str
) -> None:
    """Check that registers written since the last wgmma.wait_group were fenced.

    The ISA asks for a fence between writing a register and the wgmma that uses it. Compilers move
    register writes past the fence in PTX (ptxas puts them right), so a fence anywhere since the
    last wait is enough here; with none, a changed register is reported.
    """
    if state.fenced or state.fence is None:
        return
    block = register_block(w)
    for i, get in enumerate(registers):
        row = get(w)
        start = row.__array_interface__["data"][0] - block.__array_interface__["data"][0]
        if not np.array_equal(state.fence[start // block.strides[0]], words[:, i]):
            raise Violation(
                f"register {i} of operand {what} was written after the last wgmma.fence; put a "
                "wgmma.fence between writing registers and the wgmma that reads them"
            )


def _inputs(w: Warp, state: _Wgmmas, registers: list[Getter]) -> Any:
    """Return a function that gives the accumulator input words when they are known."""
    words = np.stack([get(w) for get in registers], axis=1)
    sources = [Tags.of(w).find(int(tag)) for tag in words[0]]
    if not any(sources):
        _check_fence(w, state, words, registers, "D")
        return lambda: words

    def collect() -> NDArray[np.uint32]:
        collected = words.copy()
        for i, source in enumerate(sources):
            if source is not None:
                assert source[0].words is not None
                collected[:, i] = source[0].words[:, source[1]]
        return collected

    return collect
