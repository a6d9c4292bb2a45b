"""Gradients of linear algebra against torch's autograd, in f64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pliant

L = torch.linalg


def definite(x: Tensor) -> Tensor:
    return x @ x.mT + torch.eye(x.shape[-1], dtype=x.dtype)


def symmetric(x: Tensor) -> Tensor:
    return x + x.mT


def _weights(x: Tensor) -> Tensor:
    """So that every element of a result counts differently."""
    return torch.arange(1.0, x.numel() + 1, dtype=x.dtype).reshape(x.shape).sin()


def _vectors(values: Tensor, vectors: Tensor) -> Tensor:
    """Of eigenvectors, whose signs are open, what does not depend on them."""
    weights = _weights(vectors[0])
    return (
        (values * weights[0]).sum()
        + ((vectors @ vectors.mT.roll(1, -1)) * weights).sum()
        + ((vectors * vectors) * weights).sum()
    )


def _svd(x: Tensor) -> Tensor:
    u, s, vh = L.svd(x, full_matrices=False)
    both = u @ vh
    return (
        (both * _weights(both[0])).sum()
        + (s * _weights(s[0])).sum()
        + ((u * u) * _weights(u[0])).sum()
    )


def _of(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        found = function(x)
        return (found * _weights(found[0])).sum()

    return run


def _qr(x: Tensor) -> Tensor:
    q, r = L.qr(x)
    return (q * _weights(q[0])).sum() + (r * _weights(r[0]).cos()).sum()


SQUARE: dict[str, Callable[[Tensor], Tensor]] = {
    "cholesky": _of(lambda x: L.cholesky(definite(x))),
    "cholesky upper": _of(lambda x: L.cholesky(definite(x), upper=True)),
    "inv": _of(L.inv),
    "det": _of(L.det),
    "slogdet": lambda x: L.slogdet(x)[1].sum(),
    "solve": _of(lambda x: L.solve(x, x.mT[..., :2].sin())),
    "solve right": _of(lambda x: L.solve(x, x[..., :2, :].cos(), left=False)),
    "solve a vector": _of(lambda x: L.solve(x, x[..., 0].cos())),
    "triangular": _of(lambda x: L.solve_triangular(x, x.cos(), upper=True)),
    "triangular right": _of(
        lambda x: L.solve_triangular(
            x, x.cos(), upper=False, left=False, unitriangular=True
        )
    ),
    "cholesky_solve": _of(
        lambda x: torch.cholesky_solve(x.sin(), L.cholesky(definite(x)))
    ),
    "eigh": lambda x: _vectors(*L.eigh(symmetric(x))),
    "eigvalsh": _of(lambda x: L.eigvalsh(symmetric(x))),
    "svd": _svd,
    "svdvals": _of(L.svdvals),
    "pinv": _of(L.pinv),
    "nuclear": _of(lambda x: L.matrix_norm(x, "nuc")),
}


class Apply(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(*shape, dtype=torch.float64))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x + self.weight)


def check(net: Apply, sizes: Any, *shape: int) -> None:
    def batch(n: int) -> tuple[tuple[Tensor], tuple[()]]:
        return (torch.randn(n, *shape, dtype=torch.float64),), ()

    step = pliant.compile_training(
        net, lambda y: y, pliant.SGD(0.1), batch(3), (({0: "n"},), ())
    )
    for n in sizes:
        inputs, targets = batch(n)
        _, ours = step.gradients(inputs, targets)
        (theirs,) = torch.autograd.grad(net(*inputs), [net.weight])
        torch.testing.assert_close(ours["weight"], theirs, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", SQUARE)
def test_square(name: str) -> None:
    check(Apply(SQUARE[name], 4, 4), (1, 2, 5), 4, 4)


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (1, 1)])
def test_svd_of_any_shape(shape: tuple[int, int]) -> None:
    check(Apply(_svd, *shape), (1, 3), *shape)


@pytest.mark.parametrize("shape", [(4, 4), (5, 3), (3, 5), (1, 1)])
@pytest.mark.parametrize("part", ["both", "q", "r"])
def test_qr_of_any_shape(shape: tuple[int, int], part: str) -> None:
    parts = {
        "both": _qr,
        "q": _of(lambda x: L.qr(x)[0]),
        "r": _of(lambda x: L.qr(x)[1]),
    }
    check(Apply(parts[part], *shape), (1, 3), *shape)
