"""aten ops that read between elements: a volume at a grid, antialiased resizing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pliant.frontend.torch_ops_context import Size, TorchContext
from pliant.frontend.torch_ops_math import Translate
from pliant.frontend.torch_ops_resize import scaled_size
from pliant.frontend.torch_ops_window import drop_axis
from pliant.ir.graph import Value
from pliant.ir.types import DType
from pliant.sym import Expr, as_expr, le, product

aten = torch.ops.aten

# --- an image or a volume at the points of a grid -------------------------------

_LINEAR, _NEAREST, _CUBIC = range(3)
_BORDER, _REFLECTION = 1, 2


def grid_sampler(
    cx: TorchContext,
    x: Value,
    grid: Value,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
) -> Value:
    """x (N, C, spatial..) at grid (N, .., rank), whose last axis has x, y, z.

    Linear interpolation in images is an op of its own (`sample`).
    """
    # Sixteen shares of both signs: their rounding errors would add up.
    wide = DType.F64 if interpolation_mode == _CUBIC else x.dtype.compute
    if x.dtype is not wide:
        how = interpolation_mode, padding_mode, align_corners
        made = grid_sampler(cx, cx.cast(x, wide), cx.cast(grid, wide), *how)
        return cx.cast(made, x.dtype)
    rank, sizes = x.type.rank - 2, x.shape[2:]
    for size in sizes:
        cx.require(le(as_expr(1), size), "a grid samples from elements")
    last = rank + 1
    points = [
        _spread(
            cx,
            drop_axis(cx, cx.slice(grid, last, rank - 1 - k, 1), last),
            size,
            align_corners,
        )
        for k, size in enumerate(sizes)
    ]  # in elements along each axis: (N, out..) each

    def put_inside(positions: Sequence[Value]) -> list[Value]:
        pairs = zip(positions, sizes, strict=True)
        how = (padding_mode, align_corners, rank == 3)
        return [_padded(cx, p, n, *how) for p, n in pairs]

    if interpolation_mode == _CUBIC:
        whole = [cx.unary("floor", point) for point in points]
        shares = [
            _cubic_shares(cx, cx.sub(p, w)) for p, w in zip(points, whole, strict=True)
        ]
        taps = range(4)
        corners = [[cx.add(w, float(k - 1)) for k in taps] for w in whole]
        settle = put_inside
    else:
        points = put_inside(points)
        near = "round" if interpolation_mode == _NEAREST else "floor"
        whole = [cx.unary(near, point) for point in points]
        rests = [cx.sub(p, w) for p, w in zip(points, whole, strict=True)]
        if interpolation_mode == _LINEAR and rank == 2:
            return _image(cx, x, whole, rests)
        shares = [[cx.sub(1.0, r), r] for r in rests]
        corners = [[w, cx.add(w, 1.0)] for w in whole]
        taps = range(1 if interpolation_mode == _NEAREST else 2)
        settle = _unchanged
    flat = cx.reshape(x, (*x.shape[:2], product(sizes)))
    final = cx.transpose(flat, (0, 2, 1))
    out: Value | None = None
    for side in itertools.product(taps, repeat=rank):
        at = settle([corners[k][s] for k, s in enumerate(side)])
        weight: Value | None = None
        if interpolation_mode != _NEAREST:
            weight = shares[0][side[0]]
            for k, s in enumerate(side[1:], start=1):
                weight = cx.mul(weight, shares[k][s])
        part = _at(cx, final, sizes, at, weight)
        out = part if out is None else cx.add(out, part)
    assert out is not None
    return cx.transpose(out, [0, rank + 1, *range(1, rank + 1)])


def _image(
    cx: TorchContext, x: Value, whole: Sequence[Value], rests: Sequence[Value]
) -> Value:
    """x (N, C, H, W) between whole positions (N, out..) and the next ones."""
    out = whole[0].shape[1:]
    flat = (x.shape[0], product(out))

    def place(position: Value, size: Expr) -> Value:
        """As an integer; all that is far outside, or no number, is just outside."""
        low = cx.arith("maximum", position, -2.0)
        near = cx.arith("minimum", low, cx.tensor(size, position.dtype))
        some = cx.select(cx.unary("isnan", position), -2.0, near)
        return cx.reshape(cx.cast(some, DType.I32), flat)

    places = [place(w, size) for w, size in zip(whole, x.shape[2:], strict=True)]
    shares = [cx.reshape(r, flat) for r in rests]
    return cx.reshape(cx.b.emit("sample", x, *places, *shares), (*x.shape[:2], *out))


def _unchanged(positions: Sequence[Value]) -> list[Value]:
    return list(positions)


def _cubic_shares(cx: TorchContext, t: Value) -> list[Value]:
    """The weights of the four elements around: Keys' kernel with a = -3/4.

    The outer ones, which torch computes as a cubic in t + 1, are a*t*(1-t)^2: nothing
    cancels.
    """
    a = -0.75

    def outer(near: Value, far: Value) -> Value:
        return cx.mul(cx.mul(cx.mul(near, a), far), far)

    def inner(d: Value) -> Value:
        slope = cx.sub(cx.mul(d, a + 2), a + 3)
        return cx.add(cx.mul(cx.mul(slope, d), d), 1.0)

    rest = cx.sub(1.0, t)
    return [outer(t, rest), inner(t), inner(rest), outer(rest, t)]


def _spread(cx: TorchContext, point: Value, size: Expr, corners: bool) -> Value:
    """A coordinate in -1..1 as a position along an axis."""
    wide = cx.tensor(size, point.dtype)
    if corners:
        return cx.mul(cx.div(cx.add(point, 1.0), 2.0), cx.sub(wide, 1.0))
    return cx.div(cx.sub(cx.mul(cx.add(point, 1.0), wide), 1.0), 2.0)


def _padded(
    cx: TorchContext, at: Value, size: Expr, padding: int, corners: bool, volume: bool
) -> Value:
    """Positions moved inside the volume, except with zero padding."""
    wide = cx.tensor(size, at.dtype)
    if padding == _REFLECTION:
        low = 0.0 if corners else -0.5
        span = cx.sub(wide, 1.0) if corners else wide
        off = cx.unary("abs", cx.sub(at, low))
        some = cx.select(cx.arith("eq", span, 0.0), 1.0, span)
        turns = cx.unary("floor", cx.div(off, some))
        rest = cx.sub(off, cx.mul(turns, some))
        even = cx.arith("eq", cx.arith("mod", turns, 2.0), 0.0)
        back = cx.select(even, cx.add(rest, low), cx.add(cx.sub(span, rest), low))
        at = cx.select(cx.arith("eq", span, 0.0), 0.0, back)
    if padding in (_BORDER, _REFLECTION):
        end = cx.sub(wide, 1.0)
        within = cx.arith(
            "logical_and", cx.arith("gt", at, 0.0), cx.arith("lt", at, end)
        )
        held = cx.arith("maximum", cx.arith("minimum", at, end), 0.0)
        at = cx.with_slopes(held, (at, within))
        # torch's clamp takes NaN to one end: to the first element, of volumes the last.
        at = cx.select(cx.unary("isnan", at), end if volume else 0.0, at)
    return at


def _at(
    cx: TorchContext,
    x: Value,
    sizes: Sequence[Expr],
    corner: Sequence[Value],
    weight: Value | None,
) -> Value:
    """x (N, spatial, C) at whole positions, times a weight; outside it is 0.

    The place of a point is one number for all axes, computed once for all channels.
    """
    inside: Value | None = None
    for position, size in zip(corner, sizes, strict=True):
        for test in (
            cx.arith("ge", position, 0.0),
            cx.arith("lt", position, cx.tensor(size, position.dtype)),
        ):
            inside = test if inside is None else cx.arith("logical_and", inside, test)
    assert inside is not None
    place: Value | None = None
    for position, size in zip(corner, sizes, strict=True):
        step = cx.cast(cx.select(inside, position, 0.0), DType.I64)
        place = step if place is None else cx.add(cx.mul(place, size), step)
    assert place is not None
    rows = cx.iota(place.shape, 0, DType.I64)
    place = cx.in_range(place, product(sizes), 1)
    picked = cx.b.emit("index", x, rows, place)  # (N, out.., C)
    column = [*inside.shape, as_expr(1)]
    kept = cx.reshape(inside, column)
    if weight is None:
        return cx.select(kept, picked, 0.0)
    share = cx.reshape(weight, column)
    if len(sizes) == 3:  # torch skips corners of volumes, and masks those of images
        return cx.select(kept, cx.mul(picked, share), 0.0)
    return cx.mul(cx.select(kept, picked, 0.0), share)


# --- resizing with antialiasing -------------------------------------------------


def _triangle(cx: TorchContext, x: Value) -> Value:
    return cx.arith("maximum", cx.sub(1.0, cx.unary("abs", x)), 0.0)


def _cubic(cx: TorchContext, x: Value) -> Value:
    """Keys' kernel with a = -1/2."""
    size = cx.unary("abs", x)
    near = cx.add(cx.mul(cx.mul(cx.sub(cx.mul(size, 1.5), 2.5), size), size), 1.0)
    far = cx.mul(cx.sub(size, 5.0), size)
    far = cx.mul(cx.sub(cx.mul(cx.add(far, 8.0), size), 4.0), -0.5)
    far = cx.select(cx.arith("lt", size, 2.0), far, 0.0)
    return cx.select(cx.arith("lt", size, 1.0), near, far)


