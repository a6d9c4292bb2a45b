"""Sizes as checked 64-bit arithmetic: the exact integer, or a flag that says it is not.

Host code computes with what a caller passes, so nothing bounds it. Sums, differences
and products go through LLVM's `with.overflow`; each value carries a flag that is set
when any step behind it overflowed. A product with a factor of 0 is 0 whatever the
others are. Quotients do not trap: a denominator below 1 counts as 1, as in kernels, and
is marked, since a guard about such a quotient says nothing.

Kernels compute without checks (`llvm_dims.py` says why they may).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

from pliant.codegen.builder import Builder
from pliant.codegen.llvm_dims import as_value, compare, is_multiple
from pliant.codegen.llvm_types import I1, I64, constant
from pliant.sym import Cond, Expr
from pliant.sym.expr import Atom, CeilDiv, FloorDiv, Max, Min, Mod, Monomial, Symbol

LEAST, MOST = -(1 << 63), (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Checked:
    """An i64, or an int; a flag that is None is never set."""

    value: Any
    overflowed: Any = None  # the value is not that of the expression
    undefined: Any = None  # a denominator was below 1


class CheckedDims:
    """The integer names of one host function, and their arithmetic."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder
        self._names: dict[str, Any] = {}
        self._known: dict[Expr | Atom, Checked] = {}

    def bind(self, name: str, value: Any) -> None:
        if name in self._names:  # what was computed for its old meaning is void
            self._known.clear()
        self._names[name] = value

    def evaluate(self, expr: Expr) -> Checked:
        if expr not in self._known:
            self._known[expr] = self._sum(expr)
        return self._known[expr]

    def holds(self, cond: Cond) -> tuple[Any, Checked]:
        """(a flag, the flags of the values that it was decided by)"""
        b = self.builder
        left, right = self.evaluate(cond.lhs), self.evaluate(cond.rhs)
        x, y = as_value(left.value), as_value(right.value)
        if cond.kind != "divides":
            return compare(b, cond.kind, x, y), self._flags(None, left, right)
        rest = self._divide(Mod, y, x)
        negative = b.icmp_signed("<", x, constant(I64, 0))
        flags = self._flags(None, left, right, Checked(None, None, negative))
        return is_multiple(b, x, y, rest), flags

    # ---- polynomials

    def _sum(self, expr: Expr) -> Checked:
        """The terms, then the constant, added up from the left."""
        total: Checked | None = None
        for coefficient, mono in expr.terms:
            term = self._product(coefficient, mono)
            total = term if total is None else self._step("sadd", total, term)
        return Checked(0) if total is None else total

    def _product(self, coefficient: int, mono: Monomial) -> Checked:
        factors = [self._atom(atom) for atom, power in mono for _ in range(power)]
        if not factors:
            return self._constant(coefficient)
        product = reduce(lambda x, y: self._step("smul", x, y), factors)
        if coefficient != 1:
            product = self._step("smul", product, self._constant(coefficient))
        own = self._flags(product.value, *factors)
        if product.overflowed is own.overflowed or len(factors) == 1:
            return product
        # The wrapped product is 0 as well if a factor is, and that is right then.
        b, zero = self.builder, constant(I64, 0)
        some = (b.icmp_signed("!=", as_value(f.value), zero) for f in factors)
        wrapped = b.and_(product.overflowed, reduce(b.and_, some))
        return self._flags(product.value, own, Checked(None, wrapped))

    def _constant(self, number: int) -> Checked:
        if LEAST <= number <= MOST:
            return Checked(number)
        return Checked(0, constant(I1, 1))

    def _step(self, name: str, x: Checked, y: Checked) -> Checked:
        """A sum or product of two."""
        if isinstance(x.value, int) and isinstance(y.value, int):
            exact = x.value + y.value if name == "sadd" else x.value * y.value
            return self._flags(exact, x, y, self._constant(exact))
        value, flag = self.builder.checked(name, as_value(x.value), as_value(y.value))
        return self._flags(value, x, y, Checked(None, flag))

    def _flags(self, value: Any, *parts: Checked) -> Checked:
        """A value that is as good as all its parts."""
        return Checked(
            value,
            self._any([part.overflowed for part in parts]),
            self._any([part.undefined for part in parts]),
        )

    def _any(self, flags: list[Any]) -> Any:
        some = list(dict.fromkeys(flag for flag in flags if flag is not None))
        return reduce(self.builder.or_, some) if some else None

    # ---- atoms

    def _atom(self, atom: Atom) -> Checked:
        if atom not in self._known:
            self._known[atom] = self._compute(atom)
        return self._known[atom]

    def _compute(self, atom: Atom) -> Checked:
        b = self.builder
        match atom:
            case Symbol(name):
                return Checked(self._names[name])
            case FloorDiv(num, den) | CeilDiv(num, den) | Mod(num, den):
                top, bottom = self.evaluate(num), self.evaluate(den)
                x, y = as_value(top.value), as_value(bottom.value)
                below = None
                if not (isinstance(bottom.value, int) and bottom.value >= 1):
                    below = b.icmp_signed("<", y, constant(I64, 1))
                value = self._divide(type(atom), x, y)
                return self._flags(value, top, bottom, Checked(None, None, below))
            case Min(args) | Max(args):
                parts = [self.evaluate(arg) for arg in args]
                sign = "<" if isinstance(atom, Min) else ">"
                best = as_value(parts[0].value)
                for part in parts[1:]:
                    value = as_value(part.value)
                    better = b.icmp_signed(sign, value, best)
                    best = b.select(better, value, best)
                return self._flags(best, *parts)
            case _:
                raise NotImplementedError(f"atom {atom}")

    def _divide(self, kind: type[Atom], x: Any, y: Any) -> Any:
        """Rounded down, or up for CeilDiv, or the remainder; y below 1 counts as 1."""
        b, zero, one = self.builder, constant(I64, 0), constant(I64, 1)
        y = b.select(b.icmp_signed(">", y, one), y, one)
        quotient, rest = b.sdiv(x, y), b.srem(x, y)
        if kind is CeilDiv:
            return b.add(quotient, b.zext(b.icmp_signed(">", rest, zero), I64))
        below = b.icmp_signed("<", rest, zero)
        if kind is Mod:
            return b.select(below, b.add(rest, y), rest)
        return b.add(quotient, b.sext(below, I64))
