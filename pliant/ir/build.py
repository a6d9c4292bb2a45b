"""Builds graphs: every op is checked and typed as it is added.

    b = Builder()
    x = b.param("x", tensor(DType.F32, sym("n"), 8))
    y = b.binary("add", x, b.scalar(1.0, DType.F32))     # broadcasts the scalar
    graph = b.finish("main", [y])                         # constraints: what to check

Conditions that a shape rule could not prove are collected in `guards`, and are facts
from then on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from pliant.errors import ModelError
from pliant.ir.graph import Constant, Graph, Names, Op, Value, names_of
from pliant.ir.interp_numbers import stored
from pliant.ir.ops import OPS, InferContext, infer
from pliant.ir.types import DType, TensorType
from pliant.sym import DimLike, Expr, Facts, Guard, as_expr, sym

Number = bool | int | float
Shape = Sequence[DimLike]


def facts_of(graph: Graph) -> Facts:
    """What the graph's constraints state about its symbols.

    A dim of a parameter is at least 0; for an integer, only constraints can say so.
    """
    facts = Facts()
    dims = {dim for param in graph.params for dim in param.shape}
    for name in graph.sizes:
        if sym(name) not in dims:
            facts = facts.with_range(name, None, None)
    for guard in graph.constraints:
        facts = facts.assume(guard.cond)
    return facts


def symbols_of(graph: Graph) -> set[str]:
    """Every symbol in the types of a graph, regions included."""
    found = set(graph.sizes)
    values = [*graph.params, *(v for op in graph.ops for v in op.results)]
    for value in values:
        found.update(name for dim in value.shape for name in dim.symbols())
    for op in graph.ops:
        found.update(*map(symbols_of, op.regions))
    return found


class Builder:
    """A graph under construction."""

    def __init__(
        self,
        facts: Facts | None = None,
        names: Names | None = None,
        *,
        callees: Mapping[str, Graph] | None = None,
    ) -> None:
        self.names = Names() if names is None else names
        self._symbols: set[str] = set()  # in use; a fresh size gets another name
        self.guards: list[Guard] = []
        self.constants: dict[str, Constant] = {}
        self.params: list[Value] = []
        self.ops: list[Op] = []
        self.most_ops = sys.maxsize  # for sources that nobody vouches for
        self.sized = 0  # ops whose dims are known not to be negative
        self._loaded: dict[str, Value] = {}  # constants of this graph
        self.loc = ""
        self._cx = InferContext(
            Facts() if facts is None else facts,
            guards=self.guards,
            fresh=self.fresh_symbol,
            callees={} if callees is None else callees,
        )

    @classmethod
    def within(cls, graph: Graph) -> Builder:
        """An empty builder of ops for `graph`: same facts, no name used twice."""
        builder = cls(facts_of(graph), Names(names_of(graph)))
        builder._symbols = symbols_of(graph)
        return builder

    def child(self) -> Builder:
        """A builder for a region: it sees the facts and shares the names."""
        region = Builder(self.facts, self.names, callees=self._cx.callees)
        region._symbols, region.constants = self._symbols, self.constants
        region.loc, region.most_ops = self.loc, self.most_ops
        return region

    @property
    def facts(self) -> Facts:
        return self._cx.facts

    @facts.setter
    def facts(self, facts: Facts) -> None:
        self._cx.facts = facts

    @contextmanager
    def at(self, loc: str) -> Iterator[None]:
        """Ops emitted inside get the location `loc`."""
        before, self.loc = self.loc, loc
        try:
            yield
        finally:
            self.loc = before

    # ---- definitions

    def param(self, name: str, type: TensorType) -> Value:
        self._note_symbols(type)
        value = Value(self.names.fresh(name), type)
        self.params.append(value)
        return value

    def fresh_symbol(self, hint: str = "u") -> Expr:
        """A symbol that nothing in this function uses."""
        number = 0
        while f"{hint}{number}" in self._symbols:
            number += 1
        self._symbols.add(f"{hint}{number}")
        return sym(f"{hint}{number}")

    def _note_symbols(self, type: TensorType) -> None:
        self._symbols.update(name for dim in type.shape for name in dim.symbols())

    def emit(
        self,
        op_name: str,
        /,
        *operands: Value,
        loc: str = "",
        regions: Sequence[Graph] = (),
        result_types: Sequence[TensorType] = (),
        **attrs: object,
    ) -> Value:
        """Adds an op of one result."""
        results = self.emit_multi(
            op_name,
            *operands,
            loc=loc,
            regions=regions,
            result_types=result_types,
            **attrs,
        )
        (value,) = results
        return value

    def emit_multi(
        self,
        op_name: str,
        /,
        *operands: Value,
        loc: str = "",
        regions: Sequence[Graph] = (),
        result_types: Sequence[TensorType] = (),
        **attrs: object,
    ) -> tuple[Value, ...]:
        """Adds an op. `result_types` only for ops whose results are stated."""
        if op_name not in OPS:
            raise KeyError(f"there is no op {op_name}")
        if len(self.ops) >= self.most_ops:
            raise ModelError(f"{loc or self.loc}: more than {self.most_ops} ops")
        given = OPS[op_name].normalise(attrs)
        draft = Op(op_name, operands, given, (), tuple(regions), loc or self.loc)
        self._cx.declared = tuple(result_types)
        types = infer(self._cx, draft)
        results = tuple(Value(self.names.fresh(op_name), t) for t in types)
        for type in types:
            self._note_symbols(type)
        self.ops.append(draft.replace(results=results))
        return results

    def append(self, op: Op) -> None:
        """Adds a finished op as it is: it was checked where it was built."""
        self.ops.append(op)

    def finish(
        self, name: str, results: Iterable[Value], sizes: Sequence[str] = ()
    ) -> Graph:
        return Graph(
            name,
            tuple(self.params),
            tuple(self.ops),
            tuple(results),
            tuple(sizes),
            tuple(self.guards),
        )

    # ---- shapes

    def require_equal(
        self, a: DimLike, b: DimLike, why: str, loc: str = "", op: str = "shape"
    ) -> Expr:
        """Requires a == b; returns the constant one of them, else `a`."""
        self._cx.op, self._cx.loc = op, loc or self.loc
        return self._cx.require_equal(as_expr(a), as_expr(b), why)

    def same(self, a: DimLike, b: DimLike) -> bool:
        """Whether the dims are provably equal."""
        return self._cx.proves_equal(as_expr(a), as_expr(b))

    def same_shape(self, a: Shape, b: Shape) -> bool:
        return len(a) == len(b) and all(map(self.same, a, b))

    def broadcast_shapes(self, *shapes: Shape) -> tuple[Expr, ...]:
        """NumPy's rule; dims that are neither equal nor the constant 1 must agree."""
        rank = max(map(len, shapes), default=0)
        out = [as_expr(1)] * rank
        for shape in shapes:
            for i, size in enumerate(shape, rank - len(shape)):
                dim = as_expr(size)
                if out[i] == 1:
                    out[i] = dim
                elif dim != 1:
                    why = f"broadcast at dim {i - rank}"
                    out[i] = self.require_equal(out[i], dim, why, op="broadcast")
        return tuple(out)

    def axis(self, axis: int, rank: int) -> int:
        """Counted from the front."""
        if not -rank <= axis < rank:
            raise IndexError(f"axis {axis} is outside rank {rank}")
        return axis % rank

    def axes(self, axes: Iterable[int] | None, rank: int) -> tuple[int, ...]:
        """Sorted and counted from the front; None means all."""
        if axes is None:
            return tuple(range(rank))
        return tuple(sorted({self.axis(a, rank) for a in axes}))

    # ---- create

    def constant(self, constant: Constant) -> Value:
        """The value of a constant; one op per constant in each graph."""
        if constant.name not in self._loaded:
            self.constants[constant.name] = constant
            self._loaded[constant.name] = self.emit(
                "constant", name=constant.name, result_types=[constant.type]
            )
        return self._loaded[constant.name]

    def full(self, value: Number, dtype: DType, shape: Shape = ()) -> Value:
        return self.emit(
            "full", value=number_as(value, dtype), dtype=dtype, shape=tuple(shape)
        )

    def scalar(self, value: Number, dtype: DType) -> Value:
        """A rank-0 tensor."""
        return self.full(value, dtype)

    def full_like(self, x: Value, value: Number, dtype: DType | None = None) -> Value:
        return self.full(value, dtype or x.dtype, x.shape)

    def iota(self, shape: Shape, axis: int = 0, dtype: DType = DType.I64) -> Value:
        axis = self.axis(axis, len(shape))
        return self.emit("iota", axis=axis, dtype=dtype, shape=tuple(shape))

    def dim_value(self, value: DimLike, dtype: DType = DType.I64) -> Value:
        return self.emit("dim_value", value=value, dtype=dtype)

    # ---- indices

    def in_range(
        self, index: Value, size: DimLike, *, wraps: bool, of: str, axis: int
    ) -> Value:
        """An index of an axis, checked at run time; the result is an i64."""
        wide = index if index.dtype is DType.I64 else self.cast(index, DType.I64)
        return self.emit("in_range", wide, size=size, wraps=wraps, of=of, axis=axis)

    def divisor(self, y: Value, of: str) -> Value:
        """Integers, checked at run time not to be 0."""
        return self.emit("divisor", y, of=of)

    def flat_place(self, indices: Sequence[Value], shape: Sequence[Expr]) -> Value:
        """Row-major positions in `shape`; each index is in range, and so is the sum."""
        place: Value | None = None
        for index, size in zip(indices, shape, strict=True):
            if place is not None:
                index = self.binary(
                    "add", self.binary("mul", place, self.dim_value(size)), index
                )
            place = index
        return self.scalar(0, DType.I64) if place is None else place

    # ---- move

    def broadcast_to(self, x: Value, shape: Shape) -> Value:
        """Aligned at the last dim."""
        dims = tuple(map(as_expr, shape))
        if len(dims) < x.type.rank:
            raise ValueError(f"cannot broadcast {x.type} to lower rank {len(dims)}")
        return self.broadcast(x, dims, range(len(dims) - x.type.rank, len(dims)))

    def broadcast(self, x: Value, shape: Shape, axes: Iterable[int]) -> Value:
        """Dim i of x becomes dim axes[i]; x itself if that changes nothing."""
        if self.same_shape(x.shape, shape):
            return x
        return self.emit("broadcast", x, shape=tuple(shape), axes=tuple(axes))

    def stretch_to(self, x: Value, shape: Shape) -> Value:
        """Aligned at the last dim; whether a dim is 1 is only known at the call."""
        if self.same_shape(x.shape, shape):
            return x
        axes = tuple(range(len(shape) - x.type.rank, len(shape)))
        return self.emit("stretch", x, shape=tuple(shape), axes=axes)

    def reshape(self, x: Value, shape: Shape) -> Value:
        if self.same_shape(x.shape, shape):
            return x
        return self.emit("reshape", x, shape=tuple(shape))

    def transpose(self, x: Value, perm: Sequence[int]) -> Value:
        order = tuple(self.axis(p, x.type.rank) for p in perm)
        if order == tuple(range(x.type.rank)):
            return x
        return self.emit("transpose", x, perm=order)

    def swap(self, x: Value, a: int, b: int) -> Value:
        """Transposes two dims."""
        perm = list(range(x.type.rank))
        perm[a], perm[b] = perm[b], perm[a]
        return self.transpose(x, perm)

    def unsqueeze(self, x: Value, axis: int) -> Value:
        """A new dim of size 1 at `axis` of the result."""
        axis = self.axis(axis, x.type.rank + 1)
        return self.reshape(x, (*x.shape[:axis], 1, *x.shape[axis:]))

    def squeeze(self, x: Value, axis: int) -> Value:
        """Drops a dim, which must be 1."""
        axis = self.axis(axis, x.type.rank)
        self.require_equal(x.shape[axis], 1, "a dropped dim must be 1", op="squeeze")
        return self.reshape(x, x.shape[:axis] + x.shape[axis + 1 :])

    def slice_axis(
        self, x: Value, axis: int, start: DimLike, size: DimLike, step: int = 1
    ) -> Value:
        axis = self.axis(axis, x.type.rank)
        if start == 0 and step == 1 and self.same(size, x.shape[axis]):
            return x
        starts: list[DimLike] = [0] * x.type.rank
        steps = [1] * x.type.rank
        shape: list[DimLike] = list(x.shape)
        starts[axis], shape[axis], steps[axis] = start, size, step
        return self.emit("slice", x, starts=starts, shape=shape, steps=steps)

    def concat(self, values: Sequence[Value], axis: int) -> Value:
        if len(values) == 1:
            return values[0]
        return self.emit("concat", *values, axis=self.axis(axis, values[0].type.rank))

    # ---- compute

    def unary(self, op: str, x: Value, loc: str = "") -> Value:
        return self.emit(op, x, loc=loc)

    def binary(self, op: str, x: Value, y: Value, loc: str = "") -> Value:
        """Broadcasts both to one shape; the dtypes must already agree."""
        with self.at(loc or self.loc):
            shape = self.broadcast_shapes(x.shape, y.shape)
            return self.emit(
                op, self.broadcast_to(x, shape), self.broadcast_to(y, shape)
            )

    def select(self, cond: Value, x: Value, y: Value, loc: str = "") -> Value:
        with self.at(loc or self.loc):
            shape = self.broadcast_shapes(cond.shape, x.shape, y.shape)
            wide = [self.broadcast_to(v, shape) for v in (cond, x, y)]
            return self.emit("select", *wide)

    def cast(self, x: Value, dtype: DType) -> Value:
        return x if x.dtype is dtype else self.emit("cast", x, dtype=dtype)

    def bitcast(self, x: Value, dtype: DType) -> Value:
        """The same bits as another type of that size."""
        if x.dtype is dtype:
            return x
        return self.emit("bitcast", x, source=x.dtype, dtype=dtype)

    def reduce(
        self,
        op: str,
        x: Value,
        axes: Iterable[int] | None = None,
        keepdims: bool = False,
    ) -> Value:
        """Over all axes if None; x itself if over none."""
        which = self.axes(axes, x.type.rank)
        if not which:
            return x
        return self.emit("reduce", x, op=op, axes=which, keepdims=keepdims)

    def mean(self, x: Value, axes: Iterable[int] | None, keepdims: bool) -> Value:
        """Of floats; over no elements it is NaN, as in torch."""
        which = self.axes(axes, x.type.rank)
        count = as_expr(1)
        for axis in which:
            count = count * x.shape[axis]
        if count.is_const:
            size = self.scalar(count.value, x.dtype)
        else:
            size = self.dim_value(count, x.dtype)
        return self.binary("div", self.reduce("sum", x, which, keepdims), size)

    def matmul(self, a: Value, b: Value, loc: str = "") -> Value:
        """torch.matmul: vectors count as a row and a column, batches broadcast."""
        with self.at(loc or self.loc):
            row, column = a.type.rank == 1, b.type.rank == 1
            a = self.unsqueeze(a, 0) if row else a
            b = self.unsqueeze(b, 1) if column else b
            rank = max(a.type.rank, b.type.rank)
            out = self.emit("matmul", self._lift(a, rank), self._lift(b, rank))
            if a.dtype is b.dtype:  # torch's sums wrap in the type of the operands
                out = self.cast(out, a.dtype)
            if column:
                out = self.reshape(out, out.shape[:-1])
            if row:
                shape = out.shape
                last = len(shape) - 1 if column else len(shape) - 2
                out = self.reshape(out, shape[:last] + shape[last + 1 :])
            return out

    def _lift(self, x: Value, rank: int) -> Value:
        ones = (1,) * (rank - x.type.rank)
        return self.reshape(x, (*ones, *x.shape))


def number_as(value: Number, dtype: DType) -> Number:
    """The number as an element of that type."""
    if dtype is DType.BOOL:
        return bool(value)
    return stored(float(value), dtype) if dtype.is_float else int(value)
