"""Functions of numbers by recurrence: polynomials, gcd, zeta, incomplete gamma.

The degree of a polynomial is data. The recurrence runs in a loop for all elements at
once, up to the largest degree of them, and each element keeps its own:

    p(k+1) = step(k, x, p(k), p(k-1))

Where torch has a closed form it is used as well: the polynomials of Chebyshev are
trigonometric functions for degrees from 6 or 9 on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pliant.frontend.torch_ops_context import Operand, TorchContext
from pliant.frontend.torch_ops_math import Translate
from pliant.frontend.torch_ops_special import SPECIAL, log_gamma
from pliant.ir.graph import Graph, Value
from pliant.ir.types import DType

aten = torch.ops.aten

Body = Callable[[Sequence[Value]], list[Value]]


def looped(
    cx: TorchContext, carried: Sequence[Value], more: Body, test: Body
) -> list[Value]:
    """The carried values once `test` gives false, after rounds of `more`."""

    def region(name: str, body: Body) -> Graph:
        outer = cx.b
        cx.b = outer.child()
        try:
            inside = [cx.b.param(f"{name}_arg", v.type) for v in carried]
            return cx.b.finish(name, body(inside))
        finally:
            cx.b = outer

    regions = (region("test", test), region("body", more))
    return list(cx.b.emit_multi("while", *carried, regions=regions))


# --- orthogonal polynomials -----------------------------------------------------------

Step = Callable[[TorchContext, Value, Value, Value, Value], Value]
Plain = Callable[[TorchContext, Value], Value]


def _twice(cx: TorchContext, k: Value, x: Value, p: Value, q: Value) -> Value:
    return cx.sub(cx.mul(cx.mul(x, 2.0), p), q)


def _hermite(cx: TorchContext, k: Value, x: Value, p: Value, q: Value) -> Value:
    return cx.sub(cx.mul(cx.mul(x, 2.0), p), cx.mul(cx.mul(k, 2.0), q))


def _hermite_e(cx: TorchContext, k: Value, x: Value, p: Value, q: Value) -> Value:
    return cx.sub(cx.mul(x, p), cx.mul(k, q))


def _laguerre(cx: TorchContext, k: Value, x: Value, p: Value, q: Value) -> Value:
    factor = cx.sub(cx.add(cx.mul(k, 2.0), 1.0), x)
    return cx.div(cx.sub(cx.mul(factor, p), cx.mul(k, q)), cx.add(k, 1.0))


def _legendre(cx: TorchContext, k: Value, x: Value, p: Value, q: Value) -> Value:
    factor = cx.mul(cx.add(cx.mul(k, 2.0), 1.0), x)
    return cx.div(cx.sub(cx.mul(factor, p), cx.mul(k, q)), cx.add(k, 1.0))


def polynomial(first: Plain, step: Step, shifted: bool = False) -> Translate:
    """Of degree n, which is a number or a tensor; of negative degree 0."""

    def translate(cx: TorchContext, x: Operand, n: Operand) -> Value:
        out = cx.out_dtype
        value, degree = cx.aligned(*(cx.tensor(v, DType.F64) for v in (x, n)))
        shape = cx.b.broadcast_shapes(value.shape, degree.shape)
        value, degree = (cx.broadcast_to(v, shape) for v in (value, degree))
        degree = cx.unary("trunc", degree)
        at = cx.sub(cx.mul(value, 2.0), 1.0) if shifted else value
        one, zero = cx.full(1.0, shape, DType.F64), cx.full(0.0, shape, DType.F64)
        linear = first(cx, at)

        def more(given: Sequence[Value]) -> list[Value]:
            k, point, top, p, q = given
            wide = cx.b.broadcast_to(k, point.shape)
            made = step(cx, wide, point, p, q)
            grows = cx.arith("lt", wide, top)
            kept = cx.b.select(grows, made, p), cx.b.select(grows, p, q)
            return [cx.add(k, 1.0), point, top, *kept]

        def test(given: Sequence[Value]) -> list[Value]:
            highest = cx.reduce("max", given[2], range(given[2].type.rank))
            return [cx.b.binary("lt", given[0], highest)]

        start = [cx.full(1.0, (), DType.F64), at, degree, linear, one]
        found = looped(cx, start, more, test)[3]
        found = cx.select(cx.arith("eq", degree, 0.0), one, found)
        return cx.cast(cx.select(cx.arith("lt", degree, 0.0), zero, found), out)

    return translate


# --- the greatest common divisor ----------------------------------------------------


def gcd(cx: TorchContext, x: Value, y: Value) -> Value:
    """Euclid's algorithm, until no element has a remainder."""
    out = cx.out_dtype
    pair = cx.aligned(*(cx.cast(v, DType.I64) for v in (x, y)))
    shape = cx.b.broadcast_shapes(*(v.shape for v in pair))
    first, second = (cx.unary("abs", cx.broadcast_to(v, shape)) for v in pair)

    def more(given: Sequence[Value]) -> list[Value]:
        a, b = given
        done = cx.arith("eq", b, 0)
        rest = cx.arith("mod", a, cx.select(done, 1, b))
        return [cx.b.select(done, a, b), cx.select(done, 0, rest)]

    def test(given: Sequence[Value]) -> list[Value]:
        return [cx.reduce("any", cx.arith("ne", given[1], 0), range(len(shape)))]

    return cx.cast(looped(cx, [first, second], more, test)[0], out)


