"""Ops at sizes of nothing, of one, and without dims, compiled and against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pliant

AUTO = torch.export.Dim.AUTO


class Applied(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


def as_eager(function: Callable[..., Any], *args: Tensor, dynamic: Any = None) -> None:
    shapes = None if dynamic is None else (tuple(dynamic),)
    compiled = pliant.compile(Applied(function), args, shapes, threads=1)
    got, want = compiled(*args), function(*args)
    torch.testing.assert_close(got, want, equal_nan=True)


PADS = [(-1, 1), (1, -1), (-2, -1), (2, 1), (0, 3), (-1, 0), (0, 0)]


def test_pads_that_cut() -> None:
    def padded(x: Tensor) -> list[Tensor]:
        each = [F.pad(x, p, m) for p in PADS for m in ("circular", "constant")]
        return each + [F.pad(x, p, m) for p in PADS[:4] for m in ("replicate",)]

    as_eager(padded, torch.arange(8.0).reshape(1, 2, 4))
    dims = ({0: "b", 1: "c", 2: AUTO},)
    as_eager(padded, torch.arange(12.0).reshape(1, 2, 6), dynamic=dims)


def test_variance_of_few() -> None:
    def variances(x: Tensor) -> list[Tensor]:
        found = [torch.var(x, 0, correction=c) for c in (-5, -1, 0, 1, 2, 5)]
        return [*found, torch.std(x, correction=-2), *torch.var_mean(x, correction=-1)]

    model = Applied(variances)
    compiled = pliant.compile(model, (torch.randn(3, 2),), (({0: "n"},),), threads=1)
    for size in (0, 1, 2, 5):
        x = torch.randn(size, 2)
        torch.testing.assert_close(compiled(x), variances(x), equal_nan=True)


def test_diff() -> None:
    def differences(x: Tensor, y: Tensor) -> list[Tensor]:
        found = [torch.diff(x, n=n) for n in (0, 1, 3)]
        found += [torch.diff(x, n=n, append=y) for n in (0, 1, 3)]
        return found + [torch.diff(x, n=n, prepend=y) for n in (0, 1, 3)]

    as_eager(differences, torch.randn(5), torch.randn(2))
    as_eager(differences, torch.randn(1), torch.randn(2))


def test_without_dims() -> None:
    def scalars(x: Tensor) -> list[Tensor]:
        found = [x.unfold(0, 1, 1), x.cumsum(0), x.sum(0), x.softmax(0), x.max(0)[0]]
        return [*found, x.flip(0), x.logsumexp(0), x.argmax(), x.prod(0), x.amax(0)]

    as_eager(scalars, torch.tensor(1.5))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.tile((0, 1)),
        lambda x: x.repeat(2, 0, 1),
        lambda x: F.group_norm(x, 2),
        lambda x: x[:, :0] * 2,
    ],
    ids=["tile", "repeat", "group_norm", "slice"],
)
def test_sizes_of_nothing(function: Callable[..., Any]) -> None:
    dims = ({0: AUTO, 1: AUTO, 2: AUTO},)
    as_eager(function, torch.randn(2, 6, 3), dynamic=dims)


def test_weight_of_any_size() -> None:
    """Sizes that a kernel needs fixed are, where the caller left that to us."""
    args = torch.randn(1, 2, 4), torch.randn(2, 3, 3)
    as_eager(
        F.conv_transpose1d, *args, dynamic=({2: AUTO}, {0: AUTO, 1: AUTO, 2: AUTO})
    )
    with pytest.raises(pliant.UnsupportedOpError, match="transposed convolution"):
        as_eager(F.conv_transpose1d, *args, dynamic=({2: AUTO}, {2: "taps"}))


@pytest.mark.parametrize("steps", [1, 2, 6])
def test_linspace_to_a_size(steps: int) -> None:
    def places(x: Tensor) -> Tensor:
        return x.sum() + torch.linspace(0.5, x.shape[0] - 0.5, steps)

    as_eager(places, torch.randn(7), dynamic=({0: "n"},))


@pytest.mark.parametrize("scale", [0.5, 0.6, 0.7, 1.4, 0.29, 1 / 3, 2.0])
def test_sizes_times_a_float_are_rounded_as_floats(scale: float) -> None:
    """90 * 0.7 is just below 63: such a size is refused, all others are eager's."""

    def resized(x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=scale, mode="nearest")

    model, x = Applied(resized), torch.randn(1, 1, 11)
    compiled = pliant.compile(model, (x,), (({2: "n"},),), threads=1)
    refused = 0
    for n in (7, 10, 45, 85, 90, 100, 170, 180, 200, 333):
        x = torch.randn(1, 1, n)
        try:
            assert compiled(x).shape == resized(x).shape
        except pliant.ShapeError:
            refused += 1
    assert refused == 0 if scale in (0.5, 0.6, 1 / 3, 2.0) else refused < 10


@pytest.mark.parametrize("masked", [False, True])
def test_torchs_own_attention_of_many_heads(masked: bool) -> None:
    """It slices the weights by a size that it asks the input for."""
    net = nn.MultiheadAttention(8, 2).eval()

    def attention(x: Tensor, y: Tensor) -> Any:
        mask = torch.ones(x.shape[0], y.shape[0], dtype=torch.bool).triu(1)
        return net(x, y, y, attn_mask=mask if masked else None)

    args = torch.randn(4, 3, 8), torch.randn(5, 3, 8)
    shapes = (({0: "t", 1: "b"}, {0: "s", 1: "b"}),)
    compiled = pliant.compile(Applied(attention), args, shapes, threads=1)
    for t, s, b in ((4, 5, 3), (1, 1, 1), (7, 9, 2), (2, 6, 1)):
        x, y = torch.randn(t, b, 8), torch.randn(s, b, 8)
        torch.testing.assert_close(compiled(x, y), attention(x, y))
