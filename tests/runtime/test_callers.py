"""Several threads that call one model: the same bits as from one thread."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

import pliant


class Chain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.softmax(-1) * 3 + x.mean(-1, keepdim=True)
        return y.tanh().sum() + y


@pytest.mark.parametrize("callers", [2, 5])
def test_same_bits_from_every_caller(callers: int) -> None:
    dims = {0: "rows", 1: "columns"}
    model = pliant.compile(Chain(), (torch.randn(3, 4),), (dims,), threads=2)
    torch.manual_seed(0)
    given = [torch.randn(50 + 31 * k, 700 + k) for k in range(callers)]
    wanted = [model(x) for x in given]
    wrong: list[int] = []

    def call(number: int) -> None:
        for _ in range(20):
            if not torch.equal(model(given[number]), wanted[number]):
                wrong.append(number)

    threads = [threading.Thread(target=call, args=(k,)) for k in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
