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

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from pliant.context import Context
from pliant.ir.graph import Graph, Knob, Module, Op, Value
from pliant.machine.rates import ASSUMED_BYTES, CALL_SECONDS
from pliant.passes.chunk_bytes import Numbers, PointMemory, RegionBytes
from pliant.passes.chunk_heads import has_groups
from pliant.passes.chunk_parts import arranged, kernels_apart, with_two_sides
from pliant.passes.chunk_regions import (
    FusedGraph,
    Growth,
    Region,
    chunk_op,
    replaced,
)
from pliant.passes.chunk_sums import rejoined, sums_apart
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
_FIXED, _MOST_FIXED = 64, 1  # rows that every call has: so many at least; such dims
_MOST_FLIPPED = 4  # products whose operands are tried in both orders
_ENOUGH = 0.4  # of the peak: then attention needs no groups of heads
_SLACK = 1.02  # the last version may have so much more than the least peak


class Peaks:
    """The memory of a fused graph at some points, and of its regions in chunks.

    What is alive while a kernel runs does not depend on which regions before and after
    it are chunks, as only what is inside a region changes. So the best choice of
    regions for a given peak is found by dynamic programming over the kernels.

    `peak` and `seconds` have a row for each region and a column for each point: bytes
    while it runs, or a kernel in between that it does not have; and how much longer it
    takes than its kernels do alone.
    """

    def __init__(self, of: FusedGraph, points: Sequence[Point]) -> None:
        memory = PointMemory(of, points)
        self.plain = memory.plain
        self.highest: Numbers = self.plain.max(axis=0, initial=1.0)
        found = sorted(steps_of(of, memory), key=lambda step: step.last)
        self.regions = [step.region for step in found]
        self.row = {region: k for k, region in enumerate(self.regions)}
        self.first = np.array([step.first for step in found], dtype=np.intp)
        self.last = np.array([step.last for step in found], dtype=np.intp)
        self.bounds = np.searchsorted(self.last, range(len(of.fusions) + 1))
        self.peak, self.seconds = _costs(memory, found)
        self.least = self._least()

    @property
    def least_share(self) -> Numbers:
        return self.least / self.highest

    def _ending(self, kernel: int) -> slice:
        """The rows of the regions that end with a kernel."""
        return slice(self.bounds[kernel], self.bounds[kernel + 1])

    def _least(self) -> Numbers:
        """The smallest peak that regions can reach, at each point."""
        best = np.zeros((len(self.plain) + 1, self.plain.shape[1]))
        for k, plain in enumerate(self.plain):
            rows = self._ending(k)
            peaks = np.maximum(best[self.first[rows]], self.peak[rows])
            alone = np.maximum(best[k], plain)
            best[k + 1] = np.minimum(peaks.min(axis=0, initial=np.inf), alone)
        found: Numbers = best[-1]
        return found

    def cheapest(
        self, points: Sequence[int], limits: Sequence[float]
    ) -> list[list[Region] | None]:
        """For each point and limit, the regions with which the peak at this point is at
        most the limit, at the least cost."""
        seconds = np.where(
            self.peak[:, points] <= limits, self.seconds[:, points], np.inf
        )
        alone = np.where(self.plain[:, points] <= limits, 0.0, np.inf)
        cost = np.zeros((len(alone) + 1, len(limits)))
        taken = np.full(alone.shape, -1)  # no region: the kernel runs as it is
        for k, none in enumerate(alone):
            rows = self._ending(k)
            ways = np.vstack([cost[k] + none, cost[self.first[rows]] + seconds[rows]])
            best = ways.argmin(axis=0)
            cost[k + 1] = ways.min(axis=0)
            taken[k] = np.where(best > 0, rows.start + best - 1, -1)
        reached = np.isfinite(cost[-1])
        return [
            self._chosen(taken[:, k]) if fits else None
            for k, fits in enumerate(reached)
        ]

    def _chosen(self, taken: NDArray[np.intp]) -> list[Region]:
        """The regions on the way back from the last kernel."""
        found: list[Region] = []
        k = len(taken)
        while k:
            row = taken[k - 1]
            k = k - 1 if row < 0 else self.first[row]
            found += [] if row < 0 else [self.regions[row]]
        return found[::-1]

    def peaks(self, chosen: Sequence[Region]) -> Numbers:
        """The peak at each point, with these regions in chunks."""
        rows = [self.row[region] for region in chosen]
        left = np.ones(len(self.plain), dtype=bool)
        for row in rows:  # what is in between has its part in the peak of the region
            left[self.first[row] : self.last[row] + 1] = False
        steps = self.peak[rows]
        peaks: Numbers = np.concatenate([self.plain[left], steps]).max(axis=0)
        return peaks

    def versions(self, below: Sequence[float]) -> list[list[Region]]:
        """Choices of regions for several limits at each point, the largest first."""
        lanes: list[tuple[int, float]] = []
        for k, (peak, least) in enumerate(zip(self.highest, self.least, strict=True)):
            limits = (*(share * peak for share in _SHARES), _SLACK * least)
            top = min(peak, below[k])
            lanes += ((k, limit) for limit in limits if _SLACK * least <= limit < top)
        found = self.cheapest([k for k, _ in lanes], [limit for _, limit in lanes])
        return [chosen for chosen in found if chosen]


