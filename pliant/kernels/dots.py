"""Matrix products with lanes along K: few columns, or few rows of a B adjacent in K.

for unit in blocks of rows x panels of columns        parallel, if there is much to do
  for width of 4, then a remainder of 3, 2 or 1
    for height of 4, then remainders of 2 and 1
      dot_f32_hxw(rows of A, rows of B)     -> the result, or scratch
  epilogue on the unit, if there is one
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from pliant.ir.loops import (
    WORKER,
    Binary,
    Block,
    Buffer,
    Call,
    For,
    If,
    Index,
    Kind,
    Let,
    Stmt,
    Switch,
)
from pliant.kernels.choose import SMALL, unit_grain
from pliant.kernels.micro import DOT_HEIGHTS, DOT_WIDTHS, dot_name
from pliant.kernels.packing import unflatten_unit
from pliant.kernels.product import Address, Around, Product, TileAt
from pliant.kernels.tiles import Tile
from pliant.sym import Expr, as_expr, ceildiv, floordiv, minimum, mod, product, sym

DOT_TILE = 16  # rows of a unit


@dataclass(frozen=True, slots=True)
class Dots:
    """A product as dot kernels compute it."""

    spec: Product
    tile: Tile
    a: Buffer
    b: Buffer  # rows along K: (batch.., N, K), or B in place: (batch.., K, N)
    in_place: bool
    b_at: Callable[[tuple[Expr, ...]], tuple[Expr, ...]]  # the batch index of B
    around: Around
    scratch: Buffer

    def units(self) -> Stmt:
        p, tile = self.spec, self.tile
        units = (*p.batch, ceildiv(p.m, DOT_TILE), ceildiv(p.n, tile.NR))
        placed, at = unflatten_unit(sym("_u"), units)
        batch, row, column = at[:-2], at[-2] * DOT_TILE, at[-1] * tile.NR
        rows, columns = minimum(DOT_TILE, p.m - row), minimum(tile.NR, p.n - column)
        end: list[Stmt] = []
        if self.around.plain is None:
            size = sym("_rows"), sym("_columns")
            done = TileAt(batch, row, column, *size, self.scratch)
            end = self.around.epilogue(done)
        unit = Block(
            (
                *placed,
                Let("_rows", Index(rows)),
                Let("_columns", Index(columns)),
                self.tiles(batch, row, column),
                *end,
            )
        )
        grain = unit_grain(minimum(p.n, tile.NR), as_expr(DOT_TILE), p.k)
        count = product(units)
        shared = For("_u", as_expr(0), count, unit, Kind.PARALLEL, grain=grain)
        alone: Stmt = For("_u", as_expr(0), count, unit)
        if self.around.plain is not None:
            alone = self.whole()
        work = product((*p.batch, p.m, p.n, p.k))
        return If(Binary("le", Index(work), Index(as_expr(SMALL))), alone, shared)

    def whole(self) -> Stmt:
        """All of a product without an epilogue, one tile after the other."""
        p = self.spec
        batch = tuple(sym(f"_b{axis}") for axis in range(len(p.batch)))
        lets = (Let("_rows", Index(p.m)), Let("_columns", Index(p.n)))
        tiles = self.tiles(batch, as_expr(0), as_expr(0))
        body: Stmt = Block((*lets, tiles))
        for axis, extent in reversed(list(enumerate(p.batch))):
            body = For(f"_b{axis}", as_expr(0), extent, body)
        return body

    def tiles(self, batch: tuple[Expr, ...], row: Expr, column: Expr) -> Stmt:
        """Computes rows by whole tiles, all in one call, then the remaining rows."""
        rows, most = sym("_rows"), max(DOT_HEIGHTS)
        whole = floordiv(rows, most)

        def across(width: int) -> Stmt:
            def call(height: int, count: Expr) -> Stmt:
                return self.call(batch, row, column, height, width, count)

            some = Binary("gt", Index(whole), Index(as_expr(0)))
            first = Block((Let("_i", Index(as_expr(0))), call(most, whole)))
            rest: list[Stmt] = []
            # Each runs at most once, as a height is twice the next one.
            for taller, height in pairwise(DOT_HEIGHTS):
                start = Let("_i", Index(floordiv(rows, taller) * taller))
                wanted = Binary("ge", Index(mod(rows, taller)), Index(as_expr(height)))
                rest.append(If(wanted, Block((start, call(height, as_expr(1))))))
            return Block((If(some, first), *rest))

        return _cover("_j", sym("_columns"), across)

    def call(
        self,
        batch: tuple[Expr, ...],
        row: Expr,
        column: Expr,
        height: int,
        width: int,
        count: Expr,
    ) -> Stmt:
        """Calls the kernel for this many tiles from (_i, _j) of a unit on."""
        p, b_at, plain = self.spec, self.b_at(batch), self.around.plain
        i, j, origin = sym("_i"), sym("_j"), as_expr(0)
        b_row = self.b.strides[-1] if self.in_place else self.b.strides[-2]
        place = (origin, column + j) if self.in_place else (column + j, origin)
        left: Address = (self.a, (*batch, row + i, origin))
        result: Address = (self.scratch, (sym(WORKER), i, j))
        c_row = as_expr(self.tile.NR)
        if plain is not None:
            result, c_row = plain(batch, row + i, column + j), p.n
        sizes = (count, p.k, p.a_strides[-2], b_row, c_row)
        name = dot_name(p.dtype, height, width)
        return Call(name, sizes, (left, (self.b, (*b_at, *place)), result))


def _cover(var: str, extent: Expr, part: Callable[[int], Stmt]) -> Stmt:
    """Covers an extent by parts of the largest width, then one remainder: 7 is 4, 3."""
    largest = max(DOT_WIDTHS)
    whole = floordiv(extent, largest) * largest
    rest = Switch(
        mod(extent, largest),
        tuple((size, part(size)) for size in DOT_WIDTHS if size < largest),
    )
    return Block(
        (
            For(var, as_expr(0), whole, part(largest), step=largest),
            Block((Let(var, Index(whole)), rest)),
        )
    )
