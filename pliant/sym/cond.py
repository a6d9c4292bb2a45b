"""Conditions on dimension expressions, to be proved, assumed or guarded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pliant.sym.expr import DimLike, Expr, Max, Min, as_expr, mod

Kind: TypeAlias = Literal["eq", "ne", "le", "lt", "divides"]
_SIGNS = {"eq": "==", "ne": "!=", "le": "<=", "lt": "<", "divides": "divides"}


@dataclass(frozen=True, slots=True)
class Cond:
    """`lhs kind rhs`; `divides` means that rhs is a multiple of lhs."""

    kind: Kind
    lhs: Expr
    rhs: Expr

    def holds(self, env: Mapping[str, int]) -> bool:
        left, right = self.lhs.evaluate(env), self.rhs.evaluate(env)
        match self.kind:
            case "eq":
                return left == right
            case "ne":
                return left != right
            case "le":
                return left <= right
            case "lt":
                return left < right
            case "divides":
                return right == 0 if left == 0 else right % left == 0

    def negated(self) -> Cond:
        match self.kind:
            case "eq":
                return Cond("ne", self.lhs, self.rhs)
            case "ne":
                return Cond("eq", self.lhs, self.rhs)
            case "le":
                return Cond("lt", self.rhs, self.lhs)
            case "lt":
                return Cond("le", self.rhs, self.lhs)
            case "divides":
                # A divisor is positive, as every denominator.
                return Cond("ne", mod(self.rhs, self.lhs), as_expr(0))

    def plain(self) -> Cond:
        """As a person would state it: min(n, 512) == n is n <= 512."""
        if self.kind != "eq":
            return self
        for one, other in ((self.lhs, self.rhs), (self.rhs, self.lhs)):
            match one.atom:
                case Min((a, b)) if other is a or other is b:
                    return Cond("le", other, b if other is a else a)
                case Max((a, b)) if other is a or other is b:
                    return Cond("le", b if other is a else a, other)
                case _:
                    pass
        return self

    def symbols(self) -> tuple[str, ...]:
        return tuple(sorted({*self.lhs.symbols(), *self.rhs.symbols()}))

    def substitute(self, env: Mapping[str, DimLike]) -> Cond:
        return Cond(self.kind, self.lhs.substitute(env), self.rhs.substitute(env))

    def __str__(self) -> str:
        return f"{self.lhs} {_SIGNS[self.kind]} {self.rhs}"


def eq(a: DimLike, b: DimLike) -> Cond:
    return Cond("eq", as_expr(a), as_expr(b))


def ne(a: DimLike, b: DimLike) -> Cond:
    return Cond("ne", as_expr(a), as_expr(b))


def le(a: DimLike, b: DimLike) -> Cond:
    return Cond("le", as_expr(a), as_expr(b))


def lt(a: DimLike, b: DimLike) -> Cond:
    return Cond("lt", as_expr(a), as_expr(b))


def ge(a: DimLike, b: DimLike) -> Cond:
    return le(b, a)


def gt(a: DimLike, b: DimLike) -> Cond:
    return lt(b, a)


def divides(a: DimLike, b: DimLike) -> Cond:
    return Cond("divides", as_expr(a), as_expr(b))
