"""The calls of a lowered graph: which must come before which, and the blocks between.

A call waits for those that wrote what it touches, and a write waits for earlier reads.
The graph is cut at every call that is ordered against each of the others in this way:
the blocks between such calls can be ordered one by one.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pliant.ir.callees import callees
from pliant.ir.calls import calls_in, roles_of
from pliant.ir.graph import Graph, Module, Op, Value
from pliant.ir.loop_walk import statements
from pliant.ir.loops import Check, Role
from pliant.ir.ops import CALLS
from pliant.lower.library import KERNELS
from pliant.memory.order_search import CallBlock, bits
from pliant.sym import Expr


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls of a lowered graph, their dependencies, and the arena's buffers."""

    ops: tuple[Op, ...]
    before: tuple[int, ...]  # per call: the calls that it waits for, as bits
    touches: tuple[tuple[int, ...], ...]  # per call: arena buffers
    buffers: tuple[Value, ...]
    bytes: tuple[Expr, ...]


def calls_of(graph: Graph, module: Module) -> Calls:
    """The calls and their dependencies: read after write, write after read and write.

    The roles of a function say which buffers it writes. A library function without
    roles writes the buffers that no call has touched before it: its results. Parameters
    are written after every call that may fail, so that a step can stop before it
    changes them.
    """
    bases: dict[Value, Value] = {}
    sizes: dict[Value, Expr] = {}
    ops: list[Op] = []
    before: list[int] = []
    touched: list[tuple[Value, ...]] = []
    writer: dict[Value, int] = {}  # the last call that wrote
    readers: dict[Value, int] = {}  # the calls that have read since, as bits
    failing = may_fail(module)
    checked = 0  # calls that may fail, as bits
    for op in graph.ops:
        if op.name == "alloc":
            sizes[op.result] = op.dim_attr("bytes")
        elif op.name == "view":
            bases[op.result] = bases.get(op.operands[0], op.operands[0])
        elif op.name in CALLS:
            number, waits = len(ops), 0
            roots = tuple(dict.fromkeys(bases.get(v, v) for v in op.operands))
            written = _written(op, module, bases, writer, sizes)
            if any(root not in sizes for root in written):
                waits |= checked
            if call_may_fail(op, module, failing):
                checked |= 1 << number
            for root in roots:
                if root in writer:
                    waits |= 1 << writer[root]
                if root in written:
                    waits |= readers.pop(root, 0)
                    writer[root] = number
                else:
                    readers[root] = readers.get(root, 0) | 1 << number
            ops.append(op)
            before.append(waits)
            touched.append(roots)
    outputs = {bases.get(v, v) for v in graph.results}
    used = {root for roots in touched for root in roots}
    buffers = tuple(v for v in sizes if v not in outputs and v in used)
    numbers = {v: k for k, v in enumerate(buffers)}
    touches = tuple(
        tuple(numbers[root] for root in roots if root in numbers) for roots in touched
    )
    return Calls(
        tuple(ops), tuple(before), touches, buffers, tuple(sizes[v] for v in buffers)
    )


def call_may_fail(op: Op, module: Module, failing: Container[str]) -> bool:
    """Whether a call may end the run; `failing` are the loop functions that may."""
    name = op.str_attr("callee")
    if op.name == "call_library" and name in KERNELS:
        return KERNELS[name].checks is not None
    return roles_of(op, module) is None or name in failing


def may_fail(module: Module) -> set[str]:
    """The loop functions that have a check, or call one that has."""
    found = {
        name
        for name, func in module.loops.items()
        if any(isinstance(stmt, Check) for stmt in statements(func.body))
    }
    called = {name: set(callees(func)) for name, func in module.loops.items()}
    grown = True
    while grown:
        more = {name for name, names in called.items() if names & found} - found
        grown = bool(more)
        found |= more
    return found


