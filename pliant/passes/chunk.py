"""Versions of a model that take less memory, because parts of it run in chunks of rows.

    %h = fusion(%x, %w1)            %y = chunk(%x, %w1, %w2, %x) {extent = n, rows = r}
    %y = fusion(%h, %w2, %x)   ->     region(%x: [k, 8], ..) sizes (k, first) {..}

`main` stays as it is. Beside it stand versions in which some regions
(`chunk_regions.py`) are loops over chunks: of what they compute in between, only a
chunk is in memory. Which version runs, and how many rows a chunk has, is decided per
call, by its sizes and its memory limit; the number of rows is a knob, a size that the
version takes. A version that is not used costs nothing.

Versions are found at sizes that represent the range: at each of them, the regions that
meet a share of the peak at the least cost (`Peaks`), and those with the least peak.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pliant.context import Context
from pliant.ir.graph import Graph, Knob, Module, Op, Value
from pliant.machine.rates import ASSUMED_BYTES, CALL_SECONDS
from pliant.passes.chunk_heads import has_groups
from pliant.passes.chunk_parts import Parts, apart, with_two_sides
from pliant.passes.chunk_regions import (
    FusedGraph,
    Growth,
    Region,
    chunk_op,
    replaced,
)
from pliant.passes.cuts import Cutter
from pliant.sym import Expr, Facts, sym
from pliant.sym.points import Point, representatives

MOST_VERSIONS = 5
_LONGEST = 48  # kernels looked at from the end of a region
_LEAST_ROWS = 16  # of a product: with fewer, reading weights takes longer than it
_CHUNKS = 64  # regions are compared with so many chunks, if there are enough rows
_MOST_POINTS = 4  # assignments at which versions are looked for
_LARGE = 256  # a size at which memory counts
_SHARES = (0.75, 0.5, 0.35, 0.2)  # of the peak: what versions are looked for to meet
_MOST_FLIPPED = 4  # products whose operands are tried in both orders
_ENOUGH = 0.4  # of the peak: then attention needs no groups of heads
_SLACK = 1.02  # the last version may have so much more than the least peak


@dataclass(frozen=True, slots=True)
class _Step:
    """A region in chunks: the kernels it spans, bytes while it runs, extra seconds."""

    region: Region
    first: int
    last: int
    peak: float
    seconds: float
    others: tuple[int, ...]  # kernels in between that it does not have


class Peaks:
    """The memory of a fused graph at one assignment.

    What is alive while a kernel runs does not depend on which regions before and after
    it are chunks, as only what is inside a region changes. So the best choice of
    regions for a given peak is found by dynamic programming over the kernels.
    """

    def __init__(self, of: FusedGraph, point: Point, regions: Sequence[Region]) -> None:
        self.of, self.point = of, point
        self._sizes: dict[Value, float] = {}
        self._known: dict[Expr, float] = {}
        self._extents: dict[Expr, int] = {}
        self.number = {op: k for k, op in enumerate(of.fusions)}
        results = {of.base(v) for v in of.graph.results}
        # The values in the arena; results have memory of their own.
        self.bytes = {
            value: self.size(value)
            for op in of.fusions
            for value in op.results
            if value not in results
        }
        self.last: dict[Value, int] = {}
        for k, op in enumerate(of.fusions):
            for value in (*op.results, *map(of.base, op.operands)):
                if value in self.bytes:
                    self.last[value] = k
        self.after: list[float] = []  # bytes that are alive after each kernel
        self.plain = list(self._profile())
        self.steps: list[list[_Step]] = [[] for _ in of.fusions]
        for region in regions:
            step = self._step(region)
            self.steps[step.last].append(step)
        self.least = self._least()

    def size(self, value: Value) -> float:
        if value not in self._sizes:
            size = value.type.bytes
            if size not in self._known:
                self._known[size] = float(size.evaluate(self.point))
            self._sizes[value] = self._known[size]
        return self._sizes[value]

    def _profile(self) -> Iterator[float]:
        """The bytes while each kernel runs."""
        dead: dict[int, list[Value]] = {}
        for value, k in self.last.items():
            dead.setdefault(k, []).append(value)
        live = 0.0
        for k, op in enumerate(self.of.fusions):
            made = [v for v in op.results if v in self.bytes]
            live += sum(self.bytes[v] for v in made)
            dying = dead.get(k, [])
            # Kernels without a product may write over what nobody reads again.
            over = op.str_attr("kind") in ("map", "row")
            yield live - (self._shared(dying, made) if over else 0.0)
            live -= sum(self.bytes[v] for v in dying)
            self.after.append(live)

    def _shared(self, dying: Iterable[Value], made: Iterable[Value]) -> float:
        """Bytes of results that are written over operands."""
        free = [(v.dtype, v.shape) for v in dying if v not in made]
        total = 0.0
        for value in made:
            if (value.dtype, value.shape) in free:
                free.remove((value.dtype, value.shape))
                total += self.bytes[value]
        return total

    def _written_over(self, region: Region, ending: Collection[Value]) -> float:
        """Bytes of a region's results that are written over operands."""
        taken: set[Value] = set()
        total = 0.0
        for result, value in region.over:
            if result in self.bytes and value in ending and not taken & {result, value}:
                taken |= {result, value}
                total += self.bytes[result]
        return total

    def _step(self, region: Region) -> _Step:
        members = sorted(self.number[op] for op in region.members)
        first, last = members[0], members[-1]
        reads = {v for v, _ in region.needs}
        cut = {v for v, d in region.needs if d is not None}
        whole = {v for v, d in region.needs if d is None}
        held = {v for v in (*reads, *region.results) if v in self.bytes}
        # What is alive afterwards, and what this reads or makes for the last time.
        ending = {v for v in held if self.last[v] <= last}
        peak = self.after[last] + sum(self.bytes[v] for v in ending)
        peak -= self._written_over(region, ending)
        extent = self._extents.get(region.extent, 0)
        if not extent:
            extent = self._extents[region.extent] = max(
                region.extent.evaluate(self.point), 1
            )
        rows = least_rows(region, extent)
        inner = max(
            sum(self.bytes.get(v, 0.0) for v in values) for values in region.inner
        )
        copied = sum(map(self.size, (*cut, *region.results)))
        count = -(-extent // rows)
        again = sum(map(self.size, whole)) * (count - 1)
        calls = count * len(members)
        seconds = (2 * copied + again) / ASSUMED_BYTES + calls * CALL_SECONDS
        peak += (inner + copied) * rows / extent
        between = set(range(first, last)) - set(members)
        return _Step(region, first, last, peak, seconds, tuple(sorted(between)))

    @property
    def least_share(self) -> float:
        return self.least / max(*self.plain, 1.0)

    def _least(self) -> float:
        """The smallest peak that regions can reach."""
        best = [0.0]
        for k, plain in enumerate(self.plain):
            found = max(best[k], plain)
            for step in self.steps[k]:
                others = max((self.plain[j] for j in step.others), default=0.0)
                found = min(found, max(best[step.first], step.peak, others))
            best.append(found)
        return best[-1]

    def cheapest(self, limit: float) -> list[Region] | None:
        """The regions with which the peak is at most `limit`, at the least cost."""
        infinite = float("inf")
        cost = [0.0]
        taken: list[_Step | None] = []
        for k, plain in enumerate(self.plain):
            best, chosen = (cost[k] if plain <= limit else infinite), None
            for step in self.steps[k]:
                fits = step.peak <= limit
                fits = fits and all(self.plain[j] <= limit for j in step.others)
                if fits and cost[step.first] + step.seconds < best:
                    best, chosen = cost[step.first] + step.seconds, step
            cost.append(best)
            taken.append(chosen)
        if cost[-1] == infinite:
            return None
        found: list[Region] = []
        k = len(taken)
        while k:
            last = taken[k - 1]
            k = k - 1 if last is None else last.first
            found += [] if last is None else [last.region]
        return found[::-1]

    def peak(self, chosen: Sequence[Region]) -> float:
        regions = set(chosen)
        steps = [s for at in self.steps for s in at if s.region in regions]
        inside = {self.number[op] for region in chosen for op in region.members}
        left = [p for k, p in enumerate(self.plain) if k not in inside]
        return max([*left, *(s.peak for s in steps)], default=0.0)

    def versions(self, below: float) -> Iterator[list[Region]]:
        """Choices of regions for several limits, the largest first."""
        peak, least = max(self.plain, default=0.0), self.least
        for limit in (*(share * peak for share in _SHARES), _SLACK * least):
            if _SLACK * least <= limit < min(peak, below):
                chosen = self.cheapest(limit)
                if chosen:
                    yield chosen


def least_rows(region: Region, extent: int) -> int:
    """The rows of a chunk with which regions are compared."""
    return min(max(-(-extent // _CHUNKS), region.multiple, 1), max(extent, 1))


def extents_of(graph: Graph) -> list[Expr]:
    """Dims that are not known before the call, and are no products of such."""
    found: dict[Expr, None] = {}
    for op in graph.ops:
        for value in op.results:
            for dim in value.shape:
                if not dim.is_const and not _is_product(dim):
                    found[dim] = None
    return list(found)


def _is_product(dim: Expr) -> bool:
    if len(dim.terms) != 1:
        return False
    ((number, mono),) = dim.terms
    return number != 1 or len(mono) > 1 or mono[0][1] != 1


def regions_of(of: FusedGraph) -> Iterator[Region]:
    """Every region of a fused graph."""
    for extent in extents_of(of.graph):
        cutter = Cutter(extent, of.facts)
        growth = Growth(of, cutter)
        seen: set[frozenset[Op]] = set()
        for end, op in enumerate(of.fusions):
            if not op.results:
                continue
            for cut in cutter.cuts_of(op.results[0].shape):
                for region in growth.regions(end, cut, _LONGEST):
                    same = frozenset(region.members)
                    if same not in seen:
                        seen.add(same)
                        yield region


class ChunkedForm:
    """A form of the graph (`chunk_parts.py`), its regions, and its memory at points."""

    def __init__(
        self, parts: Parts, facts: Facts, rows: int, points: Mapping[int, Point]
    ) -> None:
        self.of = FusedGraph(parts.graph, facts, rows, parts.origin)
        self.regions = list(regions_of(self.of))
        self.tables = {k: Peaks(self.of, p, self.regions) for k, p in points.items()}

    @property
    def worst(self) -> int:
        """The point at which the least peak is the largest share."""
        return max(self.tables, key=lambda k: self.tables[k].least_share)

    def versions(self, below: Mapping[int, float]) -> Iterator[list[Region]]:
        """Choices of regions with smaller peaks than these, at some point."""
        found: set[frozenset[Region]] = set()
        for k, peaks in self.tables.items():
            for chosen in peaks.versions(below.get(k, float("inf"))):
                if frozenset(chosen) not in found:
                    found.add(frozenset(chosen))
                    yield chosen

    def peak(self, chosen: Sequence[Region], point: int) -> float:
        """The peak at a point; infinite if this form is not for it."""
        peaks = self.tables.get(point)
        return float("inf") if peaks is None else peaks.peak(chosen)


def forms_of(
    graph: Graph, facts: Facts, rows: int, points: Sequence[Point]
) -> Iterator[ChunkedForm]:
    """The form with the least peak, and that with attention in groups of heads."""

    def form(
        flipped: Collection[Value], at: Mapping[int, Point], heads: bool = False
    ) -> ChunkedForm:
        parts = apart(graph, facts, heads=heads, flipped=flipped)
        return ChunkedForm(parts, facts, rows, at)

    every = dict(enumerate(points))
    plain = form((), every)
    worst = plain.worst
    flipped, least = frozenset[Value](), plain.tables[worst].least
    for value in with_two_sides(graph)[:_MOST_FLIPPED]:
        other = form(flipped | {value}, {worst: points[worst]}).tables[worst].least
        if other < least / _SLACK:
            flipped, least = flipped | {value}, other
    if flipped:
        plain = form(flipped, every)
    yield plain
    left = {k: p.point for k, p in plain.tables.items() if p.least_share > _ENOUGH}
    if left and has_groups(graph):
        yield form(flipped, left, heads=True)


def chunk(module: Module, cx: Context, tile: int) -> Module:
    """The module with versions of `main` that take less memory.

    `tile` is how many rows of a product are computed together.
    """
    graph = module.main
    facts = cx.facts(graph)
    values = (*graph.params, *(v for op in graph.ops for v in op.results))
    sizes = {s for v in values for d in v.shape for s in d.symbols()}
    points = points_of(facts, sizes)
    kernels = sum(op.name == "fusion" for op in graph.ops)
    # A buffer that is stored goes through `update`, which knows `main` alone.
    if kernels < 2 or not points or cx.stores:
        return module
    rows = -(-_LEAST_ROWS // tile) * tile
    found: list[tuple[ChunkedForm, list[Region]]] = []
    below: dict[int, float] = {}
    plain: list[float] = []
    for form in forms_of(graph, facts, rows, points):
        plain = plain or [max(*peaks.plain, 1.0) for peaks in form.tables.values()]
        found += ((form, chosen) for chosen in form.versions(below))
        below = {k: peaks.least for k, peaks in form.tables.items()}
    if not found:
        return module
    graphs, knobs = dict(module.graphs), dict[str, Knob]()
    names: dict[Knob, str] = {}
    for number, (form, chosen) in enumerate(_kept(found, plain), 1):
        version, used = _version(form.of, chosen, f"main.{number}", names)
        graphs[version.name] = version
        knobs |= used
    return module.replace(graphs=graphs, knobs=knobs)


def points_of(facts: Facts, names: Collection[str]) -> list[Point]:
    """Assignments at which the peak is looked at: all sizes large, or one of them."""
    if not names:
        return []
    found = representatives(facts, names)
    if not found:  # no assignment is known that the facts allow
        return []
    some = [p for p in found if max(p.values()) >= _LARGE] or found[-1:]
    kept = sorted(some, key=lambda p: abs(sum(p.values()) - _LARGE * len(p)))[:1]
    for name in sorted(names):
        for least in (True, False):  # this one is small, or only this one is large
            rank = [(p[name] / max(sum(p.values()), 1), k) for k, p in enumerate(some)]
            kept.append(some[(min if least else max)(rank)[1]])
    return [p for k, p in enumerate(kept) if p not in kept[:k]][:_MOST_POINTS]


_Choice = tuple[ChunkedForm, list[Region]]


def _kept(found: list[_Choice], plain: Sequence[float]) -> list[_Choice]:
    """The versions that lower some peak most, few kernels in chunks first."""
    peaks = [[form.peak(c, k) for k in range(len(plain))] for form, c in found]
    shares = np.array(peaks) / np.array(plain)
    order: list[int] = []
    best = np.ones(len(plain))
    while len(order) < min(MOST_VERSIONS, len(found)):
        sums = np.minimum(shares, best).sum(axis=1)
        sums[order] = np.inf
        k = int(sums.argmin())
        if sums[k] > best.sum() - 0.01:
            break
        order.append(k)
        best = np.minimum(best, shares[k])
    ranked = sorted(order, key=lambda k: sum(len(r.members) for r in found[k][1]))
    return [found[k] for k in ranked]


def _version(
    of: FusedGraph, chosen: Sequence[Region], name: str, names: dict[Knob, str]
) -> tuple[Graph, dict[str, Knob]]:
    """A version, and its knobs: one for all regions that are cut alike."""
    chunks: dict[Op, list[Op]] = {}
    knobs: dict[str, Knob] = {}
    for region in chosen:
        knob = Knob(region.extent, region.multiple)
        rows = names.setdefault(knob, f"rows_{len(names)}")
        knobs[rows] = knob
        chunks[chunk_op(of, region, sym(rows))] = list(region.members)
    graph = replaced(of.graph, chunks)
    sizes = (*graph.sizes, *knobs)
    return graph.replace(name=name, sizes=sizes), knobs
