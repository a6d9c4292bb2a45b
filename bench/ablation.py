"""What each optimisation is worth: `python -m bench.ablation tinybert resnet`.

Compiles a model with everything on, with each switch of `Options` off, and with all of
them off, and times these by turns. A switch that changes nothing in a model's code is
listed as such and not timed. Writes bench/results/ablation.json and ablation.md; a run
over chosen shapes (--shape) is only printed.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
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
from pliant.compare.tables import Report, dims_text, mebibytes
from pliant.compare.timing import Spread, geomean, interleaved, ratios
from pliant.ir.text import print_module
from pliant.options import SWITCHES

ALL = pliant.Options()
ON, OFF = "all on", "all off"
MODELS = ("tinybert", "bert", "llama", "resnet", "evoformer")
MINUTES = 6  # for each model


def variants() -> dict[str, pliant.Options]:
    off: dict[str, Any] = dict.fromkeys(SWITCHES, False)
    each = {f"{name} off": replace(ALL, **{name: False}) for name in SWITCHES}
    return {ON: ALL, **each, OFF: replace(ALL, **off)}


def compile_variants(case: Case, threads: int) -> dict[str, pliant.CompiledModel]:
    """The variants that differ from the model with everything on, which is first."""
    found: dict[str, pliant.CompiledModel] = {}
    for name, options in variants().items():
        print(f"  {case.name}: compiling, {name}", file=sys.stderr)
        model = case.compile(threads=threads, options=options)
        if not found or lowered(model) != lowered(found[ON]):
            found[name] = model
    return found


def lowered(model: pliant.CompiledModel) -> str:
    """Equal texts run the same code on the same data."""
    return print_module(model.program.lowered)


def measure(
    case: Case, threads: int, shapes: list[Shape], rounds: int
) -> list[dict[str, Any]]:
    torch.set_num_threads(threads)
    models = compile_variants(case, threads)
    rows = {name: about(case, name, model) for name, model in models.items()}
    for shape in shapes:
        print(f"  {case.name}: {shape}", file=sys.stderr)
        given = case.at(shape)
        wanted = eager(case.model, given)
        for name, model in models.items():
            check(f"{case.name} {shape}, {name}", model(*given), wanted)
        calls = {name: partial(model, *given) for name, model in models.items()}
        samples = interleaved(calls, rounds)
        for name, model in models.items():
            rows[name]["shapes"][dims_text(shape)] = {
                "ms": Spread.of(samples[name]).median * 1e3,
                "slower": ratios(samples[name], samples[ON]).median,
                "peak_bytes": model.memory_plan(*given).peak_bytes,
            }
    same = [name for name in variants() if name not in models]
    return [*rows.values(), *({"model": case.name, "variant": name} for name in same)]


def about(case: Case, name: str, model: pliant.CompiledModel) -> dict[str, Any]:
    stats = model.stats()
    kept = ("kernel_calls", "kernels", "compile_seconds")
    told = {key: stats[key] for key in kept}
    return {"model": case.name, "variant": name, **told, "shapes": {}}


def report(name: str, rows: list[dict[str, Any]]) -> Report:
    shapes = list(rows[0]["shapes"])
    columns = ["variant", "kernel calls", "distinct", "compile s", "times all on"]
    columns += [f"{shape}: ms (times all on), peak MiB" for shape in shapes]
    lines = []
    for row in rows:
        if "shapes" not in row:
            lines.append((row["variant"], "the same code", *[""] * (len(columns) - 2)))
            continue
        cells = [row["variant"], str(row["kernel_calls"]), str(row["kernels"])]
        cells.append(f"{row['compile_seconds']:.1f}")
        found = [row["shapes"][shape] for shape in shapes]
        cells.append(f"{geomean([cell['slower'] for cell in found]):.2f}")
        for cell in found:
            peak = mebibytes(cell["peak_bytes"])
            cells.append(f"{cell['ms']:.3g} ({cell['slower']:.2f}), {peak}")
        lines.append(tuple(cells))
    return Report(name, tuple(columns), tuple(lines))


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.ablation", description=__doc__)
    add_model_arguments(parser, *MODELS)
    add_timing_arguments(parser)
    arguments = parser.parse_args()
    kept, tables = [], []
    tell(MINUTES * len(arguments.models), "every switch off, by turns")
    for name, case in cases(arguments).items():
        shapes = arguments.shape or few(case.shapes)
        rows = measure(case, arguments.threads, shapes, arguments.rounds)
        tables.append(report(f"{name}, {arguments.threads} thread(s)", rows))
        show(tables[-1:])
        kept += rows
    if not arguments.shape:
        save("ablation", {"rows": kept}, tables, arguments.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
