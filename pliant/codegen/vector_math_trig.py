"""sin, cos, tan and atan2.

x = q*pi/2 + r, |r| <= pi/4; the quadrant q mod 4 says which of sin(r), cos(r), with
which sign. The reduction is in double for both formats:

  |x| <= LIMIT   q*pi/2 is subtracted in parts short enough for exact products (Cody &
                 Waite); for double, r is kept as a sum of two
  above          in the rare case that some lane is, the lanes go one by one through
                 `pliant.reduce_large`: Payne & Hanek's product with the relevant bits
                 of 2/pi (SIGNUM 1983), good for every finite double

So accuracy does not depend on |x|; one large lane costs its vector some 30 ns a lane.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TypeAlias

from llvmlite import ir

from pliant.codegen.builder import LLBuilder
from pliant.codegen.llvm_types import mangle
from pliant.codegen.vector_math_lanes import (
    DOUBLE,
    F32,
    F64,
    Lanes,
    fast_two_sum,
    two_product,
    two_sum,
    with_scalar,
)

Reduced: TypeAlias = tuple[Lanes, Lanes, Lanes]  # r high, r low, q
Reduction: TypeAlias = Callable[[Lanes], Reduced]

INFINITY = float("inf")
TWO_OVER_PI = 0.6366197723675814

# pi/2 in parts: 27 + 53 bits for float, 33 + 33 + 33 + 53 bits for double. LIMIT keeps
# q within 53 - 27 and 53 - 33 bits.
HALF_PI_FOR_FLOAT = (1.570796325802803, 9.920935796805404e-10)
HALF_PI_FOR_DOUBLE = (
    1.5707963267341256,
    6.077100506303966e-11,
    2.0222662487111665e-21,
    8.4784276603689e-32,
)
LIMIT_FLOAT = 2.0**25
LIMIT_DOUBLE = 2.0**20

# sin(r) = r + r z S(z), cos(r) = 1 - z/2 + z^2 C(z), z = r^2
SIN32 = (-1.6666667e-01, 8.333373e-03, -1.9850279e-04, 2.8040727e-06)
COS32 = (4.1666646e-02, -1.3887312e-03, 2.4432755e-05)
SIN64 = (
    -0.1666666666666663,
    0.008333333333321874,
    -0.00019841269829409363,
    2.755731356313642e-06,
    -2.505073913763813e-08,
    1.5895751313747904e-10,
)
COS64 = (
    0.041666666666666595,
    -0.001388888888887334,
    2.480158728899679e-05,
    -2.755731421400535e-07,
    2.0875704757111894e-09,
    -1.1358704141288481e-11,
)

# atan(x) = x + x z A(z), z = x^2, 0 <= x <= 1
ATAN32 = (
    -3.33333e-01,
    1.9998536e-01,
    -1.4264126e-01,
    1.0951652e-01,
    -8.402037e-02,
    5.7935286e-02,
    -3.1157082e-02,
    1.0904085e-02,
    -1.7913837e-03,
)  # 2^-28.5
ATAN64 = (
    -0.33333333333333287,
    0.19999999999990614,
    -0.14285714285044954,
    0.11111111086675125,
    -0.0909090855115696,
    0.0769229975706075,
    -0.06666584098089356,
    0.05881718457137516,
    -0.052594445272320746,
    0.0474496485032391,
    -0.042865003170359,
    0.038212501118535865,
    -0.0327897240087796,
    0.026157647261384965,
    -0.018620735913914194,
    0.011323189489469592,
    -0.005615949198883038,
    0.0021532670051282753,
    -0.000593440086328031,
    0.00010398181600313004,
    -8.664478122476988e-06,
)  # 2^-60.2
PI = {"f32": (3.1415927410125732, -8.742277657347586e-08)}
PI["f64"] = (3.141592653589793, 1.2246467991473532e-16)

# The bits of 2/pi, after two words of zeros.
TWO_OVER_PI_WORDS = (
    *(0x00000000, 0x00000000, 0xA2F9836E, 0x4E441529, 0xFC2757D1, 0xF534DDC0),
    *(0xDB629599, 0x3C439041, 0xFE5163AB, 0xDEBBC561, 0xB7246E3A, 0x424DD2E0),
    *(0x06492EEA, 0x09D1921C, 0xFE1DEB1C, 0xB129A73E, 0xE88235F5, 0x2EBB4484),
    *(0xE99C7026, 0xB45F7E41, 0x3991D639, 0x835339F4, 0x9C845F8B, 0xBDF9283B),
    *(0x1FF897FF, 0xDE05980F, 0xEF2F118B, 0x5A0A6D1F, 0x6D367ECF, 0x27CB09B7),
    *(0x4F463F66, 0x9E5FEA2D, 0x7527BAC7, 0xEBE5F17B, 0x3D0739F7, 0x8A5292EA),
    *(0x6BFB5FB1, 0x1F8D5D08, 0x56033046, 0xFC7B6BAB),
)
WORD = 0xFFFFFFFF


def sin(x: Lanes) -> Lanes:
    high, low, quadrant = _reduce(x)
    return _quarter_wave(high, low, quadrant)


def cos(x: Lanes) -> Lanes:
    high, low, quadrant = _reduce(x)
    return _quarter_wave(high, low, quadrant + 1)


def tan(x: Lanes) -> Lanes:
    """sin/cos of r, or -cos/sin in the odd quadrants."""
    high, low, quadrant = _reduce(x)
    sine, cosine = _sin_series(high, low), _cos_series(high, low)
    odd = (quadrant & 1).differs(0)
    ratio = odd.select(cosine, sine) / odd.select(sine, cosine)
    return ratio.flip_sign((quadrant & 1) << (x.format.bits - 1))


def _quarter_wave(high: Lanes, low: Lanes, quadrant: Lanes) -> Lanes:
    odd = (quadrant & 1).differs(0)
    wave = odd.select(_cos_series(high, low), _sin_series(high, low))
    return wave.flip_sign((quadrant & 2) << (high.format.bits - 2))


def _sin_series(r: Lanes, low: Lanes) -> Lanes:
    z = r * r
    cubic = r * z
    if r.format is F32:
        sine = r + cubic.times_plus(z.polynomial(SIN32), low)
    else:
        sine = r + cubic.times_plus(z.polynomial(SIN64), low - low * z * 0.5)
    return sine.with_sign_of(r)  # -0 stays


def _cos_series(r: Lanes, low: Lanes) -> Lanes:
    z = r * r
    half = z * 0.5
    leading = 1.0 - half
    lost = (1.0 - leading) - half
    series = z.polynomial(COS32 if r.format is F32 else COS64)
    return leading + (lost + (z * z).times_plus(series, -(r * low)))


def _reduce(x: Lanes) -> Reduced:
    """r as a sum of two, and q as an integer of x's width."""
    if x.format is not F32:
        return _reduce_wide(x, LIMIT_DOUBLE, _reduce_moderate_double)
    wide, _, quadrant = _reduce_wide(x.widened(), LIMIT_FLOAT, _reduce_moderate_float)
    high = wide.narrowed()
    low = (wide - high.widened()).narrowed()
    narrow = with_scalar(x.type, F32.integer)
    return high, low, x.make(x.builder.trunc(quadrant.value, narrow))


