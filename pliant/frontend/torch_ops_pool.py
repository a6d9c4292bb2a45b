"""Pools that tell what they picked, pools of random windows, backwards of means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pliant.frontend.torch_ops_context import Size, TorchContext, used
from pliant.frontend.torch_ops_math import Translate
from pliant.frontend.torch_ops_nn import adaptive_pool, max_pool
from pliant.ir.graph import Value
from pliant.ir.types import DType
from pliant.ir.windows import Window, max_pool_places, mean_pool_input
from pliant.sym import Expr, as_expr, ceildiv, le, product

aten = torch.ops.aten


def _sliding(
    cx: TorchContext,
    rank: int,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> Window:
    window = cx.ints(kernel_size, rank, "kernel size")
    given = isinstance(stride, int | Expr) or bool(stride)
    steps = cx.ints(stride, rank, "stride") if given else window
    pads = cx.ints(padding, rank, "padding")
    spread = cx.ints(dilation, rank, "dilation")
    # The last windows of a rounded-up pool reach behind the padding.
    tail = [p + (s - 1 if ceil_mode else 0) for p, s in zip(pads, steps, strict=True)]
    return Window(*(tuple(row) for row in (window, steps, pads, tail, spread)))


def max_pool_kept(rank: int) -> Translate:
    """(out, the place in its plane of each element of it)"""
    values = max_pool(rank)

    def translate(cx: TorchContext, x: Value, *args: Any, **named: Any) -> list[Any]:
        out = values(cx, x, *args, **named)
        if not used(cx, 1):
            return [out, None]
        window = _sliding(cx, rank, *args, **named)
        return [out, max_pool_places(cx.b, x, out.shape[-rank:], window)]

    return translate


# --- the largest of windows along one axis after the other -------------------------


def _along(
    cx: TorchContext, x: Value, where: Value, axis: int, first: Value, inside: Value
) -> tuple[Value, Value]:
    """The largest of each window of an axis, and what `where` has there.

    first[i] is where window i begins, inside[i, k] whether it has a k-th element. Of
    equals the first is taken, and the last NaN, as torch does.
    """
    count, widest = inside.shape
    steps = cx.iota((1, widest), 1, DType.I64)
    place = cx.add(cx.reshape(first, (count, 1)), steps)
    safe = cx.arith("maximum", cx.arith("minimum", place, x.shape[axis] - 1), 0)

    def windows(value: Value) -> Value:  # (.., count, widest, ..)
        found = cx.b.emit("index", cx.move_axis(value, axis, 0), safe)
        order = [*range(2, 2 + axis), 0, 1, *range(2 + axis, found.type.rank)]
        return cx.transpose(found, order)

    values, places = windows(x), windows(where)
    mask = cx.b.broadcast(inside, values.shape, (axis, axis + 1))
    values = cx.b.select(mask, values, cx.tensor(_lowest(x.dtype), x.dtype))
    steps = cx.iota(values.shape, axis + 1, DType.I64)
    best = cx.reduce("max", values, (axis + 1,), keepdims=True)
    hit = cx.b.binary("eq", values, best)
    most = cx.full(2**62, values.shape, DType.I64)
    pick = cx.reduce("min", cx.b.select(hit, steps, most), (axis + 1,), keepdims=True)
    if x.dtype.is_float:
        none = cx.full(-1, values.shape, DType.I64)
        empty = cx.b.select(cx.unary("isnan", values), steps, none)
        last = cx.reduce("max", empty, (axis + 1,), keepdims=True)
        pick = cx.select(cx.arith("ge", last, 0), last, pick)
    found = cx.b.emit("take_along", places, pick, axis=axis + 1)
    if cx.training:  # of equals, the one that is picked has the gradient
        best = cx.b.emit("take_along", values, pick, axis=axis + 1)
    shape = (*x.shape[:axis], count, *x.shape[axis + 1 :])
    return cx.reshape(best, shape), cx.reshape(found, shape)


def _lowest(dtype: DType) -> float | int:
    return float("-inf") if dtype.is_float else -(2 ** (8 * dtype.bytes - 1))


def _in_plane(cx: TorchContext, x: Value, rank: int) -> Value:
    """Of each element its place in its plane, the last dims."""
    out = cx.full(0, x.shape, DType.I64)
    for axis in range(x.type.rank - rank, x.type.rank):
        out = cx.add(cx.mul(out, x.shape[axis]), cx.iota(x.shape, axis, DType.I64))
    return out


def adaptive_max_pool_kept(rank: int) -> Translate:
    values = adaptive_pool("max", rank)

    def translate(cx: TorchContext, x: Value, output_size: Any) -> list[Any]:
        if not used(cx, 1) and not cx.training:
            return [values(cx, x, output_size), None]
        sizes = [output_size] if isinstance(output_size, int | Expr) else output_size
        sizes = list(sizes) * rank if len(sizes) == 1 else sizes
        lead = x.type.rank - rank
        for size in x.shape[lead:]:
            cx.require(le(1, size), "an adaptive pool needs elements")
        out, where = x, _in_plane(cx, x, rank)
        # The innermost first: of equals in a plane, the first row counts.
        for axis, size in reversed(list(enumerate(sizes, lead))):
            out, where = _adapted(cx, out, where, axis, as_expr(size))
        return [out, where]

    return translate


def _adapted(
    cx: TorchContext, x: Value, where: Value, axis: int, count: Expr
) -> tuple[Value, Value]:
    size = x.shape[axis]
    widest = cx.simplify(ceildiv(size, count) + 1)
    i = cx.iota((count,), 0, DType.I64)
    first = cx.arith("floordiv", cx.mul(i, size), count)
    last = cx.arith("floordiv", cx.add(cx.mul(i, size), size + count - 1), count)
    steps = cx.iota((count, widest), 1, DType.I64)
    length = cx.reshape(cx.sub(last, first), (count, 1))
    return _along(cx, x, where, axis, first, cx.arith("lt", steps, length))


def fractional_max_pool(rank: int) -> Translate:
    """Windows at pseudorandom places (Graham 2014), by a sample for each axis."""

    def translate(
        cx: TorchContext,
        x: Value,
        kernel_size: Any,
        output_size: Sequence[Size],
        samples: Value,
    ) -> list[Any]:
        window = cx.ints(kernel_size, rank, "kernel size")
        lead = x.type.rank - rank
        flat = x if lead == 2 else cx.reshape(x, (1, *x.shape))
        sizes = [as_expr(n) for n in output_size]
        count = samples.shape[0] * samples.shape[1]
        planes = cx.reshape(flat, (count, *flat.shape[2:]))
        places = _in_plane(cx, planes, rank)
        draws = cx.reshape(samples, (count, rank))
        # The last axis first, with the first of the samples.
        for k in reversed(range(rank)):
            draw = cx.slice(draws, 1, rank - 1 - k if rank == 2 else k, 1)
            first = _starts(cx, draw, planes.shape[k + 1], sizes[k], window[k])
            planes, places = _picked(cx, planes, places, k + 1, first, window[k])
        shape = (*x.shape[:lead], *sizes)
        return [cx.reshape(planes, shape), cx.reshape(places, shape)]

    return translate


def _starts(
    cx: TorchContext, sample: Value, size: Expr, count: Expr, window: int
) -> Value:
    """(plane, window) -> where the window begins; the last one at the end."""
    cx.require(le(count + window - 1, size), "a fractional pool needs elements")
    shape = (sample.shape[0], count)
    wide = sample.dtype
    i = cx.iota((1, count), 1, DType.I64)
    span = cx.tensor(size - window, wide)
    alpha = cx.div(span, cx.arith("maximum", cx.tensor(count - 1, wide), 1.0))
    moved = cx.mul(cx.add(cx.cast(i, wide), sample), alpha)
    start = cx.sub(cx.cast(moved, DType.I64), cx.cast(cx.mul(sample, alpha), DType.I64))
    last = cx.b.broadcast_to(cx.arith("eq", i, count - 1), shape)
    return cx.select(last, cx.full(size - window, shape, DType.I64), start)


def _picked(
    cx: TorchContext, x: Value, where: Value, axis: int, first: Value, window: int
) -> tuple[Value, Value]:
    """The largest of each plane's windows along an axis; of equals the first."""
    planes, count = first.shape
    shape = [as_expr(1)] * x.type.rank
    shape[0], shape[axis] = planes, count
    wide = (*x.shape[:axis], count, *x.shape[axis + 1 :])
    best: Value | None = None
    found: Value | None = None
    for k in range(window):
        place = cx.b.broadcast_to(cx.reshape(cx.add(first, k), shape), wide)
        value = cx.b.emit("take_along", x, place, axis=axis)
        own = cx.b.emit("take_along", where, place, axis=axis)
        if best is None or found is None:
            best, found = value, own
            continue
        more = cx.b.binary("gt", value, best)
        more = cx.b.binary("logical_or", more, cx.unary("isnan", value))
        best, found = cx.b.select(more, value, best), cx.b.select(more, own, found)
    assert best is not None and found is not None
    return best, found


