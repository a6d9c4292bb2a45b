"""Ops whose kernels are C functions of the package: rows, shape rules, meanings.

Such an op has its operands and results in memory, and shares its kernel with no other
op. Its row here is all that the graph IR knows of it; lower/library.py says which
function of pliant/library/ it calls, with which sizes and how much workspace. Gradients
are in passes/gradient_rules_library.py.

Rows run along `axis`. NaN is the largest number, and -0.0 equals 0.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pliant.ir.infer import Attrs, InferContext, Types
from pliant.ir.opdef import AttrSpec, OpDef, Trait
from pliant.ir.ops_fft import FFT_OPS
from pliant.ir.ops_linalg import LINALG_OPS
from pliant.ir.types import DType, TensorType
from pliant.sym import Expr, as_expr, le

Array = np.ndarray[Any, Any]

MOST = 2**32 - 1  # elements of a row: places have 32 bits beside a key
MOST_PLACE = 2**31 - 2  # rows and columns of an image: the one behind it has 31 bits

# ---- shape rules


def _sort(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    (x,), axis = types, cx.axis(attrs.integer("axis"), types[0])
    cx.require(le(x.shape[axis], MOST), "a row to sort is too long")
    return x, x.with_dtype(DType.I64)


def _top(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    (x,), axis, k = types, cx.axis(attrs.integer("axis"), types[0]), attrs.dim("k")
    cx.require(le(x.shape[axis], MOST), "a row to select from is too long")
    cx.require(le(0, k), "the number of elements selected must not be negative")
    message = f"selected index k out of range: k elements of dim {axis} must be there"
    cx.require(le(k, x.shape[axis]), message)
    chosen = TensorType(x.dtype, (*x.shape[:axis], k, *x.shape[axis + 1 :]))
    return chosen, chosen.with_dtype(DType.I64)


def _search(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    row, values = types
    cx.same_dtype(types)
    if row.dtype not in SEARCHED:
        cx.fail(f"searches in {', '.join(map(str, SEARCHED))}, not in {row.dtype}")
    cx.require_rank(row, 2, "the sorted rows")
    cx.require_rank(values, 2, "the values")
    cx.require_equal(row.shape[0], values.shape[0], "one row for each row of values")
    return (values.with_dtype(DType.I64),)


def _running_extreme(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    cx.axis(attrs.integer("axis"), types[0])
    return types[0], types[0].with_dtype(DType.I64)


def _running_logsumexp(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    cx.axis(attrs.integer("axis"), types[0])
    if types[0].dtype not in (DType.F32, DType.F64):
        cx.fail(f"takes f32 or f64, not {types[0].dtype}")
    return types


def _scatter_rows(cx: InferContext, types: Types, _: Attrs) -> Types:
    x, places, updates = types
    cx.same_dtype((x, updates))
    if places.dtype is not DType.I64:
        cx.fail(f"places are i64, not {places.dtype}")
    if x.rank not in (2, 3):
        cx.fail(f"takes a matrix, or several, not {x}")
    cx.require_rank(places, 1, "places")
    cx.require_rank(updates, x.rank, "rows")
    cx.require_equal(x.shape[-1], updates.shape[-1], "rows must have one size")
    cx.require_equal(places.shape[0], updates.shape[-2], "one place for each row")
    if x.rank == 3:
        cx.require_equal(x.shape[0], updates.shape[0], "as many matrices")
    return (x,)


def _overwrite(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    x, new = types
    cx.same_dtype((x, new))
    cx.require_rank(new, x.rank, "the new part")
    if len(attrs.dims("starts")) != x.rank:
        cx.fail("starts at a place of each axis")
    return (x,)


LEVELS = 4  # axes of a window, after those that it fills are joined with others


def window_levels(
    whole: Sequence[Expr], part: Sequence[Expr], starts: Sequence[Expr]
) -> list[tuple[Expr, Expr, Expr]]:
    """(size, size of the part, its start) along axes; the last one is contiguous.

    An axis that the part fills is joined with the one in front of it.
    """
    levels: list[tuple[Expr, Expr, Expr]] = []
    for size, width, start in zip(whole, part, starts, strict=True):
        if size == width and start == as_expr(0) and levels:
            whole_size, part_size, first = levels[-1]
            levels[-1] = whole_size * size, part_size * size, first * size
        else:
            levels.append((size, width, start))
    return levels


def _locate(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    (mask,) = types
    if mask.dtype is not DType.BOOL or mask.rank not in (1, 2):
        cx.fail(f"locates the true elements of a mask of rank 1 or 2, not {mask}")
    places = TensorType(DType.I64, (attrs.dim("rows"), as_expr(mask.rank)))
    return places, TensorType(DType.I64, ())


def _sample(cx: InferContext, types: Types, _: Attrs) -> Types:
    x, rows, columns, down, across = types
    cx.same_dtype((x, down, across))
    if x.dtype not in (DType.F32, DType.F64):
        cx.fail(f"takes f32 or f64, not {x.dtype}")
    cx.require_rank(x, 4, "images")
    for places in (rows, columns):
        if places.dtype is not DType.I32:
            cx.fail(f"rows and columns are i32, not {places.dtype}")
    for points in types[1:]:
        cx.require_rank(points, 2, "points")
        cx.require_equal(points.shape[0], x.shape[0], "points of each image")
        cx.require_equal(points.shape[1], rows.shape[1], "as many points")
    for size in x.shape[2:]:
        cx.require(le(size, MOST_PLACE), "an image is too large to sample")
    return (TensorType(x.dtype, (x.shape[0], x.shape[1], rows.shape[1])),)


SEARCHED = (DType.F64, DType.F32, DType.I64, DType.I32)

# ---- meanings


def ranks(x: Array) -> Array:
    """Integers that compare as the elements do: NaN is above all, zeros are equal."""
    _, place = np.unique(x, return_inverse=True, equal_nan=True)
    return place.reshape(x.shape).astype(np.int64)


def _sorted(x: Array, axis: int, descending: bool) -> tuple[Array, Array]:
    rank = -ranks(x) if descending else ranks(x)
    places = np.argsort(rank, axis, kind="stable")
    return np.take_along_axis(x, places, axis), places


def _best(x: Array, axis: int, k: int, largest: bool) -> tuple[Array, Array]:
    values, places = _sorted(x, axis, largest)
    chosen = tuple(slice(k if i == axis else None) for i in range(x.ndim))
    return values[chosen], places[chosen]


def _searched(rows: Array, values: Array, right: bool) -> Array:
    """Halves what is left of a row, as torch does; NaN makes that matter."""
    start = np.zeros(values.shape, np.int64)
    left = np.full(values.shape, rows.shape[1], np.int64)
    while (left > 0).any():
        half = left // 2
        middle = np.minimum(start + half, rows.shape[1] - 1)
        found = np.take_along_axis(rows, middle, 1)
        below = (found > values) if right else (found >= values)
        behind = (left > 0) & ~below
        start = np.where(behind, start + half + 1, start)
        left = np.where(behind, left - half - 1, half)
    return start


def _running(x: Array, axis: int, least: bool) -> tuple[Array, Array]:
    rank = ranks(x)
    if least:
        rank = np.where(x != x, x.size, -rank)
    best = np.maximum.accumulate(rank, axis)
    shape = [1] * x.ndim
    shape[axis] = -1
    here = np.arange(x.shape[axis]).reshape(shape)
    places = np.maximum.accumulate(np.where(rank == best, here, 0), axis)
    return np.take_along_axis(x, places, axis), places


def _logsumexp(x: Array, axis: int) -> Array:
    return np.logaddexp.accumulate(x.astype(np.float64), axis).astype(x.dtype)


def _placed(x: Array, places: Array, updates: Array) -> Array:
    out = x.copy()
    for number, row in enumerate(places):
        out[..., row, :] = updates[..., number, :]
    return out


def _overwritten(x: Array, new: Array, starts: tuple[int, ...]) -> Array:
    out = x.copy()
    places = zip(starts, new.shape, strict=True)
    out[tuple(slice(start, start + size) for start, size in places)] = new
    return out


def _located(mask: Array, rows: int) -> tuple[Array, Array]:
    """Rows behind the last one found are left as they are: here, 0."""
    places = np.zeros((rows, mask.ndim), np.int64)
    found = np.argwhere(mask)
    places[: len(found)] = found
    return places, np.array(len(found), np.int64)


def _sampled(
    x: Array, rows: Array, columns: Array, down: Array, across: Array
) -> Array:
    images, _, height, width = x.shape
    number = np.arange(images)[:, None]
    out = np.zeros((images, x.shape[1], rows.shape[1]), x.dtype)
    for row, share in ((rows, 1 - down), (rows + 1, down)):
        for column, part in ((columns, 1 - across), (columns + 1, across)):
            inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
            place = np.where(inside, row, 0), np.where(inside, column, 0)
            found = np.zeros_like(out)
            if inside.any():
                picked = x[number, :, *place].transpose(0, 2, 1)
                found = np.where(inside[:, None], picked, 0)
            out += found * (share * part)[:, None]
    return out


# ---- rows


def _row(
    name: str, arity: int, rule: Any, meaning: Any, *attrs: AttrSpec, cost: int
) -> OpDef:
    traits = {Trait.REDUCE, Trait.LIBRARY, Trait.PURE}
    if name == "search":
        traits.add(Trait.FLAT)
    if name in ("sort", "top", "search", "running_extreme"):  # by their places
        traits.add(Trait.JUMPS)
    kinds = frozenset(traits)
    return OpDef(name, (arity, arity), attrs, rule, kinds, cost=cost, meaning=meaning)


_AXIS = AttrSpec("axis", "int")

LIBRARY_OPS: tuple[OpDef, ...] = (
    _row("sort", 1, _sort, _sorted, _AXIS, AttrSpec("descending", "bool"), cost=64),
    _row(
        "top",
        1,
        _top,
        _best,
        _AXIS,
        AttrSpec("k", "dim"),
        AttrSpec("largest", "bool"),
        cost=16,
    ),
    _row("search", 2, _search, _searched, AttrSpec("right", "bool"), cost=64),
    _row(
        "running_extreme",
        1,
        _running_extreme,
        _running,
        _AXIS,
        AttrSpec("least", "bool"),
        cost=8,
    ),
    # Not a `scatter`, whose loops start from an identity and are parallel over columns:
    # a write has none, must keep the order of updates, and mostly has one column. The C
    # function is parallel over the rows of the result.
    _row("scatter_rows", 3, _scatter_rows, _placed, cost=4),
    _row("overwrite", 2, _overwrite, _overwritten, AttrSpec("starts", "dims"), cost=1),
    _row("sample", 5, _sample, _sampled, cost=16),
    _row("locate", 1, _locate, _located, AttrSpec("rows", "dim"), cost=4),
    _row("running_logsumexp", 1, _running_logsumexp, _logsumexp, _AXIS, cost=64),
    *LINALG_OPS,
    *FFT_OPS,
)

# Their first operand and their result may be the same memory.
OVERWRITES = frozenset({"overwrite", "scatter_rows"})
