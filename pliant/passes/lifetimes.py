"""How long kernels' results live, seen before they are lowered.

What `memory` says of the lowered graph, without scratch: enough to tell whether values
may share one buffer, which lives from the first of them to the last reader of any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pliant.ir.graph import Graph, Op, Value
from pliant.passes.groups import OPAQUE
from pliant.sym import Expr, Facts, as_expr, le


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes that live from one kernel to another."""

    bytes: Expr
    first: int
    last: int


class Kernels:
    """The fusions of a graph in order, and the spans of their results."""

    def __init__(self, fused: Graph) -> None:
        self.fusions = [op for op in fused.ops if op.name == "fusion"]
        self.of_root: dict[str, int] = {}  # a matmul's result, by name -> its kernel
        self.contractions: list[tuple[int, str]] = []  # kernel, its left operand
        for k, op in enumerate(self.fusions):
            if op.str_attr("kind") in OPAQUE:
                self._note_root(k, op)
        self.spans = self._spans(fused)
        self.before = set(self._sums(self.spans).values())

    def _note_root(self, k: int, op: Op) -> None:
        (root,) = (o for o in op.regions[0].ops if o.name == op.str_attr("kind"))
        left = root.operands[0].name if root.operands else ""
        self.contractions.append((k, left))
        if root.name == "matmul":
            self.of_root[root.result.name] = k

    def _spans(self, fused: Graph) -> dict[str, Span]:
        bases: dict[Value, Value] = {}
        found: dict[Value, Span] = {}
        kernel = 0
        for op in fused.ops:
            operands = [bases.get(v, v) for v in op.operands]
            if op.name == "fusion":
                for value in operands:
                    if value in found:
                        span = found[value]
                        found[value] = Span(span.bytes, span.first, kernel)
                for value in op.results:
                    found[value] = Span(value.type.bytes, kernel, kernel)
                kernel += 1
            elif operands:
                bases[op.result] = operands[0]
        outputs = {bases.get(v, v) for v in fused.results}
        return {v.name: span for v, span in found.items() if v not in outputs}

    def _sums(self, spans: Mapping[str, Span]) -> dict[int, Expr]:
        """Live bytes at every kernel."""
        live = [as_expr(0)] * len(self.fusions)
        for span in spans.values():
            for k in range(span.first, span.last + 1):
                live[k] = live[k] + span.bytes
        return dict(enumerate(live))

    def joined(self, names: Sequence[str]) -> dict[str, Span] | None:
        """The spans with some values in one buffer; None if one is not a buffer."""
        parts = [self.spans[name] for name in names if name in self.spans]
        if len(parts) < len(names):
            return None
        size = as_expr(0)
        for part in parts:
            size = size + part.bytes
        first = min(part.first for part in parts)
        last = max(part.last for part in parts)
        spans = {k: span for k, span in self.spans.items() if k not in names}
        return {**spans, names[0]: Span(size, first, last)}

    def accept(self, spans: dict[str, Span], facts: Facts) -> bool:
        """Takes these spans over, if they need no more memory: 1% at most."""
        sums = dict.fromkeys(self._sums(spans).values())
        for size in sums:
            if size in self.before:
                continue
            if not any(facts.prove(le(size * 100, b * 101)) for b in self.before):
                return False
        self.spans = spans
        return True