def lcm(cx: TorchContext, x: Value, y: Value) -> Value:
    common = gcd(cx, x, y)
    safe = cx.select(cx.arith("eq", common, 0), 1, common)
    return cx.unary("abs", cx.mul(cx.arith("floordiv", x, safe), y))


# --- zeta and polygamma ---------------------------------------------------------------

# (2k)! / B(2k), for k from 1: Cephes, zeta.c
_EULER_MACLAURIN = (
    *(12.0, -720.0, 30240.0, -1209600.0, 47900160.0, -1.8924375803183791606e9),
    *(7.47242496e10, -2.950130727918164224e12, 1.1646782814350067249e14),
    *(-4.5979787224074726105e15, 1.8152105401943546773e17, -7.1661652561756670113e18),
)
_DIRECT = 10  # terms that are summed up as they are


def zeta(cx: TorchContext, x: Operand, q: Operand) -> Value:
    """Hurwitz's: the sum of (k + q)**-x, by Euler and Maclaurin's formula."""
    out = cx.out_dtype
    s, a = cx.aligned(*(cx.tensor(v, DType.F64) for v in (x, q)))
    shape = cx.b.broadcast_shapes(s.shape, a.shape)
    s, a = (cx.broadcast_to(v, shape) for v in (s, a))
    return cx.cast(_zeta(cx, s, a), out)


def _zeta(cx: TorchContext, s: Value, q: Value) -> Value:
    # Where it has poles, and where it is not defined.
    whole = cx.arith("eq", q, cx.unary("floor", q))
    pole = _and(cx, cx.arith("le", q, 0.0), whole)
    odd = cx.arith("ne", s, cx.unary("floor", s))
    odd = _and(cx, _and(cx, odd, cx.arith("lt", q, 0.0)), cx.unary("logical_not", pole))
    started, a = _terms_below(cx, s, cx.select(pole, 1.0, q))
    minus = cx.unary("neg", s)
    total = cx.add(started, cx.arith("pow", a, minus))
    for k in range(1, _DIRECT):
        total = cx.add(total, cx.arith("pow", cx.add(a, float(k)), minus))
    w = cx.add(a, float(_DIRECT - 1))
    last = cx.arith("pow", w, minus)
    total = cx.add(total, cx.div(cx.mul(last, w), cx.sub(s, 1.0)))
    total = cx.sub(total, cx.mul(last, 0.5))
    factor, power = s, cx.div(last, w)
    for k, divisor in enumerate(_EULER_MACLAURIN):
        total = cx.add(total, cx.div(cx.mul(factor, power), divisor))
        factor = cx.mul(factor, cx.add(s, 2.0 * k + 1))
        factor = cx.mul(factor, cx.add(s, 2.0 * k + 2))
        power = cx.div(power, cx.mul(w, w))
    total = cx.select(pole, math.inf, total)
    total = cx.select(odd, math.nan, total)
    total = cx.select(cx.arith("lt", s, 1.0), math.nan, total)
    return cx.select(cx.arith("eq", s, 1.0), math.inf, total)


