"""Packed sequences and associative scans against eager, at every length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch.nn.utils import rnn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import pliant

DIMS = ({0: "batch", 1: "length"}, {0: "batch"})


class Packed(nn.Module):
    def __init__(
        self, layer: nn.RNNBase, sorted: bool, padding: dict[str, Any]
    ) -> None:
        super().__init__()
        self.layer, self.sorted, self.padding = layer, sorted, padding

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        first = self.layer.batch_first
        x = x if first else x.transpose(0, 1)
        packed = pack_padded_sequence(x, lengths, first, enforce_sorted=self.sorted)
        out, state = self.layer(packed)
        return *pad_packed_sequence(out, first, **self.padding), state


def lstm(**how: Any) -> nn.LSTM:
    return nn.LSTM(5, 7, **how)


LAYERS: dict[str, tuple[nn.RNNBase, bool, dict[str, Any]]] = {
    "lstm": (lstm(num_layers=2, bidirectional=True), False, {}),
    "projected": (lstm(proj_size=3, batch_first=True), False, {"padding_value": -1.0}),
    "gru": (nn.GRU(5, 7, bidirectional=True, batch_first=True), False, {}),
    "rnn": (nn.RNN(5, 7, nonlinearity="relu", bias=False), True, {"total_length": 40}),
}


def lengths_of(batch: int, length: int, sorted: bool) -> Tensor:
    lengths = torch.randint(1, length + 1, (batch,))
    return lengths.sort(descending=True)[0] if sorted else lengths


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    layer, sorted, padding = LAYERS[name]
    net = Packed(layer, sorted, padding).eval()
    m = pliant.compile(net, (torch.randn(3, 6, 5), torch.tensor([6, 4, 2])), DIMS)
    for batch, length in ((1, 1), (3, 6), (1, 9), (7, 2), (2, 31)):
        x, lengths = torch.randn(batch, length, 5), lengths_of(batch, length, sorted)
        with torch.no_grad():
            torch.testing.assert_close(m(x, lengths), net(x, lengths))
    x = torch.randn(2, 4, 5)
    wrong = [[5, 2], [3, 0], *([[2, 3]] if sorted else [])]
    for lengths in map(torch.tensor, wrong):
        with pytest.raises(pliant.IndexRangeError, match="lengths"):
            m(x, lengths)
    # Nothing is left behind.
    assert "_pliant_pack" not in vars(rnn)
    packed = pack_padded_sequence(x, torch.tensor([4, 2]), True)
    assert packed.data.shape == (6, 5)


def test_gradients() -> None:
    class Encoder(Packed):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            out, _, state = super().forward(x, lengths)
            return (out * out).sum() + state[0].sum()

    torch.manual_seed(0)
    layer = nn.LSTM(5, 7, bidirectional=True, batch_first=True)

    def batch(n: int, length: int) -> tuple[tuple[Tensor, Tensor], tuple[()]]:
        return (torch.randn(n, length, 5), lengths_of(n, length, False)), ()

    class Loss(Encoder):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            self.padding = {"total_length": x.shape[1]}
            return super().forward(x, lengths)

    net = Loss(layer, False, {})
    step = pliant.compile_training(
        net, lambda y: y, pliant.SGD(0.1), batch(3, 6), (DIMS, ())
    )
    for n, length in ((1, 1), (2, 7), (5, 3)):
        inputs, targets = batch(n, length)
        _, ours = step.gradients(inputs, targets)
        theirs = torch.autograd.grad(net(*inputs), list(net.parameters()))
        for (name, _), gradient in zip(net.named_parameters(), theirs, strict=True):
            torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-4)


def test_parts_are_refused() -> None:
    class Parts(nn.Module):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            return pack_padded_sequence(x, lengths).data.mean()

    with pytest.raises(pliant.PliantError, match="parts of a packed sequence"):
        pliant.compile(Parts(), (torch.randn(4, 2, 5), torch.tensor([4, 2])))


# ---- associative scans


def product_and_sum(a: Any, b: Any) -> Any:
    return a[0] * b[0], b[0] * a[1] + b[1]


@pytest.mark.parametrize("reverse", [False, True])
def test_associative_scan(reverse: bool) -> None:
    class Scan(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            return associative_scan(
                product_and_sum, (x, y), 1, reverse, combine_mode="generic"
            )

    net = Scan()
    m = pliant.compile(net, (torch.rand(3, 6), torch.rand(3, 6)), ({1: "n"}, {1: "n"}))
    for n in (1, 2, 3, 17, 64, 101):
        x, y = torch.rand(3, n), torch.rand(3, n)
        torch.testing.assert_close(m(x, y), net(x, y))


def test_gradient_of_an_associative_scan() -> None:
    class Scan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decay = nn.Parameter(torch.rand(3))

        def forward(self, x: Tensor) -> Tensor:
            decay = self.decay.expand_as(x)
            pair = associative_scan(
                product_and_sum, (decay, x), 0, combine_mode="generic"
            )
            return (pair[1] * pair[1]).sum()

    net = Scan()
    step = pliant.compile_training(
        net, lambda y: y, pliant.SGD(0.1), ((torch.rand(5, 3),), ()), (({0: "n"},), ())
    )
    for n in (1, 2, 13):
        x = torch.rand(n, 3)
        _, ours = step.gradients((x,), ())
        decay = net.decay.detach().requires_grad_()
        state, rows = x[0], [x[0]]
        for row in x[1:]:
            state = decay * state + row
            rows.append(state)
        (theirs,) = (
            torch.autograd.grad(
                (torch.stack(rows) ** 2).sum(), decay, allow_unused=True
            )
            if n > 1
            else (torch.zeros(3),)
        )
        torch.testing.assert_close(ours["decay"], theirs, rtol=1e-4, atol=1e-5)
