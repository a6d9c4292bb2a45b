"""FTuner: products of changing size against the vendor's library, without tuning."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import torch

import pliant
import zoo
from bench import gemm
from bench.gemm_tables import GemmRow
from bench.papers import PaperResult, Run
from bench.script import against_eager, check
from bench.shapes import Shape
from pliant.compare.accuracy import eager
from pliant.compare.tables import Report
from pliant.compare.timing import Spread, geomean_spread

MINUTES = 3.0
ROWS, K, N = 16, 768, 2304  # 16 T rows
TS = tuple(range(1, 129))
USUAL = 33  # usual number of them
PAPER_TS = (5, 24, 43, 62, 81, 100, 119, 128)  # the paper's choice
HEADS, HEAD = 16 * 12, 64  # a batch of 16 in BERT-base
BERT_TS, BERT_BATCH, BERT_LAYERS = (5, 24, 62, 128), 16, 4
GROUPS = ((1, 16), (17, 64), (65, 128))
SECONDS = 0.02  # of timing per product, but at least 15 rounds
# Seconds of tuning in the paper's artefact: Ansor, then FTuner (GPU, 128 shapes).
PUBLISHED = {"dense": (6872, 149), "batched": (13549, 193), "BERT": (69518, 474)}
KERNEL_STAGES = ("lower", "codegen", "compile")


class Scores(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.bmm(q, k.transpose(1, 2))


class Weighted(torch.nn.Module):
    def forward(self, p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.bmm(p, v)


def run(given: Run) -> PaperResult:
    os.environ["PLIANT_CACHE"] = "off"  # kernels are chosen and built here
    tuning: dict[str, dict[str, Any]] = {}
    with torch.inference_mode():
        rows = dense(given, tuning)
        batched = batched_products(given, tuning)
    bert = bert_rows(given, tuning)
    content = {
        "dense": [asdict(row) for row in rows],
        "batched": batched,
        "bert": bert,
        "tuning": tuning,
    }
    tables = [
        dense_table(rows, given.threads),
        ratio_table("Batched products, against torch.bmm", batched, given.threads),
        ratio_table(
            f"BERT, {BERT_LAYERS} layers, random weights, batch {BERT_BATCH}, against "
            "torch eager",
            bert,
            given.threads,
        ),
        tuning_table(tuning),
    ]
    return PaperResult(content, tables, given.rounds, [tvm_note()])


def kernel_seconds(model: pliant.CompiledModel) -> float:
    """Choosing, emitting and building: all that could be called tuning."""
    seconds = model.stats()["stage_seconds"]
    return float(sum(seconds.get(stage, 0.0) for stage in KERNEL_STAGES))


def dense(given: Run, tuning: dict[str, dict[str, Any]]) -> list[GemmRow]:
    weight = torch.randn(N, K)
    built = {"packed": gemm.compiled(weight), "dynamic": gemm.compiled(None)}
    seconds = sum(kernel_seconds(each.model) for each in built.values())
    tuning["dense"] = {"seconds": seconds, "shapes": len(TS)}
    rows = []
    for t in given.some(TS, USUAL):
        print(f"  dense, T = {t}", file=sys.stderr)
        x = gemm.ProductOperands(
            torch.randn(ROWS * t, K),
            weight.t().contiguous(),
            weight,
            torch.empty(ROWS * t, N),
        )
        for mode, each in built.items():
            rows.append(gemm.measure(mode, each, x, given.threads, SECONDS))
    return rows


def batched_products(
    given: Run, tuning: dict[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    dims = {0: "heads", 1: "t"}
    q = torch.randn(2, 7, HEAD)
    scores = pliant.compile(Scores(), (q, q), (dims, dims), threads=given.threads)
    weighted = pliant.compile(
        Weighted(),
        (torch.randn(2, 7, 7), q),
        ({0: "heads", 1: "t", 2: "t"}, dims),
        threads=given.threads,
    )
    seconds = kernel_seconds(scores) + kernel_seconds(weighted)
    tuning["batched"] = {"seconds": seconds, "shapes": 2 * len(PAPER_TS)}
    found = []
    for t in given.some(PAPER_TS, len(PAPER_TS)):
        print(f"  batched, T = {t}", file=sys.stderr)
        q, v = torch.randn(HEADS, t, HEAD), torch.randn(HEADS, t, HEAD)
        p = torch.randn(HEADS, t, t)
        cases: tuple[tuple[str, Any, torch.nn.Module, tuple[torch.Tensor, ...]], ...]
        cases = (
            (f"{HEADS} x {t} x {HEAD} x {t}", scores, Scores(), (q, v)),
            (f"{HEADS} x {t} x {t} x {HEAD}", weighted, Weighted(), (p, v)),
        )
        for name, model, module, inputs in cases:
            work = 2.0 * HEADS * t * t * HEAD
            found.append(compared(name, model, module, inputs, work, given.rounds))
    return found


def bert_rows(given: Run, tuning: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    case = zoo.build("bert", layers=BERT_LAYERS)
    model = case.compile(threads=given.threads)
    tuning["BERT"] = {"seconds": kernel_seconds(model), "shapes": None}
    found = []
    for t in given.some(BERT_TS, len(BERT_TS)):
        print(f"  BERT, T = {t}", file=sys.stderr)
        inputs = case.inputs(BERT_BATCH, t)
        name = f"({BERT_BATCH}, {t})"
        found.append(compared(name, model, case.model, inputs, 0.0, given.rounds))
    return found


def compared(
    name: str,
    model: Any,
    module: torch.nn.Module,
    inputs: tuple[torch.Tensor, ...],
    work: float,
    rounds: int,
) -> dict[str, Any]:
    """Times of a model and of eager, checked; `work` in floating-point operations."""
    wanted = eager(module, inputs)
    check(name, model(*inputs), wanted)
    found = against_eager(model, module, inputs, rounds)
    return {
        "case": name,
        **found,
        "gflops": work / found["pliant_us"]["median"] * 1e-3,
    }


# ---- reports


def dense_table(rows: Sequence[GemmRow], threads: int) -> Report:
    lines = []
    for mode in dict.fromkeys(row.mode for row in rows):
        for low, high in (*GROUPS, (1, 128)):
            found = [
                r for r in rows if r.mode == mode and low <= r.shape.m // ROWS <= high
            ]
            if not found:
                continue
            worst = min(found, key=lambda r: r.ratio)
            ours = median(r.flops for r in found) * 1e-9
            lines.append(
                (
                    f"{mode}, T = {low} to {high}",
                    str(len(found)),
                    f"{ours:.0f}",
                    geomean_spread([r.best for r in found]).text(),
                    f"{worst.ratio:.2f} at {worst.shape.m // ROWS}, {worst.peer}",
                    str(sum(r.ratio >= 1 for r in found)),
                )
            )
    shape = Shape(ROWS, N, K)
    columns = ("T", "sizes", "GFLOP/s", "x best peer", "worst", "ahead in")
    name = (
        f"Dense 16T x {shape.k} x {shape.n}: against the fastest of torch.mm, F.linear "
        f"and numpy.matmul, {threads} threads"
    )
    return Report(name, columns, tuple(lines))


def ratio_table(title: str, rows: Sequence[dict[str, Any]], threads: int) -> Report:
    lines = [
        (
            row["case"],
            f"{row['pliant_us']['median']:.0f}",
            f"{row['eager_us']['median']:.0f}",
            Spread(**row["ratio"]).text(),
            f"{row['gflops']:.0f}" if row["gflops"] else "",
        )
        for row in rows
    ]
    found = [Spread(**row["ratio"]) for row in rows]
    lines.append(("geomean", "", "", geomean_spread(found).text(), ""))
    columns = ("case", "pliant µs", "torch µs", "x torch", "GFLOP/s")
    return Report(f"{title}, {threads} threads", columns, tuple(lines))


def tuning_table(tuning: dict[str, dict[str, Any]]) -> Report:
    lines = []
    for name, told in tuning.items():
        ansor, ftuner = PUBLISHED[name]
        shapes = "every" if told["shapes"] is None else f"every, {told['shapes']} here"
        seconds = f"{told['seconds']:.2f}"
        lines.append((name, shapes, seconds, str(ftuner), str(ansor)))
    columns = (
        *("workload", "shapes served", "pliant: choosing and building"),
        *("FTuner's tuning, as published", "Ansor's, as published"),
    )
    return Report("Seconds before the first result", columns, tuple(lines))


def tvm_note() -> str:
    found = importlib.util.find_spec("tvm") is not None
    if found:
        return "TVM is installed here; its tuner is not part of this experiment."
    return (
        "TVM could not be imported here, so its tuner was not run; the published "
        "seconds are of the paper's artefact, on GPUs."
    )
