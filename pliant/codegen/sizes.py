"""Dimension expressions and conditions as 64-bit code, for kernels and host code.

Kernels compute with numbers that are known to be in range (`llvm_dims.py`). Host code
computes with whatever a caller passes, so its numbers carry flags (`host_dims.py`).
Polynomials differ in that. Quotients, extrema and conditions are the same in both, and
have the meaning that the interpreter gives them (`ir/interp_code.py`):

    a denominator below 1 counts as 1: the quotient is the numerator, the remainder 0;
    0 divides 0 and nothing else.

So no code traps, wherever it is moved to: a size may be 0 where a quotient by it is
computed but not used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Generic, TypeVar

import llvmlite.ir as ll

from pliant.codegen.builder import LLBuilder
from pliant.codegen.llvm_types import (
    F64,
    I64,
    LLValue,
    Number,
    constant,
    lanes_of,
    splat,
    widen,
)
from pliant.sym import Cond, Expr, maximum, mod
from pliant.sym.expr import Atom, CeilDiv, FloorDiv, Max, Min, Mod, operands

NO_WRAP = ("nsw",)
# Adding this to a small signed integer's bits gives the double 1.5 * 2^52 + integer.
_MAGIC = 1.5 * 2.0**52
_MAGIC_BITS = 0x4338000000000000
_SIGNS = {"eq": "==", "ne": "!=", "le": "<=", "lt": "<"}

V = TypeVar("V")


class SizeCode(ABC, Generic[V]):
    """Emits expressions over integers in scope; V is a subclass's kind of number."""

    # Whether numbers are so small that adding a divisor cannot overflow.
    has_room: ClassVar[bool]

    def __init__(self, builder: LLBuilder) -> None:
        self.builder = builder

    @abstractmethod
    def evaluate(self, expr: Expr) -> V:
        """An expression that is the same for all lanes."""

    @abstractmethod
    def plain(self, number: V) -> Number:
        """A number without its flags."""

    @abstractmethod
    def made(
        self,
        value: Number,
        parts: Sequence[V],
        divisor: V | None = None,
        least: int = 1,
    ) -> V:
        """A value computed from others; a divisor should be at least `least`."""

    def is_nonnegative(self, expr: Expr) -> bool:
        """Whether this is evident; False means unknown."""
        return False

    def compound(self, atom: Atom) -> V:
        """A quotient, a remainder or an extremum."""
        args = operands(atom)
        parts = [self.evaluate(arg) for arg in args]
        numbers = [self.plain(part) for part in parts]
        divisor = None if isinstance(atom, Min | Max) else parts[1]
        known = [number for number in numbers if isinstance(number, int)]
        if len(known) == len(numbers):
            return self.made(fold(atom, known), parts, divisor)
        values = [as_value(number) for number in numbers]
        known_sign = self.has_room and self.is_nonnegative(args[0])
        value = emit_atom(self.builder, atom, values, self.has_room, known_sign)
        return self.made(value, parts, divisor)

    def holds(self, cond: Cond) -> V:
        """A condition on expressions that are the same for all lanes, as a flag."""
        b, zero = self.builder, constant(I64, 0)
        sides = [self.evaluate(cond.lhs), self.evaluate(cond.rhs)]
        x, y = (as_value(self.plain(side)) for side in sides)
        if cond.kind != "divides":
            return self.made(b.icmp_signed(_SIGNS[cond.kind], x, y), sides)
        positive = cond.lhs.is_const and cond.lhs.value >= 1
        rest = mod(cond.rhs, cond.lhs if positive else maximum(cond.lhs, 1))
        whole = b.icmp_signed("==", as_value(self.plain(self.evaluate(rest))), zero)
        if not positive:
            some = b.icmp_signed("!=", x, zero)
            whole = b.or_(b.and_(some, whole), b.icmp_signed("==", y, zero))
        return self.made(whole, sides, sides[0], least=0)


def as_value(number: Number) -> LLValue:
    return constant(I64, number) if isinstance(number, int) else number


# ---- atoms of numbers, known ones and values


