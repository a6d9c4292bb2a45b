"""Backwards of convolutions and pools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pliant.frontend.torch_ops_context import TorchContext
from pliant.ir.graph import Value
from pliant.ir.windows import (
    Window,
    conv_input,
    conv_transpose_input,
    conv_weight,
    max_pool_input,
)


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
