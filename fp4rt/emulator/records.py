"""What the grammar makes of PTX: operands, instructions, variables, functions and modules."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

_NUMBERED = re.compile(r"(.*?)(0|[1-9]\d*)$")

TYPE_BYTES = {
    **{f"{k}{n}": n // 8 for k in "bus" for n in (8, 16, 32, 64)},
    **{"f16": 2, "f32": 4, "f64": 8, "b128": 16, "pred": 1, "f16x2": 4, "bf16": 2, "bf16x2": 4},
    **{"texref": 8, "samplerref": 8, "surfref": 8},
}

# ---------------------------------------------------------------------------------- operands


@dataclass(frozen=True, slots=True)
class Reg:
    """A declared register: unique name and declared type (``"b32"``, ``"f64"``, ``"pred"``)."""

    name: str
    type: str


@dataclass(frozen=True, slots=True)
class Special:
    """A special register, such as ``%tid.x``."""

    name: str


@dataclass(frozen=True, slots=True)
class Imm:
    """An immediate: an integer, or the bits of a float (kind ``"f32"``/``"f64"``)."""

    value: int
    kind: Literal["int", "f32", "f64"] = "int"


@dataclass(frozen=True, slots=True)
class Sym:
    """A symbol (variable, function or label) plus a byte offset."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Mem:
    """``[base + offset, extra…]``."""

    base: Operand
    offset: int = 0
    extra: tuple[Operand, ...] = ()


@dataclass(frozen=True, slots=True)
class Vec:
    """``{a, b, …}``."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Args:
    """``(a, b, …)`` of a call."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Not:
    """``!p``."""

    operand: Operand


@dataclass(frozen=True, slots=True)
class Pair:
    """``p|q``: two destinations of one instruction."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class Neg:
    """``-x`` of a video instruction."""

    operand: Operand


@dataclass(frozen=True, slots=True)
class Select:
    """``x.b0``, ``x.h10``: bytes or halves of a register, in a video instruction."""

    register: Reg
    selector: str


@dataclass(frozen=True, slots=True)
class Sink:
    """``_``: no operand."""


Operand = Reg | Special | Imm | Sym | Mem | Vec | Args | Not | Neg | Pair | Select | Sink

# ------------------------------------------------------------------------------------ records


@dataclass(frozen=True, slots=True)
class Source:
    """A place in the source that ``.loc`` names, innermost inlined function first."""

    file: str
    line: int
    inlined_at: Source | None = None
    column: int = 0

    def __str__(self) -> str:
        text = f"{self.file}:{self.line}"
        return f"{text} (inlined at {self.inlined_at})" if self.inlined_at else text


@dataclass(slots=True)
class Instruction:
    """One instruction.

    Attributes
    ----------
    opcode, parts
        ``"ld.global.v4.u32"`` whole and split at the dots (``"::"`` stays inside a part).
    operands
        In the order of the text.
    guard
        None, or (predicate register, negated).
    line, text, source
        PTX line (from 1), its text, and the ``.loc`` in force.
    """

    opcode: str
    parts: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: tuple[Reg, bool] | None
    line: int
    text: str
    source: Source | None
    scope: Scope
    index: int = -1


@dataclass(slots=True)
class Variable:
    """A module, function or parameter variable.

    `init` is a list of (byte offset, element bytes, value), where a value is an int, or a
    (symbol name, addend, generic) triple for an address.
    """

    name: str
    space: str
    type: str
    align: int
    size: int
    init: list[tuple[int, int, int | tuple[str, int, bool]]] = field(default_factory=list)
    external: bool = False
    unsized: bool = False


@dataclass(slots=True)
class Function:
    """An entry or a device function."""

    name: str
    entry: bool
    params: list[Variable]
    returns: list[Variable]
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, list[str]] = field(default_factory=dict)
    registers: dict[str, str] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)
    line: int = 0
    defined: bool = False


@dataclass(slots=True)
class Module:
    """A parsed PTX module; `debug` is that of ``.target``: the compiler did not optimise."""

    version: tuple[int, int]
    target: str
    address_size: int
    files: dict[int, str]
    variables: dict[str, Variable]
    functions: dict[str, Function]
    lines: list[str]
    debug: bool = False


class Scope:
    """Names declared between a pair of braces, and the scope around it."""

    def __init__(self, parent: Scope | None, serial: int) -> None:
        self.parent = parent
        self.names: dict[str, Reg | Vec | str] = {}
        self.ranges: dict[str, tuple[int, str, int]] = {}
        self.suffix = f"@{serial}" if serial else ""

    def declare(self, name: str, kind: str, vector: int) -> Reg | Vec:
        """Add a register, or a vector of them (``v.x`` … ``v.w``, or ``v`` for all)."""
        found: Reg | Vec = Reg(name + self.suffix, kind)
        if vector > 1:
            elements = [Reg(f"{name}.{axis}{self.suffix}", kind) for axis in "xyzw"[:vector]]
            self.names.update(zip((f"{name}.{axis}" for axis in "xyzw"), elements, strict=False))
            found = Vec(tuple(elements))
        self.names[name] = found
        return found

    def find(self, name: str) -> Reg | Vec | str | None:
        """Return the register, or the unique name of the variable or label, called `name`."""
        scope: Scope | None = self
        while scope is not None:
            hit = scope.names.get(name)
            if hit is not None:
                return hit
            if scope.ranges:
                match = _NUMBERED.match(name)
                if match and match[1] in scope.ranges:
                    count, kind, vector = scope.ranges[match[1]]
                    if int(match[2]) < count:
                        return scope.declare(name, kind, vector)
            scope = scope.parent
        return None
