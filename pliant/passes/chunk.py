"""Versions of a model that take less memory, because parts of it run in chunks of rows.

    %h = fusion(%x, %w1)            %y = chunk(%x, %w1, %w2, %x) {extent = n, rows = r}
    %y = fusion(%h, %w2, %x)   ->     region(%x: [k, 8], ..) sizes (k, first) {..}

`main` stays as it is. Beside it stand versions in which some regions
(`chunk_regions.py`) are loops over chunks: of what they compute in between, only a
chunk is in memory. Which version runs, and how many rows a chunk has, is decided per
call, by its sizes and its memory limit; the number of rows is a knob, a size that the
version takes. A version that is not used costs nothing.

Versions are found at sizes that represent the range. At each of them, the regions that
lower the peak most are chosen one after another, and each choice is a version: the
first ones cost less time, the last ones need less memory. Regions of the same structure
(the layers of a model) are chosen together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from pliant.context import Context
from pliant.ir.graph import Graph, Knob, Module, Names, Op, Value, names_of
from pliant.ir.ops import IN_MEMORY
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
_MOST_CHOICES = 8  # regions chosen one after another at one assignment
_LONGEST = 48  # kernels looked at from the end of a region
_CHUNKS = 16  # regions are compared with so many chunks, if there are enough rows
_MOST_POINTS = 5
_GAIN = 0.97  # a version is kept if it lowers the peak to this share
_PROGRESS = 0.995  # a choice is made if it lowers the height to this share
# The height of a profile is a norm of it, close to its maximum. Layers with one peak
# each are lowered one after another; only the last of them lowers the maximum.
_NORM = 16


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """A kernel, or a region that runs in chunks: what is in memory while it runs."""

    reads: frozenset[Value]
    writes: tuple[Value, ...]
    work: float  # bytes of temporaries
    shares: frozenset[Value]  # what it reads and may write its result over
    at: int  # the number of its last kernel


class Peaks:
    """The memory of a fused graph at one assignment, with some regions in chunks."""

    def __init__(self, of: FusedGraph, point: Point) -> None:
        self.of, self.point = of, point
        self.number = {op: k for k, op in enumerate(of.fusions)}
        results = {of.base(v) for v in of.graph.results}
        # The values in the arena; results have memory of their own.
        self.bytes = {
            value: float(value.type.bytes.evaluate(point))
            for op in of.fusions
            for value in op.results
            if value not in results
        }
        self._plain = [self._kernel(op) for op in of.fusions]
        self._chunked: dict[Region, _Step] = {}

    def _kernel(self, op: Op) -> _Step:
        bases = {self.of.base(v) for v in op.operands}
        region = op.regions[0]
        root = {v for o in region.ops if o.name in IN_MEMORY for v in o.operands}
        pairs = zip(region.params, op.operands, strict=True)
        shares = {self.of.base(v) for p, v in pairs if p not in root}
        return _Step(
            frozenset(v for v in bases if v in self.bytes),
            tuple(v for v in op.results if v in self.bytes),
            0.0,
            frozenset(shares),
            self.number[op],
        )

    def _region(self, region: Region) -> _Step:
        if region not in self._chunked:
            reads = frozenset(v for v, _ in region.needs if v in self.bytes)
            inner = [self._plain[self.number[op]] for op in region.members]
            inside = max(self.profile(sorted(inner, key=lambda s: s.at), reads))
            cut = {v for v, d in region.needs if d is not None}
            whole = {v for v, d in region.needs if d is None}
            copied = sum(
                float(v.type.bytes.evaluate(self.point)) for v in (*cut, *region.results)
            )
            extent = region.extent.evaluate(self.point)
            share = least_rows(region, extent) / max(extent, 1)
            self._chunked[region] = _Step(
                reads,
                tuple(v for v in region.results if v in self.bytes),
                (inside + copied) * share,
                frozenset(cut - whole),
                max(self.number[op] for op in region.members),
            )
        return self._chunked[region]

    def steps(self, chosen: Sequence[Region]) -> list[_Step]:
        taken = {op for region in chosen for op in region.members}
        steps = [
            self._plain[k] for k, op in enumerate(self.of.fusions) if op not in taken
        ]
        steps += [self._region(region) for region in chosen]
        return sorted(steps, key=lambda step: step.at)

    def profile(
        self, steps: Sequence[_Step], outside: frozenset[Value] = frozenset()
    ) -> list[float]:
        """Live bytes at each step."""
        last: dict[Value, int] = {}
        for k, step in enumerate(steps):
            for value in step.reads:
                last[value] = k
            for value in step.writes:
                last[value] = k
        sizes, dead = self.bytes, dict[int, list[Value]]()
        for value, k in last.items():
            if value not in outside:
                dead.setdefault(k, []).append(value)
        found, live, now = [], set[Value](), 0.0
        for k, step in enumerate(steps):
            for value in step.writes:
                if value not in live and value not in outside:
                    live.add(value)
                    now += sizes[value]
            dying = [v for v in dead.get(k, ()) if v in live]
            # A result may be written over an operand that nobody reads again.
            free = [v for v in dying if v in step.shares and v not in step.writes]
            shared = 0.0
            for value in step.writes if free else ():
                twin = next((v for v in free if sizes[v] == sizes[value]), None)
                if twin is not None:
                    free.remove(twin)
                    shared += sizes[value]
            found.append(now - shared + step.work)
            for value in dying:
                live.discard(value)
                now -= sizes[value]
        return found or [0.0]

    def peak(self, chosen: Sequence[Region]) -> float:
        return max(self.profile(self.steps(chosen)))


def height(profile: Sequence[float]) -> float:
    """A norm of a profile that is close to its maximum."""
    top = max(profile)
    return top and top * sum((x / top) ** _NORM for x in profile) ** (1 / _NORM)


@dataclass(slots=True)
class _Search:
    """Looks for versions of one fused graph."""

    of: FusedGraph
    groups: dict[object, list[Region]] = field(default_factory=dict)
    around: dict[Op, list[Region]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for region in regions_of(self.of):
            known = self.groups.setdefault(region.key, [])
            known.append(region)
            for op in region.members:
                listed = self.around.setdefault(op, [])
                if not any(other.key == region.key for other in listed[-1:]):
                    listed.append(region)

    def group(self, region: Region) -> list[Region]:
        """Regions of one structure that have no kernel in common."""
        found: list[Region] = [region]
        for other in self.groups[region.key]:
            if not any(other.overlaps(one) for one in found):
                found.append(other)
        return found

    def versions(self, peaks: Peaks) -> Iterator[list[Region]]:
        """Choices of regions, each with a lower peak at one assignment."""
        chosen: list[Region] = []
        told = peaks.peak(chosen)
        for _ in range(_MOST_CHOICES):
            steps = peaks.steps(chosen)
            profile = peaks.profile(steps)
            now = height(profile)
            at = steps[profile.index(max(profile))].at
            best: tuple[tuple[float, int], list[Region]] | None = None
            for region in self.around.get(self.of.fusions[at], ()):
                group = self.group(region)
                kept = [
                    r for r in chosen if not any(r.overlaps(other) for other in group)
                ]
                tried = kept + group
                size = sum(len(one.members) for one in group)
                score = height(peaks.profile(peaks.steps(tried))), size
                if best is None or score < best[0]:
                    best = score, tried
            if best is None or best[0][0] > _PROGRESS * now:
                return
            chosen = best[1]
            peak = peaks.peak(chosen)
            if peak < _GAIN * told:
                told = peak
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
            for cut in cutter.cuts_of(op.results[0].shape):
                for region in growth.regions(end, cut, _LONGEST):
                    same = frozenset(region.members)
                    if same not in seen:
                        seen.add(same)
                        yield region


def chunk(module: Module, cx: Context) -> Module:
    """The module with versions of `main` that take less memory."""
    graph = module.main
    facts = cx.facts(graph)
    of = FusedGraph(graph, facts)
    names = {s for op in of.fusions for v in op.results for s in v.type.bytes.symbols()}
    points = points_of(facts, names)
    if len(of.fusions) < 2 or not points:
        return module
    search = _Search(of)
    tables = [Peaks(of, point) for point in points]
    found: dict[frozenset[Region], list[Region]] = {}
    for peaks in tables:
        for chosen in search.versions(peaks):
            found.setdefault(frozenset(chosen), chosen)
    if not found:
        return module
    graphs, knobs = dict(module.graphs), dict[str, Knob]()
    for number, chosen in enumerate(_kept(list(found.values()), tables), 1):
        version, used = _version(of, chosen, f"main.{number}")
        graphs[version.name] = version
        for key, knob in used.items():
            known = knobs.get(key, knob)
            knobs[key] = max(known, knob, key=lambda knob: knob.multiple)
    return module.replace(graphs=graphs, knobs=knobs)


def points_of(facts: Facts, names: Collection[str]) -> list[Point]:
    """Assignments at which the peak is looked at: all sizes large, or one of them."""
    if not names:
        return []
    found = representatives(facts, names)
    alone = []
    for name in sorted(names):
        others = [n for n in names if n != name]
        rest = [p for p in found if p[name] >= max(p.values())]
        if rest and others:
            alone.append(min(rest, key=lambda p: sum(p[n] for n in others) / p[name]))
    even = min(found, key=lambda p: abs(sum(p.values()) - 384 * len(p)), default=None)
    kept = [even, *alone] if even is not None else alone
    return [p for k, p in enumerate(kept) if p not in kept[:k]][:_MOST_POINTS]


def _kept(found: list[list[Region]], tables: Sequence[Peaks]) -> list[list[Region]]:
    """The versions that lower some peak most, few kernels in chunks first."""
    plain = np.array([max(peaks.peak([]), 1.0) for peaks in tables])
    shares = np.array([[p.peak(c) for p in tables] for c in found]) / plain
    order: list[int] = []
    best = np.ones(len(tables))
    while len(order) < min(MOST_VERSIONS, len(found)):
        sums = np.minimum(shares, best).sum(axis=1)
        sums[order] = np.inf
        k = int(sums.argmin())
        if sums[k] > best.sum() - 0.02:
            break
        order.append(k)
        best = np.minimum(best, shares[k])
    ranked = sorted(order, key=lambda k: sum(len(r.members) for r in found[k]))
    return [found[k] for k in ranked]


def _version(
    of: FusedGraph, chosen: Sequence[Region], name: str
) -> tuple[Graph, dict[str, Knob]]:
    names = Names(names_of(of.graph))
    chunks: dict[Op, list[Op]] = {}
    knobs: dict[str, Knob] = {}
    for region in chosen:
        rows = knob_name(region.extent)
        known = knobs.get(rows)
        multiple = max(region.multiple, known.multiple if known else 1)
        knobs[rows] = Knob(region.extent, multiple)
        chunks[chunk_op(of, region, sym(rows), names)] = list(region.members)
    graph = replaced(of.graph, chunks)
    sizes = (*graph.sizes, *knobs)
    return graph.replace(name=name, sizes=sizes), knobs


def knob_name(extent: Expr) -> str:
    """One knob for all regions that are cut at the same extent."""
    text = str(extent)
    return f"rows_{text}" if text.isidentifier() else f"rows({text})"
