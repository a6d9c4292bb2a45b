"""How two sizes relate over all assignments that satisfy the facts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

from pliant.sym.expr import DimLike, as_expr
from pliant.sym.points import Point, witnesses
from pliant.sym.prove import Facts

# less: never greater. crosses: less at one assignment and greater at another.
Relation: TypeAlias = Literal["less", "equal", "greater", "crosses"]

_PROVED: dict[str | None, Relation] = {
    "lt": "less",
    "le": "less",
    "eq": "equal",
    "ge": "greater",
    "gt": "greater",
}


def relation(
    facts: Facts, a: DimLike, b: DimLike, points: Sequence[Point] | None = None
) -> Relation | None:
    """What is certain of a against b; None if nothing is.

    Three answers are proofs; `crosses` rests on two witnesses among `points`, which
    satisfy the facts.
    """
    proved = _PROVED.get(facts.compare(a, b))
    if proved is not None:
        return proved
    left, right = as_expr(a), as_expr(b)
    if points is None:
        points = witnesses(facts, {*left.symbols(), *right.symbols()})
    return crossing((left.evaluate(p), right.evaluate(p)) for p in points)


def crossing(pairs: Iterable[tuple[int, int]]) -> Relation | None:
    """`crosses` if one of the pairs ascends and one descends."""
    signs = {(x > y) - (x < y) for x, y in pairs}
    return "crosses" if {1, -1} <= signs else None
