"""The words of the text form: names, numbers, expressions over sizes, attributes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

from pliant.ir.graph import (
    Attr,
)
from pliant.ir.loops import (
    Role,
)
from pliant.ir.types import DTYPES, DType, TensorType
from pliant.sym import Cond, Expr
from pliant.sym import parse as parse_dim

T = TypeVar("T")


class ParseError(ValueError):
    """The text is not a module; says where, and what was expected there."""

    def __init__(self, message: str, line: int, column: int, near: str) -> None:
        self.line, self.column = line, column
        super().__init__(f"line {line}, column {column}: {message}\n  {near}")


_SPACE = re.compile(r"(?:\s|#[^\n]*)*")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NAME = re.compile(r"[A-Za-z0-9_.]+")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_NUMBER = re.compile(r"-?(?:inf\b|nan\b|\d+(?:\.\d*)?(?:e[-+]?\d+)?)")
_LITERAL = re.compile(r"-?\d|-?inf\b|-?nan\b|true\b|false\b")
_SYMBOL = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*|`[^`]+`")
_DIM_OPERAND = re.compile(r"\d+|[A-Za-z_][A-Za-z0-9_.]*|`[^`]+`")
_DIM_FUNCTION = re.compile(r"(?:min|max|ceildiv|floordiv|mod)\s*\(")
# A "%" that a name follows is a value; the operator prints with a space.
_DIM_OPERATOR = re.compile(r"\*\*|//|[-+*]|%(?=\s)")
_DIVIDES = re.compile(r"divides\b")
_SIGNS: dict[str, Any] = {
    "==": "eq",
    "!=": "ne",
    "<=": "le",
    "<": "lt",
    "divides": "divides",
}
_ROLES = {role.value: role for role in Role}


class Scanner:
    """A position in the text, and the words it is made of."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0

    def error(self, message: str, at: int | None = None) -> ParseError:
        if at is None:
            self.skip()
            at = self.position
        line = self.text.count("\n", 0, at) + 1
        start = self.text.rfind("\n", 0, at) + 1
        stop = self.text.find("\n", start)
        near = self.text[start : stop if stop >= 0 else None]
        pointer = " " * (at - start) + "^"
        return ParseError(message, line, at - start + 1, f"{near}\n  {pointer}")

    def skip(self) -> None:
        match = _SPACE.match(self.text, self.position)
        assert match is not None
        self.position = match.end()

    def find(self, pattern: re.Pattern[str]) -> str | None:
        self.skip()
        match = pattern.match(self.text, self.position)
        if match is None:
            return None
        self.position = match.end()
        return match[0]

    def need(self, pattern: re.Pattern[str], what: str) -> str:
        found = self.find(pattern)
        if found is None:
            raise self.error(f"expected {what}")
        return found

    def peek(self, mark: str) -> bool:
        self.skip()
        if not self.text.startswith(mark, self.position):
            return False
        after = self.text[self.position + len(mark) : self.position + len(mark) + 1]
        return not (mark[-1].isalnum() and (after.isalnum() or after in ("_", ".")))

    def accept(self, mark: str) -> bool:
        if not self.peek(mark):
            return False
        self.position += len(mark)
        return True

    def expect(self, mark: str) -> None:
        if not self.accept(mark):
            raise self.error(f"expected '{mark}'")

    def list(self, item: Callable[[], T], closing: str) -> tuple[T, ...]:
        """Items between commas up to the closing mark, which is taken."""
        items: list[T] = []
        if self.accept(closing):
            return ()
        while True:
            items.append(item())
            if self.accept(closing):
                return tuple(items)
            if not self.accept(","):
                raise self.error(f"expected ',' or '{closing}'")

    def at_end(self) -> bool:
        self.skip()
        return self.position == len(self.text)

    def word(self, what: str) -> str:
        return self.need(_WORD, what)

    def name(self, sigil: str, what: str) -> str:
        if not self.accept(sigil):
            raise self.error(f"expected {what} ({sigil}name)")
        if self.text[self.position : self.position + 1] == '"':
            return self.string()
        return self.need(_NAME, what)

    def role(self) -> Role:
        self.skip()
        start = self.position
        role = _ROLES.get(self.word("a role"))
        if role is None:
            raise self.error(f"expected a role: {', '.join(_ROLES)}", start)
        return role

    def string(self) -> str:
        self.skip()
        start = self.position
        try:
            return str(json.loads(self.need(_STRING, "a string")))
        except json.JSONDecodeError as error:
            raise self.error(f"malformed string: {error}", start) from None

    def symbol(self) -> str:
        return self.need(_SYMBOL, "a symbol").strip("`")

    def integer(self) -> int:
        self.skip()
        start = self.position
        number = self.number()
        if isinstance(number, int):
            return number
        raise self.error(f"expected an integer, found {number!r}", start)

    def number(self) -> int | float:
        found = self.need(_NUMBER, "a number")
        if found.lstrip("-").isdigit():
            return int(found)
        return float(found)

    def literal(self) -> bool | int | float:
        """A number or a truth value."""
        if self.accept("true"):
            return True
        if self.accept("false"):
            return False
        return self.number()

    def dtype(self) -> DType:
        self.skip()
        start = self.position
        found = DTYPES.get(self.word("an element type"))
        if found is None:
            raise self.error(f"expected an element type: {', '.join(DTYPES)}", start)
        return found

    def dim(self) -> Expr:
        """The longest text that is an expression: operands between operators."""
        self.skip()
        start, depth = self.position, 0
        while True:
            while self.accept("-"):
                pass
            if self.find(_DIM_FUNCTION) is not None or self.accept("("):
                depth += 1
                continue
            self.need(_DIM_OPERAND, "a dimension")
            while depth and self.accept(")"):
                depth -= 1
            end = self.position
            if depth and self.accept(","):
                continue
            if self.find(_DIM_OPERATOR) is None:
                break
        if depth:
            raise self.error("expected ')'")
        self.position = end
        try:
            return parse_dim(self.text[start:end])
        except ValueError as error:
            raise self.error(f"malformed dimension: {error}", start) from None

    def dims(self) -> tuple[Expr, ...]:
        self.expect("[")
        return self.list(self.dim, "]")

    def cond(self) -> Cond:
        left = self.dim()
        if self.find(_DIVIDES):
            sign = "divides"
        else:
            self.skip()
            sign = next((s for s in _SIGNS if self.accept(s)), "")
            if not sign:
                raise self.error("expected '==', '!=', '<=', '<' or 'divides'")
        return Cond(_SIGNS[sign], left, self.dim())

    def type(self) -> TensorType:
        dtype, shape = self.dtype(), self.dims()
        return TensorType(dtype, shape, self.dims() if self.accept("strides") else None)

    def named_attr(self) -> tuple[str, Attr]:
        name = self.word("an attribute")
        self.expect("=")
        return name, self.attr()

    def attr(self) -> Attr:
        if self.peek('"'):
            return self.string()
        if self.accept("<"):
            dim = self.dim()
            self.expect(">")
            return dim
        if self.peek("["):
            return self.dims()
        if self.accept("("):
            return self.list(self.attr, ")")
        if self.accept("none"):
            return None
        for text, dtype in DTYPES.items():
            if self.accept(text):
                return dtype
        self.skip()
        if _LITERAL.match(self.text, self.position):
            return self.literal()
        raise self.error("expected a number, string, dtype, <dim> or tuple")
