"""Matrix products with lanes along K: few columns, or few rows of a B adjacent in K.

for unit in blocks of rows x panels of columns        parallel, if there is much to do
  dots_f32(rows of A, rows of B)            one function for all products
    for width of 4, then a remainder of 3, 2 or 1
      for height of 4, then remainders of 2 and 1
        dot_f32_hxw(rows of A, rows of B)   -> the result, or scratch
  epilogue on the unit, if there is one
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
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
    LoopFunc,
    Role,
    Stmt,
    Switch,
    buffer,
)
from pliant.ir.types import DType
from pliant.kernels.choose import SMALL, unit_grain
from pliant.kernels.micro import DOT_HEIGHTS, DOT_WIDTHS, dot_kernels, dot_name
from pliant.kernels.packing import unflatten_unit
from pliant.kernels.product import Address, Around, Product, TileAt
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
        """Calls the function that covers `_rows` x `_columns` results by tiles."""
        p, origin, plain = self.spec, as_expr(0), self.around.plain
        b_row = self.b.strides[-1] if self.in_place else self.b.strides[-2]
        place = (origin, column) if self.in_place else (column, origin)
        left: Address = (self.a, (*batch, row, origin))
        result: Address = (self.scratch, (sym(WORKER), origin, origin))
        c_row = as_expr(self.tile.NR)
        if plain is not None:
            result, c_row = plain(batch, row, column), p.n
        sizes = (sym("_rows"), sym("_columns"), p.k, p.a_strides[-2], b_row, c_row)
        right: Address = (self.b, (*self.b_at(batch), *place))
        return Call(_dots_name(p.dtype), sizes, (left, right, result))


def _dots_name(dtype: DType) -> str:
    return f"dots_{dtype}"


@lru_cache(maxsize=16)
def dots_kernel(dtype: DType) -> LoopFunc:
    """Rows of A times rows of B, by tiles of up to 4 x 4 results."""
    rows, columns, k, c_row = (sym(s) for s in ("rows", "columns", "K", "c_row"))
    a = buffer("a", dtype, (rows, k), Role.IN, (sym("a_row"), 1))
    b = buffer("b", dtype, (columns, k), Role.IN, (sym("b_row"), 1))
    span = (rows - 1) * c_row + columns
    c = buffer("c", dtype, (maximum(span, 0),), Role.OUT)
    i, j, origin, most = sym("_i"), sym("_j"), as_expr(0), max(DOT_HEIGHTS)
    whole = floordiv(rows, most)

    def call(height: int, width: int, count: Expr) -> Stmt:
        sizes = (count, k, sym("a_row"), sym("b_row"), c_row)
        places = ((a, (i, origin)), (b, (j, origin)), (c, (i * c_row + j,)))
        return Call(dot_name(dtype, height, width), sizes, places)

    def across(width: int) -> Stmt:
        """All whole tiles in one call, then the remaining rows."""
        some = Binary("gt", Index(whole), Index(origin))
        first = Block((Let("_i", Index(origin)), call(most, width, whole)))
        rest: list[Stmt] = []
        # Each runs at most once, as a height is twice the next one.
        for taller, height in pairwise(DOT_HEIGHTS):
            start = Let("_i", Index(floordiv(rows, taller) * taller))
            wanted = Binary("ge", Index(mod(rows, taller)), Index(as_expr(height)))
            once = Block((start, call(height, width, as_expr(1))))
            rest.append(If(wanted, once))
        return Block((If(some, first), *rest))

    sizes = ("rows", "columns", "K", "a_row", "b_row", "c_row")
    body = _cover("_j", columns, across)
    return LoopFunc(_dots_name(dtype), sizes, (a, b, c), body)


def dots_kernels(dtype: DType) -> tuple[LoopFunc, ...]:
    """The function that products call, and the micro-kernels that it calls."""
    return *dot_kernels(dtype), dots_kernel(dtype)


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
