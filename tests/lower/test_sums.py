"""Rounding errors of sums over any axes, of many terms, against fp64 and eager."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pliant
from pliant.lower.runs import RUN

MANY = 100_003  # prime: no run, vector or piece divides it
MOST = 1_000_003
UNITS = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
}


class Apply(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def compiled(
    function: Callable[[Tensor], Tensor], example: Tensor, threads: int = 1
) -> Callable[[Tensor], Tensor]:
    dims = dict(enumerate("abcd"[: example.dim()]))
    return pliant.compile(Apply(function), (example,), (dims,), threads=threads)


def judge(
    ours: Callable[[Tensor], Tensor],
    function: Callable[[Tensor], Tensor],
    x: Tensor,
    units: float = RUN / 8,
) -> None:
    """At most twice eager's error, plus some rounding errors of the largest result.

    All terms have one sign, so a result is as large as the sum of its terms.
    """
    exact, eager, got = function(x.double()), function(x), ours(x)
    assert (got.shape, got.dtype) == (eager.shape, eager.dtype)
    if not got.numel():
        return
    scale = exact.abs().max().item()
    error = (got.double() - exact).abs().max().item()
    limit = 2 * (eager.double() - exact).abs().max().item()
    limit += units * UNITS[got.dtype] * scale
    assert error <= limit, f"{tuple(x.shape)}: {error / scale:.2g} of the result"


# The axes of a sum, and a shape with about n terms for each result.
SHAPES: dict[str, tuple[tuple[int, ...], Callable[[int], tuple[int, ...]]]] = {
    "leading": ((0,), lambda n: (n, 3)),
    "leading, wide": ((0,), lambda n: (n, 21)),
    "leading, one column": ((0,), lambda n: (n, 1)),
    "middle": ((1,), lambda n: (2, n, 3)),
    "trailing": ((1,), lambda n: (3, n)),
    "two leading": ((0, 1), lambda n: (math.ceil(n / 7), 7, 2)),
    "around": ((0, 2), lambda n: (math.ceil(n / 7), 2, 7)),
    "around, long": ((0, 2), lambda n: (3, 2, math.ceil(n / 3))),
    "first and third": ((0, 2), lambda n: (7, 2, math.ceil(n / 7), 3)),
    "all": ((0, 1), lambda n: (math.ceil(n / 3), 3)),
}
COUNTS = (0, 1, RUN - 1, RUN, RUN + 1, 3 * RUN + 5, 5000, MANY)


@pytest.mark.parametrize("name", SHAPES)
def test_sums_of_many_terms(name: str) -> None:
    axes, shape = SHAPES[name]

    def total(x: Tensor) -> Tensor:
        return x.sum(axes)

    ours = compiled(total, torch.rand(shape(12)), threads=2)
    for count in COUNTS:
        judge(ours, total, torch.rand(shape(count)))
        judge(ours, total, -torch.rand(shape(count)).exp())
    for number in (0.1, 1 / 3, 1.1):  # all rounding errors of a sum point one way
        judge(ours, total, torch.full(shape(MANY), number))


@pytest.mark.parametrize("name", ["leading", "trailing", "around"])
def test_a_million_terms(name: str) -> None:
    axes, shape = SHAPES[name]

    def total(x: Tensor) -> Tensor:
        return x.sum(axes)

    ours = compiled(total, torch.rand(shape(12)))
    judge(ours, total, torch.rand(shape(MOST)))
    judge(ours, total, torch.full(shape(MOST), 0.1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_floats(dtype: torch.dtype) -> None:
    def total(x: Tensor) -> Tensor:
        return x.sum(0)

    ours = compiled(total, torch.rand(12, 3, dtype=dtype))
    for count in COUNTS:
        x = torch.rand(count, 3, dtype=dtype) / max(count, 1)
        judge(ours, total, x, units=1 if dtype is not torch.float64 else RUN / 8)


def test_f64_against_an_exact_sum() -> None:
    """fp64 is no reference for itself: fsum rounds once."""
    x = torch.rand(MOST, 2, dtype=torch.float64)
    ours = compiled(lambda x: x.sum(0), torch.rand(12, 2, dtype=torch.float64))
    rows = compiled(lambda x: x.sum(1), torch.rand(2, 12, dtype=torch.float64))
    exact = torch.tensor(
        [math.fsum(column) for column in x.T.tolist()], dtype=torch.float64
    )
    for got in (ours(x), rows(x.T.contiguous())):
        assert ((got - exact).abs() / exact).max() <= 4 * UNITS[torch.float64]


STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean(0),
    "var": lambda x: x.var(0),
    "norm": lambda x: x.norm(dim=0),
    "squares": lambda x: (x * x).sum(0),
    "logsumexp": lambda x: x.logsumexp(0),
    "softmax": lambda x: x.softmax(0) * MANY,
    "moments": lambda x: torch.stack([x.mean(0), (x * 2).exp().sum(0) / MANY]),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True).square().sum(0),
}


@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_over_a_batch(name: str) -> None:
    function = STATISTICS[name]
    ours = compiled(function, torch.rand(12, 3))
    judge(ours, function, torch.rand(MANY, 3) + 3)


def test_gradients_that_sum_over_a_batch() -> None:
    """Of a bias and of a scale, every term with the same sign."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.bias = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale + self.bias

    def loss(y: Tensor) -> Tensor:
        return (y.exp()).sum()

    model = Scaled()
    step = pliant.compile_training(
        model,
        loss,
        pliant.SGD(0.1),
        ((torch.rand(12, 3),), ()),
        (({0: "n"},), ()),
        threads=1,
    )
    x = torch.rand(MANY, 3)
    _, gradients = step.gradients((x,), ())
    powers = (x.double() + 1).exp()
    for name, exact in (("bias", powers.sum(0)), ("scale", (powers * x).sum(0))):
        error = (gradients[name].double() - exact).abs() / exact
        assert error.max() <= RUN / 4 * UNITS[torch.float32], name


@pytest.mark.parametrize("axis", [0, 1])
def test_cumulative_sums(axis: int) -> None:
    """Every element of eager's is the f64 sum up to it, rounded once."""

    def along(x: Tensor) -> Tensor:
        return x.cumsum(axis)

    ours = compiled(along, torch.rand(3, 4))
    for count in (0, 1, 7, MANY):
        x = torch.rand((count, 3) if axis == 0 else (3, count))
        torch.testing.assert_close(ours(x), along(x), rtol=2.0**-23, atol=0)


def test_infinities_and_signed_zeros() -> None:
    def total(x: Tensor) -> Tensor:
        return x.sum(0)

    ours = compiled(total, torch.rand(12, 5))
    for count in (1, RUN, 3 * RUN + 5):
        x = torch.rand(count, 5)
        x[-1, 0], x[0, 1], x[count // 2, 2] = math.inf, -math.inf, math.nan
        x[:, 3] = -0.0
        x[:, 4] = 3e38  # the sum of two is infinite
        got, eager = ours(x), total(x)
        assert torch.equal(got.nan_to_num(7.0), eager.nan_to_num(7.0))
        assert got.isnan().tolist() == eager.isnan().tolist()
