"""The region of an attention op: what happens to its scores inside the kernel.

    %m = logical_and(le(keys, queries), eq(%document_of_query, %document_of_key))
    %y = attention(%q, %k, %v, %m) {masked = true}
    ->
    %y = attention(%q, %k, %v, %document_of_query, %document_of_key) {causal = true}
      region (%s, %a, %b) { .. add(%s, select(eq(..), 0, -inf)) }

Cheap elementwise ops over (query, key) move into the region, with the broadcasts
between them, and the region reads their operands: no tensor of the size of the scores,
or of one head's scores, is stored for them. Expensive ops (a bucket by logarithm),
gathers and data movement are computed once, outside, and their result is read. `causal`
is extracted from masks that add or set -inf; whole blocks of keys are then skipped. A
mask `key <= query + past` gives `first = past`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from pliant.ir.access import is_one
from pliant.ir.build import Builder
from pliant.ir.graph import Graph, Op, Value, ops_behind
from pliant.ir.ops import FORMULAS, OPS, Cost, Trait, has_trait
from pliant.ir.types import DType, TensorType
from pliant.sym import ZERO, Expr, Facts, as_expr, eq, minimum

# Most operands of a region: each occupies an address register in the inner loop.
MOST_READ = 6
MOST_OPS = 48


@dataclass(frozen=True, slots=True)
class Score:
    """A region, the values of the graph that it reads, and what is causal about it."""

    region: Graph | None
    reads: tuple[Value, ...]
    first: Expr | None  # a causal mask's first row; None without one

    def causal_attrs(self, op: str) -> dict[str, Any]:
        """The attributes of an attention op of this name that its mask decides."""
        attrs: dict[str, Any] = {"causal": self.first is not None}
        if op != "attention_backward":
            attrs["first"] = ZERO if self.first is None else self.first
        return attrs


# ---- positions


@dataclass(frozen=True, slots=True)
class _ScoreLine:
    """query * (index of the query) + key * (index of the key) + offset."""

    query: int
    key: int
    offset: Expr

    def minus(self, other: _ScoreLine) -> _ScoreLine:
        return _ScoreLine(
            self.query - other.query, self.key - other.key, self.offset - other.offset
        )


NOWHERE = _ScoreLine(0, 0, ZERO)


def earliest(a: Expr | None, b: Expr | None) -> Expr | None:
    """The first row of two causal masks on the same scores."""
    if a is None or b is None:
        return b if a is None else a
    return minimum(a, b)


def _same(facts: Facts, a: Expr, b: Expr) -> bool:
    return a is b or facts.prove(eq(a, b)) is True


@dataclass(slots=True)
class ScoreRegion:
    """Builds the region of one attention op with scores of type `kind`."""

    producers: Mapping[Value, Op]
    facts: Facts
    kind: TensorType
    path: Set[Value] = frozenset()  # computed from the scores: always moves in
    absorb: bool = True
    shifted: bool = True  # whether a causal mask may be one of rows from a number on
    builder: Builder = field(init=False)
    score: Value = field(init=False)
    made: dict[Value, Value] = field(default_factory=dict)
    reads: dict[Value, Value] = field(default_factory=dict)
    first: Expr | None = None  # of the causal mask

    def __post_init__(self) -> None:
        self.builder = Builder(self.facts)
        self.score = self.builder.param("score", self.kind)

    # ---- ops that move in

    def _over_grid(self, value: Value) -> bool:
        """Whether a value has an element for every query and key."""
        if value.type.rank < 2:
            return False
        pairs = zip(value.shape[-2:], self.kind.shape[-2:], strict=True)
        return all(not is_one(a) and _same(self.facts, a, b) for a, b in pairs)

    def _aligned(self, op: Op) -> bool:
        """Whether a broadcast leaves queries and keys in the last two axes."""
        (x,) = op.operands
        rank = op.result.type.rank
        trailing = tuple(range(rank - x.type.rank, rank))
        return op.ints_attr("axes") == trailing and self._over_grid(x)

    def _moves_in(self, value: Value) -> bool:
        op = self.producers.get(value)
        if op is None:
            return False
        if value in self.path or op.name in FORMULAS:
            return True
        if op.name == "broadcast":
            return True
        if not self.absorb:
            return False
        if op.name == "reshape":  # only dims of 1 change, so no index is divided
            (x,) = op.operands
            plain = [d for d in x.shape if not is_one(d)]
            ones = plain == [d for d in value.shape if not is_one(d)]
            return ones and x in self.producers and self._moves_in(x)
        # Ops that cost about as much as the exponential of a score stay outside.
        if not has_trait(op, Trait.ELEMENTWISE) or OPS[op.name].cost >= Cost.DIVIDE:
            return False
        return self._over_grid(value)

    def clone(self, value: Value) -> Value:
        """The value inside the region."""
        if value in self.made:
            return self.made[value]
        if not self._moves_in(value):
            inside = Value(self.builder.names.fresh(value.name), value.type)
            self.reads[value] = self.made[value] = inside
            return inside
        op = self.producers[value]
        operands = tuple(self.clone(v) for v in op.operands)
        result = Value(self.builder.names.fresh(op.name), value.type)
        self.builder.append(op.replace(operands=operands, results=(result,)))
        self.made[value] = result
        return result

    # ---- the causal part of a mask

    def _line(self, value: Value, axes: Sequence[int | None]) -> _ScoreLine | None:
        """An integer tensor that is linear in (query, key), its axes `axes`.

        Along an axis that is None, all elements are the same.
        """
        op = self.producers.get(value)
        if op is None:
            return None
        match op.name:
            case "iota" if op.int_attr("axis") in axes:
                which = axes.index(op.int_attr("axis"))
                return _ScoreLine(1 - which, which, ZERO)
            case "full":
                number = op.attr("value")
                if not isinstance(number, int):
                    return None
                return _ScoreLine(0, 0, as_expr(number))
            case "dim_value" if value.dtype is DType.I64:
                return _ScoreLine(0, 0, op.dim_attr("value"))
            case "broadcast":
                (x,), kept = op.operands, op.ints_attr("axes")
                own = {axis: k for k, axis in enumerate(kept) if not is_one(x.shape[k])}
                inner = [None if axis is None else own.get(axis) for axis in axes]
                return self._line(x, inner)
            case "sub":
                a, b = (self._line(v, axes) for v in op.operands)
                return None if a is None or b is None else a.minus(b)
            case "add":
                a, b = (self._line(v, axes) for v in op.operands)
                negative = None if b is None else NOWHERE.minus(b)
                return None if a is None or negative is None else a.minus(negative)
            case _:
                return None

    def _kept_from(self, value: Value, *, negated: bool) -> Expr | None:
        """The x of a flag over (query, key) that is `key <= query + x`, or is not."""
        op = self.producers.get(value)
        if op is not None and op.name == "broadcast":
            (x,) = op.operands
            return self._kept_from(x, negated=negated) if self._aligned(op) else None
        if op is not None and op.name == "reshape" and _keeps_grid(op):
            return self._kept_from(op.operands[0], negated=negated)
        if op is not None and op.name == "logical_not":
            return self._kept_from(op.operands[0], negated=not negated)
        if op is None or op.name not in ("le", "lt", "ge", "gt"):
            return None
        if not self._over_grid(value):
            return None
        rank = value.type.rank
        a, b = (self._line(v, (rank - 2, rank - 1)) for v in op.operands)
        if a is None or b is None:
            return None
        distance = a.minus(b)
        # Turn into `distance <= 0`, or for the negation `distance > 0`.
        strict, above = op.name in ("lt", "gt"), op.name in ("ge", "gt")
        if above != negated:
            distance = NOWHERE.minus(distance)
        if (distance.query, distance.key) != (-1, 1):
            return None
        first = -distance.offset - (1 if strict != negated else 0)
        return first if self.shifted or first == 0 else None

    def _is_causal(self, flag: Value, *, negated: bool) -> bool:
        """Whether a flag is a causal mask, or its negation; notes its first row."""
        found = self._kept_from(flag, negated=negated)
        self.first = earliest(self.first, found)
        return found is not None

    def visible(self, flag: Value) -> list[Value]:
        """The conjuncts of a flag, without the causal one."""
        op = self.producers.get(flag)
        if self._is_causal(flag, negated=False):
            return []
        if op is not None and op.name == "broadcast" and self._aligned(op):
            return self.visible(op.operands[0])
        if op is not None and op.name == "reshape" and _adds_leading_ones(op):
            return self.visible(op.operands[0])
        if op is not None and op.name == "logical_and" and self.absorb:
            return [part for v in op.operands for part in self.visible(v)]
        return [flag]

    def _is_lowest(self, value: Value) -> bool:
        op = self.producers.get(value)
        return op is not None and op.name == "full" and op.attr("value") == -math.inf

    # ---- the parts of a score

    def keep(self, parts: Sequence[Value], kept: Value) -> Value:
        """The value `kept` where all flags are set, else -inf."""
        if not parts:
            return kept
        b = self.builder
        flag = self.clone(parts[0])
        for part in parts[1:]:
            flag = b.binary("logical_and", flag, self.clone(part))
        return b.select(flag, kept, b.scalar(-math.inf, kept.dtype))

    def masked(self, value: Value) -> Value:
        """A score or a summand of one, with its causal -inf removed."""
        op = self.producers.get(value)
        if op is None:
            return self.clone(value)
        moves = self._moves_in(value)
        if op.name == "add" and moves:
            a, b = (self.masked(v) for v in op.operands)
            return self.builder.emit("add", a, b)
        if op.name == "reshape" and moves and _keeps_grid(op):
            return self.builder.reshape(self.masked(op.operands[0]), value.shape)
        if op.name == "broadcast" and moves and self._aligned(op):
            return self.builder.broadcast_to(self.masked(op.operands[0]), value.shape)
        if op.name == "select" and moves:
            flag, yes, no = op.operands
            if self._is_lowest(no):
                return self._kept(self.visible(flag), self.masked(yes), value)
            if self._is_lowest(yes) and self._is_causal(flag, negated=True):
                return self.masked(no)
        return self.clone(value)

    def _kept(self, parts: list[Value], kept: Value, value: Value) -> Value:
        made = self.keep(parts, kept)
        return self.builder.broadcast_to(made, value.shape)

    # ---- the whole

    def finish(self, result: Value) -> Score | None:
        """The score's region; None if it has too many operands for one kernel."""
        if len(self.reads) > MOST_READ or len(self.builder.ops) > MOST_OPS:
            return None
        result = self.builder.broadcast_to(result, self.kind.shape)
        params = (self.score, *self.reads.values())
        ops = ops_behind(self.builder.ops, (result,))
        if result is self.score:
            return Score(None, (), self.first)
        region = Graph("score", params, ops, (result,))
        return Score(region, tuple(self.reads), self.first)


