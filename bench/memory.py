"""What a call holds: `python -m bench.memory bert resnet`.

For every model, engine and shape, in a process of its own: the resident set at the
highest moment of the call, above what was resident before it (weights, inputs), and
what is still held after the result has been dropped and a short call was made. Writes
bench/results/memory.json and memory.md; a run over chosen models is only printed.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import zoo
from bench.resident import high_water, resident
from bench.script import add_model_arguments, cases, save, show, tell
from pliant.cases import Case, Shape, load
from pliant.compare.engines import ENGINES, OURS, NotAvailable, Setup, export_onnx
from pliant.compare.tables import Report, dims_text, mebibytes
from pliant.compare.timing import geomean

PEERS = ("eager", "onnxruntime", "openvino")
MINUTES = 1.5  # for each model
THREADS = 2


def shapes_of(case: Case) -> list[Shape]:
    """The zoo's long shapes; for another model the shapes it is measured at."""
    known = zoo.MODELS.get(case.name)
    return list(case.shapes if known is None else known.sizes.long)


# ---- in the process of one measurement


def probe(job: dict[str, Any]) -> dict[str, Any]:
    """One engine at one shape."""
    case = load(job["model"])
    torch.set_num_threads(THREADS)
    setup = Setup(case, THREADS, Path(job["folder"]))
    kind = ENGINES[job["engine"]]
    try:
        if kind.from_onnx:
            export_onnx(setup)
        engine = kind.prepare(setup)
    except NotAvailable as missing:
        return {"status": str(missing)}
    shape = tuple(job["shape"])
    short = engine.bind(case.at(case.example))
    call = engine.bind(case.at(shape))
    for tensor in (*case.model.parameters(), *case.model.buffers()):
        tensor.sum()  # fault in mapped weights now, not during the call
    short()
    short()
    gc.collect()
    before = resident()
    most = high_water(call)
    metered = engine.model and engine.model.stats()["last_peak_bytes"]
    short()
    gc.collect()
    after = resident()
    assert most is not None and before is not None and after is not None
    found = {"status": "ok", "bytes": most, "kept": max(after - before, 0)}
    if engine.model is not None:
        plan = engine.model.memory_plan(*case.at(shape))
        found |= {"plan": plan.peak_bytes, "bound": plan.lower_bound}
        found["metered"] = metered
    return found


# ---- all of them


def measure(model: str, shapes: list[Shape]) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for shape in shapes:
            row: dict[str, Any] = {"model": model, "shape": shape, "engines": {}}
            for engine in (OURS, *PEERS):
                print(f"  {model} {shape}: {engine}", file=sys.stderr)
                job = {
                    "model": model,
                    "engine": engine,
                    "shape": shape,
                    "folder": folder,
                }
                row["engines"][engine] = run(job)
            rows.append(row)
    return rows


def run(job: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.memory", "--probe", json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["ended without a word"]
        return {"status": f"failed: {lines[-1]}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def least_of_peers(row: dict[str, Any]) -> int | None:
    found = [row["engines"][name].get("bytes") for name in PEERS]
    return min((b for b in found if b is not None), default=None)


def ratio(row: dict[str, Any]) -> float | None:
    ours, peer = row["engines"][OURS].get("bytes"), least_of_peers(row)
    return None if ours is None or not peer else max(ours, 1) / peer


def report(rows: list[dict[str, Any]]) -> Report:
    def told(entry: dict[str, Any], field: str) -> str:
        return mebibytes(entry[field]) if field in entry else entry["status"]

    lines = []
    for row in rows:
        engines, share = row["engines"], ratio(row)
        lines.append(
            (
                f"{row['model']} {dims_text(row['shape'])}",
                told(engines[OURS], "plan"),
                *(told(engines[name], "bytes") for name in (OURS, *PEERS)),
                "" if share is None else f"{share:.2f}",
                *(told(engines[name], "kept") for name in (OURS, *PEERS)),
            )
        )
    shares = [share for row in rows if (share := ratio(row)) is not None]
    empty = ("",) * (1 + len(PEERS))
    lines.append(("geomean", "", *empty, f"{geomean(shares):.2f}", *empty))
    titles = [ENGINES[name].title for name in (OURS, *PEERS)]
    head = ("model", "planned MiB", *titles, "ours / least peer")
    kept = (f"{title}, kept" for title in titles)
    return Report(
        f"Resident MiB above the start, {THREADS} threads",
        (*head, *kept),
        tuple(lines),
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.memory", description=__doc__)
    add_model_arguments(parser)
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.probe:
        print(json.dumps(probe(json.loads(arguments.probe))))
        return 0
    everything = not arguments.models
    arguments.models = arguments.models or ["zoo"]
    rows: list[dict[str, Any]] = []
    found = cases(arguments)
    tell(MINUTES * len(found), "a process for each engine and shape, no times")
    for name, case in found.items():
        shapes = arguments.shape or shapes_of(case)
        rows += measure(name, shapes)
    table = report(rows)
    show([table])
    if everything and not arguments.shape:
        save("memory", {"rows": rows}, [table], rounds=0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
