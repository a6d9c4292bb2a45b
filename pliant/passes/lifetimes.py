"""How long the results of kernels live, estimated before lowering.

This is the liveness of the lowered graph without scratch. It suffices to decide whether
values may share one buffer, which lives from the first of them to the last reader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from pliant.ir.graph import Graph, Op, Value
from pliant.ir.ops import OPAQUE
from pliant.sym import Expr, Facts, as_expr, le


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes that are live from one kernel to another."""

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
        self.before = self._sums(self.spans)

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

    def _sums(self, spans: Mapping[str, Span]) -> list[Expr]:
        """Live bytes at every kernel."""
        live = [as_expr(0)] * len(self.fusions)
        for span in spans.values():
            for k in range(span.first, span.last + 1):
                live[k] = live[k] + span.bytes
        return live

    def join(self, names: Sequence[str], makers: Set[int], facts: Facts) -> bool:
        """Puts values into one buffer, if the peak grows by at most 1%.

        Scratch is not known yet, only that elementwise kernels have none and that the
        makers, products with the same left operand, have equal scratch. So the live
        bytes during any other kernel are compared with the earlier value at that same
        kernel.
        """
        if any(name not in self.spans for name in names):
            return False  # a result of the graph has its own storage
        spans = self._joined(names)
        now = self._sums(self.spans)
        for k, size in enumerate(self._sums(spans)):
            if size == now[k]:
                continue
            if self.fusions[k].str_attr("kind") == "map":
                bounds = set(self.before)
            else:
                bounds = {self.before[j] for j in (makers if k in makers else {k})}
            if size not in bounds and not any(
                facts.prove(le(size * 100, bound * 101)) for bound in bounds
            ):
                return False
        self.spans = spans
        return True

    def _joined(self, names: Sequence[str]) -> dict[str, Span]:
        """The spans, with the first name's span covering all of them."""
        parts = [self.spans[name] for name in names]
        size = as_expr(0)
        for part in parts:
            size = size + part.bytes
        first = min(part.first for part in parts)
        last = max(part.last for part in parts)
        others = {k: span for k, span in self.spans.items() if k not in names}
        return {**others, names[0]: Span(size, first, last)}
