"""Micro-kernels of matrix products: what one core does in registers.

    panel   height x (vectors * lanes) results; A broadcast, B by vectors
            acc[i, j..] += a[i, k] * b[k, j..]
    dot     height x width results, lanes along K; both operands adjacent in K
            acc[i, j] = sum over k of a[i, k..] * b[j, k..]

Elements may be words of several narrow integers each (`parts`, as in ir/loops.Dot):
then K counts words, and a panel kernel multiplies them part by part.

A panel kernel reads A and B with any strides (B's columns are contiguous), adds to its
results or starts from zero, and prefetches a slice of the next panel as it computes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from pliant.ir.loops import (
    Accumulate,
    Accumulator,
    Alloc,
    Binary,
    Block,
    Buffer,
    Call,
    Const,
    Dot,
    Fma,
    For,
    If,
    Index,
    Kind,
    Load,
    LoopFunc,
    LoopValue,
    Prefetch,
    Read,
    Role,
    Stmt,
    Store,
    as_dtype,
    buffer,
)
from pliant.ir.types import DType
from pliant.kernels.choose import row_tiles
from pliant.kernels.tiles import VECTORS, Tile, gemm_tile
from pliant.machine.target import Target
from pliant.sym import Expr, as_expr, floordiv, maximum, minimum, mod, sym

# Sizes of a dot kernel's tile; the remainder is covered by the smaller ones. Each
# additional row of B in a tile saves reads of A, which is the larger operand.
DOT_HEIGHTS = (4, 2, 1)
DOT_WIDTHS = (4, 3, 2, 1)

DOT_PARAMETERS = ("tiles", "K", "a_row", "b_row", "c_row")

# The integer parameters of a panel kernel: K, A's strides between groups of `ROWS`
# rows, between rows and between steps of K, B's stride along K, the results' row
# stride, whether they are added to, and the prefetch distance per step in elements.
PANEL_SIZES = ("K", "a_rows", "a_row", "a_step", "b_step", "c_row", "more", "ahead")

# A's rows are addressed from the first of each group of this many. With a single stride
# LLVM walks from row to row by additions, which takes as long as the arithmetic.
ROWS = 4


def row_strides(row: Expr, step: Expr) -> tuple[Expr, Expr, Expr]:
    """A's strides as kernels take them."""
    return ROWS * row, row, step


def left_place(tile: Expr, height: int, row: Expr, step: Expr) -> Expr:
    """The offset of an element of A in tiles of this height."""
    within = floordiv(row, ROWS) * sym("a_rows") + mod(row, ROWS) * sym("a_row")
    return tile * height * sym("a_row") + within + step * sym("a_step")


def left_buffer(dtype: DType, height: int, tiles: Expr) -> Buffer:
    """Tiles of A's rows, one below the other, as a flat buffer."""
    k = sym("K")
    last = left_place(tiles - 1, height, as_expr(height - 1), k - 1)
    return buffer("a", dtype, (maximum(minimum(k, 1) * (last + 1), 0),), Role.IN)


def multiply_add(
    x: LoopValue, y: LoopValue, z: LoopValue, dtype: DType, parts: str | None = None
) -> LoopValue:
    if parts is not None:
        return Dot(parts, x, y, z)
    return Fma(x, y, z) if dtype.is_float else Binary("add", Binary("mul", x, y), z)


def zero(dtype: DType) -> Const:
    return Const(0.0 if dtype.is_float else 0, dtype)


@dataclass(frozen=True, slots=True)
class Elements:
    """What a panel kernel multiplies: numbers of `dtype`, or words of narrow integers.

    B may be stored in another type than `dtype`.
    """

    dtype: DType
    stored: DType
    parts: str | None = None

    @property
    def name(self) -> str:
        if self.parts is not None:
            return self.parts
        plain = self.stored is self.dtype
        return str(self.dtype) if plain else f"{self.dtype}_{self.stored}"


def panel_name(of: Elements, height: int, width: int, keeps: bool = False) -> str:
    return f"gemm_{of.name}_{height}x{width}{'_kept' if keeps else ''}"


def far_name(of: Elements, height: int, tile: Tile) -> str:
    return f"{panel_name(of, height, tile.NR)}_far"


def dot_name(dtype: DType, height: int, width: int) -> str:
    return f"dot_{dtype}_{height}x{width}"


