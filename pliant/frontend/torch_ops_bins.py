"""aten ops that sum up elements by where they fall: segments of an axis, and bins.

    segment_reduce(x, "sum", lengths=[2, 3])     x[:2].sum(), x[2:].sum()
    histogram(x, 3)                              how many elements are in each third

The place of an element is found by a search among the ends, and `scatter` merges the
elements of one place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from pliant.frontend.torch_ops_context import Size, TorchContext, as_index
from pliant.frontend.torch_ops_math import Translate
from pliant.frontend.torch_ops_sort import search
from pliant.ir.graph import Value
from pliant.ir.reductions import COMBINES
from pliant.ir.types import DType
from pliant.sym import as_expr, floordiv, le, product

aten = torch.ops.aten

# --- segments ----------------------------------------------------------------------

# What a segment without elements gives.
_EMPTY = {"max": -math.inf, "min": math.inf, "sum": 0.0, "mean": math.nan, "prod": 1.0}


def segment_reduce(
    cx: TorchContext,
    x: Value,
    reduce: str,
    *,
    lengths: Value | None = None,
    indices: Value | None = None,
    offsets: Value | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: float | None = None,
) -> Value:
    """Segments of one axis; each row of the axes before it has its own."""
    given = lengths if offsets is None else offsets
    if given is None or given.type.rank != cx.axis(axis, x.type.rank) + 1:
        cx.unsupported("segments that are not told for every row, in rows of their own")
    lead, tail = x.shape[: given.type.rank - 1], x.shape[given.type.rank :]
    count, n = product(lead), x.shape[given.type.rank - 1]
    for have, want in zip(given.shape[:-1], lead, strict=True):
        cx.b.require_equal(have, want, "segment_reduce: a row of segments for each row")
    rows = cx.reshape(as_index(cx, given), (count, given.shape[-1]))
    starts = _starts(cx, rows, n, offsets is None, unsafe)
    segments = cx.simplify(starts.shape[1] - 1)
    # Before the first segment is place 0, and behind the last segments + 1.
    wanted = cx.iota((count, n), 1, DType.I64)
    place = cx.b.emit("search", starts, wanted, right=True)
    wide = cx.simplify(segments + 2)
    base = cx.mul(cx.iota((count, 1), 0, DType.I64), wide)
    places = cx.reshape(cx.add(base, place), (count * n,))
    cx.nonnegative.add(places)
    values = cx.reshape(cx.cast(x, x.dtype.compute), (count * n, product(tail)))
    found = _merged(cx, places, values, reduce, count * wide)
    found = cx.reshape(found, (count, wide, product(tail)))
    found = cx.slice(found, 1, 1, segments)
    length = cx.sub(cx.slice(starts, 1, 1, segments), cx.slice(starts, 1, 0, segments))
    length = cx.reshape(cx.in_range(length, n + 1, 0), (count, segments, 1))
    found = _finished(cx, found, length, reduce, initial)
    return cx.cast(cx.reshape(found, (*lead, segments, *tail)), cx.out_dtype)


def _starts(
    cx: TorchContext, rows: Value, n: Size, are_lengths: bool, unsafe: bool
) -> Value:
    """Where segments start, and where the last one ends: (rows, segments + 1)."""
    if not are_lengths:
        cx.require(le(1, rows.shape[1]), "segment_reduce: offsets have an end")
        return rows
    total = cx.reduce("sum", rows, (1,), True)
    ends = cx.b.emit("cumulate", rows, op="sum", axis=1)
    if not unsafe:
        gap = cx.sub(total, n)
        what = "segment_reduce: the sum of lengths less the size"
        gap = cx.b.in_range(gap, 1, wraps=False, of=what, axis=-1)
        ends = cx.add(ends, gap)
    return cx.concat([cx.full(0, total.shape, DType.I64), ends], 1)


def _merged(
    cx: TorchContext, places: Value, values: Value, reduce: str, rows: Size
) -> Value:
    op = "sum" if reduce == "mean" else reduce
    return cx.b.emit("scatter", places, values, op=op, rows=as_expr(rows))


def _finished(
    cx: TorchContext, found: Value, length: Value, reduce: str, initial: float | None
) -> Value:
    """With the initial value, and what segments without elements give."""
    if initial is not None:
        combine = COMBINES["sum" if reduce == "mean" else reduce]
        found = cx.arith(combine, found, cx.tensor(float(initial), found.dtype))
    some = cx.arith("gt", length, 0)
    if reduce == "mean":
        divisor = cx.cast(cx.arith("maximum", length, 1), found.dtype)
        found = cx.div(found, divisor)
    empty = _EMPTY[reduce] if initial is None else float(initial)
    return cx.select(some, found, cx.tensor(empty, found.dtype))


# --- bins --------------------------------------------------------------------------


def histogram(
    cx: TorchContext,
    x: Value,
    bins: Size = 100,
    *,
    range: Sequence[float] | None = None,
    weight: Value | None = None,
    density: bool = False,
) -> list[Value]:
    """The weight of the elements between neighbouring edges, and the edges.

    An edge belongs to the bin above it, the last one to the bin below.
    """
    count, n = as_expr(bins), x.type.numel
    cx.require(le(1, count), "histogram: a number of bins")
    flat = cx.reshape(x, (n,))
    edges = _edges(cx, *_ends(cx, flat, range), count)
    # 0 is below all edges; elements that are there, above, or NaN do not count.
    found = search(cx, edges, flat, True)
    last = cx.arith("eq", flat, cx.slice(edges, 0, count, 1))
    place = cx.cast(cx.select(last, cx.tensor(count, DType.I64), found), DType.I64)
    one = cx.full(1.0, (n,), x.dtype)
    rows = one if weight is None else cx.cast(cx.reshape(weight, (n,)), x.dtype)
    rows = cx.reshape(rows, (n, 1))
    sums = cx.b.emit("scatter", place, rows, op="sum", rows=count + 2)
    sums = cx.reshape(cx.slice(sums, 0, 1, count), (count,))
    if density:
        widths = cx.sub(cx.slice(edges, 0, 1, count), cx.slice(edges, 0, 0, count))
        sums = cx.div(cx.div(sums, cx.reduce("sum", sums, (0,))), widths)
    return [sums, edges]


def _ends(
    cx: TorchContext, x: Value, given: Sequence[float] | None
) -> tuple[Value, Value]:
    """The least and the largest edge, half a unit apart from one element."""
    if given is not None:
        low, high = (cx.tensor(float(end), x.dtype) for end in given)
    else:
        low, high = cx.reduce("min", x, (0,)), cx.reduce("max", x, (0,))
        if not cx.proves(le(1, x.type.numel)):
            none = cx.arith("eq", x.type.numel, 0)
            low = cx.select(none, cx.tensor(0.0, x.dtype), low)
            high = cx.select(none, cx.tensor(1.0, x.dtype), high)
        odd = cx.cast(cx.arith("ne", cx.sub(high, low), cx.sub(high, low)), DType.I64)
        what = "histogram: whether an element is NaN or infinite"
        odd = cx.b.in_range(odd, 1, wraps=False, of=what, axis=-1)
        low = cx.add(low, cx.cast(odd, x.dtype))
    same = cx.arith("eq", low, high)
    less, more = cx.sub(low, 0.5), cx.add(high, 0.5)
    return cx.select(same, less, low), cx.select(same, more, high)


def _edges(cx: TorchContext, low: Value, high: Value, count: Size) -> Value:
    """count + 1 numbers, from both ends to the middle as torch's linspace has them."""
    whole = as_expr(count)
    step = cx.div(cx.sub(high, low), cx.tensor(whole, low.dtype))
    number = cx.iota((whole + 1,), 0, DType.I64)
    below = cx.arith("lt", number, floordiv(whole + 1, 2))
    up = cx.add(low, cx.mul(step, cx.cast(number, low.dtype)))
    rest = cx.cast(cx.sub(whole, number), low.dtype)
    return cx.select(below, up, cx.sub(high, cx.mul(step, rest)))


BINS: dict[Any, Translate] = {
    aten.segment_reduce.default: segment_reduce,
    aten.histogram.bin_ct: histogram,
}
