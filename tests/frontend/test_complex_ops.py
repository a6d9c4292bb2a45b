"""Complex tensors as pairs: ops on them, and complex inputs, weights and results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from test_fft_ops import COMPLEX, DIMS, Call, check, normal
from torch import nn

import pliant

SHAPES = ((3, 8), (1, 1), (2, 7), (0, 4), (3, 0))


@pytest.mark.parametrize(
    "model",
    (
        lambda x: (x + 2, x - 1j, 3 - x, x * x, x * 2.5, x * (1 + 2j), -x),
        lambda x: (x / (x + 3), x / 2, 1 / (x + 3), x**3, x.square()),
        lambda x: (x.real, x.imag, x.abs(), x.angle(), x.conj(), x.sgn()),
        lambda x: (x.exp(), (x + 4).log(), torch.view_as_real(x)),
        lambda x: (x == x.conj(), x != 1j, torch.where(x.real > 0, x, 1j)),
        lambda x: (x.sum(-1), x.sum(), x.mT, x[:, 1:], x.flatten(), x.unsqueeze(0)),
        lambda x: (torch.cat([x, x.real], 1), torch.stack([x, x * 2])[1]),
        lambda x: (x @ x.mH, torch.einsum("bn,cn->bc", x, x.conj())),
        lambda x: (x.roll(1, 0), x.flip(1), torch.zeros_like(x), x.abs() + 0j),
        lambda x: (x.to(torch.complex128), torch.complex(x.real, x.abs())),
        lambda x: tuple(x.mT[..., None].expand(-1, -1, 3).unbind(2)),
        lambda x: (x.sin(), x.cos(), x.tan(), x.sinh(), x.cosh(), x.tanh()),
        lambda x: ((x * 30).tanh(), (x * 1e-3).expm1(), (x * 1e-3).log1p()),
        lambda x: (x.sqrt(), (x + 4).rsqrt(), x.sigmoid(), x.exp2(), x.expm1()),
        lambda x: (x.log1p(), (x + 4).log2(), (x + 4).log10(), x.isfinite()),
        lambda x: ((x + 4) ** 0.5, (x + 4) ** 1.5, (x + 4) ** -2, 2**x, x**x.real),
        lambda x: (x ** (x + 3), (x * 0) ** 2.5, x.lerp(x + 1, 0.3), x.lerp(-x, 0.7)),
        lambda x: torch.meshgrid(x[0], x[0] * 2, indexing="ij"),
    ),
)
def test_ops(model: Callable[..., Any]) -> None:
    shapes = tuple(s for s in SHAPES if s[0])
    check(model, COMPLEX, shapes)


def _spectrum(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Frequencies written into a tensor of zeros, as Fourier operators do."""
    out = torch.zeros(x.shape[0], x.shape[1] + 2, dtype=x.dtype)
    out[:, 1:-1] = x * (2 - 1j)
    out[:, 0] += 3
    row = out.mT[-1]
    row.fill_(1j)
    return out, row, out.clone().mul_(2).view(-1)


