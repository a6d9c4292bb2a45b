"""Gathers, scatters, top-k, one-hot and triangles."""

from __future__ import annotations

from collections.abc import Callable

from pliant.frontend.onnx_context import Node, OnnxContext
from pliant.frontend.onnx_ops_activation import Table
from pliant.frontend.onnx_ops_move import moved
from pliant.frontend.onnx_tensors import element_of
from pliant.frontend.translate import as_index
from pliant.ir.graph import Value
from pliant.ir.types import DType
from pliant.sym import as_expr, le, lt, product


def gather(cx: OnnxContext, n: Node, x: Value) -> Value:
    axis = n.axis(n.attr("axis", 0), x.type.rank)
    known = n.known(1)
    if known is not None and not known.is_symbolic and not known.shape:
        at = int(known.array)
        size = x.shape[axis]
        place = as_expr(at) if at >= 0 else size + at
        if cx.proves(le(0, place)) and cx.proves(lt(place, size)):
            row = cx.slice(x, axis, place, 1)
            return cx.reshape(row, (*x.shape[:axis], *x.shape[axis + 1 :]))
    index = cx.wrap_index(n.tensor(1), x.shape[axis], axis)
    rows = cx.move_axis(x, axis, 0)
    found = cx.b.emit("index", rows, index)
    count = index.type.rank
    order = [
        *range(count, count + axis),
        *range(count),
        *range(count + axis, found.type.rank),
    ]
    return cx.keep_sign(x, cx.transpose(found, order))


def gather_elements(cx: OnnxContext, n: Node, x: Value) -> Value:
    axis = n.axis(n.attr("axis", 0), x.type.rank)
    index = cx.wrap_index(n.tensor(1), x.shape[axis], axis)
    for i, (have, want) in enumerate(zip(x.shape, index.shape, strict=True)):
        if i != axis and not cx.b.same(have, want):
            x = cx.slice(x, i, 0, want)  # the index may be smaller
    return cx.b.emit("take_along", x, index, axis=axis)


def gather_nd(cx: OnnxContext, n: Node) -> Value:
    x, indices = n.tensor(0), as_index(cx, n.tensor(1))
    batch = n.attr("batch_dims", 0)
    parts = coordinates(cx, x, indices, batch)
    return cx.b.emit("index", x, *parts)


def coordinates(cx: OnnxContext, x: Value, indices: Value, batch: int) -> list[Value]:
    """Indices of x's leading axes, from the last axis of a tensor of them."""
    last = indices.type.rank - 1
    count = cx.constant_int(indices.shape[last], "the number of indices")
    shape = indices.shape[:last]
    for i in range(batch):
        cx.b.require_equal(x.shape[i], shape[i], "a dim of the batch")
    parts = [cx.iota(shape, i, DType.I64) for i in range(batch)]
    for k in range(count):
        one = cx.reshape(cx.slice(indices, last, k, 1), shape)
        parts.append(cx.wrap_index(one, x.shape[batch + k], batch + k))
    return parts


# ---- scatters


def scatter_elements(cx: OnnxContext, n: Node) -> Value:
    x, updates = n.tensor(0), n.tensor(2)
    axis = n.axis(n.attr("axis", 0))
    index = cx.wrap_index(n.tensor(1), x.shape[axis], axis)
    parts = [
        index if i == axis else cx.iota(index.shape, i, DType.I64)
        for i in range(x.type.rank)
    ]
    place = cx.reshape(cx.b.flat_place(parts, x.shape), (index.type.numel,))
    flat = cx.reshape(x, (x.type.numel, 1))
    rows = cx.reshape(updates, (updates.type.numel, 1))
    made = placed(cx, flat, place, rows, n.attr("reduction", "none"))
    return cx.reshape(made, x.shape)


def scatter_nd(cx: OnnxContext, n: Node) -> Value:
    x, updates = n.tensor(0), n.tensor(2)
    indices = as_index(cx, n.tensor(1))
    parts = coordinates(cx, x, indices, 0)
    count = len(parts)
    place = cx.b.flat_place(parts, x.shape[:count])
    places = cx.reshape(place, (product(indices.shape[:-1]),))
    width = product(x.shape[count:])
    flat = cx.reshape(x, (product(x.shape[:count]), width))
    rows = cx.reshape(updates, (product(indices.shape[:-1]), width))
    made = placed(cx, flat, places, rows, n.attr("reduction", "none"))
    return cx.reshape(made, x.shape)


_JOINS = {
    "add": ("sum", "add"),
    "mul": ("prod", "mul"),
    "max": ("max", "maximum"),
    "min": ("min", "minimum"),
}


def placed(cx: OnnxContext, x: Value, place: Value, rows: Value, how: str) -> Value:
    """x[R, C] with rows put at places, or joined with what is there."""
    if how == "none":
        return cx.b.emit("scatter_rows", x, place, rows)
    if how not in _JOINS:
        cx.unsupported(f"a scatter with reduction {how}")
    op, join = _JOINS[how]
    wide = x.dtype.compute
    found = cx.b.emit("scatter", place, cx.cast(rows, wide), op=op, rows=x.shape[0])
    return cx.cast(cx.arith(join, cx.cast(x, wide), found), x.dtype)


