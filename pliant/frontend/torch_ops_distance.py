"""Distances between rows, membership, bags of embeddings, written diagonals."""

from __future__ import annotations

import math
from typing import Any

import torch

from pliant.frontend.torch_ops_context import TorchContext, as_index, used
from pliant.frontend.torch_ops_math import Translate
from pliant.frontend.torch_ops_nn import matmul
from pliant.frontend.torch_ops_shape import take, unsqueeze
from pliant.ir.graph import Value
from pliant.ir.types import DType
from pliant.sym import floordiv, maximum, minimum

aten = torch.ops.aten


def _norm(cx: TorchContext, off: Value, p: float) -> Value:
    """The p-norm of the last axis; of nothing it is 0."""
    axes = (off.type.rank - 1,)
    size = cx.unary("abs", off)
    if p == 0:
        return cx.reduce("sum", cx.cast(cx.arith("ne", off, 0.0), off.dtype), axes)
    if p == 1:
        return cx.reduce("sum", size, axes)
    if p == 2:
        squares = cx.reduce("sum", cx.mul(off, off), axes)
        return cx.unary("sqrt", cx.flat_at_zero(squares))
    if p == math.inf:
        return _largest(cx, size, axes)
    powers = cx.arith("pow", cx.flat_at_zero(size) if p < 1 else size, p)
    return cx.arith("pow", cx.flat_at_zero(cx.reduce("sum", powers, axes)), 1 / p)


def _largest(cx: TorchContext, size: Value, axes: tuple[int, ...]) -> Value:
    """Each element that is the largest has all of the gradient, as in torch."""
    found = cx.arith("maximum", cx.reduce("max", size, axes), 0.0)
    if not cx.training:
        return found
    hit = cx.arith("eq", size, unsqueeze(cx, found, -1))
    zeros = cx.full(0.0, size.shape, size.dtype)
    hits = cx.reduce("sum", cx.with_slopes(zeros, (size, hit)), axes)
    return cx.with_slopes(found, (hits, 1.0))


def cdist(
    cx: TorchContext, x: Value, y: Value, p: float = 2, compute_mode: int | None = None
) -> Value:
    rows, others = unsqueeze(cx, x, -2), unsqueeze(cx, y, -3)
    return _norm(cx, cx.sub(rows, others), p)


def pdist(cx: TorchContext, x: Value, p: float = 2) -> Value:
    """Of each two rows i < j, by rows: where row i begins there are i (2n - i - 1) / 2.

    The row is guessed with floats, and set right with integers.
    """
    n = x.shape[0]
    count = cx.simplify(maximum(floordiv(n * (n - 1), 2), 0))
    k = cx.iota((count,), 0, DType.I64)
    width = cx.tensor(2 * n - 1, DType.F64)
    under = cx.sub(cx.mul(width, width), cx.mul(cx.cast(k, DType.F64), 8.0))
    guess = cx.mul(cx.sub(width, cx.unary("sqrt", under)), 0.5)
    row = cx.cast(cx.unary("floor", guess), DType.I64)

    def begin(i: Value) -> Value:
        return cx.arith("floordiv", cx.mul(i, cx.sub(2 * n - 1, i)), 2)

    row = cx.sub(row, cx.cast(cx.arith("gt", begin(row), k), DType.I64))
    following = cx.arith("le", begin(cx.add(row, 1)), k)
    row = cx.add(row, cx.cast(following, DType.I64))
    column = cx.add(cx.sub(k, begin(row)), cx.add(row, 1))
    cx.nonnegative |= {row, column}
    return _norm(cx, cx.sub(take(cx, x, 0, row), take(cx, x, 0, column)), p)


