"""PTX text to instruction records: grammar only.

`parse` turns a PTX module into a `Module`: variables, functions and, for each function, a list of
`Instruction` records. Names are resolved here (registers of inline-assembly scopes get unique
names, labels become instruction indices); what an opcode means is the business of the families
that register it. Source: NVIDIA "PTX ISA", chapters "Syntax" and "State Spaces, Types, and
Variables".
"""

from __future__ import annotations

import re
import struct

from .lexer import PREDEFINED, PtxError, Reader, Token
from .records import (
    TYPE_BYTES,
    Args,
    Function,
    Imm,
    Instruction,
    Mem,
    Module,
    Neg,
    Not,
    Operand,
    Pair,
    Reg,
    Scope,
    Select,
    Sink,
    Source,
    Special,
    Sym,
    Variable,
    Vec,
)
from .spelling import canonical

__all__ = [
    "TYPE_BYTES",
    "Args",
    "Function",
    "Imm",
    "Instruction",
    "Mem",
    "Module",
    "Neg",
    "Not",
    "Operand",
    "Pair",
    "PtxError",
    "Reg",
    "Scope",
    "Select",
    "Sink",
    "Source",
    "Special",
    "Sym",
    "Variable",
    "Vec",
    "parse",
]


_SPACES = {".reg", ".param", ".local", ".shared", ".global", ".const", ".tex"}
_LINKING = {".visible", ".extern", ".weak", ".common"}
_SPECIAL = re.compile(
    r"%(?:n?tid|n?ctaid|laneid|n?warpid|n?smid|gridid|is_explicit_cluster|n?clusterid"
    r"|cluster_n?ctaid|cluster_n?ctarank|lanemask_\w+|clock|clock_hi|clock64|pm\d+\w*|envreg\d+"
    r"|globaltimer\w*|reserved_smem_\w+|total_smem_size|aggr_smem_size|dynamic_smem_size"
    r"|current_graph_exec)(?:\.[xyzw])?$"
)
_SELECTOR = re.compile(r"b[0-7]{1,4}|h[0-3]{1,2}")


_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', re.MULTILINE)


