"""Dimension expressions as i64 arithmetic, and the memory they address.

A name is bound to an int (an unrolled variable), a scalar, a `Lanes` (the variable of
the vector loop being generated) or a vector (an integer bound by Let inside one).

An address is a polynomial too, and how it depends on the lane decides how memory is
accessed: not at all -> one scalar load; one element per lane -> a vector load or store;
any other way -> a gather or scatter.

Sums are added up outermost names first, so what an inner loop repeats is loop-invariant
code that LLVM hoists, and the constant comes last, where x86 addresses it for free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import llvmlite.ir as ll

from pliant.codegen import llvm_ops as ops
from pliant.codegen.builder import Builder
from pliant.codegen.llvm_types import (
    F64,
    I64,
    constant,
    iota,
    lanes_of,
    splat,
    storage_type,
    widen,
)
from pliant.ir.loops import (
    Accumulator,
    Alloc,
    Block,
    Buffer,
    Call,
    Dispatch,
    For,
    If,
    Index,
    Kind,
    Let,
    Load,
    Local,
    LoopValue,
    Read,
    Role,
    Stmt,
    Store,
    Switch,
)
from pliant.ir.loops import operands as value_operands
from pliant.sym import ZERO, Cond, Expr, mod
from pliant.sym.expr import Atom, CeilDiv, FloorDiv, Max, Min, Mod, Symbol, operands
from pliant.sym.signs import plainly_nonnegative

NO_WRAP = ("nsw",)
# Adding this to a small signed integer's bits gives the double 1.5 * 2^52 + integer.
_MAGIC = 1.5 * 2.0**52
_MAGIC_BITS = 0x4338000000000000


@dataclass(frozen=True, slots=True)
class Lanes:
    """The variable of a vector loop: base + offset + step * lane."""

    base: Any  # int or scalar value
    step: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Linear:
    """dynamic + offset + stride * lane; `dynamic` is None for 0."""

    dynamic: Any
    offset: int
    stride: Any  # int or scalar value


@dataclass(frozen=True, slots=True)
class _Product:
    depth: int
    coefficient: int
    factors: tuple[tuple[int, Any], ...]  # (depth, value), outermost first


class Dims:
    """The integer names in scope of one function, and their arithmetic."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder
        self.lanes = 1
        self.names: dict[str, Any] = {}
        self._depth: dict[str, int] = {}
        self._signed: set[str] = set()
        self._cache: list[dict[Any, Any]] = [{}]

    # ---- scope

    def bind(self, name: str, value: Any, *, signed: bool = False) -> None:
        """Binds a name; `signed` if it may be negative."""
        if name in self.names:
            # A name that is reused must not find what was computed for its old meaning.
            self._cache = [{} for _ in self._cache]
        self.names[name] = value
        self._depth[name] = len(self._cache)
        (self._signed.add if signed else self._signed.discard)(name)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Names bound and values computed inside are forgotten behind it."""
        saved = self.names, self._depth, self._signed, self._cache, self.lanes
        self.names, self._depth = dict(self.names), dict(self._depth)
        self._signed, self._cache = set(self._signed), [*self._cache, {}]
        try:
            yield
        finally:
            self.names, self._depth, self._signed, self._cache, self.lanes = saved

    def varies(self, expr: Expr) -> bool:
        """Whether lanes of the current vector loop see different values."""
        if self.lanes == 1:
            return False
        return any(_is_varying(self.names[name]) for name in expr.symbols())

    def is_signed(self, name: str) -> bool:
        return name in self._signed

    def is_nonnegative(self, expr: Expr) -> bool:
        """Whether that is plain to see; False means unknown."""
        return plainly_nonnegative(expr, self._is_unsigned)

    def _is_unsigned(self, name: str) -> bool:
        bound = self.names[name]
        bound = bound.base if isinstance(bound, Lanes) else bound
        return bound >= 0 if isinstance(bound, int) else name not in self._signed

    # ---- values

    def number(self, expr: Expr) -> Any:
        """A uniform expression: an int where all its names are, else a scalar."""
        linear = self.linear(expr)
        assert linear is not None, f"'{expr}' varies by lane"
        return self._close(linear)

    def scalar(self, expr: Expr) -> Any:
        """A uniform expression as an i64."""
        return as_value(self.number(expr))

    def value(self, expr: Expr) -> Any:
        """An i64, or a vector of them where lanes differ."""
        if not self.varies(expr):
            return self.scalar(expr)
        return self.once((expr, self.lanes), lambda: self._vector(expr))

    def holds(self, cond: Cond) -> Any:
        """A condition on uniform expressions as a flag."""
        b = self.builder
        if cond.kind != "divides":
            sides = self.scalar(cond.lhs), self.scalar(cond.rhs)
            return compare(b, cond.kind, *sides)
        rest = self.scalar(mod(cond.rhs, cond.lhs))
        if cond.lhs.is_const:
            return b.icmp_signed("==", rest, constant(I64, 0))
        return is_multiple(b, self.scalar(cond.lhs), self.scalar(cond.rhs), rest)

    def linear(self, expr: Expr) -> Linear | None:
        """The expression as a linear function of the lane; None if it is not one."""
        if expr.is_const:
            return Linear(None, expr.value, 0)
        offset, stride_offset = 0, 0
        plain: list[_Product] = []
        strides: list[_Product] = []
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
        stride = self._close(Linear(self._sum(strides), stride_offset, 0))
        return Linear(dynamic, offset, stride)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` emits, emitted at most once for a key in this scope."""
        if (found := self._find(key)) is None:
            found = self._cache[-1][key] = make()
        return found

    # ---- polynomials

    def _find(self, key: Any) -> Any:
        for level in reversed(self._cache):
            if (found := level.get(key)) is not None:
                return found
        return None

    def _close(self, linear: Linear) -> Any:
        if linear.dynamic is None or linear.offset == 0:
            return linear.offset if linear.dynamic is None else linear.dynamic
        return self._remember("+", linear.dynamic, constant(I64, linear.offset))

    def _remember(self, sign: str, x: Any, y: Any) -> Any:
        """x + y or x * y, computed once per scope."""
        right = y.constant if isinstance(y, ll.Constant) else id(y)
        key = (sign, id(x), right)
        make = self.builder.add if sign == "+" else self.builder.mul
        # The operands are kept so that their ids stay theirs.
        return self.once(key, lambda: (make(x, y, flags=NO_WRAP), x, y))[0]

    def _term(
        self, coefficient: int, mono: tuple[tuple[Atom, int], ...]
    ) -> tuple[_Product, Lanes | None] | None:
        lanes: Lanes | None = None
        factors: list[tuple[int, Any]] = []
        for atom, power in mono:
            depth, bound = self._atom(atom)
            if isinstance(bound, int):
                coefficient *= bound**power
            elif isinstance(bound, Lanes):
                if lanes is not None or power > 1:
                    return None
                lanes = bound
            elif bound is None or isinstance(bound.type, ll.VectorType):
                return None
            else:
                factors += [(depth, bound)] * power
        factors.sort(key=lambda factor: factor[0])
        if coefficient == 0:
            factors = []
        depth = factors[-1][0] if factors else 0
        return _Product(depth, coefficient, tuple(factors)), lanes

    def _atom(self, atom: Atom) -> tuple[int, Any]:
        """Depth and value; the value is None for a compound atom that varies."""
        if isinstance(atom, Symbol):
            return self._depth[atom.name], self.names[atom.name]
        args = operands(atom)
        names = {name for arg in args for name in arg.symbols()}
        depth = max((self._depth[name] for name in names), default=0)
        if any(_is_varying(self.names[name]) for name in names):
            return depth, None
        return depth, self.once(atom, lambda: self._compound(atom, args))

    def _times(self, product: _Product, base: Any) -> _Product:
        if isinstance(base, int):
            return _scale(product, base)
        factors = (*product.factors, (len(self._cache), base))
        return _Product(len(self._cache), product.coefficient, factors)

    def _sum(self, products: list[_Product]) -> Any:
        total = None
        for product in sorted(products, key=lambda p: p.depth):
            value = product.factors[0][1]
            if product.coefficient != 1:
                value = self._remember("*", value, constant(I64, product.coefficient))
            for _, factor in product.factors[1:]:
                value = self._remember("*", value, factor)
            total = value if total is None else self._remember("+", total, value)
        return total

    # ---- quotients and extrema

    def _compound(self, atom: Atom, args: tuple[Expr, ...]) -> Any:
        numbers = [self.number(arg) for arg in args]
        if all(isinstance(number, int) for number in numbers):
            return _fold(atom, numbers)
        values = [as_value(number) for number in numbers]
        match atom:
            case FloorDiv(num, _) | Mod(num, _):
                return self._divide(
                    atom, values[0], values[1], self.is_nonnegative(num)
                )
            case CeilDiv(num, _):
                b, (x, y) = self.builder, values
                last = b.sub(y, constant(I64, 1), flags=NO_WRAP)
                up = b.add(x, last, flags=NO_WRAP)
                return self._divide(atom, up, y, self.is_nonnegative(num))
            case _:
                return self._extremum(atom, values)

    def _extremum(self, atom: Atom, values: list[Any]) -> Any:
        sign = "<" if isinstance(atom, Min) else ">"
        best = values[0]
        for value in values[1:]:
            lanes = max(lanes_of(best), lanes_of(value))
            best, value = (splat(self.builder, v, lanes) for v in (best, value))
            better = self.builder.icmp_signed(sign, value, best)
            best = self.builder.select(better, value, best)
        return best

    def _divide(self, atom: Atom, x: Any, y: Any, nonnegative: bool) -> Any:
        """The quotient, or the remainder for a Mod, rounded down; y > 0."""
        b, wants_rest = self.builder, isinstance(atom, Mod)
        if isinstance(y, ll.Constant) and y.constant & (y.constant - 1) == 0:
            if wants_rest:
                return b.and_(x, constant(I64, y.constant - 1))
            return b.ashr(x, constant(I64, y.constant.bit_length() - 1))
        if not isinstance(y, ll.Constant):
            # A size may be 0 where this value is not used; LLVM may also hoist a
            # division that it sees cannot trap.
            one = constant(I64, 1)
            y = b.select(b.icmp_signed(">", y, one), y, one)
        if nonnegative:
            found = b.urem(x, y) if wants_rest else b.udiv(x, y)
            # LLVM would divide again in inner loops, to count addresses from there.
            scalar = lanes_of(found) == 1 and not isinstance(y, ll.Constant)
            return b.opaque(found) if scalar else found
        quotient, rest = b.sdiv(x, y), b.srem(x, y)
        below = b.icmp_signed("<", rest, constant(I64, 0))
        if wants_rest:
            return b.select(below, b.add(rest, y), rest)
        return b.add(quotient, b.sext(below, I64))

    # ---- vectors

    def _vector(self, expr: Expr) -> Any:
        b = self.builder
        linear = self.linear(expr)
        if linear is not None:
            base = self._close(Linear(linear.dynamic, linear.offset, 0))
            return self._spread(as_value(base), linear.stride)
        total: Any = None
        for coefficient, mono in expr.terms:
            value: Any = constant(I64, coefficient)
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

    def _mul(self, x: Any, y: Any) -> Any:
        if isinstance(x, ll.Constant) and x.type == I64 and x.constant == 1:
            return y
        lanes = max(lanes_of(x), lanes_of(y))
        b = self.builder
        return b.mul(splat(b, x, lanes), splat(b, y, lanes), flags=NO_WRAP)

    def _spread(self, base: Any, stride: Any) -> Any:
        """base + stride * lane"""
        b = self.builder
        return b.add(splat(b, base, self.lanes), self.steps(stride), flags=NO_WRAP)

    def steps(self, stride: Any) -> Any:
        """stride * lane"""
        lane, b = iota(I64, self.lanes), self.builder
        if isinstance(stride, int):
            return iota(I64, self.lanes, stride)
        return b.mul(splat(b, stride, self.lanes), lane, flags=NO_WRAP)

    def _vector_atom(self, atom: Atom) -> Any:
        if isinstance(atom, Symbol):
            bound = self.names[atom.name]
            if isinstance(bound, Lanes):
                base = self._close(Linear(*_parts(bound), 0))
                return self._spread(as_value(base), bound.step)
            return as_value(bound)
        values = [self.value(arg) for arg in operands(atom)]
        if not any(isinstance(v.type, ll.VectorType) for v in values):
            return as_value(self._atom(atom)[1])
        if isinstance(atom, Min | Max):
            return self._extremum(atom, values)
        x, y = values
        if isinstance(y, ll.Constant) and y.type == I64:
            size = y.constant
            if size & (size - 1) == 0 and not isinstance(atom, CeilDiv):
                if isinstance(atom, Mod):
                    return self.builder.and_(x, constant(x.type, size - 1))
                amount = constant(x.type, size.bit_length() - 1)
                return self.builder.ashr(x, amount)
        return self._divide_vectors(atom, x, y)

    def _divide_vectors(self, atom: Atom, x: Any, y: Any) -> Any:
        """Exact in doubles for |x| < 2^51; SIMD has no 64-bit integer division.

        round(x / y) is the floor or one more, and the remainder tells which.
        """
        b, lanes = self.builder, self.lanes
        ints, doubles = widen(I64, lanes), widen(F64, lanes)
        magic, bits = constant(doubles, _MAGIC), constant(ints, _MAGIC_BITS)

        def double(v: Any) -> Any:
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