def _keeps_grid(op: Op) -> bool:
    return op.result.shape[-2:] == op.operands[0].shape[-2:]


def _adds_leading_ones(op: Op) -> bool:
    have, given = op.result.shape, op.operands[0].shape
    extra = len(have) - len(given)
    return extra >= 0 and have[extra:] == given and all(map(is_one, have[:extra]))


def mask_region(
    mask: Value,
    kind: TensorType,
    producers: Mapping[Value, Op],
    facts: Facts,
    shifted: bool = True,
) -> Score:
    """The region that adds a mask: -inf where a flag is false, or a number."""
    build = ScoreRegion(producers, facts, kind, shifted=shifted)
    score = _mask_region(build, mask)
    if score is None:
        plain = ScoreRegion(producers, facts, kind, absorb=False, shifted=shifted)
        score = _mask_region(plain, mask)
    assert score is not None, "one mask is one operand"
    return score


def _mask_region(build: ScoreRegion, mask: Value) -> Score | None:
    b, dtype = build.builder, build.kind.dtype
    if mask.dtype is DType.BOOL:
        parts = build.visible(mask)
        if not parts:
            return build.finish(build.score)
        added = build.keep(parts, b.scalar(0.0, dtype))
    else:
        added = b.cast(build.masked(mask), dtype)
    return build.finish(b.binary("add", build.score, added))
