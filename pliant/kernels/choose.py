"""How a matrix product of M x N x K is cut, worked out from the sizes at the call.

Every choice is an integer expression of M, N, K and the number of threads, so the
compiled code evaluates it in a few dozen nanoseconds, `explain` prints it for sizes of
interest, and nothing is compiled per shape. The thresholds below were set by hand, from
what `bench.plans` measured on machines with AVX-512 and AVX2. The model, with cycles
per step of K and the bytes that move as its terms:

kernel    A panel kernel of V vectors takes max(MR*V / 2, (MR + V) / 2) cycles a step
          and computes N rounded up to whole vectors. With a few columns most lanes of
          a panel would be idle; lanes along K are cheaper, if K fills them.
packing   A B that is not constant is packed where there are rows enough to pay for it,
          from two tiles on if it is large: a group of panels at a time, each by the
          kernel of the first tile that reads it. Few rows read B where it lies; one
          that comes from far along its rows, in passes of a few steps over all columns,
          which is how memory hands it out.
depth     K is cut beyond `depth` steps once there are rows enough to reuse a panel.
          Sums of a long K are then better, too. Rows that are not adjacent in K are
          copied side by side.
order     Of panels and tiles of rows, one goes over the other. Rows that fit in L2 stay
          there, and panel after panel comes by. More rows than that go over a group of
          panels that stays in L2, tile by tile: so the rows of C are written along
          their length, and B is packed once for as many rows as there are.
blocks    As many rows as that wants, the same for every block; more blocks where
          threads would otherwise wait or share rows. Where rows are computed as they
          are copied, they go over all panels while B stays in cache.
rows      A block's rows are cut into tiles as few and as even as can be.
threads   Less than SHARED_WORK is not worth waking another. Groups of panels are even,
          and where results are added to pass by pass there are two for each thread, so
          that no two of them write to the same cache line at the same time.

To work all that out takes tens of nanoseconds. A product that takes no longer itself is
not cut: one block and one group, in one pass. And where strips of rows can compute it
(`strips.py`) they do, unless it is so large that one of the above is worth its price.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pliant.kernels.tiles import Tile
from pliant.sym import Expr, as_expr, ceildiv, floordiv, maximum, minimum, sym

THREADS = sym("threads")
DOT_ROWS = 4  # most rows for which a transposed B is read where it lies
WHOLE_ROWS = 3  # tiles of rows up to which a constant's K is not cut for the cache
FEW_TILES = 2  # of rows, for which another B is read in place if it is near
MOST_TILES = 6  # of rows, from which on it is no longer a matter of their number
THIN = 64  # steps of K up to which C is most of the traffic
THIN_PANELS = 4  # for rows of C to be worth writing from end to end
MOST_ROWS = 512  # of a block that panels go over: each may be a page of C
SWEPT_ROWS = 1024  # of a block that goes over panels: for what these are packed once
STRIP = 128  # steps of K in a pass over a B that is not constant; twice with many rows
FEW_STEPS = 16  # of K for few rows that read B from far: for more up to four times that
MOST_PASSES = 256  # over a B that is read from far
NEAR_COLUMNS = 256  # of a B whose rows are near each other
NEAR_STEPS = 48  # of K, whose rows of B are few enough to be near each other
MANY_TILES = 9  # of rows, for which any B is packed
GROUP = 16  # panels that share a copy of A's rows, or a strip of B
FEWEST_PANELS = 3  # for which a tile of rows is worth fetching
UNIT_WORK = 1 << 18  # multiply-adds worth a thread: about ten microseconds
SHARED_WORK = 1 << 19  # of a product, the least that two threads share
READ_ROWS = 8  # below which it takes as long to read B as to multiply
WRITE_STEPS = 8  # of K that take as long as it takes to write a result
MOST_ABREAST = 4  # panels that a strip has in registers
FAR_STEPS = 32  # of K in a pass of a strip over a B that is far away
LONG_SUM = 1024  # steps of K
FAR_PASSES = 128  # whose sums are added up one by one: more would lose digits
LOW_STEPS = 10  # of K for which strips are low
ALONE_STEPS = 5  # for which they are single rows, if L2 does not hold the results
LONG_ROW = 64  # results
FEW_ELEMENTS = 10 << 10  # that stay in L1


SMALL = 1 << 16  # multiply-adds of a product that is not cut
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
    dot: Expr  # 1: lanes along K, of the sizes alone; what follows is for panels
    packed: Expr  # 1: panels of B are packed before they are read; 0: read in place
    copied: Expr  # 1: a block's rows of A are copied side by side
    passes: Expr  # over K
    depth: Expr  # steps of K in a pass
    blocks: Expr  # of rows
    rows: Expr  # of a block
    groups: Expr  # of panels
    panels: Expr  # of a group
    swath: Expr  # tiles of rows that a panel meets before it is the next one's turn

    def at(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """The fields as numbers."""
        known = dict(sizes)
        for name, value in self.lets:
            known[name] = value.evaluate(known)
        values = ((name, getattr(self, name)) for name in ("dot", *FIELDS))
        return {name: value.evaluate(known) for name, value in values}

    def arguments(self) -> dict[str, Expr]:
        """What is not known when compiling, by the names that `parameters` gives."""
        values = ((f"_{name}", getattr(self, name)) for name in FIELDS)
        return {name: value for name, value in values if not value.is_const}

    def parameters(self) -> Plan:
        """The plan as a function sees it that is given those arguments."""
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
    """Names for what is not constant, so that nothing is written out twice."""

    def __init__(self) -> None:
        self.made: list[tuple[str, Expr]] = []

    def __call__(self, name: str, value: Expr) -> Expr:
        if value.is_const:
            return value
        self.made.append((name, value))
        return sym(name)


@dataclass(frozen=True, slots=True)
class Choice:
    """What is known about a product besides its sizes."""

    constant: bool  # B is a constant, packed ahead
    adjacent: bool  # B's columns lie side by side: panels can be read in place
    rows_in_k: bool  # both operands are adjacent in K: lanes along K need no copy
    packs_rows: bool  # A is adjacent in K: a few columns of B can be made so
    steps: bool  # A's rows are not adjacent in K
    computed: bool  # A is computed when its rows are copied
    alone: bool  # partial sums can lie in the result
    column: bool = False  # a single column of B lies adjacent in K

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
    # Of so many panels, what a pass reads stays in L2.
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
    # Those that share a copy of rows, or partial sums.
    together = ceildiv(panels, GROUP)
    if what.adjacent and what.alone and not what.copies:  # which lie in the result
        strip = floordiv(tile.cells // 2, maximum(depth, 1))
        broad = ceildiv(panels, maximum(strip, 1))
        together = together - (1 - many) * (together - broad)
    if what.computed:  # once for all panels, unless partial sums would be too many
        together = 1 + cut * (together - 1)
    together = together - thin * (together - 1)
    shares = let("_shares", thread_shares(cut))
    least = maximum(together, (1 - many) * minimum(shares, panels))
    shared = let("_shared", maximum(cut, copied))
    whole = maximum(shared, thin)
    # A few rows have their partial sums in L1 if they stay with one panel.
    some = packed * (1 - many)
    groups = (1 - some) * whole * least + maximum(some, 1 - whole) * panels
    swept = ceildiv(ceildiv(panels, width), shares) * shares
    groups = let("_groups", groups + sweep * (minimum(swept, panels) - groups))
    most = (1 - shared) * MOST_ROWS + shared * tile.deep_rows
    if what.computed:  # what was just copied is found in L1, if B is in L2
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
        # Copied rows have room for so many steps only.
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
    # A B that comes from far is read along its rows, a few at a time.
    far = exceeds(n * k * tile.bytes, tile.near) * (1 - packed)
    more = exceeds(m, 3 * tile.MR // 4) + 2 * exceeds(m, 3 * tile.MR // 2)
    # Sums of sums: so many passes that neither loses digits.
    short = maximum(FEW_STEPS * (1 + more), ceildiv(k, MOST_PASSES))
    steps = STRIP + packed * longer - far * maximum(STRIP - short, 0)
    return packed, let("_passes", maximum(ceildiv(k, steps), 1))


def crowded(m: Expr, n: Expr, k: Expr, tile: Tile) -> Expr:
    """1 if to read B in place from L2 for each tile of rows is too slow.

    Its rows are apart: each is on a page of its own, and its lines are split. So the
    more tiles there are, the less of it may be left as it is.
    """
    size = n * k * tile.bytes
    rows = minimum(m, MOST_TILES * tile.MR)
    often = exceeds(size * rows, FEW_TILES * tile.MR * tile.near)
    often = often * exceeds(n, tile.NR + tile.lanes)  # near each other after all
    return maximum(exceeds(size, 5 * tile.near // 4), exceeds(k, NEAR_STEPS) * often)


def dot_choice(m: Expr, n: Expr, k: Expr, tile: Tile, what: Choice) -> Expr:
    """1 if lanes go along K.

    A row then takes n * (k / (2 * lanes) + 9 / 4) cycles: the steps of K, and the sum
    over lanes at the end. With panels it takes k / 2, n at most a vector, less a part
    for tiles without so many loads, and still less where L1 does not hold the rows of
    B; the vectors of B that a tile loads besides take k / 2 once. And a B not yet
    adjacent in K takes n * k / 2 once to make it so, a single column being so already.
    Times 2 * lanes, compared:
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
    turned = exceeds(n, 1) if what.column else as_expr(1)
    fills = exceeds(k, lanes // 2 - 1)
    return fills * exceeds(m * gain + lanes * k, turned * lanes * n * k)


def thread_blocks(m: Expr, least: Expr, units: Expr, tall: Expr, tile: Tile) -> Expr:
    """Row blocks: at least `least`, and a fair share for every thread.

    With more rows than columns (`tall`) threads share B rather than A: each then finds
    the rows that it wrote before in its own cache. Otherwise the panels are dealt out,
    unless more than an eighth of the threads' time would be spent waiting.
    """
    together = maximum(least * units, 1)
    idle = ceildiv(together, THREADS) * THREADS - together
    uneven = exceeds(8 * idle, together)
    fair = ceildiv(maximum(least, 1), THREADS) * THREADS
    wanted = least + maximum(uneven, tall) * maximum(fair - least, 0)
    return maximum(minimum(wanted, ceildiv(m, tile.MR)), least, 1)


def thread_shares(cut: Expr) -> Expr:
    """The fewest groups of panels that threads share evenly; `cut`: in several passes.

    Where two groups meet they share lines of the result. A thread that adds to it pass
    by pass waits for those of its neighbour, unless that one is at another group.
    """
    return THREADS * (1 + cut * minimum(THREADS - 1, 1))


@dataclass(frozen=True, slots=True)
class StripCut:
    """How strips of rows share a product; the fields are as in `Plan`."""

    wanted: Expr  # 1: it goes by strips, of the sizes and threads
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
    """Strips read all of B for each tile of rows: from L2, if it stays there.

    For one tile it need not even do that. Panels of a constant are read one after the
    other as fast as memory gives them, if there are few rows, which have several panels
    in registers. Another B is read a few of its rows at a time, from end to end.
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
        # More than the threads' L2 hold beside the rest: tall tiles are left to panels,
        # which ask ahead.
        away = exceeds(size, 5 * tile.near // 3 * THREADS)
        few = 1 - exceeds(m, tile.MR - away * (tile.MR - tile.keeping))
        far = crowded(m, n, k, tile)
        near = floordiv(tile.near, 2 * tile.NR * tile.bytes * maximum(k, 1))
        # A panel and half of another are read together.
        wide = maximum(ceildiv(n - tile.lanes, tile.NR), 1)
        together = 1 + exceeds(m, tile.MR) * (ceildiv(wide, maximum(near, 1)) - 1)
        at_once = maximum(minimum(MOST_ABREAST, floordiv(tile.MR, maximum(m, 1))), 1)
        streamed = few * exceeds(size, tile.near // 2) * exceeds(panels, at_once)
        # So many steps that no pass is left without any.
        steps = maximum(STRIP - away * (STRIP - FAR_STEPS), ceildiv(k, FAR_PASSES))
        # A long K as one sum would lose digits.
        steps = LONG_SUM - streamed * maximum(LONG_SUM - steps, 0)
        passes = let("_passes", maximum(ceildiv(k, steps), 1))
        # Few rows share few lines of the result.
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
    """How many tiles the rows of strips are cut into: few, or many low ones.

    With few steps of K what takes time is writing results. Tiles that are not so high
    write while the next one multiplies, which pays until B comes from far; and for any
    K they compute a panel and half of another together. Results that L1 does not hold
    go best along a few rows, if these are long and B stays in L1; those that L2 does
    not hold, along one. A single step needs no tiles (`strips.outer_kernel`).
    """
    size, results = n * k, m * n
    few, broad, low = (ceildiv(rows, h) for h in (tile.MR, tile.broad, tile.low))
    near = tile.near // tile.bytes
    half = minimum(exceeds(n, tile.NR), within(n, tile.NR + tile.lanes))
    short = minimum(within(k, STRIP), within(size, near))
    held = minimum(within(size, FEW_ELEMENTS), exceeds(n, LONG_ROW))
    along = minimum(within(k, LOW_STEPS), exceeds(results, FEW_ELEMENTS))
    alone = minimum(within(k, ALONE_STEPS), exceeds(results, near))
    # Each is more than the one before; and no sum is multiplied, which takes time.
    along, alone = minimum(along, held), minimum(alone, held)
    return maximum(few, maximum(half, short) * broad, along * low, alone * rows)


def unit_grain(rows: Expr, columns: Expr, steps: Expr) -> Expr:
    """The fewest units of such a size that are worth a thread.

    A result is also written, and few rows read a B that others would share.
    """
    work = maximum(rows, READ_ROWS) * steps + rows * WRITE_STEPS
    return grain_of(work * columns, SHARED_WORK)


def grain_of(work: Expr, worth: int = UNIT_WORK) -> Expr:
    """The fewest units of so many multiply-adds that are worth a thread."""
    return maximum(1, floordiv(worth, maximum(work, 1)))


def share_of(count: Expr, number: Expr, shares: Expr) -> tuple[Expr, Expr]:
    """Where one of several shares begins and ends, which are as even as can be."""
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
    """Multiply-adds that the lanes do for a product, those not wanted included."""
    if dot:
        return m * n * -(-k // tile.lanes) * tile.lanes
    return m * -(-n // tile.lanes) * tile.lanes * k
