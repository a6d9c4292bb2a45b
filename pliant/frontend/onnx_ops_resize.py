"""Resize and Upsample: one axis after the other, as weighted sums of neighbours.

An axis is resized by an index (new, taps) and weights of that shape. What the IR's
`resize` op computes as well goes there, where it is one kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from pliant.errors import ModelError
from pliant.frontend.onnx_context import Node, OnnxContext
from pliant.frontend.onnx_ops_activation import Table
from pliant.frontend.translate import Unsupported
from pliant.ir.graph import Value
from pliant.ir.types import DType
from pliant.sym import Expr, as_expr, floordiv, le

F64, I64 = DType.F64, DType.I64


@dataclass(frozen=True, slots=True)
class _Axis:
    """How one axis changes: its new size, and the factor if one is stated."""

    axis: int
    size: Expr
    scale: float | None
    roi: tuple[Value, Value] | None = None


def resize(cx: OnnxContext, n: Node) -> Value:
    x = n.tensor(0)
    axes = _axes(cx, n, x)
    mode = n.attr("mode", "nearest")
    where = n.attr("coordinate_transformation_mode", "half_pixel")
    if n.version < 11:
        where = "asymmetric"
    direct = _direct(cx, n, x, axes, mode, where)
    if direct is not None:
        return direct
    made = x if mode == "nearest" else cx.cast(x, _working(x.dtype))
    for change in axes:
        if change.scale == 1.0 and change.roi is None:
            continue
        if change.scale is None and cx.b.same(change.size, made.shape[change.axis]):
            continue
        made = _resized(cx, n, made, change, mode, where)
    if not x.dtype.is_float and mode != "nearest":
        made = _saturated(cx, made, x.dtype)
    return cx.cast(made, x.dtype)


def _working(dtype: DType) -> DType:
    return dtype.compute if dtype.is_float else DType.F32


def _saturated(cx: OnnxContext, x: Value, dtype: DType) -> Value:
    low = 0 if dtype.is_unsigned else -(2 ** (8 * dtype.bytes - 1))
    high = low + 2 ** (8 * dtype.bytes) - 1
    x = cx.unary("round", x)
    return cx.arith("minimum", cx.arith("maximum", x, float(low)), float(high))


def _axes(cx: OnnxContext, n: Node, x: Value) -> list[_Axis]:
    """The axes that change, and to what."""
    rank = x.type.rank
    place = {9: 1, 10: 1}.get(n.version, 2)
    if n.op == "Upsample" and n.version < 9:
        scales: list[float] | None = list(n.attrs["scales"])
        sizes = None
    else:
        given = n.has(place) and cx.shape_of(n.entry(place)) != (as_expr(0),)
        sizes = n.sizes(3, "the new sizes") if n.has(3) and not given else None
        scales = n.floats(place, "scales") if sizes is None else None
    axes = [n.axis(a) for a in n.attrs.get("axes") or range(rank)]
    rois: list[tuple[Value, Value]] | None = None
    if n.attrs.get("coordinate_transformation_mode") == "tf_crop_and_resize":
        roi = cx.cast(n.tensor(1), F64)
        count = len(axes)

        def part(i: int) -> Value:
            return cx.reshape(cx.slice(roi, 0, i, 1), ())

        rois = [(part(i), part(i + count)) for i in range(count)]
    out = []
    policy = n.attr("keep_aspect_ratio_policy", "stretch")
    if sizes is not None and policy != "stretch":
        return _in_proportion(cx, x, axes, [as_expr(s) for s in sizes], policy)
    for k, axis in enumerate(axes):
        roi_part = rois[k] if rois is not None else None
        if sizes is not None:
            out.append(_Axis(axis, as_expr(sizes[k]), None, roi_part))
            continue
        assert scales is not None
        if not math.isfinite(scales[k]) or scales[k] <= 0:
            raise ModelError(f"a resize factor of {scales[k]}")
        exact = Fraction(scales[k])
        if exact.denominator > 2**30:
            cx.unsupported(f"a resize factor of {scales[k]}")
        new = floordiv(x.shape[axis] * exact.numerator, exact.denominator)
        out.append(_Axis(axis, cx.simplify(new), scales[k], roi_part))
    return out


def _in_proportion(
    cx: OnnxContext, x: Value, axes: list[int], sizes: list[Expr], policy: str
) -> list[_Axis]:
    """One factor for all axes, so that sizes are not larger, or not smaller."""
    ratios = []
    for axis, size in zip(axes, sizes, strict=True):
        have = cx.constant_int(x.shape[axis], "a size that keeps its proportion")
        ratios.append(cx.constant_int(size, "a size that keeps its proportion") / have)
    scale = min(ratios) if policy == "not_larger" else max(ratios)
    return [
        _Axis(
            a, as_expr(int(scale * cx.constant_int(x.shape[a], "a size") + 0.5)), scale
        )
        for a in axes
    ]


# ---- by the IR's own op


def _direct(
    cx: OnnxContext, n: Node, x: Value, axes: list[_Axis], mode: str, where: str
) -> Value | None:
    changed = [
        a for a in axes if not (a.scale == 1.0 or cx.b.same(a.size, x.shape[a.axis]))
    ]
    rank = x.type.rank
    if not changed or any(a.axis < 2 for a in changed) or n.attr("antialias", 0):
        return x if not changed and where != "tf_crop_and_resize" else None
    if not x.dtype.is_float or n.attr("exclude_outside", 0):
        return None
    aligned = where == "align_corners"
    if mode == "nearest":
        fits = where == "asymmetric" and n.attr("nearest_mode", "") == "floor"
        if n.version < 11:
            fits = all(_older_nearest(a) == "floor" for a in changed)
    elif mode == "linear":
        fits = where in ("half_pixel", "align_corners")
        if where == "pytorch_half_pixel":
            fits = all(cx.proves(le(2, a.size)) for a in changed)
    else:
        fits = where in ("half_pixel", "align_corners")
        fits = fits and n.attr("cubic_coeff_a", -0.75) == -0.75
    # The factor counts there, not the size that it was rounded to.
    if aligned and any(a.scale is not None and a.scale % 1 for a in changed):
        fits = False
    if not fits:
        return None
    by_axis = {a.axis: a for a in changed}
    first = min(by_axis)
    shape, scales = [], []
    for axis in range(first, rank):
        change = by_axis.get(axis)
        shape.append(x.shape[axis] if change is None else change.size)
        scales.append(None if change is None else change.scale)
    if aligned or all(s is None for s in scales):
        scales = []
    if scales and any(s is None for s in scales):
        scales = [1.0 if s is None else s for s in scales]
    for axis in range(first, rank):
        cx.require(le(1, x.shape[axis]), "a resize needs elements")
    return cx.b.emit(
        "resize",
        x,
        shape=tuple(shape),
        mode=mode,
        align_corners=aligned,
        scales=tuple(scales),
    )


# ---- any kind


def _resized(
    cx: OnnxContext, n: Node, x: Value, change: _Axis, mode: str, where: str
) -> Value:
    axis, new, size = change.axis, change.size, x.shape[change.axis]
    cx.require(le(1, size), "a resize needs elements")
    scale = _factor(cx, change, size)
    at, outside = _source(cx, change, size, scale, where)
    whole = cx.unary("floor", at)
    exact = cx.b.binary("eq", whole, at)
    # The neighbour on the left counts: where a place is whole, the fraction is 1.
    left = cx.cast(cx.select(exact, cx.sub(whole, 1.0), whole), I64)
    fraction = cx.select(exact, 1.0, cx.sub(at, whole))
    if mode == "nearest":
        kind = n.attr("nearest_mode", "round_prefer_floor")
        if n.version < 11:
            kind = _older_nearest(change)
        up = _rounds_up(cx, fraction, exact, kind)
        index = cx.add(left, cx.cast(up, I64))
        picked = _rows(cx, x, axis, _clamped(cx, index, size))
        return _outside(cx, n, picked, axis, outside)
    steps, weigh = _kernel(cx, n, change, size, mode, scale)
    columns = cx.add(cx.iota((1, len(steps)), 1, I64), steps[0])
    index = cx.add(cx.reshape(left, (new, 1)), columns)  # (new, taps)
    distance = cx.sub(cx.cast(columns, F64), cx.reshape(fraction, (new, 1)))
    weights = weigh(distance)
    if n.attr("exclude_outside", 0):
        inside = cx.b.binary(
            "logical_and",
            cx.arith("ge", index, 0),
            cx.arith("lt", index, cx.tensor(size, I64)),
        )
        weights = cx.select(inside, weights, 0.0)
    if n.attr("exclude_outside", 0) or n.attr("antialias", 0):
        weights = cx.div(weights, cx.reduce("sum", weights, (1,), True))
    found = _rows(cx, x, axis, _clamped(cx, index, size))  # (.., new, taps, ..)
    share = cx.cast(weights, x.dtype)
    parts = cx.mul(found, cx.b.broadcast(share, found.shape, (axis, axis + 1)))
    return _outside(cx, n, cx.reduce("sum", parts, (axis + 1,)), axis, outside)


def _older_nearest(change: _Axis) -> str:
    """Of operator set 10, whose text does not say: as its node tests have it."""
    return "ceil" if change.scale is not None and change.scale < 1 else "floor"


def _factor(cx: OnnxContext, change: _Axis, size: Expr) -> Value:
    if change.scale is not None:
        return cx.tensor(change.scale, F64)
    return cx.div(cx.tensor(change.size, F64), cx.tensor(size, F64))


def _source(
    cx: OnnxContext, change: _Axis, size: Expr, scale: Value, where: str
) -> tuple[Value, Value | None]:
    """Where in the input each new element is, and which are outside."""
    new = change.size
    i = cx.cast(cx.iota((new,), 0, I64), F64)
    length = cx.mul(scale, cx.tensor(size, F64))
    last = cx.tensor(size - 1, F64)
    single = cx.arith("eq", length, 1.0)
    match where:
        case "align_corners":
            step = cx.div(last, cx.sub(length, 1.0))
            return cx.mul(i, cx.select(single, 0.0, step)), None
        case "asymmetric":
            return cx.div(i, scale), None
        case "tf_crop_and_resize":
            assert change.roi is not None
            start, end = change.roi
            span = cx.mul(cx.sub(end, start), last)
            step = cx.div(span, cx.sub(length, 1.0))
            only = cx.mul(span, 0.5)
            at = cx.select(single, only, cx.mul(i, step))
            at = cx.add(at, cx.mul(start, last))
            low = cx.arith("lt", at, 0.0)
            return at, cx.b.binary("logical_or", low, cx.arith("gt", at, last))
        case "pytorch_half_pixel":
            half = cx.sub(cx.div(cx.add(i, 0.5), scale), 0.5)
            return cx.select(single, -0.5, half), None
        case "half_pixel_symmetric":
            adjusted = cx.div(cx.tensor(new, F64), length)
            offset = cx.mul(cx.sub(1.0, adjusted), cx.mul(cx.tensor(size, F64), 0.5))
            half = cx.sub(cx.div(cx.add(i, 0.5), scale), 0.5)
            return cx.add(half, offset), None
        case "half_pixel" | "tf_half_pixel_for_nn":
            if where == "tf_half_pixel_for_nn":
                return cx.div(cx.add(i, 0.5), scale), None
            return cx.sub(cx.div(cx.add(i, 0.5), scale), 0.5), None
    raise Unsupported(f"a resize by {where}")


def _rounds_up(cx: OnnxContext, fraction: Value, exact: Value, kind: str) -> Value:
    match kind:
        case "round_prefer_floor":
            up = cx.arith("gt", fraction, 0.5)
        case "round_prefer_ceil":
            up = cx.arith("ge", fraction, 0.5)
        case "floor":
            return exact
        case "ceil":
            up = cx.full(True, fraction.shape, DType.BOOL)
        case _:
            cx.unsupported(f"a resize with nearest_mode {kind}")
    return cx.b.binary("logical_or", up, exact)


def _kernel(
    cx: OnnxContext, n: Node, change: _Axis, size: Expr, mode: str, scale: Value
) -> tuple[range, Callable[[Value], Value]]:
    """The taps around the left neighbour, and the weight of each by its distance."""
    reach = 1 if mode == "linear" else 2
    a = n.attr("cubic_coeff_a", -0.75)
    if not n.attr("antialias", 0):
        steps = range(1 - reach, 1 + reach)
        if mode == "linear":
            return steps, lambda d: cx.sub(1.0, cx.unary("abs", d))
        return steps, lambda d: _cubic(cx, d, a)
    if change.scale is not None:
        factor = min(change.scale, 1.0)
    else:
        have = cx.constant_int(size, "the size of a smoothed resize")
        want = cx.constant_int(change.size, "the size of a smoothed resize")
        factor = min(want / have, 1.0)
    start = math.floor(-reach / factor) + 1
    steps = range(start, 2 - start)

    def weigh(d: Value) -> Value:
        d = cx.mul(d, factor)
        if mode == "cubic":
            return _cubic(cx, d, a)
        line = cx.sub(1.0, cx.unary("abs", d))
        return cx.arith("minimum", cx.arith("maximum", line, 0.0), 1.0)

    return steps, weigh


def _cubic(cx: OnnxContext, d: Value, a: float) -> Value:
    """Keys' kernel at a distance."""
    d = cx.unary("abs", d)
    inner = cx.sub(cx.mul(d, a + 2), a + 3)
    near = cx.add(cx.mul(cx.mul(inner, d), d), 1.0)
    outer = cx.sub(
        cx.mul(cx.add(cx.mul(cx.sub(cx.mul(d, a), 5 * a), d), 8 * a), d), 4 * a
    )
    far = cx.select(cx.arith("lt", d, 2.0), outer, 0.0)
    return cx.select(cx.arith("le", d, 1.0), near, far)


def _clamped(cx: OnnxContext, index: Value, size: Expr) -> Value:
    low = cx.arith("maximum", index, 0)
    made = cx.arith("minimum", low, cx.tensor(size - 1, I64))
    cx.nonnegative.add(made)
    return made


def _rows(cx: OnnxContext, x: Value, axis: int, index: Value) -> Value:
    """x at an index along an axis; the index's dims take its place."""
    found = cx.b.emit("index", cx.move_axis(x, axis, 0), index)
    count = index.type.rank
    order = [
        *range(count, count + axis),
        *range(count),
        *range(count + axis, found.type.rank),
    ]
    return cx.transpose(found, order)


def _outside(
    cx: OnnxContext, n: Node, x: Value, axis: int, outside: Value | None
) -> Value:
    if outside is None:
        return x
    mask = cx.b.broadcast(outside, x.shape, (axis,))
    return cx.select(mask, n.attr("extrapolation_value", 0.0), x)


RESIZE: Table = {("Resize", 10): resize, ("Upsample", 7): resize}
