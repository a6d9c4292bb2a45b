"""The forms of equations: lines, polynomials, and what they can be solved for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from math import gcd

from pliant.sym.expr import Atom, Expr, Max, Min, Mod, Monomial, Symbol, operands, sym


def line_of(expr: Expr) -> tuple[int, int] | None:
    """(a, b) if expr is a*s + b for a symbol s."""
    match expr.terms:
        case ((slope, ((Symbol(), 1),)),):
            return slope, 0
        case ((slope, ((Symbol(), 1),)), (offset, ())):
            return slope, offset
        case _:
            return None


def is_comparison(atom: Atom) -> bool:
    """Whether an atom is bounded by one of its operands."""
    if isinstance(atom, Mod):
        return not atom.den.is_const
    return isinstance(atom, Min | Max)


def is_polynomial(expr: Expr) -> bool:
    """Whether expr is a polynomial in symbols only."""
    return all(isinstance(atom, Symbol) for atom in expr.atoms())


def rewrites_outside(lead: Monomial, expr: Expr) -> bool:
    """Whether `lead` can be a rewrite: its symbols are inside no atom of expr.

    Otherwise the image would bring back what was rewritten, n -> min(n, m) + 4.
    """
    names = {atom.name for atom, _ in lead if isinstance(atom, Symbol)}
    inner = (arg for atom in expr.atoms() for arg in operands(atom))
    hidden = {name for arg in inner for name in arg.symbols()}
    return len(names) == len(lead) and not names & hidden


def primitive(expr: Expr) -> Expr:
    """expr over the common divisor of all its coefficients."""
    divisor = gcd(*(c for c, _ in expr.terms))
    return Expr._of(tuple((c // divisor, mono) for c, mono in expr.terms))


def linear_terms(expr: Expr) -> Iterator[tuple[int, str, Expr]]:
    """(a, s, rest) with expr == a*s + rest, for each symbol s that rest is free of."""
    for coefficient, mono in expr.terms:
        match mono:
            case ((Symbol(name), 1),):
                rest = expr - coefficient * sym(name)
                if name not in rest.symbols():
                    yield coefficient, name, rest
            case _:
                pass


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key: s6 before s33."""
    pieces: Iterable[str] = re.split(r"(\d+)", name)
    return [(int(piece) if piece.isdigit() else -1, piece) for piece in pieces]


def solution_of(expr: Expr) -> tuple[str, Expr] | None:
    """(s, e) such that expr == 0 means s == e, for the best symbol s.

    A solution without negative coefficients keeps signs visible; among those the
    later name goes, so that s33 == s6 leaves s6.
    """
    best: tuple[bool, list[tuple[int, str]], str, Expr] | None = None
    for coefficient, name, rest in linear_terms(expr):
        if abs(coefficient) != 1:
            continue
        image = rest * -coefficient
        positive = all(c > 0 for c, _ in image.terms)
        if best is None or (positive, _natural(name)) > best[:2]:
            best = (positive, _natural(name), name, image)
    return None if best is None else best[2:]
