"""Random ops: reproducible from a seed, and of the distribution that torch states."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pliant

COUNT = 20000


class Calls(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs)


def compiled(
    function: Callable[..., Any], *inputs: torch.Tensor, dims: Any = None
) -> Any:
    shapes = dims or tuple({0: "n"} for _ in inputs)
    return pliant.compile(Calls(function), inputs, {"inputs": shapes})


def normal_cdf(x: torch.Tensor) -> torch.Tensor:
    return torch.special.ndtr(x)


def sampled(x: torch.Tensor) -> list[torch.Tensor]:
    """Continuous distributions, of x's type."""
    return [
        torch.rand_like(x),
        torch.randn_like(x),
        torch.empty_like(x).uniform_(-2.0, 3.0),
        torch.empty_like(x).normal_(1.0, 0.5),
        torch.empty_like(x).exponential_(2.0),
        torch.empty_like(x).cauchy_(1.0, 2.0),
        torch.empty_like(x).log_normal_(0.5, 0.25),
        torch.normal(x * 0 + 3.0, 2.0),
    ]


CDFS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x.clamp(0, 1),
    normal_cdf,
    lambda x: ((x + 2) / 5).clamp(0, 1),
    lambda x: normal_cdf((x - 1) / 0.5),
    lambda x: -torch.expm1(-2 * x),
    lambda x: 0.5 + torch.atan((x - 1) / 2) / math.pi,
    lambda x: normal_cdf((x.log() - 0.5) / 0.25),
    lambda x: normal_cdf((x - 3) / 2),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_distributions(dtype: torch.dtype) -> None:
    """By Kolmogorov and Smirnov's test, at a level of 1e-4."""
    m = compiled(sampled, torch.zeros(8, dtype=dtype))
    torch.manual_seed(0)
    found = m(torch.zeros(COUNT, dtype=dtype))
    for x, cdf in zip(found, CDFS, strict=True):
        assert x.dtype is dtype
        steps = torch.arange(1, COUNT + 1, dtype=torch.float64) / COUNT
        apart = (cdf(x.double().sort()[0]) - steps).abs().max()
        assert apart < 2.23 / math.sqrt(COUNT), cdf
    assert len({tuple(x[:4].tolist()) for x in found}) == len(found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_stays_below_one(dtype: torch.dtype) -> None:
    found = compiled(torch.rand_like, torch.zeros(8, dtype=dtype))(
        torch.zeros(1 << 20, dtype=dtype)
    )
    assert found.dtype is dtype and found.min() >= 0 and found.max() < 1
    assert abs(found.double().mean() - 0.5) < 0.01


def test_a_seed_decides() -> None:
    m = compiled(
        lambda x: (x + torch.rand_like(x), torch.randn(x.shape[0])), torch.zeros(4)
    )
    x = torch.zeros(9)
    torch.manual_seed(7)
    first, second = m(x), m(x)
    torch.manual_seed(7)
    again = m(x)
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first, second))
    before = torch.get_rng_state()
    m.memory_plan(n=5)
    m.memory_plan(x)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(7)
    array = m(x.numpy())
    assert isinstance(array[0], np.ndarray)
    assert np.array_equal(array[0], first[0].numpy())


def test_a_dead_random_op_draws_nothing() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        torch.rand_like(x).mul(2.0)
        return x + 1

    m = compiled(function, torch.zeros(4))
    before = torch.get_rng_state()
    assert torch.equal(m(torch.zeros(3)), torch.ones(3))
    assert torch.equal(before, torch.get_rng_state())


def test_integers() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        n = x.shape[0]
        return [
            torch.randint(-3, 4, (n,)),
            torch.randint(0, 2**40, (n,)),
            torch.empty_like(x).geometric_(0.25),
            torch.bernoulli(x * 0 + 0.3),
            torch.randint(n, (n,)),
        ]

    m = compiled(function, torch.zeros(8))
    torch.manual_seed(1)
    small, large, trials, coin, below = (t.double() for t in m(torch.zeros(COUNT)))
    counts = torch.bincount((small + 3).long(), minlength=7)
    assert len(counts) == 7 and (counts - COUNT / 7).abs().max() < 300
    assert large.min() >= 0 and large.max() < 2**40 and large.max() > 0.99 * 2**40
    assert abs(large.mean() / 2**39 - 1) < 0.02
    assert trials.min() == 1 and abs(trials.mean() - 4) < 0.1
    assert abs(coin.mean() - 0.3) < 0.015 and set(coin.tolist()) == {0.0, 1.0}
    assert 0 <= below.min() < 20 and COUNT - 20 < below.max() < COUNT
    assert [t.shape for t in m(torch.zeros(1))] == [(1,)] * 5


@pytest.mark.parametrize("size", [0, 1, 2, 7, 1000])
def test_permutations(size: int) -> None:
    m = compiled(lambda x: torch.randperm(x.shape[0]), torch.zeros(5))
    found = [m(torch.zeros(size)) for _ in range(3)]
    assert all(torch.equal(f.sort()[0], torch.arange(size)) for f in found)
    assert size < 1000 or not torch.equal(found[0], found[1])


def test_permutations_are_even() -> None:
    m = compiled(lambda x: torch.randperm(x.shape[0]), torch.zeros(5))
    torch.manual_seed(0)
    seen: dict[tuple[int, ...], int] = {}
    for _ in range(1200):
        order = tuple(m(torch.zeros(3)).tolist())
        seen[order] = seen.get(order, 0) + 1
    assert len(seen) == 6 and max(seen.values()) < 260 and min(seen.values()) > 140


@pytest.mark.parametrize("replacement", [False, True])
def test_multinomial(replacement: bool) -> None:
    m = compiled(
        lambda x: torch.multinomial(x, 2, replacement),
        torch.rand(3, 4),
        dims=({0: "rows", 1: "n"},),
    )
    torch.manual_seed(0)
    weights = torch.tensor([1.0, 0.0, 3.0, 4.0]).expand(COUNT, 4)
    found = m(weights)
    share = torch.bincount(found[:, 0], minlength=4) / COUNT
    assert (share - torch.tensor([1, 0, 3, 4]) / 8).abs().max() < 0.015
    assert not (found == 1).any()
    twice = (found[:, 0] == found[:, 1]).double().mean()
    assert abs(twice - 26 / 64) < 0.02 if replacement else twice == 0


def test_dropout_of_a_model_in_training_mode() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        plane = x.reshape(-1, 4, 5)
        return [
            nn.functional.dropout(x, 0.25),
            nn.functional.alpha_dropout(x, 0.25, True),
            nn.functional.dropout1d(plane, 0.5),
            nn.functional.feature_alpha_dropout(plane, 0.5, True),
            nn.functional.rrelu(-x, training=True),
        ]

    m = compiled(function, torch.ones(40), dims=({0: torch.export.Dim.AUTO},))
    torch.manual_seed(0)
    plain, alpha, planes, features, leaky = m(torch.ones(COUNT))
    assert abs((plain == 0).double().mean() - 0.25) < 0.015
    assert torch.allclose(plain[plain != 0], torch.tensor(4 / 3))
    assert len(alpha.unique()) == 2
    for whole in (planes, features):
        assert (whole == whole[:, :, :1]).all() and len(whole.unique()) == 2
    assert leaky.min() >= -1 / 3 - 1e-6 and leaky.max() <= -1 / 8
    assert abs(leaky.mean() + (1 / 8 + 1 / 3) / 2) < 0.005
