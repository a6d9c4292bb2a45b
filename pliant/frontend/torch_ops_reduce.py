"""aten reductions, norms of vectors, softmax, running sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from pliant.frontend.torch_ops_context import HALF, Size, TorchContext
from pliant.frontend.torch_ops_math import Translate
from pliant.ir.graph import Value
from pliant.ir.types import DType
from pliant.sym import le, maximum

aten = torch.ops.aten
Dims = int | Sequence[int] | None


def total(op: str) -> Translate:
    """sum and prod: integers in i64, half floats accumulated in f32."""

    def translate(
        cx: TorchContext,
        x: Value,
        dim: Dims = None,
        keepdim: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Value:
        out = cx.out_dtype
        wide = cx.cast(x, out.compute)
        axes = cx.axes(dim, x.type.rank)
        return cx.cast(cx.reduce(op, wide, axes, keepdim), out)

    return translate


def all_of(op: str) -> Translate:
    """The overload without dims: `sum.default(x, *, dtype)`."""
    over = total(op)
    return lambda cx, x, dtype=None: over(cx, x, None, False, dtype)


def mean(
    cx: TorchContext,
    x: Value,
    dim: Dims = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Value:
    out = cx.out_dtype
    x = cx.cast(x, out.compute)
    return cx.cast(cx.mean(x, cx.axes(dim, x.type.rank), keepdim), out)


def mean_all(cx: TorchContext, x: Value, dtype: torch.dtype | None = None) -> Value:
    return mean(cx, x, None, False, dtype)


def variance(
    cx: TorchContext, x: Value, axes: Sequence[int], correction: float, keepdim: bool
) -> tuple[Value, Value]:
    """(variance, mean) in the computing type; two passes, as torch's is stable."""
    x = cx.cast(x, x.dtype.compute)
    center = cx.mean(x, axes, keepdims=True)
    off = cx.sub(x, center)
    squares = cx.reduce("sum", cx.mul(off, off), axes, keepdim)
    count = cx.count(x, axes)
    if correction == int(correction):
        degrees: Any = maximum(count - int(correction), 0)
    else:
        degrees = cx.arith("maximum", cx.arith("sub", count, correction), 0.0)
    out = cx.arith("div", squares, degrees, x.dtype)
    if correction < 0 and not cx.proves(le(1, count)):
        nothing = cx.arith("eq", count, 0)  # of no elements there is no variance
        out = cx.select(nothing, cx.tensor(math.nan, x.dtype), out)
    if not keepdim:
        kept = [d for i, d in enumerate(x.shape) if i not in axes]
        center = cx.reshape(center, kept)
    return out, center


def var(
    cx: TorchContext,
    x: Value,
    dim: Any = None,
    unbiased: Any = True,
    keepdim: bool = False,
) -> Value:
    if isinstance(dim, bool):  # the overload (x, unbiased)
        dim, unbiased = None, dim
    axes = cx.axes(dim, x.type.rank)
    return variance(cx, x, axes, 1.0 if unbiased else 0.0, keepdim)[0]


def var_correction(
    cx: TorchContext,
    x: Value,
    dim: Dims = None,
    correction: float | None = None,
    keepdim: bool = False,
) -> Value:
    axes = cx.axes(dim, x.type.rank)
    return variance(cx, x, axes, 1.0 if correction is None else correction, keepdim)[0]


def _root(cx: TorchContext, x: Value) -> Value:
    """Of a sum of squares: its derivative at 0 is 0, as in torch."""
    return cx.unary("sqrt", cx.flat_at_zero(x))


def root_of(translate: Translate) -> Translate:
    return lambda cx, *args, **kw: _root(cx, translate(cx, *args, **kw))


def var_mean(
    cx: TorchContext,
    x: Value,
    dim: Dims = None,
    correction: float | None = None,
    keepdim: bool = False,
) -> list[Value]:
    axes = cx.axes(dim, x.type.rank)
    correction = 1.0 if correction is None else correction
    return list(variance(cx, x, axes, correction, keepdim))


def std_mean(
    cx: TorchContext,
    x: Value,
    dim: Any = None,
    correction: float | None = None,
    keepdim: bool = False,
) -> list[Value]:
    spread, center = var_mean(cx, x, dim, correction, keepdim)
    return [_root(cx, spread), center]


def var_mean_dim(
    cx: TorchContext, x: Value, dim: Dims, unbiased: bool = True, keepdim: bool = False
) -> list[Value]:
    return var_mean(cx, x, dim, 1.0 if unbiased else 0.0, keepdim)


def _want_elements(cx: TorchContext, x: Value, axes: Sequence[int], what: str) -> None:
    """For a reduction that has no answer for no elements."""
    for axis in axes:
        cx.require(le(1, x.shape[axis]), f"{what} of no elements at dim {axis}")


def extreme(op: str) -> Translate:
    """amax, amin, and max/min over everything."""

    def translate(
        cx: TorchContext, x: Value, dim: Dims = None, keepdim: bool = False
    ) -> Value:
        axes = cx.axes(dim, x.type.rank)
        _want_elements(cx, x, axes, op)
        if x.dtype is DType.BOOL:
            return cx.reduce("any" if op == "max" else "all", x, axes, keepdim)
        return cx.keep_sign(x, cx.reduce(op, x, axes, keepdim))

    return translate


