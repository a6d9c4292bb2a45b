"""Samples of images at computed places: GridSample, RoiAlign."""

from __future__ import annotations

import itertools

from pliant.frontend.onnx_context import Node, OnnxContext
from pliant.frontend.onnx_ops_activation import Table
from pliant.frontend.onnx_ops_resize import RESIZE
from pliant.frontend.operands import Size
from pliant.ir.graph import Value
from pliant.ir.types import DType
from pliant.sym import Expr, as_expr, le, product

I64 = DType.I64
MOST_SAMPLES = as_expr(1 << 12)  # of a bin along an axis, where regions decide


def grid_sample(cx: OnnxContext, n: Node) -> Value:
    x, grid = n.tensor(0), n.tensor(1)
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(
        n.attr("mode", "linear"), n.attr("mode", "linear")
    )
    padding, aligned = n.attr("padding_mode", "zeros"), bool(n.attr("align_corners", 0))
    dims = x.shape[2:]
    rank = len(dims)
    batch, places = x.shape[0], grid.shape[1:-1]
    cx.b.require_equal(grid.shape[0], batch, "a grid for each image")
    for dim in dims:
        cx.require(le(1, dim), "an image needs pixels")
    count = product(places)
    wide = x.dtype.compute if x.dtype.is_float else DType.F32
    work = cx.cast(grid, wide)
    at = []
    for i in range(rank):  # the grid's last axis is x, y, z
        own = cx.reshape(cx.slice(work, rank + 1, rank - 1 - i, 1), (batch, count))
        at.append(_pixel(cx, own, dims[i], aligned))
    if mode == "nearest":
        at = [cx.unary("round", p) for p in at]
    at = [_kept(cx, p, dims[i], padding, aligned) for i, p in enumerate(at)]
    planes = cx.reshape(x, (batch, x.shape[1], product(dims)))
    steps = {"nearest": [0], "linear": [0, 1], "cubic": [-1, 0, 1, 2]}.get(mode)
    if steps is None:
        cx.unsupported(f"a grid sample of mode {mode}")
    low = [cx.unary("floor", p) for p in at]
    made: Value | None = None
    for tap in itertools.product(steps, repeat=rank):
        spots = [cx.add(p, float(k)) for p, k in zip(low, tap, strict=True)]
        found = _at(cx, planes, spots, dims, padding, aligned)
        if mode != "nearest":
            weight: Value | None = None
            for p, spot in zip(at, spots, strict=True):
                own = _weight(cx, cx.sub(p, spot), mode)
                weight = own if weight is None else cx.mul(weight, own)
            assert weight is not None
            share = cx.reshape(weight, (batch, 1, count))
            found = cx.mul(cx.cast(found, wide), share)
        made = found if made is None else cx.add(made, found)
    assert made is not None
    return cx.reshape(cx.cast(made, x.dtype), (batch, x.shape[1], *places))


def _pixel(cx: OnnxContext, at: Value, size: Expr, aligned: bool) -> Value:
    """From -1 .. 1 to places of pixels."""
    if aligned:
        return cx.mul(cx.mul(cx.add(at, 1.0), 0.5), cx.tensor(size - 1, at.dtype))
    return cx.mul(cx.sub(cx.mul(cx.add(at, 1.0), cx.tensor(size, at.dtype)), 1.0), 0.5)


def _kept(cx: OnnxContext, at: Value, size: Expr, padding: str, aligned: bool) -> Value:
    """A place that is outside, moved in."""
    if padding == "border":
        low, high = (0.0, cx.tensor(size - 1, at.dtype))
        inside = cx.arith("minimum", cx.arith("maximum", at, low), high)
        edge_low = 0.0 if aligned else -0.5
        edge = cx.tensor(size - 1, at.dtype)
        edge = edge if aligned else cx.add(edge, 0.5)
        outer = cx.b.binary(
            "logical_or", cx.arith("lt", at, edge_low), cx.arith("gt", at, edge)
        )
        return cx.select(outer, inside, at)
    return _mirrored(cx, at, size, aligned) if padding == "reflection" else at


