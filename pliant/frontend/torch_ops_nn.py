"""aten ops of neural networks: products, convolutions, pools."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from pliant.frontend.torch_ops_attention import attention
from pliant.frontend.torch_ops_context import TorchContext, as_index
from pliant.frontend.torch_ops_math import Translate, scaled
from pliant.ir.graph import Value
from pliant.ir.types import DType
from pliant.sym import (
    Expr,
    as_expr,
    ceildiv,
    eq,
    floordiv,
    le,
    minimum,
    mod,
    product,
)

aten = torch.ops.aten


# --- products -------------------------------------------------------------------


def matmul(cx: TorchContext, x: Value, y: Value) -> Value:
    if x.type.rank > 2 or y.type.rank > 2:
        x, y = cx.unit_dims(x), cx.unit_dims(y)
    return cx.b.matmul(x, y)


def int_matmul(cx: TorchContext, x: Value, y: Value) -> Value:
    """Products of int8, summed up in int32."""
    return cx.b.emit("matmul", x, y)


def dot(cx: TorchContext, x: Value, y: Value) -> Value:
    return cx.b.matmul(x, y)


def inner(cx: TorchContext, x: Value, y: Value) -> Value:
    scalar = not x.type.rank or not y.type.rank
    return cx.mul(x, y) if scalar else linear(cx, x, y)


def outer(cx: TorchContext, x: Value, y: Value) -> Value:
    return cx.mul(cx.reshape(x, (x.shape[0], 1)), cx.reshape(y, (1, y.shape[0])))


def plus_product(
    cx: TorchContext, x: Value, a: Value, b: Value, beta: Any = 1, alpha: Any = 1
) -> Value:
    """addmm, baddbmm, addmv: beta*x + alpha*(a @ b); x is ignored if beta is 0."""
    out = scaled(cx, cx.b.matmul(a, b), alpha)
    assert isinstance(out, Value)
    if beta == 0:
        return out
    if out.type.rank == 1 and not x.type.rank:  # of no rows, eager gives the scalar
        cx.require(le(as_expr(1), out.shape[0]), "addmv of a scalar needs rows")
    return cx.add(out, scaled(cx, x, beta))


def linear(
    cx: TorchContext, x: Value, weight: Value, bias: Value | None = None
) -> Value:
    if weight.type.rank == 1:  # one output feature, and no dim for it
        out = cx.b.matmul(x, weight)
        return out if bias is None else cx.add(out, bias)
    if bias is not None and bias.type.rank != 1:
        return cx.add(cx.b.emit("linear", x, weight), bias)
    return cx.b.emit("linear", x, weight, *([] if bias is None else [bias]))


def einsum(
    cx: TorchContext, equation: str, tensors: Sequence[Value], **_: Any
) -> Value:
    tensors = [cx.unit_dims(t) for t in tensors]
    return cx.b.emit("einsum", *tensors, equation=equation.replace(" ", ""))


# --- convolutions ---------------------------------------------------------------


def convolve(
    cx: TorchContext,
    x: Value,
    weight: Value,
    bias: Value | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Value:
    rank = weight.type.rank - 2
    strides, spread = (
        cx.ints(stride, rank, "stride"),
        cx.ints(dilation, rank, "dilation"),
    )
    if isinstance(padding, str):
        low, high = _named_padding(cx, weight, spread, padding)
    else:
        low = high = cx.ints(padding, rank, "padding")
    single = x.type.rank == rank + 1  # no batch dim
    x = cx.reshape(x, (1, *x.shape)) if single else x
    _want_places(cx, x)
    out = cx.b.emit(
        "conv",
        x,
        weight,
        stride=tuple(strides),
        low=tuple(low),
        high=tuple(high),
        dilation=tuple(spread),
        groups=groups,
    )
    out = with_bias(cx, out, bias)
    return cx.reshape(out, out.shape[1:]) if single else out


def _want_places(cx: TorchContext, x: Value) -> None:
    """torch takes an input without elements only if its batch dim is 0."""
    for size in x.shape[2:]:
        cx.require(le(minimum(x.shape[0], 1), size), "a convolution needs elements")


def _named_padding(
    cx: TorchContext, weight: Value, dilation: Sequence[int], name: str
) -> tuple[list[int], list[int]]:
    if name == "valid":
        return [0] * len(dilation), [0] * len(dilation)
    kernel = [cx.constant_int(k, "kernel size") for k in weight.shape[2:]]
    total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    return [t // 2 for t in total], [t - t // 2 for t in total]


def with_bias(cx: TorchContext, out: Value, bias: Value | None) -> Value:
    if bias is None:
        return out
    ones = (1,) * (out.type.rank - 2)
    return cx.add(out, cx.reshape(bias, (bias.shape[0], *ones)))


def convolve_transposed(
    cx: TorchContext,
    x: Value,
    weight: Value,
    bias: Value | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Value:
    rank = weight.type.rank - 2
    single = x.type.rank == rank + 1
    x = cx.reshape(x, (1, *x.shape)) if single else x
    _want_places(cx, x)
    # Its kernel is built from them.
    what = "a size of a transposed convolution's weight"
    weight = cx.reshape(weight, [cx.constant_int(size, what) for size in weight.shape])
    channels = weight.shape[0]
    cx.b.require_equal(x.shape[1], channels, "a convolution's channels")
    x = cx.reshape(x, (x.shape[0], channels, *x.shape[2:]))
    pads = tuple(cx.ints(padding, rank, "padding"))
    out = cx.b.emit(
        "conv_transpose",
        x,
        weight,
        stride=tuple(cx.ints(stride, rank, "stride")),
        low=pads,
        high=pads,
        dilation=tuple(cx.ints(dilation, rank, "dilation")),
        groups=groups,
        extra=tuple(cx.ints(output_padding, rank, "output padding")),
    )
    out = with_bias(cx, out, bias)
    return cx.reshape(out, out.shape[1:]) if single else out


def convolution(
    cx: TorchContext,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Value:
    groups = cx.constant_int(groups, "groups")
    if transposed:
        return convolve_transposed(
            cx, x, weight, bias, stride, padding, output_padding, groups, dilation
        )
    return convolve(cx, x, weight, bias, stride, padding, dilation, groups)


def bilinear(
    cx: TorchContext, x: Value, y: Value, weight: Value, bias: Value | None = None
) -> Value:
    """x, y -> x W[o] y for each of the weight's matrices."""
    lead = x.shape[:-1]
    rows = [cx.reshape(v, (product(lead), v.shape[-1])) for v in (x, y)]
    out = cx.b.emit("einsum", rows[0], weight, rows[1], equation="bi,oij,bj->bo")
    out = out if bias is None else cx.add(out, bias)
    return cx.reshape(out, (*lead, weight.shape[0]))


