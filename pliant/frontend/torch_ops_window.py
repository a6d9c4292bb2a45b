"""aten ops on windows of an axis: from start, every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pliant.frontend.torch_ops_context import Size, TorchContext
from pliant.frontend.torch_ops_math import Translate
from pliant.ir.graph import Value
from pliant.sym import (
    Expr,
    as_expr,
    ceildiv,
    divides,
    ge,
    lt,
    maximum,
    minimum,
)

aten = torch.ops.aten
END = (1 << 63) - 1  # torch's spelling of "to the end"


def from_front(cx: TorchContext, place: Size, size: Expr) -> Expr:
    """Python's rule: a negative place counts from the end of an axis of `size`."""
    expr = cx.simplify(place)
    if cx.proves(ge(expr, 0)):
        return expr
    if cx.proves(lt(expr, 0)):
        return cx.simplify(expr + size)
    negative = minimum(maximum(-expr, 0), 1)  # 1 if it is, else 0
    return cx.simplify(expr + size * negative)


def clamped(cx: TorchContext, bound: Size, low: Expr, high: Expr, size: Expr) -> Expr:
    """A bound of a slice, counted from the front and moved into low..high."""
    place = from_front(cx, bound, size)
    return cx.simplify(minimum(cx.simplify(maximum(place, low)), high))


def slice_window(
    cx: TorchContext,
    size: Expr,
    start: Size | None = None,
    end: Size | None = None,
    step: int = 1,
) -> tuple[Expr, Expr, int]:
    """(start, size, step) after torch's clamping to the dim."""
    if not isinstance(step, int) or step < 1:
        cx.unsupported(f"a slice of step {step}")
    begin = clamped(cx, 0 if start is None else start, as_expr(0), size, size)
    stop = END if end is None else end
    stop = size if stop == END else clamped(cx, stop, begin, size, size)
    return begin, cx.simplify(ceildiv(stop - begin, step)), step


def select_window(cx: TorchContext, size: Expr, index: Size) -> tuple[Expr, Expr, int]:
    return from_front(cx, index, size), as_expr(1), 1


def piece_windows(
    cx: TorchContext, size: Expr, pieces: Size, count: int
) -> list[tuple[Expr, Expr, int]]:
    """Equal pieces, a shorter last one; the trace fixed how many there are."""
    piece = cx.simplify(pieces)
    if not piece.is_const or not size.is_const:
        why = f"the model was traced for a split into {count} pieces"
        cx.b.require_equal(maximum(ceildiv(size, piece), 1), count, why)
    out = []
    for i in range(count):
        begin = cx.simplify(minimum(piece * i, size))
        stop = size if i == count - 1 else minimum(piece * (i + 1), size)
        out.append((begin, cx.simplify(stop - begin), 1))
    return out


def split_windows(
    cx: TorchContext, x: Value, target: Any, args: Sequence[Any]
) -> tuple[int, list[tuple[Expr, Expr, int]]]:
    """The axis and the windows of split, chunk and unbind."""
    if target is aten.unbind.int:
        axis = cx.axis(args[0] if args else 0, x.type.rank)
        count = cx.constant_int(x.shape[axis], "number of pieces")
        return axis, [(as_expr(i), as_expr(1), 1) for i in range(count)]
    axis = cx.axis(args[1] if len(args) > 1 else 0, x.type.rank)
    size, parts = x.shape[axis], args[0]
    if isinstance(parts, Sequence):
        begin, out = as_expr(0), []
        for part in parts:
            out.append((begin, cx.simplify(part), 1))
            begin = begin + part
        cx.b.require_equal(begin, size, "pieces of a split must add up to the dim")
        return axis, out
    if target is aten.chunk.default:
        parts = maximum(ceildiv(size, parts), 1)
    return axis, piece_windows(cx, size, parts, len(cx.val))


def split(target: Any) -> Translate:
    def translate(cx: TorchContext, x: Value, *args: Any) -> list[Value]:
        axis, windows = split_windows(cx, x, target, args)
        parts = [cx.slice(x, axis, *window) for window in windows]
        if target is aten.unbind.int:
            return [drop_axis(cx, part, axis) for part in parts]
        return parts

    return translate


