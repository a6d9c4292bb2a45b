"""The order in which the calls of a lowered graph run, so that little memory is live.

    a = f(x)          a = f(x)
    b = g(x)    ->    c = h(a)      a is dead before b is needed
    c = h(a)          b = g(x)
    d = k(b, c)       d = k(b, c)

Sizes are symbolic, so no single order need be best for all of them. The graph is cut at
every call that comes before or after each of the others in all orders; the blocks
between cuts are independent. Each block is searched for orders at a few sizes that
represent the range (`order_search.py`), and orders that another one provably never
exceeds are dropped. The result is a small set of orders of the whole graph. The
original is one of them unless another is proved to need no more memory at any size in
range. At run time the order with the least peak for the actual sizes is picked.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pliant.context import Context
from pliant.ir.callees import callees
from pliant.ir.calls import calls_in, roles_of
from pliant.ir.graph import Graph, Module, Op, Value
from pliant.ir.loop_walk import statements
from pliant.ir.loops import Check, Role
from pliant.ir.ops import CALLS
from pliant.lower.library import KERNELS
from pliant.lower.rows import THREADS
from pliant.memory.liveness import ALIGN
from pliant.memory.order_compare import PeakBound, dominates
from pliant.memory.order_search import (
    CallBlock,
    Ints,
    bits,
    live_rows,
    peaks,
    search,
    unavoidable_rows,
)
from pliant.sym import Expr, Facts
from pliant.sym.points import Point, representatives

MOST_ORDERS = 4
_THREADS = (1, 2, 8)  # thread counts at which orders are searched; any number may run
_FRUITLESS = 4  # searches in a row without gain, after which a block is given up
_EFFORT = 300_000  # total steps that such searches may take nevertheless
_MOST_KEPT = 8  # most orders kept of one block
_MOST_BYTES = 1 << 56  # most bytes at an assignment where orders are compared
_GAIN = 1.0005  # an order is kept if it saves more than this factor somewhere


@dataclass(frozen=True, slots=True)
class Ordered:
    """One order of a graph's calls, by their positions.

    `proved`: at no size in range does it need more memory than the original.
    """

    calls: tuple[int, ...]
    proved: bool


# ---- dependencies


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


# ---- search over all sizes


class BufferSizes:
    """The bytes of a graph's buffers: as formulas, and at some assignments."""

    def __init__(self, calls: Calls, facts: Facts, points: Sequence[Point]) -> None:
        self.bytes = calls.bytes
        self.facts = facts
        self.points = points
        distinct = {e: rounded(e, points) for e in dict.fromkeys(calls.bytes)}
        shape = (len(calls.bytes), len(points))
        self.table = np.array([distinct[e] for e in calls.bytes], np.int64)
        self.table = self.table.reshape(shape)


