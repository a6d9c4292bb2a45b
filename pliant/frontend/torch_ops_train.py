"""Translations that training needs: losses, norms, what is detached.

A loss is spelled so that nothing of the logits' size is made but their gradient: of the
class that is meant one element is picked, and the rest is one number for each row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from pliant.frontend.torch_ops_activation import log_sigmoid
from pliant.frontend.torch_ops_context import TorchContext, as_index
from pliant.frontend.torch_ops_loss import MEAN, SUM
from pliant.frontend.torch_ops_math import Translate
from pliant.frontend.torch_ops_norm import batch_norm as frozen_batch_norm
from pliant.frontend.torch_ops_norm import instance_norm as frozen_instance_norm
from pliant.ir.graph import Value
from pliant.ir.types import DType
from pliant.sym import Expr, as_expr, le, maximum, minimum, ne

aten = torch.ops.aten


def detached(cx: TorchContext, x: Value, *_: Any, **__: Any) -> Value:
    """In training, a value that no gradient goes through."""
    return cx.detached(x)


# --- losses of classes ------------------------------------------------------------


def _reduced(cx: TorchContext, each: Value, weights: Value, reduction: int) -> Value:
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
    cx: TorchContext, x: Value, target: Value, weight: Value | None, ignored: int
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
    cx: TorchContext,
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
    cx: TorchContext,
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
    cx: TorchContext,
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
    # Of no classes there is no mean: torch counts rows by elements.
    present = minimum(x.shape[axis], 1)
    shares = b.broadcast_to(cx.tensor(present, x.dtype), rows.shape)
    return _reduced(cx, rows, shares, reduction)


def binary_cross_entropy_with_logits(
    cx: TorchContext,
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


# --- norms that keep statistics -----------------------------------------------------


def _averaged(
    cx: TorchContext, which: int, found: Value, count: Expr, momentum: float
) -> None:
    """Moves a running statistic, operand `which` of the node, towards the one found.

    Nothing moves if it was found in no element. A momentum of NaN stands for None,
    which no trace can hold: the mean of all batches.
    """
    assert cx.node is not None and cx.state is not None
    node = cx.node.args[which]
    assert isinstance(node, torch.fx.Node)
    old, found = cx.state.read(node), detached(cx, found)
    if math.isnan(momentum):
        batches = cx.state.sibling(node, "num_batches_tracked")
        share: Any = cx.arith("div", 1.0, cx.cast(batches, found.dtype))
    else:
        share = momentum
    kept = cx.mul(cx.cast(old, found.dtype), cx.sub(1.0, share))
    moved = cx.cast(cx.add(kept, cx.mul(found, share)), old.dtype)
    cx.state.store(node, cx.select(cx.arith("gt", count, 0), moved, old))


def _normalised(
    cx: TorchContext, x: Value, axes: Sequence[int], eps: float
) -> tuple[Value, Value, Value]:
    """(x with mean 0 and variance 1 over the axes, their mean, their variance).

    A mean far from 0 has lost digits. It serves as a shift that is nearly right, and
    cancels, so no gradient goes through it; what is left is small, and exact.
    """
    shift = detached(cx, cx.mean(x, axes, keepdims=True))
    off = cx.sub(x, shift)
    rest = cx.mean(off, axes, keepdims=True)
    square = cx.mean(cx.mul(off, off), axes, keepdims=True)
    var = cx.sub(square, cx.mul(rest, rest))
    scale = cx.unary("rsqrt", cx.add(var, eps))
    return cx.mul(cx.sub(off, rest), scale), cx.add(shift, rest), var


def batch_norm(
    cx: TorchContext,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> Value:
    if not training and running_mean is not None and running_var is not None:
        given = running_mean, running_var
        return frozen_batch_norm(cx, x, weight, bias, *given, eps)
    axes = [0, *range(2, x.type.rank)]
    return _by_input(cx, x, weight, bias, running_mean, momentum, eps, axes)


def instance_norm(
    cx: TorchContext,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> Value:
    if weight is not None or bias is not None:
        cx.require(le(1, x.shape[0]), "weights of an instance norm need a batch")
    if not use_input_stats and running_mean is not None and running_var is not None:
        given = running_mean, running_var
        return frozen_batch_norm(cx, x, weight, bias, *given, eps)
    if running_mean is None:
        return frozen_instance_norm(cx, x, weight, bias, eps)
    axes = range(2, x.type.rank)
    return _by_input(cx, x, weight, bias, running_mean, momentum, eps, axes)


def _by_input(
    cx: TorchContext,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running: Value | None,
    momentum: float,
    eps: float,
    axes: Sequence[int],
) -> Value:
    """Normalised by what is found along the axes; running statistics follow that."""
    wide = cx.cast(x, x.dtype.compute)
    count = cx.count(wide, axes)
    if cx.training:
        cx.require(ne(count, 1), "a norm needs more than 1 element of each channel")
    out, mean, var = _normalised(cx, wide, axes, eps)
    if running is not None:
        degrees = cx.arith("div", count, maximum(count - 1, 1), wide.dtype)
        for which, found in ((3, mean), (4, cx.mul(var, degrees))):
            others = [k for k in range(x.type.rank) if k != 1]
            _averaged(cx, which, cx.mean(found, others), count, momentum)
    if weight is not None:
        out = cx.mul(out, cx.b.broadcast(cx.cast(weight, wide.dtype), x.shape, (1,)))
    if bias is not None:
        out = cx.add(out, cx.b.broadcast(cx.cast(bias, wide.dtype), x.shape, (1,)))
    return cx.cast(out, x.dtype)


def embedding(
    cx: TorchContext, weight: Value, indices: Value, padding_idx: int = -1, *more: Any
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
    aten.embedding.default: embedding,
    aten.batch_norm.default: batch_norm,
    aten.instance_norm.default: instance_norm,
}
