"""Bessel functions, in f64: series of torch_ops_bessel_tables.py.

They are functions of what torch gives them in f32 and half; their series are good to
1e-14, which is too little where the operand is f64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pliant.frontend import torch_ops_bessel_tables as series
from pliant.frontend.torch_ops_context import TorchContext
from pliant.frontend.torch_ops_math import Translate
from pliant.ir.graph import Value
from pliant.ir.types import DType

aten = torch.ops.aten
prims = torch.ops.prims
Function = Callable[[TorchContext, Value], Value]


def narrow(function: Function) -> Translate:
    """A function of other floats, computed in f64."""

    def translate(cx: TorchContext, x: Value) -> Value:
        if cx.out_dtype is DType.F64:
            cx.unsupported("this function of f64 has no exact translation: use f32")
        return cx.cast(function(cx, cx.cast(x, DType.F64)), cx.out_dtype)

    return translate


def chebyshev(cx: TorchContext, t: Value, coefficients: Sequence[float]) -> Value:
    """The sum of c[k] T_k(t), by Clenshaw's recurrence."""
    double = cx.add(t, t)
    ahead, behind = cx.tensor(coefficients[-1], DType.F64), cx.tensor(0.0, DType.F64)
    for c in reversed(coefficients[1:-1]):
        new = cx.sub(cx.add(cx.mul(double, ahead), c), behind)
        ahead, behind = new, ahead
    return cx.sub(cx.add(cx.mul(t, ahead), coefficients[0]), behind)


def _pieces(
    cx: TorchContext,
    x: Value,
    boundary: float,
    near: Callable[[Value], Value],
    far: Callable[[Value], Value],
) -> Value:
    """One function up to the boundary, another beyond; NaN stays NaN."""
    low = cx.arith("minimum", x, boundary)
    high = cx.arith("maximum", x, boundary)
    return cx.select(cx.arith("gt", x, boundary), far(high), near(low))


# --- modified functions of the first kind ---------------------------------------


def _scaled_i(order: int) -> Function:
    """e^-|x| I(x)"""
    near_series = (series.I0_NEAR, series.I1_NEAR)[order]
    far_series = (series.I0_FAR, series.I1_FAR)[order]

    def function(cx: TorchContext, x: Value) -> Value:
        def near(z: Value) -> Value:
            out = chebyshev(cx, cx.sub(cx.mul(z, 0.25), 1.0), near_series)
            return cx.mul(out, z) if order else out

        def far(z: Value) -> Value:
            out = chebyshev(cx, cx.sub(cx.div(16.0, z), 1.0), far_series)
            return cx.mul(out, cx.unary("rsqrt", z))

        out = _pieces(cx, cx.unary("abs", x), 8.0, near, far)
        return _odd(cx, x, out) if order else out

    return function


def _odd(cx: TorchContext, x: Value, out: Value) -> Value:
    return cx.select(cx.arith("lt", x, 0.0), cx.unary("neg", out), out)


def _i(order: int) -> Function:
    scaled = _scaled_i(order)

    def function(cx: TorchContext, x: Value) -> Value:
        # In two factors: e^x overflows before I does.
        half = cx.unary("exp", cx.mul(cx.unary("abs", x), 0.5))
        return cx.mul(cx.mul(scaled(cx, x), half), half)

    return function


# --- modified functions of the second kind --------------------------------------


def _k(order: int, scaled: bool) -> Function:
    near_series = (series.K0_NEAR, series.K1_NEAR)[order]
    far_series = (series.K0_FAR, series.K1_FAR)[order]

    def function(cx: TorchContext, x: Value) -> Value:
        def near(z: Value) -> Value:
            t = cx.sub(cx.mul(cx.mul(z, z), 0.5), 1.0)
            log = cx.mul(cx.unary("log", cx.mul(z, 0.5)), _i(order)(cx, z))
            out = chebyshev(cx, t, near_series)
            out = cx.add(cx.div(out, z), log) if order else cx.sub(out, log)
            return cx.mul(out, cx.unary("exp", z)) if scaled else out

        def far(z: Value) -> Value:
            out = chebyshev(cx, cx.sub(cx.div(4.0, z), 1.0), far_series)
            out = cx.mul(out, cx.unary("rsqrt", z))
            return out if scaled else cx.mul(out, cx.unary("exp", cx.unary("neg", z)))

        out = _pieces(cx, x, 2.0, near, far)
        out = cx.select(cx.arith("eq", x, 0.0), math.inf, out)
        return cx.select(cx.arith("lt", x, 0.0), math.nan, out)

    return function


# --- functions of the first and second kind -------------------------------------


