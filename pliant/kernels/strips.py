"""Small matrix products: strips of rows over all columns, with nothing around them.

    for tile in rows                                      as few and as even as can be
      switch height { h: strip_f32_h(rows of A, all of B, rows of C) }

    strip_f32_h:
      for whole panels of B, Q at a time, then one: h x (Q * NR) results in registers
        over all of K
      for the columns that are left: the same under a mask

Where a product takes no longer than it would take to plan it, what counts is what
happens besides multiplying: so there is one call for a row tile, nothing is packed or
kept in scratch, and results go straight to their place. Few rows leave registers for
several panels at once, which also hides the latency of an addition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from pliant.ir.loops import (
    Alloc,
    Binary,
    Block,
    Buffer,
    Call,
    For,
    If,
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
from pliant.kernels.choose import StripCut, exceeds, low_strips, unit_grain
from pliant.kernels.micro import Elements, multiply_add, zero
from pliant.kernels.packing import unflatten_unit
from pliant.kernels.product import Address, Plain, Product
from pliant.kernels.tiles import VECTORS, Tile, gemm_tile
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

# The integer parameters of a strip kernel: sizes, A's strides, B's from one step of K
# and from one panel to the next, and the results' row stride.
STRIP_SIZES = ("N", "K", "a_row", "a_step", "b_step", "b_panel", "c_row")
MOST_ABREAST = 4  # panels


def has_strips(spec: Product, adjacent: bool, target: Target) -> bool:
    """Whether strips can compute a product whose B has adjacent columns or panels."""
    plain = spec.parts is None and spec.b_dtype is spec.dtype and not spec.computed
    masked = target.has("avx2") and spec.dtype.bytes >= 4
    return plain and masked and adjacent


def abreast(height: int, tile: Tile) -> int:
    """How many panels a strip of some height has in registers: a power of two."""
    count = MOST_ABREAST
    while count > 1 and count * height > tile.MR:
        count //= 2
    return count


def strip_name(of: Elements, height: int) -> str:
    return f"strip_{of.name}_{height}"


def strip_kernels(of: Elements, target: Target) -> tuple[LoopFunc, ...]:
    tile = gemm_tile(of.dtype, target)
    return tuple(strip_kernel(of, height, tile) for height in range(1, tile.MR + 1))


class _Strip:
    """The buffers of a strip kernel, and what it does with a few panels."""

    def __init__(self, of: Elements, height: int, tile: Tile) -> None:
        self.of, self.height, self.tile = of, height, tile
        n, k, nr = sym("N"), sym("K"), tile.NR
        across = (sym("a_row"), sym("a_step"))
        self.a = buffer("a", of.dtype, (height, k), Role.IN, across)
        panels = (floordiv(n, nr), k, as_expr(nr))
        steps = (sym("b_panel"), sym("b_step"), as_expr(1))
        self.b = buffer("b", of.stored, panels, Role.IN, steps)
        self.rest = buffer("rest", of.stored, (k, mod(n, nr)), Role.IN, steps[1:])
        self.c = buffer("c", of.dtype, (height, n), Role.OUT, (sym("c_row"), 1))

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return self.a, self.b, self.rest, self.c

    def results(self, panels: int, vectors: int, columns: Expr | None) -> Stmt:
        """Whole panels from `_p` over all of K, or so many columns behind them.

        Every result has several accumulators if there are few of them.
        """
        width = vectors * self.tile.lanes
        chains = self.tile.chains(self.height, panels * vectors)
        shape = (chains, self.height, panels, width)
        acc = buffer("acc", self.of.dtype, shape, Role.REGISTER)
        i, q, j, k = (sym(name) for name in ("_i", "_q", "_j", "_k"))
        inside: LoopValue | None = None
        if columns is not None:
            inside = Binary("lt", Index(j), Index(columns))

        def across(body: Stmt) -> Stmt:
            lanes = For("_j", as_expr(0), as_expr(width), body, Kind.VECTOR)
            return For("_q", as_expr(0), as_expr(panels), lanes, Kind.UNROLL)

        def down(body: Stmt) -> Stmt:
            return For("_i", as_expr(0), as_expr(self.height), body, Kind.UNROLL)

        def right(chain: int) -> LoopValue:
            if inside is not None:
                return Load(self.rest, (k + chain, j), inside)
            return Load(self.b, (sym("_p") + q, k + chain, j))

        def step(chain: int) -> Stmt:
            place = (as_expr(chain), i, q, j)
            left = Load(self.a, (i, k + chain))
            value = multiply_add(left, right(chain), Load(acc, place), self.of.dtype)
            # B in registers, one element of A after the other.
            return down(across(Store(acc, place, value)))

        def steps(begin: Expr, end: Expr, count: int) -> Stmt:
            body = Block(tuple(step(chain) for chain in range(count)))
            return For("_k", begin, end, body, step=count)

        def start(chain: int) -> Stmt:
            store = Store(acc, (as_expr(chain), i, q, j), zero(self.of.dtype))
            return across(down(store))

        even = floordiv(sym("K"), chains) * chains
        total: LoopValue = Load(acc, (as_expr(0), i, q, j))
        for chain in range(1, chains):
            total = Binary("add", total, Load(acc, (as_expr(chain), i, q, j)))
        nr = self.tile.NR
        first = (sym("_p") + q) * nr
        if inside is not None:
            first = floordiv(sym("N"), nr) * nr
        store = Store(self.c, (i, first + j), total)
        body = [Alloc(acc), *(start(chain) for chain in range(chains))]
        body.append(steps(as_expr(0), even, chains))
        if chains > 1:
            body.append(steps(even, sym("K"), 1))
        # A row at a time: its vectors share cache lines.
        end = down(across(store if inside is None else If(inside, store)))
        return Block((*body, end))


@lru_cache(maxsize=256)
def strip_kernel(of: Elements, height: int, tile: Tile) -> LoopFunc:
    """`height` rows of A times all panels of B."""
    strip = _Strip(of, height, tile)
    n, nr = sym("N"), tile.NR
    whole = floordiv(n, nr)
    body: list[Stmt] = []
    done, several = as_expr(0), abreast(height, tile)
    if several > 1:
        done = floordiv(n, several * nr) * several
        wide = strip.results(several, VECTORS, None)
        body.append(For("_p", as_expr(0), done, wide, step=several))
    body.append(For("_p", done, whole, strip.results(1, VECTORS, None)))
    left: Stmt | None = None
    for vectors in range(1, VECTORS + 1):
        masked = strip.results(1, vectors, sym("_columns"))
        before = as_expr((vectors - 1) * tile.lanes)
        left = If(Binary("gt", Index(sym("_columns")), Index(before)), masked, left)
    assert left is not None
    body += [Let("_columns", Index(mod(n, nr))), left]
    name = strip_name(of, height)
    return LoopFunc(name, STRIP_SIZES, strip.buffers, Block(tuple(body)))


@dataclass(frozen=True, slots=True)
class Panels:
    """Columns of B as strips read them: where they start, where those behind the whole
    panels do, and how far it is to the next step of K and to the next panel."""

    first: Address
    rest: Address
    step: Expr
    panel: Expr


@dataclass(frozen=True, slots=True)
class Strips:
    """A product as strips compute it."""

    spec: Product
    tile: Tile
    a: Buffer
    # Columns of B in a batch: so many from the panel with this number on.
    right: Callable[[tuple[Expr, ...], Expr, Expr], Panels]
    plain: Plain

    def whole(self) -> Stmt:
        """All of it, one strip after the other."""
        p = self.spec
        batch = tuple(sym(f"_b{axis}") for axis in range(len(p.batch)))
        body = self.block(batch, as_expr(0), p.m, as_expr(0), p.n)
        for axis, extent in reversed(list(enumerate(p.batch))):
            body = For(f"_b{axis}", as_expr(0), extent, body)
        return body

    def units(self, cut: StripCut) -> Stmt:
        """In units of a row block and a group of panels, dealt out to threads."""
        p, nr = self.spec, self.tile.NR
        units = (*p.batch, cut.blocks, cut.groups)
        placed, at = unflatten_unit(sym("_u"), units)
        row, first = at[-2] * cut.rows, at[-1] * cut.panels
        # Even parts may leave none, or less than none, for the last.
        here = maximum(minimum(cut.rows, p.m - row), 0)
        columns = maximum(minimum(cut.panels * nr, p.n - first * nr), 0)
        lets = {"_row": row, "_here": here, "_first": first, "_wide": columns}
        unit = Block(
            (
                *placed,
                *(Let(name, Index(value)) for name, value in lets.items()),
                self.block(at[:-2], *(sym(name) for name in lets)),
            )
        )
        grain = unit_grain(cut.rows * p.k * cut.panels * nr)
        loop = For("_u", as_expr(0), product(units), unit, Kind.PARALLEL, grain=grain)
        return Block((*(Let(n, Index(v)) for n, v in cut.lets), loop))

    def block(
        self, batch: tuple[Expr, ...], row: Expr, rows: Expr, first: Expr, columns: Expr
    ) -> Stmt:
        """Rows by tiles as few and as even as can be, each over the columns."""
        p, tile = self.spec, self.tile
        b = self.right(batch, first, columns)
        sizes = (columns, p.k, *p.a_strides[-2:], b.step, b.panel, p.n)

        start = row + sym("_start")
        left = (self.a, (*batch, start, as_expr(0)))
        result = self.plain(batch, start, first * tile.NR)
        operands = (left, b.first, b.rest, result)
        cases = tuple(
            (h, Call(strip_name(p.elements, h), sizes, operands))
            for h in range(1, tile.MR + 1)
        )
        t, tiles, short, taller = (
            sym(name) for name in ("_t", "_tiles", "_short", "_taller")
        )
        done = Block(
            (
                Let("_start", Index(t * short + minimum(t, taller))),
                Let("_height", Index(short + exceeds(taller, t))),
                Switch(sym("_height"), cases),
            )
        )
        few, low = ceildiv(rows, tile.MR), ceildiv(rows, tile.low)
        return Block(
            (
                Let("_tiles", Index(few + low_strips(p.m, p.n, p.k) * (low - few))),
                Let("_short", Index(floordiv(rows, maximum(tiles, 1)))),
                Let("_taller", Index(rows - short * tiles)),
                For("_t", as_expr(0), tiles, done),
            )
        )