def _terms_below(cx: TorchContext, s: Value, a: Value) -> tuple[Value, Value]:
    """The terms of bases below 1, added up, and the first base that is not."""

    def more(given: Sequence[Value]) -> list[Value]:
        total, base, power = given
        below = cx.arith("lt", base, 1.0)
        term = cx.arith("pow", cx.select(below, base, 1.0), cx.unary("neg", power))
        sums = cx.b.select(below, cx.add(total, term), total)
        return [sums, cx.b.select(below, cx.add(base, 1.0), base), power]

    def test(given: Sequence[Value]) -> list[Value]:
        below = cx.arith("lt", given[1], 1.0)
        return [cx.reduce("any", below, range(below.type.rank))]

    start = [cx.full(0.0, a.shape, DType.F64), a, s]
    total, base, _ = looped(cx, start, more, test)
    return total, base


def _and(cx: TorchContext, x: Value, y: Value) -> Value:
    first, second = cx.aligned(x, y)
    return cx.b.binary("logical_and", first, second)


def _trigamma(cx: TorchContext, x: Value) -> Value:
    """Below 1/2 by reflection: pi**2 / sin(pi x)**2 - trigamma(1 - x)."""
    low = cx.arith("lt", x, 0.5)
    two = cx.full(2.0, x.shape, DType.F64)
    other = _zeta(cx, two, cx.select(low, cx.sub(1.0, x), x))
    sine = cx.unary("sin", cx.mul(x, math.pi))
    mirrored = cx.sub(cx.div(math.pi**2, cx.mul(sine, sine)), other)
    return cx.select(low, mirrored, other)


def polygamma(cx: TorchContext, n: int, x: Value) -> Value:
    """The n-th derivative of digamma: (-1)**(n+1) n! zeta(n + 1, x)."""
    if n == 0:
        found: Value = SPECIAL[aten.digamma.default](cx, x)
        return found
    wide = cx.cast(x, DType.F64)
    if n == 1:
        return cx.cast(_trigamma(cx, wide), cx.out_dtype)
    sign = 1.0 if n % 2 else -1.0
    made = _zeta(cx, cx.full(n + 1.0, wide.shape, DType.F64), wide)
    return cx.cast(cx.mul(made, sign * math.factorial(n)), cx.out_dtype)


# --- mantissa and exponent ------------------------------------------------------------


def frexp(cx: TorchContext, x: Value) -> list[Value]:
    """x = m * 2**e with 1/2 <= |m| < 1, by steps of powers of two, which are exact."""
    wide = cx.cast(x, DType.F64)
    odd = cx.b.binary("logical_or", cx.unary("isnan", wide), cx.unary("isinf", wide))
    odd = cx.b.binary("logical_or", odd, cx.arith("eq", wide, 0.0))
    m = cx.select(odd, 0.5, wide)
    e = cx.full(0, x.shape, DType.I64)
    for bits in (512, 256, 128, 64, 32, 16, 8, 4, 2, 1, 1):
        large = cx.arith("ge", cx.unary("abs", m), 2.0 ** (bits - 1))
        m = cx.select(large, cx.mul(m, 2.0**-bits), m)
        e = cx.select(large, cx.add(e, bits), e)
        # Twice: a number of f64 may be as small as 2**-1074.
        for _ in range(2 if bits == 512 else 1):
            small = cx.arith("lt", cx.unary("abs", m), 2.0**-bits)
            m = cx.select(small, cx.mul(m, 2.0**bits), m)
            e = cx.select(small, cx.sub(e, bits), e)
    mantissa = cx.select(odd, wide, m)
    exponent = cx.select(odd, 0, e)
    return [cx.cast(mantissa, x.dtype), cx.cast(exponent, DType.I32)]


