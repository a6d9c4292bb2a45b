"""The memory of a fused graph, and of regions of it that run in chunks, at some points.

A number of bytes is a vector here: one number for each point, an assignment of sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from pliant.ir.graph import Op, Value
from pliant.ir.types import DType
from pliant.passes.chunk_regions import FusedGraph, Member, Need, Region, outer_runs
from pliant.passes.cuts import Demand
from pliant.sym import Expr
from pliant.sym.points import Point

Numbers = NDArray[np.float64]
_Runs = tuple[DType, Expr, Expr]  # of rows: their type, all elements, number of runs


class Memory:
    """The memory of a fused graph whose kernels run one after the other, whole."""

    def __init__(self, of: FusedGraph, points: Sequence[Point]) -> None:
        self.of, self.points = of, points
        self._sizes: dict[Value, Numbers] = {}
        self._known: dict[Expr, Numbers] = {}
        self._known_runs: dict[Need, _Runs] = {}
        self.none = np.zeros(len(points))
        self.number = {op: k for k, op in enumerate(of.fusions)}
        results = {of.base(v) for v in of.graph.results}
        made = {v for op in of.fusions for v in op.results if v not in results}
        # The last kernel that makes or reads each value in the arena; results of the
        # graph have memory of their own.
        self.last: dict[Value, int] = {}
        for k, op in enumerate(of.fusions):
            for value in (*op.results, *map(of.base, op.operands)):
                if value in made:
                    self.last[value] = k
        self.after: list[Numbers] = []  # what is alive after each kernel
        self.plain = np.array(list(self._profile()))  # (kernels, points)

    def at_points(self, expr: Expr) -> Numbers:
        if expr not in self._known:
            self._known[expr] = np.array([float(expr.evaluate(p)) for p in self.points])
        return self._known[expr]

    def size(self, value: Value) -> Numbers:
        if value not in self._sizes:
            self._sizes[value] = self.at_points(value.type.bytes)
        return self._sizes[value]

    def runs(self, need: Need) -> _Runs:
        """Rows that are alike in this have the same bytes in each round."""
        if need not in self._known_runs:
            value, cut = need
            outer = outer_runs(value, cut)
            self._known_runs[need] = value.dtype, value.type.numel, outer
        return self._known_runs[need]

    def _profile(self) -> Iterator[Numbers]:
        """The bytes while each kernel runs."""
        dead: dict[int, list[Value]] = {}
        for value, k in self.last.items():
            dead.setdefault(k, []).append(value)
        live = self.none
        for k, op in enumerate(self.of.fusions):
            made = [v for v in op.results if v in self.last]
            live = sum(map(self.size, made), live)
            dying = dead.get(k, [])
            # Kernels without a product may write over what nobody reads again.
            over = op.str_attr("kind") in ("map", "row")
            yield live - (self._shared(dying, made) if over else 0.0)
            live = live - sum(map(self.size, dying), self.none)
            self.after.append(live)

    def _shared(self, dying: Iterable[Value], made: Sequence[Value]) -> Numbers:
        """Bytes of results that are written over operands."""
        free = [(v.dtype, v.shape) for v in dying if v not in made]
        total = self.none
        for value in made:
            if (value.dtype, value.shape) in free:
                free.remove((value.dtype, value.shape))
                total = total + self.size(value)
        return total


class RegionBytes:
    """The bytes of a region that grows: kernels join it, from the last to the first."""

    def __init__(self, memory: Memory, end: int) -> None:
        self.memory, self.end, self.first = memory, end, end
        none = memory.none
        self.others = none  # the peak of kernels in between that it does not have
        self.ending = none  # what it reads or makes, and nobody reads afterwards
        self.over = none  # of its results: what is written over operands
        self.copied = (
            none  # what has rows in each chunk: results, operands that are cut
        )
        self.whole = none  # operands that each chunk reads whole
        self.inner = none  # the most that a kernel reads and makes of the region's own
        self._inner: dict[Op, Numbers] = {}  # the same of each kernel
        self._count = 0
        self._reads: dict[Value, list[Demand]] = {}
        # Results and operands of which a round has the same rows, and no others.
        self._alike: dict[_Runs, tuple[int, int]] = {}

    def grow(self, region: Region) -> None:
        """Takes in the kernels that the region has more than the one before."""
        for member in region.grown[self._count : region.count]:
            self._join(member)
        self._count = region.count

    @property
    def held(self) -> Numbers:
        """What is alive while it runs, besides its chunks."""
        return self.memory.after[self.end] + self.ending - self.over

    def _join(self, member: Member) -> None:
        number, size = self.memory.number[member.op], self.memory.size
        if self.first - number > 1:
            between = self.memory.plain[number + 1 : self.first]
            self.others = np.maximum(self.others, between.max(axis=0))
        self.first = number
        self._inner[member.op] = self.memory.none
        for value in member.op.results:
            self._unread(value)
        for value in member.own:
            for op in (member.op, *self.memory.of.readers.get(value, ())):
                assert op is not None  # no result of the graph
                self._inner[op] = self._inner[op] + size(value)
                self.inner = np.maximum(self.inner, self._inner[op])
        for value in member.results:
            self.copied = self.copied + size(value)
            self._hold(value, 1)
            if value in self.memory.last:
                self._pair((value, member.cut(value)), results=1)
        for need in member.part.needs:
            self._read(need)

    def _ends(self, value: Value) -> bool:
        """Whether nobody reads a value in the arena after the region."""
        return self.memory.last.get(value, self.end + 1) <= self.end

    def _hold(self, value: Value, sign: int) -> None:
        if self._ends(value):
            self.ending = self.ending + sign * self.memory.size(value)

    def _read(self, need: Need) -> None:
        value, rows = need
        known = self._reads.setdefault(value, [])
        if rows in known:
            return
        if not known:
            self._hold(value, 1)
        if rows is None:
            self.whole = self.whole + self.memory.size(value)
        elif all(cut is None for cut in known):
            self.copied = self.copied + self.memory.size(value)
        known.append(rows)
        if self._ends(value):
            if len(known) == 1 and rows is not None:
                self._pair(need, operands=1)
            elif len(known) == 2 and known[0] is not None:
                self._pair((value, known[0]), operands=-1)

    def _unread(self, value: Value) -> None:
        """A kernel joins that makes the rows of a value: they are read no more."""
        for rows in self._reads.pop(value, ()):
            self.copied = self.copied - self.memory.size(value)
            self._hold(value, -1)
            if self._ends(value):
                self._pair((value, rows), operands=-1)

    def _pair(self, need: Need, results: int = 0, operands: int = 0) -> None:
        """Each result may be written over one operand that has the same rows."""
        runs = self.memory.runs(need)
        before = self._alike.get(runs, (0, 0))
        self._alike[runs] = before[0] + results, before[1] + operands
        more = min(self._alike[runs]) - min(before)
        if more:
            self.over = self.over + more * self.memory.size(need[0])
