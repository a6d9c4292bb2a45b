"""The work of every stage grows with the ops, not with their square.

Counted in calls of functions, which are the same on every machine: twice the steps of
an unrolled loop are about twice the calls in each stage, and so are twice the layers of
a network.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pliant
from pliant.context import Context
from pliant.frontend.torch_export import export_module, from_exported
from pliant.machine.target import host
from pliant.options import Options
from pliant.pipeline import STAGES

STEPS = 32
MOST = 2.6  # times, for twice the steps
# Merging looks at a whole group, which grows until it is full (fuse.MOST_OPS).
FILLING = {"fuse": 3.5}
# Calls of what begins at some number of ops, such as comparing functions.
ONCE = 20_000
# Versions in chunks are there from some number of ops on, and have all stages after.
NO_CHUNKS = Options(chunk=False)


class Steps(nn.Module):
    def __init__(self, function: Callable[..., Any], steps: int) -> None:
        super().__init__()
        self.function, self.steps = function, steps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.steps)


def written(x: torch.Tensor, steps: int) -> torch.Tensor:
    out = torch.zeros_like(x)
    for t in range(steps):
        out[:, t] = x[:, t].exp()
    return out


def backwards(x: torch.Tensor, steps: int) -> torch.Tensor:
    out = torch.zeros_like(x)
    for t in reversed(range(steps)):
        out[:, t] = x[:, t].exp()
    return out


def recurrent(x: torch.Tensor, steps: int) -> torch.Tensor:
    out = torch.zeros_like(x)
    out[:, 0] = x[:, 0]
    for t in range(1, steps):
        out[:, t] = out[:, t - 1] * 0.9 + x[:, t]
    return out


def stacked(x: torch.Tensor, steps: int) -> torch.Tensor:
    return torch.stack([x[:, t].exp() for t in range(steps)], 1)


def shifted(x: torch.Tensor, steps: int) -> torch.Tensor:
    held = x[:, :4]
    for t in range(steps):
        held = torch.cat([held[:, 1:], held[:, :1] * 0.5 + x[:, t : t + 1]], 1)
    return held


LOOPS = {f.__name__: f for f in (written, backwards, recurrent, stacked, shifted)}
# What always runs; the others run in `make sweep`.
OFTEN = ("written", "recurrent")
GROWING = [
    pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow)
    for name in LOOPS
]


class Encoder(nn.Module):
    """Layers of attention and a feed-forward part, over a batch of sequences."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        parts = ((8, 24), (8, 8), (8, 16), (16, 8))
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Linear(*sizes) for sizes in parts) for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for project, back, up, down in self.layers:
            q, k, v = project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v)
            x = nn.functional.layer_norm(
                x + back(mixed.transpose(1, 2).flatten(2)), [8]
            )
            x = x + down(nn.functional.gelu(up(x)))
        return x


class Stages(nn.Module):
    """Residual convolutions after two that halve the image, which has any size."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Conv2d(8, 8, 3, stride=2)
        )
        self.layers = nn.ModuleList(
            nn.Conv2d(8, 8, 3, padding=1, groups=1 + 7 * (k % 2)) for k in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for conv in self.layers:
            x = x + conv(x).relu()
        return x


NETWORKS: dict[str, tuple[Callable[[int], nn.Module], tuple[int, ...], Any]] = {
    "encoder": (Encoder, (2, 13, 8), ({0: "batch", 1: "seq"},)),
    "stages": (Stages, (2, 3, 61, 44), ({0: "batch", 2: "height", 3: "width"},)),
}


def calls_by_stage(function: Callable[..., Any], steps: int) -> Counter[str]:
    x = torch.randn(2, steps, 4)
    return calls_of(Steps(function, steps), x, ({0: "batch"},))


def calls_of(
    model: nn.Module, x: torch.Tensor, dims: Any, options: Options = NO_CHUNKS
) -> Counter[str]:
    counts: Counter[str] = Counter()
    stage = "import"

    def count(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            counts[stage] += 1

    program, info = export_module(model.eval(), (x,), dims)
    cx = Context(options, host())
    # Nothing that other tests left behind is cleared away while calls are counted.
    gc.collect()
    gc.disable()
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        module = from_exported(program, info).module
        for each in STAGES:
            stage = each.name
            if each.applies(cx):
                module = each.run(module, cx)
    finally:
        sys.setprofile(before)
        gc.enable()
    return counts


@pytest.mark.parametrize("name", GROWING)
def test_twice_the_steps_are_twice_the_work(name: str) -> None:
    calls_by_stage(LOOPS[name], 4)  # what is done once
    some, more = (calls_by_stage(LOOPS[name], n) for n in (STEPS, 2 * STEPS))
    assert not slow_stages(some, more)


def slow_stages(some: Counter[str], more: Counter[str]) -> dict[str, tuple[int, int]]:
    """The stages in which twice the ops are more than about twice the calls."""
    return {
        stage: (some[stage], count)
        for stage, count in more.items()
        if count > FILLING.get(stage, MOST) * some[stage] + ONCE
    }


def test_chunks_of_twice_the_layers() -> None:
    build, shape, dims = NETWORKS["encoder"]
    x, options = torch.randn(shape), Options()
    some, more = (calls_of(build(n), x, dims, options) for n in (12, 24))
    slow = slow_stages(some, more)
    assert not slow.keys() & {"chunk", "chunk_loops"}, slow


def many_results(x: torch.Tensor, steps: int) -> torch.Tensor:
    """One kernel computes all, and each is read by a kernel of its own."""
    square = x[:, :, None] * x[:, None]
    parts = [(square * (k + 1)).exp() for k in range(steps)]
    return torch.stack([part.cumsum(1).cumsum(2).mean(2) for part in parts])


def test_chunks_of_kernels_with_many_results() -> None:
    options, dims = Options(), ({0: "batch", 1: "seq"},)
    x = torch.randn(2, 5)
    some, more = (calls_of(Steps(many_results, n), x, dims, options) for n in (12, 24))
    # Each reader looks at the whole kernel, which grows until it is full.
    assert more["chunk"] < 3.5 * some["chunk"], (some["chunk"], more["chunk"])


@pytest.mark.parametrize("name", NETWORKS)
def test_twice_the_layers_are_twice_the_work(name: str) -> None:
    build, shape, dims = NETWORKS[name]
    calls_of(build(1), torch.randn(shape), dims)  # what is done once
    some, more = (calls_of(build(n), torch.randn(shape), dims) for n in (12, 24))
    assert not slow_stages(some, more)


@pytest.mark.parametrize("name", LOOPS)
def test_loops_that_are_unrolled_compute_the_same(name: str) -> None:
    model = Steps(LOOPS[name], 24)
    x = torch.randn(2, 24, 4)
    compiled = pliant.compile(model, (x,), ({0: "batch"},), threads=1)
    for batch in (1, 3):
        x = torch.randn(batch, 24, 4)
        torch.testing.assert_close(compiled(x), model(x))
