"""Concats of slices of concats become one concat of the parts that are read.

    %1 = concat(%0[:, :3], %a, %0[:, 4:])            out[:, 3] = a
    %2 = concat(%1[:, :4], %b, %1[:, 5:])      ->    out[:, 4] = b
                                                     %2 = concat(%0[:, :3], %a, %b,
                                                                 %0[:, 5:])

A loop that writes one row of a tensor in each step produces a chain of these, one per
step. Without this pass, an element of the last one would be searched in all of them.

A value made by concats and slices along one axis is represented by its *pieces*: parts
of computed values, side by side. The pieces of a result follow from those of its
operands by cutting at two positions, found by bisection. A value that other ops read is
in memory anyway: it is built from its pieces once, and is one piece for later ops. So
is a value whose pieces would otherwise be emitted more than once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pliant.context import Context
from pliant.ir.build import Builder
from pliant.ir.graph import Graph, Op, Value, substitute


@dataclass(frozen=True, slots=True)
class _Piece:
    """`size` elements of one axis of a value, from `start` on."""

    value: Value
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class _Pieces:
    """A value along one axis: pieces, and the position at which each begins."""

    axis: int
    pieces: list[_Piece]
    places: list[int]

    def cut(self, start: int, size: int) -> list[_Piece]:
        """The pieces of a part; the first and the last may be cut."""
        first = bisect_right(self.places, start) - 1
        last = bisect_right(self.places, start + size - 1)
        out = self.pieces[first:last]
        if not out:
            return []
        head = start - self.places[first]
        tail = self.places[last - 1] + out[-1].size - (start + size)
        if head:
            out[0] = _Piece(out[0].value, out[0].start + head, out[0].size - head)
        if tail:
            out[-1] = _Piece(out[-1].value, out[-1].start, out[-1].size - tail)
        return out


def _side_by_side(axis: int, parts: Sequence[_Piece]) -> _Pieces:
    """Merges adjacent pieces that are adjacent in the same value."""
    pieces: list[_Piece] = []
    places: list[int] = []
    at = 0
    for part in parts:
        last = pieces[-1] if pieces else None
        if not part.size:
            continue
        if (
            last is not None
            and last.value is part.value
            and last.start + last.size == part.start
        ):
            pieces[-1] = _Piece(last.value, last.start, last.size + part.size)
        else:
            pieces.append(part)
            places.append(at)
        at += part.size
    return _Pieces(axis, pieces, places)


def _joined(op: Op) -> int | None:
    """The axis of a concat or slice at positions known at compile time; else None."""
    if op.name == "concat":
        axis, shape = op.int_attr("axis"), op.result.shape
        alike = all(_beside(v, axis) == _beside(op.result, axis) for v in op.operands)
        known = all(v.shape[axis].is_const for v in op.operands)
        return axis if alike and known and shape[axis].is_const else None
    if op.name != "slice" or any(step != 1 for step in op.ints_attr("steps")):
        return None
    (x,), out = op.operands, op.result
    cut = [k for k, (a, b) in enumerate(zip(x.shape, out.shape, strict=True)) if a != b]
    if len(cut) != 1:
        return None
    starts = op.dims_attr("starts")
    if any(not s.is_const or (k != cut[0] and s != 0) for k, s in enumerate(starts)):
        return None
    whole = x.shape[cut[0]].is_const and out.shape[cut[0]].is_const
    return cut[0] if whole else None


def _beside(value: Value, axis: int) -> tuple[object, ...]:
    return (*value.shape[:axis], *value.shape[axis + 1 :])


Axes = dict[Value, int]  # result of a concat or slice -> its axis


class _Joins:
    """The pieces of concats and slices; `solid` values are single pieces."""

    def __init__(self, graph: Graph, axes: Axes, solid: set[Value]) -> None:
        self.solid = solid
        self.known: dict[Value, _Pieces] = {}
        self.readings: Counter[Value] = Counter()  # pieces read from a value
        for op in graph.ops:
            axis = _axis_of(op, axes)
            if axis is None:
                continue
            out = op.result
            if op.name == "slice":
                size = out.shape[axis].value
                start = op.dims_attr("starts")[axis].value
                parts = self._read(op.operands[0], axis, start, size)
            else:
                parts = []
                for v in op.operands:
                    parts += self._whole(v, axis)
            self.known[out] = _side_by_side(axis, parts)

    def _whole(self, value: Value, axis: int) -> list[_Piece]:
        return self._read(value, axis, 0, value.shape[axis].value)

    def _read(self, value: Value, axis: int, start: int, size: int) -> list[_Piece]:
        pieces = self.known.get(value)
        if pieces is None or pieces.axis != axis or value in self.solid:
            return [_Piece(value, start, size)]
        found = pieces.cut(start, size)
        if len(found) > 1:
            self.readings[value] += len(found) - 1
        return found

    def repeated(self) -> set[Value]:
        """Values whose pieces would be emitted more than once."""
        return {v for v, n in self.readings.items() if n > len(self.known[v].pieces)}


def joins(graph: Graph, cx: Context) -> Graph:
    if not any(op.name == "concat" for op in graph.ops):
        return graph
    axes = {op.result: axis for op in graph.ops if (axis := _joined(op)) is not None}
    solid = _read_by_others(graph, axes)
    found = _Joins(graph, axes, solid)
    more = found.repeated()
    if more:
        solid |= more
        found = _Joins(graph, axes, solid)
    # A slice that others read and that is no single piece stays a slice of one value.
    whole = {
        op.operands[0]
        for op in graph.ops
        if op.name == "slice"
        and op.result in solid
        and op.result in axes
        and len(found.known[op.result].pieces) != 1
    }
    whole = {v for v in whole if v in axes}
    if whole - solid:
        solid |= whole
        found = _Joins(graph, axes, solid)
    return _rebuilt(graph, axes, found)


def _axis_of(op: Op, axes: Axes) -> int | None:
    return axes.get(op.results[0]) if op.results else None


def _read_by_others(graph: Graph, axes: Axes) -> set[Value]:
    """Results of concats and slices that other ops read, or that the graph returns."""
    solid = {v for v in graph.results if v in axes}
    for op in graph.ops:
        axis = _axis_of(op, axes)
        solid.update(v for v in op.operands if axes.get(v, axis) != axis)
    return solid


def _rebuilt(graph: Graph, axes: Axes, found: _Joins) -> Graph:
    builder = Builder.within(graph)
    mapping: dict[Value, Value] = {}
    changed = False

    def part(piece: _Piece, axis: int) -> Value:
        value = mapping.get(piece.value, piece.value)
        return builder.slice_axis(value, axis, piece.start, piece.size)

    for op in graph.ops:
        axis = _axis_of(op, axes)
        if axis is None:
            builder.append(substitute(op, mapping))
            continue
        if op.result not in found.solid:
            changed = True
            continue  # not needed in memory
        pieces = found.known[op.result].pieces
        if _as_it_stands(op, axis, pieces):
            builder.append(substitute(op, mapping))
            continue
        changed = True
        with builder.at(op.loc):
            if not pieces:  # of no elements: what it was read from may be gone
                mapping[op.result] = builder.full_like(op.result, 0)
                continue
            if op.name == "slice" and len(pieces) != 1:
                builder.append(substitute(op, mapping))
                continue
            mapping[op.result] = builder.concat([part(p, axis) for p in pieces], axis)
    if not changed:
        return graph
    results = tuple(mapping.get(v, v) for v in graph.results)
    return graph.replace(ops=tuple(builder.ops), results=results)


def _as_it_stands(op: Op, axis: int, pieces: Sequence[_Piece]) -> bool:
    """Whether an op already reads exactly these pieces."""
    if op.name == "slice":
        return len(pieces) == 1 and pieces[0].value is op.operands[0]
    if len(pieces) != len(op.operands):
        return False
    pairs = zip(pieces, op.operands, strict=True)
    return all(p.value is v and p.size == v.shape[axis].value for p, v in pairs)