def _written(
    op: Op,
    module: Module,
    bases: Mapping[Value, Value],
    writer: Mapping[Value, int],
    allocs: Mapping[Value, Expr],
) -> set[Value]:
    """The buffers that a call writes, views resolved."""
    roles = roles_of(op, module)
    if roles is None:
        roots = {bases.get(v, v) for v in op.operands}
        return {root for root in roots if root in allocs and root not in writer}
    return {
        bases.get(value, value)
        for value, role in zip(op.operands, roles, strict=True)
        if role is not Role.IN
    }


def permuted(graph: Graph, sequence: Sequence[int]) -> Graph:
    """The graph with its calls in another order, given by their positions.

    Constants come first, as before; an alloc or view just before its first use.
    Values are the same objects, and constants have the same numbers.
    """
    producers, calls = graph.producers(), calls_in(graph)
    ops = [op for op in graph.ops if op.name == "constant"]
    placed = {op.result for op in ops} | set(graph.params)

    def place(value: Value) -> Iterator[Op]:
        if value not in placed:
            placed.add(value)
            op = producers[value]
            for operand in op.operands:
                yield from place(operand)
            yield op

    for number in sequence:
        op = calls[number]
        for value in op.operands:
            ops += place(value)
        ops.append(op)
    for value in graph.results:
        ops += place(value)
    return graph.replace(ops=tuple(ops))


# ---- blocks


@dataclass(frozen=True, slots=True)
class GraphPart:
    """A block of a graph: its calls and buffers, by their numbers in the graph."""

    calls: tuple[int, ...]
    buffers: tuple[int, ...]
    held: tuple[int, ...]  # buffers that are live throughout and not touched
    block: CallBlock

    def within(self, order: Sequence[int]) -> tuple[int, ...]:
        """The block's own part of an order of the graph."""
        local = {call: k for k, call in enumerate(self.calls)}
        return tuple(local[call] for call in order if call in local)


def parts_of(calls: Calls) -> list[GraphPart]:
    """The graph, cut at every call that is ordered against each of the others."""
    count = len(calls.ops)
    whole = CallBlock(calls.before, calls.touches, (), ())
    earlier = whole.ancestors()
    later = [0] * count
    for mask in earlier:
        for other in bits(mask):
            later[other] += 1
    groups: list[list[int]] = []
    place = [0] * count
    cuts = sorted(
        (earlier[k].bit_count(), k)
        for k in range(count)
        if earlier[k].bit_count() + later[k] == count - 1
    )
    taken = 0
    for _, cut in cuts:
        groups.append(list(bits(earlier[cut] & ~taken)))
        groups.append([cut])
        taken |= earlier[cut] | 1 << cut
    groups.append(list(bits((1 << count) - 1 & ~taken)))
    groups = [group for group in groups if group]
    for k, group in enumerate(groups):
        for call in group:
            place[call] = k
    spans: dict[int, tuple[int, int]] = {}
    for call, buffers in enumerate(calls.touches):
        for b in buffers:
            first, last = spans.get(b, (place[call], place[call]))
            spans[b] = min(first, place[call]), max(last, place[call])
    return [_part(calls, group, k, spans) for k, group in enumerate(groups)]


def _part(
    calls: Calls, group: list[int], number: int, spans: Mapping[int, tuple[int, int]]
) -> GraphPart:
    local = {call: k for k, call in enumerate(group)}
    buffers = tuple(dict.fromkeys(b for call in group for b in calls.touches[call]))
    places = {b: k for k, b in enumerate(buffers)}
    inside = sum(1 << call for call in group)
    before = tuple(
        sum(1 << local[e] for e in bits(calls.before[call] & inside)) for call in group
    )
    touches = tuple(tuple(places[b] for b in calls.touches[call]) for call in group)
    entering = tuple(spans[b][0] < number for b in buffers)
    leaving = tuple(spans[b][1] > number for b in buffers)
    held = tuple(
        b
        for b, (first, last) in spans.items()
        if first < number < last and b not in places
    )
    return GraphPart(
        tuple(group), buffers, held, CallBlock(before, touches, entering, leaving)
    )
