"""Comparisons of indices whose outcome their ranges decide, for `canonicalize`."""

from __future__ import annotations

from pliant.ir.graph import Op, Value
from pliant.ir.rewrite import Rewriter
from pliant.ir.types import DType
from pliant.sym import Cond, Expr, as_expr, eq, le, lt

_Range = tuple[Expr, Expr]


def _range(cx: Rewriter, value: Value, depth: int = 6) -> _Range | None:
    """Bounds on every element of an integer tensor, as expressions."""
    op = cx.producer(value)
    if op is None or depth == 0 or value.dtype not in (DType.I64, DType.I32):
        return None
    match op.name:
        case "full":
            number = op.attr("value")
            assert isinstance(number, int)
            return as_expr(int(number)), as_expr(int(number))
        case "dim_value":
            return op.dim_attr("value"), op.dim_attr("value")
        case "iota":
            return as_expr(0), op.result.shape[op.int_attr("axis")] - 1
        case "broadcast" | "reshape" | "transpose" | "slice" | "flip":
            return _range(cx, op.operands[0], depth - 1)
        case "cast" if value.dtype is DType.I64:
            return _range(cx, op.operands[0], depth - 1)
        case "add" | "sub" if value.dtype is DType.I64:
            left = _range(cx, op.operands[0], depth - 1)
            right = _range(cx, op.operands[1], depth - 1)
            if left is None or right is None:
                return None
            if op.name == "add":
                return left[0] + right[0], left[1] + right[1]
            return left[0] - right[1], left[1] - right[0]
        case _:
            return None


def compare_indices(cx: Rewriter, op: Op) -> Value | None:
    """iota >= 0 -> true, and other comparisons that the sizes decide."""
    x, y = op.operands
    a, b = _range(cx, x), _range(cx, y)
    if a is None or b is None:
        return None
    true, false = _outcomes(op.name, a, b)
    for answer, ways in ((True, true), (False, false)):
        if any(all(cx.facts.prove(c) is True for c in way) for way in ways):
            return cx.full(answer, op.result.dtype, op.result.shape)
    return None


_Ways = list[list[Cond]]  # alternatives; each needs all its conditions


def _outcomes(name: str, a: _Range, b: _Range) -> tuple[_Ways, _Ways]:
    """Conditions that make a comparison true for all elements, or false for all."""
    match name:
        case "lt":
            return [[lt(a[1], b[0])]], [[le(b[1], a[0])]]
        case "le":
            return [[le(a[1], b[0])]], [[lt(b[1], a[0])]]
        case "gt" | "ge":
            return _outcomes({"gt": "lt", "ge": "le"}[name], b, a)
        case "eq":
            equal = [eq(a[0], a[1]), eq(b[0], b[1]), eq(a[0], b[0])]
            return [equal], [[lt(a[1], b[0])], [lt(b[1], a[0])]]
        case _:
            equal_ways, unequal_ways = _outcomes("eq", a, b)
            return unequal_ways, equal_ways
