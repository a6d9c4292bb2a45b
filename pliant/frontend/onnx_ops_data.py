"""Ops whose results have sizes that only the data tell: NonZero, Compress, Unique, NMS.

Such a size is a fresh symbol, bound when the op has run (passes/bind.py); memory is
planned for the most that it can be.
"""

from __future__ import annotations

import numpy as np

from pliant.frontend.onnx_context import Node, OnnxContext
from pliant.frontend.onnx_ops_activation import Table
from pliant.frontend.onnx_ops_index import sortable
from pliant.frontend.onnx_types import INT64
from pliant.ir.graph import Value
from pliant.ir.types import DType
from pliant.sym import Expr, as_expr, product

I64, BOOL = DType.I64, DType.BOOL


def nonzero(cx: OnnxContext, n: Node) -> Value:
    x = cx.to_bool(n.tensor(0))
    if not x.type.rank:
        x = cx.reshape(x, (1,))
    found = cx.b.emit("nonzero", x)
    cx.nonnegative.add(found)
    return cx.transpose(found, (1, 0))


def true_places(cx: OnnxContext, mask: Value) -> Value:
    """Where a vector is true."""
    found = cx.b.emit("nonzero", mask)
    cx.nonnegative.add(found)
    return cx.reshape(found, (found.shape[0],))


def compress(cx: OnnxContext, n: Node) -> Value:
    x, known = n.tensor(0), n.known(1)
    axis = n.attrs.get("axis")
    if axis is None:
        x, axis = cx.reshape(x, (x.type.numel,)), 0
    axis = n.axis(axis, x.type.rank)
    size = x.shape[axis]
    if known is not None and not known.is_symbolic:
        chosen = np.flatnonzero(known.array)
        places = cx.in_range(cx.data(chosen, INT64), size, axis)
        rows = cx.b.emit("index", cx.move_axis(x, axis, 0), places)
        return cx.move_axis(rows, 0, axis)
    mask = n.tensor(1)
    places = true_places(cx, mask)
    if not cx.b.same(mask.shape[0], size):
        places = cx.in_range(places, size, axis)
    rows = cx.b.emit("index", cx.move_axis(x, axis, 0), places)
    return cx.move_axis(rows, 0, axis)


# ---- unique


def unique(cx: OnnxContext, n: Node) -> tuple[Value, ...]:
    """Rows are sorted; each that differs from the one before it is a new value."""
    x, axis = n.tensor(0), n.attrs.get("axis")
    whole = x
    if axis is None:
        rows = cx.reshape(x, (x.type.numel, 1))
        whole, axis = cx.reshape(x, (x.type.numel,)), 0
    else:
        axis = n.axis(axis)
        moved = cx.move_axis(x, axis, 0)
        rows = cx.reshape(moved, (moved.shape[0], product(moved.shape[1:])))
    count = rows.shape[0]
    order = _row_order(cx, rows)  # places of rows, sorted
    held = cx.b.emit("index", rows, order)
    later = cx.slice(held, 0, 1, count - 1)
    before = cx.slice(held, 0, 0, count - 1)
    changed = cx.reduce("any", cx.b.binary("ne", later, before), (1,))
    first = cx.concat([cx.full(True, (1,), BOOL), changed], 0)
    group = cx.sub(cx.b.emit("cumulate", cx.cast(first, I64), op="sum", axis=0), 1)
    group = cx.in_range(group, count, 0)
    # The group and the first place of each row, in the rows' own order.
    column = (count, as_expr(1))
    of_row = cx.b.emit(
        "scatter_rows", cx.full(0, column, I64), order, cx.reshape(group, column)
    )
    of_row = cx.reshape(of_row, (count,))
    starts = true_places(cx, first)
    indices = cx.b.emit("index", order, starts)
    ones = cx.full(1, column, I64)
    counts = cx.b.emit("scatter", of_row, ones, op="sum", rows=count)
    counts = cx.slice(cx.reshape(counts, (count,)), 0, 0, starts.shape[0])
    if not n.attr("sorted", 1):
        # By first place: its rank among the others.
        _, ranked = cx.b.emit_multi("sort", indices, axis=0, descending=False)
        place = (starts.shape[0], as_expr(1))
        inverse = cx.b.emit(
            "scatter_rows",
            cx.full(0, place, I64),
            ranked,
            cx.reshape(cx.iota((starts.shape[0],), 0, I64), place),
        )
        inverse = cx.reshape(inverse, (starts.shape[0],))
        indices, counts = (cx.b.emit("index", v, ranked) for v in (indices, counts))
        checked = cx.in_range(of_row, starts.shape[0], 0)
        of_row = cx.b.emit("index", inverse, checked)
    found = cx.b.emit("index", cx.move_axis(whole, axis, 0), indices)
    return cx.move_axis(found, 0, axis), indices, of_row, counts


