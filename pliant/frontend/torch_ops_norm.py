"""Normalisation layers of aten, as they are outside training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pliant.frontend.torch_ops_context import Size, TorchContext
from pliant.frontend.torch_ops_math import Translate
from pliant.frontend.torch_ops_nn import with_bias
from pliant.frontend.torch_ops_reduce import variance
from pliant.frontend.torch_tensors import torch_dtype
from pliant.ir.graph import Value
from pliant.sym import as_expr

aten = torch.ops.aten


def _affine(weight: Value | None, bias: Value | None) -> tuple[str, list[Value]]:
    if weight is None:
        return "none", []
    return ("w", [weight]) if bias is None else ("wb", [weight, bias])


def layer_norm(
    cx: TorchContext,
    x: Value,
    normalized_shape: Sequence[Size],
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Value:
    kind, extra = _affine(weight, bias)
    axes = len(normalized_shape)
    out = cx.b.emit("layer_norm", x, *extra, axes=axes, eps=eps, affine=kind)
    return cx.add(out, bias) if weight is None and bias is not None else out


def rms_norm(
    cx: TorchContext,
    x: Value,
    normalized_shape: Sequence[Size],
    weight: Value | None = None,
    eps: float | None = None,
) -> Value:
    if eps is None:
        # torch's own is that of the type it computes in, not of a half.
        eps = torch.finfo(torch_dtype(x.dtype.compute)).eps
    kind, extra = _affine(weight, None)
    axes = len(normalized_shape)
    return cx.b.emit("rms_norm", x, *extra, axes=axes, eps=eps, affine=kind)


def group_norm(
    cx: TorchContext,
    x: Value,
    num_groups: int,
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Value:
    kind, extra = _affine(weight, bias)
    out = cx.b.emit("group_norm", x, *extra, groups=num_groups, eps=eps, affine=kind)
    return with_bias(cx, out, bias) if weight is None else out


def batch_norm(
    cx: TorchContext,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value,
    var: Value,
    eps: float,
) -> Value:
    """By statistics that are given; `torch_ops_train.py` has the op of torch."""
    kind, extra = _affine(weight, bias)
    out = cx.b.emit("batch_norm", x, mean, var, *extra, eps=eps, affine=kind)
    return with_bias(cx, out, bias) if weight is None else out


def batch_norm_with_statistics(
    cx: TorchContext,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value,
    var: Value,
    momentum: float,
    eps: float,
) -> list[Value]:
    """Of the statistics of a batch, which are not computed, torch gives no elements."""
    none = [cx.full(0.0, (0,), cx.dtype(each.dtype)) for each in cx.val[1:]]
    return [batch_norm(cx, x, weight, bias, mean, var, eps), *none]


def instance_norm(
    cx: TorchContext, x: Value, weight: Value | None, bias: Value | None, eps: float
) -> Value:
    """By the statistics of each instance."""
    if x.shape[1].is_const:
        return group_norm(cx, x, x.shape[1].value, weight, bias, eps)
    spread, center = variance(cx, x, range(2, x.type.rank), 0.0, True)
    center = cx.reshape(center, spread.shape)
    off = cx.sub(cx.cast(x, spread.dtype), center)
    out = cx.mul(off, cx.unary("rsqrt", cx.add(spread, eps)))
    column = [x.shape[1], *[as_expr(1)] * (x.type.rank - 2)]
    if weight is not None:
        out = cx.mul(out, cx.reshape(weight, column))
    if bias is not None:
        out = cx.add(out, cx.reshape(bias, column))
    return cx.cast(out, x.dtype)


NORM: dict[Any, Translate] = {
    aten.layer_norm.default: layer_norm,
    aten.native_layer_norm.default: lambda cx, *a: [layer_norm(cx, *a), None, None],
    aten.rms_norm.default: rms_norm,
    aten._fused_rms_norm.default: lambda cx, *a: [rms_norm(cx, *a), None],
    aten.group_norm.default: group_norm,
    aten._native_batch_norm_legit_no_training.default: batch_norm_with_statistics,
}