def tensor_split(
    cx: TorchContext, x: Value, sections: Size, dim: int = 0
) -> list[Value]:
    axis = cx.axis(dim, x.type.rank)
    count = cx.constant_int(sections, "number of sections")
    if len({str(part.shape[axis]) for part in cx.val}) == 1:
        why = f"tensor_split: traced for {count} parts of the same size"
        cx.require(divides(count, x.shape[axis]), why)
    small, longer = x.shape[axis] // count, x.shape[axis] % count
    parts, begin = [], as_expr(0)
    for i in range(count):
        size = cx.simplify(small + minimum(maximum(longer - i, 0), 1))
        parts.append(cx.slice(x, axis, begin, size))
        begin = begin + size
    return parts


def drop_axis(cx: TorchContext, x: Value, axis: int) -> Value:
    return cx.reshape(x, x.shape[:axis] + x.shape[axis + 1 :])


def slice_tensor(
    cx: TorchContext,
    x: Value,
    dim: int = 0,
    start: Size | None = None,
    end: Size | None = None,
    step: int = 1,
) -> Value:
    axis = cx.axis(dim, x.type.rank)
    return cx.slice(x, axis, *slice_window(cx, x.shape[axis], start, end, step))


def select(cx: TorchContext, x: Value, dim: int, index: Size) -> Value:
    axis = cx.axis(dim, x.type.rank)
    return drop_axis(
        cx, cx.slice(x, axis, *select_window(cx, x.shape[axis], index)), axis
    )


def narrow(cx: TorchContext, x: Value, dim: int, start: Size, length: Size) -> Value:
    axis = cx.axis(dim, x.type.rank)
    begin = from_front(cx, start, x.shape[axis])
    return cx.slice(x, axis, begin, length)


def put_window(
    cx: TorchContext, x: Value, new: Value, axis: int, window: tuple[Expr, Expr, int]
) -> Value:
    """x with one window of one axis replaced."""
    start, size, step = window
    if step != 1:
        return _put_every(cx, x, new, axis, window)
    behind = cx.simplify(x.shape[axis] - start - size)
    parts = [cx.cast(new, x.dtype)]
    if start != 0:
        parts.insert(0, cx.slice(x, axis, 0, start))
    if behind != 0:
        parts.append(cx.slice(x, axis, start + size, behind))
    return cx.concat(parts, axis)


def _put_every(
    cx: TorchContext, x: Value, new: Value, axis: int, window: tuple[Expr, Expr, int]
) -> Value:
    """x with every step-th element of a window replaced."""
    start, size, step = window
    new = cx.cast(new, x.dtype)
    last = cx.b.iota((x.shape[axis],))
    turn = cx.sub(last, start)
    which = cx.arith("floordiv", turn, step)
    hit = cx.arith("eq", cx.mul(which, step), turn)
    hit = cx.b.binary("logical_and", hit, cx.arith("ge", turn, 0))
    hit = cx.b.binary("logical_and", hit, cx.arith("lt", which, size))
    # At least one row: elements outside the window read one too, and drop it.
    blank = (*x.shape[:axis], as_expr(1), *x.shape[axis + 1 :])
    rows = cx.concat([new, cx.full(0, blank, x.dtype)], axis)
    place = cx.arith("minimum", cx.arith("maximum", which, 0), size)
    found = cx.b.emit("index", cx.move_axis(rows, axis, 0), place)
    wide = cx.b.broadcast(hit, x.shape, (axis,))
    return cx.b.select(wide, cx.move_axis(found, 0, axis), x)


def slice_scatter(
    cx: TorchContext,
    x: Value,
    src: Value,
    dim: int = 0,
    start: Size | None = None,
    end: Size | None = None,
    step: int = 1,
) -> Value:
    axis = cx.axis(dim, x.type.rank)
    window = slice_window(cx, x.shape[axis], start, end, step)
    return put_window(cx, x, src, axis, window)


def select_scatter(
    cx: TorchContext, x: Value, src: Value, dim: int, index: Size
) -> Value:
    axis = cx.axis(dim, x.type.rank)
    row = cx.reshape(src, (*x.shape[:axis], 1, *x.shape[axis + 1 :]))
    return put_window(cx, x, row, axis, select_window(cx, x.shape[axis], index))


WINDOW: dict[Any, Translate] = {
    aten.slice.Tensor: slice_tensor,
    aten.select.int: select,
    aten.narrow.default: narrow,
    aten.split.Tensor: split(aten.split.Tensor),
    aten.split.sizes: split(aten.split.sizes),
    aten.split_with_sizes.default: split(aten.split_with_sizes.default),
    aten.chunk.default: split(aten.chunk.default),
    aten.unbind.int: split(aten.unbind.int),
    aten.tensor_split.sections: tensor_split,
    aten.slice_scatter.default: slice_scatter,
    aten.select_scatter.default: select_scatter,
}