def _row_order(cx: OnnxContext, rows: Value) -> Value:
    """The places of rows in lexical order: sorted by the last column first."""
    count, width = rows.shape
    columns = cx.constant_int(width, "the size of a row to be unique")
    order: Value | None = None
    for k in reversed(range(columns)):
        column = cx.reshape(cx.slice(rows, 1, k, 1), (count,))
        if order is not None:
            column = cx.b.emit("index", column, order)
        held, _ = sortable(cx, column)
        _, places = cx.b.emit_multi("sort", held, axis=0, descending=False)
        cx.nonnegative.add(places)
        order = places if order is None else cx.b.emit("index", order, places)
    assert order is not None
    cx.nonnegative.add(order)
    return order


# ---- boxes


def non_max_suppression(cx: OnnxContext, n: Node) -> Value:
    """Boxes by score; one that overlaps a better one that is kept is not."""
    boxes, scores = n.tensor(0), n.tensor(1)  # (B, N, 4), (B, C, N)
    batch, classes, count = scores.shape
    most = cx.cast(cx.reshape(n.tensor(2), ()), I64) if n.has(2) else None
    if most is None:
        return cx.full(0, (0, 3), I64)
    limit = cx.reshape(n.tensor(3), ()) if n.has(3) else cx.tensor(0.0, boxes.dtype)
    least = cx.reshape(n.tensor(4), ()) if n.has(4) else None
    overlap = _overlaps(cx, boxes, bool(n.attr("center_point_box", 0)))  # (B, N, N)
    hides = cx.arith("gt", overlap, limit)
    ranked, places = cx.b.emit_multi("sort", scores, axis=2, descending=True)
    cx.nonnegative.add(places)
    # hides[b, places[b,c,i], places[b,c,j]]
    shape = (batch, classes, count, count)
    row = cx.b.broadcast(places, shape, (0, 1, 2))
    column = cx.b.broadcast(places, shape, (0, 1, 3))
    of_batch = cx.iota(shape, 0, I64)
    for value in (row, column):
        cx.nonnegative.add(value)
    pairs = cx.b.emit("index", hides, of_batch, row, column)
    if least is None:
        open_ = cx.full(True, scores.shape, BOOL)
    else:
        open_ = cx.arith("gt", ranked, least)
    groups = batch * classes
    kept = _greedy(
        cx,
        cx.reshape(pairs, (groups, count, count)),
        cx.reshape(open_, (groups, count)),
        most,
    )
    found = cx.b.emit("nonzero", cx.reshape(kept, (batch, classes, count)))
    cx.nonnegative.add(found)
    size = found.shape[0]
    parts = [cx.reshape(cx.slice(found, 1, k, 1), (size,)) for k in range(3)]
    cx.nonnegative.update(parts)
    box = cx.b.emit("index", places, *parts)
    columns = [cx.reshape(v, (size, 1)) for v in (parts[0], parts[1], box)]
    return cx.concat(columns, 1)


