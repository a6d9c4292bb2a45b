"""aten ops that move elements: reshapes, joins; and conversions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pliant.frontend.contract import Basis
from pliant.frontend.operands import fitted
from pliant.frontend.torch_ops_context import Size, TorchContext, as_index
from pliant.frontend.torch_ops_math import Translate
from pliant.ir.graph import Value
from pliant.ir.types import DType
from pliant.sym import (
    Expr,
    Guard,
    as_expr,
    floordiv,
    le,
    maximum,
    minimum,
    mod,
    ne,
    product,
)

aten = torch.ops.aten


# --- reshapes and permutations --------------------------------------------------


def view(cx: TorchContext, x: Value, size: Sequence[Size]) -> Value:
    if isinstance(size, torch.dtype):
        cx.unsupported("a view of the same bytes as another element type")
    dims = [cx.simplify(d) for d in size]
    if len(dims) != cx.val.dim():
        # Assigning to an index drops leading dims of the value that are 1, by the
        # example alone: torch notes the shape without them, and the type with them.
        cx.unsupported(
            "the trace gives this view two ranks: assign a value of one size"
        )
    if -1 in dims:
        hole = dims.index(as_expr(-1))
        rest = product(dims[:hole] + dims[hole + 1 :])
        if rest == 0:
            cx.unsupported("a -1 beside a size of 0")
        cx.require(le(1, rest), "a -1 beside a size of 0 stands for no number")
        dims[hole] = cx.simplify(floordiv(x.type.numel, rest))
    return cx.reshape(x, dims)


def view_as(cx: TorchContext, x: Value, other: Value) -> Value:
    return cx.reshape(x, other.shape)


def flatten(cx: TorchContext, x: Value, start_dim: int = 0, end_dim: int = -1) -> Value:
    rank = x.type.rank
    if rank == 0:
        return cx.reshape(x, (1,))
    low, high = cx.axis(start_dim, rank), cx.axis(end_dim, rank) + 1
    return cx.reshape(x, (*x.shape[:low], product(x.shape[low:high]), *x.shape[high:]))


def unflatten(cx: TorchContext, x: Value, dim: int, sizes: Sequence[Size]) -> Value:
    axis = cx.axis(dim, x.type.rank)
    dims = [cx.simplify(d) for d in sizes]
    if -1 in dims:
        hole = dims.index(as_expr(-1))
        rest = product(dims[:hole] + dims[hole + 1 :])
        dims[hole] = cx.simplify(floordiv(x.shape[axis], rest))
    return cx.reshape(x, (*x.shape[:axis], *dims, *x.shape[axis + 1 :]))


def unsqueeze(cx: TorchContext, x: Value, dim: int) -> Value:
    axis = cx.axis(dim, x.type.rank + 1)
    return cx.reshape(x, (*x.shape[:axis], 1, *x.shape[axis:]))


def squeeze(
    cx: TorchContext, x: Value, dim: int | Sequence[int] | None = None
) -> Value:
    """Drops dims of 1; a dynamic dim stays, and must not be 1, so ranks are fixed."""
    if not isinstance(dim, int) and dim is not None and not dim:
        return x
    dropped = []
    for axis in cx.axes(dim, x.type.rank):
        size = cx.simplify(x.shape[axis])
        if size == 1 or cx.proves(le(size, 1)):
            cx.b.require_equal(size, 1, "a dim that the trace dropped must be 1")
            dropped.append(axis)
        elif not size.is_const:
            message = ("squeeze drops a dim of 1, and the trace kept this: ", size)
            cx.assume(Basis.BRANCH, Guard(ne(size, 1), message, cx.b.loc))
    out = cx.reshape(x, [d for i, d in enumerate(x.shape) if i not in dropped])
    if out.type.rank != len(cx.val.shape):
        cx.unsupported(f"squeeze of {x.type}: a dynamic dim decides the rank")
    return out


def permute(cx: TorchContext, x: Value, dims: Sequence[int]) -> Value:
    return cx.transpose(x, [cx.axis(d, x.type.rank) for d in dims])


def swap_axes(rank: int, a: int, b: int) -> list[int]:
    perm = list(range(rank))
    if rank:
        perm[a], perm[b] = perm[b], perm[a]
    return perm


def transpose(cx: TorchContext, x: Value, dim0: int, dim1: int) -> Value:
    return cx.transpose(x, swap_axes(x.type.rank, dim0, dim1))


def matrix_transpose(cx: TorchContext, x: Value) -> Value:
    return cx.transpose(x, swap_axes(x.type.rank, -1, -2)) if x.type.rank > 1 else x


def reverse_dims(cx: TorchContext, x: Value) -> Value:
    return cx.transpose(x, range(x.type.rank)[::-1])


def moved_axes(rank: int, source: Any, destination: Any) -> list[int]:
    sources = [source] if isinstance(source, int) else list(source)
    targets = [destination] if isinstance(destination, int) else list(destination)
    pairs = {t % rank: s % rank for t, s in zip(targets, sources, strict=True)}
    rest = iter(i for i in range(rank) if i not in pairs.values())
    return [pairs[i] if i in pairs else next(rest) for i in range(rank)]


def movedim(cx: TorchContext, x: Value, source: Any, destination: Any) -> Value:
    return cx.transpose(x, moved_axes(x.type.rank, source, destination))


def expand(
    cx: TorchContext, x: Value, size: Sequence[Size], implicit: bool = False
) -> Value:
    extra = len(size) - x.type.rank
    dims = [
        x.shape[i - extra] if i >= extra and d == -1 else cx.simplify(d)
        for i, d in enumerate(size)
    ]
    return cx.broadcast_to(x, dims)


def expand_as(cx: TorchContext, x: Value, other: Value) -> Value:
    return cx.broadcast_to(x, other.shape)


def broadcast_tensors(cx: TorchContext, tensors: Sequence[Value]) -> list[Value]:
    tensors = cx.aligned(*tensors)
    shape = cx.b.broadcast_shapes(*(t.shape for t in tensors))
    return [cx.broadcast_to(t, shape) for t in tensors]


def meshgrid(
    cx: TorchContext, tensors: Sequence[Value], indexing: str = "ij"
) -> list[Value]:
    axes = list(range(len(tensors)))
    if indexing == "xy" and len(tensors) > 1:
        axes[:2] = 1, 0
    vectors = [cx.reshape(t, (t.type.numel,)) for t in tensors]
    shape = [as_expr(1)] * len(vectors)
    for axis, vector in zip(axes, vectors, strict=True):
        shape[axis] = vector.shape[0]
    return [
        cx.keep_sign(vector, cx.b.broadcast(vector, shape, (axis,)))
        for axis, vector in zip(axes, vectors, strict=True)
    ]


# --- joining, repeating, reordering ---------------------------------------------


def cat(cx: TorchContext, tensors: Sequence[Value], dim: int = 0) -> Value:
    # torch ignores an empty vector, whatever the rank of the others.
    ranks = max(t.type.rank for t in tensors)
    kept = [t for t in tensors if t.type.rank == ranks]
    dtype = cx.promote(*tensors)
    return cx.concat([cx.cast(t, dtype) for t in kept], cx.axis(dim, ranks))


def stack(cx: TorchContext, tensors: Sequence[Value], dim: int = 0) -> Value:
    return cat(cx, [unsqueeze(cx, t, dim) for t in tensors], dim)


def stack_rows(first: int) -> Translate:
    """hstack (rows of vectors join at dim 0) and vstack."""

    def translate(cx: TorchContext, tensors: Sequence[Value]) -> Value:
        if first == 0:
            rows = [
                t if t.type.rank > 1 else cx.reshape(t, (1, t.type.numel))
                for t in tensors
            ]
            return cat(cx, rows, 0)
        flat = [t if t.type.rank else cx.reshape(t, (1,)) for t in tensors]
        return cat(cx, flat, 0 if flat[0].type.rank == 1 else 1)

    return translate


def repeat(cx: TorchContext, x: Value, repeats: Sequence[Size]) -> Value:
    counts = [cx.simplify(r) for r in repeats]
    extra = len(counts) - x.type.rank
    shape = (as_expr(1),) * extra + x.shape
    # (d0, d1) -> (r0, d0, r1, d1) -> (r0*d0, r1*d1); a count of 1 needs no dim.
    wide: list[Expr] = []
    axes: list[int] = []
    for i, (count, dim) in enumerate(zip(counts, shape, strict=True)):
        if count != 1:
            wide.append(count)
        if i >= extra:
            axes.append(len(wide))
            wide.append(dim)
        elif count == 1:
            wide.append(dim)
    spread = cx.keep_sign(x, cx.b.broadcast(x, wide, axes))
    return cx.reshape(spread, [c * d for c, d in zip(counts, shape, strict=True)])


def tile(cx: TorchContext, x: Value, dims: Sequence[Size]) -> Value:
    missing = x.type.rank - len(dims)
    return repeat(cx, x, [*[1] * max(missing, 0), *dims])


def repeat_interleave(
    cx: TorchContext,
    x: Value,
    repeats: Size,
    dim: int | None = None,
    output_size: Size | None = None,
) -> Value:
    if dim is None:
        x, dim = cx.reshape(x, (x.type.numel,)), 0
    axis = cx.axis(dim, x.type.rank)
    count = cx.simplify(repeats)
    before, size, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    axes = [*range(axis + 1), *range(axis + 2, x.type.rank + 1)]
    wide = cx.b.broadcast(x, (*before, size, count, *after), axes)
    return cx.reshape(cx.keep_sign(x, wide), (*before, size * count, *after))


def roll(cx: TorchContext, x: Value, shifts: Any, dims: Any = ()) -> Value:
    moves = [shifts] if isinstance(shifts, int | Expr) else list(shifts)
    axes = [dims] if isinstance(dims, int) else list(dims)
    if not axes:
        flat = _rolled(cx, cx.reshape(x, (x.type.numel,)), moves[0], 0)
        return cx.reshape(flat, x.shape)
    for shift, axis in zip(moves, axes, strict=True):
        x = _rolled(cx, x, shift, cx.axis(axis, x.type.rank))
    return x


def _rolled(cx: TorchContext, x: Value, shift: Size, axis: int) -> Value:
    size = x.shape[axis]
    # The last `tail` come first; a size of 0 must not divide.
    tail = cx.simplify(mod(shift, maximum(size, 1)))
    if tail == 0:
        return x
    head = cx.simplify(size - tail)
    if not cx.proves(le(tail, size)):
        tail = cx.simplify(minimum(tail, size))
        head = cx.simplify(size - tail)
    return cx.concat([cx.slice(x, axis, head, tail), cx.slice(x, axis, 0, head)], axis)


def flip(cx: TorchContext, x: Value, dims: Sequence[int]) -> Value:
    if not dims:
        return x
    axes = cx.axes(dims, x.type.rank)
    return cx.keep_sign(x, cx.b.emit("flip", x, axes=axes))


def rot90(
    cx: TorchContext, x: Value, k: int = 1, dims: Sequence[int] = (0, 1)
) -> Value:
    a, b = (cx.axis(d, x.type.rank) for d in dims)
    swapped = swap_axes(x.type.rank, a, b)
    match k % 4:
        case 1:
            return flip(cx, cx.transpose(x, swapped), [a])
        case 2:
            return flip(cx, x, [a, b])
        case 3:
            return flip(cx, cx.transpose(x, swapped), [b])
        case _:
            return x


def triangle(op: str) -> Translate:
    """tril keeps column - row <= diagonal, triu >= diagonal."""

    def translate(cx: TorchContext, x: Value, diagonal: Size = 0) -> Value:
        rows, columns = x.shape[-2:]
        row = cx.iota((rows, 1), 0, DType.I64)
        column = cx.iota((1, columns), 1, DType.I64)
        edge = row if diagonal == 0 else cx.add(row, diagonal)
        keep = cx.arith(op, column, edge)
        zero = cx.tensor(False if x.dtype is DType.BOOL else 0, x.dtype)
        return cx.b.select(keep, x, zero)

    return translate


def pad(
    cx: TorchContext,
    x: Value,
    pad: Sequence[Size],
    mode: str = "constant",
    value: float | None = None,
) -> Value:
    """`pad` lists (before, behind) from the last dim on."""
    pairs = [
        (x.type.rank - 1 - i, cx.simplify(pad[2 * i]), cx.simplify(pad[2 * i + 1]))
        for i in range(len(pad) // 2)
    ]
    if mode in ("reflect", "replicate"):
        for axis, low, high in pairs:
            for side in (low, high) if mode == "reflect" else (as_expr(0),):
                least = cx.simplify(side + 1)
                cx.require(le(least, x.shape[axis]), f"{mode} padding reads its axis")
            x = _padded_by_own(cx, x, axis, low, high, mode)
        return x
    lows, highs = [as_expr(0)] * x.type.rank, [as_expr(0)] * x.type.rank
    for axis, low, high in pairs:  # a negative pad cuts
        cut_low, cut_high = (cx.simplify(maximum(-p, 0)) for p in (low, high))
        lows[axis], highs[axis] = (cx.simplify(maximum(p, 0)) for p in (low, high))
        x = cx.slice(x, axis, cut_low, x.shape[axis] - cut_low - cut_high)
    if mode != "constant":  # reads x as it is after the cuts
        for axis, _, _ in pairs:
            x = _padded_by_own(cx, x, axis, lows[axis], highs[axis], mode)
        return x
    if not any(d != 0 for d in lows + highs):
        return x
    fill = fitted(0 if value is None else value, x.dtype)
    return cx.b.emit("pad", x, low=tuple(lows), high=tuple(highs), value=fill)


def constant_pad(
    cx: TorchContext, x: Value, sizes: Sequence[Size], value: Any = 0
) -> Value:
    return pad(cx, x, sizes, "constant", value)


def _padded_by_own(
    cx: TorchContext, x: Value, axis: int, low: Expr, high: Expr, mode: str
) -> Value:
    """reflect, replicate, circular: the new dim reads the old one by position."""
    if low == 0 and high == 0:
        return x
    size = x.shape[axis]
    place = cx.sub(cx.iota((size + low + high,), 0, DType.I64), low)
    last = cx.tensor(size - 1, DType.I64)
    match mode:
        case "replicate":
            place = cx.arith("maximum", cx.arith("minimum", place, last), 0)
        case "reflect":
            # |p| mirrors at 0; last - |last - p| mirrors at the end.
            place = cx.unary("abs", place)
            place = cx.sub(last, cx.unary("abs", cx.sub(last, place)))
        case "circular":
            place = cx.arith("mod", place, size)
        case _:
            cx.unsupported(f"padding mode {mode}")
    return take(cx, x, axis, place)


def take(cx: TorchContext, x: Value, axis: int, places: Value) -> Value:
    """Reads one axis at a vector of places (all inside the axis)."""
    front = cx.move_axis(x, axis, 0)
    picked = cx.keep_sign(x, cx.b.emit("index", front, as_index(cx, places)))
    return cx.move_axis(picked, 0, axis)


# --- identity and conversion ----------------------------------------------------


def identity(cx: TorchContext, x: Value, *_: Any, **__: Any) -> Value:
    return x


def convert(cx: TorchContext, x: Value, *_: Any, **__: Any) -> Value:
    """to.*, _to_copy, type_as: the trace knows the result's dtype."""
    if not x.dtype.is_float and cx.out_dtype is DType.BOOL:
        return cx.to_bool(x)
    return cx.cast(x, cx.out_dtype)


