"""LSTM and GRU against eager, ONNX Runtime and OpenVINO: `python -m bench.recurrent`.

Two layers in both directions, 256 wide; one compilation for all sizes. Each
row is one interleaved run, and its numbers are medians. 10 minutes for a count of
threads. Writes bench/results/recurrent.json and .md.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from torch import nn

from bench.peers import report, rows_of
from bench.script import add_timing_arguments, save, show, tell
from pliant.cases import Case
from pliant.compare.tables import Report

WIDTH = 256
KINDS: dict[str, type[nn.LSTM] | type[nn.GRU]] = {"LSTM": nn.LSTM, "GRU": nn.GRU}
BATCHES, LENGTHS = (1, 4, 16), (1, 10, 50, 150, 500)


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
        tuple((batch, length) for batch in BATCHES for length in LENGTHS),
        label=f"2 layers, both directions, {WIDTH} wide",
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
        case = case_of(name)
        content[name] = rows_of(case, arguments.threads, arguments.rounds)
        tables.append(report(case, content[name], arguments.threads))
        show(tables[-1:])
    save("recurrent", content, tables, arguments.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
