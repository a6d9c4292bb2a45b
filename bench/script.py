"""What the benchmarks share: arguments, checks, and storing results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pliant.cases import Case, Shape, expand, load
from pliant.compare.accuracy import error, scale
from pliant.compare.results import stamp, write_json, write_page
from pliant.compare.tables import Report, console
from pliant.compare.timing import ROUNDS, Spread, interleaved, ratios

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
# Relative; two ways to compute in f32 differ in the order of additions.
TOLERANCE = 1e-3


def add_model_arguments(parser: argparse.ArgumentParser, *default: str) -> None:
    """MODEL.. and --shape, as `pliant bench` takes them."""
    parser.add_argument("models", nargs="*", default=list(default), metavar="MODEL")
    parser.add_argument("--shape", type=_dims, action="append", help="such as 1x32")


def _dims(text: str) -> Shape:
    return tuple(int(part) for part in text.split("x"))


def add_timing_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=ROUNDS)


def cases(arguments: argparse.Namespace) -> dict[str, Case]:
    """The requested models, by name."""
    return {name: load(name) for name in expand(arguments.models)}


def tell(minutes: float, what: str) -> None:
    """Prints how long a benchmark takes, before it starts."""
    print(f"{what}: about {minutes:.0f} minutes", file=sys.stderr, flush=True)


def check(what: str, result: Any, wanted: Any) -> None:
    """Ends the benchmark if a result differs from eager's."""
    if not (found := error(result, wanted)) <= TOLERANCE * scale(wanted):
        raise SystemExit(f"{what}: error {found:.3g}")


def against_eager(
    model: Callable[..., object],
    module: torch.nn.Module,
    inputs: tuple[torch.Tensor, ...],
    rounds: int,
) -> dict[str, Any]:
    """The times of a compiled model and of its module, and the ratio of the two."""
    calls = {"pliant": partial(model, *inputs), "eager": partial(module, *inputs)}
    with torch.inference_mode():
        samples = interleaved(calls, rounds)
    return {
        "pliant_us": asdict(Spread.of(samples["pliant"]).scaled(1e6)),
        "eager_us": asdict(Spread.of(samples["eager"]).scaled(1e6)),
        "ratio": asdict(ratios(samples["eager"], samples["pliant"])),
    }


def show(tables: Sequence[Report]) -> None:
    out = console()
    for table in tables:
        table.show(out)


def parts_by_threads(
    threads: Sequence[int],
    names: Sequence[str],
    measure: Callable[[str, int], list[dict[str, Any]]],
    report: Callable[[list[dict[str, Any]], int], Report],
) -> tuple[dict[str, Any], list[Report]]:
    """Measures each part with each count of threads: rows to store, and the tables."""
    content: dict[str, Any] = {}
    tables: list[Report] = []
    for count in threads:
        rows: list[dict[str, Any]] = []
        for name in names:
            print(f"  {name}", file=sys.stderr)
            rows += measure(name, count)
        content[f"threads_{count}"] = rows
        tables.append(report(rows, count))
        show(tables[-1:])
    return content, tables


# ---- results


def save(
    name: str,
    content: Mapping[str, Any],
    tables: Sequence[Report],
    rounds: int,
    notes: Sequence[str] = (),
) -> None:
    """bench/results/NAME.json and NAME.md; `rounds` is 0 where nothing is timed.

    Results from fewer rounds than stored results need are not written.
    """
    if 0 < rounds < ROUNDS:
        print(f"{rounds} rounds are too few: not stored", file=sys.stderr)
        return
    write(RESULTS, name, stamp(rounds), content, tables, notes)
    print(f"written: {RESULTS / name}.md", file=sys.stderr)


def write(
    folder: Path,
    name: str,
    about: Mapping[str, Any],
    content: Mapping[str, Any],
    tables: Sequence[Report],
    notes: Sequence[str] = (),
) -> None:
    """NAME.json with the stamp and `content`, NAME.md with tables, notes and stamp."""
    write_json(folder / f"{name}.json", about, content)
    write_page(folder / f"{name}.md", [about], tables, notes)
