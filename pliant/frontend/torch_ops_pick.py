"""aten ops that create tensors, and that pick elements by index."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch

from pliant.frontend.torch_ops_context import (
    Operand,
    Real,
    Size,
    TorchContext,
    as_index,
)
from pliant.frontend.torch_ops_math import Translate
from pliant.frontend.torch_ops_shape import take, unsqueeze
from pliant.frontend.torch_ops_window import drop_axis
from pliant.ir.graph import Value
from pliant.ir.types import DType
from pliant.sym import Expr, as_expr, ceildiv, floordiv, le, maximum, minimum

aten = torch.ops.aten


# --- creation -------------------------------------------------------------------


def filled(value: Any) -> Translate:
    """zeros, ones, empty: a size, then options."""
    return lambda cx, size, dtype=None, **_: cx.full(value, size, cx.out_dtype)


def filled_like(value: Any) -> Translate:
    return lambda cx, x, dtype=None, **_: cx.full(value, x.shape, cx.out_dtype)


def filled_new(value: Any) -> Translate:
    return lambda cx, x, size, dtype=None, **_: cx.full(value, size, cx.out_dtype)


def full(cx: TorchContext, size: Sequence[Size], value: Operand, **_: Any) -> Value:
    return cx.full(value, size, cx.out_dtype)


def full_like(cx: TorchContext, x: Value, value: Operand, **_: Any) -> Value:
    return cx.full(value, x.shape, cx.out_dtype)


def new_full(
    cx: TorchContext, x: Value, size: Sequence[Size], value: Operand, **_: Any
) -> Value:
    return cx.full(value, size, cx.out_dtype)


def fill(cx: TorchContext, x: Value, value: Operand) -> Value:
    return cx.full(value, x.shape, x.dtype)


def zero(cx: TorchContext, x: Value) -> Value:
    return cx.full(0, x.shape, x.dtype)


def copy(cx: TorchContext, x: Value, src: Value, non_blocking: bool = False) -> Value:
    return cx.broadcast_to(cx.cast(src, x.dtype), x.shape)


def scalar_tensor(cx: TorchContext, value: Operand, **_: Any) -> Value:
    return cx.tensor(value, cx.out_dtype)


def arange_end(cx: TorchContext, end: Any, **_: Any) -> Value:
    return arange(cx, 0, end)


def arange(cx: TorchContext, start: Any, end: Any, step: Any = 1, **_: Any) -> Value:
    dtype = cx.out_dtype
    if any(isinstance(n, Real) for n in (start, end, step)):
        cx.unsupported("arange between floats that depend on sizes")
    start, end, step = (_whole(n) for n in (start, end, step))
    if any(isinstance(n, float) for n in (start, end, step)):
        size = _float_places(cx, start, end, step)
    else:
        stride = cx.simplify(step)
        if not stride.is_const:
            cx.require(le(1, stride), "arange's step must be positive")
        up = not stride.is_const or stride.value > 0
        span = (as_expr(end) - start) if up else (as_expr(start) - end)
        stride = stride if up else as_expr(-stride.value)
        size = cx.simplify(maximum(ceildiv(span, stride), 0))
    simple = step == 1 and start == 0
    # Floats: start + i*step in f64, as torch, then rounded once.
    wide = DType.F64 if dtype.is_float and not simple else dtype
    if dtype in (DType.F16, DType.BF16):
        wide = DType.F32 if simple else DType.F64
    out = cx.iota((size,), 0, wide)
    if step != 1:
        out = cx.arith("mul", out, step, wide)
    if start != 0:
        out = cx.arith("add", out, start, wide)
    out = cx.cast(out, dtype)
    grows = isinstance(start, int) and start >= 0
    if grows and isinstance(step, int) and step > 0:
        cx.nonnegative.add(out)
    return out


def _whole(n: Any) -> Any:
    """2.0 as 2, which counts from and to sizes too."""
    exact = isinstance(n, float) and n.is_integer() and abs(n) < 2**53
    return int(n) if exact else n


def _float_places(cx: TorchContext, start: Any, end: Any, step: Any) -> Expr:
    """How many numbers there are: ceil((end - start) / step) in f64, as torch has it.

    Ends that are sizes leave it exact if the floats are fractions of few bits, as 0.5.
    """
    given = [n for n in (start, end, step) if not isinstance(n, Expr)]
    floats = [Fraction(n) for n in given if math.isfinite(n)]
    scale = math.lcm(*(n.denominator for n in floats))
    short = max(scale, *(abs(n.numerator) for n in floats)) <= _SHORT
    sizes = len(given) < 3 and not isinstance(step, Expr)
    if short and sizes and len(floats) == len(given):
        first, last, by = (
            n * scale if isinstance(n, Expr) else as_expr(int(Fraction(n) * scale))
            for n in (start, end, step)
        )
        up = by.value > 0
        span = last - first if up else first - last
        return cx.simplify(maximum(ceildiv(span, by if up else -by), 0))
    numbers = [_number(cx, n) for n in (start, end, step)]
    return as_expr(max(math.ceil((numbers[1] - numbers[0]) / numbers[2]), 0))


_SHORT = 1 << 20


def _number(cx: TorchContext, n: Any) -> float:
    if isinstance(n, Expr):
        return float(cx.constant_int(n, "arange's bound"))
    return float(n)


def linspace(cx: TorchContext, start: Any, end: Any, steps: Size, **_: Any) -> Value:
    count = as_expr(steps)
    first, last = (cx.tensor(n, DType.F64) for n in (start, end))
    place = cx.iota((count,), 0, DType.F64)
    gaps = cx.tensor(maximum(count - 1, 1), DType.F64)
    step = cx.div(cx.sub(last, first), gaps)
    # Counted from the nearer end, so that both ends are exact; one place is the start.
    rising = cx.add(cx.mul(place, step), first)
    behind = cx.sub(cx.tensor(count - 1, DType.F64), place)
    falling = cx.sub(last, cx.mul(behind, step))
    half = cx.tensor(maximum(floordiv(count, 2), 1), DType.F64)
    nearer = cx.arith("lt", place, half)
    return cx.cast(cx.select(nearer, rising, falling), cx.out_dtype)


def eye(cx: TorchContext, n: Size, m: Size | None = None, **_: Any) -> Value:
    row = cx.iota((n, 1), 0, DType.I64)
    column = cx.iota((1, n if m is None else m), 1, DType.I64)
    return cx.cast(cx.arith("eq", row, column), cx.out_dtype)


def one_hot(cx: TorchContext, x: Value, num_classes: int = -1) -> Value:
    if num_classes < 0:
        cx.unsupported("one_hot without num_classes: its size depends on the data")
    classes = cx.iota((num_classes,), 0, DType.I64)
    meant = unsqueeze(cx, cx.in_range(x, num_classes, x.type.rank), -1)
    return cx.cast(cx.arith("eq", meant, classes), DType.I64)


# --- picking by index -----------------------------------------------------------


def index_select(cx: TorchContext, x: Value, dim: int, index: Value) -> Value:
    index = cx.reshape(index, (index.type.numel,))
    if x.type.rank == 0:
        return cx.reshape(take(cx, cx.reshape(x, (1,)), 0, index), ())
    axis = cx.axis(dim, x.type.rank)
    _want_places(cx, index, x.shape[axis])
    return take(cx, x, axis, index)


def _want_places(cx: TorchContext, index: Value, size: Expr) -> None:
    """An axis without places has none to pick, even if nothing comes of it."""
    some = minimum(index.type.numel, 1)
    cx.require(le(some, size), "an index into an axis of no elements")


def gather(cx: TorchContext, x: Value, dim: int, index: Value, **_: Any) -> Value:
    if x.type.rank == 0:
        flat = cx.reshape(index, (index.type.numel,))
        return cx.reshape(gather(cx, cx.reshape(x, (1,)), 0, flat), index.shape)
    axis = cx.axis(dim, x.type.rank)
    if index.type.rank == 0:
        return cx.reshape(gather(cx, x, axis, cx.reshape(index, (1,))), ())
    out = cx.b.emit("take_along", x, as_index(cx, index), axis=axis)
    return cx.keep_sign(x, out)


def take_flat(cx: TorchContext, x: Value, index: Value) -> Value:
    """Elements of x as a vector; negative indices count from the end."""
    flat = cx.reshape(x, (x.type.numel,))
    places = cx.wrap_index(index, x.type.numel, 0)
    return cx.keep_sign(x, cx.b.emit("index", flat, places))


def take_along_dim(
    cx: TorchContext, x: Value, indices: Value, dim: int | None = None
) -> Value:
    if dim is None:
        x, dim = cx.reshape(x, (x.type.numel,)), 0
        indices = cx.reshape(indices, (indices.type.numel,))
    axis = cx.axis(dim, x.type.rank)
    # Dims beside the axis broadcast.
    ours = [as_expr(1) if i == axis else d for i, d in enumerate(x.shape)]
    theirs = [as_expr(1) if i == axis else d for i, d in enumerate(indices.shape)]
    shape = list(cx.b.broadcast_shapes(ours, theirs))
    wide = [x.shape[axis] if i == axis else d for i, d in enumerate(shape)]
    tall = [indices.shape[axis] if i == axis else d for i, d in enumerate(shape)]
    # torch takes every index, modulo the size.
    places = cx.arith("mod", as_index(cx, indices), x.shape[axis])
    cx.nonnegative.add(places)
    return gather(cx, cx.broadcast_to(x, wide), axis, cx.broadcast_to(places, tall))


def index_tensor(cx: TorchContext, x: Value, indices: Sequence[Value | None]) -> Value:
    """x[i, :, j]: index tensors broadcast together; None keeps a dim."""
    places = expand_masks(cx, x, indices)
    used = [axis for axis, place in enumerate(places) if place is not None]
    if not used:
        return x
    aligned = cx.aligned(*(p for p in places if p is not None))
    shape = cx.b.broadcast_shapes(*(p.shape for p in aligned))
    wrapped = []
    for axis, place in zip(used, aligned, strict=True):
        _want_places(cx, place, x.shape[axis])
        inside = cx.wrap_index(place, x.shape[axis], axis)
        wrapped.append(cx.broadcast_to(inside, shape))
    rest = [a for a in range(x.type.rank) if a not in used]
    front = cx.transpose(x, used + rest)
    out = cx.keep_sign(x, cx.b.emit("index", front, *wrapped))
    # Adjacent index tensors put their dims where the first one was.
    if used == list(range(used[0], used[0] + len(used))) and used[0] > 0:
        rank, lead = len(shape), used[0]
        kept = [rank + i for i in range(lead)]
        after = range(rank + lead, out.type.rank)
        out = cx.transpose(out, [*kept, *range(rank), *after])
    return out


def expand_masks(
    cx: TorchContext, x: Value, indices: Sequence[Value | None]
) -> list[Value | None]:
    """A mask of rank r stands for r index vectors, one per dim it covers."""
    places: list[Value | None] = []
    for index in indices:
        if index is None or index.dtype not in (DType.BOOL, DType.U8):
            places.append(index)
            continue
        covered = x.shape[len(places) : len(places) + index.type.rank]
        for have, want in zip(index.shape, covered, strict=True):
            cx.b.require_equal(have, want, "a mask must have the size it masks")
        found = cx.b.emit("nonzero", cx.to_bool(index))
        for column in range(index.type.rank):
            place = drop_axis(cx, cx.slice(found, 1, column, 1), 1)
            cx.nonnegative.add(place)
            places.append(place)
    return places


def masked_select(cx: TorchContext, x: Value, mask: Value) -> Value:
    x, mask = cx.aligned(x, mask)
    shape = cx.b.broadcast_shapes(x.shape, mask.shape) or (as_expr(1),)
    wide = cx.broadcast_to(x, shape)
    return index_tensor(cx, wide, [cx.broadcast_to(mask, shape)])


def nonzero(cx: TorchContext, x: Value) -> Value:
    out = cx.b.emit("nonzero", cx.to_bool(x))
    cx.nonnegative.add(out)
    return out


def diagonal(
    cx: TorchContext, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Value:
    a, b = cx.axis(dim1, x.type.rank), cx.axis(dim2, x.type.rank)
    rows, columns = x.shape[a], x.shape[b]
    low, high = max(-offset, 0), max(offset, 0)
    size = cx.simplify(maximum(minimum(rows - low, columns - high), 0))
    place = cx.iota((size,), 0, DType.I64)
    rest = [i for i in range(x.type.rank) if i not in (a, b)]
    front = cx.transpose(x, [a, b, *rest])
    picked = cx.b.emit("index", front, cx.add(place, low), cx.add(place, high))
    return cx.move_axis(picked, 0, len(rest))


def unfold(cx: TorchContext, x: Value, dimension: int, size: int, step: int) -> Value:
    """Sliding windows of one axis; the window becomes the last dim."""
    if x.type.rank == 0:  # one element, and one window
        return cx.slice(cx.reshape(x, (1,)), 0, 0, size)
    axis = cx.axis(dimension, x.type.rank)
    cx.require(le(as_expr(size), x.shape[axis]), "a window must fit into its axis")
    count = cx.simplify(floordiv(x.shape[axis] - size, step) + 1)
    start = cx.iota((count, 1), 0, DType.I64)
    start = start if step == 1 else cx.mul(start, step)
    place = cx.add(start, cx.iota((1, size), 1, DType.I64))
    front = cx.move_axis(x, axis, 0)
    picked = cx.b.emit("index", front, place)  # (count, size, rest..)
    picked = cx.move_axis(picked, 1, x.type.rank)
    return cx.move_axis(picked, 0, axis)


def pixel_shuffle(cx: TorchContext, x: Value, upscale_factor: int) -> Value:
    *lead, channels, height, width = x.shape
    r, n = upscale_factor, len(lead)
    split_up = cx.reshape(x, (*lead, channels // (r * r), r, r, height, width))
    perm = [*range(n), n, n + 3, n + 1, n + 4, n + 2]
    mixed = cx.transpose(split_up, perm)
    return cx.reshape(mixed, (*lead, channels // (r * r), height * r, width * r))


def pixel_unshuffle(cx: TorchContext, x: Value, downscale_factor: int) -> Value:
    *lead, channels, height, width = x.shape
    r, n = downscale_factor, len(lead)
    high, wide = height // r, width // r
    split_up = cx.reshape(x, (*lead, channels, high, r, wide, r))
    mixed = cx.transpose(split_up, [*range(n), n, n + 2, n + 4, n + 1, n + 3])
    return cx.reshape(mixed, (*lead, channels * r * r, high, wide))


PICK: dict[Any, Translate] = {
    # creation
    aten.zeros.default: filled(0),
    aten.ones.default: filled(1),
    aten.empty.memory_format: filled(0),
    aten.zeros_like.default: filled_like(0),
    aten.ones_like.default: filled_like(1),
    aten.empty_like.default: filled_like(0),
    aten.new_zeros.default: filled_new(0),
    aten.new_ones.default: filled_new(1),
    aten.new_empty.default: filled_new(0),
    aten.full.default: full,
    aten.full_like.default: full_like,
    aten.new_full.default: new_full,
    aten.fill.Scalar: fill,
    aten.fill.Tensor: fill,
    aten.zero.default: zero,
    aten.copy.default: copy,
    aten.scalar_tensor.default: scalar_tensor,
    aten.arange.default: arange_end,
    aten.arange.start: arange,
    aten.arange.start_step: arange,
    aten.linspace.default: linspace,
    aten.eye.default: eye,
    aten.eye.m: eye,
    aten.one_hot.default: one_hot,
    # picking
    aten.index_select.default: index_select,
    aten.gather.default: gather,
    aten.take.default: take_flat,
    aten.take_along_dim.default: take_along_dim,
    aten.index.Tensor: index_tensor,
    aten.masked_select.default: masked_select,
    aten.nonzero.default: nonzero,
    aten.diagonal.default: diagonal,
    aten.unfold.default: unfold,
    aten.pixel_shuffle.default: pixel_shuffle,
    aten.pixel_unshuffle.default: pixel_unshuffle,
}