def fold(atom: Atom, numbers: Sequence[int]) -> int:
    match atom:
        case FloorDiv():
            return numbers[0] // max(numbers[1], 1)
        case CeilDiv():
            return -(-numbers[0] // max(numbers[1], 1))
        case Mod():
            return numbers[0] % max(numbers[1], 1)
        case Min():
            return min(numbers)
        case Max():
            return max(numbers)
        case _:
            raise NotImplementedError(f"atom {atom}")


def emit_atom(
    b: LLBuilder,
    atom: Atom,
    values: Sequence[LLValue],
    has_room: bool,
    nonnegative: bool = False,
) -> LLValue:
    """The atom of these arguments; `nonnegative`: the numerator is known to be >= 0."""
    if isinstance(atom, Min | Max):
        return _extremum(b, atom, values)
    x, y = values
    if isinstance(y, ll.Constant) and y.type == I64:
        y = constant(I64, max(y.constant, 1))
    else:
        one = constant(y.type, 1)
        y = b.select(b.icmp_signed(">", y, one), y, one)
    shift = _power_of_two(y)
    if shift is not None and (has_room or not isinstance(atom, CeilDiv)):
        return _shift(b, atom, x, shift)
    if max(lanes_of(x), lanes_of(y)) > 1:
        return _divide_vectors(b, atom, x, y)
    if nonnegative:
        return _divide_nonnegative(b, atom, x, y)
    quotient, rest = b.sdiv(x, y), b.srem(x, y)
    zero = constant(I64, 0)
    if isinstance(atom, CeilDiv):
        return b.add(quotient, b.zext(b.icmp_signed(">", rest, zero), I64))
    below = b.icmp_signed("<", rest, zero)
    if isinstance(atom, Mod):
        return b.select(below, b.add(rest, y), rest)
    return b.add(quotient, b.sext(below, I64))


def _extremum(b: LLBuilder, atom: Atom, values: Sequence[LLValue]) -> LLValue:
    sign = "<" if isinstance(atom, Min) else ">"
    best = values[0]
    for value in values[1:]:
        lanes = max(lanes_of(best), lanes_of(value))
        best, value = (splat(b, v, lanes) for v in (best, value))
        best = b.select(b.icmp_signed(sign, value, best), value, best)
    return best


def _power_of_two(y: LLValue) -> int | None:
    known = isinstance(y, ll.Constant) and y.type == I64
    if not known or y.constant & (y.constant - 1):
        return None
    return int(y.constant).bit_length() - 1


def _shift(b: LLBuilder, atom: Atom, x: LLValue, shift: int) -> LLValue:
    if isinstance(atom, Mod):
        return b.and_(x, constant(x.type, (1 << shift) - 1))
    if isinstance(atom, CeilDiv):
        x = b.add(x, constant(x.type, (1 << shift) - 1), flags=NO_WRAP)
    return b.ashr(x, constant(x.type, shift))


def _divide_nonnegative(b: LLBuilder, atom: Atom, x: LLValue, y: LLValue) -> LLValue:
    """For a scalar x >= 0 such that x plus the divisor does not overflow."""
    if isinstance(atom, CeilDiv):
        x = b.add(x, b.sub(y, constant(I64, 1), flags=NO_WRAP), flags=NO_WRAP)
    found = b.urem(x, y) if isinstance(atom, Mod) else b.udiv(x, y)
    # Otherwise LLVM repeats the division in inner loops, to derive addresses from it.
    return found if isinstance(y, ll.Constant) else b.opaque(found)


def _divide_vectors(b: LLBuilder, atom: Atom, x: LLValue, y: LLValue) -> LLValue:
    """Exact in doubles for |x| < 2^51; SIMD has no 64-bit integer division.

    round(x / y) is the floor or one more, and the remainder tells which.
    """
    lanes = max(lanes_of(x), lanes_of(y))
    ints, doubles = widen(I64, lanes), widen(F64, lanes)
    magic, bits = constant(doubles, _MAGIC), constant(ints, _MAGIC_BITS)

    def double(v: LLValue) -> LLValue:
        wide = splat(b, v, lanes)
        return b.fsub(b.bitcast(b.add(wide, bits), doubles), magic)

    dividend, divisor = double(x), double(y)
    if isinstance(atom, CeilDiv):
        dividend = b.fneg(dividend)
    quotient = b.fadd(b.fdiv(dividend, divisor), magic)
    quotient = b.fsub(quotient, magic)
    rest = b.fsub(dividend, b.fmul(quotient, divisor))
    below = b.fcmp_ordered("<", rest, constant(doubles, 0.0))
    if isinstance(atom, Mod):
        result = b.select(below, b.fadd(rest, divisor), rest)
    else:
        one = constant(doubles, 1.0)
        result = b.select(below, b.fsub(quotient, one), quotient)
    if isinstance(atom, CeilDiv):
        result = b.fneg(result)
    return b.sub(b.bitcast(b.fadd(result, magic), ints), bits)
