"""Reverse-mode differentiation on the graph.

    graph @main(%x, %w) { %y = matmul(%x, %w)  %l = reduce(%y) {sum}  return %l }
    ->
    graph @main(%x, %w) {
      %y = matmul(%x, %w)     %l = reduce(%y) {sum}
      %1 = full() {1.0}       %2 = broadcast(%1)          the loss, then back from it
      %3 = matmul(transpose(%x), %2)
      return %l, %3
    }

Ops are visited from the last to the first; each has a rule that turns the gradient of
its result into those of its operands, in ops of the graph again. So every later pass
sees one graph, in which nothing tells forward from backward. Only what depends on a
parameter is differentiated, and only what the loss depends on.

Rules follow torch where the derivative is a matter of convention: relu and abs have
derivative 0 at 0, `max` divides the gradient among equal elements, and a clamp passes
the gradient at its bounds.

`stop_gradient` marks what the model detached, and `slope` has a derivative that is
given; the pass drops both. A log-softmax keeps only its result: its maximum only shifts
the exponents, so no gradient goes through it.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

from pliant.context import Context
from pliant.errors import InternalError, UnsupportedOp, UnsupportedOpError
from pliant.ir.attention import spell_out_trained_attention
from pliant.ir.build import Builder
from pliant.ir.graph import (
    Graph,
    Names,
    Op,
    Value,
    copied,
    names_of,
    substitute,
    values_behind,
)
from pliant.ir.ops import Trait, has_trait
from pliant.ir.rewrite import RuleSet, rewrite
from pliant.passes.gradient_rules import RULES, WITHOUT
from pliant.passes.gradient_rules_flow import with_history
from pliant.passes.gradient_tape import GradientPart, Tape, total
from pliant.passes.sample import spell_out_sample

# ---- before decomposition: forms whose derivative is safe and as in torch


def _silu(b: Builder, op: Op) -> Value:
    """x * sigmoid(x): the quotient's derivative is 0 * inf far below 0."""
    x = b.cast(op.operands[0], op.result.dtype.compute)
    return b.cast(b.binary("mul", x, b.unary("sigmoid", x)), op.result.dtype)


def _relu(b: Builder, op: Op) -> Value:
    """x <= 0 ? 0 : x has the derivative 0 at 0."""
    (x,) = op.operands
    zero = b.scalar(0, x.dtype)
    return b.select(b.binary("le", x, zero), zero, x)


_SMOOTH: RuleSet = {
    "silu": (_silu,),
    "relu": (_relu,),
    "sample": (spell_out_sample,),
}


def smooth_for(graph: Graph, wrt: Sequence[Value], cx: Context) -> Graph:
    """Composite ops in the form that `gradient` differentiates.

    Attention with a trained mask is decomposed, as its kernels give no such gradient.
    """
    found = depends(graph, wrt)

    def spelled(b: Builder, op: Op) -> Value | None:
        trained = any(v in found for v in op.operands[3:])
        return spell_out_trained_attention(b, op) if trained else None

    return rewrite(graph, {**_SMOOTH, "attention": (spelled,)})


def _with_sums(graph: Graph, active: set[Value]) -> Graph:
    """Makes attention that is differentiated also return the logarithms of its sums."""
    builder = Builder.within(graph)
    mapping: dict[Value, Value] = {}
    for op in graph.ops:
        op = substitute(op, mapping)
        if op.name != "attention" or not active & set(op.results):
            builder.append(op)
            continue
        attrs: dict[str, Any] = dict(op.attrs)
        with builder.at(op.loc):
            made, _ = builder.emit_multi(
                "attention_lse", *op.operands, regions=op.regions, **attrs
            )
        mapping[op.result] = made
    if not mapping:
        return graph
    results = tuple(mapping.get(v, v) for v in graph.results)
    return graph.replace(ops=tuple(builder.ops), results=results)


# ---- what is differentiated


def depends(graph: Graph, wrt: Sequence[Value]) -> set[Value]:
    """Float values that depend on `wrt`, in a way that has a derivative."""
    found = set(wrt)
    for op in graph.ops:
        found.update(passed_on(op, found))
    return found


def passed_on(op: Op, found: Container[Value]) -> list[Value]:
    """The results of an op that depend on these values differentiably."""
    if op.name in WITHOUT or not any(v in found for v in op.operands):
        return []
    return [v for v in op.results if v.dtype.is_float]


def _between(graph: Graph, wrt: Sequence[Value], of: Sequence[Value]) -> set[Value]:
    """What depends on `wrt`, and has a part in the values that are differentiated."""
    return depends(graph, wrt) & values_behind(graph.ops, of)


def _multiplies(op: Op) -> bool:
    """Products at computed places: a quotient by the factor fails where it is 0."""
    return op.name == "scatter" and op.str_attr("op") == "prod"


def _reject(graph: Graph, active: set[Value]) -> None:
    missing = [
        UnsupportedOp(op.name, "its gradient is not known", op.loc or "unknown place")
        for op in graph.ops
        if (op.name not in RULES or _multiplies(op))
        and op.name not in WITHOUT
        and any(v in active for v in op.results)
    ]
    if missing:
        raise UnsupportedOpError(list(dict.fromkeys(missing)))


