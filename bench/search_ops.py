"""Sorting, selecting and moving by index against peers: `python -m bench.search_ops`.

topk, sort, scatter_add, nonzero, cumsum and grid_sample, each a model of its own over
several sizes, against eager and ONNX Runtime. Each row is one interleaved run, and its
numbers are medians. 5 minutes for each count of threads. Writes
bench/results/search_ops.json and .md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bench.peers import report, rows_of
from bench.script import add_timing_arguments, save, show, tell
from pliant.cases import Case, Shape
from pliant.compare.tables import Report
from pliant.compare.timing import geomean

PEERS = ("eager", "onnxruntime")
ROWS: tuple[Shape, ...] = ((1, 100), (1, 50_000), (32, 1000), (64, 128), (512, 512))
IMAGES: tuple[Shape, ...] = ((1, 3, 32), (1, 16, 64), (2, 64, 56), (1, 3, 256))


class Function(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(*inputs)


def _rows(name: str, function: Callable[..., torch.Tensor], label: str) -> Case:
    return Case(
        name,
        Function(function),
        lambda rows, width: (torch.randn(rows, width),),
        ({0: "rows", 1: "width"},),
        ("rows", "width"),
        (3, 77),
        ROWS,
        label=label,
    )


def _scatter() -> Case:
    def inputs(rows: int, width: int) -> tuple[torch.Tensor, ...]:
        return torch.randint(0, 64, (rows, width)), torch.randn(rows, width)

    return Case(
        "scatter_add",
        Function(lambda i, x: x.new_zeros(x.shape[0], 64).scatter_add(1, i, x)),
        inputs,
        ({0: "rows", 1: "width"}, {0: "rows", 1: "width"}),
        ("rows", "width"),
        (3, 77),
        ROWS,
        label="rows into 64 places",
    )


def _grid() -> Case:
    def inputs(batch: int, channels: int, side: int) -> tuple[torch.Tensor, ...]:
        places = torch.rand(batch, side, side, 2) * 2 - 1
        return torch.randn(batch, channels, side, side), places

    sample = nn.functional.grid_sample
    return Case(
        "grid_sample",
        Function(lambda x, places: sample(x, places, align_corners=False)),
        inputs,
        (
            {0: "batch", 1: "channels", 2: "height", 3: "width"},
            {0: "batch", 1: "out_height", 2: "out_width"},
        ),
        ("batch", "channels", "side"),
        (2, 5, 7),
        IMAGES,
        label="bilinear",
    )


def cases() -> list[Case]:
    return [
        _rows("topk", lambda x: x.topk(8)[0], "8 of a row"),
        _rows("sort", lambda x: x.sort(1)[0], "rows"),
        _rows("nonzero", lambda x: (x > 0.5).nonzero(), "three in ten"),
        _rows("cumsum", lambda x: x.cumsum(1), "rows"),
        _scatter(),
        _grid(),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.search_ops", description=__doc__)
    add_timing_arguments(parser)
    arguments = parser.parse_args()
    tell(5, "ops that search and move")
    torch.set_num_threads(arguments.threads)
    content: dict[str, Any] = {}
    tables: list[Report] = []
    for case in cases():
        rows = rows_of(case, arguments.threads, arguments.rounds, PEERS)
        content[case.name] = rows
        tables.append(report(case, rows, arguments.threads))
        show(tables[-1:])
    gains = [row["gain"] for rows in content.values() for row in rows]
    print(f"all: x{geomean(gains):.2f} by geometric mean, least {min(gains):.2f}")
    save("search_ops", content, tables, arguments.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
