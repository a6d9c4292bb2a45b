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

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pliant.context import Context
from pliant.ir.graph import Graph, Module
from pliant.lower.rows import THREADS
from pliant.memory.order_compare import PeakBound, dominates
from pliant.memory.order_graph import (
    Calls,
    GraphPart,
    calls_of,
    parts_of,
    permuted,
)
from pliant.memory.order_search import (
    CallBlock,
    Ints,
    live_rows,
    peaks,
    search,
    unavoidable_rows,
)
from pliant.runtime.description import ALIGN
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
    counts = Counter(calls.bytes)  # layers have buffers of the same sizes
    points = [point for point in points if _is_real(counts, point)]
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


def _is_real(counts: Mapping[Expr, int], point: Point) -> bool:
    """Whether all buffers together are small enough that no sum overflows.

    `counts`: how many buffers have each size.
    """
    try:
        total = sum(size.evaluate(point) * n for size, n in counts.items())
        return total < _MOST_BYTES
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
