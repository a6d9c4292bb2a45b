"""exp and what is built on it: expm1, sigmoid, tanh, erf, erfc.

exp: x = k*ln2 + r, |r| <= ln2/2, exp(x) = 2^k * (1 + r + r^2 P(r)). ln2 is split in a
high part with trailing zeros, so that k*high is exact, and the rest (Cody & Waite,
"Software Manual for the Elementary Functions", 1980). k comes out of the low mantissa
bits of x/ln2 + 1.5*2^mantissa, without a conversion to integer.

Coefficients are weighted minimax fits of relative error (Lawson iteration at 60
digits), rounded to the format one by one, low degree first, refitting the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from pliant.codegen.vector_math_lanes import F32, Lanes


@dataclass(frozen=True, slots=True)
class ExpTable:
    ln2_high: float
    ln2_low: float
    underflow: float  # exp is 0 from here down, after rounding
    overflow: float  # exp is inf from here up
    least: float  # exp is a normal number from here up
    series: tuple[float, ...]  # P of the module docstring, |r| <= ln2/2


LOG2_E = 1.4426950408889634

EXP32 = ExpTable(
    ln2_high=0.693359375,
    ln2_low=-2.12194440e-4,
    underflow=-104.0,
    overflow=89.0,
    least=-87.0,
    series=(4.9999994e-01, 1.666652e-01, 4.166825e-02, 8.368826e-03, 1.3822414e-03),
)  # 2^-28.2
EXP64 = ExpTable(
    ln2_high=6.93147180369123816490e-01,
    ln2_low=1.90821492927058770002e-10,
    underflow=-746.0,
    overflow=710.0,
    least=-708.0,
    series=(
        0.5000000000000011,
        0.16666666666666435,
        0.041666666666526096,
        0.008333333333479052,
        0.0013888888944705352,
        0.00019841269541208607,
        2.4801491976250024e-05,
        2.7557554503119376e-06,
        2.763065282933218e-07,
        2.5010419581346225e-08,
    ),
)  # 2^-57.9
EXP64_SHORT = (
    0.5000000000435502,
    0.1666666678506281,
    0.04166666433857169,
    0.008333281604673991,
    0.0013889207240914102,
    0.00019909085812977074,
    2.470416417789044e-05,
)  # 2^-39.7: double arithmetic on the way to a float result

# tanh(x)/x = 1 + z T(z), z = x^2, |x| <= 0.625
TANH32 = (-3.3333284e-01, 1.333148e-01, -5.3742457e-02, 2.0647036e-02, -5.713036e-03)
TANH64 = (
    -0.33333333333333315,
    0.13333333333329975,
    -0.053968253966158924,
    0.021869488470960687,
    -0.008863234342705728,
    0.0035921142592114925,
    -0.0014557274322667302,
    0.000589457511572873,
    -0.0002370263498805967,
    9.158226904196153e-05,
    -3.0209687260360138e-05,
    6.051760159639507e-06,
)

# erf(x)/x = 1 + E(x^2), |x| <= 0.9375 (float), 1 (double)
ERF32_SMALL = (
    1.2837915e-01,
    -3.761248e-01,
    1.1281622e-01,
    -2.6758825e-02,
    4.9811574e-03,
    -5.9277914e-04,
)
ERF64_SMALL = (
    0.1283791670955126,
    -0.37612638903183876,
    0.1128379167095874,
    -0.026866170645618782,
    0.005223977629087358,
    -0.0008548327189111545,
    0.00012055337759731691,
    -1.4925738076719837e-05,
    1.6463080406574877e-06,
    -1.6370569444323813e-07,
    1.4786099743014803e-08,
    -1.1828911432478334e-09,
    6.682081135776575e-11,
)
# -log(erfc(x)) = x L(x) on [0.93, 4] (float), L(x - 2.5) on [1, 6] (double). The error
# weight is erfc(x), which is how much the error counts in 1 - erfc(x).
ERF32_LARGE = (
    1.1285065e00,
    6.3574517e-01,
    1.0522596e-01,
    -2.2866664e-02,
    3.2076112e-03,
    -2.1308614e-04,
)
ERF64_LARGE = (
    7.806815272727266,
    5.352680750986433,
    0.9438937335242172,
    0.010858072737454191,
    -0.0021654769027437994,
    0.0004209325639442515,
    -7.703078137534362e-05,
    1.2755857950608419e-05,
    -1.7690250810508528e-06,
    1.558993510269481e-07,
    1.2620805677148633e-08,
    -1.085245985955066e-08,
    3.5412735745955993e-09,
    -8.775369291911079e-10,
    1.3723292605714923e-10,
    -1.8062615039574687e-11,
    8.832373217832478e-12,
    7.625153705907908e-13,
    -1.0382592454678453e-12,
)
# (1 + 2x) exp(x^2) erfc(x) = C((x - 3.75) / (x + 3.75)), 0 <= x (Shepherd, Laframboise
# 1981), to 2^-27 up to 10.3 (float), to 2^-60 up to 27.6 (double).
ERFC32 = (
    1.2375126,
    -0.14024054,
    0.0035846648,
    0.082273178,
    -0.10879099,
    0.092359401,
    -0.058741689,
    0.028036801,
    -0.009901017,
    0.0023443063,
    0.001109542,
)
ERFC64 = (
    1.2375126308378275,
    -0.140240598585547,
    0.0035854154854635984,
    0.08227673849014934,
    -0.10880393014170146,
    0.09230432116026742,
    -0.058693398590694036,
    0.028362277420189107,
    -0.009746579545882697,
    0.001755625846728534,
    0.000293713583817021,
    -0.00029015407459790553,
    5.1649443123068397e-05,
    2.238432414783079e-05,
    -1.1445075354999672e-05,
    -9.740300806672794e-07,
    1.7532279966743711e-06,
    -5.60327907003782e-08,
    -2.602857892840865e-07,
    2.1605483717370873e-08,
    3.945980070206358e-08,
    -2.498659241873596e-09,
    -5.159038339949874e-09,
    -8.25808229973906e-11,
    3.0314178405904606e-10,
)


def exp_table(x: Lanes) -> ExpTable:
    return EXP32 if x.format is F32 else EXP64


def split_exponent(x: Lanes) -> tuple[Lanes, Lanes, Lanes]:
    """(k, k as the low bits of an integer, r) with x = k*ln2 + r."""
    table, magic = exp_table(x), x.format.round_magic
    shifted = x.times_plus(LOG2_E, magic)
    k = shifted - magic
    r = x.minus_times(k, table.ln2_high).minus_times(k, table.ln2_low)
    return k, shifted.bits() - x.format.encode(magic), r


def exp_minus_one_series(r: Lanes, series: tuple[float, ...] | None = None) -> Lanes:
    """exp(r) - 1 for |r| <= ln2/2."""
    series = exp_table(r).series if series is None else series
    return (r * r).times_plus(r.polynomial(series), r)


def scale(x: Lanes, k: Lanes) -> Lanes:
    """x * 2^k for |k| up to twice the exponent range; rounds once, at the end."""
    form = x.format
    biased = k + 2 * form.bias  # positive, so a logical shift halves it
    half = biased >> 1
    first = (half << form.mantissa).as_float()
    second = ((biased - half) << form.mantissa).as_float()
    return x * first * second


def exp(x: Lanes) -> Lanes:
    table = exp_table(x)
    # Masked scores are far below. Rounding them to 0 through a subnormal product would
    # cost tens of cycles per vector, so those lanes compute with a normal number.
    nothing = x <= table.underflow
    x = nothing.select(0.0, x.at_most(table.overflow))
    _, k, r = split_exponent(x)
    return nothing.select(0.0, scale(exp_minus_one_series(r) + 1.0, k))


def exp_moderate(x: Lanes, series: tuple[float, ...] | None = None) -> Lanes:
    """exp where neither x nor the result can leave the normal range."""
    _, k, r = split_exponent(x)
    form = x.format
    power = ((k + form.bias) << form.mantissa).as_float()
    return power.times_plus(exp_minus_one_series(r, series), power)


def decay(x: Lanes) -> Lanes:
    """exp for x <= 0; results that are not normal numbers are flushed to 0."""
    least = exp_table(x).least
    return (x < least).select(0.0, exp_moderate(x.at_least(least)))


def expm1(x: Lanes) -> Lanes:
    """2^k * (exp(r) - 1) + (2^k - 1).

    For k = 0 it is exact; around it the two terms have different sizes. The result
    takes the sign of x, which also restores -0.
    """
    table, form = exp_table(x), x.format
    floor = -2.0 * form.mantissa  # exp(floor) is far below half an ulp of 1
    clamped = x.at_most(table.overflow).at_least(floor)
    kf, k, r = split_exponent(clamped)
    series = exp_minus_one_series(r)
    # 2^k itself overflows for the largest k: stay one below and double.
    half_power = ((k + (form.bias - 1)) << form.mantissa).as_float()
    total = half_power.times_plus(series, half_power - 0.5) * 2.0
    return kf.equals(0.0).select(series, total).with_sign_of(x)


def sigmoid(x: Lanes) -> Lanes:
    """z = exp(-|x|): 1/(1+z) on the right, z/(1+z) on the left, subnormals included."""
    z = exp(-x.magnitude())
    return (x < 0.0).select(z, 1.0) / (z + 1.0)


def tanh(x: Lanes) -> Lanes:
    """x + x^3 T(x^2) near 0, otherwise 1 - 2/(exp(2|x|) + 1)."""
    is_float = x.format is F32
    magnitude = x.magnitude()
    square = x * x
    series = square.polynomial(TANH32 if is_float else TANH64)
    small = magnitude.times_plus(square * series, magnitude)
    # 1 - tanh is below half an ulp of 1 from here on.
    clamped = magnitude.at_most(10.0 if is_float else 20.0)
    large = 1.0 - 2.0 / (exp_moderate(clamped * 2.0) + 1.0)
    return (magnitude < 0.625).select(small, large).with_sign_of(x)


def erf_series(x: Lanes) -> Lanes:
    """x + x E(x^2), near 0."""
    series = (x * x).polynomial(ERF32_SMALL if x.format is F32 else ERF64_SMALL)
    return x.times_plus(series, x)


def erf(x: Lanes) -> Lanes:
    """x + x E(x^2) near 0, otherwise 1 - exp(log(erfc(|x|)))."""
    is_float = x.format is F32
    magnitude = x.magnitude()
    small = erf_series(magnitude)
    if is_float:
        clamped = magnitude.at_most(4.0)
        exponent = -clamped * clamped.polynomial(ERF32_LARGE)
    else:
        exponent = -(magnitude.at_most(6.0) - 2.5).polynomial(ERF64_LARGE)
    large = 1.0 - exp_moderate(exponent)
    boundary = 0.9375 if is_float else 1.0
    return (magnitude < boundary).select(small, large).with_sign_of(x)


def erfc(x: Lanes) -> Lanes:
    """1 - erf(x) near 0; right of it C(t) exp(-x^2) / (1 + 2|x|), left of it 2 - that.

    |x| = h + l with an exact h^2, and l (|x| + h) is subtracted from the reduced h^2: a
    rounded x^2 would multiply the error of exp by x^2.
    """
    is_float = x.format is F32
    size = x.magnitude().at_most(10.25 if is_float else 27.5)  # 0 from here on
    high = (size.bits() & ~((1 << (12 if is_float else 27)) - 1)).as_float()
    _, k, r = split_exponent(-(high * high))
    r = r - (size - high) * (size + high)
    t = (size - 3.75) / (size + 3.75)
    front = t.polynomial(ERFC32 if is_float else ERFC64) / (size + size + 1.0)
    tail = scale(front.times_plus(exp_minus_one_series(r), front), k)
    near = x.magnitude() < 0.8125
    return near.select(1.0 - erf_series(x), (x < 0.0).select(2.0 - tail, tail))


UNARY = {
    "exp": exp,
    "decay": decay,
    "expm1": expm1,
    "sigmoid": sigmoid,
    "tanh": tanh,
    "erf": erf,
    "erfc": erfc,
}
