"""What dynamic shapes cost: `python -m bench.static bert resnet`.

Compiles a model once with its dims dynamic, and once more for each of a few shapes with
every dim fixed, and times the two by turns. A ratio is the static time over the dynamic
one: at 1 dynamic shapes are free. Writes bench/results/static.json and static.md; a run
over chosen shapes (--shape) is only printed.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

import pliant
from bench.script import (
    add_model_arguments,
    add_timing_arguments,
    cases,
    check,
    save,
    show,
    tell,
)
from pliant.cases import Case, Shape, few
from pliant.compare.accuracy import eager
from pliant.compare.tables import Report, dims_text
from pliant.compare.timing import Spread, geomean_spread, interleaved, ratios

MINUTES = 6  # for the whole zoo


def measure(
    case: Case, threads: int, shapes: list[Shape], rounds: int
) -> list[dict[str, Any]]:
    torch.set_num_threads(threads)
    dynamic = case.compile(threads=threads)
    rows = []
    for shape in shapes:
        print(f"  {case.name}: {shape}", file=sys.stderr)
        given = case.at(shape)
        static = pliant.compile(case.model, given, threads=threads)
        assert static.dims == ()
        calls = {"static": partial(static, *given), "dynamic": partial(dynamic, *given)}
        wanted = eager(case.model, given)
        for name, call in calls.items():
            check(f"{case.name} {shape}, {name}", call(), wanted)
        samples = interleaved(calls, rounds)
        rows.append(
            {
                "model": case.name,
                "shape": shape,
                "threads": threads,
                "static_ms": asdict(Spread.of(samples["static"]).scaled(1e3)),
                "dynamic_ms": asdict(Spread.of(samples["dynamic"]).scaled(1e3)),
                "ratio": asdict(ratios(samples["static"], samples["dynamic"])),
            }
        )
    return rows


def report(rows: list[dict[str, Any]], threads: int) -> Report:
    lines = [
        (
            f"{row['model']} {dims_text(row['shape'])}",
            Spread(**row["static_ms"]).text(),
            Spread(**row["dynamic_ms"]).text(),
            Spread(**row["ratio"]).text(),
        )
        for row in rows
    ]
    found = [Spread(**row["ratio"]) for row in rows]
    lines.append(("geomean", "", "", geomean_spread(found).text()))
    worst = min(found, key=lambda each: each.median)
    lines.append(("worst", "", "", worst.text()))
    name = f"Every dim fixed against every dim dynamic, {threads} thread(s)"
    return Report(
        name, ("model", "static ms", "dynamic ms", "static / dynamic"), tuple(lines)
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.static", description=__doc__)
    add_model_arguments(parser, "zoo")
    add_timing_arguments(parser)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    tell(MINUTES, "every model of the zoo at three shapes")
    for case in cases(arguments).values():
        shapes = arguments.shape or few(case.shapes)
        rows += measure(case, arguments.threads, shapes, arguments.rounds)
    table = report(rows, arguments.threads)
    show([table])
    if not arguments.shape:
        save("static", {"rows": rows}, [table], arguments.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
