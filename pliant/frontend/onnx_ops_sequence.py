"""Sequences and optionals: lists of tensors whose length is known."""

from __future__ import annotations

import numpy as np

from pliant.frontend.onnx_context import Node, OnnxContext
from pliant.frontend.onnx_ops_activation import Table
from pliant.frontend.onnx_ops_move import pieces
from pliant.frontend.onnx_tensors import element_of
from pliant.frontend.onnx_types import BOOL, INT64
from pliant.frontend.onnx_values import ABSENT, Absent, Entry, Items, Known
from pliant.frontend.operands import Size
from pliant.ir.graph import Value
from pliant.sym import as_expr, ceildiv


def items(cx: OnnxContext, n: Node, i: int) -> Items:
    entry = n.entry(i)
    if not isinstance(entry, Items):
        cx.unsupported("a sequence of unknown length")
    return entry


def _known(value: object, element: object) -> Known:
    kind = np.bool_ if element is BOOL else np.int64
    return Known(np.array(value, kind), BOOL if element is BOOL else INT64)


def construct(cx: OnnxContext, n: Node) -> Items:
    return Items(tuple(n.entry(i) for i in range(len(n.inputs))))


def empty(cx: OnnxContext, n: Node) -> Items:
    return Items((), element_of(n.attr("dtype", 1), n.op))


def _place(n: Node, i: int, length: int) -> int:
    at = n.integer(i, "the position in a sequence")
    if not -length <= at < length:
        n.cx.unsupported(f"position {at} of a sequence of {length}")
    return at % length


def insert(cx: OnnxContext, n: Node) -> Items:
    whole = list(items(cx, n, 0).values)
    place = len(whole)
    if n.has(2):
        at = n.integer(2, "the position in a sequence")
        place = at + len(whole) if at < 0 else at
        if not 0 <= place <= len(whole):
            cx.unsupported(f"position {at} of a sequence of {len(whole)}")
    whole.insert(place, n.entry(1))
    return Items(tuple(whole))


def erase(cx: OnnxContext, n: Node) -> Items:
    old = items(cx, n, 0)
    whole = list(old.values)
    whole.pop(_place(n, 1, len(whole)) if n.has(1) else -1)
    return Items(tuple(whole), old.element)


def at(cx: OnnxContext, n: Node) -> Entry:
    whole = items(cx, n, 0).values
    return whole[_place(n, 1, len(whole))]


def length(cx: OnnxContext, n: Node) -> Known:
    return _known(len(items(cx, n, 0).values), INT64)


def concat_from(cx: OnnxContext, n: Node) -> Value:
    parts = [cx.value(e) for e in items(cx, n, 0).values]
    if not parts:
        cx.unsupported("a concat of an empty sequence")
    axis, rank = n.attrs["axis"], parts[0].type.rank
    if n.attr("new_axis", 0):
        axis = n.axis(axis, rank + 1)
        parts = [cx.b.unsqueeze(p, axis) for p in parts]
        return cx.concat(parts, axis)
    return cx.concat(parts, n.axis(axis, rank))


def split_to(cx: OnnxContext, n: Node) -> Items:
    x = n.tensor(0)
    axis = n.axis(n.attr("axis", 0))
    keep = bool(n.attr("keepdims", 1))
    size = x.shape[axis]
    if not n.has(1):
        count = cx.constant_int(size, "the length of a sequence")
        parts = pieces(cx, x, axis, [1] * count)
        if not keep:
            shape = (*x.shape[:axis], *x.shape[axis + 1 :])
            parts = [cx.reshape(p, shape) for p in parts]
        return Items(tuple(parts))
    given = n.sizes(1, "the sizes of parts")
    if not n.cx.shape_of(n.entry(1)):
        each = cx.constant_int(given[0], "the size of a part")
        count = cx.constant_int(ceildiv(size, each), "the length of a sequence")
        given = [each] * (count - 1) if count else []
        if count:
            given.append(cx.simplify(size - each * (count - 1)))
    sizes: list[Size] = [as_expr(s) for s in given]
    return Items(tuple(pieces(cx, x, axis, sizes)))


def sequence_map(cx: OnnxContext, n: Node) -> tuple[Items, ...]:
    """The body for each element, one after the other."""
    first = items(cx, n, 0)
    rows: list[tuple[Entry, ...]] = []
    for k in range(len(first.values)):
        given = []
        for i in range(len(n.inputs)):
            entry = n.entry(i)
            given.append(entry.values[k] if isinstance(entry, Items) else entry)
        rows.append(n.walk.inlined(n.attrs["body"], given))
    return tuple(
        Items(tuple(row[k] for row in rows), None if rows else first.element)
        for k in range(len(n.outputs))
    )


# ---- optionals


def optional(cx: OnnxContext, n: Node) -> Entry:
    return n.entry(0) if n.has(0) else ABSENT


def get_element(cx: OnnxContext, n: Node) -> Entry:
    entry = n.entry(0)
    if isinstance(entry, Absent):
        cx.unsupported("the element of an empty optional")
    return entry


def has_element(cx: OnnxContext, n: Node) -> Known:
    there = n.has(0) and not isinstance(n.inputs[0], Absent)
    return _known(there, BOOL)


SEQUENCES: Table = {
    ("SequenceConstruct", 11): construct,
    ("SequenceEmpty", 11): empty,
    ("SequenceInsert", 11): insert,
    ("SequenceErase", 11): erase,
    ("SequenceAt", 11): at,
    ("SequenceLength", 11): length,
    ("ConcatFromSequence", 11): concat_from,
    ("SplitToSequence", 11): split_to,
    ("SequenceMap", 17): sequence_map,
    ("Optional", 15): optional,
    ("OptionalGetElement", 15): get_element,
    ("OptionalHasElement", 15): has_element,
}
