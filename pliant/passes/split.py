"""Sizes that data decide: a graph becomes parts, each run when its sizes are known.

    %m: bool[n] = gt(%x, %z)           part 1   %m: bool[n] = gt(%x, %z)
    %i: i64[u, 1] = nonzero(%m)                 %u: i64[] = the number of true ones
    %y: f32[u] = index(%x, %i)    ->            return %u, %m
    return %y                          part 2   main(%x, %m) sizes(u)
                                                %i: i64[u, 1] = locate(%m) {rows = u}
                                                %y: f32[u] = index(%x, %i)
                                                return %y

A part computes what the sizes that it finds depend on, and nothing else. It returns the
sizes, then the values that later parts read. The parameters of the next part are those
of this one, then these values; the sizes are symbols of it, as those of inputs are. So
the memory of a part is planned for the sizes that it runs at. What only moves data, and
constants, is computed again instead of handed over.

Sizes that do not depend on one another are found in one part. Those that branches and
loops find stay inside them (`passes/bind.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pliant.errors import UnsupportedOp, UnsupportedOpError
from pliant.ir.build import Builder
from pliant.ir.finders import FINDERS, most_of, size_of
from pliant.ir.graph import Attr, Graph, Op, Value
from pliant.ir.spec import exprs_of
from pliant.ir.types import DType
from pliant.passes.mask_places import flat_mask, places_of
from pliant.sym import Expr, Facts, Guard, ge, le, maximum, sym
from pliant.sym.monotone import largest
from pliant.sym.rules import Found

# Ops that are computed again in a part that reads their results.
_FREE = frozenset(
    {"constant", "full", "iota", "dim_value", "reshape", "broadcast", "transpose"}
)


def _is_free(op: Op) -> bool:
    if op.name == "cast":  # to more bytes: what it casts is handed over
        return op.operands[0].dtype.bytes <= op.result.dtype.bytes
    return op.name in _FREE


@dataclass(frozen=True, slots=True)
class Part:
    """A part: its first results are the sizes it finds; the last one finds none."""

    graph: Graph
    finds: tuple[Found, ...] = ()


def _symbols(attr: Attr) -> Iterator[str]:
    for expr in exprs_of(attr):
        yield from expr.symbols()


def mentions(op: Op) -> set[str]:
    """The sizes in an op's attributes, results and regions."""
    found = {s for _, attr in op.attrs for s in _symbols(attr)}
    found.update(s for v in op.results for d in v.shape for s in d.symbols())
    for region in op.regions:
        for value in region.params:
            found.update(s for d in value.shape for s in d.symbols())
        for inner in region.ops:
            found |= mentions(inner)
    return found


def _ready(graph: Graph) -> list[Op]:
    """The ops that find sizes, and depend on no other such size."""
    loose = {size_of(op) for op in graph.ops if op.name in FINDERS}
    dependent: set[Value] = set()
    ready: list[Op] = []
    for op in graph.ops:
        own = {size_of(op)} if op.name in FINDERS else set()
        depends = any(v in dependent for v in op.operands)
        if depends or not (mentions(op) - own).isdisjoint(loose):
            dependent.update(op.results)
        elif own:
            dependent.update(op.results)
            ready.append(op)
    return ready


def _needed(graph: Graph, wanted: Sequence[Value]) -> set[Op]:
    """The ops that these values depend on."""
    producers, found = graph.producers(), set[Op]()
    stack = list(wanted)
    while stack:
        op = producers.get(stack.pop())
        if op is not None and op not in found:
            found.add(op)
            stack.extend(op.operands)
    return found


def _later(graph: Graph, first: set[Op], finders: Sequence[Op]) -> set[Op]:
    """The ops of the parts behind the first: the rest, and free ops that they read."""
    producers = graph.producers()
    rest = {op for op in graph.ops if op not in first}
    masks = [f.operands[0] for f in finders if f.name == "nonzero"]
    stack = [*masks, *graph.results]
    stack += [v for op in rest if op not in finders for v in op.operands]
    while stack:
        op = producers.get(stack.pop())
        if op is not None and op not in rest and _is_free(op):
            rest.add(op)
            stack.extend(op.operands)
    return rest


