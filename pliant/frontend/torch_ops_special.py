"""Special functions and inverse functions, as compositions of elementwise ops.

What is not f64 is computed in f64 and rounded once, so that a few roundings on the way
do not matter. Functions whose composition is good to the last digits of f64 too are
`exact`; of others, an f64 operand is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from pliant.frontend.torch_ops_bessel import BESSEL, Function, narrow
from pliant.frontend.torch_ops_context import HALF, Operand, TorchContext
from pliant.frontend.torch_ops_math import Translate, float_test
from pliant.ir.graph import Value
from pliant.ir.types import DType

aten = torch.ops.aten


def exact(function: Function) -> Translate:
    def translate(cx: TorchContext, x: Value) -> Value:
        return cx.cast(function(cx, cx.cast(x, DType.F64)), cx.out_dtype)

    return translate


def _both_sides(cx: TorchContext, x: Value, side: Callable[[Value], Value]) -> Value:
    """An odd function from its right side; it has a slope at 0, and -0 stays -0."""
    left = cx.arith("lt", x, 0.0)
    out = side(cx.select(left, cx.unary("neg", x), x))
    return cx.select(left, cx.unary("neg", out), out)


# --- inverses of trigonometric and hyperbolic functions -------------------------


def _root_of_one_minus_square(cx: TorchContext, x: Value) -> Value:
    return cx.unary("sqrt", cx.mul(cx.sub(1.0, x), cx.add(x, 1.0)))


def _acos(cx: TorchContext, x: Value) -> Value:
    return cx.arith("atan2", _root_of_one_minus_square(cx, x), x)


def _asin(cx: TorchContext, x: Value) -> Value:
    return cx.arith("atan2", x, _root_of_one_minus_square(cx, x))


def _atan(cx: TorchContext, x: Value) -> Value:
    return cx.arith("atan2", x, 1.0)


def _asinh(cx: TorchContext, x: Value) -> Value:
    """log(x + sqrt(x^2 + 1)), and log(2x) where x^2 is all there is."""

    def right(z: Value) -> Value:
        near = cx.arith("minimum", z, 1e10)
        root = cx.unary("sqrt", cx.add(cx.mul(near, near), 1.0))
        small = cx.add(cx.div(near, cx.add(root, 1.0)), 1.0)
        small = cx.unary("log1p", cx.mul(near, small))
        far = cx.arith("maximum", z, 1e10)
        large = cx.add(cx.unary("log", far), math.log(2))
        return cx.select(cx.arith("gt", z, 1e10), large, small)

    return _both_sides(cx, x, right)


def _acosh(cx: TorchContext, x: Value) -> Value:
    near = cx.sub(cx.arith("minimum", x, 1e10), 1.0)
    root = cx.unary("sqrt", cx.mul(near, cx.add(near, 2.0)))
    small = cx.unary("log1p", cx.add(near, root))
    large = cx.add(cx.unary("log", cx.arith("maximum", x, 1e10)), math.log(2))
    out = cx.select(cx.arith("gt", x, 1e10), large, small)
    return cx.select(cx.arith("lt", x, 1.0), math.nan, out)


def _atanh(cx: TorchContext, x: Value) -> Value:
    def right(z: Value) -> Value:
        ratio = cx.div(cx.add(z, z), cx.sub(1.0, z))
        return cx.mul(cx.unary("log1p", ratio), 0.5)

    return _both_sides(cx, x, right)


# --- the error function's relatives ---------------------------------------------

_CENTRAL = (0.886226899, -1.645349621, 0.914624893, -0.140543331)
_CENTRAL_BELOW = (1.0, -2.118377725, 1.442710462, -0.329097515, 0.012229801)
_TAIL = (-1.970840454, -1.624906493, 3.429567803, 1.641345311)
_TAIL_BELOW = (1.0, 3.543889200, 1.637067800)


def _polynomial(cx: TorchContext, x: Value, coefficients: tuple[float, ...]) -> Value:
    """Lowest degree first."""
    out = cx.tensor(coefficients[-1], DType.F64)
    for c in reversed(coefficients[:-1]):
        out = cx.add(cx.mul(out, x), c)
    return out


def _erfinv(cx: TorchContext, y: Value) -> Value:
    """A rational function, then three steps of Newton's method on erf."""
    left = cx.arith("lt", y, 0.0)
    size = cx.select(left, cx.unary("neg", y), y)  # with a slope at 0
    inside = cx.arith("minimum", size, 0.7)
    z = cx.mul(inside, inside)
    ratio = cx.div(_polynomial(cx, z, _CENTRAL), _polynomial(cx, z, _CENTRAL_BELOW))
    central = cx.mul(inside, ratio)
    rest = cx.div(cx.sub(1.0, cx.arith("maximum", size, 0.7)), 2.0)
    # At 1 and beyond any number will do: they are replaced below.
    rest = cx.arith("maximum", rest, 1e-300)
    z = cx.unary("sqrt", cx.unary("neg", cx.unary("log", rest)))
    tail = cx.div(_polynomial(cx, z, _TAIL), _polynomial(cx, z, _TAIL_BELOW))
    x = cx.select(cx.arith("le", size, 0.7), central, tail)
    x = cx.detached(x)
    for step in range(3):
        slope = cx.unary("exp", cx.unary("neg", cx.mul(x, x)))
        slope = cx.mul(slope, 2 / math.sqrt(math.pi))
        x = cx.sub(x, cx.div(cx.sub(cx.unary("erf", x), size), slope))
        # The last step has the derivative: 1 over that of erf.
        x = cx.detached(x) if step == 1 else x
    x = cx.select(cx.arith("eq", size, 1.0), math.inf, x)
    x = cx.select(left, cx.unary("neg", x), x)
    return cx.select(cx.arith("gt", size, 1.0), math.nan, x)


