"""Gradients of convolutions and pools, written in graph ops.

Used for Pliant's own gradients (`passes/gradient_rules_conv.py`) and for torch's
backward ops (`frontend/torch_ops_backward_conv.py`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pliant.ir.build import Builder
from pliant.ir.graph import Op, Value
from pliant.ir.types import DType
from pliant.sym import Expr, as_expr, product

Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Window:
    """How a window of constant size slides over padded dims, one entry for each."""

    size: Ints
    stride: Ints
    low: Ints
    high: Ints
    dilation: Ints

    @classmethod
    def of(cls, op: Op, size: Ints) -> Window:
        """That of a convolution or pool."""
        names = ("stride", "low", "high", "dilation")
        return cls(size, *(op.ints_attr(name) for name in names))

    @property
    def rank(self) -> int:
        return len(self.size)

    @property
    def spans(self) -> Ints:
        """From the first element seen to behind the last, in each dim."""
        pairs = zip(self.size, self.dilation, strict=True)
        return tuple(gap * (size - 1) + 1 for size, gap in pairs)

    @property
    def is_grid(self) -> bool:
        """Whether windows lie side by side: no element is in two, none is padding."""
        pairs = zip(self.size, self.dilation, strict=True)
        spread = any(d != 1 and k != 1 for k, d in pairs)
        padded = any(self.low) or any(self.high)
        return self.size == self.stride and not spread and not padded

    def without_stride(self, dim: int) -> Window:
        """With a stride of 1 and no padding along one dim."""

        def but(values: Ints, value: int) -> Ints:
            return (*values[:dim], value, *values[dim + 1 :])

        return replace(
            self,
            stride=but(self.stride, 1),
            low=but(self.low, 0),
            high=but(self.high, 0),
        )

    def taps(self) -> itertools.product[tuple[int, ...]]:
        return itertools.product(*map(range, self.size))

    def seen(self, b: Builder, x: Value, tap: Ints, places: Sequence[Expr]) -> Value:
        """The elements of a padded value that one tap of every window sees."""
        lead = x.type.rank - self.rank
        rows = zip(tap, self.stride, self.dilation, places, strict=True)
        for axis, (k, step, gap, size) in enumerate(rows, lead):
            x = b.slice_axis(x, axis, k * gap, size, step)
        return x


def _padded(b: Builder, x: Value, window: Window, value: float) -> Value:
    if not any(window.low) and not any(window.high):
        return x
    none = [as_expr(0)] * (x.type.rank - window.rank)
    low, high = ((*none, *map(as_expr, ends)) for ends in (window.low, window.high))
    return b.emit("pad", x, low=low, high=high, value=value)


def _front(b: Builder, x: Value, sizes: Sequence[Expr]) -> Value:
    """The first elements along the last dims."""
    for axis, size in enumerate(sizes, x.type.rank - len(sizes)):
        x = b.slice_axis(x, axis, 0, size)
    return x


def _to_end(b: Builder, x: Value, sizes: Sequence[Expr]) -> Value:
    """With zeros behind the last dims, up to these sizes."""
    lead = x.type.rank - len(sizes)
    if b.same_shape(x.shape[lead:], sizes):
        return x
    low = (as_expr(0),) * x.type.rank
    more = [size - had for size, had in zip(sizes, x.shape[lead:], strict=True)]
    return b.emit("pad", x, low=low, high=(*low[:lead], *more), value=0.0)


# ---- convolutions


def conv_input(
    b: Builder,
    grad: Value,
    weight: Value,
    shape: Sequence[Expr],
    w: Window,
    groups: int,
) -> Value:
    """The gradient of a convolution's input, which has this shape."""
    within = all(
        max(low, high) < span
        for low, high, span in zip(w.low, w.high, w.spans, strict=True)
    )
    if within and all(step == 1 for step in w.stride):
        return _conv_input_dense(b, grad, weight, w, groups)
    # Rounding down has dropped up to stride - 1 elements at the end: as many more are
    # made, less the padding there, and cut off again.
    pairs = list(zip(w.high, w.stride, strict=True))
    out = b.emit(
        "conv_transpose",
        grad,
        weight,
        stride=w.stride,
        low=w.low,
        high=tuple(max(high - step + 1, 0) for high, step in pairs),
        dilation=w.dilation,
        groups=groups,
        extra=tuple(max(step - 1 - high, 0) for high, step in pairs),
    )
    return _front(b, out, shape[2:])


