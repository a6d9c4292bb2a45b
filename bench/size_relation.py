"""The relation of two sizes over all assignments that satisfy the facts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

from bench.size_exhaustion import exhausted
from pliant.sym.cond import le
from pliant.sym.expr import DimLike, Expr, as_expr
from pliant.sym.points import Point, extremes, witnesses
from pliant.sym.prove import Facts

# less: never greater. crosses: less at one assignment and greater at another.
Relation: TypeAlias = Literal["less", "equal", "greater", "crosses"]


def relation(
    facts: Facts, a: DimLike, b: DimLike, points: Sequence[Point] | None = None
) -> Relation | None:
    """The relation of a and b that is certain; None if none is.

    Three answers are proofs; `crosses` rests on two witnesses, among `points` or at
    extreme sizes, that satisfy the facts.
    """
    left, right = as_expr(a), as_expr(b)
    if points is None:
        points = witnesses(facts, {*left.symbols(), *right.symbols()})
    signs = seen((left.evaluate(p), right.evaluate(p)) for p in points)
    if signs >= {1, -1}:
        return "crosses"
    less = 1 not in signs and at_most(facts, left, right)
    greater = -1 not in signs and at_most(facts, right, left)
    if less or greater:
        return "equal" if less and greater else "less" if less else "greater"
    far = extremes(facts, {*left.symbols(), *right.symbols()})
    signs |= seen((left.evaluate(p), right.evaluate(p)) for p in far)
    return "crosses" if signs >= {1, -1} else None


def at_most(facts: Facts, a: Expr, b: Expr) -> bool:
    """Whether a <= b is proved, by every means."""
    return facts.prove(le(a, b)) is True or exhausted(facts, b - a)


def seen(pairs: Iterable[tuple[int, int]]) -> set[int]:
    """Signs of differences; no more are looked at once both are there."""
    found: set[int] = set()
    for x, y in pairs:
        found.add((x > y) - (x < y))
        if found >= {1, -1}:
            break
    return found
