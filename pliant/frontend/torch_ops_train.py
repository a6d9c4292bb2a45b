"""Translations that training needs: losses, random ops, what is detached.

A loss is spelled so that nothing of the logits' size is made but their gradient: of the
class that is meant one element is picked, and the rest is one number for each row.
"""

from __future__ import annotations

from typing import Any

import torch

from pliant.frontend.torch_ops_context import Context, as_index
from pliant.frontend.torch_ops_math import Translate, log_sigmoid
from pliant.ir.graph import Value
from pliant.ir.types import DType
from pliant.sym import as_expr

aten = torch.ops.aten

MEAN, SUM = 1, 2  # torch's numbers of reductions


def detached(cx: Context, x: Value, *_: Any, **__: Any) -> Value:
    """In training, a value that no gradient goes through."""
    if not cx.training or not x.dtype.is_float:
        return x
    return cx.keep_sign(x, cx.b.emit("stop_gradient", x))


# --- losses of classes ------------------------------------------------------------


def _reduced(cx: Context, each: Value, weights: Value, reduction: int) -> Value:
    """As they are, their sum, or the mean by weight."""
    if reduction not in (MEAN, SUM):
        return each
    axes = range(each.type.rank)
    total = cx.b.reduce("sum", each, axes)
    if reduction == SUM:
        return total
    return cx.b.emit("div", total, cx.b.reduce("sum", weights, axes))


def _class_axis(x: Value) -> int:
    return 1 if x.type.rank > 1 else 0


def _picked(
    cx: Context, x: Value, target: Value, weight: Value | None, ignored: int
) -> tuple[Value, Value, Value]:
    """x of the meant class, its weight (0 where ignored), and where it counts."""
    b, axis = cx.b, _class_axis(x)
    target = as_index(cx, target)
    counts = cx.arith("ne", target, ignored)
    place = b.select(counts, target, b.scalar(0, DType.I64))
    kept = (*x.shape[:axis], as_expr(1), *x.shape[axis + 1 :])
    found = b.emit("take_along", x, b.reshape(place, kept), axis=axis)
    found = b.reshape(found, target.shape)
    if weight is None:
        share = b.cast(counts, x.dtype)
    else:
        share = b.emit("index", b.cast(weight, x.dtype), place)
        share = b.select(counts, share, b.scalar(0.0, x.dtype))
    return found, share, counts


def nll_loss(
    cx: Context,
    x: Value,
    target: Value,
    weight: Value | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
) -> Value:
    out = x.dtype
    x = cx.cast(x, out.compute)
    found, share, counts = _picked(cx, x, target, weight, ignore_index)
    each = cx.b.emit("mul", cx.b.unary("neg", found), share)
    each = cx.b.select(counts, each, cx.b.scalar(0.0, x.dtype))
    return cx.cast(_reduced(cx, each, share, reduction), out)


