"""B in the layouts that its micro-kernels read.

    panels   (P, K, NR): NR columns side by side, zero-padded
    rows     (N, K): for lanes along K

A constant is packed once at compile time. For another B, the product packs each panel
just before it reads it, and packs a few columns as rows before it starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pliant.ir.loops import (
    Block,
    Buffer,
    For,
    Index,
    Kind,
    Let,
    Load,
    Role,
    Stmt,
    Store,
    buffer,
)
from pliant.ir.types import DType
from pliant.kernels.choose import Plan
from pliant.kernels.tiles import Tile
from pliant.machine import pages
from pliant.sym import (
    Expr,
    as_expr,
    floordiv,
    maximum,
    mod,
    product,
    sym,
)

PACK_WORK = 1 << 14  # elements that pay for a thread


@dataclass(frozen=True, slots=True)
class Right:
    """B in place: batch axes (each as in the result, or 1), sizes, strides."""

    batch: tuple[Expr, ...]
    n: Expr
    k: Expr
    strides: tuple[Expr, ...]  # (batch.., K, N)

    def buffer(self, dtype: DType) -> Buffer:
        shape = (*self.batch, self.k, self.n)
        return buffer("b", dtype, shape, Role.IN, self.strides)


def pack_constant(weight: np.ndarray, tile: Tile) -> np.ndarray:
    """(K, N) as panels (P, K, NR), zero-padded."""
    k, n = weight.shape
    packed = pages.zeros((-(-n // tile.NR), k, tile.NR), weight.dtype)
    full = n // tile.NR
    panels = weight[:, : full * tile.NR].reshape(k, full, tile.NR)
    # In the order of the result, so that the panel being written stays in cache.
    pages.copy(packed[:full], panels.transpose(1, 0, 2))
    if full < len(packed):
        packed[full, :, : n - full * tile.NR] = weight[:, full * tile.NR :]
    return packed


def row_room(n: Expr, plan: Plan) -> Expr:
    """How many columns of B are packed as rows along K before a product."""
    return plan.dot * n


def pack_rows(b: Buffer, rows: Buffer) -> Stmt:
    """Packs the few columns of B (batch.., K, N) as rows along K (batch.., N, K)."""
    *batch, k, n = b.shape
    lets, at = unflatten_unit(sym("_u"), batch)
    column, row = sym("_n"), sym("_k")
    store = Store(rows, (*at, column, row), Load(b, (*at, row, column)))
    by_column = For("_n", as_expr(0), n, For("_k", as_expr(0), k, store, Kind.VECTOR))
    body = Block((*lets, by_column))
    return _parallel(body, batch, n * k)


def _parallel(body: Stmt, units: Sequence[Expr], work: Expr) -> Stmt:
    grain = maximum(1, floordiv(PACK_WORK, maximum(work, 1)))
    return For("_u", as_expr(0), product(units), body, Kind.PARALLEL, grain=grain)


def unflatten_unit(
    position: Expr, extents: Sequence[Expr], prefix: str = "_u"
) -> tuple[list[Stmt], tuple[Expr, ...]]:
    """Splits a unit number into an index; returns its Lets and the index."""
    lets: list[Stmt] = []
    index: list[Expr] = []
    for k, extent in reversed(list(enumerate(extents))):
        if extent == as_expr(1):
            index.append(as_expr(0))
            continue
        safe = maximum(extent, 1)
        name = f"{prefix}{k}"
        last = k == 0
        lets.append(Let(name, Index(position if last else mod(position, safe))))
        position = floordiv(position, safe)
        index.append(sym(name))
    return lets, tuple(reversed(index))
