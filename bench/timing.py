"""What the scripts here share: pliant.benchmark, and where results are kept."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pliant.benchmark import results
from pliant.benchmark.accuracy import eager, error, scale
from pliant.benchmark.models import (
    Case,
    Shape,
    default_zoo,
    expand,
    few,
    load,
    load_zoo,
)
from pliant.benchmark.tables import (
    Report,
    console,
    dims_text,
    mebibytes,
)
from pliant.benchmark.timing import (
    ROUNDS,
    Spread,
    geomean,
    geomean_spread,
    interleaved,
    ratios,
    settle,
)

__all__ = [
    "RESULTS",
    "ROUNDS",
    "Case",
    "Report",
    "Shape",
    "Spread",
    "add_model_arguments",
    "cases",
    "console",
    "default_zoo",
    "dims_text",
    "eager",
    "error",
    "expand",
    "few",
    "geomean",
    "geomean_spread",
    "interleaved",
    "load_zoo",
    "mebibytes",
    "ratios",
    "save",
    "scale",
    "settle",
    "tell",
]

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"


def save(
    name: str,
    content: Mapping[str, Any],
    tables: Sequence[Report],
    rounds: int,
    notes: Sequence[str] = (),
) -> None:
    """bench/results/NAME.json and NAME.md; `rounds` is 0 where nothing is timed.

    What was timed in fewer rounds than results have is not stored.
    """
    if 0 < rounds < ROUNDS:
        print(f"{rounds} rounds are too few: not stored", file=sys.stderr)
        return
    results.save(RESULTS, name, results.stamp(rounds), content, tables, notes)
    print(f"written: {RESULTS / name}.md", file=sys.stderr)


def tell(minutes: float, what: str) -> None:
    """How long a benchmark takes, before it starts."""
    print(f"{what}: about {minutes:.0f} minutes", file=sys.stderr, flush=True)


def add_model_arguments(parser: argparse.ArgumentParser, *default: str) -> None:
    """MODEL.., --zoo and --shape, as `pliant bench` takes them."""
    parser.add_argument("models", nargs="*", default=list(default), metavar="MODEL")
    parser.add_argument("--zoo", type=Path, default=default_zoo())
    parser.add_argument("--shape", type=_dims, action="append", help="such as 1x32")


def _dims(text: str) -> Shape:
    return tuple(int(part) for part in text.split("x"))


def cases(arguments: argparse.Namespace) -> dict[str, Case]:
    """The models asked for, by name."""
    names = expand(arguments.models, arguments.zoo)
    return {name: load(name, arguments.zoo) for name in names}
