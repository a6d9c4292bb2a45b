"""Attention's gradients against torch's: `python -m bench.attention_backward`.

Twelve heads, one thread unless told otherwise. The op is compiled once for all batches
and lengths, then timed by turns with torch's
`_scaled_dot_product_flash_attention_for_cpu_backward` on the same tensors. Errors are
the largest of the three gradients' against float64. The last columns are the forward
pass with and without the sums that gradients need.
Writes bench/results/attention_backward.md; a run over chosen cases is only printed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import pliant
from bench.attention import HEADS
from bench.script import add_timing_arguments, save, show, tell
from pliant.compare.accuracy import error
from pliant.compare.tables import Report
from pliant.compare.timing import geomean, medians
from pliant.ir.build import Builder
from pliant.ir.graph import Module, Value
from pliant.ir.types import DType, tensor
from pliant.sym import sym

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
SIZES = ((1, 128), (4, 128), (1, 500), (4, 512), (1, 1024), (1, 2048))


@dataclass(frozen=True, slots=True)
class GradientCase:
    causal: bool
    head: int
    batch: int
    length: int


@dataclass(frozen=True, slots=True)
class GradientTimes:
    case: GradientCase
    pliant_ms: float
    torch_ms: float
    error: float
    torch_error: float
    forward_us: float
    with_sums_us: float


def builder(head: int, names: str) -> tuple[Builder, list[Value]]:
    b = Builder()
    kind = tensor(DType.F32, sym("batch"), HEADS, sym("length"), head)
    return b, [b.param(name, kind) for name in names]


@cache
def backward(causal: bool, head: int, threads: int) -> pliant.CompiledModel:
    b, (grad, out, q, k, v) = builder(head, "goqkv")
    lse = b.param("lse", tensor(DType.F32, *q.shape[:-1]))
    grads = b.emit_multi("attention_backward", grad, out, lse, q, k, v, causal=causal)
    return pliant.compile(Module({"main": b.finish("main", grads)}), threads=threads)


@cache
def forward(op: str, causal: bool, head: int, threads: int) -> pliant.CompiledModel:
    b, operands = builder(head, "qkv")
    made = b.emit_multi(op, *operands, causal=causal)
    return pliant.compile(Module({"main": b.finish("main", made)}), threads=threads)


def exact(case: GradientCase, grad: Tensor, *operands: Tensor) -> list[Tensor]:
    q, k, v = (x.double().requires_grad_() for x in operands)
    out = scaled_dot_product_attention(q, k, v, is_causal=case.causal)
    return list(torch.autograd.grad(out, (q, k, v), grad.double()))


def measured(case: GradientCase, threads: int, rounds: int) -> GradientTimes:
    shape = (case.batch, HEADS, case.length, case.head)
    grad, q, k, v = (torch.randn(shape) for _ in range(4))
    out, lse = FORWARD(q, k, v, 0.0, case.causal)[:2]
    lse = lse.contiguous()
    model = backward(case.causal, case.head, threads)
    fixed = case.causal, case.head, threads
    plain, summed = (forward(op, *fixed) for op in ("attention", "attention_lse"))
    calls: dict[str, Callable[[], Any]] = {
        "pliant": lambda: model(grad, out, q, k, v, lse),
        "torch": lambda: BACKWARD(grad, q, k, v, out, lse, 0.0, case.causal),
    }
    truth = exact(case, grad, q, k, v)
    mine, theirs = (
        max(error(a, b) for a, b in zip(call(), truth, strict=True))
        for call in calls.values()
    )
    found = medians(calls, rounds)
    ahead = {"plain": lambda: plain(q, k, v), "summed": lambda: summed(q, k, v)}
    found |= medians(ahead, rounds)
    return GradientTimes(
        case,
        found["pliant"] * 1e3,
        found["torch"] * 1e3,
        mine,
        theirs,
        found["plain"] * 1e6,
        found["summed"] * 1e6,
    )


def report(results: list[GradientTimes], title: str) -> Report:
    rows = [
        (
            f"{r.case.batch} x {HEADS} x {r.case.length} x {r.case.head}"
            + (", causal" if r.case.causal else ""),
            f"{r.pliant_ms:.2f}",
            f"{r.torch_ms:.2f}",
            f"{r.torch_ms / r.pliant_ms:.2f}",
            f"{r.error:.1e}",
            f"{r.torch_error:.1e}",
            f"{r.forward_us:.0f}",
            f"{r.with_sums_us:.0f}",
        )
        for r in results
    ]
    ratios = [r.torch_ms / r.pliant_ms for r in results]
    rows.append(("geomean", "", "", f"{geomean(ratios):.2f}", "", "", "", ""))
    rows.append(("least", "", "", f"{min(ratios):.2f}", "", "", "", ""))
    columns = ("batch x heads x length x head size", "pliant ms", "torch ms", "ratio")
    more = ("error", "torch's", "forward µs", "with sums µs")
    return Report(title, (*columns, *more), tuple(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", nargs="*", type=int)
    parser.add_argument("--lengths", nargs="*", type=int)
    add_timing_arguments(parser)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    tell(2, "twelve cases")
    lengths = options.lengths or [length for _, length in SIZES]
    chosen = [
        GradientCase(causal, head, batch, length)
        for head in options.heads or [64]
        for causal in (False, True)
        for batch, length in SIZES
        if length in lengths
    ]
    results = [measured(c, options.threads, options.rounds) for c in chosen]
    table = report(results, f"Attention's gradients, {options.threads} thread(s)")
    show([table])
    if not (options.heads or options.lengths):
        rows = [asdict(r) for r in results]
        save("attention_backward", {"results": rows}, [table], options.rounds)


if __name__ == "__main__":
    main()
