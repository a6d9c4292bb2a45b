"""pow, with the special cases of C99 annex F.9.4.4 (which are torch's).

|x|^y = exp(y log|x|). A float goes through double, whose 29 spare bits absorb the
magnification of log's error by y log|x| <= 104. A double needs log to 2^-64: it is
computed as a sum of two doubles, with 2 atanh(s) = 2s + 2/3 s^3 + s^5 T(s^2), the first
two terms as sums of two, after SLEEF's logk (Shibata & Petrogalli 2020).
"""

from __future__ import annotations

from pliant.codegen.vector_math_exp import (
    EXP64,
    EXP64_SHORT,
    LOG2_E,
    exp_minus_one_series,
    exp_moderate,
    scale,
)
from pliant.codegen.vector_math_lanes import (
    F32,
    Lanes,
    fast_two_sum,
    two_product,
    two_sum,
)
from pliant.codegen.vector_math_log import log, split_mantissa

INFINITY = float("inf")
NAN = float("nan")

TWO_THIRDS = (0.6666666666666666, 3.700743415417188e-17)
LOG_TAIL = (
    0.3999999999999998,
    0.2857142857144382,
    0.22222222217796583,
    0.18181818843196518,
    0.1538455847270278,
    0.13336263323840528,
    0.11675792733032186,
    0.1198175521303841,
)  # 2^-73.4 of log


def pow(x: Lanes, y: Lanes) -> Lanes:
    magnitude = x.magnitude()
    power = _pow_float if x.format is F32 else _pow_double
    result = power(magnitude, y)
    result = magnitude.equals(1.0).select(x.constant(1.0), result)
    # A negative x needs an integral y; an odd y keeps the sign.
    integral = y.nearest().equals(y)
    half = y * 0.5
    odd = integral & half.nearest().differs(half)
    sign = odd.select(x.sign_bit(), x.bits().constant(0))
    finite_negative = (x < 0.0) & (x > -INFINITY)
    undefined = (finite_negative & integral.invert()) | x.is_nan() | y.is_nan()
    result = undefined.select(NAN, result.flip_sign(sign))
    return (y.equals(0.0) | x.equals(1.0)).select(1.0, result)


def _pow_float(x: Lanes, y: Lanes) -> Lanes:
    exponent = y.widened() * log(x.widened())
    # Within double's normal range, beyond float's: narrowing rounds once.
    clamped = exponent.at_most(100.0).at_least(-110.0)
    return exp_moderate(clamped, EXP64_SHORT).narrowed()


def _pow_double(x: Lanes, y: Lanes) -> Lanes:
    log_high, log_low = _log_pair(x)
    high, low = two_product(y, log_high)
    low = low + y * log_low
    # Far outside exp's range `low` may be inf - inf.
    inside = high.magnitude() < 800.0
    low = inside.select(low, 0.0)
    return _exp_pair(high.at_most(800.0).at_least(-800.0), low)


def _exp_pair(high: Lanes, low: Lanes) -> Lanes:
    magic = high.format.round_magic
    shifted = high.times_plus(LOG2_E, magic)
    k = shifted - magic
    r = high.minus_times(k, EXP64.ln2_high) + low.minus_times(k, EXP64.ln2_low)
    return scale(
        exp_minus_one_series(r) + 1.0, shifted.bits() - high.format.encode(magic)
    )


def _log_pair(x: Lanes) -> tuple[Lanes, Lanes]:
    """log(x) as a sum of two doubles; x >= 0, with log(0) = -inf and log(inf) = inf."""
    form = x.format
    tiny = x < form.smallest_normal
    e, m = split_mantissa(tiny.select(x * 2.0**form.mantissa, x))
    e = e - tiny.select(x.constant(float(form.mantissa)), 0.0)
    s, s_low = _ratio(m)
    z, z_low = two_product(s, s)
    z_low = z_low + s * s_low * 2.0
    cube, cube_low = two_product(z, s)
    cube_low = cube_low + z * s_low + z_low * s
    third, third_low = two_product(cube, TWO_THIRDS[0])
    third_low = third_low + cube * TWO_THIRDS[1] + cube_low * TWO_THIRDS[0]
    tail = cube * z * z.polynomial(LOG_TAIL)
    high, low = two_sum(e * EXP64.ln2_high, s * 2.0)
    high, lower = two_sum(high, third)
    small = tail + third_low + s_low * 2.0 + e * EXP64.ln2_low
    high, low = fast_two_sum(high, small + (low + lower))
    limit = x.equals(0.0).select(x.constant(-INFINITY), x)
    ordinary = (x > 0.0) & (x < INFINITY)
    return ordinary.select(high, limit), ordinary.select(low, 0.0)


def _ratio(m: Lanes) -> tuple[Lanes, Lanes]:
    """(m-1)/(m+1) as a sum of two; m in [sqrt(1/2), sqrt(2))."""
    f = m - 1.0
    below = m + 1.0
    below_low = m - (below - 1.0)
    s = f / below
    product, product_low = two_product(s, below)
    rest = ((f - product) - product_low).minus_times(s, below_low)
    return s, rest / below


BINARY = {
    "pow": pow,
}
