"""Relax: activation memory over a sequence of shapes, against a pooled allocator.

The allocator is simulated with the requests of our own kernels. It has a free list for
each size, rounded up to pages, like the runtime that Relax compares with. A freed block
goes to its list, and only a request of that size reuses it, so blocks of one shape are
useless for the next.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pliant
import zoo
from bench.papers import PaperResult, Run
from bench.resident import high_water
from pliant.cases import Case, Shape
from pliant.compare.tables import Report, mebibytes

MINUTES = 1.0
MODELS = ("llama", "gpt2", "bert")
PAGE = 4096
# The paper's prefill, and its range of batches; the first is within every position
# table but BERT's, which ends at 512.
LENGTHS = tuple(range(128, 1025, 128))
BATCHES = (1, 2, 4, 8, 16, 32, 64)
SEQUENCES: dict[str, tuple[Shape, ...]] = {
    "1 sequence of 128 to 1024": tuple((1, length) for length in LENGTHS),
    "1 to 64 sequences of 1": tuple((batch, 1) for batch in BATCHES),
}
LIMITED = {"bert": 512}
PLAIN = pliant.Options(order=False, inplace=False)


@dataclass(slots=True)
class Pool:
    """Exact-size free lists: `held` is everything taken from the system so far."""

    held: int = 0
    free: Counter[int] = field(default_factory=Counter)

    def take(self, size: int) -> int:
        rounded = -(-size // PAGE) * PAGE
        if self.free[rounded]:
            self.free[rounded] -= 1
        else:
            self.held += rounded
        return rounded

    def give(self, rounded: int) -> None:
        self.free[rounded] += 1


def pooled(sequence: Sequence[Sequence[tuple[int, int, int]]]) -> int:
    """Bytes held after calls that each have (bytes, first, last step) of buffers."""
    pool = Pool()
    for buffers in sequence:
        steps = sorted({k for _, first, last in buffers for k in (first, last)})
        taken: dict[int, int] = {}
        for step in steps:
            for number, (size, first, _) in enumerate(buffers):
                if first == step:
                    taken[number] = pool.take(size)
            for number, (_, _, last) in enumerate(buffers):
                if last == step:
                    pool.give(taken[number])
    return pool.held


def requests(
    model: pliant.CompiledModel, inputs: tuple[Any, ...]
) -> list[tuple[int, int, int]]:
    """The intermediate buffers of a call: bytes, first and last step."""
    sizes = dict(model.memory_plan(*inputs).dims)
    sizes["threads"] = model.stats()["threads"]
    return [
        (b.bytes.evaluate(sizes), b.first, b.last)
        for b in model.program.footprint.memory.buffers
    ]


def run(given: Run) -> PaperResult:
    rows: list[dict[str, Any]] = []
    for name in MODELS if given.share >= 1 else MODELS[2:]:
        print(f"  {name}", file=sys.stderr)
        case = zoo.build(name)
        planned = case.compile(threads=given.threads)
        plain = case.compile(threads=given.threads, options=PLAIN)
        for title, shapes in SEQUENCES.items():
            most = LIMITED.get(name)
            kept = [s for s in shapes if most is None or s[-1] <= most]
            rows.append({"model": name, "sequence": title, "shapes": kept})
            rows[-1] |= measured(case, planned, plain, kept)
    return PaperResult({"rows": rows}, [table(rows, given.threads)], 0)


def measured(
    case: Case,
    planned: pliant.CompiledModel,
    plain: pliant.CompiledModel,
    shapes: Sequence[Shape],
) -> dict[str, int]:
    inputs = [case.at(shape) for shape in shapes]
    plans = [planned.memory_plan(*given) for given in inputs]
    planned(*inputs[0])
    planned.trim()
    results = max(plan.output_bytes for plan in plans)

    def every() -> None:
        for given in inputs:
            planned(*given)

    resident = high_water(every)
    return {
        "ours": max(plan.arena_bytes for plan in plans),
        "same_kernels": pooled([requests(planned, given) for given in inputs]),
        "plain": pooled([requests(plain, given) for given in inputs]),
        "results": results,
        "resident": -1 if resident is None else resident,
    }


def table(rows: Sequence[dict[str, Any]], threads: int) -> Report:
    lines = []
    for row in rows:
        ours = max(row["ours"], 1)
        lines.append(
            (
                f"{row['model']}, {row['sequence']} ({len(row['shapes'])} shapes)",
                mebibytes(row["plain"]),
                mebibytes(row["same_kernels"]),
                mebibytes(row["ours"]),
                f"{1 - ours / max(row['plain'], 1):.0%}",
                f"{1 - ours / max(row['same_kernels'], 1):.0%}",
                mebibytes(row["results"]),
                mebibytes(row["resident"]),
            )
        )
    columns = (
        *("model, shapes in order", "pool, order of the model", "pool, our order"),
        *("planned", "less than the first", "less than the second"),
        *("largest result", "resident above start"),
    )
    name = f"Activation MiB held after a sequence of shapes, {threads} threads"
    return Report(name, columns, tuple(lines))