_FILTERS: dict[str, tuple[Callable[[TorchContext, Value], Value], float]] = {
    "linear": (_triangle, 1.0),
    "cubic": (_cubic, 2.0),
}


def _weights(
    cx: TorchContext,
    kind: str,
    size: Expr,
    out: Expr,
    factor: float | None,
    corners: bool,
) -> tuple[Value, Value]:
    """The weights (out, size) of elements in results, in f64, and where they count.

    The filter is as wide as `scale` elements where the result is smaller. Elements
    are taken from int(center - support + 1/2) up to int(center + support + 1/2).
    """
    filter, reach = _FILTERS[kind]
    wide, narrow = cx.tensor(size, DType.F64), cx.tensor(out, DType.F64)
    if corners:
        gaps = cx.arith("maximum", cx.sub(narrow, 1.0), 1.0)
        scale = cx.div(cx.sub(wide, 1.0), gaps)
        scale = cx.select(cx.arith("gt", narrow, 1.0), scale, 0.0)
    elif factor is not None and factor > 0:
        scale = cx.tensor(1.0 / factor, DType.F64)
    else:
        scale = cx.div(wide, narrow)
    spread = cx.arith("maximum", scale, 1.0)
    support = cx.mul(spread, reach)
    center = cx.mul(scale, cx.add(cx.iota((out, 1), 0, DType.F64), 0.5))
    place = cx.iota((1, size), 1, DType.F64)
    first = cx.unary("trunc", cx.add(cx.sub(center, support), 0.5))
    behind = cx.unary("trunc", cx.add(cx.add(center, support), 0.5))
    off = cx.div(cx.add(cx.sub(place, center), 0.5), spread)
    taken = cx.arith(
        "logical_and", cx.arith("ge", place, first), cx.arith("lt", place, behind)
    )
    weight = cx.select(taken, filter(cx, off), 0.0)
    total = cx.reduce("sum", weight, (1,), keepdims=True)
    whole = cx.div(weight, cx.select(cx.arith("eq", total, 0.0), 1.0, total))
    return whole, cx.broadcast_to(taken, (out, size))


