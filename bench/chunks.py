"""Memory against time in chunks of rows: `python -m bench.chunks gpt2 vit` (or `zoo`).

The activations of a call are what it allocates without its results. Each model runs
without a limit, and with 80, 50, 40, 30, 20 and 10 percent of the activations that it
has then: in how many chunks, and how much slower than without a limit and than torch
eager, in turns of one run. Where a limit cannot be met, the least that can is told. No
call may exceed its limit. Then, for each model, the longest input whose activations and
results fit 1 GiB, for torch eager by what becomes resident. Writes
bench/results/chunks.json and chunks.md; a run over chosen models or shapes is only
printed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

import pliant
from bench.memory import shapes_of
from bench.resident import high_water
from bench.script import add_model_arguments, cases, check, save, show, tell
from pliant.cases import Case, Shape, expand
from pliant.compare.tables import Report, dims_text, mebibytes
from pliant.compare.timing import ROUNDS, Spread, interleaved, ratios

PERCENT = (80, 50, 40, 30, 20, 10)
ROOM = 2**30  # what the longest input is to fit
MINUTES = 12  # for each model
# The sizes at which activations are large: tokens, patches along a side of an image,
# residues, and eighths of a side of a latent.
LONG: dict[str, tuple[Shape, ...]] = {
    "gpt2": ((1, 1024), (1, 4096), (1, 16384)),
    "vit": ((1, 14), (1, 32), (1, 64)),
    "evoformer": ((1, 128), (1, 256), (1, 384), (1, 512)),
    "unet": ((1, 4, 77), (1, 8, 77), (1, 16, 77)),
}
# For the longest input: the inputs of one size, which is the largest that there may be.
LENGTHS: dict[str, tuple[Callable[[int], Shape], int]] = {
    "gpt2": (lambda n: (1, n), 16384),
    "vit": (lambda n: (1, n), 256),
    "evoformer": (lambda n: (1, n), 2048),
    "unet": (lambda n: (1, n, 77), 64),
}


def plan_within(model: Any, given: tuple[Any, ...], limit: int) -> tuple[Any, int]:
    """The plan for a limit, or None; and the least bytes, if it does not fit."""
    try:
        return model.memory_plan(*given, memory_limit=limit), 0
    except pliant.MemoryLimitError as error:
        return None, int(error.least)


def within(model: Any, given: tuple[Any, ...], limit: int | None) -> object:
    model.memory_limit = limit
    return model(*given)


def sweep(
    name: str, case: Case, model: Any, shape: Shape, rounds: int
) -> list[dict[str, Any]]:
    """One row per limit; all that fit are timed in turns."""
    given = case.at(shape)
    model.memory_limit = None
    free = model.memory_plan(*given)
    activations = free.peak_bytes - free.output_bytes
    wanted = case.model(*given)
    calls: dict[str, Callable[[], object]] = {
        "eager": partial(case.model, *given),
        "free": partial(within, model, given, None),
    }
    rows: list[dict[str, Any]] = []
    for percent in PERCENT:
        limit = free.output_bytes + activations * percent // 100
        row = {"model": name, "shape": shape, "percent": percent, "limit": limit}
        row |= {"results": free.output_bytes, "free": free.peak_bytes}
        rows.append(row)
        plan, least = plan_within(model, given, limit)
        if plan is None:
            row["least"] = least
            continue
        check(f"{name} {shape} at {percent}%", within(model, given, limit), wanted)
        metered = model.stats()["last_peak_bytes"]
        assert metered == plan.peak_bytes <= limit
        made = plan.knobs["rematerialised"]
        row |= {
            "peak": metered,
            "parts": len(plan.knobs["chunks"]),
            "chunks": max((c.chunks for c in plan.knobs["chunks"]), default=1),
            "recompute": sum(r.action == "recompute" for r in made),
            "spill": sum(r.action == "spill" for r in made),
        }
        calls[str(percent)] = partial(within, model, given, limit)
    samples = interleaved(calls, rounds)
    for row in rows:
        timed = samples.get(str(row["percent"]))
        if timed is not None:
            row["ms"] = asdict(Spread.of(timed).scaled(1e3))
            row["against_free"] = asdict(ratios(timed, samples["free"]))
            row["against_eager"] = asdict(ratios(timed, samples["eager"]))
        told = "does not fit" if timed is None else f"{row['chunks']} chunks"
        print(f"  {name} {shape} {row['percent']}%: {told}", file=sys.stderr)
    model.memory_limit = None
    return rows


def longest(fits: Callable[[int], bool], most: int) -> int:
    """The largest size that fits; larger ones need more."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > max(low // 16, 1):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def lengths(name: str, case: Case, model: Any) -> dict[str, Any]:
    """The longest inputs inside 1 GiB: without chunks, with them, and torch eager's."""
    shape_of, most = LENGTHS[name]
    plain = case.compile(threads=1, options=pliant.Options(chunk=False, remat=False))

    def planned(of: Any, size: int) -> bool:
        return plan_within(of, case.at(shape_of(size)), ROOM)[0] is not None

    def eager(size: int) -> bool:
        held = high_water(partial(case.model, *case.at(shape_of(size))))
        return held is not None and held <= ROOM

    row = {
        "model": name,
        "chunks": longest(partial(planned, model), most),
        "plain": longest(partial(planned, plain), most),
        "eager": longest(eager, most),
        "most": most,
    }
    print(f"  {name}: {row}", file=sys.stderr)
    return row


