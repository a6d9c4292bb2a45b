"""Scaled dot product attention in one pass over tiles, with an online softmax.

    out[row] = softmax(score(scale * q[row] . k)) x v

Scores never leave L1. A unit of work is a block of query rows of one key head. With
grouped heads it holds the rows of all query heads that share the keys, one head after
the other, so that the keys are packed once for all of them. The scratch of a worker is
the unit's rows and one block of keys, however long the sequences are.

    for unit in batch x key heads x row blocks  parallel
      rows *= scale, into scratch; maximum, sum = -inf, 0
      for block of keys                             those above the diagonal not at all
        pack keys into panels (D, NR)
        for tile of up to MR rows
          scores = rows x panels                    registers -> scratch (MR, KC)
          for row: scores = score(scores)
                   maximum' = max(maximum, scores)
                   scores = exp(scores - maximum')
                   sum = sum * exp(maximum - maximum') + total(scores)
          result = result * exp(maximum - maximum') + scores x values
      out = result / sum

When a token is generated there are few rows, many keys and often fewer heads than
threads. The keys are then split too, and the result, maximum and sum of each part are
joined at the end, in a fixed order. Where gradients are wanted, the logarithm of each
row's sum is a second result.

`score` is what the model does to the scores before softmax: it adds biases and masks,
clamps, scales. A fully masked row (its maximum stays -inf) gives 0, as torch's op does,
or NaN, as torch's softmax does. NaN propagates. Columns above the causal diagonal are
skipped; row 0 is row `first` of the causal mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pliant.ir.loop_walk import size_symbols
from pliant.ir.loops import (
    Accumulate,
    Accumulator,
    Binary,
    Block,
    Call,
    Cast,
    Const,
    For,
    If,
    Index,
    Kind,
    Let,
    Load,
    Local,
    LoopFunc,
    LoopValue,
    Read,
    Select,
    Stmt,
    Store,
    Switch,
    Unary,
)
from pliant.kernels.attention_rows import (
    FACTOR,
    FEW,
    LEAST_KEYS,
    MAXIMUM,
    PART_ROWS,
    ROWS,
    SCRATCH,
    SUM,
)
from pliant.kernels.attention_softmax import Softmax
from pliant.kernels.attention_spec import (
    KEY,
    Attention,
    AttentionKernel,
    Scored,
    at_,
    is_,
    let,
    scale_of,
)
from pliant.kernels.attention_tiles import (
    keys_kernel,
    keys_kernel_name,
    loop,
    scores_kernel,
    scores_kernel_name,
    symbolic,
    values_kernel,
    values_kernel_name,
)
from pliant.kernels.choose import THREADS, grain_of
from pliant.kernels.micro import zero
from pliant.kernels.packing import unflatten_unit
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
    mod,
    product,
)

__all__ = ["KEY", "Attention", "AttentionKernel", "Scored", "attention"]

LEAST_ROWS = 48  # fewest rows of a unit that is split to occupy threads


def attention(name: str, spec: Attention, target: Target) -> AttentionKernel:
    return _Kernel(spec, target).build(name)


class _Kernel(Softmax):
    """Builds the loops of one attention op; names as in the module docstring."""

    def build(self, name: str) -> AttentionKernel:
        work = [self.queries, self.panels, self.scores, self.result, self.stats]
        work += [] if self.values is None else [self.values]
        work += [self.parts] if self.is_split else []
        outs = [self.out] if self.lse is None else [self.out, self.lse]
        buffers = (self.q, self.k, self.v, *self.spec.reads, *outs, *work)
        body = self.body()
        function = LoopFunc(name, size_symbols(body, buffers), buffers, body)
        c, s, tall = self.compute, self.spec, self.tall
        helpers = (
            keys_kernel(s.dtype, self.tile, s.head, s.k_strides[-1]),
            *(scores_kernel(c, h, self.tile, s.head) for h in tall),
            *(values_kernel(c, h, self.tile, s.value_head) for h in self.heights),
        )
        return AttentionKernel(function, helpers, tuple(work))

    def body(self) -> Stmt:
        spec = self.spec
        outer = product(spec.batch) * spec.kv_heads
        # Heads that cannot be divided evenly among the threads are split into row
        # blocks.
        most = minimum(
            ceildiv(self.rows, LEAST_ROWS), ceildiv(2 * THREADS, maximum(outer, 1))
        )
        even = is_("eq", mod(outer, THREADS), 0)
        split = Select(even, Index(ONE), Index(most))
        blocks = maximum(ceildiv(self.rows, ROWS), at_("split"), 1)
        extents = (*spec.batch, spec.kv_heads, at_("row_blocks"))
        lets, at = unflatten_unit(at_("u"), (*extents, at_("splits")))
        self.batch_at, self.kv_head = at[:-3], at[-3]
        # With few rows the time is that of loading keys and values, so count at least
        # 8.
        rows = maximum(at_("block_rows"), 8)
        work = rows * at_("part_keys") * (spec.head + spec.value_head)
        units = outer * at_("row_blocks")
        first = let("first", at[-2] * at_("block_rows"))
        unit = Block((*lets, first, let("part", at[-1]), *self.unit()))
        grain = grain_of(work)
        split_units = units * at_("splits")
        return Block(
            (
                *self.clamped_past(),
                Let("_at_split", split),
                let("row_blocks", blocks),
                let("block_rows", ceildiv(self.rows, at_("row_blocks"))),
                Let("_at_splits", self.splits(units)),
                let("part_keys", ceildiv(self.keys, at_("splits"))),
                For("_at_u", ZERO, split_units, unit, Kind.PARALLEL, grain=grain),
                *self.join_parts(units, extents),
            )
        )

    # ---- keys split between threads

    def splits(self, units: Expr) -> LoopValue:
        """How many parts the keys are split into: 1 unless threads are idle."""
        if not self.is_split:
            return Index(ONE)
        idle = ceildiv(THREADS, maximum(units, 1))
        most = maximum(minimum(idle, floordiv(self.keys, LEAST_KEYS)), 1)
        few = is_("le", self.rows, PART_ROWS)
        return Select(few, Index(most), Index(ONE))

    def part(self, number: Expr, row: Expr, column: Expr) -> tuple[Expr, ...]:
        return (floordiv(number, 2), mod(number, 2), row, column)

    def store_part(self) -> Stmt:
        i, e, width = at_("i"), at_("e"), self.spec.value_head
        found = Load(self.result, (*SCRATCH, i, e))
        body = [loop("_at_e", width, self.put(i, e, found), Kind.VECTOR)]
        stats = [
            self.put(i, width + k, Load(self.stats, (*SCRATCH, which, i)))
            for k, which in enumerate((MAXIMUM, SUM))
        ]
        return loop("_at_i", at_("rows"), Block((*body, *stats)))

    def put(self, row: Expr, column: Expr, value: LoopValue) -> Stmt:
        return Store(self.parts, self.part(at_("u"), row, column), value)

    def join_parts(self, units: Expr, extents: Sequence[Expr]) -> list[Stmt]:
        """Adds up the parts' results, each times exp(its maximum - the highest)."""
        if not self.is_split:
            return []
        compute, width = self.compute, self.spec.value_head
        lets, at = unflatten_unit(at_("w"), extents)
        i, e, p = at_("i"), at_("e"), at_("p")
        number = at_("w") * at_("splits") + p

        def read(column: Expr) -> LoopValue:
            return Load(self.parts, self.part(number, i, column))

        def over_parts(name: str, op: str, value: LoopValue) -> list[Stmt]:
            body = Accumulate(name, value)
            return [
                Accumulator(name, compute, op),
                loop("_at_p", at_("splits"), body),
            ]

        top = self.shift(Read("_at_top", compute))
        below = Unary("decay", Binary("sub", read(width), Read("_at_shift", compute)))
        joined = Binary("mul", read(e), below)
        row = Block(
            (
                *over_parts("_at_top", "max", read(width)),
                Local("_at_shift", compute, top),
                *over_parts("_at_total", "sum", Binary("mul", read(width + 1), below)),
                *self.store_row(
                    Read("_at_total", compute),
                    over_parts("_at_sum", "sum", joined),
                    Read("_at_sum", compute),
                ),
                *self.joined_sum(),
            )
        )
        unit = Block(
            (
                *lets,
                let("first", at[-1] * at_("block_rows")),
                let("rows", self.unit_rows()),
                loop("_at_i", at_("rows"), row),
            )
        )
        return [If(is_("gt", at_("splits"), 1), loop("_at_w", units, unit))]

    def joined_sum(self) -> list[Stmt]:
        if self.lse is None:
            return []
        _, head, query = self.position(at_("first") + at_("i"))
        total, top = Read("_at_total", self.compute), Read("_at_top", self.compute)
        place = (*self.batch_at, head, query)
        return [Store(self.lse, place, self.log_sum(total, top))]

    def unit_rows(self) -> Expr:
        left = self.rows - at_("first")
        return maximum(minimum(at_("block_rows"), left), 0)

    # ---- a unit

    def unit(self) -> list[Stmt]:
        first, rows, end = at_("first"), at_("rows"), at_("end")
        length, blocks = at_("length"), at_("kv_blocks")
        seen = self.spec.kv_len
        if self.spec.causal:
            seen = minimum(seen, self.past + self.last_query(first, rows) + 1)
        block, begin = at_("b"), at_("begin")
        t, tiles, step = at_("t"), maximum(at_("tiles"), 1), at_("step")
        steps = ceildiv(rows, step)
        even, over = floordiv(steps, tiles), mod(steps, tiles)
        tile_loop = loop(
            "_at_t",
            at_("tiles"),
            Block(
                (
                    let("start", (t * even + minimum(t, over)) * step),
                    let("height", floordiv(steps + tiles - 1 - t, tiles) * step),
                    *self.row_tile(),
                )
            ),
        )
        columns = Block(
            (
                let("column", begin + block * length),
                let("count", minimum(length, end - begin - block * length)),
                self.pack(),
                *self.pack_values(),
                tile_loop,
            )
        )
        tall, few = Index(as_expr(self.tile.step)), Index(maximum(rows, 1))
        # Blocks are even and whole vectors. Without columns there is a single empty
        # one.
        cut = ceildiv(ceildiv(end - begin, blocks), self.tile.lanes) * self.tile.lanes
        last = minimum(seen, begin + at_("part_keys"))
        return [
            let("rows", self.unit_rows()),
            # A few rows are one tile. More rows are cut evenly into tiles of whole
            # steps.
            Let("_at_step", Select(is_("gt", rows, FEW[-1]), tall, few)),
            let("tiles", ceildiv(rows, self.tile.MR)),
            let("begin", at_("part") * at_("part_keys")),
            let("end", maximum(last, begin)),
            let("kv_blocks", maximum(ceildiv(end - begin, self.tile.KC), 1)),
            let("length", cut),
            self.load_rows(),
            loop("_at_b", blocks, columns),
            *self.store(),
        ]

    def load_rows(self) -> Stmt:
        """Copies scaled queries to scratch, padded to a tile; resets statistics."""
        i, d = at_("i"), at_("d")
        lets, head, query = self.position(at_("first") + i)
        loaded = self.widened(Load(self.q, (*self.batch_at, head, query, d)))
        scaled = Binary("mul", loaded, Read("_at_scale", self.compute))
        store = Store(self.queries, (*SCRATCH, i, d), scaled)
        lowest = Const(float("-inf"), self.compute)
        body = (
            *lets,
            loop("_at_d", self.spec.head, store, Kind.VECTOR),
            Store(self.stats, (*SCRATCH, MAXIMUM, i), lowest),
            Store(self.stats, (*SCRATCH, SUM, i), zero(self.compute)),
        )
        clear = Store(self.queries, (*SCRATCH, i, d), zero(self.compute))
        padding = (
            loop("_at_d", self.spec.head, clear, Kind.VECTOR),
            Store(self.stats, (*SCRATCH, FACTOR, i), zero(self.compute)),
        )
        end = ceildiv(at_("rows"), self.tile.step) * self.tile.step
        return Block(
            (
                Local("_at_scale", self.compute, scale_of(self.spec)),
                loop("_at_i", at_("rows"), Block(body)),
                loop("_at_i", end, Block(padding), begin=at_("rows")),
            )
        )

    def store(self) -> list[Stmt]:
        """Stores the unit's rows in the result, or in the unit's part of it."""
        i, e = at_("i"), at_("e")
        total = Read("_at_total", self.compute)
        body = (
            Local("_at_total", self.compute, Load(self.stats, (*SCRATCH, SUM, i))),
            *self.store_row(total, [], Load(self.result, (*SCRATCH, i, e))),
        )
        whole = Block((loop("_at_i", at_("rows"), Block(body)), *self.store_sums()))
        if not self.is_split:
            return [whole]
        return [If(is_("gt", at_("splits"), 1), self.store_part(), whole)]

    def store_row(
        self, total: LoopValue, before: Sequence[Stmt], found: LoopValue
    ) -> list[Stmt]:
        """Stores row i of the result: `found` at each element e, divided by the sum."""
        i, e = at_("i"), at_("e")
        lets, head, query = self.position(at_("first") + i)
        compute = self.compute
        nothing = zero(compute)
        inverse = Binary("div", Const(1.0, compute), total)
        empty: LoopValue = Binary("eq", total, nothing)
        if self.spec.nan_rows:  # 0 * (1 / 0) is NaN
            empty = is_("eq", self.spec.kv_len, 0)
        inverse_or_zero = Select(empty, nothing, inverse)
        value: LoopValue = Binary("mul", found, Read("_at_inverse", compute))
        if self.spec.zero_nan:
            value = Select(Unary("isnan", total), nothing, value)
        if self.spec.dtype is not compute:
            value = Cast(value, self.spec.dtype)
        store = Store(self.out, (*self.batch_at, head, query, e), value)
        element = Block((*before, store)) if before else store
        return [
            *lets,
            Local("_at_inverse", compute, inverse_or_zero),
            loop("_at_e", self.spec.value_head, element, Kind.VECTOR),
        ]

    def store_sums(self) -> list[Stmt]:
        """Stores the logarithms of the row sums, computed by vectors in scratch."""
        if self.lse is None:
            return []
        i = at_("i")
        here = (*SCRATCH, SUM, i)
        found = self.log_sum(
            Load(self.stats, here), Load(self.stats, (*SCRATCH, MAXIMUM, i))
        )
        lets, head, query = self.position(at_("first") + i)
        place = (*self.batch_at, head, query)
        return [
            loop("_at_i", at_("rows"), Store(self.stats, here, found), Kind.VECTOR),
            loop(
                "_at_i",
                at_("rows"),
                Block((*lets, Store(self.lse, place, Load(self.stats, here)))),
            ),
        ]

    def log_sum(self, total: LoopValue, highest: LoopValue) -> LoopValue:
        """log(sum of exp(score)), from the sum of exp(score - highest)."""
        return Binary("add", self.shift(highest), Unary("log", total))

    # ---- a block of keys

    def pack(self) -> Stmt:
        """Packs the keys of the block into panels (D, NR)."""
        head, (row, element) = self.spec.head, self.spec.k_strides[-2:]
        keys = (*self.batch_at, self.kv_head, at_("column"), ZERO)
        packed = Call(
            keys_kernel_name(self.spec.dtype, self.tile, head, element),
            (*symbolic(head), at_("count"), row, element),
            ((self.k, keys), (self.panels, (*SCRATCH, ZERO, ZERO, ZERO))),
        )
        return If(is_("gt", at_("rows"), FEW[-1]), packed)

    def pack_values(self) -> list[Stmt]:
        if self.values is None:
            return []
        n, e = at_("n"), at_("e")
        index = (*self.batch_at, self.kv_head, at_("column") + n, e)
        store = Store(self.values, (*SCRATCH, n, e), self.widened(Load(self.v, index)))
        columns = loop("_at_e", self.spec.value_head, store, Kind.VECTOR)
        return [loop("_at_n", at_("count"), columns)]

    # ---- a tile of rows

    def row_tile(self) -> list[Stmt]:
        columns = at_("count")
        if not self.spec.causal:
            return [let("columns", columns), *self.tile_steps()]
        last = self.last_query(at_("first") + at_("start"), at_("height"))
        columns = minimum(columns, self.past + last + 1 - at_("column"))
        # Every row sees a column of the first block, unless there are no columns at
        # all.
        least = minimum(1, self.spec.kv_len)
        if self.past != ZERO:
            # A row need not see any of its part. The first block resets its result.
            columns, least = maximum(columns, 0), minimum(1, at_("b"))
        some = is_("ge", at_("columns"), least)
        return [let("columns", columns), If(some, Block(tuple(self.tile_steps())))]

    def tile_steps(self) -> list[Stmt]:
        return [
            If(is_("gt", at_("rows"), FEW[-1]), self.scores_call(), self.dots()),
            *self.softmax(),
            self.values_call(),
        ]

    def switch(self, heights: Sequence[int], call: Callable[[int], Call]) -> Stmt:
        return Switch(at_("height"), tuple((h, call(h)) for h in heights))

    def scores_call(self) -> Stmt:
        nr, lanes, columns = self.tile.NR, self.tile.lanes, at_("columns")
        # The remainder after whole panels takes one vector of a panel, or both.
        wide = floordiv(columns + (nr - lanes - 1), nr)
        narrow = ceildiv(maximum(columns - at_("wide") * nr, 0), lanes)
        head = self.spec.head

        def call(height: int) -> Call:
            return Call(
                scores_kernel_name(self.compute, height, self.tile, head),
                (*symbolic(head), at_("wide"), at_("narrow")),
                (
                    (self.queries, (*SCRATCH, at_("start"), ZERO)),
                    (self.panels, (*SCRATCH, ZERO, ZERO, ZERO)),
                    (self.scores, (*SCRATCH, ZERO, ZERO)),
                ),
            )

        return Block(
            (let("wide", wide), let("narrow", narrow), self.switch(self.tall, call))
        )

    def dots(self) -> Stmt:
        i, n, d = at_("i"), at_("n"), at_("d")
        index = (*self.batch_at, self.kv_head, at_("column") + n, d)
        product_ = Binary(
            "mul",
            Load(self.queries, (*SCRATCH, at_("start") + i, d)),
            self.widened(Load(self.k, index)),
        )
        body = Block(
            (
                Accumulator("_at_dot", self.compute, "sum"),
                loop(
                    "_at_d",
                    self.spec.head,
                    Accumulate("_at_dot", product_),
                    Kind.VECTOR,
                ),
                Store(self.scores, (*SCRATCH, i, n), Read("_at_dot", self.compute)),
            )
        )
        return loop("_at_i", at_("height"), loop("_at_n", at_("columns"), body))

    def values_call(self) -> Stmt:
        head = self.spec.value_head
        if self.values is None:
            ldv = self.spec.v_strides[-2]
            source = (self.v, (*self.batch_at, self.kv_head, at_("column"), ZERO))
        else:
            ldv = head
            source = (self.values, (*SCRATCH, ZERO, ZERO))

        def call(height: int) -> Call:
            return Call(
                values_kernel_name(self.compute, height, self.tile, head),
                (*symbolic(head), at_("columns"), ldv, at_("b")),
                (
                    (self.scores, (*SCRATCH, ZERO, ZERO)),
                    source,
                    (self.stats, (*SCRATCH, FACTOR, at_("start"))),
                    (self.result, (*SCRATCH, at_("start"), ZERO)),
                ),
            )

        return self.switch(self.heights, call)
