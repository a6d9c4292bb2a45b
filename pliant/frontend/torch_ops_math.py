"""Elementwise aten ops: arithmetic, comparisons, logic."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from pliant.frontend.torch_ops_context import HALF, Operand, TorchContext
from pliant.ir.graph import Value
from pliant.ir.types import DType
from pliant.sym import Expr, ne

aten = torch.ops.aten
Translate = Callable[..., Any]


# --- families -------------------------------------------------------------------


def float_unary(op: str) -> Translate:
    """Integers are computed in torch's default float type."""
    return lambda cx, x: cx.unary(op, x, cx.out_dtype)


def rounding(op: str) -> Translate:
    """floor, ceil, round, trunc: the identity on integers."""
    return lambda cx, x: cx.unary(op, x) if x.dtype.is_float else x


def binary(op: str) -> Translate:
    return lambda cx, x, y: cx.arith(op, x, y)


def compare(op: str) -> Translate:
    return lambda cx, x, y: cx.arith(op, x, y)


def logical(op: str) -> Translate:
    def translate(cx: TorchContext, x: Value, y: Value) -> Value:
        x, y = cx.aligned(cx.to_bool(x), cx.to_bool(y))
        return cx.b.binary(op, x, y)

    return translate


def bitwise(op: str) -> Translate:
    """On booleans a bitwise op is the logical one."""

    def translate(cx: TorchContext, x: Operand, y: Operand) -> Value:
        dtype = cx.promote(x, y)
        name = op.replace("bitwise", "logical") if dtype is DType.BOOL else op
        return cx.arith(name, x, y, dtype)

    return translate


def via_f32(translate: Translate) -> Translate:
    """For activations made of several ops: half floats round once, at the end."""

    def wide(cx: TorchContext, x: Value, *args: Any, **kwargs: Any) -> Value:
        if x.dtype not in HALF:
            out: Value = translate(cx, x, *args, **kwargs)
            return out
        return cx.cast(translate(cx, cx.cast(x, DType.F32), *args, **kwargs), x.dtype)

    return wide


# --- arithmetic -----------------------------------------------------------------


def scaled(cx: TorchContext, y: Operand, alpha: Any) -> Operand:
    if alpha == 1:
        return y
    if isinstance(y, Value):
        return cx.arith("mul", y, alpha)
    return y * alpha if isinstance(y, int | float | Expr) else cx.mul(y, alpha)


def add(cx: TorchContext, x: Operand, y: Operand, alpha: Any = 1) -> Value:
    dtype = cx.promote(x, y)
    if dtype is DType.BOOL:
        return cx.arith("logical_or", x, y, dtype)
    if y == 0 and isinstance(x, Value) and x.dtype is dtype and dtype.is_int:
        return x  # only integers: -0.0 + 0 is 0.0
    out = cx.arith("add", x, scaled(cx, y, alpha), dtype)
    if _nonnegative(cx, x) and _nonnegative(cx, y) and _positive(alpha):
        cx.nonnegative.add(out)
    return out


def _nonnegative(cx: TorchContext, x: Operand) -> bool:
    if isinstance(x, Value):
        return x in cx.nonnegative
    return isinstance(x, int | float) and x >= 0


def _positive(alpha: Any) -> bool:
    return isinstance(alpha, int | float) and alpha > 0


def sub(cx: TorchContext, x: Operand, y: Operand, alpha: Any = 1) -> Value:
    return cx.arith("sub", x, scaled(cx, y, alpha), cx.promote(x, y))


def rsub(cx: TorchContext, x: Operand, y: Operand, alpha: Any = 1) -> Value:
    return sub(cx, y, x, alpha)


def mul(cx: TorchContext, x: Operand, y: Operand) -> Value:
    dtype = cx.promote(x, y)
    if dtype is DType.BOOL:
        return cx.arith("logical_and", x, y, dtype)
    out = cx.arith("mul", x, y, dtype)
    if _nonnegative(cx, x) and _nonnegative(cx, y):
        cx.nonnegative.add(out)
    return out


