"""aten ops that write or sum up elements at computed places.

x.scatter_reduce(0, i, u, "amax")        rows of x, rows of u and their places;
                                         `scatter` merges those of one place
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pliant.frontend.torch_ops_context import Operand, Size, TorchContext, as_index
from pliant.frontend.torch_ops_data import write_masked
from pliant.frontend.torch_ops_math import Translate
from pliant.frontend.torch_ops_pick import expand_masks
from pliant.ir.graph import Value
from pliant.ir.reductions import COMBINES
from pliant.ir.types import DType
from pliant.sym import Expr, as_expr, le, minimum, product

aten = torch.ops.aten
MOST_WRITES = 16  # elements of a row that a scatter writes by a select for each
# torch's names of the operations that combine elements.
REDUCES = {
    "add": "sum",
    "sum": "sum",
    "multiply": "prod",
    "prod": "prod",
    "mean": "mean",
    "amax": "max",
    "amin": "min",
}


def embedding_backward(
    cx: TorchContext,
    grad: Value,
    indices: Value,
    num_weights: Size,
    padding_idx: Size,
    scale_grad_by_freq: bool,
) -> Value:
    """The rows of `grad` added up by index."""
    if scale_grad_by_freq:
        cx.unsupported("embedding with scale_grad_by_freq")
    count, width = indices.type.numel, grad.shape[-1]
    places = cx.reshape(as_index(cx, indices), (count,))
    rows = cx.reshape(grad, (count, width))
    padding = cx.constant_int(padding_idx, "padding index")
    if padding >= 0:
        kept = cx.reshape(cx.arith("ne", places, padding), (count, 1))
        rows = cx.select(kept, rows, 0.0)
    return _sum_rows(cx, places, rows, as_expr(num_weights))


def _sum_rows(cx: TorchContext, places: Value, rows: Value, count: Expr) -> Value:
    wide = cx.cast(rows, rows.dtype.compute)
    out = cx.b.emit("scatter", places, wide, op="sum", rows=count)
    return cx.cast(out, rows.dtype)


def index_put(
    cx: TorchContext,
    x: Value,
    indices: Sequence[Value | None],
    values: Value,
    accumulate: bool = False,
) -> Value:
    """x with values written at the indices, or added there with `accumulate`.

    Of several values for one place, the last is written.
    """
    plain = [i for i in indices if i is not None]
    if any(i.dtype in (DType.BOOL, DType.U8) for i in plain):
        if len(plain) == 1 and not accumulate:
            return write_masked(cx, x, plain[0], list(indices).index(plain[0]), values)
        indices = expand_masks(cx, x, indices)
    if not plain:
        both = cx.cast(values, x.dtype)
        return cx.broadcast_to(cx.add(x, both) if accumulate else both, x.shape)
    rows = rows_at(cx, x, indices, values, wraps=True)
    return rows.back(merged(cx, rows, "sum" if accumulate else "last"))


@dataclass(frozen=True, slots=True)
class ScatterRows:
    """A tensor as rows, the places of rows to merge into it, and how to put it back."""

    target: Value  # (rows, width)
    places: Value  # (count,)
    values: Value  # (count, width)
    back: Callable[[Value], Value]


def _hit(cx: TorchContext, rows: ScatterRows) -> tuple[Value, Value]:
    """How many values each row is given, and for each element whether it is any."""
    ones = cx.full(1, (rows.places.shape[0], 1), DType.I64)
    count = rows.target.shape[0]
    hits = cx.b.emit("scatter", rows.places, ones, op="sum", rows=count)
    return hits, cx.broadcast_to(cx.arith("gt", hits, 0), rows.target.shape)


def merged(
    cx: TorchContext, rows: ScatterRows, op: str, include_self: bool = True
) -> Value:
    """The target, each row merged with the values for its place.

    `op` is sum, prod, mean, max, min, or last, which replaces the row by the last of
    the values. Half floats are merged in f32 and rounded once.
    """
    kind = rows.target.dtype
    if op == "last":
        return cx.b.emit("scatter_rows", rows.target, rows.places, rows.values)
    wide = DType.I32 if kind is DType.BOOL else kind.compute
    old, new = (cx.cast(v, wide) for v in (rows.target, rows.values))
    count = old.shape[0]
    merge = "sum" if op == "mean" else op
    if op in ("max", "min") and include_self and cx.training:
        # In one step: all that are equal to the result share its gradient.
        every = cx.b.concat((cx.iota((count,), 0, DType.I64), rows.places), 0)
        both = cx.b.concat((old, new), 0)
        return cx.cast(cx.b.emit("scatter", every, both, op=op, rows=count), kind)
    found = cx.b.emit("scatter", rows.places, new, op=merge, rows=count)
    if op == "sum" and include_self:
        return cx.cast(cx.add(old, found), kind)
    if op in ("prod", "max", "min") and include_self:
        return cx.cast(cx.arith(COMBINES[op], old, found), kind)
    hits, hit = _hit(cx, rows)
    if op == "mean":
        total = cx.add(old, found) if include_self else found
        among = cx.cast(cx.add(hits, 1) if include_self else hits, wide)
        among = cx.arith("maximum", among, 1, wide)
        found = cx.arith("div" if wide.is_float else "floordiv", total, among, wide)
    return cx.cast(cx.select(hit, found, old), kind)


def rows_at(
    cx: TorchContext,
    x: Value,
    indices: Sequence[Value | None],
    values: Value,
    *,
    wraps: bool,
) -> ScatterRows:
    """x[i, :, j] and values; with `wraps`, negative indices count from the end."""
    plain = [i for i in indices if i is not None]
    used_axes = [a for a, i in enumerate(indices) if i is not None]
    aligned = cx.aligned(*plain)
    shape = cx.b.broadcast_shapes(*(i.shape for i in aligned))
    rest = [a for a in range(x.type.rank) if a not in used_axes]
    beside = [x.shape[a] for a in rest]
    # If the indexed axes are adjacent, the dims of the indices take their place; else
    # they come first.
    first = used_axes[0]
    together = used_axes == list(range(first, first + len(used_axes)))
    lead = first if together else 0
    full = (*beside[:lead], *shape, *beside[lead:])
    spread = cx.broadcast_to(cx.cast(values, x.dtype), full)
    rank = len(shape)
    order = [*range(lead, lead + rank), *range(lead), *range(lead + rank, len(full))]
    spread = cx.transpose(spread, order)  # (indices.., beside..)
    inside = [
        cx.in_range(index, x.shape[axis], axis, wraps=wraps)
        for axis, index in zip(used_axes, aligned, strict=True)
    ]
    place = cx.b.flat_place(inside, [x.shape[axis] for axis in used_axes])
    place = cx.broadcast_to(place, shape)
    count, width = product(shape), product(beside)
    order = used_axes + rest
    inverse = [order.index(i) for i in range(x.type.rank)]
    front = tuple(x.shape[a] for a in order)
    return ScatterRows(
        cx.reshape(cx.transpose(x, order), (cx.count(x, used_axes), width)),
        cx.reshape(place, (count,)),
        cx.reshape(spread, (count, width)),
        lambda new: cx.transpose(cx.reshape(new, front), inverse),
    )


def scatter_add(
    cx: TorchContext, x: Value, dim: int, index: Value, src: Value
) -> Value:
    """x[.., index[.., j, ..], ..] += src[.., j, ..]"""
    rows = rows_along(cx, x, dim, index, src)
    return rows.back(merged(cx, rows, "sum"))


def rows_along(
    cx: TorchContext, x: Value, dim: int, index: Value, src: Value
) -> ScatterRows:
    """x[.., index[.., j, ..], ..] and src[.., j, ..]"""
    whole = x.shape
    if not x.type.rank:
        x, index, src = (cx.reshape(v, (v.type.numel,)) for v in (x, index, src))
    if not index.type.rank:
        index, src = cx.reshape(index, (1,)), cx.reshape(src, (1,))
    axis = cx.axis(dim, x.type.rank)
    shape = index.shape
    for i, (have, want) in enumerate(zip(src.shape, shape, strict=True)):
        if not cx.b.same(have, want):
            src = cx.slice(src, i, 0, want)
    for i, (have, want) in enumerate(zip(shape, x.shape, strict=True)):
        if i != axis:
            cx.require(le(have, want), "no more indices than rows")
    inside = cx.in_range(index, x.shape[axis], axis)
    places = [
        inside if i == axis else cx.iota(shape, i, DType.I64)
        for i in range(x.type.rank)
    ]
    flat = cx.reshape(cx.b.flat_place(places, x.shape), (index.type.numel,))
    return ScatterRows(
        cx.reshape(x, (x.type.numel, 1)),
        flat,
        cx.reshape(cx.cast(src, x.dtype), (index.type.numel, 1)),
        lambda new: cx.reshape(new, whole),
    )


def index_add(
    cx: TorchContext, x: Value, dim: int, index: Value, source: Value, *, alpha: Any = 1
) -> Value:
    if not x.type.rank:
        x, index, source = (cx.reshape(v, (v.type.numel,)) for v in (x, index, source))
        return cx.reshape(index_add(cx, x, 0, index, source, alpha=alpha), ())
    axis = cx.axis(dim, x.type.rank)
    added = source if alpha == 1 else cx.mul(source, alpha)
    index = cx.reshape(index, (index.type.numel,))
    rows = rows_at(cx, x, [*[None] * axis, index], added, wraps=False)
    return rows.back(merged(cx, rows, "sum"))


def scatter(cx: TorchContext, x: Value, dim: int, index: Value, src: Operand) -> Value:
    """x[.., index[.., j, ..], ..] = src[.., j, ..]; of equal indices the last wins."""
    if not x.type.rank:
        x, index = (cx.reshape(v, (v.type.numel,)) for v in (x, index))
        if isinstance(src, Value):
            src = cx.reshape(src, (src.type.numel,))
        return cx.reshape(scatter(cx, x, 0, index, src), ())
    axis = cx.axis(dim, x.type.rank)
    few = index.shape[axis] if index.type.rank else as_expr(1)
    if not few.is_const or few.value > MOST_WRITES or not index.type.rank:
        values = cx.tensor(src, x.dtype)
        values = values if values.type.rank else cx.broadcast_to(values, index.shape)
        rows = rows_along(cx, x, dim, index, values)
        return rows.back(merged(cx, rows, "last"))
    places = cx.in_range(index, x.shape[axis], axis)
    values = cx.tensor(src, x.dtype)
    if values.type.rank:
        for i, size in enumerate(index.shape):
            values = cx.slice(values, i, 0, size)
        values = _extended(cx, values, x.shape, axis, 0)
    places = _extended(cx, places, x.shape, axis, -1)
    along = cx.iota(x.shape, axis, DType.I64)
    for j in range(index.shape[axis].value):
        hit = cx.arith("eq", along, cx.slice(places, axis, j, 1))
        new = cx.slice(values, axis, j, 1) if values.type.rank else values
        x = cx.b.select(hit, cx.broadcast_to(new, x.shape), x)
    return x


def _extended(
    cx: TorchContext, part: Value, shape: Sequence[Expr], axis: int, fill: float
) -> Value:
    """`part` filled up to `shape`, but along one axis."""
    high = [as_expr(0)] * len(shape)
    for i, (have, want) in enumerate(zip(part.shape, shape, strict=True)):
        if i != axis and not cx.b.same(have, want):
            cx.require(le(have, want), "no more indices than rows")
            high[i] = cx.simplify(want - have)
    if all(width == 0 for width in high):
        return part
    low = (as_expr(0),) * len(shape)
    out = cx.b.emit("pad", part, low=low, high=tuple(high), value=fill)
    # have + (want - have) is want
    return cx.reshape(
        out, [d if i != axis else part.shape[i] for i, d in enumerate(shape)]
    )


def scatter_reduce(
    cx: TorchContext,
    x: Value,
    dim: int,
    index: Value,
    src: Operand,
    *,
    reduce: str,
    include_self: bool = True,
) -> Value:
    values = cx.tensor(src, x.dtype)
    if not values.type.rank and index.type.rank:
        values = cx.broadcast_to(values, index.shape)
    rows = rows_along(cx, x, dim, index, values)
    return rows.back(merged(cx, rows, REDUCES[reduce], include_self))


def scatter_reduce_two(
    cx: TorchContext,
    x: Value,
    dim: int,
    index: Value,
    src: Value,
    reduce: str,
    *,
    include_self: bool = True,
) -> Value:
    return scatter_reduce(
        cx, x, dim, index, src, reduce=reduce, include_self=include_self
    )


def _one_axis(
    cx: TorchContext, x: Value, dim: int, index: Value, values: Value, wraps: bool
) -> ScatterRows:
    """x[.., index, ..] and values; a scalar is a vector of one element."""
    whole = x.shape
    if not x.type.rank:
        x, values = cx.reshape(x, (1,)), cx.reshape(values, (values.type.numel,))
    axis = cx.axis(dim, x.type.rank)
    index = cx.reshape(index, (index.type.numel,))
    if not values.type.rank and x.type.rank == 1:
        values = cx.reshape(values, (1,))
    rows = rows_at(cx, x, [*[None] * axis, index], values, wraps=wraps)
    return replace(rows, back=lambda new: cx.reshape(rows.back(new), whole))


def index_copy(
    cx: TorchContext, x: Value, dim: int, index: Value, source: Value
) -> Value:
    rows = _one_axis(cx, x, dim, index, source, wraps=False)
    return rows.back(merged(cx, rows, "last"))


def index_fill(
    cx: TorchContext, x: Value, dim: int, index: Value, value: Operand
) -> Value:
    filling = cx.tensor(value, x.dtype)
    rows = _one_axis(cx, x, dim, index, filling, wraps=True)
    if cx.training:  # a place that is filled twice gives its gradient once
        return rows.back(cx.select(_hit(cx, rows)[1], filling, rows.target))
    return rows.back(merged(cx, rows, "last"))


def index_reduce(
    cx: TorchContext,
    x: Value,
    dim: int,
    index: Value,
    source: Value,
    reduce: str,
    *,
    include_self: bool = True,
) -> Value:
    rows = _one_axis(cx, x, dim, index, source, wraps=False)
    return rows.back(merged(cx, rows, REDUCES[reduce], include_self))


def put(
    cx: TorchContext, x: Value, index: Value, source: Value, accumulate: bool = False
) -> Value:
    """Elements of x as a vector."""
    flat = cx.reshape(x, (x.type.numel,))
    count = index.type.numel
    values = cx.reshape(source, (source.type.numel,))
    cx.b.require_equal(source.type.numel, count, "put writes as many as it is given")
    places = cx.reshape(index, (count,))
    rows = rows_at(cx, flat, [places], values, wraps=True)
    return cx.reshape(
        rows.back(merged(cx, rows, "sum" if accumulate else "last")), x.shape
    )


def masked_scatter(cx: TorchContext, x: Value, mask: Value, source: Value) -> Value:
    """The elements of source in order, where the mask says.

    An element's number is how many are masked before it.
    """
    shape = cx.b.broadcast_shapes(x.shape, mask.shape)
    x, mask = (cx.broadcast_to(v, shape) for v in (x, cx.to_bool(mask)))
    count = x.type.numel
    flat = cx.cast(cx.reshape(mask, (count,)), DType.I64)
    number = cx.sub(cx.b.emit("cumulate", flat, op="sum", axis=0), flat)
    number = cx.reshape(number, shape)
    values = cx.reshape(cx.cast(source, x.dtype), (source.type.numel,))
    some = cx.simplify(minimum(count, 1))
    # Elements that are not masked read an extra element, which is not used.
    extra = cx.full(0, (some,), x.dtype)
    values = cx.concat([values, extra], 0)
    wanted = cx.select(mask, number, cx.tensor(source.type.numel, DType.I64))
    picked = cx.b.emit(
        "index", values, cx.in_range(wanted, cx.simplify(values.shape[0]), 0)
    )
    return cx.b.select(mask, picked, x)


SCATTER: dict[Any, Translate] = {
    aten.embedding_dense_backward.default: embedding_backward,
    aten.index_put.default: index_put,
    aten._unsafe_index_put.default: index_put,
    aten.index_add.default: index_add,
    aten.index_copy.default: index_copy,
    aten.index_fill.int_Scalar: index_fill,
    aten.index_fill.int_Tensor: index_fill,
    aten.index_reduce.default: index_reduce,
    aten.put.default: put,
    aten.masked_scatter.default: masked_scatter,
    aten.scatter.src: scatter,
    aten.scatter.value: scatter,
    aten.scatter.reduce: scatter_reduce,
    aten.scatter.value_reduce: scatter_reduce,
    aten.scatter_add.default: scatter_add,
    aten.scatter_reduce.two: scatter_reduce_two,
}
