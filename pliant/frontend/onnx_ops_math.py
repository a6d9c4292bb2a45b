"""Elementwise arithmetic, comparisons, casts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from pliant.frontend.onnx_codes import coded_constant, decode, encode
from pliant.frontend.onnx_context import Node, OnnxContext, Rule
from pliant.frontend.onnx_types import ELEMENTS, NAMES, Element
from pliant.frontend.onnx_values import Coded, Entry, Known
from pliant.ir.graph import Value
from pliant.ir.types import DType
from pliant.sym import as_expr

Table = dict[tuple[str, int], Rule]


def unary(op: str) -> Rule:
    def rule(cx: OnnxContext, n: Node) -> Value:
        return cx.unary(op, n.tensor(0))

    return rule


def rounding(op: str) -> Rule:
    """Integers are what they are."""

    def rule(cx: OnnxContext, n: Node) -> Value:
        x = n.tensor(0)
        return cx.unary(op, x) if x.dtype.is_float else x

    return rule


def composed(function: Callable[[OnnxContext, Value], Value]) -> Rule:
    """A function of one tensor, computed in f32 for half floats."""

    def rule(cx: OnnxContext, n: Node) -> Value:
        x = n.tensor(0)
        return cx.cast(function(cx, cx.cast(x, x.dtype.compute)), x.dtype)

    return rule


# ---- two operands


def old_broadcast(cx: OnnxContext, n: Node) -> tuple[Value, Value]:
    """Before operator set 7, `broadcast` and `axis` said how operands meet."""
    x, y = n.tensor(0), n.tensor(1)
    if n.attrs.get("broadcast") and "axis" in n.attrs:
        axis = n.axis(n.attrs["axis"], x.type.rank)
        ones = x.type.rank - axis - y.type.rank
        y = cx.reshape(y, (*y.shape, *[as_expr(1)] * ones))
    return x, y


def binary(op: str) -> Rule:
    def rule(cx: OnnxContext, n: Node) -> Value:
        return cx.join(op, *old_broadcast(cx, n))

    return rule


def divide(cx: OnnxContext, n: Node) -> Value:
    x, y = old_broadcast(cx, n)
    if x.dtype.is_float:
        return cx.join("div", x, y)
    x, y = cx.spread(x, y)
    y = cx.b.divisor(y, "Div")
    return towards_zero(cx, x, y)


def towards_zero(cx: OnnxContext, x: Value, y: Value) -> Value:
    """An integer quotient as C rounds it."""
    if x.dtype.is_unsigned or (x in cx.nonnegative and y in cx.nonnegative):
        return cx.arith("floordiv", x, y)
    below = cx.arith("floordiv", x, y)
    rest = cx.arith("mod", x, y)
    apart = cx.arith("lt", cx.arith("bitwise_xor", x, y), 0)
    up = cx.b.binary("logical_and", cx.arith("ne", rest, 0), apart)
    return cx.add(below, cx.cast(up, x.dtype))


def modulo(cx: OnnxContext, n: Node) -> Value:
    x, y = cx.spread(n.tensor(0), n.tensor(1))
    if x.dtype.is_float:
        return float_remainder(cx, x, y, bool(n.attr("fmod", 0)))
    y = cx.b.divisor(y, "Mod")
    if n.attr("fmod", 0):
        return cx.sub(x, cx.mul(towards_zero(cx, x, y), y))
    return cx.arith("mod", x, y)


def float_remainder(cx: OnnxContext, x: Value, y: Value, of_x: bool) -> Value:
    """The remainder with the sign of x, or with that of y as Python's."""
    wide = x.dtype.compute
    left, right = (cx.cast(v, wide) for v in (x, y))
    if not of_x:
        return cx.cast(cx.arith("mod", left, right), x.dtype)
    size = cx.arith("mod", cx.unary("abs", left), cx.unary("abs", right))
    return cx.cast(cx.arith("copysign", size, left), x.dtype)


def power(cx: OnnxContext, n: Node) -> Value:
    """The result has the type of the base."""
    x, y = n.tensor(0), n.tensor(1)
    exponent = n.number(1)
    if exponent is not None and exponent == 2 and y.type.rank <= x.type.rank:
        return cx.mul(x, cx.expand_to(x, cx.broadcast_shape(x.shape, y.shape)))
    if exponent == 0.5 and x.dtype.is_float and y.type.rank == 0:
        return cx.unary("sqrt", x)
    if x.dtype is y.dtype:
        return cx.join("pow", x, y)
    if x.dtype.is_float:
        wide = x.dtype.compute
        if y.dtype in (DType.F64, DType.I64) or y.dtype.is_float:
            wide = DType.F64 if y.dtype is DType.F64 else wide
        return cx.cast(cx.join("pow", cx.cast(x, wide), cx.cast(y, wide)), x.dtype)
    if y.dtype.is_float:
        wide = DType.F64
        made = cx.join("pow", cx.cast(x, wide), cx.cast(y, wide))
        return cx.cast(made, x.dtype)
    made = cx.join("pow", cx.cast(x, DType.I64), cx.cast(y, DType.I64))
    return cx.cast(made, x.dtype)


