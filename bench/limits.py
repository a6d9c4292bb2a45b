"""Time against memory: `python -m bench.limits bert llama` (or `zoo`), --training.

Each model runs without a limit, and with 97, 90, 80, 60, 50 and 40 percent of the peak
that it has then: by how much the call becomes slower, what is computed again or spilled
for that, and how long the plan took. Where a limit cannot be met, the least that can is
told. Then, inside the memory that a batch of four takes, the largest batch that runs.
No call may exceed its limit, as the runtime meters what it allocates: that ends the
run; what became resident stands beside it. Writes bench/results/limits.json and
limits.md; a run over chosen models or shapes is only printed, but for --training=only,
whose rows replace those that are stored.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch

import pliant
import zoo
from bench.finetune import loss_of
from bench.memory import shapes_of
from bench.resident import high_water
from bench.script import RESULTS, add_model_arguments, cases, save, show, tell
from pliant.cases import Shape, expand
from pliant.compare.tables import Report, dims_text, mebibytes
from pliant.compare.timing import ROUNDS, medians

PERCENT = (100, 97, 90, 80, 60, 50, 40)
TRAINING_SHAPES: tuple[Shape, ...] = (
    *((1, 64), (4, 64), (2, 256), (2, 512)),
    *((3, 701), (4, 512), (1, 2048)),
)
STEP = "llama step"
MINUTES, STEP_MINUTES = 2.5, 25  # for each model, and for the training step
BATCH, FAR = 4, 48  # the limit is the memory of BATCH; FAR is more than fits
LARGEST_SHAPE: Shape = (BATCH, 256)  # for the training step


def seconds_of(call: Callable[[], object]) -> float:
    return medians({"call": call})["call"]


def resident_of(model: Any, given: tuple[Any, ...]) -> int | None:
    """What a call makes resident, as the system counts it, starting without arena."""
    model.trim()
    return high_water(partial(model, *given))


def sweep(
    name: str, shape: Shape, model: Any, given: tuple[Any, ...], rows: list[Any]
) -> None:
    """One row per limit."""
    model.memory_limit = None
    free = model.memory_plan(*given)
    for percent in PERCENT:
        limit = free.peak_bytes * percent // 100
        row = {"model": name, "shape": shape, "percent": percent, "limit": limit}
        row |= {"free": free.peak_bytes, "bound": free.lower_bound}
        model.memory_limit = limit
        try:
            started = perf_counter()
            plan = model.memory_plan(*given)
            row["plan_ms"] = (perf_counter() - started) * 1e3
            row["ms"] = seconds_of(partial(model, *given)) * 1e3
        except pliant.MemoryLimitError as error:
            row["least"] = error.least
            rows.append(row)
            print(f"  {name} {shape} {percent}%: does not fit", file=sys.stderr)
            continue
        stats = model.stats()
        metered = stats["last_peak_bytes"]
        assert metered == plan.peak_bytes <= limit
        made = plan.knobs["rematerialised"]
        row |= {
            "peak": metered,
            "resident": resident_of(model, given),
            "again": stats["recomputed_calls"],
            "spilled": stats["spilled_bytes"],
            "recompute": sum(r.action == "recompute" for r in made),
            "spill": sum(r.action == "spill" for r in made),
            "chunks": max((c.chunks for c in plan.knobs.get("chunks", ())), default=1),
        }
        rows.append(row)
        told = (
            f"{row['ms']:.1f} ms, {row['chunks']} chunks, {row['recompute']} "
            f"recomputed, {row['spill']} filed"
        )
        print(f"  {name} {shape} {percent}%: {told}", file=sys.stderr)
    model.memory_limit = None


def largest(
    name: str, model: Any, shape: Shape, at: Callable[..., Any], rows: list[Any]
) -> None:
    """The largest batch that runs in the memory of a batch of four; each is run."""
    rest = shape[1:]
    model.memory_limit = None
    given = at(BATCH, *rest)
    limit = model.memory_plan(*given).peak_bytes
    free = seconds_of(partial(model, *given))
    model.memory_limit = limit
    try:
        model.memory_plan(*at(FAR, *rest))
        raise AssertionError(f"{name}: a batch of {FAR} fits {limit} bytes")
    except pliant.MemoryLimitError as error:
        batch = error.largest[model.dims[0]]
    given = at(batch, *rest)
    plan = model.memory_plan(*given)
    print(f"  {name} {rest}: largest batch {batch}", file=sys.stderr)
    spent = seconds_of(partial(model, *given))
    metered = model.stats()["last_peak_bytes"]
    assert metered == plan.peak_bytes <= limit
    rows.append(
        {
            "model": name,
            "shape": (BATCH, *rest),
            "limit": limit,
            "batch": batch,
            "peak": metered,
            "free_ms": free * 1e3 / BATCH,
            "ms": spent * 1e3 / batch,
        }
    )
    model.memory_limit = None


def training_step(threads: int) -> tuple[Any, Callable[..., Any]]:
    """The step of the zoo's llama, and its inputs for a shape."""
    torch.manual_seed(0)
    model = zoo.build("llama").model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def batch(*shape: int) -> Any:
        ids = torch.randint(0, 32000, shape)
        return (ids,), (ids,)

    dims = {0: "batch", 1: "seq"}
    step = pliant.compile_training(
        model,
        loss_of,
        optimizer,
        batch(2, 13),
        ((dims,), (dims,)),
        threads=threads,
    )
    return step, batch


