"""B in the layouts that its micro-kernels read.

    panels   (P, K, NR): NR columns side by side, zero-padded
    rows     (N, K): for lanes along K

A constant is packed once at compile time. For another B, the product packs each panel
just before it reads it, and packs a few columns as rows before it starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

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
    as_dtype,
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


@dataclass(frozen=True, slots=True)
class Packing:
    """The kernels that pack panels of B: `dtype` from `stored` numbers.

    `along` is the axis in which B is contiguous, K or N, or neither.
    """

    dtype: DType
    stored: DType
    along: str | None
    tile: Tile

    @staticmethod
    def of(b: Buffer, dtype: DType, tile: Tile) -> Packing:
        along = None
        for axis, stride in zip("KN", b.strides[-2:], strict=True):
            along = axis if stride == as_expr(1) else along
        return Packing(dtype, b.dtype, along, tile)

    @property
    def whole(self) -> str:
        """The name of the kernel for whole panels.

        Its sizes: steps of K, panels, B's strides along K and N, steps of K that a
        packed panel has room for.
        """
        same = self.stored is self.dtype
        types = f"{self.dtype}" if same else f"{self.dtype}_{self.stored}"
        return f"pack_{types}x{self.tile.NR}{f'_by_{self.along}' if self.along else ''}"

    @property
    def partial(self) -> str:
        """The name of the kernel for a panel with few columns; the rest is zero.

        Its sizes: steps of K, columns, B's strides along K and N.
        """
        return f"{self.whole}_partial"

    def kernels(self) -> tuple[LoopFunc, ...]:
        return _pack_panels(self), _pack_partial(self)

    @property
    def _strides(self) -> tuple[Expr, Expr]:
        step, column = (sym("b_step"), sym("b_column"))
        one = as_expr(1)
        return one if self.along == "K" else step, one if self.along == "N" else column


@lru_cache(maxsize=64)
def _pack_panels(how: Packing) -> LoopFunc:
    nr = as_expr(how.tile.NR)
    steps, panels, depth = (sym(name) for name in ("K", "panels", "depth"))
    k, q, j = (sym(name) for name in ("_k", "_q", "_j"))
    b = buffer("b", how.stored, (steps, panels * nr), Role.IN, how._strides)
    shape, strides = (panels, steps, nr), (depth * nr, nr, 1)
    packed = buffer("packed", how.dtype, shape, Role.OUT, strides)
    value = as_dtype(Load(b, (k, q * nr + j)), how.dtype)
    row = For("_j", as_expr(0), nr, Store(packed, (q, k, j), value), Kind.VECTOR)
    loops = (("_k", steps), ("_q", panels))
    # B is read sequentially.
    body: Stmt = row
    for name, extent in loops if how.along == "K" else loops[::-1]:
        body = For(name, as_expr(0), extent, body)
    sizes = ("K", "panels", "b_step", "b_column", "depth")
    return LoopFunc(how.whole, sizes, (b, packed), body)


@lru_cache(maxsize=64)
def _pack_partial(how: Packing) -> LoopFunc:
    nr = as_expr(how.tile.NR)
    steps, columns, k, j = (sym(name) for name in ("K", "columns", "_k", "_j"))
    b = buffer("b", how.stored, (steps, columns), Role.IN, how._strides)
    packed = buffer("packed", how.dtype, (steps, nr), Role.OUT)
    inside = Binary("lt", Index(j), Index(columns))
    value = as_dtype(Load(b, (k, j), inside), how.dtype)
    row = For("_j", as_expr(0), nr, Store(packed, (k, j), value), Kind.VECTOR)
    body = For("_k", as_expr(0), steps, row)
    sizes = ("K", "columns", "b_step", "b_column")
    return LoopFunc(how.partial, sizes, (b, packed), body)


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
