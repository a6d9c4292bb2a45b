"""The sign of an expression as far as it is syntactic, without facts or search."""

from __future__ import annotations

from collections.abc import Callable

from pliant.sym.nodes import Atom, CeilDiv, Expr, FloorDiv, Max, Min, Mod, Symbol


def _is_size(name: str) -> bool:
    return True


def plainly_nonnegative(expr: Expr, symbol: Callable[[str], bool] = _is_size) -> bool:
    """Whether no coefficient is negative, and no atom can be.

    `symbol` tells which symbols are nonnegative; by default all are.
    """
    return all(
        coefficient >= 0 and all(_atom(atom, symbol) for atom, _ in mono)
        for coefficient, mono in expr.terms
    )


def without_plain(expr: Expr) -> Expr:
    """At most `expr`, and simpler: without terms of quotients and choices that are
    plainly nonnegative. Of a long sum, this may be proved where all of it is not."""
    terms = (
        (coefficient, mono)
        for coefficient, mono in expr.terms
        if coefficient < 0
        or all(isinstance(atom, Symbol) for atom, _ in mono)
        or not all(_atom(atom, _is_size) for atom, _ in mono)
    )
    return Expr._of(tuple(terms))


def _atom(atom: Atom, symbol: Callable[[str], bool]) -> bool:
    match atom:
        case Symbol(name):
            return symbol(name)
        case Mod():
            return True
        case FloorDiv(num, _) | CeilDiv(num, _):
            return plainly_nonnegative(num, symbol)
        case Min(args):
            return all(plainly_nonnegative(arg, symbol) for arg in args)
        case Max(args):
            return any(plainly_nonnegative(arg, symbol) for arg in args)
        case _:
            raise TypeError(f"unknown atom {atom!r}")
