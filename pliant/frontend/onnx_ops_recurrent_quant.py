"""DynamicQuantizeLSTM of com.microsoft: weights of 8 bits, states quantized on the way.

    weights  (D, I, 4H) and (D, H, 4H), with a scale and a zero point for each
             direction, or for each of its columns
    product  x becomes u8 by its own smallest and largest number: all steps of the
             inputs at once, all rows of a state in each step

    (x - zero) @ w * scale = (x @ w - zero * sums of columns of w) * scale

The products are exact, in i32. A zero point of w that is not 0 is taken from w first.
"""

from __future__ import annotations

from collections.abc import Sequence

from pliant.frontend.onnx_context import Node, OnnxContext
from pliant.frontend.onnx_ops_activation import Table
from pliant.frontend.onnx_ops_quant import dynamic_codes
from pliant.frontend.onnx_ops_recurrent import Layer, lstm_of
from pliant.ir.graph import Value
from pliant.ir.types import DType
from pliant.sym import product

F32, I32 = DType.F32, DType.I32


class _Quantized(Layer):
    inner = 1

    def __init__(self, cx: OnnxContext, n: Node) -> None:
        super().__init__(cx, n, 4)
        if self.lengths is not None:
            cx.unsupported("lengths of rows: what is behind them is quantized as well")

    def rows(self, number: int) -> Value:
        return self.quantized_product(self.xs, self._weights(self.weight, 8, number))

    def held(self, number: int) -> list[Value]:
        return self._weights(self.hidden, 10, number)

    def step(self, state: Value, held: Sequence[Value]) -> Value:
        return self.quantized_product(state, held)

    def _weights(self, weight: Value, place: int, number: int) -> list[Value]:
        """Codes, the sums of their columns, and the scale."""
        cx, n = self.cx, self.n
        codes = self.part(weight, number)
        scale = self.part(n.tensor(place), number)
        zero = n.known(place + 1)
        if zero is None and n.has(place + 1):
            cx.unsupported("zero points of weights that are not constant")
        if zero is not None and zero.array.any():
            own = cx.cast(self.part(n.tensor(place + 1), number), I32)
            codes = cx.join("sub", cx.cast(codes, I32), own)
        sums = cx.reduce("sum", cx.cast(codes, I32), (0,))
        return [codes, sums, scale]

    def quantized_product(self, x: Value, held: Sequence[Value]) -> Value:
        cx = self.cx
        weight, sums, by = held
        codes, scale, zero = dynamic_codes(cx, x)
        flat = cx.reshape(codes, (product(x.shape[:-1]), x.shape[-1]))
        if weight.dtype is I32:
            flat = cx.cast(flat, I32)
        whole = cx.b.emit("matmul", flat, weight)
        moved = cx.join("mul", sums, cx.cast(zero, I32))
        exact = cx.cast(cx.join("sub", whole, moved), F32)
        made = cx.join("mul", exact, cx.join("mul", by, scale))
        return cx.reshape(made, (*x.shape[:-1], weight.shape[1]))


def dynamic_lstm(cx: OnnxContext, n: Node) -> tuple[Value, ...]:
    return lstm_of(_Quantized(cx, n))


QUANTIZED_LAYERS: Table = {("com.microsoft::DynamicQuantizeLSTM", 1): dynamic_lstm}
