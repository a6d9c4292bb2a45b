"""Proofs of expr >= 0 that enumerate every small value of its one unknown.

    512*ceildiv(min(s, 512), 4) <= 4096*min(ceildiv(s, 32), 16)

holds for s up to a thousand because it does at each of them, and beyond because the
bounds of a large s decide. An expression of several symbols may have one unknown all
the same, a quotient or a product:

    ceildiv(min((h//16)*(w//16) + 1, 512), 4)    depends on (h//16)*(w//16) alone
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce

from pliant.sym.bounding import Interval
from pliant.sym.cond import ge
from pliant.sym.expr import (
    Atom,
    CeilDiv,
    Expr,
    FloorDiv,
    Monomial,
    Symbol,
    as_expr,
    lift,
    monomial_quotient,
    operands,
    rebuild,
    sym,
)
from pliant.sym.prove import Facts

_MOST = 1024  # values that are gone through
UNKNOWN = sym("_unknown")


def exhausted(facts: Facts, expr: Expr) -> bool:
    """Whether expr >= 0 was proved so."""
    expr = _without_factors(facts, facts.canonical(expr))
    expr, ranges = _over_quotients(facts, expr)
    expr, (low, high) = _over_product(expr, ranges)
    if low is None:
        return False
    (name,) = UNKNOWN.symbols()
    last = low + _MOST if high is None else min(high, low + _MOST)
    try:
        if any(expr.evaluate({name: v}) < 0 for v in range(low, last + 1)):
            return False
    except ZeroDivisionError:
        return False  # outside the precondition of a quotient
    if last == high:
        return True
    beyond = Facts().with_range(name, last + 1, high)
    return beyond.prove(ge(expr, 0)) is True


def _without_factors(facts: Facts, expr: Expr) -> Expr:
    """The expression divided by the common factors that are never negative."""
    if expr.is_const:
        return expr
    for item in expr.terms[0][1]:
        atom = item[0]
        divided = [monomial_quotient(mono, ((atom, 1),)) for _, mono in expr.terms]
        low = facts.box(atom)[0]
        if low is None or low < 0 or None in divided:
            continue
        pairs = zip(expr.terms, divided, strict=True)
        smaller = sum((_term(c, m or ()) for (c, _), m in pairs), as_expr(0))
        return _without_factors(facts, smaller)
    return expr


def _term(coefficient: int, mono: Monomial) -> Expr:
    return reduce(
        lambda e, item: e * lift(item[0]) ** item[1], mono, as_expr(coefficient)
    )


def _over_quotients(facts: Facts, expr: Expr) -> tuple[Expr, dict[str, Interval]]:
    """Symbols of which only one quotient occurs stand for the quotient."""
    uses: dict[str, set[Atom]] = {}
    for name, atom in _uses(expr):
        uses.setdefault(name, set()).add(atom)
    images = {atom: name for name, (atom, *more) in uses.items() if not more}

    def replace(atom: Atom) -> Expr:
        if atom in images:
            return sym(images[atom])
        args = operands(atom)
        return (
            rebuild(atom, [arg.map_atoms(replace) for arg in args])
            if args
            else lift(atom)
        )

    ranges = {name: facts.box(Symbol(name)) for name in uses}
    ranges |= {name: facts.box(atom) for atom, name in images.items()}
    return expr.map_atoms(replace), ranges


def _uses(expr: Expr) -> Iterator[tuple[str, Atom]]:
    """Each symbol, with the quotient by a number that it is in, or itself."""
    for atom in expr.atoms():
        if isinstance(atom, Symbol):
            yield atom.name, atom
        elif (
            isinstance(atom, FloorDiv | CeilDiv)
            and atom.den.is_const
            and (name := atom.num.symbol)
        ):
            yield name, atom
        else:
            for arg in operands(atom):
                yield from _uses(arg)


def _over_product(expr: Expr, ranges: Mapping[str, Interval]) -> tuple[Expr, Interval]:
    """Over one unknown in the place of the only product of symbols that occurs."""
    products = set(_products(expr))
    if len(products) != 1:
        return expr, (None, None)
    (product,) = products
    low = 1
    high: int | None = 1
    for atom, power in product:
        assert isinstance(atom, Symbol)
        least, most = ranges[atom.name]
        if least is None or least < 0:
            return expr, (None, None)
        low *= least**power
        high = None if high is None or most is None else high * most**power

    def replaced(expr: Expr) -> Expr:
        total = as_expr(0)
        for coefficient, mono in expr.terms:
            rest = monomial_quotient(mono, product)
            term = _term(coefficient, ()) if rest is None else coefficient * UNKNOWN
            for atom, power in mono if rest is None else rest:
                term = term * rebuild(atom, map(replaced, operands(atom))) ** power
            total = total + term
        return total

    return replaced(expr), (low, high)


def _products(expr: Expr) -> Iterator[Monomial]:
    """The products of symbols in all terms, inside atoms too."""
    for _, mono in expr.terms:
        product = tuple(item for item in mono if isinstance(item[0], Symbol))
        if product:
            yield product
        for atom, _ in mono:
            for arg in operands(atom):
                yield from _products(arg)