def shift(cx: OnnxContext, n: Node) -> Value:
    left = n.attrs["direction"] == "LEFT"
    x, y = n.tensor(0), n.tensor(1)
    return cx.join("shift_left" if left else "shift_right", x, y)


def logical(op: str) -> Rule:
    def rule(cx: OnnxContext, n: Node) -> Value:
        x, y = old_broadcast(cx, n)
        return cx.join(f"logical_{op}", x, y)

    return rule


# ---- any number of operands


def folded(op: str) -> Rule:
    def rule(cx: OnnxContext, n: Node) -> Value:
        first, *others = n.tensors()
        for other in others:
            first = cx.join(op, first, other)
        return first

    return rule


def mean(cx: OnnxContext, n: Node) -> Value:
    first, *others = n.tensors()
    dtype = first.dtype
    total = cx.cast(first, dtype.compute)
    for other in others:
        total = cx.join("add", total, cx.cast(other, dtype.compute))
    return cx.cast(cx.div(total, float(1 + len(others))), dtype)


def clip(cx: OnnxContext, n: Node) -> Value:
    x = n.tensor(0)
    low, high = n.attrs.get("min"), n.attrs.get("max")
    ends = [n.maybe(1) or low, n.maybe(2) or high]
    for op, end in zip(("maximum", "minimum"), ends, strict=True):
        if end is not None:
            x = cx.arith(op, x, end if isinstance(end, Value) else float(end))
    return x


# ---- comparisons and choices


def where(cx: OnnxContext, n: Node) -> Value:
    cond, x, y = cx.spread(n.tensor(0), n.tensor(1), n.tensor(2))
    cx.same_types(x, y)
    return cx.select(cond, x, y)


def isinf(cx: OnnxContext, n: Node) -> Value:
    x = n.tensor(0)
    positive = bool(n.attr("detect_positive", 1))
    negative = bool(n.attr("detect_negative", 1))
    if positive and negative:
        return cx.unary("isinf", x)
    if not positive and not negative:
        return cx.full(False, x.shape, DType.BOOL)
    return cx.arith("eq", x, math.inf if positive else -math.inf)


# ---- types


def cast_to(
    cx: OnnxContext, entry: Entry, element: Element, saturate: bool, rounded: str
) -> Entry:
    own = cx.element_of(entry)
    if own is element:
        return entry
    if element.dtype is not None:
        if isinstance(entry, Coded):
            return decode(cx, entry, element.dtype)
        if own.dtype is None:
            return decode(cx, _as_codes(cx, entry), element.dtype)
        return cx.cast(cx.value(entry), element.dtype)
    if own.dtype is None:
        coded = entry if isinstance(entry, Coded) else _as_codes(cx, entry)
        entry = decode(cx, coded, DType.F32)
    return encode(cx, cx.value(entry), element, saturate, rounded)


def _as_codes(cx: OnnxContext, entry: Entry) -> Coded:
    """A constant of a type without a DType, as codes."""
    if not isinstance(entry, Known):
        cx.unsupported("a type that pliant does not have")
    return coded_constant(cx, entry)


def cast(cx: OnnxContext, n: Node) -> Entry:
    return _cast(cx, n, n.attrs["to"])


def cast_like(cx: OnnxContext, n: Node) -> Entry:
    return _cast(cx, n, cx.element_of(n.entry(1)).number)


def _cast(cx: OnnxContext, n: Node, number: Any) -> Entry:
    element = ELEMENTS.get(number)
    if element is None:
        cx.unsupported(f"a cast to {NAMES.get(number, number)}")
    saturate = bool(n.attr("saturate", 1))
    return cast_to(cx, n.entry(0), element, saturate, n.attr("round_mode", "up"))


def bitcast(cx: OnnxContext, n: Node) -> Value:
    element = ELEMENTS.get(n.attrs["to"])
    if element is None or element.dtype is None:
        cx.unsupported(f"a bitcast to {NAMES.get(n.attrs['to'])}")
    return cx.b.bitcast(n.tensor(0), element.dtype)


# ---- functions that are compositions


def _asin(cx: OnnxContext, x: Value) -> Value:
    """atan2(x, sqrt((1-x)(1+x)))"""
    rest = cx.mul(cx.arith("sub", 1.0, x), cx.add(x, 1.0))
    return cx.arith("atan2", x, cx.unary("sqrt", rest))


def _acos(cx: OnnxContext, x: Value) -> Value:
    rest = cx.mul(cx.arith("sub", 1.0, x), cx.add(x, 1.0))
    return cx.arith("atan2", cx.unary("sqrt", rest), x)


