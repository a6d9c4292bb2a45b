"""Logarithms: log, log1p, logit.

x = 2^e * m with m in [sqrt(1/2), sqrt(2)), f = m - 1, by integer arithmetic on the bits
(subnormals are scaled up first). Then

  float   log(1+f) = f - f^2/2 + f^3 P(f)
  double  s = f/(2+f): log(1+f) = f - f^2/2 + s (f^2/2 + R(s^2)), where
          2 atanh(s) = 2s + s R(s^2)   (FreeBSD msun, e_log.c)

and e*ln2 is added in two parts, the small one first.
"""

from __future__ import annotations

from pliant.codegen.vector_math_exp import exp_table
from pliant.codegen.vector_math_lanes import F32, Lanes

INFINITY = float("inf")
NAN = float("nan")

LOG32 = (
    3.3333313e-01,
    -2.5000012e-01,
    2.0002073e-01,
    -1.666786e-01,
    1.422024e-01,
    -1.2408097e-01,
    1.1886018e-01,
    -1.1661208e-01,
    6.734126e-02,
)  # 2^-30.3
LOG64 = (
    0.6666666666666735,
    0.3999999999940893,
    0.28571428743819594,
    0.22222198411011307,
    0.18183573522907975,
    0.153137965387363,
    0.14798667774025373,
)  # R(z)/z, 2^-59.5
SQRT_HALF = 0.7071067811865476


def split_mantissa(x: Lanes) -> tuple[Lanes, Lanes]:
    """(e as a float, m) with x = 2^e * m; x positive, finite, normal."""
    form = x.format
    low = form.encode(SQRT_HALF)
    moved = x.bits() + ((form.bias << form.mantissa) - low)
    m = ((moved & form.mantissa_mask) + low).as_float()
    # The biased exponent, placed in the mantissa of 2^mantissa, reads as a float.
    base = 2.0**form.mantissa
    e = (moved >> form.mantissa) | form.encode(base)
    return e.as_float() - (base + form.bias), m


def log_sum(e: Lanes, f: Lanes, extra: Lanes | None = None) -> Lanes:
    """e*ln2 + log(1+f) (+ extra, a small correction)."""
    table = exp_table(f)
    half_square = f * f * 0.5
    low = e * table.ln2_low if extra is None else e.times_plus(table.ln2_low, extra)
    if f.format is F32:
        cubic = f * f * f * f.polynomial(LOG32)
        inner = (cubic + low) - half_square
    else:
        s = f / (f + 2.0)
        z = s * s
        inner = s.times_plus(half_square + z * z.polynomial(LOG64), low) - half_square
    return e.times_plus(table.ln2_high, f + inner)


def log(x: Lanes) -> Lanes:
    form = x.format
    tiny = x < form.smallest_normal
    scaled = tiny.select(x * 2.0**form.mantissa, x)
    e, m = split_mantissa(scaled)
    e = e - tiny.select(x.constant(float(form.mantissa)), 0.0)
    return log_limits(x, log_sum(e, m - 1.0))


def log_limits(x: Lanes, result: Lanes) -> Lanes:
    """log at 0, infinity, NaN and for negative x."""
    result = (x < INFINITY).select(result, x)  # inf and NaN stay
    result = (x < 0.0).select(NAN, result)
    return x.equals(0.0).select(-INFINITY, result)


def log1p(x: Lanes) -> Lanes:
    """log(u) with u = fl(1+x), plus the error of that addition divided by u."""
    u = x + 1.0
    e, m = split_mantissa(u)
    lost = (x > 1.0).select(1.0 - (u - x), x - (u - 1.0)) / u
    near = e.equals(0.0)  # 1+x needs no scaling: use x itself, nothing is lost
    f = near.select(x, m - 1.0)
    result = log_sum(e, f, near.select(0.0, lost))
    result = log_limits(u, result)
    return near.select(result.with_sign_of(x), result)


def logit(x: Lanes) -> Lanes:
    """log(x / (1-x)), and around 1/2 log1p((2x-1) / (1-x)), where 2x-1 is exact."""
    rest = 1.0 - x
    near = (x - 0.5).magnitude() < 0.1875
    return near.select(log1p((x + x - 1.0) / rest), log(x / rest))


UNARY = {
    "log": log,
    "log1p": log1p,
    "logit": logit,
}
