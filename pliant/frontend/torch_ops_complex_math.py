"""Functions of complex numbers, by those of their parts, x + iy.

f32 is computed in f64 and rounded once, so that sums of products lose nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from pliant.frontend.torch_ops_complex import (
    Complex,
    Number,
    as_complex,
    divided,
    exponential,
    logarithm,
    magnitude,
    multiplied,
    power,
    reciprocal,
)
from pliant.frontend.torch_ops_context import TorchContext
from pliant.frontend.torch_ops_math import Translate, cosh, sinh
from pliant.ir.graph import Value
from pliant.ir.types import DType

aten = torch.ops.aten
Function = Callable[[TorchContext, Complex], Complex]

_FAR = 20.0  # tanh is 1 to the last digit of f64 beyond


def wide(function: Function) -> Translate:
    def translate(cx: TorchContext, x: Complex) -> Complex:
        found = function(cx, as_complex(cx, x, DType.F64))
        return as_complex(cx, found, cx.out_dtype)

    return translate


def _turned(cx: TorchContext, z: Complex, back: bool = False) -> Complex:
    """iz, or z/i."""
    if back:
        return Complex(z.im, cx.unary("neg", z.re))
    return Complex(cx.unary("neg", z.im), z.re)


def _sinh(cx: TorchContext, z: Complex) -> Complex:
    cos, sin = cx.unary("cos", z.im), cx.unary("sin", z.im)
    return Complex(cx.mul(sinh(cx, z.re), cos), cx.mul(cosh(cx, z.re), sin))


def _cosh(cx: TorchContext, z: Complex) -> Complex:
    cos, sin = cx.unary("cos", z.im), cx.unary("sin", z.im)
    return Complex(cx.mul(cosh(cx, z.re), cos), cx.mul(sinh(cx, z.re), sin))


def _tanh(cx: TorchContext, z: Complex) -> Complex:
    """(sinh 2x + i sin 2y) / (cosh 2x + cos 2y), whose divisor is 2 (s^2 + cos^2 y)."""
    far = cx.arith("gt", cx.unary("abs", z.re), _FAR)
    x = cx.select(far, cx.mul(cx.unary("sign", z.re), _FAR), z.re)
    s, c = sinh(cx, x), cosh(cx, x)
    cos, sin = cx.unary("cos", z.im), cx.unary("sin", z.im)
    divisor = cx.add(cx.mul(s, s), cx.mul(cos, cos))
    # sin y cos y / s^2 falls as e^-2|x|.
    more = cx.sub(_FAR, cx.arith("maximum", cx.unary("abs", z.re), _FAR))
    falls = cx.unary("exp", cx.mul(more, 2.0))
    im = cx.mul(cx.div(cx.mul(sin, cos), divisor), falls)
    return Complex(cx.div(cx.mul(s, c), divisor), im)


def _through_i(function: Function) -> Function:
    """sin z = sinh(iz) / i, and tan alike."""
    return lambda cx, z: _turned(cx, function(cx, _turned(cx, z)), back=True)


def _cos(cx: TorchContext, z: Complex) -> Complex:
    return _cosh(cx, _turned(cx, z))


def _sqrt(cx: TorchContext, z: Complex) -> Complex:
    """The larger part by a sum without cancellation, the other one by division."""
    size = cx.unary("abs", z.re)
    large = cx.unary("sqrt", cx.mul(cx.add(magnitude(cx, z), size), 0.5))
    none = cx.arith("eq", large, 0.0)
    small = cx.div(z.im, cx.mul(cx.select(none, 1.0, large), 2.0))
    left = cx.arith("lt", z.re, 0.0)
    below = cx.arith("lt", z.im, 0.0)
    im = cx.select(below, cx.unary("neg", large), large)
    return Complex(
        cx.select(left, cx.unary("abs", small), large), cx.select(left, im, small)
    )


def _scaled_log(base: float) -> Function:
    def function(cx: TorchContext, z: Complex) -> Complex:
        found = logarithm(cx, z)
        scale = 1 / math.log(base)
        return Complex(cx.mul(found.re, scale), cx.mul(found.im, scale))

    return function


def _log1p(cx: TorchContext, z: Complex) -> Complex:
    """log |1 + z| is log1p(2x + x^2 + y^2) / 2, and far from 0 the logarithm itself."""
    above = Complex(cx.add(z.re, 1.0), z.im)
    far = logarithm(cx, above)
    squares = cx.add(cx.mul(z.re, z.re), cx.mul(z.im, z.im))
    near = cx.arith("lt", squares, 0.25)
    inside = cx.add(cx.mul(z.re, 2.0), squares)
    exact = cx.mul(cx.unary("log1p", cx.select(near, inside, 0.0)), 0.5)
    return Complex(cx.select(near, exact, far.re), far.im)


def _expm1(cx: TorchContext, z: Complex) -> Complex:
    """e^x cos y - 1 is expm1(x) cos y - 2 sin^2(y/2)."""
    cos, sin = cx.unary("cos", z.im), cx.unary("sin", z.im)
    half = cx.unary("sin", cx.mul(z.im, 0.5))
    re = cx.mul(cx.unary("expm1", z.re), cos)
    re = cx.sub(re, cx.mul(cx.mul(half, half), 2.0))
    return Complex(re, cx.mul(cx.unary("exp", z.re), sin))


def _exp2(cx: TorchContext, z: Complex) -> Complex:
    scale = math.log(2)
    return exponential(cx, Complex(cx.mul(z.re, scale), cx.mul(z.im, scale)))


def powers(cx: TorchContext, x: Number, exponent: Number) -> Complex:
    """e^(w log z); by products for a small integer, and by a root for 1/2."""
    if isinstance(exponent, float) and exponent == int(exponent):
        exponent = int(exponent)
    if isinstance(exponent, int) and not isinstance(exponent, bool):
        base = as_complex(cx, x, cx.out_dtype)
        if 0 <= exponent <= 16:
            return power(cx, base, exponent)
        if -16 <= exponent < 0:
            return reciprocal(cx, power(cx, base, -exponent))
    z, w = as_complex(cx, x, DType.F64), as_complex(cx, exponent, DType.F64)
    if exponent == 0.5:
        return as_complex(cx, _sqrt(cx, z), cx.out_dtype)
    zero = _both(cx, z, "eq", 0.0)
    base = Complex(cx.select(zero, 1.0, z.re), z.im)
    log = logarithm(cx, base)
    log, w = _spread(cx, log, w)
    found = exponential(cx, multiplied(cx, log, w))
    # 0 to the power of 0 is 1, and to one with a positive real part 0.
    one = cx.cast(_both(cx, w, "eq", 0.0), DType.F64)
    least = cx.select(cx.arith("gt", w.re, 0.0), 0.0, math.nan)
    at_zero = cx.select(cx.arith("eq", one, 1.0), one, least)
    re = cx.select(zero, at_zero, found.re)
    im = cx.select(zero, cx.mul(at_zero, 0.0), found.im)
    return as_complex(cx, Complex(re, im), cx.out_dtype)


def _both(cx: TorchContext, z: Complex, op: str, number: float) -> Value:
    return cx.b.binary(
        "logical_and", cx.arith(op, z.re, number), cx.arith(op, z.im, number)
    )


def _spread(cx: TorchContext, a: Complex, b: Complex) -> tuple[Complex, Complex]:
    """Both in the shape in which they meet."""
    shape = cx.b.broadcast_shapes(*(v.shape for v in cx.aligned(a.re, b.re)))
    first, second = (
        Complex(cx.broadcast_to(z.re, shape), cx.broadcast_to(z.im, shape))
        for z in (a, b)
    )
    return first, second


def lerp(cx: TorchContext, x: Number, y: Number, weight: Any) -> Complex:
    """From the nearer end, as torch computes it."""
    start, end = (as_complex(cx, v, cx.out_dtype) for v in (x, y))
    share = as_complex(cx, weight if abs(weight) < 0.5 else weight - 1, cx.out_dtype)
    way = Complex(cx.sub(end.re, start.re), cx.sub(end.im, start.im))
    gone, near = multiplied(cx, way, share), start if abs(weight) < 0.5 else end
    return Complex(cx.add(near.re, gone.re), cx.add(near.im, gone.im))


def _is_finite(cx: TorchContext, x: Complex) -> Value:
    parts = [cx.sub(part, part) for part in (x.re, x.im)]  # 0, or NaN
    re, im = (cx.arith("eq", part, 0.0) for part in parts)
    return cx.b.binary("logical_and", re, im)


_FUNCTIONS: dict[str, Function] = {
    "sinh": _sinh,
    "cosh": _cosh,
    "tanh": _tanh,
    "sin": _through_i(_sinh),
    "tan": _through_i(_tanh),
    "cos": _cos,
    "sqrt": _sqrt,
    "rsqrt": lambda cx, z: reciprocal(cx, _sqrt(cx, z)),
    "sigmoid": lambda cx, z: _logistic(cx, z),
    "log2": _scaled_log(2.0),
    "log10": _scaled_log(10.0),
    "log1p": _log1p,
    "expm1": _expm1,
    "exp2": _exp2,
}


def _logistic(cx: TorchContext, z: Complex) -> Complex:
    """1 / (1 + e^-z)"""
    minus = Complex(cx.unary("neg", z.re), cx.unary("neg", z.im))
    found = exponential(cx, minus)
    one = as_complex(cx, 1.0, DType.F64)
    return divided(cx, one, Complex(cx.add(found.re, 1.0), found.im))


COMPLEX_MATH: dict[Any, Translate] = {
    **{
        getattr(aten, name).default: wide(function)
        for name, function in _FUNCTIONS.items()
    },
    aten.pow.Tensor_Scalar: powers,
    aten.pow.Tensor_Tensor: powers,
    aten.pow.Scalar: powers,
    aten.isfinite.default: _is_finite,
    aten.lerp.Scalar: lerp,
}