def divided(op: str) -> Translate:
    """floordiv or mod. Integers are checked not to be divided by 0."""

    def translate(cx: TorchContext, x: Operand, y: Operand) -> Value:
        dtype = cx.promote(x, y)
        if dtype.is_float:
            return cx.arith(op, x, y, dtype)
        return cx.arith(op, *checked_division(cx, x, y, dtype))

    return translate


def checked_division(
    cx: TorchContext, x: Operand, y: Operand, dtype: DType
) -> tuple[Value, Value]:
    """Both operands of a division of integers, the divisor checked not to be 0.

    It is checked in the shape of the result: where there is none, nothing is divided.
    """
    left, right = cx.aligned(cx.tensor(x, dtype), cx.tensor(y, dtype))
    if isinstance(y, int | Expr) and cx.proves(ne(y, 0)):
        return left, right
    shape = cx.b.broadcast_shapes(left.shape, right.shape)
    right = cx.broadcast_to(right, shape)
    return left, cx.b.divisor(right, cx.op_name)


def div(
    cx: TorchContext, x: Operand, y: Operand, rounding_mode: str | None = None
) -> Value:
    dtype = cx.promote(x, y)
    if rounding_mode == "floor":
        made: Value = divided("floordiv")(cx, x, y)
        return made
    if rounding_mode == "trunc":
        if dtype.is_float:
            # A half would round the quotient up to the integer that it is short of.
            wide = cx.arith("div", x, y, dtype.compute)
            return cx.cast(cx.unary("trunc", wide), dtype)
        return _truncated_quotient(cx, *checked_division(cx, x, y, dtype))
    return cx.arith("div", x, y, dtype if dtype.is_float else cx.out_dtype)


def _truncated_quotient(cx: TorchContext, x: Value, y: Value) -> Value:
    """Round towards zero: the floor, and one more where it is below a fraction.

    Not by way of |x|: the least integer has none.
    """
    floor = cx.arith("floordiv", x, y)
    if x.dtype is DType.U8:
        return floor
    return cx.select(_rounded_down(cx, x, y), cx.arith("add", floor, 1), floor)


def _rounded_down(cx: TorchContext, x: Value, y: Value) -> Value:
    """Where the floor of x / y is not what it is when rounded towards zero."""
    rest = cx.arith("mod", x, y)  # of y's sign
    inexact = cx.arith("ne", rest, 0)
    opposite = cx.arith("ne", cx.arith("lt", x, 0), cx.arith("lt", y, 0))
    return cx.arith("logical_and", inexact, opposite)


def fmod(cx: TorchContext, x: Operand, y: Operand) -> Value:
    """The remainder with the sign of x."""
    dtype = cx.promote(x, y)
    if dtype.is_float:
        left, right = cx.tensor(x, dtype), cx.tensor(y, dtype)
        rest = cx.arith("mod", cx.unary("abs", left), cx.unary("abs", right))
        out = cx.arith("copysign", rest, left)
        if not cx.training:
            return out
        times = cx.unary("trunc", cx.div(left, right))
        return cx.with_slopes(out, (left, 1.0), (right, cx.unary("neg", times)))
    left, right = checked_division(cx, x, y, dtype)
    rest = cx.arith("mod", left, right)
    if dtype is DType.U8:
        return rest
    return cx.select(_rounded_down(cx, left, right), cx.sub(rest, right), rest)


def power(cx: TorchContext, x: Operand, y: Operand) -> Value:
    dtype = cx.promote(x, y)
    if not isinstance(x, Value) or isinstance(y, Value) or not dtype.is_float:
        if isinstance(x, Value) and y == 2:
            return cx.arith("mul", x, x)
        return cx.arith("pow", x, y, dtype)
    exponent = y.value if isinstance(y, Expr) and y.is_const else y
    x = cx.tensor(x, dtype)
    match exponent:
        case 0.5:
            return cx.unary("sqrt", x)
        case -0.5:
            return cx.unary("rsqrt", x)
        case 1:
            return x
        case 2:
            return cx.mul(x, x)
        case 3:
            cube: Value = via_f32(lambda cx, x: cx.mul(cx.mul(x, x), x))(cx, x)
            return cube
        case -1:
            return cx.unary("reciprocal", x)
        case -2:
            over = via_f32(lambda cx, x: cx.unary("reciprocal", cx.mul(x, x)))
            made: Value = over(cx, x)
            return made
        case _:
            return cx.arith("pow", x, exponent, dtype)