def aminmax(
    cx: TorchContext, x: Value, dim: int | None = None, keepdim: bool = False
) -> list[Value]:
    return [extreme("min")(cx, x, dim, keepdim), extreme("max")(cx, x, dim, keepdim)]


def arg_extreme(op: str) -> Translate:
    def translate(
        cx: TorchContext, x: Value, dim: int | None = None, keepdim: bool = False
    ) -> Value:
        if x.dtype is DType.BOOL:
            x = cx.cast(x, DType.U8)
        rank = x.type.rank
        if dim is None or rank == 0:
            flat = cx.reshape(x, (x.type.numel,))
            out = cx.b.emit("argreduce", flat, op=op, axis=0, keepdims=False)
            out = cx.reshape(out, (1,) * rank) if keepdim else out
        else:
            axis = cx.axis(dim, rank)
            out = cx.b.emit("argreduce", x, op=op, axis=axis, keepdims=keepdim)
        cx.nonnegative.add(out)
        return out

    return translate


def extreme_with_index(op: str) -> Translate:
    """max.dim and min.dim: (values, indices)."""
    values, indices = extreme(op), arg_extreme(op)

    def translate(
        cx: TorchContext, x: Value, dim: int, keepdim: bool = False
    ) -> list[Value]:
        where = indices(cx, x, dim, keepdim)
        if x.type.rank == 0:
            return [x, where]
        if not cx.training:
            return [values(cx, x, dim, keepdim), where]
        # Of equals, the one at the index has the gradient.
        axis = cx.axis(dim, x.type.rank)
        kept = where if keepdim else indices(cx, x, dim, True)
        found = cx.b.emit("take_along", x, kept, axis=axis)
        return [cx.reshape(found, where.shape), where]

    return translate


def truth(op: str) -> Translate:
    def translate(
        cx: TorchContext, x: Value, dim: Dims = None, keepdim: bool = False
    ) -> Value:
        # No axes are none here, where other reductions take them for all.
        none = isinstance(dim, list | tuple) and not dim
        axes = () if none else cx.axes(dim, x.type.rank)
        return cx.reduce(op, cx.to_bool(x), axes, keepdim)

    return translate