def name_of(row: dict[str, Any]) -> str:
    return f"{row['model']} {dims_text(row['shape'])}"


def action(row: dict[str, Any]) -> str:
    """How a row's limit is met; empty if it does not fit."""
    if not row.get("recompute") and not row.get("spill"):
        return ""
    if not row["spill"]:
        return "recompute"
    return "both" if row["recompute"] else "spill"


def cells(row: dict[str, Any], first: float) -> tuple[str, ...]:
    head = (name_of(row), f"{row['percent']}%", mebibytes(row["limit"]))
    if "least" in row:
        return (*head, f"at least {mebibytes(row['least'])}", *("",) * 7)
    resident = row.get("resident")
    return (
        *head,
        mebibytes(row["peak"]),
        "" if resident is None else mebibytes(resident),
        f"{row['ms']:.2f}",
        f"{row['ms'] / first:.2f}",
        action(row),
        f"{row['recompute']} ({row['again']})",
        f"{row['spill']} ({mebibytes(row['spilled'])})",
        f"{row['plan_ms']:.2f}",
    )


def report(rows: list[dict[str, Any]]) -> Report:
    first = {name_of(r): r["ms"] for r in rows if r["percent"] == 100}
    columns = (
        *("model", "limit", "MiB", "metered MiB", "resident MiB"),
        *("ms", "against 100%", "chosen"),
        *("values recomputed (calls)", "spilled (MiB)", "plan ms"),
    )
    lines = tuple(cells(r, first[name_of(r)]) for r in rows)
    return Report("Time against memory", columns, lines)


def batches(rows: list[dict[str, Any]]) -> Report:
    lines = tuple(
        (
            name_of(row),
            mebibytes(row["limit"]),
            str(row["batch"]),
            mebibytes(row["peak"]),
            f"{row['free_ms']:.2f}",
            f"{row['ms']:.2f}",
        )
        for row in rows
    )
    columns = (
        *("model", "limit MiB", "largest batch", "its peak MiB"),
        *("ms per sample, batch 4", "ms per sample, largest"),
    )
    return Report("The largest batch inside the memory of a batch of 4", columns, lines)


def chosen(rows: list[dict[str, Any]]) -> str:
    """Where values were recomputed, where they were spilled, and where both."""
    told = []
    for wanted in ("recompute", "spill", "both"):
        places = [
            f"{name_of(r)} at {r['percent']}%" for r in rows if action(r) == wanted
        ]
        told.append(f"{wanted}: {', '.join(places) or 'nowhere'}.")
    return "\n\n".join(told)


def replaced(key: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The stored rows, with those of the same model and shape replaced."""
    path = RESULTS / "limits.json"
    stored = json.loads(path.read_text())[key] if path.exists() else []
    names = set(map(name_of, rows))
    return [*(row for row in stored if name_of(row) not in names), *rows]


def add_training_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--training",
        nargs="?",
        const="also",
        choices=("also", "only"),
        help="llama's step, besides the models or alone",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_model_arguments(parser, "zoo")
    add_training_argument(parser)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    most: list[dict[str, Any]] = []
    alone = arguments.training == "only"
    step_minutes = STEP_MINUTES if arguments.training else 0
    models = 0 if alone else len(expand(arguments.models))
    tell(MINUTES * models + step_minutes, f"{len(PERCENT)} limits at every shape")
    with torch.inference_mode():
        for name, case in ({} if alone else cases(arguments)).items():
            compiled = case.compile(threads=arguments.threads)
            shapes = arguments.shape or shapes_of(case)
            for shape in shapes:
                sweep(name, shape, compiled, case.at(shape), rows)
            largest(name, compiled, shapes[0], lambda *s, c=case: c.at(s), most)
    if arguments.training:
        step, batch = training_step(arguments.threads)
        shapes = arguments.shape or TRAINING_SHAPES
        for shape in shapes:
            sweep(STEP, shape, step, batch(*shape), rows)
        largest(STEP, step, LARGEST_SHAPE, batch, most)
    if alone:
        rows, most = replaced("rows", rows), replaced("largest", most)
    tables = report(rows), batches(most)
    show(tables)
    print(chosen(rows))
    if alone or (arguments.models == ["zoo"] and arguments.shape is None):
        save("limits", {"rows": rows, "largest": most}, tables, ROUNDS, [chosen(rows)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