def name_of(row: dict[str, Any]) -> str:
    return f"{row['model']} {dims_text(row['shape'])}"


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    head = (name_of(row), f"{row['percent']}%", mebibytes(row["limit"]))
    if "least" in row:
        whole = row["free"] - row["results"]
        share = (row["least"] - row["results"]) / max(whole, 1)
        told = f"at least {mebibytes(row['least'])} ({share:.0%})"
        return (*head, told, *("",) * 5)
    return (
        *head,
        mebibytes(row["peak"]),
        f"{row['parts']} in up to {row['chunks']}",
        f"{row['recompute']}, {row['spill']}",
        f"{row['ms']['median']:.2f}",
        f"{row['against_free']['median']:.2f}",
        f"{row['against_eager']['median']:.2f}",
    )


def reports(rows: list[dict[str, Any]], most: list[dict[str, Any]]) -> list[Report]:
    columns = (
        *("model", "activations", "limit MiB", "metered MiB", "parts in chunks"),
        *("recomputed, spilled", "ms", "against no limit", "against eager"),
    )
    tables = [Report("Activations in chunks", columns, tuple(map(cells, rows)))]
    if most:
        head = ("model", "in chunks", "without chunks", "eager", "looked at up to")
        keys = ("chunks", "plain", "eager", "most")
        lines = tuple((r["model"], *(str(r[key]) for key in keys)) for r in most)
        tables.append(Report("The longest input inside 1 GiB", head, lines))
    return tables


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_model_arguments(parser, "zoo")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--no-longest", action="store_true", help="limits alone")
    arguments = parser.parse_args()
    tell(MINUTES * len(expand(arguments.models)), f"{len(PERCENT)} limits per shape")
    torch.set_num_threads(arguments.threads)
    rows: list[dict[str, Any]] = []
    most: list[dict[str, Any]] = []
    with torch.inference_mode():
        for name, case in cases(arguments).items():
            model = case.compile(threads=arguments.threads)
            for shape in arguments.shape or LONG.get(name) or shapes_of(case):
                rows += sweep(name, case, model, shape, arguments.rounds)
            if name in LENGTHS and not arguments.no_longest:
                most.append(lengths(name, case, model))
    tables = reports(rows, most)
    show(tables)
    whole = arguments.models == ["zoo"] and arguments.shape is None
    if whole and not arguments.no_longest:
        save("chunks", {"rows": rows, "longest": most}, tables, arguments.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
