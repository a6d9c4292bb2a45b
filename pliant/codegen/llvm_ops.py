"""Elementwise ops of the loop IR as LLVM instructions.

Everything here works on scalars and on vectors; both operands have the same width. No
instruction may trap or be undefined for any data: integer division guards its divisor,
shifts their amount.
"""

from __future__ import annotations

from collections.abc import Callable

from pliant.codegen import vector_math
from pliant.codegen.builder import LLBuilder
from pliant.codegen.llvm_casts import HALVES, emit_cast
from pliant.codegen.llvm_lanes import any_lane
from pliant.codegen.llvm_types import (
    I1,
    LLValue,
    call_intrinsic,
    constant,
    lanes_of,
    mangle,
    scalar_of,
    widen,
)
from pliant.ir.types import DType
from pliant.machine.target import Target

_SIGNS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


# ---- one operand


def emit_unary(
    b: LLBuilder, op: str, x: LLValue, dtype: DType, target: Target
) -> LLValue:
    if dtype in HALVES:
        number = emit_cast(b, x, dtype, DType.F32, target)
        result = emit_unary(b, op, number, DType.F32, target)
        if scalar_of(result.type) == I1:
            return result
        return emit_cast(b, result, DType.F32, dtype, target)
    if dtype.is_float:
        return _unary_float(b, op, x, target)
    return _unary_int(b, op, x, dtype)


# Ops with an LLVM intrinsic; the second table only if the machine has the instruction.
_INTRINSICS = {"abs": "fabs", "sqrt": "sqrt"}
_ROUNDINGS = {"floor": "floor", "ceil": "ceil", "trunc": "trunc", "round": "roundeven"}


def _intrinsic(b: LLBuilder, name: str, x: LLValue) -> LLValue:
    return call_intrinsic(b, f"llvm.{name}.{mangle(x.type)}", x.type, [x])


def _unary_float(b: LLBuilder, op: str, x: LLValue, target: Target) -> LLValue:
    if op in _INTRINSICS:
        return _intrinsic(b, _INTRINSICS[op], x)
    if op in _ROUNDINGS and target.rounds:
        return _intrinsic(b, _ROUNDINGS[op], x)
    match op:
        case "neg":
            return b.fneg(x)
        case "isnan":
            return b.fcmp_unordered("uno", x, x)
        case "isinf":
            size = _intrinsic(b, "fabs", x)
            return b.fcmp_ordered("==", size, constant(x.type, float("inf")))
        case "logical_not":
            return b.fcmp_ordered("==", x, constant(x.type, 0.0))
        case "reciprocal":
            return b.fdiv(constant(x.type, 1.0), x)
        case _:
            return vector_math.emit_unary(b, op, x, fma=target.fma)


def _unary_int(b: LLBuilder, op: str, x: LLValue, dtype: DType) -> LLValue:
    zero = constant(x.type, 0)
    flags = widen(I1, lanes_of(x))
    unsigned = dtype.is_unsigned
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
    b: LLBuilder, op: str, x: LLValue, y: LLValue, dtype: DType, target: Target
) -> LLValue:
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


_Emit = Callable[[LLBuilder, LLValue, LLValue], LLValue]
_BITS: dict[str, _Emit] = {
    "and": LLBuilder.and_,
    "or": LLBuilder.or_,
    "xor": LLBuilder.xor,
}
_FLOAT: dict[str, _Emit] = {
    "add": LLBuilder.fadd,
    "sub": LLBuilder.fsub,
    "mul": LLBuilder.fmul,
    "div": LLBuilder.fdiv,
}
_INTEGER: dict[str, _Emit] = {
    "add": LLBuilder.add,
    "sub": LLBuilder.sub,
    "mul": LLBuilder.mul,
}


def _compare(b: LLBuilder, sign: str, x: LLValue, y: LLValue, dtype: DType) -> LLValue:
    if dtype.is_float:
        if sign == "!=":
            return b.fcmp_unordered("!=", x, y)
        return b.fcmp_ordered(sign, x, y)
    if dtype.is_unsigned:
        return b.icmp_unsigned(sign, x, y)
    return b.icmp_signed(sign, x, y)


def _binary_float(
    b: LLBuilder, op: str, x: LLValue, y: LLValue, target: Target
) -> LLValue:
    if op in _FLOAT:
        return _FLOAT[op](b, x, y)
    if op in ("maximum", "minimum"):
        # One max/min instruction (which gives y if either is NaN), then x if NaN.
        sign = ">" if op == "maximum" else "<"
        chosen = b.select(b.fcmp_ordered(sign, x, y), x, y)
        return b.select(b.fcmp_unordered("uno", x, x), x, chosen)
    return vector_math.emit_binary(b, op, x, y, fma=target.fma)


def _binary_int(b: LLBuilder, op: str, x: LLValue, y: LLValue, dtype: DType) -> LLValue:
    unsigned = dtype.is_unsigned
    if dtype is DType.BOOL:
        op = {"add": "maximum", "mul": "minimum"}.get(op, op)
    if op in _INTEGER:
        return _INTEGER[op](b, x, y)
    match op:
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


def _floor_divide(
    b: LLBuilder, x: LLValue, y: LLValue, unsigned: bool
) -> tuple[LLValue, LLValue]:
    """Quotient and remainder rounded as Python does; 0 and 0 for a zero divisor."""
    zero, one = constant(x.type, 0), constant(x.type, 1)
    none = b.icmp_unsigned("==", y, zero)
    if unsigned:
        safe = b.select(none, one, y)
        quotient, remainder = b.udiv(x, safe), b.urem(x, safe)
    else:
        # The least integer divided by -1 overflows; dividing by 1 gives the wrapped
        # result.
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


def _power(b: LLBuilder, x: LLValue, y: LLValue, unsigned: bool) -> LLValue:
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
    # 1 and -1 are their own inverses; all others round to 0.
    unit = b.icmp_unsigned("<=", b.add(x, one), constant(x.type, 2))
    unit = b.and_(unit, b.icmp_unsigned("!=", x, zero))
    sign = b.select(b.icmp_unsigned("!=", b.and_(y, one), zero), x, one)
    inverse = b.select(unit, sign, zero)
    return b.select(b.icmp_signed("<", y, zero), inverse, following[0])


def emit_fma(
    b: LLBuilder, x: LLValue, y: LLValue, z: LLValue, dtype: DType, target: Target
) -> LLValue:
    """x*y + z, rounded once if the target can."""
    if dtype in HALVES:
        args = [emit_cast(b, v, dtype, DType.F32, target) for v in (x, y, z)]
        result = emit_fma(b, args[0], args[1], args[2], DType.F32, target)
        return emit_cast(b, result, DType.F32, dtype, target)
    if not dtype.is_float:
        return b.add(b.mul(x, y), z)
    if target.fma:
        return call_intrinsic(b, f"llvm.fma.{mangle(x.type)}", x.type, [x, y, z])
    return b.fadd(b.fmul(x, y), z)
