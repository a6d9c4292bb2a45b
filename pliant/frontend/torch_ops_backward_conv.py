"""Backwards of convolutions and pools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pliant.frontend.torch_ops_context import TorchContext, used
from pliant.frontend.torch_ops_nn import max_pool
from pliant.ir.graph import Value
from pliant.ir.windows import (
    Window,
    conv_input,
    conv_transpose_input,
    conv_weight,
    max_pool_input,
    max_pool_places,
)
from pliant.sym import Expr


def convolution_backward(
    cx: TorchContext,
    grad: Value,
    x: Value,
    weight: Value,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    output_mask: Sequence[bool],
) -> list[Any]:
    """Gradients of input, weight and bias, those that are asked for."""
    rank, groups = weight.type.rank - 2, cx.constant_int(groups, "groups")
    kernel = tuple(cx.constant_int(k, "kernel size") for k in weight.shape[2:])
    steps = tuple(cx.ints(stride, rank, "stride"))
    pads = tuple(cx.ints(padding, rank, "padding"))
    spread = tuple(cx.ints(dilation, rank, "dilation"))
    window = Window(kernel, steps, pads, pads, spread)
    of_input = conv_transpose_input if transposed else conv_input
    grads: list[Any] = [None, None, None]
    if output_mask[0]:
        grads[0] = of_input(cx.b, grad, weight, x.shape, window, groups)
    if output_mask[1]:
        pair = (x, grad) if transposed else (grad, x)
        grads[1] = conv_weight(cx.b, *pair, weight, window, groups)
    if output_mask[2]:
        axes = [i for i in range(grad.type.rank) if i != 1]
        total = cx.reduce("sum", cx.cast(grad, grad.dtype.compute), axes)
        grads[2] = cx.cast(total, grad.dtype)
    return grads


# --- max pools that know what they picked ---------------------------------------


def max_pool_kept(
    cx: TorchContext,
    x: Value,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> list[Any]:
    """(out, the place in its plane of each element of it)"""
    options = (kernel_size, stride, padding, dilation, ceil_mode)
    out = max_pool(2)(cx, x, *options)
    if not used(cx, 1):
        return [out, None]
    window = cx.ints(kernel_size, 2, "kernel size")
    given = isinstance(stride, int | Expr) or bool(stride)
    steps = cx.ints(stride, 2, "stride") if given else window
    pads = cx.ints(padding, 2, "padding")
    spread = cx.ints(dilation, 2, "dilation")
    # The last windows of a rounded-up pool reach behind the padding.
    tail = [p + (s - 1 if ceil_mode else 0) for p, s in zip(pads, steps, strict=True)]
    rows = (window, steps, pads, tail, spread)
    sliding = Window(*(tuple(row) for row in rows))
    return [out, max_pool_places(cx.b, x, out.shape[-2:], sliding)]


def max_pool_backward(
    cx: TorchContext,
    grad: Value,
    x: Value,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil_mode: bool,
    indices: Value,
) -> Value:
    return max_pool_input(cx.b, grad, indices, x.shape, 2)