def embedding_bag(
    cx: TorchContext,
    weight: Value,
    indices: Value,
    offsets: Value,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Value | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> list[Any]:
    """The sum, mean or maximum of the rows of each bag, and three unused results.

    A bag begins at its offset, so the number of a row's bag is the number of offsets
    up to that row.
    """
    if any(used(cx, which) for which in (1, 2, 3)):
        cx.unsupported("embedding_bag that gives more than the bags")
    if scale_grad_by_freq:
        cx.unsupported("embedding_bag with scale_grad_by_freq")
    count, bags = indices.shape[0], offsets.shape[0]
    if include_last_offset:
        bags = cx.simplify(maximum(bags - 1, 0))
        offsets = cx.slice(offsets, 0, 0, bags)
    ones = cx.full(1, (bags, 1), DType.I64)
    marks = cx.b.emit("scatter", as_index(cx, offsets), ones, op="sum", rows=count + 1)
    number = cx.b.emit("cumulate", cx.slice(marks, 0, 0, count), op="sum", axis=0)
    place = cx.sub(cx.reshape(number, (count,)), 1)
    rows = take(cx, weight, 0, cx.in_range(indices, weight.shape[0], 0))
    rows = cx.cast(rows, rows.dtype.compute)
    if per_sample_weights is not None:
        rows = cx.mul(rows, unsqueeze(cx, per_sample_weights, -1))
    kept = cx.full(True, (count, 1), DType.BOOL)
    if padding_idx >= 0:
        kept = unsqueeze(cx, cx.arith("ne", indices, padding_idx), -1)
    among = cx.b.emit("scatter", place, cx.cast(kept, DType.I64), op="sum", rows=bags)
    if mode == 2:
        rows = cx.select(kept, rows, -math.inf)
        out = cx.b.emit("scatter", place, rows, op="max", rows=bags)
        out = cx.select(cx.arith("gt", among, 0), out, 0.0)
    else:
        out = cx.b.emit(
            "scatter", place, cx.select(kept, rows, 0.0), op="sum", rows=bags
        )
    if mode == 1:
        least = cx.arith("maximum", among, 1)
        out = cx.div(out, cx.cast(least, out.dtype))
    return [cx.cast(out, weight.dtype), None, None, None]


def diagonal_scatter(
    cx: TorchContext,
    x: Value,
    src: Value,
    offset: int = 0,
    dim1: int = 0,
    dim2: int = 1,
) -> Value:
    """x with a diagonal replaced; its axis is the last one of src."""
    rank = x.type.rank
    a, b = cx.axis(dim1, rank), cx.axis(dim2, rank)
    rest = [i for i in range(rank) if i not in (a, b)]
    order = [a, b, *rest]
    front = cx.transpose(x, order)  # (rows, columns, rest..)
    rows, columns = front.shape[:2]
    low, high = max(-offset, 0), max(offset, 0)
    size = cx.simplify(maximum(minimum(rows - low, columns - high), 0))
    row = cx.iota((rows, 1), 0, DType.I64)
    on = cx.arith("eq", cx.iota((1, columns), 1, DType.I64), cx.add(row, offset))
    new = cx.move_axis(cx.cast(src, x.dtype), src.type.rank - 1, 0)
    cx.b.require_equal(new.shape[0], size, "as many elements as the diagonal has")
    # Rows without an element of the diagonal read an extra one that is appended.
    extra = cx.full(0, (1, *new.shape[1:]), x.dtype)
    number = cx.sub(cx.iota((rows,), 0, DType.I64), low)
    inside = cx.b.binary(
        "logical_and", cx.arith("ge", number, 0), cx.arith("lt", number, size)
    )
    number = cx.select(inside, number, cx.tensor(size, DType.I64))
    cx.nonnegative.add(number)
    picked = take(cx, cx.concat([new, extra], 0), 0, number)
    on = cx.reshape(on, (rows, columns, *[1] * len(rest)))
    out = cx.select(on, unsqueeze(cx, picked, 1), front)
    return cx.transpose(out, [order.index(i) for i in range(rank)])


def angle(cx: TorchContext, x: Value) -> Value:
    x = cx.cast(x, cx.out_dtype)
    by_sign = cx.select(cx.arith("lt", x, 0.0), math.pi, cx.mul(cx.sub(x, x), 0.0))
    zero = cx.select(cx.unary("isinf", x), 0.0, by_sign)
    return cx.select(cx.arith("lt", x, 0.0), math.pi, zero)


def addbmm(
    cx: TorchContext, x: Value, a: Value, b: Value, *, beta: Any = 1, alpha: Any = 1
) -> Value:
    """The products of a batch summed up are one product."""
    batch, rows, inner = a.shape
    wide = cx.reshape(cx.transpose(a, [1, 0, 2]), (rows, batch * inner))
    tall = cx.reshape(b, (batch * inner, b.shape[2]))
    out = matmul(cx, wide, tall)
    out = out if alpha == 1 else cx.mul(out, alpha)
    if beta == 0:
        return out
    return cx.add(x if beta == 1 else cx.mul(x, beta), out)


DISTANCE: dict[Any, Translate] = {
    aten.cdist.default: cdist,
    aten._cdist_forward.default: cdist,
    aten._pdist_forward.default: pdist,
    aten._euclidean_dist.default: lambda cx, x, y: cdist(cx, x, y, 2.0),
    aten._embedding_bag.default: embedding_bag,
    aten._embedding_bag_forward_only.default: embedding_bag,
    aten.diagonal_scatter.default: diagonal_scatter,
    aten.angle.default: angle,
    aten.addbmm.default: addbmm,
}
