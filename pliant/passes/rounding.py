"""Half floats that a jump depends on are rounded wherever they are computed.

    %y = mul(%a, %b)                    %y = mul(%a, %b)
    %m = reduce(%y) {op = "max"}        %r = rounded(%y)
    %w = broadcast(%m)           ->     %m = reduce(%r) {op = "max"}
    %e = eq(%y, %w)                     %w = broadcast(%m)
                                        %e = eq(%r, %w)

A kernel computes half floats in f32 and rounds what it stores, so an op may read a
value with more digits than another op that reads it from memory. Most ops then differ
by about one rounding. One that jumps (a comparison, `floor`, a cast to integers, the
places of a sort, a logarithm about 0) may differ by anything: no element of y equals
the maximum of y that was stored. So every value of a half type that such an op depends
on is rounded, and has the same bits for all who read it. Values that are only compared
to choose between numbers that agree there (relu, leaky relu) are not.

What an op depends on is followed back to what is in memory, and to sums and products,
which no pass computes twice. So relations between elements, the order among them and
what is equal, are those that torch's roundings give them. This is late in the pipeline:
passes before it may copy ops, into the scores of attention for one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from pliant.context import Context
from pliant.ir.graph import Graph, Names, Op, Value, names_of
from pliant.ir.interp_numbers import stored
from pliant.ir.ops import (
    ATTENTIONS,
    LIBRARY,
    OPAQUE,
    Trait,
    has_trait,
)
from pliant.ir.ops_library import OVERWRITES
from pliant.passes.bends import Bends

_SUMS = frozenset({"sum", "prod", "mean"})


def _is_half(value: Value) -> bool:
    return value.dtype.compute is not value.dtype


def _sums_up(op: Op) -> bool:
    """Whether results are made of many elements: no relation of single ones remains."""
    if has_trait(op, Trait.CONTRACT) or op.name in ATTENTIONS:
        return True
    if op.name in LIBRARY:
        return not has_trait(op, Trait.JUMPS) and op.name not in OVERWRITES
    return has_trait(op, Trait.REDUCE) and op.attr("op") in _SUMS


def _is_rounded(op: Op) -> bool:
    """Whether results have their type's digits if the operands have theirs."""
    match op.name:
        case "cast" | "bitcast" | "constant" | "full" | "rounded":
            return True
        case "pad":
            number = op.attr("value")
            assert isinstance(number, (bool, int, float))
            return stored(number, op.result.dtype) == number
        case "iota" | "dim_value":
            return False
        case _:
            moves = has_trait(op, Trait.MOVE) or has_trait(op, Trait.FITS)
            in_memory = op.name in OPAQUE and not has_trait(op, Trait.CONTRACT)
            return moves or in_memory or (op.name == "reduce" and not _sums_up(op))


@dataclass(slots=True)
class _JumpSearch:
    """What the jumps of a graph depend on, also those in its attentions' scores."""

    graph: Graph
    producers: dict[Value, Op] = field(default_factory=dict)
    # Parameters of the scores' regions, and what they are of the graph; the scores
    # themselves, which are in registers.
    outer: dict[Value, Value] = field(default_factory=dict)
    scores: set[Value] = field(default_factory=set)
    found: set[Value] = field(default_factory=set)  # half floats to be rounded

    def run(self, results: Iterable[Value]) -> None:
        stack = list(results)
        for graph in self.graphs():
            bends = Bends(graph)
            self.producers.update(bends.producers)
            for op in graph.ops:
                stack.extend(_jumped_on(op, bends))
        seen: set[Value] = set()
        while stack:
            value = stack.pop()
            if value in seen or not value.dtype.is_float:
                continue
            seen.add(value)
            if value in self.outer:
                stack.append(self.outer[value])
                continue
            made = self.producers.get(value)
            computed = value in self.scores if made is None else not _is_rounded(made)
            if computed and _is_half(value):
                self.found.add(value)
            if made is not None and not _sums_up(made):
                stack.extend(made.operands)

    def graphs(self) -> Iterator[Graph]:
        """The graph and the regions of its attentions."""
        yield self.graph
        for op in self.graph.ops:
            for region in op.regions:
                score, *others = region.params
                self.scores.add(score)
                read = op.operands[len(op.operands) - len(others) :]
                self.outer.update(zip(others, read, strict=True))
                yield region


def _jumped_on(op: Op, bends: Bends) -> Sequence[Value]:
    """The operands that the op may jump on, or hand on to where they are jumped on."""
    if not any(v.dtype.is_float for v in op.operands):
        return ()
    if has_trait(op, Trait.JUMPS):
        return () if bends.is_bend(op) else op.operands
    if has_trait(op, Trait.EDGE):
        return () if bends.is_off_edge(op) else op.operands
    if op.name == "cast":
        return () if op.result.dtype.is_float else op.operands
    return op.operands if has_trait(op, Trait.CALL) else ()


def _with_rounded(graph: Graph, found: set[Value], names: Names) -> Graph:
    """The graph, or a region, with these values rounded for all who read them."""
    now: dict[Value, Value] = {}
    ops: list[Op] = []

    def round_(values: Iterable[Value], loc: str) -> None:
        for value in values:
            if value in found:
                now[value] = Value(names.fresh(f"{value.name}_rounded"), value.type)
                ops.append(Op("rounded", (value,), (), (now[value],), (), loc))

    round_(graph.params, "")
    for op in graph.ops:
        operands = tuple(now.get(v, v) for v in op.operands)
        regions = tuple(_with_rounded(r, found, names) for r in op.regions)
        if (operands, regions) != (op.operands, op.regions):
            op = op.replace(operands=operands, regions=regions)
        ops.append(op)
        round_(op.results, op.loc)
    return graph.replace(ops=tuple(ops))


def rounding(graph: Graph, cx: Context) -> Graph:
    """The graph with the half floats rounded that a jump depends on.

    What a part of a model hands on to others may be jumped on there.
    """
    if not any(_is_half(v) for op in graph.ops for v in (*op.operands, *op.results)):
        return graph
    search = _JumpSearch(graph)
    search.run(graph.results if cx.is_part else ())
    if not search.found:
        return graph
    return _with_rounded(graph, search.found, Names(names_of(graph)))
