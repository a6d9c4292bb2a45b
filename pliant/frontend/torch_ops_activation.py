"""Activation functions of aten."""

from __future__ import annotations

from typing import Any

import torch

from pliant.frontend.torch_ops_context import TorchContext
from pliant.frontend.torch_ops_math import Translate, clamp, via_f32
from pliant.ir.graph import Value

aten = torch.ops.aten


def composite(op: str) -> Translate:
    return lambda cx, x: cx.b.emit(op, x)


def relu(cx: TorchContext, x: Value) -> Value:
    return cx.b.emit("relu", x) if x.dtype.is_float else cx.arith("maximum", x, 0)


def gelu(cx: TorchContext, x: Value, approximate: str = "none") -> Value:
    return cx.b.emit("gelu", x, approximate=approximate)


def leaky_relu(cx: TorchContext, x: Value, negative_slope: float = 0.01) -> Value:
    return cx.select(cx.arith("gt", x, 0.0), x, cx.mul(x, negative_slope))


def prelu(cx: TorchContext, x: Value, weight: Value) -> Value:
    if weight.type.rank == 1 and x.type.rank > 1 and weight.shape[0] != 1:
        weight = cx.reshape(weight, (weight.shape[0], *[1] * (x.type.rank - 2)))
    elif x.type.rank == 0:
        weight = cx.reshape(weight, ())
    return cx.select(cx.arith("gt", x, 0.0), x, cx.mul(x, weight))


def elu(
    cx: TorchContext,
    x: Value,
    alpha: float = 1,
    scale: float = 1,
    input_scale: float = 1,
) -> Value:
    low = cx.arith("minimum", x, 0.0) if cx.training else x  # finite where unused
    below = cx.mul(cx.unary("expm1", _times(cx, low, input_scale)), alpha * scale)
    return cx.select(cx.arith("gt", x, 0.0), _times(cx, x, scale), below)


def _times(cx: TorchContext, x: Value, factor: float) -> Value:
    return x if factor == 1 else cx.mul(x, factor)


SELU_ALPHA, SELU_SCALE = (
    1.6732632423543772848170429916717,
    1.0507009873554804934193349852946,
)


def selu(cx: TorchContext, x: Value) -> Value:
    return elu(cx, x, SELU_ALPHA, SELU_SCALE)


def celu(cx: TorchContext, x: Value, alpha: float = 1.0) -> Value:
    return elu(cx, x, alpha, 1.0, 1.0 / alpha)


def _held(cx: TorchContext, x: Value, low: float, high: float) -> Value:
    """A clamp; in training, one without a slope at its bounds."""
    if not cx.training:
        return clamp(cx, x, low, high)
    x = cx.select(cx.arith("le", x, low), cx.tensor(low, x.dtype), x)
    return cx.select(cx.arith("ge", x, high), cx.tensor(high, x.dtype), x)


def hardsigmoid(cx: TorchContext, x: Value) -> Value:
    return cx.div(_held(cx, cx.add(x, 3.0), 0.0, 6.0), 6.0)


def hardswish(cx: TorchContext, x: Value) -> Value:
    return cx.div(cx.mul(x, _held(cx, cx.add(x, 3.0), 0.0, 6.0)), 6.0)


def hardtanh(
    cx: TorchContext, x: Value, min_val: float = -1, max_val: float = 1
) -> Value:
    return _held(cx, x, min_val, max_val)


def relu6(cx: TorchContext, x: Value) -> Value:
    return _held(cx, x, 0, 6)


def softplus(
    cx: TorchContext, x: Value, beta: float = 1, threshold: float = 20
) -> Value:
    scaled_x = _times(cx, x, beta)
    # Beyond the threshold the exponential is not used: kept finite for its gradient.
    near = cx.arith("minimum", scaled_x, float(threshold))
    soft = cx.div(cx.unary("log1p", cx.unary("exp", near)), float(beta))
    return cx.select(cx.arith("gt", scaled_x, float(threshold)), x, soft)


def mish(cx: TorchContext, x: Value) -> Value:
    return cx.mul(x, cx.unary("tanh", softplus(cx, x)))


def log_sigmoid(cx: TorchContext, x: Value) -> Value:
    """min(0, x) - log1p(exp(-|x|)): never overflows."""
    if cx.training:  # in parts that have a derivative at 0
        low = cx.arith("minimum", x, 0.0)
        low = cx.sub(low, cx.unary("log1p", cx.unary("exp", low)))
        high = cx.unary("neg", cx.arith("maximum", x, 0.0))
        high = cx.unary("neg", cx.unary("log1p", cx.unary("exp", high)))
        return cx.select(cx.arith("lt", x, 0.0), low, high)
    decay = cx.unary("exp", cx.unary("neg", cx.unary("abs", x)))
    return cx.sub(cx.arith("minimum", x, 0.0), cx.unary("log1p", decay))


def softshrink(cx: TorchContext, x: Value, lambd: float = 0.5) -> Value:
    out = cx.select(cx.arith("lt", x, -lambd), cx.add(x, lambd), cx.mul(x, 0.0))
    return cx.select(cx.arith("gt", x, lambd), cx.sub(x, lambd), out)


def hardshrink(cx: TorchContext, x: Value, lambd: float = 0.5) -> Value:
    inside = cx.b.binary(
        "logical_and", cx.arith("ge", x, -lambd), cx.arith("le", x, lambd)
    )
    return cx.select(inside, cx.tensor(0.0, x.dtype), x)


def threshold(cx: TorchContext, x: Value, threshold: float, value: float) -> Value:
    return cx.select(cx.arith("le", x, threshold), cx.tensor(value, x.dtype), x)


def glu(cx: TorchContext, x: Value, dim: int = -1) -> Value:
    axis = cx.axis(dim, x.type.rank)
    half = x.shape[axis] // 2
    cx.b.require_equal(half * 2, x.shape[axis], "glu halves an even dim")
    first, second = cx.slice(x, axis, 0, half), cx.slice(x, axis, half, half)
    return cx.mul(first, cx.unary("sigmoid", second))


ACTIVATION: dict[Any, Translate] = {
    aten.relu.default: relu,
    aten.silu.default: composite("silu"),
    aten.gelu.default: gelu,
    aten.leaky_relu.default: via_f32(leaky_relu),
    aten.prelu.default: prelu,
    aten._prelu_kernel.default: prelu,
    aten.elu.default: via_f32(elu),
    aten.selu.default: via_f32(selu),
    aten.celu.default: via_f32(celu),
    aten.hardsigmoid.default: via_f32(hardsigmoid),
    aten.hardswish.default: via_f32(hardswish),
    aten.hardtanh.default: hardtanh,
    aten.relu6.default: relu6,
    aten.softplus.default: via_f32(softplus),
    aten.mish.default: via_f32(mish),
    aten.log_sigmoid.default: via_f32(log_sigmoid),
    aten.softshrink.default: via_f32(softshrink),
    aten.hardshrink.default: hardshrink,
    aten.threshold.default: via_f32(threshold),
    aten.glu.default: via_f32(glu),
}
