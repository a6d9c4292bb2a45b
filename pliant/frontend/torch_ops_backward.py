"""aten ops of training graphs: what forwards keep, and backwards.

`decompositions` are torch's own for every op that has no translation here; a backward
that decomposes into elementwise ops and sums needs none.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, get_decompositions

from pliant.frontend.torch_ops_context import Context, Operand, Size, as_index
from pliant.frontend.torch_ops_math import Translate
from pliant.frontend.torch_ops_nn import attention, layer_norm, rms_norm
from pliant.frontend.torch_ops_reduce import variance
from pliant.ir.graph import Value
from pliant.ir.types import DType
from pliant.sym import as_expr

aten = torch.ops.aten


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """torch's decompositions of the ops that have no translation."""
    from pliant.frontend.torch_ops import TABLE

    more = [
        aten.native_group_norm.default,
        aten.native_batch_norm.default,
        aten._native_batch_norm_legit.default,
        aten._native_batch_norm_legit.no_stats,
        aten._native_batch_norm_legit_functional.default,
    ]
    every = {**core_aten_decompositions(), **get_decompositions(more)}
    return {op: rule for op, rule in every.items() if op not in TABLE}


def used(cx: Context, which: int) -> bool:
    """Whether anything reads this result of the op."""
    assert cx.node is not None
    return any(user.args[1] == which and user.users for user in cx.node.users)


# --- norms that keep their statistics -------------------------------------------


def layer_norm_kept(
    cx: Context,
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
    cx: Context,
    x: Value,
    normalized_shape: Sequence[Size],
    weight: Value | None,
    eps: float | None,
) -> list[Any]:
    """(out, 1 / root of the mean square)"""
    if not used(cx, 1):
        cx_val = cx.val[0].dtype
        eps = torch.finfo(cx_val).eps if eps is None else eps
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


def _scores(
    cx: Context,
    q: Value,
    k: Value,
    mask: Value | None,
    causal: bool,
    scale: float,
) -> Value:
    """Scaled and masked scores, in the computing type."""
    wide = q.dtype.compute
    product = cx.b.matmul(cx.cast(q, wide), _turned(cx, cx.cast(k, wide)))
    scores = cx.mul(product, scale)
    if mask is not None:
        scores = cx.add(scores, cx.cast(mask, wide))
    if not causal:
        return scores
    rows, columns = scores.shape[-2:]
    row = cx.iota((rows, columns), 0, DType.I64)
    column = cx.iota((rows, columns), 1, DType.I64)
    seen = cx.broadcast_to(cx.arith("le", column, row), scores.shape)
    return cx.select(seen, scores, -math.inf)


def _turned(cx: Context, x: Value) -> Value:
    rank = x.type.rank
    return cx.transpose(x, [*range(rank - 2), rank - 1, rank - 2])


def attention_kept(
    cx: Context,
    q: Value,
    k: Value,
    v: Value,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    attn_mask: Value | None = None,
    scale: float | None = None,
) -> list[Any]:
    """(out, log of the sum of the exponentials of each row's scores)"""
    if dropout_p:
        cx.unsupported("attention with dropout inside")
    out = attention(cx, q, k, v, attn_mask, 0.0, is_causal, scale)
    if not used(cx, 1):
        return [out, None]
    factor = _factor(q, scale)
    scores = _scores(cx, q, k, attn_mask, is_causal, factor)
    last = scores.type.rank - 1
    top = cx.reduce("max", scores, (last,), True)
    finite = cx.select(cx.arith("eq", top, -math.inf), 0.0, top)
    total = cx.reduce("sum", cx.unary("exp", cx.sub(scores, finite)), (last,), True)
    lse = cx.add(cx.unary("log", total), finite)
    return [out, cx.reshape(lse, lse.shape[:-1])]


def _factor(q: Value, scale: float | None) -> float:
    width = q.shape[-1]
    return 1 / math.sqrt(width.value) if scale is None else float(scale)


def attention_backward(
    cx: Context,
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
    if dropout_p:
        cx.unsupported("attention with dropout inside")
    wide, factor = q.dtype.compute, _factor(q, scale)
    scores = _scores(cx, q, k, attn_mask, is_causal, factor)
    kept = cx.reshape(lse, (*lse.shape, 1))
    hidden = cx.arith("eq", kept, -math.inf)
    kept = cx.select(hidden, 0.0, kept)
    weights = cx.unary("exp", cx.sub(scores, kept))
    up, given = cx.cast(grad, wide), cx.cast(out, wide)
    last = up.type.rank - 1
    slope = cx.b.matmul(up, _turned(cx, cx.cast(v, wide)))
    lost = cx.reduce("sum", cx.mul(up, given), (last,), True)
    change = cx.mul(cx.mul(weights, cx.sub(slope, lost)), factor)
    parts = (
        cx.b.matmul(change, cx.cast(k, wide)),
        cx.b.matmul(_turned(cx, change), cx.cast(q, wide)),
        cx.b.matmul(_turned(cx, weights), up),
    )
    return [cx.cast(part, q.dtype) for part in parts]


# --- picked elements ------------------------------------------------------------


def embedding_backward(
    cx: Context,
    grad: Value,
    indices: Value,
    num_weights: Size,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> Value:
    """The rows of `grad` added up by index."""
    if scale_grad_by_freq:
        cx.unsupported("embedding with scale_grad_by_freq")
    count, width = indices.type.numel, grad.shape[-1]
    flat = cx.reshape(as_index(cx, indices), (1, count))
    row = cx.iota((num_weights, count), 0, DType.I64)
    hit = cx.b.binary("eq", row, cx.broadcast_to(flat, (num_weights, count)))
    if isinstance(padding_idx, int) and padding_idx >= 0:
        hit = cx.b.binary("logical_and", hit, cx.arith("ne", row, padding_idx))
    wide = grad.dtype.compute
    rows = cx.cast(cx.reshape(grad, (count, width)), wide)
    return cx.cast(cx.b.matmul(cx.cast(hit, wide), rows), grad.dtype)


def scatter(cx: Context, x: Value, dim: int, index: Value, src: Operand) -> Value:
    """Only one element for each row: x[.., index[.., 0, ..], ..] = src."""
    if not x.type.rank:
        return cx.broadcast_to(cx.tensor(src, x.dtype), ())
    axis = cx.axis(dim, x.type.rank)
    fits = index.shape[axis] == 1 and all(
        i == axis or cx.b.same(a, b)
        for i, (a, b) in enumerate(zip(x.shape, index.shape, strict=True))
    )
    if not fits:
        cx.unsupported("writing several elements of a row at computed places")
    place = cx.wrap_index(as_index(cx, index), x.shape[axis])
    hit = cx.arith("eq", cx.iota(x.shape, axis, DType.I64), place)
    return cx.b.select(hit, cx.broadcast_to(cx.tensor(src, x.dtype), x.shape), x)


def convert_element_type(cx: Context, x: Value, dtype: torch.dtype) -> Value:
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
    aten.scatter.value: scatter,
    aten.scatter.src: scatter,
}
_ = as_expr
