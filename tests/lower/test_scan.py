"""Kernels that walk a window or an axis, in machine code, against torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import pliant

IMAGE = {0: "batch", 2: "height", 3: "width"}


class Apply(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def agree(
    function: Callable[[Tensor], Any],
    example: Tensor,
    dims: dict[int, str],
    calls: list[Tensor],
    tolerance: float = 2e-5,
) -> None:
    compiled = pliant.compile(Apply(function), (example,), (dims,), threads=2)
    for x in (example, *calls):
        got, want = pytree.tree_leaves(compiled(x)), pytree.tree_leaves(function(x))
        for a, b in zip(got, want, strict=True):
            assert a.dtype is b.dtype
            torch.testing.assert_close(
                a,
                b,
                rtol=tolerance,
                atol=tolerance,
                equal_nan=True,
                msg=lambda m, x=x: f"{tuple(x.shape)}: {m}",
            )


def pictures(least: int) -> list[Tensor]:
    sizes = [s for s in (1, 2, 3, 5, 8, 17, 33) if s >= least]
    torch.manual_seed(0)
    made = [torch.randn(1, 3, h, w) for h, w in itertools.product(sizes, sizes)]
    return [*made, torch.randn(0, 3, 9, 9), torch.randn(3, 3, 9, 10)]


POOLS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "max": (lambda x: F.max_pool2d(x, 2), 2),
    "max padded": (lambda x: F.max_pool2d(x, 3, stride=2, padding=1), 1),
    "max dilated": (lambda x: F.max_pool2d(x, 2, stride=1, dilation=2), 3),
    "max uneven": (lambda x: F.max_pool2d(x, (3, 1), stride=(1, 2), padding=(1, 0)), 1),
    "max ceil": (lambda x: F.max_pool2d(x, 3, stride=2, ceil_mode=True), 3),
    "max ceil padded": (
        # (stride 3 over windows of 2 is refused at most sizes: torch's trace keeps a
        # last window that starts outside, eager drops it)
        lambda x: F.max_pool2d(x, 3, stride=2, padding=1, ceil_mode=True),
        1,
    ),
    "mean": (lambda x: F.avg_pool2d(x, 2), 2),
    "mean padded": (lambda x: F.avg_pool2d(x, 3, stride=2, padding=1), 1),
    "mean of inside": (
        lambda x: F.avg_pool2d(x, 3, stride=2, padding=1, count_include_pad=False),
        1,
    ),
    "mean ceil of inside": (
        lambda x: F.avg_pool2d(
            x, 3, stride=2, padding=1, ceil_mode=True, count_include_pad=False
        ),
        1,
    ),
    "after a map": (lambda x: F.max_pool2d(x.sin() - 2, 2, padding=1) + 1, 1),
    "of a transpose": (lambda x: F.max_pool2d(x.transpose(2, 3), (2, 1)), 2),
}


@pytest.mark.parametrize("name", POOLS)
def test_pool(name: str) -> None:
    function, least = POOLS[name]
    agree(function, torch.randn(2, 3, 11, 12), IMAGE, pictures(least))


def test_pool_of_rows() -> None:
    """Rank 3: torch takes a batch of planes without a batch of channels."""
    dims = {0: "batch", 1: "height", 2: "width"}
    shapes = ((1, 1, 1), (2, 3, 40), (3, 17, 2))
    calls = [torch.randn(shape) for shape in shapes]

    def pools(x: Tensor) -> tuple[Tensor, Tensor]:
        return F.max_pool2d(x, 3, 1, padding=1), F.avg_pool2d(x, 1, stride=2)

    agree(pools, torch.randn(2, 5, 9), dims, calls)


def test_pool_with_nan_and_infinity() -> None:
    x = torch.randn(2, 3, 4, 9)
    x[0, 1, 2, 4], x[1, 2, 0, 0], x[0, 0] = math.nan, math.inf, -math.inf

    def pools(x: Tensor) -> tuple[Tensor, Tensor]:
        return F.max_pool2d(x, 3, 1, padding=1), F.avg_pool2d(x, 2)

    agree(pools, x, IMAGE, [x[:, :, :, :5]])


def test_pool_of_integers() -> None:
    """Padding is below every value, the least included."""
    least = torch.iinfo(torch.int64).min
    x = torch.randint(-9, -1, (2, 3, 6, 7))
    x[0, 0, 0, 0] = least

    def pool(x: Tensor) -> Tensor:
        return F.max_pool2d(x, 3, stride=2, padding=1)

    agree(pool, x, IMAGE, [x[:, :, :1, :1]])


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_cumulate(axis: int) -> None:
    torch.manual_seed(0)
    calls = [
        torch.randn(shape)
        for shape in ((0, 1, 2), (1, 1, 1), (3, 0, 2), (2, 3, 0), (5, 17, 33))
    ]

    def sums(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.cumsum(axis), (x * 2).cumsum(axis) - x

    example = torch.randn(2, 3, 4)
    agree(sums, example, {0: "a", 1: "b", 2: "c"}, calls, 1e-4)


def test_cumulate_integers_and_narrow_floats() -> None:
    def sums(x: Tensor) -> tuple[Tensor, ...]:
        return x.cumsum(1), (x > 0).cumsum(0), x.to(torch.float64).cumsum(1)

    calls = [torch.randint(-9, 9, shape) for shape in ((1, 1), (0, 3), (4, 40))]
    agree(sums, torch.randint(-9, 9, (3, 4)), {0: "a", 1: "b"}, calls)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("keep", [False, True])
def test_argreduce(axis: int, keep: bool) -> None:
    torch.manual_seed(0)
    shapes = ((1, 1, 1), (5, 17, 33), (2, 9, 1), (1, 2, 40))
    calls = [torch.randint(-3, 3, shape).float() for shape in shapes]  # with ties

    def extremes(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.argmax(axis, keepdim=keep), (-x).argmin(axis, keepdim=keep)

    dims = {0: "a", 1: "b", 2: "c"}
    example = torch.randn(2, 3, 4)
    compiled = pliant.compile(Apply(extremes), (example,), (dims,), threads=2)
    for x in (example, *calls):
        for got in compiled(x):
            want = x.amax(axis, keepdim=True)
            at = got if keep else got.unsqueeze(axis)
            assert torch.equal(x.gather(axis, at), want)
            # The first of equal values.
            before = torch.arange(x.shape[axis]).view(
                [-1 if k == axis else 1 for k in range(3)]
            )
            assert not ((x == want) & (before < at)).any()


def test_argreduce_with_nan() -> None:
    nan, inf = math.nan, math.inf
    x = torch.tensor(
        [
            [1.0, nan, 3.0, nan],
            [nan, 1.0, 2.0, 3.0],
            [-inf, -inf, -inf, -inf],
            [inf, 1.0, inf, 0.0],
            [-1.0, -0.0, 0.0, -2.0],
        ]
    )
    dims = {0: "a", 1: "b"}
    agree(lambda x: (x.argmax(1), x.argmin(1)), x, dims, [x[:, :1], x[:2, 1:], x[:0]])


def test_argreduce_of_integers_and_whole() -> None:
    def extremes(x: Tensor) -> tuple[Tensor, ...]:
        return x.argmax(1), x.argmin(0), x.argmax(), (x > 0).int().argmax(1)

    calls = [torch.randperm(n * m).view(n, m) - 5 for n, m in ((1, 1), (3, 40), (8, 2))]
    agree(extremes, torch.randperm(12).view(3, 4) - 6, {0: "a", 1: "b"}, calls)


TRANSPOSED = [
    {"kernel_size": 3},
    {"kernel_size": 2, "stride": 2},
    {"kernel_size": 4, "stride": 2, "padding": 1},
    {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1},
    {"kernel_size": 3, "stride": 3, "dilation": 2, "output_padding": 2},
    {"kernel_size": 3, "groups": 2},
    {"kernel_size": (2, 3), "stride": (1, 2), "padding": (0, 2), "groups": 4},
    {"kernel_size": 1, "bias": False},
]


@pytest.mark.parametrize(
    "options", TRANSPOSED, ids=lambda o: " ".join(f"{k}={v}" for k, v in o.items())
)
def test_conv_transpose(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = nn.ConvTranspose2d(4, 8, **options).requires_grad_(False)
    shapes = [(1, 4, h, w) for h, w in itertools.product((1, 2, 5, 13), (2, 3, 17))]
    calls = [torch.randn(shape) for shape in (*shapes, (0, 4, 3, 3), (3, 4, 4, 5))]
    agree(lambda x: F.relu(layer(x)), torch.randn(2, 4, 5, 6), IMAGE, calls)


def test_conv_transpose_1d() -> None:
    torch.manual_seed(0)
    layer = nn.ConvTranspose1d(3, 5, 4, stride=2, padding=1).requires_grad_(False)
    calls = [torch.randn(b, 3, n) for b, n in ((1, 1), (0, 3), (2, 33))]
    agree(layer, torch.randn(2, 3, 7), {0: "batch", 2: "n"}, calls)