def _count(b: Builder, finder: Op) -> Value:
    """The size that an op finds, as a number."""
    (source,) = finder.operands
    with b.at(finder.loc):
        if finder.name == "nonzero":
            return b.reduce("sum", b.cast(source, DType.I64))
        most, of = finder.dim_attr("most"), finder.str_attr("of")
        return b.in_range(source, most + 1, wraps=False, of=of, axis=-1)


def _at_size(b: Builder, finder: Op) -> list[Op]:
    """What an op gives, at a size that is known."""
    inner = b.child()
    (source,), size = finder.operands, finder.result.shape[0]
    with inner.at(finder.loc):
        if finder.name == "extent":
            inner.full(False, DType.BOOL, (size,))
        elif source.type.rank == 0:
            inner.full(0, DType.I64, (size, 0))
        else:
            found, _ = inner.emit_multi("locate", flat_mask(inner, source), rows=size)
            places_of(inner, found, source.shape)
    last = inner.ops[-1]
    if last.name == "locate":
        return [*inner.ops[:-1], last.replace(results=(finder.result, last.results[1]))]
    return [*inner.ops[:-1], last.replace(results=(finder.result,))]


def _limits(finders: Sequence[Op]) -> Iterator[Guard]:
    for op in finders:
        size = sym(size_of(op))
        for cond in (ge(size, 0), le(size, most_of(op))):
            yield Guard(cond, (f"{cond} must hold",), op.loc)


def _found(finder: Op, ends: Mapping[str, Expr], facts: Facts) -> Found:
    most = most_of(finder)
    end = largest(most, ends, facts)
    if end is None:
        why = "no largest value is known of a size that it finds"
        place = finder.loc or "unknown place"
        raise UnsupportedOpError([UnsupportedOp(finder.name, why, place)])
    return Found(size_of(finder), most, maximum(end, 0))


def split(graph: Graph, ends: Mapping[str, Expr] | None = None) -> tuple[Part, ...]:
    """The parts of a graph, in their order; one if its own ops find no size.

    `ends` are the largest values of sizes that parts before it find.
    """
    finders = _ready(graph)
    if not finders:
        return (Part(graph),)
    loose = {size_of(op) for op in graph.ops if op.name in FINDERS}
    stays = tuple(g for g in graph.constraints if loose.isdisjoint(g.cond.symbols()))
    first = _needed(graph, [v for op in finders for v in op.operands])
    later = _later(graph, first, finders)
    own = tuple(op for op in graph.ops if op in first)
    b = Builder.within(graph.replace(constraints=stays))
    counts = [_count(b, op) for op in finders]
    guards = (*stays, *b.guards)
    begun = {v for op in own if op not in later for v in op.results}
    limits = tuple(_limits(finders))
    rest = Builder.within(graph.replace(constraints=(*limits, *graph.constraints)))
    known: Mapping[Op, list[Op]] = {op: _at_size(rest, op) for op in finders}
    ops = [o for op in graph.ops if op in later for o in known.get(op, [op])]
    read = dict.fromkeys(v for op in ops for v in op.operands)
    handed = [v for v in (*read, *graph.results) if v in begun]
    handed = list(dict.fromkeys(handed))
    before = {} if ends is None else ends
    found = tuple(_found(op, before, b.facts) for op in finders)
    part = graph.replace(
        ops=(*own, *b.ops), results=(*counts, *handed), constraints=_distinct(guards)
    )
    remaining = graph.replace(
        params=(*graph.params, *handed),
        ops=tuple(ops),
        sizes=(*graph.sizes, *(size.name for size in found)),
        constraints=_distinct((*graph.constraints, *limits, *rest.guards)),
    )
    after = {**before, **{size.name: size.end for size in found}}
    return Part(part, found), *split(remaining, after)


def _distinct(guards: Sequence[Guard]) -> tuple[Guard, ...]:
    known: dict[object, Guard] = {}
    for guard in guards:
        known.setdefault(guard.cond, guard)
    return tuple(known.values())
