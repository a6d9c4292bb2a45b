"""Ops of com.microsoft that common exporters and optimizers write.

Attention is in onnx_ops_attention.py, quantized ops in onnx_ops_quant.py.
"""

from __future__ import annotations

import numpy as np

from pliant.frontend.onnx_context import Node, OnnxContext, Rule
from pliant.frontend.onnx_ops_activation import Table
from pliant.frontend.onnx_ops_conv import conv
from pliant.frontend.onnx_ops_linalg import gemm, multiply
from pliant.frontend.onnx_ops_norm import normalized, rms_normalized
from pliant.frontend.onnx_types import ELEMENTS
from pliant.frontend.onnx_values import Entry
from pliant.frontend.translate import Unsupported
from pliant.ir.graph import Value
from pliant.ir.types import DType

I32 = DType.I32


def _gelu(approximate: str) -> Rule:
    def rule(cx: OnnxContext, n: Node) -> Value:
        x, bias = n.tensor(0), n.maybe(1)
        x = x if bias is None else cx.add(x, bias)
        return cx.b.emit("gelu", x, approximate=approximate)

    return rule


def quick_gelu(cx: OnnxContext, n: Node) -> Value:
    x = n.tensor(0)
    return cx.mul(x, cx.unary("sigmoid", cx.mul(x, n.attr("alpha", 1.702))))


def bias_split_gelu(cx: OnnxContext, n: Node) -> Value:
    x = cx.add(n.tensor(0), n.tensor(1))
    last = x.type.rank - 1
    half = x.shape[last] // 2
    gate = cx.b.emit("gelu", cx.slice(x, last, half, half), approximate="none")
    return cx.mul(cx.slice(x, last, 0, half), gate)


def fused_matmul(cx: OnnxContext, n: Node) -> Value:
    a, b = n.tensor(0), n.tensor(1)
    if n.attr("transBatchA", 0) or n.attr("transBatchB", 0):
        cx.unsupported("transposed batches")
    if n.attr("transA", 0):
        a = cx.b.swap(a, -1, -2)
    if n.attr("transB", 0):
        b = cx.b.swap(b, -1, -2)
    made = multiply(cx, a, b)
    alpha = n.attr("alpha", 1.0)
    return made if alpha == 1.0 else cx.mul(made, alpha)


# ---- normalizations


def skip_layer_norm(cx: OnnxContext, n: Node) -> tuple[Entry | None, ...]:
    """(x, skip, weight, bias, bias of x) -> result, mean, deviation, the sum"""
    total = _skipped(cx, n, n.maybe(4))
    made = normalized(
        cx,
        total,
        n.tensor(2),
        n.maybe(3),
        total.type.rank - 1,
        n.attr("epsilon", 1e-12),
        frozenset({0}),
    )
    return made[0], None, None, total


def skip_rms_norm(cx: OnnxContext, n: Node) -> tuple[Entry | None, ...]:
    total = _skipped(cx, n, n.maybe(3))
    eps = n.attr("epsilon", 1e-12)
    made = rms_normalized(cx, total, n.tensor(2), total.type.rank - 1, eps)
    return made, None, None, total


def _skipped(cx: OnnxContext, n: Node, bias: Value | None) -> Value:
    x, skip = n.tensor(0), n.tensor(1)
    total = cx.join("add", x, skip)
    return total if bias is None else cx.add(total, bias)


def simplified_norm(cx: OnnxContext, n: Node) -> tuple[Entry | None, ...]:
    x = n.tensor(0)
    axis, eps = n.axis(n.attr("axis", -1)), n.attr("epsilon", 1e-5)
    return rms_normalized(cx, x, n.tensor(1), axis, eps), None


def embed_layer_norm(cx: OnnxContext, n: Node) -> tuple[Entry | None, ...]:
    """(ids, segments, words, positions, segment table, weight, bias, mask, places)"""
    ids = n.tensor(0)
    batch, length = ids.shape
    words, table = n.tensor(2), n.tensor(3)
    total = cx.b.emit("index", words, cx.wrap_index(ids, words.shape[0], 0))
    if n.has(8):
        places = cx.wrap_index(n.tensor(8), table.shape[0], 0)
        places = cx.broadcast_to(places, (batch, length))
    else:
        places = cx.in_range(cx.iota((batch, length), 1, DType.I64), table.shape[0], 0)
    total = cx.add(total, cx.b.emit("index", table, places))
    if n.has(1) and n.has(4):
        segments = n.tensor(4)
        index = cx.wrap_index(n.tensor(1), segments.shape[0], 0)
        total = cx.add(total, cx.b.emit("index", segments, index))
    made = normalized(
        cx, total, n.tensor(5), n.tensor(6), 2, n.attr("epsilon", 1e-12), frozenset({0})
    )
    lengths = cx.full(0, (batch,), I32)
    if n.has(7):
        lengths = cx.cast(cx.reduce("sum", cx.cast(n.tensor(7), I32), (1,)), I32)
    return made[0], lengths, total


