"""Convolutions keep channels last, from the first of them to the last.

    %y = conv(%x, %w)                     %t = transpose(%x) {perm = (0, 2, 3, 1)}
    %r = maximum(%y, %zero)        ->     %c = conv_last(%t, %w)
    %z = conv(%r, %v)                     %m = maximum(%c, %zero_last)
                                          %d = conv_last(%m, %v)
                                          %z = transpose(%d) {perm = (0, 3, 1, 2)}

With channels last a convolution is a product of pixels and packed weights; with a 1x1
window it is exactly that. Ops between two convolutions are computed in the order of
axes in which their operands are held. A held value is a transpose of the graph's value,
and a transpose in the graph only changes the permutation. It is undone where an op
needs the graph's own order.

The pass applies only where it pays: the multiply-adds that become faster are weighed
against the elements that are moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pliant.context import Context
from pliant.ir.access import is_one, segments
from pliant.ir.build import Builder
from pliant.ir.graph import Graph, Names, Op, Value, names_of
from pliant.ir.ops import Trait, has_trait
from pliant.sym import Expr, product

# Moving one element to another order takes as long as channels last saves on this many
# multiply-adds.
PACE = 900
SIZE = 64  # assumed for a symbolic dim when costs are compared
FREE = frozenset({"broadcast", "full", "iota"})

Perm = tuple[int, ...]


def _inverse(perm: Perm) -> Perm:
    return tuple(perm.index(k) for k in range(len(perm)))


def _is_identity(perm: Perm) -> bool:
    return perm == tuple(range(len(perm)))


def _last(rank: int) -> Perm:
    return (0, *range(2, rank), 1)


@dataclass(frozen=True, slots=True)
class _Held:
    """A value of the graph in another order: axis k of `value` is its axis perm[k]."""

    value: Value
    perm: Perm

    def position(self, axis: int) -> int:
        return self.perm.index(axis)

    def positions(self, axes: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted(map(self.position, axes)))

    def moved(self, entries: Sequence[Any]) -> tuple[Any, ...]:
        """Per-axis entries of the graph's value, permuted to the order held."""
        return tuple(entries[axis] for axis in self.perm)


@dataclass(slots=True)
class _Layout:
    builder: Builder
    producers: dict[Value, Op]
    plain: dict[Value, Value] = field(default_factory=dict)  # in the graph's own order
    held: dict[Value, _Held] = field(default_factory=dict)
    ordered: dict[tuple[Value, Perm], Value] = field(default_factory=dict)
    saved: int = 0  # multiply-adds that become faster
    moved: int = 0  # elements that are moved

    # ---- values in some order

    def own(self, value: Value) -> Value:
        """The value in the graph's order."""
        if value in self.plain:
            return self.plain[value]
        held, op = self.held.get(value), self.producers.get(value)
        if held is not None:
            made = self._transpose(held.value, _inverse(held.perm))
        elif op is not None and op.name in FREE:
            made = self._again(op, [self.own(v) for v in op.operands])
        else:
            made = value
        self.plain[value] = made
        return made

    def order(self, value: Value, perm: Perm) -> Value:
        """The value with its axes in the order of `perm`."""
        if _is_identity(perm):
            return self.own(value)
        held = self.held.get(value)
        if held is not None and held.perm == perm:
            return held.value
        if (value, perm) not in self.ordered:
            self.ordered[value, perm] = self._ordered(value, perm, held)
        return self.ordered[value, perm]

    def _ordered(self, value: Value, perm: Perm, held: _Held | None) -> Value:
        op = self.producers.get(value)
        if held is not None:
            return self._transpose(held.value, tuple(map(held.position, perm)))
        if op is not None and op.name == "transpose":
            outer = op.ints_attr("perm")
            return self.order(op.operands[0], tuple(outer[axis] for axis in perm))
        if op is None or op.name not in FREE:
            return self._transpose(self.own(value), perm)
        shape = tuple(value.shape[axis] for axis in perm)
        if op.name == "full":
            return self._again(op, (), shape=shape)
        if op.name == "iota":
            axis = perm.index(op.int_attr("axis"))
            return self._again(op, (), shape=shape, axis=axis)
        places = [perm.index(axis) for axis in op.ints_attr("axes")]
        order = sorted(range(len(places)), key=places.__getitem__)
        source = self.order(op.operands[0], tuple(order))
        return self._again(op, (source,), shape=shape, axes=tuple(sorted(places)))

    def _transpose(self, value: Value, perm: Perm) -> Value:
        if _is_identity(perm):
            return value
        self.moved += _size(value.shape)
        return self.builder.transpose(value, perm)

    def _again(self, op: Op, operands: Sequence[Value], **changes: object) -> Value:
        """The op with other operands and some attributes changed."""
        attrs: dict[str, Any] = {**dict(op.attrs), **changes}
        with self.builder.at(op.loc):
            return self.builder.emit(op.name, *operands, **attrs)

    def hold(self, result: Value, value: Value, perm: Perm) -> None:
        if _is_identity(perm):
            self.plain[result] = value
        else:
            self.held[result] = _Held(value, perm)

    # ---- ops

    def visit(self, op: Op) -> None:
        if op.name in FREE:
            return
        rule = _RULES.get(op.name)
        if rule is None and has_trait(op, Trait.ELEMENTWISE):
            rule = _elementwise
        if rule is not None and rule(self, op):
            return
        operands = tuple(self.own(v) for v in op.operands)
        self.builder.append(op.replace(operands=operands))

    def first_held(self, op: Op) -> _Held | None:
        """The first operand that is held in another order."""
        found = (self.held.get(v) for v in op.operands if v not in self.plain)
        return next((held for held in found if held is not None), None)


