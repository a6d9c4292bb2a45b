"""Arithmetic on LLVM values, written as Python expressions.

A `Lanes` is one `float`, `double` or integer value, or a vector of them. Operators
emit the instruction at the builder's position; plain Python numbers become splats.
Everything here is one or a few instructions on every target: no libm, no table.

Two facts about the target matter and come as one flag, `fma`: the target fuses
multiply-add *and* rounds to integral in hardware (AVX2+FMA, AVX-512, aarch64). Without
it `a*b + c` rounds twice and rounding goes through the add-a-large-number trick.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import TypeAlias

from llvmlite import ir

from pliant.codegen.builder import LLBuilder
from pliant.codegen.llvm_types import call_intrinsic, mangle

FLOAT = ir.FloatType()
DOUBLE = ir.DoubleType()

Number: TypeAlias = float | int
Operand: TypeAlias = "Lanes | float | int"


class Format:
    """The constants of one IEEE format."""

    def __init__(self, scalar: ir.Type, bits: int, mantissa: int) -> None:
        self.scalar = scalar
        self.bits = bits
        self.mantissa = mantissa  # stored bits: 23, 52
        self.bias = (1 << (bits - mantissa - 2)) - 1  # 127, 1023
        self.integer = ir.IntType(bits)
        self.sign_mask = 1 << (bits - 1)
        self.magnitude_mask = self.sign_mask - 1
        self.mantissa_mask = (1 << mantissa) - 1
        self.smallest_normal = 2.0 ** (1 - self.bias)
        # Adding it leaves round-half-even(x) in the low mantissa bits, either sign.
        self.round_magic = 1.5 * 2.0**mantissa

    def encode(self, value: float) -> int:
        """The bit pattern of `value` rounded to this format."""
        code, word = ("<f", "<I") if self.bits == 32 else ("<d", "<Q")
        pattern: int = struct.unpack(word, struct.pack(code, value))[0]
        return pattern


F32 = Format(FLOAT, 32, 23)
F64 = Format(DOUBLE, 64, 52)


def scalar_type(type_: ir.Type) -> ir.Type:
    return type_.element if isinstance(type_, ir.VectorType) else type_


def with_scalar(type_: ir.Type, scalar: ir.Type) -> ir.Type:
    """`type_` with its element type replaced."""
    if isinstance(type_, ir.VectorType):
        return ir.VectorType(scalar, type_.count)
    return scalar


def splat(type_: ir.Type, value: Number) -> ir.Constant:
    """The constant `value` in every lane of `type_`."""
    if isinstance(type_, ir.VectorType):
        return ir.Constant(type_, [ir.Constant(type_.element, value)] * type_.count)
    return ir.Constant(type_, value)


def call_overloaded(
    builder: LLBuilder, name: str, result: ir.Type, args: list[ir.Value]
) -> ir.Value:
    """Call `llvm.<name>` overloaded on the first argument's type."""
    symbol = f"llvm.{name}.{mangle(args[0].type)}"
    return call_intrinsic(builder, symbol, result, args)


