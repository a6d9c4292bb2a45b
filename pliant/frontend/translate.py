"""Translates a source's graph into graph IR: the part that all front ends share.

    cx = Translation(Builder())
    x = cx.b.param("x", TensorType(DType.F32, (cx.symbol("batch"), as_expr(3))))
    y = cx.add(x, 1)           # promoted, broadcast, with its place in the source
    module = cx.finish([y])    # or an UnsupportedOpError with all that there are

A translation of an op gets its operands resolved: a tensor is a `Value`, an integer
that depends on shapes an `Expr` (or an int when constant), a float that depends on
shapes a `Real`; all else is the object that the source has there. Numbers beside
tensors take part in types as in torch; a source that spells out every type casts.

A front end adds how it reads its nodes, and which translation each op has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import numpy as np

from pliant.errors import (
    InternalError,
    PliantError,
    ShapeError,
    UnsupportedOp,
    UnsupportedOpError,
)
from pliant.frontend.contract import Assumption, Basis
from pliant.frontend.operands import (
    HALF,
    Operand,
    Real,
    Size,
    combined,
    fitted,
    is_rounded,
    promote_types,
    type_of,
)
from pliant.ir.build import Builder
from pliant.ir.graph import Constant, Module, Value
from pliant.ir.types import DType, TensorType
from pliant.sym import Cond, Expr, Guard, Max, Min, as_expr, le, minimum, sym

T = TypeVar("T")

_SIGNS = {"eq": "==", "ne": "!=", "le": "<=", "lt": "<", "divides": "divides"}


class Unsupported(Exception):
    """This op, as it is used here, has no translation; `attempt` collects them."""


class Untranslated:
    """The result of an op that could not be translated."""


POISON = Untranslated()


@dataclass(frozen=True, slots=True)
class Location:
    """Where the model uses an op: "file.py:12" and with the code of that line."""

    short: str
    full: str


class Translation:
    """The state of one import that translations of ops see."""

    def __init__(self, builder: Builder, training: bool = False) -> None:
        self.b = builder
        self.training = training
        self.op_name = ""  # of the source's op that is translated now
        self.problems: list[UnsupportedOp] = []
        # The source's symbols in our spelling.
        self.symbols: dict[str, Expr] = {}
        self.random = True  # whether random numbers may be drawn here
        self.randoms = 0  # random ops so far; each draws numbers of its own
        self.seed_value: Value | None = None
        # What the source's program took for granted, and which of its branches need
        # not hold, or which weaker guard is there instead.
        self.assumptions: list[Assumption] = []
        self.covered: Mapping[Cond, Guard | None] = {}
        # Tensors whose elements are known to be >= 0, so indices need no wrapping.
        self.nonnegative: set[Value] = set()
        # Fixes the symbols of a size to their traced values, where the tracer allows.
        self.specialise: Callable[[Expr], None] | None = None

    # --- the whole ----------------------------------------------------------------

    def attempt(
        self,
        op: str,
        place: Location,
        translate: Callable[[], T],
        otherwise: Callable[[str], T | Untranslated],
    ) -> T | Untranslated:
        """What `translate` makes of an op; `otherwise`, with the reason, if it cannot.

        An unexpected failure is a bug of ours, unless it is behind something that is
        not supported: a value that stands in for that may not fit.
        """
        self.b.loc = place.short
        try:
            return translate()
        except Unsupported as problem:
            return otherwise(str(problem))
        except PliantError:
            if not self.problems:
                raise
        except Exception as error:
            if not self.problems:
                detail = f"{op} at {place.full}: {type(error).__name__}: {error}"
                raise InternalError("import", detail) from error
        return POISON

    def unsupported(self, reason: str) -> NoReturn:
        raise Unsupported(reason)

    def note(self, op: str, reason: str, place: Location) -> None:
        """Records something unsupported; `finish` reports all of it."""
        self.problems.append(UnsupportedOp(op, reason, place.full))

    def finish(self, results: Sequence[Value], sizes: Sequence[str] = ()) -> Module:
        """The module; UnsupportedOpError lists all that was noted."""
        if self.problems:
            raise UnsupportedOpError(list(dict.fromkeys(self.problems)))
        graph = self.b.finish("main", results, sizes)
        return Module({"main": graph}, constants=dict(self.b.constants))

    # --- random numbers -----------------------------------------------------------

    def seed(self) -> Value:
        """The parameter that all random numbers of a call follow from."""
        if self.seed_value is None:
            self.seed_value = self.b.param("seed", TensorType(DType.I64, ()))
        return self.seed_value

    def next_number(self) -> int:
        self.randoms += 1
        return self.randoms

    # --- sizes ------------------------------------------------------------------

    def symbol(self, name: str) -> Expr:
        """The source's symbol; unless it has got a name, s0, s1, .. as they appear."""
        if name not in self.symbols:
            used = {n for expr in self.symbols.values() for n in expr.symbols()}
            self.symbols[name] = fresh_symbol(used)
        return self.symbols[name]

    def simplify(self, size: Size) -> Expr:
        return self.b.facts.canonical(as_expr(size))

    def proves(self, cond: Cond) -> bool:
        return self.b.facts.prove(cond) is True

    def require(self, cond: Cond, why: str) -> None:
        """Enforced, and known from here on."""
        self.enforce(self.guard(cond, why))

    def guard(self, cond: Cond, why: str) -> Guard:
        """A guard for the op that is translated now."""
        message = (f"{why}: ", cond.lhs, f" {_SIGNS[cond.kind]} ", cond.rhs)
        return Guard(cond, message, self.b.loc)

    def assume(self, basis: Basis, guard: Guard) -> None:
        """Records an assumption of the program, enforced unless it is covered."""
        if basis in (Basis.BRANCH, Basis.LAYOUT):
            instead = self.covered.get(guard.cond, guard)
            if instead is None:
                return
            guard = instead
        self.assumptions.append(Assumption(basis, guard))
        self.enforce(guard)

    def enforce(self, guard: Guard) -> None:
        """Guards it unless known; ShapeError if it contradicts what is known."""
        known = self.b.facts.prove(guard.cond)
        if known is True:
            return
        try:
            facts = self.b.facts.assume(guard.cond)
        except ValueError:
            known = False
        if known is False:
            what = f"{guard.render({})} ({guard.origin})"
            others = "; ".join(g.render({}) for g in self.b.guards)
            against = f", against: {others}" if others else ""
            raise ShapeError(f"no size can be compiled: {what}{against}")
        self.b.facts = facts
        self.b.guards.append(guard)

    def guard_sizes(self) -> None:
        """No dim of the ops built since the last time is negative: known from here."""
        for op in self.b.ops[self.b.sized :]:
            for dim in (d for value in op.results for d in value.shape):
                if not dim.is_const:
                    message = (f"a size of {op.name} must not be negative: ", dim)
                    self.enforce(Guard(le(0, dim), message, op.loc))
        self.b.sized = len(self.b.ops)

    def constant_int(self, size: object, what: str) -> int:
        if isinstance(size, bool) or not isinstance(size, int | Expr):
            self.unsupported(f"{what} is not an integer: {size}")
        expr = self.simplify(size)
        if not expr.is_const and self.specialise is not None:
            self.specialise(expr)
            expr = self.simplify(expr)
        if not expr.is_const:
            self.unsupported(f"{what} depends on a size: {expr}")
        return expr.value

    def ints(self, sizes: Size | Sequence[Size], rank: int, what: str) -> list[int]:
        """Per-dim integers; one number stands for all dims."""
        if isinstance(sizes, int | Expr):
            sizes = [sizes]
        out = [self.constant_int(s, what) for s in sizes]
        return out * rank if len(out) == 1 else out

    # --- operands ---------------------------------------------------------------

    def promote(self, *operands: Operand | None) -> DType:
        """The common type: tensors with dims outrank 0-dim ones, those numbers."""
        ranked: list[DType | None] = [None, None, None]
        for operand in operands:
            if operand is None:
                continue
            priority, dtype = type_of(operand)
            have = ranked[priority]
            ranked[priority] = dtype if have is None else promote_types(have, dtype)
        full, zero_dim, number = ranked
        result = combined(full, combined(zero_dim, number))
        assert result is not None
        return result

    def tensor(self, operand: Operand, dtype: DType | None = None) -> Value:
        """The operand as a tensor of that dtype; a number becomes a scalar."""
        match operand:
            case Value():
                return operand if dtype is None else self.cast(operand, dtype)
            case Real():
                return self.cast(self.real(operand), dtype or DType.F32)
            case Expr() if not operand.is_const:
                wanted = dtype or DType.I64
                if wanted is DType.BOOL:
                    size = self.tensor(operand, DType.I64)
                    return self.b.binary("ne", size, self.b.scalar(0, DType.I64))
                return self.b.emit("dim_value", value=operand, dtype=wanted)
            case _:
                number = operand.value if isinstance(operand, Expr) else operand
                dtype = dtype or self.promote(number)
                return self.b.scalar(fitted(number, dtype), dtype)

    def real(self, number: Real) -> Value:
        """The f64 scalar; a ratio divides here, where it is first needed."""
        if number.value is not None:
            return number.value
        assert number.ratio is not None
        top, bottom = (self.tensor(part, DType.F64) for part in number.ratio)
        return self.b.binary("div", top, bottom)

    def cast(self, x: Value, dtype: DType) -> Value:
        if x.dtype is dtype:
            return x
        out = self.b.cast(x, dtype)
        fits = dtype.is_float or dtype.kind == "u" or dtype.bytes >= x.dtype.bytes
        if (x in self.nonnegative and fits) or x.dtype.is_unsigned:
            self.nonnegative.add(out)
        return out

    def axis(self, dim: int, rank: int) -> int:
        return dim + max(rank, 1) if dim < 0 else dim

    def axes(self, dims: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
        """Reduced axes; none given means all of them."""
        if dims is None or (not isinstance(dims, int) and not dims):
            return tuple(range(rank))
        if isinstance(dims, int):
            dims = [dims]
        return tuple(sorted(self.axis(d, rank) for d in dims)) if rank else ()

    # --- arithmetic -------------------------------------------------------------

    def arith(
        self, op: str, x: Operand, y: Operand, dtype: DType | None = None
    ) -> Value:
        """A binary op in the promoted type."""
        dtype = dtype or self.promote(x, y)
        # Torch rounds a number to the type of the half floats beside it, but for
        # factors and divisors: computed in f32, those are exact.
        exact = {"mul": (x, y), "div": (y,), "floordiv": (y,)}.get(op, ())
        if dtype in HALF and any(is_rounded(n, dtype) for n in exact):
            wide = self.arith(op, x, y, DType.F32)
            return wide if wide.dtype is DType.BOOL else self.cast(wide, dtype)
        left, right = self.aligned(self.tensor(x, dtype), self.tensor(y, dtype))
        return self.b.binary(op, left, right)

    def aligned(self, *values: Value) -> list[Value]:
        """The values, ready to broadcast against each other."""
        shapes = [v.shape for v in values]
        return [
            functools.reduce(self.unit_dims, shapes[:i] + shapes[i + 1 :], v)
            for i, v in enumerate(values)
        ]

    def unit_dims(self, x: Value, shape: Sequence[Expr] | None = None) -> Value:
        """A dim of x that is at most 1 must be 1 where it broadcasts.

        x[:, :1] has min(n, 1) columns. A trace took it for 1, and a dim of 1
        broadcasts: where `shape` differs, so must ours. (All dims, without `shape`.)
        Beside n columns it may stay: there are none of either, or it is 1.
        """
        if not any(_capped(dim) for dim in x.shape):
            return x
        dims = list(x.shape)
        beside: list[Expr | None] = list(shape or ())
        if shape is None:
            beside = [None] * len(dims)
        beside = [*[as_expr(1)] * (len(dims) - len(beside)), *beside]
        for i, other in enumerate(beside[len(beside) - len(dims) :]):
            if not _capped(dims[i]) or not self.proves(le(dims[i], 1)):
                continue
            if other is None or not (other == 1 or self.b.same(dims[i], other)):
                if other is not None and self.b.same(dims[i], minimum(other, 1)):
                    wide = (*dims[:i], other, *dims[i + 1 :])
                    x = self.keep_sign(x, self.b.stretch_to(x, wide))
                    dims[i] = other
                    continue
                why = "a slice of one element must have it"
                self.b.require_equal(dims[i], 1, why)
                dims[i] = as_expr(1)
        if tuple(dims) == x.shape:
            return x
        return self.keep_sign(x, self.b.emit("reshape", x, shape=tuple(dims)))

    def unary(self, op: str, x: Value, dtype: DType | None = None) -> Value:
        return self.b.unary(op, x if dtype is None else self.cast(x, dtype))

    def add(self, x: Operand, y: Operand) -> Value:
        return self.arith("add", x, y)

    def sub(self, x: Operand, y: Operand) -> Value:
        return self.arith("sub", x, y)

    def mul(self, x: Operand, y: Operand) -> Value:
        return self.arith("mul", x, y)

    def div(self, x: Operand, y: Operand) -> Value:
        return self.arith("div", x, y)

    def select(self, cond: Value, x: Operand, y: Operand) -> Value:
        dtype = self.promote(x, y)
        parts = self.to_bool(cond), self.tensor(x, dtype), self.tensor(y, dtype)
        cond, left, right = self.aligned(*parts)
        return self.b.select(cond, left, right)

    def to_bool(self, x: Value) -> Value:
        if x.dtype is DType.BOOL:
            return x
        return self.b.binary("ne", x, self.b.scalar(0, x.dtype))

    def iota(self, shape: Sequence[Size], axis: int, dtype: DType) -> Value:
        dims = tuple(as_expr(d) for d in shape)
        out = self.b.emit("iota", axis=axis, dtype=dtype, shape=dims)
        self.nonnegative.add(out)
        return out

    def full(self, value: Operand, shape: Sequence[Size], dtype: DType) -> Value:
        dims = tuple(as_expr(d) for d in shape)
        if isinstance(value, Expr) and value.is_const:
            value = value.value
        if isinstance(value, Value | Expr | Real):
            return self.b.broadcast_to(self.tensor(value, dtype), dims)
        number = fitted(value, dtype)
        out = self.b.emit("full", value=number, dtype=dtype, shape=dims)
        if number >= 0:
            self.nonnegative.add(out)
        return out

    def broadcast_to(self, x: Value, shape: Sequence[Size]) -> Value:
        dims = tuple(as_expr(d) for d in shape)
        return self.keep_sign(x, self.b.broadcast_to(self.unit_dims(x, dims), dims))

    def keep_sign(self, x: Value, moved: Value) -> Value:
        """`moved` holds elements of `x` only."""
        if x in self.nonnegative:
            self.nonnegative.add(moved)
        return moved

    def reshape(self, x: Value, shape: Sequence[Size]) -> Value:
        dims = tuple(as_expr(d) for d in shape)
        return x if dims == x.shape else self.keep_sign(x, self.b.reshape(x, dims))

    def transpose(self, x: Value, perm: Sequence[int]) -> Value:
        if tuple(perm) == tuple(range(x.type.rank)):
            return x
        return self.keep_sign(x, self.b.transpose(x, tuple(perm)))

    def slice(
        self, x: Value, axis: int, start: Size, size: Size, step: int = 1
    ) -> Value:
        """`size` elements of one axis; the caller has made sure that they exist."""
        start, size = self.simplify(start), self.simplify(size)
        if start == 0 and size == x.shape[axis] and step == 1:
            return x
        return self.keep_sign(x, self.b.slice_axis(x, axis, start, size, step))

    def concat(self, parts: Sequence[Value], axis: int) -> Value:
        if len(parts) == 1:
            return parts[0]
        out = self.b.emit("concat", *parts, axis=axis)
        if all(part in self.nonnegative for part in parts):
            self.nonnegative.add(out)
        return out

    def move_axis(self, x: Value, source: int, target: int) -> Value:
        perm = [i for i in range(x.type.rank) if i != source]
        perm.insert(target, source)
        return self.transpose(x, perm)

    def reduce(
        self, op: str, x: Value, axes: Sequence[int], keepdims: bool = False
    ) -> Value:
        return self.b.reduce(op, x, tuple(axes), keepdims)

    def count(self, x: Value, axes: Sequence[int]) -> Expr:
        total = as_expr(1)
        for axis in axes:
            total = total * x.shape[axis]
        return total

    def mean(self, x: Value, axes: Sequence[int], keepdims: bool = False) -> Value:
        """Half floats sum and divide in f32."""
        wide = self.cast(x, x.dtype.compute)
        total = self.reduce("sum", wide, axes, keepdims)
        mean = self.arith("div", total, self.count(x, axes), wide.dtype)
        return self.cast(mean, x.dtype)

    def in_range(
        self, index: Value, size: Size, axis: int, *, wraps: bool = False
    ) -> Value:
        """An index of an axis, checked when it is used and counted from the front.

        With `wraps`, negative indices count from the end; else they are outside.
        """
        out = self.b.in_range(
            index, as_expr(size), wraps=wraps, of=self.op_name, axis=axis
        )
        self.nonnegative.add(out)
        return out

    def wrap_index(self, index: Value, size: Expr, axis: int) -> Value:
        """For an op that checks its indices: negative ones count from the end."""
        index = as_index(self, index)
        if index in self.nonnegative:
            return index
        return self.in_range(index, size, axis, wraps=True)


def as_index(cx: Translation, index: Value) -> Value:
    return cx.cast(index, DType.I64) if index.dtype is not DType.I64 else index


def _capped(dim: Expr) -> bool:
    return any(isinstance(atom, Min | Max) for atom in dim.atoms())


def constant_of(
    name: str, dtype: DType, data: np.ndarray[Any, Any], keep: object = None
) -> Constant:
    """Data of the model; of bf16, its bits. `keep` is what owns the memory."""
    kind = TensorType(dtype, tuple(as_expr(n) for n in data.shape))
    return Constant(name, kind, data, keep=keep)


def fresh_symbol(taken: set[str]) -> Expr:
    """The first of s0, s1, .. that is not taken; it is then."""
    number = 0
    while f"s{number}" in taken:
        number += 1
    taken.add(f"s{number}")
    return sym(f"s{number}")
