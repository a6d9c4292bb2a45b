"""What each optimisation is worth: `python -m bench.ablation tinybert bert`.

Compiles a model once with everything on and once with each option off, and times all of
them by turns. Writes bench/results/ablation.json and bench/results/ablation.md; a run
over chosen shapes (--shape) is only printed.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console

import pliant
from bench.models import dims
from bench.timing import (
    RESULTS,
    Report,
    Spread,
    eager,
    error,
    interleaved,
    machine,
    machine_line,
    mebibytes,
    ratios,
    store,
    zoo,
)

ALL = pliant.Options()
VARIANTS: dict[str, pliant.Options] = {
    "all on": ALL,
    "constraints off": replace(ALL, constraints=False),
    "attention off": replace(ALL, attention=False),
    "fold off": replace(ALL, fold=False),
    "share off": replace(ALL, share=False),
    "fuse off": replace(ALL, fuse=False),
    "all off": replace(
        ALL, constraints=False, attention=False, fold=False, share=False, fuse=False
    ),
}
SHAPES = ((1, 7), (1, 100), (8, 128))
TOLERANCE = 1e-4  # between variants: only the order of additions differs


def measure(
    name: str, threads: int, shapes: list[tuple[int, ...]], repetitions: int
) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    case = getattr(zoo(), name)()
    models: dict[str, pliant.CompiledModel] = {}
    for variant, options in VARIANTS.items():
        print(f"  {name}: compiling, {variant}", file=sys.stderr)
        models[variant] = pliant.compile(
            case.model,
            case.inputs(*case.example),
            case.dynamic_shapes,
            threads=threads,
            options=options,
        )
    rows: dict[str, dict[str, Any]] = {
        variant: {
            "model": name,
            "variant": variant,
            "kernel_calls": model.stats()["kernel_calls"],
            "kernels": model.stats()["kernels"],
            "compile_seconds": model.stats()["compile_seconds"],
            "shapes": {},
        }
        for variant, model in models.items()
    }
    for shape in shapes:
        print(f"  {name}: {shape}", file=sys.stderr)
        given = case.inputs(*shape)
        wanted = eager(case.model, given)
        for variant, model in models.items():
            if (found := error(model(*given), wanted)) > TOLERANCE:
                raise SystemExit(f"{name}, {variant}, {shape}: error {found:.3g}")
        calls = {
            variant: lambda m=model, x=given: m(*x) for variant, model in models.items()
        }
        samples = interleaved(calls, repetitions)
        for variant, model in models.items():
            rows[variant]["shapes"]["x".join(map(str, shape))] = {
                "ms": Spread.of(samples[variant]).median * 1e3,
                "slower": ratios(samples[variant], samples["all on"]).median,
                "peak_bytes": model.memory_plan(*given).peak_bytes,
            }
    return list(rows.values())


def report(name: str, rows: list[dict[str, Any]]) -> Report:
    shapes = list(rows[0]["shapes"])
    columns = ["variant", "kernel calls", "distinct", "compile s"]
    columns += [f"{shape}: ms (times all on), peak MiB" for shape in shapes]
    lines = []
    for row in rows:
        cells = [row["variant"], str(row["kernel_calls"]), str(row["kernels"])]
        cells.append(f"{row['compile_seconds']:.1f}")
        for shape in shapes:
            cell = row["shapes"][shape]
            peak = mebibytes(cell["peak_bytes"])
            cells.append(f"{cell['ms']:.2f} ({cell['slower']:.2f}), {peak}")
        lines.append(tuple(cells))
    return Report(name, tuple(columns), tuple(lines))


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.ablation", description=__doc__)
    parser.add_argument("models", nargs="*", default=["tinybert", "bert"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--shape", type=dims, action="append", help="such as 1x32")
    arguments = parser.parse_args()
    shapes = list(arguments.shape or SHAPES)
    console = Console(width=None if sys.stdout.isatty() else 140)
    about, kept, parts = machine(), [], []
    for name in arguments.models:
        rows = measure(name, arguments.threads, shapes, arguments.repetitions)
        table = report(f"{name}, {arguments.threads} thread(s)", rows)
        table.show(console)
        kept += rows
        parts.append(table.markdown())
    if arguments.shape:
        return 0
    store("ablation.json", {"machine": about, "rows": kept})
    parts.append(machine_line(about) + "\n")
    (RESULTS / "ablation.md").write_text("\n".join(parts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
