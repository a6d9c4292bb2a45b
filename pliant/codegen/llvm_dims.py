"""Dimension expressions as i64 arithmetic in kernels.

A name is bound to an int (an unrolled variable), a scalar, a `Lanes` (the variable of
the vector loop being generated) or a vector (an integer bound by Let inside one).

Sums start with the outermost names, so that the part an inner loop repeats is
loop-invariant and LLVM hoists it. The constant comes last: x86 addressing adds it for
free.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import llvmlite.ir as ll

from pliant.codegen.builder import LLBuilder
from pliant.codegen.llvm_types import (
    I64,
    LLValue,
    Number,
    constant,
    iota,
    lanes_of,
    splat,
)
from pliant.codegen.sizes import NO_WRAP, SizeCode, as_value, emit_atom
from pliant.sym import Expr
from pliant.sym.expr import Atom, Symbol, operands
from pliant.sym.signs import plainly_nonnegative

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LaneIndex:
    """The variable of a vector loop: base + offset + step * lane."""

    base: Number
    step: int
    offset: int = 0


Bound: TypeAlias = Number | LaneIndex  # the meaning of a name


class Linear(NamedTuple):
    """dynamic + offset + stride * lane; `dynamic` is None for 0."""

    dynamic: LLValue | None
    offset: int
    stride: Number


class _SizeProduct(NamedTuple):
    depth: int
    coefficient: int
    factors: tuple[tuple[int, LLValue], ...]  # (depth, value), outermost first


class Dims(SizeCode[Number]):
    """The integer names in scope of one function, and their arithmetic."""

    has_room = True

    def __init__(self, builder: LLBuilder) -> None:
        super().__init__(builder)
        self.lanes = 1
        self.names: dict[str, Bound] = {}
        self._depth: dict[str, int] = {}
        self._signed: set[str] = set()
        # The names bound in the scopes around this place, and what they were before.
        self._bound: list[tuple[str, Bound | None, int, bool]] = []
        self._level = 1  # the number of scopes around this place
        self._known: dict[Hashable, Any] = {}  # what was computed
        # Where that is, from the outermost scope to this one, to forget it at its end.
        self._added: list[tuple[dict[Hashable, Any], Hashable]] = []

    # ---- scope

    def bind(self, name: str, value: Bound, *, signed: bool = False) -> None:
        """Binds a name; `signed` if it may be negative."""
        old = self.names.get(name)
        if old is not None:
            # A reused name must not find values cached for its old meaning.
            self._known = {}
        self._bound.append((name, old, self._depth.get(name, 0), name in self._signed))
        self.names[name] = value
        self._depth[name] = self._level
        (self._signed.add if signed else self._signed.discard)(name)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Names bound and values computed inside are forgotten afterwards."""
        known_before, lanes = self._known, self.lanes
        bound, before = len(self._bound), len(self._added)
        self._level += 1
        try:
            yield
        finally:
            self._known, self.lanes = known_before, lanes
            self._level -= 1
            while len(self._bound) > bound:
                self._unbind(*self._bound.pop())
            for known, key in self._added[before:]:
                del known[key]
            del self._added[before:]

    def _unbind(self, name: str, old: Bound | None, depth: int, signed: bool) -> None:
        """The name as it was before it was bound."""
        if old is None:
            del self.names[name], self._depth[name]
        else:
            self.names[name], self._depth[name] = old, depth
        (self._signed.add if signed else self._signed.discard)(name)

    def varies(self, expr: Expr) -> bool:
        """Whether lanes of the current vector loop see different values."""
        if self.lanes == 1:
            return False
        return any(_is_varying(self.names[name]) for name in expr.symbols())

    def is_signed(self, name: str) -> bool:
        return name in self._signed

    def is_nonnegative(self, expr: Expr) -> bool:
        """Whether this is evident; False means unknown."""
        return plainly_nonnegative(expr, self._is_unsigned)

    def _is_unsigned(self, name: str) -> bool:
        bound = self.names[name]
        bound = bound.base if isinstance(bound, LaneIndex) else bound
        return bound >= 0 if isinstance(bound, int) else name not in self._signed

    # ---- values

    def evaluate(self, expr: Expr) -> Number:
        """A uniform expression: an int if all its names are ints, else a scalar."""
        if expr.is_const:
            return expr.value
        linear = self.linear(expr)
        assert linear is not None, f"'{expr}' varies by lane"
        return self._close(linear)

    def scalar(self, expr: Expr) -> LLValue:
        """A uniform expression as an i64."""
        return as_value(self.evaluate(expr))

    def plain(self, number: Number) -> Number:
        return number

    def made(
        self,
        value: Number,
        parts: Sequence[Number],
        divisor: Number | None = None,
        least: int = 1,
    ) -> Number:
        return value

    def value(self, expr: Expr) -> LLValue:
        """An i64, or a vector of them if lanes differ."""
        if not self.varies(expr):
            return self.scalar(expr)
        return self.once((expr, self.lanes), lambda: self._vector(expr))

    def linear(self, expr: Expr) -> Linear | None:
        """The expression as a linear function of the lane; None if it is not one."""
        if expr.is_const:
            return Linear(None, expr.value, 0)
        offset, stride_offset = 0, 0
        plain: list[_SizeProduct] = []
        strides: list[_SizeProduct] = []
        for coefficient, mono in expr.terms:
            term = self._term(coefficient, mono)
            if term is None:
                return None
            product, lanes = term
            if lanes is not None:
                scaled = _scale(product, lanes.step)
                if scaled.factors:
                    strides.append(scaled)
                else:
                    stride_offset += scaled.coefficient
                shift = _scale(product, lanes.offset)
                if shift.factors:
                    plain.append(shift)
                else:
                    offset += shift.coefficient
                product = self._times(product, lanes.base)
            if product.factors:
                plain.append(product)
            else:
                offset += product.coefficient
        dynamic = self._sum(plain)
        if not strides:
            return Linear(dynamic, offset, stride_offset)
        stride = self._close(Linear(self._sum(strides), stride_offset, 0))
        return Linear(dynamic, offset, stride)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """The result of `make`, emitted at most once per key in this scope."""
        found: T | None = self._known.get(key)
        if found is None:
            found = self._keep(key, make())
        return found

    def _keep(self, key: Hashable, value: T) -> T:
        self._known[key] = value
        self._added.append((self._known, key))
        return value

    # ---- polynomials

    def _close(self, linear: Linear) -> Number:
        if linear.dynamic is None or linear.offset == 0:
            return linear.offset if linear.dynamic is None else linear.dynamic
        return self._remember("+", linear.dynamic, constant(I64, linear.offset))

    def _remember(self, sign: str, x: LLValue, y: LLValue) -> LLValue:
        """x + y or x * y, computed once per scope."""
        right = y.constant if isinstance(y, ll.Constant) else id(y)
        key = (sign, id(x), right)
        found = self._known.get(key)
        if found is None:
            make = self.builder.add if sign == "+" else self.builder.mul
            # The operands are kept alive so that their ids are not reused.
            found = self._keep(key, (make(x, y, flags=NO_WRAP), x, y))
        return found[0]

    def _term(
        self, coefficient: int, mono: tuple[tuple[Atom, int], ...]
    ) -> tuple[_SizeProduct, LaneIndex | None] | None:
        lanes: LaneIndex | None = None
        factors: list[tuple[int, LLValue]] = []
        for atom, power in mono:
            depth, bound = self._atom(atom)
            if isinstance(bound, int):
                coefficient *= bound**power
            elif isinstance(bound, LaneIndex):
                if lanes is not None or power > 1:
                    return None
                lanes = bound
            elif bound is None or isinstance(bound.type, ll.VectorType):
                return None
            else:
                factors += [(depth, bound)] * power
        if coefficient == 0 or not factors:
            return _SizeProduct(0, coefficient, ()), lanes
        if len(factors) > 1:
            factors.sort(key=lambda factor: factor[0])
        depth = factors[-1][0]
        return _SizeProduct(depth, coefficient, tuple(factors)), lanes

    def _atom(self, atom: Atom) -> tuple[int, LLValue]:
        """Depth and value; the value is None for a compound atom that varies."""
        if isinstance(atom, Symbol):
            return self._depth[atom.name], self.names[atom.name]
        found: tuple[int, LLValue] | None = self._known.get(atom)
        if found is None:
            args = operands(atom)
            names = {name for arg in args for name in arg.symbols()}
            depth = max((self._depth[name] for name in names), default=0)
            if any(_is_varying(self.names[name]) for name in names):
                return depth, None
            found = self._keep(atom, (depth, self.compound(atom)))
        return found

    def _times(self, product: _SizeProduct, base: Number) -> _SizeProduct:
        if isinstance(base, int):
            return _scale(product, base)
        factors = (*product.factors, (self._level, base))
        return _SizeProduct(self._level, product.coefficient, factors)

    def _sum(self, products: list[_SizeProduct]) -> LLValue:
        total = None
        if len(products) > 1:
            products = sorted(products, key=lambda p: p.depth)
        for product in products:
            value = product.factors[0][1]
            if product.coefficient != 1:
                value = self._remember("*", value, constant(I64, product.coefficient))
            for _, factor in product.factors[1:]:
                value = self._remember("*", value, factor)
            total = value if total is None else self._remember("+", total, value)
        return total

    # ---- vectors

    def _vector(self, expr: Expr) -> LLValue:
        b = self.builder
        linear = self.linear(expr)
        if linear is not None:
            base = self._close(Linear(linear.dynamic, linear.offset, 0))
            return self._spread(as_value(base), linear.stride)
        total: LLValue = None
        for coefficient, mono in expr.terms:
            value: LLValue = constant(I64, coefficient)
            for atom, power in mono:
                factor = self._vector_atom(atom)
                for _ in range(power):
                    value = self._mul(value, factor)
            if total is None:
                total = value
            else:
                lanes = max(lanes_of(total), lanes_of(value))
                sides = (splat(b, v, lanes) for v in (total, value))
                total = b.add(*sides, flags=NO_WRAP)
        return splat(b, total, self.lanes)

    def _mul(self, x: LLValue, y: LLValue) -> LLValue:
        if isinstance(x, ll.Constant) and x.type == I64 and x.constant == 1:
            return y
        lanes = max(lanes_of(x), lanes_of(y))
        b = self.builder
        return b.mul(splat(b, x, lanes), splat(b, y, lanes), flags=NO_WRAP)

    def _spread(self, base: LLValue, stride: Number) -> LLValue:
        """base + stride * lane"""
        b = self.builder
        return b.add(splat(b, base, self.lanes), self.steps(stride), flags=NO_WRAP)

    def steps(self, stride: Number) -> LLValue:
        """stride * lane"""
        lane, b = iota(I64, self.lanes), self.builder
        if isinstance(stride, int):
            return iota(I64, self.lanes, stride)
        return b.mul(splat(b, stride, self.lanes), lane, flags=NO_WRAP)

    def _vector_atom(self, atom: Atom) -> LLValue:
        if isinstance(atom, Symbol):
            bound = self.names[atom.name]
            if isinstance(bound, LaneIndex):
                base = self._close(Linear(*_parts(bound), 0))
                return self._spread(as_value(base), bound.step)
            return as_value(bound)
        values = [self.value(arg) for arg in operands(atom)]
        if not any(isinstance(v.type, ll.VectorType) for v in values):
            return as_value(self._atom(atom)[1])
        return emit_atom(self.builder, atom, values, self.has_room)


def _is_varying(bound: Bound) -> bool:
    if isinstance(bound, int):
        return False
    return isinstance(bound, LaneIndex) or isinstance(bound.type, ll.VectorType)


def _scale(product: _SizeProduct, factor: int) -> _SizeProduct:
    if factor == 0:
        return _SizeProduct(0, 0, ())
    return _SizeProduct(product.depth, product.coefficient * factor, product.factors)


def _parts(lanes: LaneIndex) -> tuple[LLValue | None, int]:
    """The dynamic and the constant part of a vector variable's first lane."""
    if isinstance(lanes.base, int):
        return None, lanes.base + lanes.offset
    return lanes.base, lanes.offset
