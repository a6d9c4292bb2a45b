"""A compiled product gives the same result by every plan that its scratch allows."""

from __future__ import annotations

import re
from functools import cache

import numpy as np
import pytest
import torch

import pliant
from bench.plan_code import Artifact, artifacts
from bench.plan_set import Set, picked
from pliant.ir.text import print_module

SHAPES = [(1, 1, 1), (1, 70, 300), (15, 33, 40), (61, 7, 129), (200, 97, 1100)]


@cache
def made() -> dict[str, Artifact]:
    return artifacts()


@pytest.mark.slow  # every plan of the set in one artifact takes a minute to compile
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("mode", ["packed", "dynamic"])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_every_plan(mode: str, m: int, n: int, k: int, threads: int) -> None:
    artifact = made()[mode]
    x = artifact.operands(m, n, k, threads)
    exact = x.a.astype(np.float64) @ x.b.astype(np.float64)
    sizes = np.abs(x.a).astype(np.float64) @ np.abs(x.b)
    pick = picked(artifact.choice(m, n, k, threads))
    dots = k >= artifact.tile.lanes
    plans = {*Set(m, n, k, threads, mode == "packed", dots, artifact.tile).plans()}
    assert plans
    for plan in {pick, *plans}:
        x.c.fill(np.nan)
        artifact.call(x, plan)(1)
        wrong = ~(np.abs(x.c - exact) <= k * 2.0**-24 / (1 - k * 2.0**-24) * sizes)
        assert not wrong.any(), plan


@pytest.mark.parametrize("switch", ["packing", "patching"])
def test_switched_off(switch: str) -> None:
    """Without packed weights, or with uneven tiles: other code, the same product."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(40, 70), torch.nn.GELU())
    example, dims = (torch.randn(3, 40),), ({0: "batch"},)
    on = pliant.compile(net, example, dims)
    off = pliant.compile(net, example, dims, options=pliant.Options(**{switch: False}))
    for rows in (0, 1, 7, 15, 29, 100):
        x = torch.randn(rows, 40)
        torch.testing.assert_close(off(x), on(x), rtol=1e-5, atol=1e-6)
    texts = [print_module(m.program.lowered) for m in (on, off)]
    assert texts[0] != texts[1]
    weights = re.findall(r'constant\(\) {name = "([^"]*)"', texts[1])
    assert any("packed" in name for name in weights) == (switch == "patching")


@pytest.mark.parametrize("rows", [3, 40])
def test_long_sums_keep_their_digits(rows: int) -> None:
    """Over K in the thousands the error stays near that of torch's blocked sums."""

    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x @ y

    torch.manual_seed(0)
    x, y = torch.randn(rows, 30001), torch.randn(30001, 70)
    model = pliant.compile(Net(), (x, y), ({0: "m", 1: "k"}, {0: "k"}))
    exact = x.double() @ y.double()
    ours, torchs = ((z - exact).abs().max().item() for z in (model(x, y), x @ y))
    assert ours <= 2 * torchs + 1e-5
