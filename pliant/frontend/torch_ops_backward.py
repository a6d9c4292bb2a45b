"""aten ops of training graphs: what forwards keep, and backwards.

A backward that torch decomposes into elementwise ops and sums needs no translation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pliant.frontend.torch_ops_attention import attention
from pliant.frontend.torch_ops_backward_conv import (
    convolution_backward,
    max_pool_backward,
    max_pool_kept,
)
from pliant.frontend.torch_ops_context import (
    Operand,
    Size,
    TorchContext,
    as_index,
    used,
)
from pliant.frontend.torch_ops_math import Translate
from pliant.frontend.torch_ops_nn import layer_norm, rms_norm
from pliant.frontend.torch_ops_pick import index_put as write_at
from pliant.frontend.torch_ops_pick import scatter_elements
from pliant.frontend.torch_ops_reduce import variance
from pliant.ir.graph import Value
from pliant.ir.types import DType
from pliant.sym import Expr, as_expr, le, product

aten = torch.ops.aten
MOST_WRITES = 16  # elements of a row that a scatter may write: each is one select


# --- norms that keep their statistics -------------------------------------------


def layer_norm_kept(
    cx: TorchContext,
    x: Value,
    normalized_shape: Sequence[Size],
    weight: Value | None,
    bias: Value | None,
    eps: float,
) -> list[Any]:
    """(out, mean, 1 / deviation)"""
    if not used(cx, 1) and not used(cx, 2):
        out = layer_norm(cx, x, normalized_shape, weight, bias, eps)
        return [out, None, None]
    rank = x.type.rank
    axes = tuple(range(rank - len(normalized_shape), rank))
    spread, mean = variance(cx, x, axes, 0.0, True)
    scale = cx.unary("rsqrt", cx.add(spread, eps))
    wide = cx.cast(x, x.dtype.compute)
    out = cx.mul(cx.sub(wide, mean), scale)
    out = out if weight is None else cx.mul(out, weight)
    out = out if bias is None else cx.add(out, bias)
    return [cx.cast(out, x.dtype), mean, scale]


def rms_norm_kept(
    cx: TorchContext,
    x: Value,
    normalized_shape: Sequence[Size],
    weight: Value | None,
    eps: float | None,
) -> list[Any]:
    """(out, 1 / root of the mean square)"""
    if not used(cx, 1):
        return [rms_norm(cx, x, normalized_shape, weight, eps), None]
    rank = x.type.rank
    axes = tuple(range(rank - len(normalized_shape), rank))
    wide = cx.cast(x, x.dtype.compute)
    if eps is None:
        eps = torch.finfo(cx.val[1].dtype).eps
    square = cx.mean(cx.mul(wide, wide), axes, keepdims=True)
    scale = cx.unary("rsqrt", cx.add(square, eps))
    out = cx.mul(wide, scale)
    out = out if weight is None else cx.mul(out, weight)
    return [cx.cast(out, x.dtype), scale]


# --- attention ------------------------------------------------------------------


def attention_kept(
    cx: TorchContext,
    q: Value,
    k: Value,
    v: Value,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    attn_mask: Value | None = None,
    scale: float | None = None,
) -> list[Any]:
    """(out, log of the sum of the exponentials of each row's scores)"""
    _no_dropout(cx, dropout_p)
    if not used(cx, 1):
        grouped = not cx.b.same(q.shape[-3], k.shape[-3])
        out = attention(cx, q, k, v, attn_mask, 0.0, is_causal, scale, grouped)
        return [out, None]
    # Of heads of no elements, torch's own kernel leaves the sums unwritten.
    cx.require(le(1, q.shape[-1]), "sums of attention need heads of elements")
    operands, attrs = _attended(q, k, v, attn_mask, is_causal, scale)
    return list(cx.b.emit_multi("attention_lse", *operands, **attrs))


def attention_backward(
    cx: TorchContext,
    grad: Value,
    q: Value,
    k: Value,
    v: Value,
    out: Value,
    lse: Value,
    dropout_p: float,
    is_causal: bool,
    attn_mask: Value | None = None,
    scale: float | None = None,
) -> list[Any]:
    """Gradients of q, k and v."""
    _no_dropout(cx, dropout_p)
    operands, attrs = _attended(q, k, v, attn_mask, is_causal, scale)
    given = (grad, out, cx.cast(lse, q.dtype.compute))
    return list(cx.b.emit_multi("attention_backward", *given, *operands, **attrs))


def _attended(
    q: Value,
    k: Value,
    v: Value,
    mask: Value | None,
    causal: bool,
    scale: float | None,
) -> tuple[tuple[Value, ...], dict[str, Any]]:
    operands = (q, k, v) if mask is None else (q, k, v, mask)
    factor = None if scale is None else float(scale)
    return operands, {
        "scale": factor,
        "causal": causal,
        "masked": mask is not None,
    }


def _no_dropout(cx: TorchContext, dropout_p: float) -> None:
    if dropout_p:
        cx.unsupported("attention with dropout inside")


# --- sums at computed places ----------------------------------------------------


def embedding_backward(
    cx: TorchContext,
    grad: Value,
    indices: Value,
    num_weights: Size,
    padding_idx: Size,
    scale_grad_by_freq: bool,
) -> Value:
    """The rows of `grad` added up by index."""
    if scale_grad_by_freq:
        cx.unsupported("embedding with scale_grad_by_freq")
    count, width = indices.type.numel, grad.shape[-1]
    places = cx.reshape(as_index(cx, indices), (count,))
    rows = cx.reshape(grad, (count, width))
    padding = cx.constant_int(padding_idx, "padding index")
    if padding >= 0:
        kept = cx.reshape(cx.arith("ne", places, padding), (count, 1))
        rows = cx.select(kept, rows, 0.0)
    return _sum_rows(cx, places, rows, as_expr(num_weights))


def _sum_rows(cx: TorchContext, places: Value, rows: Value, count: Expr) -> Value:
    wide = cx.cast(rows, rows.dtype.compute)
    out = cx.b.emit("scatter_add", places, wide, rows=count)
    return cx.cast(out, rows.dtype)


def index_put(
    cx: TorchContext,
    x: Value,
    indices: Sequence[Value | None],
    values: Value,
    accumulate: bool = False,
) -> Value:
    """Sums where indices say; without `accumulate`, as index_put of forwards."""
    plain = [i for i in indices if i is not None]
    if not accumulate or any(i.dtype in (DType.BOOL, DType.U8) for i in plain):
        if accumulate:
            cx.unsupported("adding up where a mask says")
        return write_at(cx, x, indices, values, accumulate)
    return _add_at(cx, x, indices, values, wraps=True)


def _add_at(
    cx: TorchContext,
    x: Value,
    indices: Sequence[Value | None],
    values: Value,
    *,
    wraps: bool,
) -> Value:
    """x[i, :, j] += values; with `wraps`, negative indices count from the end."""
    plain = [i for i in indices if i is not None]
    used_axes = [a for a, i in enumerate(indices) if i is not None]
    aligned = cx.aligned(*plain)
    shape = cx.b.broadcast_shapes(*(i.shape for i in aligned))
    rest = [a for a in range(x.type.rank) if a not in used_axes]
    beside = [x.shape[a] for a in rest]
    # The dims of the indices stand where the first is if they are adjacent.
    first = used_axes[0]
    together = used_axes == list(range(first, first + len(used_axes)))
    lead = first if together else 0
    full = (*beside[:lead], *shape, *beside[lead:])
    spread = cx.broadcast_to(cx.cast(values, x.dtype), full)
    rank = len(shape)
    order = [*range(lead, lead + rank), *range(lead), *range(lead + rank, len(full))]
    spread = cx.transpose(spread, order)  # (indices.., beside..)
    inside = [
        cx.in_range(index, x.shape[axis], axis, wraps=wraps)
        for axis, index in zip(used_axes, aligned, strict=True)
    ]
    place = cx.b.flat_place(inside, [x.shape[axis] for axis in used_axes])
    place = cx.broadcast_to(place, shape)
    count, width = product(shape), product(beside)
    rows = cx.reshape(spread, (count, width))
    sums = _sum_rows(cx, cx.reshape(place, (count,)), rows, cx.count(x, used_axes))
    front = cx.reshape(sums, (*(x.shape[a] for a in used_axes), *beside))
    back = [(used_axes + rest).index(i) for i in range(x.type.rank)]
    return cx.add(x, cx.transpose(front, back))


def scatter_add(
    cx: TorchContext, x: Value, dim: int, index: Value, src: Value
) -> Value:
    """x[.., index[.., j, ..], ..] += src[.., j, ..]"""
    if not x.type.rank:
        x, index, src = (cx.reshape(v, (v.type.numel,)) for v in (x, index, src))
        return cx.reshape(scatter_add(cx, x, 0, index, src), ())
    axis = cx.axis(dim, x.type.rank)
    shape = index.shape
    for i, (have, want) in enumerate(zip(src.shape, shape, strict=True)):
        if not cx.b.same(have, want):
            src = cx.slice(src, i, 0, want)
    for i, (have, want) in enumerate(zip(shape, x.shape, strict=True)):
        if i != axis:
            cx.require(le(have, want), "no more indices than rows")
    inside = cx.in_range(index, x.shape[axis], axis)
    places = [
        inside if i == axis else cx.iota(shape, i, DType.I64)
        for i in range(x.type.rank)
    ]
    flat = cx.reshape(cx.b.flat_place(places, x.shape), (index.type.numel,))
    rows = cx.reshape(src, (index.type.numel, 1))
    return cx.add(x, cx.reshape(_sum_rows(cx, flat, rows, x.type.numel), x.shape))


def index_add(
    cx: TorchContext, x: Value, dim: int, index: Value, source: Value, *, alpha: Any = 1
) -> Value:
    if not x.type.rank:
        x, index, source = (cx.reshape(v, (v.type.numel,)) for v in (x, index, source))
        return cx.reshape(index_add(cx, x, 0, index, source, alpha=alpha), ())
    axis = cx.axis(dim, x.type.rank)
    added = source if alpha == 1 else cx.mul(source, alpha)
    index = cx.reshape(index, (index.type.numel,))
    return _add_at(cx, x, [*[None] * axis, index], added, wraps=False)


def scatter(cx: TorchContext, x: Value, dim: int, index: Value, src: Operand) -> Value:
    """x[.., index[.., j, ..], ..] = src[.., j, ..]; of equal indices the last wins."""
    if not x.type.rank:
        x, index = (cx.reshape(v, (v.type.numel,)) for v in (x, index))
        if isinstance(src, Value):
            src = cx.reshape(src, (src.type.numel,))
        return cx.reshape(scatter(cx, x, 0, index, src), ())
    axis = cx.axis(dim, x.type.rank)
    if not index.shape[axis].is_const or index.shape[axis].value > MOST_WRITES:
        return scatter_elements(cx, x, axis, index, src)
    places = cx.in_range(index, x.shape[axis], axis)
    values = cx.tensor(src, x.dtype)
    if values.type.rank:
        for i, size in enumerate(index.shape):
            values = cx.slice(values, i, 0, size)
        values = _extended(cx, values, x.shape, axis, 0)
    places = _extended(cx, places, x.shape, axis, -1)
    along = cx.iota(x.shape, axis, DType.I64)
    for j in range(index.shape[axis].value):
        hit = cx.arith("eq", along, cx.slice(places, axis, j, 1))
        new = cx.slice(values, axis, j, 1) if values.type.rank else values
        x = cx.b.select(hit, cx.broadcast_to(new, x.shape), x)
    return x


def _extended(
    cx: TorchContext, part: Value, shape: Sequence[Expr], axis: int, fill: float
) -> Value:
    """`part` filled up to `shape`, but along one axis."""
    high = [as_expr(0)] * len(shape)
    for i, (have, want) in enumerate(zip(part.shape, shape, strict=True)):
        if i != axis and not cx.b.same(have, want):
            cx.require(le(have, want), "no more indices than rows")
            high[i] = cx.simplify(want - have)
    if all(width == 0 for width in high):
        return part
    low = (as_expr(0),) * len(shape)
    out = cx.b.emit("pad", part, low=low, high=tuple(high), value=fill)
    # have + (want - have) is want
    return cx.reshape(
        out, [d if i != axis else part.shape[i] for i, d in enumerate(shape)]
    )


# --- random numbers -------------------------------------------------------------


def uniform(cx: TorchContext, shape: Sequence[Size], *_: Any, **__: Any) -> Value:
    """In [0, 1)."""
    if not cx.random:
        cx.unsupported("random numbers are not supported")
    dims = tuple(as_expr(size) for size in shape)
    out = cx.b.emit("random", cx.seed(), number=cx.next_number(), shape=dims)
    return cx.cast(out, cx.out_dtype)


def uniform_like(cx: TorchContext, x: Value, *_: Any, **__: Any) -> Value:
    return uniform(cx, x.shape)


def bernoulli(cx: TorchContext, x: Value, p: Operand | None = None, **_: Any) -> Value:
    """1 with probability p, or that of each element."""
    if not cx.random:
        cx.unsupported("random numbers are not supported")
    chance = cx.b.emit("random", cx.seed(), number=cx.next_number(), shape=x.shape)
    return cx.cast(cx.arith("lt", chance, x if p is None else p), x.dtype)


def native_dropout(
    cx: TorchContext, x: Value, p: float, train: bool | None
) -> list[Any]:
    """(out, which elements were kept)"""
    if train is False or not p:
        return [x, cx.full(True, x.shape, DType.BOOL)]
    if not cx.random:
        cx.unsupported("dropout in training is random: call eval()")
    chance = cx.b.emit("random", cx.seed(), number=cx.next_number(), shape=x.shape)
    kept = cx.arith("ge", chance, float(p))
    scaled = cx.mul(x, 0.0 if p == 1 else 1 / (1 - p))
    return [cx.select(kept, scaled, 0.0), kept]


def convert_element_type(cx: TorchContext, x: Value, dtype: torch.dtype) -> Value:
    return cx.cast(x, cx.dtype(dtype))


# --- the table ------------------------------------------------------------------

BACKWARD: dict[Any, Translate] = {
    torch.ops.prims.convert_element_type.default: convert_element_type,
    aten.native_layer_norm.default: layer_norm_kept,
    aten._fused_rms_norm.default: rms_norm_kept,
    aten._scaled_dot_product_flash_attention_for_cpu.default: attention_kept,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (
        attention_backward
    ),
    aten.embedding_dense_backward.default: embedding_backward,
    aten.rand.default: uniform,
    aten.rand_like.default: uniform_like,
    aten.bernoulli.default: bernoulli,
    aten.bernoulli.p: bernoulli,
    aten.native_dropout.default: native_dropout,
    aten.index_put.default: index_put,
    aten._unsafe_index_put.default: index_put,
    aten.index_add.default: index_add,
    aten.scatter_add.default: scatter_add,
    aten.scatter.value: scatter,
    aten.scatter.src: scatter,
    aten.convolution_backward.default: convolution_backward,
    aten.max_pool2d_with_indices.default: max_pool_kept,
    aten.max_pool2d_with_indices_backward.default: max_pool_backward,
}