def cross_entropy(
    cx: Context,
    x: Value,
    target: Value,
    weight: Value | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Value:
    out, b = x.dtype, cx.b
    x = b.cast(x, out.compute)
    axis = _class_axis(x)
    if target.dtype.is_float:
        return b.cast(
            _soft_cross_entropy(cx, x, target, weight, reduction, label_smoothing), out
        )
    # The shift cancels: no gradient has to go through it.
    top = detached(cx, b.reduce("max", x, [axis], keepdims=True))
    below = b.binary("sub", x, top)
    total = b.reduce("sum", b.unary("exp", below), [axis], keepdims=True)
    log_total = b.reshape(b.unary("log", total), target.shape)
    found, share, counts = _picked(cx, x, target, weight, ignore_index)
    found = b.emit("sub", found, b.reshape(top, target.shape))
    zero = b.scalar(0.0, x.dtype)
    each = b.emit("mul", b.emit("sub", log_total, found), share)
    loss = _reduced(cx, b.select(counts, each, zero), share, reduction)
    if not label_smoothing:
        return b.cast(loss, out)
    size = cx.constant_int(x.shape[axis], "the number of classes")
    flat = b.emit("sub", b.broadcast_to(b.unary("log", total), x.shape), below)
    if weight is not None:
        wide = b.broadcast(b.cast(weight, x.dtype), x.shape, (axis,))
        flat = b.emit("mul", flat, wide)
    rest = b.reduce("sum", flat, [axis])
    smooth = _reduced(cx, b.select(counts, rest, zero), share, reduction)
    parts = (cx.mul(loss, 1 - label_smoothing), cx.mul(smooth, label_smoothing / size))
    return b.cast(b.emit("add", *parts), out)


def _soft_cross_entropy(
    cx: Context,
    x: Value,
    target: Value,
    weight: Value | None,
    reduction: int,
    smoothing: float,
) -> Value:
    """Of targets that are probabilities of all classes."""
    b, axis = cx.b, _class_axis(x)
    target = b.cast(target, x.dtype)
    if smoothing:
        size = cx.constant_int(x.shape[axis], "the number of classes")
        target = cx.add(cx.mul(target, 1 - smoothing), smoothing / size)
    each = b.emit("mul", b.emit("log_softmax", x, axis=axis), target)
    if weight is not None:
        each = b.emit(
            "mul", each, b.broadcast(b.cast(weight, x.dtype), x.shape, (axis,))
        )
    rows = b.unary("neg", b.reduce("sum", each, [axis]))
    return _reduced(cx, rows, b.full_like(rows, 1.0), reduction)


def binary_cross_entropy_with_logits(
    cx: Context,
    x: Value,
    target: Value,
    weight: Value | None = None,
    pos_weight: Value | None = None,
    reduction: int = MEAN,
) -> Value:
    """(1 - t) * x - share * log sigmoid(x)."""
    out, b = x.dtype, cx.b
    x, target = b.cast(x, out.compute), b.cast(target, out.compute)
    likely = log_sigmoid(cx, x)
    if pos_weight is not None:
        more = cx.mul(cx.sub(b.cast(pos_weight, x.dtype), 1.0), target)
        likely = b.binary("mul", cx.add(more, 1.0), likely)
    each = b.emit("sub", b.emit("mul", cx.sub(1.0, target), x), likely)
    if weight is not None:
        each = b.binary("mul", each, b.cast(weight, x.dtype))
    return b.cast(_reduced(cx, each, b.full_like(each, 1.0), reduction), out)


# --- dropout ----------------------------------------------------------------------


def dropout(cx: Context, x: Value, p: float = 0.5, train: bool = False) -> Value:
    if not train or not p:
        return x
    if not cx.random:
        cx.unsupported("dropout in training is random: call eval()")
    if p == 1:
        return cx.mul(x, 0.0)
    b = cx.b
    chance = b.emit("random", cx.seed(), number=cx.next_number(), shape=x.shape)
    keep = b.binary("ge", chance, b.scalar(p, DType.F32))
    return b.select(keep, cx.mul(x, 1 / (1 - p)), b.scalar(0.0, x.dtype))


def native_dropout(cx: Context, x: Value, p: float, train: bool = False) -> list[Any]:
    return [dropout(cx, x, p, bool(train)), None]


def other_dropout(cx: Context, x: Value, p: float = 0.5, train: bool = False) -> Value:
    if train and p:
        cx.unsupported("this kind of dropout has no translation: call eval()")
    return x


def embedding(
    cx: Context, weight: Value, indices: Value, padding_idx: int = -1, *more: Any
) -> Value:
    if len(more) > 0 and more[0] is True and cx.training:
        cx.unsupported("an embedding with scale_grad_by_freq")
    found = cx.keep_sign(weight, cx.b.emit("index", weight, indices))
    if not cx.training or padding_idx < 0:
        return found
    pads = cx.arith("eq", indices, padding_idx)  # their row is not trained
    wide = cx.b.broadcast(pads, found.shape, range(indices.type.rank))
    return cx.b.select(wide, detached(cx, found), found)


TRAIN: dict[Any, Translate] = {
    aten.detach.default: detached,
    aten.detach_.default: detached,
    aten.nll_loss.default: nll_loss,
    aten.nll_loss_nd.default: nll_loss,
    aten.nll_loss2d.default: nll_loss,
    aten.cross_entropy_loss.default: cross_entropy,
    aten.binary_cross_entropy_with_logits.default: binary_cross_entropy_with_logits,
    aten.dropout.default: dropout,
    aten.native_dropout.default: native_dropout,
    aten.feature_dropout.default: other_dropout,
    aten.alpha_dropout.default: other_dropout,
    aten.embedding.default: embedding,
}
