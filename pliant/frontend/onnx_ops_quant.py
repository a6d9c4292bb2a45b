"""Quantized ops: written as integers, scales and zero points, in ordinary ops.

    QuantizeLinear      clip(round(x / scale) + zero)
    DequantizeLinear    (x - zero) * scale
    QLinear..           of dequantized operands, or of integers and one scale behind

A product of 8-bit integers is summed up in i32, as the IR's matmul does it.
"""

from __future__ import annotations

from collections.abc import Callable

from pliant.frontend.onnx_codes import coded_constant, decode, encode
from pliant.frontend.onnx_context import Node, OnnxContext
from pliant.frontend.onnx_ops_activation import Table
from pliant.frontend.onnx_ops_conv import biased, convolve, kernel_size, sliding
from pliant.frontend.onnx_ops_linalg import multiply
from pliant.frontend.onnx_types import ELEMENTS, OF_DTYPE, Element
from pliant.frontend.onnx_values import Coded, Entry, Known
from pliant.ir.graph import Value
from pliant.ir.types import DType
from pliant.sym import as_expr, product

F32, I32 = DType.F32, DType.I32


def _number(cx: OnnxContext, entry: Entry, dtype: DType) -> Value:
    """The numbers of a tensor, whatever its type."""
    element = cx.element_of(entry)
    if element.dtype is None:
        coded = entry if isinstance(entry, Coded) else None
        if isinstance(entry, Known):
            coded = coded_constant(cx, entry)
        assert coded is not None
        return decode(cx, coded, dtype)
    return cx.cast(cx.value(entry), dtype)


def spread(cx: OnnxContext, part: Value, x: Value, axis: int, block: int) -> Value:
    """A scale or zero point beside x: of all, of each row of an axis, or of blocks."""
    rank = x.type.rank
    if part.type.rank == 0 or part.type.numel == as_expr(1):
        return cx.reshape(part, ())
    if part.type.rank == 1 and not block:
        row = [as_expr(1)] * rank
        row[axis] = part.shape[0]
        return cx.reshape(part, row)
    if not block:
        return part
    shape = (*part.shape[: axis + 1], as_expr(1), *part.shape[axis + 1 :])
    wide = (*part.shape[: axis + 1], as_expr(block), *part.shape[axis + 1 :])
    joined = (*part.shape[:axis], part.shape[axis] * block, *part.shape[axis + 1 :])
    made = cx.reshape(cx.broadcast_to(cx.reshape(part, shape), wide), joined)
    return cx.slice(made, axis, 0, x.shape[axis])


def _ends(element: Element) -> tuple[int, int]:
    bits = element.bits or 8 * (element.dtype.bytes if element.dtype else 1)
    if element.name.startswith("U"):
        return 0, 2**bits - 1
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


def quantize(cx: OnnxContext, n: Node) -> Entry:
    x, scale = n.tensor(0), n.tensor(1)
    axis, block = n.attr("axis", 1), n.attr("block_size", 0)
    axis = n.axis(axis) if x.type.rank and -x.type.rank <= axis < x.type.rank else 0
    number = n.attr("output_dtype", 0)
    element = ELEMENTS[number] if number else ELEMENTS[2]
    zero = None
    if n.has(2):
        element = cx.element_of(n.entry(2))
        if not element.is_float:
            zero = spread(cx, _number(cx, n.entry(2), I32), x, axis, block)
    work = F32 if x.dtype is not DType.F64 else DType.F64
    if x.dtype in (DType.F16, DType.BF16) and scale.dtype is x.dtype:
        work = x.dtype
    by = spread(cx, cx.cast(scale, work), x, axis, block)
    ratio = cx.div(cx.cast(x, work), by)
    if element.is_float:
        return encode(cx, ratio, element, bool(n.attr("saturate", 1)), "up")
    return quantized(cx, cx.cast(ratio, F32), zero, element)


def quantized(
    cx: OnnxContext, ratio: Value, zero: Value | None, element: Element
) -> Entry:
    """Rounded to even, moved by the zero point, and kept between the ends."""
    low, high = _ends(element)
    whole = cx.unary("round", ratio)
    # Beyond these, the zero point does not matter.
    whole = cx.arith("maximum", cx.arith("minimum", whole, 2.0**30), -(2.0**30))
    made = cx.cast(whole, I32)
    if zero is not None:
        made = cx.join("add", made, zero)
    made = cx.arith("maximum", cx.arith("minimum", made, high), low)
    if element.dtype is None:
        return encode(cx, made, element, True, "up")
    return cx.cast(made, element.dtype)