def _split_quadrant(x: Lanes) -> tuple[Lanes, Lanes]:
    magic = x.format.round_magic
    shifted = x.times_plus(TWO_OVER_PI, magic)
    return shifted - magic, shifted.bits()


def _reduce_moderate_float(x: Lanes) -> Reduced:
    q, bits = _split_quadrant(x)
    first, second = HALF_PI_FOR_FLOAT
    return x.minus_times(q, first).minus_times(q, second), x.constant(0.0), bits


def _reduce_moderate_double(x: Lanes) -> Reduced:
    q, bits = _split_quadrant(x)
    first, second, third, fourth = HALF_PI_FOR_DOUBLE
    high, low = two_sum(x.minus_times(q, first), -(q * second))
    high, lower = two_sum(high, -(q * third))
    low = (low + lower).minus_times(q, fourth)
    high, low = fast_two_sum(high, low)
    return x.equals(0.0).select(x, high), low, bits  # the sums lose -0


def _reduce_wide(x: Lanes, limit: float, moderate: Reduction) -> Reduced:
    """`moderate` for the lanes within the limit, `_reduce_large` for the others."""
    builder = x.builder
    fast = moderate(x)
    magnitude = x.magnitude()
    large = (magnitude > limit) & (magnitude < INFINITY)
    before = builder.block
    slow = builder.append_basic_block("large")
    join = builder.append_basic_block("reduced")
    branch = builder.cbranch(large.any(), slow, join)
    branch.set_weights([1, 1 << 20])
    builder.position_at_end(slow)
    function = _lanes_function(builder.module, x.type, limit, x.fma)
    result = builder.call(function, [x.value, *(part.value for part in fast)])
    exact = [builder.extract_value(result, i) for i in range(3)]
    builder.branch(join)
    builder.position_at_end(join)
    joined = []
    for a, b in zip(fast, exact, strict=True):
        phi = builder.phi(a.type)
        phi.add_incoming(a.value, before)
        phi.add_incoming(b, slow)
        joined.append(x.make(phi))
    return joined[0], joined[1], joined[2]


