"""What every benchmark here shares: interleaved timing, the zoo, the machine, tables.

The engines are timed by turns within every repetition, so that a change in the
machine's speed hits all of them alike, and ratios are taken within a repetition before
their median. Each turn starts with a pause, in which the idle threads of the engine
before it stop spinning, and one call that is not timed.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any

import llvmlite
import torch
from rich.console import Console
from rich.table import Table
from torch.utils import _pytree as pytree

import pliant
from pliant import target

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
SETTLE_SECONDS = 0.005  # libgomp spins for 1 to 2 ms after a parallel region
TURN_SECONDS = 0.005  # short calls are repeated until a turn lasts this long
MOST_CALLS_A_TURN = 1000


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with the 10th and 90th percentile."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(samples: Sequence[float]) -> Spread:
        ranked = sorted(samples)
        last = len(ranked) - 1
        return Spread(
            median(ranked), ranked[round(0.1 * last)], ranked[round(0.9 * last)]
        )

    def scaled(self, factor: float) -> Spread:
        return Spread(self.median * factor, self.low * factor, self.high * factor)

    def text(self, digits: int = 2) -> str:
        low, high = f"{self.low:.{digits}f}", f"{self.high:.{digits}f}"
        return f"{self.median:.{digits}f} ({low} to {high})"


def interleaved(
    calls: Mapping[str, Callable[[], object]], repetitions: int, warm_up: int = 2
) -> dict[str, list[float]]:
    """Seconds per call of every engine, one sample per repetition."""
    counts: dict[str, int] = {}
    for name, call in calls.items():
        for _ in range(warm_up):
            call()
        started = perf_counter()
        call()
        once = max(perf_counter() - started, 1e-9)
        counts[name] = min(MOST_CALLS_A_TURN, max(1, round(TURN_SECONDS / once)))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for repetition in range(repetitions):
        # going back and forth gives every engine every neighbour
        for name in order if repetition % 2 == 0 else reversed(order):
            call, count = calls[name], counts[name]
            sleep(SETTLE_SECONDS)
            call()
            started = perf_counter()
            for _ in range(count):
                call()
            samples[name].append((perf_counter() - started) / count)
    return samples


def ratios(above: Sequence[float], below: Sequence[float]) -> Spread:
    """above / below within each repetition."""
    return Spread.of([a / b for a, b in zip(above, below, strict=True)])


def geomean(values: Sequence[float]) -> float:
    return math.exp(sum(math.log(v) for v in values) / len(values))


# ---- models


def zoo() -> Any:
    """The development models: the folder PLIANT_ZOO, or ../shared/zoo."""
    folder = Path(os.environ.get("PLIANT_ZOO") or ROOT.parent / "shared" / "zoo")
    if not (folder / "zoo.py").is_file():
        raise SystemExit(f"no zoo.py in {folder}; set PLIANT_ZOO to its folder")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    sys.path.insert(0, str(folder))
    return importlib.import_module("zoo")


def eager(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> Any:
    with torch.inference_mode():
        return model(*inputs)


def error(result: Any, reference: Any) -> float:
    """Largest absolute difference over all tensors of two results."""
    pairs = zip(pytree.tree_leaves(result), pytree.tree_leaves(reference), strict=True)
    return max((_difference(got, wanted) for got, wanted in pairs), default=0.0)


def _difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    if got.shape != wanted.shape:
        return math.inf
    if got.numel() == 0:
        return 0.0
    found = (got.double() - wanted.double()).abs().max().item()
    return math.inf if math.isnan(found) else found


# ---- reports


def machine() -> dict[str, str]:
    """The CPU and the versions that a number was measured with."""
    host = target.host()
    notable = ("avx2", "fma", "avx512f", "avx512vnni", "avx512bf16", "amx-tile")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpu": f"{_cpu_name()}, {host.cores} cores",
        "features": ", ".join(f for f in notable if host.has(f)) or "sse2",
        "versions": f"pliant {pliant.__version__}, torch {torch.__version__}, "
        f"llvmlite {llvmlite.__version__}, Python {platform.python_version()}",
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2] for line in lines if line.startswith("model name"))
    return next(names, platform.machine()).strip()


def machine_line(about: Mapping[str, str]) -> str:
    return "; ".join(about.values())


@dataclass(frozen=True, slots=True)
class Report:
    """A table for the terminal and for Markdown."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def show(self, console: Console) -> None:
        console.print(self.title, style="bold", highlight=False)
        table = Table()
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*row)
        console.print(table)

    def markdown(self) -> str:
        rule = ("---", *("---:" for _ in self.columns[1:]))
        lines = [" | ".join(row) for row in (self.columns, rule, *self.rows)]
        return f"### {self.title}\n\n" + "\n".join(f"| {x} |" for x in lines) + "\n"


def store(name: str, content: Mapping[str, Any]) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / name
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def mebibytes(count: int) -> str:
    return f"{count / 2**20:.2f}"
