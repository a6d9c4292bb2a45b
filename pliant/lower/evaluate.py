"""Values of a fusion region at one index, as loop IR.

An `Evaluator` walks from a value back to what the kernel can load and composes index
maps on the way, so that everything in between is computed in registers. Each (value,
index) is computed once per scope and placed in the outermost scope that has its
variables: a row's statistics are computed once per row, whichever loop uses them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from pliant.errors import InternalError
from pliant.ir.access import Space, pull
from pliant.ir.graph import DataCheck, Op, Value
from pliant.ir.loop_walk import operands
from pliant.ir.loops import (
    Binary,
    Bits,
    Check,
    Const,
    Index,
    Let,
    Load,
    Local,
    LoopValue,
    Read,
    Select,
    Stmt,
    Unary,
    as_dtype,
    dtype_of,
)
from pliant.ir.ops import VIEWS
from pliant.ir.types import DType
from pliant.lower.step import NumberCheck
from pliant.sym import Expr, as_expr, sym

Leaf = Callable[[Value, tuple[Expr, ...], LoopValue | None], LoopValue | None]


@dataclass(slots=True)
class Scope:
    """One block being emitted, and the variables that it introduces."""

    variables: frozenset[str]
    body: list[Stmt] = field(default_factory=list)
    memo: dict[tuple[Value, tuple[Expr, ...], LoopValue | None], LoopValue] = field(
        default_factory=dict
    )


def conjunction(a: LoopValue | None, b: LoopValue) -> LoopValue:
    return b if a is None or a == b else Binary("logical_and", a, b)


@dataclass(frozen=True, slots=True)
class BoundValue:
    """The axis that an index is checked against, and the op it is checked for.

    Where the axis is -1, `op` names a number that must be below the size.
    """

    op: str
    axis: int
    size: Expr
    loc: str

    @property
    def check(self) -> DataCheck:
        if self.axis < 0:
            most = self.size - 1
            ends = "0" if most == as_expr(0) else f"0 to {most}"
            message = f"{self.op} is {{value}}, must be {ends}"
            return DataCheck.at("size", message, self.loc)
        place = f"axis {self.axis} of size {self.size}"
        message = f"{self.op}: index {{value}} is outside {place}"
        return DataCheck.at("index", message, self.loc)


def _within(i: Expr, low: Expr, high: Expr) -> LoopValue:
    """low <= i < high, at run time."""
    return Binary(
        "logical_and",
        Binary("ge", Index(i), Index(low)),
        Binary("lt", Index(i), Index(high)),
    )


class Evaluator:
    """Computes region values.

    `leaf(value, index, where)` returns what the kernel loads instead of computing.
    `check` gives a run-time check its number. `below` are loaded indices that an
    earlier kernel has checked: none is negative, and all are below a size.
    """

    def __init__(
        self,
        producers: Mapping[Value, Op],
        leaf: Leaf,
        space: Space,
        check: NumberCheck,
        below: Mapping[Value, Expr] | None = None,
    ) -> None:
        self.below = below or {}
        self.producers, self.leaf = producers, leaf
        self.space, self.check = space, check
        self.scopes: list[Scope] = [Scope(frozenset())]
        self._ends: dict[Value, list[Expr]] = {}  # where a concat's operands end
        self._depends: dict[str, frozenset[str]] = {}  # a name -> loop variables
        self._count = 0

    # ---- scopes

    def push(self, variables: Iterable[str]) -> None:
        self.scopes.append(Scope(frozenset(variables)))

    def pop(self) -> list[Stmt]:
        return self.scopes.pop().body

    def emit(self, stmt: Stmt) -> None:
        """Appends to the innermost scope."""
        self.scopes[-1].body.append(stmt)

    def fresh(self, hint: str) -> str:
        self._count += 1
        return f"{hint}{self._count}"

    def declare(self, name: str) -> None:
        """Declares a name in the innermost scope; it varies with all its variables."""
        # The name is itself a variable of its scope. What reads it must not be hoisted
        # out, even where no loop variable prevents it (a reduction over everything).
        self.scopes[-1].variables |= {name}
        self._depends[name] = frozenset(
            v for scope in self.scopes for v in scope.variables
        )

    def _variables(self, value: LoopValue) -> frozenset[str]:
        names: set[str] = set()
        match value:
            case Index(dim):
                names.update(dim.symbols())
            case Load(_, index, _):
                names.update(s for i in index for s in i.symbols())
            case Read(name, _):
                names.add(name)
            case _:
                pass
        out: set[str] = set()
        for name in names:
            out |= self._depends.get(name, frozenset((name,)))
        for part in operands(value):
            out |= self._variables(part)
        return frozenset(out)

    def _scope_of(self, variables: frozenset[str]) -> Scope:
        for scope in reversed(self.scopes):
            if variables & scope.variables:
                return scope
        return self.scopes[0]

    def local(self, value: LoopValue) -> LoopValue:
        """The value under a name, hoisted as far out as its variables allow."""
        if isinstance(value, (Const, Read)):
            return value
        variables = self._variables(value)
        name, dtype = self.fresh("_v"), dtype_of(value)
        self._depends[name] = variables
        self._scope_of(variables).body.append(Local(name, dtype, value))
        return Read(name, dtype)

    def integer(self, value: LoopValue) -> Expr:
        """An integer value as a symbol that indices can use."""
        variables = self._variables(value)
        name = self.fresh("_i")
        self._depends[name] = variables
        self._scope_of(variables).body.append(Let(name, as_dtype(value, DType.I64)))
        return sym(name)

    # ---- values

    def value(
        self, v: Value, index: tuple[Expr, ...], where: LoopValue | None = None
    ) -> LoopValue:
        """The element of `v` at `index` in its compute type; defined only `where`."""
        key = (v, index, where)
        for scope in self.scopes:
            if key in scope.memo:
                return scope.memo[key]
        result = self.leaf(v, index, where)
        if result is not None:
            result = as_dtype(result, v.dtype.compute)
        else:
            result = self._op(self.producers[v], index, where)
        if not isinstance(result, Read):
            result = self.local(result)
        self._scope_of(self._variables(result)).memo[key] = result
        return result

    def _op(
        self, op: Op, index: tuple[Expr, ...], where: LoopValue | None
    ) -> LoopValue:
        if op.name in VIEWS and op.name != "rounded":
            return self.value(op.operands[0], pull(op, index, self.space), where)
        handler = _MOVES.get(op.name)
        if handler is not None:
            return handler(self, op, index, where)
        args = [self.value(v, index, where) for v in op.operands]
        match op.name, args:
            case "cast", [x]:
                dtype = op.dtype_attr("dtype")
                return as_dtype(as_dtype(x, dtype), dtype.compute)
            case "bitcast", [x]:
                stored = as_dtype(x, op.dtype_attr("source"))
                dtype = op.dtype_attr("dtype")
                return as_dtype(Bits(stored, dtype), dtype.compute)
            case "select", [c, x, y]:
                return Select(c, x, y)
            case name, [x]:
                return Unary(name, x)
            case name, [x, y]:
                return Binary(name, x, y)
        raise InternalError("lower", f"cannot evaluate {op.name} inside a kernel")

    def rounded(
        self, op: Op, index: tuple[Expr, ...], where: LoopValue | None
    ) -> LoopValue:
        """The element as memory holds it; what is loaded from there is so."""
        (x,) = op.operands
        found = self.value(x, index, where)
        if x not in self.producers:
            loaded = self.leaf(x, index, where)
            if loaded is not None and dtype_of(loaded) is x.dtype:
                return found
        return as_dtype(as_dtype(found, x.dtype), x.dtype.compute)

    # ---- data movement under a condition

    def between(self, i: Expr, low: Expr, high: Expr) -> LoopValue | bool:
        """low <= i < high: proved true or false, or as a run-time value."""
        above, below = self.space.at_least(i, low), self.space.at_least(high - 1, i)
        if above is False or below is False:
            return False
        conditions: list[LoopValue] = []
        if not above:
            conditions.append(Binary("ge", Index(i), Index(low)))
        if not below:
            conditions.append(Binary("lt", Index(i), Index(high)))
        if not conditions:
            return True
        whole = conditions[0]
        for other in conditions[1:]:
            whole = Binary("logical_and", whole, other)
        return self.local(whole)

    def concat(
        self, op: Op, index: tuple[Expr, ...], where: LoopValue | None
    ) -> LoopValue:
        axis = op.int_attr("axis")
        result: LoopValue | None = None
        pieces: list[tuple[LoopValue, LoopValue]] = []
        for operand, low, high in self.reached(op, index):
            inside = self.between(index[axis], low, high)
            if inside is not False:
                shifted = (*index[:axis], index[axis] - low, *index[axis + 1 :])
                if inside is True:
                    return self.value(operand, shifted, where)
                guard = self.local(conjunction(where, inside))
                pieces.append((inside, self.value(operand, shifted, guard)))
        for inside, piece in reversed(pieces):
            result = piece if result is None else Select(inside, piece, result)
        if result is None:  # an axis with no elements
            return number_of(0, op.result.dtype.compute)
        return result

    def reached(
        self, op: Op, index: tuple[Expr, ...]
    ) -> list[tuple[Value, Expr, Expr]]:
        """The operands of a concat that an index may be in, each with its range."""
        axis = op.int_attr("axis")
        ends = self._ends.get(op.result)
        if ends is None:
            sizes = (v.shape[axis] for v in op.operands)
            ends = self._ends[op.result] = [as_expr(0), *accumulate(sizes)]
        i, count = index[axis], len(op.operands)
        # Each answer rules out all operands before, or after, the end that was
        # compared.
        first = bisect_left(
            range(count - 1), True, key=lambda k: not self._behind(i, ends[k + 1])
        )
        last = bisect_left(
            range(first + 1, count), True, key=lambda k: self._before(i, ends[k])
        )
        kept = range(first, first + 1 + last)
        return [(op.operands[k], ends[k], ends[k + 1]) for k in kept]

    def _behind(self, i: Expr, end: Expr) -> bool:
        return self.space.at_least(i, end) is True

    def _before(self, i: Expr, begin: Expr) -> bool:
        return self.space.at_least(i, begin) is False

    def pad(
        self, op: Op, index: tuple[Expr, ...], where: LoopValue | None
    ) -> LoopValue:
        (x,) = op.operands
        inner, guard = [], where
        condition: LoopValue | None = None
        extents: dict[str, Expr] = {}  # extents of variables, where the operand is read
        for i, low, dim in zip(index, op.dims_attr("low"), x.shape, strict=True):
            inside = self.between(i - low, as_expr(0), dim)
            inner.append(i - low)
            if inside is True:
                continue
            name = (i - low).symbol
            if name is not None and name in self.space.extents:
                extents[name] = dim
            test: LoopValue = Const(False, DType.BOOL) if inside is False else inside
            condition = conjunction(condition, test)
            guard = conjunction(guard, test)
        if guard is not None:
            guard = self.local(guard)
        outer, self.space = self.space, self.space.narrowed(extents)
        body = self.value(x, tuple(inner), guard)
        self.space = outer
        if condition is None:
            return body
        filler = number_of(op.float_attr("value"), op.result.dtype.compute)
        return Select(condition, body, filler)

    def gathered(
        self, i: Value, at: tuple[Expr, ...], bound: BoundValue, where: LoopValue | None
    ) -> tuple[Expr, LoopValue | None]:
        """The index that `i` holds at a position, and whether it may be read.

        It is checked against its axis, unless `in_range` has done so already.
        """
        position = self.integer(self.value(i, at, where))
        if self._is_inside(i, bound.size):
            return position, where
        ok = self.local(_within(position, as_expr(0), bound.size))
        made = self.producers.get(i)
        if (
            made is None
            or made.name != "in_range"
            or made.dim_attr("size") != (bound.size)
        ):
            self._check(ok, bound.check, Index(position), where)
        return position, self.local(conjunction(where, ok))

    def _is_inside(self, i: Value, size: Expr) -> bool:
        """Whether all elements are known to be indices of an axis of this size."""
        while (made := self.producers.get(i)) is not None and made.name in VIEWS:
            i = made.operands[0]
        if made is not None and made.name == "iota":
            return made.result.shape[made.int_attr("axis")] == size
        return self.below.get(i) == size

    def _check(
        self,
        ok: LoopValue,
        check: DataCheck,
        shown: LoopValue | None,
        where: LoopValue | None,
    ) -> None:
        fine = ok
        if where is not None:
            fine = Binary("logical_or", Unary("logical_not", where), ok)
        scope = self._scope_of(self._variables(fine))
        # Outside all loops the code may not run, so there is nothing to check.
        if scope is self.scopes[0]:
            scope = self.scopes[-1]
        scope.body.append(Check(fine, self.check(check), shown))

    def divisor(
        self, op: Op, index: tuple[Expr, ...], where: LoopValue | None
    ) -> LoopValue:
        """The divisor, checked not to be 0."""
        (y,) = op.operands
        found = self.value(y, index, where)
        ok = self.local(Binary("ne", found, Const(0, y.dtype.compute)))
        message = f"{op.str_attr('of')}: division of an integer by 0"
        self._check(ok, DataCheck.at("division", message, op.loc), None, where)
        return found

    def in_range(
        self, op: Op, index: tuple[Expr, ...], where: LoopValue | None
    ) -> LoopValue:
        """The index, counted from the front and checked."""
        size = op.dim_attr("size")
        position = self.integer(self.value(op.operands[0], index, where))
        wraps = op.bool_attr("wraps")
        least = -size if wraps else as_expr(0)
        ok = self.local(_within(position, least, size))
        bound = BoundValue(op.str_attr("of"), op.int_attr("axis"), size, op.loc)
        self._check(ok, bound.check, Index(position), where)
        found: LoopValue = Index(position)
        if wraps:
            negative = Binary("lt", found, Const(0, DType.I64))
            found = Select(negative, Index(position + size), found)
        return as_dtype(found, op.result.dtype.compute)

    def index(
        self, op: Op, index: tuple[Expr, ...], where: LoopValue | None
    ) -> LoopValue:
        x, *indices = op.operands
        rank = indices[0].type.rank
        position: list[Expr] = []
        guard = where
        for k, i in enumerate(indices):
            bound = BoundValue("index", k, x.shape[k], op.loc)
            at, guard = self.gathered(i, index[:rank], bound, guard)
            position.append(at)
        return self.value(x, (*position, *index[rank:]), guard)

    def take_along(
        self, op: Op, index: tuple[Expr, ...], where: LoopValue | None
    ) -> LoopValue:
        x, i = op.operands
        axis = op.int_attr("axis")
        bound = BoundValue("gather", axis, x.shape[axis], op.loc)
        at, guard = self.gathered(i, index, bound, where)
        return self.value(x, (*index[:axis], at, *index[axis + 1 :]), guard)

    # ---- values without operands

    def full(
        self, op: Op, index: tuple[Expr, ...], where: LoopValue | None
    ) -> LoopValue:
        value = op.attr("value")
        assert isinstance(value, (bool, int, float))
        return number_of(value, op.result.dtype.compute)

    def iota(
        self, op: Op, index: tuple[Expr, ...], where: LoopValue | None
    ) -> LoopValue:
        position = Index(index[op.int_attr("axis")])
        return as_dtype(position, op.result.dtype.compute)

    def dim_value(
        self, op: Op, index: tuple[Expr, ...], where: LoopValue | None
    ) -> LoopValue:
        return as_dtype(Index(op.dim_attr("value")), op.result.dtype.compute)


class Breaks(Evaluator):
    """Finds, per variable, the positions at which a concat changes operand.

    A dry run: nothing is emitted, and every operand is visited once, unconditionally.
    """

    def __init__(self, producers: Mapping[Value, Op], leaf: Leaf, space: Space) -> None:
        super().__init__(producers, leaf, space, lambda check: 0)
        self.found: dict[str, set[Expr]] = {}

    def value(
        self, v: Value, index: tuple[Expr, ...], where: LoopValue | None = None
    ) -> LoopValue:
        return super().value(v, index)

    def concat(
        self, op: Op, index: tuple[Expr, ...], where: LoopValue | None
    ) -> LoopValue:
        axis = op.int_attr("axis")
        for k, (operand, low, _) in enumerate(self.reached(op, index)):
            shifted = (*index[:axis], index[axis] - low, *index[axis + 1 :])
            self.value(operand, shifted)
            if k:
                self._note(index[axis], low)
        return number_of(0, op.result.dtype.compute)

    def _note(self, i: Expr, at: Expr) -> None:
        """i == var + offset: the operand changes at var == at - offset."""
        variables = {v for scope in self.scopes for v in scope.variables}
        for name in i.symbols():
            offset = i - sym(name)
            if not variables & {*offset.symbols()} and name not in offset.symbols():
                self.found.setdefault(name, set()).add(at - offset)


def number_of(value: float, dtype: DType) -> Const:
    if dtype is DType.BOOL:
        return Const(bool(value), dtype)
    return Const(float(value) if dtype.is_float else int(value), dtype)


_Handler = Callable[[Evaluator, Op, tuple[Expr, ...], LoopValue | None], LoopValue]
_MOVES: dict[str, _Handler] = {
    "concat": lambda cx, *place: cx.concat(*place),
    "pad": Evaluator.pad,
    "rounded": Evaluator.rounded,
    "in_range": Evaluator.in_range,
    "divisor": Evaluator.divisor,
    "index": Evaluator.index,
    "take_along": Evaluator.take_along,
    "full": Evaluator.full,
    "iota": Evaluator.iota,
    "dim_value": Evaluator.dim_value,
}