def rounded(size: Expr, points: Sequence[Point]) -> list[int]:
    """Bytes in the arena, rounded up to cache lines, at each assignment."""
    return [-(-size.evaluate(point) // ALIGN) * ALIGN for point in points]


def searched(
    part: GraphPart, sizes: BufferSizes, starts: Sequence[Sequence[int]] = ()
) -> list[tuple[int, ...]]:
    """Orders of a block: the original, and those that were better somewhere.

    `starts` are orders of the whole graph to begin with, besides the original.
    """
    block = part.block
    original = tuple(range(block.calls))
    found = [original, *(part.within(order) for order in starts)]
    if block.calls < 2:
        return found
    table = sizes.table[list(part.buffers)]
    least = peaks(unavoidable_rows(block), table)
    best = np.min([peaks(live_rows(block, order), table) for order in found], axis=0)
    # Each buffer's share of the bytes at each assignment, and its distance from the
    # assignments searched already: 0 where the shares are the same.
    shares = table / np.maximum(table.sum(axis=0), 1)
    unlike = np.ones(len(sizes.points))
    fruitless = steps = 0
    while fruitless < _FRUITLESS or steps < _EFFORT:
        # Search next where the possible gain is largest.
        gaps = (best / np.maximum(least, 1) - 1) * unlike
        k = int(gaps.argmax())
        if gaps[k] < _GAIN - 1:
            break
        unlike = np.minimum(unlike, np.abs(shares - shares[:, k : k + 1]).sum(axis=0))
        column = [int(size) for size in table[:, k]]
        start = min(found, key=lambda order: _peak_at(block, order, table, k))
        better = search(block, column, start, int(least[k]))
        fruitless, steps = fruitless + 1, steps + better.steps
        if better.peak < best[k]:
            fruitless = 0
            found.append(better.order)
            best = np.minimum(best, peaks(live_rows(block, better.order), table))
    return found


def _peak_at(block: CallBlock, order: tuple[int, ...], table: Ints, k: int) -> int:
    return int(peaks(live_rows(block, order), table[:, k : k + 1])[0])


@dataclass(frozen=True, slots=True)
class BlockOrders:
    """The orders of one block that are kept.

    The first is best overall. `safe` are those proved to be no worse than the original;
    there is always one.
    """

    orders: tuple[tuple[int, ...], ...]
    peaks: Ints  # orders x assignments, without the buffers that are held throughout
    safe: tuple[bool, ...]


def choices(part: GraphPart, sizes: BufferSizes) -> BlockOrders:
    """The orders of a block that are not proved to be dominated."""
    found = searched(part, sizes)
    table = sizes.table[list(part.buffers)]
    formulas = [sizes.bytes[b] for b in part.buffers]
    bounds = [PeakBound.of(live_rows(part.block, o), formulas, table) for o in found]
    ranked = sorted(range(len(found)), key=lambda k: (_cost(bounds[k].peaks), k))
    kept: list[int] = []
    for k in ranked:
        if not any(dominates(bounds[w], bounds[k], sizes.facts) for w in kept):
            kept.append(k)
    safe = {k: k == 0 or dominates(bounds[k], bounds[0], sizes.facts) for k in kept}
    sure = next(k for k in kept if safe[k])
    table = np.array([bounds[k].peaks for k in kept], np.int64)
    first = list(dict.fromkeys([0, kept.index(sure)]))
    few = [kept[k] for k in _worthwhile(table, first, _MOST_KEPT)]
    return BlockOrders(
        tuple(found[k] for k in few),
        np.array([bounds[k].peaks for k in few], np.int64),
        tuple(safe[k] for k in few),
    )


def _worthwhile(table: Ints, first: list[int], most: int) -> list[int]:
    """The orders `first`, then those that save most where none so far is best."""
    kept, peak = list(first), np.maximum(table, 1)
    least = peak.min(axis=0)
    while len(kept) < most:
        regret = peak[kept].min(axis=0) / least
        if regret.max(initial=1.0) < _GAIN:
            break
        kept.append(int(peak[:, regret.argmax()].argmin()))
    return kept


def _cost(peak: Ints) -> float:
    """Compares orders over all assignments: the sum of logarithms of the peaks."""
    return float(np.log(np.maximum(peak, 1)).sum())


# ---- the orders of the whole graph


def orders(graph: Graph, module: Module, facts: Facts) -> tuple[Ordered, ...]:
    """A few orders of a lowered graph, the one that is best overall first.

    At least one of them is proved to need no more memory than the original at any size
    in range; it is the original itself if nothing better is.
    """
    calls = calls_of(graph, module)
    if not calls.ops:
        return (Ordered((), True),)
    names = {s for e in calls.bytes for s in e.symbols()}
    known = facts.with_range(THREADS, 1, None) if THREADS in names else facts
    points = [
        {**point, THREADS: threads}
        for point in representatives(facts, names - {THREADS})
        for threads in _THREADS
    ]
    points = [point for point in points if _is_real(calls.bytes, point)]
    if not points:  # no assignment to compare orders at
        return (Ordered(tuple(range(len(calls.ops))), True),)
    sizes = BufferSizes(calls, known, points)
    parts = parts_of(calls)
    chosen = _choices(parts, sizes)
    held = np.array(
        [sizes.table[list(part.held)].sum(axis=0) for part in parts], np.int64
    )
    picks = _picks(chosen, held)
    found = []
    for pick in picks:
        sequence = tuple(
            part.calls[k]
            for part, choice, number in zip(parts, chosen, pick, strict=True)
            for k in choice.orders[number]
        )
        safe = all(c.safe[n] for c, n in zip(chosen, pick, strict=True))
        found.append(Ordered(sequence, safe))
    return tuple(found)


def _is_real(sizes: Sequence[Expr], point: Point) -> bool:
    """Whether all buffers together are small enough that no sum overflows."""
    try:
        return sum(size.evaluate(point) for size in sizes) < _MOST_BYTES
    except ZeroDivisionError:
        return False  # a quotient is undefined here


def _choices(parts: Sequence[GraphPart], sizes: BufferSizes) -> list[BlockOrders]:
    """The orders of every block; equal blocks are searched once."""
    known: dict[object, BlockOrders] = {}
    found = []
    for part in parts:
        key = part.block, tuple(sizes.bytes[b] for b in part.buffers)
        if key not in known:
            known[key] = choices(part, sizes)
        found.append(known[key])
    return found


def _picks(chosen: Sequence[BlockOrders], held: Ints) -> list[tuple[int, ...]]:
    """For each order of the whole graph, the order picked in each block."""
    first = tuple(0 for _ in chosen)
    sure = tuple(choice.safe.index(True) for choice in chosen)
    at = [
        tuple(int(choice.peaks[:, k].argmin()) for choice in chosen)
        for k in range(held.shape[1])
    ]
    possible = list(dict.fromkeys([first, sure, *at]))
    table = np.array([_peaks(pick, chosen, held) for pick in possible], np.int64)
    must = possible.index(sure)
    best = min(range(len(possible)), key=lambda k: _cost(table[k]))
    gain = (np.maximum(table[must], 1) / np.maximum(table[best], 1)).max(initial=1.0)
    kept = [must] if gain < _GAIN else list(dict.fromkeys([best, must]))
    return [possible[k] for k in _worthwhile(table, kept, MOST_ORDERS)]


def _peaks(pick: Sequence[int], chosen: Sequence[BlockOrders], held: Ints) -> Ints:
    rows = [choice.peaks[n] for choice, n in zip(chosen, pick, strict=True)]
    if not rows:
        return np.zeros(held.shape[-1], np.int64)
    top: Ints = (np.array(rows, np.int64) + held).max(axis=0)
    return top


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


def order(module: Module, cx: Context) -> Module:
    """The module in the best order that is proved to be no worse than its own.

    Orders that need less at some sizes are stored with the module.
    """
    graph = module.main
    found = orders(graph, module, cx.facts(graph))
    best = next(candidate for candidate in found if candidate.proved)
    place = {call: k for k, call in enumerate(best.calls)}
    others = tuple(
        tuple(place[k] for k in other.calls) for other in found if other is not best
    )
    if best.calls != tuple(range(len(best.calls))):
        module = module.with_main(permuted(graph, best.calls))
    return module.replace(orders=others) if others else module


# ---- with known sizes


def peak_at(
    graph: Graph,
    module: Module,
    dims: Mapping[str, int],
    order: Sequence[int] | None = None,
) -> int:
    """The largest live bytes of a lowered graph, in its own order or another one.

    Results are not counted.
    """
    calls = calls_of(graph, module)
    count = len(calls.buffers)
    whole = CallBlock(calls.before, calls.touches, (False,) * count, (False,) * count)
    column = np.array([rounded(e, [dict(dims)]) for e in calls.bytes], np.int64)
    own = range(len(calls.ops))
    rows = live_rows(whole, own if order is None else order)
    return int(peaks(rows, column.reshape(count, 1))[0])


def oracle_peak(
    graph: Graph,
    module: Module,
    dims: Mapping[str, int],
    starts: Sequence[Sequence[int]] = (),
) -> int:
    """The least peak that the same search finds when it knows the sizes.

    `starts` are orders of the calls to begin with, besides the graph's own.
    """
    calls = calls_of(graph, module)
    sizes = BufferSizes(calls, Facts(), [dict(dims)])
    top = 0
    for part in parts_of(calls):
        table = sizes.table[list(part.buffers)]
        best = min(
            int(peaks(live_rows(part.block, order), table)[0])
            for order in searched(part, sizes, starts)
        )
        top = max(top, best + int(sizes.table[list(part.held)].sum()))
    return top