def test_changes_in_place() -> None:
    check(_spectrum, COMPLEX, tuple(s for s in SHAPES if 0 not in s))

    def part(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x.real.add_(1)
        return x

    def given(x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2)

    for model in (part, given):
        with pytest.raises(pliant.UnsupportedOpError, match=r"in.place"):
            pliant.compile(Call(model), (normal(2, 3, dtype=COMPLEX[0]),))


def _square(x: torch.Tensor) -> torch.Tensor:
    eye = torch.eye(x.shape[0], dtype=x.dtype)
    return x @ x.mH + eye


def _rows(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a = _square(x)
    index = torch.arange(x.shape[0])
    return x.index_put((index,), x * 2), x.index_add(0, index, x), torch.trace(a)


@pytest.mark.parametrize(
    "model",
    (
        lambda x: (torch.linalg.inv(_square(x)), torch.inverse(_square(x))),
        lambda x: torch.linalg.inv_ex(_square(x)),
        lambda x: (
            torch.linalg.solve(_square(x), x),
            torch.linalg.matrix_exp(x @ x.mH),
        ),
        lambda x: (torch.linalg.solve(_square(x), x.mT, left=False),),
        lambda x: (torch.linalg.solve(_square(x), x[:, 0]),),
        _rows,
    ),
)
def test_matrices(model: Callable[..., Any]) -> None:
    check(lambda x: model(x / 2), COMPLEX, ((3, 8), (1, 1), (2, 7), (5, 3)))


def test_a_singular_matrix() -> None:
    x = torch.eye(3, dtype=torch.complex64)
    m = pliant.compile(Call(lambda x: torch.linalg.inv_ex(x).info), (x,))
    for k in range(3):
        spoilt = x.clone()
        spoilt[k, k] = 0
        assert int(m(spoilt)) == k + 1 == int(torch.linalg.inv_ex(spoilt).info)
    with pytest.raises(pliant.MatrixError, match="singular"):
        pliant.compile(Call(torch.linalg.inv), (x,))(x * 0)


def test_rotary_positions() -> None:
    """As in llama4: pairs of a head's numbers are turned by complex factors."""

    def model(x: torch.Tensor) -> Any:
        turn = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * x.new_ones(1, 4)
        factors = torch.polar(torch.ones_like(turn), turn)
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return (torch.view_as_real(pairs * factors).flatten(2),)

    dims = ({0: "b", 1: "n"},)
    shapes = ((2, 5, 8), (1, 1, 8), (3, 16, 8))
    check(model, (torch.float32, torch.float64), shapes, dims)


class Filter(nn.Module):
    """A spectrum times complex weights, as global filter networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=16)


def test_complex_weights_are_followed() -> None:
    model = Filter()
    x = normal(3, 16, dtype=torch.float32)
    m = pliant.compile(model, (x,), ({0: "b"},))
    torch.testing.assert_close(m(x), model(x), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        model.weight.mul_(2 - 1j)
    torch.testing.assert_close(m(x), model(x), rtol=1e-5, atol=1e-5)


def test_inputs_of_other_kinds() -> None:
    x = normal(2, 3, dtype=torch.complex64)
    m = pliant.compile(Call(lambda x: x * 2j), (x,), (DIMS,))
    assert torch.equal(m(x.conj()), x.conj() * 2j)  # conjugated lazily
    assert torch.equal(m(x.mT), x.mT * 2j)  # with strides
    array = x.numpy()
    answer = m(array)
    assert isinstance(answer, np.ndarray) and answer.dtype == np.complex64
    assert np.array_equal(answer, array * 2j)
    for wrong in (x.real, x.to(torch.complex128), torch.view_as_real(x), 3):
        with pytest.raises(pliant.DTypeError, match="must be complex64"):
            m(wrong)
    with pytest.raises(pliant.ShapeError, match="dims"):
        m(x[0])


def test_what_has_no_translation_is_named() -> None:
    x = normal(2, 3, dtype=torch.complex64)
    for function in (
        torch.linalg.cholesky,
        torch.asin,
        lambda x: torch.fft.fft(x).real.zero_(),
    ):
        with pytest.raises(pliant.UnsupportedOpError):
            pliant.compile(Call(function), (x[:, :2],), None)


def test_eigenvalues() -> None:
    def model(x: torch.Tensor) -> Any:
        square = x @ x.mT + x[:, :1]
        values, vectors = torch.linalg.eig(square)
        off = square.to(values.dtype) @ vectors - vectors * values
        sizes = torch.linalg.eigvals(square).abs().sort().values
        return off.abs() / (1 + sizes[-1]), sizes

    shapes = ((3, 8), (1, 1), (7, 5), (20, 30))
    check(model, (torch.float32, torch.float64), shapes, units=2000)