def negative(cx: TorchContext, x: Value) -> Value:
    return cx.unary("neg", x)


def absolute(cx: TorchContext, x: Value) -> Value:
    if x.dtype in (DType.BOOL, DType.U8):
        return x
    out = cx.unary("abs", x)
    if x.dtype.is_int:
        cx.nonnegative.add(out)
    return out


def sign(cx: TorchContext, x: Value) -> Value:
    return x if x.dtype is DType.BOOL else cx.unary("sign", x)


def round_decimals(cx: TorchContext, x: Value, decimals: int = 0) -> Value:
    if not x.dtype.is_float:
        return x
    if decimals == 0:
        return cx.unary("round", x)
    scale = 10.0 ** abs(decimals)
    up, down = ("mul", "div") if decimals > 0 else ("div", "mul")
    return cx.arith(down, cx.unary("round", cx.arith(up, x, scale)), scale)


def log_base(base: float) -> Translate:
    def translate(cx: TorchContext, x: Value) -> Value:
        wide = cx.cast(x, cx.out_dtype.compute)
        return cx.arith("mul", cx.unary("log", wide), 1.0 / math.log(base))

    return translate


def logit(cx: TorchContext, x: Value, eps: float | None = None) -> Value:
    """logit of x, clamped between eps and 1 - eps if eps is given."""
    x = cx.cast(x, cx.out_dtype)
    return cx.unary("logit", x if eps is None else clamp(cx, x, eps, 1 - eps))


def exp2(cx: TorchContext, x: Value) -> Value:
    return cx.arith("pow", 2.0, cx.cast(x, cx.out_dtype))


def sinh(cx: TorchContext, x: Value) -> Value:
    x = cx.cast(x, cx.out_dtype)
    size = cx.unary("abs", x)
    grown = cx.unary("expm1", size)  # e^|x| - 1
    # sinh = (g + g/(g + 1)) / 2, exact near zero.
    small = cx.mul(cx.add(grown, cx.div(grown, cx.add(grown, 1.0))), 0.5)
    # e^|x| overflows before sinh does: the square of a root does not.
    root = cx.unary("exp", cx.mul(size, 0.5))
    out = cx.select(cx.arith("gt", size, 20.0), cx.mul(cx.mul(root, 0.5), root), small)
    return cx.select(cx.arith("lt", x, 0.0), cx.unary("neg", out), out)


def cosh(cx: TorchContext, x: Value) -> Value:
    root = cx.unary("exp", cx.mul(cx.unary("abs", cx.cast(x, cx.out_dtype)), 0.5))
    # e^|x| overflows before cosh does: the square of a root does not.
    return cx.add(cx.mul(cx.mul(root, 0.5), root), cx.div(0.5, cx.mul(root, root)))


def frac(cx: TorchContext, x: Value) -> Value:
    return cx.sub(x, cx.unary("trunc", x))


def lerp(cx: TorchContext, x: Value, end: Value, weight: Operand) -> Value:
    """From the nearer end, as torch does: exact at 1, and infinite where that is."""
    span = cx.sub(end, x)
    from_start = cx.add(x, cx.mul(weight, span))
    if isinstance(weight, int | float) and abs(weight) < 0.5:
        return from_start
    if isinstance(weight, int | float):
        return cx.sub(end, cx.mul(1 - weight, span))
    from_end = cx.sub(end, cx.mul(cx.sub(1, weight), span))
    near_end = cx.arith("ge", cx.unary("abs", cx.tensor(weight)), 0.5)
    return cx.select(near_end, from_end, from_start)


