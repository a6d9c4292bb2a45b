"""B in the layout its micro-kernels read.

    panels   (P, K, NR): NR columns side by side, zero-padded
    rows     (N, K): for lanes along K

A constant is packed once at compile time; another before its product, by a loop
function that reads B a few rows at a time, so that its lines and pages are used whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pliant.ir.loops import (
    Binary,
    Block,
    Buffer,
    For,
    Index,
    Kind,
    Let,
    Load,
    LoopFunc,
    Role,
    Stmt,
    Store,
    buffer,
)
from pliant.ir.types import DType
from pliant.kernels.choose import Plan
from pliant.kernels.tiles import Tile
from pliant.sym import (
    Expr,
    as_expr,
    ceildiv,
    floordiv,
    maximum,
    minimum,
    mod,
    product,
    sym,
)

STRIP = 16  # rows of K packed together
PACK_WORK = 1 << 14  # elements worth a thread


@dataclass(frozen=True, slots=True)
class Right:
    """B where it lies: batch axes (each as in the result, or 1), sizes, strides."""

    batch: tuple[Expr, ...]
    n: Expr
    k: Expr
    strides: tuple[Expr, ...]  # (batch.., K, N)

    def buffer(self, dtype: DType) -> Buffer:
        shape = (*self.batch, self.k, self.n)
        return buffer("b", dtype, shape, Role.IN, self.strides)


def packed_shape(
    batch: Sequence[Expr], n: Expr, k: Expr, tile: Tile
) -> tuple[Expr, ...]:
    return (*batch, ceildiv(n, tile.NR), k, as_expr(tile.NR))


def pack_constant(weight: np.ndarray, tile: Tile) -> np.ndarray:
    """(K, N) as panels (P, K, NR), zero-padded."""
    k, n = weight.shape
    packed = np.zeros((-(-n // tile.NR), k, tile.NR), weight.dtype)
    for p, first in enumerate(range(0, n, tile.NR)):  # a panel at a time stays in cache
        columns = weight[:, first : first + tile.NR]
        packed[p, :, : columns.shape[1]] = columns
    return packed


def panel_room(n: Expr, plan: Plan, tile: Tile) -> Expr:
    """How many panels are packed before a product."""
    partial = minimum(mod(n, tile.NR), 1)
    panels = plan.packed * ceildiv(n, tile.NR) + (1 - plan.packed) * partial
    return (1 - plan.dot) * panels


def pack_panels(
    name: str, dtype: DType, right: Right, plan: Plan, tile: Tile
) -> LoopFunc:
    """Into panels: all of B, or only a partial last one if the rest stays."""
    batch, n, k, nr = right.batch, right.n, right.k, tile.NR
    b = right.buffer(dtype)
    shape = (*batch, panel_room(n, plan, tile), k, as_expr(nr))
    packed = buffer("packed", dtype, shape, Role.OUT)
    strips = ceildiv(k, STRIP)
    lets, at = unflatten_unit(sym("_u"), (*batch, strips))
    batch_at, strip = at[:-1], at[-1]
    panel, row, column = sym("_p"), sym("_k"), sym("_j")
    n_at = (sym("_skipped") + panel) * nr + column
    inside = Binary("lt", Index(n_at), Index(n))
    value = Load(b, (*batch_at, row, n_at), inside)
    store = Store(packed, (*batch_at, panel, row, column), value)
    columns = For("_j", as_expr(0), as_expr(nr), store, Kind.VECTOR)
    rows = For("_k", sym("_first"), sym("_last"), columns)
    strip_of_panels = Block(
        (
            *lets,
            Let("_first", Index(strip * STRIP)),
            Let("_last", Index(minimum(strip * STRIP + STRIP, k))),
            For("_p", as_expr(0), sym("_room"), rows),
        )
    )
    body = Block(
        (
            Let("_room", Index(panel_room(n, plan, tile))),
            Let("_skipped", Index((1 - plan.packed) * floordiv(n, nr))),
            _parallel(strip_of_panels, (*batch, strips), sym("_room") * nr * STRIP),
        )
    )
    return LoopFunc(name, (), (b, packed), body)


def row_room(n: Expr, plan: Plan) -> Expr:
    """How many columns of B are written as rows along K before a product."""
    return plan.dot * n


def pack_rows(name: str, dtype: DType, right: Right, plan: Plan) -> LoopFunc:
    """The few columns of B as rows along K, where the plan wants them."""
    batch, n, k = right.batch, right.n, right.k
    b = right.buffer(dtype)
    rows = buffer("rows", dtype, (*batch, row_room(n, plan), k), Role.OUT)
    lets, at = unflatten_unit(sym("_u"), batch)
    column, row = sym("_n"), sym("_k")
    store = Store(rows, (*at, column, row), Load(b, (*at, row, column)))
    columns = For("_n", as_expr(0), row_room(n, plan), store)
    body = Block((*lets, For("_k", as_expr(0), k, columns)))
    return LoopFunc(name, (), (b, rows), _parallel(body, batch, row_room(n, plan) * k))


def _parallel(body: Stmt, units: Sequence[Expr], work: Expr) -> Stmt:
    grain = maximum(1, floordiv(PACK_WORK, maximum(work, 1)))
    return For("_u", as_expr(0), product(units), body, Kind.PARALLEL, grain=grain)


def unflatten_unit(
    position: Expr, extents: Sequence[Expr]
) -> tuple[list[Stmt], tuple[Expr, ...]]:
    """Lets that take a unit number apart, and the index they give."""
    lets: list[Stmt] = []
    index: list[Expr] = []
    for k, extent in reversed(list(enumerate(extents))):
        if extent == as_expr(1):
            index.append(as_expr(0))
            continue
        safe = maximum(extent, 1)
        name = f"_u{k}"
        last = k == 0
        lets.append(Let(name, Index(position if last else mod(position, safe))))
        position = floordiv(position, safe)
        index.append(sym(name))
    return lets, tuple(reversed(index))
