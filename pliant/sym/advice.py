"""A guard that failed, as a sentence about the dims that a person can change.

seq <= 512         seq must be at most 512, got 600
b*n == 2*b*(n//2)  ... with b=2, n=7; n=6 or n=8 would do
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pliant.sym.cond import Cond
from pliant.sym.expr import Expr
from pliant.sym.guards import Guard

_FAR = 64  # how far from a size another one is looked for


def bound_text(cond: Cond, env: Mapping[str, int]) -> str | None:
    """What a condition on one dim and a number asks for; None if it is another one."""
    low, high = cond.lhs, cond.rhs
    strict = int(cond.kind == "lt")
    if _is_dim(high) and low.is_const and cond.kind == "divides":
        return _said(high, f"a multiple of {low}", env)
    if cond.kind in ("le", "lt") and _is_dim(low) and high.is_const:
        return _said(low, f"at most {high.value - strict}", env)
    if cond.kind in ("le", "lt") and low.is_const and _is_dim(high):
        return _said(high, f"at least {low.value + strict}", env)
    return None


def _is_dim(expr: Expr) -> bool:
    return expr.symbol is not None and "." not in expr.symbol


def _said(dim: Expr, what: str, env: Mapping[str, int]) -> str | None:
    name = dim.symbol
    if name is None or name not in env:
        return None
    return f"{name} must be {what}, got {env[name]}"


def nearest_text(guard: Guard, env: Mapping[str, int]) -> str:
    """Sizes close by for which the guard holds, one dim changed: "n=6 or n=8"."""
    names = guard.cond.symbols()
    if any("." in name or name not in env for name in names):
        return ""
    return " or ".join(text for name in names for text in _nearest(guard, env, name))


def _nearest(guard: Guard, env: Mapping[str, int], name: str) -> Iterator[str]:
    """The closest size below, which is not 0 or less, and the closest above."""
    value = env[name]
    for step in (-1, 1):
        for size in range(value + step, value + step * (_FAR + 1), step):
            if size < 1:
                break
            if _holds(guard.cond, {**env, name: size}):
                yield f"{name}={size}"
                break


def _holds(cond: Cond, env: Mapping[str, int]) -> bool:
    try:
        return cond.holds(env)
    except ZeroDivisionError:
        return False