def _scaled_first(cx: TorchContext, x: Value, a: Value, b: Value, by: Any) -> Operand:
    """a times a number, in the type of all three: what follows overflows as torch's."""
    return scaled(cx, cx.cast(a, cx.promote(x, a, b)), by)


def addcmul(cx: TorchContext, x: Value, a: Value, b: Value, value: Any = 1) -> Value:
    return cx.add(x, cx.mul(_scaled_first(cx, x, a, b, value), b))


def addcdiv(cx: TorchContext, x: Value, a: Value, b: Value, value: Any = 1) -> Value:
    return cx.add(x, cx.div(_scaled_first(cx, x, a, b, value), b))


def hypot(cx: TorchContext, x: Value, y: Value) -> Value:
    out = hypotenuse(cx, x, y)
    if not cx.training:
        return out
    return cx.with_slopes(out, (x, cx.div(x, out)), (y, cx.div(y, out)))


def hypotenuse(cx: TorchContext, x: Value, y: Value) -> Value:
    """The larger side times a root that neither overflows nor vanishes."""
    x, y = cx.unary("abs", x), cx.unary("abs", y)
    long, short = cx.arith("maximum", x, y), cx.arith("minimum", x, y)
    flat = cx.arith("eq", long, 0.0)
    ratio = cx.div(short, cx.select(flat, cx.full(1.0, (), long.dtype), long))
    out = cx.mul(long, cx.unary("sqrt", cx.add(cx.mul(ratio, ratio), 1.0)))
    endless = cx.arith(  # even beside a NaN
        "logical_or", cx.unary("isinf", x), cx.unary("isinf", y), DType.BOOL
    )
    return cx.select(endless, cx.full(math.inf, (), out.dtype), out)


# --- comparisons, choice --------------------------------------------------------


def isfinite(cx: TorchContext, x: Value) -> Value:
    if not x.dtype.is_float:
        return cx.full(True, x.shape, DType.BOOL)
    bad = cx.b.binary("logical_or", cx.unary("isnan", x), cx.unary("isinf", x))
    return cx.unary("logical_not", bad)


def float_test(op: str) -> Translate:
    def translate(cx: TorchContext, x: Value) -> Value:
        if not x.dtype.is_float:
            return cx.full(False, x.shape, DType.BOOL)
        return cx.unary(op, x)

    return translate


def logical_not(cx: TorchContext, x: Value) -> Value:
    return cx.unary("logical_not", cx.to_bool(x))


def bitwise_not(cx: TorchContext, x: Value) -> Value:
    return cx.unary("logical_not" if x.dtype is DType.BOOL else "bitwise_not", x)


def clamp(
    cx: TorchContext, x: Value, min: Operand | None = None, max: Operand | None = None
) -> Value:
    dtype = cx.promote(x, min, max)
    out = x = cx.cast(x, dtype)
    if min is not None:
        out = cx.arith("maximum", out, min, dtype)
    if max is not None:
        out = cx.arith("minimum", out, max, dtype)
    if cx.training and (isinstance(min, Value) or isinstance(max, Value)):
        out = _clamp_with_slopes(cx, out, x, min, max)
    if (
        min is not None
        and _nonnegative(cx, min)
        and (max is None or _nonnegative(cx, max))
    ):
        cx.nonnegative.add(out)
    return out


def _clamp_with_slopes(
    cx: TorchContext, out: Value, x: Value, low: Operand | None, high: Operand | None
) -> Value:
    """x has the gradient up to its bounds, a bound has it where x is beyond, and the
    upper one wherever it is below the lower one."""
    least = -math.inf if low is None else low
    most = math.inf if high is None else high
    inside = cx.arith("logical_and", cx.arith("ge", x, least), cx.arith("le", x, most))
    slopes = [(x, inside)]
    below, above = cx.arith("lt", x, least), cx.arith("gt", x, most)
    if low is not None and high is not None:
        below = cx.arith("logical_and", below, cx.arith("lt", low, high))
        above = cx.arith("logical_or", above, cx.arith("gt", low, high))
    bounds = ((low, below), (high, above))
    slopes += [(b, where) for b, where in bounds if isinstance(b, Value)]
    return cx.with_slopes(out, *slopes)