class _Parser(Reader):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.module = Module((0, 0), "", 64, {}, {}, {}, self.lines)
        self.scope = Scope(None, 0)
        self.serial = 0
        self.source: Source | None = None
        self.places: dict[tuple[int, int, int], Source] = {}

    # -- operands

    def operand(self) -> Operand:
        token = self.tokens[self.at]
        if token.kind == "word" and token.text not in PREDEFINED:
            self.at += 1
            operand = self.name(token)
            if self.peek() == "|" and isinstance(operand, Reg | Sink):
                self.at += 1
                return Pair(operand, self.operand())
            if isinstance(operand, Sym) and self.peek() in "+-" and self.peek():
                return Sym(operand.name, self.expression(8))
            return operand
        if token.text == "[":
            return self.memory()
        if token.text == "{":
            self.at += 1
            return Vec(tuple(self.operands_until("}")))
        if token.text == "!" and self.tokens[self.at + 1].kind == "word":
            self.at += 1
            return Not(self.operand())
        if token.text == "-" and self.tokens[self.at + 1].kind == "word":
            hit = self.scope.find(self.tokens[self.at + 1].text.partition(".")[0])
            if isinstance(hit, Reg):
                self.at += 1
                return Neg(self.operand())
        return self.immediate()

    def argument(self) -> Operand:
        """Parse an operand of a call: a list in parentheses, or the callee."""
        if self.accept("("):
            return Args(tuple(self.operands_until(")")))
        return self.operand()

    def operands_until(self, closing: str) -> list[Operand]:
        found: list[Operand] = []
        while not self.accept(closing):
            found.append(self.operand())
            if not self.accept(","):
                self.expect(closing)
                break
        return found

    def name(self, token: Token) -> Operand:
        text = token.text
        if text == "_":
            return Sink()
        hit = self.scope.find(text)
        if isinstance(hit, Reg | Vec):
            return hit
        if hit is not None:
            return Sym(hit)
        if _SPECIAL.match(text):
            return Special(text)
        base, _, element = text.rpartition(".")  # v.x of a vector register
        if base:
            self.scope.find(base)  # declares the elements of one of a range
        if base and element in ("x", "y", "z", "w", "r", "g", "b", "a"):
            hit = self.scope.find(f"{base}.{'xyzw'['xyzwrgba'.index(element) % 4]}")
            if isinstance(hit, Reg):
                return hit
        if base and _SELECTOR.fullmatch(element):
            hit = self.scope.find(base)
            if isinstance(hit, Reg):
                return Select(hit, element)
        if text.startswith("%"):
            raise self.error(f"undeclared register {text}", token)
        return Sym(text)

    def memory(self) -> Mem:
        self.expect("[")
        base = self.operand()
        offset = 0
        if isinstance(base, Sym):
            base, offset = Sym(base.name), base.offset
        elif isinstance(base, Imm):
            offset, base = 0, base
        while self.peek() in ("+", "-"):
            sign = 1 if self.next().text == "+" else -1
            offset += sign * self.expression(9)
        extra: list[Operand] = []
        while self.accept(","):
            extra.append(self.operand())
        self.expect("]")
        return Mem(base, offset, tuple(extra))

    # -- variables

    def variable(self, space: str, *, in_list: bool = False) -> list[Variable]:
        """Parse the rest of a declaration after its state space; registers go to the scope.

        In a parameter list, a comma starts the next parameter with a state space of its own.
        """
        align, kind, vector, pointer_align = 0, "", 1, False
        while self.tokens[self.at].kind == "dir":
            word = self.next().text[1:]
            if word == "align":
                value = self.expression()
                align = 0 if pointer_align else value
            elif word in TYPE_BYTES:
                kind = word
            elif word in ("v2", "v4", "v8"):
                vector = int(word[1:])
            elif word == "ptr":
                pointer_align = True
            elif word == "attribute":
                self.skip_parentheses()
            elif "." + word not in _SPACES and word not in ("byte", "u128"):
                raise self.error(f"unknown qualifier .{word} in a declaration")
        if not kind:
            raise self.error("declaration without a type")
        element = TYPE_BYTES[kind] * vector
        found: list[Variable] = []
        while True:
            name = self.next().text
            if space == "reg":
                self.registers(name, kind, vector)
            else:
                found.append(self.array(name, space, kind, element, align))
            if self.peek() != "," or in_list:
                return found
            self.at += 1

    def registers(self, name: str, kind: str, vector: int) -> None:
        scope = self.scope
        if self.accept("<"):
            count = self.expression(8)
            self.expect(">")
            scope.ranges[name] = (count, kind, vector)
            return
        scope.declare(name, kind, vector)

    def array(self, name: str, space: str, kind: str, element: int, align: int) -> Variable:
        dims: list[int] = []
        unsized = False
        while self.accept("["):
            if self.peek() == "]":
                unsized = True
                dims.append(0)
            else:
                dims.append(self.expression())
            self.expect("]")
        count = 1
        for dim in dims:
            count *= dim
        unique = name + self.scope.suffix if space in ("local", "shared", "param") else name
        var = Variable(unique, space, kind, align or element, count * element, unsized=unsized)
        if self.accept("="):
            strides: list[int] = []
            step = element
            for dim in reversed(dims):
                strides.insert(0, step)
                step *= dim
            if element > TYPE_BYTES[kind]:  # a vector is one more dimension
                strides.append(TYPE_BYTES[kind])
            end = self.initialiser(var, 0, strides or [element], TYPE_BYTES[kind])
            if unsized:
                var.size = end
                var.unsized = False
            elif end > var.size:
                raise self.error(f"too many initial values for {name}")
        if self.scope.parent is not None or space == "param":
            self.scope.names[name] = unique
        return var

    def initialiser(self, var: Variable, at: int, strides: list[int], element: int) -> int:
        """Parse one initialiser at byte `at`; return the byte after it."""
        if self.accept("{"):
            inner = strides[1:] or [element]
            step = strides[0] if strides else element
            position = at
            while not self.accept("}"):
                after = self.initialiser(var, position, inner, element)
                position = max(position + step, after) if len(strides) else after
                if not self.accept(","):
                    self.expect("}")
                    break
            return position
        token = self.tokens[self.at]
        if token.kind == "word" and token.text not in PREDEFINED:
            self.at += 1
            generic = token.text == "generic" and self.accept("(")
            name = self.next().text if generic else token.text
            if generic:
                self.expect(")")
            addend = self.expression(8) if self.peek() in ("+", "-") else 0
            var.init.append((at, element, (name, addend, generic)))
        else:
            imm = self.immediate()
            value = imm.value
            if imm.kind == "f64" and element == 4:
                double = struct.unpack("<d", value.to_bytes(8, "little"))[0]
                value = int.from_bytes(struct.pack("<f", double), "little")
            var.init.append((at, element, value & ((1 << (8 * element)) - 1)))
        return at + element

    # -- module level

    def parse(self) -> Module:
        linking: set[str] = set()
        for index, name in _FILE.findall(self.text):  # .loc may come before its .file
            self.module.files[int(index)] = name
        while self.tokens[self.at].kind != "end":
            token = self.next()
            word = token.text
            if word == ".version":
                major, _, minor = self.next().text.partition(".")
                self.module.version = (int(major), int(minor or 0))
            elif word == ".target":
                self.module.target = self.next().text
                while self.accept(","):
                    self.module.debug |= self.next().text == "debug"
            elif word == ".address_size":
                self.module.address_size = self.expression()
            elif word in _LINKING:
                linking.add(word)
            elif word == ".file":
                self.file()
            elif word == ".loc":
                self.location()
            elif word == ".section":
                self.skip_to("{")
                self.skip_to("}")
            elif word == ".pragma":
                self.skip_to(";")
            elif word == ".alias":
                alias = self.next().text
                self.expect(",")
                self.module.functions[alias] = self.module.functions[self.next().text]
                self.expect(";")
            elif word in (".entry", ".func"):
                self.function(word == ".entry", token)
                linking.clear()
            elif word in _SPACES:
                for var in self.variable(word[1:]):
                    var.external = ".extern" in linking
                    known = self.module.variables.get(var.name)
                    if known is None or known.external:
                        self.module.variables[var.name] = var
                self.expect(";")
                linking.clear()
            elif word != ";":
                raise self.error(f"unexpected {word!r} at module level", token)
        return self.module

    def file(self) -> None:
        index = self.expression()
        name = self.next().text
        self.module.files[index] = name.strip('"')
        while self.accept(","):
            self.expression()

    def location(self) -> None:
        file, line, column = self.expression(), self.expression(), 0
        if self.tokens[self.at].kind == "int":
            column = self.expression()
        outer: Source | None = None
        while self.accept(","):
            word = self.next().text
            if word == "function_name":
                self.next()
                if self.peek() in ("+", "-"):
                    self.next()
                    self.expression(9)
            elif word == "inlined_at":
                place = self.expression(), self.expression(), self.expression()
                # That place may be inlined itself: the last .loc there says where.
                outer = self.places.get(place) or Source(
                    self.file_name(place[0]), place[1], column=place[2]
                )
        self.source = Source(self.file_name(file), line, outer, column)
        self.places[file, line, column] = self.source

    def file_name(self, index: int) -> str:
        return self.module.files.get(index) or f"<file {index}>"

    def parameters(self) -> list[Variable]:
        found: list[Variable] = []
        while not self.accept(")"):
            space = self.next().text
            if space == ".reg":
                at = self.at
                while self.tokens[self.at].kind == "dir":
                    self.at += 1
                name = self.peek()
                self.at = at
                self.variable("reg", in_list=True)
                reg = self.scope.names[name]
                assert isinstance(reg, Reg)
                size = TYPE_BYTES[reg.type]
                found.append(Variable(reg.name, "reg", reg.type, size, size))
            elif space == ".param":
                for var in self.variable("param_list", in_list=True):
                    var.space = "param"
                    self.scope.names[var.name] = var.name
                    found.append(var)
            else:
                raise self.error(f"unexpected {space!r} in a parameter list")
            if not self.accept(","):
                self.expect(")")
                break
        return found

    def function(self, entry: bool, token: Token) -> None:
        outer = self.scope
        self.serial = 0
        self.scope = Scope(outer, 0)
        returns: list[Variable] = []
        if self.accept(".attribute"):
            self.skip_parentheses()
        if self.accept("("):
            returns = self.parameters()
        name = self.next().text
        params = self.parameters() if self.accept("(") else []
        func = Function(name, entry, params, returns, line=self.line(token))
        while self.peek() not in ("{", ";"):
            directive = self.next()
            word = directive.text[1:]
            if word == "pragma":
                self.skip_to(";")
                continue
            takes = self.tokens[self.at].kind in ("int", "punct") and self.peek() not in "{;"
            func.directives[word] = self.integers() if takes else ()
        if self.accept(";"):
            self.module.functions.setdefault(name, func)
        else:
            self.expect("{")
            func.defined = True
            self.module.functions[name] = func
            self.body(func)
            _link(func, self)
        self.scope = outer
        self.source, self.places = None, {}

    # -- statements

    def body(self, func: Function) -> None:
        depth = 1
        while depth:
            token = self.next()
            text = token.text
            if text == "{":
                depth += 1
                self.serial += 1
                self.scope = Scope(self.scope, self.serial)
            elif text == "}":
                depth -= 1
                if depth and self.scope.parent is not None:
                    self.scope = self.scope.parent
            elif text == ";":
                continue
            elif text == ".loc":
                self.location()
            elif text == ".pragma":
                self.skip_to(";")
            elif text in _SPACES:
                for var in self.variable(text[1:]):
                    func.variables[var.name] = var
                self.expect(";")
            elif token.kind == "dir":
                raise self.error(f"unexpected {text!r} in a function", token)
            elif token.kind == "end":
                raise self.error("missing '}'", token)
            elif token.kind == "word" and self.peek() == ":":
                self.at += 1
                self.label(func, text)
            else:
                self.instruction(func, token)

    def label(self, func: Function, name: str) -> None:
        unique = name + self.scope.suffix
        self.scope.names[name] = unique
        if self.peek() in (".branchtargets", ".calltargets"):
            self.next()
            targets = [self.next().text]
            while self.accept(","):
                targets.append(self.next().text)
            self.expect(";")
            func.tables[unique] = targets
        elif self.peek() == ".callprototype":
            self.skip_to(";")
            func.tables[unique] = []
        else:
            func.labels[unique] = len(func.code)

    def instruction(self, func: Function, token: Token) -> None:
        guard: tuple[Reg, bool] | None = None
        first = token
        if token.text == "@":
            negated = self.accept("!")
            reg = self.name(self.next())
            if not isinstance(reg, Reg) or reg.type != "pred":
                raise self.error("guard is not a predicate register", token)
            guard = (reg, negated)
            token = self.next()
        if token.kind != "word":
            raise self.error(f"expected an instruction, found {token.text!r}", token)
        operands: list[Operand] = []
        read = self.argument if token.text.partition(".")[0] == "call" else self.operand
        if self.peek() != ";":
            operands.append(read())
            while self.accept(","):
                operands.append(read())
        end = self.tokens[self.at]
        self.expect(";")
        text = " ".join(self.text[first.pos : end.pos + 1].split())
        func.code.append(
            Instruction(
                token.text,
                canonical(tuple(token.text.split("."))),
                tuple(operands),
                guard,
                self.line(first),
                text,
                self.source,
                self.scope,
                len(func.code),
            )
        )


