"""The operands, the scratch and the row numbers of attention."""

from __future__ import annotations

from pliant.ir.loops import (
    WORKER,
    Buffer,
    Cast,
    Load,
    LoopValue,
    Role,
    Stmt,
    buffer,
    dtype_of,
)
from pliant.kernels.attention_spec import Attention, at_, let
from pliant.kernels.attention_tiles import blocking
from pliant.kernels.choose import THREADS
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
    sym,
)

ROWS = 512  # rows of a unit: packing the keys costs about as much as 10 of them
# For these numbers of rows, dot products on unpacked keys are cheaper than packing.
FEW = (1, 2)
# Up to this many rows, the keys are split between threads that would be idle.
PART_ROWS = 16
LEAST_KEYS = 1024  # fewest keys of a part

SCRATCH = (sym(WORKER),)
MAXIMUM, SUM, FACTOR = map(as_expr, range(3))  # rows of the statistics buffer


class Rows:
    """The buffers of one attention op, and the head and query that a row stands for."""

    batch_at: tuple[Expr, ...]
    kv_head: Expr

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
        # Where every row sees all keys, or the last of them, keys may be split. Causal
        # rows from 0 on are as many as keys in use, and seldom few.
        self.is_split = not spec.causal or spec.first != 0
        # How many keys the first query sees before its own, and the keys in use.
        self.past, self.keys = ZERO, spec.kv_len
        if spec.first != 0:
            self.past = at_("past")
            self.keys = minimum(spec.kv_len, maximum(self.past + spec.q_len, 0))
        q_shape = (*batch, spec.heads, spec.q_len, spec.head)
        k_shape = (*batch, spec.kv_heads, spec.kv_len, spec.head)
        v_shape = (*batch, spec.kv_heads, spec.kv_len, spec.value_head)
        out_shape = (*batch, spec.heads, spec.q_len, spec.value_head)
        self.q = buffer("_at_q", spec.dtype, q_shape, Role.IN, spec.q_strides)
        self.k = buffer("_at_k", spec.dtype, k_shape, Role.IN, spec.k_strides)
        self.v = buffer("_at_v", spec.dtype, v_shape, Role.IN, spec.v_strides)
        self.out = buffer("_at_out", spec.dtype, out_shape, Role.OUT, spec.out_strides)
        self.lse = None
        if spec.lse:
            self.lse = buffer("_at_lse", compute, out_shape[:-1], Role.OUT)
        room = ceildiv(minimum(ROWS, self.rows), self.tile.step) * self.tile.step
        panels = minimum(self.tile.KC // nr, ceildiv(spec.kv_len, nr))

        def work(name: str, *shape: Expr | int) -> Buffer:
            return buffer(f"_at_{name}", compute, (THREADS, *shape), Role.WORK)

        self.queries = work("queries", room, spec.head)
        self.panels = work("panels", panels, spec.head, nr)
        self.scores = work("scores", self.tile.MR, self.tile.KC)
        self.result = work("result", room, spec.value_head)
        self.stats = work("stats", 3, room)
        # Where keys are split, each part keeps a row's result, maximum and sum. There
        # are fewer than twice as many parts as workers.
        few = minimum(PART_ROWS, self.rows)
        shape = (THREADS, as_expr(2), few, spec.value_head + 2)
        self.parts = buffer("_at_parts", compute, shape, Role.INOUT)
        # Values are read in place if their rows are contiguous and of the compute type.
        in_place = spec.dtype is compute and spec.v_strides[-1] == ONE
        length = minimum(self.tile.KC, spec.kv_len)
        self.values = None if in_place else work("values", length, spec.value_head)

    def position(self, row: Expr) -> tuple[list[Stmt], Expr, Expr]:
        """Head and query of a row of the key head, and statements that bind them."""
        if self.group == ONE:
            return [], self.kv_head, row
        length = maximum(self.spec.q_len, 1)
        lets: list[Stmt] = [
            let("head", self.kv_head * self.group + floordiv(row, length)),
            let("query", mod(row, length)),
        ]
        return lets, at_("head"), at_("query")

    def clamped_past(self) -> list[Stmt]:
        """Binds `past`, between what shows no key and what shows all: no overflow."""
        if self.past == ZERO:
            return []
        most = minimum(self.spec.first, self.spec.kv_len)
        return [let("past", maximum(most, -self.spec.q_len))]

    def last_query(self, first: Expr, rows: Expr) -> Expr:
        """The last query of a range of rows."""
        if self.group == ONE:
            return first + rows - 1
        length = maximum(self.spec.q_len, 1)
        return minimum(length - 1, mod(first, length) + rows - 1)

    def widened(self, load: Load) -> LoopValue:
        return Cast(load, self.compute) if dtype_of(load) != self.compute else load