def _atan(cx: OnnxContext, x: Value) -> Value:
    return cx.arith("atan2", x, cx.full(1.0, x.shape, x.dtype))


def _sinh(cx: OnnxContext, x: Value) -> Value:
    """(e + e/(e+1)) / 2 with e = expm1(|x|), and the sign of x"""
    e = cx.unary("expm1", cx.unary("abs", x))
    half = cx.mul(cx.add(e, cx.div(e, cx.add(e, 1.0))), 0.5)
    large = cx.arith("gt", cx.unary("abs", x), 40.0)
    much = cx.mul(cx.unary("exp", cx.sub(cx.unary("abs", x), math.log(2))), 1.0)
    return cx.arith("copysign", cx.select(large, much, half), x)


def _cosh(cx: OnnxContext, x: Value) -> Value:
    e = cx.unary("exp", cx.sub(cx.unary("abs", x), math.log(2)))
    return cx.add(e, cx.div(0.25, e))


def _asinh(cx: OnnxContext, x: Value) -> Value:
    """log1p(a + a²/(1 + sqrt(a²+1))), with the sign of x"""
    a = cx.unary("abs", x)
    square = cx.mul(a, a)
    root = cx.unary("sqrt", cx.add(square, 1.0))
    small = cx.unary("log1p", cx.add(a, cx.div(square, cx.add(root, 1.0))))
    large = cx.add(cx.unary("log", a), math.log(2))
    made = cx.select(cx.arith("gt", a, 1e9), large, small)
    return cx.arith("copysign", made, x)


def _acosh(cx: OnnxContext, x: Value) -> Value:
    """log1p(t + sqrt(t(t+2))) with t = x - 1"""
    t = cx.sub(x, 1.0)
    root = cx.unary("sqrt", cx.mul(t, cx.add(t, 2.0)))
    large = cx.add(cx.unary("log", x), math.log(2))
    small = cx.unary("log1p", cx.add(t, root))
    return cx.select(cx.arith("gt", x, 1e9), large, small)


def _atanh(cx: OnnxContext, x: Value) -> Value:
    """log1p(2a/(1-a)) / 2, with the sign of x"""
    a = cx.unary("abs", x)
    ratio = cx.div(cx.add(a, a), cx.arith("sub", 1.0, a))
    return cx.arith("copysign", cx.mul(cx.unary("log1p", ratio), 0.5), x)


def sign(cx: OnnxContext, n: Node) -> Value:
    """NaN stays NaN."""
    x = n.tensor(0)
    made = cx.unary("sign", x)
    return cx.select(cx.unary("isnan", x), x, made) if x.dtype.is_float else made


MATH: Table = {
    **{
        (name, 1): unary(op)
        for name, op in (
            *(("Abs", "abs"), ("Neg", "neg"), ("Exp", "exp"), ("Log", "log")),
            *(("Sqrt", "sqrt"), ("Reciprocal", "reciprocal"), ("Erf", "erf")),
            *(("Sin", "sin"), ("Cos", "cos"), ("Tan", "tan"), ("Tanh", "tanh")),
            *(("Sigmoid", "sigmoid"), ("Not", "logical_not"), ("IsNaN", "isnan")),
            ("BitwiseNot", "bitwise_not"),
        )
    },
    **{
        (name, 1): rounding(op)
        for name, op in (("Floor", "floor"), ("Ceil", "ceil"), ("Round", "round"))
    },
    **{
        (name, 1): composed(function)
        for name, function in (
            *(("Asin", _asin), ("Acos", _acos), ("Atan", _atan), ("Sinh", _sinh)),
            *(("Cosh", _cosh), ("Asinh", _asinh), ("Acosh", _acosh)),
            ("Atanh", _atanh),
        )
    },
    **{
        (name, 1): binary(op)
        for name, op in (
            *(("Add", "add"), ("Sub", "sub"), ("Mul", "mul"), ("Equal", "eq")),
            *(("Less", "lt"), ("Greater", "gt"), ("LessOrEqual", "le")),
            *(("GreaterOrEqual", "ge"), ("BitwiseAnd", "bitwise_and")),
            *(("BitwiseOr", "bitwise_or"), ("BitwiseXor", "bitwise_xor")),
        )
    },
    **{(op.title(), 1): logical(op) for op in ("and", "or", "xor")},
    **{
        (name, 1): folded(op)
        for name, op in (("Max", "maximum"), ("Min", "minimum"), ("Sum", "add"))
    },
    ("Sign", 9): sign,
    ("Div", 1): divide,
    ("Mod", 10): modulo,
    ("Pow", 1): power,
    ("BitShift", 11): shift,
    ("Mean", 1): mean,
    ("Clip", 6): clip,
    ("Where", 9): where,
    ("IsInf", 10): isinf,
    ("Cast", 6): cast,
    ("CastLike", 15): cast_like,
    ("BitCast", 1): bitcast,
}