def _greedy(cx: OnnxContext, hides: Value, open_: Value, most: Value) -> Value:
    """kept (G, N): in order, what is open, not hidden by kept ones, not too many."""
    groups, count = open_.shape
    rows = cx.transpose(hides, (1, 0, 2))  # (N, G, N): whom box i hides
    flags = cx.transpose(open_, (1, 0))  # (N, G)
    steps = cx.iota((count,), 0, I64)
    outer = cx.b
    hidden = cx.full(False, (groups, count), BOOL)
    many = cx.full(0, (groups,), I64)
    cx.b = outer.child()
    try:
        b = cx.b
        state = b.param("hidden", hidden.type)
        number = b.param("number", many.type)
        limit = b.param("most", most.type)
        row = b.param("row", rows.type.with_shape(rows.shape[1:]))
        flag = b.param("flag", flags.type.with_shape(flags.shape[1:]))
        step = b.param("step", steps.type.with_shape(()))
        here = cx.arith("eq", cx.iota((groups, count), 1, I64), step)
        gone = cx.reduce("any", b.binary("logical_and", here, state), (1,))
        fits = b.binary("lt", number, limit)
        take = b.binary("logical_and", flag, cx.unary("logical_not", gone))
        take = b.binary("logical_and", take, fits)
        wide = cx.reshape(take, (groups, 1))
        more = b.binary("logical_and", row, cx.broadcast_to(wide, row.shape))
        after = b.binary("logical_or", state, more)
        total = cx.add(number, cx.cast(take, I64))
        body = b.finish("step", [after, total, limit, take])
    finally:
        cx.b = outer
    made = cx.b.emit_multi(
        "scan",
        *(hidden, many, most, rows, flags, steps),
        regions=(body,),
        rounds=count,
        scanned=3,
    )
    return cx.transpose(made[-1], (1, 0))


def _overlaps(cx: OnnxContext, boxes: Value, centered: bool) -> Value:
    """Intersection over union of all pairs of boxes (B, N, N)."""
    batch, count, _ = boxes.shape
    part = [cx.reshape(cx.slice(boxes, 2, k, 1), (batch, count)) for k in range(4)]
    if centered:
        x, y, width, height = part
        sides = [
            (cx.sub(x, cx.mul(width, 0.5)), cx.add(x, cx.mul(width, 0.5))),
            (cx.sub(y, cx.mul(height, 0.5)), cx.add(y, cx.mul(height, 0.5))),
        ]
    else:
        sides = [
            (
                cx.arith("minimum", part[k], part[k + 2]),
                cx.arith("maximum", part[k], part[k + 2]),
            )
            for k in (1, 0)
        ]
    shared: Value | None = None
    area: Value | None = None
    for low, high in sides:
        start = cx.arith("maximum", *_pair(cx, low))
        end = cx.arith("minimum", *_pair(cx, high))
        both = cx.arith("maximum", cx.sub(end, start), 0.0)
        shared = both if shared is None else cx.mul(shared, both)
        own = cx.sub(high, low)
        area = own if area is None else cx.mul(area, own)
    assert shared is not None and area is not None
    union = cx.sub(cx.add(*_pair(cx, area)), shared)
    empty = cx.arith("le", union, 0.0)
    return cx.select(empty, 0.0, cx.div(shared, cx.select(empty, 1.0, union)))


def _pair(cx: OnnxContext, x: Value) -> tuple[Value, Value]:
    """(B, N) as rows and as columns of (B, N, N)."""
    batch, count = x.shape
    shape: tuple[Expr, ...] = (batch, count, count)
    return (
        cx.broadcast_to(cx.reshape(x, (batch, count, 1)), shape),
        cx.broadcast_to(cx.reshape(x, (batch, 1, count)), shape),
    )


DATA: Table = {
    ("NonZero", 9): nonzero,
    ("Compress", 9): compress,
    ("Unique", 11): unique,
    ("NonMaxSuppression", 10): non_max_suppression,
}