def _erfcx(cx: TorchContext, x: Value) -> Value:
    """exp(x^2) erfc(x); beyond 20 its asymptotic series, inf at large negative x."""
    near = cx.arith("minimum", x, 20.0)
    near = cx.mul(cx.unary("exp", cx.mul(near, near)), cx.unary("erfc", near))
    far = cx.arith("maximum", x, 20.0)
    z = cx.div(0.5, cx.mul(far, far))
    series = _polynomial(cx, z, (1.0, -1.0, 3.0, -15.0, 105.0, -945.0))
    large = cx.div(cx.mul(series, 1 / math.sqrt(math.pi)), far)
    return cx.select(cx.arith("gt", x, 20.0), large, near)


def _ndtr(cx: TorchContext, x: Value) -> Value:
    return cx.mul(cx.unary("erfc", cx.mul(x, -math.sqrt(0.5))), 0.5)


def _eager_ndtr(cx: TorchContext, x: Value) -> Value:
    """As torch has it: 0 left of -8.3, where `_ndtr` is not."""
    return cx.mul(cx.add(cx.unary("erf", cx.mul(x, math.sqrt(0.5))), 1.0), 0.5)


def _log_ndtr(cx: TorchContext, x: Value) -> Value:
    """In the left tail -x^2/2 plus the logarithm of ndtr(x) / exp(-x^2/2)."""
    low = cx.arith("minimum", x, -1.0)
    tail = cx.unary("log", cx.mul(_erfcx(cx, cx.mul(low, -math.sqrt(0.5))), 0.5))
    left = cx.sub(tail, cx.mul(cx.mul(low, low), 0.5))
    high = cx.arith("maximum", x, -1.0)
    above = cx.mul(cx.unary("erfc", cx.mul(high, math.sqrt(0.5))), -0.5)
    right = cx.unary("log1p", above)
    return cx.select(cx.arith("lt", x, -1.0), left, right)