# --- the incomplete gamma function ----------------------------------------------------

_MOST_ROUNDS, _SMALL, _TINY = 2000.0, 2.0**-52, 1e-300


def _gamma_series(cx: TorchContext, a: Value, x: Value) -> Value:
    """The sum of x**n / ((a + 1) .. (a + n)), for x that is not much above a."""

    def more(given: Sequence[Value]) -> list[Value]:
        k, total, term, shape, point = given
        wide = cx.add(cx.b.broadcast_to(k, point.shape), 1.0)
        term = cx.mul(term, cx.div(point, cx.add(shape, wide)))
        return [cx.add(k, 1.0), cx.add(total, term), term, shape, point]

    def test(given: Sequence[Value]) -> list[Value]:
        k, total, term, *_ = given
        open_ = cx.arith("gt", term, cx.mul(total, _SMALL))
        some = cx.reduce("any", open_, range(open_.type.rank))
        return [_and(cx, some, cx.arith("lt", k, _MOST_ROUNDS))]

    one = cx.full(1.0, a.shape, DType.F64)
    return looped(cx, [cx.full(0.0, (), DType.F64), one, one, a, x], more, test)[1]


def _gamma_fraction(cx: TorchContext, a: Value, x: Value) -> Value:
    """A continued fraction for x above a: Lentz's method (Numerical Recipes, 6.2)."""

    def more(given: Sequence[Value]) -> list[Value]:
        k, b, c, d, found, change, shape = given
        k, b = cx.add(k, 1.0), cx.add(b, 2.0)
        wide = cx.b.broadcast_to(k, b.shape)
        step = cx.mul(wide, cx.sub(shape, wide))
        d = _away_from_0(cx, cx.add(cx.mul(step, d), b))
        c = _away_from_0(cx, cx.add(b, cx.div(step, c)))
        d = cx.div(1.0, d)
        change = cx.mul(c, d)
        return [k, b, c, d, cx.mul(found, change), change, shape]

    def test(given: Sequence[Value]) -> list[Value]:
        off = cx.unary("abs", cx.sub(given[5], 1.0))
        open_ = cx.arith("gt", off, _SMALL)
        some = cx.reduce("any", open_, range(open_.type.rank))
        return [_and(cx, some, cx.arith("lt", given[0], _MOST_ROUNDS))]

    b = cx.sub(cx.add(x, 1.0), a)
    d = cx.div(1.0, _away_from_0(cx, b))
    c = cx.full(1 / _TINY, a.shape, DType.F64)
    two = cx.full(2.0, a.shape, DType.F64)
    start = [cx.full(0.0, (), DType.F64), b, c, d, d, two, a]
    return looped(cx, start, more, test)[4]


def _away_from_0(cx: TorchContext, x: Value) -> Value:
    return cx.select(cx.arith("lt", cx.unary("abs", x), _TINY), _TINY, x)


