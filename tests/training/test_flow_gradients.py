"""Gradients through control flow against torch's autograd."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops import while_loop
from torch._higher_order_ops.scan import scan
from training_oracle import check_gradients

import pliant

DIMS = {0: "batch", 1: "length"}
DYNAMIC = ((DIMS,), (DIMS,))


def batch(rows: int, length: int, out: int) -> tuple[tuple[Tensor], tuple[Tensor]]:
    generator = torch.Generator().manual_seed(100 * rows + length)
    x = torch.randn(rows, length, 3, generator=generator)
    return (x,), (torch.randn(rows, length, out, generator=generator),)


def compare(model: nn.Module, out: int) -> None:
    torch.manual_seed(0)
    sizes = ((1, 1), (3, 7), (2, 12))
    batches = [batch(*size, out) for size in sizes]
    check_gradients(model, F.mse_loss, batch(2, 5, out), DYNAMIC, batches)


class Tagger(nn.Module):
    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind: Callable[..., nn.Module]) -> None:
    compare(Tagger(kind(3, 4, 2, bidirectional=True, batch_first=True), 8), 2)


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(
            x.sum() > 0,
            lambda x: torch.tanh(self.a(x)),
            lambda x: self.b(x) ** 2 + self.a(x),
            (x,),
        )


def test_branch() -> None:
    compare(Branch(), 2)


class Filter(nn.Module):
    """A scan whose body has a branch on data."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.start = nn.Linear(3, 3), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        def step(h: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.cond(
                row.sum() > 0,
                lambda h, row: torch.tanh(self.mix(h) + row),
                lambda h, row: h * 0.5 + row.exp(),
                (h, row),
            )
            return h, h * row

        begin = self.start.expand(x.shape[0], 3).clone()
        last, rows = scan(step, begin, x, dim=1)
        return rows + last[:, None]


def test_scan_around_a_branch() -> None:
    compare(Filter(), 3)


def test_a_while_loop_has_no_gradient() -> None:
    class Repeat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            start = torch.zeros((), dtype=torch.int64)
            return while_loop(
                lambda i, x: i < 3, lambda i, x: (i + 1, self.mix(x)), (start, x)
            )[1]

    model = Repeat()
    step = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = batch(2, 5, 3)
    with pytest.raises(pliant.UnsupportedOpError, match="while: its gradient is not"):
        pliant.compile_training(model, F.mse_loss, step, (inputs, targets), DYNAMIC)


class Sorted(nn.Module):
    """Kernels in C on the way there and on the way back."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        def step(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            carry = torch.tanh(carry + self.inner(row)).sort(-1).values
            return carry, carry * carry.topk(2, -1).values.sum(-1, keepdim=True)

        start = x.new_zeros(x.shape[0], 4)
        return self.head(scan(step, start, x.transpose(0, 1))[1].transpose(0, 1))


def test_kernels_in_c_inside_a_scan() -> None:
    compare(Sorted(), 2)