def _shifts(graph: Graph) -> set[Value]:
    """Maxima that only keep exponentials in range: results do not depend on them.

    The patterns are exp(x - max) divided by its own sum, and the logarithm of that sum.
    """
    users = graph.users()

    def readers(value: Value) -> list[Op]:
        return users.get(value, [])

    def through(value: Value, *names: str) -> list[Op]:
        """Readers, through ops of these names, each of which has one operand."""
        found: list[Op] = []
        for op in readers(value):
            found += through(op.result, *names) if op.name in names else [op]
        return found

    results = set(graph.results)

    def normalises(op: Op, shifted: Value) -> bool:
        """Whether an exp is used only together with its own sum."""
        sums = next((o for o in readers(op.result) if o.name == "reduce"), None)
        if sums is None or sums.str_attr("op") != "sum" or op.result in results:
            return False
        ends = through(sums.result, "broadcast", "reshape", "log")
        quotient = all(o.name == "div" and o.operands[0] is op.result for o in ends)
        difference = all(o.name == "sub" and o.operands[0] is shifted for o in ends)
        others = [o for o in readers(op.result) if o is not sums]
        return (quotient or difference) and all(o in ends for o in others)

    found: set[Value] = set()
    for op in graph.ops:
        if op.name != "reduce" or op.str_attr("op") != "max" or op.result in results:
            continue
        ends = through(op.result, "broadcast", "reshape")
        if len(ends) != 1 or ends[0].name != "sub":
            continue
        (below,) = ends
        if below.operands[0] is not op.operands[0] or below.result in results:
            continue
        raised = [o for o in readers(below.result) if o.name == "exp"]
        if len(raised) != 1 or not normalises(raised[0], below.result):
            continue
        log_sum = {o for o in readers(below.result) if o is not raised[0]}
        if all(o.name == "sub" and o.operands[0] is below.result for o in log_sum):
            found.add(op.result)
    return found


# ---- the pass


@dataclass(slots=True)
class _Backward:
    tape: Tape
    parts: dict[Value, list[GradientPart]] = field(default_factory=dict)

    def visit(self, op: Op) -> None:
        tape = self.tape
        grads = [
            total(tape, v, self.parts.pop(v, [])) if v in tape.active else None
            for v in op.results
        ]
        if all(g is None for g in grads):
            return
        with tape.b.at(op.loc):
            for operand, part in RULES[op.name](tape, op, grads):
                if operand in tape.active:
                    self.parts.setdefault(operand, []).append(part)

    def run(self, ops: Sequence[Op]) -> None:
        for op in reversed(ops):
            if not has_trait(op, Trait.CREATE):
                self.visit(op)

    def gradients(self, values: Sequence[Value]) -> list[Value]:
        grads: list[Value] = []
        for value in values:
            found = total(self.tape, value, self.parts.pop(value, []))
            grads.append(self.tape.zeros(value) if found is None else found)
        return grads


def region_gradient(b: Builder, region: Graph, wanted: Sequence[int]) -> Graph:
    """A region that gives the gradients of some params, by their numbers.

    Behind the params it takes the gradient of each float result.
    """
    graph = _prepared(copied(region))
    wrt = [graph.params[k] for k in wanted]
    graph = _with_sums(graph, _between(graph, wrt, graph.results))
    active = _between(graph, wrt, graph.results) - _shifts(graph)
    _reject(graph, active)
    builder = b.child()
    builder.params += graph.params
    builder.ops += graph.ops
    back = _Backward(Tape(builder, graph.producers(), active, region_gradient))
    for value in graph.results:
        if value.dtype.is_float:
            seed = builder.param("seed", value.type)
            if value in active:
                back.parts.setdefault(value, []).append(GradientPart(seed))
    back.run(graph.ops)
    return without_stops(builder.finish(f"{region.name}_back", back.gradients(wrt)))


def _prepared(graph: Graph) -> Graph:
    """The graph with scans that keep what their way back needs."""
    if not any(op.name == "scan" for op in graph.ops):
        return graph
    names = Names(names_of(graph))
    return graph.replace(
        ops=tuple(
            with_history(op, names) if op.name == "scan" else op for op in graph.ops
        )
    )


def gradient(graph: Graph, wrt: Sequence[Value], cx: Context) -> Graph:
    """The graph with its gradients with respect to `wrt` added to its results.

    The first result is the loss. A parameter that it does not depend on has a gradient
    of zeros.
    """
    loss = graph.results[0]
    if loss.type.rank != 0 or not loss.dtype.is_float:
        raise InternalError("gradient", f"the loss is {loss.type}, not a number")
    graph = _prepared(graph)
    graph = _with_sums(graph, _between(graph, wrt, (loss,)))
    loss = graph.results[0]
    active = _between(graph, wrt, (loss,)) - _shifts(graph)
    _reject(graph, active)
    builder = Builder.within(graph)
    builder.ops.extend(graph.ops)
    tape = Tape(builder, graph.producers(), active, region_gradient)
    back = _Backward(tape)
    if loss in active:
        back.parts[loss] = [GradientPart(builder.scalar(1.0, loss.dtype))]
    back.run(graph.ops)
    grads = back.gradients(wrt)
    stated = {guard.cond for guard in graph.constraints}
    more = tuple(g for g in builder.guards if g.cond not in stated)
    made = graph.replace(
        ops=tuple(builder.ops),
        results=(*graph.results, *grads),
        constraints=(*graph.constraints, *more),
    )
    return without_stops(made)


def without_stops(graph: Graph) -> Graph:
    """Drops every `stop_gradient` and `slope`."""
    mapping: dict[Value, Value] = {}
    ops: list[Op] = []
    for op in graph.ops:
        op = substitute(op, mapping)
        if op.name in ("stop_gradient", "slope"):
            mapping[op.result] = op.operands[0]
        else:
            ops.append(op)
    if not mapping:
        return graph
    results = tuple(mapping.get(v, v) for v in graph.results)
    return graph.replace(ops=tuple(ops), results=results)
