"""Where the true elements of a mask are: indices of each axis, from those of two."""

from __future__ import annotations

from collections.abc import Sequence

from pliant.ir.build import Builder
from pliant.ir.graph import Value
from pliant.sym import Expr, as_expr, maximum, product


def flat_mask(b: Builder, mask: Value) -> Value:
    """A mask as `locate` takes it: of rank 1, or (all axes but the last, the last)."""
    if mask.type.rank == 1:
        return mask
    rows = product(mask.shape[:-1]) if mask.type.rank else as_expr(1)
    last = mask.shape[-1] if mask.type.rank else as_expr(1)
    return b.reshape(mask, (rows, last))


def places_of(b: Builder, found: Value, shape: Sequence[Expr]) -> Value:
    """What `locate` found in a mask of this shape as indices of each axis."""
    if len(shape) <= 2:
        return found
    place, last = (b.slice_axis(found, 1, k, 1) for k in range(2))
    columns = [last]
    for size in reversed(shape[1:-1]):
        divisor = b.dim_value(maximum(size, 1))  # with 0, there are no rows
        columns.insert(0, b.binary("mod", place, divisor))
        place = b.binary("floordiv", place, divisor)
    return b.concat([place, *columns], 1)
