"""The search for regions in chunks: its sums and its choices, as they are defined."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pliant.context import Context
from pliant.frontend.torch_export import export_module, from_exported
from pliant.ir.graph import Value
from pliant.ir.parse import parse_module
from pliant.machine.target import named
from pliant.options import Options
from pliant.passes.chunk import Peaks, fixed_extents, points_of, steps_of
from pliant.passes.chunk_bytes import PointMemory
from pliant.passes.chunk_parts import apart
from pliant.passes.chunk_regions import FusedGraph, Need, Region, outer_runs
from pliant.pipeline import STAGES, run_stages
from pliant.sym import Facts, as_expr, sym

CX = Context(Options(), named("avx512"))
ROWS = 28


class Layer(nn.Module):
    """Attention, a feed-forward part, and values that several kernels read."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.up, self.down = (
            nn.Linear(*sizes) for sizes in ((64, 192), (64, 128), (128, 64))
        )
        self.norm = nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            self.qkv(self.norm(x)).unflatten(-1, (3, 1, 64)).permute(2, 0, 3, 1, 4)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v).squeeze(1)
        return x + self.down(self.up(x + y).relu())


class Pairs(nn.Module):
    """Products of two operands that are computed, along either of two sizes."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.exp().cumsum(1), x.sin().cumsum(1)
        square = (a @ b.transpose(1, 2)).softmax(-1)
        return (square @ a).tanh() + (square.transpose(1, 2) @ b).cumsum(1)


class Totals(nn.Module):
    """Sums over rows of what is wide, beside each other."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 640)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.head(x.sin())
        norm = y.square().sum((0, 1)).sqrt()
        return norm, y.flatten(0, 1).T @ x.flatten(0, 1) - 1, y.argmax(-1)


MODELS = {
    "totals": Totals,
    "layers": lambda: nn.Sequential(Layer(), Layer()),
    "pairs": Pairs,
}


def fused(name: str, *, heads: bool = False) -> FusedGraph:
    torch.manual_seed(0)
    model = MODELS[name]().eval().requires_grad_(False)
    dims = ({0: "batch", 1: "length"},)
    program, info = export_module(model, (torch.randn(2, 7, 64),), dims)
    graph = run_stages(from_exported(program, info).module, CX, "fuse").main
    facts = CX.facts(graph)
    parts = apart(graph, facts, heads=heads)
    return FusedGraph(parts.graph, facts, ROWS, parts.origin)


def memory_of(of: FusedGraph) -> PointMemory:
    return PointMemory(of, points_of(of.facts, ("batch", "length")))


def needs_of(region: Region) -> list[Need]:
    """What a region reads from outside."""
    made = {v for member in region.members for v in member.op.results}
    needs = (need for member in region.members for need in member.part.needs)
    return [need for need in dict.fromkeys(needs) if need[0] not in made]


def total(memory: PointMemory, values: Iterator[Value] | Sequence[Value]) -> float:
    return sum(float(memory.size(v)[0]) for v in values)


def written_over(memory: PointMemory, region: Region, ending: set[Value]) -> float:
    """Each result takes the place of an operand whose rows a round has read."""
    needs = needs_of(region)
    free = [
        (value.dtype, value.type.numel, outer_runs(value, cut))
        for value, cut in needs
        if cut is not None and value in ending
        if sum(other is value for other, _ in needs) == 1
    ]
    found = 0.0
    for value, cut in region.results.items():
        runs = value.dtype, value.type.numel, outer_runs(value, cut)
        if value in memory.last and cut is not None and runs in free:
            free.remove(runs)
            found += total(memory, [value])
    return found


