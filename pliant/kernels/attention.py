"""Scaled dot product attention in one pass over tiles, softmax on the way.

    out[row] = softmax(score(scale * q[row] . k)) x v

Scores never leave the first cache. A unit of work is a block of query rows of one key
head: with grouped heads the rows of all query heads that share the keys, one head after
the other, so that keys are packed once for them. Memory is the unit's rows and one
block of keys per worker, whatever the lengths.

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

`score` is whatever the model does to scores before softmax: it adds biases and masks,
bounds, scales. A row without any column left (its maximum stays -inf) gives 0, as
torch's op does, or NaN, as its softmax does; NaN goes through. Columns above the causal
diagonal are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pliant.ir.loops import (
    WORKER,
    Accumulate,
    Accumulator,
    Alloc,
    Binary,
    Block,
    Buffer,
    Call,
    Cast,
    Const,
    Fma,
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
    Role,
    Select,
    Stmt,
    Store,
    Switch,
    Unary,
    buffer,
    dtype_of,
)
from pliant.ir.types import DType
from pliant.kernels.attention_tiles import (
    blocking,
    loop,
    scores_kernel,
    scores_kernel_name,
    symbolic,
    values_kernel,
    values_kernel_name,
)
from pliant.kernels.choose import THREADS
from pliant.kernels.gemm import UNIT_WORK
from pliant.kernels.micro import zero
from pliant.kernels.packing import unflatten_unit
from pliant.lower.to_loops import size_symbols
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
    sym,
)
from pliant.target import Target

ROWS = 512  # of a unit: packing keys costs what about 10 rows of arithmetic do
LEAST_ROWS = 48  # below, a unit is not split for the sake of threads
# Of so many rows, dot products on the keys in place are cheaper than packing.
FEW = (1, 2)

SCRATCH = (sym(WORKER),)


@dataclass(frozen=True, slots=True)
class Scored:
    """Statements for one column of a row, and the score they end in."""

    body: tuple[Stmt, ...]
    value: LoopValue


KEY = "_at_key"  # the number of a key, where a score is computed

# (index up to the query, (score, whether it is there, its key).., names that differ
# from column to column) -> what the row computes once, and each score
ScoreOf = Callable[
    [
        Sequence[Expr],
        Sequence[tuple[LoopValue, LoopValue | None, Expr]],
        frozenset[str],
    ],
    tuple[list[Stmt], list[Scored]],
]


@dataclass(frozen=True, slots=True)
class Attention:
    """One use. Strides are of (batch.., head, position, element), in elements.

    The last stride of q and out is 1. `score` reads the buffers `reads`.
    """

    dtype: DType
    batch: tuple[Expr, ...]
    heads: Expr
    kv_heads: Expr
    q_len: Expr
    kv_len: Expr
    head: Expr
    value_head: Expr
    q_strides: tuple[Expr, ...]
    k_strides: tuple[Expr, ...]
    v_strides: tuple[Expr, ...]
    out_strides: tuple[Expr, ...]
    reads: tuple[Buffer, ...] = ()
    score: ScoreOf | None = None
    causal: bool = False
    nan_rows: bool = False  # of rows all at -inf
    scale: float | None = None  # 1/sqrt(head)


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """The loop function (q, k, v, reads.., out, work..), what it calls, its scratch."""

    func: LoopFunc
    helpers: tuple[LoopFunc, ...]
    work: tuple[Buffer, ...]


def attention(name: str, spec: Attention, target: Target) -> AttentionKernel:
    return _Builder(spec, target).build(name)


# ---- the kernel


MAXIMUM, SUM, FACTOR = map(as_expr, range(3))  # rows of the statistics buffer


def _at(name: str) -> Expr:
    """A name of this kernel, apart from the sizes of the model."""
    return sym(f"_at_{name}")


def _let(name: str, dim: Expr | int) -> Let:
    return Let(f"_at_{name}", Index(as_expr(dim)))


def _is(op: str, x: Expr, y: Expr | int) -> LoopValue:
    return Binary(op, Index(x), Index(as_expr(y)))


class _Builder:
    """One use on its way to loops; names as in the module docstring."""

    def __init__(self, spec: Attention, target: Target) -> None:
        self.spec, self.compute = spec, spec.dtype.compute
        self.tile = blocking(self.compute, target)
        batch, compute, nr = spec.batch, self.compute, self.tile.NR
        self.tall = range(self.tile.step, self.tile.MR + 1, self.tile.step)
        self.heights = sorted({*FEW, *self.tall})
        self.group = (
            ONE if spec.heads == spec.kv_heads else floordiv(spec.heads, spec.kv_heads)
        )
        self.rows = self.group * spec.q_len
        q_shape = (*batch, spec.heads, spec.q_len, spec.head)
        k_shape = (*batch, spec.kv_heads, spec.kv_len, spec.head)
        v_shape = (*batch, spec.kv_heads, spec.kv_len, spec.value_head)
        out_shape = (*batch, spec.heads, spec.q_len, spec.value_head)
        self.q = buffer("_at_q", spec.dtype, q_shape, Role.IN, spec.q_strides)
        self.k = buffer("_at_k", spec.dtype, k_shape, Role.IN, spec.k_strides)
        self.v = buffer("_at_v", spec.dtype, v_shape, Role.IN, spec.v_strides)
        self.out = buffer("_at_out", spec.dtype, out_shape, Role.OUT, spec.out_strides)
        room = ceildiv(minimum(ROWS, self.rows), self.tile.step) * self.tile.step
        panels = minimum(self.tile.KC // nr, ceildiv(spec.kv_len, nr))

        def work(name: str, *shape: Expr | int) -> Buffer:
            return buffer(f"_at_{name}", compute, (THREADS, *shape), Role.WORK)

        self.queries = work("queries", room, spec.head)
        self.panels = work("panels", panels, spec.head, nr)
        self.scores = work("scores", self.tile.MR, self.tile.KC)
        self.result = work("result", room, spec.value_head)
        self.stats = work("stats", 3, room)
        # Values are read in place where their rows are vectors of the right type.
        in_place = spec.dtype is compute and spec.v_strides[-1] == ONE
        length = minimum(self.tile.KC, spec.kv_len)
        self.values = None if in_place else work("values", length, spec.value_head)

    def build(self, name: str) -> AttentionKernel:
        every = (self.queries, self.panels, self.scores, self.result, self.stats)
        work = every if self.values is None else (*every, self.values)
        buffers = (self.q, self.k, self.v, *self.spec.reads, self.out, *work)
        body = self.body()
        function = LoopFunc(name, size_symbols(body, buffers), buffers, body)
        c, s, tall = self.compute, self.spec, self.tall
        helpers = (
            *(scores_kernel(c, h, self.tile, s.head) for h in tall),
            *(values_kernel(c, h, self.tile, s.value_head) for h in self.heights),
        )
        return AttentionKernel(function, helpers, work)

    def body(self) -> Stmt:
        spec = self.spec
        outer = product(spec.batch) * spec.kv_heads
        # Heads that do not share out evenly among threads are split into row blocks.
        most = minimum(
            ceildiv(self.rows, LEAST_ROWS), ceildiv(2 * THREADS, maximum(outer, 1))
        )
        even = _is("eq", mod(outer, THREADS), 0)
        split = Select(even, Index(ONE), Index(most))
        blocks = maximum(ceildiv(self.rows, ROWS), _at("split"), 1)
        extents = (*spec.batch, spec.kv_heads, _at("row_blocks"))
        lets, at = unflatten_unit(_at("u"), extents)
        self.batch_at, self.kv_head = at[:-2], at[-2]
        work = _at("block_rows") * spec.kv_len * (spec.head + spec.value_head)
        units = outer * _at("row_blocks")
        first = _let("first", at[-1] * _at("block_rows"))
        unit = Block((*lets, first, *self.unit()))
        grain = maximum(1, floordiv(UNIT_WORK, maximum(work, 1)))
        return Block(
            (
                Let("_at_split", split),
                _let("row_blocks", blocks),
                _let("block_rows", ceildiv(self.rows, _at("row_blocks"))),
                For("_at_u", ZERO, units, unit, Kind.PARALLEL, grain=grain),
            )
        )

    # ---- rows

    def position(self, row: Expr) -> tuple[list[Stmt], Expr, Expr]:
        """Head and query of a row of the key head; bound in the enclosing block."""
        if self.group == ONE:
            return [], self.kv_head, row
        length = maximum(self.spec.q_len, 1)
        lets: list[Stmt] = [
            _let("head", self.kv_head * self.group + floordiv(row, length)),
            _let("query", mod(row, length)),
        ]
        return lets, _at("head"), _at("query")

    def last_query(self, first: Expr, rows: Expr) -> Expr:
        """The last query of a range of rows."""
        if self.group == ONE:
            return first + rows - 1
        length = maximum(self.spec.q_len, 1)
        return minimum(length - 1, mod(first, length) + rows - 1)

    def widened(self, load: Load) -> LoopValue:
        return Cast(load, self.compute) if dtype_of(load) != self.compute else load

    # ---- a unit

    def unit(self) -> list[Stmt]:
        first, rows, end = _at("first"), _at("rows"), _at("end")
        length, blocks = _at("length"), _at("kv_blocks")
        seen = self.spec.kv_len
        if self.spec.causal:
            seen = minimum(seen, self.last_query(first, rows) + 1)
        block = _at("b")
        t, tiles, step = _at("t"), maximum(_at("tiles"), 1), _at("step")
        steps = ceildiv(rows, step)
        even, over = floordiv(steps, tiles), mod(steps, tiles)
        tile_loop = loop(
            "_at_t",
            _at("tiles"),
            Block(
                (
                    _let("start", (t * even + minimum(t, over)) * step),
                    _let("height", floordiv(steps + tiles - 1 - t, tiles) * step),
                    *self.row_tile(),
                )
            ),
        )
        columns = Block(
            (
                _let("column", block * length),
                _let("count", minimum(length, end - block * length)),
                self.pack(),
                *self.pack_values(),
                tile_loop,
            )
        )
        tall, few = Index(as_expr(self.tile.step)), Index(maximum(rows, 1))
        # Even blocks of whole vectors; a single empty one where there are no columns.
        cut = ceildiv(ceildiv(end, blocks), self.tile.lanes) * self.tile.lanes
        return [
            _let("rows", maximum(minimum(_at("block_rows"), self.rows - first), 0)),
            # A few rows are one tile; others are cut evenly into tiles of whole steps.
            Let("_at_step", Select(_is("gt", rows, FEW[-1]), tall, few)),
            _let("tiles", ceildiv(rows, self.tile.MR)),
            _let("end", seen),
            _let("kv_blocks", maximum(ceildiv(end, self.tile.KC), 1)),
            _let("length", cut),
            self.load_rows(),
            loop("_at_b", blocks, columns),
            self.store_rows(),
        ]

    def load_rows(self) -> Stmt:
        """Scaled queries into scratch, empty statistics, zeros up to a whole tile."""
        i, d = _at("i"), _at("d")
        lets, head, query = self.position(_at("first") + i)
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
        end = ceildiv(_at("rows"), self.tile.step) * self.tile.step
        return Block(
            (
                Local("_at_scale", self.compute, self.scale()),
                loop("_at_i", _at("rows"), Block(body)),
                loop("_at_i", end, Block(padding), begin=_at("rows")),
            )
        )

    def scale(self) -> LoopValue:
        head, compute = self.spec.head, self.compute
        if self.spec.scale is not None:
            return Const(self.spec.scale, compute)
        if head.is_const:
            return Const(max(head.value, 1) ** -0.5, compute)
        root = Unary("sqrt", Cast(Index(maximum(head, 1)), compute))
        return Binary("div", Const(1.0, compute), root)

    def store_rows(self) -> Stmt:
        i, e = _at("i"), _at("e")
        lets, head, query = self.position(_at("first") + i)
        compute = self.compute
        total, nothing = Read("_at_total", compute), zero(compute)
        inverse = Binary("div", Const(1.0, compute), total)
        empty: LoopValue = Binary("eq", total, nothing)
        if self.spec.nan_rows:  # 0 * (1 / 0)
            empty = _is("eq", self.spec.kv_len, 0)
        inverse_or_zero = Select(empty, nothing, inverse)
        found, factor = (
            Load(self.result, (*SCRATCH, i, e)),
            Read("_at_inverse", compute),
        )
        value: LoopValue = Binary("mul", found, factor)
        if self.spec.dtype is not compute:
            value = Cast(value, self.spec.dtype)
        store = Store(self.out, (*self.batch_at, head, query, e), value)
        body = (
            *lets,
            Local("_at_total", compute, Load(self.stats, (*SCRATCH, SUM, i))),
            Local("_at_inverse", compute, inverse_or_zero),
            loop("_at_e", self.spec.value_head, store, Kind.VECTOR),
        )
        return loop("_at_i", _at("rows"), Block(body))

    # ---- a block of keys

    def pack(self) -> Stmt:
        """Keys of the block as panels (D, NR); no more is written than is read."""
        nr, p, d, j = self.tile.NR, _at("p"), _at("d"), _at("j")
        count, column = _at("count"), _at("column")

        def panel(width: int, masked: bool) -> Stmt:
            at = p * nr + j
            where = _is("lt", at, count) if masked else None
            load = Load(self.k, (*self.batch_at, self.kv_head, column + at, d), where)
            store = Store(self.panels, (*SCRATCH, p, d, j), self.widened(load))
            columns = loop("_at_j", width, store, Kind.VECTOR)
            return loop("_at_d", self.spec.head, columns)

        whole, lanes = floordiv(count, nr), self.tile.lanes
        rest = If(_is("gt", mod(count, nr), lanes), panel(nr, True), panel(lanes, True))
        body = (
            loop("_at_p", whole, panel(nr, False)),
            loop("_at_p", ceildiv(count, nr), rest, begin=whole),
        )
        return If(_is("gt", _at("rows"), FEW[-1]), Block(body))

    def pack_values(self) -> list[Stmt]:
        if self.values is None:
            return []
        n, e = _at("n"), _at("e")
        index = (*self.batch_at, self.kv_head, _at("column") + n, e)
        store = Store(self.values, (*SCRATCH, n, e), self.widened(Load(self.v, index)))
        columns = loop("_at_e", self.spec.value_head, store, Kind.VECTOR)
        return [loop("_at_n", _at("count"), columns)]

    # ---- a tile of rows

    def row_tile(self) -> list[Stmt]:
        columns = _at("count")
        if not self.spec.causal:
            return [_let("columns", columns), *self.tile_steps()]
        last = self.last_query(_at("first") + _at("start"), _at("height"))
        columns = minimum(columns, last + 1 - _at("column"))
        # The first block has a column for every row, unless there are none at all.
        some = _is("ge", _at("columns"), minimum(1, self.spec.kv_len))
        return [_let("columns", columns), If(some, Block(tuple(self.tile_steps())))]

    def tile_steps(self) -> list[Stmt]:
        return [
            If(_is("gt", _at("rows"), FEW[-1]), self.scores_call(), self.dots()),
            *self.softmax(),
            self.values_call(),
        ]

    def switch(self, heights: Sequence[int], call: Callable[[int], Call]) -> Stmt:
        return Switch(_at("height"), tuple((h, call(h)) for h in heights))

    def scores_call(self) -> Stmt:
        nr, lanes, columns = self.tile.NR, self.tile.lanes, _at("columns")
        # What is left behind whole panels takes one vector of them, or both.
        wide = floordiv(columns + (nr - lanes - 1), nr)
        narrow = ceildiv(maximum(columns - _at("wide") * nr, 0), lanes)
        head = self.spec.head

        def call(height: int) -> Call:
            return Call(
                scores_kernel_name(self.compute, height, self.tile, head),
                (*symbolic(head), _at("wide"), _at("narrow")),
                (
                    (self.queries, (*SCRATCH, _at("start"), ZERO)),
                    (self.panels, (*SCRATCH, ZERO, ZERO, ZERO)),
                    (self.scores, (*SCRATCH, ZERO, ZERO)),
                ),
            )

        return Block(
            (_let("wide", wide), _let("narrow", narrow), self.switch(self.tall, call))
        )

    def dots(self) -> Stmt:
        i, n, d = _at("i"), _at("n"), _at("d")
        index = (*self.batch_at, self.kv_head, _at("column") + n, d)
        product_ = Binary(
            "mul",
            Load(self.queries, (*SCRATCH, _at("start") + i, d)),
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
        return loop("_at_i", _at("height"), loop("_at_n", _at("columns"), body))

    def values_call(self) -> Stmt:
        head = self.spec.value_head
        if self.values is None:
            ldv = self.spec.v_strides[-2]
            source = (self.v, (*self.batch_at, self.kv_head, _at("column"), ZERO))
        else:
            ldv = head
            source = (self.values, (*SCRATCH, ZERO, ZERO))

        def call(height: int) -> Call:
            return Call(
                values_kernel_name(self.compute, height, self.tile, head),
                (*symbolic(head), _at("columns"), ldv, _at("b")),
                (
                    (self.scores, (*SCRATCH, ZERO, ZERO)),
                    source,
                    (self.stats, (*SCRATCH, FACTOR, _at("start"))),
                    (self.result, (*SCRATCH, _at("start"), ZERO)),
                ),
            )

        return self.switch(self.heights, call)

    # ---- softmax of a tile

    def softmax(self) -> list[Stmt]:
        """Scores become probabilities, up to a factor of their row.

        In two loops over the rows: the maximum of a row is a long chain of
        instructions, which those of the next rows fill; no branch depends on it.
        """
        rows = minimum(_at("height"), _at("rows") - _at("start"))
        return [
            _let("tile_rows", rows),
            loop("_at_i", _at("tile_rows"), Block(tuple(self.find_maximum()))),
            loop("_at_i", _at("tile_rows"), Block(tuple(self.raise_scores()))),
        ]

    def seen(self, query: Expr) -> Expr:
        """How many columns of the tile a query sees."""
        if not self.spec.causal:
            return _at("columns")
        return maximum(minimum(_at("columns"), query + 1 - _at("column")), 0)

    def stat(self, which: Expr) -> tuple[Expr, ...]:
        return (*SCRATCH, which, _at("start") + _at("i"))

    def scored(
        self,
        head: Expr,
        query: Expr,
        columns: Sequence[tuple[LoopValue, LoopValue | None]],
        key: Expr,
    ) -> tuple[list[Stmt], list[Scored]]:
        """What the row computes once, and the scores that softmax sees."""
        if self.spec.score is None:
            return [], [Scored((), found) for found, _ in columns]
        index = (*self.batch_at, head, _at("row_query"))
        keyed = [(found, inside, key) for found, inside in columns]
        names = frozenset({"_at_c", "_at_j"})
        once, scored = self.spec.score(index, keyed, names)
        return [_let("row_query", query), *once], scored

    def find_maximum(self) -> list[Stmt]:
        """Adds the mask; the maximum so far, and the factor for what came before it.

        The maximum need not keep NaN, the sum does: so it is a comparison and a choice
        in registers, one instruction, and not an accumulator.
        """
        compute, nr = self.compute, self.tile.NR
        c, j = _at("c"), _at("j")
        lets, head, query = self.position(_at("first") + _at("start") + _at("i"))
        best = buffer("_at_best", compute, (nr,), Role.REGISTER)
        lowest = Const(float("-inf"), compute)
        score, highest = Read("_at_score", compute), Read("_at_highest", compute)
        at = c * nr + j
        inside, place = _is("lt", at, _at("seen")), (*SCRATCH, _at("i"), at)
        found = Load(self.scores, place)
        once, scored = self.scored(
            head, query, [(found, None), (found, inside)], _at("column") + at
        )

        def columns(tail: bool) -> Stmt:
            changed = scored[tail]
            value = Select(inside, changed.value, lowest) if tail else changed.value
            top = Load(best, (j,))
            chosen = Select(Binary("gt", score, top), score, top)
            body = (
                *changed.body,
                Local("_at_score", compute, value),
                *([Store(self.scores, place, score)] if changed.body else []),
                Store(best, (j,), chosen),
            )
            return loop("_at_j", nr, Block(body), Kind.VECTOR)

        before, after = Read("_at_before", compute), Read("_at_after", compute)
        both = Select(Binary("gt", highest, before), highest, before)
        change = Unary("decay", Binary("sub", before, self.shift(after)))
        whole = floordiv(_at("seen"), nr)
        return [
            *(lets if self.spec.causal or self.spec.score is not None else []),
            _let("seen", self.seen(query)),
            *once,
            Alloc(best),
            loop("_at_j", nr, Store(best, (j,), lowest), Kind.VECTOR),
            loop("_at_c", whole, columns(tail=False)),
            loop("_at_c", ceildiv(_at("seen"), nr), columns(tail=True), begin=whole),
            Accumulator("_at_highest", compute, "max"),
            loop("_at_j", nr, Accumulate("_at_highest", Load(best, (j,))), Kind.VECTOR),
            Local("_at_before", compute, Load(self.stats, self.stat(MAXIMUM))),
            Local("_at_after", compute, both),
            Store(self.stats, self.stat(MAXIMUM), after),
            If(
                _is("gt", _at("b"), 0),
                Store(self.stats, self.stat(FACTOR), change),
                Store(self.stats, self.stat(FACTOR), Const(1.0, compute)),
            ),
        ]

    def raise_scores(self) -> list[Stmt]:
        """exp of the scores, and their sum."""
        compute, j = self.compute, _at("j")
        score = (*SCRATCH, _at("i"), j)
        power, shift = Read("_at_power", compute), Read("_at_shift", compute)
        highest = Load(self.stats, self.stat(MAXIMUM))
        below = Binary("sub", Load(self.scores, score), shift)
        body = Block(
            (
                Local("_at_power", compute, Unary("decay", below)),
                Store(self.scores, score, power),
                Accumulate("_at_sum", power),
            )
        )
        total = Fma(
            Load(self.stats, self.stat(SUM)),
            Load(self.stats, self.stat(FACTOR)),
            Read("_at_sum", compute),
        )
        steps: list[Stmt] = [
            Local("_at_shift", compute, self.shift(highest)),
            Accumulator("_at_sum", compute, "sum"),
            loop("_at_j", _at("seen"), body, Kind.VECTOR),
            Store(self.stats, self.stat(SUM), total),
        ]
        lets: list[Stmt] = []
        query = ZERO
        if self.spec.causal:
            lets, _, query = self.position(_at("first") + _at("start") + _at("i"))
            hidden = Store(self.scores, score, zero(compute))
            steps.append(
                loop("_at_j", _at("columns"), hidden, Kind.VECTOR, begin=_at("seen"))
            )
        return [*lets, _let("seen", self.seen(query)), *steps]

    def shift(self, highest: LoopValue) -> LoopValue:
        """What is subtracted: the maximum, or 0 where all columns are masked."""
        lowest = Const(float("-inf"), self.compute)
        return Select(Binary("eq", highest, lowest), zero(self.compute), highest)
