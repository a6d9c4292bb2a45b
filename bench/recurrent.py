"""LSTM and GRU against eager, ONNX Runtime and OpenVINO: `python -m bench.recurrent`.

Two layers in both directions, 256 wide; one compilation for every batch and length. The
ONNX file is made by torch's older exporter, which writes one LSTM op a layer; the newer
one would write the steps. Each row is one interleaved run, and its numbers are medians.
10 minutes for each count of threads. Writes bench/results/recurrent.json and .md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.script import add_timing_arguments, check, save, show, tell
from pliant.cases import Case, Shape
from pliant.compare.engines import ENGINES, OURS, Engine, NotAvailable, Setup, onnx_path
from pliant.compare.tables import Report
from pliant.compare.timing import Spread, geomean, interleaved, ratios

WIDTH = 256
KINDS: dict[str, type[nn.LSTM] | type[nn.GRU]] = {"LSTM": nn.LSTM, "GRU": nn.GRU}
SHAPES: tuple[Shape, ...] = tuple(
    (batch, length) for batch in (1, 4, 16) for length in (1, 10, 50, 150, 500)
)
PEERS = ("eager", "onnxruntime", "openvino")


class Rows(nn.Module):
    """The outputs of all steps."""

    def __init__(self, layers: nn.LSTM | nn.GRU) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.layers(x)[0]
        return rows


def case_of(name: str) -> Case:
    torch.manual_seed(0)
    layers = KINDS[name](WIDTH, WIDTH, 2, bidirectional=True, batch_first=True)
    return Case(
        name,
        Rows(layers).eval(),
        lambda batch, length: (torch.randn(batch, length, WIDTH),),
        ({0: "batch", 1: "length"},),
        ("batch", "length"),
        (2, 7),
        SHAPES,
        label="2 layers, both directions, random weights",
    )


def engines(case: Case, threads: int, folder: Path) -> dict[str, Engine]:
    setup = Setup(case, threads, folder)
    torch.onnx.export(
        case.model,
        case.at(case.example),
        onnx_path(setup),
        dynamo=False,
        input_names=["x"],
        dynamic_axes={"x": {0: "batch", 1: "length"}},
        verbose=False,
    )
    found: dict[str, Engine] = {}
    for name in (OURS, *PEERS):
        try:
            found[name] = ENGINES[name].prepare(setup)
        except NotAvailable as missing:
            print(f"  {name}: {missing}", file=sys.stderr)
    return found


def rows_of(case: Case, threads: int, rounds: int) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        made = engines(case, threads, Path(folder))
        for shape in SHAPES:
            inputs = case.at(shape)
            calls = {name: engine.bind(inputs) for name, engine in made.items()}
            (wanted,) = made["eager"].tensors(calls["eager"]())
            for name, engine in made.items():
                check(f"{name} {shape}", engine.tensors(calls[name]())[0], wanted)
            samples = interleaved(calls, rounds)
            times = {n: Spread.of(s).median * 1e6 for n, s in samples.items()}
            best = min((n for n in times if n != OURS), key=lambda n: times[n])
            gain = ratios(samples[best], samples[OURS]).median
            rows.append({"shape": shape, "us": times, "best": best, "gain": gain})
            print(f"  {case.name} {shape} x{gain:.2f}", file=sys.stderr, flush=True)
    return rows


def report(name: str, rows: list[dict[str, Any]], threads: int) -> Report:
    names = list(rows[0]["us"])
    gains = [row["gain"] for row in rows]
    title = (
        f"{name}, 2 layers, both directions, {WIDTH} wide, {threads} thread(s): x best "
        f"{geomean(gains):.2f} by geometric mean, least {min(gains):.2f}"
    )
    return Report(
        title,
        ("(batch, length)", *(f"{n} µs" for n in names), "x best"),
        tuple(
            (
                str(tuple(row["shape"])),
                *(f"{row['us'][n]:.0f}" for n in names),
                f"{row['gain']:.2f}",
            )
            for row in rows
        ),
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.recurrent", description=__doc__)
    add_timing_arguments(parser)
    arguments = parser.parse_args()
    tell(10, "LSTM and GRU")
    torch.set_num_threads(arguments.threads)
    content: dict[str, Any] = {}
    tables: list[Report] = []
    for name in KINDS:
        rows = rows_of(case_of(name), arguments.threads, arguments.rounds)
        content[name] = rows
        tables.append(report(name, rows, arguments.threads))
        show(tables[-1:])
    save("recurrent", content, tables, arguments.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