def _ndtri(cx: TorchContext, p: Value) -> Value:
    """Abramowitz and Stegun 26.2.23, then Newton's method on log ndtr."""
    upper = cx.arith("gt", p, 0.5)
    tail = cx.select(upper, cx.sub(1.0, p), p)
    inside = cx.arith("maximum", tail, 1e-300)
    log = cx.unary("log", inside)
    z = cx.unary("sqrt", cx.mul(log, -2.0))
    above = _polynomial(cx, z, (2.515517, 0.802853, 0.010328))
    below = _polynomial(cx, z, (1.0, 1.432788, 0.189269, 0.001308))
    y = cx.sub(cx.div(above, below), z)
    for _ in range(3):
        whole = _ndtr(cx, y)
        bell = cx.unary("exp", cx.mul(cx.mul(y, y), -0.5))
        slope = cx.div(cx.mul(bell, 1 / math.sqrt(2 * math.pi)), whole)
        y = cx.sub(y, cx.div(cx.sub(cx.unary("log", whole), log), slope))
    y = cx.select(upper, cx.unary("neg", y), y)
    y = cx.select(cx.arith("eq", p, 0.0), -math.inf, y)
    y = cx.select(cx.arith("eq", p, 1.0), math.inf, y)
    y = cx.select(cx.arith("eq", p, 0.5), 0.0, y)
    outside = cx.b.binary("logical_or", cx.arith("lt", p, 0.0), cx.arith("gt", p, 1.0))
    return cx.select(outside, math.nan, y)


# --- the gamma function's relatives ---------------------------------------------

_SHIFT = 8
# B(2k) / (2k (2k-1)) and B(2k) / 2k
_LOG_GAMMA = (
    *(1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360),
    *(1 / 156, -3617 / 122400),
)
_DIGAMMA = (
    *(1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760),
    *(1 / 12, -3617 / 8160),
)


def _mirrored(cx: TorchContext, x: Value) -> tuple[Value, Value, Value]:
    """(x is left of 1/2, 1 - x there and x elsewhere, distance from an integer).

    The distance is 1/2 where it is not used, so that nothing there is infinite.
    """
    left = cx.arith("lt", x, 0.5)
    right = cx.select(left, cx.sub(1.0, x), x)
    off = cx.sub(x, cx.unary("round", x))
    return left, right, cx.select(left, off, 0.5)


def log_gamma(cx: TorchContext, x: Value) -> Value:
    left, z, off = _mirrored(cx, x)
    small = cx.arith("lt", z, float(_SHIFT))
    inside = cx.arith("minimum", z, float(_SHIFT))
    product = inside
    for k in range(1, _SHIFT):
        product = cx.mul(product, cx.add(inside, float(k)))
    shifted = cx.select(small, cx.add(z, float(_SHIFT)), z)
    inverse = cx.div(1.0, shifted)
    tail = cx.mul(_polynomial(cx, cx.mul(inverse, inverse), _LOG_GAMMA), inverse)
    log = cx.unary("log", shifted)
    main = cx.sub(cx.mul(cx.sub(shifted, 0.5), cx.sub(log, 1.0)), 0.5)
    out = cx.add(cx.add(main, 0.5 * math.log(2 * math.pi)), tail)
    out = cx.sub(out, cx.select(small, cx.unary("log", product), 0.0))
    sine = cx.unary("sin", cx.mul(cx.unary("abs", off), math.pi))
    mirror = cx.sub(math.log(math.pi), cx.add(cx.unary("log", sine), out))
    out = cx.select(left, mirror, out)
    for zero in (1.0, 2.0):  # exactly
        out = cx.select(cx.arith("eq", x, zero), 0.0, out)
    return cx.select(cx.unary("isinf", x), math.inf, out)


def _digamma(cx: TorchContext, x: Value) -> Value:
    left, z, off = _mirrored(cx, x)
    small = cx.arith("lt", z, float(_SHIFT))
    inside = cx.arith("minimum", z, float(_SHIFT))
    sums = cx.div(1.0, inside)
    for k in range(1, _SHIFT):
        sums = cx.add(sums, cx.div(1.0, cx.add(inside, float(k))))
    shifted = cx.select(small, cx.add(z, float(_SHIFT)), z)
    inverse = cx.div(1.0, shifted)
    square = cx.mul(inverse, inverse)
    tail = cx.mul(_polynomial(cx, square, _DIGAMMA), square)
    out = cx.sub(cx.unary("log", shifted), cx.add(cx.mul(inverse, 0.5), tail))
    out = cx.sub(out, cx.select(small, sums, 0.0))
    cotangent = cx.div(math.pi, cx.unary("tan", cx.mul(off, math.pi)))
    out = cx.select(left, cx.sub(out, cotangent), out)
    integer = cx.arith("eq", off, 0.0)
    out = cx.select(integer, math.nan, out)
    # At 0 it is infinite, with the other sign.
    pole = cx.unary("neg", cx.div(1.0, cx.select(integer, x, 1.0)))
    return cx.select(cx.arith("eq", x, 0.0), pole, out)


