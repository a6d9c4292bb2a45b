"""Whole programs against eager: `python -m bench.programs "beam search" nms`.

Programs with loops and branches (zoo/programs.py), each compiled once and timed by
turns with eager, which runs plain loops of Python (torch's own while_loop and scan take
it several times as long). A ratio is eager's time over ours. Writes
bench/results/programs.json and programs.md if all of them are run.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch

import pliant
from bench.script import (
    add_timing_arguments,
    against_eager,
    check,
    save,
    show,
    tell,
)
from pliant.compare.tables import Report
from pliant.compare.timing import Spread, geomean_spread
from zoo.programs import PROGRAMS, python_loops

MINUTES = 4
SIZES = (1, 8, 64)


def measure(name: str, threads: int, rounds: int) -> list[dict[str, Any]]:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    program = PROGRAMS[name]
    module = program.make().eval().requires_grad_(False)
    model = pliant.compile(module, program.inputs(6), program.dynamic, threads=threads)
    rows: list[dict[str, Any]] = []
    for n in SIZES:
        print(f"  {name}: n = {n}", file=sys.stderr)
        inputs = program.inputs(n)
        with python_loops():
            check(f"{name}, n = {n}", model(*inputs), module(*inputs))
            times = against_eager(model, module, inputs, rounds)
        rows.append({"program": name, "n": n, "threads": threads, **times})
    return rows


def report(rows: list[dict[str, Any]], threads: int) -> Report:
    lines = [
        (
            row["program"],
            str(row["n"]),
            Spread(**row["eager_us"]).text(),
            Spread(**row["pliant_us"]).text(),
            Spread(**row["ratio"]).text(),
        )
        for row in rows
    ]
    found = [Spread(**row["ratio"]) for row in rows]
    lines.append(("geomean", "", "", "", geomean_spread(found).text()))
    head = ("program", "n", "eager us", "pliant us", "eager / pliant")
    return Report(f"Whole programs, {threads} thread(s)", head, tuple(lines))


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.programs", description=__doc__)
    parser.add_argument("programs", nargs="*", metavar="PROGRAM")
    add_timing_arguments(parser)
    arguments = parser.parse_args()
    unknown = set(arguments.programs) - set(PROGRAMS)
    if unknown:
        parser.error(f"no program {', '.join(unknown)}: {', '.join(PROGRAMS)}")
    tell(MINUTES, "every program at three sizes")
    rows: list[dict[str, Any]] = []
    for name in arguments.programs or PROGRAMS:
        rows += measure(name, arguments.threads, arguments.rounds)
    table = report(rows, arguments.threads)
    show([table])
    if not arguments.programs:
        save("programs", {"rows": rows}, [table], arguments.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
