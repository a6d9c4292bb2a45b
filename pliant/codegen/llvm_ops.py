"""Elementwise ops and casts of the loop IR as LLVM instructions.

Everything here works on scalars and on vectors alike; both operands have one width.
No instruction may trap or be undefined, whatever the data: integer division guards its
divisor, shifts their amount, and float to integer its range.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.ir as ll

from pliant.codegen import vector_math
from pliant.codegen.builder import Builder
from pliant.codegen.llvm_types import (
    F16,
    F32,
    I1,
    I8,
    I16,
    I32,
    PTR,
    VOID,
    call_intrinsic,
    compute_type,
    constant,
    dtype_constant,
    lanes_of,
    mangle,
    scalar_of,
    splat,
    widen,
)
from pliant.ir.reductions import COMBINES, identity
from pliant.ir.types import DType
from pliant.machine.target import Target

HALVES = (DType.F16, DType.BF16)
_SIGNS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


# ---- casts


def emit_cast(b: Builder, x: Any, source: DType, to: DType, target: Target) -> Any:
    """Conversion as in C; float to bool is `!= 0`; to half rounds to even."""
    if source is to:
        return x
    if source in HALVES:
        number = _half_to_f32(b, x, source, target)
        return emit_cast(b, number, DType.F32, to, target)
    if to in HALVES:
        number = emit_cast(b, x, source, DType.F32, target)
        return _f32_to_half(b, number, to, target)
    lanes = lanes_of(x)
    typ = compute_type(to, lanes)
    if to is DType.BOOL:
        return emit_binary(b, "ne", x, constant(x.type, 0), source, target)
    if source.is_float:
        return _cast_float(b, x, source, to, typ)
    unsigned = source in (DType.BOOL, DType.U8)
    if to.is_float:
        return b.uitofp(x, typ) if unsigned else b.sitofp(x, typ)
    if scalar_of(typ).width <= scalar_of(x.type).width:
        return b.trunc(x, typ) if typ != x.type else x
    return b.zext(x, typ) if unsigned else b.sext(x, typ)


def _cast_float(b: Builder, x: Any, source: DType, to: DType, typ: Any) -> Any:
    if to.is_float:
        return b.fpext(x, typ) if to.bytes > source.bytes else b.fptrunc(x, typ)
    # What cvttss2si does: out of range and NaN give the least integer. The narrow
    # types keep the low bits of the 32-bit result.
    wide = compute_type(DType.I64 if to is DType.I64 else DType.I32, lanes_of(x))
    bits = scalar_of(wide).width
    low, high = (
        constant(x.type, -(2.0 ** (bits - 1))),
        constant(x.type, 2.0 ** (bits - 1)),
    )
    fits = b.and_(b.fcmp_ordered(">=", x, low), b.fcmp_ordered("<", x, high))
    if source is DType.F64 and bits == 32:
        below = constant(x.type, -(2.0**31) - 1.0)  # truncates to the least i32
        fits = b.and_(b.fcmp_ordered(">", x, below), b.fcmp_ordered("<", x, high))
    safe = b.select(fits, x, constant(x.type, 0.0))
    number = b.select(fits, b.fptosi(safe, wide), constant(wide, -(2 ** (bits - 1))))
    return number if wide == typ else b.trunc(number, typ)


def _half_to_f32(b: Builder, x: Any, source: DType, target: Target) -> Any:
    lanes = lanes_of(x)
    bits_type, f32 = widen(I32, lanes), widen(F32, lanes)
    if source is DType.BF16:
        wide = b.shl(b.zext(x, bits_type), constant(bits_type, 16))
        return b.bitcast(wide, f32)
    if target.has("f16c"):
        return b.fpext(b.bitcast(x, widen(F16, lanes)), f32)
    # Shift the 15 bits into place and scale by 2^112 to rebias the exponent, which is
    # exact for subnormals too; exponent 31 then needs all ones.
    bits = b.zext(x, bits_type)
    sign = b.shl(b.and_(bits, constant(bits_type, 0x8000)), constant(bits_type, 16))
    magnitude = b.and_(bits, constant(bits_type, 0x7FFF))
    shifted = b.shl(magnitude, constant(bits_type, 13))
    scaled = b.fmul(b.bitcast(shifted, f32), constant(f32, 2.0**112))
    special = b.icmp_unsigned(">=", magnitude, constant(bits_type, 0x7C00))
    number = b.select(
        special,
        b.or_(shifted, constant(bits_type, 0x7F800000)),
        b.bitcast(scaled, bits_type),
    )
    return b.bitcast(b.or_(number, sign), f32)


def _f32_to_half(b: Builder, x: Any, to: DType, target: Target) -> Any:
    lanes = lanes_of(x)
    bits_type, half = widen(I32, lanes), widen(I16, lanes)
    if to is DType.F16 and target.has("f16c"):
        return b.bitcast(b.fptrunc(x, widen(F16, lanes)), half)
    bits = b.bitcast(x, bits_type)
    if to is DType.BF16:
        top = b.lshr(bits, constant(bits_type, 16))
        odd = b.and_(top, constant(bits_type, 1))
        rounded = b.add(b.add(bits, constant(bits_type, 0x7FFF)), odd)
        quiet = b.or_(top, constant(bits_type, 0x40))
        nan = b.fcmp_unordered("uno", x, x)
        number = b.select(nan, quiet, b.lshr(rounded, constant(bits_type, 16)))
        return b.trunc(number, half)
    return b.trunc(_f32_to_f16_bits(b, bits), half)


def _f32_to_f16_bits(b: Builder, bits: Any) -> Any:
    """Round to nearest even in integers, for targets without F16C."""
    typ = bits.type
    f32 = widen(F32, lanes_of(bits))

    def number(value: int) -> Any:
        return constant(typ, value)

    sign = b.and_(b.lshr(bits, number(16)), number(0x8000))
    magnitude = b.and_(bits, number(0x7FFFFFFF))
    # Normal: rebias the exponent by -112 and round the 13 bits that go.
    odd = b.and_(b.lshr(magnitude, number(13)), number(1))
    rebiased = b.add(magnitude, number(0xFFF - (112 << 23)))
    normal = b.lshr(b.add(rebiased, odd), number(13))
    # Subnormal (below 2^-14): adding 0.5 puts the f16 fraction in the low bits, and
    # the addition itself rounds to even.
    sum_ = b.fadd(b.bitcast(magnitude, f32), constant(f32, 0.5))
    small = b.sub(b.bitcast(sum_, typ), number(0x3F000000))
    result = b.select(b.icmp_unsigned("<", magnitude, number(113 << 23)), small, normal)
    # 65520 and above round to infinity.
    too_large = b.icmp_unsigned(">=", magnitude, number(0x477FF000))
    result = b.select(too_large, number(0x7C00), result)
    payload = b.and_(b.lshr(magnitude, number(13)), number(0x3FF))
    quiet = b.or_(payload, number(0x7E00))
    nan = b.icmp_unsigned(">", magnitude, number(0x7F800000))
    return b.or_(b.select(nan, quiet, result), sign)


# ---- one operand


def emit_unary(b: Builder, op: str, x: Any, dtype: DType, target: Target) -> Any:
    if dtype in HALVES:
        number = emit_cast(b, x, dtype, DType.F32, target)
        result = emit_unary(b, op, number, DType.F32, target)
        if scalar_of(result.type) == I1:
            return result
        return emit_cast(b, result, DType.F32, dtype, target)
    if dtype.is_float:
        return _unary_float(b, op, x, target)
    return _unary_int(b, op, x, dtype)


def _unary_float(b: Builder, op: str, x: Any, target: Target) -> Any:
    match op:
        case "neg":
            return b.fneg(x)
        case "abs":
            return call_intrinsic(b, f"llvm.fabs.{mangle(x.type)}", x.type, [x])
        case "isnan":
            return b.fcmp_unordered("uno", x, x)
        case "isinf":
            size = call_intrinsic(b, f"llvm.fabs.{mangle(x.type)}", x.type, [x])
            return b.fcmp_ordered("==", size, constant(x.type, float("inf")))
        case "logical_not":
            return b.fcmp_ordered("==", x, constant(x.type, 0.0))
        case "sqrt":
            return call_intrinsic(b, f"llvm.sqrt.{mangle(x.type)}", x.type, [x])
        case "reciprocal":
            return b.fdiv(constant(x.type, 1.0), x)
        case "floor" | "ceil" | "trunc" | "round" if target.has("sse4.1"):
            name = {"round": "roundeven"}.get(op, op)
            return call_intrinsic(b, f"llvm.{name}.{mangle(x.type)}", x.type, [x])
        case _:
            return vector_math.emit_unary(b, op, x, fma=target.fma)


def _unary_int(b: Builder, op: str, x: Any, dtype: DType) -> Any:
    zero = constant(x.type, 0)
    flags = widen(I1, lanes_of(x))
    unsigned = dtype in (DType.U8, DType.BOOL)
    match op:
        case "neg":
            return b.sub(zero, x)
        case "abs":
            return (
                x
                if unsigned
                else b.select(b.icmp_signed("<", x, zero), b.sub(zero, x), x)
            )
        case "sign":
            positive = (
                b.zext(b.icmp_signed(">", x, zero), x.type) if not unsigned else None
            )
            if positive is None:
                some = b.icmp_unsigned("!=", x, zero)
                return some if x.type == some.type else b.zext(some, x.type)
            return b.sub(positive, b.zext(b.icmp_signed("<", x, zero), x.type))
        case "floor" | "ceil" | "round" | "trunc":
            return x
        case "bitwise_not":
            return b.not_(x)
        case "logical_not":
            return b.icmp_unsigned("==", x, zero)
        case "isnan" | "isinf":
            return constant(flags, 0)
        case _:
            raise NotImplementedError(f"unary '{op}' of {dtype}")


# ---- two operands


def emit_binary(
    b: Builder, op: str, x: Any, y: Any, dtype: DType, target: Target
) -> Any:
    if dtype in HALVES:
        left = emit_cast(b, x, dtype, DType.F32, target)
        right = emit_cast(b, y, dtype, DType.F32, target)
        result = emit_binary(b, op, left, right, DType.F32, target)
        if scalar_of(result.type) == I1:
            return result
        return emit_cast(b, result, DType.F32, dtype, target)
    if op in _SIGNS:
        return _compare(b, _SIGNS[op], x, y, dtype)
    if op.startswith("logical_"):
        left = emit_cast(b, x, dtype, DType.BOOL, target)
        right = emit_cast(b, y, dtype, DType.BOOL, target)
        return _BITS[op.removeprefix("logical_")](b, left, right)
    if op.startswith("bitwise_"):
        return _BITS[op.removeprefix("bitwise_")](b, x, y)
    if dtype.is_float:
        return _binary_float(b, op, x, y, target)
    return _binary_int(b, op, x, y, dtype)


_BITS: dict[str, Callable[[Builder, Any, Any], Any]] = {
    "and": lambda b, x, y: b.and_(x, y),
    "or": lambda b, x, y: b.or_(x, y),
    "xor": lambda b, x, y: b.xor(x, y),
}


def _compare(b: Builder, sign: str, x: Any, y: Any, dtype: DType) -> Any:
    if dtype.is_float:
        if sign == "!=":
            return b.fcmp_unordered("!=", x, y)
        return b.fcmp_ordered(sign, x, y)
    if dtype in (DType.U8, DType.BOOL):
        return b.icmp_unsigned(sign, x, y)
    return b.icmp_signed(sign, x, y)


def _binary_float(b: Builder, op: str, x: Any, y: Any, target: Target) -> Any:
    match op:
        case "add":
            return b.fadd(x, y)
        case "sub":
            return b.fsub(x, y)
        case "mul":
            return b.fmul(x, y)
        case "div":
            return b.fdiv(x, y)
        case "maximum" | "minimum":
            # One max/min instruction (which gives y if either is NaN), then x if NaN.
            sign = ">" if op == "maximum" else "<"
            chosen = b.select(b.fcmp_ordered(sign, x, y), x, y)
            return b.select(b.fcmp_unordered("uno", x, x), x, chosen)
        case _:
            return vector_math.emit_binary(b, op, x, y, fma=target.fma)


def _binary_int(b: Builder, op: str, x: Any, y: Any, dtype: DType) -> Any:
    unsigned = dtype in (DType.U8, DType.BOOL)
    if dtype is DType.BOOL:
        op = {"add": "maximum", "mul": "minimum"}.get(op, op)
    match op:
        case "add":
            return b.add(x, y)
        case "sub":
            return b.sub(x, y)
        case "mul":
            return b.mul(x, y)
        case "maximum" | "minimum":
            sign = ">" if op == "maximum" else "<"
            compare = b.icmp_unsigned if unsigned else b.icmp_signed
            return b.select(compare(sign, x, y), x, y)
        case "div" | "floordiv":
            return _floor_divide(b, x, y, unsigned)[0]
        case "mod":
            return _floor_divide(b, x, y, unsigned)[1]
        case "shift_left":
            fits = b.icmp_unsigned("<", y, constant(y.type, scalar_of(y.type).width))
            amount = b.select(fits, y, constant(y.type, 0))
            return b.select(fits, b.shl(x, amount), constant(x.type, 0))
        case "shift_right":
            most = constant(y.type, scalar_of(y.type).width - 1)
            amount = b.select(b.icmp_unsigned("<", y, most), y, most)
            if unsigned:
                whole = b.icmp_unsigned(">", y, most)
                return b.select(whole, constant(x.type, 0), b.lshr(x, amount))
            return b.ashr(x, amount)
        case "pow":
            return _power(b, x, y, unsigned)
        case _:
            raise NotImplementedError(f"binary '{op}' of {dtype}")


def _floor_divide(b: Builder, x: Any, y: Any, unsigned: bool) -> tuple[Any, Any]:
    """Quotient and remainder rounded as Python does; 0 and 0 for a zero divisor."""
    zero, one = constant(x.type, 0), constant(x.type, 1)
    none = b.icmp_unsigned("==", y, zero)
    if unsigned:
        safe = b.select(none, one, y)
        quotient, remainder = b.udiv(x, safe), b.urem(x, safe)
    else:
        # The least integer by -1 overflows; by 1 it has the wrapped quotient.
        least = constant(x.type, -(2 ** (scalar_of(x.type).width - 1)))
        minus = b.icmp_signed("==", y, constant(x.type, -1))
        overflow = b.and_(b.icmp_signed("==", x, least), minus)
        safe = b.select(b.or_(none, overflow), one, y)
        quotient = b.sdiv(x, safe)
        remainder = b.sub(x, b.mul(quotient, safe))
        inexact = b.icmp_signed("!=", remainder, zero)
        apart = b.icmp_signed("<", b.xor(remainder, safe), zero)
        adjust = b.and_(inexact, apart)
        quotient = b.select(adjust, b.sub(quotient, one), quotient)
        remainder = b.select(adjust, b.add(remainder, safe), remainder)
    return b.select(none, zero, quotient), b.select(none, zero, remainder)


def _power(b: Builder, x: Any, y: Any, unsigned: bool) -> Any:
    """Wrapping power by squaring; a negative exponent rounds 1/x towards zero."""
    zero, one = constant(x.type, 0), constant(x.type, 1)
    before = b.block
    body, done = b.append_basic_block("power"), b.append_basic_block("power.done")
    b.branch(body)
    b.position_at_end(body)
    result, base, left = (b.phi(x.type) for _ in range(3))
    odd = b.icmp_unsigned("!=", b.and_(left, one), zero)
    following = (
        b.select(odd, b.mul(result, base), result),
        b.mul(base, base),
        b.lshr(left, one),
    )
    for phi, start, after in zip(
        (result, base, left), (one, x, y), following, strict=True
    ):
        phi.add_incoming(start, before)
        phi.add_incoming(after, body)
    b.cbranch(any_lane(b, b.icmp_unsigned("!=", following[2], zero)), body, done)
    b.position_at_end(done)
    if unsigned:
        return following[0]
    # 1 and -1 are their own inverses, all others round to 0.
    unit = b.icmp_unsigned("<=", b.add(x, one), constant(x.type, 2))
    unit = b.and_(unit, b.icmp_unsigned("!=", x, zero))
    sign = b.select(b.icmp_unsigned("!=", b.and_(y, one), zero), x, one)
    inverse = b.select(unit, sign, zero)
    return b.select(b.icmp_signed("<", y, zero), inverse, following[0])


def emit_fma(b: Builder, x: Any, y: Any, z: Any, dtype: DType, target: Target) -> Any:
    """x*y + z, rounded once where the target can."""
    if dtype in HALVES:
        args = [emit_cast(b, v, dtype, DType.F32, target) for v in (x, y, z)]
        result = emit_fma(b, args[0], args[1], args[2], DType.F32, target)
        return emit_cast(b, result, DType.F32, dtype, target)
    if not dtype.is_float:
        return b.add(b.mul(x, y), z)
    if target.fma:
        return call_intrinsic(b, f"llvm.fma.{mangle(x.type)}", x.type, [x, y, z])
    return b.fadd(b.fmul(x, y), z)


# ---- reductions


def combine(
    b: Builder, op: str, new: Any, acc: Any, dtype: DType, target: Target
) -> Any:
    """One step of a reduction. `new` goes first: its NaN test is off the chain."""
    return emit_binary(b, COMBINES[op], new, acc, dtype, target)


def reduce_lanes(b: Builder, op: str, x: Any, dtype: DType, target: Target) -> Any:
    """The lanes of a vector combined by halves, always in the same order."""
    lanes = lanes_of(x)
    while lanes > 1:
        lanes //= 2
        undefined = ll.Constant(x.type, ll.Undefined)
        low, high = (
            b.shuffle_vector(
                x,
                undefined,
                ll.Constant(
                    ll.VectorType(I32, lanes),
                    [constant(I32, first + i) for i in range(lanes)],
                ),
            )
            for first in (0, lanes)
        )
        x = combine(b, op, high, low, dtype, target)
    return (
        b.extract_element(x, constant(I32, 0))
        if isinstance(x.type, ll.VectorType)
        else x
    )


class Reduction:
    """An accumulator: a slot in the entry block, and partial vectors where needed.

    `lanes` is the width it was declared at. Added to by wider code, it keeps one
    partial vector per copy of that code, so that copies do not wait for one another.
    """

    def __init__(
        self,
        b: Builder,
        op: str,
        dtype: DType,
        lanes: int,
        alloca: Callable[[Any], Any],
        target: Target,
    ) -> None:
        self.op, self.dtype, self.lanes, self.target = op, dtype, lanes, target
        self.alloca = alloca
        self.slot = alloca(compute_type(dtype, lanes))
        self.started = b.store(self.neutral(lanes), self.slot)
        self.partials: list[Any] = []
        self.final: Any = None  # the total, once nothing more is added

    def neutral(self, lanes: int) -> Any:
        return dtype_constant(identity(self.op, self.dtype), self.dtype, lanes)

    def _start(self, lanes: int) -> Any:
        """What a partial vector starts from.

        A sum from -0.0, for then LLVM need not add it: x + 0.0 is not x for x = -0.0.
        The slot, which the partial vectors are added to, starts from 0.0.
        """
        if self.op == "sum" and self.dtype.is_float:
            return dtype_constant(-0.0, self.dtype, lanes)
        return self.neutral(lanes)

    def join(self, b: Builder, new: Any, before: Any) -> Any:
        return combine(b, self.op, new, before, self.dtype, self.target)

    def add(self, b: Builder, value: Any, lanes: int, mask: Any, copy: int) -> None:
        """Adds a value in each of some lanes, or of those that are in the mask."""
        new, slot = splat(b, value, lanes), self.slot
        factors = self._factors(value)
        self.final = None
        if lanes == self.target.lanes and self.lanes != lanes:
            slot = self._partial(b, copy)
        elif self.lanes != lanes:  # fewer lanes than a whole vector
            if mask is not None:
                new, mask = b.select(mask, new, self.neutral(lanes)), None
            new = reduce_lanes(b, self.op, new, self.dtype, self.target)
            factors = None
        before = b.load(slot, typ=new.type)
        if factors is not None:
            # One rounding less, and one instruction: the product itself is not needed.
            x, y = (splat(b, factor, lanes) for factor in factors)
            after = emit_fma(b, x, y, before, self.dtype, self.target)
        else:
            after = self.join(b, new, before)
        b.store(after if mask is None else b.select(mask, after, before), slot)

    def _factors(self, value: Any) -> tuple[Any, Any] | None:
        """x and y of a product x*y of floats that is to be summed up."""
        if self.op != "sum" or getattr(value, "opname", "") != "fmul":
            return None
        x, y = value.operands
        return x, y

    def _partial(self, b: Builder, copy: int) -> Any:
        lanes = self.target.lanes
        while len(self.partials) <= copy:
            slot = self.alloca(compute_type(self.dtype, lanes))
            behind = Builder()
            behind.position_after(self.started)
            behind.store(self._start(lanes), slot)
            self.partials.append(slot)
            # If that was the block being written, its end has moved.
            b.position_at_end(b.block)
        return self.partials[copy]

    def start(self, b: Builder) -> Any:
        """What the partial vectors are added to."""
        return b.load(self.slot, typ=compute_type(self.dtype, self.lanes))

    def vector(self, b: Builder) -> Any:
        """All partial vectors, combined pairwise in their order, if there are any."""
        wide = compute_type(self.dtype, self.target.lanes)
        parts = [b.load(slot, typ=wide) for slot in self.partials]
        while len(parts) > 1:
            pairs = zip(parts[1::2], parts[::2], strict=False)
            joined = [self.join(b, right, left) for right, left in pairs]
            parts = joined + parts[len(joined) * 2 :]
        return parts[0] if parts else None

    def total(self, b: Builder) -> Any:
        """The slot and all partial vectors."""
        total, vector = self.start(b), self.vector(b)
        if vector is None:
            return total
        one = reduce_lanes(b, self.op, vector, self.dtype, self.target)
        return self.join(b, one, total)

    @property
    def is_sum_of_lanes(self) -> bool:
        """Whether its total may be found together with others (`totals`)."""
        lanes = bool(self.partials) and self.lanes == 1
        return self.op == "sum" and self.dtype.is_float and lanes


TOGETHER = 4  # sums over lanes


def totals(b: Builder, sums: Sequence[Reduction]) -> list[Any]:
    """The totals of some reductions, those of TOGETHER sums in one go.

    Halves of two vectors are added side by side, so a shuffle serves both: for four
    sums over sixteen lanes that is nine shuffles instead of sixteen.
    """
    first = sums[0]
    lanes = first.target.lanes
    same = {(r.dtype, r.is_sum_of_lanes) for r in sums} == {(first.dtype, True)}
    if len(sums) != TOGETHER or not same or lanes < 2 * TOGETHER:
        return [r.total(b) for r in sums]
    vectors = [r.vector(b) for r in sums]

    def added(x: Any, y: Any, part: int) -> Any:
        """The halves of every `part` lanes of x, then of y, added."""
        starts = [*range(0, 2 * lanes, part)]
        low = [s + i for s in starts for i in range(part // 2)]
        high = [s + part // 2 + i for s in starts for i in range(part // 2)]
        return first.join(b, shuffled(b, x, y, high), shuffled(b, x, y, low))

    part = lanes
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [added(x, y, part) for x, y in pairs]
        part //= 2
    (both,) = vectors
    half = part // 2
    while half:
        other = [i ^ half for i in range(lanes)]
        both = first.join(b, shuffled(b, both, both, other), both)
        half //= 2
    found = shuffled(b, both, both, [*range(0, lanes, part)])
    starts = ll.Constant(found.type, ll.Undefined)
    for number, r in enumerate(sums):
        starts = b.insert_element(starts, r.start(b), constant(I32, number))
    found = first.join(b, found, starts)
    return [b.extract_element(found, constant(I32, n)) for n in range(TOGETHER)]


def shuffled(b: Builder, x: Any, y: Any, lanes: Sequence[int]) -> Any:
    """Lanes of two vectors, numbered through both."""
    mask = ll.Constant(ll.VectorType(I32, len(lanes)), list(lanes))
    return b.shuffle_vector(x, y, mask)


def any_lane(b: Builder, mask: Any) -> Any:
    """Whether a flag is set in any lane."""
    if not isinstance(mask.type, ll.VectorType):
        return mask
    bits = b.bitcast(mask, ll.IntType(mask.type.count))
    return b.icmp_unsigned("!=", bits, constant(bits.type, 0))


def first_lane(b: Builder, value: Any, mask: Any) -> Any:
    """The value in the first lane whose flag is set; one is."""
    if not isinstance(value.type, ll.VectorType):
        return value
    if not isinstance(mask.type, ll.VectorType):
        return b.extract_element(value, constant(I32, 0))
    bits = b.bitcast(mask, ll.IntType(mask.type.count))
    one_is = constant(ll.IntType(1), 1)
    name = f"llvm.cttz.{mangle(bits.type)}"
    first = call_intrinsic(b, name, bits.type, [bits, one_is])
    return b.extract_element(value, first)


# ---- memory


def load_lanes(b: Builder, ptr: Any, typ: Any, align: int, mask: Any) -> Any:
    """Neighbouring elements; lanes outside the mask are not read and are zero."""
    if mask is None:
        return b.load(ptr, align=align, typ=typ)
    name = f"llvm.masked.load.{mangle(typ)}.p0"
    args = [ptr, mask, ll.Constant(typ, None)]
    return call_intrinsic(b, name, typ, args, (0, align))


def store_lanes(b: Builder, value: Any, ptr: Any, align: int, mask: Any) -> None:
    """Writes neighbouring elements, those inside the mask."""
    if mask is None:
        b.store(value, ptr, align=align)
        return
    name = f"llvm.masked.store.{mangle(value.type)}.p0"
    call_intrinsic(b, name, VOID, [value, ptr, mask], (1, align))


def prefetch(b: Builder, address: Any) -> None:
    """Asks for a cache line to be brought to the second-level cache, for reading."""
    read, second_level, data = (constant(I32, n) for n in (0, 2, 1))
    call_intrinsic(b, "llvm.prefetch.p0", VOID, [address, read, second_level, data])


def pointers(b: Builder, base: Any, element: Any, offsets: Any) -> Any:
    """A vector of addresses: base + offsets, in elements."""
    instruction = b.gep(base, [offsets], source_etype=element)
    # llvmlite types a getelementptr by its base alone; vector indices make a vector.
    instruction.type = ll.VectorType(PTR, offsets.type.count)
    return instruction


def gather(b: Builder, addresses: Any, typ: Any, align: int, mask: Any) -> Any:
    """An element from each address; lanes outside the mask are zero."""
    lanes = typ.count
    name = f"llvm.masked.gather.{mangle(typ)}.v{lanes}p0"
    mask = constant(widen(I1, lanes), 1) if mask is None else mask
    args = [addresses, mask, ll.Constant(typ, None)]
    return call_intrinsic(b, name, typ, args, (0, align))


def scatter(b: Builder, value: Any, addresses: Any, align: int, mask: Any) -> None:
    lanes = value.type.count
    name = f"llvm.masked.scatter.{mangle(value.type)}.v{lanes}p0"
    mask = constant(widen(I1, lanes), 1) if mask is None else mask
    call_intrinsic(b, name, VOID, [value, addresses, mask], (1, align))


def reverse_lanes(b: Builder, x: Any) -> Any:
    lanes = x.type.count
    order = [constant(I32, lanes - 1 - lane) for lane in range(lanes)]
    mask = ll.Constant(ll.VectorType(I32, lanes), order)
    return b.shuffle_vector(x, ll.Constant(x.type, ll.Undefined), mask)


def from_storage(b: Builder, x: Any, dtype: DType) -> Any:
    """A loaded value as it is computed with: a bool byte becomes a flag."""
    return b.icmp_unsigned("!=", x, constant(x.type, 0)) if dtype is DType.BOOL else x


def to_storage(b: Builder, x: Any, dtype: DType) -> Any:
    return b.zext(x, widen(I8, lanes_of(x))) if dtype is DType.BOOL else x