@dataclass(frozen=True, slots=True)
class _Step:
    """A region in chunks: the kernels it spans, and bytes at the points."""

    region: Region
    first: int
    last: int
    ending: Numbers  # what it reads or makes, and nobody reads afterwards
    over: Numbers  # of its results: what is written over operands
    others: Numbers  # the peak of kernels in between that it does not have
    inner: Numbers  # the most of its own values at once; only chunks are in memory
    copied: Numbers  # what else only chunks of are in memory: copies of rows
    whole: Numbers  # operands that each chunk reads whole


_COLUMNS = tuple(
    map(attrgetter, ("ending", "over", "others", "inner", "copied", "whole"))
)


def _costs(memory: PointMemory, steps: Sequence[_Step]) -> tuple[Numbers, Numbers]:
    """The peak and the extra seconds of each step, at each point."""
    if not steps:
        return np.zeros((0, len(memory.points))), np.zeros((0, len(memory.points)))
    regions = [step.region for step in steps]
    extent = np.maximum([memory.at_points(region.extent) for region in regions], 1.0)
    multiple = np.array([[region.multiple] for region in regions])
    rows = least_rows(extent, multiple)
    chunks = np.ceil(extent / rows)
    ending, over, others, inner, copied, whole = (
        np.concatenate([column(step) for step in steps]).reshape(extent.shape)
        for column in _COLUMNS
    )
    # What is alive while a region runs, besides its chunks.
    held = np.array(memory.after)[[step.last for step in steps]] + ending - over
    calls = chunks * [[region.count] for region in regions]
    again = whole * (chunks - 1)
    seconds = (2 * copied + again) / ASSUMED_BYTES + calls * CALL_SECONDS
    cut = inner + copied
    return np.maximum(held + cut * rows / extent, others), seconds


def least_rows(extent: Numbers, multiple: NDArray[np.int_]) -> Numbers:
    """The rows of a chunk with which regions are compared."""
    return np.minimum(np.maximum(np.ceil(extent / _CHUNKS), multiple), extent)


def extents_of(graph: Graph) -> list[Expr]:
    """Dims that are not known before the call, and are no products of such."""
    found: dict[Expr, None] = {}
    for op in graph.ops:
        for value in op.results:
            for dim in value.shape:
                if not dim.is_const and not _is_product(dim):
                    found[dim] = None
    return list(found)


def fixed_extents(graph: Graph, memory: PointMemory) -> list[Expr]:
    """Dims of every call that are rows of most of what kernels make; few of them.

    The last axis is no rows: it has the features of one. Nor are those of a value that
    has one size in all calls, the gradient of a weight.
    """
    found: dict[Expr, float] = {}
    for op in graph.ops:
        for value in op.results if op.name == "fusion" else ():
            if value.type.numel.is_const:
                continue
            for dim in value.shape[:-1]:
                if dim.is_const and dim.value >= _FIXED:
                    size = float(memory.size(value).max(initial=0.0))
                    found[dim] = found.get(dim, 0.0) + size
    return sorted(found, key=lambda dim: -found[dim])[:_MOST_FIXED]


def _is_product(dim: Expr) -> bool:
    if len(dim.terms) != 1:
        return False
    ((number, mono),) = dim.terms
    return number != 1 or len(mono) > 1 or mono[0][1] != 1


def steps_of(of: FusedGraph, memory: PointMemory) -> Iterator[_Step]:
    """Every region of a fused graph."""
    for extent in (*extents_of(of.graph), *fixed_extents(of.graph, memory)):
        cutter = of.cutter(extent)
        growth = Growth(of, cutter)
        for end, op in enumerate(of.fusions):
            seen: set[int] = set()
            for way in growth.ways(end, _LONGEST) if op.results else ():
                grown = RegionBytes(memory, end)
                for region in way:
                    if region.numbers not in seen:
                        seen.add(region.numbers)
                        yield _step(region, grown)


def _step(region: Region, grown: RegionBytes) -> _Step:
    grown.grow(region)
    return _Step(
        region,
        grown.first,
        grown.end,
        grown.ending,
        grown.over,
        grown.others,
        grown.inner,
        grown.copied,
        grown.whole,
    )