def _mirrored(cx: OnnxContext, at: Value, size: Expr, aligned: bool) -> Value:
    """Reflected at the borders until it is between them."""
    low = 0.0 if aligned else -0.5
    span = cx.tensor(size - 1 if aligned else size, at.dtype)
    safe = cx.arith("maximum", span, 1e-30)
    period = cx.mul(safe, 2.0)
    inside = cx.arith("mod", cx.sub(at, low), period)
    folded = cx.sub(safe, cx.unary("abs", cx.sub(inside, safe)))
    return cx.add(cx.arith("minimum", folded, span), low)


def _at(
    cx: OnnxContext,
    planes: Value,
    spots: list[Value],
    dims: tuple[Expr, ...],
    padding: str,
    aligned: bool,
) -> Value:
    """planes (B, C, area) at whole places (B, N) of each axis -> (B, C, N)"""
    inside: Value | None = None
    index = []
    for spot, size in zip(spots, dims, strict=True):
        last = cx.tensor(size - 1, spot.dtype)
        if padding == "reflection":
            spot = _mirrored(cx, spot, size, aligned)
            spot = cx.unary("trunc", spot)
        elif padding == "zeros":
            fits = cx.b.binary(
                "logical_and", cx.arith("ge", spot, 0.0), cx.arith("le", spot, last)
            )
            inside = (
                fits if inside is None else cx.b.binary("logical_and", inside, fits)
            )
        safe = cx.arith("minimum", cx.arith("maximum", spot, 0.0), last)
        index.append(cx.cast(safe, I64))
    flat = cx.b.flat_place(index, dims)
    cx.nonnegative.add(flat)
    batch, channels, _ = planes.shape
    shape = (batch, as_expr(1), flat.shape[1])
    wide = cx.broadcast_to(cx.reshape(flat, shape), (batch, channels, flat.shape[1]))
    found = cx.b.emit("take_along", planes, wide, axis=2)
    if inside is None:
        return found
    mask = cx.broadcast_to(cx.reshape(inside, shape), found.shape)
    return cx.select(mask, found, cx.full(0, found.shape, found.dtype))


def _weight(cx: OnnxContext, d: Value, mode: str) -> Value:
    d = cx.unary("abs", d)
    if mode == "linear":
        return cx.sub(1.0, d)
    a = -0.75
    near = cx.add(cx.mul(cx.mul(cx.sub(cx.mul(d, a + 2), a + 3), d), d), 1.0)
    inner = cx.add(cx.mul(cx.sub(cx.mul(d, a), 5 * a), d), 8 * a)
    far = cx.sub(cx.mul(inner, d), 4 * a)
    return cx.select(cx.arith("le", d, 1.0), near, far)


def affine_grid(cx: OnnxContext, n: Node) -> None:
    """Left to its body, which does not look at the batch of the matrices."""
    size = n.sizes(1, "the size of the images")
    have = cx.shape_of(n.entry(0))[0]
    cx.b.require_equal(have, size[0], "a matrix for each image")


# ---- regions


