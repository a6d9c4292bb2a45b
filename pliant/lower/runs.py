"""Sums in runs: the rounding error of a sum does not grow with its number of terms.

Terms added one after another lose about one rounding error each. So a run of terms is
summed by itself, and the sums of the runs are added up in f64:

    accumulator $sum_total = sum : f64
    for _run_d0 = 0 to ceildiv(n, 32) {
      accumulator $sum_run = sum : f32
      for _d0 = 32*_run_d0 to min(n, 32*_run_d0 + 32) { accumulate $sum_run, .. }
      accumulate $sum_total, cast($sum_run, f64)
    }
    local $sum = cast($sum_total, f32)

A sum of f64 has no wider type: its runs are summed in groups of as many, the groups in
batches, and those in the total. A sum that is known to be of one run is a plain loop,
and so are products, maxima and sums of integers. Several reduced axes share a run:
where the inner axis is short, a run takes as many turns of the outer one as fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pliant.ir.loop_walk import Node, rewrite
from pliant.ir.loops import (
    Accumulate,
    Accumulator,
    Block,
    For,
    Kind,
    Local,
    Read,
    Stmt,
    as_dtype,
)
from pliant.ir.types import DType
from pliant.lower.domain import Axis
from pliant.lower.nest import block
from pliant.sym import (
    ONE,
    ZERO,
    Expr,
    Facts,
    ceildiv,
    floordiv,
    le,
    maximum,
    minimum,
    product,
    sym,
)

WIDE = DType.F64
# Terms that are added one after another: where all their rounding errors point one way,
# the sum is off by up to a quarter of RUN units. A run's end costs conversions and two
# additions for each vector, a tenth of what 32 terms cost.
RUN = 32
# A vector loop along a row has up to this many partial sums for each lane, and adds
# them up at the end of a run.
PARTIALS = 4


@dataclass(frozen=True, slots=True)
class AxisSpan:
    """The part of an axis that a nest runs over."""

    axis: str
    begin: Expr
    end: Expr
    most: Expr  # no part has more turns

    @staticmethod
    def whole(axis: Axis) -> AxisSpan:
        return AxisSpan(axis.name, ZERO, axis.extent, axis.extent)

    def block(self, number: Expr, length: Expr) -> AxisSpan:
        """One of the blocks that it is cut into."""
        begin = self.begin + length * number
        end = minimum(self.end, begin + length)
        return AxisSpan(self.axis, begin, end, minimum(self.most, length))


@dataclass(frozen=True, slots=True)
class Runs:
    """How a nest adds up: along its last axis by lanes, or term by term."""

    facts: Facts
    lanes: int | None = None

    @property
    def partials(self) -> int:
        """Terms of the last axis that are added to different partial sums."""
        return 1 if self.lanes is None else PARTIALS * self.lanes

    def chain(self, terms: Expr) -> Expr:
        """How many terms of the last axis, at most, are added to one partial sum."""
        if self.lanes is None:
            return terms
        if not terms.is_const:
            return ceildiv(terms, self.partials) + 1
        # What fills no vector is added by half a vector, a quarter, and so on.
        return ceildiv(terms, self.partials) + (terms.value % self.lanes).bit_count()

    def nest(
        self,
        spans: Sequence[AxisSpan],
        body: Sequence[Stmt],
        accumulators: Sequence[Accumulator],
    ) -> list[Stmt]:
        """The accumulators, the loops over `spans` around the body, and the results.

        Each result has the name of its accumulator.
        """
        sums = [a for a in accumulators if a.op == "sum" and a.dtype.is_float]
        wide = any(a.dtype is WIDE for a in sums)
        *outer, last = [span.most for span in spans] or [ONE]
        chain = product(outer) * self.chain(last)
        sizes = [
            size
            for size in ((RUN**3, RUN**2, RUN) if wide else (RUN,))
            if not self.facts.prove(le(chain, size))
        ]
        if not sums or not sizes:
            return [*accumulators, self.loops(spans, body)]
        totals = {a.name: Accumulator(f"{a.name}_total", WIDE, "sum") for a in sums}
        results = [
            Local(a.name, a.dtype, as_dtype(Read(totals[a.name].name, WIDE), a.dtype))
            for a in sums
        ]
        declared = [totals.get(a.name, a) for a in accumulators]
        return [*declared, self.blocks(spans, body, sums, totals, sizes), *results]

    def blocks(
        self,
        spans: Sequence[AxisSpan],
        body: Sequence[Stmt],
        sums: Sequence[Accumulator],
        into: Mapping[str, Accumulator],
        sizes: Sequence[int],
    ) -> Stmt:
        """Loops over blocks of the spans; the sums of each block go `into` others."""
        size, *smaller = sizes
        name = ("run", "group", "batch")[len(smaller)]
        inside, turns = self.cut(spans, size, name)
        parts = {
            a.name: Accumulator(f"{a.name}_{name}", WIDE if smaller else a.dtype, "sum")
            for a in sums
        }
        if smaller:
            nest = self.blocks(inside, body, sums, parts, smaller)
        else:
            nest = self.loops(inside, [in_place_of(stmt, parts) for stmt in body])
        added = [
            Accumulate(into[name].name, as_dtype(Read(part.name, part.dtype), WIDE))
            for name, part in parts.items()
        ]
        stmt = block([*parts.values(), nest, *added])
        for turn in turns:
            stmt = replace(turn, body=stmt)
        return stmt

    def cut(
        self, spans: Sequence[AxisSpan], size: int, name: str
    ) -> tuple[list[AxisSpan], list[For]]:
        """One block, and the loops over all blocks, innermost first.

        In a block at most `size` terms are added to one partial sum. A turn of an axis
        that has more of them is in blocks of its own.
        """
        inside: list[AxisSpan] = []
        loops: list[For] = []
        each = ONE  # terms that a turn of the axis adds to a partial sum
        for k, span in enumerate(reversed(spans)):
            length = maximum(1, floordiv(size, maximum(each, 1)))
            length = length * self.partials if k == 0 else length
            each = self.chain(span.most) if k == 0 else each * span.most
            if not self.facts.prove(le(span.most, length)):
                number = f"_{name}{span.axis}"
                blocks = ceildiv(span.end - span.begin, length)
                loops.append(For(number, ZERO, blocks, Block(())))
                span = span.block(sym(number), length)
            inside.insert(0, span)
        return inside, loops

    def loops(self, spans: Sequence[AxisSpan], body: Sequence[Stmt]) -> Stmt:
        """Plain loops over the spans, the last of them by lanes if asked."""
        stmt = block(body)
        for k, span in enumerate(reversed(spans)):
            by_lanes = self.lanes is not None and k == 0
            kind = Kind.VECTOR if by_lanes else Kind.SERIAL
            stmt = For(span.axis, span.begin, span.end, stmt, kind)
        return stmt


def in_place_of(stmt: Stmt, parts: Mapping[str, Accumulator]) -> Stmt:
    """The statement with other accumulators in the place of some."""

    def changed(node: Node) -> Node:
        if isinstance(node, Accumulate) and node.name in parts:
            return replace(node, name=parts[node.name].name)
        return node

    return rewrite(stmt, changed)
