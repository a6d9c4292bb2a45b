"""The tools of gradient rules: the builder, producers, parts of a gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pliant.ir.build import Builder
from pliant.ir.graph import Graph, Op, Value
from pliant.sym import ZERO, Expr


@dataclass(frozen=True, slots=True)
class GradientPart:
    """A summand of a value's gradient.

    With an axis it covers only the piece from `start` on along that axis, and is zero
    elsewhere. The pieces of a split are concatenated, not added up.
    """

    value: Value
    axis: int | None = None
    start: Expr = ZERO

    @property
    def end(self) -> Expr:
        assert self.axis is not None
        return self.start + self.value.shape[self.axis]


@dataclass(frozen=True, slots=True)
class Tape:
    """The graph being differentiated, and where backward ops go."""

    b: Builder
    producers: Mapping[Value, Op]
    active: set[Value]  # what needs a gradient
    # From a region and the numbers of some params to a region that gives their
    # gradients; behind its params it takes that of each float result.
    region_gradient: Callable[[Builder, Graph, Sequence[int]], Graph]

    def backward(self, region: Graph, wanted: Sequence[int]) -> Graph:
        return self.region_gradient(self.b, region, wanted)

    def wants(self, value: Value) -> bool:
        return value in self.active

    def number(self, value: Value) -> float | None:
        """The number that every element is, if the value is a `full` behind views."""
        op = self.producers.get(value)
        while op is not None and op.name in ("broadcast", "reshape"):
            op = self.producers.get(op.operands[0])
        found = None if op is None or op.name != "full" else op.attr("value")
        return float(found) if isinstance(found, (bool, int, float)) else None

    # ---- arithmetic with numbers

    def times(self, x: Value, number: float) -> Value:
        return self.b.binary("mul", x, self.b.scalar(number, x.dtype))

    def plus(self, x: Value, number: float) -> Value:
        return self.b.binary("add", x, self.b.scalar(number, x.dtype))

    def mul(self, x: Value, y: Value) -> Value:
        return self.b.emit("mul", x, y)

    def neg(self, x: Value) -> Value:
        return self.b.unary("neg", x)

    def zeros(self, like: Value) -> Value:
        return self.b.full_like(like, 0.0)

    def where(self, cond: Value, x: Value) -> Value:
        """x where the condition holds, else 0."""
        return self.b.select(cond, x, self.b.scalar(0.0, x.dtype))

    def compare(self, op: str, x: Value, number: float) -> Value:
        return self.b.binary(op, x, self.b.scalar(number, x.dtype))


Grads = Sequence[Value | None]  # one for each result
Parts = Iterator[tuple[Value, GradientPart]]
Rule = Callable[[Tape, Op, Grads], Parts]


def total(tape: Tape, value: Value, parts: Sequence[GradientPart]) -> Value | None:
    """The sum of a value's parts; None if there are none."""
    if not parts:
        return None
    whole = [p.value for p in parts if p.axis is None]
    pieces = [p for p in parts if p.axis is not None]
    while pieces:
        row, pieces = _row(tape, pieces)
        whole.append(_joined(tape, value, row))
    out = whole[0]
    for other in whole[1:]:
        out = tape.b.emit("add", out, other)
    return out


def _row(
    tape: Tape, pieces: list[GradientPart]
) -> tuple[list[GradientPart], list[GradientPart]]:
    """Pieces that are contiguous along one axis, in order, and the other parts."""
    first, *rest = pieces
    row = [first]
    changed = True
    while changed:
        changed = False
        for piece in rest:
            if piece.axis != first.axis:
                continue
            if tape.b.same(piece.start, row[-1].end):
                row.append(piece)
            elif tape.b.same(piece.end, row[0].start):
                row.insert(0, piece)
            else:
                continue
            rest = [p for p in rest if p is not piece]
            changed = True
            break
    return row, rest


def _joined(tape: Tape, value: Value, row: list[GradientPart]) -> Value:
    """One value of the whole shape: the pieces, padded with zeros."""
    b, axis = tape.b, row[0].axis
    assert axis is not None
    out = b.concat([p.value for p in row], axis)
    low = [ZERO] * value.type.rank
    high = list(low)
    low[axis], high[axis] = row[0].start, value.shape[axis] - row[-1].end
    if b.same(low[axis], 0) and b.same(high[axis], 0):
        return out
    return b.emit("pad", out, low=tuple(low), high=tuple(high), value=0.0)
