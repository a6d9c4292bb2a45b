"""Which memory a lowered graph needs, and when: symbolic liveness.

Every `alloc` that is not a result lives in the arena, from the first call that touches
it to the last; results are allocated by the caller's framework and live to the end.
Offsets are chosen per shape at run time (runtime/planner.c) from exactly these
intervals and sizes, so the peak is known without running.
"""

from __future__ import annotations

from dataclasses import dataclass

from pliant.ir.graph import Graph, Value
from pliant.sym import Expr, Facts, as_expr, ceildiv

ALIGN = 64  # offsets are multiples of a cache line


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
    moments = sorted({b.first for b in memory.buffers})
    sums: list[Expr] = []
    for k in moments:
        live = results
        for b in memory.buffers:
            if b.first <= k <= b.last:
                live = live + ALIGN * ceildiv(b.bytes, ALIGN)
        sums.append(live)
    return largest(sums or [results], facts)


def largest(sums: list[Expr], facts: Facts) -> list[Expr]:
    """Drops every sum that another one provably dominates."""
    kept: list[Expr] = []
    for e in dict.fromkeys(sums):
        if any(facts.compare(e, other) in ("lt", "le", "eq") for other in kept):
            continue
        kept = [o for o in kept if facts.compare(o, e) not in ("lt", "le", "eq")]
        kept.append(e)
    return kept
