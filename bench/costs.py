"""What is paid once and what is paid per call: `python -m bench.costs`.

Compile seconds per stage for BERT-base (12 layers), its planned peaks, what compiling
takes with nothing in the cache and with everything there (`--models`), and the fixed
cost of a call. The last is found from unfused chains of element-wise kernels at size
(1, 1): time = fixed cost + kernels * cost of one, fitted over the length of the chain.
Writes bench/results/costs.json and bench/results/costs.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from statistics import linear_regression
from typing import Any

import torch

import pliant
import zoo
from bench.script import save, show, tell
from pliant.compare.accuracy import eager
from pliant.compare.tables import Report, mebibytes
from pliant.compare.timing import ROUNDS, Spread, interleaved

CHAINS = (1, 8, 16, 24)
MODELS = ("bert", "gpt2", "resnet")
# Stages that are reported together.
KERNEL_STAGES = ("lower", "codegen", "compile")
PARTS = {
    "export": ("export",),
    "choose and pack": ("lower",),
    "find or emit": ("codegen",),
    "LLVM and link": ("compile",),
}
PEAKS = ((1, 1), (1, 32), (1, 128), (8, 128), (1, 512), (8, 512))


class Chain(torch.nn.Module):
    """`length` element-wise ops in a row."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(self.length):
            x = x.sin() if number % 2 else x.exp()
        return x


def call_cost(rounds: int) -> dict[str, float]:
    """Microseconds: fixed part and per kernel, of pliant and of eager."""
    torch.set_num_threads(1)
    x = torch.zeros(1, 1)
    calls: dict[str, Any] = {}
    for length in CHAINS:
        module = Chain(length)
        compiled = pliant.compile(
            module,
            (torch.zeros(2, 3),),
            ({0: "rows", 1: "columns"},),
            threads=1,
            options=pliant.Options(fuse=False),
        )
        assert compiled.stats()["kernel_calls"] == length
        calls[f"pliant {length}"] = lambda m=compiled: m(x)
        calls[f"eager {length}"] = lambda m=module: eager(m, (x,))
    samples = interleaved(calls, rounds)
    costs: dict[str, float] = {}
    for engine in ("pliant", "eager"):
        times = [Spread.of(samples[f"{engine} {n}"]).median * 1e6 for n in CHAINS]
        slope, start = linear_regression(CHAINS, times)
        costs |= {f"{engine}_fixed_us": start, f"{engine}_kernel_us": slope}
    return costs


def compile_cost(layers: int) -> dict[str, Any]:
    """Seconds per stage for BERT-base, and the planned allocations of its calls."""
    case = zoo.build("bert", layers=layers)
    model = case.compile()
    stats = model.stats()
    peaks = []
    for shape in PEAKS:
        plan = model.memory_plan(*(x.to("meta") for x in case.inputs(*shape)))
        peaks.append((shape, plan.peak_bytes, plan.output_bytes))
    return {
        "stage_seconds": stats["stage_seconds"],
        "kernels": stats["kernels"],
        "kernel_calls": stats["kernel_calls"],
        "weight_bytes": stats["weight_bytes"],
        "peak_formula": model.peak_formula,
        "peaks": peaks,
    }


def seconds_of(name: str) -> dict[str, float]:
    """Compiles a model of the zoo and returns its seconds by stage."""
    seconds: dict[str, float] = zoo.build(name).compile().stats()["stage_seconds"]
    return seconds


def build_cost(name: str) -> dict[str, dict[str, float]]:
    """Seconds by stage of two fresh processes: with an empty cache, then a full one."""
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for cache in ("cold", "warm"):
            told = subprocess.run(
                [sys.executable, "-m", "bench.costs", "--stages-of", name],
                env={**os.environ, "PLIANT_CACHE": folder},
                check=True,
                capture_output=True,
                text=True,
            )
            found[cache] = json.loads(told.stdout.splitlines()[-1])
    return found


def build_row(name: str, cache: str, seconds: dict[str, float]) -> tuple[str, ...]:
    parts = [sum(seconds.get(s, 0.0) for s in stages) for stages in PARTS.values()]
    kernels, every = sum(seconds[s] for s in KERNEL_STAGES), sum(seconds.values())
    parts.insert(1, every - sum(parts))
    return (name, cache, *(f"{value:.2f}" for value in (*parts, kernels, every)))


def call_table(call: dict[str, float]) -> Report:
    return Report(
        f"Cost of one call at size (1, 1), 1 thread, fitted over chains of {CHAINS[0]} "
        f"to {CHAINS[-1]} kernels",
        ("", "pliant µs", "eager µs"),
        tuple(
            (label, f"{call[f'pliant_{key}']:.2f}", f"{call[f'eager_{key}']:.2f}")
            for label, key in (("fixed", "fixed_us"), ("each kernel", "kernel_us"))
        ),
    )


def reports(result: dict[str, Any]) -> list[Report]:
    call, once = result["call"], result["compile"]
    layers = result["layers"]
    seconds = once["stage_seconds"]
    stages = [(name, f"{value:.2f}") for name, value in seconds.items()]
    stages.append(("all", f"{sum(seconds.values()):.2f}"))
    peaks = [
        (str(tuple(shape)), mebibytes(peak), mebibytes(output))
        for shape, peak, output in once["peaks"]
    ]
    return [
        call_table(call),
        Report(
            f"Compiling BERT, {layers} layers: {once['kernels']} loop functions, "
            f"{once['kernel_calls']} kernel calls",
            ("stage", "seconds"),
            tuple(stages),
        ),
        Report(
            "Seconds of a fresh process, without and with the cache of an earlier one",
            (
                *("model", "cache", "export", "import, passes"),
                *list(PARTS)[1:],
                *("kernels", "all"),
            ),
            tuple(
                build_row(name, cache, seconds)
                for name, caches in result["build"].items()
                for cache, seconds in caches.items()
            ),
        ),
        Report(
            f"Planned memory of BERT, {layers} layers",
            ("(batch, seq)", "peak MiB", "of it outputs"),
            tuple(peaks),
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.costs", description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2 * ROUNDS)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--stages-of", metavar="MODEL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.stages_of is not None:
        print(json.dumps(seconds_of(arguments.stages_of)))
        return 0
    tell(1 + len(arguments.models) / 3, "calls, and compiling")
    result: dict[str, Any] = {
        "layers": arguments.layers,
        "call": call_cost(arguments.rounds),
        "compile": compile_cost(arguments.layers),
        "build": {name: build_cost(name) for name in arguments.models},
    }
    tables = reports(result)
    show(tables)
    note = "The cost of a call is timed in rounds; a compile is made once for each row."
    save("costs", result, tables, arguments.rounds, [note])
    return 0


if __name__ == "__main__":
    sys.exit(main())