def nothing(cx: TorchContext, *_: Any, **__: Any) -> None:
    """Assertions of the trace: our own shape rules state what must hold."""


SHAPE: dict[Any, Translate] = {
    aten.view.default: view,
    aten._unsafe_view.default: view,
    aten.reshape.default: view,
    aten.view_as.default: view_as,
    aten.reshape_as.default: view_as,
    aten.flatten.using_ints: flatten,
    aten.ravel.default: flatten,
    aten.unflatten.int: unflatten,
    aten.unsqueeze.default: unsqueeze,
    aten.squeeze.default: squeeze,
    aten.squeeze.dim: squeeze,
    aten.squeeze.dims: squeeze,
    aten.permute.default: permute,
    aten.transpose.int: transpose,
    aten.swapaxes.default: transpose,
    aten.swapdims.default: transpose,
    aten.t.default: matrix_transpose,
    aten.mT.default: matrix_transpose,
    aten.adjoint.default: matrix_transpose,
    aten.numpy_T.default: reverse_dims,
    aten.movedim.int: movedim,
    aten.movedim.intlist: movedim,
    aten.moveaxis.int: movedim,
    aten.moveaxis.intlist: movedim,
    aten.expand.default: expand,
    aten.broadcast_to.default: expand,
    aten.expand_as.default: expand_as,
    aten.broadcast_tensors.default: broadcast_tensors,
    aten.meshgrid.default: meshgrid,
    aten.meshgrid.indexing: meshgrid,
    aten.cat.default: cat,
    aten.concat.default: cat,
    aten.concatenate.default: cat,
    aten.stack.default: stack,
    aten.hstack.default: stack_rows(1),
    aten.vstack.default: stack_rows(0),
    aten.repeat.default: repeat,
    aten.tile.default: tile,
    aten.repeat_interleave.self_int: repeat_interleave,
    aten.roll.default: roll,
    aten.flip.default: flip,
    aten.rot90.default: rot90,
    aten.tril.default: triangle("le"),
    aten.triu.default: triangle("ge"),
    aten.pad.default: pad,
    aten.constant_pad_nd.default: constant_pad,
    # identity and conversion
    aten.contiguous.default: identity,
    aten.clone.default: identity,
    aten.alias.default: identity,
    aten.lift_fresh.default: identity,
    aten.lift_fresh_copy.default: identity,
    aten.to.dtype: convert,
    aten.to.device: convert,
    aten.to.dtype_layout: convert,
    aten.to.other: convert,
    aten._to_copy.default: convert,
    aten.type_as.default: convert,
    aten._assert_tensor_metadata.default: nothing,
    aten.sym_constrain_range.default: nothing,
    aten.sym_constrain_range_for_size.default: nothing,
}
