"""The work of every stage grows with the ops, not with their square.

Counted in calls of functions, which are the same on every machine: twice the steps of
an unrolled loop are about twice the calls in each stage.
"""

from __future__ import annotations

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


def calls_by_stage(function: Callable[..., Any], steps: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    stage = "import"

    def count(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            counts[stage] += 1

    program, info = export_module(
        Steps(function, steps), (torch.randn(2, steps, 4),), ({0: "batch"},)
    )
    cx = Context(Options(), host())
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
    return counts


@pytest.mark.parametrize("name", LOOPS)
def test_twice_the_steps_are_twice_the_work(name: str) -> None:
    calls_by_stage(LOOPS[name], 4)  # what is done once
    some, more = (calls_by_stage(LOOPS[name], n) for n in (STEPS, 2 * STEPS))
    slow = {
        stage: (some[stage], count)
        for stage, count in more.items()
        if count > FILLING.get(stage, MOST) * some[stage] + 1000
    }
    assert not slow


@pytest.mark.parametrize("name", LOOPS)
def test_loops_that_are_unrolled_compute_the_same(name: str) -> None:
    model = Steps(LOOPS[name], 24)
    x = torch.randn(2, 24, 4)
    compiled = pliant.compile(model, (x,), ({0: "batch"},), threads=1)
    for batch in (1, 3):
        x = torch.randn(batch, 24, 4)
        torch.testing.assert_close(compiled(x), model(x))
