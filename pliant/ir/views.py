"""Strided views: which chains of data movement need no copy.

A view is a base value, an offset and a stride per axis, all symbolic. Slices,
transposes, broadcasts and flips always are; a reshape is if every axis it merges is
contiguous.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pliant.ir.access import is_one, segments, stretched
from pliant.ir.graph import Op, Value
from pliant.ir.ops import VIEWS
from pliant.ir.types import contiguous_strides
from pliant.sym import Expr, Facts, as_expr


@dataclass(frozen=True, slots=True)
class View:
    """Element i of the viewed value is base[offset + sum(i[k] * strides[k])]."""

    base: Value
    offset: Expr
    shape: tuple[Expr, ...]
    strides: tuple[Expr, ...]

    def is_contiguous(self) -> bool:
        """Row-major and from the start of its base (axes of one element aside)."""
        if self.offset != as_expr(0):
            return False
        pairs = zip(
            self.shape, self.strides, contiguous_strides(self.shape), strict=True
        )
        return all(have == want or is_one(dim) for dim, have, want in pairs)


def resolve(value: Value, producers: Mapping[Value, Op], facts: Facts) -> View | None:
    """The view behind a value; the value itself if nothing only moves it."""
    op = producers.get(value)
    if op is None or op.name not in VIEWS:
        return View(value, as_expr(0), value.shape, contiguous_strides(value.shape))
    source = resolve(op.operands[0], producers, facts)
    if source is None:
        return None
    shape = value.shape
    match op.name:
        case "broadcast":
            strides = [as_expr(0)] * len(shape)
            for k, axis in enumerate(op.ints_attr("axes")):
                if not is_one(source.shape[k]):
                    strides[axis] = source.strides[k]
            return View(source.base, source.offset, shape, tuple(strides))
        case "stretch":
            strides = [as_expr(0)] * len(shape)
            for k, axis in enumerate(op.ints_attr("axes")):
                moves = stretched(source.shape[k], shape[axis])
                strides[axis] = source.strides[k] * moves
            return View(source.base, source.offset, shape, tuple(strides))
        case "transpose":
            perm = op.ints_attr("perm")
            moved = tuple(source.strides[axis] for axis in perm)
            return View(source.base, source.offset, shape, moved)
        case "slice":
            offset = source.offset
            for start, stride in zip(
                op.dims_attr("starts"), source.strides, strict=True
            ):
                offset = offset + start * stride
            stepped = tuple(
                stride * step
                for stride, step in zip(
                    source.strides, op.ints_attr("steps"), strict=True
                )
            )
            return View(source.base, offset, shape, stepped)
        case "flip":
            offset, flipped = source.offset, list(source.strides)
            for axis in op.ints_attr("axes"):
                offset = offset + (source.shape[axis] - 1) * flipped[axis]
                flipped[axis] = -flipped[axis]
            return View(source.base, offset, shape, tuple(flipped))
        case "rounded":  # what is in memory is rounded
            return source
        case _:
            return _reshape(source, shape, facts)


def row_stride(shape: Sequence[Expr], strides: Sequence[Expr]) -> Expr | None:
    """The one stride that reaches all rows of all leading axes, if there is one."""
    live = [k for k in range(len(shape) - 1) if shape[k] != as_expr(1)]
    for k, j in pairwise(live):
        if strides[k] != strides[j] * shape[j]:
            return None
    return strides[live[-1]] if live else strides[-2]


def _reshape(source: View, shape: tuple[Expr, ...], facts: Facts) -> View | None:
    if source.is_contiguous():  # and so in any other shape, however that is written
        return View(source.base, source.offset, shape, contiguous_strides(shape))
    strides: list[Expr] = []
    for here, there in segments(source.shape, shape, facts):
        dims = [k for k in here if not is_one(source.shape[k])]
        for k, inner in pairwise(dims):
            if source.strides[k] != source.strides[inner] * source.shape[inner]:
                return None
        step = source.strides[dims[-1]] if dims else as_expr(0)
        within = contiguous_strides(tuple(shape[k] for k in there))
        strides.extend(step * s for s in within)
    return View(source.base, source.offset, shape, tuple(strides))