# --- of two operands ------------------------------------------------------------


def _larger(keeps: str) -> Translate:
    """fmax, fmin: a NaN loses. Of equal ones the first has the gradient."""

    def translate(cx: TorchContext, x: Value, y: Value) -> Value:
        dtype = cx.promote(x, y)
        x, y = cx.aligned(cx.cast(x, dtype), cx.cast(y, dtype))
        first = cx.arith(keeps, x, y)
        if dtype.is_float:
            first = cx.arith("logical_or", first, cx.unary("isnan", y))
        return cx.select(first, x, y)

    return translate


def heaviside(cx: TorchContext, x: Value, values: Value) -> Value:
    step = cx.cast(cx.arith("gt", x, 0), x.dtype)
    return cx.select(cx.arith("eq", x, 0), values, step)


def signed_infinity(limit: float) -> Translate:
    def translate(cx: TorchContext, x: Value) -> Value:
        if not x.dtype.is_float:
            made: Value = float_test("isinf")(cx, x)
            return made
        return cx.arith("eq", x, limit)

    return translate


def copysign(cx: TorchContext, x: Operand, y: Operand) -> Value:
    return cx.arith("copysign", x, y, cx.out_dtype)


def nextafter(cx: TorchContext, x: Value, y: Value) -> Value:
    if cx.out_dtype in HALF:
        cx.unsupported("the next number of a half float")
    return cx.with_slopes(cx.arith("nextafter", x, y), (x, cx.arith("ne", x, y)))


def signbit(cx: TorchContext, x: Value) -> Value:
    if not x.dtype.is_float:
        return (
            cx.arith("lt", x, 0)
            if x.dtype is not DType.BOOL
            else cx.full(False, x.shape, DType.BOOL)
        )
    return cx.arith("lt", cx.arith("copysign", 1.0, x, x.dtype), 0.0)


def sinc(cx: TorchContext, x: Value) -> Value:
    x = cx.cast(x, cx.out_dtype)
    wide = cx.mul(cx.cast(x, x.dtype.compute), math.pi)
    zero = cx.arith("eq", x, 0.0)
    out = cx.div(cx.unary("sin", wide), cx.select(zero, 1.0, wide))
    return cx.cast(cx.select(zero, 1.0, out), x.dtype)


SPECIAL: dict[Any, Translate] = {
    aten.acos.default: exact(_acos),
    aten.asin.default: exact(_asin),
    aten.atan.default: exact(_atan),
    aten.acosh.default: exact(_acosh),
    aten.asinh.default: exact(_asinh),
    aten.atanh.default: exact(_atanh),
    aten.erfinv.default: exact(_erfinv),
    aten.special_erfcx.default: narrow(_erfcx),
    aten.special_ndtr.default: exact(_eager_ndtr),
    aten.special_log_ndtr.default: narrow(_log_ndtr),
    aten.special_ndtri.default: narrow(_ndtri),
    aten.lgamma.default: narrow(log_gamma),
    aten.digamma.default: narrow(_digamma),
    aten.fmax.default: _larger("ge"),
    aten.fmin.default: _larger("le"),
    aten.heaviside.default: heaviside,
    aten.isposinf.default: signed_infinity(math.inf),
    aten.isneginf.default: signed_infinity(-math.inf),
    aten.copysign.Tensor: copysign,
    aten.copysign.Scalar: copysign,
    aten.signbit.default: signbit,
    aten.sinc.default: sinc,
    aten.nextafter.default: nextafter,
    **BESSEL,
}
