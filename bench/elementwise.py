"""Kernels that are not products, against torch eager: `python -m bench.elementwise`.

Each case is one op, or a few that fuse, compiled once with every dim dynamic and timed
at three sizes, by turns with eager. A ratio above 1 is in Pliant's favour. Writes
bench/results/elementwise.json and bench/results/elementwise.md; a run over chosen cases
is only printed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import pliant
from bench.script import against_eager, parts_by_threads, save, tell
from pliant.compare.accuracy import error
from pliant.compare.tables import Report
from pliant.compare.timing import ROUNDS, Spread, geomean_spread

SIZES = {"1k": 1 << 10, "64k": 1 << 16, "4M": 1 << 22}  # elements, about
TOLERANCE = 2e-4
MINUTES = 2  # for one thread


@dataclass(frozen=True, slots=True)
class ElementwiseCase:
    """A function, and its inputs for a given number of elements."""

    function: Callable[..., Any]
    inputs: Callable[[int], tuple[Tensor, ...]]
    dims: tuple[dict[int, str], ...]


class Apply(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: Tensor) -> Any:
        return self.function(*given)


def rows(width: int, count: int = 1) -> Callable[[int], tuple[Tensor, ...]]:
    """`count` tensors (rows, width)."""
    return lambda size: tuple(
        torch.randn(max(size // width, 1), width) for _ in range(count)
    )


def heads(size: int) -> tuple[Tensor, ...]:
    return (torch.randn(1, max(size // 768, 1), 12, 64),)


def image(size: int) -> tuple[Tensor, ...]:
    side = max(round((size / 64) ** 0.5), 1)
    return (torch.randn(1, 64, side, side),)


def square(size: int) -> tuple[Tensor, ...]:
    side = round(size**0.5)
    return (torch.randn(side, side),)


def rope_inputs(size: int) -> tuple[Tensor, ...]:
    seq = max(size // 768, 1)
    return (torch.randn(1, 12, seq, 64), torch.randn(seq, 64), torch.randn(seq, 64))


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def table_inputs(size: int) -> tuple[Tensor, ...]:
    return (torch.randn(5000, 256), torch.randint(0, 5000, (max(size // 256, 1),)))


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def with_vectors(width: int, count: int) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda size: (
        torch.randn(max(size // width, 1), width),
        *(torch.randn(width) for _ in range(count)),
    )


TWO = {0: "rows", 1: "columns"}
HEADS = {0: "batch", 1: "seq"}
IMAGE = {0: "batch", 2: "height", 3: "width"}
CASES: dict[str, ElementwiseCase] = {
    "add": ElementwiseCase(lambda x, y: x + y, rows(256, 2), (TWO, TWO)),
    "silu(x) * y": ElementwiseCase(
        lambda x, y: F.silu(x) * y, rows(256, 2), (TWO, TWO)
    ),
    "gelu": ElementwiseCase(F.gelu, rows(256), (TWO,)),
    "gelu, tanh": ElementwiseCase(
        lambda x: F.gelu(x, approximate="tanh"), rows(256), (TWO,)
    ),
    "rope": ElementwiseCase(rope, rope_inputs, ({2: "seq"}, {0: "seq"}, {0: "seq"})),
    **{
        f"softmax, rows of {width}": ElementwiseCase(
            lambda x: x.softmax(-1), rows(width), (TWO,)
        )
        for width in (7, 64, 128, 768)
    },
    **{
        f"layer norm, rows of {width}": ElementwiseCase(
            lambda x, w, b, width=width: F.layer_norm(x, (width,), w, b),
            with_vectors(width, 2),
            ({0: "rows"}, {}, {}),
        )
        for width in (7, 64, 128, 768)
    },
    "rms norm, rows of 768": ElementwiseCase(
        rms_norm, with_vectors(768, 1), (TWO, {0: "columns"})
    ),
    "group norm, 8 groups": ElementwiseCase(
        lambda x: F.group_norm(x, 8), image, (IMAGE,)
    ),
    "transpose": ElementwiseCase(lambda x: x.t().contiguous(), square, (TWO,)),
    "(B,S,H,D) to (B,H,S,D)": ElementwiseCase(
        lambda x: x.transpose(1, 2).contiguous(), heads, (HEADS,)
    ),
    "NCHW to NHWC": ElementwiseCase(
        lambda x: x.permute(0, 2, 3, 1).contiguous(), image, (IMAGE,)
    ),
    "NHWC to NCHW": ElementwiseCase(
        lambda x: x.permute(0, 3, 1, 2).contiguous(),
        lambda size: (image(size)[0].permute(0, 2, 3, 1).contiguous(),),
        ({0: "batch", 1: "height", 2: "width"},),
    ),
    "concat": ElementwiseCase(
        lambda x, y: torch.cat((x, y), 1), rows(256, 2), (TWO, TWO)
    ),
    "slice": ElementwiseCase(lambda x: x[:, 3:-5] * 2, rows(256), (TWO,)),
    "embedding": ElementwiseCase(
        lambda table, i: F.embedding(i, table), table_inputs, ({}, {0: "count"})
    ),
    "sum, all": ElementwiseCase(lambda x: x.sum(), rows(256), (TWO,)),
    "mean, last": ElementwiseCase(lambda x: x.mean(-1), rows(256), (TWO,)),
    "mean, rows": ElementwiseCase(lambda x: x.mean(0), rows(256), (TWO,)),
    "max, all": ElementwiseCase(lambda x: x.amax(), rows(256), (TWO,)),
    "max, last": ElementwiseCase(lambda x: x.amax(-1), rows(256), (TWO,)),
    "argmax, last": ElementwiseCase(lambda x: x.argmax(-1), rows(256), (TWO,)),
    "argmax, all": ElementwiseCase(lambda x: x.argmax(), rows(256), (TWO,)),
    "cumsum, last": ElementwiseCase(lambda x: x.cumsum(-1), rows(256), (TWO,)),
    "cumsum, rows": ElementwiseCase(lambda x: x.cumsum(0), rows(256), (TWO,)),
}


def measure(
    name: str, threads: int, rounds: int, options: pliant.Options
) -> list[dict[str, Any]]:
    case = CASES[name]
    torch.set_num_threads(threads)
    module = Apply(case.function)
    model = pliant.compile(
        module,
        case.inputs(1 << 14),
        (case.dims,),
        threads=threads,
        options=options,
    )
    row: dict[str, Any] = {"case": name, "sizes": {}}
    for label, size in SIZES.items():
        torch.manual_seed(0)
        given = case.inputs(size)
        wanted = case.function(*given)
        if (found := error(model(*given), wanted)) > TOLERANCE * size**0.5:
            raise SystemExit(f"{name}, {label}: error {found:.3g}")
        row["sizes"][label] = against_eager(model, module, given, rounds)
    return [row]


def report(kept: list[dict[str, Any]], threads: int) -> Report:
    columns = ["case", *(f"{label}: µs; eager / ours" for label in SIZES)]
    lines = []
    for row in kept:
        cells = [row["case"]]
        for label in SIZES:
            cell = row["sizes"][label]
            median = cell["pliant_us"]["median"]
            cells.append(f"{median:.1f}; {Spread(**cell['ratio']).text()}")
        lines.append(tuple(cells))
    found = ([Spread(**row["sizes"][s]["ratio"]) for row in kept] for s in SIZES)
    lines.append(("geomean", *(geomean_spread(each).text() for each in found)))
    title = f"{threads} thread(s): median, and the 95% interval of the ratio's"
    return Report(title, tuple(columns), tuple(lines))


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.elementwise", description=__doc__)
    parser.add_argument("cases", nargs="*", help="parts of names; none means all")
    parser.add_argument("--threads", type=int, action="append")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--no-variants", action="store_true")
    arguments = parser.parse_args()
    options = pliant.Options(variants=not arguments.no_variants)
    wanted = arguments.cases
    names = [n for n in CASES if not wanted or any(w in n for w in wanted)]
    tell(MINUTES, f"{len(CASES)} cases")
    content, tables = parts_by_threads(
        arguments.threads or [1],
        names,
        partial(measure, rounds=arguments.rounds, options=options),
        report,
    )
    if not wanted and not arguments.no_variants:
        save("elementwise", content, tables, arguments.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
