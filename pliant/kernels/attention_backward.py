"""Gradients of attention in one pass over tiles; the weights are recomputed.

    w = exp(score(scale * q x k.T) - lse)      ds = w * (dout x v.T - sum(dout * out))
    dq = scale * ds x k       dk = ds.T x (scale * q)       dv = w.T x dout

Each pair of a block of keys and a block of rows takes five products, all between
panels, tiles and rows that are in L1 or L2. The weights never leave those caches. A
unit of work is a key head with all query heads that share it. It owns its dk and dv and
the dq of its heads, so threads share nothing and sums are taken in a fixed order.

    for unit in batch x key heads  parallel
      for block of keys
        pack keys and values into panels (D, NR)
        dk, dv = 0                                  in scratch
        for query head of the group, block of rows  those above the diagonal not at all
          rows = scale * q;  grads = dout;  below = sum(dout * out)
          for tile of up to MR rows
            w = rows x key panels;  ds = grads x value panels
            w = exp(score(w) - lse);  ds = w * (ds - below)
            dq += scale * ds x keys
          for tile of up to MR keys
            dv += w.T x grads;  dk += ds.T x rows
        store dk, dv

A row with every column at -inf has an lse of -inf. Its weights are exp(-inf - 0), so
its gradients are 0 where its result is 0, and NaN where its result is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pliant.ir.loop_walk import size_symbols
from pliant.ir.loops import (
    WORKER,
    Accumulate,
    Accumulator,
    Binary,
    Block,
    Buffer,
    Call,
    Cast,
    Const,
    Fma,
    For,
    If,
    Kind,
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
    as_dtype,
    buffer,
)
from pliant.kernels.attention_backward_tiles import (
    ROWS,
    backward_blocking,
    keys_kernel,
    keys_kernel_name,
)
from pliant.kernels.attention_spec import (
    AttentionBackward,
    AttentionKernel,
    at_,
    is_,
    let,
    scale_of,
)
from pliant.kernels.attention_tiles import (
    loop,
    pack_panels,
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
    sym,
)

SCRATCH = (sym(WORKER),)
BELOW, SHIFT = as_expr(0), as_expr(1)  # rows of the statistics buffer


def attention_backward(
    name: str, spec: AttentionBackward, target: Target
) -> AttentionKernel:
    return _BackwardKernels(spec, target).build(name)


class _BackwardKernels:
    """Builds the loops of one backward op; names as in the module docstring."""

    batch_at: tuple[Expr, ...]
    kv_head: Expr

    def __init__(self, spec: AttentionBackward, target: Target) -> None:
        self.spec, self.of = spec, spec.forward
        of, compute = self.of, self.of.dtype.compute
        self.compute = compute
        self.tile = backward_blocking(compute, target)
        self.keys_most = self.tile.KC - self.tile.lanes
        self.heights = range(self.tile.step, self.tile.MR + 1, self.tile.step)
        self.group = ONE if of.heads == of.kv_heads else floordiv(of.heads, of.kv_heads)
        self.operands()
        self.scratch()

    def operands(self) -> None:
        of, spec, dtype = self.of, self.spec, self.of.dtype
        query = (*of.batch, of.heads, of.q_len)
        key = (*of.batch, of.kv_heads, of.kv_len)

        def given(
            name: str, shape: tuple[Expr, ...], steps: tuple[Expr, ...]
        ) -> Buffer:
            return buffer(f"_at_{name}", dtype, shape, Role.IN, steps)

        self.grad = given("grad", (*query, of.value_head), spec.grad_strides)
        self.out = given("out", (*query, of.value_head), of.out_strides)
        lse = ("_at_lse", self.compute, query, Role.IN, spec.lse_strides)
        self.lse = buffer(*lse)
        self.q = given("q", (*query, of.head), of.q_strides)
        self.k = given("k", (*key, of.head), of.k_strides)
        self.v = given("v", (*key, of.value_head), of.v_strides)

        def result(
            name: str, shape: tuple[Expr, ...], steps: tuple[Expr, ...]
        ) -> Buffer:
            role = Role.INOUT if name == "dq" else Role.OUT
            return buffer(f"_at_{name}", dtype, shape, role, steps)

        self.dq = result("dq", (*query, of.head), spec.dq_strides)
        self.dk = result("dk", (*key, of.head), spec.dk_strides)
        self.dv = result("dv", (*key, of.value_head), spec.dv_strides)

    def scratch(self) -> None:
        of, compute, step, nr = self.of, self.compute, self.tile.step, self.tile.NR

        def work(name: str, *shape: Expr | int) -> Buffer:
            return buffer(f"_at_{name}", compute, (THREADS, *shape), Role.WORK)

        rows = ceildiv(minimum(ROWS, of.q_len), step) * step
        keys = minimum(self.keys_most, of.kv_len)
        room = ceildiv(keys, step) * step
        self.rows = work("rows", rows, of.head)
        self.grads = work("grads", rows, of.value_head)
        self.stats = work("stats", 2, rows)
        self.key_panels = work("key_panels", ceildiv(keys, nr), of.head, nr)
        self.value_panels = work("value_panels", ceildiv(keys, nr), of.value_head, nr)
        self.weights = work("weights", rows, self.tile.KC)
        self.changes = work("changes", rows, self.tile.KC)
        self.sum_q = work("sum_q", self.tile.MR, of.head)
        self.sum_k = work("sum_k", room, of.head)
        self.sum_v = work("sum_v", room, of.value_head)
        # Keys are read in place if their rows are contiguous and of the compute type.
        in_place = of.dtype is compute and of.k_strides[-1] == ONE
        self.keys = None if in_place else work("keys", keys, of.head)
        # dq is summed in place if it has the compute type.
        own = self.group, of.q_len, of.head
        self.total_q = None if of.dtype is compute else work("total_q", *own)

    # ---- the whole

    def build(self, name: str) -> AttentionKernel:
        given = (self.grad, self.out, self.lse, self.q, self.k, self.v, *self.of.reads)
        work: list[Buffer] = [self.rows, self.grads, self.stats]
        work += [self.key_panels, self.value_panels, self.weights, self.changes]
        work += [self.sum_q, self.sum_k, self.sum_v]
        work += [extra for extra in (self.keys, self.total_q) if extra is not None]
        buffers = (*given, self.dq, self.dk, self.dv, *work)
        body = self.body()
        function = LoopFunc(name, size_symbols(body, buffers), buffers, body)
        return AttentionKernel(function, tuple(self.helpers()), tuple(work))

    def helpers(self) -> list[LoopFunc]:
        tile, compute = self.tile, self.compute
        heads = dict.fromkeys((self.of.head, self.of.value_head))
        found: dict[str, LoopFunc] = {}
        for height in self.heights:
            made = [values_kernel(compute, height, tile, self.of.head)]
            made += [scores_kernel(compute, height, tile, head) for head in heads]
            made += [keys_kernel(compute, height, tile, head) for head in heads]
            found.update((func.name, func) for func in made)
        return list(found.values())

    def body(self) -> Stmt:
        of = self.of
        extents = (*of.batch, of.kv_heads)
        lets, at = unflatten_unit(at_("u"), extents)
        self.batch_at, self.kv_head = at[:-1], at[-1]
        pairs = self.group * of.q_len * of.kv_len
        work = 3 * pairs * (of.head + of.value_head)
        grain = grain_of(work)
        unit = Block((*lets, *self.unit()))
        blocks = maximum(ceildiv(of.kv_len, self.keys_most), 1)
        lanes = self.tile.lanes
        cut = ceildiv(ceildiv(of.kv_len, at_("kv_blocks")), lanes) * lanes
        row_blocks = ceildiv(of.q_len, ROWS)
        high = ceildiv(of.q_len, maximum(at_("row_blocks"), 1))
        return Block(
            (
                let("kv_blocks", blocks),
                let("length", cut),
                let("row_blocks", row_blocks),
                # Blocks are whole steps, so that only the last one computes unused
                # rows.
                let("block_rows", self.stepped(high)),
                For("_at_u", ZERO, product(extents), unit, Kind.PARALLEL, grain=grain),
            )
        )

    def stepped(self, count: Expr) -> Expr:
        return ceildiv(count, self.tile.step) * self.tile.step

    def tiles(self, name: str, count: Expr, body: Sequence[Stmt]) -> Stmt:
        """Runs the body on rows or keys cut evenly into tiles of whole steps."""
        step, number = self.tile.step, at_(f"{name}_tiles")
        t, steps = at_(name), ceildiv(count, step)
        tiles = maximum(number, 1)
        even, over = floordiv(steps, tiles), mod(steps, tiles)
        inner = Block(
            (
                let("start", (t * even + minimum(t, over)) * step),
                let("height", floordiv(steps + tiles - 1 - t, tiles) * step),
                *body,
            )
        )
        many = let(f"{name}_tiles", ceildiv(count, self.tile.MR))
        return Block((many, loop(f"_at_{name}", number, inner)))

    # ---- a unit

    def unit(self) -> list[Stmt]:
        column, count = at_("column"), at_("count")
        length, b = at_("length"), at_("b")
        begin = ZERO
        if self.of.causal:
            begin = floordiv(column, maximum(at_("block_rows"), 1))
        blocks = For("_at_r", begin, at_("row_blocks"), self.row_block())
        heads = loop("_at_g", self.group, blocks)
        block = Block(
            (
                let("column", b * length),
                let("count", maximum(minimum(length, self.of.kv_len - column), 0)),
                self.pack(self.k, self.key_panels, self.of.head),
                self.pack(self.v, self.value_panels, self.of.value_head),
                *self.copy_keys(),
                self.clear(self.sum_k, self.stepped(count), self.of.head),
                self.clear(self.sum_v, self.stepped(count), self.of.value_head),
                heads,
                self.store(self.sum_k, self.dk, self.of.head),
                self.store(self.sum_v, self.dv, self.of.value_head),
            )
        )
        return [
            Local("_at_scale", self.compute, scale_of(self.of)),
            loop("_at_b", at_("kv_blocks"), block),
            *self.store_total(),
        ]

    def key_at(self, row: Expr, element: Expr) -> tuple[Expr, ...]:
        return (*self.batch_at, self.kv_head, at_("column") + row, element)

    def wide(self, value: LoopValue) -> LoopValue:
        return as_dtype(value, self.compute)

    def pack(self, source: Buffer, panels: Buffer, depth: Expr) -> Stmt:
        def element(row: Expr, d: Expr, where: LoopValue | None) -> LoopValue:
            return self.wide(Load(source, self.key_at(row, d), where))

        count = at_("count")
        return pack_panels(panels, SCRATCH, element, depth, count, self.tile)

    def copy_keys(self) -> list[Stmt]:
        if self.keys is None:
            return []
        n, d = at_("n"), at_("d")
        found = self.wide(Load(self.k, self.key_at(n, d)))
        store = Store(self.keys, (*SCRATCH, n, d), found)
        columns = loop("_at_d", self.of.head, store, Kind.VECTOR)
        return [loop("_at_n", at_("count"), columns)]

    def clear(self, target: Buffer, rows: Expr, width: Expr) -> Stmt:
        n, d = at_("n"), at_("d")
        store = Store(target, (*SCRATCH, n, d), zero(self.compute))
        return loop("_at_n", rows, loop("_at_d", width, store, Kind.VECTOR))

    def store(self, source: Buffer, target: Buffer, width: Expr) -> Stmt:
        n, d = at_("n"), at_("d")
        found = as_dtype(Load(source, (*SCRATCH, n, d)), target.dtype)
        store = Store(target, self.key_at(n, d), found)
        columns = loop("_at_d", width, store, Kind.VECTOR)
        return loop("_at_n", at_("count"), columns)

    def store_total(self) -> list[Stmt]:
        """Stores dq of the unit's heads, where it was summed in another type."""
        if self.total_q is None:
            return []
        g, i, d = at_("g"), at_("i"), at_("d")
        found = Cast(Load(self.total_q, (*SCRATCH, g, i, d)), self.dq.dtype)
        index = (*self.batch_at, self.head(), i, d)
        columns = loop("_at_d", self.of.head, Store(self.dq, index, found), Kind.VECTOR)
        return [loop("_at_g", self.group, loop("_at_i", self.of.q_len, columns))]

    # ---- a block of rows

    def head(self) -> Expr:
        if self.group == ONE:
            return self.kv_head
        return self.kv_head * self.group + at_("g")

    def row_at(self, row: Expr, *element: Expr) -> tuple[Expr, ...]:
        return (*self.batch_at, self.head(), at_("first") + row, *element)

    def row_block(self) -> Stmt:
        first, height = at_("first"), at_("block_rows")
        columns = at_("count")
        if self.of.causal:
            columns = minimum(columns, first + at_("high") - at_("column"))
        return Block(
            (
                let("first", at_("r") * height),
                let("high", minimum(height, self.of.q_len - first)),
                let("columns", columns),
                self.load_rows(),
                self.tiles("t", at_("high"), self.row_tile()),
                self.tiles("k", at_("columns"), self.key_tile()),
            )
        )

    def load_rows(self) -> Stmt:
        """Copies scaled queries and gradients; computes each row's `below`."""
        i, d, e, compute = at_("i"), at_("d"), at_("e"), self.compute
        query = self.wide(Load(self.q, self.row_at(i, d)))
        scaled = Binary("mul", query, Read("_at_scale", compute))
        grad = Read("_at_change", compute)
        part = Binary("mul", grad, self.wide(Load(self.out, self.row_at(i, e))))
        change = Block(
            (
                Local(
                    "_at_change", compute, self.wide(Load(self.grad, self.row_at(i, e)))
                ),
                Store(self.grads, (*SCRATCH, i, e), grad),
                Accumulate("_at_below", part),
            )
        )
        lse = Read("_at_sum", compute)
        hidden = Binary("eq", lse, Const(float("-inf"), compute))
        row = (
            loop(
                "_at_d",
                self.of.head,
                Store(self.rows, (*SCRATCH, i, d), scaled),
                Kind.VECTOR,
            ),
            Accumulator("_at_below", compute, "sum"),
            loop("_at_e", self.of.value_head, change, Kind.VECTOR),
            Store(self.stats, (*SCRATCH, BELOW, i), Read("_at_below", compute)),
            Local("_at_sum", compute, Load(self.lse, self.row_at(i))),
            Store(self.stats, (*SCRATCH, SHIFT, i), Select(hidden, zero(compute), lse)),
        )
        return loop("_at_i", at_("high"), Block(row))

    # ---- a tile of rows

    def row_tile(self) -> list[Stmt]:
        seen = at_("count")
        if self.of.causal:
            last = at_("first") + at_("start") + at_("height")
            seen = maximum(minimum(at_("columns"), last - at_("column")), 0)
        nr, lanes = self.tile.NR, self.tile.lanes
        # The remainder after whole panels takes one vector of a panel, or both.
        wide = floordiv(at_("across") + (nr - lanes - 1), nr)
        narrow = ceildiv(maximum(at_("across") - at_("wide") * nr, 0), lanes)
        return [
            let("across", seen),
            let("wide", wide),
            let("narrow", narrow),
            self.scores(self.rows, self.key_panels, self.weights, self.of.head),
            self.scores(
                self.grads, self.value_panels, self.changes, self.of.value_head
            ),
            let("tile_rows", minimum(at_("height"), at_("high") - at_("start"))),
            loop("_at_i", at_("tile_rows"), Block(tuple(self.weigh()))),
            self.product_q(),
            loop("_at_i", at_("tile_rows"), self.add_q()),
        ]

    def switch(self, call: Callable[[int], Call]) -> Stmt:
        return Switch(at_("height"), tuple((h, call(h)) for h in self.heights))

    def scores(self, left: Buffer, panels: Buffer, out: Buffer, head: Expr) -> Stmt:
        def call(height: int) -> Call:
            return Call(
                scores_kernel_name(self.compute, height, self.tile, head),
                (*symbolic(head), at_("wide"), at_("narrow")),
                (
                    (left, (*SCRATCH, at_("start"), ZERO)),
                    (panels, (*SCRATCH, ZERO, ZERO, ZERO)),
                    (out, (*SCRATCH, at_("start"), ZERO)),
                ),
            )

        return self.switch(call)

    def weigh(self) -> list[Stmt]:
        """Row i of a tile: scores become weights, and dout x v.T becomes ds."""
        compute, j, row = self.compute, at_("j"), at_("start") + at_("i")
        query = at_("first") + row
        seen = at_("across")
        if self.of.causal:
            seen = maximum(minimum(seen, query + 1 - at_("column")), 0)
        here = (*SCRATCH, row, j)
        score: LoopValue = Load(self.weights, here)
        once: list[Stmt] = []
        body: list[Stmt] = []
        if self.of.score is not None:
            index = (*self.batch_at, self.head(), at_("row_query"))
            columns = [(score, None, at_("column") + j)]
            once, (scored,) = self.of.score(index, columns, frozenset({"_at_j"}))
            body, score = list(scored.body), scored.value
        weight = Read("_at_weight", compute)
        shifted = Binary("sub", score, Read("_at_shift", compute))
        below = Binary("sub", Load(self.changes, here), Read("_at_below", compute))
        body += [
            Local("_at_weight", compute, Unary("decay", shifted)),
            Store(self.weights, here, weight),
            Store(self.changes, here, Binary("mul", weight, below)),
        ]
        steps: list[Stmt] = [
            let("row_query", query),
            let("seen", seen),
            *once,
            Local("_at_shift", compute, Load(self.stats, (*SCRATCH, SHIFT, row))),
            Local("_at_below", compute, Load(self.stats, (*SCRATCH, BELOW, row))),
            loop("_at_j", at_("seen"), Block(tuple(body)), Kind.VECTOR),
        ]
        if self.of.causal:
            nothing = zero(compute)
            hide = Block(
                (Store(self.weights, here, nothing), Store(self.changes, here, nothing))
            )
            # Up to a whole tile of keys: the columns beyond belong to later rows.
            end = self.stepped(at_("columns"))
            rest = loop("_at_j", end, hide, Kind.VECTOR, begin=at_("seen"))
            steps.append(rest)
        return steps

    def product_q(self) -> Stmt:
        head = self.of.head
        if self.keys is None:
            ldk = self.of.k_strides[-2]
            source = (self.k, self.key_at(ZERO, ZERO))
        else:
            ldk, source = head, (self.keys, (*SCRATCH, ZERO, ZERO))

        def call(height: int) -> Call:
            return Call(
                values_kernel_name(self.compute, height, self.tile, head),
                (*symbolic(head), at_("across"), ldk, ZERO),
                (
                    (self.changes, (*SCRATCH, at_("start"), ZERO)),
                    source,
                    (self.stats, (*SCRATCH, BELOW, ZERO)),  # not read
                    (self.sum_q, (*SCRATCH, ZERO, ZERO)),
                ),
            )

        return self.switch(call)

    def add_q(self) -> Stmt:
        """dq += scale * the tile's part; the first block of keys stores it."""
        i, d, row = at_("i"), at_("d"), at_("start") + at_("i")
        if self.total_q is None:
            target, index = self.dq, self.row_at(row, d)
        else:
            target = self.total_q
            index = (*SCRATCH, at_("g"), at_("first") + row, d)
        part = Load(self.sum_q, (*SCRATCH, i, d))
        scale = Read("_at_scale", self.compute)
        whole = Store(target, index, Binary("mul", part, scale))
        more = Store(target, index, Fma(part, scale, Load(target, index)))

        def columns(store: Stmt) -> Stmt:
            return loop("_at_d", self.of.head, store, Kind.VECTOR)

        return If(is_("gt", at_("b"), 0), columns(more), columns(whole))

    # ---- a tile of keys

    def key_tile(self) -> list[Stmt]:
        """Adds to dv and dk of the tile's keys, from the first row that sees one."""
        begin = ZERO
        if self.of.causal:
            begin = maximum(at_("column") + at_("start") - at_("first"), 0)
        return [
            let("begin", begin),
            self.product_k(self.weights, self.grads, self.sum_v, self.of.value_head),
            self.product_k(self.changes, self.rows, self.sum_k, self.of.head),
        ]

    def product_k(self, left: Buffer, rows: Buffer, total: Buffer, head: Expr) -> Stmt:
        def call(height: int) -> Call:
            return Call(
                keys_kernel_name(self.compute, height, self.tile, head),
                (*symbolic(head), at_("high") - at_("begin")),
                (
                    (left, (*SCRATCH, at_("begin"), at_("start"))),
                    (rows, (*SCRATCH, at_("begin"), ZERO)),
                    (total, (*SCRATCH, at_("start"), ZERO)),
                ),
            )

        return self.switch(call)
