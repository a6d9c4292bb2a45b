"""Matrix products on register tiles.

    C (M, N) = A (M, K) x B (K, N), then the epilogue on each tile while it is in cache

B is read in panels of NR columns, packed (P, K, NR) and zero-padded: a constant B is
packed once at compile time, another by `pack` before the product. A is read in place,
its rows adjacent in K. Work is cut into (row block, panel) units; a unit's rows are cut
into tiles as even as can be, each by the micro-kernel of that height.

    for unit in blocks x panels  parallel
      for tile in rows of the block
        switch height { h: tile[..] = gemm_f32_h(A rows, panel) }   registers -> scratch
      for m, n in tile: out[m, n] = epilogue(tile[m, n])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pliant.ir.loops import (
    WORKER,
    Alloc,
    Binary,
    Block,
    Buffer,
    Call,
    Const,
    Fma,
    For,
    Index,
    Kind,
    Let,
    Load,
    LoopFunc,
    LoopValue,
    Role,
    Stmt,
    Store,
    Switch,
    buffer,
)
from pliant.ir.types import DType
from pliant.kernels.tiles import Tile, gemm_tile
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
from pliant.target import Target

THREADS = sym("threads")
UNIT_WORK = 1 << 18  # multiply-adds worth a thread: about ten microseconds

Address = tuple[Buffer, tuple[Expr, ...]]
# Writes the results that one tile of the product makes.
Epilogue = Callable[["TileAt"], list[Stmt]]


@dataclass(frozen=True, slots=True)
class TileAt:
    """A tile of the result, as the epilogue sees it."""

    batch: tuple[Expr, ...]
    row: Expr  # first row and column of the tile in the result
    column: Expr
    rows: Expr
    columns: Expr
    scratch: Buffer

    def element(self, m: Expr, n: Expr) -> LoopValue:
        """The product at (row + m, column + n)."""
        return Load(self.scratch, (sym(WORKER), m, n))


def multiply_add(x: LoopValue, y: LoopValue, z: LoopValue, dtype: DType) -> LoopValue:
    return Fma(x, y, z) if dtype.is_float else Binary("add", Binary("mul", x, y), z)


def zero(dtype: DType) -> Const:
    return Const(0.0 if dtype.is_float else 0, dtype)


def micro_kernel_name(dtype: DType, height: int, tile: Tile) -> str:
    return f"gemm_{dtype}_{height}x{tile.NR}"


def micro_kernel(dtype: DType, height: int, tile: Tile) -> LoopFunc:
    """`height` rows of A times one panel, accumulated in registers over all of K."""
    nr, k = tile.NR, sym("K")
    a = buffer("a", dtype, (height, k), Role.IN, (sym("lda"), 1))
    b = buffer("b", dtype, (k, nr), Role.IN)
    c = buffer("c", dtype, (height, nr), Role.OUT)
    acc = buffer("acc", dtype, (height, nr), Role.REGISTER)
    i, j, at = sym("_i"), sym("_j"), sym("_k")

    def over_tile(value: LoopValue, target: Buffer) -> Stmt:
        columns = For(
            "_j", as_expr(0), as_expr(nr), Store(target, (i, j), value), Kind.VECTOR
        )
        return For("_i", as_expr(0), as_expr(height), columns, Kind.UNROLL)

    step = multiply_add(Load(a, (i, at)), Load(b, (at, j)), Load(acc, (i, j)), dtype)
    body = Block(
        (
            Alloc(acc),
            over_tile(zero(dtype), acc),
            For("_k", as_expr(0), k, over_tile(step, acc)),
            over_tile(Load(acc, (i, j)), c),
        )
    )
    name = micro_kernel_name(dtype, height, tile)
    return LoopFunc(name, ("K", "lda"), (a, b, c), body)


def micro_kernels(dtype: DType, target: Target) -> list[LoopFunc]:
    tile = gemm_tile(dtype, target)
    return [micro_kernel(dtype, h, tile) for h in range(1, tile.MR + 1)]


# ---- packing


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


def pack(
    name: str,
    dtype: DType,
    batch: tuple[Expr, ...],
    n: Expr,
    k: Expr,
    strides: tuple[Expr, ...],
    tile: Tile,
) -> LoopFunc:
    """B, strided (batch.., K, N), into panels."""
    nr = tile.NR
    b = buffer("b", dtype, (*batch, k, n), Role.IN, strides)
    packed = buffer("packed", dtype, packed_shape(batch, n, k, tile), Role.OUT)
    panels = ceildiv(n, nr)
    lets, at = unflatten_unit(sym("_u"), (*batch, panels))
    batch_at, panel = at[:-1], at[-1]
    column, row = sym("_j"), sym("_k")
    n_at = panel * nr + column
    inside = Binary("lt", Index(n_at), Index(n))
    value = Load(b, (*batch_at, row, n_at), inside)
    store = Store(packed, (*batch_at, panel, row, column), value)
    inner = For("_j", as_expr(0), as_expr(nr), store, Kind.VECTOR)
    rows = For("_k", as_expr(0), k, inner)
    units = product((*batch, panels))
    grain = maximum(1, floordiv(1 << 14, maximum(k * nr, 1)))
    body = For(
        "_u", as_expr(0), units, Block((*lets, rows)), Kind.PARALLEL, grain=grain
    )
    return LoopFunc(name, (), (b, packed), body)


# ---- the product


@dataclass(frozen=True, slots=True)
class Product:
    """One matrix product: sizes, operand layouts."""

    dtype: DType
    batch: tuple[Expr, ...]
    m: Expr
    n: Expr
    k: Expr
    a_strides: tuple[Expr, ...]  # (batch.., M, K); the last is 1
    b_batch: tuple[Expr, ...]  # batch axes of packed B: each as in `batch`, or 1


def gemm(
    product_: Product, target: Target, epilogue: Epilogue
) -> tuple[Stmt, tuple[Buffer, Buffer, Buffer]]:
    """The product as a statement, and its buffers: A, packed B, scratch."""
    p, tile = product_, gemm_tile(product_.dtype, target)
    a = buffer("a", p.dtype, (*p.batch, p.m, p.k), Role.IN, p.a_strides)
    b = buffer("b", p.dtype, packed_shape(p.b_batch, p.n, p.k, tile), Role.IN)
    panels = ceildiv(p.n, tile.NR)
    outer = product(p.batch) * panels
    # Enough row blocks for every thread where panels alone are too few.
    split = minimum(ceildiv(p.m, tile.MR), ceildiv(2 * THREADS, maximum(outer, 1)))
    # With more rows than columns, threads share B rather than A: a thread then finds
    # the rows that it wrote before in its own cache.
    tall = minimum(THREADS, ceildiv(p.m + 1, maximum(p.n, 1)))
    blocks = maximum(ceildiv(p.m, tile.rows), split, tall)
    block_rows = ceildiv(p.m, blocks)
    scratch = buffer("scratch", p.dtype, (THREADS, tile.rows, tile.NR), Role.WORK)
    lets, at = unflatten_unit(sym("_u"), (*p.batch, sym("_blocks"), panels))
    batch, block, panel = at[:-2], at[-2], at[-1]
    row = block * sym("_block_rows")
    b_at = tuple(
        as_expr(0) if dim == as_expr(1) else i
        for dim, i in zip(p.b_batch, batch, strict=True)
    )
    rows = sym("_rows")
    tiles = row_tiles(
        (p.dtype, tile),
        rows,
        (p.k, p.a_strides[-2]),
        lambda start: (a, (*batch, row + start, as_expr(0))),
        (b, (*b_at, panel, as_expr(0), as_expr(0))),
        scratch,
    )
    column = panel * tile.NR
    done = TileAt(batch, row, column, rows, minimum(tile.NR, p.n - column), scratch)
    unit = Block(
        (
            *lets,
            # Blocks of even size may leave none, or less than none, for the last.
            Let("_rows", Index(maximum(minimum(sym("_block_rows"), p.m - row), 0))),
            *tiles,
            *epilogue(done),
        )
    )
    work = sym("_block_rows") * p.k * tile.NR
    units = product(p.batch) * sym("_blocks") * panels
    body = Block(
        (
            Let("_blocks", Index(blocks)),
            Let("_block_rows", Index(block_rows)),
            For(
                "_u",
                as_expr(0),
                units,
                unit,
                Kind.PARALLEL,
                grain=maximum(1, floordiv(UNIT_WORK, maximum(work, 1))),
            ),
        )
    )
    return body, (a, b, scratch)


def row_tiles(
    kind: tuple[DType, Tile],
    rows: Expr,
    sizes: tuple[Expr, Expr],
    a: Callable[[Expr], Address],
    panel: Address,
    scratch: Buffer,
) -> list[Stmt]:
    """`rows` rows of A (from `a(row)` on) times one panel, into scratch.

    The rows are cut into as few tiles as can be, as even as can be: tile t of n has
    rows//n rows, and one more if t < rows % n. `sizes` are K and A's row stride.
    """
    dtype, tile = kind
    t, start, tiles = sym("_t"), sym("_start"), maximum(sym("_tiles"), 1)
    calls = tuple(
        (
            h,
            Call(
                micro_kernel_name(dtype, h, tile),
                sizes,
                (a(start), panel, (scratch, (sym(WORKER), start, as_expr(0)))),
            ),
        )
        for h in range(1, tile.MR + 1)
    )
    first = t * floordiv(rows, tiles) + minimum(t, mod(rows, tiles))
    one = Block(
        (
            Let("_start", Index(first)),
            Let("_height", Index(floordiv(rows + tiles - 1 - t, tiles))),
            Switch(sym("_height"), calls),
        )
    )
    return [
        Let("_tiles", Index(ceildiv(rows, tile.MR))),
        For("_t", as_expr(0), sym("_tiles"), one),
    ]


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
        safe = extent if extent.is_const else maximum(extent, 1)
        name = f"_u{k}"
        last = k == 0
        lets.append(Let(name, Index(position if last else mod(position, safe))))
        position = floordiv(position, safe)
        index.append(sym(name))
    return lets, tuple(reversed(index))
