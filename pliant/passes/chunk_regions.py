"""Parts of a fused graph that can run in chunks of rows.

A region grows from one kernel backwards. Its last kernel gives some rows of its result;
`Cutter` tells which rows of its operands that takes, so the kernels that make those
may give rows only as well, and so on:

    %h = fusion(%x, %w1)      %x cut at its rows, %w1 whole
    %y = fusion(%h, %w2, %x)  cut at its rows: %h and %x are cut, %w2 is whole

A kernel whose result somebody needs whole (the keys of attention), or that cannot be
cut there, runs before the loop, once. So does all that it depends on. A value that
other parts of the graph read too is a result of the region: its rows are collected.

The last kernel may also combine all rows, in a sum, or in a product whose contracted
axis is cut: each round adds its part. And a kernel that is not needed for the last one,
but reads the same rows of a value as the region does, may run in it beside the others:

    %l = fusion(%x, %w)       logits
    %n = fusion(%l)           the sum of what their rows give
    %g = fusion(%l, %x)       a product over all rows, with %n beside it: then nobody
                              needs whole logits
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pliant.ir.graph import Attr, Graph, Names, Op, Value
from pliant.ir.ops import VIEWS, Trait, has_trait
from pliant.passes.chunk_sums import SplitKernel
from pliant.passes.chunk_views import Bases
from pliant.passes.cuts import Chunk, Cutter, Demand, RegionCuts, chunked
from pliant.sym import ONE, Expr, Facts, Guard, as_expr, ge, le, product, sym

_FEW_ROWS = 4  # of each of many matrices

# The sizes of a chunk's region: how many rows, and which is the first; and how many
# there are of values without the last row of all, if there are such values.
COUNT, FIRST, SHORT = "chunk_rows", "chunk_first", "chunk_short"

Need = tuple[Value, Demand]  # a value in memory, and which rows of it


@dataclass(frozen=True, slots=True, eq=False)
class CutKernel:
    """A kernel that gives rows only, and what it needs from memory for them."""

    cuts: RegionCuts
    needs: tuple[Need, ...]
    multiple: int  # of which number of rows it makes best use


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A kernel of a region, and what becomes of its results."""

    op: Op
    part: CutKernel
    own: tuple[Value, ...]  # those that no kernel outside of the region reads
    results: tuple[Value, ...]  # those that are results of the region

    def cut(self, result: Value) -> Demand:
        """The rows that a chunk has of a result; none: it is a sum."""
        inside = self.op.regions[0].results[self.op.results.index(result)]
        return self.part.cuts.demands[inside]


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """Kernels that run in chunks together.

    Regions that grow out of each other share one list of kernels, the last kernel
    first: each has the first `count` of them.
    """

    cutter: Cutter
    grown: Sequence[Member]
    count: int
    multiple: int  # rows in a chunk should be a multiple of this
    numbers: int  # which kernels these are: bits, counted from the last one

    @property
    def members(self) -> Sequence[Member]:
        return self.grown[: self.count]

    @property
    def results(self) -> dict[Value, Demand]:
        """What others read."""
        ordered = reversed(self.members)
        return {v: member.cut(v) for member in ordered for v in member.results}

    @property
    def sums(self) -> dict[Value, str]:
        """The results that are sums, and by which reduction."""
        totals = ((m.results, m.part.cuts.total) for m in self.members)
        return {v: t.combine for values, t in totals if t is not None for v in values}

    @property
    def extent(self) -> Expr:
        return self.cutter.extent


@dataclass(slots=True)
class FusedGraph(Bases):
    """A fused graph, and who makes and reads each value in memory.

    `rows` are those that the kernel of a product makes best use of: rows of a chunk are
    a multiple, where a product has them as rows. `origin` tells which kernels are
    copies of one. Graphs that share kernels may share `cutters`, and what they know.
    """

    facts: Facts
    rows: int
    origin: Mapping[Op, Op] = field(default_factory=dict)
    cutters: dict[Expr, Cutter] = field(default_factory=dict)  # by their extents
    splits: Sequence[SplitKernel] = ()  # kernels of which some of its are parts
    fusions: tuple[Op, ...] = field(init=False)
    reads: dict[Op, frozenset[Value]] = field(init=False)  # values in memory

    def __post_init__(self) -> None:
        Bases.__post_init__(self)
        self.fusions = tuple(op for op in self.graph.ops if op.name == "fusion")
        self.reads = {op: frozenset(map(self.base, op.operands)) for op in self.fusions}

    def cutter(self, extent: Expr) -> Cutter:
        if extent not in self.cutters:
            self.cutters[extent] = Cutter(extent, self.facts)
        return self.cutters[extent]

    def need(self, cutter: Cutter, value: Value, demand: Demand) -> Need | None:
        """The rows of a value in memory behind those of a view, if there are such."""
        op = self.producers.get(value)
        while op is not None and op.name in VIEWS:
            if demand is not None:
                behind = cutter.behind(op, demand)
                if behind is None:
                    return None
                (demand,) = behind
            value = op.operands[0]
            op = self.producers.get(value)
        if demand is not None and op is not None and op.name not in ("fusion", "chunk"):
            return None  # a constant is not cut
        return value, demand


