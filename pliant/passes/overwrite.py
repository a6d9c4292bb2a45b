"""Buffers of which a call changes a part: only that part is written.

    %a = slice(%cache) {starts = [0], ..}
    %b = slice(%cache) {starts = [p + n], ..}          %new = overwrite(%cache, %x)
    %new = concat(%a, %x, %b)                     ->          {starts = [p]}
    return %y, %new                                    return %y, %new

`update` then lets the buffer's memory be both the first operand and the result, and no
element is touched that stays what it is. The same for rows at computed places, where an
axis that is not the first was moved to the front and back: they are written along that
axis. A concat is replaced if all parts but those written are proved to be the buffer's
own elements in their places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pliant.context import Context
from pliant.ir.access import is_one
from pliant.ir.graph import Attr, Graph, Names, Op, Value, names_of, substitute
from pliant.ir.ops_library import LEVELS, window_levels
from pliant.ir.types import TensorType, contiguous_strides
from pliant.ir.views import resolve
from pliant.sym import Expr, Facts, as_expr, eq, product


@dataclass(frozen=True, slots=True)
class _Window:
    """A value that is written into a buffer: where it starts, and along which axes."""

    value: Value
    starts: tuple[Expr, ...]
    axes: tuple[
        int | None, ...
    ]  # the buffer's axis for each of the value's; None: extent 1


@dataclass(frozen=True, slots=True)
class _PlacedRows:
    """Rows at computed places along some axes of a buffer."""

    op: Op  # the scatter_rows of the graph
    first: int  # the first of the axes, and their number
    count: int


@dataclass(frozen=True, slots=True)
class _Write:
    base: Value
    parts: tuple[_Window, ...] | _PlacedRows


@dataclass(slots=True)
class _Overwrite:
    facts: Facts
    producers: dict[Value, Op]
    params: frozenset[Value]
    found: dict[Value, _Write] = field(default_factory=dict)

    def serves(self, value: Value) -> bool:
        """Whether a value is a buffer with parts overwritten, or the buffer."""
        if value in self.params or value in self.found:
            return True
        op = self.producers.get(value)
        write = None
        if op is not None and op.name == "concat":
            write = self.windows(op)
        elif op is not None and op.name in ("transpose", "reshape"):
            write = self.rows(op)
        if write is None or not self.serves(write.base):
            return False
        self.found[value] = write
        return True

    # ---- windows

    def windows(self, op: Op) -> _Write | None:
        bases: dict[Value, None] = {}
        for part in op.operands:
            view = resolve(part, self.producers, self.facts)
            if view is not None and self.same(view.base, op.result):
                bases[view.base] = None
        axes, zero = tuple(range(op.result.type.rank)), as_expr(0)
        whole = _Window(op.result, (zero,) * len(axes), axes)
        for base in bases:
            parts = self.written(whole, base)
            if parts != [whole] and all(_fits(part, base) for part in parts):
                return _Write(base, tuple(parts))
        return None

    def same(self, one: Value, other: Value) -> bool:
        """Whether two values have the same type, however their sizes are written."""
        if one.dtype is not other.dtype or one.type.rank != other.type.rank:
            return False
        pairs = zip(one.shape, other.shape, strict=True)
        return all(self.equal(a, b) for a, b in pairs)

    def written(self, at: _Window, base: Value) -> list[_Window]:
        """The parts of a window that are not the buffer's own; itself if all is new."""
        if self.is_own(at, base):
            return []
        op = self.producers.get(at.value)
        if op is not None and op.name == "reshape":
            inner = self.without_ones(at, op.operands[0])
            if inner is not None:
                parts = self.written(inner, base)
                return [at] if parts == [inner] else parts
        if op is None or op.name != "concat":
            return [at]
        axis = op.int_attr("axis")
        place = at.axes[axis]
        if place is None:
            return [at]
        offset, parts, own = at.starts[place], list[_Window](), False
        for part in op.operands:
            starts = (*at.starts[:place], offset, *at.starts[place + 1 :])
            inner = _Window(part, starts, at.axes)
            found = self.written(inner, base)
            own |= found != [inner]
            parts += found
            offset = offset + part.shape[axis]
        return parts if own else [at]

    def is_own(self, at: _Window, base: Value) -> bool:
        view = resolve(at.value, self.producers, self.facts)
        if view is None or view.base is not base:
            return False
        strides = contiguous_strides(base.shape)
        offset = as_expr(0)
        for start, stride in zip(at.starts, strides, strict=True):
            offset = offset + start * stride
        if not self.equal(view.offset, offset):
            return False
        return all(
            is_one(dim) or (axis is not None and stride == strides[axis])
            for dim, stride, axis in zip(view.shape, view.strides, at.axes, strict=True)
        )

    def without_ones(self, at: _Window, inner: Value) -> _Window | None:
        """The same window of a value that has other axes of one element."""
        kept = [k for k, dim in enumerate(at.value.shape) if not is_one(dim)]
        other = [k for k, dim in enumerate(inner.shape) if not is_one(dim)]
        if len(kept) != len(other):
            return None
        axes: list[int | None] = [None] * inner.type.rank
        for here, there in zip(kept, other, strict=True):
            if not self.equal(at.value.shape[here], inner.shape[there]):
                return None
            axes[there] = at.axes[here]
        return _Window(inner, at.starts, tuple(axes))

    def equal(self, one: Expr, other: Expr) -> bool:
        return self.facts.prove(eq(one, other)) is True

    # ---- rows

    def rows(self, op: Op) -> _Write | None:
        """transpose(reshape(scatter_rows(reshape(transpose(x)), ..))), and back."""
        rank = op.result.type.rank
        back = list(range(rank))
        if op.name == "transpose":
            back = list(op.ints_attr("perm"))
            above = self.producers.get(op.operands[0])
            if above is None:
                return None
            op = above
        if op.name != "reshape":
            return None
        scatter = self.producers.get(op.operands[0])
        if scatter is None or scatter.name != "scatter_rows":
            return None
        front = self.producers.get(scatter.operands[0])
        if front is None or front.name != "reshape" or scatter.result.type.rank != 2:
            return None
        base, order = front.operands[0], list(range(rank))
        moved = self.producers.get(base)
        if moved is not None and moved.name == "transpose":
            base, order = moved.operands[0], list(moved.ints_attr("perm"))
        if [order.index(k) for k in range(base.type.rank)] != back:
            return None
        rows = scatter.operands[0].shape[0]
        first = order[0] if order else 0
        for count in range(1, rank + 1):
            axes = list(range(first, first + count))
            rest = [k for k in range(rank) if k not in axes]
            there = product(base.shape[first : first + count])
            if order == [*axes, *rest] and first > 0 and there == rows:
                return _Write(base, _PlacedRows(scatter, first, count))
        return None


