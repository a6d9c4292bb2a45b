"""The memory of a fused graph, and of regions of it that run in chunks, at some points.

A number of bytes is a vector here: one number for each point, an assignment of sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pliant.ir.graph import Op, Value
from pliant.ir.types import DType
from pliant.passes.chunk_regions import (
    CutKernel,
    FusedGraph,
    Member,
    Need,
    Region,
    outer_runs,
)
from pliant.passes.cuts import Demand
from pliant.sym import Expr
from pliant.sym.points import Point

Numbers = NDArray[np.float64]
_Runs = tuple[DType, Expr, Expr]  # of rows: their type, all elements, number of runs


@dataclass(frozen=True, slots=True, eq=False)
class HeldRows:
    """Rows of a value in memory, or all of it, and what they count for."""

    value: Value
    cut: Demand
    size: Numbers  # of the whole value
    last: int  # the last kernel that makes or reads it; none if not in the arena
    kind: int  # rows of the same kind have the same bytes in each round


_NOT_HELD = -1  # in the arena
_WHOLE = -1  # no rows, but all of a value


class PointMemory:
    """The memory of a fused graph whose kernels run one after the other, whole."""

    def __init__(self, of: FusedGraph, points: Sequence[Point]) -> None:
        self.of, self.points = of, points
        self._sizes: dict[Value, Numbers] = {}
        self._known: dict[Expr, Numbers] = {}
        self._rows: dict[Need, HeldRows] = {}
        self._kind_of_runs: dict[_Runs, int] = {}
        self._weights: dict[CutKernel, tuple[Numbers, list[HeldRows]]] = {}
        self._results: dict[Member, list[HeldRows]] = {}
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

    def rows(self, value: Value, cut: Demand) -> HeldRows:
        found = self._rows.get((value, cut))
        if found is None:
            kind = _WHOLE
            if cut is not None:
                runs = value.dtype, value.type.numel, outer_runs(value, cut)
                kind = self._kind_of_runs.setdefault(runs, len(self._kind_of_runs))
            last = self.last.get(value, _NOT_HELD)
            found = HeldRows(value, cut, self.size(value), last, kind)
            self._rows[value, cut] = found
        return found

    def results(self, member: Member) -> list[HeldRows]:
        """What chunks have of a kernel's results that others read."""
        if member not in self._results:
            made = [self.rows(v, member.cut(v)) for v in member.results]
            self._results[member] = made
        return self._results[member]

    def weights(self, part: CutKernel) -> tuple[Numbers, list[HeldRows]]:
        """The bytes of what a kernel alone reads whole and none makes; other needs."""
        if part not in self._weights:
            readers, sizes = self.of.readers, self.none
            rest: list[HeldRows] = []
            for value, cut in part.needs:
                if cut is None and value not in self.last and len(readers[value]) == 1:
                    sizes = sizes + self.size(value)
                else:
                    rest.append(self.rows(value, cut))
            self._weights[part] = sizes, rest
        return self._weights[part]

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

    def __init__(self, memory: PointMemory, end: int) -> None:
        self.memory, self.end, self.first = memory, end, end
        none = memory.none
        # Kernels in between that it does not have, and the bytes while each runs: what
        # is the region's own is not in memory then, as they run before or after it.
        self._between: dict[int, Numbers] = {}
        self.ending = none  # what it reads or makes, and nobody reads afterwards
        self.over = none  # of its results: what is written over operands
        self.copied = none  # what chunks have rows of: results, operands that are cut
        self.whole = none  # operands that each chunk reads whole
        self.inner = none  # the most that a kernel reads and makes of the region's own
        self._inner: dict[Op, Numbers] = {}  # the same of each kernel
        self._count = 0
        self._reads: dict[Value, list[HeldRows]] = {}
        # Of each kind of rows: results, and operands of which a round has no others.
        self._alike: dict[int, tuple[int, int]] = {}

    def grow(self, region: Region) -> None:
        """Takes in the kernels that the region has more than the one before."""
        for member in region.grown[self._count : region.count]:
            self._join(member)
        self._count = region.count

    @property
    def others(self) -> Numbers:
        """The peak of kernels in between that it does not have."""
        if not self._between:
            return self.memory.none
        found: Numbers = np.maximum.reduce(list(self._between.values()))
        return found

    def _join(self, member: Member) -> None:
        number, size = self.memory.number[member.op], self.memory.size
        for k in range(number + 1, self.first):
            self._between[k] = self.memory.plain[k]
        self.first = number
        self._inner[member.op] = self.memory.none
        for value in member.op.results:
            self._unread(value)
        for value in member.own:
            last = self.memory.last[value]
            for k, alive in self._between.items():
                if k <= last:
                    self._between[k] = alive - size(value)
            for op in (member.op, *self.memory.of.readers.get(value, ())):
                assert op is not None  # no result of the graph
                self._inner[op] = self._inner[op] + size(value)
                self.inner = np.maximum(self.inner, self._inner[op])
        is_sum = member.part.cuts.total is not None
        for rows in self.memory.results(member):
            if self._ends(rows):
                self.ending = self.ending + rows.size
            if is_sum:
                self.whole = self.whole + 2 * rows.size  # read and written
                continue
            self.copied = self.copied + rows.size
            if rows.last != _NOT_HELD:
                self._pair(rows, results=1)
        weights, needs = self.memory.weights(member.part)
        self.whole = self.whole + weights
        for need in needs:
            self._read(need)

    def _ends(self, rows: HeldRows) -> bool:
        """Whether nobody reads a value in the arena after the region."""
        return _NOT_HELD < rows.last <= self.end

    def _read(self, rows: HeldRows) -> None:
        known = self._reads.setdefault(rows.value, [])
        if rows in known:
            return
        if rows.cut is None:
            self.whole = self.whole + rows.size
        elif all(other.cut is None for other in known):
            self.copied = self.copied + rows.size
        known.append(rows)
        if not self._ends(rows):
            return
        if len(known) == 1:
            self.ending = self.ending + rows.size
            if rows.cut is not None:
                self._pair(rows, operands=1)
        elif len(known) == 2 and known[0].cut is not None:
            self._pair(known[0], operands=-1)

    def _unread(self, value: Value) -> None:
        """A kernel joins that makes the rows of a value: they are read no more."""
        for rows in self._reads.pop(value, ()):
            self.copied = self.copied - rows.size
            if self._ends(rows):
                self.ending = self.ending - rows.size
                self._pair(rows, operands=-1)

    def _pair(self, rows: HeldRows, results: int = 0, operands: int = 0) -> None:
        """Each result may be written over one operand that has the same rows."""
        made, read = self._alike.get(rows.kind, (0, 0))
        self._alike[rows.kind] = made + results, read + operands
        more = min(made + results, read + operands) - min(made, read)
        if more:
            self.over = self.over + more * rows.size
