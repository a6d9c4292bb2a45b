"""Matrix products against MKL and OpenBLAS: `python -m bench.gemm`, `make bench-gemm`.

Shapes are log-uniform in 1..4096 for M, N and K; the seed is the clock's and printed.
Two modes: `packed`, a weight known when compiling (one compile for each N, K), and
`dynamic`, both operands known at the call (one compile for all).

From 2^18 multiply-adds on, what is timed is a call from Python that allocates its
result: ours, torch.mm, F.linear, numpy.matmul. Below that it is the kernel alone,
repeated in machine code on memory that is there: our host flow, and the sgemm that
torch and NumPy call, B stored either way; such shapes are also timed as Python calls,
given apart. A ratio is the fastest peer's time over ours.
Writes bench/results/gemm.json and gemm.md; a run over fewer shapes is only printed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import sqrt
from statistics import median, quantiles
from time import perf_counter, time_ns
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import pliant
from bench.gemm_tables import GemmRow, Limits, Vector, tables
from bench.native import (
    blas_libraries,
    blas_product,
    host_flow,
    set_peer_threads,
)
from bench.script import save, show, tell
from bench.shapes import Shape, random_shapes
from pliant.compare.tables import console
from pliant.compare.timing import ROUNDS, Pace, Spread, Timed, by_turns, called, turn
from pliant.ir.build import Builder
from pliant.ir.graph import Constant, Module
from pliant.ir.types import DType, tensor
from pliant.kernels.choose import executed
from pliant.kernels.mix import ProductPlan
from pliant.machine.target import host
from pliant.measure.probes import _read_work, _seconds, measured
from pliant.sym import sym

THROUGH_THE_API = 1 << 18  # multiply-adds
SHAPES, SHAPE_SECONDS = 80, 2.5  # how many by default, and seconds for each
TURN_SECONDS = 0.001
FEWEST_ROUNDS, MOST_ROUNDS = ROUNDS, 2 * ROUNDS
UNSURE = 0.02  # a ratio with a larger relative error is measured further
PATIENCE = 10  # for at most this many times the requested seconds
MOST_CALLS = 20_000
VECTOR_ROWS = (1, 2, 3, 4)
VECTOR_WEIGHT = (8192, 16384)  # (N, K): 512 MiB, beyond any cache
OURS = "pliant"
UNIT = 2.0**-24


# ---- what is compared


@dataclass(frozen=True, slots=True)
class BuiltProduct:
    """A product, compiled, and how the compiler chose to cut it."""

    model: pliant.CompiledModel
    plan: ProductPlan

    def executed(self, shape: Shape, threads: int) -> float:
        """Multiply-adds that the lanes execute, divided by those needed."""
        m, n, k = shape.m, shape.n, shape.k
        cut = self.plan.at({"m": m, "n": n, "k": k}, threads)
        return executed(m, n, k, cut.dot == 1, self.plan.tile) / shape.work


def compiled(weight: torch.Tensor | None) -> BuiltProduct:
    """x W^T with the (N, K) weight packed, or x y with every size dynamic."""
    b = Builder()
    m, n, k = sym("m"), sym("n"), sym("k")
    if weight is None:
        x = b.param("x", tensor(DType.F32, m, k))
        result = b.matmul(x, b.param("y", tensor(DType.F32, k, n)))
    else:
        x = b.param("x", tensor(DType.F32, m, weight.shape[1]))
        kind = tensor(DType.F32, *weight.shape)
        held = b.constant(Constant("weight", kind, weight.numpy()))
        result = b.matmul(x, b.swap(held, 0, 1))
    module = Module({"main": b.finish("main", [result])}, constants=dict(b.constants))
    model = pliant.compile(module, threads=2)
    ((plan,),) = model.program.lowered.plans.values()
    assert isinstance(plan, ProductPlan)
    return BuiltProduct(model, plan)


@dataclass(slots=True)
class ProductOperands:
    """A (M, K), B stored as (K, N) and as (N, K), and a buffer for the result."""

    a: torch.Tensor
    b: torch.Tensor
    turned: torch.Tensor
    c: torch.Tensor

    @staticmethod
    def of(shape: Shape) -> ProductOperands:
        turned = torch.randn(shape.n, shape.k)
        return ProductOperands(
            torch.randn(shape.m, shape.k),
            turned.t().contiguous(),
            turned,
            torch.empty(shape.m, shape.n),
        )


def python_calls(
    mode: str, model: pliant.CompiledModel, x: ProductOperands
) -> dict[str, Timed]:
    a, b, turned = x.a, x.b, x.turned
    left, right = a.numpy(), b.numpy()
    calls: dict[str, Timed] = {
        OURS: called(lambda: model(a) if mode == "packed" else model(a, b)),
        "torch.mm": called(lambda: torch.mm(a, b)),
        "numpy.matmul": called(lambda: np.matmul(left, right)),
    }
    if mode == "packed":
        calls["F.linear"] = called(lambda: F.linear(a, turned))
    return calls


def kernels(
    mode: str, model: pliant.CompiledModel, x: ProductOperands, threads: int
) -> dict[str, Timed]:
    a, b, turned, c = (t.numpy() for t in (x.a, x.b, x.turned, x.c))
    inputs = [a] if mode == "packed" else [a, b]
    found: dict[str, Timed] = {OURS: host_flow(model, inputs, c, threads)}
    for library in blas_libraries():
        found[library.name] = blas_product(library, a, b, c, False)
        if mode == "packed":
            found[f"{library.name} turned"] = blas_product(library, a, turned, c, True)
    return found


def check(mode: str, model: pliant.CompiledModel, x: ProductOperands) -> None:
    """Compares with torch: within twice the rounding error of a sum of K products."""
    got = model(x.a) if mode == "packed" else model(x.a, x.b)
    terms = x.a.shape[1] * UNIT
    sizes = x.a.double().norm(dim=1)[:, None] * x.b.double().norm(dim=0)
    allowed = 2 * terms / (1 - terms) * sizes
    if not ((got - torch.mm(x.a, x.b)).abs() <= allowed).all():
        raise SystemExit(f"wrong result: {mode} {tuple(x.a.shape)} {tuple(x.b.shape)}")


# ---- timing


def samples_of(
    calls: Mapping[str, Timed], seconds: float, threads: int
) -> dict[str, list[float]]:
    """Seconds per call of each, one sample per round; more rounds if they scatter."""
    pace = Pace(TURN_SECONDS, MOST_CALLS, pause=threads > 1)

    def enough(samples: Mapping[str, Sequence[float]]) -> bool:
        if len(samples[OURS]) < FEWEST_ROUNDS:
            return False
        spent = sum(max(each, TURN_SECONDS) for x in samples.values() for each in x)
        return spent > (PATIENCE * seconds if unsure(samples) else seconds)

    turns = {name: turn(call, pace) for name, call in calls.items()}
    return by_turns(turns, MOST_ROUNDS, enough)


def over_ours(samples: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """The time of each peer divided by ours, one ratio per round."""
    ours = samples[OURS]
    return {
        name: [t / u for t, u in zip(times, ours, strict=True)]
        for name, times in samples.items()
        if name != OURS
    }


def best_peer(samples: Mapping[str, Sequence[float]]) -> tuple[str, Spread]:
    """The fastest peer, and its time over ours."""
    found = {name: Spread.of(each) for name, each in over_ours(samples).items()}
    name = min(found, key=lambda peer: found[peer].median)
    return name, found[name]


def unsure(samples: Mapping[str, Sequence[float]]) -> bool:
    """Whether the fastest peer's median ratio has too large a standard error."""
    ratios = over_ours(samples)[best_peer(samples)[0]]
    low, middle, high = quantiles(ratios, n=4)
    # Of a normal distribution, quartiles are 1.35 standard deviations apart, and a
    # median scatters 1.25 times as much as a mean.
    return 1.25 * (high - low) / 1.35 / middle > UNSURE * sqrt(len(ratios))


