"""sign, minimum, maximum, nextafter; Python's `mod` and floor division on floats."""

from __future__ import annotations

from pliant.codegen.vector_math_lanes import F32, Lanes, call_overloaded

INFINITY = float("inf")
NAN = float("nan")


def sign(x: Lanes) -> Lanes:
    """-1, 0 or 1; 0 for NaN and for -0, as torch has it."""
    return (x > 0.0).select(1.0, (x < 0.0).select(x.constant(-1.0), 0.0))


def minimum(x: Lanes, y: Lanes) -> Lanes:
    """NaN if either operand is; -0 < +0."""
    return x.make(call_overloaded(x.builder, "minimum", x.type, [x.value, y.value]))


def maximum(x: Lanes, y: Lanes) -> Lanes:
    """NaN if either operand is; -0 < +0."""
    return x.make(call_overloaded(x.builder, "maximum", x.type, [x.value, y.value]))


def nextafter(x: Lanes, y: Lanes) -> Lanes:
    """The next number from x towards y: one more or less in its bits."""
    away = (x < y) ^ (x < 0.0)  # from 0
    bits = x.bits()
    moved = (bits + away.select(bits.constant(1), -1)).as_float()
    least = x.constant(0.0).bits() + 1
    moved = x.equals(0.0).select(least.as_float().with_sign_of(y), moved)
    result = x.equals(y).select(y, moved)
    return (x.is_nan() | y.is_nan()).select(x + y, result)


def mod(x: Lanes, y: Lanes) -> Lanes:
    """x - y*floor(x/y), exact but for the last addition; it has the sign of y."""
    remainder = truncated_remainder(x, y)
    return _wrong_side(remainder, y).select(remainder + y, remainder)


def floordiv(x: Lanes, y: Lanes) -> Lanes:
    """floor(x/y) through the exact remainder, so that it never rounds up (CPython)."""
    remainder = truncated_remainder(x, y)
    quotient = (x - remainder) / y
    quotient = _wrong_side(remainder, y).select(quotient - 1.0, quotient)
    floor = quotient.floor()
    floor = (quotient - floor > 0.5).select(floor + 1.0, floor)
    ratio = x / y
    result = quotient.equals(0.0).select(x.constant(0.0).with_sign_of(ratio), floor)
    return y.equals(0.0).select(ratio, result)


def _wrong_side(remainder: Lanes, y: Lanes) -> Lanes:
    return remainder.differs(0.0) & ((y < 0.0) ^ (remainder < 0.0))


def truncated_remainder(x: Lanes, y: Lanes) -> Lanes:
    """C's fmod, exact."""
    if x.format is F32:
        wide = _remainder_loop(x.widened().magnitude(), y.widened().magnitude(), False)
        remainder = wide.narrowed()
    else:
        remainder = _remainder_loop(x.magnitude(), y.magnitude(), True)
    remainder = remainder.with_sign_of(x)
    remainder = y.magnitude().equals(INFINITY).select(x, remainder)
    undefined = y.equals(0.0) | x.magnitude().equals(INFINITY)
    undefined = undefined | x.is_nan() | y.is_nan()
    return undefined.select(NAN, remainder)


def _remainder_loop(x: Lanes, y: Lanes, full_range: bool) -> Lanes:
    """Long division in double, 25 bits of quotient per step; 0 for lanes without one.

    Each step takes q <= x/y of at most 26 bits, so that q*y (y split in two) and x -
    q*y are exact. One step suffices if all quotients are below 2^25. Inputs that are
    widened floats cannot overflow x/y, and need no split of y.
    """
    builder = x.builder
    defined = (y > 0.0) & (y < INFINITY) & (x < INFINITY)
    x = defined.select(x, 0.0)
    y = defined.select(y, 1.0)
    before = builder.block
    loop = builder.append_basic_block("remainder")
    done = builder.append_basic_block("done")
    builder.cbranch((x >= y).any(), loop, done)
    builder.position_at_end(loop)
    rest_phi = builder.phi(x.type)
    rest_phi.add_incoming(x.value, before)
    following = _remainder_step(x.make(rest_phi), y, full_range)
    rest_phi.add_incoming(following.value, builder.block)
    builder.cbranch((following >= y).any(), loop, done)
    after = builder.block
    builder.position_at_end(done)
    result = builder.phi(x.type)
    result.add_incoming(x.value, before)
    result.add_incoming(following.value, after)
    return x.make(result)


def _remainder_step(x: Lanes, y: Lanes, full_range: bool) -> Lanes:
    active = x >= y
    if full_range:  # reduce by y*2^700 or y*2^1400 first where x/y could overflow
        y_large = y * 2.0**700
        y_huge = y_large * 2.0**700
        y = (x >= y_huge).select(y_huge, (x >= y_large).select(y_large, y))
    # One ulp below the rounded quotient is below the true one.
    bits = ((x / y).bits() - 1) & ~((1 << 27) - 1)
    q = bits.as_float().truncate().at_least(1.0)
    if full_range:
        high = (y.bits() & ~((1 << 27) - 1)).as_float()
        rest = (x - q * high) - q * (y - high)
    else:
        rest = x - q * y
    # An exact multiple was taken one too few times; the difference is exact below 2y.
    less = rest - y
    rest = ((less >= 0.0) & (less < y)).select(less, rest)
    return active.select(rest, x)


UNARY = {
    "sign": sign,
}
BINARY = {
    "nextafter": nextafter,
    "minimum": minimum,
    "maximum": maximum,
    "mod": mod,
    "floordiv": floordiv,
}
