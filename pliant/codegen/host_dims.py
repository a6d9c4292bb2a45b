"""Sizes as checked 64-bit arithmetic: the exact integer, or a flag that says it is not.

Host code computes with what a caller passes, so nothing bounds it. Sums, differences
and products use LLVM's `with.overflow`; each value carries a flag that is set if any
step before it overflowed. A product with a factor of 0 is 0 whatever the others are. A
denominator below 1 counts as 1, as in kernels (`sizes.py`), and is flagged, since a
guard about such a quotient means nothing.

Kernels compute without checks (`host_checks.py` says why that is safe).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from pliant.codegen.builder import LLBuilder
from pliant.codegen.llvm_types import I1, I64, LLValue, Number, constant
from pliant.codegen.sizes import SizeCode, as_value
from pliant.sym import Expr
from pliant.sym.expr import Atom, Monomial, Symbol

LEAST, MOST = -(1 << 63), (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Checked:
    """An i64, or an int; a flag that is None is never set."""

    value: Number
    overflowed: LLValue | None = None  # the value is not that of the expression
    undefined: LLValue | None = None  # a denominator was below 1


class CheckedDims(SizeCode[Checked]):
    """The integer names of one host function, and their arithmetic."""

    has_room = False

    def __init__(self, builder: LLBuilder) -> None:
        super().__init__(builder)
        self._names: dict[str, Number] = {}
        self._known: dict[Expr | Atom, Checked] = {}

    def bind(self, name: str, value: Number) -> None:
        if name in self._names:  # cached values used its old meaning
            self._known.clear()
        self._names[name] = value

    def evaluate(self, expr: Expr) -> Checked:
        if expr not in self._known:
            self._known[expr] = self._sum(expr)
        return self._known[expr]

    def plain(self, number: Checked) -> Number:
        return number.value

    def made(
        self,
        value: Number,
        parts: Sequence[Checked],
        divisor: Checked | None = None,
        least: int = 1,
    ) -> Checked:
        if divisor is None:
            return self._flags(value, *parts)
        by = divisor.value
        if isinstance(by, int):
            below = None if by >= least else constant(I1, 1)
        else:
            below = self.builder.icmp_signed("<", by, constant(I64, least))
        return self._flags(value, *parts, Checked(None, None, below))

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
        # If a factor is 0, the wrapped product is 0 as well, and that is correct.
        b, zero = self.builder, constant(I64, 0)
        some = (b.icmp_signed("!=", as_value(f.value), zero) for f in factors)
        wrapped = b.and_(product.overflowed, reduce(b.and_, some))
        return self._flags(product.value, own, Checked(None, wrapped))

    def _constant(self, number: int) -> Checked:
        if LEAST <= number <= MOST:
            return Checked(number)
        return Checked(0, constant(I1, 1))

    def _step(self, name: str, x: Checked, y: Checked) -> Checked:
        """A checked sum or product of two values."""
        if isinstance(x.value, int) and isinstance(y.value, int):
            exact = x.value + y.value if name == "sadd" else x.value * y.value
            return self._flags(exact, x, y, self._constant(exact))
        value, flag = self.builder.checked(name, as_value(x.value), as_value(y.value))
        return self._flags(value, x, y, Checked(None, flag))

    def _flags(self, value: Number | None, *parts: Checked) -> Checked:
        """A value with the flags of all its parts."""
        return Checked(
            value,
            self._any([part.overflowed for part in parts]),
            self._any([part.undefined for part in parts]),
        )

    def _any(self, flags: list[LLValue | None]) -> LLValue | None:
        some = list(dict.fromkeys(flag for flag in flags if flag is not None))
        return reduce(self.builder.or_, some) if some else None

    # ---- atoms

    def _atom(self, atom: Atom) -> Checked:
        if atom not in self._known:
            if isinstance(atom, Symbol):
                self._known[atom] = Checked(self._names[atom.name])
            else:
                self._known[atom] = self.compound(atom)
        return self._known[atom]
