"""Assignments that satisfy the facts, to drop hopeless proofs early.

A sample never proves anything. A value below zero shows that expr >= 0 has no
proof, so most undecidable questions end here, after a few evaluations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from pliant.sym.bounding import Interval
from pliant.sym.cond import Cond
from pliant.sym.expr import Expr

# Offset of the j-th symbol from its least value (or below its greatest).
_PATTERNS: tuple[Callable[[int], int], ...] = (
    lambda j: 0,
    lambda j: 1,
    lambda j: 2 + 3 * j,
    lambda j: 31 // (j + 1),
    lambda j: 1009 + 7 * j,
    lambda j: 0 if j % 2 else 97,
    lambda j: 97 if j % 2 else 0,
)


class Sampler:
    """Small assignments within `interval` that satisfy `conditions`."""

    def __init__(
        self, conditions: tuple[Cond, ...], interval: Callable[[str], Interval]
    ) -> None:
        self._conditions = [(cond, set(cond.symbols())) for cond in conditions]
        self._interval = interval
        self._known: dict[tuple[str, ...], list[dict[str, int]]] = {}

    def values(self, expr: Expr) -> list[int]:
        return list(self._evaluated(expr))

    def signs(self, expr: Expr) -> tuple[bool, bool]:
        """Whether a negative value was seen, and whether another one was."""
        negative = nonneg = False
        for value in self._evaluated(expr):
            negative |= value < 0
            nonneg |= value >= 0
            if negative and nonneg:
                break
        return negative, nonneg

    def _evaluated(self, expr: Expr) -> Iterator[int]:
        symbols = expr.symbols()
        if symbols not in self._known:
            self._known[symbols] = list(self._assignments(set(symbols)))
        for env in self._known[symbols]:
            try:
                yield expr.evaluate(env)
            except ZeroDivisionError:
                continue  # outside the precondition of a quotient

    def _assignments(self, symbols: set[str]) -> Iterator[dict[str, int]]:
        # A condition that shares a symbol restricts the others as well.
        conditions: list[Cond] = []
        waiting = self._conditions
        grown = True
        while grown:
            joined = [cond for cond, names in waiting if names & symbols]
            waiting = [pair for pair in waiting if not pair[1] & symbols]
            grown = bool(joined)
            conditions += joined
            symbols = symbols.union(*(cond.symbols() for cond in joined))
        for pattern in _PATTERNS:
            env = {
                name: self._value(name, pattern(j))
                for j, name in enumerate(sorted(symbols))
            }
            if all(_holds(cond, env) for cond in conditions):
                yield env

    def _value(self, name: str, offset: int) -> int:
        low, high = self._interval(name)
        if low is None:
            return -offset if high is None else high - offset
        return low + offset if high is None else min(low + offset, high)


def _holds(cond: Cond, env: Mapping[str, int]) -> bool:
    try:
        return cond.holds(env)
    except ZeroDivisionError:
        return False
