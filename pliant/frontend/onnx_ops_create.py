"""Constants, ranges, filled tensors, windows, random numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pliant.frontend.onnx_context import Node, OnnxContext, Rule
from pliant.frontend.onnx_ops_activation import Table
from pliant.frontend.onnx_tensors import element_of
from pliant.frontend.onnx_types import FLOAT, INT64
from pliant.frontend.onnx_values import Entry, Known, Ratio
from pliant.frontend.operands import Size
from pliant.ir.graph import Value
from pliant.ir.types import DType
from pliant.sym import Expr, as_expr, ceildiv, le, maximum


def constant(cx: OnnxContext, n: Node) -> Entry:
    for name, element in (("value_float", FLOAT), ("value_floats", FLOAT)):
        if name in n.attrs:
            return Known(np.array(n.attrs[name], np.float32), element)
    for name in ("value_int", "value_ints"):
        if name in n.attrs:
            return Known(np.array(n.attrs[name], np.int64), INT64)
    found = n.attrs.get("value", n.attrs.get("sparse_value"))
    if not isinstance(found, Known):
        cx.unsupported("a constant that is no tensor of numbers")
    return Known(found.array, found.element, found.name or n.outputs[0])


def constant_of_shape(cx: OnnxContext, n: Node) -> Entry:
    shape = [as_expr(s) for s in n.sizes(0, "the shape")]
    value = n.attrs.get("value")
    element = value.element if value is not None else FLOAT
    number = value.array.reshape(-1)[0].item() if value is not None else 0.0
    sizes = [cx.simplify(d) for d in shape]
    count = math.prod(d.value for d in sizes if d.is_const)
    if all(d.is_const for d in sizes) and count <= 1024:
        array = np.full([d.value for d in sizes], number, element.numpy)
        return Known(array, element)
    if element.dtype is None:
        cx.unsupported(f"a tensor of {element.name}")
    for d in sizes:
        if not cx.proves(le(0, d)):
            cx.require(le(0, d), "a size that is not negative")
    return cx.full(number, sizes, element.dtype)


def range_(cx: OnnxContext, n: Node) -> Value:
    element = cx.element_of(n.entry(0))
    parts = [n.needed(i, "the ends of a range").reshape(-1)[0] for i in range(3)]
    start, limit, step = (_element(p) for p in parts)
    dtype = element.dtype or DType.I64
    if isinstance(step, Expr | Ratio):
        cx.unsupported("a range whose step depends on sizes")
    if isinstance(start, Ratio) or isinstance(limit, Ratio):
        return _range_of_ratios(cx, start, limit, step, dtype)
    if not isinstance(start, Expr) and not isinstance(limit, Expr):
        count = max(math.ceil((limit - start) / step), 0)
        size = as_expr(count)
    elif step > 0:
        gap = as_expr(limit) - as_expr(start)
        size = cx.simplify(maximum(ceildiv(gap, step), 0))
    else:
        gap = as_expr(start) - as_expr(limit)
        size = cx.simplify(maximum(ceildiv(gap, -step), 0))
    place = cx.iota((size,), 0, DType.I64)
    if dtype.is_float:
        wide = cx.cast(place, DType.F64)
        made = cx.add(cx.mul(wide, float(step)), float(start))
        return cx.cast(made, dtype)
    if step != 1:
        place = cx.mul(place, step)
    first = cx.tensor(start, DType.I64) if isinstance(start, Expr) else start
    moved = place if start == 0 else cx.add(place, first)
    if step > 0 and cx.proves(le(0, as_expr(start))):
        cx.nonnegative.add(moved)
    return cx.cast(moved, dtype)


def _range_of_ratios(
    cx: OnnxContext, start: Any, limit: Any, step: Any, dtype: DType
) -> Value:
    """start + 0, step, .. below the limit, where these are floats made of sizes."""
    first, end, by = (Ratio.of(x) for x in (start, limit, step))
    if (
        first is None
        or end is None
        or by is None
        or dtype not in (DType.F32, DType.F64)
    ):
        cx.unsupported("a range of floats that depends on sizes, and is not exact")
    gap = end.top * first.bottom - first.top * end.bottom
    ahead = by.top.value
    top, bottom = (gap, ahead) if ahead > 0 else (-gap, -ahead)
    count = ceildiv(top * by.bottom, bottom * end.bottom * first.bottom)
    size = cx.simplify(maximum(count, 0))
    wide = cx.cast(cx.iota((size,), 0, DType.I64), DType.F64)
    begin = cx.div(cx.tensor(first.top, DType.F64), float(first.bottom))
    return cx.cast(cx.add(cx.mul(wide, float(step)), begin), dtype)


def _element(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


# ---- windows


def window(weights: tuple[float, ...]) -> Rule:
    """a0 - a1 cos(2πi/N) + a2 cos(4πi/N)"""

    def rule(cx: OnnxContext, n: Node) -> Value:
        size = as_expr(n.sizes(0, "the size of the window")[0])
        dtype = element_of(n.attr("output_datatype", 1), n.op).dtype or DType.F32
        i = cx.cast(cx.iota((size,), 0, DType.I64), DType.F64)
        periodic = bool(n.attr("periodic", 1))
        length = cx.tensor(size if periodic else size - 1, DType.F64)
        turn = cx.div(cx.mul(i, 2 * math.pi), length)
        made: Value = cx.full(weights[0], (size,), DType.F64)
        for k, weight in enumerate(weights[1:], 1):
            term = cx.mul(cx.unary("cos", cx.mul(turn, float(k))), weight)
            made = cx.sub(made, term) if k % 2 else cx.add(made, term)
        return cx.cast(made, dtype)

    return rule


# ---- random numbers


def uniform(cx: OnnxContext, shape: list[Size], dtype: DType) -> Value:
    """Numbers in [0, 1)."""
    if not cx.random:
        cx.unsupported("random numbers in a region")
    made = cx.b.emit(
        "random",
        cx.seed(),
        number=cx.next_number(),
        shape=tuple(as_expr(s) for s in shape),
    )
    return cx.cast(made, dtype)


def _shape(cx: OnnxContext, n: Node) -> list[Size]:
    if n.op.endswith("Like") or n.op == "Bernoulli":
        return list(cx.shape_of(n.entry(0)))
    return list(n.attrs["shape"])


def _dtype(cx: OnnxContext, n: Node) -> DType:
    if "dtype" in n.attrs:
        return element_of(n.attrs["dtype"], n.op).dtype or DType.F32
    if n.op.endswith("Like") or n.op == "Bernoulli":
        return cx.element_of(n.entry(0)).dtype or DType.F32
    return DType.F32


def random_uniform(cx: OnnxContext, n: Node) -> Value:
    low, high = n.attr("low", 0.0), n.attr("high", 1.0)
    made = uniform(cx, _shape(cx, n), DType.F32)
    return cx.cast(cx.add(cx.mul(made, high - low), low), _dtype(cx, n))


def random_normal(cx: OnnxContext, n: Node) -> Value:
    """By Box and Muller."""
    shape = _shape(cx, n)
    first, second = uniform(cx, shape, DType.F32), uniform(cx, shape, DType.F32)
    inside = cx.unary("log1p", cx.unary("neg", first))
    radius = cx.unary("sqrt", cx.mul(inside, -2.0))
    made = cx.mul(radius, cx.unary("cos", cx.mul(second, 2 * math.pi)))
    made = cx.add(cx.mul(made, n.attr("scale", 1.0)), n.attr("mean", 0.0))
    return cx.cast(made, _dtype(cx, n))


def bernoulli(cx: OnnxContext, n: Node) -> Value:
    x = n.tensor(0)
    draw = uniform(cx, list(x.shape), x.dtype)
    return cx.cast(cx.arith("lt", draw, x), _dtype(cx, n))


CREATE: Table = {
    ("Constant", 1): constant,
    ("ConstantOfShape", 9): constant_of_shape,
    ("Range", 11): range_,
    ("HannWindow", 17): window((0.5, 0.5)),
    ("HammingWindow", 17): window((25 / 46, 21 / 46)),
    ("BlackmanWindow", 17): window((0.42, 0.5, 0.08)),
    ("RandomUniform", 1): random_uniform,
    ("RandomUniformLike", 1): random_uniform,
    ("RandomNormal", 1): random_normal,
    ("RandomNormalLike", 1): random_normal,
    ("Bernoulli", 15): bernoulli,
}
