"""Peaks of a lowered graph at known sizes: of an order, and the least that is found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pliant.ir.graph import Graph, Module
from pliant.memory.order import BufferSizes, rounded, searched
from pliant.memory.order_graph import calls_of, parts_of
from pliant.memory.order_search import CallBlock, live_rows, peaks
from pliant.sym import Facts


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