def embedding_renorm(
    cx: TorchContext, weight: Value, indices: Value, max_norm: float, norm_type: float
) -> Value:
    """Rows that are looked up and longer than max_norm, scaled to that length."""
    rows = weight.shape[0]
    places = cx.reshape(as_index(cx, indices), (indices.type.numel,))
    ones = cx.full(1.0, (indices.type.numel, 1), DType.F32)
    hits = cx.b.emit("scatter", places, ones, op="sum", rows=rows)
    wide = cx.unary("abs", cx.cast(weight, weight.dtype.compute))
    if norm_type == math.inf:
        norm = cx.reduce("max", wide, (1,), keepdims=True)
    else:
        total = cx.reduce("sum", cx.arith("pow", wide, norm_type), (1,), keepdims=True)
        norm = cx.arith("pow", total, 1 / norm_type)
    long = cx.b.binary(
        "logical_and", cx.arith("gt", hits, 0.0), cx.arith("gt", norm, max_norm)
    )
    scale = cx.select(long, cx.div(max_norm, cx.add(norm, 1e-7)), 1.0)
    return cx.cast(cx.mul(weight, scale), weight.dtype)


# --- pools ----------------------------------------------------------------------


def _pool(
    cx: TorchContext,
    op: str,
    x: Value,
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    include_pad: bool,
) -> Value:
    for size in x.shape[x.type.rank - len(window) - 1 :]:  # as torch demands
        cx.require(le(1, size), "a pool needs elements")
    # Rounding up reads up to stride - 1 more; windows that start behind the input
    # and its padding are dropped again.
    extra = [s - 1 if ceil_mode else 0 for s in stride]
    out = cx.b.emit(
        "pool",
        x,
        op=op,
        window=tuple(window),
        stride=tuple(stride),
        low=tuple(padding),
        high=tuple(p + e for p, e in zip(padding, extra, strict=True)),
        dilation=tuple(dilation),
        include_pad=include_pad,
    )
    if ceil_mode:
        lead = x.type.rank - len(window)
        for i, (step, pad) in enumerate(zip(stride, padding, strict=True), lead):
            kept = minimum(out.shape[i], ceildiv(x.shape[i] + pad, step))
            out = cx.slice(out, i, 0, kept)
    return out