def _cold_function(
    module: ir.Module, name: str, results: list[ir.Type], parameters: list[ir.Type]
) -> ir.Function:
    """An internal function that is not inlined into its callers."""
    signature = ir.FunctionType(ir.LiteralStructType(results), parameters)
    function = ir.Function(module, signature, name)
    function.linkage = "internal"
    for attribute in ("noinline", "cold", "nounwind"):
        function.attributes.add(attribute)
    return function


def _return_parts(builder: LLBuilder, parts: list[ir.Value]) -> None:
    type_ = builder.function.ftype.return_type
    value: ir.Value = ir.Constant(type_, ir.Undefined)
    for i, part in enumerate(parts):
        value = builder.insert_value(value, part, i)
    builder.ret(value)


def _lanes_function(
    module: ir.Module, type_: ir.Type, limit: float, fma: bool
) -> ir.Function:
    """(x, r high, r low, q) -> the same three, recomputed in the large lanes."""
    name = f"pliant.reduce_lanes.{mangle(type_)}.{limit:.0f}{'.fma' if fma else ''}"
    found = module.globals.get(name)
    if found is not None:
        return found
    parts = [type_, type_, with_scalar(type_, F64.integer)]
    function = _cold_function(module, name, parts, [type_, *parts])
    x, *fast = function.args
    large = _large_function(module, fma)
    entry = function.append_basic_block("entry")
    builder = LLBuilder(entry)
    if not isinstance(type_, ir.VectorType):
        builder.ret(builder.call(large, [x]))
        return function
    loop, done = (function.append_basic_block(name) for name in ("lane", "done"))
    index = ir.IntType(32)
    builder.branch(loop)
    builder.position_at_end(loop)
    lane = builder.phi(index)
    vectors = [builder.phi(part) for part in parts]
    element = builder.extract_element(x, lane)
    result = builder.call(large, [element])
    magnitude = Lanes(builder, element, fma).magnitude()
    is_large = ((magnitude > limit) & (magnitude < INFINITY)).value
    lane.add_incoming(index(0), entry)
    following = builder.add(lane, index(1))
    lane.add_incoming(following, loop)
    updated = []
    for i, vector in enumerate(vectors):
        old, new = (
            builder.extract_element(vector, lane),
            builder.extract_value(result, i),
        )
        chosen = builder.select(is_large, new, old)
        updated.append(builder.insert_element(vector, chosen, lane))
        vector.add_incoming(fast[i], entry)
        vector.add_incoming(updated[i], loop)
    more = builder.icmp_unsigned("<", following, index(type_.count))
    builder.cbranch(more, loop, done)
    builder.position_at_end(done)
    _return_parts(builder, updated)
    return function


def _large_function(module: ir.Module, fma: bool) -> ir.Function:
    """double -> {r high, r low, quadrant}; |x| >= 2^20 or the result is meaningless."""
    name = f"pliant.reduce_large.f64{'.fma' if fma else ''}"
    found = module.globals.get(name)
    if found is not None:
        return found
    function = _cold_function(module, name, [DOUBLE, DOUBLE, F64.integer], [DOUBLE])
    builder = LLBuilder(function.append_basic_block("entry"))
    parts = _reduce_large(Lanes(builder, function.args[0], fma))
    _return_parts(builder, [part.value for part in parts])
    return function


