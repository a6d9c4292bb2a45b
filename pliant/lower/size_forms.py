"""The form of a size expression: its numbers and the model's sizes are left open.

    128*s0*s1 + 14*_row  ->  form _open0 + _open1*_row, open 128*s0*s1 and 14

Two expressions of one form differ in what is open alone. What is known only inside a
function, a loop variable or a part of its plan, is in the form. So is a number that

    is 0 or 1: such expressions have another form
    divides something
    multiplies a variable of a vector or unrolled loop

An expression in the model's sizes is open as a whole, with the number in front, if it
is never negative: parameters of functions are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pliant.ir.spec import HOST_SYMBOLS
from pliant.sym import (
    ONE,
    ZERO,
    Atom,
    CeilDiv,
    Expr,
    Facts,
    FloorDiv,
    Max,
    Min,
    Mod,
    Symbol,
    as_expr,
    ge,
    operands,
    rebuild,
    sym,
)
from pliant.sym.nodes import Monomial, Term, lift, sum_of
from pliant.sym.signs import plainly_nonnegative


@dataclass(frozen=True, slots=True)
class SizeForm:
    """An expression in names that stand for what is open in it."""

    form: Expr
    names: tuple[str, ...]
    open: tuple[Expr, ...]  # what they stand for here


class SizeForms:
    """The forms of expressions in functions with the same sizes.

    `numbers`: whether numbers alone are open too.
    """

    def __init__(self, sizes: frozenset[str], facts: Facts, numbers: bool) -> None:
        # Names with an underscore are of a plan, not of the model.
        self.sizes = {s for s in sizes if not s.startswith("_")} - HOST_SYMBOLS
        self.facts, self.numbers = facts, numbers
        self._made: dict[tuple[Expr, frozenset[str]], SizeForm] = {}
        self._orders: dict[Expr, str] = {}
        self._signs: dict[Expr, bool] = {}

    def of(self, dim: Expr, varying: frozenset[str] = frozenset()) -> SizeForm:
        """The form; `varying` are the variables of vector and unrolled loops."""
        key = dim, varying.intersection(dim.symbols())
        if key not in self._made:
            self._made[key] = _Maker(self, key[1]).made(dim)
        return self._made[key]

    def is_open(self, expr: Expr) -> bool:
        """Whether it is computed from the model's sizes alone, and not negative."""
        if not self.sizes.issuperset(expr.symbols()):
            return False
        found = self._signs.get(expr)
        if found is None:
            found = (
                plainly_nonnegative(expr) or self.facts.prove(ge(expr, ZERO)) is True
            )
            self._signs[expr] = found
        return found

    def order(self, expr: Expr) -> str:
        """A text by which the parts of a sum or an extremum are ordered.

        It is the same for expressions of one form: what is open has no part in it.
        """
        if self.sizes.issuperset(expr.symbols()):
            return "#"
        if expr not in self._orders:
            self._orders[expr] = "+".join(sorted(map(self.term_order, expr.terms)))
        return self._orders[expr]

    def term_order(self, term: Term) -> str:
        coefficient, factors = term
        names = sorted(f"{self._atom_order(atom)}^{power}" for atom, power in factors)
        return ("-" if coefficient < 0 else "") + "*".join(names)

    def _atom_order(self, atom: Atom) -> str:
        if isinstance(atom, Symbol):
            return "#" if atom.name in self.sizes else atom.name
        args = [self.order(arg) for arg in operands(atom)]
        if isinstance(atom, Min | Max):
            args.sort()
        return f"{type(atom).__name__}({','.join(args)})"


class _Maker:
    """Makes the form of one expression."""

    def __init__(self, forms: SizeForms, varying: frozenset[str]) -> None:
        self.forms, self.varying = forms, varying
        self.open: dict[str, Expr] = {}

    def made(self, dim: Expr) -> SizeForm:
        form = self._sum(dim)
        # An open part that the form does not need after all is left out.
        used = {*form.symbols()}
        names = tuple(name for name in self.open if name in used)
        return SizeForm(form, names, tuple(self.open[name] for name in names))

    def _named(self, value: Expr) -> Expr:
        if value.is_const and (value.value < 2 or not self.forms.numbers):
            return value
        name = f"_open{len(self.open)}"
        self.open[name] = value
        return sym(name)

    def _sum(self, dim: Expr) -> Expr:
        if not dim.is_const and self.forms.is_open(dim):
            return self._named(dim)
        terms: Sequence[Term] = dim.terms
        if len(terms) > 1:
            terms = sorted(terms, key=self.forms.term_order)
        return sum_of([self._term(*term) for term in terms])

    def _term(self, coefficient: int, factors: Monomial) -> Expr:
        size, rest, moves = ONE, ONE, False
        for atom, power in factors:
            whole = lift(atom)
            if self.forms.is_open(whole):
                size = size * whole**power
                continue
            moves = moves or not self.varying.isdisjoint(whole.symbols())
            rest = rest * self._atom(atom, whole) ** power
        if moves:
            scale = as_expr(coefficient)
            return rest * scale * (ONE if size is ONE else self._named(size))
        named = self._named(size * abs(coefficient))
        return rest * (named if coefficient > 0 else -named)

    def _atom(self, atom: Atom, whole: Expr) -> Expr:
        if isinstance(atom, Symbol) or not self.varying.isdisjoint(whole.symbols()):
            return whole
        args = operands(atom)
        if isinstance(atom, FloorDiv | CeilDiv | Mod):
            numerator, divisor = args
            divisor = self._divisor(divisor)
            return rebuild(atom, (self._sum(numerator), divisor))
        return self._extremum(atom)

    def _divisor(self, dim: Expr) -> Expr:
        """That max(.., 1) is not 0 must stay visible."""
        if dim.is_const:
            return dim
        atom = dim.atom
        return self._extremum(atom) if isinstance(atom, Max) else self._sum(dim)

    def _extremum(self, atom: Atom) -> Expr:
        ordered = sorted(operands(atom), key=self.forms.order)
        return rebuild(atom, [self._sum(arg) for arg in ordered])
