"""Buffers that a model changes while it trains: statistics of norms, counters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training_oracle import check_gradients

import pliant

IMAGES = (({0: "b", 2: "h", 3: "w"},), ())
SIZES = ((2, 6, 7), (3, 9, 5), (1, 5, 3), (4, 17, 13), (1, 3, 4))


def images(b: int, h: int, w: int) -> tuple[tuple[Tensor], tuple[()]]:
    """Far from mean 0, which is where sums lose digits."""
    generator = torch.Generator().manual_seed(b * 100 + h)
    return (torch.randn(b, 3, h, w, generator=generator) * 3 + 20,), ()


def wave(y: Tensor) -> Tensor:
    return (y - torch.arange(y.shape[-1]).cos()).square().mean()


def same_state(ours: nn.Module, theirs: nn.Module) -> None:
    for name, want in theirs.state_dict().items():
        found = ours.state_dict()[name]
        torch.testing.assert_close(
            found, want, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def train_both(
    model: nn.Module,
    loss: Callable[..., Tensor],
    shapes: Any,
    batches: Sequence[Any],
    **settings: Any,
) -> pliant.TrainingStep:
    """Steps here and in torch: losses, parameters and buffers stay together."""
    other = copy.deepcopy(model)
    mine, theirs = (torch.optim.SGD(m.parameters(), lr=1e-3) for m in (model, other))
    step = pliant.compile_training(
        model, loss, mine, batches[0], shapes, threads=2, **settings
    )
    for name, want in other.state_dict().items():
        assert torch.equal(model.state_dict()[name], want), f"{name} before any step"
    for inputs, targets in batches:
        found = step(inputs, targets)
        theirs.zero_grad()
        want = loss(other(*inputs), *targets)
        want.backward()
        theirs.step()
        torch.testing.assert_close(found, want.detach(), rtol=1e-5, atol=1e-5)
        same_state(model, other)
    return step


def convolved() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.GELU())


class Wavy(nn.Module):
    """Something trained in front of a norm, or behind it, that compiles in no time."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.01, 0.05, 3)[:, None, None])

    def forward(self, x: Tensor) -> Tensor:
        return x + (x * self.weight).sin()


NORMS: dict[str, Callable[[], nn.Module]] = {
    "usual": lambda: nn.BatchNorm2d(3),
    "slow": lambda: nn.BatchNorm2d(3, momentum=0.01),
    "cumulative": lambda: nn.BatchNorm2d(3, momentum=None),
    "plain": lambda: nn.BatchNorm2d(3, affine=False),
    "no statistics": lambda: nn.BatchNorm2d(3, track_running_stats=False),
    "frozen": lambda: nn.BatchNorm2d(3).eval(),
    "instance": lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms(name: str) -> None:
    model = nn.Sequential(Wavy(), NORMS[name](), nn.ReLU(), Wavy())
    batches = [images(*size) for size in SIZES]
    check_gradients(copy.deepcopy(model), wave, batches[0], IMAGES, batches[1:])
    train_both(model, wave, IMAGES, batches)


def test_rows() -> None:
    """Of no more dims than channels; as in torch, of none, but not of a single one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))

    def rows(n: int) -> tuple[tuple[Tensor], tuple[Tensor]]:
        return (torch.randn(n, 6),), (torch.randn(n, 3),)

    shapes = (({0: "n"},), ({0: "n"},))
    batches = [rows(n) for n in (5, 2, 0, 13, 101)]

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return (y - target).square().sum()

    step = train_both(model, loss, shapes, batches)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(pliant.ShapeError):
        step(*rows(1))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_gradients_change_nothing() -> None:
    model = convolved()
    step = pliant.compile_training(
        model, wave, pliant.SGD(0.1), images(2, 6, 7), IMAGES
    )
    before = copy.deepcopy(model.state_dict())
    step.gradients(*images(3, 5, 5))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_statistics_are_the_modules_own() -> None:
    """What is loaded between steps is what the next step goes on from."""
    model, other = convolved(), convolved()
    step = pliant.compile_training(
        model, wave, pliant.SGD(0.0), images(2, 6, 7), IMAGES
    )
    step(*images(2, 6, 7))
    model[1].running_mean.fill_(5.0)
    other[1].running_mean.fill_(5.0)
    step(*images(3, 9, 5))
    other(*images(3, 9, 5)[0])
    torch.testing.assert_close(model[1].running_mean, other[1].running_mean)


class Counting(nn.Module):
    """Buffers of its own: read after and before they change, and through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(2, 3))
        self.register_buffer("last", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        before = self.seen.sum()
        self.calls += 1
        self.seen[1].add_(y.detach().sum(0))
        self.last.copy_(self.linear.bias)
        return y * self.calls + self.seen.mean() + before


@pytest.mark.parametrize("update", [True, False])
def test_other_buffers(update: bool) -> None:
    torch.manual_seed(0)
    model = Counting()
    batches = [((torch.randn(n, 6),), ()) for n in (5, 1, 0, 7)]

    def loss(y: Tensor) -> Tensor:
        return y.square().sum() * 1e-3

    options = pliant.Options(update=update)
    step = train_both(model, loss, (({0: "n"},), ()), batches, options=options)
    assert float(model.calls) == 4 and step.compile_count == 1
    # As it was when the last step began.
    assert not torch.equal(model.last, model.linear.bias)


@pytest.mark.parametrize("chunk", [False, True])
def test_limits_change_nothing(chunk: bool) -> None:
    """Statistics are updated once, whatever is computed again; chunks may round."""
    model = convolved().extend([nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.GELU()])
    step = pliant.compile_training(
        model,
        wave,
        pliant.SGD(0.1),
        images(2, 6, 7),
        IMAGES,
        threads=2,
        options=pliant.Options(chunk=chunk),
    )
    batch, start = images(4, 33, 29), copy.deepcopy(model.state_dict())
    step(*batch)
    end = copy.deepcopy(model.state_dict())
    model.load_state_dict(start)
    peak = step.memory_plan(*batch).peak_bytes
    step.memory_limit = 1
    with pytest.raises(pliant.MemoryLimitError) as caught:
        step(*batch)
    assert caught.value.least < peak
    step.memory_limit = caught.value.least
    step(*batch)
    near = 1e-5 if chunk else 0.0
    torch.testing.assert_close(model.state_dict(), end, rtol=near, atol=near)


def test_a_buffer_of_two_names_is_refused() -> None:
    model = Counting()
    model.register_buffer("twin", model.calls)
    with pytest.raises(pliant.UnsupportedOpError, match="twin"):
        pliant.compile_training(
            model, torch.sum, pliant.SGD(0.1), ((torch.ones(2, 6),), ())
        )
