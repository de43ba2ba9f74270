"""A kernel made executable: every instruction decoded once into a closure.

Instruction families register a decoder for their opcodes with `register`. A `Program` decodes an
entry and every function it may call; a `Decoder` gives the families their operands.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from fp4rt.device import EmulatorFault

from . import ptx
from .dataflow import analyse
from .memory import SHARED_WINDOW, Violation
from .ptx import (
    TYPE_BYTES,
    Function,
    Imm,
    Instruction,
    Mem,
    Operand,
    Reg,
    Sink,
    Special,
    Sym,
    Variable,
    Vec,
)
from .shared import SHARED_RESERVED
from .special import DYNAMIC, STATIC
from .warp import FILES, POISON32, Mask
from .wrappers import Handler, aligned, failing, guarded, watched, with_preludes

if TYPE_CHECKING:
    from .warp import Warp

Getter = Callable[["Warp"], Any]
Setter = Callable[["Warp", Any, Mask], None]
Family = Callable[[Instruction, "Decoder"], Handler]

REGISTRY: dict[str, Family] = {}
CODE_WINDOW = 0xC0DE << 32
STACK_BYTES = 16384
"""Local memory of a lane that alloca gives out, in programs that have one."""
_RECURSION_BYTES = 8192
FILE = {name: i for i, name in enumerate(FILES)}
FILE |= {
    "b8": 1,
    "u8": 1,
    "s8": 2,
    "b16": 1,
    "b32": 4,
    "b64": 7,
    "bf16": 1,
    "f16x2": 4,
    "bf16x2": 4,
}
FILE |= {"tf32": 4, "e4m3x2": 1, "e5m2x2": 1, "u16x2": 4, "s16x2": 4}
_CLASS = {"pred": "pred", 1: "b16", 2: "b16", 4: "b32", 8: "b64", 16: "b128"}
DTYPES: dict[str, Any] = {
    "u8": np.uint8, "b8": np.uint8, "s8": np.int8, "u16": np.uint16, "b16": np.uint16,
    "s16": np.int16, "f16": np.float16, "bf16": np.uint16, "u32": np.uint32, "b32": np.uint32,
    "s32": np.int32, "f32": np.float32, "f16x2": np.uint32, "bf16x2": np.uint32, "u64": np.uint64,
    "b64": np.uint64, "s64": np.int64, "f64": np.float64, "tf32": np.uint32,
}  # fmt: skip


def register(*prefixes: str) -> Callable[[Family], Family]:
    """Register a decoder for opcodes that start with one of these dotted prefixes."""

    def add(family: Family) -> Family:
        for prefix in prefixes:
            if prefix in REGISTRY:
                raise ValueError(f"two decoders for {prefix}")
            REGISTRY[prefix] = family
        return family

    return add


def find_family(parts: tuple[str, ...]) -> Family | None:
    """Return the decoder with the longest matching prefix."""
    for n in range(len(parts), 0, -1):
        family = REGISTRY.get(".".join(parts[:n]))
        if family is not None:
            return family
    return None


class Rows:
    """The register file layout of a program: rows by class, constants and special registers."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[Any, int]] = {
            c: {} for c in ("pred", "b16", "b32", "b64", "b128")
        }
        self.constants: dict[str, dict[int, int]] = {c: {} for c in self.rows}
        self.fills: list[tuple[str, int, Callable[[Warp], Any]]] = []

    def of(self, cls: str, key: Any) -> int:
        """Return the row for `key`, a new one at the first call."""
        rows = self.rows[cls]
        row = rows.get(key)
        if row is None:
            row = rows[key] = len(rows)
        return row

    def constant(self, cls: str, value: int) -> int:
        """Return a row that holds `value` in every lane."""
        row = self.of(cls, ("constant", value))
        self.constants[cls][row] = value
        return row

    def filled(self, cls: str, key: Any, fill: Callable[[Warp], Any]) -> int:
        """Return a row that `fill(warp)` gives its content when the warp starts."""
        rows = self.rows[cls]
        if key not in rows:
            self.fills.append((cls, self.of(cls, key), fill))
        return rows[key]