def vector_norm(
    cx: TorchContext,
    x: Value,
    ord: float = 2,
    dim: Dims = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Value:
    out = cx.out_dtype
    x = cx.cast(x, out.compute)
    axes = cx.axes(dim, x.type.rank)
    size = cx.unary("abs", x)
    if ord < 0 or ord == math.inf:
        _want_elements(cx, x, axes, f"a norm of order {ord}")
    match float(ord):
        case 2.0:
            norm = _root(cx, cx.reduce("sum", cx.mul(x, x), axes, keepdim))
        case 1.0:
            norm = cx.reduce("sum", size, axes, keepdim)
        case math.inf:
            norm = cx.reduce("max", size, axes, keepdim)
        case other if other == -math.inf:
            norm = cx.reduce("min", size, axes, keepdim)
        case 0.0:
            there = cx.cast(cx.to_bool(x), x.dtype)
            norm = cx.reduce("sum", there, axes, keepdim)
        case power:
            size = cx.flat_at_zero(size) if power < 1 else size
            powers = cx.arith("pow", size, power)
            summed = cx.reduce("sum", powers, axes, keepdim)
            norm = cx.arith("pow", cx.flat_at_zero(summed), 1.0 / power)
    return cx.cast(norm, out)


def norm(
    cx: TorchContext,
    x: Value,
    p: float | None = 2,
    dim: Dims = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Value:
    return vector_norm(cx, x, 2 if p is None else p, dim, keepdim, dtype)


def weight_norm(cx: TorchContext, v: Value, g: Value, dim: int = 0) -> Value:
    """Rows of v along an axis, each as long as g says; -1: all of v is one row."""
    others = [axis for axis in range(v.type.rank) if axis != dim]
    return cx.mul(v, cx.div(g, vector_norm(cx, v, 2, others, True)))


def logsumexp(cx: TorchContext, x: Value, dim: Dims, keepdim: bool = False) -> Value:
    out = cx.out_dtype
    x = cx.cast(x, out.compute)
    axes = cx.axes(dim, x.type.rank)
    if not isinstance(dim, int) and not dim and axes and not keepdim:
        cx.unsupported("of no axes, and without keepdim: torch raises an error")
    peak = cx.reduce("max", x, axes, True)
    # An infinite peak would turn inf - inf into NaN; shift by 0 then.
    finite = cx.select(cx.unary("isinf", peak), cx.tensor(0.0, x.dtype), peak)
    summed = cx.reduce("sum", cx.unary("exp", cx.sub(x, finite)), axes, True)
    whole = cx.add(cx.unary("log", summed), finite)
    kept = [d for i, d in enumerate(x.shape) if i not in axes]
    return cx.cast(whole if keepdim else cx.reshape(whole, kept), out)


def softmax(op: str) -> Translate:
    def translate(cx: TorchContext, x: Value, dim: int, dtype: Any = None) -> Value:
        # `dtype` is the flag half_to_float in the overloads with underscores.
        x = cx.cast(x, cx.out_dtype)
        if x.type.rank == 0:
            value = 1.0 if op == "softmax" else 0.0
            return cx.full(value, (), x.dtype)
        return cx.b.emit(op, x, axis=cx.axis(dim, x.type.rank))

    return translate


def cumulate(op: str) -> Translate:
    def translate(
        cx: TorchContext, x: Value, dim: int, dtype: torch.dtype | None = None
    ) -> Value:
        wide = cx.cast(x, cx.out_dtype.compute)
        if x.type.rank == 0:
            return wide
        axis = cx.axis(dim, x.type.rank)
        return cx.keep_sign(wide, cx.b.emit("cumulate", wide, op=op, axis=axis))

    return translate


def diff(
    cx: TorchContext,
    x: Value,
    n: int = 1,
    dim: int = -1,
    prepend: Value | None = None,
    append: Value | None = None,
) -> Value:
    if n == 0:
        return x  # and nothing is put before or behind it
    axis = cx.axis(dim, x.type.rank)
    parts = [part for part in (prepend, x, append) if part is not None]
    out = cx.concat([cx.cast(part, cx.out_dtype) for part in parts], axis)
    for _ in range(n):
        size: Size = cx.simplify(maximum(out.shape[axis] - 1, 0))
        start = cx.simplify(out.shape[axis] - size)  # 1, or 0 when there is nothing
        later, sooner = cx.slice(out, axis, start, size), cx.slice(out, axis, 0, size)
        if out.dtype is DType.BOOL:
            out = cx.b.binary("logical_xor", later, sooner)
        else:
            out = cx.sub(later, sooner)
    return out


def count_nonzero(cx: TorchContext, x: Value, dim: Dims = None) -> Value:
    there = cx.cast(cx.to_bool(x), DType.I64)
    return cx.reduce("sum", there, cx.axes(dim, x.type.rank))


def cosine_similarity(
    cx: TorchContext, x: Value, y: Value, dim: int = 1, eps: float = 1e-8
) -> Value:
    dtype = cx.out_dtype
    wide = DType.F32 if dtype in HALF else dtype
    x, y = cx.cast(x, wide), cx.cast(y, wide)
    shape = cx.b.broadcast_shapes(x.shape, y.shape)
    x, y = cx.broadcast_to(x, shape), cx.broadcast_to(y, shape)
    axes = cx.axes(dim, x.type.rank)
    units = []
    for side in (x, y):
        length = _root(cx, cx.reduce("sum", cx.mul(side, side), axes, True))
        divisor = cx.with_slopes(cx.arith("maximum", length, eps), (length, 1.0))
        units.append(cx.div(side, divisor))
    return cx.reduce("sum", cx.mul(*units), axes)


REDUCE: dict[Any, Translate] = {
    aten.sum.default: all_of("sum"),
    aten.sum.dim_IntList: total("sum"),
    aten.prod.default: all_of("prod"),
    aten.prod.dim_int: total("prod"),
    aten.mean.default: mean_all,
    aten.mean.dim: mean,
    aten.var.default: var,
    aten.var.dim: var,
    aten.var.correction: var_correction,
    aten.std.default: root_of(var),
    aten.std.dim: root_of(var),
    aten.std.correction: root_of(var_correction),
    aten.var_mean.correction: var_mean,
    aten.std_mean.correction: std_mean,
    aten.var_mean.dim: var_mean_dim,
    aten.amax.default: extreme("max"),
    aten.amin.default: extreme("min"),
    aten.aminmax.default: aminmax,
    aten.max.default: extreme("max"),
    aten.min.default: extreme("min"),
    aten.max.dim: extreme_with_index("max"),
    aten.min.dim: extreme_with_index("min"),
    aten.argmax.default: arg_extreme("max"),
    aten.argmin.default: arg_extreme("min"),
    aten.any.default: truth("any"),
    aten.any.dim: truth("any"),
    aten.any.dims: truth("any"),
    aten.all.default: truth("all"),
    aten.all.dim: truth("all"),
    aten.all.dims: truth("all"),
    aten.count_nonzero.default: count_nonzero,
    aten.count_nonzero.dim_IntList: count_nonzero,
    aten.linalg_vector_norm.default: vector_norm,
    aten.norm.Scalar: norm,
    aten.norm.ScalarOpt_dim: norm,
    aten.norm.ScalarOpt_dim_dtype: norm,
    aten._weight_norm.default: weight_norm,
    aten.logsumexp.default: logsumexp,
    aten.softmax.int: softmax("softmax"),
    aten._softmax.default: softmax("softmax"),
    aten.log_softmax.int: softmax("log_softmax"),
    aten._log_softmax.default: softmax("log_softmax"),
    aten.cumsum.default: cumulate("sum"),
    aten.cumprod.default: cumulate("prod"),
    aten.diff.default: diff,
    aten.cosine_similarity.default: cosine_similarity,
}