# --- backwards of means --------------------------------------------------------------


def avg_pool_backward(
    cx: TorchContext,
    grad: Value,
    x: Value,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Value:
    if ceil_mode:
        cx.unsupported("the gradient of an avg_pool that rounds up")
    window = _sliding(cx, 2, kernel_size, stride, padding)
    include = count_include_pad or bool(divisor_override)
    out = mean_pool_input(cx.b, grad, x.shape, window, include)
    if divisor_override:
        out = cx.mul(out, window.size[0] * window.size[1] / divisor_override)
    return out


def adaptive_avg_pool_backward(cx: TorchContext, grad: Value, x: Value) -> Value:
    """Every window's share goes to all of it: one product for each axis."""
    out = cx.cast(grad, grad.dtype.compute)
    for axis in (grad.type.rank - 2, grad.type.rank - 1):
        size, count = x.shape[axis], grad.shape[axis]
        shape = (count, size)
        i, at = (cx.iota(shape, k, DType.I64) for k in (0, 1))
        first = cx.arith("floordiv", cx.mul(i, size), count)
        last = cx.arith("floordiv", cx.add(cx.mul(i, size), size + count - 1), count)
        inside = cx.b.binary(
            "logical_and", cx.arith("ge", at, first), cx.arith("lt", at, last)
        )
        share = cx.div(1.0, cx.cast(cx.sub(last, first), out.dtype))
        spread = cx.select(inside, share, cx.tensor(0.0, out.dtype))
        moved = cx.move_axis(out, axis, out.type.rank - 1)
        rows = cx.reshape(moved, (product(moved.shape[:-1]), count))
        made = cx.b.emit("matmul", rows, spread)
        made = cx.reshape(made, (*moved.shape[:-1], size))
        out = cx.move_axis(made, out.type.rank - 1, axis)
    return cx.cast(out, grad.dtype)


POOL: dict[Any, Translate] = {
    aten.max_pool2d_with_indices.default: max_pool_kept(2),
    aten.max_pool3d_with_indices.default: max_pool_kept(3),
    aten.adaptive_max_pool1d.default: adaptive_max_pool_kept(1),
    aten.adaptive_max_pool2d.default: adaptive_max_pool_kept(2),
    aten.adaptive_max_pool3d.default: adaptive_max_pool_kept(3),
    aten.fractional_max_pool2d.default: fractional_max_pool(2),
    aten.fractional_max_pool3d.default: fractional_max_pool(3),
    aten.avg_pool2d_backward.default: avg_pool_backward,
    aten._adaptive_avg_pool2d_backward.default: adaptive_avg_pool_backward,
    aten._adaptive_avg_pool3d.default: adaptive_pool("mean", 3),
}