def _size(shape: Sequence[Expr]) -> int:
    dims = product(shape)
    return dims.evaluate(dict.fromkeys(dims.symbols(), SIZE))


# A rule computes the op on held values and returns True, or returns False to leave it
# to the graph's order.
_Rule = Callable[[_Layout, Op], bool]


def _conv(to: _Layout, op: Op) -> bool:
    x, w = op.operands
    if op.int_attr("groups") != 1 or not op.result.dtype.is_float:
        return False
    perm, b = _last(x.type.rank), to.builder
    image, weight = to.order(x, perm), to.own(w)
    to.saved += _size(op.result.shape) * _size(w.shape[1:])
    with b.at(op.loc):
        if _is_pointwise(op):
            ones = (1,) * (x.type.rank - 2)
            matrix = b.reshape(weight, (*ones, *w.shape[:2]))
            rank = matrix.type.rank
            made = b.emit("matmul", image, b.swap(matrix, rank - 2, rank - 1))
        else:
            names = ("stride", "low", "high", "dilation")
            attrs: dict[str, Any] = {name: op.ints_attr(name) for name in names}
            made = b.emit("conv_last", image, weight, **attrs)
    to.hold(op.result, made, perm)
    return True


def _is_pointwise(op: Op) -> bool:
    """Whether every output pixel depends on the input pixel at the same place only."""
    window = op.operands[1].shape[2:]
    padding = (*op.ints_attr("low"), *op.ints_attr("high"))
    steps = op.ints_attr("stride")
    return all(map(is_one, window)) and not any(padding) and set(steps) == {1}


def _elementwise(to: _Layout, op: Op) -> bool:
    held = to.first_held(op)
    if held is None:
        return False
    operands = [to.order(v, held.perm) for v in op.operands]
    to.hold(op.result, to._again(op, operands), held.perm)
    return True


def _concat(to: _Layout, op: Op) -> bool:
    held = to.first_held(op)
    if held is None:
        return False
    operands = [to.order(v, held.perm) for v in op.operands]
    axis = held.position(op.int_attr("axis"))
    to.hold(op.result, to._again(op, operands, axis=axis), held.perm)
    return True


