"""Plans a matrix product of M x N x K from its sizes, at the call.

Every choice is an integer expression of M, N, K and the number of threads. The compiled
code evaluates it in a few dozen nanoseconds, `explain` prints it for sizes of interest,
and nothing is compiled per shape. The thresholds below were set by hand from
measurements of `bench.plans` on machines with AVX-512 and AVX2. The cost model counts
cycles per step of K and bytes moved:

kernel    A panel kernel of V vectors takes max(MR*V / 2, (MR + V) / 2) cycles a step
          and computes N rounded up to whole vectors. With few columns most lanes of a
          panel are idle. Lanes along K are cheaper then, if K fills them.
packing   A B that is not constant is packed if there are enough rows to pay for it; a
          large B from two tiles on. One group of panels is packed at a time, each panel
          by the kernel of the first tile that reads it. Few rows read B in place. If B
          is beyond L2, they read it along its rows: each pass takes a few steps of K
          over all columns, so that memory is read sequentially.
depth     K is cut beyond `depth` steps if there are enough rows to reuse a panel. This
          also makes sums over a long K more precise. Rows of A that are not contiguous
          in K are copied side by side.
order     Either panels or tiles of rows are the outer loop. If the rows fit in L2 they
          stay there, and one panel after the other passes over them. Otherwise a group
          of panels stays in L2, and the tiles of rows pass over it. Rows of C are then
          written along their length, and B is packed once for all rows.
blocks    Blocks of rows have the size that the order asks for, and are even. There are
          more of them where threads would otherwise be idle or share rows. Where rows
          of A are computed as they are copied, the copy passes over all panels while B
          stays in cache.
rows      A block's rows are cut into as few tiles as possible, of even height.
threads   A product below SHARED_WORK does not pay for waking another thread. Groups of
          panels are even. If there are several passes, each thread has two groups, so
          that no two threads write to the same cache line at the same time.

Evaluating all this takes tens of nanoseconds. A product that takes no longer than that
is not cut: it is one block and one group, in one pass. Products that strips of rows can
compute (`strips.py`) use them, unless the product is large enough for panels to pay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pliant.kernels.tiles import Tile
from pliant.sym import Expr, as_expr, ceildiv, floordiv, maximum, minimum, sym

THREADS = sym("threads")
DOT_ROWS = 4  # up to this many rows, a transposed B is read in place
WHOLE_ROWS = 3  # up to this many tiles of rows, K of a constant B is not cut for L2
FEW_TILES = 2  # this many tiles of rows may read a B of `Tile.near` bytes in place
MOST_TILES = 6  # more tiles of rows than this count as this many in that test
THIN = 64  # up to this K, writing C is most of the memory traffic
THIN_PANELS = 4  # fewest panels for which rows of C are written end to end
# Most rows of a block that panels pass over: each may be on its own page of C.
MOST_ROWS = 512
# Most rows of a block that passes over panels, which are packed once per block.
SWEPT_ROWS = 1024
# Steps of K per pass over a B that is not constant; twice that for many rows.
STRIP = 128
# Steps of K per pass if few rows read a B beyond L2; more rows take up to 4 times that.
FEW_STEPS = 16
MOST_PASSES = 256  # most passes over a B that is read from beyond L2
NEAR_COLUMNS = 256  # up to this N, the rows of B count as close to each other in memory
NEAR_STEPS = 48  # up to this K, B has few enough rows to be read in place by many tiles
MANY_TILES = 9  # with more tiles of rows than this, B is packed if K > STRIP
GROUP = 16  # panels that share a copy of A's rows, or a strip of B
# Fewest panels of a group: fewer do not pay for fetching a tile of rows.
FEWEST_PANELS = 3
UNIT_WORK = 1 << 18  # multiply-adds that pay for a thread: about ten microseconds
SHARED_WORK = 1 << 19  # the least work of a product that two threads share
READ_ROWS = 8  # with fewer rows, reading B takes as long as multiplying 8 rows
WRITE_STEPS = 8  # writing a result takes as long as this many steps of K
MOST_PANELS = 4  # most panels that a strip holds in registers
FAR_STEPS = 32  # steps of K per pass of a strip over a B that no L2 holds
LONG_SUM = 1024  # most steps of K in one sum: a longer one loses precision
FAR_PASSES = 128  # most passes of a strip: adding up more partial sums loses precision
LOW_STEPS = 10  # up to this K, strips use low tiles (`Tile.low`)
ALONE_STEPS = 5  # up to this K, strips are single rows if L2 does not hold the results
LONG_ROW = 64  # a row with more results than this is long
FEW_ELEMENTS = 10 << 10  # this many elements stay in L1


SMALL = 1 << 16  # a product of at most this many multiply-adds is not cut
FIELDS = (
    *("packed", "copied", "passes", "depth"),
    *("blocks", "rows", "groups", "panels", "swath"),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """One way to compute a product.

    Every field is an expression of the sizes and of the names that `lets` gives to
    expressions of the sizes and of earlier names.
    """

    lets: tuple[tuple[str, Expr], ...]
    # 1: lanes along K; the other fields are for panels. Depends on sizes only.
    dot: Expr
    packed: Expr  # 1: panels of B are packed before they are read; 0: read in place
    copied: Expr  # 1: a block's rows of A are copied side by side
    passes: Expr  # number of passes over K
    depth: Expr  # steps of K in a pass
    blocks: Expr  # number of row blocks
    rows: Expr  # rows of a block
    groups: Expr  # number of groups of panels
    panels: Expr  # panels of a group
    swath: Expr  # tiles of rows that one panel multiplies before the next panel starts

    def at(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """The fields as numbers."""
        known = dict(sizes)
        for name, value in self.lets:
            known[name] = value.evaluate(known)
        values = ((name, getattr(self, name)) for name in ("dot", *FIELDS))
        return {name: value.evaluate(known) for name, value in values}

    def arguments(self) -> dict[str, Expr]:
        """The fields not known at compile time, by their names in `parameters`."""
        values = ((f"_{name}", getattr(self, name)) for name in FIELDS)
        return {name: value for name, value in values if not value.is_const}

    def parameters(self) -> Plan:
        """The plan inside a function that takes those arguments as parameters."""
        names = self.arguments()
        given = {name: f"_{name}" for name in FIELDS if f"_{name}" in names}
        return replace(self, lets=(), **{n: sym(s) for n, s in given.items()})

    def uncut(self, m: Expr, n: Expr, k: Expr, tile: Tile) -> dict[str, Expr]:
        """Arguments for a product that is too small to be cut."""
        one, none = as_expr(1), as_expr(0)
        panels = maximum(ceildiv(n, tile.NR), 1)
        tiles = ceildiv(m, tile.MR)
        uncut = (none, none, one, k, one, m, one, panels, tiles)
        values = dict(zip(FIELDS, uncut, strict=True))
        return {name: values[name[1:]] for name in self.arguments()}


class _Lets:
    """Names expressions that are not constant, so that each is evaluated once."""

    def __init__(self) -> None:
        self.made: list[tuple[str, Expr]] = []

    def __call__(self, name: str, value: Expr) -> Expr:
        if value.is_const:
            return value
        self.made.append((name, value))
        return sym(name)


@dataclass(frozen=True, slots=True)
class Choice:
    """The properties of a product, besides its sizes, that the choice depends on."""

    constant: bool  # B is a constant, packed ahead
    adjacent: bool  # B's columns lie side by side: panels can be read in place
    rows_in_k: bool  # both operands are adjacent in K: lanes along K need no copy
    packs_rows: bool  # A is contiguous in K: a few columns of B can be packed to match
    steps: bool  # A's rows are not contiguous in K: its steps of K are
    computed: bool  # A is computed as its rows are copied
    alone: bool  # nothing follows the product: partial sums can be kept in the result
    column: bool = False  # a single column of B is contiguous in K

    @property
    def copies(self) -> bool:
        """Whether rows of A may be copied side by side."""
        return self.computed or self.steps


def choose(m: Expr, n: Expr, k: Expr, outer: Expr, tile: Tile, what: Choice) -> Plan:
    """The plan for one product of `outer` batches."""
    let = _Lets()
    panels = let("_all", maximum(ceildiv(n, tile.NR), 1))
    few_rows = WHOLE_ROWS * tile.MR if what.constant else 7 * tile.MR // 4
    many = let("_many", exceeds(m, few_rows))
    packed, passes = _packing(let, m, n, k, many, tile, what)
    cut = let("_cut", minimum(passes - 1, 1))
    depth = let("_depth", ceildiv(k, passes))
    held = 1 - exceeds(n * k, floordiv(tile.near, 2 * tile.bytes))
    wide = exceeds(panels, THIN_PANELS - 1)
    thin = (1 - exceeds(k, THIN)) * held * wide
    thin = let("_thin", thin if what.constant or what.adjacent else as_expr(0))
    # The number of panels for which one pass's reads stay in L2.
    width = floordiv(tile.cells, maximum(depth, 1))
    fewest = FEWEST_PANELS if what.constant else 1
    width = let("_width", maximum(width - cut * maximum(width - GROUP, 0), fewest))
    copied, swath = as_expr(0), ceildiv(m, tile.MR)
    sweep, tall = many * packed, as_expr(0)
    if what.computed:
        copied = as_expr(1)
    elif what.steps:
        copied = let("_copied", exceeds(m, tile.MR))
    if what.constant and not what.copies:
        far = maximum(exceeds(m * k * tile.bytes, tile.near), exceeds(m, MOST_ROWS))
        sweep = many * maximum(cut, thin, far)
    sweep = let("_sweep", sweep)
    if what.constant:
        tall = 1 - exceeds(n, m)
    elif what.adjacent:
        tall = (1 - packed) * (1 - exceeds(n, m))
    # The fewest groups whose panels share a copy of rows, or partial sums.
    together = ceildiv(panels, GROUP)
    # Partial sums are kept in the result.
    if what.adjacent and what.alone and not what.copies:
        strip = floordiv(tile.cells // 2, maximum(depth, 1))
        broad = ceildiv(panels, maximum(strip, 1))
        together = together - (1 - many) * (together - broad)
    # Rows are computed once for all panels, unless partial sums take too much room.
    if what.computed:
        together = 1 + cut * (together - 1)
    together = together - thin * (together - 1)
    shares = let("_shares", thread_shares(cut))
    least = maximum(together, (1 - many) * minimum(shares, panels))
    shared = let("_shared", maximum(cut, copied))
    whole = maximum(shared, thin)
    # The partial sums of a few rows stay in L1 if the rows stay with one panel.
    some = packed * (1 - many)
    groups = (1 - some) * whole * least + maximum(some, 1 - whole) * panels
    swept = ceildiv(ceildiv(panels, width), shares) * shares
    groups = let("_groups", groups + sweep * (minimum(swept, panels) - groups))
    most = (1 - shared) * MOST_ROWS + shared * tile.deep_rows
    if what.computed:  # the rows just copied are in L1, if B is in L2
        thin = let("_few", maximum(thin, (1 - cut) * held))
    most = (1 - thin) * most + thin * 2 * tile.MR
    kept = as_expr(0) if what.alone else cut
    high = SWEPT_ROWS - kept * (SWEPT_ROWS - tile.deep_rows)
    least_blocks = let("_least", ceildiv(m, most + sweep * (high - most)))
    blocks = thread_blocks(m, least_blocks, outer * groups, tall, tile)
    if what.steps:
        swath = minimum(swath, tile.deep_rows // tile.MR)
    else:
        swath = swath - sweep * (swath - 1)
    blocks = let("_blocks", blocks)
    return Plan(
        tuple(let.made),
        dot_choice(m, n, k, tile, what),
        packed,
        copied,
        passes,
        depth,
        blocks,
        ceildiv(m, blocks),
        groups,
        ceildiv(panels, groups),
        swath,
    )


def _packing(
    let: _Lets, m: Expr, n: Expr, k: Expr, many: Expr, tile: Tile, what: Choice
) -> tuple[Expr, Expr]:
    """Whether panels are packed, and the passes over K."""
    if what.constant:
        # The copy of A's rows has room for this many steps.
        deepest = tile.depth if what.copies else 2 * tile.depth
        deep = maximum(ceildiv(k, deepest), 1)
        passes = deep if what.copies else 1 + many * (deep - 1)
        return as_expr(0), let("_passes", passes)
    large = exceeds(m, MANY_TILES * tile.MR)
    longer = many * STRIP + large * (tile.depth // 2 - 2 * STRIP)
    longer = longer + exceeds(m, MOST_ROWS) * (tile.depth - tile.depth // 2)
    if not what.adjacent:
        return as_expr(1), let("_passes", maximum(ceildiv(k, STRIP + longer), 1))
    apart = exceeds(k, STRIP) * maximum(many * exceeds(n, NEAR_COLUMNS), large)
    packed = let("_packed", maximum(apart, many * crowded(m, n, k, tile)))
    # A B beyond L2 is read along its rows, a few rows per pass.
    far = exceeds(n * k * tile.bytes, tile.near) * (1 - packed)
    more = exceeds(m, 3 * tile.MR // 4) + 2 * exceeds(m, 3 * tile.MR // 2)
    # A sum of partial sums: both the passes and their steps are few enough to be
    # precise.
    short = maximum(FEW_STEPS * (1 + more), ceildiv(k, MOST_PASSES))
    steps = STRIP + packed * longer - far * maximum(STRIP - short, 0)
    return packed, let("_passes", maximum(ceildiv(k, steps), 1))


def crowded(m: Expr, n: Expr, k: Expr, tile: Tile) -> Expr:
    """1 if it is too slow that each tile of rows reads B in place from L2.

    The rows of B are far apart: each is on its own page, and vectors straddle cache
    lines. So the more tiles of rows there are, the smaller a B has to be to be read in
    place.
    """
    size = n * k * tile.bytes
    rows = minimum(m, MOST_TILES * tile.MR)
    often = exceeds(size * rows, FEW_TILES * tile.MR * tile.near)
    # A narrow B has its rows close together.
    often = often * exceeds(n, tile.NR + tile.lanes)
    return maximum(exceeds(size, 5 * tile.near // 4), exceeds(k, NEAR_STEPS) * often)


def dot_choice(m: Expr, n: Expr, k: Expr, tile: Tile, what: Choice) -> Expr:
    """1 if lanes go along K.

    Lanes along K take n * (k / (2 * lanes) + 9 / 4) cycles per row: the steps of K, and
    the horizontal sum at the end. Panels take k / 2 cycles per row for n up to a
    vector, minus a part for tiles with fewer loads, and minus more where L1 does not
    hold the rows of B. The vectors of B that a tile loads take k / 2 once. Packing a B
    that is not contiguous in K takes n * k / 2 once; a single column is contiguous
    already. The code compares both sides multiplied by 2 * lanes.
    """
    lanes = tile.lanes
    less = 1 + lanes // 8 + lanes // 4 * exceeds(n * k, FEW_ELEMENTS)
    gain = k * (lanes - less - n) - 9 * lanes // 2 * n
    if what.rows_in_k:
        few_columns = exceeds(gain, 0) * exceeds(k, lanes // 2 - 1)
        if few_columns == as_expr(1):
            return few_columns
        fills = exceeds(k, lanes - 1)
        return maximum(few_columns, fills * (1 - exceeds(m, DOT_ROWS)))
    if not what.packs_rows:
        return as_expr(0)
    packs = exceeds(n, 1) if what.column else as_expr(1)
    fills = exceeds(k, lanes // 2 - 1)
    return fills * exceeds(m * gain + lanes * k, packs * lanes * n * k)


def thread_blocks(m: Expr, least: Expr, units: Expr, tall: Expr, tile: Tile) -> Expr:
    """The number of row blocks: at least `least`, and a fair share for every thread.

    With more rows than columns (`tall`), threads share B rather than A, so that each
    finds the rows that it wrote before in its own cache. Otherwise threads divide the
    panels, unless they would be idle for more than an eighth of the time.
    """
    together = maximum(least * units, 1)
    idle = ceildiv(together, THREADS) * THREADS - together
    uneven = exceeds(8 * idle, together)
    fair = ceildiv(maximum(least, 1), THREADS) * THREADS
    wanted = least + maximum(uneven, tall) * maximum(fair - least, 0)
    return maximum(minimum(wanted, ceildiv(m, tile.MR)), least, 1)


def thread_shares(cut: Expr) -> Expr:
    """The fewest groups of panels that divide evenly; `cut`: there are several passes.

    Two adjacent groups share cache lines of the result. With several passes a thread
    that adds to such a line would wait for its neighbour. Twice as many groups keep the
    neighbour at another group.
    """
    return THREADS * (1 + cut * minimum(THREADS - 1, 1))


@dataclass(frozen=True, slots=True)
class StripCut:
    """How strips of rows divide a product; the fields are as in `Plan`."""

    wanted: Expr  # 1: strips compute the product. Depends on sizes and threads
    lets: tuple[tuple[str, Expr], ...]
    blocks: Expr
    rows: Expr
    groups: Expr
    panels: Expr
    passes: Expr
    depth: Expr

    def at(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """The numbers of blocks, groups and passes, and their sizes."""
        known = dict(sizes)
        for name, value in self.lets:
            known[name] = value.evaluate(known)
        names = ("blocks", "rows", "groups", "panels", "passes", "depth")
        return {name: getattr(self, name).evaluate(known) for name in names}


def choose_strips(m: Expr, n: Expr, k: Expr, tile: Tile, what: Choice) -> StripCut:
    """Strips read all of B for each tile of rows, so B should stay in L2.

    A single tile of rows reads B once, from anywhere. With few rows a strip holds
    several panels in registers, and panels of a constant stream in at memory bandwidth.
    A B that is not constant is read a few of its rows at a time, from end to end.
    """
    let = _Lets()
    size = n * k * tile.bytes
    panels = maximum(ceildiv(n, tile.NR), 1)
    blocks = let("_blocks", maximum(minimum(THREADS, ceildiv(m, tile.MR)), 1))
    together, passes, cut = as_expr(1), as_expr(1), as_expr(0)
    if what.constant:
        few = 1 - exceeds(m, tile.few)
        far = exceeds(size, tile.near)
    else:
        # B does not fit in the L2 caches of all threads beside the rest. Tall tiles are
        # then left to the panel kernels, which prefetch.
        away = exceeds(size, 5 * tile.near // 3 * THREADS)
        few = 1 - exceeds(m, tile.MR - away * (tile.MR - tile.keeping))
        far = crowded(m, n, k, tile)
        near = floordiv(tile.near, 2 * tile.NR * tile.bytes * maximum(k, 1))
        # The strip kernel reads one and a half panels together.
        wide = maximum(ceildiv(n - tile.lanes, tile.NR), 1)
        together = 1 + exceeds(m, tile.MR) * (ceildiv(wide, maximum(near, 1)) - 1)
        at_once = maximum(minimum(MOST_PANELS, floordiv(tile.MR, maximum(m, 1))), 1)
        streamed = few * exceeds(size, tile.near // 2) * exceeds(panels, at_once)
        # Enough steps per pass that no pass is empty.
        steps = maximum(STRIP - away * (STRIP - FAR_STEPS), ceildiv(k, FAR_PASSES))
        # One sum over a long K would lose precision.
        steps = LONG_SUM - streamed * maximum(LONG_SUM - steps, 0)
        passes = let("_passes", maximum(ceildiv(k, steps), 1))
        # With few rows, threads share few cache lines of the result.
        cut = minimum(passes - 1, 1) * exceeds(m, tile.few)
    wanted = maximum(1 - far, few)
    idle = ceildiv(thread_shares(cut), blocks)
    groups = let("_groups", maximum(together, minimum(idle, panels)))
    shares = ceildiv(m, blocks), ceildiv(panels, groups)
    return StripCut(
        wanted,
        tuple(let.made),
        *(blocks, shares[0], groups, shares[1]),
        *(passes, ceildiv(k, passes)),
    )


def strip_tiles(rows: Expr, m: Expr, n: Expr, k: Expr, tile: Tile) -> Expr:
    """The number of tiles that the rows of strips are cut into: few, or many low ones.

    With few steps of K, writing results takes most of the time. Lower tiles overlap the
    writes with the next tile's multiplications, which pays as long as B is in L2. They
    also compute one and a half panels together, for any K. If L1 does not hold the
    results, a few rows at a time are best, provided the rows are long and B stays in
    L1; if L2 does not hold the results, one row at a time. K = 1 needs no tiles
    (`strips.outer_kernel`).
    """
    size, results = n * k, m * n
    few, broad, low = (ceildiv(rows, h) for h in (tile.MR, tile.broad, tile.low))
    near = tile.near // tile.bytes
    half = minimum(exceeds(n, tile.NR), within(n, tile.NR + tile.lanes))
    short = minimum(within(k, STRIP), within(size, near))
    held = minimum(within(size, FEW_ELEMENTS), exceeds(n, LONG_ROW))
    along = minimum(within(k, LOW_STEPS), exceeds(results, FEW_ELEMENTS))
    alone = minimum(within(k, ALONE_STEPS), exceeds(results, near))
    # Each number of tiles exceeds the one before, so the largest that applies wins. A
    # maximum is also cheaper here than products of sums.
    along, alone = minimum(along, held), minimum(alone, held)
    return maximum(few, maximum(half, short) * broad, along * low, alone * rows)


def unit_grain(rows: Expr, columns: Expr, steps: Expr) -> Expr:
    """The fewest units of this size that pay for a thread.

    Writing a result counts as well, and so does reading B, which few rows do not
    amortize.
    """
    work = maximum(rows, READ_ROWS) * steps + rows * WRITE_STEPS
    return grain_of(work * columns, SHARED_WORK)


def grain_of(work: Expr, worth: int = UNIT_WORK) -> Expr:
    """The fewest units of this many multiply-adds that pay for a thread."""
    return maximum(1, floordiv(worth, maximum(work, 1)))


def share_of(count: Expr, number: Expr, shares: Expr) -> tuple[Expr, Expr]:
    """The begin and the end of one of several shares, which are as even as possible."""
    shares = maximum(shares, 1)
    return floordiv(number * count, shares), floordiv((number + 1) * count, shares)


def exceeds(x: Expr, bound: Expr | int) -> Expr:
    """1 if x > bound, else 0."""
    return minimum(maximum(x - bound, 0), 1)


def within(x: Expr, bound: Expr | int) -> Expr:
    """1 if x <= bound, else 0."""
    return exceeds(bound + 1 - x, 0)


def row_tiles(rows: int, most: int) -> list[int]:
    """The heights that a block's rows are cut into, none above `most`."""
    count = -(-rows // most)
    return [(rows + count - 1 - t) // count for t in range(count)]


def executed(m: int, n: int, k: int, dot: bool, tile: Tile) -> int:
    """Multiply-adds that the lanes execute for a product, unused lanes included."""
    if dot:
        return m * n * -(-k // tile.lanes) * tile.lanes
    return m * -(-n // tile.lanes) * tile.lanes * k
