"""Activations; half floats are computed in f32."""

from __future__ import annotations

from collections.abc import Callable

from pliant.frontend.onnx_context import Node, OnnxContext, Rule
from pliant.ir.graph import Value
from pliant.ir.types import DType
from pliant.sym import Expr

Table = dict[tuple[str, int], Rule]
Body = Callable[[OnnxContext, Node, Value], Value]


def computed(body: Body) -> Rule:
    """A function of a float tensor, in the type that arithmetic happens in."""

    def rule(cx: OnnxContext, n: Node) -> Value:
        x = n.tensor(0)
        return cx.cast(body(cx, n, cx.cast(x, x.dtype.compute)), x.dtype)

    return rule


def relu(cx: OnnxContext, n: Node) -> Value:
    return cx.b.emit("relu", n.tensor(0))


def _leaky(cx: OnnxContext, n: Node, x: Value) -> Value:
    slope = n.attr("alpha", 0.01)
    return cx.select(cx.arith("ge", x, 0.0), x, cx.mul(x, slope))


def _elu(cx: OnnxContext, n: Node, x: Value) -> Value:
    below = cx.mul(cx.unary("expm1", cx.arith("minimum", x, 0.0)), n.attr("alpha", 1.0))
    return cx.select(cx.arith("gt", x, 0.0), x, below)


def _selu(cx: OnnxContext, n: Node, x: Value) -> Value:
    alpha, gamma = n.attr("alpha", 1.6732632), n.attr("gamma", 1.0507010)
    below = cx.mul(cx.unary("expm1", cx.arith("minimum", x, 0.0)), alpha)
    return cx.mul(cx.select(cx.arith("gt", x, 0.0), x, below), gamma)


def _celu(cx: OnnxContext, n: Node, x: Value) -> Value:
    alpha = n.attr("alpha", 1.0)
    below = cx.unary("expm1", cx.arith("minimum", cx.div(x, alpha), 0.0))
    return cx.add(cx.arith("maximum", x, 0.0), cx.mul(below, alpha))


def _hard_sigmoid(cx: OnnxContext, n: Node, x: Value) -> Value:
    line = cx.add(cx.mul(x, n.attr("alpha", 0.2)), n.attr("beta", 0.5))
    return cx.arith("minimum", cx.arith("maximum", line, 0.0), 1.0)


def _hard_swish(cx: OnnxContext, n: Node, x: Value) -> Value:
    line = cx.add(cx.mul(x, 1.0 / 6.0), 0.5)
    return cx.mul(x, cx.arith("minimum", cx.arith("maximum", line, 0.0), 1.0))


def softplus(cx: OnnxContext, x: Value) -> Value:
    """max(x, 0) + log1p(exp(-|x|))"""
    tail = cx.unary("log1p", cx.unary("exp", cx.unary("neg", cx.unary("abs", x))))
    return cx.add(cx.arith("maximum", x, 0.0), tail)


def _softplus(cx: OnnxContext, n: Node, x: Value) -> Value:
    return softplus(cx, x)


def _softsign(cx: OnnxContext, n: Node, x: Value) -> Value:
    return cx.div(x, cx.add(cx.unary("abs", x), 1.0))


def _mish(cx: OnnxContext, n: Node, x: Value) -> Value:
    return cx.mul(x, cx.unary("tanh", softplus(cx, x)))


def _thresholded(cx: OnnxContext, n: Node, x: Value) -> Value:
    return cx.select(cx.arith("gt", x, n.attr("alpha", 1.0)), x, 0.0)


def _shrink(cx: OnnxContext, n: Node) -> Value:
    x = n.tensor(0)
    bias, end = n.attr("bias", 0.0), n.attr("lambd", 0.5)
    wide = cx.cast(x, x.dtype.compute if x.dtype.is_float else DType.F32)
    low = cx.arith("lt", wide, -end)
    high = cx.arith("gt", wide, end)
    kept = cx.select(low, cx.add(wide, bias), cx.full(0.0, x.shape, wide.dtype))
    return cx.cast(cx.select(high, cx.sub(wide, bias), kept), x.dtype)


def _swish(cx: OnnxContext, n: Node, x: Value) -> Value:
    alpha = n.attr("alpha", 1.0)
    if alpha == 1.0:
        return cx.b.emit("silu", x)
    return cx.mul(x, cx.unary("sigmoid", cx.mul(x, alpha)))


def gelu(cx: OnnxContext, n: Node) -> Value:
    return cx.b.emit("gelu", n.tensor(0), approximate=n.attr("approximate", "none"))


def prelu(cx: OnnxContext, n: Node) -> Value:
    x, slope = n.tensor(0), n.tensor(1)
    rank = x.type.rank
    if slope.type.rank == 1 and rank > 2 and n.version < 9:
        slope = cx.reshape(slope, (*slope.shape, *[1] * (rank - 2)))
    slope = cx.expand_to(slope, x.shape)
    zero = cx.full(0, x.shape, x.dtype)
    return cx.select(cx.b.binary("lt", x, zero), cx.mul(x, slope), x)


# ---- along an axis


def softmax(op: str) -> Rule:
    """Before operator set 13, over all dims from `axis` on."""

    def rule(cx: OnnxContext, n: Node) -> Value:
        x = n.tensor(0)
        if n.version >= 13:
            return cx.b.emit(op, x, axis=n.axis(n.attr("axis", -1)))
        axis = n.axis(n.attr("axis", 1)) if x.type.rank else 0
        rows, columns = _joined(cx, x, axis)
        flat = cx.reshape(x, (rows, columns))
        return cx.reshape(cx.b.emit(op, flat, axis=1), x.shape)

    return rule


def _joined(cx: OnnxContext, x: Value, axis: int) -> tuple[Expr, Expr]:
    rank = x.type.rank
    return cx.count(x, range(axis)), cx.count(x, range(axis, rank))


def hardmax(cx: OnnxContext, n: Node) -> Value:
    x = n.tensor(0)
    flat = x
    if n.version >= 13:
        axis = n.axis(n.attr("axis", -1))
    else:
        rows, columns = _joined(cx, x, n.axis(n.attr("axis", 1)))
        flat, axis = cx.reshape(x, (rows, columns)), 1
    best = cx.b.emit("argreduce", flat, op="max", axis=axis, keepdims=True)
    here = cx.iota(flat.shape, axis, DType.I64)
    hot = cx.cast(cx.arith("eq", here, best), x.dtype)
    return cx.reshape(hot, x.shape)


ACTIVATIONS: Table = {
    ("Relu", 1): relu,
    ("LeakyRelu", 1): computed(_leaky),
    ("Elu", 1): computed(_elu),
    ("Selu", 1): computed(_selu),
    ("Celu", 12): computed(_celu),
    ("HardSigmoid", 1): computed(_hard_sigmoid),
    ("HardSwish", 14): computed(_hard_swish),
    ("Softplus", 1): computed(_softplus),
    ("Softsign", 1): computed(_softsign),
    ("Mish", 18): computed(_mish),
    ("ThresholdedRelu", 1): computed(_thresholded),
    ("Shrink", 9): _shrink,
    ("Swish", 24): computed(_swish),
    ("Gelu", 20): gelu,
    ("PRelu", 1): prelu,
    ("Softmax", 1): softmax("softmax"),
    ("LogSoftmax", 1): softmax("log_softmax"),
    ("Hardmax", 1): hardmax,
}
