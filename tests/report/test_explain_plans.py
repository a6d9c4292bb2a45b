"""What `explain` says of matrix products is what their kernels do.

The words are checked against what the compiled sizes say, and the numbers against the
calls that the kernels make when the interpreter runs them.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from machines import TARGETS, machine
from programs import interpretable
from torch import nn

import pliant
from pliant import api
from pliant.ir import interp_loops
from pliant.ir.build import Builder
from pliant.ir.graph import Constant, Module
from pliant.ir.interp import run_graph
from pliant.ir.loop_walk import statements
from pliant.ir.loops import Call
from pliant.ir.types import DType, tensor
from pliant.kernels.choose import row_tiles
from pliant.kernels.micro import DOT_HEIGHTS, DOT_WIDTHS
from pliant.kernels.mix import ProductCut, ProductPlan, dot_sizes, shared_units
from pliant.kernels.tiles import VECTORS
from pliant.machine.target import avx2
from pliant.sym import sym

SHAPES = [
    *((1, 1, 1), (7, 768, 96), (15, 50, 64), (29, 33, 1), (3, 2, 500), (200, 7, 40)),
    *((0, 5, 5), (5, 0, 5), (5, 5, 0), (13, 97, 300), (180, 65, 130), (61, 64, 1100)),
    *((5, 2100, 300), (33, 2100, 300), (40, 1900, 60), (50, 200, 3)),
    *((9, 29, 1), (15, 17, 1), (3, 40, 1), (20, 16, 1), (40, 1, 12), (12, 900, 700)),
    *((71, 40, 3912), (12, 1500, 1200)),
]


def module_of(
    n: int | None = None, k: int | None = None, batch: bool = False
) -> Module:
    """x y of any sizes; with n and k, y is a constant."""
    b = Builder()
    m, columns, steps = sym("m"), sym("n"), sym("k")
    if n is not None and k is not None:
        x = b.param("x", tensor(DType.F32, m, k))
        weight = np.ones((k, n), np.float32)
        y = b.constant(Constant("weight", tensor(DType.F32, k, n), weight))
    else:
        outer = (sym("b"),) if batch else ()
        x = b.param("x", tensor(DType.F32, *outer, m, steps))
        y = b.param("y", tensor(DType.F32, *outer, steps, columns))
    results = [b.matmul(x, y)]
    return Module({"main": b.finish("main", results)}, constants=dict(b.constants))


def compiled(module: Module, target: str = "machine") -> pliant.CompiledModel:
    return pliant.compile(module, threads=2, target=machine(target))


def plan_of(model: pliant.CompiledModel) -> ProductPlan:
    ((plan,),) = model.program.lowered.plans.values()
    return plan


def expected_calls(plan: ProductPlan, cut: ProductCut) -> Counter[str]:
    """The micro-kernels that the words tell of, and how many tiles each computes."""
    tile, times = plan.tile, cut.batch * cut.passes
    calls: Counter[str] = Counter()
    if cut.dot:
        for h in (h for rows in cut.block_rows() for h in dot_sizes(rows, DOT_HEIGHTS)):
            for w in dot_sizes(cut.n, DOT_WIDTHS):
                calls[f"dot_f32_{h}x{w}"] += times
        return calls
    heights = [h for rows in cut.block_rows() for h in row_tiles(rows, cut.height)]
    whole, left = divmod(cut.n, tile.NR)
    panels = whole + (left > 0)
    if cut.strips:  # all columns of a group together
        for group in range(cut.groups):
            first, last = (panels * at // cut.groups for at in (group, group + 1))
            narrow = min(last * tile.NR, cut.n) - first * tile.NR <= tile.lanes
            if cut.k == cut.height == 1:  # row after row
                calls["outer_f32"] += times * len(heights)
                continue
            for h in heights:
                calls[f"{'narrow' if narrow else 'strip'}_f32_{h}"] += times
        return calls
    last = -(-left // tile.lanes)
    for vectors in [VECTORS] * whole + [last] * (left > 0):
        for part in (p for h in heights for p in row_tiles(h, tile.tallest(vectors))):
            calls[f"gemm_f32_{part}x{vectors * tile.lanes}"] += times
    if cut.packed:  # by the first tile of a block, if it is tall
        panels = times * whole
        for rows in cut.block_rows():
            first = row_tiles(rows, cut.height)[0]
            if first >= tile.keeping:
                name = f"gemm_f32_{first}x{tile.NR}"
                calls[name] -= panels
                calls[f"{name}_kept"] += panels
    return +calls


def observed_calls(
    model: pliant.CompiledModel,
    inputs: list[np.ndarray[Any, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> Counter[str]:
    """The micro-kernels that the lowered program calls; they are not run."""
    counts: Counter[str] = Counter()
    inside = interp_loops._Run.call

    def noted(self: Any, name: str, sizes: Any, memories: Any) -> None:
        body = self.module.loops[name].body
        splits = any(isinstance(stmt, Call) for stmt in statements(body))
        if name.startswith("gemm_") and not splits:
            counts[name] += 1
        elif name.startswith(("dot_", "strip_", "narrow_", "outer_")):
            counts[name.removesuffix("_whole")] += sizes[0]  # tiles
        else:
            inside(self, name, sizes, memories)

    monkeypatch.setattr(interp_loops._Run, "call", noted)
    run_graph(interpretable(model), inputs, workers=2)
    return counts


def operands(*shapes: tuple[int, ...]) -> list[np.ndarray[Any, Any]]:
    return [np.zeros(shape, np.float32) for shape in shapes]


@pytest.mark.parametrize("target", TARGETS[:2])
def test_kernels_called(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = compiled(module_of(), target)
    plan = plan_of(model)
    for m, n, k in SHAPES:
        cut = plan.at({"m": m, "n": n, "k": k}, threads=2)
        got = observed_calls(model, operands((m, k), (k, n)), monkeypatch)
        assert got == expected_calls(plan, cut), (m, n, k)
        monkeypatch.undo()


@pytest.mark.parametrize(("m", "n", "k"), [(15, 50, 64), (9, 7, 40), (200, 300, 1500)])
def test_kernels_called_on_a_weight(
    m: int, n: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = compiled(module_of(n, k))
    cut = plan_of(model).at({"m": m}, threads=2)
    got = observed_calls(model, operands((m, k)), monkeypatch)
    assert got == expected_calls(plan_of(model), cut)


def test_kernels_called_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    model = compiled(module_of(batch=True))
    for b, m, n, k in ((3, 5, 9, 17), (2, 40, 33, 200), (0, 4, 4, 4)):
        cut = plan_of(model).at({"b": b, "m": m, "n": n, "k": k}, threads=2)
        got = observed_calls(model, operands((b, m, k), (b, k, n)), monkeypatch)
        assert got == expected_calls(plan_of(model), cut), (b, m, n, k)
        monkeypatch.undo()


def cut_of(**given: int) -> ProductCut:
    fields = dict.fromkeys(ProductCut.__dataclass_fields__, 1) | given
    return ProductCut(**fields)


def test_what_threads_share() -> None:
    def told(**given: int) -> list[str]:
        return [n for n, count in shared_units(cut_of(**given)) if count > 1]

    assert told(threads=2, groups=24) == ["panels"]
    assert told(threads=2, blocks=4, groups=24) == ["rows"]
    assert told(threads=2, blocks=3, groups=5) == ["rows", "panels"]
    assert told(threads=2, batch=8, blocks=3) == ["products"]


def test_threads_take_part_in_large_products_alone() -> None:
    plan = plan_of(compiled(module_of()))

    def used(m: int, n: int, k: int, threads: int) -> int:
        return plan.at({"m": m, "n": n, "k": k}, threads).threads

    assert used(512, 512, 512, 2) == 2
    assert used(512, 512, 512, 1) == 1
    assert used(8, 8, 64, 2) == 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.few = nn.Linear(64, 1536), nn.Linear(1536, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.few(self.up(x).relu())
        return y, y @ x[:, :3]


@pytest.fixture(scope="module")
def net() -> pliant.CompiledModel:
    """For tiles of 6 x 16; only told about, so the machine need not run it."""
    inputs = (torch.randn(2, 9, 64),)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "_check_runs", lambda target: None)
        return pliant.compile(
            Net(), inputs, ({0: "batch", 1: "seq"},), threads=2, target=avx2()
        )


def products_of(text: str) -> str:
    return text[text.index("matrix products") :].partition("\n\n")[0]


def test_sizes_without_dims(net: pliant.CompiledModel) -> None:
    text = products_of(net.explain())
    assert "M=batch*seq N=1536 K=64" in text
    assert "M=seq N=64 K=3 products=batch" in text
    assert "rows" not in text


def test_words_with_dims(net: pliant.CompiledModel) -> None:
    text = products_of(net.explain(batch=1, seq=7))
    assert text.startswith("matrix products at batch=1, seq=7")
    assert "M=7 N=1536 K=64: rows 4 + 3, columns 96 x 16; " in text
    assert "B packed ahead" in text
    assert "columns 3; lanes along K" in text
    assert "nothing to compute" in products_of(net.explain(batch=0, seq=7))


def test_words_of_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_check_runs", lambda target: None)
    plan = plan_of(pliant.compile(module_of(), threads=2, target=avx2()))

    def told(**given: int) -> str:
        return plan.words(cut_of(**given))

    dot = told(dot=1, m=15, n=7, k=40, rows=15)
    assert dot == (
        "rows 3 x 4 + 2 + 1, columns 4 + 3; lanes along K, columns of B made rows, "
        "1 thread"
    )
    sizes = {"dot": 0, "m": 50, "n": 50, "k": 500, "blocks": 3, "rows": 17}
    shared = {"strips": 0, "packed": 0, "passes": 4, "depth": 125}
    shared |= {"groups": 2, "panels": 2, "height": 6}
    assert told(**sizes, **shared, threads=2) == (
        "rows 2 x (2 x 6 + 5) + (6 + 2 x 5), columns 3 x 16 + 8; 3 blocks, "
        "2 panels at a time, 4 passes of 125, B in place, A copied, "
        "2 threads by rows and panels"
    )


def test_every_dim_or_none(net: pliant.CompiledModel) -> None:
    with pytest.raises(pliant.ShapeError, match=r"explain takes.*missing: seq"):
        net.explain(batch=1)
    with pytest.raises(pliant.ShapeError, match="unknown: rows"):
        net.explain(batch=1, seq=1, rows=2)
    with pytest.raises(pliant.ShapeError, match="a size is an int"):
        net.explain(batch=1, seq=-1)


def test_products_of_one_function() -> None:
    """Layers of several widths share a function; each of them is told of."""
    widths = (96, 160, 224, 288)
    layers = [nn.Linear(k, n) for k, n in pairwise(widths)]
    net = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))
    x = torch.randn(5, 96)
    model = pliant.compile(net.eval(), (x,), {"input": {0: torch.export.Dim("rows")}})
    plans = model.program.lowered.plans
    assert len(plans) < len(layers)
    text = model.explain(rows=5)
    for k, n in pairwise(widths):
        assert f"N={n} K={k}" in text, text
    told = sum(text.count(f"{name} ") for name in plans)
    assert told == len(plans) + len(layers), text  # once, and in the order
    for rows in (0, 1, 5, 13, 61, 300):
        x = torch.randn(rows, 96)
        with torch.no_grad():
            torch.testing.assert_close(model(x), net(x), rtol=1e-4, atol=1e-5)
