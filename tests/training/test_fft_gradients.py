"""Gradients through Fourier transforms, against torch's in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fft, nn
from training_oracle import check_gradients


class Spectral(nn.Module):
    """A layer in front of a transform, so that its gradient goes through it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(6, 6), kind

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.kind == "fnet":
            return fft.fftn(x, dim=(1, 2)).real
        if self.kind == "filter":
            half = fft.rfft(x, dim=1, norm="ortho")
            weight = torch.polar(x.mean(1, keepdim=True).exp(), x[:, :1])
            return fft.irfft(half * weight, n=x.shape[1], dim=1, norm="ortho")
        return fft.rfft(x, dim=2).abs() + fft.ifft(x, dim=1).imag[..., :4]


@pytest.mark.parametrize("kind", ("fnet", "filter", "sizes"))
def test_gradients(kind: str) -> None:
    torch.manual_seed(0)
    model = Spectral(kind)

    def batch(rows: int, length: int) -> tuple[tuple[Tensor], tuple[()]]:
        return (torch.randn(rows, length, 6),), ()

    check_gradients(
        model,
        lambda y: y.square().mean() + y.mean(),
        batch(2, 8),
        (({0: "b", 1: "n"},), ()),
        [batch(1, 5), batch(3, 7), batch(2, 16)],
    )
