"""Iteration domains: the axes of a kernel, merged where addresses allow it.

(batch, seq, 768) with every address linear in batch*seq + seq' is (batch*seq, 768);
if every address is the flat position, it is one axis. Fewer axes mean longer vectors,
cheaper addresses, and one kernel for shapes that differ only in how they are folded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pliant.ir.access import Space, linear_coefficient
from pliant.ir.loop_walk import dims_in, substitute
from pliant.ir.loops import Stmt
from pliant.sym import Expr, Facts, as_expr, ge, le, sym


@dataclass(frozen=True, slots=True)
class Axis:
    """One loop: its variable, its extent, and whether a reduction runs along it."""

    name: str
    extent: Expr
    reduced: bool = False

    @property
    def var(self) -> Expr:
        return sym(self.name)


def with_axes(facts: Facts, axes: Iterable[Axis]) -> Space:
    """Inside the loops: 0 <= variable < extent."""
    return Space(facts, {axis.name: axis.extent for axis in axes})


def merge(axes: Sequence[Axis], body: Sequence[Stmt]) -> tuple[list[Axis], list[Stmt]]:
    """Merges neighbouring axes of one kind while every expression allows it."""
    merged, stmts = list(axes), list(body)
    k = len(merged) - 2
    while k >= 0:
        outer, inner = merged[k], merged[k + 1]
        if outer.reduced == inner.reduced and _mergeable(outer, inner, stmts):
            # outer*extent + inner is the merged variable, named as the inner one.
            stmts = [substitute(s, {outer.name: 0}) for s in stmts]
            joined = Axis(inner.name, outer.extent * inner.extent, inner.reduced)
            merged[k : k + 2] = [joined]
        k -= 1
    return merged, stmts


def _mergeable(outer: Axis, inner: Axis, body: Sequence[Stmt]) -> bool:
    if outer.extent == as_expr(1):
        return True
    for e in dims_in(body):
        if not {outer.name, inner.name} & set(e.symbols()):
            continue
        high = linear_coefficient(e, outer.name)
        low = linear_coefficient(e, inner.name)
        if high is None or low is None or high != low * inner.extent:
            return False
    return True


def sorted_breaks(found: Iterable[Expr], axis: Axis, facts: Facts) -> list[Expr]:
    """The breaks of an axis in order, if their order is provable; else none.

    A segment is computed whole, so it must end where the axis does: a break that may be
    beyond (the second row, where there may be one) is none.
    """
    inside = [
        e
        for e in found
        if not facts.prove(le(e, 0)) and not facts.prove(ge(e, axis.extent))
    ]
    inside = [
        e for e in inside if facts.prove(ge(e, 0)) and facts.prove(le(e, axis.extent))
    ]
    known = sorted((e for e in inside if e.is_const), key=lambda e: e.value)
    ordered: list[Expr] = list(known)
    for e in inside:
        if e.is_const:
            continue
        low, high = 0, len(ordered)
        while low < high:
            middle = (low + high) // 2
            order = facts.compare(e, ordered[middle])
            if order is None:
                return []
            if order in ("lt", "le"):
                high = middle
            else:
                low = middle + 1
        ordered.insert(low, e)
    return ordered
