"""Softmax multiplies by a reciprocal; every other quotient divides."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pliant
from pliant.ir.loop_walk import values
from pliant.ir.loops import Binary, Unary


class Apply(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def compiled(function: Callable[[Tensor], Tensor]) -> pliant.CompiledModel:
    dims = {0: "rows", 1: "columns"}
    return pliant.compile(Apply(function), (torch.randn(3, 4),), (dims,), threads=2)


def ops(model: pliant.CompiledModel) -> set[str]:
    return {
        value.op
        for func in model.program.lowered.loops.values()
        for value in values(func.body)
        if isinstance(value, Unary | Binary)
    }


def divided_by_the_shifted(x: Tensor) -> Tensor:
    e = (x - x.amax(-1, keepdim=True)).exp()
    return x / e.sum(-1, keepdim=True)


def unshifted(x: Tensor) -> Tensor:
    e = x.exp()
    return e / e.sum(-1, keepdim=True)


def shifted_by_columns(x: Tensor) -> Tensor:
    e = (x - x.amax(0, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


@pytest.mark.parametrize("axis", [0, 1])
def test_softmax_multiplies(axis: int) -> None:
    model = compiled(lambda x: x.softmax(axis))
    assert "reciprocal" in ops(model) and "div" not in ops(model)
    nan, inf = math.nan, math.inf
    for x in (
        torch.tensor([[1.0, nan, 2.0], [inf, 0.0, 1.0], [-inf, -inf, -inf]]),
        torch.tensor([[-inf, 0.0, 3e38], [-3e38, 3e38, 1.0], [0.0, -0.0, 1e-45]]),
        torch.randn(7, 1),
        torch.randn(0, 5),
        torch.randn(13, 257) * 30,
    ):
        wanted = x.softmax(axis)
        # Denormals are that far apart, so their last digit is more than rtol allows.
        last = 2.0**-149
        torch.testing.assert_close(
            model(x), wanted, rtol=2e-6, atol=last, equal_nan=True
        )


@pytest.mark.parametrize(
    "function", [divided_by_the_shifted, unshifted, shifted_by_columns]
)
def test_others_divide(function: Callable[[Tensor], Tensor]) -> None:
    model = compiled(function)
    assert "div" in ops(model) and "reciprocal" not in ops(model)
    x = torch.randn(5, 33)
    torch.testing.assert_close(model(x), function(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shares_are_the_same_where_they_are_computed_again(dtype: torch.dtype) -> None:
    """The way back compares shares with the largest of a column."""

    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            generator = torch.Generator().manual_seed(0)
            made = torch.randn(13, 67, generator=generator, dtype=dtype)
            self.x = nn.Parameter(made)

        def forward(self, factor: Tensor) -> Tensor:
            return (self.x * factor).softmax(-1).amax(0)

    model, batch = Shares(), ((torch.ones(67, dtype=dtype),), ())
    step = pliant.compile_training(model, torch.sum, pliant.SGD(0.1), batch, None)
    model(*batch[0]).sum().backward()
    wanted = model.x.grad
    assert wanted is not None
    torch.testing.assert_close(step.gradients(*batch)[1]["x"], wanted)
