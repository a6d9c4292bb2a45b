"""Kernels of sums over rows, apart from what follows the sums.

    %n = fusion(%g, %x, %p) {kind = "matmul"}      %s = fusion(%g, %x) {kind = "matmul"}
      region(..) {                            ->     matmul(%g, %x)
        %s = matmul(%g, %x)                        %n = fusion(%s, %p) {kind = "map"}
        %n = sub(%p, %s)                             sub(%p, %s)
      }

A loop over chunks may add up %s, the gradient of a weight or the sum of a loss, if a
kernel gives it as it is. What follows runs after the loop. Where no chunk is made of
the parts, a version has the kernel again that they were made of (`rejoined`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pliant.ir.graph import Graph, Names, Op, Value, copied, names_of, values_behind
from pliant.ir.ops import Trait, has_trait
from pliant.passes.cuts import combined_by, contracted_axes, root_of

_KINDS = ("row", "matmul")  # of kernels that may have such a sum


@dataclass(frozen=True, slots=True)
class SplitKernel:
    """A kernel, and those that compute the same: its sums, and what follows them."""

    whole: Op
    parts: tuple[Op, ...]


def kernel_of(
    fusion: Op,
    given: Mapping[Value, Value],
    outside: Mapping[Value, Value],
) -> Op:
    """The part of a kernel that computes some values, from those that there are.

    Both tables have the values inside it, and what they are outside.
    """
    region = fusion.regions[0]
    needed = set(given)
    ops: list[Op] = []
    for op in reversed(region.ops):
        if any(v in needed for v in op.results):
            ops.append(op)
            needed.update(v for v in op.operands if v not in outside)
    ops.reverse()
    read = (v for op in ops for v in op.operands if v in outside)
    params = tuple(dict.fromkeys(read))
    body = copied(Graph(region.name, params, tuple(ops), tuple(given)))
    kind = "row" if any(op.name == "reduce" for op in ops) else "map"
    if any(has_trait(op, Trait.CONTRACT) for op in ops):
        kind = fusion.str_attr("kind")
    operands = tuple(outside[p] for p in params)
    results = tuple(given.values())
    return Op("fusion", operands, (("kind", kind),), results, (body,), fusion.loc)


def _sums_in(region: Graph) -> list[Op]:
    """The ops that combine rows of which only the call knows how many."""
    return [
        op
        for op in region.ops
        if combined_by(op) is not None
        and any(not op.operands[0].shape[k].is_const for k in contracted_axes(op))
    ]


def _split(fusion: Op, names: Names) -> SplitKernel | None:
    """The sums of a kernel apart, if what follows reads nothing that they read."""
    if fusion.name != "fusion" or fusion.str_attr("kind") not in _KINDS:
        return None
    region = fusion.regions[0]
    sums = _sums_in(region)
    results = dict(zip(region.results, fusion.results, strict=True))
    if not sums or root_of(region) in sums or len(results) < len(fusion.results):
        return None
    outside = dict(zip(region.params, fusion.operands, strict=True))
    parts: list[Op] = []
    for op in sums:
        outer = results.get(op.result)
        if outer is None:
            outer = Value(names.fresh(op.result.name), op.result.type)
        parts.append(kernel_of(fusion, {op.result: outer}, outside))
    read = {v for part in parts for v in part.operands}
    outside |= {op.result: p.result for op, p in zip(sums, parts, strict=True)}
    given = {inner: v for inner, v in results.items() if inner not in outside}
    rest = kernel_of(fusion, given, outside)
    depend = all(any(p.result in _behind(rest, v) for p in parts) for v in rest.results)
    if not given or not depend or not read.isdisjoint(rest.operands):
        return None
    return SplitKernel(fusion, (*parts, rest))


def _behind(fusion: Op, result: Value) -> set[Value]:
    """The operands of a kernel that one of its results depends on."""
    region = fusion.regions[0]
    inside = region.results[fusion.results.index(result)]
    needed = values_behind(region.ops, (inside,))
    pairs = zip(region.params, fusion.operands, strict=True)
    return {operand for param, operand in pairs if param in needed}


def sums_apart(graph: Graph) -> tuple[Graph, list[SplitKernel]]:
    """The graph with one kernel for each sum over rows, and those that were split."""
    names = Names(names_of(graph))
    ops: list[Op] = []
    found: list[SplitKernel] = []
    for op in graph.ops:
        split = _split(op, names)
        if split is not None:
            found.append(split)
        ops += (op,) if split is None else split.parts
    return (graph.replace(ops=tuple(ops)) if found else graph), found


def rejoined(
    graph: Graph, splits: Sequence[SplitKernel], kept: Collection[Op]
) -> Graph:
    """The graph with the kernels that were split, where no part of them is kept.

    Other operands may have come in the place of those that the parts were made with.
    """
    producers = graph.producers()
    gone: set[Op] = set()
    joined: dict[Op, Op] = {}
    for split in splits:
        parts = [producers.get(part.results[0]) for part in split.parts]
        now: dict[Value, Value] = {}
        for was, op in zip(split.parts, parts, strict=True):
            if op is not None:
                now.update(zip(was.operands, op.operands, strict=True))
        if any(op is None or op in kept for op in parts):
            continue
        *sums, rest = parts
        assert rest is not None
        gone.update(op for op in sums if op is not None)
        operands = tuple(now.get(v, v) for v in split.whole.operands)
        joined[rest] = split.whole.replace(operands=operands)
    ops = tuple(joined.get(op, op) for op in graph.ops if op not in gone)
    return graph.replace(ops=ops) if joined else graph