# ---- weights in few bits


def matmul_nbits(cx: OnnxContext, n: Node) -> Value:
    """x times a matrix (N, K) of blocks along K, with a scale for each block.

    The packed bytes are shifted, masked and scaled in ordinary ops.
    """
    x, packed, scales = n.tensor(0), n.tensor(1), n.tensor(2)
    rows, width = n.attrs["N"], n.attrs["K"]
    bits, block = n.attr("bits", 4), n.attrs["block_size"]
    if bits not in (2, 4, 8) or n.has(4):
        cx.unsupported(f"weights of {bits} bits, or in another order")
    blocks = -(-width // block)
    whole = _unpacked(cx, packed, (rows, blocks), block, bits)
    scale = cx.reshape(cx.cast(scales, DType.F32), (rows, blocks, 1))
    if n.has(3):
        given = n.tensor(3)
        if given.dtype.is_float:
            zero = cx.reshape(cx.cast(given, DType.F32), (rows, blocks, 1))
        else:
            per = 8 // bits
            count = -(-blocks // per)
            spread = _unpacked(cx, given, (rows, count), per, bits)
            line = cx.slice(cx.reshape(spread, (rows, count * per)), 1, 0, blocks)
            zero = cx.cast(cx.reshape(line, (rows, blocks, 1)), DType.F32)
        moved = cx.sub(cx.cast(whole, DType.F32), zero)
    else:
        moved = cx.sub(cx.cast(whole, DType.F32), float(1 << (bits - 1)))
    weight = cx.reshape(cx.mul(moved, scale), (rows, blocks * block))
    weight = cx.cast(cx.slice(weight, 1, 0, width), x.dtype)
    made = cx.b.emit("linear", x, weight)
    bias = n.maybe(5)
    return made if bias is None else cx.add(made, bias)


def _unpacked(
    cx: OnnxContext, packed: Value, lead: tuple[int, int], count: int, bits: int
) -> Value:
    """Bytes as numbers of a few bits, the lowest first: (.., count)"""
    per = 8 // bits
    size = -(-count // per)
    held = cx.reshape(cx.cast(packed, DType.U8), (*lead, size, 1))
    if per == 1:
        return cx.slice(cx.reshape(held, (*lead, size)), 2, 0, count)
    steps = np.arange(per, dtype=np.uint8) * bits
    shift = cx.data(steps, ELEMENTS[2], f"shifts_{bits}")
    parts = cx.arith("shift_right", cx.broadcast_to(held, (*lead, size, per)), shift)
    low = cx.arith("bitwise_and", parts, (1 << bits) - 1)
    return cx.slice(cx.reshape(low, (*lead, size * per)), 2, 0, count)


# ---- others


def fused_conv(cx: OnnxContext, n: Node) -> Value:
    made = conv(cx, n)
    if n.has(3):
        made = cx.add(made, n.tensor(3))
    kind = n.attr("activation", "")
    if kind in ("", "Relu"):
        return made if not kind else cx.b.emit("relu", made)
    rates = n.attrs.get("activation_params") or []
    if kind == "LeakyRelu":
        return cx.select(cx.arith("ge", made, 0.0), made, cx.mul(made, rates[0]))
    if kind in ("Sigmoid", "Tanh"):
        return cx.unary(kind.lower(), made)
    if kind == "Clip":
        low = cx.arith("maximum", made, rates[0])
        return cx.arith("minimum", low, rates[1])
    raise Unsupported(f"the activation {kind}")


def fused_gemm(cx: OnnxContext, n: Node) -> Value:
    made, kind = gemm(cx, n), n.attr("activation", "")
    if kind == "Relu":
        return cx.b.emit("relu", made)
    return made if not kind else cx.unsupported(f"the activation {kind}")


_D = "com.microsoft"
MICROSOFT: Table = {
    (f"{_D}::Gelu", 1): _gelu("none"),
    (f"{_D}::BiasGelu", 1): _gelu("none"),
    (f"{_D}::FastGelu", 1): _gelu("tanh"),
    (f"{_D}::QuickGelu", 1): quick_gelu,
    (f"{_D}::BiasSplitGelu", 1): bias_split_gelu,
    (f"{_D}::FusedMatMul", 1): fused_matmul,
    (f"{_D}::TransposeMatMul", 1): fused_matmul,
    (f"{_D}::FusedConv", 1): fused_conv,
    (f"{_D}::FusedGemm", 1): fused_gemm,
    (f"{_D}::SkipLayerNormalization", 1): skip_layer_norm,
    (f"{_D}::SkipSimplifiedLayerNormalization", 1): skip_rms_norm,
    (f"{_D}::SimplifiedLayerNormalization", 1): simplified_norm,
    ("SimplifiedLayerNormalization", 1): simplified_norm,
    (f"{_D}::EmbedLayerNormalization", 1): embed_layer_norm,
    (f"{_D}::MatMulNBits", 1): matmul_nbits,
}
