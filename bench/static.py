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
from bench.timing import (
    RESULTS,
    Case,
    Report,
    Shape,
    Spread,
    add_model_arguments,
    cases,
    console,
    dims_text,
    eager,
    error,
    few,
    geomean,
    interleaved,
    machine,
    machine_line,
    ratios,
    scale,
    store,
)

TOLERANCE = 1e-3  # between the two, relative: only the order of additions may differ
SECONDS = 2.0  # of timing per shape
ROUNDS = 30


def measure(
    case: Case, threads: int, shapes: list[Shape], seconds: float
) -> list[dict[str, Any]]:
    torch.set_num_threads(threads)
    dynamic = case.compile(threads=threads)
    rows = []
    for shape in shapes:
        print(f"  {case.name}: {shape}", file=sys.stderr)
        given = case.at(shape)
        static = pliant.compile(case.model, given, threads=threads)
        assert static.dims == ()
        check(case, given, static(*given), dynamic(*given))
        calls = {
            "static": partial(static, *given),
            "dynamic": partial(dynamic, *given),
        }
        samples = interleaved(calls, ROUNDS, seconds=seconds)
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


def check(case: Case, given: tuple[torch.Tensor, ...], *results: Any) -> None:
    wanted = eager(case.model, given)
    for result in results:
        if not (found := error(result, wanted)) <= TOLERANCE * scale(wanted):
            raise SystemExit(f"{case.name}: error {found:.3g}")


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
    found = [row["ratio"]["median"] for row in rows]
    lines.append(("geomean", "", "", f"{geomean(found):.3f}"))
    lines.append(("worst", "", "", f"{min(found):.3f}"))
    name = f"Every dim fixed against every dim dynamic, {threads} thread(s)"
    return Report(
        name, ("model", "static ms", "dynamic ms", "static / dynamic"), tuple(lines)
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.static", description=__doc__)
    add_model_arguments(parser, "zoo")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for case in cases(arguments).values():
        shapes = arguments.shape or few(case.shapes)
        rows += measure(case, arguments.threads, shapes, arguments.seconds)
    table, told = report(rows, arguments.threads), machine()
    table.show(console())
    if not arguments.shape:
        store("static.json", {"machine": told, "rows": rows})
        text = f"{table.markdown()}\n{machine_line(told)}\n"
        (RESULTS / "static.md").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
