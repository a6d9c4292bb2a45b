"""Functions by recurrence, and pools that tell what they picked, against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pliant

special, aten = torch.special, torch.ops.aten


class Calls(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs)


def compiled(function: Callable[..., Any], *inputs: torch.Tensor) -> Any:
    auto = torch.export.Dim.AUTO
    dims = tuple(dict.fromkeys(range(x.dim()), auto) for x in inputs)
    return pliant.compile(Calls(function), inputs, {"inputs": dims})


POLYNOMIALS = [
    getattr(special, name)
    for name in dir(special)
    if "_polynomial_" in name and not name.startswith("_")
]


def test_polynomials() -> None:
    def function(x: torch.Tensor, n: torch.Tensor) -> list[torch.Tensor]:
        return [each(x, n) for each in POLYNOMIALS]

    assert len(POLYNOMIALS) == 12
    m = compiled(function, torch.rand(4), torch.ones(4))
    for size in (0, 1, 7, 23):
        x = torch.randn(size, dtype=torch.float32)
        n = torch.randint(-2, 12, (size,)).float()
        found, wide = m(x, n), function(x.double(), n.double())
        for ours, true in zip(found, wide, strict=True):
            torch.testing.assert_close(ours.double(), true, rtol=2e-5, atol=2e-5)


def test_gcd_and_lcm() -> None:
    m = compiled(lambda x, y: (torch.gcd(x, y), torch.lcm(x, y)), *_integers(4))
    for size in (0, 1, 7, 100):
        pair = _integers(size)
        assert torch.equal(m(*pair)[0], torch.gcd(*pair))
        assert torch.equal(m(*pair)[1], torch.lcm(*pair))


def _integers(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(-40, 40, (size,)), torch.randint(-1000, 1000, (size,))


def test_zeta_and_polygamma() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        more = [torch.polygamma(n, x) for n in range(4)]
        return [special.zeta(x.abs() + 1.1, x.abs() + 0.3), *more]

    m = compiled(function, torch.rand(4))
    for x in (torch.rand(50) * 20 + 0.01, torch.rand(9) * 5 - 5.2, torch.rand(0)):
        for ours, true in zip(m(x), function(x.double()), strict=True):
            torch.testing.assert_close(ours.double(), true, rtol=3e-5, atol=1e-5)


def test_incomplete_gamma() -> None:
    def function(a: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        return [special.gammainc(a, x), special.gammaincc(a, x)]

    m = compiled(function, torch.rand(4), torch.rand(4))
    a = torch.tensor([0.1, 0.5, 1, 2.5, 10, 100, 300, 0, 0, 1, 2, -1, 3]).repeat(4)
    x = torch.rand(a.numel()) * 1.5 * a.clamp(min=1)
    x[7:13] = torch.tensor([0.0, 2, 0, torch.inf, 1, -1])
    for ours, true in zip(m(a, x), function(a.double(), x.double()), strict=True):
        torch.testing.assert_close(
            ours.double(), true, rtol=1e-5, atol=1e-6, equal_nan=True
        )


def test_airy() -> None:
    m = compiled(special.airy_ai, torch.rand(4))
    edges = torch.tensor([0, -2.09, -2.0901, 2.09, 2.0901, 8.4, 104, torch.nan])
    for x in (torch.randn(50) * 6, edges, edges[:1], edges[:0], edges[:1] + torch.inf):
        true = special.airy_ai(x.double())
        torch.testing.assert_close(
            m(x).double(), true, rtol=1e-6, atol=1e-7, equal_nan=True
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_frexp(dtype: torch.dtype) -> None:
    m = compiled(torch.frexp, torch.rand(4, dtype=dtype))
    info = torch.finfo(dtype)
    edges = [0.0, -0.0, 1, 0.5, -2, info.max, info.tiny, info.tiny / 8, 3, torch.inf]
    x = torch.tensor([*edges, torch.nan, *torch.randn(50).tolist()], dtype=dtype)
    mantissa, exponent = m(x)
    its = torch.frexp(x)
    finite = x.isfinite()
    assert torch.equal(mantissa[finite], its.mantissa[finite])
    assert torch.equal(exponent[finite], its.exponent[finite])


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_adaptive_pools_tell_places(rank: int) -> None:
    pool = getattr(F, f"adaptive_max_pool{rank}d")
    m = compiled(
        lambda x: pool(x, [2, 3, 2][:rank], True), torch.rand(2, 3, *[7] * rank)
    )
    for sizes in ((4, 5, 6), (7, 7, 7), (2, 3, 5)):
        x = torch.randint(0, 5, (2, 3, *sizes[:rank])).float()
        x.view(-1)[::17] = torch.nan
        for ours, its in zip(m(x), pool(x, [2, 3, 2][:rank], True), strict=True):
            torch.testing.assert_close(ours, its, equal_nan=True)


@pytest.mark.parametrize("rank", [2, 3])
def test_fractional_pools(rank: int) -> None:
    pool = getattr(F, f"fractional_max_pool{rank}d_with_indices")

    def function(x: torch.Tensor, samples: torch.Tensor) -> Any:
        return pool(x, 2, [3, 4, 3][:rank], _random_samples=samples)

    m = compiled(function, torch.rand(2, 3, *[9] * rank), torch.rand(2, 3, rank))
    # Torch's trace of the pool of volumes fixes their size.
    for sizes in [(9, 9, 9)] * 3 if rank == 3 else [(8, 9), (4, 5), (13, 7)]:
        x, samples = torch.rand(2, 3, *sizes[:rank]), torch.rand(2, 3, rank)
        for ours, its in zip(m(x, samples), function(x, samples), strict=True):
            assert torch.equal(ours, its)


def test_pools_of_padding_alone() -> None:
    """Windows whose taps all lie in padding tell a place behind the input."""

    def function(x: torch.Tensor) -> Any:
        return aten.max_pool2d_with_indices(x, [2, 2], [1, 1], [1, 1], [3, 3])

    m = compiled(function, torch.rand(2, 3, 5, 4))
    for sizes in ((5, 2), (2, 4), (7, 2), (2, 2), (3, 3)):
        x = torch.rand(1, 2, *sizes)
        assert all(map(torch.equal, m(x), function(x)))


def test_gradient_of_a_pool_of_padding_alone() -> None:
    """Torch writes behind its memory here; what lies behind it is dropped."""

    def function(grad: torch.Tensor, x: torch.Tensor, where: torch.Tensor) -> Any:
        return aten.max_pool2d_with_indices_backward(
            grad, x, [2, 2], [1, 1], [1, 1], [3, 3], False, where
        )

    def inputs(height: int, width: int) -> tuple[torch.Tensor, ...]:
        x = torch.rand(1, 2, height, width)
        out, where = aten.max_pool2d_with_indices(x, [2, 2], [1, 1], [1, 1], [3, 3])
        return torch.rand_like(out), x, where

    m = compiled(function, *inputs(5, 4))
    for sizes in ((5, 2), (2, 2), (4, 5)):
        grad, x, where = inputs(*sizes)
        plane = torch.arange(2).reshape(1, 2, 1, 1) * sizes[0] * sizes[1]
        flat, share = (plane + where).flatten(), grad.flatten()
        wanted = torch.zeros(x.numel() + flat.numel() + 99).index_add(0, flat, share)
        torch.testing.assert_close(m(grad, x, where), wanted[: x.numel()].view_as(x))


@pytest.mark.parametrize("include", [False, True])
def test_means_that_round_up(include: bool) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=include)

    m = compiled(function, torch.rand(2, 3, 8, 9))
    for sizes in ((2, 2), (5, 6), (6, 9), (1, 1)):
        x = torch.rand(2, 3, *sizes)
        torch.testing.assert_close(m(x), function(x))


def test_strided() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        windows = torch.as_strided(x.contiguous(), (x.shape[0] - 2, 3), (1, 1))
        return [windows, torch.as_strided_scatter(x, x[:2] * 0, (2,), (2,), 1)]

    m = compiled(function, torch.rand(8))
    for size in (4, 5, 11):
        x = torch.rand(size)
        assert all(map(torch.equal, m(x), function(x)))


def test_slices_with_a_step_are_written() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = x.clone()
        out[1::3] = y.sum()
        out[:, ::2] *= 2
        return out

    m = compiled(function, torch.rand(8, 5), torch.rand(3))
    for sizes in ((1, 1), (2, 4), (9, 6), (0, 3)):
        pair = torch.rand(*sizes), torch.rand(3)
        torch.testing.assert_close(m(*pair), function(*pair))


def test_renormalised_embedding_and_bilinear() -> None:
    def function(w: torch.Tensor, i: torch.Tensor, x: torch.Tensor) -> Any:
        found = F.embedding(i, w, max_norm=1.0)
        return found, F.bilinear(x, found, w[None, :4, :4].repeat(3, 1, 1))

    m = compiled(function, torch.randn(6, 4), torch.tensor([1, 3, 1]), torch.rand(3, 4))
    given = torch.randn(6, 4), torch.tensor([0, 5, 5, 2]), torch.rand(4, 4)
    own, its = ([x.clone() for x in given] for _ in range(2))
    torch.testing.assert_close(m(*own), function(*its))
    torch.testing.assert_close(own, its)


def test_long_chains_of_differences_compile() -> None:
    m = compiled(lambda x: torch.diff(x, 12, 1), torch.rand(3, 30))
    x = torch.rand(2, 41)
    torch.testing.assert_close(m(x), torch.diff(x, 12, 1), rtol=1e-4, atol=1e-3)


def test_tensors_without_elements() -> None:
    for function in (
        lambda: torch.tril_indices(0, 3),
        lambda: torch.triu_indices(3, 3, 5),
        lambda: torch.tril_indices(3, 4, -9),
    ):
        m = compiled(lambda x, f=function: (f(), x + 1), torch.rand(3))
        assert torch.equal(m(torch.rand(5))[0], function())
