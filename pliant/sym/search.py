"""Proof search for expr >= 0, where intervals alone do not decide.

In this order, each step within one small budget:

    quotients    a//k becomes (a - a % k)/k, the remainder an interval of its own
    cases        min(a, b) is a where a <= b, and b where b <= a; likewise max
    known        expr >= 0 follows from expr - t*g >= 0 for a known g >= 0 and t >= 0
    smallest     n*n >= n: n is its least value, or at least one more
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import permutations
from math import gcd
from typing import Protocol

from pliant.sym.bounding import Interval, lower_bound
from pliant.sym.expr import (
    Atom,
    CeilDiv,
    Expr,
    FloorDiv,
    Max,
    Min,
    Mod,
    Symbol,
    ceildiv,
    const,
    floordiv,
    lift,
    mod,
    monomial_quotient,
    operands,
    rebuild,
)
from pliant.sym.nodes import MEMO, sum_of

_STEPS = 48
_DEPTH = 2
_MOST_TERMS = 48


@lru_cache(maxsize=MEMO)
def without_quotients(expr: Expr) -> tuple[Expr, int]:
    """(e, s) with e == s * expr and s > 0, and no quotient by a constant in e.

    A remainder by an expression becomes num - den * (num // den), so that each
    pair of quotient and remainder is one unknown.
    """
    scale = 1
    while True:
        atom = next(filter(_is_flattened, expr.atoms()), None)
        if len(expr.terms) > _MOST_TERMS:
            return expr, scale
        match atom:
            case Mod(num, den):
                image, divisor = num - den * floordiv(num, den), 1
            case FloorDiv(num, den):
                image, divisor = num - mod(num, den), den.value
            case CeilDiv(num, den):
                image, divisor = num + den - 1 - mod(num + den - 1, den), den.value
            case _:
                return expr, scale
        expr, factor = _multiplied_out(expr, atom, image, divisor)
        scale *= factor


def _is_flattened(atom: Atom) -> bool:
    if isinstance(atom, Mod):
        return not atom.den.is_const
    return isinstance(atom, FloorDiv | CeilDiv) and atom.den.is_const


def _multiplied_out(
    expr: Expr, atom: Atom, image: Expr, divisor: int
) -> tuple[Expr, int]:
    """(divisor**d * expr, divisor**d) with atom = image / divisor, d its degree."""
    degree = max(dict(mono).get(atom, 0) for _, mono in expr.terms)
    parts: list[Expr] = []
    for coefficient, mono in expr.terms:
        power = dict(mono).get(atom, 0)
        rest = tuple(item for item in mono if item[0] is not atom)
        scaled = coefficient * divisor ** (degree - power)
        parts.append(Expr._of(((scaled, rest),)) * image**power)
    return sum_of(parts), divisor**degree


@lru_cache(maxsize=MEMO)
def _replaced(expr: Expr, old: Atom, image: Expr) -> Expr:
    """`expr` with an atom replaced everywhere, inside other atoms too."""

    def replace(atom: Atom) -> Expr:
        if atom is old:
            return image
        args = operands(atom)
        new = [_replaced(arg, old, image) for arg in args]
        return lift(atom) if tuple(new) == args else rebuild(atom, new)

    return expr.map_atoms(replace)


@lru_cache(maxsize=MEMO)
def _choice(expr: Expr) -> Min | Max | None:
    """A Min or Max with no other inside."""
    for atom in expr.atoms():
        for arg in operands(atom):
            if (inner := _choice(arg)) is not None:
                return inner
        if isinstance(atom, Min | Max):
            return atom
    return None


def tightened(expr: Expr) -> Expr:
    """The strongest integer form of expr >= 0: 2*n - 1 >= 0 is n - 1 >= 0."""
    divisor = gcd(*(c for c, mono in expr.terms if mono))
    if divisor < 2:
        return expr
    terms = ((c // divisor, mono) for c, mono in expr.terms)
    return Expr._of(tuple(term for term in terms if term[0]))


class SearchFacts(Protocol):
    """What a search is given to start from."""

    def box(self, atom: Atom) -> Interval:
        """The interval of one atom, taken by itself."""

    def known_nonneg(self) -> tuple[Expr, ...]:
        """Expressions that are at least 0."""


class Search:
    """One question to `facts`; the budget is shared by all its branches."""

    def __init__(self, facts: SearchFacts) -> None:
        self.facts = facts
        self.steps = _STEPS
        self.lows: dict[str, int] = {}  # raised by the case in hand

    def nonneg(
        self, expr: Expr, known: tuple[Expr, ...] = (), depth: int = _DEPTH
    ) -> bool:
        """Whether expr >= 0 was proved, given also that each of `known` is."""
        expr = tightened(expr)
        if expr.is_const:
            return expr.value >= 0
        self.steps -= 1
        if self.steps < 0:
            return False
        if depth and self._from_known(expr, self._monotone(expr, depth), known, depth):
            return True
        flat = tightened(without_quotients(expr)[0])
        if flat.is_const:
            return flat.value >= 0
        if self._bounded(expr) or (flat is not expr and self._bounded(flat)):
            return True
        choice = _choice(flat)
        if choice is not None:
            return self._each_case(flat, choice, known, depth)
        if depth == 0:
            return False
        facts = (*known, *self.facts.known_nonneg(), *self._about_quotients(flat))
        if self._from_known(flat, facts, known, depth):
            return True
        return self._above_least(flat, known, depth)

    def _box(self, atom: Atom) -> Interval:
        low, high = self.facts.box(atom)
        if isinstance(atom, Symbol) and atom.name in self.lows:
            raised = self.lows[atom.name]
            return raised if low is None else max(low, raised), high
        return low, high

    def _bounded(self, expr: Expr) -> bool:
        low = lower_bound(expr.terms, self._box)
        return low is not None and low >= 0

    def _each_case(
        self, expr: Expr, choice: Min | Max, known: tuple[Expr, ...], depth: int
    ) -> bool:
        sign = 1 if isinstance(choice, Min) else -1
        for arg in choice.args:
            # Where this argument is the one chosen, the others are beyond it.
            gaps = [(other - arg) * sign for other in choice.args if other is not arg]
            beyond = [tightened(without_quotients(gap)[0]) for gap in gaps]
            if not self._in_case(expr, choice, arg, (*known, *beyond), depth):
                return False
        return True

    def _in_case(
        self, expr: Expr, atom: Atom, image: Expr, known: tuple[Expr, ...], depth: int
    ) -> bool:
        try:
            expr = _replaced(expr, atom, image)
            known = tuple(_replaced(fact, atom, image) for fact in known)
        except ZeroDivisionError:
            return True  # denominators are positive, so this case never happens
        return self.nonneg(expr, known, depth)

    def _about_quotients(self, expr: Expr) -> Iterator[Expr]:
        """den * quotient is within one den of num, for quotients by expressions."""
        for atom in expr.atoms():
            if isinstance(atom, FloorDiv | CeilDiv):
                taken = atom.den * lift(atom)
                left = (
                    atom.num - taken if isinstance(atom, FloorDiv) else taken - atom.num
                )
                yield left
                yield atom.den - 1 - left

    def _monotone(self, expr: Expr, depth: int) -> Iterator[Expr]:
        """Quotients are ordered as what they divide, and as what they divide by."""
        tops = {
            atom: atom.num if isinstance(atom, FloorDiv) else atom.num + atom.den - 1
            for atom in expr.atoms()
            if isinstance(atom, FloorDiv | CeilDiv)
        }
        for low, high in permutations(tops, 2):
            if low.num is high.num:
                yield from self._coarser(low, high)
            if low.den is not high.den or not self._bounded(tops[high] - tops[low]):
                continue
            yield lift(high) - lift(low)
            apart = tops[high] - tops[low]
            if apart.is_const:
                yield lift(low) + ceildiv(apart, low.den) - lift(high)
        yield from self._extrema(expr, depth)

    def _coarser(
        self, coarse: FloorDiv | CeilDiv, fine: FloorDiv | CeilDiv
    ) -> Iterator[Expr]:
        """n/8 and n/2 in whole numbers: at most 4 of the first make up the second."""
        if type(coarse) is not type(fine) or not (
            coarse.den.is_const and fine.den.is_const
        ):
            return
        ratio, rest = divmod(coarse.den.value, fine.den.value)
        if rest or not self._bounded(coarse.num):
            return
        if isinstance(coarse, FloorDiv):
            yield lift(fine) - ratio * lift(coarse)
        else:
            yield lift(fine) - lift(coarse)
            yield ratio * lift(coarse) - lift(fine)

    def _extrema(self, expr: Expr, depth: int) -> Iterator[Expr]:
        """min(a, k) is ordered as a is; likewise max."""
        found = [atom for atom in expr.atoms() if isinstance(atom, Min | Max)]
        for low, high in permutations(found, 2):
            ours = [arg for arg in low.args if arg not in high.args]
            theirs = [arg for arg in high.args if arg not in low.args]
            if type(low) is not type(high) or not len(ours) == len(theirs) == 1:
                continue
            if self.nonneg(theirs[0] - ours[0], (), depth):
                yield lift(high) - lift(low)

    def _from_known(
        self,
        expr: Expr,
        facts: Iterable[Expr],
        known: tuple[Expr, ...],
        depth: int,
    ) -> bool:
        for fact in facts:
            for debt, mono in expr.terms:
                if debt > 0:
                    continue
                if self.steps <= 0:
                    return False
                for paid, other in fact.terms:
                    factor = monomial_quotient(mono, other) if paid < 0 else None
                    if factor is None or not all(self._is_nonneg(a) for a, _ in factor):
                        continue
                    # Scaled so that the negative term cancels exactly.
                    share = Expr._of(((-debt, factor),)) * fact
                    if self.nonneg(expr * -paid - share, known, depth - 1):
                        return True
        return False

    def _is_nonneg(self, atom: Atom) -> bool:
        low = self._box(atom)[0]
        return low is not None and low >= 0

    def _above_least(self, expr: Expr, known: tuple[Expr, ...], depth: int) -> bool:
        debts = [atom for c, mono in expr.terms if c < 0 for atom, _ in mono]
        for atom in dict.fromkeys([*debts, *expr.atoms()]):
            low = self._box(atom)[0]
            if not isinstance(atom, Symbol) or low is None:
                continue
            if not self._in_case(expr, atom, const(low), known, depth - 1):
                continue
            before = dict(self.lows)
            self.lows[atom.name] = low + 1
            above = self.nonneg(expr, known, depth - 1)
            self.lows = before
            if above:
                return True
        return False
