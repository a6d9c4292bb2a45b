"""Whole steps of training against torch's: losses, parameters, state, memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_models import (
    GPT,
    TEXTS,
    TOKENS,
    Bert,
    Llama,
    text_batch,
    token_batch,
    token_loss,
)
from torch import Tensor, nn
from training_oracle import follow

import pliant
from pliant.errors import IndexRangeError

Make = Callable[[Any], torch.optim.Optimizer]
SIZES = ((2, 5), (1, 1), (3, 7), (1, 13), (2, 2))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3)


@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("kind", [GPT, Llama, Bert])
def test_twenty_steps(kind: type[nn.Module], make: Make) -> None:
    torch.manual_seed(0)
    draw, loss, shapes = token_batch, token_loss, TOKENS
    if kind is Bert:
        draw, loss, shapes = text_batch, F.cross_entropy, TEXTS
    batches = [draw(*SIZES[k % len(SIZES)], seed=k) for k in range(20)]
    step = follow(kind(), loss, make, shapes, batches, tolerance=3e-4)
    assert step.stats()["calls"] == 20


OPTIMIZERS: dict[str, Make] = {
    "plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "dampened": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3),
    "uphill": lambda p: torch.optim.SGD(p, lr=0.01, maximize=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, betas=(0.8, 0.9)),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))


def rows(n: int) -> tuple[tuple[Tensor], tuple[Tensor]]:
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, 6, generator=generator)
    return (x,), (torch.randn(n, 3, generator=generator),)


ROWS = (({0: "n"},), ({0: "n"},))
BATCHES = [rows(n) for n in (5, 1, 13, 7, 5, 2)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    make = OPTIMIZERS[name]
    follow(network(), F.mse_loss, make, ROWS, BATCHES, tolerance=1e-5)


def test_clipping() -> None:
    step = follow(network(), F.mse_loss, sgd, ROWS, BATCHES, 1e-5, clip_grad_norm=0.05)
    assert step.memory_plan(*rows(3)).peak_bytes > 0


def test_groups_and_a_schedule() -> None:
    model, other = network(), network()

    def make(net: Any) -> torch.optim.Optimizer:
        first = {"params": net[0].parameters(), "lr": 0.01, "weight_decay": 0.2}
        return torch.optim.AdamW([first, {"params": net[2].parameters()}], lr=0.05)

    mine, theirs = make(model), make(other)
    schedules = [
        torch.optim.lr_scheduler.ExponentialLR(o, gamma=0.7) for o in (mine, theirs)
    ]
    step = pliant.compile_training(model, F.mse_loss, mine, rows(5), ROWS)
    for inputs, targets in BATCHES:
        step(inputs, targets)
        theirs.zero_grad()
        F.mse_loss(other(*inputs), *targets).backward()
        theirs.step()
        for schedule in schedules:
            schedule.step()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_goes_on_in_torch_and_back() -> None:
    """State has torch's names: saved here, it loads there, and the other way round."""
    model, other = network(), network()
    mine = adamw(model.parameters())
    step = pliant.compile_training(model, F.mse_loss, mine, rows(5), ROWS)
    reference = adamw(other.parameters())

    def in_torch(net: nn.Module, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        F.mse_loss(net(*batch[0]), *batch[1]).backward()
        optimizer.step()

    for batch in BATCHES:
        in_torch(other, reference, batch)
    step(*BATCHES[0])
    step(*BATCHES[1])
    moved = copy.deepcopy(model)
    resumed = adamw(moved.parameters())
    resumed.load_state_dict(mine.state_dict())
    in_torch(moved, resumed, BATCHES[2])
    in_torch(moved, resumed, BATCHES[3])
    model.load_state_dict(moved.state_dict())
    mine.load_state_dict(resumed.state_dict())
    step(*BATCHES[4])
    step(*BATCHES[5])
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_updates_in_place_change_nothing() -> None:
    """Bit for bit as with copies; and no parameter is copied."""
    ends = []
    for options in (pliant.Options(), pliant.Options(update=False)):
        torch.manual_seed(0)
        model = GPT(1)
        step = pliant.compile_training(
            model,
            token_loss,
            adamw(model.parameters()),
            token_batch(2, 5),
            TOKENS,
            threads=2,
            options=options,
        )
        for k in range(4):
            step(*token_batch(*SIZES[k], seed=k))
        ends.append((step, [p.detach().clone() for p in model.parameters()]))
    (ours, ours_end), (copied, copied_end) = ends
    for a, b in zip(ours_end, copied_end, strict=True):
        assert torch.equal(a, b)
    assert "store_" not in ours.explain() and "store_" in copied.explain()


def test_memory_is_told_and_kept() -> None:
    model = GPT(1)
    step = pliant.compile_training(
        model, token_loss, pliant.SGD(0.1), token_batch(2, 5), TOKENS
    )
    assert step.dims == ("batch", "seq") and "seq" in step.peak_formula
    for b, s in ((1, 1), (3, 11)):
        plan = step.memory_plan(batch=b, seq=s)
        assert plan == step.memory_plan(*token_batch(b, s))
        step(*token_batch(b, s))
        assert step.stats()["last_peak_bytes"] == plan.peak_bytes
    before = [p.detach().clone() for p in model.parameters()]
    step.memory_limit = 1000
    with pytest.raises(pliant.MemoryLimitError):
        step(*token_batch(1, 3))
    for a, b in zip(model.parameters(), before, strict=True):
        assert torch.equal(a, b)
    step.memory_limit = None
    step.trim()
    assert step(*token_batch(1, 3)).isfinite()


def test_a_refused_call_counts_for_nothing() -> None:
    model = network()
    optimizer = adamw(model.parameters())
    step = pliant.compile_training(model, F.mse_loss, optimizer, rows(5), ROWS)
    with pytest.raises(pliant.ShapeError):
        step((torch.ones(3, 7),), (torch.ones(3, 3),))
    with pytest.raises(pliant.DTypeError):
        step((torch.ones(3, 6).double(),), (torch.ones(3, 3),))
    assert all("step" not in s for s in optimizer.state.values())
    step(*rows(3))
    assert {float(s["step"]) for s in optimizer.state.values()} == {1.0}


def test_a_switched_optimizer_is_refused() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = pliant.compile_training(model, F.mse_loss, optimizer, rows(5), ROWS)
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(pliant.StepChangedError, match="compile_training again"):
        step(*rows(3))


def test_a_failed_check_leaves_the_parameters() -> None:
    torch.manual_seed(0)
    net = GPT()
    optimizer = adamw(net.parameters())
    inputs, targets = token_batch(2, 5, seed=0)
    step = pliant.compile_training(
        net, token_loss, optimizer, (inputs, targets), TOKENS
    )
    step(inputs, targets)
    before = copy.deepcopy((net.state_dict(), optimizer.state_dict()["state"]))
    beyond = tuple(torch.full_like(ids, 10**6) for ids in inputs)
    with pytest.raises(IndexRangeError):
        step(beyond, targets)
    torch.testing.assert_close(
        (net.state_dict(), optimizer.state_dict()["state"]), before, rtol=0, atol=0
    )
    step(inputs, targets)
