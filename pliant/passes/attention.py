"""Finds attention in products, and brings every attention into its kernel's form.

    %s = matmul(%q, transpose(%k))                       q x k
    %x = add(mul(%s, 0.125), broadcast(%bias))           anything elementwise
    %w = softmax(%x), spelled out over the last axis
    %y = matmul(%w, %v)
    ->
    %y = attention(%q, %k, %v, %bias) {scale = 0.125} region (%s, %b) { add(%s, %b) }

Attention is recognised by what is computed, after decomposition: softmax is a quotient
of exponentials and their sum along the keys, however it was written. Everything between
the first product and the softmax goes into the region (`passes/scores.py`). If
something else reads the scores or the weights, they are needed in memory and the ops
stay as they are. Keys and values that are repeated for a group of query heads are read
once per group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pliant.context import Context
from pliant.ir.access import is_one
from pliant.ir.build import Builder
from pliant.ir.graph import Graph, Names, Op, Value, names_of, substitute
from pliant.ir.ops import ATTENTIONS, Trait, first_row, has_trait
from pliant.ir.types import TensorType
from pliant.passes.scores import Score, ScoreRegion, earliest, mask_region
from pliant.sym import Expr, Facts


@dataclass(frozen=True, slots=True)
class Spelled:
    """Attention as products: softmax(path(a x b * scale)) x v."""

    product: Op
    start: Value  # the scaled product, where the path begins
    scale: float
    path: frozenset[Value]
    scores: Value  # the input of softmax
    values: Value
    guarded: bool  # weights that are NaN become 0


class _AttentionFinder:
    def __init__(self, graph: Graph, facts: Facts, guards: bool) -> None:
        self.guards = guards
        self.producers, self.users = graph.producers(), graph.users()
        self.results, self.facts = set(graph.results), facts

    def producer(self, value: Value, *names: str) -> Op | None:
        op = self.producers.get(value)
        return op if op is not None and op.name in names else None

    def read_only_by(self, value: Value, *ops: Op | None) -> bool:
        readers = self.users.get(value, [])
        return value not in self.results and all(
            any(r is op for op in ops) for r in readers
        )

    def through_casts(self, value: Value) -> Value:
        """The value before casts between float types: the kernel computes in one."""
        while (op := self.producer(value, "cast")) is not None:
            (x,) = op.operands
            if not (x.dtype.is_float and value.dtype.is_float):
                break
            if not self.read_only_by(x, op):
                break
            value = x
        return value

    # ---- softmax

    def of_rows(self, value: Value, kind: str) -> Op | None:
        """The reduction of the last axis whose result a value broadcasts along it."""
        op = self.producer(value, "broadcast")
        if op is None:
            return None
        (row,) = op.operands
        found = self.producer(row, "reduce")
        if found is None or found.str_attr("op") != kind:
            return None
        rank = value.type.rank
        if found.ints_attr("axes") != (rank - 1,):
            return None
        if found.operands[0].type.rank != rank:
            return None
        return found if op.ints_attr("axes") == tuple(range(row.type.rank)) else None

    def softmax(self, value: Value) -> Value | None:
        """The value that this one is the softmax of, if that has no other use."""
        divide = self.producer(value, "div")
        if divide is None:
            return None
        powers, total = divide.operands
        sum_, raised = self.of_rows(total, "sum"), self.producer(powers, "exp")
        if sum_ is None or raised is None or sum_.operands[0] is not powers:
            return None
        below = self.producer(raised.operands[0], "sub")
        if below is None:
            return None
        scores, top = below.operands
        most = self.of_rows(top, "max")
        if most is None or most.operands[0] is not scores:
            return None
        alone = self.read_only_by(powers, divide, sum_)
        return scores if alone and self.read_only_by(scores, below, most) else None

    def unguarded(self, value: Value) -> Value | None:
        """The weights of which select(isnan(weights), 0, weights) is made."""
        op = self.producer(value, "select")
        if op is None:
            return None
        flag, nothing, weights = op.operands
        test = self.producer(flag, "isnan")
        if test is None or test.operands[0] is not weights or self.number(nothing) != 0:
            return None
        alone = self.read_only_by(flag, op) and self.read_only_by(weights, op, test)
        return weights if alone else None

    # ---- from the scores back to the product

    def path_to_product(self, value: Value) -> tuple[Op, list[Value]] | None:
        """The product behind elementwise ops, and the values on the way to it."""
        op = self.producers.get(value)
        if op is None:
            return None
        if op.name == "matmul":
            return op, [value]
        if op.name == "reshape" and not self.keeps_grid(op):
            return None
        if op.name != "reshape" and not has_trait(op, Trait.ELEMENTWISE):
            return None
        for operand in op.operands:
            if operand.dtype.is_float and self.read_only_by(operand, op):
                found = self.path_to_product(operand)
                if found is not None:
                    return found[0], [*found[1], value]
        return None

    def keeps_grid(self, op: Op) -> bool:
        """Whether a reshape leaves the last two axes unchanged."""
        have, given = op.result.shape, op.operands[0].shape
        return len(have) > 1 and len(given) > 1 and have[-2:] == given[-2:]

    def number(self, value: Value) -> float | None:
        op = self.producer(value, "full")
        number = None if op is None else op.attr("value")
        return number if isinstance(number, float) else None

    def scaled(self, op: Op, value: Value) -> float | None:
        """The constant that an op multiplies a value by."""
        if op.name not in ("mul", "div") or len(op.operands) != 2:
            return None
        a, b = op.operands
        if op.name == "mul" and b is value:
            a, b = b, a
        factor = self.number(b) if a is value else None
        if factor is None or factor == 0:
            return None
        return factor if op.name == "mul" else 1 / factor

    def match(self, out: Op) -> Spelled | None:
        weights, values = out.operands
        inner = self.through_casts(weights)
        unguarded = self.unguarded(inner) if self.guards else None
        if unguarded is not None:
            inner = self.through_casts(unguarded)
        scores = self.softmax(inner)
        if scores is None or not self.read_only_by(weights, out):
            return None
        if scores.shape[:-2] != out.result.shape[:-2]:
            return None
        found = self.path_to_product(scores)
        if found is None:
            return None
        product, path = found
        q, k = product.operands
        if not q.dtype is k.dtype is values.dtype is out.result.dtype:
            return None
        scale, start = 1.0, product.result
        while start is not scores:
            (user,) = dict.fromkeys(self.users[start])
            factor = self.scaled(user, start)
            if factor is None or user.result.dtype is not start.dtype:
                break
            scale, start = scale * factor, user.result
        behind = path[path.index(start) :]
        guarded = unguarded is not None
        return Spelled(
            product, start, scale, frozenset(behind), scores, values, guarded
        )


# ---- operands


class _Operands:
    """Queries, keys and values as the kernel takes them.

    `shifted`: a mask `key <= query + past` may become `causal` with a `first`.
    """

    def __init__(
        self, finder: _AttentionFinder, builder: Builder, shifted: bool
    ) -> None:
        self.finder, self.builder, self.shifted = finder, builder, shifted

    def unscaled(self, value: Value) -> tuple[Value, float]:
        """The value without a constant factor: the kernel has a factor anyway."""
        op = self.finder.producers.get(value)
        if op is None or op.name not in ("mul", "div"):
            return value, 1.0
        for operand in op.operands:
            factor = self.finder.scaled(op, operand)
            if factor is not None:
                return operand, factor
        return value, 1.0

    def swapped(self, value: Value) -> Value:
        """The value with its last two axes exchanged; cancels a transpose before it."""
        rank = value.type.rank
        perm = [*range(rank - 2), rank - 1, rank - 2]
        op = self.finder.producer(value, "transpose")
        if op is not None:
            before = op.ints_attr("perm")
            return self.builder.transpose(op.operands[0], [before[p] for p in perm])
        return self.builder.transpose(value, perm)

    def shared(self, value: Value) -> Value | None:
        """(.., Hk, S, D) whose heads a value (.., Hk * group, S, D) repeats."""
        op = self.finder.producer(value, "reshape")
        wide = None if op is None else self.finder.producer(op.operands[0], "broadcast")
        if wide is None:
            return None
        shape, axes = wide.result.shape, wide.ints_attr("axes")
        (x,) = wide.operands
        rank = len(shape)
        lead = rank - 3  # the axis of the group
        if rank != value.type.rank + 1 or lead < 1:
            return None
        plain = (*shape[: lead - 1], shape[lead - 1] * shape[lead], *shape[lead + 1 :])
        known = self.finder.facts.canonical
        if [known(d) for d in plain] != [known(d) for d in value.shape]:
            return None
        own = [k for k, axis in enumerate(axes) if axis != lead]
        if [axes[k] for k in own] != [k for k in range(rank) if k != lead]:
            return None
        if any(is_one(x.shape[k]) and not is_one(shape[axes[k]]) for k in own):
            return None
        if any(not is_one(d) for k, d in enumerate(x.shape) if k not in own):
            return None
        return self.builder.reshape(x, [x.shape[k] for k in own])

    def ungrouped(self, k: Value, v: Value) -> tuple[Value, Value]:
        """Keys and values before they were repeated, if both were."""
        keys, values = self.shared(k), self.shared(v)
        if keys is None or values is None:
            return k, v
        same = self.builder.same(keys.shape[-3], values.shape[-3])
        return (keys, values) if same else (k, v)

    def over(
        self, value: Value, batch: Sequence[Expr], old: Sequence[Expr], heads: bool
    ) -> Value:
        """Broadcasts to the product's batch, then reshapes to that of the scores.

        A single head of keys stays single.
        """
        b, tail = self.builder, value.shape[-2:]
        if heads and len(old) and list(batch) == list(old) and is_one(value.shape[-3]):
            return b.broadcast_to(value, (*old[:-1], 1, *tail))
        return b.reshape(b.broadcast_to(value, (*old, *tail)), (*batch, *tail))


def _spelled_operands(
    spelled: Spelled, out: Op, operands: _Operands
) -> tuple[list[Value], float]:
    """q, k, v of one rank of at least 3, and the factor of the scores."""
    q, scale = operands.unscaled(spelled.product.operands[0])
    k, more = operands.unscaled(spelled.product.operands[1])
    k, again = operands.unscaled(operands.swapped(k))
    scale *= spelled.scale * more * again
    old, batch = spelled.product.result.shape[:-2], out.result.shape[:-2]
    q = operands.over(q, batch, old, heads=False)
    v = spelled.values
    keys, values = operands.ungrouped(k, v)
    if keys is not k and list(old) == list(batch):
        return [q, keys, values], scale
    k = operands.over(k, batch, old, heads=True)
    v = operands.over(v, batch, batch, heads=True)
    if not batch:
        return [operands.builder.unsqueeze(x, 0) for x in (q, k, v)], scale
    if not operands.builder.same(k.shape[-3], v.shape[-3]):
        heads = batch[-1]
        k, v = (
            operands.builder.broadcast_to(x, (*batch[:-1], heads, *x.shape[-2:]))
            for x in (k, v)
        )
    return [q, k, v], scale


def _spelled_score(
    spelled: Spelled, kind: TensorType, operands: _Operands
) -> Score | None:
    """Everything between the product and the softmax, as a region."""
    finder, shifted = operands.finder, operands.shifted
    path = spelled.path | {spelled.scores}
    for absorb in (True, False):
        build = ScoreRegion(finder.producers, finder.facts, kind, path, absorb, shifted)
        b = build.builder
        build.made[spelled.start] = b.reshape(build.score, spelled.start.shape)
        result = build.masked(spelled.scores)
        score = build.finish(b.reshape(result, kind.shape))
        if score is not None:
            return score
    return None


# ---- the pass


def attention(graph: Graph, cx: Context) -> Graph:
    """Makes every attention, found or given, one op with its masks in a region."""
    return gather_attention(graph, cx, lambda made: True)


def gather_attention(
    graph: Graph,
    cx: Context,
    accept: Callable[[Sequence[Op]], bool],
    shifted: bool = True,
    guards: bool = True,
) -> Graph:
    """The pass; `accept` decides on each op in its new form.

    Without `shifted`, all attention that it makes is of rows from 0 on; without
    `guards`, weights that are NaN stay so.
    """
    finder = _AttentionFinder(graph, cx.facts(graph), guards)
    builder = Builder(finder.facts, Names(names_of(graph)))
    operands = _Operands(finder, builder, shifted)
    mapping: dict[Value, Value] = {}
    for op in graph.ops:
        start = len(builder.ops)
        with builder.at(op.loc):
            made = _rewritten(op, finder, operands)
        # The new ops read values of the old graph.
        fresh = [substitute(new, mapping) for new in builder.ops[start:]]
        if made is None or not accept(fresh):
            del builder.ops[start:]
            builder.append(substitute(op, mapping))
            continue
        builder.ops[start:] = fresh
        for old, new in zip(op.results, made, strict=True):
            mapping[old] = mapping.get(new, new)
    if not mapping:
        return graph
    results = tuple(mapping.get(v, v) for v in graph.results)
    return graph.replace(ops=tuple(builder.ops), results=results)


def _rewritten(
    op: Op, finder: _AttentionFinder, operands: _Operands
) -> tuple[Value, ...] | None:
    if op.name == "matmul":
        spelled = finder.match(op)
        made = None if spelled is None else _from_products(spelled, op, operands)
        return None if made is None else (made,)
    if op.name in ATTENTIONS and not op.regions:
        return _with_region(op, operands)
    return None


def _from_products(spelled: Spelled, out: Op, operands: _Operands) -> Value | None:
    builder = operands.builder
    (q, k, v), scale = _spelled_operands(spelled, out, operands)
    kind = TensorType(q.dtype, (*q.shape[:-1], k.shape[-2]))
    score = _spelled_score(spelled, kind, operands)
    if score is None:
        return None
    made = builder.emit(
        "attention",
        *(q, k, v, *score.reads),
        scale=scale,
        nan_rows=not spelled.guarded,
        zero_nan=spelled.guarded,
        **score.causal_attrs("attention"),
        regions=() if score.region is None else (score.region,),
    )
    return builder.reshape(made, out.result.shape)


def _with_region(op: Op, operands: _Operands) -> tuple[Value, ...] | None:
    """Moves masks into the region; reads repeated keys and values once.

    Gradients do not read them once: every head has its own gradient.
    """
    finder, builder = operands.finder, operands.builder
    q, k, v, *masks = attended(op)
    before = op.operands[: ATTENTIONS[op.name]]
    keys, values = (k, v) if before else operands.ungrouped(k, v)
    if keys is k and not masks:
        return None
    score = score_of(op, finder.producers, finder.facts, operands.shifted)
    attrs: dict[str, Any] = {**dict(op.attrs), "masked": False}
    attrs.update(score.causal_attrs(op.name))
    regions = () if score.region is None else (score.region,)
    taken = (*before, q, keys, values, *score.reads)
    return builder.emit_multi(op.name, *taken, regions=regions, **attrs)


def attended(op: Op) -> tuple[Value, ...]:
    """q, k, v and the values that the scores read, for any form of attention."""
    return op.operands[ATTENTIONS[op.name] :]


def score_of(
    op: Op, producers: Mapping[Value, Op], facts: Facts, shifted: bool = True
) -> Score:
    """The region of an attention, made from its mask if it has none yet."""
    q, k, _, *others = attended(op)
    first = first_row(op) if op.bool_attr("causal") else None
    if op.regions:
        return Score(op.regions[0], tuple(others), first)
    if not others:
        return Score(None, (), first)
    kind = TensorType(q.dtype, (*q.shape[:-1], k.shape[-2]))
    shifted = shifted and op.name != "attention_backward"
    score = mask_region(others[0], kind, producers, facts, shifted)
    return Score(score.region, score.reads, earliest(score.first, first))