def _reduce_large(x: Lanes) -> Reduced:
    """Payne and Hanek's reduction of one double.

    |x| = M * 2^E with M of 53 bits. Bits of 2/pi before position E-2 contribute
    multiples of 4 to the quotient; the 192 bits W from there on give
    |x| * 2/pi mod 4 = M * W * 2^-190 mod 4, to 2^-137. No double comes closer to a
    multiple of pi/2 than 2^-62, so r has 75 good bits.
    """
    form, bits = x.format, x.bits()
    exponent = (bits >> form.mantissa) & ((1 << (form.bits - form.mantissa - 1)) - 1)
    mantissa = (bits & form.mantissa_mask) | (1 << form.mantissa)
    # E = exponent - bias - 52; the table starts 64 zeros early, which keeps skip >= 0.
    skip = exponent - (form.bias + form.mantissa + 2 - 64)
    # Meaningless lanes must not read outside the table.
    last = 32 * (len(TWO_OVER_PI_WORDS) - 7)
    skip = (skip < 0).select(0, (skip > last).select(last, skip))
    words = [_table_word(x, (skip >> 5) + i) for i in range(7)]
    shift = skip & 31
    window = [
        (((a << 32) | b) << shift >> 32) & WORD for a, b in itertools.pairwise(words)
    ]
    product = _multiply_words(window[::-1], mantissa & WORD, mantissa >> 32)
    top = (product[5] << 32) | product[4]
    middle = (product[3] << 32) | product[2]
    bottom = (product[1] << 32) | product[0]
    quadrant = (top + (1 << 61)) >> 62
    # The rest, as a signed fraction of 2^128: two's complement by inverting all bits.
    high = (top << 2) | (middle >> 62)
    low = (middle << 2) | (bottom >> 62)
    negative = high < 0
    flip = negative.select(high.constant(-1), 0)
    high, low = high ^ flip, low ^ flip
    pieces = [high >> 32, high & WORD, low >> 32, low & WORD]
    scaled = [_from_word(p) * 2.0 ** (-32 * (i + 1)) for i, p in enumerate(pieces)]
    sum_high, error = fast_two_sum(scaled[2], scaled[3])
    sum_high, error_above = fast_two_sum(scaled[1], sum_high)
    sum_high, sum_low = fast_two_sum(scaled[0], sum_high)
    sum_low = sum_low + (error_above + error)
    # times pi/2
    half_pi, half_pi_low = PI["f64"][0] / 2, PI["f64"][1] / 2
    r, r_low = two_product(sum_high, half_pi)
    r_low = r_low + sum_high * half_pi_low + sum_low * half_pi
    r, r_low = fast_two_sum(r, r_low)
    backward = x.sign_bit()
    sign = (flip & form.sign_mask) ^ backward
    quadrant = backward.differs(0).select(4 - quadrant, quadrant)
    return r.flip_sign(sign), r_low.flip_sign(sign), quadrant


def _from_word(word: Lanes) -> Lanes:
    """An integer below 2^32 as a double, through the mantissa of 2^52."""
    base = 2.0**52
    return (word | F64.encode(base)).as_float() - base


def _table_word(x: Lanes, index: Lanes) -> Lanes:
    """TWO_OVER_PI_WORDS[index] as i64."""
    builder, name = x.builder, "pliant.two_over_pi"
    word = ir.IntType(32)
    table = builder.module.globals.get(name)
    if table is None:
        type_ = ir.ArrayType(word, len(TWO_OVER_PI_WORDS))
        table = ir.GlobalVariable(builder.module, type_, name)
        table.linkage = "internal"
        table.global_constant = True
        table.initializer = ir.Constant(type_, list(TWO_OVER_PI_WORDS))
    place = builder.gep(table, [index.value], source_etype=word)
    return x.make(builder.zext(builder.load(place, typ=word), F64.integer))


def _multiply_words(window: list[Lanes], low: Lanes, high: Lanes) -> list[Lanes]:
    """window * (high*2^32 + low) modulo 2^192; words from the least significant up."""
    product: list[Lanes] = []
    carry = low.constant(0)
    for word in window:
        partial = low * word + carry
        product.append(partial & WORD)
        carry = partial >> 32
    carry = low.constant(0)
    for i, word in enumerate(window[:-1], start=1):
        partial = high * word + product[i] + carry
        product[i] = partial & WORD
        carry = partial >> 32
    return product


def atan2(y: Lanes, x: Lanes) -> Lanes:
    """base +- atan(q), q = min/max of the magnitudes, base one of 0, pi/2, pi."""
    is_float = x.format is F32
    across, up = x.magnitude(), y.magnitude()
    steep = up > across
    longer, shorter = steep.select(up, across), steep.select(across, up)
    same = shorter.equals(longer)  # 0/0 and inf/inf among them
    q = same.select(
        longer.equals(0.0).select(longer.constant(0.0), 1.0), shorter / longer
    )
    z = q * q
    series = z.polynomial(ATAN32 if is_float else ATAN64)
    angle = (q * z).times_plus(series, q)
    left = x.bits() < 0
    high, low = PI["f32" if is_float else "f64"]
    zero = x.constant(0.0)
    base_high = steep.select(x.constant(high / 2), left.select(x.constant(high), zero))
    base_low = steep.select(x.constant(low / 2), left.select(x.constant(low), zero))
    angle = (steep ^ left).select(-angle, angle)
    return (base_high + (base_low + angle)).with_sign_of(y)


UNARY = {
    "sin": sin,
    "cos": cos,
    "tan": tan,
}
BINARY = {
    "atan2": atan2,
}