def roi_align(cx: OnnxContext, n: Node) -> Value:
    x, rois = n.tensor(0), n.tensor(1)
    batch = cx.wrap_index(n.tensor(2), x.shape[0], 0)
    height, width = n.attr("output_height", 1), n.attr("output_width", 1)
    ratio, scale = n.attr("sampling_ratio", 0), n.attr("spatial_scale", 1.0)
    largest = n.attr("mode", "avg") == "max"
    if ratio <= 0 and largest:
        cx.unsupported("the largest of samples whose number follows from the regions")
    half = (
        n.version >= 16
        and n.attr("coordinate_transformation_mode", "half_pixel") == "half_pixel"
    )
    moved = cx.sub(cx.mul(rois, scale), 0.5 if half else 0.0)  # (R, 4)
    count = rois.shape[0]
    corner = [cx.slice(moved, 1, k, 1) for k in range(4)]  # (R, 1) each
    lines: list[Value] = []
    grids: list[Size] = []  # samples of a bin along each axis, the most of any region
    counts: list[Value] = []  # and those of each region
    for axis, bins in enumerate((height, width)):
        start, end = corner[1 - axis], corner[3 - axis]
        length = cx.sub(end, start)
        if not half:
            length = cx.arith("maximum", length, 1.0)
        each = cx.div(length, float(bins))
        samples: Value | float = float(ratio)
        grid: Size = ratio
        if ratio <= 0:
            samples = cx.unary("ceil", each)
            grid = _most_samples(cx, samples)
            counts.append(samples)
        places = cx.iota((1, grid * bins), 1, I64)
        cell = cx.cast(cx.arith("floordiv", places, cx.tensor(grid, I64)), x.dtype)
        inner = cx.cast(cx.arith("mod", places, cx.tensor(grid, I64)), x.dtype)
        at = cx.add(cell, cx.div(cx.add(inner, 0.5), samples))
        line = cx.add(start, cx.mul(at, each))  # (R, bins*grid)
        if isinstance(samples, Value):  # beyond a region's own, outside of the image
            line = cx.select(cx.arith("lt", inner, samples), line, -2.0)
        lines.append(line)
        grids.append(grid)
    images = cx.b.emit("index", x, cx.reshape(batch, (count,)))  # (R, C, H, W)
    parts = _corners(cx, images, lines[0], lines[1], x.shape[2:])
    shape = (count, x.shape[1], height, grids[0], width, grids[1])
    if largest:
        # The largest share of a corner, as the operator set has it.
        best = parts[0]
        for part in parts[1:]:
            best = cx.arith("maximum", best, part)
        return cx.reduce("max", cx.reshape(best, shape), (3, 5))
    total = cx.add(cx.add(parts[0], parts[1]), cx.add(parts[2], parts[3]))
    if not counts:
        return cx.mean(cx.reshape(total, shape), (3, 5))
    each = cx.arith("maximum", cx.mul(*counts), 1.0)
    summed = cx.reduce("sum", cx.reshape(total, shape), (3, 5))
    return cx.div(summed, cx.reshape(each, (count, 1, 1, 1)))


def _most_samples(cx: OnnxContext, samples: Value) -> Expr:
    """The largest number of samples of any region, as a size."""
    most = cx.reduce("max", samples, (0, 1))  # of no region, -inf
    number = cx.cast(cx.arith("maximum", most, 0.0), I64)
    return cx.b.emit("extent", number, most=MOST_SAMPLES, of="RoiAlign").shape[0]


def _corners(
    cx: OnnxContext, images: Value, rows: Value, columns: Value, dims: tuple[Expr, ...]
) -> list[Value]:
    """images (R, C, H, W) at rows (R, P) and columns (R, Q) -> four of (R, C, P, Q)

    The four pixels around each place, times their shares; 0 outside the image.
    """
    count = images.shape[0]
    parts = [images]
    hidden: Value | None = None
    for axis, (at, size) in enumerate(zip((rows, columns), dims, strict=True), 2):
        edge = cx.tensor(size, at.dtype)
        outer = cx.b.binary(
            "logical_or", cx.arith("lt", at, -1.0), cx.arith("gt", at, edge)
        )
        shape = [count, as_expr(1), as_expr(1), as_expr(1)]
        shape[axis] = at.shape[1]
        outer = cx.reshape(outer, shape)
        hidden = outer if hidden is None else cx.b.binary("logical_or", hidden, outer)
        last = cx.tensor(size - 1, at.dtype)
        inside = cx.arith("minimum", cx.arith("maximum", at, 0.0), last)
        low = cx.unary("floor", inside)
        share = cx.sub(inside, low)
        made = []
        for part in parts:
            wide = [*part.shape[:axis], at.shape[1], *part.shape[axis + 1 :]]
            for step in (0.0, 1.0):
                index = cx.cast(cx.arith("minimum", cx.add(low, step), last), I64)
                cx.nonnegative.add(index)
                place = cx.broadcast_to(cx.reshape(index, shape), wide)
                found = cx.b.emit("take_along", part, place, axis=axis)
                weight = share if step else cx.sub(1.0, share)
                made.append(cx.mul(found, cx.reshape(weight, shape)))
        parts = made
    assert hidden is not None
    mask = cx.broadcast_to(hidden, parts[0].shape)
    return [cx.select(mask, 0.0, part) for part in parts]


IMAGES: Table = {
    **RESIZE,
    ("GridSample", 16): grid_sample,
    ("RoiAlign", 10): roi_align,
    ("AffineGrid", 20): affine_grid,
}