class ChunkedForm:
    """A form of the graph (`chunk_parts.py`), and its memory at points, by number."""

    def __init__(self, of: FusedGraph, points: Mapping[int, Point]) -> None:
        self.of, self.points = of, points
        self.peaks = Peaks(of, list(points.values()))

    @property
    def least(self) -> dict[int, float]:
        return dict(zip(self.points, self.peaks.least, strict=True))

    @property
    def least_share(self) -> dict[int, float]:
        return dict(zip(self.points, self.peaks.least_share, strict=True))

    def versions(self, below: Mapping[int, float]) -> Iterator[list[Region]]:
        """Choices of regions with smaller peaks than these, at some point."""
        found: set[frozenset[Region]] = set()
        limits = [below.get(k, float("inf")) for k in self.points]
        for chosen in self.peaks.versions(limits):
            if frozenset(chosen) not in found:
                found.add(frozenset(chosen))
                yield chosen

    def peaks_of(self, chosen: Sequence[Region], count: int) -> list[float]:
        """The peaks at all points; infinite at those that this form is not for."""
        known = dict(zip(self.points, self.peaks.peaks(chosen), strict=True))
        return [known.get(k, float("inf")) for k in range(count)]


def forms_of(
    graph: Graph,
    facts: Facts,
    rows: int,
    points: Sequence[Point],
    settled: bool = False,
) -> Iterator[ChunkedForm]:
    """The form with the least peak, and that with attention in groups of heads.

    If its order is `settled`, the graph has one form.
    """

    def form(
        flipped: Collection[Value], at: Mapping[int, Point], heads: bool = False
    ) -> ChunkedForm:
        parts = arranged(smaller, facts, heads=heads, flipped=flipped, settled=settled)
        of = FusedGraph(parts.graph, facts, rows, parts.origin, cutters, splits)
        return ChunkedForm(of, at)

    smaller, splits = sums_apart(kernels_apart(graph, facts))
    cutters: dict[Expr, Cutter] = {}
    every = dict(enumerate(points))
    plain = form((), every)
    if settled:
        yield plain
        return
    worst = max(plain.least_share, key=plain.least_share.__getitem__)
    flipped, least = frozenset[Value](), plain.least[worst]
    for value in with_two_sides(graph)[:_MOST_FLIPPED]:
        other = form(flipped | {value}, {worst: points[worst]}).least[worst]
        if other < least / _SLACK:
            flipped, least = flipped | {value}, other
    if flipped:
        plain = form(flipped, every)
    yield plain
    left = {k: every[k] for k, share in plain.least_share.items() if share > _ENOUGH}
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
    # What `overwrite` has made of a buffer that is stored is not cut.
    if kernels < 2 or not points or cx.stores:
        return module
    rows = -(-_LEAST_ROWS // tile) * tile
    found: list[tuple[ChunkedForm, list[Region]]] = []
    below: dict[int, float] = {}
    plain: Numbers | None = None
    # A gradient stands behind what it is of, and the product that updates a weight
    # beside the one that goes on: the order in which little is alive.
    settled = cx.training is not None
    for form in forms_of(graph, facts, rows, points, settled):
        plain = form.peaks.highest if plain is None else plain
        found += ((form, chosen) for chosen in form.versions(below))
        below = form.least
    if plain is None or not found:
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
    large = {name: _large(facts.bounds(sym(name))[1]) for name in names}
    some = [p for p in found if any(p[n] >= large[n] for n in names)] or found[-1:]
    kept = sorted(some, key=lambda p: abs(sum(p.values()) - _LARGE * len(p)))[:1]
    for name in sorted(names):
        for least in (True, False):  # this one is small, or only this one is large
            rank = [(p[name] / max(sum(p.values()), 1), k) for k, p in enumerate(some)]
            kept.append(some[(min if least else max)(rank)[1]])
    return [p for k, p in enumerate(kept) if p not in kept[:k]][:_MOST_POINTS]


def _large(most: int | None) -> int:
    """From which value on a size counts as large: of one in 224 .. 239, all do."""
    return _LARGE if most is None or most < _FIXED else min(_LARGE, most // 2)


_Choice = tuple[ChunkedForm, list[Region]]


def _kept(found: list[_Choice], plain: Numbers) -> list[_Choice]:
    """The versions that lower some peak most, few kernels in chunks first."""
    peaks = [form.peaks_of(chosen, len(plain)) for form, chosen in found]
    shares = np.array(peaks) / plain
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
    ranked = sorted(order, key=lambda k: sum(r.count for r in found[k][1]))
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
        chunks[chunk_op(of, region, sym(rows))] = [
            member.op for member in region.members
        ]
    kept = {member for members in chunks.values() for member in members}
    graph = replaced(rejoined(of.graph, of.splits, kept), chunks)
    sizes = (*graph.sizes, *knobs)
    return graph.replace(name=name, sizes=sizes), knobs
