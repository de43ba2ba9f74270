"""tcgen05.mma: the matrix instruction of Blackwell, dense, without .ws.

Operands come from shared memory by descriptor (A also from Tensor Memory), scale factors and the
accumulator are in Tensor Memory. With ``cta_group::2`` the pair's CTAs hold half of A's rows and
half of B's rows each, at the same addresses. Layouts: PTX ISA "Data path layout organization"
(layouts A, B, D, F) and "Block scaling"; see the functions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .descriptors import InstructionDescriptor, decode_instruction, decode_tcgen05
from .memory import Violation
from .numerics import BITS, block_scaled_dot, decode, decode_padded, dot
from .program import Decoder, Handler, register
from .ptx import Instruction, Mem, Not, Vec
from .tcgen05 import Pipe, cta_group, group_ctas, tensor_memory
from .tensor_core import check_bounds, footprint, operand_addresses
from .tmem import TensorMemory, split_address
from .tmem_order import Rect

if TYPE_CHECKING:
    from .machine import Cta
    from .warp import Mask, Warp


@dataclass(frozen=True)
class Layout:
    """Where a CTA's part of D lies.

    Attributes
    ----------
    rows
        Rows of D (and of A) that a CTA holds.
    columns
        Tensor Memory columns of D in a CTA.
    lanes, cells
        Lane and column offset of each element, shape (rows, N).
    """

    rows: int
    columns: int
    lanes: NDArray[np.int64]
    cells: NDArray[np.int64]


def layout(m: int, n: int, group: int) -> Layout:
    """Return the data path layout of D (PTX ISA layouts A, B, D, F).

    Examples
    --------
    >>> d = layout(128, 64, 2)                 # layout B: columns from N/2 on in lanes 64-127
    >>> d.rows, d.columns, int(d.lanes[5, 40]), int(d.cells[5, 40])
    (64, 32, 69, 8)
    """
    rows = m // group
    r, c = np.arange(rows)[:, None], np.arange(n)[None, :]
    if rows == 128:  # D (one CTA, M = 128) and A (two CTAs, M = 256)
        return Layout(rows, n, r + 0 * c, c + 0 * r)
    if group == 2:  # B: M = 128 over two CTAs
        return Layout(rows, n // 2, r + 64 * (c >= n // 2), c % (n // 2) + 0 * r)
    return Layout(rows, n, 32 * (r // 16) + r % 16 + 0 * c, c + 0 * r)  # F: M = 64


@register("tcgen05.mma")
def _mma(ins: Instruction, d: Decoder) -> Handler:
    parts = ins.parts
    group = cta_group(ins, d)
    if parts[2] in ("ws", "sp") or "ashift" in parts:
        raise d.unsupported("sparse, .ws and .ashift forms are not emulated")
    kind = next(p for p in parts if p.startswith("kind::")).partition("::")[2]
    scaled = "block_scale" in parts
    d.need(scaled == kind.startswith("mx"), ".block_scale goes with the mx kinds")
    block = _block(parts, kind) if scaled else 0
    ops = list(ins.operands)
    d_address = d.address(ops[0])
    a_in_tmem = isinstance(ops[1], Mem)
    a = d.address(ops[1]) if a_in_tmem else d.read(ops[1], "b64")
    b = d.read(ops[2], "b64")
    idesc = d.read(ops[3], "b32")
    rest = ops[4:]
    scales = []
    disabled: list[Any] = []
    if scaled:
        scales = [d.address(rest.pop(0)), d.address(rest.pop(0))]
    elif isinstance(rest[0], Vec):
        disabled = d.reads(rest.pop(0), "b32")
        d.need(len(disabled) == 4 * group, "disable-output-lane")
    flag = rest.pop(0)
    negated = isinstance(flag, Not)
    use_d = d.read(flag.operand if isinstance(flag, Not) else flag, "pred")
    shift = d.constant(rest.pop(0)) if rest else 0
    d.need(not rest and 0 <= shift <= 15 and (not shift or kind in ("f16", "tf32")))

    def run(w: Warp, m: Mask) -> None:
        for lane in w.lanes(m):
            lane = int(lane)
            task = _Task(
                w,
                group_ctas(w, group),
                decode_instruction(int(idesc(w)[lane]), kind, group, block),
                block,
                int(d_address(w)[lane]),
                bool(use_d(w)[lane]) != negated,
                2.0**-shift,
            )
            if a_in_tmem:
                task.a_from_tmem(int(a(w)[lane]))
            else:
                task.a_from_shared(int(a(w)[lane]))
            task.b_from_shared(int(b(w)[lane]))
            if scaled:
                task.set_scales(*(int(get(w)[lane]) for get in scales))
            if disabled:
                task.disable([int(get(w)[lane]) for get in disabled])
            text = f"tcgen05.mma.kind::{kind}"
            pipe = Pipe.of(w, lane)
            pipe.submit(w, "tcgen05.mma", text, task.execute, task.touches, task.reads)

    return run


def _block(parts: tuple[str, ...], kind: str) -> int:
    """Return the elements per scale factor that the instruction names or implies."""
    k = 32 if kind == "mxf8f6f4" else 64
    names = {"block16": 16, "block32": 32}
    names |= {f"scale_vec::{n}X": k // n for n in (1, 2, 4)}
    for part in parts:
        if part in names:
            return names[part]
    return 0 if kind == "mxf4nvf4" else 32  # mandatory for mxf4nvf4, implied otherwise


class _Task:
    """One mma: its operands, its checks, and its execution."""

    def __init__(
        self,
        w: Warp,
        ctas: list[Cta],
        desc: InstructionDescriptor,
        block: int,
        d_address: int,
        use_d: bool,
        d_factor: float,
    ) -> None:
        self.w, self.ctas, self.desc, self.block = w, ctas, desc, block
        self.use_d, self.d_factor = use_d, d_factor
        self.touches: list[tuple[Any, str, bool, Rect]] = []
        self.reads: list[tuple[Any, Any]] = []
        self.layout = layout(desc.m, desc.n, len(ctas))
        self.memories = [tensor_memory(cta) for cta in ctas]
        self.keep: list[NDArray[np.bool_]] = []
        self.a_bytes: Callable[[int], NDArray[np.uint8]]
        self.b_table: NDArray[np.int64]
        self.scales: list[tuple[str, int, int, int]] = []
        self.k_bytes = desc.k * self._bits(desc.a_type) // 8
        self.d_lane, self.d_column = split_address(d_address)
        half = self.layout.rows == 64 and len(ctas) == 1
        if self.d_lane not in ((0, 16) if half else (0,)):
            raise Violation(
                f"accumulator address {d_address:#010x} has lane {self.d_lane}; it must be "
                f"{'0 or 16' if half else '0'} for M = {desc.m}"
            )
        lanes = int(self.layout.lanes.max()) + 1
        self._touch("accumulator", True, self.d_lane, lanes, self.d_column, self.layout.columns)

    def _bits(self, dtype: str) -> int:
        """Return the bits that an element takes in shared memory."""
        return 8 if self.desc.kind in ("f8f6f4", "mxf8f6f4") else BITS[dtype]

    def _touch(
        self, role: str, write: bool, lane: int, lanes: int, column: int, columns: int
    ) -> None:
        for cta, memory in zip(self.ctas, self.memories, strict=True):
            memory.check(f"the {role} of tcgen05.mma", lane, lanes, column, columns)
            self.touches.append((cta, role, write, (lane, lanes, column, columns)))

    # -- operands

    def _from_shared(self, name: str, value: int, rows: int, major: Any, dtype: str) -> Any:
        place = decode_tcgen05(value)
        element = max(self._bits(dtype) // 8, 1)
        table, chunks = operand_addresses(place, rows, self.k_bytes, major, element)
        for cta in self.ctas:
            check_bounds(cta, chunks, f"operand {name} of tcgen05.mma")
            self.reads.append((cta.shared, footprint(self.w, table, chunks)))
        return table

    def a_from_shared(self, value: int) -> None:
        """Take A by descriptor: the CTA's rows."""
        desc = self.desc
        table = self._from_shared("A", value, self.layout.rows, desc.a_major, desc.a_type)
        self.a_bytes = lambda i: np.asarray(self.ctas[i].shared.data[table])

    def a_from_tmem(self, address: int) -> None:
        """Take A from Tensor Memory: row r in D's lane of row r, K packed along the columns."""
        if self.desc.a_major != "K":
            raise Violation("operand A in Tensor Memory cannot be transposed")
        if self.layout.rows == 64 and len(self.ctas) == 2:
            raise Violation("operand A in Tensor Memory with M = 128 over two CTAs: not emulated")
        lane, column = split_address(address)
        rows = self.layout.lanes[:, :1] + lane
        columns = np.arange(self.k_bytes // 4)[None, :] + column
        self._touch(
            "operand A", False, lane, int(self.layout.lanes.max()) + 1, column, self.k_bytes // 4
        )

        def read(i: int) -> NDArray[np.uint8]:
            words = self.memories[i].read("operand A of tcgen05.mma", rows, columns)
            return np.ascontiguousarray(words).view(np.uint8)

        self.a_bytes = read

    def b_from_shared(self, value: int) -> None:
        """Take B by descriptor: each CTA holds its share of the N rows."""
        desc = self.desc
        rows = desc.n // len(self.ctas)
        self.b_table = self._from_shared("B", value, rows, desc.b_major, desc.b_type)

    def set_scales(self, a_address: int, b_address: int) -> None:
        """Take the scale factors; SFB is complete in each CTA, SFA has the CTA's rows."""
        for name, address, rows, scale_id in (
            ("A", a_address, self.layout.rows, self.desc.a_scale_id),
            ("B", b_address, self.desc.n, self.desc.b_scale_id),
        ):
            # Bits 30-31 of a scale address may carry the scale id, as CUTLASS passes it.
            lane, column = split_address(address & 0x3FFFFFFF)
            if lane:
                raise Violation(f"scale factors {name} at lane {lane}; the lane must be 0")
            self._touch("scale factors", False, 0, 128, column, -(-rows // 32))
            self.scales.append((name, column, rows, scale_id))

    def disable(self, words: list[int]) -> None:
        """Take the disable-output-lane vector: bit r set keeps lane r of D as it is."""
        bits = np.unpackbits(np.array(words, np.uint32).view(np.uint8), bitorder="little")
        self.keep = [part.astype(bool) for part in np.split(bits, len(self.ctas))]

    # -- execution

    def execute(self) -> None:
        """Compute D in every CTA of the group."""
        desc = self.desc
        data = np.concatenate([cta.shared.data[self.b_table] for cta in self.ctas])
        b = self._values(data, desc.b_type, desc.negate_b)
        for i, memory in enumerate(self.memories):
            a = self._values(self.a_bytes(i), desc.a_type, desc.negate_a)
            before = self._before(memory) if self.use_d else None
            if desc.scale_type:
                codes = [self._codes(memory, *each) for each in self.scales]
                result: Any = block_scaled_dot(a, b, codes[0], codes[1], desc.scale_type, before)
            else:
                if before is not None and self.d_factor != 1.0:
                    before = before * before.dtype.type(self.d_factor)
                result = dot(a, b, before, desc.d_type, saturate=desc.saturate)
            self._store(memory, i, result)

    def _values(self, data: NDArray[np.uint8], dtype: str, negate: bool) -> NDArray[np.float64]:
        if self.desc.kind in ("f8f6f4", "mxf8f6f4"):
            values = decode_padded(data, dtype)
        else:
            values = decode(data, dtype)
        return -values if negate else values

    def _cells(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return self.layout.lanes + self.d_lane, self.layout.cells + self.d_column

    def _before(self, memory: TensorMemory) -> Any:
        words = memory.read("the accumulator input of tcgen05.mma", *self._cells())
        if self.desc.d_type == "f16":
            return (words & 0xFFFF).astype(np.uint16).view(np.float16)
        return words.view(np.int32 if self.desc.d_type == "s32" else np.float32)

    def _codes(
        self, memory: TensorMemory, name: str, column: int, rows: int, scale_id: int
    ) -> NDArray[np.uint8]:
        """Return scale codes (rows, blocks): row r in lane r % 32 of every partition.

        Column ``base + r // 32``; the bytes from `scale_id` on are the blocks along K.
        """
        r = np.arange(rows)
        what = f"scale factors {name} of tcgen05.mma"
        partitions = np.arange(4)[:, None] * 32
        words = memory.read(what, r % 32 + partitions, column + r // 32 + 0 * partitions)
        if (words != words[0]).any():
            bad = int(np.argwhere(words != words[0])[0][1])
            raise Violation(
                f"{what}: row {bad} differs between the four 32-lane partitions; copy them with "
                ".warpx4"
            )
        blocks = self.desc.k // self.block
        codes = np.ascontiguousarray(words[0])[:, None].view(np.uint8)
        return np.asarray(codes[:, scale_id : scale_id + blocks])

    def _store(self, memory: TensorMemory, i: int, result: Any) -> None:
        lanes, cells = self._cells()
        if self.desc.d_type == "f16":
            words = result.view(np.uint16).astype(np.uint32)
        else:
            words = result.view(np.uint32)
        if self.keep:
            use = ~self.keep[i][lanes]
            memory.write(lanes[use], cells[use], words[use])
        else:
            memory.write(lanes, cells, words)
