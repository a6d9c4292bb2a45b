"""Small matrix products: strips of rows over all columns, without an epilogue.

    switch height { h: strip_f32_h(rows of A, all of B, rows of C) }    twice

    strip_f32_h:
      for tile of h rows                                  as few and even as possible
        for panels of B, Q at a time, then two: h x (Q * NR) results in registers
          over all of K
        for the remaining columns: the same, the last vector under a mask

    outer_f32                                             K = 1: row after row of C

If a product takes no longer than planning it would, overhead dominates. So there is one
call for all tiles of a height, nothing is packed or kept in scratch, and results are
stored in place. With few rows there are registers for several panels at once, which
also hides the latency of an addition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

from pliant.ir.callees import callees
from pliant.ir.loop_walk import calling
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
    Prefetch,
    Role,
    Stmt,
    Store,
    Switch,
    buffer,
)
from pliant.kernels.choose import (
    MOST_PANELS,
    StripCut,
    exceeds,
    share_of,
    strip_tiles,
    unit_grain,
)
from pliant.kernels.micro import (
    Elements,
    left_buffer,
    left_place,
    multiply_add,
    row_strides,
    zero,
)
from pliant.kernels.packing import unflatten_unit
from pliant.kernels.product import Address, Plain, Product
from pliant.kernels.tiles import VECTORS, Tile
from pliant.machine.target import Target
from pliant.sym import (
    ONE,
    ZERO,
    Expr,
    as_expr,
    ceildiv,
    floordiv,
    maximum,
    minimum,
    product,
    sym,
)

# The integer parameters of a strip kernel: the number of row tiles, sizes, A's strides,
# B's strides between steps of K and between panels, the results' row stride, and
# whether they are added to.
STRIP_SIZES = (
    *("tiles", "N", "K", "a_rows", "a_row", "a_step"),
    *("b_step", "b_panel", "c_row", "more"),
)
NARROW_SIZES = tuple(n for n in STRIP_SIZES if n not in ("a_rows", "b_panel"))
OUTER_SIZES = ("M", "N", "a_row", "c_row")
_WHOLE = "_whole"  # ends the names of kernels for whole panels
STREAM_STEPS = 32  # prefetch distance in steps of K where B comes from memory


def has_strips(spec: Product, adjacent: bool, target: Target) -> bool:
    """Whether strips can compute a product whose B has contiguous columns or panels."""
    plain = spec.parts is None and spec.b_dtype is spec.dtype and not spec.computed
    masked = spec.dtype.bytes >= 4 and target.masks(spec.dtype.bytes)
    return plain and masked and adjacent


def panels_in_registers(height: int, tile: Tile) -> int:
    """How many panels a strip of this height holds in registers."""
    return max(1, min(MOST_PANELS, tile.MR // height))


def panels_before(columns: Expr, tile: Tile) -> Expr:
    """How many panels precede the last one, which may be partial."""
    return floordiv(maximum(columns - 1, 0), tile.NR)


def strip_name(of: Elements, height: int, far: bool, whole: bool) -> str:
    kind = "stream" if far else "strip"
    return f"{kind}_{of.name}_{height}{_WHOLE if whole else ''}"


def with_general_strips(loops: Mapping[str, LoopFunc]) -> dict[str, LoopFunc]:
    """Functions that call the kernels for any number of columns, where there are any.

    Those for whole panels are the same code, without some cases.
    """
    names = (name for name in loops if name.endswith(_WHOLE))
    general = {name: name.removesuffix(_WHOLE) for name in names}
    instead = {name: other for name, other in general.items() if other in loops}

    def now(func: LoopFunc) -> LoopFunc:
        return (
            func if instead.keys().isdisjoint(callees(func)) else calling(func, instead)
        )

    return {name: now(func) for name, func in loops.items() if name not in instead}


def narrow_name(of: Elements, height: int) -> str:
    return f"narrow_{of.name}_{height}"


def outer_name(of: Elements) -> str:
    return f"outer_{of.name}"


class _Strip:
    """The buffers of a strip kernel, and its code for a few vectors of columns.

    `far`: B comes from memory. `whole`: columns come in whole panels, of which the last
    may end inside its last vector. `narrow`: A's rows are addressed with a single
    stride; a tile of few columns takes so little time that setting up two strides would
    show.
    """

    def __init__(
        self,
        of: Elements,
        height: int,
        tile: Tile,
        far: bool = False,
        whole: bool = False,
        narrow: bool = False,
    ) -> None:
        self.of, self.height, self.tile, self.far = of, height, tile, far
        self.whole, self.narrow = whole, narrow
        n, k, nr = sym("N"), sym("K"), tile.NR
        rows = sym("tiles") * height
        self.a = left_buffer(of.dtype, height, sym("tiles"))
        if narrow:
            strides = sym("a_row"), sym("a_step")
            self.a = buffer("a", of.dtype, (rows, k), Role.IN, strides)
        before = panels_before(n, tile)
        steps = (sym("b_panel"), sym("b_step"), as_expr(1))
        self.b = buffer("b", of.stored, (before, k, nr), Role.IN, steps)
        last = (k, n - before * nr)
        self.last = buffer("last", of.stored, last, Role.IN, steps[1:])
        self.c = buffer("c", of.dtype, (rows, n), Role.INOUT, (sym("c_row"), 1))

    def results(self, vectors: int, columns: Expr | None) -> Stmt:
        """Computes this many vectors of columns from panel `_p` on, over all of K.

        If `columns` is given, the last vector may be partial. If there are few results,
        each has several accumulators.
        """
        lanes = self.tile.lanes
        chains = self.tile.chains(self.height, vectors)
        shape = (chains, self.height, vectors, lanes)
        acc = buffer("acc", self.of.dtype, shape, Role.REGISTER)
        i, j, k = (sym(name) for name in ("_i", "_j", "_k"))
        row = sym("_t") * self.height + i

        def inside(vector: int) -> LoopValue | None:
            if columns is None or vector + 1 < vectors:
                return None
            return Binary("lt", Index(j + vector * lanes), Index(columns))

        def over(body: Callable[[int], Stmt], by_rows: bool = True) -> Stmt:
            def lane(vector: int) -> Stmt:
                return For("_j", ZERO, as_expr(lanes), body(vector), Kind.VECTOR)

            def rows(inner: Stmt) -> Stmt:
                return For("_i", ZERO, as_expr(self.height), inner, Kind.UNROLL)

            across = [lane(vector) for vector in range(vectors)]
            if by_rows:
                return rows(Block(tuple(across)))
            return Block(tuple(rows(vector) for vector in across))

        def step(chain: int, vector: int) -> Stmt:
            place = (as_expr(chain), i, as_expr(vector), j)
            panel, first = divmod(vector, VECTORS)
            column, wanted = first * lanes + j, inside(vector)
            right = Load(self.b, (sym("_p") + panel, k + chain, column))
            if columns is not None and panel == (vectors - 1) // VECTORS:
                right = Load(self.last, (k + chain, column), wanted)
            at = left_place(sym("_t"), self.height, i, k + chain)
            left = Load(self.a, (row, k + chain) if self.narrow else (at,))
            value = multiply_add(left, right, Load(acc, place), self.of.dtype)
            return Store(acc, place, value)

        def coming(chain: int) -> list[Stmt]:
            """Prefetches every line of whole panels, some steps ahead."""
            if not self.far or columns is not None:
                return []
            places = (divmod(vector, VECTORS) for vector in range(vectors))
            at = k + chain + STREAM_STEPS
            return [
                Prefetch(self.b, (sym("_p") + panel, at, as_expr(part * lanes)))
                for panel, part in places
            ]

        def steps(begin: Expr, end: Expr, count: int) -> Stmt:
            body: list[Stmt] = []
            # The smaller operand stays in registers: elements of A, or vectors of B.
            by_rows = self.height >= vectors
            for chain in range(count):
                body += [*coming(chain), over(partial(step, chain), by_rows)]
            return For("_k", begin, end, Block(tuple(body)), step=count)

        def start(chain: int, vector: int) -> Stmt:
            place = (as_expr(chain), i, as_expr(vector), j)
            return Store(acc, place, zero(self.of.dtype))

        def place(vector: int) -> tuple[Expr, ...]:
            return (row, sym("_p") * self.tile.NR + vector * lanes + j)

        def total(more: bool, vector: int) -> Stmt:
            """The sum of the accumulators, or that and what is in C."""
            at = (i, as_expr(vector), j)
            found: LoopValue = Load(acc, (ZERO, *at))
            if more:
                before = Load(self.c, place(vector), inside(vector))
                found = Binary("add", before, found)
            else:
                for chain in range(1, chains):
                    found = Binary("add", found, Load(acc, (as_expr(chain), *at)))
            return Store(acc, (ZERO, *at), found)

        def end(vector: int) -> Stmt:
            wanted, result = inside(vector), Load(acc, (ZERO, i, as_expr(vector), j))
            store = Store(self.c, place(vector), result)
            return store if wanted is None else If(wanted, store)

        even = floordiv(sym("K"), chains) * chains
        body = [Alloc(acc), *(over(partial(start, chain)) for chain in range(chains))]
        body.append(steps(as_expr(0), even, chains))
        if chains > 1:
            body += [steps(even, sym("K"), 1), over(partial(total, False))]
        # Each pass is summed on its own: one sum over a long K would lose precision.
        more = Binary("gt", Index(sym("more")), Index(as_expr(0)))
        # One row at a time, as its vectors share cache lines.
        return Block((*body, If(more, over(partial(total, True))), over(end)))

    def remainder(self, columns: Expr) -> Stmt:
        """A call for the columns from panel `_p` on: they are few."""
        tile, panel = sym("_t"), sym("_p")
        here = {"tiles": ONE, "N": columns}
        sizes = tuple(here.get(name, sym(name)) for name in STRIP_SIZES)
        operands = (
            (self.a, (left_place(tile, self.height, ZERO, ZERO),)),
            (self.b, (panel, ZERO, ZERO)),
            (self.last, (ZERO, ZERO)),
            (self.c, (tile * self.height, panel * self.tile.NR)),
        )
        name = strip_name(self.of, self.height, False, self.whole)
        return Call(name, sizes, operands)


@lru_cache(maxsize=256)
def strip_kernel(
    of: Elements, height: int, tile: Tile, far: bool, whole: bool
) -> LoopFunc:
    """Tiles of `height` rows of A, one below the other, times all panels of B.

    `far`: B comes from memory, so whole panels are prefetched. The other kernel has the
    code for what remains.
    """
    strip = _Strip(of, height, tile, far, whole)
    n, several = sym("N"), panels_in_registers(height, tile)
    before, columns, done = panels_before(n, tile), sym("_columns"), ZERO
    parts: list[Stmt] = []
    # The remainder after groups of `several` panels: at most two panels and two more.
    for size in dict.fromkeys((several, min(several, 2))):
        end = done + floordiv(before - done, size) * size
        results = strip.results(size * VECTORS, None)
        parts.append(For("_p", done, end, results, step=size))
        done, most = end, size * VECTORS
    if several == 1 and height <= tile.broad:  # registers for one and a half panels
        done, most = floordiv(maximum(ceildiv(n, tile.lanes) - 2, 0), VECTORS), 3
        parts = [For("_p", ZERO, done, strip.results(VECTORS, None))]
    if far:
        left = strip.remainder(columns)
    else:
        step = VECTORS if whole else 1
        widths = range(step, most + 1, step)
        cases = tuple((v, strip.results(v, columns)) for v in widths)
        left = Switch(ceildiv(columns, tile.lanes), cases)
    tile_done = Block(
        (
            *parts,
            Let("_p", Index(done)),
            Let("_columns", Index(n - done * tile.NR)),
            left,
        )
    )
    body = For("_t", as_expr(0), sym("tiles"), tile_done)
    buffers = (strip.a, strip.b, strip.last, strip.c)
    name = strip_name(of, height, far, whole)
    return LoopFunc(name, STRIP_SIZES, buffers, body)


@lru_cache(maxsize=256)
def narrow_kernel(of: Elements, height: int, tile: Tile) -> LoopFunc:
    """Tiles of `height` rows of A, one below the other, times a vector of columns."""
    strip = _Strip(of, height, tile, narrow=True)
    product = strip.results(1, sym("N"))
    one = Block((Let("_p", Index(ZERO)), product))
    body = For("_t", ZERO, sym("tiles"), one)
    name = narrow_name(of, height)
    return LoopFunc(name, NARROW_SIZES, (strip.a, strip.last, strip.c), body)


@lru_cache(maxsize=64)
def outer_kernel(of: Elements) -> LoopFunc:
    """A column times a row: stores dominate, and are fastest along one row of C."""
    m, n, i, j = (sym(name) for name in ("M", "N", "_i", "_j"))
    a = buffer("a", of.dtype, (m,), Role.IN, (sym("a_row"),))
    b = buffer("b", of.dtype, (n,), Role.IN)
    c = buffer("c", of.dtype, (m, n), Role.OUT, (sym("c_row"), 1))
    value = Binary("mul", Load(a, (i,)), Load(b, (j,)))
    row = For("_j", ZERO, n, Store(c, (i, j), value), Kind.VECTOR)
    body = For("_i", ZERO, m, row)
    return LoopFunc(outer_name(of), OUTER_SIZES, (a, b, c), body)


# The start and the length of a part of an extent.
Part = tuple[Expr, Expr]


@dataclass(frozen=True, slots=True)
class Panels:
    """Columns of B as strips read them.

    The addresses of the first panel and of the last, and B's strides between steps of K
    and between panels.
    """

    first: Address
    last: Address
    step: Expr
    panel: Expr


@dataclass(frozen=True, slots=True)
class StripPlace:
    """Where a part of a product starts: row, panel, step of K; and its steps."""

    batch: tuple[Expr, ...]
    row: Expr
    panel: Expr
    step: Expr
    steps: Expr


@dataclass(frozen=True, slots=True)
class Strips:
    """A product computed by strips."""

    spec: Product
    tile: Tile
    a: Buffer
    # The panels of B from this one on. Arguments: batch, step of K, first panel, number
    # of columns.
    right: Callable[[tuple[Expr, ...], Expr, Expr, Expr], Panels]
    plain: Plain

    @property
    def far(self) -> Expr:
        """1 if B is a constant that comes from memory."""
        p = self.spec
        if p.b_strides is not None:
            return as_expr(0)
        # What L2 holds is not prefetched: that would only cost time.
        return exceeds(p.n * p.k * self.tile.bytes, 2 * self.tile.near)

    @property
    def are_whole(self) -> bool:
        """Whether every part of the columns, cut at panels, has all vectors of each."""
        n, tile = self.spec.n, self.tile
        return n.is_const and -(-n.value // tile.lanes) % VECTORS == 0

    def kernels(self) -> tuple[LoopFunc, ...]:
        tile, of, whole = self.tile, self.spec.elements, self.are_whole
        found: list[LoopFunc] = []
        heights, n = range(1, tile.MR + 1), self.spec.n
        wide = not n.is_const or n.value > tile.lanes
        if wide and self.far != as_expr(0):
            few = range(1, tile.few + 1)
            found += (strip_kernel(of, h, tile, True, whole) for h in few)
        if wide:
            found += (strip_kernel(of, h, tile, False, whole) for h in heights)
        if not n.is_const or n.value <= tile.lanes:
            found += (narrow_kernel(of, h, tile) for h in heights)
        if self.single is not None or self.may_be_row:
            found.append(outer_kernel(of))
        return tuple(found)

    @property
    def single(self) -> LoopValue | None:
        """Whether K is one step and rows fill vectors; None if known to be false.

        Shorter rows are faster with several of them unrolled.
        """
        n, k = self.spec.n, self.spec.k
        if (k.is_const and k != ONE) or (n.is_const and n.value <= self.tile.lanes):
            return None
        one = Binary("eq", Index(k), Index(ONE))
        wide = Binary("gt", Index(n), Index(as_expr(self.tile.lanes)))
        return one if n.is_const else Binary("logical_and", one, wide)

    def whole(self) -> Stmt:
        """The whole product, one strip after the other."""
        p = self.spec
        batch = tuple(sym(f"_b{axis}") for axis in range(len(p.batch)))
        body = self.block(batch, (ZERO, p.m), (ZERO, p.n), (ZERO, p.k))
        if self.may_be_row:
            single = Binary("eq", Index(p.n * p.k), Index(ONE))
            body = If(single, self.as_row(), body)
        if not p.n.is_const or p.n.value <= self.tile.NR:
            # The smallest products are not cut into tiles at all.
            at = StripPlace(batch, ZERO, ZERO, ZERO, p.k)
            narrow, wide = (f(at, p.m, ONE, p.n) for f in (self.narrow, self.wide))
            limits = ((p.m, self.tile.MR), (p.n, self.tile.NR))
            low, thin = (Binary("le", Index(x), Index(as_expr(y))) for x, y in limits)
            alone = self.by_width(p.n, narrow, wide)
            body = If(Binary("logical_and", low, thin), alone, body)
        for axis, extent in reversed(list(enumerate(p.batch))):
            body = For(f"_b{axis}", as_expr(0), extent, body)
        return body

    @property
    def may_be_row(self) -> bool:
        """Whether a column times a number may be computed as the number times a row."""
        p = self.spec
        known = p.n.is_const and p.k.is_const
        adjacent = p.a_strides == (p.k, ONE)
        return adjacent and (not known or p.n == p.k == ONE)

    def as_row(self) -> Stmt:
        """A column times a number, computed as one row."""
        b = self.right((), ZERO, ZERO, ONE)
        sizes = (ONE, self.spec.m, ONE, ONE)
        operands = (b.last, (self.a, (ZERO, ZERO)), self.plain((), ZERO, ZERO))
        return Call(outer_name(self.spec.elements), sizes, operands)

    def units(self, cut: StripCut) -> Stmt:
        """The product in units of a row block and a group of panels, for threads."""
        p, nr = self.spec, self.tile.NR
        units = (*p.batch, cut.blocks, cut.groups)
        placed, at = unflatten_unit(sym("_u"), units)
        row = at[-2] * cut.rows
        # Rounding up may leave no rows, or a negative number, for the last part.
        here = maximum(minimum(cut.rows, p.m - row), 0)
        first, last = share_of(ceildiv(p.n, nr), at[-1], cut.groups)
        columns = minimum(last * nr, p.n) - sym("_first") * nr
        begin = sym("_pass") * cut.depth
        lets = {"_row": row, "_here": here, "_first": first, "_wide": columns}
        steps = {"_begin": begin, "_steps": minimum(cut.depth, p.k - begin)}
        parts = [sym(name) for name in (*lets, *steps)]
        a_pass = Block(
            (
                *(Let(name, Index(value)) for name, value in steps.items()),
                self.block(at[:-2], *(zip(parts[::2], parts[1::2], strict=True))),
            )
        )
        unit = Block(
            (
                *placed,
                *(Let(name, Index(value)) for name, value in lets.items()),
                For("_pass", as_expr(0), cut.passes, a_pass),
            )
        )
        grain = unit_grain(cut.rows, cut.panels * nr, p.k)
        loop = For("_u", as_expr(0), product(units), unit, Kind.PARALLEL, grain=grain)
        return Block((*(Let(n, Index(v)) for n, v in cut.lets), loop))

    def block(
        self, batch: tuple[Expr, ...], height: Part, width: Part, depth: Part
    ) -> Stmt:
        """Cuts rows into few, even tiles, each over the given columns and steps."""
        p, tile = self.spec, self.tile
        (row, rows), (first, columns), (begin, steps) = height, width, depth
        t, tiles, short, taller = (
            sym(name) for name in ("_t", "_tiles", "_short", "_taller")
        )
        # First the tiles with one row more, if any, then the others.
        count, tall = taller + t * (tiles - 2 * taller), short + 1 - t
        at = StripPlace(batch, row + sym("_start"), first, begin, steps)
        narrow = self.narrow(at, tall, count, columns)
        wide = self.wide(at, tall, count, columns)
        done = Block(
            (
                Let("_start", Index(t * taller * (short + 1))),
                self.by_width(columns, narrow, wide),
            )
        )
        tiled = Block(
            (
                Let("_tiles", Index(strip_tiles(rows, p.m, p.n, p.k, tile))),
                Let("_short", Index(floordiv(rows, maximum(tiles, 1)))),
                Let("_taller", Index(rows - short * tiles)),
                For("_t", 1 - minimum(taller, 1), as_expr(2), done),
            )
        )
        if self.single is None:
            return tiled
        whole = StripPlace(batch, row, first, begin, steps)
        return If(self.single, self.rows(whole, rows, columns), tiled)

    def rows(self, at: StripPlace, height: Expr, columns: Expr) -> Stmt:
        """Rows of results for K = 1, where panels of B are contiguous."""
        p = self.spec
        b = self.right(at.batch, ZERO, at.panel, columns)
        left, result = self.outer(at)
        sizes = (height, columns, p.a_strides[-2], p.n)
        return Call(outer_name(p.elements), sizes, (left, b.first, result))

    def by_width(self, columns: Expr, narrow: Stmt, wide: Stmt) -> Stmt:
        """One of the two, chosen now if the number of columns is known."""
        n = self.spec.n
        if not n.is_const:
            is_narrow = Binary("le", Index(columns), Index(as_expr(self.tile.lanes)))
            return If(is_narrow, narrow, wide)
        return narrow if n.value <= self.tile.lanes else wide

    def wide(self, at: StripPlace, height: Expr, tiles: Expr, columns: Expr) -> Stmt:
        """Tiles of one height over all panels."""
        p, tile, far = self.spec, self.tile, self.far
        b = self.right(at.batch, at.step, at.panel, columns)
        strides = (*row_strides(*p.a_strides[-2:]), b.step, b.panel, p.n)
        sizes = (tiles, columns, at.steps, *strides, minimum(at.step, 1))
        left, result = self.outer(at)
        operands = (left, b.first, b.last, result)
        kinds = tile.MR + 1  # all heights, and 0
        cases: list[tuple[int, Stmt]] = []
        for h in range(1, tile.MR + 1):
            near, streaming = (
                strip_name(p.elements, h, streams, self.are_whole)
                for streams in (False, True)
            )
            cases.append((h, Call(near, sizes, operands)))
            if far != ZERO:
                name = streaming if h <= tile.few else near
                cases.append((kinds + h, Call(name, sizes, operands)))
        return Switch(height + far * kinds, tuple(cases))

    def narrow(self, at: StripPlace, height: Expr, tiles: Expr, columns: Expr) -> Stmt:
        """Tiles of one height over a single vector of columns."""
        p = self.spec
        b = self.right(at.batch, at.step, at.panel, as_expr(1))
        strides = (*p.a_strides[-2:], b.step, p.n)
        sizes = (tiles, columns, at.steps, *strides, minimum(at.step, 1))
        left, result = self.outer(at)
        operands = (left, b.last, result)
        names = ((h, narrow_name(p.elements, h)) for h in range(1, self.tile.MR + 1))
        return Switch(height, tuple((h, Call(n, sizes, operands)) for h, n in names))

    def outer(self, at: StripPlace) -> tuple[Address, Address]:
        """The rows of A, and the results."""
        left = (self.a, (*at.batch, at.row, at.step))
        return left, self.plain(at.batch, at.row, at.panel * self.tile.NR)
