"""Attention against torch's scaled_dot_product_attention: `python -m bench.attention`.

Twelve heads, one thread unless told otherwise. Each case is compiled once with batch
and lengths dynamic, then timed by turns with torch's op on the same tensors. Errors
are against float64. A ratio above 1 is in Pliant's favour.
Writes bench/results/attention.json and bench/results/attention.md; a run over chosen
cases is only printed.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from functools import cache
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import pliant
from bench.script import add_timing_arguments, save, show, tell
from pliant.compare.accuracy import error
from pliant.compare.tables import Report
from pliant.compare.timing import Spread, geomean_spread, interleaved, ratios

HEADS = 12
MINUTES = 15
MASKS = ("none", "causal", "additive", "bool")
LENGTHS = (7, 32, 100, 128, 257, 500, 1024, 4096)


@dataclass(frozen=True, slots=True)
class AttentionCase:
    mask: str
    head: int
    batch: int
    queries: int
    keys: int

    @property
    def name(self) -> str:
        return f"{self.batch} x {HEADS} x {self.queries} x {self.keys} x {self.head}"


@dataclass(frozen=True, slots=True)
class AttentionTimes:
    case: AttentionCase
    pliant_us: float
    torch_us: float
    error: float
    torch_error: float
    ratio: Spread


class AttentionLayer(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Tensor:
        return scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal)


def inputs(case: AttentionCase) -> tuple[Tensor, ...]:
    lead = (case.batch, HEADS)
    lengths = (case.queries, case.keys, case.keys)
    tensors = [torch.randn(*lead, length, case.head) for length in lengths]
    grid = (case.batch, 1, case.queries, case.keys)
    if case.mask == "additive":
        tensors.append(torch.randn(grid))
    if case.mask == "bool":
        tensors.append(torch.rand(grid) > 0.3)
    return tuple(tensors)


@cache
def compiled(mask: str, head: int, threads: int) -> pliant.CompiledModel:
    keys = "queries" if mask == "causal" else "keys"
    read = {0: "batch", 2: keys}
    dims: list[dict[int, str]] = [{0: "batch", 2: "queries"}, read, read]
    if mask in ("additive", "bool"):
        dims.append({0: "batch", 2: "queries", 3: keys})
    example = AttentionCase(mask, head, 2, 13, 13 if mask == "causal" else 17)
    model = AttentionLayer(mask == "causal")
    return pliant.compile(model, inputs(example), tuple(dims), threads=threads)


def cases(masks: list[str], heads: list[int], quick: bool) -> list[AttentionCase]:
    found = []
    for mask in masks:
        for head in heads:
            for batch in (1, 8):
                for length in LENGTHS:
                    large = length > 1024 and (batch > 1 or head != 64 or quick)
                    if not large:
                        found.append(AttentionCase(mask, head, batch, length, length))
            if mask != "causal":
                for queries, keys in ((1, 500), (1, 4096), (4, 4096)):
                    found.append(AttentionCase(mask, head, 1, queries, keys))
    return found


def measured(case: AttentionCase, threads: int, rounds: int) -> AttentionTimes:
    model = compiled(case.mask, case.head, threads)
    given, eager = inputs(case), AttentionLayer(case.mask == "causal")
    wide = tuple(x.double() if x.is_floating_point() else x for x in given)
    with torch.inference_mode():
        truth = eager(*wide)
        mine, theirs = error(model(*given), truth), error(eager(*given), truth)
        calls = {"pliant": lambda: model(*given), "torch": lambda: eager(*given)}
        samples = interleaved(calls, rounds)
    middle = {name: median(seconds) * 1e6 for name, seconds in samples.items()}
    ratio = ratios(samples["torch"], samples["pliant"])
    return AttentionTimes(case, middle["pliant"], middle["torch"], mine, theirs, ratio)


def report(results: list[AttentionTimes], title: str) -> Report:
    rows = [
        (
            f"{r.case.name}, {r.case.mask}",
            f"{r.pliant_us:.1f}",
            f"{r.torch_us:.1f}",
            r.ratio.text(),
            f"{r.error:.1e}",
            f"{r.torch_error:.1e}",
        )
        for r in results
    ]
    found = [r.ratio for r in results]
    least = min(found, key=lambda each: each.median)
    rows.append(("geomean", "", "", geomean_spread(found).text(), "", ""))
    rows.append(("least", "", "", least.text(), "", ""))
    columns = ("batch x heads x queries x keys x head size", "pliant µs", "torch µs")
    return Report(title, (*columns, "ratio", "error", "torch's"), tuple(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--masks", nargs="*", choices=MASKS)
    parser.add_argument("--heads", nargs="*", type=int)
    add_timing_arguments(parser)
    parser.add_argument("--quick", action="store_true", help="lengths up to 1024")
    options = parser.parse_args()
    torch.manual_seed(0)
    tell(MINUTES, "all masks, head sizes and lengths")
    torch.set_num_threads(options.threads)
    chosen = cases(
        options.masks or list(MASKS), options.heads or [32, 64, 80, 128], options.quick
    )
    results = [measured(c, options.threads, options.rounds) for c in chosen]
    table = report(results, f"Attention, {options.threads} thread(s)")
    show([table])
    if not (options.masks or options.heads or options.quick):
        rows = [asdict(r) for r in results]
        save("attention", {"results": rows}, [table], options.rounds)


if __name__ == "__main__":
    main()