def _link(func: Function, parser: _Parser) -> None:
    """Give every label operand and table entry its unique name."""
    for ins in func.code:
        if ins.parts[0] in ("bra", "brx"):
            ins.operands = tuple(_resolve(op, ins.scope) for op in ins.operands)
            for op in ins.operands:
                if isinstance(op, Sym) and op.name not in func.labels | func.tables.keys():
                    raise PtxError(f"PTX line {ins.line}: unknown label {op.name}: {ins.text}")
        elif ins.parts[0] == "call":
            ins.operands = tuple(_resolve(op, ins.scope) for op in ins.operands)


def _resolve(op: Operand, scope: Scope) -> Operand:
    if isinstance(op, Sym):
        hit = scope.find(op.name)
        return Sym(hit, op.offset) if isinstance(hit, str) else op
    return op


def parse(text: str) -> Module:
    """Parse a PTX module.

    Parameters
    ----------
    text
        The module's text, as nvcc or a person wrote it.

    Raises
    ------
    PtxError
        If the text is not PTX; the message gives the line.

    Examples
    --------
    >>> from fp4rt.emulator.ptx import parse
    >>> module = parse('''.version 9.0
    ... .target sm_90a
    ... .address_size 64
    ... .visible .entry f(.param .u64 p) { .reg .b32 %r<2>; add.u32 %r1, 1, %tid.x; ret; }''')
    >>> [ins.opcode for ins in module.functions["f"].code]
    ['add.u32', 'ret']
    """
    return _Parser(text).parse()
