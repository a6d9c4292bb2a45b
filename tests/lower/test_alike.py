"""Layers that are alike are lowered once, and each has its own weights and checks."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

import pliant
from pliant.lower import lower


class Layers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return x


@pytest.mark.parametrize("count", [1, 4])
def test_products_of_equal_layers_are_made_once(count: int) -> None:
    model, x = Layers(count).eval(), torch.randn(5, 24)
    make = mock.Mock(wraps=lower._CONTRACTIONS["matmul"])
    with mock.patch.dict(lower._CONTRACTIONS, {"matmul": make}):
        options = pliant.Options(chunk=False)
        compiled = pliant.compile(model, (x,), ({0: "n"},), options=options)
    assert make.call_count == 1
    for rows in (0, 1, 7, 64):
        x = torch.randn(rows, 24)
        torch.testing.assert_close(compiled(x), model(x))


def test_equal_chunks_have_their_own_weights() -> None:
    model, x = Layers(6).eval(), torch.randn(300, 24)
    compiled = pliant.compile(model, (x,), ({0: "n"},))
    x = torch.randn(3000, 24)
    torch.testing.assert_close(compiled(x), model(x))
    compiled.memory_limit = 1
    with pytest.raises(pliant.MemoryLimitError) as refused:
        compiled(x)
    compiled.memory_limit = refused.value.least
    torch.testing.assert_close(compiled(x), model(x))
    assert compiled.stats()["last_peak_bytes"] <= refused.value.least


class Tables(nn.Module):
    """Two kernels that differ in nothing but their place in the source."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Embedding(9, 8), nn.Embedding(9, 8)

    def forward(self, i: torch.Tensor) -> torch.Tensor:
        first = self.one(i).cumsum(0)
        second = self.two((first.sum(1) * 0).long() + 99).cumsum(0)
        return first + second


def test_a_check_tells_its_own_place() -> None:
    i = torch.zeros(3, dtype=torch.long)
    compiled = pliant.compile(Tables().eval(), (i,), ({0: "n"},))
    with pytest.raises(IndexError) as first:
        compiled(i + 9)
    with pytest.raises(IndexError) as second:
        compiled(i)
    lines = [str(error.value).rpartition(":")[2] for error in (first, second)]
    assert lines[0] != lines[1]
