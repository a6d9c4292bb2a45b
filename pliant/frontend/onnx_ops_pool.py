"""Pools over windows and over whole planes."""

from __future__ import annotations

import math

from pliant.frontend.onnx_context import Node, OnnxContext, Rule
from pliant.frontend.onnx_ops_activation import Table
from pliant.frontend.onnx_ops_conv import Sliding, explicit, sliding
from pliant.frontend.onnx_ops_move import padded
from pliant.ir.graph import Value
from pliant.ir.types import DType
from pliant.ir.windows import Window, max_pool_places
from pliant.sym import Expr, as_expr, ceildiv, floordiv, le, minimum


def _window(cx: OnnxContext, n: Node, x: Value) -> Sliding:
    return sliding(cx, n, list(n.attrs["kernel_shape"]), list(x.shape[2:]))


def _counts(cx: OnnxContext, n: Node, dims: list[Expr], w: Sliding) -> list[Expr]:
    """How many windows there are; rounded up, none begins behind the input."""
    out = []
    for i, dim in enumerate(dims):
        room = dim + w.low[i] + w.high[i] - w.spans[i]
        if n.attr("ceil_mode", 0):
            count = ceildiv(room, w.stride[i]) + 1
            # The last window begins before low + dim.
            count = minimum(count, ceildiv(dim + w.low[i], w.stride[i]))
        else:
            count = floordiv(room, w.stride[i]) + 1
        if not cx.proves(le(0, room)):
            cx.require(le(0, room), "a window fits into the padded input")
        out.append(cx.simplify(count))
    return out


def _pooled(
    cx: OnnxContext, x: Value, op: str, w: Sliding, counts: list[Expr], include: bool
) -> Value:
    """A pool with as many windows as `counts` says."""
    tail = tuple(e.value + max(s - 1, 0) for e, s in zip(w.high, w.stride, strict=True))
    plain = [
        floordiv(dim + lo + hi - span, s) + 1
        for dim, lo, hi, span, s in zip(
            x.shape[2:], w.low, w.high, w.spans, w.stride, strict=True
        )
    ]
    rounds = any(not cx.b.same(a, b) for a, b in zip(plain, counts, strict=True))
    made = cx.b.emit(
        "pool",
        x,
        op=op,
        window=w.size,
        stride=w.stride,
        low=tuple(e.value for e in w.low),
        high=tail if rounds else tuple(e.value for e in w.high),
        dilation=w.dilation,
        include_pad=include,
    )
    if rounds:
        for i, count in enumerate(counts):
            made = cx.slice(made, 2 + i, 0, count)
    return made


def max_pool(cx: OnnxContext, n: Node) -> tuple[Value | None, ...]:
    x = n.tensor(0)
    w = _window(cx, n, x)
    counts = _counts(cx, n, list(x.shape[2:]), w)
    lowest = -math.inf if x.dtype.is_float else -(2 ** (8 * x.dtype.bytes - 1))
    if x.dtype.is_unsigned:
        lowest = 0
    shown, held = explicit(cx, x, w, lowest)
    out = _pooled(cx, shown, "max", held, counts, True)
    if 1 not in n.used:
        return (out, None)
    if shown is not x:
        cx.unsupported("places of a pool whose padding depends on sizes")
    return out, _places(cx, n, x, held, counts)


def _places(
    cx: OnnxContext, n: Node, x: Value, w: Sliding, counts: list[Expr]
) -> Value:
    """Where in the whole tensor each largest element is."""
    rank = len(w.size)
    low, high = ([e.value for e in ends] for ends in (w.low, w.high))
    tail = [h + s - 1 for h, s in zip(high, w.stride, strict=True)]
    window = Window(w.size, w.stride, tuple(low), tuple(tail), w.dilation)
    place = max_pool_places(cx.b, x, counts, window)
    dims = x.shape[2:]
    if n.attr("storage_order", 0):
        rest, parts = place, []
        for dim in reversed(dims):
            size = cx.tensor(dim, DType.I64)
            parts.append(cx.arith("mod", rest, size))
            rest = cx.arith("floordiv", rest, size)
        place = parts[0]
        for part, dim in zip(parts[1:], reversed(dims[:-1]), strict=True):
            place = cx.add(cx.mul(place, cx.tensor(dim, DType.I64)), part)
    area = cx.tensor(cx.count(x, range(2, 2 + rank)), DType.I64)
    batch, channel = (cx.iota(place.shape, i, DType.I64) for i in (0, 1))
    plane = cx.add(cx.mul(batch, cx.tensor(x.shape[1], DType.I64)), channel)
    return cx.add(cx.mul(plane, area), place)


def average_pool(cx: OnnxContext, n: Node) -> Value:
    return window_means(cx, n, n.tensor(0))


