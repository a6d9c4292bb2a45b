"""Reductions, running sums, positions of extremes."""

from __future__ import annotations

from collections.abc import Callable

from pliant.frontend.onnx_context import Node, OnnxContext, Rule
from pliant.frontend.onnx_ops_activation import Table
from pliant.ir.graph import Value
from pliant.ir.types import DType
from pliant.sym import as_expr

Reduction = Callable[[OnnxContext, Value, list[int], bool], Value]


def reduction(function: Reduction) -> Rule:
    def rule(cx: OnnxContext, n: Node) -> Value:
        x = n.tensor(0)
        axes = n.axes_input(1)
        if not axes and n.attr("noop_with_empty_axes", 0):
            axes = []
        elif not axes:
            axes = list(range(x.type.rank))
        axes = sorted(set(axes))
        return function(cx, x, axes, bool(n.attr("keepdims", 1)))

    return rule


def _plain(op: str) -> Reduction:
    def reduce(cx: OnnxContext, x: Value, axes: list[int], keep: bool) -> Value:
        return cx.reduce(op, x, axes, keep)

    return reduce


def wide_sum(cx: OnnxContext, x: Value, axes: list[int], keep: bool) -> Value:
    """Half floats are summed up in f32."""
    wide = cx.cast(x, x.dtype.compute)
    return cx.cast(cx.reduce("sum", wide, axes, keep), x.dtype)


def _mean(cx: OnnxContext, x: Value, axes: list[int], keep: bool) -> Value:
    if x.dtype.is_float:
        return cx.mean(x, axes, keep)
    total = cx.reduce("sum", x, axes, keep)
    count = cx.tensor(cx.count(x, axes), x.dtype)
    return cx.arith("floordiv", total, count)


def _extreme(op: str) -> Reduction:
    def reduce(cx: OnnxContext, x: Value, axes: list[int], keep: bool) -> Value:
        if x.dtype is DType.BOOL:
            return cx.reduce("any" if op == "max" else "all", x, axes, keep)
        return cx.reduce(op, x, axes, keep)

    return reduce


def _l1(cx: OnnxContext, x: Value, axes: list[int], keep: bool) -> Value:
    return wide_sum(cx, cx.unary("abs", x), axes, keep)


def _square(cx: OnnxContext, x: Value, axes: list[int], keep: bool) -> Value:
    wide = cx.cast(x, x.dtype.compute)
    return cx.cast(cx.reduce("sum", cx.mul(wide, wide), axes, keep), x.dtype)


def _l2(cx: OnnxContext, x: Value, axes: list[int], keep: bool) -> Value:
    wide = cx.cast(x, x.dtype.compute if x.dtype.is_float else DType.F64)
    total = cx.reduce("sum", cx.mul(wide, wide), axes, keep)
    return cx.cast(cx.unary("sqrt", total), x.dtype)


def _log_sum(cx: OnnxContext, x: Value, axes: list[int], keep: bool) -> Value:
    wide = cx.cast(x, x.dtype.compute if x.dtype.is_float else DType.F64)
    total = cx.reduce("sum", wide, axes, keep)
    return cx.cast(cx.unary("log", total), x.dtype)


def _log_sum_exp(cx: OnnxContext, x: Value, axes: list[int], keep: bool) -> Value:
    """max + log(sum(exp(x - max))); where the largest is infinite, it is the result."""
    wide = cx.cast(x, x.dtype.compute if x.dtype.is_float else DType.F64)
    if not axes:
        return x
    top = cx.reduce("max", wide, axes, True)
    safe = cx.select(cx.unary("isinf", top), 0.0, top)
    total = cx.reduce("sum", cx.unary("exp", cx.sub(wide, safe)), axes, True)
    made = cx.add(cx.unary("log", total), safe)
    if not keep:
        shape = [d for i, d in enumerate(x.shape) if i not in axes]
        made = cx.reshape(made, shape)
    return cx.cast(made, x.dtype)


def arg(op: str) -> Rule:
    def rule(cx: OnnxContext, n: Node) -> Value:
        x = n.tensor(0)
        axis, keep = n.axis(n.attr("axis", 0)), bool(n.attr("keepdims", 1))
        if x.dtype.is_unsigned and x.dtype.bytes > 1:
            x = cx.cast(x, DType.I64)
        if not n.attr("select_last_index", 0):
            return cx.b.emit("argreduce", x, op=op, axis=axis, keepdims=keep)
        flipped = cx.b.emit("flip", x, axes=(axis,))
        found = cx.b.emit("argreduce", flipped, op=op, axis=axis, keepdims=keep)
        return cx.arith("sub", cx.tensor(x.shape[axis] - 1, DType.I64), found)

    return rule


def running(op: str) -> Rule:
    def rule(cx: OnnxContext, n: Node) -> Value:
        x = n.tensor(0)
        axis = n.axis(n.integer(1, "axis"))
        reverse = bool(n.attr("reverse", 0))
        if reverse:
            x = cx.b.emit("flip", x, axes=(axis,))
        wide = cx.cast(x, x.dtype.compute)
        made = cx.cast(cx.b.emit("cumulate", wide, op=op, axis=axis), x.dtype)
        if n.attr("exclusive", 0):
            made = _shifted(cx, made, axis, 0 if op == "sum" else 1)
        return cx.b.emit("flip", made, axes=(axis,)) if reverse else made

    return rule


def _shifted(cx: OnnxContext, x: Value, axis: int, first: int) -> Value:
    """One place later, with the neutral element in front."""
    low = [as_expr(0)] * x.type.rank
    none = tuple(low)
    low[axis] = as_expr(1)
    value = float(first) if x.dtype.is_float else first
    padded = cx.b.emit("pad", x, low=tuple(low), high=none, value=value)
    return cx.slice(padded, axis, 0, x.shape[axis])


REDUCE: Table = {
    ("ReduceSum", 1): reduction(wide_sum),
    ("ReduceProd", 1): reduction(_plain("prod")),
    ("ReduceMean", 1): reduction(_mean),
    ("ReduceMax", 1): reduction(_extreme("max")),
    ("ReduceMin", 1): reduction(_extreme("min")),
    ("ReduceL1", 1): reduction(_l1),
    ("ReduceL2", 1): reduction(_l2),
    ("ReduceSumSquare", 1): reduction(_square),
    ("ReduceLogSum", 1): reduction(_log_sum),
    ("ReduceLogSumExp", 1): reduction(_log_sum_exp),
    ("ArgMax", 1): arg("max"),
    ("ArgMin", 1): arg("min"),
    ("CumSum", 11): running("sum"),
    ("CumProd", 1): running("prod"),
}
