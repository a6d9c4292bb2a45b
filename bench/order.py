"""What orders of calls save, and what is known of sizes: `python -m bench.order`.

For each model of the zoo, and for its training step: the share of pairs of buffer
sizes, and of pairs of live sums, whose order is certain over all sizes in range; the
peak of our orders, chosen without knowing the sizes, against the same search with the
sizes known (it starts from the original order and from ours), at random shapes; and
what the original order would need. Writes bench/results/order.json and order.md.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from time import process_time
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

import pliant
from bench.peaks import oracle_peak, peak_at
from bench.script import add_model_arguments, cases, save, show, tell
from bench.size_relation import relation
from pliant.cases import Case
from pliant.compare.tables import Report
from pliant.ir.graph import Module
from pliant.memory.inplace import in_place
from pliant.memory.order import orders
from pliant.memory.order_compare import PeakBound, lines, nonpositive
from pliant.memory.order_graph import calls_of, permuted
from pliant.memory.order_search import CallBlock, live_rows
from pliant.sym import Facts
from pliant.sym.points import Point, extremes, random_points, witnesses

PLAIN = pliant.Options(order=False, inplace=False, remat=False)
MOST_PAIRS = 500
KINDS = ("less", "equal", "greater", "crosses", None)


def programs(case: Case, training: bool) -> Iterator[tuple[str, Module, Facts]]:
    """The lowered graph of a model in its original order, and of its training step."""
    compiled = case.compile(options=PLAIN, threads=2)
    yield case.name, compiled.program.lowered, compiled.program.interface.facts
    if training:
        step = pliant.compile_training(
            case.model,
            squares,
            pliant.SGD(0.1, momentum=0.9),
            (case.at(case.example), ()),
            (case.dynamic_shapes, ()),
            threads=2,
            options=PLAIN,
        )
        yield (
            f"{case.name} training",
            step.program.lowered,
            step.program.interface.facts,
        )


def squares(outputs: Any) -> torch.Tensor:
    """A loss that depends on every output, for any model."""
    means = [y.square().mean() for y in tree_leaves(outputs)]
    return torch.stack(means).sum()


def compared(module: Module, facts: Facts) -> dict[str, dict[str, int]]:
    """Counts how pairs of sizes, and of live sums, compare."""
    calls = calls_of(module.main, module)
    names = {s for e in calls.bytes for s in e.symbols()}
    known = facts.with_range("threads", 1, None) if "threads" in names else facts
    points = _points(facts, names)
    sizes = list(dict.fromkeys(known.canonical(e) for e in calls.bytes))
    table = np.array([[e.evaluate(p) for p in points] for e in calls.bytes], np.int64)
    table = -(-table // 64) * 64
    first: Counter[str | None] = Counter(
        relation(known, a, b, points) for a, b in _some(combinations(sizes, 2))
    )
    count = len(calls.bytes)
    whole = CallBlock(calls.before, calls.touches, (False,) * count, (False,) * count)
    rows = live_rows(whole, range(len(calls.ops)))
    bound = PeakBound.of(rows, calls.bytes, table)
    second = Counter(
        summed(bound, i, j, known)
        for i, j in _some(combinations(range(len(bound.counts)), 2))
    )
    return {
        "sizes": {str(kind): first[kind] for kind in KINDS},
        "sums": {str(kind): second[kind] for kind in KINDS},
    }


def summed(bound: PeakBound, i: int, j: int, facts: Facts) -> str | None:
    """How two live sums compare."""
    signs = set(np.sign(bound.samples[i] - bound.samples[j]).tolist())
    if signs >= {1, -1}:
        return "crosses"
    difference = (bound.counts[i] - bound.counts[j]).tolist()
    less = 1 not in signs and nonpositive(bound.sizes, difference, facts)
    opposite = [-count for count in difference]
    more = -1 not in signs and nonpositive(bound.sizes, opposite, facts)
    if less or more:
        return "equal" if less and more else "less" if less else "greater"
    terms = [(c, e) for c, e in zip(difference, bound.sizes, strict=True) if c]
    for point in extremes(facts, {s for _, e in terms for s in e.symbols()}):
        total = sum(c * lines(e).evaluate(point) for c, e in terms)
        signs.add((total > 0) - (total < 0))
    return "crosses" if signs >= {1, -1} else None


def _points(facts: Facts, names: set[str]) -> list[Point]:
    found = witnesses(facts, names - {"threads"})
    return [{**point, "threads": t} for point in found for t in (1, 4096)]


def _some(pairs: Iterator[Any]) -> list[Any]:
    every = list(pairs)
    return every[:: max(1, -(-len(every) // MOST_PAIRS))]


def measured(name: str, module: Module, facts: Facts, shapes: int) -> dict[str, Any]:
    graph = module.main
    calls = calls_of(graph, module)
    names = {s for e in calls.bytes for s in e.symbols()} - {"threads"}
    started = process_time()
    found = orders(graph, module, facts)
    seconds = process_time() - started
    ours, original, first, over = [], [], [], []
    for point in random_points(facts, names, 0, shapes):
        point["threads"] = 2
        known = [one.calls for one in found]
        oracle = max(oracle_peak(graph, module, point, known), 1)
        peaks = [peak_at(graph, module, point, one.calls) for one in found]
        ours.append(min(peaks) / oracle)
        first.append(peaks[0] / oracle)
        before = peak_at(graph, module, point)
        original.append(before / oracle)
        assert min(peaks) <= before, f"{name}: worse than the original at {point}"
    sure = next(one for one in found if one.proved)
    best = permuted(graph, sure.calls)
    changed = in_place(best, module, facts)
    joint = module.replace(loops={**module.loops, **changed.loops})
    for point in random_points(facts, names, 2, shapes // 5):
        point["threads"] = 2
        over.append(
            peak_at(changed.graph, joint, point) / max(peak_at(best, module, point), 1)
        )
    allocs = [sum(op.name == "alloc" for op in g.ops) for g in (best, changed.graph)]
    return {
        "model": name,
        "calls": len(calls.ops),
        "orders": len(found),
        "shapes": len(ours),
        "seconds": seconds,
        "ours_worst": max(ours),
        "ours_mean": float(np.mean(ours)),
        "first_worst": max(first),
        "original_worst": max(original),
        "original_mean": float(np.mean(original)),
        "in_place": allocs[0] - allocs[1],
        "in_place_least": min(over),
        "compared": compared(module, facts),
    }


def order_table(rows: list[dict[str, Any]]) -> Report:
    cells = tuple(
        (
            row["model"],
            str(row["calls"]),
            str(row["orders"]),
            f"{row['seconds']:.2f}",
            f"{row['ours_mean']:.3f} ({row['ours_worst']:.3f})",
            f"{row['first_worst']:.3f}",
            f"{row['original_mean']:.3f} ({row['original_worst']:.3f})",
            f"{row['in_place']} ({row['in_place_least']:.3f})",
        )
        for row in rows
    )
    shapes = max(row["shapes"] for row in rows)
    return Report(
        f"Peak over that of an order searched with the sizes known, {shapes} shapes: "
        "mean (worst)",
        (
            "model",
            "calls",
            "orders",
            "planning s",
            "ours",
            "the first alone",
            "original order",
            "in place (least peak)",
        ),
        cells,
    )


def share_table(rows: list[dict[str, Any]]) -> Report:
    cells = []
    total = {"sizes": Counter[str](), "sums": Counter[str]()}
    for row in rows:
        for what in ("sizes", "sums"):
            total[what].update(row["compared"][what])
        cells.append((row["model"], *_shares(row["compared"])))
    cells.append(("all", *_shares({k: dict(v) for k, v in total.items()})))
    head = ("pairs", "less, equal, greater", "crosses", "can't say")
    return Report(
        "What is certain of pairs of buffer sizes, and of pairs of live sums",
        ("model", *(f"sizes: {h}" for h in head), *(f"sums: {h}" for h in head)),
        tuple(cells),
    )


def _shares(counts: dict[str, dict[str, int]]) -> list[str]:
    found: list[str] = []
    for what in ("sizes", "sums"):
        told = counts[what]
        pairs = max(sum(told.values()), 1)
        ordered = told["less"] + told["equal"] + told["greater"]
        found.append(str(sum(told.values())))
        found += [
            f"{100 * part / pairs:.1f}%"
            for part in (ordered, told["crosses"], told["None"])
        ]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.order", description=__doc__)
    add_model_arguments(parser, "zoo")
    parser.add_argument("--shapes", type=int, default=50)
    parser.add_argument("--no-training", action="store_true")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    tell(2 * len(arguments.models), "orders, no times")
    for case in cases(arguments).values():
        for name, module, facts in programs(case, not arguments.no_training):
            print(f"  {name}", file=sys.stderr)
            rows.append(measured(name, module, facts, arguments.shapes))
    tables = order_table(rows), share_table(rows)
    show(tables)
    if arguments.models == ["zoo"] and not arguments.no_training:
        save("order", {"rows": rows}, tables, rounds=0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