def _reduce(to: _Layout, op: Op) -> bool:
    held = to.first_held(op)
    if held is None:
        return False
    axes = op.ints_attr("axes")
    made = to._again(op, (held.value,), axes=held.positions(axes))
    perm = held.perm
    if not op.bool_attr("keepdims"):
        kept = [axis for axis in perm if axis not in axes]
        perm = tuple(sorted(kept).index(axis) for axis in kept)
    to.hold(op.result, made, perm)
    return True


def _pool(to: _Layout, op: Op) -> bool:
    held = to.first_held(op)
    if held is None:
        return False
    rank = len(held.perm)
    lead = rank - len(op.ints_attr("window"))
    before = min(map(held.position, range(lead, rank)))
    neutral = {"window": 1, "stride": 1, "low": 0, "high": 0, "dilation": 1}
    attrs = {
        name: held.moved((*[least] * lead, *op.ints_attr(name)))[before:]
        for name, least in neutral.items()
    }
    to.hold(op.result, to._again(op, (held.value,), **attrs), held.perm)
    return True


def _box(*names: str) -> _Rule:
    """A rule for an op whose attributes of these names have an entry per axis."""

    def rule(to: _Layout, op: Op) -> bool:
        held = to.first_held(op)
        if held is None:
            return False
        attrs: dict[str, Any] = dict(op.attrs)
        changes = {name: held.moved(attrs[name]) for name in names}
        to.hold(op.result, to._again(op, (held.value,), **changes), held.perm)
        return True

    return rule


def _transpose(to: _Layout, op: Op) -> bool:
    held = to.first_held(op)
    if held is None:
        return False
    places = _inverse(op.ints_attr("perm"))
    to.hold(op.result, held.value, tuple(places[axis] for axis in held.perm))
    return True


def _reshape(to: _Layout, op: Op) -> bool:
    """Applies if axes that are split or joined are adjacent in the order held, too."""
    held = to.first_held(op)
    if held is None:
        return False
    x, shape = op.operands[0], op.result.shape
    runs: list[tuple[list[int], list[int]]] = []
    for here, there in segments(x.shape, shape, to.builder.facts):
        if not here and runs:
            runs[-1][1].extend(there)
        else:
            runs.append((list(here), list(there)))
    placed: list[tuple[int, list[int]]] = []
    for axes, new in runs:
        places = [held.position(axis) for axis in axes]
        if not places or places != list(range(places[0], places[0] + len(places))):
            return False
        placed.append((places[0], new))
    perm = tuple(axis for _, new in sorted(placed) for axis in new)
    made = to._again(op, (held.value,), shape=tuple(shape[axis] for axis in perm))
    to.hold(op.result, made, perm)
    return True


def _index(to: _Layout, op: Op) -> bool:
    """Indexes the leading axis, wherever it is held."""
    x, *indices = op.operands
    held = to.held.get(x)
    if held is None or x in to.plain or len(indices) != 1:
        return False
    if indices[0].type.rank != 1:
        return False
    perm = (0, *(axis for axis in held.perm if axis != 0))
    # The gather reads the transposed value in place, so nothing is moved.
    moved_value = to.builder.transpose(held.value, tuple(map(held.position, perm)))
    operands = (moved_value, to.own(indices[0]))
    to.hold(op.result, to._again(op, operands), perm)
    return True


_RULES: dict[str, _Rule] = {
    "conv": _conv,
    "concat": _concat,
    "reduce": _reduce,
    "pool": _pool,
    "slice": _box("starts", "shape", "steps"),
    "pad": _box("low", "high"),
    "transpose": _transpose,
    "reshape": _reshape,
    "index": _index,
}


def layout(graph: Graph, cx: Context) -> Graph:
    if all(op.name != "conv" for op in graph.ops):
        return graph
    builder = Builder(cx.facts(graph), Names(names_of(graph)))
    to = _Layout(builder, graph.producers())
    for op in graph.ops:
        to.visit(op)
    results = tuple(to.own(v) for v in graph.results)
    if to.saved < PACE * to.moved:
        return graph
    return graph.replace(ops=tuple(builder.ops), results=results)
