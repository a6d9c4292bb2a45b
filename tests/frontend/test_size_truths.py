"""Conditions on sizes that are used as values, and the bits of sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from guarded_runs import Call
from torch import Tensor

import pliant

AS_VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "tensor": lambda x: torch.where(torch.tensor(x.shape[0] > 3), x, x * 2),
    "full": lambda x: x.sum() * torch.full((2,), x.shape[0] > 3),
    "product": lambda x: x * (x.shape[0] > 3),
    "of_both": lambda x: x * ((x.shape[0] > 3) & (x.shape[0] < 9)),
    "of_either": lambda x: x * ((x.shape[0] > 5) | (x.shape[0] < 2)),
    "divides": lambda x: x * (x.shape[0] % 4 == 0),
    "fill": lambda x: torch.zeros_like(x).masked_fill(x > 0, x.shape[0] <= 4),
}


@pytest.mark.parametrize("function", AS_VALUES.values(), ids=AS_VALUES.keys())
def test_as_eager_or_refused(function: Callable[[Tensor], Tensor]) -> None:
    m = pliant.compile(Call(function), (torch.randn(4, 3),), ({0: "n"},), threads=1)
    answered = 0
    for n in (0, 1, 2, 3, 4, 5, 8, 9, 20):
        x = torch.randn(n, 3)
        try:
            got = m(x)
        except pliant.ShapeError as error:
            assert "the model's code branches on" in str(error)
            continue
        answered += 1
        torch.testing.assert_close(got, function(x))
    assert answered >= 3


def test_of_sizes_that_data_decide() -> None:
    def function(x: Tensor) -> Tensor:
        n = x.nonzero().shape[0]
        return x * (n > 3)

    with pytest.raises(pliant.PliantError):
        pliant.compile(Call(function), (torch.randn(4),), ({0: "n"},), threads=1)


BITS: dict[str, Callable[[Tensor], Tensor]] = {
    "low": lambda x: x * (x.shape[0] & 3),
    "from_the_left": lambda x: x * (7 & x.shape[0]),
    "high": lambda x: x[: x.shape[0] & ~3] * 1,
    "aligned": lambda x: x.new_ones((x.shape[0] + 7) & ~7) * x.sum(),
    "odd": lambda x: x * 2 if x.shape[0] & 1 == 0 else x * 3,
}


@pytest.mark.parametrize("function", BITS.values(), ids=BITS.keys())
def test_bits(function: Callable[[Tensor], Tensor]) -> None:
    m = pliant.compile(Call(function), (torch.randn(4, 3),), ({0: "n"},), threads=1)
    for n in (
        (0, 2, 4, 8, 10, 64) if function is BITS["odd"] else (0, 1, 3, 4, 7, 8, 13)
    ):
        x = torch.randn(n, 3)
        torch.testing.assert_close(m(x), function(x))


@pytest.mark.parametrize(
    "function", [lambda x: x * (x.shape[0] & 5), lambda x: x * (x.shape[0] | 3)]
)
def test_other_bits_are_refused(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(pliant.UnsupportedOpError, match="bits of a size"):
        pliant.compile(Call(function), (torch.randn(4, 3),), ({0: "n"},), threads=1)
