"""Training through sizes that data decide, against eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pliant

N = {0: "n"}


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 3)


class Kept(_Model):
    """Rows that a mask of the inputs keeps."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        rows = self.first(x).relu()[keep > 0]
        return self.second(rows).sum()


class Selected(_Model):
    """The parameters decide how many."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        y = self.second(self.first(x).tanh())
        return y.masked_select(y > 0).square().sum()


class Gathered(_Model):
    """Twice: some of some rows."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        y = self.first(x)
        rows = y[torch.nonzero(y[:, 0] > 0).squeeze(1)]
        z = self.second(rows)
        return z[z[:, 1] > 0].sin().sum() + rows.square().mean(1).sum()


class Headed(_Model):
    """A number of the data as the end of a slice."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        n = (keep > 0).sum().item()
        torch._check(n >= 0)
        torch._check(n <= x.shape[0])
        return self.second(self.first(x)[:n].sin()).sum()


MODELS: dict[str, Callable[[], _Model]] = {
    "kept": Kept,
    "selected": Selected,
    "gathered": Gathered,
    "headed": Headed,
}


def loss(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().sum() * 0.01


def inputs_of(n: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor]]:
    return (torch.randn(n, 4), torch.randn(n)), (torch.randn(1),)


def trained(make: Callable[[], nn.Module]) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = pliant.compile_training(
        model, loss, optimizer, inputs_of(6), ((N, N), ({},))
    )
    return model, step


@pytest.mark.parametrize("name", MODELS)
def test_steps_are_those_of_eager(name: str) -> None:
    model, step = trained(MODELS[name])
    eager = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(eager.parameters(), lr=0.01)
    for n in (7, 1, 31, 0, 53):
        inputs, (target,) = inputs_of(n)
        optimizer.zero_grad()
        want = loss(eager(*inputs), target)
        want.backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizer.step()
        got = torch.as_tensor(step(inputs, (target,)))
        torch.testing.assert_close(got, want.detach(), rtol=1e-4, atol=1e-5)
        for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        run = step.stats()
        plan = step.memory_plan(n=n, **run["last_sizes"])
        assert run["last_peak_bytes"] == plan.peak_bytes
        assert plan.peak_bytes <= step.memory_plan(n=n).peak_bytes


def test_a_step_that_does_not_fit_changes_nothing() -> None:
    model, step = trained(Gathered)
    (x, keep), target = inputs_of(200)
    with torch.no_grad():
        model.get_submodule("first").get_parameter("bias")[0] = 50.0  # all are kept
    step.memory_limit = step.memory_plan(n=200, u0=0, u1=0).peak_bytes
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(pliant.MemoryLimitError, match="n=200, u0=200"):
        step((x, keep), target)
    for now, then in zip(model.parameters(), before, strict=True):
        assert torch.equal(now, then)
    step.memory_limit = None
    step((x, keep), target)
    assert any(
        not torch.equal(now, then)
        for now, then in zip(model.parameters(), before, strict=True)
    )
