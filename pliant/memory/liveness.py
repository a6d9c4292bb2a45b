"""Which memory a lowered graph needs, and when: symbolic liveness.

Every `alloc` that is not a result lives in the arena, from the first call that touches
it to the last; results are allocated by the caller's framework and live to the end.
Offsets are chosen per shape at run time (runtime/planner.c) from exactly these
intervals and sizes, so the peak is known without running.
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass

from pliant.ir.graph import Graph, Value
from pliant.runtime.description import ALIGN
from pliant.sym import Expr, Facts, as_expr, ceildiv, le
from pliant.sym.points import witnesses


@dataclass(frozen=True, slots=True)
class ArenaBuffer:
    """An arena buffer: its bytes, and the first and last step that touch it."""

    value: Value
    bytes: Expr
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Memory:
    """The arena's buffers, the results' storage, and the base of every value."""

    buffers: tuple[ArenaBuffer, ...]
    outputs: tuple[Value, ...]  # the alloc behind each result
    bases: dict[Value, Value]  # a view -> the alloc, param or constant it is a view of


def liveness(graph: Graph) -> Memory:
    """The memory of a lowered graph; step k is its k-th op."""
    bases: dict[Value, Value] = {}
    spans: dict[Value, tuple[int, int]] = {}
    kinds: dict[Value, Expr] = {}
    for k, op in enumerate(graph.ops):
        if op.name == "alloc":
            kinds[op.result] = op.dim_attr("bytes")
        elif op.name == "view":
            source = op.operands[0]
            bases[op.result] = bases.get(source, source)
        else:
            for value in op.operands:
                base = bases.get(value, value)
                first, _ = spans.get(base, (k, k))
                spans[base] = (first, k)
    outputs = tuple(bases.get(v, v) for v in graph.results)
    held = set(outputs)
    buffers = tuple(
        ArenaBuffer(value, size, *spans[value])
        for value, size in kinds.items()
        if value not in held and value in spans
    )
    return Memory(buffers, outputs, bases)


def peak_terms(memory: Memory, facts: Facts) -> list[Expr]:
    """Live bytes at every moment that could be the peak, results included.

    Sizes in the arena are rounded up to whole cache lines, as the planner rounds them.
    """
    results = as_expr(0)
    for value in dict.fromkeys(memory.outputs):
        results = results + value.type.bytes
    sums: list[Expr] = []
    moments = sorted({b.first for b in memory.buffers})
    for k, following in itertools.zip_longest(moments, moments[1:]):
        alive = [b for b in memory.buffers if b.first <= k <= b.last]
        if following is not None and all(b.last >= following for b in alive):
            continue  # all of it is alive at the next moment as well
        live = results
        for b in alive:
            live = live + ALIGN * ceildiv(b.bytes, ALIGN)
        sums.append(live)
    return largest(sums or [results], facts)


def largest(sums: list[Expr], facts: Facts) -> list[Expr]:
    """Drops every sum that another one provably dominates.

    A proof is tried only where no size is known at which the sum is the greater one.
    """
    names = {name for e in sums for name in e.symbols()}
    points = witnesses(facts, names)
    values = {e: [e.evaluate(point) for point in points] for e in sums}

    def dominates(a: Expr, b: Expr) -> bool:
        refuted = any(map(operator.lt, values[a], values[b]))
        return not refuted and facts.prove(le(b, a)) is True

    kept: list[Expr] = []
    # The greatest first: few of those behind it need a second proof.
    for e in sorted(values, key=lambda e: -sum(values[e])):
        if not any(dominates(other, e) for other in kept):
            kept = [*(other for other in kept if not dominates(e, other)), e]
    return [e for e in values if e in kept]
