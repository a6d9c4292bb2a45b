"""What attention and its gradients mean, in NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from pliant.ir.graph import Op
from pliant.ir.interp_memory import Array
from pliant.ir.interp_ops import extreme

# What happens to the scaled scores before softmax.
ScoreOf = Callable[[Array], Array]


def masked(scores: Array, mask: Array) -> Array:
    if mask.dtype == np.bool_:
        return np.where(mask, scores, -np.inf).astype(scores.dtype)
    return scores + mask


def causal(scores: Array, first: int) -> Array:
    rows, columns = np.ogrid[: scores.shape[-2], : scores.shape[-1]]
    return np.where(columns <= first + rows, scores, -np.inf).astype(scores.dtype)


def _scale(op: Op, q: Array) -> Array:
    given = op.attr("scale")
    scale = 1 / math.sqrt(q.shape[-1]) if given is None else op.float_attr("scale")
    return np.asarray(scale, q.dtype)


def _repeated(q: Array, x: Array) -> Array:
    """Keys or values once for every query head."""
    shared = q.shape[-3] // x.shape[-3] if x.shape[-3] else 1
    return np.repeat(x, shared, -3)


def _scores(op: Op, q: Array, k: Array, score: ScoreOf) -> Array:
    product: Array = np.matmul(q, np.swapaxes(_repeated(q, k), -1, -2))
    return score(product * _scale(op, q))


def attention(op: Op, q: Array, k: Array, v: Array, score: ScoreOf) -> Array:
    return attention_lse(op, q, k, v, score)[0]


def attention_lse(
    op: Op, q: Array, k: Array, v: Array, score: ScoreOf
) -> tuple[Array, Array]:
    scores = _scores(op, q, k, score)
    top = extreme(np.max, "max", scores, (scores.ndim - 1,), True)
    hidden = top == -np.inf
    shift = np.where(hidden, 0, top)
    exp = np.exp(scores - shift)
    total = np.sum(exp, -1, keepdims=True)
    nothing = np.nan if op.bool_attr("nan_rows") and k.shape[-2] else 0
    mixed = np.matmul(exp / total, _repeated(q, v))
    if op.bool_attr("zero_nan"):
        mixed = np.where(np.isnan(total), 0, mixed)
    result = np.where(hidden, nothing, mixed).astype(q.dtype)
    lse = (shift + np.log(total))[..., 0].astype(q.dtype)
    return (np.swapaxes(result, -2, -3) if op.bool_attr("swapped") else result), lse


def attention_backward(
    op: Op,
    grad: Array,
    out: Array,
    lse: Array,
    q: Array,
    k: Array,
    v: Array,
    score: ScoreOf,
) -> tuple[Array, Array, Array]:
    scores = _scores(op, q, k, score)
    shift = np.where(lse == -np.inf, 0, lse)[..., None]
    weights = np.exp(scores - shift)
    across = np.matmul(grad, np.swapaxes(_repeated(q, v), -1, -2))
    below = np.sum(grad * out, -1, keepdims=True)
    change = weights * (across - below)

    def summed(x: Array, like: Array) -> Array:
        """Over the query heads of every key head."""
        *lead, heads = like.shape[:-2]
        shared = x.shape[-3] // heads if heads else 1
        parts: Array = x.reshape((*lead, heads, shared, *like.shape[-2:]))
        return np.asarray(parts.sum(-3))

    dq = np.matmul(change, _repeated(q, k)) * _scale(op, q)
    dk = summed(np.matmul(np.swapaxes(change, -1, -2), q), k) * _scale(op, q)
    dv = summed(np.matmul(np.swapaxes(weights, -1, -2), grad), v)
    grads = tuple(x.astype(q.dtype) for x in (dq, dk, dv))
    if op.bool_attr("swapped"):
        grads = tuple(np.swapaxes(x, -2, -3) for x in grads)
    dq, dk, dv = grads
    return dq, dk, dv