def _waves(cx: TorchContext, z: Value, order: int, second: bool) -> Value:
    """J or Y beyond 8, by amplitude and phase."""
    ratio = cx.div(8.0, z)
    t = cx.sub(cx.mul(cx.mul(ratio, ratio), 2.0), 1.0)
    p = chebyshev(cx, t, (series.P0_FAR, series.P1_FAR)[order])
    q = cx.mul(ratio, chebyshev(cx, t, (series.Q0_FAR, series.Q1_FAR)[order]))
    # cos and sin of z - pi/4 and z - 3pi/4 by those of z, which lose nothing.
    sin, cos = cx.unary("sin", z), cx.unary("cos", z)
    plus, minus = cx.add(cos, sin), cx.sub(sin, cos)
    c, s = (minus, cx.unary("neg", plus)) if order else (plus, minus)
    if second:
        out = cx.add(cx.mul(p, s), cx.mul(q, c))
    else:
        out = cx.sub(cx.mul(p, c), cx.mul(q, s))
    # sqrt(2/pi) / sqrt(2)
    return cx.mul(cx.mul(out, cx.unary("rsqrt", z)), 1 / math.sqrt(math.pi))


def _near_j(cx: TorchContext, z: Value, order: int) -> Value:
    t = cx.sub(cx.div(cx.mul(z, z), 32.0), 1.0)
    if order:
        return cx.mul(chebyshev(cx, t, series.J1_NEAR), z)
    return chebyshev(cx, t, series.J0_NEAR)


def _j(order: int) -> Function:
    def function(cx: TorchContext, x: Value) -> Value:
        out = _pieces(
            cx,
            cx.unary("abs", x),
            8.0,
            lambda z: _near_j(cx, z, order),
            lambda z: _waves(cx, z, order, second=False),
        )
        return _odd(cx, x, out) if order else out

    return function


def _y(order: int) -> Function:
    def function(cx: TorchContext, x: Value) -> Value:
        def near(z: Value) -> Value:
            t = cx.sub(cx.div(cx.mul(z, z), 32.0), 1.0)
            log = cx.mul(cx.unary("log", z), _near_j(cx, z, order))
            if order:
                log = cx.sub(log, cx.div(1.0, z))
                out = cx.mul(chebyshev(cx, t, series.Y1_NEAR), z)
            else:
                out = chebyshev(cx, t, series.Y0_NEAR)
            return cx.add(out, cx.mul(log, 2 / math.pi))

        def far(z: Value) -> Value:
            return _waves(cx, z, order, second=True)

        out = _pieces(cx, x, 8.0, near, far)
        out = cx.select(cx.arith("eq", x, 0.0), -math.inf, out)
        return cx.select(cx.arith("lt", x, 0.0), math.nan, out)

    return function


def _spherical_j0(cx: TorchContext, x: Value) -> Value:
    """sin(x) / x, and near 0 its series."""
    z = cx.mul(x, x)
    term, near = cx.tensor(1.0, DType.F64), cx.tensor(1.0, DType.F64)
    for k in range(1, 8):
        term = cx.mul(term, cx.mul(z, -1.0 / ((2 * k) * (2 * k + 1))))
        near = cx.add(near, term)
    small = cx.arith("lt", cx.unary("abs", x), 0.5)
    far = cx.div(cx.unary("sin", x), cx.select(small, 1.0, x))
    return cx.select(cx.unary("isinf", x), 0.0, cx.select(small, near, far))


BESSEL: dict[Any, Translate] = {
    aten.i0.default: narrow(_i(0)),
    aten.special_i0e.default: narrow(_scaled_i(0)),
    aten.special_i1.default: narrow(_i(1)),
    aten.special_i1e.default: narrow(_scaled_i(1)),
    aten.special_modified_bessel_i0.default: narrow(_i(0)),
    aten.special_modified_bessel_i1.default: narrow(_i(1)),
    aten.special_modified_bessel_k0.default: narrow(_k(0, scaled=False)),
    aten.special_modified_bessel_k1.default: narrow(_k(1, scaled=False)),
    aten.special_scaled_modified_bessel_k0.default: narrow(_k(0, scaled=True)),
    aten.special_scaled_modified_bessel_k1.default: narrow(_k(1, scaled=True)),
    aten.special_bessel_j0.default: narrow(_j(0)),
    aten.special_bessel_j1.default: narrow(_j(1)),
    aten.special_bessel_y0.default: narrow(_y(0)),
    aten.special_bessel_y1.default: narrow(_y(1)),
    aten.special_spherical_bessel_j0.default: narrow(_spherical_j0),
}