def measure(
    mode: str, built: BuiltProduct, x: ProductOperands, threads: int, seconds: float
) -> GemmRow:
    (m, k), n = x.a.shape, x.b.shape[1]
    model, shape = built.model, Shape(m, n, k)
    set_peer_threads(threads)
    model._runtime.set_threads(threads)
    check(mode, model, x)
    api = python_calls(mode, model, x)
    small = shape.work < THROUGH_THE_API
    timed = kernels(mode, model, x, threads) if small else api
    samples = samples_of(timed, seconds, threads)
    peer, ratio = best_peer(samples)
    as_called = None
    if small:
        as_called = best_peer(samples_of(api, seconds, threads))[1].median
    times = {name: median(found) for name, found in samples.items()}
    ours = times.pop(OURS)
    share = built.executed(shape, threads)
    return GemmRow(mode, threads, shape, ours, peer, ratio, as_called, times, share)


def sweep(
    shapes: Sequence[Shape],
    modes: Sequence[str],
    threads: Sequence[int],
    seconds: float,
) -> Iterator[GemmRow]:
    dynamic = compiled(None)
    for shape in shapes:
        x = ProductOperands.of(shape)
        for mode in modes:
            built = compiled(x.turned) if mode == "packed" else dynamic
            for count in threads:
                yield measure(mode, built, x, count, seconds)