def tensor_scatter(cx: OnnxContext, n: Node) -> Value:
    """A cache with new rows at each batch's own place."""
    past, new = n.tensor(0), n.tensor(1)
    axis = n.axis(n.attr("axis", -2))
    batch, size = past.shape[0], past.shape[axis]
    shape = new.shape
    place = cx.iota(shape, axis, DType.I64)
    if n.has(2):
        ones = [as_expr(1)] * (past.type.rank - 1)
        start = cx.reshape(cx.cast(n.tensor(2), DType.I64), (batch, *ones))
        place = cx.add(place, cx.broadcast_to(start, shape))
    if n.attr("mode", "linear") == "circular":
        place = cx.arith("mod", place, cx.tensor(size, DType.I64))
    place = cx.in_range(place, size, axis)
    parts = [
        place if i == axis else cx.iota(shape, i, DType.I64)
        for i in range(past.type.rank)
    ]
    flat = cx.reshape(cx.b.flat_place(parts, past.shape), (new.type.numel,))
    rows = cx.reshape(new, (new.type.numel, 1))
    made = cx.b.emit("scatter_rows", cx.reshape(past, (past.type.numel, 1)), flat, rows)
    return cx.reshape(made, past.shape)


# ---- order


def sortable(cx: OnnxContext, x: Value) -> tuple[Value, Callable[[Value], Value]]:
    """The elements as a type that is sorted natively, and back."""
    if not x.dtype.is_unsigned or x.dtype.bytes == 1:
        return x, lambda y: y
    if x.dtype is DType.U64:
        top = -(2**63)
        made = cx.arith("bitwise_xor", cx.b.bitcast(x, DType.I64), top)
        return made, lambda y: cx.b.bitcast(cx.arith("bitwise_xor", y, top), DType.U64)
    return cx.cast(x, DType.I64), lambda y: cx.cast(y, x.dtype)


def top_k(cx: OnnxContext, n: Node) -> tuple[Value, ...]:
    x = n.tensor(0)
    axis = n.axis(n.attr("axis", -1))
    k = as_expr(n.attrs["k"] if n.version < 10 else n.sizes(1, "k")[0])
    held, back = sortable(cx, x)
    values, places = cx.b.emit_multi(
        "top", held, axis=axis, k=k, largest=bool(n.attr("largest", 1))
    )
    cx.nonnegative.add(places)
    return back(values), places


# ---- masks


def one_hot(cx: OnnxContext, n: Node) -> Value:
    indices, values = n.tensor(0), n.tensor(2)
    depth = as_expr(n.sizes(1, "depth")[0])
    rank = indices.type.rank
    axis = n.axis(n.attr("axis", -1), rank + 1)
    if not indices.dtype.is_int:
        indices = cx.cast(indices, DType.I64)
    index = as_index(cx, indices)
    size = cx.tensor(depth, DType.I64)
    negative = cx.arith("lt", index, 0)
    index = cx.select(negative, cx.add(index, size), index)
    shape = (*indices.shape[:axis], depth, *indices.shape[axis:])
    wide = cx.reshape(index, (*indices.shape[:axis], 1, *indices.shape[axis:]))
    hot = cx.arith("eq", cx.iota(shape, axis, DType.I64), cx.broadcast_to(wide, shape))
    off, on = (cx.reshape(cx.slice(values, 0, k, 1), ()) for k in (0, 1))
    return cx.b.select(hot, on, off)


def trilu(cx: OnnxContext, n: Node) -> Value:
    x, rank = n.tensor(0), n.rank
    k: Value | int = cx.reshape(n.tensor(1), ()) if n.has(1) else 0
    square = x.shape[-2:]
    row, column = (cx.iota(square, i, DType.I64) for i in (0, 1))
    edge = cx.add(row, k)
    upper = bool(n.attr("upper", 1))
    mask = cx.arith("ge" if upper else "le", column, edge)
    mask = cx.b.broadcast(mask, x.shape, (rank - 2, rank - 1))
    return cx.select(mask, x, cx.full(0, x.shape, x.dtype))


def reverse_sequence(cx: OnnxContext, n: Node) -> Value:
    x, lengths = n.tensor(0), as_index(cx, n.tensor(1))
    batch, time = n.attr("batch_axis", 1), n.attr("time_axis", 0)
    return reversed_rows(cx, x, lengths, batch, time)


def reversed_rows(
    cx: OnnxContext, x: Value, lengths: Value, batch: int, time: int
) -> Value:
    """The first `lengths` rows of each batch in reverse order."""
    shape = [as_expr(1)] * x.type.rank
    shape[batch] = x.shape[batch]
    length = cx.broadcast_to(cx.reshape(lengths, shape), x.shape)
    here = cx.iota(x.shape, time, DType.I64)
    back = cx.sub(cx.sub(length, here), 1)
    place = cx.select(cx.arith("lt", here, length), back, here)
    place = cx.in_range(place, x.shape[time], time)
    return cx.b.emit("take_along", x, place, axis=time)


def eye_like(cx: OnnxContext, n: Node) -> Value:
    x = n.tensor(0)
    dtype = x.dtype
    if "dtype" in n.attrs:
        dtype = element_of(n.attrs["dtype"], "EyeLike").dtype or dtype
    row, column = (cx.iota(x.shape, i, DType.I64) for i in (0, 1))
    return cx.cast(cx.arith("eq", column, cx.add(row, n.attr("k", 0))), dtype)


INDEX: Table = {
    ("Gather", 1): moved(gather),
    ("GatherElements", 11): moved(gather_elements),
    ("GatherND", 11): gather_nd,
    ("Scatter", 9): scatter_elements,
    ("ScatterElements", 11): scatter_elements,
    ("ScatterND", 11): scatter_nd,
    ("TensorScatter", 24): tensor_scatter,
    ("TopK", 1): top_k,
    ("OneHot", 9): one_hot,
    ("Trilu", 14): trilu,
    ("ReverseSequence", 10): reverse_sequence,
    ("EyeLike", 9): eye_like,
}