def dequantize(cx: OnnxContext, n: Node) -> Value:
    entry, scale = n.entry(0), n.tensor(1)
    number = n.attr("output_dtype", 0)
    to = ELEMENTS[number].dtype if number else scale.dtype
    own = cx.element_of(entry)
    axis, block = n.attr("axis", 1), n.attr("block_size", 0)
    rank = len(cx.shape_of(entry))
    axis = n.axis(axis) if rank and -rank <= axis < rank else 0
    # Differences of 16 bits are exact in f32.
    wide = DType.I64 if own.dtype is I32 else F32
    whole = _number(cx, entry, F32 if own.is_float or not n.has(2) else wide)
    shape = whole.shape
    if block and rank and (size := shape[axis]).is_const and not size.value % block:
        # A block is an axis of its own, so that products can decode their weights.
        lead, behind = shape[:axis], shape[axis + 1 :]
        whole = cx.reshape(whole, (*lead, size.value // block, block, *behind))

    def beside(part: Value) -> Value:
        if whole.type.rank == rank:
            return spread(cx, part, whole, axis, block)
        return cx.reshape(
            part, (*part.shape[: axis + 1], as_expr(1), *part.shape[axis + 1 :])
        )

    if not own.is_float and n.has(2):
        zero = beside(_number(cx, n.entry(2), wide))
        whole = cx.cast(cx.join("sub", whole, zero), F32)
    made = cx.join("mul", whole, beside(cx.cast(scale, F32)))
    return cx.cast(cx.reshape(made, shape), to or F32)


def dynamic_quantize(cx: OnnxContext, n: Node) -> tuple[Entry, ...]:
    return dynamic_codes(cx, n.tensor(0))


def dynamic_codes(cx: OnnxContext, x: Value) -> tuple[Value, Value, Value]:
    """To u8 by the smallest and the largest element, with 0 between them.

    -> (codes, scale, zero point)
    """
    axes = range(x.type.rank)
    low = cx.arith("minimum", cx.reduce("min", x, axes), 0.0)
    high = cx.arith("maximum", cx.reduce("max", x, axes), 0.0)
    scale = cx.div(cx.sub(high, low), 255.0)
    zero = cx.unary("round", cx.unary("neg", cx.div(low, scale)))
    zero = cx.arith("minimum", cx.arith("maximum", zero, 0.0), 255.0)
    zero = cx.cast(zero, DType.U8)
    made = quantized(cx, cx.div(x, scale), cx.cast(zero, I32), ELEMENTS[2])
    return cx.value(made), scale, zero


# ---- products


def centered(cx: OnnxContext, x: Value, zero: Value | None, axis: int) -> Value:
    """x - zero as i32; a zero point of each row of an axis stands beside it."""
    wide = cx.cast(x, I32)
    if zero is None:
        return wide
    return cx.join("sub", wide, spread(cx, cx.cast(zero, I32), x, axis, 0))


def is_zero(n: Node, i: int) -> bool:
    known = n.known(i)
    if not n.has(i):
        return True
    return known is not None and not known.is_symbolic and not known.array.any()


def matmul_integer(cx: OnnxContext, n: Node) -> Value:
    a, b = n.tensor(0), n.tensor(1)
    return _product(cx, n, a, b, 2, 3)


def _product(
    cx: OnnxContext, n: Node, a: Value, b: Value, zero_a: int, zero_b: int
) -> Value:
    """(a - zero_a) x (b - zero_b) in i32; zero points are inputs of the node."""
    zeros = (None if is_zero(n, i) else n.maybe(i) for i in (zero_a, zero_b))
    return integer_product(cx, a, b, *zeros)


def integer_product(
    cx: OnnxContext, a: Value, b: Value, first: Value | None, second: Value | None
) -> Value:
    """(a - first) x (b - second) in i32."""
    if first is None and second is None and a.type.rank > 1 < b.type.rank:
        rank = max(a.type.rank, b.type.rank)
        ones = [as_expr(1)] * rank
        left = cx.reshape(a, (*ones[a.type.rank :], *a.shape))
        right = cx.reshape(b, (*ones[b.type.rank :], *b.shape))
        return cx.b.emit("matmul", left, right)
    left = centered(cx, a, first, max(a.type.rank - 2, 0))
    right = centered(cx, b, second, b.type.rank - 1)
    return multiply(cx, left, right)


def qlinear_matmul(cx: OnnxContext, n: Node) -> Entry:
    a, b = n.tensor(0), n.tensor(3)
    total = cx.cast(_product(cx, n, a, b, 2, 5), F32)
    first = cx.cast(n.tensor(1), F32)
    if first.type.rank == 1 and first.shape[0] != 1:
        first = cx.reshape(first, (*first.shape, as_expr(1)))
    second = cx.cast(n.tensor(4), F32)
    scale = cx.join("mul", plain(cx, first), plain(cx, second))
    ratio = cx.join("div", cx.join("mul", total, scale), plain(cx, n.tensor(6)))
    zero = cx.cast(n.tensor(7), I32)
    element = OF_DTYPE[n.tensor(7).dtype]
    return quantized(cx, cx.cast(ratio, F32), plain(cx, zero), element)


def plain(cx: OnnxContext, x: Value) -> Value:
    """A vector of one element as a scalar."""
    one = x.type.rank == 1 and x.shape[0] == 1
    made = cx.reshape(x, ()) if one else x
    return cx.cast(made, F32) if made.dtype.is_float else made


def conv_integer(cx: OnnxContext, n: Node) -> Value:
    x, weight = n.tensor(0), n.tensor(1)
    return _convolution(cx, n, x, weight, n.maybe(2), n.maybe(3))


def _convolution(
    cx: OnnxContext,
    n: Node,
    x: Value,
    weight: Value,
    zero_x: Value | None,
    zero_w: Value | None,
) -> Value:
    """In f64, where sums of products of 8-bit integers are exact."""
    size = kernel_size(cx, n, weight)
    w = sliding(cx, n, size, list(x.shape[2:]))
    left = cx.cast(centered(cx, x, zero_x, 1), DType.F64)
    right = cx.cast(centered(cx, weight, zero_w, 0), DType.F64)
    made = convolve(cx, left, right, w, n.attr("group", 1))
    return cx.cast(made, I32)


def qlinear_conv(cx: OnnxContext, n: Node) -> Entry:
    x, weight = n.tensor(0), n.tensor(3)
    total = _convolution(cx, n, x, weight, n.maybe(2), n.maybe(5))
    total = biased(cx, total, n.maybe(8))
    factor = cx.join(
        "mul", plain(cx, n.tensor(1)), cx.cast(plain(cx, n.tensor(4)), F32)
    )
    if factor.type.rank:
        factor = cx.reshape(factor, (*factor.shape, *[1] * (x.type.rank - 2)))
    ratio = cx.div(cx.mul(cx.cast(total, F32), factor), plain(cx, n.tensor(6)))
    zero = n.tensor(7)
    return quantized(cx, ratio, cx.cast(plain(cx, zero), I32), OF_DTYPE[zero.dtype])


# ---- elementwise, of com.microsoft


def unscaled(cx: OnnxContext, n: Node, place: int) -> Value:
    """The numbers of an operand that is followed by its scale and zero point."""
    whole = cx.cast(n.tensor(place), I32)
    if n.has(place + 2):
        whole = cx.join("sub", whole, cx.cast(plain(cx, n.tensor(place + 2)), I32))
    return cx.mul(cx.cast(whole, F32), plain(cx, n.tensor(place + 1)))


def requantized(cx: OnnxContext, n: Node, x: Value, place: int, like: int) -> Entry:
    """x by the scale at `place`, and the zero point behind it."""
    ratio = cx.div(x, plain(cx, n.tensor(place)))
    zero = n.maybe(place + 1)
    element = OF_DTYPE[(zero if zero is not None else n.tensor(like)).dtype]
    moved = None if zero is None else cx.cast(plain(cx, zero), I32)
    return quantized(cx, ratio, moved, element)


def qlinear_binary(op: str) -> Callable[[OnnxContext, Node], Entry]:
    def rule(cx: OnnxContext, n: Node) -> Entry:
        made = cx.join(op, unscaled(cx, n, 0), unscaled(cx, n, 3))
        return requantized(cx, n, made, 6, 0)

    return rule


def qlinear_unary(
    function: Callable[[OnnxContext, Node, Value], Value],
) -> Callable[[OnnxContext, Node], Entry]:
    def rule(cx: OnnxContext, n: Node) -> Entry:
        return requantized(cx, n, function(cx, n, unscaled(cx, n, 0)), 3, 0)

    return rule


def qlinear_concat(cx: OnnxContext, n: Node) -> Entry:
    parts = [unscaled(cx, n, k) for k in range(2, len(n.inputs), 3)]
    whole = cx.concat(parts, n.axis(n.attrs["axis"], parts[0].type.rank))
    return requantized(cx, n, whole, 0, 2)


def _leaky(cx: OnnxContext, n: Node, x: Value) -> Value:
    return cx.select(cx.arith("ge", x, 0.0), x, cx.mul(x, n.attr("alpha", 0.01)))


def _softmax(cx: OnnxContext, n: Node, x: Value) -> Value:
    axis = n.axis(n.attr("axis", -1))
    if n.attr("opset", 13) < 13:
        shape = product(x.shape[:axis]), product(x.shape[axis:])
        flat = cx.b.emit("softmax", cx.reshape(x, shape), axis=1)
        return cx.reshape(flat, x.shape)
    return cx.b.emit("softmax", x, axis=axis)


QUANTIZED: Table = {
    ("QuantizeLinear", 10): quantize,
    ("DequantizeLinear", 10): dequantize,
    ("DynamicQuantizeLinear", 11): dynamic_quantize,
    ("MatMulInteger", 10): matmul_integer,
    ("QLinearMatMul", 10): qlinear_matmul,
    ("ConvInteger", 10): conv_integer,
    ("QLinearConv", 10): qlinear_conv,
    ("com.microsoft::QuantizeLinear", 1): quantize,
    ("com.microsoft::DequantizeLinear", 1): dequantize,
    ("com.microsoft::QLinearAdd", 1): qlinear_binary("add"),
    ("com.microsoft::QLinearMul", 1): qlinear_binary("mul"),
    ("com.microsoft::QLinearSigmoid", 1): qlinear_unary(
        lambda cx, n, x: cx.unary("sigmoid", x)
    ),
    ("com.microsoft::QLinearLeakyRelu", 1): qlinear_unary(_leaky),
    ("com.microsoft::QLinearSoftmax", 1): qlinear_unary(_softmax),
    ("com.microsoft::QLinearConcat", 1): qlinear_concat,
}
