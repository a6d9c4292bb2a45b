"""Casts of the loop IR as LLVM instructions; scalars and vectors alike.

No cast traps or is undefined for any data: float to integer guards its range.
"""

from __future__ import annotations

from pliant.codegen.builder import LLBuilder
from pliant.codegen.llvm_types import (
    F16,
    F32,
    I1,
    I8,
    I16,
    I32,
    LLType,
    LLValue,
    compute_type,
    constant,
    lanes_of,
    scalar_of,
    widen,
)
from pliant.ir.types import DType
from pliant.machine.target import Target

HALVES = (DType.F16, DType.BF16)


def emit_cast(
    b: LLBuilder, x: LLValue, source: DType, to: DType, target: Target
) -> LLValue:
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
        return _is_not_zero(b, x, source)
    if source.is_float:
        return _cast_float(b, x, source, to, typ)
    unsigned = source.is_unsigned
    if to.is_float:
        return b.uitofp(x, typ) if unsigned else b.sitofp(x, typ)
    if scalar_of(typ).width <= scalar_of(x.type).width:
        return b.trunc(x, typ) if typ != x.type else x
    return b.zext(x, typ) if unsigned else b.sext(x, typ)


def emit_bits(b: LLBuilder, x: LLValue, to: DType) -> LLValue:
    """The same bits as another type; a bool is the lowest of its byte."""
    lanes = lanes_of(x)
    if scalar_of(x.type) == I1:
        x = b.zext(x, widen(I8, lanes))
    if to is DType.BOOL:
        return b.trunc(x, widen(I1, lanes))
    typ = compute_type(to, lanes)
    return x if x.type == typ else b.bitcast(x, typ)


def _cast_float(
    b: LLBuilder, x: LLValue, source: DType, to: DType, typ: LLType
) -> LLValue:
    if to.is_float:
        return b.fpext(x, typ) if to.bytes > source.bytes else b.fptrunc(x, typ)
    if to is DType.U64:
        # What has the highest bit is converted without it.
        top = constant(x.type, 2.0**63)
        high = b.fcmp_ordered(">=", x, top)
        rest = b.select(high, b.fsub(x, top), x)
        low = _cast_float(b, rest, source, DType.I64, typ)
        return b.select(high, b.xor(low, constant(typ, -(2**63))), low)
    # As cvttss2si: out of range and NaN give the least integer. Narrow types keep the
    # low bits of the 32-bit result, and u32 of the 64-bit one.
    long = to in (DType.I64, DType.U32)
    wide = compute_type(DType.I64 if long else DType.I32, lanes_of(x))
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


def _half_to_f32(b: LLBuilder, x: LLValue, source: DType, target: Target) -> LLValue:
    lanes = lanes_of(x)
    bits_type, f32 = widen(I32, lanes), widen(F32, lanes)
    if source is DType.BF16:
        wide = b.shl(b.zext(x, bits_type), constant(bits_type, 16))
        return b.bitcast(wide, f32)
    if target.converts_half:
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


def _f32_to_half(b: LLBuilder, x: LLValue, to: DType, target: Target) -> LLValue:
    lanes = lanes_of(x)
    bits_type, half = widen(I32, lanes), widen(I16, lanes)
    if to is DType.F16 and target.converts_half:
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


def _f32_to_f16_bits(b: LLBuilder, bits: LLValue) -> LLValue:
    """Round to nearest even in integers, for targets without F16C."""
    typ = bits.type
    f32 = widen(F32, lanes_of(bits))

    def number(value: int) -> LLValue:
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


def _is_not_zero(b: LLBuilder, x: LLValue, source: DType) -> LLValue:
    zero = constant(x.type, 0)
    if source.is_float:
        return b.fcmp_unordered("!=", x, zero)
    return b.icmp_signed("!=", x, zero)