def _conv_input_dense(
    b: Builder, grad: Value, weight: Value, w: Window, groups: int
) -> Value:
    """Stride 1: a convolution with inputs and outputs exchanged, the window flipped."""
    outputs, inputs, *window = weight.shape
    each = outputs // groups
    flipped = b.reshape(weight, (groups, each, inputs, *window))
    flipped = b.reshape(b.swap(flipped, 1, 2), (inputs * groups, each, *window))
    axes = tuple(k for k, size in enumerate(w.size, 2) if size > 1)
    if axes:
        flipped = b.emit("flip", flipped, axes=axes)
    return b.emit(
        "conv",
        grad,
        flipped,
        stride=w.stride,
        low=tuple(span - 1 - low for span, low in zip(w.spans, w.low, strict=True)),
        high=tuple(span - 1 - end for span, end in zip(w.spans, w.high, strict=True)),
        dilation=w.dilation,
        groups=groups,
    )


def conv_transpose_input(
    b: Builder,
    grad: Value,
    weight: Value,
    shape: Sequence[Expr],
    w: Window,
    groups: int,
) -> Value:
    """The gradient of a transposed convolution's input, which has this shape."""
    out = b.emit(
        "conv",
        grad,
        weight,
        stride=w.stride,
        low=w.low,
        high=w.high,
        dilation=w.dilation,
        groups=groups,
    )
    return _front(b, out, shape[2:])


def conv_weight(
    b: Builder, grad: Value, x: Value, weight: Value, w: Window, groups: int
) -> Value:
    """The gradient of a convolution's weight.

    That of a transposed one's too, its input and the gradient of its result exchanged.
    """
    pairs = zip(w.stride, w.dilation, strict=True)
    apart = any(step > 1 and gap > 1 for step, gap in pairs)
    if groups == 1 and math.prod(w.size) > 1 and not w.is_grid and not apart:
        return _conv_weight_whole(b, grad, x, weight, w)
    batch, outputs, *places = grad.shape
    inputs, rest = weight.shape[1], product(places)
    each = outputs // groups
    left = b.reshape(grad, (batch, groups, each, rest))
    left = b.reshape(b.transpose(left, (1, 2, 0, 3)), (groups, each, batch * rest))
    if w.is_grid:
        right = _patches(b, x, w, places, groups)
        return b.reshape(b.matmul(left, right), weight.shape)
    x = _padded(b, x, w, 0.0)
    taps: list[Value] = []
    for tap in w.taps():
        right = w.seen(b, x, tap, places)
        right = b.reshape(right, (batch, groups, inputs, rest))
        right = b.transpose(right, (1, 0, 3, 2))
        right = b.reshape(right, (groups, batch * rest, inputs))
        taps.append(b.reshape(b.matmul(left, right), (outputs, inputs, 1)))
    return b.reshape(b.concat(taps, 2), weight.shape)


def _conv_weight_whole(
    b: Builder, grad: Value, x: Value, weight: Value, w: Window
) -> Value:
    """By convolutions: the gradient slides over the input, and gives every tap.

    Input channels play the role of the batch, and the batch is one more dim to slide
    along, so that rows of the input are read in place. A stride of s is removed first:
    along each dim there are s convolutions, each for every s-th tap.
    """
    dtype = weight.dtype.compute
    image = b.unsqueeze(b.swap(b.cast(x, dtype), 0, 1), -1)  # (C, N, spatial.., 1)
    taps = b.unsqueeze(b.swap(b.cast(grad, dtype), 0, 1), 1)  # (O, 1, N, places..)
    out = _slid(b, image, taps, w, 0)
    out = b.reshape(out, (weight.shape[1], *w.size, weight.shape[0]))
    out = b.transpose(out, (w.rank + 1, *range(w.rank + 1)))
    return b.cast(out, weight.dtype)


