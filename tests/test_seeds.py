"""Numbers drawn at random are the same in every run, in any order of the tests."""

from __future__ import annotations

import random

import hypothesis
import numpy as np
import pytest
import torch

Drawn = tuple[float, float, float]


def draw() -> Drawn:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


AT_IMPORT = draw()


def seeded() -> Drawn:
    generator = torch.Generator().manual_seed(0)
    others = random.Random(0).random(), float(np.random.RandomState(0).rand())
    return *others, torch.rand((), generator=generator).item()


@pytest.fixture(scope="module")
def of_module() -> Drawn:
    return draw()


@pytest.fixture
def of_test() -> Drawn:
    return draw()


@pytest.mark.parametrize("turn", range(2))
def test_draws_are_seeded(turn: int, of_module: Drawn, of_test: Drawn) -> None:
    assert draw() == of_test == of_module == AT_IMPORT == seeded()
    draw()


def test_hypothesis_draws_the_same_examples() -> None:
    assert hypothesis.settings().derandomize