@pytest.mark.parametrize("name", MODELS)
def test_sums_of_regions_that_grow(name: str) -> None:
    of = fused(name)
    memory = memory_of(of)
    steps = list(steps_of(of, memory))
    assert len(steps) > (5 if name == "totals" else 20)
    for step in steps:
        region, needs = step.region, needs_of(step.region)
        numbers = {memory.number[member.op] for member in region.members}
        assert (step.first, step.last) == (min(numbers), max(numbers))
        # Those in between run before or after: what is the region's own is not there.
        others = max(
            (
                memory.plain[k][0]
                - total(
                    memory,
                    [
                        v
                        for m in region.members
                        for v in m.own
                        if memory.number[m.op] < k <= memory.last[v]
                    ],
                )
                for k in set(range(step.first, step.last)) - numbers
            ),
            default=0.0,
        )
        assert step.others[0] == others
        cut = {value for value, rows in needs if rows is not None}
        rows_of = [v for v in region.results if v not in region.sums]
        copied = total(memory, [*cut, *rows_of])
        assert step.copied[0] == copied
        whole = [value for value, rows in needs if rows is None]
        again = 2 * total(memory, list(region.sums))  # read and written
        assert step.whole[0] == total(memory, whole) + again
        made = {v for member in region.members for v in member.op.results}
        own = made - region.results.keys()
        inner = 0.0
        for member in region.members:
            touched = {*map(of.base, member.op.operands), *member.op.results}
            inner = max(inner, total(memory, list(touched & own)))
        assert step.inner[0] == inner
        held = {
            v for v in (*(v for v, _ in needs), *region.results) if v in memory.last
        }
        ending = {v for v in held if memory.last[v] <= step.last}
        assert step.ending[0] == total(memory, list(ending))
        assert step.over[0] == written_over(memory, region, ending)


def choices(peaks: Peaks, kernels: int) -> list[tuple[float, float]]:
    """The peak and the seconds of every choice of regions, for the first kernels."""
    found = [[(0.0, 0.0)]]
    for k in range(kernels):
        now = [(max(peak, peaks.plain[k][0]), cost) for peak, cost in found[k]]
        rows = range(peaks.bounds[k], peaks.bounds[k + 1])
        for row in rows:
            now += (
                (max(peak, peaks.peak[row][0]), cost + peaks.seconds[row][0])
                for peak, cost in found[peaks.first[row]]
            )
        # Of choices that are alike so far, or worse, one is enough.
        best: dict[float, float] = {}
        for peak, cost in now:
            best[peak] = min(cost, best.get(peak, cost))
        found.append(list(best.items()))
    return found[-1]


@pytest.mark.parametrize("name", MODELS)
def test_the_best_of_all_choices(name: str) -> None:
    of = fused(name)
    peaks = Peaks(of, points_of(of.facts, ("batch", "length"))[:1])
    every = choices(peaks, len(of.fusions))
    least = min(peak for peak, _ in every)
    assert peaks.least[0] == least < peaks.highest[0]
    limits = np.linspace(least, peaks.highest[0], 7).tolist()
    for limit, chosen in zip(limits, peaks.cheapest([0] * 7, limits), strict=True):
        assert chosen is not None
        assert peaks.peaks(chosen)[0] <= limit
        cost = sum(peaks.seconds[peaks.row[region]][0] for region in chosen)
        assert cost == pytest.approx(min(c for peak, c in every if peak <= limit))
    assert peaks.cheapest([0], [least / 2]) == [None]


def test_sizes_of_a_narrow_range() -> None:
    """No size is large there, but memory counts, also where the others are small."""
    facts = Facts().with_range("n", 224, 239).with_range("b", 0, None)
    points = points_of(facts, ["b", "n"])
    assert any(point["b"] == 1 for point in points)


def test_rows_that_every_call_has() -> None:
    """A dim of every call is cut if it has rows, but not the features of one."""
    text = """
graph @main(%x: f32[b, 197, 96], %w: f32[96, 384], %v: f32[384, 96], %g: f32[384, 96]) {
  %one: f32[1, 96, 384] = reshape(%w) {shape = [1, 96, 384]}
  %two: f32[1, 384, 96] = reshape(%v) {shape = [1, 384, 96]}
  %h: f32[b, 197, 384] = matmul(%x, %one)
  %a: f32[b, 197, 384] = tanh(%h)
  %y: f32[b, 197, 96] = matmul(%a, %two)
  %new: f32[384, 96] = sub(%v, %g)
  return %y, %new
}
"""
    fused = next(stage for stage in STAGES if stage.name == "fuse")
    module = fused.run(parse_module(text), CX)
    facts = CX.facts(module.main)
    of = FusedGraph(module.main, facts, ROWS)
    memory = PointMemory(of, [{"b": 1}])
    assert fixed_extents(of.graph, memory) == [as_expr(197)]
    peaks = Peaks(of, [{"b": 1}])
    assert {region.extent for region in peaks.regions} == {sym("b"), as_expr(197)}
    assert peaks.least_share[0] < 0.4
