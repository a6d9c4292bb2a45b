"""Gradients against torch's autograd: parts of models, at sizes 1, odd, prime, 0."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training_oracle import check_gradients

ROWS = (({0: "n"},), ({0: "n"},))


def rows(n: int, width: int, out: int) -> tuple[tuple[Tensor], tuple[Tensor]]:
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, width, generator=generator)
    return (x,), (torch.randn(n, out, generator=generator),)


def test_feedforward() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    batches = [rows(n, 8, 4) for n in (1, 2, 7, 13, 64)]
    check_gradients(model, F.mse_loss, rows(5, 8, 4), ROWS, batches)


def test_no_rows() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return (out - y).square().sum()

    check_gradients(model, loss, rows(5, 3, 2), ROWS, [rows(0, 3, 2)])