def window_means(cx: OnnxContext, n: Node, x: Value) -> Value:
    """AveragePool of x by the attributes of a node."""
    w = _window(cx, n, x)
    counts = _counts(cx, n, list(x.shape[2:]), w)
    wide = cx.cast(x, x.dtype.compute)
    if n.attr("count_include_pad", 0):
        # The padding counts, what a rounded-up window has behind it does not.
        lead = [as_expr(0)] * 2
        wide = padded(cx, wide, [*lead, *w.low], [*lead, *w.high], "constant", 0.0)
        none = tuple(as_expr(0) for _ in w.size)
        w = Sliding(w.size, w.stride, none, none, w.dilation)
    elif not w.is_constant:
        return cx.cast(_shared(cx, wide, w, counts), x.dtype)
    return cx.cast(_pooled(cx, wide, "mean", w, counts, False), x.dtype)


def _shared(cx: OnnxContext, x: Value, w: Sliding, counts: list[Expr]) -> Value:
    """A mean whose padding depends on sizes: sums, divided by how many there are."""
    ones = cx.full(1.0, (1, 1, *x.shape[2:]), x.dtype)
    total, held = explicit(cx, x, w)
    count, _ = explicit(cx, ones, w)
    parts = [_pooled(cx, v, "mean", held, counts, True) for v in (total, count)]
    return cx.div(parts[0], cx.broadcast_to(parts[1], parts[0].shape))


def lp_pool(cx: OnnxContext, n: Node) -> Value:
    x = n.tensor(0)
    p = n.attr("p", 2)
    w = _window(cx, n, x)
    counts = _counts(cx, n, list(x.shape[2:]), w)
    powers = cx.arith("pow", cx.unary("abs", x), float(p))
    if p == 2:
        powers = cx.mul(x, x)
    lead = [as_expr(0)] * 2
    tail = [h + s - 1 for h, s in zip(w.high, w.stride, strict=True)]
    whole = padded(cx, powers, [*lead, *w.low], [*lead, *tail], "constant", 0.0)
    none = tuple(as_expr(0) for _ in w.size)
    held = Sliding(w.size, w.stride, none, none, w.dilation)
    made = _pooled(cx, whole, "mean", held, counts, True)
    total = cx.mul(made, float(math.prod(w.size)))
    return _root(cx, total, p)


def _root(cx: OnnxContext, x: Value, p: int) -> Value:
    return cx.unary("sqrt", x) if p == 2 else cx.arith("pow", x, 1.0 / p)


def whole_plane(op: str) -> Rule:
    def rule(cx: OnnxContext, n: Node) -> Value:
        x = n.tensor(0)
        axes = list(range(2, x.type.rank))
        if op == "mean":
            return cx.mean(x, axes, True)
        if op == "max":
            return cx.reduce("max", x, axes, True)
        p = n.attr("p", 2)
        powers = cx.arith("pow", cx.unary("abs", x), float(p))
        return _root(cx, cx.reduce("sum", powers, axes, True), p)

    return rule


def max_unpool(cx: OnnxContext, n: Node) -> Value:
    x, places = n.tensor(0), n.tensor(1)
    rank = x.type.rank - 2
    size = list(n.attrs["kernel_shape"])
    stride = n.attrs.get("strides") or [1] * rank
    pads = n.attrs.get("pads") or [0] * (2 * rank)
    shape = [
        *x.shape[:2],
        *(
            (dim - 1) * s + k - pads[i] - pads[i + rank]
            for i, (dim, s, k) in enumerate(zip(x.shape[2:], stride, size, strict=True))
        ),
    ]
    target = shape
    if n.has(2):
        target = [as_expr(s) for s in n.sizes(2, "the output's shape")]
    total = as_expr(1)
    for dim in target:
        total = total * dim
    index = places
    if n.has(2):
        # Places count in the inferred shape; the result has another one.
        rest, parts = places, []
        for dim in reversed(shape):
            length = cx.tensor(dim, DType.I64)
            parts.append(cx.arith("mod", rest, length))
            rest = cx.arith("floordiv", rest, length)
        index = cx.b.flat_place(parts[::-1], target)
    flat = cx.in_range(cx.reshape(index, (x.type.numel,)), total, 0)
    empty = cx.full(0, (total, 1), x.dtype)
    made = cx.b.emit("scatter_rows", empty, flat, cx.reshape(x, (x.type.numel, 1)))
    return cx.reshape(made, target)


POOLS: Table = {
    ("MaxPool", 1): max_pool,
    ("AveragePool", 1): average_pool,
    ("LpPool", 1): lp_pool,
    ("GlobalAveragePool", 1): whole_plane("mean"),
    ("GlobalMaxPool", 1): whole_plane("max"),
    ("GlobalLpPool", 1): whole_plane("lp"),
    ("MaxUnpool", 9): max_unpool,
}
