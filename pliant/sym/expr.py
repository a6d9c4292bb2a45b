"""Dimension expressions, the public face: everything of `nodes.py`, and `parse`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NoReturn

from pliant.sym.nodes import (
    ONE,
    ZERO,
    Atom,
    CeilDiv,
    Dim,
    DimLike,
    Expr,
    FloorDiv,
    Max,
    Min,
    Mod,
    Monomial,
    Symbol,
    Term,
    as_expr,
    ceildiv,
    const,
    floordiv,
    lift,
    maximum,
    minimum,
    mod,
    monomial_quotient,
    operands,
    product,
    rebuild,
    sym,
)

__all__ = [
    "ONE",
    "ZERO",
    "Atom",
    "CeilDiv",
    "Dim",
    "DimLike",
    "Expr",
    "FloorDiv",
    "Max",
    "Min",
    "Mod",
    "Monomial",
    "Symbol",
    "Term",
    "as_expr",
    "ceildiv",
    "const",
    "floordiv",
    "lift",
    "maximum",
    "minimum",
    "mod",
    "monomial_quotient",
    "operands",
    "parse",
    "product",
    "rebuild",
    "sym",
]

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+)|(?P<name>[A-Za-z_][A-Za-z0-9_.]*)|`(?P<quoted>[^`]+)`"
    r"|(?P<operator>\*\*|//|[-+*%(),]))"
)
_FUNCTIONS: dict[str, tuple[Callable[..., Expr], int | None]] = {
    "min": (minimum, None),
    "max": (maximum, None),
    "ceildiv": (ceildiv, 2),
    "floordiv": (floordiv, 2),
    "mod": (mod, 2),
}


def parse(text: str) -> Expr:
    """The inverse of `str`. ValueError tells the position of a mistake.

    sum     = product (("+" | "-") product)*
    product = unary (("*" | "//" | "%") unary)*
    unary   = "-" unary | power
    power   = primary ("**" number)?
    primary = number | symbol | function "(" sum ("," sum)* ")" | "(" sum ")"
    """
    return _DimParser(text).whole()


class _DimParser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0  # where the current token starts
        self.end = 0
        self.kind = ""
        self.token = ""
        self.advance()

    def advance(self) -> None:
        match = _TOKEN.match(self.text, self.end)
        self.position = self.end
        if match is not None:
            self.kind = match.lastgroup or ""
            self.token = match[self.kind]
            self.position = match.start() + len(match[0]) - len(match[0].lstrip())
            self.end = match.end()
            return
        if self.text[self.end :].strip():
            rest = self.text[self.end :].lstrip()
            self.position, self.token = len(self.text) - len(rest), rest[0]
            self.fail("unexpected character")
        self.kind, self.token = "end", "end of text"

    def fail(self, problem: str) -> NoReturn:
        raise ValueError(
            f"{problem} {self.token!r} at position {self.position} of {self.text!r}"
        )

    def at(self, *operators: str) -> bool:
        return self.kind == "operator" and self.token in operators

    def expect(self, operator: str) -> None:
        if not self.at(operator):
            self.fail(f"expected {operator!r}, found")
        self.advance()

    def whole(self) -> Expr:
        out = self.sum()
        if self.kind != "end":
            self.fail("unexpected")
        return out

    def sum(self) -> Expr:
        out = self.product()
        while self.at("+", "-"):
            operator = self.token
            self.advance()
            right = self.product()
            out = out + right if operator == "+" else out - right
        return out

    def product(self) -> Expr:
        out = self.unary()
        while self.at("*", "//", "%"):
            operator = self.token
            position = self.position
            self.advance()
            right = self.unary()
            if operator == "*":
                out = out * right
            else:
                out = self.call(floordiv if operator == "//" else mod, position)(
                    out, right
                )
        return out

    def call(self, function: Callable[..., Expr], position: int) -> Callable[..., Expr]:
        def checked(*args: Expr) -> Expr:
            try:
                return function(*args)
            except ZeroDivisionError as error:
                raise ValueError(
                    f"{error} at position {position} of {self.text!r}"
                ) from None

        return checked

    def unary(self) -> Expr:
        if self.at("-"):
            self.advance()
            return -self.unary()
        base = self.primary()
        if not self.at("**"):
            return base
        self.advance()
        if self.kind != "number":
            self.fail("expected a power, found")
        power = int(self.token)
        self.advance()
        return base**power

    def primary(self) -> Expr:
        kind, token, position = self.kind, self.token, self.position
        if self.at("("):
            self.advance()
            out = self.sum()
            self.expect(")")
            return out
        if kind not in ("number", "name", "quoted"):
            self.fail("expected a number or symbol, found")
        self.advance()
        if kind == "number":
            return const(int(token))
        if kind == "name" and token in _FUNCTIONS and self.at("("):
            return self.arguments(token, position)
        return sym(token)

    def arguments(self, name: str, position: int) -> Expr:
        function, arity = _FUNCTIONS[name]
        self.expect("(")
        args = [self.sum()]
        while self.at(","):
            self.advance()
            args.append(self.sum())
        if arity is not None and len(args) != arity:
            self.fail(f"{name} takes {arity} arguments, not {len(args)}, before")
        self.expect(")")
        return self.call(function, position)(*args)
