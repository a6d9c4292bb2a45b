"""Ops that move elements: reshape, transpose, slice, concat, pad, tile and their like.

Those that only rearrange apply to codes as well (`Coded`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

from pliant.errors import ModelError
from pliant.frontend.onnx_context import Node, OnnxContext, Rule
from pliant.frontend.onnx_known import MOST
from pliant.frontend.onnx_limits import OUTPUTS
from pliant.frontend.onnx_ops_activation import Table
from pliant.frontend.onnx_values import Coded, Entry, Known, settled
from pliant.frontend.operands import Size
from pliant.ir.graph import Value
from pliant.ir.types import DType
from pliant.sym import Expr, as_expr, eq, floordiv, le, maximum, minimum, product


def moved(rule: Callable[[OnnxContext, Node, Value], Value]) -> Rule:
    """A rule of the first input that does not care what its elements mean."""

    @functools.wraps(rule)
    def apply(cx: OnnxContext, n: Node) -> Entry:
        entry = n.entry(0)
        if isinstance(entry, Coded):
            return Coded(rule(cx, n, entry.codes), entry.element)
        return rule(cx, n, cx.value(entry))

    return apply


def identity(cx: OnnxContext, n: Node) -> Entry:
    return n.entry(0)


def reshape(cx: OnnxContext, n: Node, x: Value) -> Value:
    wanted = list(n.attrs["shape"]) if n.version < 5 else n.sizes(1, "the new shape")
    allow = bool(n.attr("allowzero", 0))
    shape: list[Expr | None] = []
    for i, size in enumerate(wanted):
        if isinstance(size, Expr):
            size = cx.simplify(size)
        if size == 0 and not allow:
            shape.append(x.shape[i])
        elif size == -1:
            shape.append(None)
        else:
            if isinstance(size, Expr) and not cx.proves(le(0, size)):
                cx.require(le(0, size), "a size that is not negative")
            shape.append(as_expr(size))
    return cx.reshape(x, resolved(cx, x, shape))


def resolved(cx: OnnxContext, x: Value, shape: list[Expr | None]) -> list[Expr]:
    """The shape with its one open size, which is what is left of the elements."""
    if None not in shape:
        return [d for d in shape if d is not None]
    known = cx.simplify(product([d for d in shape if d is not None]))
    total = cx.simplify(x.type.numel)
    rest = _quotient(cx, x.shape, [d for d in shape if d is not None])
    if rest is None:
        if known == 0:
            rest = as_expr(0)
        else:
            if not cx.proves(le(1, known)):
                cx.require(le(1, known), "an open size needs others above 0")
            rest = cx.simplify(floordiv(total, known))
    return [rest if d is None else d for d in shape]


def _quotient(
    cx: OnnxContext, have: Sequence[Expr], given: Sequence[Expr]
) -> Expr | None:
    """The product of `have` without those that are `given`, where all of them are."""
    left = list(have)
    for size in given:
        found = next((k for k, d in enumerate(left) if d == size), None)
        if found is None:
            constant = [k for k, d in enumerate(left) if d.is_const and size.is_const]
            whole = product([left[k] for k in constant]).value if constant else 0
            if not size.is_const or size.value < 1 or not whole or whole % size.value:
                return None
            rest = whole // size.value
            left = [d for k, d in enumerate(left) if k not in constant]
            left.append(as_expr(rest))
            continue
        left.pop(found)
    return cx.simplify(product(left))


def flatten(cx: OnnxContext, n: Node, x: Value) -> Value:
    axis = n.attr("axis", 1)
    axis = axis + x.type.rank if axis < 0 else axis
    rest = range(axis, x.type.rank)
    return cx.reshape(x, (cx.count(x, range(axis)), cx.count(x, rest)))


def transpose(cx: OnnxContext, n: Node, x: Value) -> Value:
    rank = x.type.rank
    return cx.transpose(x, n.attrs.get("perm") or list(reversed(range(rank))))


def squeeze(cx: OnnxContext, n: Node, x: Value) -> Value:
    axes = n.axes_input(1)
    if axes is None:
        axes = []
        for i, dim in enumerate(x.shape):
            size = cx.simplify(dim)
            if not size.is_const and cx.b.facts.prove(eq(size, 1)) is None:
                cx.constant_int(size, "whether a dim is 1")
            if size.is_const and size.value == 1:
                axes.append(i)
    for axis in axes:
        cx.b.require_equal(x.shape[axis], 1, "a dropped dim must be 1")
    return cx.reshape(x, [d for i, d in enumerate(x.shape) if i not in axes])


def unsqueeze(cx: OnnxContext, n: Node, x: Value) -> Value:
    given = n.attrs["axes"] if "axes" in n.attrs else n.ints(1, "axes")
    rank = x.type.rank + len(given)
    axes = {n.axis(int(a), rank) for a in given}
    dims = iter(x.shape)
    shape = [as_expr(1) if i in axes else next(dims) for i in range(rank)]
    return cx.reshape(x, shape)


def expand(cx: OnnxContext, n: Node, x: Value) -> Value:
    wanted = [as_expr(s) for s in n.sizes(1, "the new shape")]
    shape = list(cx.broadcast_shape(x.shape, wanted))
    return cx.expand_to(x, shape)


def tile(cx: OnnxContext, n: Node, x: Value) -> Value:
    if n.version < 6:
        cx.unsupported("Tile before operator set 6")
    repeats = n.sizes(1, "repeats")
    for axis, count in enumerate(repeats):
        if count == 1:
            continue
        shape = (*x.shape[:axis], as_expr(1), *x.shape[axis:])
        wide = (*x.shape[:axis], as_expr(count), *x.shape[axis:])
        joined = (*x.shape[:axis], x.shape[axis] * count, *x.shape[axis + 1 :])
        x = cx.reshape(cx.broadcast_to(cx.reshape(x, shape), wide), joined)
    return x


def concat(cx: OnnxContext, n: Node) -> Entry:
    first = n.entry(0)
    axis = n.axis(n.attr("axis", 1 if n.version < 4 else 0))
    if isinstance(first, Coded):
        parts = [e for e in n.inputs if isinstance(e, Coded)]
        if len(parts) != len(n.inputs):
            cx.unsupported("a concat of different types")
        return Coded(cx.concat([p.codes for p in parts], axis), first.element)
    return cx.concat(n.tensors(), axis)


def slice_(cx: OnnxContext, n: Node, x: Value) -> Value:
    if n.version < 10:
        starts: list[Size] = list(n.attrs["starts"])
        ends: list[Size] = list(n.attrs["ends"])
        axes = n.attrs.get("axes")
        steps = [1] * len(starts)
    else:
        starts, ends = n.sizes(1, "starts"), n.sizes(2, "ends")
        axes = n.ints(3, "axes") if n.has(3) else None
        steps = n.ints(4, "steps") if n.has(4) else [1] * len(starts)
    axes = list(range(len(starts))) if axes is None else axes
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        x = sliced(cx, x, n.axis(axis), start, end, step)
    return x


def sliced(
    cx: OnnxContext, x: Value, axis: int, start: Size, end: Size, step: int
) -> Value:
    """x[start:end:step] as in Python."""
    size = x.shape[axis]
    if step == 0:
        cx.unsupported("a slice with step 0")
    if step < 0:
        # From the back: element i of the flipped axis is element size-1-i.
        first = _place(cx, start, size, as_expr(-1), size - 1)
        last = _place(cx, end, size, as_expr(-1), size - 1)
        x = cx.b.emit("flip", x, axes=(axis,))
        low, high = size - 1 - first, size - 1 - last
        return _cut(cx, x, axis, low, high, -step)
    low = _place(cx, start, size, as_expr(0), size)
    high = _place(cx, end, size, as_expr(0), size)
    return _cut(cx, x, axis, low, high, step)


def _cut(
    cx: OnnxContext, x: Value, axis: int, low: Expr, high: Expr, step: int
) -> Value:
    length = cx.simplify(maximum(high - low, 0))
    count = cx.simplify(floordiv(length + step - 1, step))
    # An empty slice may begin behind the end.
    start = cx.simplify(low)
    if not cx.proves(le(start + (count - 1) * step + 1, x.shape[axis])):
        start = cx.simplify(minimum(start, x.shape[axis]))
    return cx.slice(x, axis, start, count, step)


def _place(cx: OnnxContext, at: Size, size: Expr, least: Expr, most: Expr) -> Expr:
    """Where a bound of a slice is: from the end if negative, between the ends."""
    place = cx.simplify(at)
    if place.is_const and abs(place.value) >= 2**31 - 1:
        return least if place.value < 0 else cx.simplify(most)
    if cx.proves(le(place, -1)):
        place = place + size
    elif not cx.proves(le(0, place)):
        cx.require(le(0, place), "a bound of a slice that is not negative")
    return cx.simplify(minimum(maximum(place, least), most))


def split(cx: OnnxContext, n: Node) -> tuple[Entry, ...]:
    axis = n.axis(n.attr("axis", 0))
    count = len(n.outputs)
    whole = n.known(0)
    if whole is not None and whole.array.size <= MOST:
        return _split_known(cx, n, whole, axis)
    x = n.tensor(0)
    if "split" in n.attrs:
        sizes: list[Size] = list(n.attrs["split"])
    elif n.has(1):
        sizes = n.sizes(1, "the sizes of parts")
    else:
        parts = int(n.attrs.get("num_outputs", count))
        if not 1 <= parts <= OUTPUTS:
            raise ModelError(f"Split into {parts} parts")
        each = cx.simplify(floordiv(x.shape[axis] + parts - 1, parts))
        if n.version < 18:
            each = cx.simplify(floordiv(x.shape[axis], parts))
            cx.b.require_equal(each * parts, x.shape[axis], "equal parts")
        sizes = [each] * (parts - 1)
        sizes.append(cx.simplify(x.shape[axis] - each * (parts - 1)))
    return tuple(pieces(cx, x, axis, sizes))


def _split_known(
    cx: OnnxContext, n: Node, whole: Known, axis: int
) -> tuple[Entry, ...]:
    size, count = whole.shape[axis], len(n.outputs)
    if "split" in n.attrs:
        sizes = list(n.attrs["split"])
    elif n.has(1):
        sizes = n.ints(1, "the sizes of parts")
    else:
        each = -(-size // count)
        sizes = [each] * (count - 1) + [size - each * (count - 1)]
    parts = np.split(whole.array, np.cumsum(sizes)[:-1], axis)
    return tuple(Known(settled(p, whole.element), whole.element) for p in parts)


def pieces(cx: OnnxContext, x: Value, axis: int, sizes: Sequence[Size]) -> list[Value]:
    start, out = as_expr(0), []
    for size in sizes:
        out.append(cx.slice(x, axis, start, size))
        start = start + size
    cx.b.require_equal(start, x.shape[axis], "parts that make up the whole")
    return out


# ---- padding


def pad(cx: OnnxContext, n: Node) -> Value:
    x = n.tensor(0)
    rank = x.type.rank
    mode = n.attr("mode", "constant")
    value: Value | float = n.attr("value", 0.0)
    if n.version < 11:
        widths: list[Size] = list(n.attrs.get("pads", n.attrs.get("paddings", ())))
    else:
        widths = n.sizes(1, "pads")
        value = n.tensor(2) if n.has(2) else 0.0
        number = n.number(2)
        value = number if number is not None else value
    axes = list(range(rank))
    if n.has(3):
        axes = [n.axis(a) for a in n.ints(3, "axes")]
    low, high = [as_expr(0)] * rank, [as_expr(0)] * rank
    for k, axis in enumerate(axes):
        low[axis] = as_expr(widths[k])
        high[axis] = as_expr(widths[k + len(axes)])
    return padded(cx, x, low, high, mode, value)


def padded(
    cx: OnnxContext,
    x: Value,
    low: Sequence[Expr],
    high: Sequence[Expr],
    mode: str,
    value: Value | float,
) -> Value:
    """Widths below 0 cut."""
    for axis in range(x.type.rank):
        lo, hi = cx.simplify(low[axis]), cx.simplify(high[axis])
        for width in (lo, hi):
            if not cx.proves(le(0, width)) and not cx.proves(le(width, -1)):
                cx.require(le(0, width), "padding that is not negative")
        cut_low = -lo if cx.proves(le(lo, -1)) else as_expr(0)
        cut_high = -hi if cx.proves(le(hi, -1)) else as_expr(0)
        if cut_low != 0 or cut_high != 0:
            size = x.shape[axis] - cut_low - cut_high
            x = cx.slice(x, axis, cut_low, size)
        lo = lo if cut_low == 0 else as_expr(0)
        hi = hi if cut_high == 0 else as_expr(0)
        if mode != "constant" and (lo != 0 or hi != 0):
            x = _reflected(cx, x, axis, lo, hi, mode)
        elif lo != 0 or hi != 0:
            x = _filled(cx, x, axis, lo, hi, value)
    return x


def _filled(
    cx: OnnxContext, x: Value, axis: int, lo: Expr, hi: Expr, value: Value | float
) -> Value:
    rank = x.type.rank
    none = [as_expr(0)] * rank
    low, high = list(none), list(none)
    low[axis], high[axis] = lo, hi
    number = 0.0 if isinstance(value, Value) else value
    fill = float(number) if x.dtype.is_float else int(number)
    if x.dtype is DType.BOOL:
        fill = bool(number)
    made = cx.b.emit("pad", x, low=tuple(low), high=tuple(high), value=fill)
    if isinstance(value, Value):
        place = cx.iota(made.shape, axis, DType.I64)
        inside = cx.b.binary(
            "logical_and",
            cx.arith("ge", place, lo),
            cx.arith("lt", place, lo + x.shape[axis]),
        )
        made = cx.select(inside, made, cx.reshape(value, ()))
    return made


def _reflected(
    cx: OnnxContext, x: Value, axis: int, lo: Expr, hi: Expr, mode: str
) -> Value:
    """Rows of x by their places: mirrored, repeated at the ends, or around."""
    size = x.shape[axis]
    count = cx.simplify(size + lo + hi)
    place = cx.sub(cx.iota((count,), 0, DType.I64), cx.tensor(lo, DType.I64))
    last = cx.tensor(size - 1, DType.I64)
    if mode == "edge":
        place = cx.arith("maximum", cx.arith("minimum", place, last), 0)
    elif mode == "wrap":
        place = cx.arith("mod", place, cx.tensor(size, DType.I64))
    elif mode == "reflect":
        period = cx.arith("maximum", cx.tensor(2 * size - 2, DType.I64), 1)
        place = cx.arith("mod", place, period)
        place = cx.sub(last, cx.unary("abs", cx.sub(last, place)))
    else:
        cx.unsupported(f"padding of mode {mode}")
    cx.require(le(1, size), "padding from elements needs some")
    rows = cx.move_axis(x, axis, 0)
    return cx.move_axis(cx.b.emit("index", rows, place), 0, axis)


def center_crop_pad(cx: OnnxContext, n: Node) -> Value:
    x = n.tensor(0)
    axes = n.attrs.get("axes")
    wanted = n.sizes(1, "the new shape")
    axes = list(range(x.type.rank)) if axes is None else [n.axis(a) for a in axes]
    for axis, size in zip(axes, wanted, strict=True):
        have, want = x.shape[axis], as_expr(size)
        more = maximum(want - have, 0)
        less = maximum(have - want, 0)
        start = cx.simplify(floordiv(less, 2))
        x = cx.slice(x, axis, start, cx.simplify(have - less))
        before = cx.simplify(floordiv(more, 2))
        after = cx.simplify(more - floordiv(more, 2))
        if before != 0 or after != 0:
            x = _filled(cx, x, axis, before, after, 0.0)
    return x


# ---- blocks


def _block(n: Node) -> int:
    size = int(n.attrs["blocksize"])
    if not 1 <= size <= 2**24:
        raise ModelError(f"{n.op} with blocks of {size}")
    return size


def depth_to_space(cx: OnnxContext, n: Node) -> Value:
    x, block = n.tensor(0), _block(n)
    b, c, h, w = x.shape
    depth = cx.simplify(floordiv(c, block * block))
    if n.attr("mode", "DCR") == "DCR":
        parts = cx.reshape(x, (b, block, block, depth, h, w))
        parts = cx.transpose(parts, (0, 3, 4, 1, 5, 2))
    else:
        parts = cx.reshape(x, (b, depth, block, block, h, w))
        parts = cx.transpose(parts, (0, 1, 4, 2, 5, 3))
    return cx.reshape(parts, (b, depth, h * block, w * block))


def space_to_depth(cx: OnnxContext, n: Node) -> Value:
    x, block = n.tensor(0), _block(n)
    b, c, h, w = x.shape
    rows, columns = (cx.simplify(floordiv(d, block)) for d in (h, w))
    if n.attr("mode", "DCR") == "CRD":
        parts = cx.reshape(x, (b, c, rows, block, columns, block))
        parts = cx.transpose(parts, (0, 1, 3, 5, 2, 4))
    else:
        parts = cx.reshape(x, (b, c, rows, block, columns, block))
        parts = cx.transpose(parts, (0, 3, 5, 1, 2, 4))
    return cx.reshape(parts, (b, c * block * block, rows, columns))


# ---- shapes


def shape(cx: OnnxContext, n: Node) -> Known:
    dims = cx.shape_of(n.entry(0))
    rank = len(dims)
    start, end = n.attr("start", 0), n.attr("end", rank)
    start = max(start + rank, 0) if start < 0 else start
    end = max(end + rank, 0) if end < 0 else end
    return cx.sizes(dims[start:end])


def size(cx: OnnxContext, n: Node) -> Known:
    total = product(cx.shape_of(n.entry(0)))
    vector = cx.sizes([total])
    return Known(vector.array.reshape(()), vector.element)


MOVE: Table = {
    ("Identity", 1): identity,
    ("Reshape", 1): moved(reshape),
    ("Flatten", 1): moved(flatten),
    ("Transpose", 1): moved(transpose),
    ("Squeeze", 1): moved(squeeze),
    ("Unsqueeze", 1): moved(unsqueeze),
    ("Expand", 8): moved(expand),
    ("Tile", 1): moved(tile),
    ("Concat", 1): concat,
    ("Slice", 1): moved(slice_),
    ("Split", 1): split,
    ("Pad", 1): pad,
    ("CenterCropPad", 18): center_crop_pad,
    ("DepthToSpace", 1): depth_to_space,
    ("SpaceToDepth", 1): space_to_depth,
    ("Shape", 1): shape,
    ("Size", 1): size,
}