class Lanes:
    __slots__ = ("builder", "fma", "value")

    def __init__(self, builder: LLBuilder, value: ir.Value, fma: bool) -> None:
        self.builder = builder
        self.value = value
        self.fma = fma

    # -- types

    @property
    def type(self) -> ir.Type:
        return self.value.type

    @property
    def format(self) -> Format:
        return F32 if scalar_type(self.type) == FLOAT else F64

    @property
    def is_float(self) -> bool:
        return scalar_type(self.type) in (FLOAT, DOUBLE)

    def make(self, value: ir.Value) -> Lanes:
        return Lanes(self.builder, value, self.fma)

    def constant(self, value: Number) -> Lanes:
        return self.make(splat(self.type, value))

    def lift(self, value: Operand) -> Lanes:
        return value if isinstance(value, Lanes) else self.constant(value)

    def _emit(
        self,
        float_op: Callable[..., ir.Value] | None,
        int_op: Callable[..., ir.Value] | None,
        a: Lanes,
        b: Lanes,
    ) -> Lanes:
        emit = float_op if a.is_float else int_op
        if emit is None:
            raise TypeError(f"operator not defined on {a.type}")
        return self.make(emit(a.value, b.value))

    # -- arithmetic

    def __add__(self, other: Operand) -> Lanes:
        b = self.builder
        return self._emit(b.fadd, b.add, self, self.lift(other))

    def __radd__(self, other: Number) -> Lanes:
        return self.lift(other) + self

    def __sub__(self, other: Operand) -> Lanes:
        b = self.builder
        return self._emit(b.fsub, b.sub, self, self.lift(other))

    def __rsub__(self, other: Number) -> Lanes:
        return self.lift(other) - self

    def __mul__(self, other: Operand) -> Lanes:
        b = self.builder
        return self._emit(b.fmul, b.mul, self, self.lift(other))

    def __rmul__(self, other: Number) -> Lanes:
        return self.lift(other) * self

    def __truediv__(self, other: Operand) -> Lanes:
        return self._emit(self.builder.fdiv, None, self, self.lift(other))

    def __rtruediv__(self, other: Number) -> Lanes:
        return self.lift(other) / self

    def __neg__(self) -> Lanes:
        return self.make(self.builder.fneg(self.value))

    def __and__(self, other: Operand) -> Lanes:
        return self._emit(None, self.builder.and_, self, self.lift(other))

    def __or__(self, other: Operand) -> Lanes:
        return self._emit(None, self.builder.or_, self, self.lift(other))

    def __xor__(self, other: Operand) -> Lanes:
        return self._emit(None, self.builder.xor, self, self.lift(other))

    def __lshift__(self, count: Operand) -> Lanes:
        return self._emit(None, self.builder.shl, self, self.lift(count))

    def __rshift__(self, count: Operand) -> Lanes:
        """Logical: 64-bit arithmetic shifts are slow before AVX-512."""
        return self._emit(None, self.builder.lshr, self, self.lift(count))

    def times_plus(self, factor: Operand, addend: Operand) -> Lanes:
        """self*factor + addend, fused where the target fuses."""
        factor, addend = self.lift(factor), self.lift(addend)
        if not self.fma:
            return self * factor + addend
        args = [self.value, factor.value, addend.value]
        return self.make(call_overloaded(self.builder, "fma", self.type, args))

    def minus_times(self, a: Operand, b: Operand) -> Lanes:
        """self - a*b, fused where the target fuses."""
        a = self.lift(a)
        return (-a).times_plus(b, self) if self.fma else self - a * b

    def polynomial(self, coefficients: Sequence[float]) -> Lanes:
        """Horner's rule; lowest degree first."""
        result = self.constant(coefficients[-1])
        for c in reversed(coefficients[:-1]):
            result = result.times_plus(self, c)
        return result

    # -- comparison: ordered, false when either side is NaN

    def _compare(self, op: str, other: Operand) -> Lanes:
        rhs = self.lift(other).value
        if self.is_float:
            return self.make(self.builder.fcmp_ordered(op, self.value, rhs))
        return self.make(self.builder.icmp_signed(op, self.value, rhs))

    def __lt__(self, other: Operand) -> Lanes:
        return self._compare("<", other)

    def __le__(self, other: Operand) -> Lanes:
        return self._compare("<=", other)

    def __gt__(self, other: Operand) -> Lanes:
        return self._compare(">", other)

    def __ge__(self, other: Operand) -> Lanes:
        return self._compare(">=", other)

    def equals(self, other: Operand) -> Lanes:
        return self._compare("==", other)

    def differs(self, other: Operand) -> Lanes:
        """Unequal or unordered."""
        rhs = self.lift(other).value
        if self.is_float:
            return self.make(self.builder.fcmp_unordered("!=", self.value, rhs))
        return self.make(self.builder.icmp_signed("!=", self.value, rhs))

    def is_nan(self) -> Lanes:
        return self.make(self.builder.fcmp_unordered("uno", self.value, self.value))

    def invert(self) -> Lanes:
        return self.make(self.builder.not_(self.value))

    def select(self, yes: Operand, no: Operand) -> Lanes:
        """Lane by lane, `yes` where this boolean is set."""
        if not isinstance(yes, Lanes):
            assert isinstance(no, Lanes)
            yes = no.constant(yes)
        no = yes.lift(no)
        return yes.make(self.builder.select(self.value, yes.value, no.value))

    def any(self) -> ir.Value:
        """One i1: whether this boolean is set in some lane."""
        if not isinstance(self.type, ir.VectorType):
            return self.value
        bit = ir.IntType(1)
        return call_overloaded(self.builder, "vector.reduce.or", bit, [self.value])

    def at_most(self, limit: float) -> Lanes:
        """Clamp from above; NaN stays."""
        return (self > limit).select(limit, self)

    def at_least(self, limit: float) -> Lanes:
        """Clamp from below; NaN stays."""
        return (self < limit).select(limit, self)

    # -- bits and conversions

    def bits(self) -> Lanes:
        type_ = with_scalar(self.type, self.format.integer)
        return self.make(self.builder.bitcast(self.value, type_))

    def as_float(self) -> Lanes:
        scalar = FLOAT if scalar_type(self.type).width == 32 else DOUBLE
        return self.make(
            self.builder.bitcast(self.value, with_scalar(self.type, scalar))
        )

    def widened(self) -> Lanes:
        """float -> double"""
        return self.make(self.builder.fpext(self.value, with_scalar(self.type, DOUBLE)))

    def narrowed(self) -> Lanes:
        """double -> float"""
        return self.make(
            self.builder.fptrunc(self.value, with_scalar(self.type, FLOAT))
        )

    def magnitude(self) -> Lanes:
        args = [self.value]
        return self.make(call_overloaded(self.builder, "fabs", self.type, args))

    def sign_bit(self) -> Lanes:
        return self.bits() & self.format.sign_mask

    def with_sign_of(self, other: Lanes) -> Lanes:
        """copysign

        Not written as bit operations: LLVM would combine the selection between x and
        the bits of a function of x into one masked vpternlog, whose immediate LLVM
        before 23 gets wrong (llvm/llvm-project issue 157929).
        """
        args = [self.value, other.value]
        return self.make(call_overloaded(self.builder, "copysign", self.type, args))

    def flip_sign(self, sign: Lanes) -> Lanes:
        """Negated where the integer `sign` has its top bit set; other bits clear."""
        return (self.bits() ^ sign).as_float()

    def square_root(self) -> Lanes:
        args = [self.value]
        return self.make(call_overloaded(self.builder, "sqrt", self.type, args))

    # -- rounding to integral values

    def _rounded(self, name: str) -> Lanes:
        args = [self.value]
        return self.make(call_overloaded(self.builder, name, self.type, args))

    def nearest(self) -> Lanes:
        """Round half to even; keeps -0, infinities and NaN."""
        if self.fma:
            return self._rounded("roundeven")
        large = 2.0**self.format.mantissa  # from here on every value is integral
        magnitude = self.magnitude()
        rounded = ((magnitude + large) - large).with_sign_of(self)
        return (magnitude < large).select(rounded, self)

    def floor(self) -> Lanes:
        if self.fma:
            return self._rounded("floor")
        near = self.nearest()
        return (near > self).select(near - 1.0, near).with_sign_of(self)

    def ceil(self) -> Lanes:
        if self.fma:
            return self._rounded("ceil")
        near = self.nearest()
        return (near < self).select(near + 1.0, near).with_sign_of(self)

    def truncate(self) -> Lanes:
        if self.fma:
            return self._rounded("trunc")
        near, magnitude = self.nearest(), self.magnitude()
        beyond = near.magnitude() > magnitude
        return beyond.select(near.magnitude() - 1.0, near).with_sign_of(self)


# -- sums and products with their rounding errors (Dekker 1971, Knuth 4.2.2)


def two_sum(a: Lanes, b: Lanes) -> tuple[Lanes, Lanes]:
    """(fl(a+b), what rounding lost)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def fast_two_sum(a: Lanes, b: Lanes) -> tuple[Lanes, Lanes]:
    """The same for |a| >= |b| or a = 0."""
    total = a + b
    return total, b - (total - a)


def two_product(a: Lanes, b: Operand) -> tuple[Lanes, Lanes]:
    """(fl(a*b), what rounding lost), double; without fma the loss is good to 2^-106."""
    b = a.lift(b)
    product = a * b
    if a.fma:
        return product, a.times_plus(b, -product)
    a_high, a_low = _halves(a)
    b_high, b_low = _halves(b)
    low = (a_high * b_high - product) + a_high * b_low + a_low * b_high
    return product, low + a_low * b_low


def _halves(a: Lanes) -> tuple[Lanes, Lanes]:
    high = (a.bits() & ~((1 << 27) - 1)).as_float()
    return high, a - high
