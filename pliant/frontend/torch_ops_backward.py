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
)
from pliant.frontend.torch_ops_context import (
    Size,
    TorchContext,
    used,
)
from pliant.frontend.torch_ops_math import Translate
from pliant.frontend.torch_ops_norm import layer_norm, rms_norm
from pliant.frontend.torch_ops_reduce import variance
from pliant.ir.graph import Value
from pliant.sym import le

aten = torch.ops.aten


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
    aten.convolution_backward.default: convolution_backward,
    aten.max_pool2d_with_indices_backward.default: max_pool_backward,
}
