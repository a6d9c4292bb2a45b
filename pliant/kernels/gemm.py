"""Matrix products on register tiles.

    C (M, N) = A (M, K) x B (K, N), then the epilogue on each tile while it is in cache

B is read in panels of NR columns. A constant is packed at compile time into (P, K, NR),
zero-padded. Another B is read in place, or packed one group of panels at a time. A is
read in place, or rows of it are copied side by side. `choose.py` decides from the sizes
how much of each, and in which order. A unit of work is a row block and a group of
panels:

    for unit in blocks x groups                parallel
      for pass over K                          usually one
        pack panels                            unless the first tile packs them
        for swath of tiles in block            one tile, or all of them
          copy the swath's rows of A           if the plan says so
          for panel in group
            for tile in swath
              switch height { h: tile += gemm_f32_h(A rows, panel) }
              last pass: for m, n in tile: out[m, n] = epilogue(tile[m, n])

Products with few columns, or with few rows and a B that is contiguous in K, use lanes
along K instead (`dots.py`). Products without an epilogue whose B stays in cache use
strips of rows (`strips.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

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
    Load,
    LoopFunc,
    LoopValue,
    Role,
    Stmt,
    Store,
    Switch,
    buffer,
)
from pliant.kernels.choose import (
    GROUP,
    SMALL,
    STRIP,
    SWEPT_ROWS,
    THREADS,
    Plan,
    StripCut,
    exceeds,
    share_of,
    unit_grain,
)
from pliant.kernels.dots import DOT_TILE, Dots, dots_kernels
from pliant.kernels.micro import (
    far_kernels,
    far_name,
    keeping_kernels,
    panel_kernels,
    panel_name,
    row_strides,
    tap_kernels,
    tap_name,
)
from pliant.kernels.packing import Packing, pack_rows, row_room, unflatten_unit
from pliant.kernels.product import (
    Address,
    Around,
    Cuts,
    Direct,
    Product,
    Prologue,
    RowsAt,
    TileAt,
)
from pliant.kernels.strips import (
    Panels,
    Strips,
    has_strips,
    panels_before,
)
from pliant.kernels.tiles import VECTORS, Tile, gemm_tile
from pliant.machine.target import Target
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

# Prefetch distance, in steps of K, of a panel that is read in place and packed.
AHEAD = 16
PAGE = 4096  # bytes
# Steps of K; if rows of A are shorter, the next ones are in flight anyway.
SHORT_ROW = 48
NEAR_STEPS = 64  # prefetch distance, in steps of K, of a panel that is read once


@dataclass(frozen=True, slots=True)
class Gemm:
    """A product, and the buffers it uses; None where there is none."""

    dots: Stmt | None  # the product with lanes along K
    planned: Stmt | None  # the product with panels, cut as the plan's arguments say
    strips: Strips | None
    a: Buffer | None
    packed: Buffer | None  # a constant's panels
    rows: Buffer | None  # columns of B, packed as rows along K
    b: Buffer | None  # B in place
    work: tuple[Buffer, ...]  # scratch of every worker
    helpers: tuple[LoopFunc, ...]


# Calls the planned product with the plan's arguments.
PlannedCall = Callable[[dict[str, Expr]], Stmt]
# Calls a kernel. The arguments: B's address and stride along K, the address and stride
# to prefetch, where to write the packed panel, whether rows of A come from beyond L2.
PanelCall = Callable[[Address, Expr, Address, Expr, Address | None, bool], Stmt]


class _Builder:
    """Emits one product according to its plan."""

    def __init__(
        self, spec: Product, plan: Plan, target: Target, around: Around, cuts: Cuts
    ) -> None:
        self.p, self.around, self.target, self.cuts = spec, around, target, cuts
        self.plan = plan.parameters()
        self.tile = gemm_tile(spec.dtype, target)
        p, tile, dtype = spec, self.tile, spec.dtype
        self.a = buffer("a", dtype, (*p.batch, p.m, p.k), Role.IN, p.a_strides)
        self.several = plan.passes != as_expr(1)
        self.constant = self.b = None
        if p.b_strides is None:
            panels = (ceildiv(p.n, tile.NR), p.k, as_expr(tile.NR))
            self.constant = buffer("packed", p.b_dtype, p.b_batch + panels, Role.IN)
        else:
            self.b = p.right.buffer(p.b_dtype)
        # Whether the kernels of a block's first tile pack the panels as they read them.
        self.keeps = (
            self.b is not None
            and self.b.dtype is dtype
            and self.b.strides[-1] == as_expr(1)
            and plan.packed != as_expr(0)
        )
        self.dot_rows = self.row_buffer()
        even = mod(p.n, tile.NR) == as_expr(0)
        whole = self.constant is not None and even and not self.several
        self.direct = around.direct if whole else None
        self.copy = None if plan.copied == as_expr(0) else self.copy_buffer()
        cells = minimum(ceildiv(p.n, tile.NR) * minimum(p.k, tile.depth), tile.cells)
        self.packing = None
        if self.b is not None:
            self.packing = Packing.of(self.b, dtype, tile)
        self.panel = buffer("panels", dtype, (THREADS, cells, tile.NR), Role.WORK)
        rows = as_expr(max(tile.MR, DOT_TILE if self.dot_rows is not None else 0))
        if self.several:
            block = minimum(p.m, SWEPT_ROWS if p.alone else tile.deep_rows)
            kept = as_expr(1) if p.alone else minimum(ceildiv(p.n, tile.NR), GROUP)
            rows = maximum(rows, kept * block)
        self.scratch = buffer("scratch", dtype, (THREADS, rows, tile.NR), Role.WORK)

    def row_buffer(self) -> Buffer | None:
        """The buffer of B's rows along K: packed before the product, or B itself."""
        p = self.p
        if self.plan.dot == as_expr(0) or self.b is None:
            return None
        if self.b.strides[-2] == as_expr(1):
            return self.b
        shape = (*p.b_batch, row_room(p.n, self.plan), p.k)
        return buffer("rows", p.dtype, shape, Role.OUT)

    @property
    def a_transposed(self) -> bool:
        """Whether A is transposed; computed rows never are."""
        return not self.p.computed and self.p.a_strides[-2] == as_expr(1)

    def copy_buffer(self) -> Buffer:
        """The copy of A by rows, or by steps of K if A is transposed."""
        p, tile = self.p, self.tile
        # The stride is a power of two plus one vector, so that rows use different cache
        # sets.
        if self.a_transposed:
            depth, side = minimum(p.k, tile.depth), tile.deep_rows + tile.lanes
            return buffer("copy", p.dtype, (THREADS, depth, side), Role.WORK)
        rows, row = minimum(p.m, tile.deep_rows), minimum(p.k, tile.depth) + tile.lanes
        return buffer("copy", p.dtype, (THREADS, rows, row), Role.WORK)

    def b_at(self, batch: Sequence[Expr]) -> tuple[Expr, ...]:
        return tuple(
            as_expr(0) if dim == as_expr(1) else i
            for dim, i in zip(self.p.b_batch, batch, strict=True)
        )

    # ---- panels

    def panel_units(self) -> Stmt:
        p, plan, tile = self.p, self.plan, self.tile
        units = (*p.batch, plan.blocks, plan.groups)
        placed, at = unflatten_unit(sym("_u"), units)
        batch, block, group = at[:-2], at[-2], at[-1]
        first, last = share_of(ceildiv(p.n, tile.NR), group, plan.groups)
        rows = minimum(plan.rows, p.m - block * plan.rows)
        unit = Block(
            (
                *placed,
                Let("_row", Index(block * plan.rows)),
                # Rounding up may leave no rows, or a negative number, for the last
                # block.
                Let("_here", Index(maximum(rows, 0))),
                Let("_tiles", Index(ceildiv(sym("_here"), tile.MR))),
                *self.tile_heights(),
                *self.fused(),
                Let("_first", Index(first)),
                Let("_last", Index(last)),
                *self.far(),
                self.passes(batch),
            )
        )
        grain = unit_grain(plan.rows, plan.panels * tile.NR, p.k)
        return For("_u", as_expr(0), product(units), unit, Kind.PARALLEL, grain=grain)

    def tile_heights(self) -> tuple[Stmt, ...]:
        """Tiles as even as possible: the first `_taller` have one row more."""
        here, tiles, short = (sym(name) for name in ("_here", "_tiles", "_short"))
        if self.cuts.even:
            least, taller = floordiv(here, maximum(tiles, 1)), here - short * tiles
        else:
            least, taller = as_expr(self.tile.MR), as_expr(0)
        return Let("_short", Index(least)), Let("_taller", Index(taller))

    def fused(self) -> tuple[Stmt, ...]:
        """1 if the first tile's kernels pack panels; low tiles cannot."""
        if not self.keeps:
            return ()
        height = minimum(self.first_row(as_expr(1)), sym("_here"))
        tall = exceeds(height, self.tile.keeping - 1)
        return (Let("_fused", Index(self.plan.packed * tall)),)

    def passes(self, batch: tuple[Expr, ...]) -> Stmt:
        begin = sym("_begin")
        body: list[Stmt] = [
            Let("_begin", Index(sym("_pass") * self.plan.depth)),
            Let("_steps", Index(minimum(self.plan.depth, self.p.k - begin))),
        ]
        if self.b is not None:
            body.append(self.pack_panels(self.b, batch))
        body.append(self.swaths(batch))
        return For("_pass", as_expr(0), self.plan.passes, Block(tuple(body)))

    def first_row(self, tile: Expr) -> Expr:
        """The first row of a tile, in its block."""
        return tile * sym("_short") + minimum(tile, sym("_taller"))

    def swaths(self, batch: tuple[Expr, ...]) -> Stmt:
        """Loops over swaths: tiles that one panel multiplies before the next panel."""
        tiles, first, end = sym("_tiles"), sym("_top"), sym("_bottom")
        below = minimum(self.first_row(end), sym("_here"))
        lets = {
            "_bottom": minimum(first + self.plan.swath, tiles),
            "_swath_row": self.first_row(first),
            "_swath_rows": below - sym("_swath_row"),
        }
        body: list[Stmt] = [Let(name, Index(value)) for name, value in lets.items()]
        if self.copy is not None:
            body.append(If(_is_set(self.plan.copied), self.copy_rows(self.copy, batch)))
        body.append(self.panels(batch))
        count = ceildiv(tiles, maximum(self.plan.swath, 1))
        top = Let("_top", Index(sym("_s") * self.plan.swath))
        return For("_s", as_expr(0), count, Block((top, *body)))

    def copy_rows(self, copy: Buffer, batch: tuple[Expr, ...]) -> Stmt:
        """Copies this pass's part of the swath's rows of A side by side."""
        first, here = sym("_row") + sym("_swath_row"), sym("_swath_rows")
        if self.around.prologue is not None:
            at = RowsAt(batch, first, sym("_begin"), here, sym("_steps"), copy)
            if self.direct is not None:
                return self.copy_tiles(at, self.around.prologue)
            return Block(tuple(self.around.prologue(at)))
        i, k = sym("_i"), sym("_k")
        value = Load(self.a, (*batch, first + i, sym("_begin") + k))
        if self.a_transposed:
            store = Store(copy, (sym(WORKER), k, i), value)
            rows = For("_i", as_expr(0), here, store, Kind.VECTOR)
            return For("_k", as_expr(0), sym("_steps"), rows)
        store = Store(copy, (sym(WORKER), i, k), value)
        steps = For("_k", as_expr(0), sym("_steps"), store, Kind.VECTOR)
        return For("_i", as_expr(0), here, steps)

    def copy_tiles(self, at: RowsAt, prologue: Prologue) -> Stmt:
        """Copies the rows of those tiles that are not read in place."""
        above = sym("_start") - sym("_swath_row")
        tile = replace(at, row=at.row + above, rows=sym("_height"), first=above)
        wanted = Binary("eq", Index(sym("_inside")), Index(as_expr(0)))
        body = (*self.tile_lets(), If(wanted, Block(tuple(prologue(tile)))))
        return For("_t", sym("_top"), sym("_bottom"), Block(body))

    def tile_lets(self) -> tuple[Stmt, ...]:
        """Where tile `_t` starts in its block, how high it is, where its rows are."""
        start = self.first_row(sym("_t"))
        height = sym("_short") + exceeds(sym("_taller"), sym("_t"))
        if not self.cuts.even:
            height = minimum(height, sym("_here") - start)
        lets = Let("_start", Index(start)), Let("_height", Index(height))
        if self.direct is None:
            return lets
        tall = exceeds(sym("_height"), self.tile.tall[0] - 1)
        inside = self.direct.inside(sym("_row") + sym("_start"), sym("_height"))
        return (*lets, Let("_inside", Index(tall * inside)))

    def panels(self, batch: tuple[Expr, ...]) -> Stmt:
        p, tile = self.p, self.tile
        panel, column = sym("_p"), sym("_p") * tile.NR
        even = mod(p.n, tile.NR) == as_expr(0)
        columns = as_expr(tile.NR) if even else minimum(tile.NR, p.n - column)
        # In a single pass a tile is finished at once, so all tiles use the same scratch
        # rows.
        several = minimum(self.plan.passes - 1, 1) if self.several else as_expr(0)
        before = as_expr(0) if p.alone else (panel - sym("_first")) * self.plan.rows
        place = several * (before + sym("_start"))
        tile_done = Block(
            (
                *self.tile_lets(),
                Let("_place", Index(place)),
                self.finished(batch, column, columns),
            )
        )
        tiles: Stmt = For("_t", sym("_top"), sym("_bottom"), tile_done)
        if self.b is not None:
            partial = exceeds(panel + 1, floordiv(p.n, tile.NR))
            packs = Index(maximum(self.plan.packed, partial))
            tiles = Block((Let("_packs", packs), tiles))
        return For("_p", sym("_first"), sym("_last"), tiles)

    def finished(self, batch: tuple[Expr, ...], column: Expr, columns: Expr) -> Stmt:
        """Computes one tile and, in the last pass, writes it.

        Whole panels of a product without an epilogue are stored in place. Other tiles
        go to scratch, where the epilogue reads them.
        """
        whole = as_expr(self.tile.NR)
        row = sym("_row") + sym("_start")

        kept = (self.scratch, (sym(WORKER), sym("_place"), as_expr(0)))

        def through(columns: Expr) -> Stmt:
            place = sym("_place") if self.several else as_expr(0)
            size = (sym("_height"), columns)
            done = TileAt(batch, row, column, *size, self.scratch, place)
            end: Stmt = Block(tuple(self.around.epilogue(done)))
            if self.several:
                last = Binary("ge", Index(sym("_pass") + 1), Index(self.plan.passes))
                end = If(last, end)
            return Block((self.multiply(batch, columns, kept, whole), end))

        plain = self.around.plain
        if plain is None:
            full = through(whole)
        else:
            place = plain(batch, row, column)
            full = self.multiply(batch, whole, place, self.p.n)
        if columns == whole:
            return full
        is_whole = Binary("ge", Index(columns), Index(whole))
        return If(is_whole, full, through(columns))

    def cell(self, panel: Expr) -> Expr:
        """Where a packed panel of the group starts; a partial one may be alone."""
        return self.plan.packed * (panel - sym("_first")) * self.plan.depth

    def pack_panels(self, b: Buffer, batch: tuple[Expr, ...]) -> Stmt:
        """Packs this pass's part of the group's whole panels, and of a partial one."""
        p, nr, packing = self.p, self.tile.NR, self.packing
        assert packing is not None
        first, last, begin = sym("_first"), sym("_last"), sym("_begin")
        whole = minimum(last, floordiv(p.n, nr))
        at, steps, strides = self.b_at(batch), sym("_steps"), b.strides[-2:]

        def ends(panel: Expr) -> tuple[Address, Address]:
            kept = (sym(WORKER), self.cell(panel), as_expr(0))
            return (b, (*at, begin, panel * nr)), (self.panel, kept)

        sizes = (steps, whole - first, *strides, self.plan.depth)
        several = Call(packing.whole, sizes, ends(first))
        columns = (steps, p.n - whole * nr, *strides)
        partial = Call(packing.partial, columns, ends(whole))
        wanted = self.plan.packed
        if self.keeps:
            wanted = wanted * (1 - sym("_fused"))
        rest = If(Binary("lt", Index(whole), Index(last)), partial)
        return Block((If(_is_set(wanted), several), rest))

    def multiply(
        self, batch: tuple[Expr, ...], columns: Expr, result: Address, c_row: Expr
    ) -> Stmt:
        """Calls the micro-kernel of this tile's height and width, as the plan says."""
        row = sym("_row") + sym("_start")

        def on(a: Address, strides: Sequence[Expr]) -> Stmt:
            left = (sym("_steps"), *row_strides(*strides))
            return self.right(
                batch,
                columns,
                lambda b, step, coming, ahead, kept, far: self.heights(
                    (*left, step, c_row, sym("_adding"), ahead),
                    (a, b, coming, result),
                    columns,
                    kept,
                    far,
                ),
            )

        always = self.plan.copied == as_expr(1)
        call: Stmt | None = None
        if not always:
            there = (self.a, (*batch, row, sym("_begin")))
            call = on(there, self.a.strides[-2:])
        if self.copy is not None:
            order = -1 if self.a_transposed else 1
            at = (sym("_start") - sym("_swath_row"), as_expr(0))[::order]
            copied = (self.copy, (sym(WORKER), *at))
            beside = on(copied, self.copy.strides[-2:][::order])
            wanted = _is_set(self.plan.copied)
            call = beside if call is None else If(wanted, beside, call)
        assert call is not None
        if self.direct is not None:
            taps = self.taps(self.direct, batch, result, c_row)
            call = If(_is_set(sym("_inside")), taps, call)
        adding = minimum(sym("_pass"), 1) if self.several else as_expr(0)
        return Block((Let("_adding", Index(adding)), call))

    def taps(
        self, direct: Direct, batch: tuple[Expr, ...], result: Address, c_row: Expr
    ) -> Stmt:
        """Calls the micro-kernel of this tile on rows in place; prefetches the next."""
        assert self.constant is not None
        row, none = sym("_row") + sym("_start"), as_expr(0)
        strides = row_strides(direct.row, as_expr(1))[:2]
        sizes = (as_expr(direct.run), direct.taps, direct.tap, *strides, c_row)
        panel = (self.constant, (*self.b_at(batch), sym("_p"), none, none))
        left, index = direct.place(row + sym("_height"), direct.taps - 1)
        share = (sym("_p") - sym("_first")) * self.p.k
        coming = (left, (*index[:-1], index[-1] + share))
        operands = (direct.place(row, none), panel, coming, result)
        of, tile = self.p.elements, self.tile
        names = {h: tap_name(of, h, tile) for h in tile.tall}
        return _calls(sym("_height"), names, sizes, operands)

    def right(self, batch: tuple[Expr, ...], columns: Expr, call: PanelCall) -> Stmt:
        """The call with a constant's panel, a panel just packed, or B in place."""
        tile, panel, begin = self.tile, sym("_p"), sym("_begin")
        b_at, none = self.b_at(batch), as_expr(0)
        nr = as_expr(tile.NR)
        if self.constant is not None:
            b: Address = (self.constant, (*b_at, panel, begin, none))
            near = call(b, nr, *self.constant_next(self.constant, b_at), None, False)
            if not self.streams or columns != nr:
                return near
            far = call(b, nr, *self.rows_next(batch), None, True)
            return If(_is_set(sym("_far")), far, near)
        assert self.b is not None
        step, place = self.b.strides[-2], (*b_at, begin, panel * tile.NR)
        kept = (self.panel, (sym(WORKER), self.cell(panel), none))
        packed = call(kept, nr, *self.packed_next(self.b, b_at, kept), None, False)
        if self.keeps and columns == nr:
            coming = (self.b, (*b_at, begin + AHEAD, panel * tile.NR))
            keeping = call((self.b, place), step, coming, step, kept, False)
            first = Binary("lt", Index(sym("_t")), Index(sym("_fused")))
            packed = If(first, keeping, packed)
        if self.plan.packed == as_expr(1):
            return packed
        b = (self.b, place)
        # Prefetch what the next pass reads of the panel: the first tile takes one line
        # of each row, the second tile the other lines.
        lane = minimum(sym("_t"), VECTORS - 1) * tile.lanes
        row = begin + self.plan.depth
        coming = (self.b, (*b_at, row, panel * tile.NR + lane))
        there = call(b, step, coming, step, None, False)
        return If(_is_set(sym("_packs")), packed, there)

    def constant_next(
        self, packed: Buffer, at: tuple[Expr, ...]
    ) -> tuple[Address, Expr]:
        """What to prefetch of a constant: each tile prefetches its share.

        That is a share of the next panel, or, where tiles pass over a group of panels,
        of the same panel in the next pass or group. A panel that is read only once is
        prefetched `NEAR_STEPS` ahead instead.
        """
        p, tiles, begin = self.plan, maximum(sym("_tiles"), 1), sym("_begin")
        ahead = ceildiv(self.tile.NR, tiles)
        share = floordiv(sym("_t") * sym("_steps") * ahead, self.tile.NR)
        more, swept = exceeds(tiles, 1), exceeds(tiles, p.swath)
        last = swept * exceeds(sym("_pass") + 2, p.passes)
        row = begin + more * share + (1 - more) * NEAR_STEPS
        row = row + swept * p.depth - last * (begin + p.depth)
        panel = sym("_p") + more * (1 - swept) + last * p.panels
        return (packed, (*at, panel, row, as_expr(0))), ahead

    @property
    def streams(self) -> bool:
        """Whether rows of A may stream in from beyond L2 while a constant stays in L2.

        Only tall kernels prefetch rows, so tiles have to be even.
        """
        p = self.p
        return (
            self.cuts.even
            and self.constant is not None
            and self.constant.dtype is self.a.dtype
            and self.plan.copied == as_expr(0)
            and exceeds(p.k, SHORT_ROW) == as_expr(1)
            and self.a.strides[-2:] == (p.k, as_expr(1))
            and self.held != as_expr(0)
        )

    @property
    def held(self) -> Expr:
        """1 if all of B stays in L2."""
        p, tile = self.p, self.tile
        return 1 - exceeds(p.n * p.k, floordiv(tile.near, 2 * tile.bytes))

    def far(self) -> tuple[Stmt, ...]:
        """1 if rows of A do not stay in L2, B does, and tiles are tall."""
        if not self.streams:
            return ()
        p, tile = self.p, self.tile
        far = exceeds(p.m * p.k, floordiv(tile.near, tile.bytes))
        whole = 1 - exceeds(self.plan.passes, 1)
        tall = exceeds(sym("_short"), tile.tall[0] - 1)
        each = ceildiv(tile.MR, maximum(sym("_last") - sym("_first"), 1))
        return (
            Let("_far", Index(self.held * far * whole * tall)),
            Let("_each", Index(each)),
        )

    def rows_next(self, batch: tuple[Expr, ...]) -> tuple[Address, Expr]:
        """The rows of A of the next tile; each panel prefetches a share of them.

        Rows follow each other in memory, but a tile reads all of its rows at once, a
        pattern that no hardware prefetcher follows.
        """
        p, height = self.plan, sym("_height")
        swept = exceeds(sym("_tiles"), p.swath)
        ahead = sym("_each")
        further = p.rows + swept * (height - p.rows)
        row = sym("_row") + sym("_start") + further
        share = (sym("_p") - sym("_first")) * sym("_steps") * ahead
        return (self.a, (*batch, row, share)), ahead

    def packed_next(
        self, b: Buffer, at: tuple[Expr, ...], here: Address
    ) -> tuple[Address, Expr]:
        """What is packed next; the last tiles prefetch one line of each row each."""
        tile, panel, p = self.tile, sym("_p"), self.plan
        if b.dtype is not self.p.dtype or b.strides[-1] != as_expr(1):
            return here, as_expr(0)
        last = exceeds(sym("_pass") + 2, p.passes)
        left = sym("_tiles") - 1 - sym("_t")
        row = (1 - last) * (sym("_begin") + p.depth)
        column = (panel + last * p.panels) * tile.NR + left * tile.lanes
        step = b.strides[-2]
        # Rows that are whole pages apart would map to a few cache sets.
        apart = minimum(mod(step, PAGE // tile.bytes), 1)
        wanted = apart * (1 - exceeds(left, VECTORS - 1))
        return (b, (*at, row, column)), wanted * step

    def heights(
        self,
        sizes: tuple[Expr, ...],
        operands: tuple[Address, ...],
        columns: Expr,
        kept: Address | None,
        far: bool,
    ) -> Stmt:
        """Calls the kernel of this height; for few columns, the narrow one."""
        tile, of = self.tile, self.p.elements
        names: dict[int, str] = {}
        if far:
            names = {h: far_name(of, h, tile) for h in tile.tall}
        elif kept is not None:
            operands = (*operands, kept)
            heights = range(tile.keeping, tile.MR + 1)
            names = {h: panel_name(of, h, tile.NR, True) for h in heights}
        if names:
            return _calls(sym("_height"), names, sizes, operands)
        widths = set(range(1, VECTORS + 1))
        n = columns if columns.is_const else self.p.n
        if n.is_const:
            last = -(-(n.value % tile.NR) // tile.lanes)
            widths = {last, VECTORS} - {0} if n.value > tile.NR else {last or VECTORS}
        for vectors in sorted(widths):
            for height in range(1, tile.MR + 1):
                name = panel_name(of, height, vectors * tile.lanes)
                names[(vectors - 1) * tile.MR + height] = name
        wide = ceildiv(columns, tile.lanes) - 1
        number = wide * tile.MR + sym("_height")
        return _calls(number, names, sizes, operands)

    # ---- strips

    def strips(self) -> Strips | None:
        """The product by strips of rows, if strips can compute it."""
        plain, b = self.around.plain, self.b
        adjacent = b is None or b.strides[-1] == as_expr(1)
        if plain is None or not has_strips(self.p, adjacent, self.target):
            return None
        nr, none = as_expr(self.tile.NR), as_expr(0)

        def right(
            batch: tuple[Expr, ...], step: Expr, first: Expr, columns: Expr
        ) -> Panels:
            at, last = self.b_at(batch), first + panels_before(columns, self.tile)
            if self.constant is not None:
                packed = self.constant
                begin, end = ((packed, (*at, p, step, none)) for p in (first, last))
                return Panels(begin, end, nr, self.p.k * nr)
            assert b is not None
            begin, end = ((b, (*at, step, p * nr)) for p in (first, last))
            return Panels(begin, end, b.strides[-2], nr)

        return Strips(self.p, self.tile, self.a, right, plain)

    # ---- lanes along K

    def dots(self) -> Stmt | None:
        """The product with lanes along K, if the plan allows it."""
        rows = self.dot_rows
        if rows is None:
            return None
        b, around = self.b, self.around

        def along(p: Product, rows: Buffer) -> Stmt:
            given = (self.a, rows, rows is b, self.b_at, around, self.scratch)
            return Dots(p, self.tile, *given).units()

        if b is None or rows is b:
            return along(self.p, rows)
        packed = Block((pack_rows(b, rows), along(self.p, rows)))
        if b.strides[-2] != self.p.n:
            return packed
        single = Binary("eq", Index(self.p.n), Index(as_expr(1)))
        return If(single, along(replace(self.p, n=as_expr(1)), b), packed)


def _calls(
    number: Expr,
    names: Mapping[int, str],
    sizes: tuple[Expr, ...],
    operands: tuple[Address, ...],
) -> Stmt:
    """Calls the kernel of this number; all take the same arguments."""
    cases = ((case, Call(name, sizes, operands)) for case, name in names.items())
    return Switch(number, tuple(cases))


def _is_set(flag: Expr) -> LoopValue:
    return Binary("gt", Index(flag), Index(as_expr(0)))


def gemm(
    spec: Product,
    plan: Plan,
    target: Target,
    around: Around,
    cuts: Cuts,
) -> Gemm:
    """The product as planned, and by strips if they can compute it."""
    builder = _Builder(spec, plan, target, around, cuts)
    always_dot = plan.dot == as_expr(1)
    planned = None
    helpers: tuple[LoopFunc, ...] = ()
    if not always_dot:
        planned = builder.panel_units()
        helpers += panel_kernels(spec.elements, target)
        helpers += builder.packing.kernels() if builder.packing is not None else ()
        helpers += keeping_kernels(spec.elements, target) if builder.keeps else ()
        helpers += tap_kernels(spec.elements, target) if builder.direct else ()
        helpers += far_kernels(spec.elements, target) if builder.streams else ()
    dots = builder.dots()
    if dots is not None:
        helpers += dots_kernels(spec.dtype)
    by_strips = builder.strips() if cuts.strips and not always_dot else None
    if by_strips is not None:
        helpers += by_strips.kernels()
    work = [builder.scratch]
    if not always_dot:
        work += [] if builder.copy is None else [builder.copy]
        work += [] if builder.b is None else [builder.panel]
    return Gemm(
        dots,
        planned,
        by_strips,
        None if spec.computed else builder.a,
        builder.constant,
        None if builder.dot_rows is builder.b else builder.dot_rows,
        builder.b,
        tuple(work),
        helpers,
    )


def call_planned(
    spec: Product,
    plan: Plan,
    tile: Tile,
    by_strips: tuple[Strips, StripCut] | None,
    planned: PlannedCall,
) -> Stmt:
    """Evaluates the plan and calls with it; a small product is not planned."""
    full: Stmt = Block(
        (
            *(Let(name, Index(value)) for name, value in plan.lets),
            planned(plan.arguments()),
        )
    )
    if by_strips is not None:
        strips, cut = by_strips
        uncut = strips.whole()
        full = If(_is_set(cut.wanted), strips.units(cut), full)
    elif not plan.arguments():
        return full
    else:
        uncut = planned(plan.uncut(spec.m, spec.n, spec.k, tile))
    small: LoopValue | None = None
    for size, most in small_sizes(spec, tile, by_strips is not None):
        below = Binary("le", Index(size), Index(as_expr(most)))
        small = below if small is None else Binary("logical_and", small, below)
    assert small is not None
    return If(small, uncut, full)


def small_sizes(
    spec: Product, tile: Tile, strips: bool
) -> tuple[tuple[Expr, int], ...]:
    """The sizes, and their upper bounds in a product that is not cut."""
    # With K = 1 writing results takes most of the time, so half as many count as small.
    work = product((*spec.batch, spec.m, spec.n, maximum(spec.k, 2)))
    if strips:
        return ((work, SMALL),)
    steps = tile.depth if spec.b_strides is None else 2 * STRIP
    return ((work, SMALL), (spec.m, tile.deep_rows), (spec.k, steps))
