"""Recurrent layers and loops as whole programs, against eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import while_loop
from torch.utils import _pytree as pytree

import pliant

BT = {0: "batch", 1: "length"}
SIZES = ((1, 1), (1, 7), (2, 3), (5, 61), (16, 13))

LAYERS: dict[str, nn.Module] = {
    "lstm": nn.LSTM(3, 5, 2, bidirectional=True, batch_first=True),
    "projected": nn.LSTM(3, 6, 2, bidirectional=True, batch_first=True, proj_size=4),
    "no bias": nn.LSTM(3, 5, bias=False, batch_first=True),
    "gru": nn.GRU(3, 5, 2, bidirectional=True, batch_first=True),
    "rnn": nn.RNN(3, 5, batch_first=True),
    "relu": nn.RNN(3, 5, nonlinearity="relu", batch_first=True),
    "steps first": nn.GRU(3, 5),
}


def same(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    pairs = zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    """One compilation serves every batch and length; the plan is what a call takes."""
    torch.manual_seed(0)
    layer = LAYERS[name].eval().requires_grad_(False)
    for p in layer.parameters():
        nn.init.normal_(p, std=0.3)
    m = pliant.compile(layer, (torch.randn(3, 5, 3),), (BT,))
    for batch, length in SIZES:
        x = torch.randn(batch, length, 3)
        same(m(x), layer(x))
        plan = m.memory_plan(batch=batch, length=length)
        assert m.stats()["last_peak_bytes"] == plan.peak_bytes
    assert m.compile_count == 1


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_initial_states(kind: Any) -> None:
    torch.manual_seed(0)
    layer = kind(3, 5, 2).requires_grad_(False)

    def given(batch: int, length: int) -> tuple[Any, ...]:
        state = torch.randn(2, batch, 5)
        both = (state, torch.randn(2, batch, 5)) if kind is nn.LSTM else state
        return torch.randn(length, batch, 3), both

    state = {1: "batch"}
    states = (state, state) if kind is nn.LSTM else state
    dynamic = ({0: "length", 1: "batch"}, states)
    m = pliant.compile(layer, given(3, 4), dynamic)
    for batch, length in SIZES:
        inputs = given(batch, length)
        same(m(*inputs), layer(*inputs))


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells(kind: Any) -> None:
    torch.manual_seed(0)
    cell = kind(3, 5).requires_grad_(False)
    m = pliant.compile(cell, (torch.randn(4, 3),), ({0: "batch"},))
    for batch in (1, 2, 33):
        x = torch.randn(batch, 3)
        same(m(x), cell(x))


def test_weights_in_a_loop_are_followed() -> None:
    torch.manual_seed(0)
    layer = nn.LSTM(3, 5, batch_first=True).requires_grad_(False)
    m = pliant.compile(layer, (torch.randn(3, 5, 3),), (BT,))
    x = torch.randn(2, 9, 3)
    same(m(x), layer(x))
    layer.load_state_dict({k: v * 2 for k, v in layer.state_dict().items()})
    same(m(x), layer(x))


def test_a_failed_check_ends_a_loop() -> None:
    """An index out of range in some round: an error, not an endless loop."""

    class Walk(nn.Module):
        def forward(self, table: Tensor, at: Tensor) -> Tensor:
            return while_loop(
                lambda at, total: total < 100,
                lambda at, total: (table.index_select(0, at), total + 1),
                (at, torch.zeros((), dtype=torch.int64)),
            )[0]

    table = torch.tensor([1, 2, 3, 0])
    inputs = table, torch.tensor([0])
    m = pliant.compile(Walk(), inputs, ({0: "n"}, {}))
    assert int(m(*inputs)) == 0
    with pytest.raises(pliant.PliantError, match="is outside axis 0"):
        m(torch.tensor([1, 2, 9, 0]), torch.tensor([0]))
    assert int(m(*inputs)) == 0


def test_weights_are_held_once() -> None:
    """A weight that the steps have packed is not an operand of the loop as well."""
    layer = nn.LSTM(32, 32, batch_first=True)
    compiled = pliant.compile(
        layer, (torch.randn(2, 5, 32),), ({0: "batch", 1: "length"},)
    )
    held = sum(p.numel() * p.element_size() for p in layer.parameters())
    assert compiled.stats()["weight_bytes"] <= held