def compare(builder: Any, kind: str, x: Any, y: Any) -> Any:
    """Whether x and y are in that relation, as `Cond.holds` has it."""
    sign = {"eq": "==", "ne": "!=", "le": "<=", "lt": "<"}[kind]
    return builder.icmp_signed(sign, x, y)


def is_multiple(builder: Any, divisor: Any, number: Any, rest: Any) -> Any:
    """Whether divisor divides number; `rest` is the remainder unless divisor is 0."""
    zero = constant(I64, 0)
    whole = builder.icmp_signed("==", rest, zero)
    some = builder.icmp_signed("!=", divisor, zero)
    nothing = builder.icmp_signed("==", number, zero)  # what 0 divides
    return builder.or_(builder.and_(some, whole), nothing)


def as_value(number: Any) -> Any:
    return constant(I64, number) if isinstance(number, int) else number


def _is_varying(bound: Any) -> bool:
    if isinstance(bound, int):
        return False
    return isinstance(bound, Lanes) or isinstance(bound.type, ll.VectorType)


def _scale(product: _Product, factor: int) -> _Product:
    if factor == 0:
        return _Product(0, 0, ())
    return _Product(product.depth, product.coefficient * factor, product.factors)


def _fold(atom: Atom, numbers: list[int]) -> int:
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


