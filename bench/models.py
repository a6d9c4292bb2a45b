"""Models against torch eager: `python -m bench.models bert tinybert`.

Every model and thread count runs in a process of its own. Results are checked against
an fp64 reference before anything is timed. Writes bench/results/<model>_<threads>t.json
and, from all such files present, bench/results/models.md; a run over chosen shapes
(--shape) is only printed.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console

import pliant
from bench.timing import (
    RESULTS,
    ROOT,
    Report,
    Spread,
    eager,
    error,
    geomean,
    interleaved,
    machine,
    machine_line,
    mebibytes,
    ratios,
    store,
    zoo,
)

TEXT = ((1, 7), (1, 32), (1, 100), (1, 257), (2, 64), (4, 37), (8, 128), (1, 500))
SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {  # of models that do not take text
    "vit": ((1, 7), (1, 14), (1, 20), (2, 14), (4, 9), (8, 14)),
    "resnet": ((1, 96, 80), (1, 224, 224), (2, 130, 190), (4, 224, 224), (1, 480, 640)),
    "evoformer": ((1, 13), (1, 32), (1, 64), (1, 100), (2, 48)),
    "unet": ((1, 2, 7), (1, 4, 77), (1, 8, 77), (2, 4, 20), (4, 4, 77)),
}
FLOOR = 1e-5  # allowed beyond twice eager's error, both against fp64


class Wrong(Exception):
    """A result outside the error rule."""


def measure(
    name: str, threads: int, shapes: list[tuple[int, ...]], repetitions: int
) -> dict[str, Any]:
    """Compiles one model, checks it and times it on every shape."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    case = getattr(zoo(), name)()
    compiled = pliant.compile(
        case.model, case.inputs(*case.example), case.dynamic_shapes, threads=threads
    )
    reference = copy.deepcopy(case.model).double()
    inputs = {shape: case.inputs(*shape) for shape in shapes}
    errors = {s: check(case.model, reference, compiled, inputs[s]) for s in shapes}
    del reference
    rows = []
    for shape in shapes:
        print(f"  {name}, {threads} thread(s), {shape}", file=sys.stderr)
        given = inputs[shape]
        samples = interleaved(
            {
                "eager": lambda x=given: eager(case.model, x),  # type: ignore[misc]
                "pliant": lambda x=given: compiled(*x),  # type: ignore[misc]
            },
            repetitions,
        )
        plan = compiled.memory_plan(*given)
        rows.append(
            {
                "shape": shape,
                "eager_ms": asdict(Spread.of(samples["eager"]).scaled(1e3)),
                "pliant_ms": asdict(Spread.of(samples["pliant"]).scaled(1e3)),
                "speedup": asdict(ratios(samples["eager"], samples["pliant"])),
                "eager_error": errors[shape][0],
                "pliant_error": errors[shape][1],
                "peak_bytes": plan.peak_bytes,
                "output_bytes": plan.output_bytes,
            }
        )
    stats = compiled.stats()
    return {
        "model": name,
        "threads": threads,
        "machine": machine(),
        "repetitions": repetitions,
        "dims": case.dims,
        "compiles": compiled.compile_count,
        "kernels": stats["kernels"],
        "kernel_calls": stats["kernel_calls"],
        "stage_seconds": stats["stage_seconds"],
        "weight_bytes": stats["weight_bytes"],
        "rows": rows,
    }


def check(
    model: torch.nn.Module,
    reference: torch.nn.Module,
    compiled: pliant.CompiledModel,
    inputs: tuple[torch.Tensor, ...],
) -> tuple[float, float]:
    """Errors of eager and of pliant against fp64; raises where pliant's is too big."""
    wide = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    exact = eager(reference, wide)
    theirs = error(eager(model, inputs), exact)
    ours = error(compiled(*inputs), exact)
    if not ours <= 2 * theirs + FLOOR:
        shapes = [tuple(x.shape) for x in inputs]
        raise Wrong(f"error {ours:.3g} at {shapes}, eager's is {theirs:.3g}")
    return theirs, ours