def smoothed(
    cx: TorchContext,
    x: Value,
    kind: str,
    sizes: Sequence[Size],
    corners: bool,
    factors: Sequence[float | None],
) -> Value:
    """Columns, then rows: each the weighted sums of what a window holds.

    An infinity outside of a window does not count, so it is no matrix product. An axis
    of the size it has already is left alone, where windows have weights of 0 too.
    """
    kept = x.dtype
    x = cx.cast(x, kept.compute)
    for axis in (3, 2):
        size, out = x.shape[axis], cx.simplify(as_expr(sizes[axis - 2]))
        for extent in (size, out):
            cx.require(le(as_expr(1), extent), "a resize needs elements")
        weights, taken = _weights(cx, kind, size, out, factors[axis - 2], corners)
        last = cx.move_axis(x, axis, 3)
        spread = cx.reshape(last, (*last.shape[:3], 1, size))
        changes = cx.arith("ne", cx.tensor(size, DType.I64), cx.tensor(out, DType.I64))
        counts = cx.arith("logical_or", changes, cx.arith("ne", weights, 0.0))
        taken = cx.arith("logical_and", taken, counts)
        parts = cx.mul(spread, cx.cast(weights, x.dtype))
        x = cx.reduce("sum", cx.select(taken, parts, 0.0), (4,))
        x = cx.move_axis(x, 3, axis)
    return cx.cast(x, kept)


def resize_smoothed(kind: str) -> Translate:
    def translate(
        cx: TorchContext,
        x: Value,
        sizes: Sequence[Size],
        align_corners: bool,
        *factors: float | None,
    ) -> Value:
        padded = (*factors, None, None)[:2]
        return smoothed(cx, x, kind, sizes, align_corners, padded)

    return translate


def resize_smoothed_vec(kind: str) -> Translate:
    def translate(
        cx: TorchContext,
        x: Value,
        sizes: Sequence[Size] | None,
        align_corners: bool,
        factors: Sequence[Any] | None,
    ) -> Value:
        given = tuple(factors) if factors is not None else (None, None)
        if sizes is None:
            pairs = zip(x.shape[2:], given, strict=True)
            sizes = [scaled_size(cx, dim, factor) for dim, factor in pairs]
        if any(f is not None and not isinstance(f, int | float) for f in given):
            cx.unsupported("a resize factor that depends on sizes")
        return smoothed(cx, x, kind, sizes, align_corners, given)

    return translate


SAMPLE: dict[Any, Translate] = {
    aten.grid_sampler_2d.default: grid_sampler,
    aten.grid_sampler_3d.default: grid_sampler,
    aten._upsample_bilinear2d_aa.default: resize_smoothed("linear"),
    aten._upsample_bilinear2d_aa.vec: resize_smoothed_vec("linear"),
    aten._upsample_bicubic2d_aa.default: resize_smoothed("cubic"),
    aten._upsample_bicubic2d_aa.vec: resize_smoothed_vec("cubic"),
}