def limits_of(threads: Sequence[int]) -> list[Limits]:
    found = measured(host(), refresh=True)
    one = (found.fma_gflops_1, found.read_gbs_1)
    every = (found.fma_gflops_all, found.read_gbs_all)
    return [
        Limits(t, *(1e9 * rate for rate in (one if t == 1 else every))) for t in threads
    ]


def reads(model: pliant.CompiledModel, threads: int) -> Timed:
    """Reads the packed weight of a model and does nothing else, at full speed."""
    (held,) = model._weights.arrays
    weight = np.asarray(held.reshape(-1), np.float32)
    work, _ = _read_work(host(), weight, weight.nbytes // threads)
    return partial(_seconds, work, threads)


def vectors(threads: Sequence[int]) -> list[Vector]:
    """A few rows times a weight larger than the caches: how fast the weight is read."""
    n, k = VECTOR_WEIGHT
    weight = torch.randn(n, k)
    model = compiled(weight).model
    found: list[Vector] = []
    for count in threads:
        set_peer_threads(count)
        model._runtime.set_threads(count)
        for m in VECTOR_ROWS:
            a = torch.randn(m, k)
            calls: dict[str, Timed] = {
                OURS: called(partial(model, a)),
                "F.linear": called(partial(F.linear, a, weight)),
                "read": reads(model, count),
            }
            times = {
                name: median(samples)
                for name, samples in samples_of(calls, 1.0, count).items()
            }
            rates = (weight.nbytes / times[name] for name in (OURS, "F.linear", "read"))
            found.append(Vector(count, m, n, k, *rates))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.gemm", description=__doc__)
    parser.add_argument("--shapes", type=int, default=SHAPES)
    parser.add_argument("--seed", type=int, help="default: the clock")
    parser.add_argument("--modes", nargs="+", default=["packed", "dynamic"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=0.06, help="per measurement")
    parser.add_argument("--no-vectors", action="store_true", help="leave out GEMV")
    arguments = parser.parse_args()
    seed = time_ns() % 2**32 if arguments.seed is None else arguments.seed
    shapes = random_shapes(arguments.shapes, seed)
    terminal = console()
    terminal.print(f"{len(shapes)} shapes, seed {seed}", highlight=False)
    tell(1 + len(shapes) * SHAPE_SECONDS / 60, "all of them")
    started = perf_counter()
    torch.manual_seed(seed)
    with torch.inference_mode():
        limits = limits_of(arguments.threads)
        rows = []
        for row in sweep(shapes, arguments.modes, arguments.threads, arguments.seconds):
            rows.append(row)
            if sys.stderr.isatty():
                print(f"\r{len(rows)} {row.shape}\033[K", end="", file=sys.stderr)
        streams = [] if arguments.no_vectors else vectors(arguments.threads)
    reports = tables(rows, limits, streams)
    show(reports)
    took = f"{len(shapes)} shapes, seed {seed}, {perf_counter() - started:.0f} s"
    terminal.print(took, highlight=False)
    content: dict[str, Any] = {"seed": seed, "limits": [asdict(x) for x in limits]}
    content |= {"rows": [asdict(r) for r in rows]}
    content |= {"vectors": [asdict(v) for v in streams]}
    if len(shapes) >= SHAPES and not arguments.no_vectors:
        save("gemm", content, reports, FEWEST_ROUNDS, [took])
    return 0


if __name__ == "__main__":
    sys.exit(main())