def _parts(lanes: Lanes) -> tuple[Any, int]:
    """The dynamic and the constant part of a vector variable's first lane."""
    if isinstance(lanes.base, int):
        return None, lanes.base + lanes.offset
    return lanes.base, lanes.offset


class Memory:
    """The buffers in scope of one function, and access to them."""

    def __init__(self, dims: Dims) -> None:
        self.dims, self.builder = dims, dims.builder
        self.buffers: dict[str, Any] = {}  # name -> address of element 0
        self.in_place = False  # whether an input may be written, under another name
        self._flat: dict[tuple[tuple[Expr, ...], tuple[Expr, ...]], Expr] = {}

    def flat(self, buf: Buffer, index: tuple[Expr, ...]) -> Expr:
        """The element's number in the buffer."""
        key = (buf.strides, index)
        if key not in self._flat:
            pairs = zip(index, buf.strides, strict=True)
            self._flat[key] = sum((i * step for i, step in pairs), ZERO)
        return self._flat[key]

    def address(self, buf: Buffer, index: tuple[Expr, ...]) -> Any:
        """Where an element is that is the same for all lanes."""
        return self._pointer(buf, self._uniform(self.flat(buf, index)))

    def near(self, buf: Buffer, index: tuple[Expr, ...]) -> Any:
        """The address of lane 0's element, or None if it is not found by adding."""
        at = self.dims.linear(self.flat(buf, index))
        return None if at is None else self._pointer(buf, at)

    def load(self, buf: Buffer, index: tuple[Expr, ...], where: Any, mask: Any) -> Any:
        """An element, or one per lane; zero, and not read, where a flag is false."""
        b, expr = self.builder, self.flat(buf, index)
        if not self.dims.varies(expr):
            if where is not None and lanes_of(where) > 1:
                where = self._both(mask, where)
            loaded = self._load_uniform(buf, self._uniform(expr), where)
        else:
            loaded = self._load_varying(buf, expr, self._both(mask, where))
        return ops.from_storage(b, loaded, buf.dtype)

    def store(
        self, buf: Buffer, index: tuple[Expr, ...], value: Any, mask: Any
    ) -> None:
        """Writes the lanes of the mask; None stands for all of them."""
        b, expr, align = self.builder, self.flat(buf, index), buf.dtype.bytes
        stored = ops.to_storage(b, value, buf.dtype)
        if self.dims.lanes == 1:
            b.store(stored, self._pointer(buf, self._uniform(expr)), align=align)
            return
        stored = splat(b, stored, self.dims.lanes)
        at = self.dims.linear(expr)
        if at is None or at.stride != 1:
            ops.scatter(b, stored, self._addresses(buf, expr), align, mask)
            return
        pointer = self._pointer(buf, at)
        if mask is not None and _is_register(buf, at):
            # A masked store would keep the buffer out of registers.
            kept = b.load(pointer, align=align, typ=stored.type)
            stored, mask = b.select(mask, stored, kept), None
        ops.store_lanes(b, stored, pointer, align, mask)

    def _is_constant(self, buf: Buffer) -> bool:
        """Whether a function that reads the buffer leaves it as it is."""
        return buf.role is Role.IN and not self.in_place

    def _uniform(self, expr: Expr) -> Linear:
        found = self.dims.linear(expr)
        assert found is not None, f"'{expr}' varies by lane"
        return found

    def _pointer(self, buf: Buffer, at: Linear) -> Any:
        """Where lane 0 is."""
        pointer, element = self.buffers[buf.name], storage_type(buf.dtype)
        if at.dynamic is not None:
            base, moving = pointer, at.dynamic
            pointer, _ = self.dims.once(
                ("pointer", buf.name, id(moving)),
                lambda: (
                    self.builder.gep(base, [moving], source_etype=element),
                    moving,
                ),
            )
        if at.offset:
            offset = constant(I64, at.offset)
            pointer = self.builder.gep(pointer, [offset], source_etype=element)
        return pointer

    def _addresses(self, buf: Buffer, expr: Expr) -> Any:
        """One address per lane."""
        at, element = self.dims.linear(expr), storage_type(buf.dtype)
        if at is None:
            base, offsets = self.buffers[buf.name], self.dims.value(expr)
        else:
            base, offsets = self._pointer(buf, at), self.dims.steps(at.stride)
        return ops.pointers(self.builder, base, element, offsets)

    def _both(self, mask: Any, other: Any) -> Any:
        """The lanes in both masks; None stands for all lanes."""
        if other is None:
            return mask
        other = splat(self.builder, other, self.dims.lanes)
        return other if mask is None else self.builder.and_(mask, other)

    def _load_uniform(self, buf: Buffer, at: Linear, where: Any) -> Any:
        b, typ, align = self.builder, storage_type(buf.dtype), buf.dtype.bytes
        if where is None:
            pointer = self._pointer(buf, at)
            return b.load(
                pointer, align=align, typ=typ, constant=self._is_constant(buf)
            )
        wanted = ops.any_lane(b, where)
        before = b.block
        with b.if_then(wanted):
            with self.dims.scope():
                found = b.load(self._pointer(buf, at), align=align, typ=typ)
            after = b.block
        loaded = b.phi(typ)
        loaded.add_incoming(ll.Constant(typ, None), before)
        loaded.add_incoming(found, after)
        if lanes_of(where) == 1:
            return loaded
        wide = splat(b, loaded, lanes_of(where))
        return b.select(where, wide, ll.Constant(wide.type, None))

    def _load_varying(self, buf: Buffer, expr: Expr, mask: Any) -> Any:
        b, lanes, align = self.builder, self.dims.lanes, buf.dtype.bytes
        typ = storage_type(buf.dtype, lanes)
        at = self.dims.linear(expr)
        if at is not None and at.stride == 1:
            if _is_register(buf, at):
                loaded = b.load(self._pointer(buf, at), align=align, typ=typ)
                zero = ll.Constant(typ, None)
                return loaded if mask is None else b.select(mask, loaded, zero)
            pointer, constant = self._pointer(buf, at), self._is_constant(buf)
            if mask is None:
                return b.load(pointer, align=align, typ=typ, constant=constant)
            return ops.load_lanes(b, pointer, typ, align, mask)
        if at is not None and at.stride == -1 and mask is None:
            last = Linear(at.dynamic, at.offset - lanes + 1, 1)
            backwards = b.load(self._pointer(buf, last), align=align, typ=typ)
            return ops.reverse_lanes(b, backwards)
        return ops.gather(b, self._addresses(buf, expr), typ, align, mask)


