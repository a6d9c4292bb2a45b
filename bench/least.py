"""The least memory of a call: `python -m bench.least gpt2 vit` (or `zoo`), --training.

Nothing is run or timed: for each model and shape, the peak of a call without a limit,
with every knob off, and the least limit that it can meet; both with its results and
without them. Beside it stands what a build needs that has neither chunks nor attention
as one kernel. `--training` adds llama's training step. Writes bench/results/least.json
and least.md, where the rows of a run replace those of the same models and shapes; each
row has its commit.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import pliant
from bench.chunks import LONG, plan_within
from bench.limits import STEP, add_training_argument, training_step
from bench.memory import shapes_of
from bench.script import RESULTS, add_model_arguments, cases, save, show, tell
from pliant.cases import Shape, expand
from pliant.compare.results import commit
from pliant.compare.tables import Report, dims_text, mebibytes

MINUTES = 1.0  # for each model
STEP_SHAPES: tuple[Shape, ...] = ((4, 256), (4, 1024))
UNFUSED = pliant.Options(attention=False, chunk=False)


def row_of(
    name: str, shape: Shape, model: Any, given: tuple[Any, ...], unfused: Any
) -> dict[str, Any]:
    """What a call needs, in bytes."""
    free = model.memory_plan(*given)
    plan, least = plan_within(model, given, 1)
    row = {
        "model": name,
        "shape": shape,
        "results": free.output_bytes,
        "inputs": sum(x.nbytes for x in tree_leaves(given)),
        "free": free.peak_bytes,
        "least": least if plan is None else plan.peak_bytes,
        "commit": commit()["commit"],
    }
    if unfused is not None:
        row["unfused"] = unfused.memory_plan(*given).peak_bytes
    print(f"  {name} {shape}: {row}", file=sys.stderr, flush=True)
    return row


def name_of(row: dict[str, Any]) -> str:
    return f"{row['model']} {dims_text(row['shape'])}"


def stored(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that are stored, and these in the place of what was there of them."""
    path = RESULTS / "least.json"
    known = json.loads(path.read_text())["rows"] if path.exists() else []
    new = {name_of(row): row for row in rows}
    kept = [new.pop(name_of(row), row) for row in known]
    return [*kept, *new.values()]


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    results, free, least = row["results"], row["free"], row["least"]

    def share(of: int) -> str:
        return f"{(least - results) / max(of - results, 1):.1%}"

    sizes = (row["inputs"], results, free, least)
    found = (
        name_of(row),
        *map(mebibytes, sizes),
        f"{least / free:.1%}",
        mebibytes(least - results),
        share(free),
    )
    unfused = row.get("unfused")
    apart = ("", "")
    if unfused is not None:
        apart = (mebibytes(unfused - results), share(unfused))
    return (*found, *apart, row["commit"])


def report(rows: list[dict[str, Any]]) -> Report:
    columns = (
        *("model", "inputs MiB", "results", "peak", "least", "share"),
        *("least activations", "share"),
        *("activations, attention apart", "share", "commit"),
    )
    return Report("The least memory of a call", columns, tuple(map(cells, rows)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_model_arguments(parser, "zoo")
    add_training_argument(parser)
    arguments = parser.parse_args()
    alone = arguments.training == "only"
    tell(MINUTES * len(expand(arguments.models)), "plans alone")
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for name, case in ({} if alone else cases(arguments)).items():
            model = case.compile(threads=2)
            unfused = case.compile(threads=2, options=UNFUSED)
            for shape in arguments.shape or LONG.get(name) or shapes_of(case):
                rows.append(row_of(name, shape, model, case.at(shape), unfused))
    if arguments.training:
        step, batch = training_step(2)
        for shape in arguments.shape or STEP_SHAPES:
            rows.append(row_of(STEP, shape, step, batch(*shape), None))
    show([report(rows)])
    rows = stored(rows)
    save("least", {"rows": rows}, [report(rows)], rounds=0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