class Decoder:
    """Operand access for one instruction; see the methods."""

    def __init__(self, program: Program, function: Function, ins: Instruction) -> None:
        self.program, self.function, self.ins = program, function, ins
        self.is_whole_warp: bool | str = False
        self.preludes: list[Callable[[Warp], None]] = []

    def unsupported(self, why: str = "") -> EmulatorFault:
        """Return the fault for an instruction that the emulator does not know."""
        return EmulatorFault(
            f"unknown instruction {self.ins.opcode}{': ' + why if why else ''}\n"
            f"  at PTX line {self.ins.line}: {self.ins.text}"
        )

    def illegal(self, why: str) -> EmulatorFault:
        """Return the fault for an instruction that PTX does not allow."""
        return EmulatorFault(f"{why}\n  at PTX line {self.ins.line}: {self.ins.text}")

    def need(self, condition: bool, why: str = "operands or modifiers") -> None:
        """Raise `unsupported` unless `condition`."""
        if not condition:
            raise self.unsupported(why)

    def whole_warp(self, *, exited: bool = False) -> None:
        """Mark the instruction `.aligned`; `exited` lanes may be missing for barriers."""
        self.is_whole_warp = "exited" if exited else True

    def constant(self, op: Operand) -> int:
        """Return the value of an integer immediate."""
        if isinstance(op, Imm) and op.kind == "int":
            return op.value
        raise self.illegal("operand must be an integer constant")

    # -- registers

    def row(self, op: Operand, type: str) -> tuple[int, int]:
        """Return (register file, row) of an operand read or written as `type`."""
        rows = self.program.rows
        file = FILE.get(type)
        if file is None:
            raise self.unsupported(f"type {type}")
        size = TYPE_BYTES.get(type) or np.dtype(DTYPES[type]).itemsize
        cls = _CLASS["pred" if type == "pred" else size]
        if isinstance(op, Reg):
            own = _CLASS["pred" if op.type == "pred" else TYPE_BYTES[op.type]]
            if own != cls:
                raise self.illegal(f"register {op.name} is .{op.type}, not .{type}")
            return file, rows.of(cls, (self.function.name, op.name))
        if isinstance(op, Imm):
            return file, rows.constant(cls, self._bits(op, type, size))
        if isinstance(op, Special):
            return file, self._special(op.name, cls)
        if isinstance(op, Sym):
            return file, self._symbol(op, cls)
        if isinstance(op, Sink):
            return file, rows.of(cls, "sink")
        raise self.unsupported(f"operand {op}")

    def _bits(self, op: Imm, type: str, size: int) -> int:
        if type == "pred":
            return int(bool(op.value))
        value = op.value
        if op.kind == "f64" and (type in ("f32", "tf32") or size == 4):
            double = struct.unpack("<d", value.to_bytes(8, "little"))[0]
            value = int(np.float32(double).view(np.uint32))
        elif op.kind == "f64" and type == "f16":
            double = struct.unpack("<d", value.to_bytes(8, "little"))[0]
            value = int(np.float16(double).view(np.uint16))
        elif op.kind == "f32" and type == "f64":
            value = int(np.float64(np.uint32(value).view(np.float32)).view(np.uint64))
        elif op.kind == "int" and type in ("f32", "f64"):
            raise self.illegal(f"integer constant {value} where a .{type} is due")
        return value & ((1 << 8 * size) - 1)

    def _special(self, name: str, cls: str) -> int:
        rows = self.program.rows
        self.program.specials.add(name)
        base, _, axis = name.partition(".")
        static = STATIC.get(base)
        if static is not None:
            axis_index = "xyzw".index(axis) if axis else -1
            return rows.filled(
                cls,
                ("special", name),
                (lambda w: static(w)[axis_index]) if axis else static,
            )
        dynamic = DYNAMIC.get(base)
        if dynamic is None:
            raise self.unsupported(f"special register {name}")
        row = rows.of(cls, ("special", name))
        file = {"b16": 1, "b32": 4, "b64": 7}[cls]
        bits = {"b16": 0xFFFF, "b32": 0xFFFFFFFF, "b64": 0xFFFFFFFFFFFFFFFF}[cls]

        def refresh(w: Warp) -> None:
            w.files[file][row][:] = dynamic(w) & bits

        self.preludes.append(refresh)
        return row

    def _symbol(self, op: Sym, cls: str) -> int:
        space, value = self.symbol(op.name)
        value += op.offset
        rows = self.program.rows
        bits = (1 << {"b16": 16, "b32": 32, "b64": 64}[cls]) - 1
        if space == "shared":
            return rows.filled(cls, ("shared", value), lambda w: (w.cta.rank << 24 | value) & bits)
        if space == "local" and self.program.recursive:
            row = rows.of(cls, ("local", value))
            file = {"b32": 4, "b64": 7}[cls]

            def refresh(w: Warp) -> None:
                w.files[file][row][:] = value + local_base(w)

            self.preludes.append(refresh)
            return row
        return rows.constant(cls, value & bits)

    def symbol(self, name: str) -> tuple[str, int]:
        """Return (state space, address) of a variable or function."""
        return self.program.symbol(name, self.function)

    def read(self, op: Operand, type: str) -> Getter:
        """Return a getter of ndarray[32]; the array is the register itself, not a copy."""
        if type in ("u8", "s8", "b8") and isinstance(op, Reg):
            file, row = self.row(
                op, "b16" if TYPE_BYTES[op.type] <= 2 else f"b{TYPE_BYTES[op.type] * 8}"
            )
            dtype = DTYPES[type]
            return lambda w: w.files[file][row].astype(np.uint8).view(dtype)
        file, row = self.row(op, type)
        return lambda w: w.files[file][row]

    def reads(self, op: Operand, type: str) -> list[Getter]:
        """Return a getter for each element of a vector operand (or for the operand itself)."""
        return [self.read(item, type) for item in (op.items if isinstance(op, Vec) else (op,))]

    def write(self, op: Operand, type: str) -> Setter:
        """Return a setter (warp, values, mask)."""
        if isinstance(op, Sink):
            return lambda w, values, m: None
        if not isinstance(op, Reg):
            raise self.illegal("destination must be a register")
        file, row = self.row(op, type)

        def put(w: Warp, values: Any, m: Mask) -> None:
            if m is None:
                w.files[file][row][:] = values
            else:
                np.copyto(w.files[file][row], values, where=m)

        return put

    def writes(self, op: Operand, type: str) -> list[Setter]:
        """Return a setter for each element of a vector operand (or for the operand itself)."""
        return [self.write(item, type) for item in (op.items if isinstance(op, Vec) else (op,))]

    # -- addresses

    def address(self, op: Operand) -> Getter:
        """Return a getter of uint64[32]: base plus offset of a memory operand."""
        base, offset = (op.base, op.offset) if isinstance(op, Mem) else (op, 0)
        if isinstance(base, Sym):
            base, offset = Sym(base.name, base.offset + offset), 0
        wide = not isinstance(base, Reg) or TYPE_BYTES[base.type] == 8
        if isinstance(base, Imm):
            base, offset = Imm(base.value + offset), 0
        file, row = self.row(base, "u64" if wide else "u32")
        if wide:
            if not offset:
                return lambda w: w.files[file][row]
            step = np.uint64(offset & 0xFFFFFFFFFFFFFFFF)
            return lambda w: w.files[file][row] + step
        step32 = np.uint32(offset & 0xFFFFFFFF)
        return lambda w: (w.files[file][row] + step32).astype(np.uint64)

    def shared_address(self, op: Operand) -> Getter:
        """Return a getter of int64[32]: shared addresses (``rank << 24 | offset``)."""
        address = self.address(op)
        base = op.base if isinstance(op, Mem) else op
        if isinstance(base, Reg) and TYPE_BYTES[base.type] == 8:

            def convert(w: Warp) -> Any:
                values = address(w)
                high = values >> np.uint64(32)
                generic = high == np.uint64(SHARED_WINDOW >> 32)
                if not ((high == 0) | generic).all():
                    bad = values[((high != 0) & ~generic).argmax()]
                    raise Violation(f"address {int(bad):#x} is not in shared memory")
                return (values & np.uint64(0xFFFFFFFF)).astype(np.int64)

            return convert
        return lambda w: address(w).astype(np.int64)


