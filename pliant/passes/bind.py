"""Sizes that data decide: what depends on one becomes a region that is run with it.

    %i: i64[u, 1] = nonzero(%x: bool[n])      %all: i64[n, 1], %count = locate(%x)
    %y: f32[u, 4] = index(%t, %i)        ->   %y: f32[4*n] = bind(%count, %all, %t)
    return %y                                   {most = [n]} region(%all, %t) sizes(u)
                                              return %y, %count

The indices are found at their largest possible number, and the region takes the first
`u` of them. A result whose size depends on `u` has its elements at the start of memory
for the most there can be; the caller cuts it (`SizedResult`). So all memory is planned
before the call, for the largest sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from pliant.errors import UnsupportedOp, UnsupportedOpError
from pliant.ir.build import Builder
from pliant.ir.finders import FINDERS, most_of, size_of
from pliant.ir.graph import Graph, Op, Value, substitute
from pliant.ir.types import DType
from pliant.passes.branch_sizes import loose_sizes, sized_branches
from pliant.passes.mask_places import flat_mask, places_of
from pliant.passes.split import mentions
from pliant.sym import Expr, Guard, le


@dataclass(frozen=True, slots=True)
class SizedValue:
    """A result's dims, over sizes of inputs and of data.

    With `cut`, the result is flat and longer than that.
    """

    dims: tuple[Expr, ...]
    cut: bool


@dataclass(frozen=True, slots=True)
class Bound:
    """What the results of a graph are after the pass, in their old order.

    Behind them it has a result for each size that data decide.
    """

    results: tuple[SizedValue, ...]
    counts: dict[str, int]  # a size that data decide -> the number of a result

    def cut(self, arrays: Sequence[Any], dims: Mapping[str, int]) -> list[Any]:
        """The results in their own shapes, where `dims` are the sizes of the inputs."""
        known = {**dims, **{name: int(arrays[k]) for name, k in self.counts.items()}}
        made = []
        for value, array in zip(self.results, arrays, strict=False):
            if value.cut:
                shape = [dim.evaluate(known) for dim in value.dims]
                array = array[: prod(shape)].reshape(shape)
            made.append(array)
        return made


def results_of(before: Graph, after: Graph) -> Bound:
    """What the results of a graph are, told from it before and after the pass."""
    pairs = zip(before.results, after.results[: len(before.results)], strict=True)
    results = tuple(SizedValue(v.shape, made.type != v.type) for v, made in pairs)
    names = _counted(after, len(before.results))
    return Bound(results, {name: len(results) + k for k, name in enumerate(names)})


def _counted(graph: Graph, start: int) -> tuple[str, ...]:
    """Names of the sizes that the results from `start` on hold, outermost first."""
    if start == len(graph.results):
        return ()
    count, *inner = graph.results[start:]
    (op,) = (o for o in graph.ops if o.name == "bind" and o.operands[0] is count)
    (region,) = op.regions
    return (*region.sizes, *_counted(region, len(region.results) - len(inner)))


def _indices(outer: Builder, finder: Op, found: Value) -> list[Op]:
    """Ops that turn the found places into rows of indices, one column per axis."""
    (mask,), (count, _) = finder.operands, finder.result.shape
    b, rank = outer.child(), mask.type.rank
    b.facts = b.facts.assume(le(count, mask.type.numel))
    with b.at(finder.loc):
        if rank == 0:
            b.full(0, DType.I64, (count, 0))
        else:
            places_of(b, b.slice_axis(found, 0, 0, count), mask.shape)
    last = b.ops.pop()
    return [*b.ops, last.replace(results=(finder.result,))]


def _within(op: Op) -> Op:
    """An op of control flow whose regions bind the sizes that they find."""
    if not op.regions:
        return op
    regions: list[Graph] = []
    for region in op.regions:
        made = bind_sizes(region)
        if made is region:
            regions.append(region)
            continue
        kept = made.results[: len(region.results)]
        if any(a.type != b.type for a, b in zip(kept, region.results, strict=True)):
            why = "a result of a branch or of a round has a size that data decide"
            raise UnsupportedOpError([UnsupportedOp(op.name, why, op.loc or "unknown")])
        regions.append(made.replace(results=kept))
    same = all(a is b for a, b in zip(regions, op.regions, strict=True))
    return op if same else op.replace(regions=tuple(regions))


def bind_inside(graph: Graph) -> Graph:
    """The graph with the sizes bound that its branches and loops find."""
    if any(map(loose_sizes, graph.ops)):
        b = Builder.within(graph)
        for op in graph.ops:
            if loose_sizes(op):
                sized_branches(b, op, bind_sizes)
            else:
                b.append(op)
        guards = (*graph.constraints, *b.guards)
        graph = graph.replace(ops=tuple(b.ops), constraints=guards)
    ops = tuple(map(_within, graph.ops))
    same = all(new is old for new, old in zip(ops, graph.ops, strict=True))
    return graph if same else graph.replace(ops=ops)


def bind_sizes(graph: Graph) -> Graph:
    """The graph without results of sizes that its own ops find out."""
    graph = bind_inside(graph)
    at = next((k for k, op in enumerate(graph.ops) if op.name in FINDERS), None)
    if at is None:
        return graph
    finder = graph.ops[at]
    size = size_of(finder)
    before, inside = list(graph.ops[:at]), list[Op]()
    sizes, dependent = {size}, {finder.result}
    for op in graph.ops[at + 1 :]:
        finds = op.name in FINDERS  # a size inside this one
        depends = any(v in dependent for v in op.operands)
        if finds or depends or not sizes.isdisjoint(mentions(op)):
            inside.append(op)
            dependent.update(op.results)
        else:
            before.append(op)
        if finds:
            sizes.update(op.result.shape[0].symbols())
    stays, moves = list[Guard](), list[Guard]()
    for guard in graph.constraints:
        loose = not sizes.isdisjoint(guard.cond.symbols())
        (moves if loose else stays).append(guard)
    b = Builder.within(graph.replace(constraints=tuple(stays)))
    b.ops += before
    most = most_of(finder)
    with b.at(finder.loc):
        if finder.name == "nonzero":
            mask = flat_mask(b, finder.operands[0])
            found, count = b.emit_multi("locate", mask, rows=most)
            inside[:0] = indices = _indices(b, finder, found)
            dependent.update(v for op in indices for v in op.results)
        else:
            count = finder.operands[0]
            of = finder.str_attr("of")
            count = b.in_range(count, most + 1, wraps=False, of=of, axis=-1)
    region, given = _region(graph, size, inside, dependent, tuple(moves))
    inner = bind_sizes(region)
    made = b.emit_multi(
        "bind", count, *given, regions=[inner], most=(most,), loc=finder.loc
    )
    # The results in their order, then the size, then those that the region finds.
    new = dict(zip(region.results, made, strict=False))
    results = (*(new.get(v, v) for v in graph.results), count, *made[len(new) :])
    known = {g.cond for g in stays}
    more = tuple(g for g in b.guards if g.cond not in known)
    return graph.replace(ops=tuple(b.ops), results=results, constraints=(*stays, *more))


def _region(
    graph: Graph,
    size: str,
    inside: Sequence[Op],
    dependent: set[Value],
    guards: tuple[Guard, ...],
) -> tuple[Graph, list[Value]]:
    """The region of what depends on a size, and what it is given."""
    wanted = [v for op in inside for v in op.operands if v not in dependent]
    given = list(dict.fromkeys(wanted))
    params = {v: Value(v.name, v.type) for v in given}
    ops = tuple(substitute(op, params) for op in inside)
    results = tuple(dict.fromkeys(v for v in graph.results if v in dependent))
    region = Graph("bound", tuple(params.values()), ops, results, (size,), guards)
    return region, given
