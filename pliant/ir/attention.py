"""Attention, its log-sum-exp and its gradients, written in primitive ops.

Used by passes that have no kernel for it, by the gradient of a training step, and by
front ends for attention with a part that the op does not have (dropout).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from pliant.ir.build import Builder
from pliant.ir.graph import Op, Value
from pliant.ir.ops import first_row
from pliant.ir.types import DType
from pliant.sym import Expr, floordiv


def _up(b: Builder, x: Value) -> Value:
    return b.cast(x, x.dtype.compute)


def _scalar(b: Builder, like: Value, number: float) -> Value:
    return b.scalar(number, like.dtype)


def _repeat_heads(b: Builder, x: Value, heads: Expr) -> Value:
    """(.., Hk, S, D) -> (.., Hq, S, D), each head repeated in place."""
    own = x.shape[-3]
    if b.same(own, heads):
        return x
    lead, tail = x.shape[:-3], x.shape[-2:]
    split = b.reshape(x, (*lead, own, 1, *tail))
    wide = b.broadcast_to(split, (*lead, own, floordiv(heads, own), *tail))
    return b.reshape(wide, (*lead, heads, *tail))


def _masked_scores(b: Builder, op: Op, masks: Sequence[Value], scores: Value) -> Value:
    lowest = _scalar(b, scores, -math.inf)
    for mask in masks:
        if mask.dtype is DType.BOOL:
            scores = b.select(mask, scores, lowest)
        else:
            scores = b.binary("add", scores, b.cast(mask, scores.dtype))
    if op.bool_attr("causal"):
        grid = scores.shape[-2:]
        rows, first = b.iota(grid, 0), first_row(op)
        if first != 0:
            rows = b.binary("add", rows, b.dim_value(first, rows.dtype))
        seen = b.emit("le", b.iota(grid, 1), rows)
        scores = b.select(seen, scores, lowest)
    return scores


def _score_factor(b: Builder, op: Op, q: Value) -> Value:
    scale, size = op.attr("scale"), q.shape[-1]
    if isinstance(scale, float):
        return b.scalar(scale, q.dtype)
    if size.is_const and size != 0:
        return b.scalar(1 / math.sqrt(size.value), q.dtype)
    return b.unary("rsqrt", b.dim_value(size, q.dtype))


def _scores(b: Builder, op: Op, q: Value, k: Value, masks: Sequence[Value]) -> Value:
    """q @ k.T * scale + mask, (.., Hq, Sq, Sk)."""
    scores = b.matmul(q, b.swap(k, -1, -2))
    scores = b.binary("mul", scores, _score_factor(b, op, q))
    return _masked_scores(b, op, masks, scores)


def spell_out_attention(b: Builder, op: Op) -> Value:
    return spell_out_attention_lse(b, op)[0]


def spell_out_trained_attention(
    b: Builder, op: Op, drop: Callable[[Value], Value] = lambda weights: weights
) -> Value:
    """The form that is differentiated; `drop` is applied to the result of softmax."""
    return spell_out_attention_lse(b, op, drop, trained=True)[0]


def spell_out_attention_lse(
    b: Builder,
    op: Op,
    drop: Callable[[Value], Value] = lambda weights: weights,
    trained: bool = False,
) -> tuple[Value, Value]:
    """softmax(q @ k.T * scale + mask) @ v, and the logarithm of softmax's divisor.

    A row in which everything is masked gives 0, as torch's CPU kernels do (2.13, with
    boolean and with -inf masks): its maximum is taken as 0 and its sum as 1. With
    `trained`, the maximum gets no gradient, because its gradients cancel.
    """
    q, k, v = (_up(b, x) for x in op.operands[:3])
    k, v = (_repeat_heads(b, x, q.shape[-3]) for x in (k, v))
    scores = _scores(b, op, q, k, op.operands[3:])
    top = b.reduce("max", scores, [-1], keepdims=True)
    empty = b.binary("eq", top, _scalar(b, top, -math.inf))
    top = b.select(empty, _scalar(b, top, 0.0), top)
    top = b.emit("stop_gradient", top) if trained else top
    e = b.unary("exp", b.binary("sub", scores, top))
    total = b.reduce("sum", e, [-1], keepdims=True)
    lse = b.squeeze(b.binary("add", top, b.unary("log", total)), -1)
    total = b.select(empty, _scalar(b, total, 1.0), total)
    weights = drop(b.binary("div", e, total))
    out = b.cast(b.matmul(weights, v), op.results[0].dtype)
    return (b.swap(out, -2, -3) if op.bool_attr("swapped") else out), lse


def spell_out_attention_backward(b: Builder, op: Op) -> tuple[Value, ...]:
    grad, out, lse, q, k, v = (_up(b, x) for x in op.operands[:6])
    keys, values = (_repeat_heads(b, x, q.shape[-3]) for x in (k, v))
    scores = _scores(b, op, q, keys, op.operands[6:])
    empty = b.binary("eq", lse, _scalar(b, lse, -math.inf))
    shift = b.unsqueeze(b.select(empty, _scalar(b, lse, 0.0), lse), -1)
    weights = b.unary("exp", b.binary("sub", scores, shift))
    across = b.matmul(grad, b.swap(values, -1, -2))
    below = b.reduce("sum", b.binary("mul", grad, out), [-1], keepdims=True)
    change = b.binary("mul", weights, b.binary("sub", across, below))
    change = b.binary("mul", change, _score_factor(b, op, q))
    grads = (
        b.matmul(change, keys),
        _sum_heads(b, b.matmul(b.swap(change, -1, -2), q), k),
        _sum_heads(b, b.matmul(b.swap(weights, -1, -2), grad), v),
    )
    made = (b.cast(x, r.dtype) for x, r in zip(grads, op.results, strict=True))
    return tuple(b.swap(x, -2, -3) if op.bool_attr("swapped") else x for x in made)


def _sum_heads(b: Builder, x: Value, like: Value) -> Value:
    """(.., Hq, S, D) -> (.., Hk, S, D), the heads of each group added up."""
    own, heads = like.shape[-3], x.shape[-3]
    if b.same(own, heads):
        return x
    lead, tail = x.shape[:-3], x.shape[-2:]
    split = b.reshape(x, (*lead, own, floordiv(heads, own), *tail))
    return b.reduce("sum", split, [-3], keepdims=False)
