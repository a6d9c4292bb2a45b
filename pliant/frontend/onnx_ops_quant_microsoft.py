"""Quantized ops of com.microsoft that quantizers write: pools, products, Where.

QLinear..              of dequantized operands, quantized again
QGemm                  an integer product, scaled once behind its bias
MatMulIntegerToFloat   the same without a result of integers
DynamicQuantizeMatMul  the same of what is quantized by its own extremes
"""

from __future__ import annotations

from collections.abc import Callable

from pliant.frontend.onnx_context import Node, OnnxContext
from pliant.frontend.onnx_ops_activation import Table
from pliant.frontend.onnx_ops_pool import window_means
from pliant.frontend.onnx_ops_quant import (
    dynamic_codes,
    integer_product,
    is_zero,
    plain,
    requantized,
    unscaled,
)
from pliant.frontend.onnx_values import Entry
from pliant.ir.graph import Value
from pliant.ir.types import DType

F32, I32 = DType.F32, DType.I32

# ---- pools and Where


def _global_mean(cx: OnnxContext, n: Node, x: Value) -> Value:
    return cx.mean(x, list(range(2, x.type.rank)), True)


def pooled(
    mean: Callable[[OnnxContext, Node, Value], Value],
) -> Callable[[OnnxContext, Node], Entry]:
    def rule(cx: OnnxContext, n: Node) -> Entry:
        x = unscaled(cx, n, 0)
        rank = x.type.rank
        last = bool(n.attr("channels_last", 0))
        if last:
            x = cx.transpose(x, (0, rank - 1, *range(1, rank - 1)))
        made = mean(cx, n, x)
        if last:
            made = cx.transpose(made, (0, *range(2, rank), 1))
        return requantized(cx, n, made, 3, 0)

    return rule


def where(cx: OnnxContext, n: Node) -> Entry:
    condition = cx.to_bool(n.tensor(0))
    condition, a, b = cx.spread(condition, unscaled(cx, n, 1), unscaled(cx, n, 4))
    return requantized(cx, n, cx.select(condition, a, b), 7, 1)


# ---- products


def _zero(n: Node, i: int) -> Value | None:
    return None if is_zero(n, i) else n.maybe(i)


def _column(cx: OnnxContext, x: Value | None) -> Value | None:
    """A number of each row of a matrix, beside it."""
    if x is None or x.type.rank != 1 or x.shape[0] == 1:
        return x
    return cx.reshape(x, (x.shape[0], 1))


def _scaled(cx: OnnxContext, n: Node, whole: Value, by: Value, bias: int) -> Value:
    made = cx.join("mul", cx.cast(whole, F32), by)
    added = n.maybe(bias)
    return made if added is None else cx.join("add", made, added)


def integer_to_float(cx: OnnxContext, n: Node) -> Value:
    a, b = n.tensor(0), n.tensor(1)
    whole = integer_product(cx, a, b, _column(cx, _zero(n, 4)), _zero(n, 5))
    first = _column(cx, n.tensor(2))
    assert first is not None
    by = cx.join("mul", plain(cx, first), plain(cx, n.tensor(3)))
    return _scaled(cx, n, whole, by, 6)


def dynamic_matmul(cx: OnnxContext, n: Node) -> Value:
    codes, scale, zero = dynamic_codes(cx, n.tensor(0))
    whole = integer_product(cx, codes, n.tensor(1), zero, _zero(n, 3))
    return _scaled(cx, n, whole, cx.join("mul", scale, plain(cx, n.tensor(2))), 4)


def gemm(cx: OnnxContext, n: Node) -> Entry:
    a, b = n.tensor(0), n.tensor(3)
    if a.type.rank != 2 or b.type.rank != 2:
        cx.unsupported("operands that are no matrices")
    if n.attr("transA", 0):
        a = cx.transpose(a, (1, 0))
    second = _zero(n, 5)
    if n.attr("transB", 0):
        b = cx.transpose(b, (1, 0))
    whole = integer_product(cx, a, b, _zero(n, 2), second)
    bias = n.maybe(6)
    if bias is not None:
        whole = cx.join("add", whole, cx.cast(bias, I32))
    by = cx.join("mul", plain(cx, n.tensor(1)), plain(cx, n.tensor(4)))
    made = cx.mul(cx.join("mul", cx.cast(whole, F32), by), n.attr("alpha", 1.0))
    return requantized(cx, n, made, 7, 0) if n.has(7) else made


QUANTIZED_MICROSOFT: Table = {
    ("com.microsoft::QLinearAveragePool", 1): pooled(window_means),
    ("com.microsoft::QLinearGlobalAveragePool", 1): pooled(_global_mean),
    ("com.microsoft::QLinearWhere", 1): where,
    ("com.microsoft::QGemm", 1): gemm,
    ("com.microsoft::MatMulIntegerToFloat", 1): integer_to_float,
    ("com.microsoft::DynamicQuantizeMatMul", 1): dynamic_matmul,
}
