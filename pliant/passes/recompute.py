"""Decides what the backward part recomputes instead of keeping.

    %h = matmul(%x, %w)          kept: the backward part needs it
    %a = gelu(%h)                recomputed from %h where the backward part reads it

A value that lives from the forward part to the backward part occupies memory all that
time. Elementwise ops are recomputed from what is kept anyway: pre-activations, the
residual stream, the statistics of norms. If all sources of a value would have to be
kept just for it, the value itself is kept; if it has a single source that is in memory
anyway, that source is kept instead. Only elementwise ops are recomputed, so a step
takes hardly longer. `remat` goes further if there is a memory limit.

This runs after the last canonicalize, whose CSE would remove the copies.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pliant.context import Context
from pliant.ir.graph import Graph, Names, Op, Value, names_of, values_behind
from pliant.ir.ops import FORMULAS, VIEWS, Trait, has_trait
from pliant.passes.extra_row import at_most_a_row_larger
from pliant.sym import Facts

MOST_OPS = 64  # most ops of one chain


def forward_values(graph: Graph) -> set[Value]:
    """The values that the loss, the first result, depends on."""
    return values_behind(graph.ops, graph.results[:1])


def _is_cheap(op: Op) -> bool:
    return (
        has_trait(op, Trait.ELEMENTWISE)
        or op.name in VIEWS
        or (has_trait(op, Trait.GATHER) and not has_trait(op, Trait.LOOKUP))
        or op.name in FORMULAS
    )


@dataclass(slots=True)
class _Choice:
    graph: Graph
    facts: Facts
    ahead: set[Value]
    producers: dict[Value, Op]
    users: dict[Value, list[Op]]
    kept: set[Value] = field(default_factory=set)
    again: set[Value] = field(default_factory=set)

    def needs(self) -> list[Value]:
        """Forward values that backward ops read, through views, in order."""
        found: set[Value] = set()
        for op in self.graph.ops:
            if not any(v in self.ahead for v in op.results):
                found.update(self.base(v) for v in op.operands if v in self.ahead)
        return [v for op in self.graph.ops for v in op.results if v in found]

    def base(self, value: Value) -> Value:
        while (op := self.producers.get(value)) is not None and op.name in VIEWS:
            value = op.operands[0]
        return value

    def run(self) -> None:
        needs = self.needs()
        for value in needs:
            if not _is_cheap(self.producers[value]):
                self.kept.add(value)
        for value in needs:
            if value not in self.kept:
                self.decide(value)

    def decide(self, value: Value) -> None:
        missing = self.sources(value)
        if len(missing) == 1:
            source = self.stored(*missing)
            if source is not value and self.stands_for(source, value):
                self.kept.add(source)
                missing = self.sources(value)
                if missing:
                    self.kept.remove(source)
        if missing:
            self.kept.add(value)
        else:
            self.again.add(value)

    def stored(self, source: Value) -> Value:
        """What is stored: the end of a chain of single elementwise readers."""
        while True:
            readers = self.readers(source)
            if len(readers) != 1 or not has_trait(readers[0], Trait.ELEMENTWISE):
                return source
            source = readers[0].result

    def sources(self, value: Value) -> set[Value]:
        """The additional values to keep to recompute this one; itself if too many."""
        missing: set[Value] = set()
        seen: set[Value] = set()
        stack = [value]
        while stack:
            current = stack.pop()
            op = self.producers.get(current)
            if current in seen or current in self.kept or op is None:
                continue
            seen.add(current)
            if op.name == "constant" or op.name == "reduce":
                continue  # a constant, or one number per row
            if not _is_cheap(op):
                missing.add(current)
                continue
            stack.extend(op.operands)
        return missing if len(seen) <= MOST_OPS else {value}

    def stands_for(self, source: Value, value: Value) -> bool:
        """Whether a source is in memory, and at most one row larger than the value."""
        same = source.dtype.bytes <= value.dtype.bytes
        if not same or not at_most_a_row_larger(source.shape, value.shape, self.facts):
            return False
        return any(not _is_cheap(op) for op in self.readers(source))

    def readers(self, value: Value) -> list[Op]:
        """Forward ops that read a value, through views."""
        found: list[Op] = []
        for op in self.users.get(value, []):
            if not any(v in self.ahead for v in op.results):
                continue
            found += self.readers(op.result) if op.name in VIEWS else [op]
        return found


class _Copies:
    """Copies of forward ops, placed before the backward ops that read them."""

    def __init__(self, choice: _Choice, names: Names) -> None:
        self.choice, self.names = choice, names
        self.made: dict[Value, Value] = {}
        self.ops: list[Op] = []

    def of(self, value: Value) -> Value:
        choice = self.choice
        if value not in choice.ahead:
            return value
        base = choice.base(value)
        if base is not value and base in choice.again:
            return self.copy(value)
        return self.copy(value) if value in choice.again else value

    def copy(self, value: Value) -> Value:
        op = self.choice.producers.get(value)
        if value in self.made:
            return self.made[value]
        kept = value in self.choice.kept and value not in self.choice.again
        if kept or op is None or not _is_cheap(op):
            return value
        operands = tuple(self.copy(v) for v in op.operands)
        result = Value(self.names.fresh(value.name), value.type)
        self.ops.append(op.replace(operands=operands, results=(result,)))
        self.made[value] = result
        return result


def recompute(graph: Graph, cx: Context) -> Graph:
    """A training step whose backward part reads only what has to be kept."""
    ahead = forward_values(graph)
    choice = _Choice(graph, cx.facts(graph), ahead, graph.producers(), graph.users())
    choice.run()
    if not choice.again:
        return graph
    copies = _Copies(choice, Names(names_of(graph)))
    for op in graph.ops:
        if any(v in ahead for v in op.results):
            copies.ops.append(op)
            continue
        operands = tuple(copies.of(v) for v in op.operands)
        copies.ops.append(op.replace(operands=operands))
    results = (graph.results[0], *(copies.of(v) for v in graph.results[1:]))
    return graph.replace(ops=tuple(copies.ops), results=results)
