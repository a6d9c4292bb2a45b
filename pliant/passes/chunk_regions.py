"""Parts of a fused graph that can run in chunks of rows.

A region grows from one kernel backwards. Its last kernel gives some rows of its result;
`Cutter` tells which rows of its operands that takes, so the kernels that make those
may give rows only as well, and so on:

    %h = fusion(%x, %w1)      %x cut at its rows, %w1 whole
    %y = fusion(%h, %w2, %x)  cut at its rows: %h and %x are cut, %w2 is whole

A kernel whose result somebody needs whole (the keys of attention), or that cannot be
cut there, runs before the loop, once. So does all that it depends on. A value that
other parts of the graph read too is a result of the region: its rows are collected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pliant.ir.graph import Graph, Names, Op, Value
from pliant.ir.ops import VIEWS, Trait, has_trait
from pliant.ir.types import DType
from pliant.passes.chunk_views import Bases
from pliant.passes.cuts import Chunk, Cut, Cutter, Demand, RegionCuts, chunked
from pliant.sym import ONE, Expr, Facts, Guard, as_expr, ge, le, product, sym

_FEW_ROWS = 4  # of each of many matrices

# The sizes of a chunk's region: how many rows, and which is the first.
COUNT, FIRST = "chunk_rows", "chunk_first"

Need = tuple[Value, Demand]  # a value in memory, and which rows of it
_Runs = tuple[DType, Expr, Expr]  # of rows: their type, all elements, number of runs


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """Kernels that run in chunks together."""

    cutter: Cutter
    members: dict[Op, RegionCuts]  # the last one first
    results: Mapping[Value, Cut]  # of the members: those that others read
    needs: tuple[Need, ...]  # what it reads from outside
    # What each member reads and makes that is the region's own.
    inner: tuple[tuple[Value, ...], ...]
    multiple: int  # rows in a chunk should be a multiple of this
    # Results and values that they may be written over: each round has read their rows.
    over: tuple[tuple[Value, Value], ...]

    @property
    def extent(self) -> Expr:
        return self.cutter.extent


@dataclass(slots=True)
class FusedGraph(Bases):
    """A fused graph, and who makes and reads each value in memory.

    `rows` are those that the kernel of a product makes best use of: rows of a chunk are
    a multiple, where a product has them as rows. `origin` tells which kernels are
    copies of one.
    """

    facts: Facts
    rows: int
    origin: Mapping[Op, Op] = field(default_factory=dict)
    fusions: tuple[Op, ...] = field(init=False)
    touched: dict[Op, tuple[Value, ...]] = field(init=False)  # by each kernel

    def __post_init__(self) -> None:
        Bases.__post_init__(self)
        self.fusions = tuple(op for op in self.graph.ops if op.name == "fusion")
        self.touched = {
            op: tuple(dict.fromkeys((*map(self.base, op.operands), *op.results)))
            for op in self.fusions
        }

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


class Growth:
    """The regions that end with one kernel, cut in one way: each inside the next."""

    def __init__(self, of: FusedGraph, cutter: Cutter) -> None:
        self.of, self.cutter = of, cutter
        self._parts: dict[tuple[Op, tuple[Demand, ...]], _Part | None] = {}
        self._multiples: dict[tuple[Op, int], int] = {}
        self._needs: dict[int, tuple[Need, ...]] = {}  # of a part, by its cuts
        self._known_runs: dict[tuple[Value, Cut], _Runs] = {}

    def regions(self, end: int, cut: Cut, most: int) -> Iterator[Region]:
        """From small to large; `most` kernels are looked at."""
        fusions = self.of.fusions
        wanted: dict[Value, set[Demand]] = {fusions[end].results[0]: {cut}}
        members: dict[Op, RegionCuts] = {}
        open_ = {fusions[end].results[0]}
        reads = 0  # values from outside; a region that needs fewer is looked at
        for k in range(end, max(end - most, -1), -1):
            op = fusions[k]
            if not any(v in wanted for v in op.results):
                continue
            open_ -= set(op.results)
            part = self._part(op, [wanted.get(v) for v in op.results])
            if part is None and k == end:
                return
            if part is None:
                for value in op.operands:
                    wanted.setdefault(self.of.base(value), set()).add(None)
                    open_.discard(self.of.base(value))
            else:
                members[op] = part.cuts
                for value, demand in part.needs:
                    rows = wanted.setdefault(value, set())
                    rows.add(demand)
                    if rows == {demand} and demand is not None:
                        open_.add(value)
                    else:
                        open_.discard(value)
                reads, before = len(wanted) - len(members), reads
                if reads < before or _is_worth_a_look(len(members)):
                    made = self._region(members)
                    if made is not None:
                        yield made
            if not open_:
                return

    def _part(self, op: Op, wanted: Sequence[set[Demand] | None]) -> _Part | None:
        cuts: list[Demand] = []
        for demands in wanted:
            if demands is not None and (len(demands) > 1 or None in demands):
                return None
            cuts.append(next(iter(demands)) if demands else None)
        filled = self._filled(op, cuts)
        return None if filled is None else self._cut(op, filled)

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

    def _cut(self, op: Op, cuts: tuple[Demand, ...]) -> _Part | None:
        key = op, cuts
        if key not in self._parts:
            self._parts[key] = self._new_part(op, cuts)
        return self._parts[key]

    def _new_part(self, op: Op, cuts: tuple[Demand, ...]) -> _Part | None:
        region = op.regions[0]
        found = self.cutter.region(region, cuts)
        if found is None:
            return None
        needs: list[Need] = []
        for param, operand in zip(region.params, op.operands, strict=True):
            if param in found.demands:
                need = self.of.need(self.cutter, operand, found.demands[param])
                if need is None:
                    return None
                needs.append(need)
        part = _Part(found, tuple(dict.fromkeys(needs)))
        self._needs[id(found)] = part.needs
        return part

    def _multiple(self, op: Op, cuts: RegionCuts) -> int:
        """Of which number of rows a kernel makes best use."""
        key = op, id(cuts)  # `_parts` holds it
        if key not in self._multiples:
            self._multiples[key] = self._new_multiple(op, cuts)
        return self._multiples[key]

    def _new_multiple(self, op: Op, cuts: RegionCuts) -> int:
        for inner in op.regions[0].ops:
            if has_trait(inner, Trait.CONTRACT):
                cut = cuts.demands.get(inner.results[0])
                rows = inner.results[0].type.rank - 2
                if cut is not None and cut.axis == rows and cut.inner == ONE:
                    # A row of a product of many matrices is a row of each of them.
                    return self.of.rows if rows < 2 else _FEW_ROWS
        return 1

    def _region(self, members: Mapping[Op, RegionCuts]) -> Region | None:
        """A region of these kernels, if they keep something to themselves."""
        ordered = list(members)[::-1]  # they were found from the end
        inner = {v for op in ordered for v in op.results}
        results: dict[Value, Cut] = {}
        needs: dict[Need, None] = {}
        for op in ordered:
            cuts = members[op]
            region = op.regions[0]
            for value, given in zip(op.results, region.results, strict=True):
                if not self.of.readers.get(value, {}).keys() <= members.keys():
                    cut = cuts.demands[given]
                    assert cut is not None
                    results[value] = cut
            needs |= {n: None for n in self._needs[id(cuts)] if n[0] not in inner}
        if len(results) == len(inner):
            return None
        read = (value for value, rows in needs if rows is not None)
        if any(v.type.numel == as_expr(0) for v in (*results, *read)):
            return None  # of nothing there are no rows
        kept = inner - set(results)
        own = tuple(
            tuple(v for v in self.of.touched[op] if v in kept) for op in ordered
        )
        multiple = max(self._multiple(op, members[op]) for op in ordered)
        return Region(
            self.cutter,
            dict(members),
            results,
            tuple(needs),
            own,
            multiple,
            tuple(self._written_over(results, needs)),
        )

    def _written_over(
        self, results: Mapping[Value, Cut], needs: Collection[Need]
    ) -> Iterator[tuple[Value, Value]]:
        """Results and operands of which a round has the same rows, and no others."""
        ways = Counter(value for value, _ in needs)
        alike: dict[_Runs, list[Value]] = {}
        for value, demand in needs:
            if demand is not None and ways[value] == 1:
                alike.setdefault(self._runs(value, demand), []).append(value)
        for result, cut in results.items():
            for value in alike.get(self._runs(result, cut), ()):
                yield result, value

    def _runs(self, value: Value, cut: Cut) -> _Runs:
        """Values that are alike in this have rows of the same bytes in each round."""
        key = value, cut
        if key not in self._known_runs:
            self._known_runs[key] = value.dtype, value.type.numel, _outer(value, cut)
        return self._known_runs[key]


def _is_worth_a_look(kernels: int) -> bool:
    """Of small regions all, of large ones few: so there are not many."""
    return 1 < kernels <= 6 or kernels % max(kernels // 2, 1) == 0


@dataclass(frozen=True, slots=True)
class _Part:
    """A kernel that gives rows only, and what it needs from memory for them."""

    cuts: RegionCuts
    needs: tuple[Need, ...]


# ---- the op


def chunk_op(of: FusedGraph, region: Region, rows: Expr) -> Op:
    """The op `chunk` that computes a region, `rows` at a time."""
    return _ChunkBuilder(of, region, rows).op()


class _ChunkBuilder:
    def __init__(self, of: FusedGraph, region: Region, rows: Expr) -> None:
        self.of, self.region, self.rows = of, region, rows
        self.sizes = COUNT, FIRST
        self.chunk = Chunk(region.cutter, sym(COUNT), sym(FIRST), Names())
        self.values: dict[Need, Value] = {}
        self.ops: list[Op] = []
        self.params: dict[Need, Value] = {}
        # Results of members, by the kernel and what it reads: copies are one here.
        self.made: dict[object, tuple[Value, ...]] = {}

    def op(self) -> Op:
        for fusion in reversed(self.region.members):
            self.member(fusion)
        outputs = self.region.results
        results = tuple(self.values[v, cut] for v, cut in outputs.items())
        count, extent = sym(self.sizes[0]), self.region.extent
        guards = [ge(count, 1), le(count, extent), ge(sym(self.sizes[1]), 0)]
        guards.append(le(sym(self.sizes[1]) + count, extent))
        body = Graph(
            "chunk",
            tuple(self.params.values()),
            tuple(self.ops),
            results,
            self.sizes,
            tuple(Guard(cond, (), "") for cond in guards),
        )
        runs = [_outer(v, cut) for v, cut in (*self.params, *outputs.items())]
        attrs = (("extent", extent), ("rows", self.rows), ("outers", tuple(runs)))
        operands = tuple(v for v, _ in self.params)
        loc = next((op.loc for op in self.region.members if op.loc), "")
        return Op("chunk", operands, attrs, tuple(outputs), (body,), loc)

    def member(self, fusion: Op) -> None:
        inside, cuts = fusion.regions[0], self.region.members[fusion]
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


def _outer(value: Value, cut: Demand) -> Expr:
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