@dataclass(slots=True)
class _Beside:
    """Whether kernels join that the last one does not need; and if some were seen."""

    joins: bool = False
    seen: bool = False


class Growth:
    """The regions that end with one kernel, cut in one way: each inside the next."""

    def __init__(self, of: FusedGraph, cutter: Cutter) -> None:
        self.of, self.cutter = of, cutter
        self._parts: dict[tuple[Op, tuple[Demand, ...]], CutKernel | None] = {}
        self._ends: dict[Op, list[CutKernel]] = {}
        self._members: dict[tuple[CutKernel, tuple[bool, ...]], Member] = {}

    def ways(self, end: int, most: int) -> Iterator[Iterator[Region]]:
        """For each way to cut the last kernel, its regions from small to large.

        `most` kernels are looked at.
        """
        for last in self.ends(self.of.fusions[end]):
            beside = _Beside()
            yield self._regions(end, last, most, beside)
            if beside.seen:
                yield self._regions(end, last, most, _Beside(joins=True))

    def ends(self, op: Op) -> list[CutKernel]:
        """The ways in which a kernel runs in chunks: it gives rows, or sums."""
        if op not in self._ends:
            shape = op.results[0].shape
            rest: list[set[Demand] | None] = [None] * (len(op.results) - 1)
            ways = [self._part(op, [{c}, *rest]) for c in self.cutter.cuts_of(shape)]
            ways += (self._with_needs(op, c) for c in self.cutter.sums(op.regions[0]))
            self._ends[op] = [part for part in ways if part is not None]
        return self._ends[op]

    def _regions(
        self, end: int, last: CutKernel, most: int, beside: _Beside
    ) -> Iterator[Region]:
        fusions = self.of.fusions
        wanted: dict[Value, set[Demand]] = {}
        members: dict[Op, Member] = {}
        grown: list[Member] = []
        multiple, numbers, keeps = 1, 0, False
        open_: set[Value] = set()
        reads = 0  # values from outside; a region that needs fewer is looked at
        for k in range(end, max(end - most, -1), -1):
            op = fusions[k]
            part: CutKernel | None
            if k == end:
                part = last
            elif not wanted.keys().isdisjoint(op.results):
                open_.difference_update(op.results)
                part = self._part(op, [wanted.get(v) for v in op.results])
            elif open_.isdisjoint(self.of.reads[op]):
                continue
            else:
                beside.seen = True
                part = self._beside(op, wanted, open_) if beside.joins else None
                if part is None:
                    continue
            if part is None:
                for value in op.operands:
                    wanted.setdefault(self.of.base(value), set()).add(None)
                    open_.discard(self.of.base(value))
            else:
                members[op] = self._member(op, part, members)
                grown.append(members[op])
                multiple, numbers = max(multiple, part.multiple), numbers | 1 << end - k
                keeps = keeps or bool(members[op].own)
                for value, demand in part.needs:
                    rows = wanted.setdefault(value, set())
                    rows.add(demand)
                    if demand is not None and len(rows) == 1:
                        open_.add(value)
                    else:
                        open_.discard(value)
                reads, before = len(wanted) - len(members), reads
                if keeps and (reads < before or _is_worth_a_look(len(members))):
                    yield Region(self.cutter, grown, len(grown), multiple, numbers)
            if not open_:
                return

    def _beside(
        self, op: Op, wanted: Mapping[Value, set[Demand]], open_: Collection[Value]
    ) -> CutKernel | None:
        """The way in which a kernel reads the same rows as those in a region do."""
        made = self.of.producers
        for part in self.ends(op):
            same = (
                v not in made or wanted.get(v, {rows}) == {rows}
                for v, rows in part.needs
            )
            if all(same) and any(v in open_ for v, _ in part.needs):
                return part
        return None

    def _member(self, op: Op, part: CutKernel, later: Collection[Op]) -> Member:
        """A kernel that joins a region; all who may read it and are in it have."""
        readers = self.of.readers
        own = tuple(
            part.cuts.total is None and all(r in later for r in readers.get(v, ()))
            for v in op.results
        )
        if (part, own) not in self._members:
            kept = tuple(v for v, is_own in zip(op.results, own, strict=True) if is_own)
            results = tuple(v for v in op.results if v not in kept)
            self._members[part, own] = Member(op, part, kept, results)
        return self._members[part, own]

    def _part(self, op: Op, wanted: Sequence[set[Demand] | None]) -> CutKernel | None:
        cuts: list[Demand] = []
        for demands in wanted:
            if demands is not None and (len(demands) > 1 or None in demands):
                return None
            cuts.append(next(iter(demands)) if demands else None)
        key = op, tuple(cuts)
        if key not in self._parts:
            filled = self._filled(op, cuts)
            self._parts[key] = None if filled is None else self._new_part(op, filled)
        return self._parts[key]

    def _filled(self, op: Op, cuts: list[Demand]) -> tuple[Demand, ...] | None:
        """Cuts for the results that only others read as well: for one after the other,
        the first by which it needs the same rows as those before it."""
        region = op.regions[0]
        agreed: dict[Value, Demand] = {}

        def fits(k: int, cut: Demand) -> bool:
            alone = region.replace(results=(region.results[k],))
            found = self.cutter.region(alone, (cut,))
            if found is None:
                return False
            if any(agreed.get(v, rows) != rows for v, rows in found.demands.items()):
                return False
            agreed.update(found.demands)
            return True

        known = [k for k, cut in enumerate(cuts) if cut is not None]
        if len(known) < len(cuts) and not all(fits(k, cuts[k]) for k in known):
            return None
        for k, result in enumerate(op.results):
            if cuts[k] is None:
                ways = self.cutter.cuts_of(result.shape)
                cuts[k] = next((cut for cut in ways if fits(k, cut)), None)
                if cuts[k] is None:
                    return None
        return tuple(cuts)

    def _new_part(self, op: Op, cuts: tuple[Demand, ...]) -> CutKernel | None:
        found = self.cutter.region(op.regions[0], cuts)
        return None if found is None else self._with_needs(op, found)

    def _with_needs(self, op: Op, found: RegionCuts) -> CutKernel | None:
        region = op.regions[0]
        needs: dict[Need, None] = {}
        for param, operand in zip(region.params, op.operands, strict=True):
            if param in found.demands:
                need = self.of.need(self.cutter, operand, found.demands[param])
                if need is None:
                    return None
                needs[need] = None
        given = (*op.results, *(value for value, rows in needs if rows is not None))
        if any(value.type.numel == as_expr(0) for value in given):
            return None  # of nothing there are no rows
        return CutKernel(found, tuple(needs), self._multiple(op, found))

    def _multiple(self, op: Op, cuts: RegionCuts) -> int:
        """Of which number of rows a kernel makes best use."""
        for inner in op.regions[0].ops:
            if has_trait(inner, Trait.CONTRACT):
                cut = cuts.demands.get(inner.results[0])
                rows = inner.results[0].type.rank - 2
                if cut is not None and cut.axis == rows and cut.inner == ONE:
                    # A row of a product of many matrices is a row of each of them.
                    return self.of.rows if rows < 2 else _FEW_ROWS
        return 1