def clamp_max(cx: TorchContext, x: Value, max: Operand) -> Value:
    return clamp(cx, x, None, max)


def where(cx: TorchContext, cond: Value, x: Operand, y: Operand) -> Value:
    return cx.select(cond, x, y)


def masked_fill(cx: TorchContext, x: Value, mask: Value, value: Operand) -> Value:
    parts = cx.to_bool(mask), cx.tensor(value, x.dtype), x
    mask, fill, x = cx.aligned(*parts)
    return cx.b.select(mask, fill, x)


def nan_to_num(
    cx: TorchContext,
    x: Value,
    nan: float | None = None,
    posinf: float | None = None,
    neginf: float | None = None,
) -> Value:
    if not x.dtype.is_float:
        return x
    info = torch.finfo(cx.val.dtype)
    out = cx.select(
        cx.unary("isnan", x), cx.tensor(0.0 if nan is None else nan, x.dtype), x
    )
    high = cx.tensor(info.max if posinf is None else posinf, x.dtype)
    low = cx.tensor(info.min if neginf is None else neginf, x.dtype)
    out = cx.select(cx.arith("eq", out, math.inf), high, out)
    return cx.select(cx.arith("eq", out, -math.inf), low, out)


MATH: dict[Any, Translate] = {
    # unary
    aten.exp.default: float_unary("exp"),
    aten.expm1.default: float_unary("expm1"),
    aten.log.default: float_unary("log"),
    aten.log1p.default: float_unary("log1p"),
    aten.logit.default: logit,
    aten.log2.default: log_base(2.0),
    aten.log10.default: log_base(10.0),
    aten.exp2.default: exp2,
    aten.sqrt.default: float_unary("sqrt"),
    aten.rsqrt.default: float_unary("rsqrt"),
    aten.reciprocal.default: float_unary("reciprocal"),
    aten.sin.default: float_unary("sin"),
    aten.cos.default: float_unary("cos"),
    aten.tan.default: float_unary("tan"),
    aten.tanh.default: float_unary("tanh"),
    aten.sinh.default: via_f32(sinh),
    aten.cosh.default: via_f32(cosh),
    aten.erf.default: float_unary("erf"),
    aten.erfc.default: float_unary("erfc"),
    aten.sigmoid.default: float_unary("sigmoid"),
    aten.neg.default: negative,
    aten.abs.default: absolute,
    aten.sign.default: sign,
    aten.sgn.default: sign,
    aten.floor.default: rounding("floor"),
    aten.ceil.default: rounding("ceil"),
    aten.trunc.default: rounding("trunc"),
    aten.fix.default: rounding("trunc"),
    aten.round.default: rounding("round"),
    aten.round.decimals: round_decimals,
    aten.frac.default: frac,
    aten.square.default: lambda cx, x: mul(cx, x, x),
    aten.positive.default: lambda cx, x: x,
    aten.deg2rad.default: lambda cx, x: cx.mul(x, math.pi / 180),
    aten.rad2deg.default: lambda cx, x: cx.mul(x, 180 / math.pi),
    aten.isnan.default: float_test("isnan"),
    aten.isinf.default: float_test("isinf"),
    aten.isfinite.default: isfinite,
    aten.logical_not.default: logical_not,
    aten.bitwise_not.default: bitwise_not,
    # binary
    aten.add.Tensor: add,
    aten.add.Scalar: add,
    aten.sub.Tensor: sub,
    aten.sub.Scalar: sub,
    aten.subtract.Tensor: sub,
    aten.rsub.Tensor: rsub,
    aten.rsub.Scalar: rsub,
    aten.mul.Tensor: mul,
    aten.mul.Scalar: mul,
    aten.multiply.Tensor: mul,
    aten.div.Tensor: div,
    aten.div.Scalar: div,
    aten.div.Tensor_mode: div,
    aten.div.Scalar_mode: div,
    aten.divide.Tensor: div,
    aten.true_divide.Tensor: div,
    aten.floor_divide.default: divided("floordiv"),
    aten.floor_divide.Scalar: divided("floordiv"),
    aten.remainder.Tensor: divided("mod"),
    aten.remainder.Scalar: divided("mod"),
    aten.remainder.Scalar_Tensor: divided("mod"),
    aten.fmod.Tensor: fmod,
    aten.fmod.Scalar: fmod,
    aten.pow.Tensor_Scalar: power,
    aten.pow.Tensor_Tensor: power,
    aten.pow.Scalar: power,
    aten.atan2.default: binary("atan2"),
    aten.minimum.default: binary("minimum"),
    aten.maximum.default: binary("maximum"),
    aten.min.other: binary("minimum"),
    aten.max.other: binary("maximum"),
    aten.lerp.Tensor: lerp,
    aten.lerp.Scalar: lerp,
    aten.addcmul.default: addcmul,
    aten.addcdiv.default: addcdiv,
    aten.hypot.default: hypot,
    # comparisons and logic
    aten.eq.Tensor: compare("eq"),
    aten.eq.Scalar: compare("eq"),
    aten.ne.Tensor: compare("ne"),
    aten.ne.Scalar: compare("ne"),
    aten.lt.Tensor: compare("lt"),
    aten.lt.Scalar: compare("lt"),
    aten.le.Tensor: compare("le"),
    aten.le.Scalar: compare("le"),
    aten.gt.Tensor: compare("gt"),
    aten.gt.Scalar: compare("gt"),
    aten.ge.Tensor: compare("ge"),
    aten.ge.Scalar: compare("ge"),
    aten.logical_and.default: logical("logical_and"),
    aten.logical_or.default: logical("logical_or"),
    aten.logical_xor.default: logical("logical_xor"),
    aten.bitwise_and.Tensor: bitwise("bitwise_and"),
    aten.bitwise_and.Scalar: bitwise("bitwise_and"),
    aten.bitwise_or.Tensor: bitwise("bitwise_or"),
    aten.bitwise_or.Scalar: bitwise("bitwise_or"),
    aten.bitwise_xor.Tensor: bitwise("bitwise_xor"),
    aten.bitwise_xor.Scalar: bitwise("bitwise_xor"),
    aten.__and__.Tensor: bitwise("bitwise_and"),
    aten.__and__.Scalar: bitwise("bitwise_and"),
    aten.__or__.Tensor: bitwise("bitwise_or"),
    aten.__or__.Scalar: bitwise("bitwise_or"),
    aten.__xor__.Tensor: bitwise("bitwise_xor"),
    aten.__xor__.Scalar: bitwise("bitwise_xor"),
    aten.__lshift__.Tensor: binary("shift_left"),
    aten.__lshift__.Scalar: binary("shift_left"),
    aten.__rshift__.Tensor: binary("shift_right"),
    aten.__rshift__.Scalar: binary("shift_right"),
    aten.bitwise_left_shift.Tensor: binary("shift_left"),
    aten.bitwise_left_shift.Tensor_Scalar: binary("shift_left"),
    aten.bitwise_right_shift.Tensor: binary("shift_right"),
    aten.bitwise_right_shift.Tensor_Scalar: binary("shift_right"),
    # choice
    aten.clamp.default: clamp,
    aten.clamp.Tensor: clamp,
    aten.clip.default: clamp,
    aten.clamp_min.default: clamp,
    aten.clamp_min.Tensor: clamp,
    aten.clamp_max.default: clamp_max,
    aten.clamp_max.Tensor: clamp_max,
    aten.where.self: where,
    aten.where.ScalarOther: where,
    aten.where.ScalarSelf: where,
    aten.where.Scalar: where,
    aten.masked_fill.Scalar: masked_fill,
    aten.masked_fill.Tensor: masked_fill,
    aten.nan_to_num.default: nan_to_num,
}
