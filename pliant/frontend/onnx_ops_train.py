"""Optimizer steps of ai.onnx.preview.training, and ops of ai.onnx.ml on numbers."""

from __future__ import annotations

from collections.abc import Callable

from pliant.frontend.onnx_context import Node, OnnxContext, Rule
from pliant.frontend.onnx_ops_activation import Table
from pliant.frontend.translate import as_index
from pliant.ir.graph import Value
from pliant.ir.types import DType

Update = Callable[[OnnxContext, Node, Value, Value, list[Value]], list[Value]]


def optimizer(states: int, update: Update) -> Rule:
    """(rate, step, x.., gradient.., states..) -> x.., states.."""

    def rule(cx: OnnxContext, n: Node) -> tuple[Value, ...]:
        rate, step = cx.reshape(n.tensor(0), ()), cx.reshape(n.tensor(1), ())
        rest = n.tensors(2)
        count = len(rest) // (2 + states)
        columns: list[list[Value]] = [[] for _ in range(1 + states)]
        for k in range(count):
            parts = [rest[k + i * count] for i in range(2 + states)]
            made = update(cx, n, rate, step, parts)
            for column, value in zip(columns, made, strict=True):
                column.append(value)
        return tuple(v for column in columns for v in column)

    return rule


def _decayed(cx: OnnxContext, n: Node, x: Value, g: Value) -> Value:
    return cx.add(cx.mul(x, n.attr("norm_coefficient", 0.0)), g)


def _momentum(
    cx: OnnxContext, n: Node, rate: Value, step: Value, parts: list[Value]
) -> list[Value]:
    x, g, v = parts
    g = _decayed(cx, n, x, g)
    alpha, beta = n.attrs["alpha"], n.attrs["beta"]
    first = cx.arith("eq", step, 0)
    share = cx.select(first, cx.tensor(1.0, x.dtype), cx.tensor(beta, x.dtype))
    new = cx.add(cx.mul(v, alpha), cx.mul(g, share))
    if n.attrs["mode"] == "nesterov":
        return [cx.sub(x, cx.mul(cx.add(g, cx.mul(new, alpha)), rate)), new]
    return [cx.sub(x, cx.mul(new, rate)), new]


def _shrunk(cx: OnnxContext, rate: Value, step: Value, decay: float) -> Value:
    """rate / (1 + step * decay)"""
    slower = cx.add(cx.mul(cx.cast(step, rate.dtype), decay), 1.0)
    return cx.div(rate, slower)


def _adagrad(
    cx: OnnxContext, n: Node, rate: Value, step: Value, parts: list[Value]
) -> list[Value]:
    x, g, h = parts
    rate = _shrunk(cx, rate, step, n.attr("decay_factor", 0.0))
    g = _decayed(cx, n, x, g)
    new = cx.add(h, cx.mul(g, g))
    size = cx.add(cx.unary("sqrt", new), n.attr("epsilon", 1e-6))
    return [cx.sub(x, cx.div(cx.mul(g, rate), size)), new]


def _adam(
    cx: OnnxContext, n: Node, rate: Value, step: Value, parts: list[Value]
) -> list[Value]:
    x, g, v, h = parts
    alpha, beta = n.attr("alpha", 0.9), n.attr("beta", 0.999)
    g = _decayed(cx, n, x, g)
    v = cx.add(cx.mul(v, alpha), cx.mul(g, 1 - alpha))
    h = cx.add(cx.mul(h, beta), cx.mul(cx.mul(g, g), 1 - beta))
    size = cx.add(cx.unary("sqrt", h), n.attr("epsilon", 1e-6))
    count = cx.cast(step, DType.F64)
    ratios = [
        cx.sub(1.0, cx.arith("pow", cx.tensor(b, DType.F64), count))
        for b in (beta, alpha)
    ]
    adjusted = cx.mul(
        cx.cast(rate, DType.F64), cx.div(cx.unary("sqrt", ratios[0]), ratios[1])
    )
    some = cx.arith("gt", step, 0)
    adjusted = cx.select(some, adjusted, cx.cast(rate, DType.F64))
    made = cx.sub(x, cx.mul(cx.cast(adjusted, x.dtype), cx.div(v, size)))
    post = n.attr("norm_coefficient_post", 0.0)
    return [cx.mul(made, 1 - post) if post else made, v, h]


# ---- ai.onnx.ml


def binarizer(cx: OnnxContext, n: Node) -> Value:
    x = n.tensor(0)
    return cx.cast(cx.arith("gt", x, n.attr("threshold", 0.0)), x.dtype)


def feature_extractor(cx: OnnxContext, n: Node) -> Value:
    x, index = n.tensor(0), as_index(cx, n.tensor(1))
    last = x.type.rank - 1
    count = index.type.numel
    flat = cx.wrap_index(cx.reshape(index, (count,)), x.shape[last], last)
    rows = cx.move_axis(x, last, 0)
    found = cx.move_axis(cx.b.emit("index", rows, flat), 0, last)
    return found if last else cx.reshape(found, (1, count))


_TRAIN = "ai.onnx.preview.training"
TRAINING: Table = {
    (f"{_TRAIN}::Momentum", 1): optimizer(1, _momentum),
    (f"{_TRAIN}::Adagrad", 1): optimizer(1, _adagrad),
    (f"{_TRAIN}::Adam", 1): optimizer(2, _adam),
    ("ai.onnx.ml::Binarizer", 1): binarizer,
    ("ai.onnx.ml::ArrayFeatureExtractor", 1): feature_extractor,
}
