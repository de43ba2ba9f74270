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
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

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


class PtxError(ValueError):
    """The text is not PTX that this grammar knows; the message gives the line."""


# ------------------------------------------------------------------------------------- tokens

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+|//[^\n]*|/\*.*?\*/)
  | (?P<float>0[fF][0-9a-fA-F]{8}\b|0[dD][0-9a-fA-F]{16}\b)
  | (?P<real>\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+\b|\.\d+(?:[eE][+-]?\d+)?(?![\w]))
  | (?P<int>0[xX][0-9a-fA-F]+U?|0[bB][01]+U?|\d+U?\b)
  | (?P<word>(?:%[\w$]|[$_A-Za-z])[\w$]*(?:(?:\.|::)[\w$]+)*)
  | (?P<dir>\.[A-Za-z_]\w*(?:::\w+)*)
  | (?P<string>"(?:[^"\\]|\\.)*")
  | (?P<punct><<|>>|==|!=|<=|>=|&&|\|\||[-+*/%~!<>=(){}\[\],;:|&^?@])""",
    re.VERBOSE | re.DOTALL,
)

_SPACES = {".reg", ".param", ".local", ".shared", ".global", ".const", ".tex"}
_LINKING = {".visible", ".extern", ".weak", ".common"}
_SPECIAL = re.compile(
    r"%(?:n?tid|n?ctaid|laneid|n?warpid|n?smid|gridid|is_explicit_cluster|n?clusterid"
    r"|cluster_n?ctaid|cluster_n?ctarank|lanemask_\w+|clock|clock_hi|clock64|pm\d+\w*|envreg\d+"
    r"|globaltimer\w*|reserved_smem_\w+|total_smem_size|aggr_smem_size|dynamic_smem_size"
    r"|current_graph_exec)(?:\.[xyzw])?$"
)
_PREDEFINED = {"WARP_SZ": 32}
_SELECTOR = re.compile(r"b[0-7]{1,4}|h[0-3]{1,2}")


_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', re.MULTILINE)


@dataclass(slots=True)
class _Token:
    kind: str
    text: str
    pos: int


def _tokens(text: str) -> Iterator[_Token]:
    pos, end = 0, len(text)
    match_at = _TOKEN.match
    while pos < end:
        match = match_at(text, pos)
        if match is None:
            line = text.count("\n", 0, pos) + 1
            raise PtxError(f"PTX line {line}: unexpected character {text[pos]!r}")
        kind = match.lastgroup or ""
        if kind != "space":
            yield _Token(kind, match[0], pos)
        pos = match.end()


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = text.split("\n")
        self.tokens = list(_tokens(text))
        self.tokens.append(_Token("end", "", len(text)))
        self.at = 0
        self.line_starts = [0]
        for line in self.lines:
            self.line_starts.append(self.line_starts[-1] + len(line) + 1)
        self.module = Module((0, 0), "", 64, {}, {}, {}, self.lines)
        self.scope = Scope(None, 0)
        self.serial = 0
        self.source: Source | None = None
        self.places: dict[tuple[int, int, int], Source] = {}

    # -- helpers

    def line(self, token: _Token) -> int:
        return bisect_right(self.line_starts, token.pos)

    def error(self, message: str, token: _Token | None = None) -> PtxError:
        line = self.line(token or self.tokens[self.at])
        text = self.lines[line - 1].strip() if line <= len(self.lines) else ""
        return PtxError(f"PTX line {line}: {message}: {text}")

    def peek(self) -> str:
        return self.tokens[self.at].text

    def next(self) -> _Token:
        token = self.tokens[self.at]
        self.at += 1
        return token

    def accept(self, text: str) -> bool:
        if self.tokens[self.at].text == text and self.tokens[self.at].kind != "string":
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> None:
        if not self.accept(text):
            raise self.error(f"expected {text!r}, found {self.peek()!r}")

    def skip_to(self, text: str) -> None:
        while self.peek() != text:
            if self.tokens[self.at].kind == "end":
                raise self.error(f"missing {text!r}")
            self.at += 1
        self.at += 1

    def integers(self) -> tuple[int, ...]:
        found = [self.expression()]
        while self.accept(","):
            found.append(self.expression())
        return tuple(found)

    # -- constant expressions (precedence climbing)

    _LEVELS: tuple[tuple[str, ...], ...] = (
        ("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<", ">", "<=", ">="),
        ("<<", ">>"), ("+", "-"), ("*", "/", "%"),
    )  # fmt: skip

    def expression(self, level: int = 0) -> int:
        if level == len(self._LEVELS):
            return self.unary()
        left = self.expression(level + 1)
        while self.tokens[self.at].kind == "punct" and self.peek() in self._LEVELS[level]:
            op = self.next().text
            right = self.expression(level + 1)
            left = _fold(op, left, right)
        return left

    def unary(self) -> int:
        token = self.next()
        if token.text == "-":
            return -self.unary()
        if token.text == "+":
            return self.unary()
        if token.text == "~":
            return ~self.unary()
        if token.text == "!":
            return int(not self.unary())
        if token.text == "(":
            if self.tokens[self.at].kind == "dir":  # a cast: (.s64) or (.u64)
                self.next()
                self.expect(")")
                return self.unary()
            value = self.expression()
            self.expect(")")
            return value
        if token.kind == "int":
            return _integer(token.text)
        if token.text in _PREDEFINED:
            return _PREDEFINED[token.text]
        raise self.error(f"expected a constant, found {token.text!r}", token)

    # -- operands

    def operand(self) -> Operand:
        token = self.tokens[self.at]
        if token.kind == "word" and token.text not in _PREDEFINED:
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
        if token.text == "(" and self.tokens[self.at + 1].kind in ("word", "punct"):
            following = self.tokens[self.at + 1]
            if following.kind == "word" or following.text == ")":
                self.at += 1
                return Args(tuple(self.operands_until(")")))
        if token.text == "!" and self.tokens[self.at + 1].kind == "word":
            self.at += 1
            return Not(self.operand())
        if token.text == "-" and self.tokens[self.at + 1].kind == "word":
            hit = self.scope.find(self.tokens[self.at + 1].text.partition(".")[0])
            if isinstance(hit, Reg):
                self.at += 1
                return Neg(self.operand())
        return self.immediate()

    def operands_until(self, closing: str) -> list[Operand]:
        found: list[Operand] = []
        while not self.accept(closing):
            found.append(self.operand())
            if not self.accept(","):
                self.expect(closing)
                break
        return found

    def immediate(self) -> Imm:
        start = self.at
        negative = False
        while self.peek() in ("-", "+"):
            negative ^= self.next().text == "-"
        token = self.tokens[self.at]
        if token.kind == "float":
            self.at += 1
            bits, kind = int(token.text[2:], 16), token.text[1].lower()
            if kind == "f":
                return Imm(bits ^ (negative << 31), "f32")
            return Imm(bits ^ (negative << 63), "f64")
        if token.kind == "real":
            self.at += 1
            value = -float(token.text) if negative else float(token.text)
            return Imm(int.from_bytes(struct.pack("<d", value), "little"), "f64")
        self.at = start
        return Imm(self.expression())

    def name(self, token: _Token) -> Operand:
        text = token.text
        if text == "_":
            return Sink()
        hit = self.scope.find(text)
        if isinstance(hit, Reg):
            return hit
        if hit is not None:
            return Sym(hit)
        if _SPECIAL.match(text):
            return Special(text)
        base, _, element = text.rpartition(".")  # v.x of a vector register
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

    def variable(self, space: str) -> list[Variable]:
        """Parse the rest of a declaration after its state space; registers go to the scope."""
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
                self.skip_to(")")
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
            if self.peek() != "," or space == "param_list":
                return found
            self.at += 1

    def registers(self, name: str, kind: str, vector: int) -> None:
        scope = self.scope
        if self.accept("<"):
            count = self.expression(8)
            self.expect(">")
            scope.ranges[name] = (count, kind)
            return
        if vector > 1:
            for element in "xyzw"[:vector]:
                scope.names[f"{name}.{element}"] = Reg(f"{name}.{element}{scope.suffix}", kind)
        scope.names[name] = Reg(name + scope.suffix, kind)

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
            strides = [element]
            for dim in reversed(dims[1:]):
                strides.insert(0, strides[0] * dim)
            end = self.initialiser(var, 0, strides if dims else [element], TYPE_BYTES[kind])
            if unsized:
                var.size = end
                var.unsized = False
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
        if token.kind == "word" and token.text not in _PREDEFINED:
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
                    self.next()
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
                self.variable("reg")
                reg = self.scope.names[name]
                assert isinstance(reg, Reg)
                size = TYPE_BYTES[reg.type]
                found.append(Variable(reg.name, "reg", reg.type, size, size))
            elif space == ".param":
                save, found_here = self.at, self.variable("param_list")
                del save
                for var in found_here:
                    var.space = "param"
                    self.scope.names[var.name] = var.name
                found.extend(found_here)
            else:
                raise self.error(f"unexpected {space!r} in a parameter list")
            if not self.accept(","):
                self.expect(")")
                break
        return found

    def function(self, entry: bool, token: _Token) -> None:
        outer = self.scope
        self.serial = 0
        self.scope = Scope(outer, 0)
        returns: list[Variable] = []
        if self.accept(".attribute"):
            self.skip_to(")")
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

    def instruction(self, func: Function, token: _Token) -> None:
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
        if self.peek() != ";":
            operands.append(self.operand())
            while self.accept(","):
                operands.append(self.operand())
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


def _integer(text: str) -> int:
    text = text.rstrip("U")
    if text[:2] in ("0x", "0X"):
        return int(text, 16)
    if text[:2] in ("0b", "0B"):
        return int(text, 2)
    return int(text, 8) if len(text) > 1 and text[0] == "0" else int(text)


def _fold(op: str, a: int, b: int) -> int:
    if op in "/%" and b == 0:
        raise PtxError("division by zero in a constant expression")
    table = {
        "+": lambda: a + b, "-": lambda: a - b, "*": lambda: a * b, "&": lambda: a & b,
        "|": lambda: a | b, "^": lambda: a ^ b, "<<": lambda: a << b, ">>": lambda: a >> b,
        "/": lambda: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
        "%": lambda: abs(a) % abs(b) * (-1 if a < 0 else 1),
        "==": lambda: int(a == b), "!=": lambda: int(a != b), "<": lambda: int(a < b),
        ">": lambda: int(a > b), "<=": lambda: int(a <= b), ">=": lambda: int(a >= b),
        "&&": lambda: int(bool(a and b)), "||": lambda: int(bool(a or b)),
    }  # fmt: skip
    return int(table[op]())


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
