"""Folds trivial ops, shares equal ops, drops unused ones.

    %1 = reshape(%0) {shape = (n, 2, 4)}           %1 = transpose(..)
    %2 = reshape(%1) {shape = (n, 8)}        ->    nothing: %0 already has that shape
    %3 = logical_and(%m, full true)          ->    %m
    attention(q, k, v, full true) {masked}   ->    attention(q, k, v)

The rules are in `canonical_rules.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pliant.context import Context
from pliant.ir.build import facts_of
from pliant.ir.graph import Graph, Op, Value, substitute
from pliant.ir.ops import Trait, has_trait
from pliant.ir.rewrite import rewrite
from pliant.ir.same import attr_key
from pliant.ir.spec import exprs_of
from pliant.passes.canonical_rules import RULES

_MOST_ROUNDS = 8


def share(graph: Graph, cx: Context | None = None) -> Graph:
    """Common subexpression elimination."""
    seen: dict[object, Op] = {}
    mapping: dict[Value, Value] = {}
    out: list[Op] = []
    for old in graph.ops:
        op = _with_regions(substitute(old, mapping), share)
        if has_trait(op, Trait.PURE) and not op.regions:
            operands = [id(v) for v in op.operands]
            if has_trait(op, Trait.COMMUTATIVE):
                operands.sort()
            attrs = tuple((name, attr_key(value)) for name, value in op.attrs)
            types = tuple(v.type for v in op.results)
            first = seen.setdefault((op.name, *operands, attrs, types), op)
            if first is not op:
                mapping.update(zip(op.results, first.results, strict=True))
                continue
        out.append(op)
    return _rebuilt(graph, out, tuple(mapping.get(v, v) for v in graph.results))


def _effect_free(op: Op) -> bool:
    inner = (o for region in op.regions for o in region.ops)
    return has_trait(op, Trait.PURE) and all(map(_effect_free, inner))


def _sizes(op: Op) -> set[str]:
    """The symbols that an op's attributes, results and regions mention."""
    exprs = [e for _, attr in op.attrs for e in exprs_of(attr)]
    exprs += [dim for value in op.results for dim in value.shape]
    inner = (_sizes(o) for region in op.regions for o in region.ops)
    return {name for expr in exprs for name in expr.symbols()}.union(*inner)


def _sizes_wanted(graph: Graph) -> set[str]:
    """The symbols in the results and the constraints of a graph."""
    dims = (dim for value in graph.results for dim in value.shape)
    conds = (guard.cond.symbols() for guard in graph.constraints)
    return {name for dim in dims for name in dim.symbols()}.union(*conds)


def drop(graph: Graph, cx: Context | None = None) -> Graph:
    """Dead code elimination; ops that bind a size in use are kept."""
    live = set(graph.results)
    binds = any(has_trait(op, Trait.CONTROL) for op in graph.ops)
    sizes = _sizes_wanted(graph) if binds else set()
    out: list[Op] = []
    for op in reversed(graph.ops):
        wanted = has_trait(op, Trait.CONTROL) and not sizes.isdisjoint(_sizes(op))
        if _effect_free(op) and not wanted and live.isdisjoint(op.results):
            continue
        live.update(op.operands)
        if binds:
            sizes.update(_sizes(op))
        out.append(_with_regions(op, drop))
    return _rebuilt(graph, out[::-1], graph.results)


def _with_regions(op: Op, change: Callable[[Graph], Graph]) -> Op:
    regions = tuple(map(change, op.regions))
    same = all(a is b for a, b in zip(regions, op.regions, strict=True))
    return op if same else op.replace(regions=regions)


def _rebuilt(graph: Graph, ops: Iterable[Op], results: tuple[Value, ...]) -> Graph:
    new = tuple(ops)
    same = len(new) == len(graph.ops) and results == graph.results
    if same and all(a is b for a, b in zip(new, graph.ops, strict=True)):
        return graph
    return graph.replace(ops=new, results=results)


def canonicalize(graph: Graph, cx: Context | None = None) -> Graph:
    """Applies the rules, CSE and DCE until nothing changes."""
    for _ in range(_MOST_ROUNDS):
        before = graph
        facts = facts_of(graph) if cx is None else cx.facts(graph)
        graph = drop(share(rewrite(graph, RULES, facts)))
        if graph is before:
            break
    return graph