@lru_cache(maxsize=256)
def panel_kernel(
    of: Elements, height: int, vectors: int, tile: Tile, keeps: bool = False
) -> LoopFunc:
    """`height` rows of A times one panel, accumulated in registers over all of K.

    A keeping kernel also writes the rows of B that it reads into a packed panel.
    """
    width, k, dtype = vectors * tile.lanes, sym("K"), of.dtype
    chains = tile.chains(height, vectors)
    a = left_buffer(dtype, height, as_expr(1))
    b = buffer("b", of.stored, (k, width), Role.IN, (sym("b_step"), 1))
    coming = buffer("coming", of.stored, (k, width), Role.IN, (sym("ahead"), 1))
    c = buffer("c", dtype, (height, width), Role.INOUT, (sym("c_row"), 1))
    acc = buffer("acc", dtype, (chains, height, width), Role.REGISTER)
    kept = buffer("kept", dtype, (k, width), Role.OUT)

    def steps(begin: Expr, end: Expr, count: int) -> Stmt:
        at = sym("_k")
        body: list[Stmt] = []
        for chain in range(count):
            lines = range(0, width if keeps else 1, tile.lanes)
            body += [Prefetch(coming, (at + chain, as_expr(line))) for line in lines]
            value = multiply_add(
                Load(a, (left_place(as_expr(0), height, sym("_i"), at + chain),)),
                as_dtype(Load(b, (at + chain, sym("_j"))), dtype),
                Load(acc, (as_expr(chain), sym("_i"), sym("_j"))),
                dtype,
                of.parts,
            )
            body.append(_over(acc, chain, height, width, value))
            if keeps:
                copy = Store(
                    kept, (at + chain, sym("_j")), Load(b, (at + chain, sym("_j")))
                )
                body.append(For("_j", as_expr(0), as_expr(width), copy, Kind.VECTOR))
        return For("_k", begin, end, Block(tuple(body)), step=count)

    def start(chain: int) -> Stmt:
        return _over(acc, chain, height, width, zero(dtype))

    # Each pass is summed on its own: one sum over a long K would lose precision.
    old = Load(c, (sym("_i"), sym("_j")))
    added = Binary("gt", Index(sym("more")), Index(as_expr(0)))
    even = floordiv(k, chains) * chains
    whole = Load(acc, (as_expr(0), sym("_i"), sym("_j")))
    total: LoopValue = whole
    for chain in range(1, chains):
        total = Binary("add", total, Load(acc, (as_expr(chain), *whole.index[1:])))
    body: list[Stmt] = [
        Alloc(acc),
        *(start(chain) for chain in range(chains)),
        steps(as_expr(0), even, chains),
    ]
    if chains > 1:
        body.append(steps(even, k, 1))
    joined = _over(c, None, height, width, Binary("add", old, total))
    body.append(If(added, joined, _over(c, None, height, width, total)))
    name = panel_name(of, height, width, keeps)
    buffers = (a, b, coming, c, *((kept,) if keeps else ()))
    return LoopFunc(name, PANEL_SIZES, buffers, Block(tuple(body)))


def _over(
    target: Buffer, chain: int | None, height: int, width: int, value: LoopValue
) -> Stmt:
    """Stores a value for every (_i, _j) of a tile, unrolled."""
    at = (sym("_i"), sym("_j"))
    index = at if chain is None else (as_expr(chain), *at)
    store = Store(target, index, value)
    columns = For("_j", as_expr(0), as_expr(width), store, Kind.VECTOR)
    return For("_i", as_expr(0), as_expr(height), columns, Kind.UNROLL)


@lru_cache(maxsize=256)
def split_kernel(of: Elements, height: int, vectors: int, tile: Tile) -> LoopFunc:
    """A tile that is too tall for its width: it calls the kernels of lower ones."""
    width = vectors * tile.lanes
    a = left_buffer(of.dtype, height, as_expr(1))
    c = buffer("c", of.dtype, (height, width), Role.INOUT, (sym("c_row"), 1))
    b = buffer("b", of.stored, (sym("K"), width), Role.IN, (sym("b_step"), 1))
    # Prefetched only, so it may lie anywhere.
    coming = buffer("coming", of.stored, (0, width), Role.IN, (sym("ahead"), 1))
    sizes, none = tuple(sym(name) for name in PANEL_SIZES), as_expr(0)
    calls: list[Stmt] = []
    row = 0
    for part in row_tiles(height, tile.tallest(vectors)):
        left = (left_place(none, height, as_expr(row), none),)
        ends = ((a, left), (b, (none, none)), (coming, (none, none)))
        result = (c, (as_expr(row), none))
        calls.append(Call(panel_name(of, part, width), sizes, (*ends, result)))
        row += part
    name = panel_name(of, height, width)
    return LoopFunc(name, PANEL_SIZES, (a, b, coming, c), Block(tuple(calls)))


def panel_kernels(of: Elements, target: Target) -> tuple[LoopFunc, ...]:
    """Kernels of every height, with one vector per row and with two."""
    tile = gemm_tile(of.dtype, target)
    return tuple(
        (panel_kernel if height <= tile.tallest(vectors) else split_kernel)(
            of, height, vectors, tile
        )
        for vectors in range(1, VECTORS + 1)
        for height in range(1, tile.MR + 1)
    )


def keeping_kernels(of: Elements, target: Target) -> tuple[LoopFunc, ...]:
    """The panel kernels that also pack their panel."""
    tile = gemm_tile(of.dtype, target)
    heights = range(tile.keeping, tile.MR + 1)
    return tuple(panel_kernel(of, h, VECTORS, tile, True) for h in heights)


