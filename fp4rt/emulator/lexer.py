"""PTX text to tokens, and what every part of the grammar needs: constants and their expressions.

Source: NVIDIA "PTX ISA", chapter "Syntax".
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from .records import Imm


class PtxError(ValueError):
    """The text is not PTX that this grammar knows; the message gives the line."""


_TOKEN = re.compile(
    r"""(?:[ \t\r\n]+|//[^\n]*|/\*.*?\*/)*+(?:
    (?P<float>0[fF][0-9a-fA-F]{8}\b|0[dD][0-9a-fA-F]{16}\b)
  | (?P<real>\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+\b|\.\d+(?:[eE][+-]?\d+)?(?![\w]))
  | (?P<int>0[xX][0-9a-fA-F]+U?|0[bB][01]+U?|\d+U?\b)
  | (?P<word>(?:%[\w$]|[$_A-Za-z])[\w$]*(?:(?:\.|::)[\w$]+)*)
  | (?P<dir>\.[A-Za-z_]\w*(?:::\w+)*)
  | (?P<string>"(?:[^"\\]|\\.)*")
  | (?P<punct><<|>>|==|!=|<=|>=|&&|\|\||[-+*/%~!<>=(){}\[\],;:|&^?@])
  | (?P<end>\Z)
  | (?P<other>.))""",
    re.VERBOSE | re.DOTALL,
)

PREDEFINED = {"WARP_SZ": 32}

_LEVELS: tuple[tuple[str, ...], ...] = (
    ("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<", ">", "<=", ">="),
    ("<<", ">>"), ("+", "-"), ("*", "/", "%"),
)  # fmt: skip
"""Binary operators of constant expressions, the loosest first."""

_OPERATORS = {"?"}.union(*_LEVELS)


@dataclass(slots=True)
class Token:
    """A token: kind (the name of its group in the pattern), text and place."""

    kind: str
    text: str
    pos: int


def _tokens(text: str) -> Iterator[Token]:
    """Yield the tokens of `text`; the last is of kind "end"."""
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup or ""
        token, pos = match[kind], match.start(kind)
        if kind == "other":
            line = text.count("\n", 0, pos) + 1
            raise PtxError(f"PTX line {line}: unexpected character {token!r}")
        yield Token(kind, token, pos)


class Reader:
    """A place in a text: looks at tokens, takes them, and evaluates constants."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = text.split("\n")
        self.tokens = list(_tokens(text))
        self.at = 0
        self.line_starts = [0]
        for line in self.lines:
            self.line_starts.append(self.line_starts[-1] + len(line) + 1)

    def line(self, token: Token) -> int:
        """Return the line of a token, from 1."""
        return bisect_right(self.line_starts, token.pos)

    def error(self, message: str, token: Token | None = None) -> PtxError:
        """Return an error that gives the line of `token` (or of the next one)."""
        line = self.line(token or self.tokens[self.at])
        text = self.lines[line - 1].strip() if line <= len(self.lines) else ""
        return PtxError(f"PTX line {line}: {message}: {text}")

    def peek(self) -> str:
        """Return the next token's text."""
        return self.tokens[self.at].text

    def next(self) -> Token:
        """Take the next token."""
        token = self.tokens[self.at]
        self.at += 1
        return token

    def accept(self, text: str) -> bool:
        """Take the next token if it is `text`."""
        if self.tokens[self.at].text == text and self.tokens[self.at].kind != "string":
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> None:
        """Take the next token, which must be `text`."""
        if not self.accept(text):
            raise self.error(f"expected {text!r}, found {self.peek()!r}")

    def skip_to(self, text: str) -> None:
        """Take everything up to and including `text`."""
        while self.peek() != text:
            if self.tokens[self.at].kind == "end":
                raise self.error(f"missing {text!r}")
            self.at += 1
        self.at += 1

    def skip_parentheses(self) -> None:
        """Take ``(`` and everything up to the ``)`` that belongs to it."""
        self.expect("(")
        while not self.accept(")"):
            if self.peek() == "(":
                self.skip_parentheses()
            elif self.next().kind == "end":
                raise self.error("missing ')'")

    def integers(self) -> tuple[int, ...]:
        """Take constant expressions separated by commas."""
        found = [self.expression()]
        while self.accept(","):
            found.append(self.expression())
        return tuple(found)

    # -- constant expressions (precedence climbing)

    def expression(self, level: int = 0) -> int:
        """Take a constant expression of operators from precedence `level` up."""
        token = self.tokens[self.at]
        if token.kind == "int" and self.tokens[self.at + 1].text not in _OPERATORS:
            self.at += 1  # nearly always
            return _integer(token.text)
        if level == len(_LEVELS):
            return self.unary()
        left = self.expression(level + 1)
        while self.tokens[self.at].kind == "punct" and self.peek() in _LEVELS[level]:
            op = self.next().text
            right = self.expression(level + 1)
            left = _fold(op, left, right)
        if level == 0 and self.accept("?"):
            first = self.expression()
            self.expect(":")
            second = self.expression()
            return first if left else second
        return left

    def unary(self) -> int:
        """Take a constant with its signs, or an expression in parentheses."""
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
        if token.text in PREDEFINED:
            return PREDEFINED[token.text]
        raise self.error(f"expected a constant, found {token.text!r}", token)

    def immediate(self) -> Imm:
        """Take a constant of any type."""
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
