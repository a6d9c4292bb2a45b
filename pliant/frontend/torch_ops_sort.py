"""aten ops that order, select, search and count elements."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from pliant.frontend.torch_ops_context import Operand, Size, TorchContext, as_index
from pliant.frontend.torch_ops_math import Translate
from pliant.frontend.torch_ops_window import drop_axis
from pliant.ir.graph import Value
from pliant.ir.ops_library import SEARCHED
from pliant.ir.types import DType
from pliant.sym import Expr, as_expr, floordiv, le

aten = torch.ops.aten


# --- sorting --------------------------------------------------------------------


def sorted_along(
    cx: TorchContext, x: Value, axis: int, descending: bool = False
) -> tuple[Value, Value]:
    """(values, places)"""
    values, places = cx.b.emit_multi("sort", x, axis=axis, descending=descending)
    cx.nonnegative.add(places)
    return cx.keep_sign(x, values), places


def sort(
    cx: TorchContext, x: Value, dim: int = -1, descending: bool = False, **_: Any
) -> list[Value]:
    if x.type.rank == 0:
        return [x, cx.full(0, (), DType.I64)]
    return list(sorted_along(cx, x, cx.axis(dim, x.type.rank), descending))


def stable_sort(
    cx: TorchContext,
    x: Value,
    stable: bool | None = None,
    dim: int = -1,
    descending: bool = False,
) -> list[Value]:
    return sort(cx, x, dim, descending)


def argsort(
    cx: TorchContext, x: Value, dim: int = -1, descending: bool = False, **_: Any
) -> Value:
    return sort(cx, x, dim, descending)[1]


def stable_argsort(
    cx: TorchContext, x: Value, stable: bool, dim: int = -1, descending: bool = False
) -> Value:
    return sort(cx, x, dim, descending)[1]


def msort(cx: TorchContext, x: Value) -> Value:
    return sort(cx, x, 0)[0]


def topk(
    cx: TorchContext,
    x: Value,
    k: Size,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,
) -> list[Value]:
    if x.type.rank == 0:
        cx.b.require_equal(as_expr(k), 1, "one element of a number is chosen")
        return [x, cx.full(0, (), DType.I64)]
    axis = cx.axis(dim, x.type.rank)
    values, places = cx.b.emit_multi("top", x, axis=axis, k=as_expr(k), largest=largest)
    cx.nonnegative.add(places)
    return [cx.keep_sign(x, values), places]


# --- single elements of sorted rows ---------------------------------------------


# The place of a row's element, with the axis kept.
Choose = Callable[[TorchContext, Value, int], Value]


def one_of_rows(
    cx: TorchContext, x: Value, dim: int, keepdim: bool, choose: Choose
) -> list[Value]:
    """One element of each row, and its place."""
    if x.type.rank == 0:
        return [x, cx.full(0, (), DType.I64)]
    axis = cx.axis(dim, x.type.rank)
    cx.require(le(1, x.shape[axis]), f"{cx.op_name} of no elements at dim {axis}")
    place = choose(cx, x, axis)
    cx.nonnegative.add(place)
    value = cx.keep_sign(x, cx.b.emit("take_along", x, place, axis=axis))
    if keepdim:
        return [value, place]
    return [drop_axis(cx, value, axis), drop_axis(cx, place, axis)]


def along(choose: Choose) -> Translate:
    return lambda cx, x, dim=-1, keepdim=False: one_of_rows(cx, x, dim, keepdim, choose)


def kthvalue(
    cx: TorchContext, x: Value, k: Size, dim: int = -1, keepdim: bool = False
) -> list[Value]:
    def choose(cx: TorchContext, x: Value, axis: int) -> Value:
        message = f"kthvalue(): selected number k out of range for dimension {axis}"
        cx.require(le(1, k), message)
        cx.require(le(k, x.shape[axis]), message)
        return cx.slice(sorted_along(cx, x, axis)[1], axis, as_expr(k) - 1, 1)

    return one_of_rows(cx, x, dim, keepdim, choose)


def _nans(cx: TorchContext, x: Value, axis: int) -> Value:
    """How many NaNs a row has, with the axis kept."""
    there = cx.cast(cx.unary("isnan", x), DType.I64)
    return cx.reduce("sum", there, (axis,), True)


def _median(ignores_nan: bool) -> Choose:
    def choose(cx: TorchContext, x: Value, axis: int) -> Value:
        size = x.shape[axis]
        _, places = sorted_along(cx, x, axis)
        if not x.dtype.is_float:
            return cx.slice(places, axis, floordiv(size - 1, 2), 1)
        nans = _nans(cx, x, axis)
        if ignores_nan:
            left = cx.arith("maximum", cx.sub(cx.sub(size, nans), 1), 0)
            rank = cx.arith("floordiv", left, 2)
        else:  # the first NaN, if there is one
            spoilt = cx.arith("gt", nans, 0)
            rank = cx.select(spoilt, cx.sub(size, nans), floordiv(size - 1, 2))
        return cx.b.emit("take_along", places, rank, axis=axis)

    return choose


def _of_equals(cx: TorchContext, flat: Value, median: Value) -> Value:
    """The median of all elements: in training, those that equal it share its gradient.

    It is the largest of the elements up to it. A NaN is that of one element.
    """
    if not (cx.training and flat.dtype.is_float):
        return median
    border = cx.b.emit("stop_gradient", median)
    below = cx.select(cx.arith("le", flat, border), flat, float("-inf"))
    shared = cx.reduce("max", below, (0,))
    return cx.select(cx.unary("isnan", border), median, shared)


def median_of_all(ignores_nan: bool) -> Translate:
    def translate(cx: TorchContext, x: Value) -> Value:
        flat = cx.reshape(x, (x.type.numel,))
        return _of_equals(cx, flat, found(cx, x, flat))

    def found(cx: TorchContext, x: Value, flat: Value) -> Value:
        if cx.proves(le(1, x.type.numel)) or not x.dtype.is_float:
            return one_of_rows(cx, flat, 0, False, _median(ignores_nan))[0]
        # The median of no elements is NaN. An extra element is appended: NaN if there
        # are no others, else infinity, which is never the median.
        none = cx.arith("eq", x.type.numel, 0)
        filler = cx.select(none, float("nan"), float("inf"))
        filler = cx.reshape(cx.cast(filler, x.dtype), (1,))
        longer = cx.concat([flat, filler], 0)
        nans = cx.reduce("sum", cx.cast(cx.unary("isnan", flat), DType.I64), (0,))
        left = cx.sub(x.type.numel, nans)
        rank = cx.arith("floordiv", cx.arith("maximum", cx.sub(left, 1), 0), 2)
        _, places = sorted_along(cx, longer, 0)
        if ignores_nan:
            rank = cx.select(cx.arith("eq", left, 0), x.type.numel, rank)
        else:
            rank = cx.select(cx.arith("gt", nans, 0), x.type.numel, rank)
        place = cx.b.emit("take_along", places, cx.reshape(rank, (1,)), axis=0)
        return cx.reshape(cx.b.emit("take_along", longer, place, axis=0), ())

    return translate


def _mode(cx: TorchContext, x: Value, axis: int) -> Value:
    """The end of the first of the longest runs of equals in the sorted row."""
    values, places = sorted_along(cx, x, axis)
    size = x.shape[axis]
    before = cx.slice(values, axis, 0, size - 1)
    after = cx.slice(values, axis, 1, size - 1)
    starts = cx.b.binary("ne", after, before)
    here = cx.iota(starts.shape, axis, DType.I64)
    begun = cx.select(starts, cx.add(here, 1), 0)
    first = cx.full(0, (*x.shape[:axis], 1, *x.shape[axis + 1 :]), DType.I64)
    begun = cx.concat([first, begun], axis)
    begun, _ = cx.b.emit_multi("running_extreme", begun, axis=axis, least=False)
    length = cx.sub(cx.iota(x.shape, axis, DType.I64), begun)
    longest = cx.b.emit("argreduce", length, op="max", axis=axis, keepdims=True)
    return cx.b.emit("take_along", places, longest, axis=axis)


# --- quantiles ------------------------------------------------------------------


def quantile(ignores_nan: bool) -> Translate:
    def translate(
        cx: TorchContext,
        x: Value,
        q: Operand,
        dim: int | None = None,
        keepdim: bool = False,
        *,
        interpolation: str = "linear",
    ) -> Value:
        rank = x.type.rank
        if dim is None or rank == 0:
            kept = [as_expr(1)] * rank
            rows = cx.reshape(x, (x.type.numel,))
        else:
            axis = cx.axis(dim, rank)
            kept = [as_expr(1) if i == axis else d for i, d in enumerate(x.shape)]
            rows = cx.move_axis(x, axis, rank - 1)
        message = "quantile() input tensor must be non-empty"
        cx.require(le(1, rows.type.numel), message)
        asked = cx.tensor(q, x.dtype)
        several = asked.type.rank == 1
        count = asked.shape[0] if several else as_expr(1)
        asked = cx.reshape(asked, (*[1] * (rows.type.rank - 1), count))
        found = _at_quantiles(cx, rows, asked, ignores_nan, interpolation)
        found = cx.move_axis(found, found.type.rank - 1, 0)
        lead = [count] if several else []
        if keepdim:
            return cx.reshape(found, (*lead, *kept))
        return cx.reshape(found, (*lead, *found.shape[1:]))

    return translate


def _at_quantiles(
    cx: TorchContext, rows: Value, q: Value, ignores_nan: bool, between: str
) -> Value:
    """rows (.., n), q (1, .., count) -> (.., count)"""
    axis, size = rows.type.rank - 1, rows.shape[-1]
    values, _ = sorted_along(cx, rows, axis)
    nans = _nans(cx, rows, axis)
    if ignores_nan:
        last = cx.cast(cx.sub(cx.sub(size, nans), 1), rows.dtype)
        rank = cx.arith("maximum", cx.mul(q, last), 0.0)
    else:
        last = cx.tensor(size - 1, rows.dtype)
        rank = cx.select(cx.arith("gt", nans, 0), last, cx.mul(q, last))
    shape = (*rows.shape[:-1], q.shape[-1])
    rank = cx.broadcast_to(rank, shape)
    rounding = {"lower": "floor", "higher": "ceil", "nearest": "round"}
    if between in rounding:
        rank = cx.unary(rounding[between], rank)
    place = cx.cast(rank, DType.I64)
    below = cx.b.emit("take_along", values, place, axis=axis)
    if between in rounding:
        return below
    above_place = cx.cast(cx.unary("ceil", rank), DType.I64)
    above = cx.b.emit("take_along", values, above_place, axis=axis)
    weight: Operand = 0.5
    if between == "linear":
        weight = cx.sub(rank, cx.cast(place, rank.dtype))
    step = cx.sub(above, below)
    low = cx.add(below, cx.mul(weight, step))
    high = cx.sub(above, cx.mul(step, cx.sub(1.0, weight)))
    if between == "midpoint":
        return high
    return cx.select(cx.arith("lt", weight, 0.5), low, high)


# --- running ---------------------------------------------------------------------


def running_extreme(least: bool) -> Translate:
    def translate(cx: TorchContext, x: Value, dim: int) -> list[Value]:
        if x.type.rank == 0:
            return [x, cx.full(0, (), DType.I64)]
        axis = cx.axis(dim, x.type.rank)
        values, places = cx.b.emit_multi("running_extreme", x, axis=axis, least=least)
        cx.nonnegative.add(places)
        return [cx.keep_sign(x, values), places]

    return translate


def logcumsumexp(cx: TorchContext, x: Value, dim: int) -> Value:
    if x.type.rank == 0:
        return x
    wide = cx.cast(x, x.dtype.compute)
    axis = cx.axis(dim, x.type.rank)
    return cx.cast(cx.b.emit("running_logsumexp", wide, axis=axis), x.dtype)


# --- searching -------------------------------------------------------------------


def _searchable(dtype: DType) -> DType:
    """The type in which values are compared; it holds them exactly."""
    if dtype in SEARCHED:
        return dtype
    return DType.F32 if dtype.is_float else DType.I32


def search(cx: TorchContext, rows: Value, values: Value, right: bool) -> Value:
    """Rows with one axis for all values, or with leading axes like those of values."""
    dtype = _searchable(cx.promote(rows, values))
    rows, values = cx.cast(rows, dtype), cx.cast(values, dtype)
    shape = values.shape
    if rows.type.rank == 1:
        rows = cx.reshape(rows, (1, rows.shape[0]))
        flat = cx.reshape(values, (1, values.type.numel))
    else:
        for have, want in zip(values.shape[:-1], rows.shape[:-1], strict=True):
            cx.b.require_equal(have, want, "sorted rows and values must agree")
        count = cx.count(rows, range(rows.type.rank - 1))
        rows = cx.reshape(rows, (count, rows.shape[-1]))
        flat = cx.reshape(values, (count, values.shape[-1]))
    places = cx.b.emit("search", rows, flat, right=right)
    cx.nonnegative.add(places)
    return cx.reshape(places, shape)


def searchsorted(
    cx: TorchContext,
    rows: Value,
    values: Operand,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Value | None = None,
) -> Value:
    if sorter is not None:
        axis = rows.type.rank - 1
        rows = cx.b.emit("take_along", rows, as_index(cx, sorter), axis=axis)
    wanted = values if isinstance(values, Value) else cx.tensor(values, rows.dtype)
    return cx.cast(search(cx, rows, wanted, right or side == "right"), cx.out_dtype)


def bucketize(
    cx: TorchContext,
    values: Operand,
    boundaries: Value,
    out_int32: bool = False,
    right: bool = False,
) -> Value:
    return searchsorted(cx, boundaries, values, out_int32, right)


def isin(
    cx: TorchContext,
    elements: Operand,
    tests: Operand,
    assume_unique: bool = False,
    invert: bool = False,
) -> Value:
    """Whether an element has an equal: the first and last place to insert it differ."""
    dtype = _searchable(cx.promote(elements, tests))
    x, among = cx.tensor(elements, dtype), cx.tensor(tests, dtype)
    among = cx.reshape(among, (among.type.numel,))
    found: Value | None = None
    if dtype.is_float:  # a NaN equals nothing, so it is replaced by another test
        spoilt = cx.unary("isnan", among)
        rest = cx.select(spoilt, cx.tensor(-math.inf, dtype), among)
        among = cx.select(spoilt, cx.reduce("max", rest, (0,), True), among)
        found = cx.unary("logical_not", cx.reduce("all", spoilt, (0,)))
        found = cx.b.binary("logical_and", found, cx.b.binary("eq", x, x))
    rows, _ = sorted_along(cx, among, 0)
    differ = cx.arith("ne", search(cx, rows, x, False), search(cx, rows, x, True))
    found = differ if found is None else cx.b.binary("logical_and", found, differ)
    return cx.unary("logical_not", found) if invert else found


# --- counting --------------------------------------------------------------------


def _counted(cx: TorchContext, place: Value, inside: Value, bins: Expr) -> Value:
    """How often each of 0 .. bins-1 occurs among the places that are `inside`."""
    count = place.type.numel
    where = cx.reshape(cx.select(inside, place, bins), (count,))
    one = cx.full(1, (count, 1), DType.I64)
    sums = cx.b.emit("scatter", where, one, op="sum", rows=bins + 1)
    return cx.reshape(cx.slice(sums, 0, 0, bins), (bins,))


def _ends(cx: TorchContext, x: Value) -> tuple[Value, Value]:
    """The least and the largest element; one less and one more if they are equal."""
    axes = tuple(range(x.type.rank))
    low, high = cx.reduce("min", x, axes), cx.reduce("max", x, axes)
    if not cx.proves(le(1, x.type.numel)):
        none = cx.arith("eq", x.type.numel, 0)
        low, high = cx.select(none, 0.0, low), cx.select(none, 0.0, high)
        low, high = cx.cast(low, x.dtype), cx.cast(high, x.dtype)
    same = cx.arith("eq", low, high)
    less, more = cx.sub(low, 1.0), cx.add(high, 1.0)
    return cx.select(same, less, low), cx.select(same, more, high)


def histc(
    cx: TorchContext, x: Value, bins: Size = 100, min: Any = 0, max: Any = 0
) -> Value:
    wide = cx.cast(x, x.dtype.compute)
    count = as_expr(bins)
    if min == max:
        low, high = _ends(cx, wide)
    else:
        low, high = cx.tensor(min, wide.dtype), cx.tensor(max, wide.dtype)
    above, below = cx.arith("ge", wide, low), cx.arith("le", wide, high)
    inside = cx.b.binary("logical_and", above, below)
    scaled = cx.mul(cx.sub(wide, low), cx.tensor(count, wide.dtype))
    place = cx.div(scaled, cx.sub(high, low))
    # The place of an element outside the range may not fit into an integer.
    place = cx.select(inside, place, cx.tensor(0.0, wide.dtype))
    place = cx.arith("minimum", cx.cast(place, DType.I64), count - 1)
    return cx.cast(_counted(cx, place, inside, count), x.dtype)


# --- products of groups ----------------------------------------------------------


def grouped_mm(
    cx: TorchContext,
    a: Value,
    b: Value,
    offs: Value | None = None,
    bias: Value | None = None,
    out_dtype: torch.dtype | None = None,
) -> Value:
    """Rows a (S, K) in groups that end at `offs`, each with a matrix of b (G, K, N)."""
    if offs is None or bias is not None or (a.type.rank, b.type.rank) != (2, 3):
        cx.unsupported("only groups of rows, each with a matrix, and without bias")
    wide = cx.cast(a, a.dtype.compute)
    out = cx.b.emit("grouped_matmul", wide, b, offs)
    return cx.cast(out, cx.out_dtype)


SORT: dict[Any, Translate] = {
    aten._grouped_mm.default: grouped_mm,
    aten.sort.default: sort,
    aten.sort.stable: stable_sort,
    aten.argsort.default: argsort,
    aten.argsort.stable: stable_argsort,
    aten.msort.default: msort,
    aten.topk.default: topk,
    aten.kthvalue.default: kthvalue,
    aten.median.default: median_of_all(False),
    aten.nanmedian.default: median_of_all(True),
    aten.median.dim: along(_median(False)),
    aten.nanmedian.dim: along(_median(True)),
    aten.mode.default: along(_mode),
    aten.quantile.default: quantile(False),
    aten.quantile.scalar: quantile(False),
    aten.nanquantile.default: quantile(True),
    aten.nanquantile.scalar: quantile(True),
    aten.cummax.default: running_extreme(False),
    aten.cummin.default: running_extreme(True),
    aten.logcumsumexp.default: logcumsumexp,
    aten.searchsorted.Tensor: searchsorted,
    aten.searchsorted.Scalar: searchsorted,
    aten.bucketize.Tensor: bucketize,
    aten.bucketize.Scalar: bucketize,
    aten.isin.Tensor_Tensor: isin,
    aten.isin.Tensor_Scalar: isin,
    aten.isin.Scalar_Tensor: isin,
    aten.histc.default: histc,
}
