"""Softmax of a tile of scores, updated with every block of keys."""

from __future__ import annotations

from collections.abc import Sequence

from pliant.ir.loops import (
    Accumulate,
    Accumulator,
    Alloc,
    Binary,
    Block,
    Const,
    Fma,
    If,
    Kind,
    Load,
    Local,
    LoopValue,
    Read,
    Role,
    Select,
    Stmt,
    Store,
    Unary,
    buffer,
)
from pliant.kernels.attention_rows import FACTOR, MAXIMUM, SCRATCH, SUM, Rows
from pliant.kernels.attention_spec import Scored, at_, is_, let
from pliant.kernels.attention_tiles import loop
from pliant.kernels.micro import zero
from pliant.sym import ZERO, Expr, ceildiv, floordiv, maximum, minimum


class Softmax(Rows):
    """Turns scores in scratch into weights; keeps maximum and sum of every row."""

    def softmax(self) -> list[Stmt]:
        """Turns scores into probabilities, up to a factor per row.

        There are two loops over the rows. The maximum of a row is a long dependency
        chain; in a loop of its own the chains of several rows overlap, as no branch
        depends on them.
        """
        rows = minimum(at_("height"), at_("rows") - at_("start"))
        return [
            let("tile_rows", rows),
            loop("_at_i", at_("tile_rows"), Block(tuple(self.find_maximum()))),
            loop("_at_i", at_("tile_rows"), Block(tuple(self.raise_scores()))),
        ]

    def seen(self, query: Expr) -> Expr:
        """How many columns of the tile a query sees."""
        if not self.spec.causal:
            return at_("columns")
        seen = self.past + query + 1 - at_("column")
        return maximum(minimum(at_("columns"), seen), 0)

    def stat(self, which: Expr) -> tuple[Expr, ...]:
        return (*SCRATCH, which, at_("start") + at_("i"))

    def scored(
        self,
        head: Expr,
        query: Expr,
        columns: Sequence[tuple[LoopValue, LoopValue | None]],
        key: Expr,
    ) -> tuple[list[Stmt], list[Scored]]:
        """The statements a row computes once, and the scores that softmax sees."""
        if self.spec.score is None:
            return [], [Scored((), found) for found, _ in columns]
        index = (*self.batch_at, head, at_("row_query"))
        keyed = [(found, inside, key) for found, inside in columns]
        names = frozenset({"_at_c", "_at_j"})
        once, scored = self.spec.score(index, keyed, names)
        return [let("row_query", query), *once], scored

    def find_maximum(self) -> list[Stmt]:
        """Scores the row; updates its maximum and the factor for the earlier result.

        The maximum need not propagate NaN, as the sum does. So it is a compare and
        select in registers, one instruction, instead of an accumulator.
        """
        compute, nr = self.compute, self.tile.NR
        c, j = at_("c"), at_("j")
        lets, head, query = self.position(at_("first") + at_("start") + at_("i"))
        best = buffer("_at_best", compute, (nr,), Role.REGISTER)
        lowest = Const(float("-inf"), compute)
        score, highest = Read("_at_score", compute), Read("_at_highest", compute)
        at = c * nr + j
        inside, place = is_("lt", at, at_("seen")), (*SCRATCH, at_("i"), at)
        found = Load(self.scores, place)
        once, scored = self.scored(
            head, query, [(found, None), (found, inside)], at_("column") + at
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
        whole = floordiv(at_("seen"), nr)
        return [
            *(lets if self.spec.causal or self.spec.score is not None else []),
            let("seen", self.seen(query)),
            *once,
            Alloc(best),
            loop("_at_j", nr, Store(best, (j,), lowest), Kind.VECTOR),
            loop("_at_c", whole, columns(tail=False)),
            loop("_at_c", ceildiv(at_("seen"), nr), columns(tail=True), begin=whole),
            Accumulator("_at_highest", compute, "max"),
            loop("_at_j", nr, Accumulate("_at_highest", Load(best, (j,))), Kind.VECTOR),
            Local("_at_before", compute, Load(self.stats, self.stat(MAXIMUM))),
            Local("_at_after", compute, both),
            Store(self.stats, self.stat(MAXIMUM), after),
            If(
                is_("gt", at_("b"), 0),
                Store(self.stats, self.stat(FACTOR), change),
                Store(self.stats, self.stat(FACTOR), Const(1.0, compute)),
            ),
        ]

    def raise_scores(self) -> list[Stmt]:
        """Replaces the scores by their exp, and adds up the sum."""
        compute, j = self.compute, at_("j")
        score = (*SCRATCH, at_("i"), j)
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
            loop("_at_j", at_("seen"), body, Kind.VECTOR),
            Store(self.stats, self.stat(SUM), total),
        ]
        lets: list[Stmt] = []
        query = ZERO
        if self.spec.causal:
            lets, _, query = self.position(at_("first") + at_("start") + at_("i"))
            hidden = Store(self.scores, score, zero(compute))
            steps.append(
                loop("_at_j", at_("columns"), hidden, Kind.VECTOR, begin=at_("seen"))
            )
        return [*lets, let("seen", self.seen(query)), *steps]

    def shift(self, highest: LoopValue) -> LoopValue:
        """What is subtracted: the maximum, or 0 where all columns are masked."""
        lowest = Const(float("-inf"), self.compute)
        return Select(Binary("eq", highest, lowest), zero(self.compute), highest)