def _is_register(buf: Buffer, at: Linear) -> bool:
    return buf.role is Role.REGISTER and at.dynamic is None


@dataclass(slots=True)
class LaneCheck:
    """Whether the iterations of a VECTOR loop can run side by side."""

    flat: Callable[[Buffer, tuple[Expr, ...]], Expr]
    varying: set[str]  # names whose value differs by lane

    def differs(self, expr: Expr) -> bool:
        return not self.varying.isdisjoint(expr.symbols())

    def value_differs(self, value: LoopValue) -> bool:
        match value:
            case Index(dim):
                return self.differs(dim)
            case Load(_, index, _) if any(map(self.differs, index)):
                return True
            case Read(name, _):
                return name in self.varying
            case _:
                return any(map(self.value_differs, value_operands(value)))

    def allows(self, stmt: Stmt) -> bool:
        match stmt:
            case Block(body):
                return all(map(self.allows, body))
            case For():
                alike = not (self.differs(stmt.begin) or self.differs(stmt.end))
                nested = stmt.kind in (Kind.VECTOR, Kind.PARALLEL)
                return alike and not nested and self.allows(stmt.body)
            case Store(buf, index, _):
                return self.differs(self.flat(buf, index))
            case Let(name, value) | Local(name, _, value):
                if self.value_differs(value):
                    self.varying.add(name)
                return True
            case Accumulator(name, _, _):
                self.varying.add(name)
                return True
            case If(_, then, otherwise):
                return self.allows(then) and (
                    otherwise is None or self.allows(otherwise)
                )
            case Switch(selector, cases):
                inside = all(self.allows(body) for _, body in cases)
                return inside and not self.differs(selector)
            case Alloc() | Call() | Dispatch():
                return False
            case _:
                return True