def _is_worth_a_look(kernels: int) -> bool:
    """Of small regions all, of large ones few: so there are not many."""
    return 1 < kernels <= 6 or kernels % max(kernels // 2, 1) == 0


# ---- the op


def chunk_op(of: FusedGraph, region: Region, rows: Expr) -> Op:
    """The op `chunk` that computes a region, `rows` at a time."""
    return _ChunkBuilder(of, region, rows).op()


class _ChunkBuilder:
    def __init__(self, of: FusedGraph, region: Region, rows: Expr) -> None:
        self.of, self.region, self.rows = of, region, rows
        sizes = sym(COUNT), sym(FIRST)
        self.chunk = Chunk(region.cutter, *sizes, Names(), sym(SHORT))
        self.values: dict[Need, Value] = {}
        self.ops: list[Op] = []
        self.params: dict[Need, Value] = {}
        # Results of members, by the kernel and what it reads: copies are one here.
        self.made: dict[object, tuple[Value, ...]] = {}

    def op(self) -> Op:
        for member in reversed(self.region.members):
            self.member(member.op, member.part.cuts)
        outputs = self.region.results
        results = tuple(self.values[v, cut] for v, cut in outputs.items())
        params, sizes = tuple(self.params.values()), [COUNT, FIRST]
        count, first, short = sym(COUNT), sym(FIRST), sym(SHORT)
        extent = self.region.extent
        guards = [ge(count, 1), le(count, extent), ge(first, 0)]
        guards.append(le(first + count, extent))
        made = (v for op in self.ops for v in op.results)
        if any(SHORT in d.symbols() for v in (*params, *made) for d in v.shape):
            sizes.append(SHORT)
            guards += [ge(short, 0), le(short, count), le(count, short + 1)]
            guards.append(le(first + short, extent - 1))
        body = Graph(
            "chunk",
            params,
            tuple(self.ops),
            results,
            tuple(sizes),
            tuple(Guard(cond, (), "") for cond in guards),
        )
        runs = [outer_runs(v, cut) for v, cut in (*self.params, *outputs.items())]
        attrs: tuple[tuple[str, Attr], ...]
        attrs = (("extent", extent), ("rows", self.rows), ("outers", tuple(runs)))
        sums = self.region.sums
        if sums:
            attrs = (*attrs, ("sums", tuple(sums.get(v, "") for v in outputs)))
        operands = tuple(v for v, _ in self.params)
        loc = next((m.op.loc for m in self.region.members if m.op.loc), "")
        return Op("chunk", operands, attrs, tuple(outputs), (body,), loc)

    def member(self, fusion: Op, cuts: RegionCuts) -> None:
        inside = fusion.regions[0]
        values = {
            param: self.value(operand, cuts.demands[param])
            for param, operand in zip(inside.params, fusion.operands, strict=True)
            if param in cuts.demands
        }
        demands = tuple(cuts.demands[v] for v in inside.results)
        operands = tuple(values.get(p) for p in inside.params)
        key = self.of.origin.get(fusion, fusion), operands, demands
        if key not in self.made:
            self.ops += cuts.ops(inside, self.chunk, values)
            self.made[key] = tuple(values[v] for v in inside.results)
        for value, cut, made in zip(
            fusion.results, demands, self.made[key], strict=True
        ):
            self.values[value, cut] = made

    def value(self, value: Value, demand: Demand) -> Value:
        need = value, demand
        if need not in self.values:
            op = self.of.producers.get(value)
            if op is not None and op.name in VIEWS:
                behind: Demand = None
                if demand is not None:
                    found = self.region.cutter.behind(op, demand)
                    assert found is not None
                    (behind,) = found
                made = {op.operands[0]: self.value(op.operands[0], behind)}
                self.ops += chunked(op, demand, self.chunk, made)
                self.values[need] = made[value]
            else:
                self.values[need] = self.params[need] = self.chunk.value(value, demand)
        return self.values[need]


def outer_runs(value: Value, cut: Demand) -> Expr:
    """How many runs of elements the rows are; none if the value is whole."""
    if cut is None:
        return as_expr(0)
    return product(value.shape[: cut.axis]) * cut.outer


def replaced(graph: Graph, chunks: Mapping[Op, Iterable[Op]]) -> Graph:
    """The graph with chunks in the place of the kernels that they replace."""
    place = {member: op for op, members in chunks.items() for member in members}
    producers = graph.producers() | {v: op for op in chunks for v in op.results}
    ops: list[Op] = []
    done: set[Op] = set()

    def emit(op: Op) -> None:
        stack = [op]
        while stack:
            at = stack[-1]
            if at in done:
                stack.pop()
                continue
            before = [producers[v] for v in at.operands if v in producers]
            waiting = [p for p in before if p not in done]
            if waiting:
                stack += waiting
            else:
                done.add(at)
                ops.append(stack.pop())

    for op in graph.ops:
        if op not in place and op.name not in VIEWS:
            emit(op)
    for value in graph.results:
        if value in producers:
            emit(producers[value])
    return graph.replace(ops=tuple(ops))