def local_base(w: Warp) -> int:
    """Return where the present function's local frame starts."""
    frame = w.frag.frame
    return frame.local_base if frame is not None else 0


class Program:
    """An entry and the functions it may call, decoded."""

    def __init__(self, module: ptx.Module, entry: str, symbols: dict[str, int], arch: str) -> None:
        self.module, self.name, self.symbols, self.arch = module, entry, symbols, arch
        self.entry = module.functions[entry]
        self.rows = Rows()
        self.specials: set[str] = set()
        self.functions = self._reachable()
        self.base: dict[str, int] = {}
        self.instructions: list[Instruction] = []
        self.shared_offsets: dict[str, int] = {}
        self.extern_shared: list[Variable] = []
        self._shared_layout()
        self.local_offsets: dict[tuple[str, str], int] = {}
        self.local_frames: dict[str, int] = {}
        self.param_offsets: dict[tuple[str, str], int] = {}
        self._frames()
        self.kernel_params = self._kernel_params()
        self.param_bytes = max((o + v.size for o, v in self.kernel_params.values()), default=0)
        self.owner: list[Function] = []
        for func in self.functions:
            self.base[func.name] = len(self.instructions)
            for ins in func.code:
                self.instructions.append(ins)
                self.owner.append(func)
            line = func.code[-1].line if func.code else func.line
            end = Instruction(
                "ret", ("ret",), (), None, line, "ret; (end)", None, ptx.Scope(None, 0)
            )
            self.instructions.append(end)
            self.owner.append(func)
        self.start = self.base[entry]
        self.suspects = {func.name: analyse(func) for func in self.functions}
        self.steps: list[Handler] = []
        for pc in range(len(self.instructions)):
            self.steps.append(self._decode(pc))
        self._templates()

    # -- layout

    def _reachable(self) -> list[Function]:
        found: dict[str, Function] = {}
        todo = [self.entry.name]
        calls: dict[str, set[str]] = {}
        indirect = False
        while todo:
            name = todo.pop()
            func = self.module.functions[name]
            if name in found or not func.defined:
                continue
            found[name] = func
            called = calls.setdefault(name, set())
            for ins in func.code:
                if ins.parts[0] == "call" and not any(
                    isinstance(op, Sym) and op.name in self.module.functions for op in ins.operands
                ):
                    indirect = True
                for op in ins.operands:
                    for name2 in _symbols(op):
                        if name2 in self.module.functions:
                            called.add(name2)
                            todo.append(name2)
            if indirect:
                for other in self.module.functions.values():
                    if not other.entry:
                        called.add(other.name)
                        todo.append(other.name)
        self.recursive = _has_cycle(calls)
        return list(found.values())

    def _shared_layout(self) -> None:
        offset = SHARED_RESERVED
        dynamic_align = 16
        names: set[str] = set()
        for func in self.functions:
            for ins in func.code:
                for op in ins.operands:
                    names.update(_symbols(op))
        variables = [v for v in self.module.variables.values() if v.space == "shared"]
        for func in self.functions:
            variables.extend(v for v in func.variables.values() if v.space == "shared")
        for var in variables:
            if var.name not in names:
                continue
            if var.unsized or (var.external and not var.size):
                dynamic_align = max(dynamic_align, var.align)
                self.extern_shared.append(var)
                continue
            offset = -(-offset // var.align) * var.align
            self.shared_offsets[var.name] = offset
            offset += var.size
        self.static_shared = offset - SHARED_RESERVED
        self.dynamic_offset = -(-offset // dynamic_align) * dynamic_align
        for var in self.extern_shared:
            self.shared_offsets[var.name] = self.dynamic_offset

    def shared_size(self, dynamic: int) -> int:
        """Return the bytes of shared memory that a CTA has with `dynamic` bytes of its own."""
        if dynamic:
            return self.dynamic_offset - SHARED_RESERVED + dynamic
        return self.static_shared

    def _frames(self) -> None:
        local = 0
        params = 0
        for func in self.functions:
            start = 0 if self.recursive else local
            at = start
            for var in func.variables.values():
                if var.space == "local":
                    at = -(-at // max(var.align, 1)) * max(var.align, 1)
                    self.local_offsets[func.name, var.name] = at
                    at += var.size
            self.local_frames[func.name] = -(-at // 16) * 16
            local = max(local, self.local_frames[func.name])
            formals = [] if func.entry else [*func.params, *func.returns]
            for var in [*formals, *func.variables.values()]:
                if var.space == "param":
                    params = -(-params // 16) * 16
                    self.param_offsets[func.name, var.name] = params
                    params += max(var.size, 1)
        self.local_bytes = sum(self.local_frames.values()) if self.recursive else local
        self.local_size = self.local_bytes
        if self.recursive:
            self.local_size = max(16 * self.local_bytes, _RECURSION_BYTES)
        self.has_stack = any(ins.parts[0] == "alloca" for f in self.functions for ins in f.code)
        if self.has_stack:
            self.local_size = -(-self.local_size // 16) * 16 + STACK_BYTES
        self.param_size = params

    def _kernel_params(self) -> dict[str, tuple[int, Variable]]:
        offset = 0
        found: dict[str, tuple[int, Variable]] = {}
        for var in self.entry.params:
            offset = -(-offset // var.align) * var.align
            found[var.name] = (offset, var)
            offset += var.size
        return found

    def uses_special(self, prefix: str) -> bool:
        """Whether some instruction reads a special register of that name."""
        return any(name.startswith(prefix) for name in self.specials)

    def symbol(self, name: str, func: Function) -> tuple[str, int]:
        """Return (state space, address) of a variable or function as seen from `func`."""
        if (func.name, name) in self.local_offsets:
            return "local", self.local_offsets[func.name, name]
        if name in self.shared_offsets:
            return "shared", self.shared_offsets[name]
        if func.entry and name in self.kernel_params:
            return "kernel_param", self.kernel_params[name][0]
        if (func.name, name) in self.param_offsets:
            return "param", self.param_offsets[func.name, name]
        if name in self.symbols:
            return self.module.variables[name].space, self.symbols[name]
        if name in self.base or name in self.module.functions:
            return "code", CODE_WINDOW + list(self.module.functions).index(name)
        raise EmulatorFault(f"unknown symbol {name} in {func.name}")

    # -- decoding

    def _decode(self, pc: int) -> Handler:
        ins, func = self.instructions[pc], self.owner[pc]
        decoder = Decoder(self, func, ins)
        family = find_family(ins.parts)
        handler: Handler
        try:
            if family is None:
                raise decoder.unsupported()
            handler = family(ins, decoder)
        except EmulatorFault as error:
            return failing(str(error))
        except (IndexError, KeyError, ValueError, AttributeError) as error:
            why = f"{type(error).__name__}: {error}"
            return failing(str(decoder.unsupported(f"operands or modifiers ({why})")))
        if decoder.preludes:
            handler = with_preludes(decoder.preludes, handler)
        suspects = self.suspects[func.name]
        at = pc - self.base[func.name]
        guard_name = ins.guard[0].name if ins.guard is not None else ""
        reads = suspects.reads.get(at, [])
        handler = watched(
            handler,
            func.name,
            [reg for reg in reads if reg != guard_name],
            suspects.writes.get(at, []),
        )
        guard = None
        if ins.guard is not None:
            reg, negated = ins.guard
            guard = (self.rows.of("pred", (func.name, reg.name)), negated)
        if decoder.is_whole_warp:
            handler = aligned(handler, guard, decoder.is_whole_warp == "exited")
        elif guard is not None:
            handler = guarded(handler, *guard)
        return watched(handler, func.name, [reg for reg in reads if reg == guard_name], [])

    # -- warps

    def _templates(self) -> None:
        rows, constants = self.rows.rows, self.rows.constants
        shapes: dict[str, Any] = {"b16": np.uint16, "b32": np.uint32, "b64": np.uint64}
        self.templates: dict[str, Any] = {"pred": np.zeros((len(rows["pred"]), 32), bool)}
        for cls, dtype in shapes.items():
            poison = POISON32 * 0x100000001 & int(np.iinfo(dtype).max)
            self.templates[cls] = np.full((len(rows[cls]), 32), poison, dtype)
        for cls, values in constants.items():
            for row, value in values.items():
                self.templates[cls][row] = value
        self.wide_rows = len(rows["b128"])

    def registers(self, w: Warp) -> tuple[RegisterFile, ...]:
        """Return the register files of a new warp, in the order of `FILES`."""
        blocks = {cls: block.copy() for cls, block in self.templates.items()}
        for cls, row, fill in self.rows.fills:
            blocks[cls][row] = fill(w)
        b16, b32, b64 = blocks["b16"], blocks["b32"], blocks["b64"]
        wide = np.zeros((self.wide_rows, 32, 2), np.uint64)
        views = (
            blocks["pred"],
            b16, b16.view(np.int16), b16.view(np.float16),
            b32, b32.view(np.int32), b32.view(np.float32),
            b64, b64.view(np.int64), b64.view(np.float64),
            wide,
        )  # fmt: skip
        return tuple(map(RegisterFile, views))


class RegisterFile(dict[int, Any]):
    """The rows of a block of registers; a warp uses few of them, so each is made at its first use.

    An array of a row costs a microsecond, a kernel has thousands, and most tests launch many warps.
    """

    __slots__ = ("block",)

    def __init__(self, block: Any) -> None:
        self.block = block

    def __missing__(self, row: int) -> Any:
        found = self[row] = self.block[row]
        return found


def _symbols(op: Operand) -> list[str]:
    if isinstance(op, Sym):
        return [op.name]
    if isinstance(op, Mem):
        return [n for item in (op.base, *op.extra) for n in _symbols(item)]
    if isinstance(op, Vec | ptx.Args):
        return [n for item in op.items for n in _symbols(item)]
    return []


def _has_cycle(calls: dict[str, set[str]]) -> bool:
    done: set[str] = set()
    open_: set[str] = set()

    def visit(name: str) -> bool:
        if name in open_:
            return True
        if name in done:
            return False
        open_.add(name)
        hit = any(visit(other) for other in calls.get(name, ()))
        open_.discard(name)
        done.add(name)
        return hit

    return any(visit(name) for name in calls)


__all__ = [
    "CODE_WINDOW",
    "DTYPES",
    "FILE",
    "Decoder",
    "Getter",
    "Handler",
    "Mask",
    "Program",
    "Setter",
    "local_base",
    "register",
]
