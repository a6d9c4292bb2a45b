"""How an expression changes with one of its symbols, and the largest that it gets.

largest(64*ceildiv(4*u, 64) + n - u, {u: n})  =  64*ceildiv(4*n, 64) + n
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pliant.sym.cond import ge, le
from pliant.sym.nodes import (
    ZERO,
    Atom,
    CeilDiv,
    Expr,
    FloorDiv,
    Max,
    Min,
    Symbol,
    Term,
    as_expr,
    lift,
    maximum,
    minimum,
    operands,
    rebuild,
    sum_of,
)
from pliant.sym.prove import Facts
from pliant.sym.signs import plainly_nonnegative


def direction(expr: Expr, name: str, facts: Facts | None = None) -> int | None:
    """1: it never falls as the symbol rises, -1: it never rises, 0: it stays."""
    way = _common(_of_term(term, name, facts) for term in expr.terms)
    if way is not None or facts is None:
        return way
    factor = linear_coefficient(expr, name)  # n*s - n*min(s, 1) has s - min(s, 1)
    if factor is None:
        return None
    if facts.prove(ge(factor, 0)) is True:
        return 1
    return -1 if facts.prove(le(factor, 0)) is True else None


def linear_coefficient(e: Expr, name: str) -> Expr | None:
    """c where e == c*name + rest and rest and c do not contain name; else None."""
    if name not in e.symbols():
        return as_expr(0)
    parts: list[Expr] = []
    for number, factors in e.terms:
        part, within = as_expr(number), False
        for atom, power in factors:
            if isinstance(atom, Symbol) and atom.name == name:
                if power > 1:
                    return None
                within = True
                continue
            factor = lift(atom)
            if name in factor.symbols():
                return None
            part = part * factor**power
        if within:
            parts.append(part)
    return sum_of(parts)


def _common(found: Iterable[int | None]) -> int | None:
    directions = set(found) - {0}
    if len(directions) > 1:
        return None
    return directions.pop() if directions else 0


def _of_term(term: Term, name: str, facts: Facts | None) -> int | None:
    coefficient, mono = term
    moving = [(a, p) for a, p in mono if name in lift(a).symbols()]
    if not moving:
        return 0
    alone = len(mono) == 1 and mono[0][1] == 1
    if not alone and not all(plainly_nonnegative(lift(atom)) for atom, _ in mono):
        return None
    ways = {_of_atom(atom, name, facts) for atom, _ in moving}
    if len(ways) > 1 or None in ways:
        return None
    (way,) = ways
    assert way is not None
    return way if coefficient > 0 else -way


def _of_atom(atom: Atom, name: str, facts: Facts | None) -> int | None:
    match atom:
        case Symbol():
            return 1
        case FloorDiv() | CeilDiv():
            dividend, divisor = operands(atom)
            fixed = name not in divisor.symbols() and plainly_nonnegative(divisor)
            return direction(dividend, name, facts) if fixed else None
        case Min() | Max():
            return _common(direction(arg, name, facts) for arg in operands(atom))
        case _:
            return None


def largest(expr: Expr, most: Mapping[str, Expr], facts: Facts) -> Expr | None:
    """An expression that is never less while each symbol is in 0 .. most.

    None if no such expression is found. `facts` know these ranges.
    """
    for name, end in most.items():
        if name not in expr.symbols():
            continue
        total = ZERO
        for coefficient, mono in expr.terms:
            term = as_expr(coefficient)
            for atom, power in mono:
                for _ in range(power):
                    term = term * lift(atom)
            found = _largest_term(term, name, end, facts)
            if found is None:
                return None
            total = total + found
        expr = total
    return expr


def _largest_term(term: Expr, name: str, end: Expr, facts: Facts) -> Expr | None:
    high, low = (term.substitute({name: at}) for at in (end, as_expr(0)))
    way = direction(term, name, facts)
    if way is not None:
        return low if way < 0 else high
    for bound in (high, low):
        if facts.prove(le(term, bound)) is True:
            return bound
    return _above(term, name, end)


def _above(expr: Expr, name: str, end: Expr) -> Expr | None:
    """A bound from bounds of the parts: min(max(a - b*u, 0), 1) is at most 1."""
    total = ZERO
    for coefficient, mono in expr.terms:
        if not all(plainly_nonnegative(lift(atom)) for atom, _ in mono):
            return None
        term = as_expr(max(coefficient, 0))
        moving = any(name in lift(atom).symbols() for atom, _ in mono)
        if not moving:
            term = as_expr(coefficient)
        for atom, power in mono:
            bound = _atom_above(atom, name, end)
            if bound is None:
                return None
            term = term * bound**power
        total = total + term
    return total


def _atom_above(atom: Atom, name: str, end: Expr) -> Expr | None:
    if name not in lift(atom).symbols():
        return lift(atom)
    if isinstance(atom, Symbol):
        return end
    bounds = [_above(part, name, end) for part in operands(atom)]
    known = [bound for bound in bounds if bound is not None]
    match atom:
        case Min() if known:
            return minimum(*known)
        case Max() if len(known) == len(bounds):
            return maximum(*known)
        case FloorDiv() | CeilDiv():
            divisor = operands(atom)[1]
            fixed = name not in divisor.symbols() and plainly_nonnegative(divisor)
            return rebuild(atom, known) if fixed and len(known) == 2 else None
        case _:
            return None
