"""What calls really take: counted where it is asked for, trapped beyond, and resident.

`last_peak_bytes` is counted at the arena's mapping, at torch's storages and copies
of inputs. The plan is not asked for it, so that comparing the two says something.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

import pliant

MODELS = """
import torch, pliant
from torch import nn
torch.manual_seed(0)
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.of = nn.Linear(24, 72)
    def forward(self, x):
        q, k, v = self.of(x).unflatten(-1, (3, 2, 12)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).flatten(2).softmax(-1)
image = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.ReLU(), nn.Conv2d(5, 7, 3, 2),
                      nn.GroupNorm(7, 7), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
                      nn.Linear(28, 3))
chain = nn.Sequential(nn.Linear(24, 50), nn.GELU(), nn.LayerNorm(50), nn.Linear(50, 9))
cases = (
    (Attention(), (2, 7, 24), {0: "b", 1: "s"}, ((1, 1), (2, 33), (3, 100), (0, 4))),
    (chain, (2, 7, 24), {0: "b", 1: "s"}, ((1, 1), (2, 33), (3, 100), (0, 4))),
    (image, (2, 3, 16, 18), {0: "b", 2: "h", 3: "w"}, ((1, 16, 18), (2, 31, 47))),
)
for net, example, dims, shapes in cases:
    net.eval()
    with torch.no_grad():
        m = pliant.compile(net, (torch.randn(example),), (dims,), threads=2)
        for sizes in shapes:
            shape = list(example)
            for axis, size in zip(dims, sizes): shape[axis] = size
            x = torch.randn(shape)
            torch.testing.assert_close(m(x), net(x), atol=1e-4, rtol=1e-4)
            plan, stats = m.memory_plan(x), m.stats()
            assert stats["last_peak_bytes"] == plan.peak_bytes, (plan, stats)
            m.memory_limit = max(m.memory_plan(x).lower_bound, plan.peak_bytes * 2 // 3)
            try:
                torch.testing.assert_close(m(x), net(x), atol=1e-4, rtol=1e-4)
                assert m.stats()["last_peak_bytes"] <= m.memory_limit
            except pliant.MemoryLimitError:
                pass
            m.memory_limit = None
print("right")
"""


# Loops and branches: what a round or a branch touches is inside the plan as well.
LOOPS = """
import torch, pliant
from torch.utils import _pytree as pytree
from zoo.programs import PROGRAMS, python_loops
for name, program in PROGRAMS.items():
    torch.manual_seed(0)
    net = program.make().eval().requires_grad_(False)
    m = pliant.compile(net, program.inputs(6), program.dynamic, threads=2)
    for n in (0, 1, 3, 17, 40):
        if n < program.smallest:
            continue
        x = program.inputs(n)
        with python_loops():
            want = pytree.tree_leaves(net(*x))
        plan = m.memory_plan(*x).peak_bytes
        for limit in (None, plan):
            m.memory_limit = limit
            for a, b in zip(pytree.tree_leaves(m(*x)), want, strict=True):
                torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)
            assert m.stats()["last_peak_bytes"] == plan, (name, n, m.stats())
        m.memory_limit = max(plan - 1, 0)
        try:
            m(*x)
            assert m.stats()["last_peak_bytes"] < max(plan, 1), (name, n, m.stats())
        except pliant.MemoryLimitError:
            assert plan > 0
        m.memory_limit = None
print("right")
"""


@pytest.mark.parametrize("models", [MODELS, LOOPS], ids=["models", "loops"])
def test_nothing_is_touched_beyond_the_plan(models: str) -> None:
    """With a page that traps behind each arena, which ends where its plan ends."""
    done = subprocess.run(
        [sys.executable, "-c", models],
        env={**os.environ, "PLIANT_GUARD_PAGES": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "right"


class Wide(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.softmax(-1)
        return y @ y.t(), (y * 2).to(torch.float64)


@pytest.fixture(scope="module")
def wide() -> pliant.CompiledModel:
    dims = ({0: "rows", 1: "columns"},)
    return pliant.compile(Wide(), (torch.randn(3, 4),), dims, threads=1)


@pytest.mark.parametrize("shape", [(1, 1), (0, 3), (17, 5), (300, 200)])
def test_the_meter_agrees_with_the_plan(
    wide: pliant.CompiledModel, shape: tuple[int, int]
) -> None:
    x = torch.randn(shape)
    for given in (x, x.numpy(), x.t().contiguous().t()):
        plan = wide.memory_plan(given)
        results = wide(given)
        stats = wide.stats()
        assert stats["last_planned_bytes"] == plan.peak_bytes
        assert stats["last_peak_bytes"] == plan.peak_bytes
        assert plan.output_bytes == sum(r.nbytes for r in results)
        assert stats["last_arena_bytes"] == plan.arena_bytes


RESIDENT = """
import torch, pliant
from bench.resident import high_water
class Wide(torch.nn.Module):
    def forward(self, x):
        y = x.softmax(-1)
        return y @ y.t(), (y * 2).to(torch.float64)
x = torch.randn(2000, 1500)
dims = ({0: "rows", 1: "columns"},)
wide = pliant.compile(Wide(), (torch.randn(3, 4),), dims, threads=1)
wide(x[:2, :2])
most = high_water(lambda: wide(x))
print(most, wide.stats()["last_peak_bytes"])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_resident_memory_agrees_with_the_meter() -> None:
    """In a process of its own: arenas of other models may be given back meanwhile."""
    done = subprocess.run(
        [sys.executable, "-c", RESIDENT], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    most, metered = map(int, done.stdout.split())
    assert metered > 40 << 20
    assert 0.9 * metered < most < metered + (8 << 20)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_long_input_leaves_nothing_behind(wide: pliant.CompiledModel) -> None:
    """Without a call after it; one that is repeated keeps its arena."""
    x = torch.randn(2000, 1500)
    for _ in range(10):
        wide(x[:2, :2])
    assert wide.stats()["arena_bytes"] == 4096
    wide(x)
    assert wide.stats()["arena_bytes"] <= 1 << 20
    wide(x)
    stats = wide.stats()
    assert stats["arena_bytes"] >= stats["last_arena_bytes"] > 8 << 20
