"""Random expression trees, kept apart from the code under test.

A tree is nested tuples, so that its value can be computed without Expr.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from pliant.sym import (
    Expr,
    ceildiv,
    const,
    floordiv,
    maximum,
    minimum,
    mod,
    sym,
)

NAMES = ("n", "m", "k")
SIZES = (0, 1, 2, 3, 7, 13, 64, 97, 1009, 10**6 + 3)

numbers = st.integers(-20, 20).map(lambda v: ("const", v))
names = st.sampled_from(NAMES).map(lambda v: ("sym", v))
# A denominator is positive for sizes >= 0.
denominators = st.one_of(
    st.integers(1, 24).map(lambda v: ("const", v)),
    st.sampled_from(NAMES).map(lambda v: ("+", ("sym", v), ("const", 1))),
    st.sampled_from(NAMES).map(
        lambda v: ("max", ("*", ("sym", v), ("const", 2)), ("const", 1))
    ),
)


def _grow(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.tuples(st.sampled_from(["+", "-", "*", "min", "max"]), inner, inner),
        st.tuples(st.sampled_from(["//", "%", "ceildiv"]), inner, denominators),
    )


trees = st.recursive(st.one_of(numbers, names), _grow, max_leaves=8)
linear = st.recursive(
    st.one_of(numbers, names),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["+", "-", "min", "max"]), inner, inner),
        st.tuples(
            st.sampled_from(["//", "%", "ceildiv"]),
            inner,
            st.integers(1, 12).map(lambda v: ("const", v)),
        ),
    ),
    max_leaves=5,
)
environments = st.fixed_dictionaries({name: st.sampled_from(SIZES) for name in NAMES})


def value_of(tree: Any, env: dict[str, int]) -> int:
    match tree:
        case ("const", v):
            return v
        case ("sym", name):
            return env[name]
    operator, left, right = tree[0], value_of(tree[1], env), value_of(tree[2], env)
    match operator:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
        case "//":
            return left // right
        case "%":
            return left % right
        case "ceildiv":
            return -(-left // right)
        case "min":
            return min(left, right)
        case _:
            return max(left, right)


def expr_of(tree: Any) -> Expr:
    match tree:
        case ("const", v):
            return const(v)
        case ("sym", name):
            return sym(name)
    operator, left, right = tree[0], expr_of(tree[1]), expr_of(tree[2])
    match operator:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
        case "//":
            return floordiv(left, right)
        case "%":
            return mod(left, right)
        case "ceildiv":
            return ceildiv(left, right)
        case "min":
            return minimum(left, right)
        case _:
            return maximum(left, right)
