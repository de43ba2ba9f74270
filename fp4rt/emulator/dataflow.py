"""Registers that may be read before they are written.

A forward analysis finds the reads that some path reaches with no write before them; only those are
checked while a program runs, lane by lane. Moves, selects and stores may carry undefined values
about, as compilers let them; computing with one, or using one as an address or predicate, may not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .ptx import (
    Args,
    Function,
    Instruction,
    Mem,
    Neg,
    Not,
    Operand,
    Pair,
    Reg,
    Select,
    Sym,
    Vec,
)

_COMPUTES = {
    "add", "sub", "mul", "mad", "fma", "div", "rem", "min", "max", "neg", "abs", "sad", "dp4a",
    "dp2a", "and", "or", "xor", "not", "cnot", "shl", "shr", "shf", "lop3", "bfe", "bfi", "popc",
    "clz", "brev", "bfind", "fns", "bmsk", "szext", "cvt", "setp", "set", "slct", "rcp", "sqrt",
    "rsqrt", "ex2", "lg2", "sin", "cos", "tanh", "copysign", "testp", "addc", "subc", "madc",
    "mul24", "mad24", "prmt",
}  # fmt: skip
_DEFINES_FIRST = _COMPUTES | {
    "mov", "selp", "ld", "ldu", "atom", "shfl", "vote", "match", "redux", "elect", "activemask",
    "cvta", "isspacep", "alloca", "stacksave",
    "mapa", "getctarank", "ldmatrix", "movmatrix", "createpolicy",
}  # fmt: skip
_DEFINES_NOTHING = {
    "st", "red", "bra", "brx", "ret", "exit", "trap", "brkpt", "nanosleep", "membar", "fence",
    "prefetch", "prefetchu", "discard", "applypriority", "stmatrix", "setmaxnreg",
    "griddepcontrol", "pmevent", "stackrestore",
}  # fmt: skip


@dataclass
class Suspects:
    """What to watch in one function.

    Attributes
    ----------
    registers
        Registers that some read may reach unwritten.
    reads
        For an instruction index, the registers among them that it must not read unwritten.
    writes
        For an instruction index, the registers among them that it writes.
    """

    registers: set[str] = field(default_factory=set)
    reads: dict[int, list[str]] = field(default_factory=dict)
    writes: dict[int, list[str]] = field(default_factory=dict)


def registers_of(op: Operand) -> Iterator[str]:
    """Yield the names of the registers in an operand."""
    if isinstance(op, Reg):
        yield op.name
    elif isinstance(op, Mem):
        for item in (op.base, *op.extra):
            yield from registers_of(item)
    elif isinstance(op, Vec | Args):
        for item in op.items:
            yield from registers_of(item)
    elif isinstance(op, Select):
        yield op.register.name
    elif isinstance(op, Not | Neg):
        yield from registers_of(op.operand)
    elif isinstance(op, Pair):
        yield from registers_of(op.first)
        yield from registers_of(op.second)


def _writes(ins: Instruction) -> list[str]:
    name = ins.parts[0]
    if name in _DEFINES_NOTHING or not ins.operands:
        return []
    if name in _DEFINES_FIRST:
        return list(registers_of(ins.operands[0]))
    return [reg for op in ins.operands for reg in registers_of(op)]


def _reads(ins: Instruction) -> list[str]:
    name = ins.parts[0]
    found: list[str] = []
    if ins.guard is not None:
        found.append(ins.guard[0].name)
    if name in _COMPUTES:
        found.extend(reg for op in ins.operands[1:] for reg in registers_of(op))
    elif name in ("ld", "st", "atom", "red", "ldu"):
        found.extend(reg for op in ins.operands if isinstance(op, Mem) for reg in registers_of(op))
    return found


def _successors(func: Function) -> list[list[int]]:
    count = len(func.code)
    found: list[list[int]] = []
    for index, ins in enumerate(func.code):
        following: list[int] = []
        name = ins.parts[0]
        if name == "bra":
            target = ins.operands[0]
            if isinstance(target, Sym):
                following.append(func.labels[target.name])
        elif name == "brx":
            table = ins.operands[1]
            if isinstance(table, Sym):
                for label in func.tables[table.name]:
                    unique = ins.scope.find(label)
                    following.append(func.labels[unique if isinstance(unique, str) else label])
        jumps = name in ("bra", "brx", "ret", "exit", "trap")
        if not jumps or ins.guard is not None:
            following.append(index + 1)
        found.append([target for target in following if target < count])
    return found


def analyse(func: Function) -> Suspects:
    """Return the reads of `func` that a path reaches with no write before them."""
    number: dict[str, int] = {}
    sure: list[int] = []
    for ins in func.code:
        bits = 0
        if ins.guard is None:
            for reg in _writes(ins):
                bits |= 1 << number.setdefault(reg, len(number))
        sure.append(bits)
    start = 0
    for var in func.params:
        if var.space == "reg":
            start |= 1 << number.setdefault(var.name, len(number))
    following = _successors(func)
    everything = (1 << len(number)) - 1
    known = [everything] * len(func.code)
    if not func.code:
        return Suspects()
    known[0] = start
    reached = {0}
    todo = [0]
    while todo:
        index = todo.pop()
        after = known[index] | sure[index]
        for target in following[index]:
            merged = known[target] & after
            if merged != known[target] or target not in reached:
                known[target] = merged
                reached.add(target)
                todo.append(target)
    found = Suspects()
    for index, ins in enumerate(func.code):
        if index not in reached:
            continue
        for reg in _reads(ins):
            bit = number.get(reg)
            if bit is None or not known[index] >> bit & 1:
                found.registers.add(reg)
                found.reads.setdefault(index, []).append(reg)
    if found.registers:
        for index, ins in enumerate(func.code):
            hits = [reg for reg in _writes(ins) if reg in found.registers]
            if hits:
                found.writes[index] = hits
    return found