def _shape(part: _Window, rank: int) -> tuple[Expr, ...]:
    """The part's sizes along the axes of the buffer."""
    shape = [as_expr(1)] * rank
    for dim, axis in zip(part.value.shape, part.axes, strict=True):
        if axis is not None:
            shape[axis] = dim
    return tuple(shape)


def _fits(part: _Window, base: Value) -> bool:
    shape = _shape(part, base.type.rank)
    return len(window_levels(base.shape, shape, part.starts)) <= LEVELS


# ---- the graph


@dataclass(slots=True)
class _Emit:
    names: Names
    ops: list[Op] = field(default_factory=list)
    loc: str = ""

    def op(
        self, name: str, operands: Sequence[Value], kind: TensorType, **attrs: Attr
    ) -> Value:
        result = Value(self.names.fresh(name), kind)
        given = tuple(attrs.items())
        self.ops.append(Op(name, tuple(operands), given, (result,), (), self.loc))
        return result

    def reshape(self, x: Value, shape: tuple[Expr, ...]) -> Value:
        if x.shape == shape:
            return x
        return self.op("reshape", (x,), TensorType(x.dtype, shape), shape=shape)

    def windows(self, base: Value, parts: Sequence[_Window]) -> Value:
        for part in parts:
            new = self.reshape(part.value, _shape(part, base.type.rank))
            base = self.op("overwrite", (base, new), base.type, starts=part.starts)
        return base

    def rows(self, base: Value, write: _PlacedRows) -> Value:
        _, places, updates = write.op.operands
        end = write.first + write.count
        outer, inner = product(base.shape[: write.first]), product(base.shape[end:])
        count, rows = places.shape[0], product(base.shape[write.first : end])
        x = self.reshape(base, (outer, rows, inner))
        u = self.reshape(updates, (count, outer, inner))
        swapped = TensorType(base.dtype, (outer, count, inner))
        u = self.op("transpose", (u,), swapped, perm=(1, 0, 2))
        new = self.op("scatter_rows", (x, places, u), x.type)
        return self.reshape(new, base.shape)


def overwrite(graph: Graph, cx: Context) -> Graph:
    """The graph with changed buffers as writes to them."""
    if not cx.stores:
        return graph
    params = {v.name: v for v in graph.params}
    stored = frozenset(params[name] for name, _ in cx.stores)
    search = _Overwrite(cx.facts(graph), graph.producers(), stored)
    for _, number in cx.stores:
        search.serves(graph.results[number])
    if not search.found:
        return graph
    emit, mapping = _Emit(Names(names_of(graph))), dict[Value, Value]()
    for op in graph.ops:
        emit.ops.append(substitute(op, mapping))
        write = search.found.get(op.results[0]) if op.results else None
        if write is None:
            continue
        emit.loc = op.loc
        base = mapping.get(write.base, write.base)
        if isinstance(write.parts, _PlacedRows):
            new = emit.rows(base, write.parts)
        else:
            parts = [
                _Window(mapping.get(p.value, p.value), p.starts, p.axes)
                for p in write.parts
            ]
            new = emit.windows(base, parts)
        mapping[op.result] = emit.reshape(new, op.result.shape)
    results = tuple(mapping.get(v, v) for v in graph.results)
    return graph.replace(ops=tuple(emit.ops), results=results)