def report(result: dict[str, Any]) -> Report:
    rows = []
    for row in result["rows"]:
        times = [Spread(**row[key]) for key in ("eager_ms", "pliant_ms", "speedup")]
        rows.append(
            (
                "(" + ", ".join(map(str, row["shape"])) + ")",
                *(spread.text() for spread in times),
                f"{row['pliant_error']:.1e} / {row['eager_error']:.1e}",
                mebibytes(row["peak_bytes"]),
            )
        )

    def mean(key: str) -> str:
        return f"{geomean([row[key]['median'] for row in result['rows']]):.2f}"

    rows.append(("geomean", mean("eager_ms"), mean("pliant_ms"), mean("speedup")))
    seconds = sum(result["stage_seconds"].values())
    plural = "s" if result["threads"] > 1 else ""
    return Report(
        f"{result['model']}, {result['threads']} thread{plural} "
        f"({result['kernel_calls']} kernel calls, compiled in {seconds:.1f} s)",
        (
            f"({', '.join(result['dims'])})",
            "eager ms",
            "pliant ms",
            "speed-up",
            "error pliant / eager",
            "peak MiB",
        ),
        tuple((*row, *("",) * (6 - len(row))) for row in rows),
    )


def write_summary() -> None:
    """bench/results/models.md, from every stored result."""
    found = [json.loads(path.read_text()) for path in RESULTS.glob("*_*t.json")]
    found.sort(key=lambda r: (r["model"], r["threads"]))
    parts = [
        "Times per call: median (10th to 90th percentile). Speed-up: eager's time over "
        "pliant's, within each repetition. Error: largest absolute difference from "
        "fp64. Peak: all that one call allocates, weights apart. Written by "
        "`make bench`.\n"
    ]
    for result in found:
        parts += [report(result).markdown(), machine_line(result["machine"]) + "\n"]
    (RESULTS / "models.md").write_text("\n".join(parts))


def run_worker(
    name: str, threads: int, arguments: argparse.Namespace
) -> dict[str, Any] | None:
    """One measurement in a process of its own; None if it failed."""
    command = [sys.executable, "-m", "bench.models", "--worker", name]
    command += ["--threads", str(threads)]
    command += ["--repetitions", str(arguments.repetitions)]
    for shape in arguments.shape or ():
        command += ["--shape", "x".join(map(str, shape))]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )
    if done.returncode != 0:
        return None
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def dims(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("x"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.models", description=__doc__)
    parser.add_argument("models", nargs="*", default=["bert", "tinybert"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--shape", type=dims, action="append", help="such as 1x32")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        name, threads = arguments.worker, arguments.threads[0]
        shapes = list(arguments.shape or SHAPES.get(name, TEXT))
        try:
            result = measure(name, threads, shapes, arguments.repetitions)
        except (Wrong, pliant.PliantError) as failure:
            print(f"{name}: {failure}", file=sys.stderr)
            return 1
        print(json.dumps(result))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 140)
    load = os.getloadavg()[0]
    if load > 0.5:
        console.print(
            f"[yellow]The machine is busy (load {load:.1f}). torch's thread pool waits "
            "for whole time slices then; do not trust these times.[/yellow]"
        )
    failed = []
    for name in arguments.models:
        for threads in arguments.threads:
            file = f"{name}_{threads}t.json"
            if not arguments.shape:
                # a failure must not leave an older version's numbers behind
                (RESULTS / file).unlink(missing_ok=True)
            found = run_worker(name, threads, arguments)
            if found is None:
                failed.append(f"{name} with {threads} thread(s)")
                continue
            found["machine"]["load"] = f"load {load:.1f} before the run"
            report(found).show(console)
            if not arguments.shape:
                store(file, found)
    if not arguments.shape:
        write_summary()
    for item in failed:
        console.print(f"[red]failed: {item}[/red]")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
