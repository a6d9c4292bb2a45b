"""Translations of losses of numbers; those of classes are in torch_ops_train.py."""

from __future__ import annotations

from typing import Any

import torch

from pliant.frontend.torch_ops_context import TorchContext, as_index
from pliant.frontend.torch_ops_math import Translate
from pliant.ir.graph import Value
from pliant.ir.types import DType
from pliant.sym import as_expr, le

aten = torch.ops.aten

EACH, MEAN, SUM = 0, 1, 2  # torch's numbers of reductions


def _reduced(cx: TorchContext, each: Value, reduction: int) -> Value:
    if reduction == EACH:
        return cx.cast(each, cx.out_dtype)
    axes = range(each.type.rank)
    reduced = cx.mean(each, axes) if reduction == MEAN else cx.reduce("sum", each, axes)
    return cx.cast(reduced, cx.out_dtype)


def _wide(cx: TorchContext, *values: Value) -> list[Value]:
    return [cx.cast(value, cx.out_dtype.compute) for value in values]


def mse_loss(cx: TorchContext, x: Value, y: Value, reduction: int = MEAN) -> Value:
    off = cx.sub(*_wide(cx, x, y))
    return _reduced(cx, cx.mul(off, off), reduction)


def l1_loss(cx: TorchContext, x: Value, y: Value, reduction: int = MEAN) -> Value:
    return _reduced(cx, cx.unary("abs", cx.sub(*_wide(cx, x, y))), reduction)


def smooth_l1_loss(
    cx: TorchContext, x: Value, y: Value, reduction: int = MEAN, beta: float = 1.0
) -> Value:
    """A parabola below beta, the distance beyond."""
    if beta == 0:
        return l1_loss(cx, x, y, reduction)
    off = cx.unary("abs", cx.sub(*_wide(cx, x, y)))
    near = cx.mul(cx.mul(off, off), 0.5 / beta)
    each = cx.select(cx.arith("lt", off, beta), near, cx.sub(off, 0.5 * beta))
    return _reduced(cx, each, reduction)


def huber_loss(
    cx: TorchContext, x: Value, y: Value, reduction: int = MEAN, delta: float = 1.0
) -> Value:
    """A parabola up to delta, delta times the distance beyond."""
    off = cx.unary("abs", cx.sub(*_wide(cx, x, y)))
    near = cx.mul(cx.mul(off, off), 0.5)
    far = cx.mul(cx.sub(off, 0.5 * delta), delta)
    return _reduced(cx, cx.select(cx.arith("le", off, delta), near, far), reduction)


def kl_div(
    cx: TorchContext,
    x: Value,
    y: Value,
    reduction: int = MEAN,
    log_target: bool = False,
) -> Value:
    x, y = _wide(cx, x, y)
    if log_target:
        return _reduced(cx, cx.mul(cx.unary("exp", y), cx.sub(y, x)), reduction)
    # y*log(y) is 0 at 0.
    positive = cx.select(cx.arith("eq", y, 0.0), 1.0, y)
    each = cx.mul(y, cx.unary("log", positive))
    if cx.training:  # as torch's xlogy(y, y) has it: not a number at 0
        each = cx.with_slopes(each, (y, cx.add(cx.unary("log", y), cx.div(y, y))))
    each = cx.sub(each, cx.mul(y, x))
    return _reduced(cx, each, reduction)


def soft_margin_loss(
    cx: TorchContext, x: Value, y: Value, reduction: int = MEAN
) -> Value:
    x, y = _wide(cx, x, y)
    each = cx.unary("log1p", cx.unary("exp", cx.unary("neg", cx.mul(x, y))))
    return _reduced(cx, each, reduction)


def multilabel_margin_loss(
    cx: TorchContext, x: Value, target: Value, reduction: int = MEAN
) -> list[Value]:
    """The mean over classes i that are no targets of max(0, 1 - x[target] + x[i]).

    A row of targets ends before its first -1. The losses of all its targets are summed
    up. The second result tells which classes are targets.
    """
    classes = x.shape[-1] if x.type.rank else as_expr(1)
    rows = x.shape[0] if x.type.rank == 2 else as_expr(1)
    cx.require(le(1, classes), "multilabel_margin_loss: some class")
    value = cx.reshape(cx.cast(x, x.dtype.compute), (rows, classes))
    named = cx.reshape(as_index(cx, target), (rows, classes))
    named = cx.sub(cx.in_range(cx.add(named, 1), classes + 1, 1), 1)
    ends = cx.cast(cx.arith("lt", named, 0), DType.I64)
    kept = cx.arith("eq", cx.b.emit("cumulate", ends, op="sum", axis=1), 0)
    place = cx.select(kept, named, 0)
    cx.nonnegative.add(place)
    picked = cx.b.emit("take_along", value, place, axis=1)
    # (rows, targets, classes)
    target_axis, class_axis = (rows, classes, 1), (rows, 1, classes)
    meant = cx.arith(
        "eq", cx.reshape(place, target_axis), cx.iota((1, 1, classes), 2, DType.I64)
    )
    meant = cx.b.binary("logical_and", meant, cx.reshape(kept, target_axis))
    is_target = cx.reduce("any", meant, (1,))
    gap = cx.sub(cx.reshape(value, class_axis), cx.reshape(picked, target_axis))
    each = cx.arith("maximum", cx.add(gap, 1.0), 0.0)
    counts = cx.b.binary(
        "logical_and",
        cx.reshape(kept, target_axis),
        cx.reshape(cx.unary("logical_not", is_target), class_axis),
    )
    each = cx.reduce("sum", cx.select(counts, each, 0.0), (1, 2))
    each = cx.arith("div", each, classes, each.dtype)
    out, told = cx.val
    if x.type.rank < 2:
        each = cx.reshape(each, ())
    if reduction != EACH and each.type.rank:
        mean = reduction == MEAN
        each = cx.mean(each, (0,)) if mean else cx.reduce("sum", each, (0,))
    chosen = cx.reshape(cx.cast(is_target, cx.dtype(told.dtype)), target.shape)
    return [cx.cast(each, cx.dtype(out.dtype)), chosen]


LOSS: dict[Any, Translate] = {
    aten.mse_loss.default: mse_loss,
    aten.l1_loss.default: l1_loss,
    aten.smooth_l1_loss.default: smooth_l1_loss,
    aten.huber_loss.default: huber_loss,
    aten.kl_div.default: kl_div,
    aten.soft_margin_loss.default: soft_margin_loss,
    aten.multilabel_margin_loss_forward.default: multilabel_margin_loss,
}