# The integer parameters of a tap kernel: steps of K per tap, number of taps, A's stride
# between taps, and the rest as for a panel kernel.
TAP_SIZES = ("K", "taps", "a_tap", "a_rows", "a_row", "c_row")


def tap_name(of: Elements, height: int, tile: Tile) -> str:
    return f"{panel_name(of, height, tile.NR)}_taps"


@lru_cache(maxsize=64)
def tap_kernel(of: Elements, height: int, tile: Tile) -> LoopFunc:
    """Like a panel kernel, for rows of A in several pieces with the same strides."""
    k, taps, width, dtype = sym("K"), sym("taps"), tile.NR, of.dtype
    tap, row, step = sym("_t"), sym("_i"), sym("_k")

    def place(tap: Expr, row: Expr, step: Expr) -> Expr:
        within = floordiv(row, ROWS) * sym("a_rows") + mod(row, ROWS) * sym("a_row")
        return tap * sym("a_tap") + within + step

    last = place(taps - 1, as_expr(height - 1), k - 1)
    a = buffer("a", dtype, (maximum(last + 1, 0),), Role.IN)
    b = buffer("b", of.stored, (taps * k, width), Role.IN)
    coming = buffer("coming", dtype, (taps * k,), Role.IN)
    c = buffer("c", dtype, (height, width), Role.OUT, (sym("c_row"), 1))
    acc = buffer("acc", dtype, (1, height, width), Role.REGISTER)
    at = tap * k + step
    held = Load(acc, (as_expr(0), row, sym("_j")))
    right = as_dtype(Load(b, (at, sym("_j"))), dtype)
    left = Load(a, (place(tap, row, step),))
    value = multiply_add(left, right, held, dtype, of.parts)
    steps = Block((Prefetch(coming, (at,)), _over(acc, 0, height, width, value)))
    body = (
        Alloc(acc),
        _over(acc, 0, height, width, zero(dtype)),
        For("_t", as_expr(0), taps, For("_k", as_expr(0), k, steps)),
        _over(c, None, height, width, held),
    )
    name = tap_name(of, height, tile)
    return LoopFunc(name, TAP_SIZES, (a, b, coming, c), Block(body))


def tap_kernels(of: Elements, target: Target) -> tuple[LoopFunc, ...]:
    """The tap kernels of tall tiles."""
    tile = gemm_tile(of.dtype, target)
    return tuple(tap_kernel(of, height, tile) for height in tile.tall)


def far_kernels(of: Elements, target: Target) -> tuple[LoopFunc, ...]:
    """The panel kernels of tall tiles that prefetch the next rows of A.

    They have names of their own because LLVM specializes a kernel that is called in one
    place only.
    """
    tile = gemm_tile(of.dtype, target)
    return tuple(
        replace(panel_kernel(of, h, VECTORS, tile), name=far_name(of, h, tile))
        for h in tile.tall
    )


@lru_cache(maxsize=256)
def dot_kernel(dtype: DType, height: int, width: int) -> LoopFunc:
    """Tiles of `height` rows of A, one below the other, times `width` rows of B.

    Lanes go along K.
    """
    k, rows = sym("K"), sym("tiles") * height
    a = buffer("a", dtype, (rows, k), Role.IN, (sym("a_row"), 1))
    b = buffer("b", dtype, (width, k), Role.IN, (sym("b_row"), 1))
    span = (rows - 1) * sym("c_row") + width
    c = buffer("c", dtype, (maximum(span, 0),), Role.OUT)
    first = sym("_t") * height
    places = list(product(range(height), range(width)))
    at = sym("_k")
    names = {place: f"sum_{place[0]}_{place[1]}" for place in places}
    adds = tuple(
        Accumulate(
            names[i, j],
            Binary("mul", Load(a, (first + i, at)), Load(b, (as_expr(j), at))),
        )
        for i, j in places
    )

    def stores(c_row: Expr) -> Stmt:
        begin = first * sym("c_row")
        results = ((begin + i * c_row + j, names[i, j]) for i, j in places)
        return Block(tuple(Store(c, (at,), Read(name, dtype)) for at, name in results))

    # If the rows of C follow each other, the results are contiguous: one store.
    adjacent = Binary("eq", Index(sym("c_row")), Index(as_expr(width)))
    tile = Block(
        (
            *(Accumulator(names[place], dtype, "sum") for place in places),
            For("_k", as_expr(0), k, Block(adds), Kind.VECTOR),
            If(adjacent, stores(as_expr(width)), stores(sym("c_row"))),
        )
    )
    body = For("_t", as_expr(0), sym("tiles"), tile)
    return LoopFunc(dot_name(dtype, height, width), DOT_PARAMETERS, (a, b, c), body)


def dot_kernels(dtype: DType) -> tuple[LoopFunc, ...]:
    sizes = product(DOT_HEIGHTS, DOT_WIDTHS)
    return tuple(dot_kernel(dtype, height, width) for height, width in sizes)
