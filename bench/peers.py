"""A case beside the zoo against its peers, for the benchmarks of parts."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.script import check
from pliant.cases import Case
from pliant.compare.engines import ENGINES, OURS, Engine, NotAvailable, Setup, onnx_path
from pliant.compare.tables import Report
from pliant.compare.timing import Spread, geomean, interleaved, ratios

PEERS = ("eager", "onnxruntime", "openvino")


def export_by_script(setup: Setup) -> None:
    """Makes an ONNX file by the older exporter, which keeps recurrent layers whole."""
    case, names = setup.case, [f"x{k}" for k in range(len(setup.case.dynamic_shapes))]
    torch.onnx.export(
        case.model,
        case.at(case.example),
        onnx_path(setup),
        dynamo=False,
        input_names=names,
        dynamic_axes=dict(zip(names, case.dynamic_shapes, strict=True)),
        verbose=False,
    )


def engines(case: Case, threads: int, folder: Path, peers: Sequence[str]) -> Any:
    """Those that can run it, ours first; why others cannot is printed."""
    setup = Setup(case, threads, folder)
    found: dict[str, Engine] = {}
    exported = False
    for name in (OURS, *peers):
        try:
            if ENGINES[name].from_onnx and not exported:
                export_by_script(setup)
                exported = True
            engine = ENGINES[name].prepare(setup)
            engine.bind(case.at(case.example))()
            found[name] = engine
        except NotAvailable as missing:
            print(f"  {name}: {missing}", file=sys.stderr)
        except Exception as error:
            if name in (OURS, "eager"):
                raise
            print(f"  {name} cannot run {case.name}: {error!s:.200}", file=sys.stderr)
    return found


def rows_of(
    case: Case, threads: int, rounds: int, peers: Sequence[str] = PEERS
) -> list[dict[str, Any]]:
    """At each shape of a case: the medians, and the gain against the best peer."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        made = engines(case, threads, Path(folder), peers)
        for shape in case.shapes:
            inputs = case.at(shape)
            calls = {name: engine.bind(inputs) for name, engine in made.items()}
            wanted = made["eager"].tensors(calls["eager"]())[0]
            for name, engine in made.items():
                check(f"{name} {shape}", engine.tensors(calls[name]())[0], wanted)
            samples = interleaved(calls, rounds)
            times = {n: Spread.of(s).median * 1e6 for n, s in samples.items()}
            best = min((n for n in times if n != OURS), key=lambda n: times[n])
            gain = ratios(samples[best], samples[OURS]).median
            rows.append({"shape": shape, "us": times, "best": best, "gain": gain})
            print(f"  {case.name} {shape} x{gain:.2f}", file=sys.stderr, flush=True)
    return rows


def report(case: Case, rows: Sequence[dict[str, Any]], threads: int) -> Report:
    names = list(rows[0]["us"])
    gains = [row["gain"] for row in rows]
    title = (
        f"{case.name}, {case.label}, {threads} thread(s): x best {geomean(gains):.2f} "
        f"by geometric mean, least {min(gains):.2f}"
    )
    return Report(
        title,
        (f"({', '.join(case.dims)})", *(f"{n} µs" for n in names), "x best"),
        tuple(
            (
                str(tuple(row["shape"])),
                *(f"{row['us'][n]:.0f}" for n in names),
                f"{row['gain']:.2f}",
            )
            for row in rows
        ),
    )
