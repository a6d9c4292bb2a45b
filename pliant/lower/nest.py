"""Loop nests over a domain: parallel outside, vector inside.

    axes kept | axes reduced          the last axis is the vector one

A map:            parallel over all but the last axis, vector over the last;
                  a single axis is cut into blocks. A map that reads along another
                  axis than it writes along is tiled over the two.
A row reduction:  parallel over rows; inside one row, loops over the reduced axes,
                  the last of them vector.
A column reduction (the last axis is kept): parallel over the other kept axes, vector
                  over the last one, serial over the reduced axes inside it.
Sums of floats are cut into runs along the reduced axes (`lower/runs.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pliant.ir.access import linear_coefficient
from pliant.ir.loop_walk import values
from pliant.ir.loops import Block, For, Index, Kind, Let, Load, Stmt
from pliant.lower.domain import Axis
from pliant.sym import Expr, as_expr, ceildiv, floordiv, maximum, minimum, mod, sym
from pliant.sym import product as product_of

BLOCK = 2048  # elements of a block when one axis is split between threads
COLUMN_BLOCK = 64  # columns of a block of a column reduction
# A tile of a transposing map: reads along one axis bring in cache lines that are used
# completely while they are in L1. More lines than L1 has ways would evict each other
# where their distance is a power of two.
TILE = (16, 16)
# Work that pays for another thread, in units of one cheap op on one element: about 10
# microseconds, several times the cost of waking a worker.
THREAD_WORK = 1 << 16


def block(body: Sequence[Stmt]) -> Stmt:
    return body[0] if len(body) == 1 else Block(tuple(body))


def grain(work: Expr) -> Expr:
    """Iterations that pay for a thread when one iteration is `work` units."""
    if work.is_const:
        return as_expr(max(1, THREAD_WORK // max(work.value, 1)))
    return maximum(1, floordiv(THREAD_WORK, maximum(work, 1)))


def inner_loops(
    axes: Sequence[Axis], body: Sequence[Stmt], vector: bool, multiple: int = 1
) -> Stmt:
    """Loops over `axes` around the body; the last one is vector if asked.

    `multiple`: the extent of the last axis is known to be a multiple of this.
    """
    stmt = block(body)
    for k, axis in enumerate(reversed(axes)):
        kind = Kind.VECTOR if vector and k == 0 else Kind.SERIAL
        end = multiple * floordiv(axis.extent, multiple) if k == 0 else axis.extent
        stmt = For(axis.name, as_expr(0), end, stmt, kind)
    return stmt


def parallel(axes: Sequence[Axis], body: Sequence[Stmt], work: Expr) -> Stmt:
    """One parallel loop over all of `axes`; `work` is that of one iteration."""
    live = [axis for axis in axes if axis.extent != as_expr(1)]
    if not live:
        return block(body)
    if len(live) == 1:
        (axis,) = live
        return For(
            axis.name,
            as_expr(0),
            axis.extent,
            block(body),
            Kind.PARALLEL,
            grain=grain(work),
        )
    total, rest = product_of(a.extent for a in live), sym("_p")
    lets: list[Stmt] = []
    for axis in reversed(live[1:]):
        safe = maximum(axis.extent, 1)  # no division by zero where the axis is empty
        lets.append(Let(axis.name, Index(mod(rest, safe))))
        rest = floordiv(rest, safe)
    lets.append(Let(live[0].name, Index(rest)))
    inside = block([*lets, *body])
    return For("_p", as_expr(0), total, inside, Kind.PARALLEL, grain=grain(work))


def split(
    axis: Axis, body: Sequence[Stmt], work: int | Expr, size: int = BLOCK
) -> Stmt:
    """One vector axis cut into blocks for the threads; `work` is per element."""
    begin = sym("_p") * size
    inner = For(
        axis.name,
        begin,
        minimum(axis.extent, begin + size),
        block(body),
        Kind.VECTOR,
    )
    blocks = ceildiv(axis.extent, size)
    return For(
        "_p",
        as_expr(0),
        blocks,
        inner,
        Kind.PARALLEL,
        grain=grain(as_expr(size) * work),
    )


def tiled(
    axes: Sequence[Axis],
    along: Axis,
    outer: Sequence[Stmt],
    inner: Sequence[Stmt],
    work: int,
) -> Stmt:
    """Tiles of the axis `along` and the last axis, which is the vector one.

    `outer` are the statements that do not vary with the last axis.
    """
    last, (height, width) = axes[-1], TILE
    rows = Axis("_tile_row", ceildiv(along.extent, height))
    columns = Axis("_tile_column", ceildiv(last.extent, width))
    vector = replace(_block_of(last, columns, width, inner), kind=Kind.VECTOR)
    tile = _block_of(along, rows, height, [*outer, vector])
    others = [axis for axis in axes[:-1] if axis.name != along.name]
    work_of_tile = as_expr(height * width * work)
    return parallel([*others, rows, columns], [tile], work_of_tile)


def _block_of(axis: Axis, number: Axis, size: int, body: Sequence[Stmt]) -> For:
    """One of the blocks of an axis; the whole axis, if there is only one."""
    begin = as_expr(0) if number.extent == as_expr(1) else number.var * size
    return For(axis.name, begin, minimum(axis.extent, begin + size), block(body))


def read_along(axes: Sequence[Axis], inner: Sequence[Stmt]) -> Axis | None:
    """The axis along which a map's operand is contiguous, if that is not the last.

    Without tiles, few elements of each cache line of such an operand would be used.
    """
    last = axes[-1].name
    for value in values(Block(tuple(inner))):
        if not isinstance(value, Load) or len(value.index) != 1:
            continue
        step = linear_coefficient(value.index[0], last)
        if step is None or (step.is_const and abs(step.value) <= 1):
            continue
        for axis in axes[:-1]:
            if linear_coefficient(value.index[0], axis.name) == as_expr(1):
                return axis
    return None
