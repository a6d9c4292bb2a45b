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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pliant.ir.graph import Graph, Names, Op, Value
from pliant.ir.ops import VIEWS, Trait, has_trait
from pliant.passes.cuts import Chunk, Cut, Cutter, Demand, RegionCuts, chunked
from pliant.sym import ONE, Expr, Facts, Guard, as_expr, ge, le, product, sym

ROWS = 16  # rows of a chunk are a multiple of this, where a product has them as rows

# The sizes of a chunk's region: how many rows, and which is the first.
COUNT, FIRST = "chunk_rows", "chunk_first"

Need = tuple[Value, Demand]  # a value in memory, and which rows of it


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """Kernels that run in chunks together, in their order."""

    cutter: Cutter
    members: Mapping[Op, RegionCuts]
    results: Mapping[Value, Cut]  # of the members: those that others read
    needs: tuple[Need, ...]  # what it reads from outside
    # What each member reads and makes that is the region's own.
    inner: tuple[tuple[Value, ...], ...]
    multiple: int  # rows in a chunk should be a multiple of this

    @property
    def extent(self) -> Expr:
        return self.cutter.extent


@dataclass(slots=True)
class FusedGraph:
    """A fused graph, and who makes and reads each value in memory."""

    graph: Graph
    facts: Facts
    producers: Mapping[Value, Op] = field(init=False)
    fusions: tuple[Op, ...] = field(init=False)
    # The kernels that read each value, through views; None: it is a result.
    readers: dict[Value, set[Op | None]] = field(init=False)
    touched: dict[Op, tuple[Value, ...]] = field(init=False)  # by each kernel

    def __post_init__(self) -> None:
        self.producers = self.graph.producers()
        self.fusions = tuple(op for op in self.graph.ops if op.name == "fusion")
        self.touched = {
            op: tuple(dict.fromkeys((*map(self.base, op.operands), *op.results)))
            for op in self.fusions
        }
        self.readers = {}
        for op in self.fusions:
            for value in op.operands:
                self.readers.setdefault(self.base(value), set()).add(op)
        for value in self.graph.results:
            self.readers.setdefault(self.base(value), set()).add(None)

    def base(self, value: Value) -> Value:
        """The value in memory that a view reads."""
        op = self.producers.get(value)
        while op is not None and op.name in VIEWS:
            value = op.operands[0]
            op = self.producers.get(value)
        return value

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

    def regions(self, end: int, cut: Cut, most: int) -> Iterator[Region]:
        """From small to large; `most` kernels are looked at."""
        fusions = self.of.fusions
        wanted: dict[Value, set[Demand]] = {fusions[end].results[0]: {cut}}
        members: dict[Op, RegionCuts] = {}
        open_ = {fusions[end].results[0]}
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
                if _is_worth_a_look(len(members)):
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
        for filled in self._filled(op, cuts, 0):
            part = self._cut(op, filled)
            if part is not None:
                return part
        return None

    def _filled(
        self, op: Op, cuts: list[Demand], at: int
    ) -> Iterator[tuple[Demand, ...]]:
        """Cuts for the results that only others read."""
        if at == len(cuts):
            yield tuple(cuts)
        elif cuts[at] is not None:
            yield from self._filled(op, cuts, at + 1)
        else:
            for cut in self.cutter.cuts_of(op.results[at].shape):
                rest = [*cuts[:at], cut, *cuts[at + 1 :]]
                yield from self._filled(op, rest, at + 1)

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
        return _Part(found, tuple(dict.fromkeys(needs)))

    def _region(self, members: Mapping[Op, RegionCuts]) -> Region | None:
        """A region of these kernels, if they keep something to themselves."""
        ordered = [op for op in self.of.fusions if op in members]
        inner = {v for op in ordered for v in op.results}
        results: dict[Value, Cut] = {}
        needs: dict[Need, None] = {}
        for op in ordered:
            cuts = members[op]
            region = op.regions[0]
            for value, given in zip(op.results, region.results, strict=True):
                if self.of.readers.get(value, set()) - set(members):
                    cut = cuts.demands[given]
                    assert cut is not None
                    results[value] = cut
            for param, operand in zip(region.params, op.operands, strict=True):
                if param in cuts.demands:
                    need = self.of.need(self.cutter, operand, cuts.demands[param])
                    assert need is not None
                    if need[0] not in inner:
                        needs[need] = None
        if len(results) == len(inner):
            return None
        kept = inner - set(results)
        own = tuple(
            tuple(v for v in self.of.touched[op] if v in kept) for op in ordered
        )
        multiple = max(_multiple(op, members[op]) for op in ordered)
        return Region(self.cutter, dict(members), results, tuple(needs), own, multiple)


def _is_worth_a_look(kernels: int) -> bool:
    """Of small regions all, of large ones few: so there are not many."""
    return 1 < kernels <= 8 or kernels % max(kernels // 4, 1) == 0


def _multiple(op: Op, cuts: RegionCuts) -> int:
    """Of which number of rows a kernel makes best use."""
    for inner in op.regions[0].ops:
        if has_trait(inner, Trait.CONTRACT):
            cut = cuts.demands.get(inner.results[0])
            rows = inner.results[0].type.rank - 2
            if cut is not None and cut.axis == rows and cut.inner == ONE:
                return ROWS
    return 1


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

    def op(self) -> Op:
        for fusion in (op for op in self.of.fusions if op in self.region.members):
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
        self.ops += cuts.ops(inside, self.chunk, values)
        for value, given in zip(fusion.results, inside.results, strict=True):
            self.values[value, cuts.demands[given]] = values[given]

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