def incomplete_gamma(upper: bool) -> Translate:
    """The share of gamma(a) that is below x, or above."""

    def translate(cx: TorchContext, a: Value, x: Value) -> Value:
        pair = cx.aligned(*(cx.cast(v, DType.F64) for v in (a, x)))
        dims = cx.b.broadcast_shapes(*(v.shape for v in pair))
        a, x = (cx.broadcast_to(v, dims) for v in pair)
        # Elsewhere than inside, the loops get harmless numbers.
        inside = _and(cx, cx.arith("gt", a, 0.0), cx.arith("gt", x, 0.0))
        inside = _and(cx, inside, cx.arith("lt", cx.add(a, x), math.inf))
        shape, point = cx.select(inside, a, 1.0), cx.select(inside, x, 1.0)
        low = cx.arith("lt", point, cx.add(shape, 1.0))
        power = cx.sub(cx.mul(shape, cx.unary("log", point)), point)
        scale = cx.unary("exp", cx.sub(power, log_gamma(cx, shape)))
        series = _gamma_series(cx, shape, cx.select(low, point, 0.5))
        below = cx.div(cx.mul(series, scale), shape)
        far = cx.select(low, cx.add(shape, 2.0), point)
        above = cx.mul(_gamma_fraction(cx, shape, far), scale)
        if upper:
            found, zero, whole = cx.select(low, cx.sub(1.0, below), above), 1.0, 0.0
        else:
            found, zero, whole = cx.select(low, below, cx.sub(1.0, above)), 0.0, 1.0
        edge = cx.select(cx.arith("eq", x, 0.0), zero, math.nan)
        edge = cx.select(cx.arith("eq", a, 0.0), whole, edge)
        edge = cx.select(cx.arith("eq", x, math.inf), whole, edge)
        edge = cx.select(cx.arith("eq", a, math.inf), zero, edge)
        both = cx.arith("eq", a, x)  # 0 and 0, infinity and infinity
        edge = cx.select(both, math.nan, edge)
        least = cx.arith("minimum", a, x)
        edge = cx.select(cx.arith("ge", least, 0.0), edge, math.nan)
        return cx.cast(cx.select(inside, found, edge), cx.out_dtype)

    return translate


def _times(factor: float, more: float = 0.0) -> Plain:
    return lambda cx, x: cx.add(cx.mul(x, factor), more)


_SERIES: dict[str, Translate] = {
    "chebyshev_polynomial_t": polynomial(_times(1.0), _twice),
    "chebyshev_polynomial_u": polynomial(_times(2.0), _twice),
    "chebyshev_polynomial_v": polynomial(_times(2.0, -1.0), _twice),
    "chebyshev_polynomial_w": polynomial(_times(2.0, 1.0), _twice),
    "shifted_chebyshev_polynomial_t": polynomial(_times(1.0), _twice, True),
    "shifted_chebyshev_polynomial_u": polynomial(_times(2.0), _twice, True),
    "shifted_chebyshev_polynomial_v": polynomial(_times(2.0, -1.0), _twice, True),
    "shifted_chebyshev_polynomial_w": polynomial(_times(2.0, 1.0), _twice, True),
    "hermite_polynomial_h": polynomial(_times(2.0), _hermite),
    "hermite_polynomial_he": polynomial(_times(1.0), _hermite_e),
    "laguerre_polynomial_l": polynomial(_times(-1.0, 1.0), _laguerre),
    "legendre_polynomial_p": polynomial(_times(1.0), _legendre),
    "zeta": zeta,
}
_OF_NUMBERS = (("x_scalar", "n_scalar"), ("self_scalar", "other_scalar"))
SERIES: dict[Any, Translate] = {
    **{
        getattr(getattr(aten, f"special_{name}"), overload): rule
        for name, rule in _SERIES.items()
        for overload in ("default", *_OF_NUMBERS[name == "zeta"])
    },
    aten.igamma.default: incomplete_gamma(False),
    aten.igammac.default: incomplete_gamma(True),
    aten.special_gammainc.default: incomplete_gamma(False),
    aten.special_gammaincc.default: incomplete_gamma(True),
    aten.frexp.Tensor: frexp,
    aten.gcd.default: gcd,
    aten.lcm.default: lcm,
    aten.polygamma.default: polygamma,
    aten.special_polygamma.default: polygamma,
}