def max_pool(rank: int) -> Translate:
    def translate(
        cx: TorchContext,
        x: Value,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> Value:
        window = cx.ints(kernel_size, rank, "kernel size")
        steps = cx.ints(stride, rank, "stride") if _given(stride) else window
        pads = cx.ints(padding, rank, "padding")
        spread = cx.ints(dilation, rank, "dilation")
        return _pool(cx, "max", x, window, steps, pads, spread, ceil_mode, True)

    return translate


def _given(stride: Any) -> bool:
    return isinstance(stride, int | Expr) or bool(stride)


def avg_pool(rank: int) -> Translate:
    def translate(
        cx: TorchContext,
        x: Value,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Value:
        window = cx.ints(kernel_size, rank, "kernel size")
        steps = cx.ints(stride, rank, "stride") if _given(stride) else window
        pads = cx.ints(padding, rank, "padding")
        ones, size = [1] * rank, math.prod(window)
        counts = ceil_mode and count_include_pad and any(pads)
        include = count_include_pad and not ceil_mode
        include = include or bool(divisor_override) or counts
        out = _pool(cx, "mean", x, window, steps, pads, ones, ceil_mode, include)
        if divisor_override:
            return cx.mul(out, size / divisor_override)
        if not counts:
            return out
        wide = cx.mul(cx.cast(out, out.dtype.compute), float(size))
        return cx.cast(_by_reach(cx, wide, x, window, steps, pads), x.dtype)

    return translate


def _by_reach(
    cx: TorchContext,
    sums: Value,
    x: Value,
    window: Sequence[int],
    steps: Sequence[int],
    pads: Sequence[int],
) -> Value:
    """Sums of windows over how much of each lies on the input and its padding.

    The last window of a pool that rounds up may reach further.
    """
    lead = x.type.rank - len(window)
    for k, (size, step, pad) in enumerate(zip(window, steps, pads, strict=True), lead):
        start = cx.sub(cx.mul(cx.b.iota((sums.shape[k],)), step), pad)
        end = cx.arith("minimum", cx.add(start, size), x.shape[k] + pad)
        count = cx.cast(cx.sub(end, start), sums.dtype)
        sums = cx.div(sums, cx.b.broadcast(count, sums.shape, (k,)))
    return sums


def adaptive_pool(op: str, rank: int, mean: bool = True) -> Translate:
    """Windows of a product grid: one axis after the other.

    torch takes a mean instead where one window has all, also of nothing (`mean`).
    """

    def translate(cx: TorchContext, x: Value, output_size: Any) -> Value:
        sizes = [output_size] if isinstance(output_size, int | Expr) else output_size
        sizes = list(sizes) * rank if len(sizes) == 1 else sizes
        lead = x.type.rank - rank
        whole = op == "mean" and all(s == 1 for s in sizes)
        for axis in () if whole and mean else x.shape[lead:]:
            cx.require(le(as_expr(1), axis), "an adaptive pool needs elements")
        if whole:
            return cx.mean(x, range(lead, x.type.rank), keepdims=True)
        wide = cx.cast(x, x.dtype.compute) if op == "mean" else x
        for i, size in enumerate(sizes, lead):
            wide = _adapt_axis(cx, op, wide, i, cx.simplify(size))
        return cx.cast(wide, x.dtype)

    return translate


def _adapt_axis(cx: TorchContext, op: str, x: Value, axis: int, out: Expr) -> Value:
    size = x.shape[axis]
    if out == size:
        return x
    before, after = x.shape[:axis], x.shape[axis + 1 :]

    def shrink(grid: Value) -> Value:  # (.., out, window, ..)
        if op == "mean":
            return cx.mean(grid, (axis + 1,))
        return cx.reduce(op, grid, (axis + 1,))

    if cx.proves(eq(mod(size, out), 0)):
        grid = (*before, out, cx.simplify(floordiv(size, out)), *after)
        return shrink(cx.reshape(x, grid))
    # Window i covers floor(i*size/out) .. ceil((i+1)*size/out): read the widest
    # window everywhere, then mask what is behind the end.
    widest = cx.simplify(ceildiv(size, out) + 1)
    i = cx.iota((out, 1), 0, DType.I64)
    first = cx.arith("floordiv", cx.mul(i, size), out)
    last = cx.arith("floordiv", cx.add(cx.mul(i, size), size + out - 1), out)
    place = cx.add(first, cx.iota((1, widest), 1, DType.I64))
    inside = cx.arith("lt", place, last)
    safe = cx.arith("maximum", cx.arith("minimum", place, size - 1), 0)
    picked = cx.b.emit("index", cx.move_axis(x, axis, 0), safe)  # (out, widest, ..)
    order = [*range(2, 2 + axis), 0, 1, *range(2 + axis, picked.type.rank)]
    picked = cx.transpose(picked, order)
    column = (1,) * len(after)
    mask = cx.reshape(inside, (out, widest, *column))
    fill = 0.0 if op == "mean" else -math.inf
    kept = cx.select(mask, picked, cx.tensor(fill, x.dtype))
    if op == "max":
        return cx.reduce("max", kept, (axis + 1,))
    counts = cx.cast(cx.reshape(cx.sub(last, first), (out, *column)), x.dtype)
    return cx.div(cx.reduce("sum", kept, (axis + 1,)), counts)


NN: dict[Any, Translate] = {
    aten.matmul.default: matmul,
    aten.mm.default: matmul,
    aten.bmm.default: matmul,
    aten._int_mm.default: int_matmul,
    aten.mv.default: matmul,
    aten.dot.default: dot,
    aten.vdot.default: dot,
    aten.inner.default: inner,
    aten.outer.default: outer,
    aten.ger.default: outer,
    aten.addmm.default: plus_product,
    aten.baddbmm.default: plus_product,
    aten.addmv.default: plus_product,
    aten.linear.default: linear,
    aten.einsum.default: einsum,
    aten.bilinear.default: bilinear,
    aten.embedding_renorm.default: embedding_renorm,
    aten.conv1d.default: convolve,
    aten.conv1d.padding: convolve,
    aten.conv2d.default: convolve,
    aten.conv2d.padding: convolve,
    aten.conv3d.default: convolve,
    aten.conv3d.padding: convolve,
    aten.convolution.default: convolution,
    aten.conv_transpose1d.default: convolve_transposed,
    aten.conv_transpose2d.input: convolve_transposed,
    aten.conv_transpose3d.input: convolve_transposed,
    aten.max_pool1d.default: max_pool(1),
    aten.max_pool2d.default: max_pool(2),
    aten.max_pool3d.default: max_pool(3),
    aten.avg_pool1d.default: avg_pool(1),
    aten.avg_pool2d.default: avg_pool(2),
    aten.avg_pool3d.default: avg_pool(3),
    aten.adaptive_avg_pool1d.default: adaptive_pool("mean", 1),
    aten.adaptive_avg_pool2d.default: adaptive_pool("mean", 2),
    aten._adaptive_avg_pool2d.default: adaptive_pool("mean", 2, mean=False),
    aten.adaptive_avg_pool3d.default: adaptive_pool("mean", 3),
    aten.scaled_dot_product_attention.default: attention,
}