def _slid(b: Builder, image: Value, taps: Value, w: Window, dim: int) -> Value:
    """(C, 1, taps.., O); of the dims before `dim` one part is left, of stride 1."""
    while dim < w.rank and w.stride[dim] == 1:
        dim += 1
    if dim == w.rank:
        return b.emit(
            "conv_last",
            image,
            taps,
            stride=(1, *w.dilation),
            low=(0, *w.low),
            high=(0, *w.high),
            dilation=(1,) * (w.rank + 1),
        )
    axis, step, size = dim + 2, w.stride[dim], w.size[dim]
    low = [as_expr(0)] * image.type.rank
    high = list(low)
    low[axis], high[axis] = as_expr(w.low[dim]), as_expr(w.high[dim])
    if w.low[dim] or w.high[dim]:
        image = b.emit("pad", image, low=tuple(low), high=tuple(high), value=0.0)
    alone = w.without_stride(dim)
    most = -(-size // step)
    parts: list[Value] = []
    for phase in range(min(step, size)):
        here = -(-(size - phase) // step)
        seen = taps.shape[axis + 1] + (here - 1)
        part = b.slice_axis(image, axis, phase, seen, step)
        part = _slid(b, part, taps, alone, dim)
        part = _to_count(b, part, axis, most - here)
        parts.append(b.unsqueeze(part, axis + 1))
    out = b.concat(parts, axis + 1)
    count = as_expr(most * len(parts))
    shape = (*out.shape[:axis], count, *out.shape[axis + 2 :])
    return b.slice_axis(b.reshape(out, shape), axis, 0, size)


def _to_count(b: Builder, x: Value, axis: int, more: int) -> Value:
    if not more:
        return x
    low = [as_expr(0)] * x.type.rank
    high = list(low)
    high[axis] = as_expr(more)
    return b.emit("pad", x, low=tuple(low), high=tuple(high), value=0.0)


def _patches(
    b: Builder, x: Value, w: Window, places: Sequence[Expr], groups: int
) -> Value:
    """Windows side by side as rows: (groups, batch * places, inputs * window)."""
    batch, channels = x.shape[:2]
    inputs = channels // groups
    spread = [place * size for place, size in zip(places, w.size, strict=True)]
    grid = [d for pair in zip(places, w.size, strict=True) for d in pair]
    x = b.reshape(_front(b, x, spread), (batch, groups, inputs, *grid))
    rows = [3 + 2 * k for k in range(w.rank)]
    x = b.transpose(x, (1, 0, *rows, 2, *(k + 1 for k in rows)))
    columns = inputs * math.prod(w.size)
    return b.reshape(x, (groups, batch * product(places), columns))


# ---- pools


def mean_pool_input(
    b: Builder, grad: Value, shape: Sequence[Expr], w: Window, include_pad: bool
) -> Value:
    """The gradient of what is averaged, which has this shape."""
    lead, dims = shape[: -w.rank], shape[-w.rank :]
    wide = b.cast(grad, grad.dtype.compute)
    ones = b.full(1.0, wide.dtype, (1, 1, *w.size))
    count = b.scalar(float(math.prod(w.size)), wide.dtype)
    if not include_pad and not w.is_grid:
        count = b.emit(
            "conv",
            b.full(1.0, wide.dtype, (1, 1, *dims)),
            ones,
            stride=w.stride,
            low=w.low,
            high=w.high,
            dilation=w.dilation,
            groups=1,
        )
        # The gradient of a window that is all padding is dropped.
        count = b.binary("maximum", count, b.scalar(1.0, wide.dtype))
        count = b.reshape(count, count.shape[2:])
    share = b.binary("div", wide, count)
    if w.is_grid:
        out = _repeated(b, share, w)
        return b.cast(_to_end(b, out, dims), grad.dtype)
    planes = product(lead)
    share = b.reshape(share, (planes, 1, *share.shape[-w.rank :]))
    out = conv_input(b, share, ones, (planes, as_expr(1), *dims), w, 1)
    return b.cast(b.reshape(out, shape), grad.dtype)


def _repeated(b: Builder, x: Value, w: Window) -> Value:
    """Each element as often as its window is large, side by side."""
    lead, places = x.shape[: -w.rank], x.shape[-w.rank :]
    pairs = list(zip(places, w.size, strict=True))
    x = b.reshape(x, (*lead, *(d for place in places for d in (place, 1))))
    x = b.broadcast_to(x, (*lead, *(d for pair in pairs for d in pair)))
    return b.reshape(x, (*lead, *(place * size for place, size in pairs)))


def max_pool_places(b: Builder, x: Value, places: Sequence[Expr], w: Window) -> Value:
    """Where in its plane the element is that each window picks: i64.

    As torch picks: the first of equals, the last of NaNs.
    """
    dims, shape = x.shape[-w.rank :], (*x.shape[: -w.rank], *places)
    padded = _padded(b, x, w, -math.inf)

    def flat(place: Callable[[int], Value]) -> Value:
        out = place(0)
        for k in range(1, w.rank):
            scaled = b.binary("mul", out, b.dim_value(dims[k]))
            out = b.emit("add", scaled, place(k))
        return out

    def start(k: int) -> Value:
        """Of each window along one dim."""
        index = b.iota(shape, len(shape) - w.rank + k, DType.I64)
        index = b.binary("mul", index, b.scalar(w.stride[k], DType.I64))
        return b.binary("sub", index, b.scalar(w.low[k], DType.I64))

    def first(k: int) -> Value:
        """The first that is not before the input: picked if all are the lowest.

        Of a window whose taps all lie in padding, that one lies behind the input, and
        is what torch says it picked.
        """
        begin, gap = start(k), b.scalar(w.dilation[k], DType.I64)
        none = b.scalar(0, DType.I64)
        if w.low[k]:
            before = b.binary("maximum", b.unary("neg", begin), none)
            more = b.binary("add", before, b.scalar(w.dilation[k] - 1, DType.I64))
            skipped = b.binary("floordiv", more, gap)
            begin = b.emit("add", begin, b.binary("mul", skipped, gap))
        return begin

    best = b.full(-math.inf, x.dtype, shape)
    where = flat(first)
    for tap in w.taps():
        part = w.seen(b, padded, tap, places)

        def at(k: int, tap: Ints = tap) -> Value:
            step = b.scalar(tap[k] * w.dilation[k], DType.I64)
            return b.binary("add", start(k), step)

        larger = b.emit("gt", part, best)
        taken = b.emit("logical_or", larger, b.unary("isnan", part))
        best = b.select(taken, part, best)
        where = b.select(taken, flat(at), where)
    return where


def max_pool_input(
    b: Builder, grad: Value, where: Value, shape: Sequence[Expr], rank: int
) -> Value:
    """Each gradient added up at the element that was picked, in a value of this shape.

    `where` are places in a plane: the last `rank` dims. One behind its plane, of a
    window of padding alone, is in the next, as torch has it; the last has no next.
    """
    planes, size = product(shape[:-rank]), product(shape[-rank:])
    seen = product(grad.shape[-rank:])
    flat = b.reshape(where, (planes, seen))
    plane = b.iota((planes, seen), 0, DType.I64)
    flat = b.emit("add", flat, b.binary("mul", plane, b.dim_value(size)))
    inside = b.binary("lt", flat, b.dim_value(planes * size))
    wide = b.reshape(b.cast(grad, grad.dtype.compute), (planes, seen))
    flat = b.select(inside, flat, b.scalar(0, DType.I64))
    wide = b.select(inside, wide, b.scalar(0.0, wide.dtype))
    rows = b.reshape(wide, (planes * seen, 1))
    index = b.reshape(flat, (planes * seen,))
    sums = b.emit("scatter", index, rows, op="sum", rows=planes * size)
    return b.reshape(b.cast(sums, grad.dtype), shape)
