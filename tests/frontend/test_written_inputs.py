"""Inputs that a model writes in place: the caller's tensors change, as in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pliant


class Calls(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs)


def added(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(y)
    return x * 2


def column(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, int]:
    x[:, 0] = y.sum(1)
    x.t()[1:].mul_(2)
    return x.sum(), x.shape[0]


def swapped(x: torch.Tensor, y: torch.Tensor) -> None:
    old = x.clone()
    x.copy_(y)
    y.copy_(old)


def compiled(function: Callable[..., Any], columns: int = 3) -> pliant.CompiledModel:
    x, y = torch.rand(4, columns), torch.rand(4, columns)
    rows = {0: "n", 1: torch.export.Dim.AUTO}
    return pliant.compile(Calls(function), (x, y), {"inputs": (rows, rows)})


@pytest.mark.parametrize("function", [added, column, swapped])
@pytest.mark.parametrize("size", [0, 1, 2, 7])
def test_as_eager_writes_them(function: Callable[..., Any], size: int) -> None:
    m = compiled(function)
    given = torch.rand(size, 3), torch.rand(size, 3)
    own, its = ([x.clone() for x in given] for _ in range(2))
    found, wanted = m(*own), function(*its)
    torch.testing.assert_close(found, wanted)
    for mine, theirs in zip(own, its, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("size", [2, 7])
def test_running_statistics(size: int) -> None:
    def function(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> Any:
        return nn.functional.batch_norm(x, mean, var, training=True)

    example = torch.rand(4, 3), torch.rand(3), torch.rand(3)
    m = pliant.compile(Calls(function), example, {"inputs": ({0: "n"}, None, None)})
    given = torch.rand(size, 3), torch.rand(3), torch.rand(3)
    own, its = ([x.clone() for x in given] for _ in range(2))
    torch.testing.assert_close(m(*own), function(*its))
    torch.testing.assert_close(own, its)


def test_strided_and_numpy() -> None:
    m = compiled(added)
    block, y = torch.rand(3, 5), torch.rand(5, 3)
    before = block.clone()
    m(block.t(), y)
    torch.testing.assert_close(block, before + y.t())
    array = np.ones((5, 3), np.float32)
    m(array, y.numpy())
    assert np.allclose(array, 1 + y.numpy())


def test_shared_memory_is_refused() -> None:
    m = compiled(added)
    x = torch.rand(4, 3)
    with pytest.raises(pliant.DTypeError, match="shares memory"):
        m(x, x)
    with pytest.raises(pliant.DTypeError, match="shares memory"):
        m(x[:2], x[2:])
    array = np.ones((6, 3), np.float32)
    with pytest.raises(pliant.DTypeError, match="shares memory"):
        m(torch.from_numpy(array[1:5]), torch.from_numpy(array[2:]))


def test_a_read_only_array_is_refused_before_anything_is_written() -> None:
    def both(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        y.add_(1)
        return x * y

    rows = {"inputs": ({0: "n"}, {0: "n"})}
    model = pliant.compile(Calls(both), (torch.ones(3), torch.ones(3)), rows)
    first, second = np.zeros(6, np.float32)[::2], np.zeros(3, np.float32)
    second.flags.writeable = False
    with pytest.raises(pliant.DTypeError, match="'inputs_1', which is a read-only"):
        model(first, second)
    assert not first.any()
    second.flags.writeable = True
    np.testing.assert_array_equal(model(first, second), np.ones(3, np.float32))
    np.testing.assert_array_equal(first, second)


def test_elements_that_share_memory_are_refused() -> None:
    m = compiled(added)
    row, y = torch.rand(12), torch.rand(4, 3)
    for strides in ((1, 0), (2, 1), (0, 1), (1, 2)):
        with pytest.raises(pliant.DTypeError, match="elements of which share memory"):
            m(row.as_strided((4, 3), strides), y)
    array = np.lib.stride_tricks.as_strided(row.numpy(), (4, 3), (8, 4))
    with pytest.raises(pliant.DTypeError, match="elements of which share memory"):
        m(array, y.numpy())
    before, column = row.clone(), row.as_strided((1, 3), (0, 4))
    m(column, y[:1])
    torch.testing.assert_close(column, before.as_strided((1, 3), (0, 4)) + y[:1])
    m(row.as_strided((0, 3), (0, 0)), y[:0])
    reverse = np.ones((4, 3), np.float32)
    m(reverse[::-1], y.numpy())
    assert np.allclose(reverse[::-1], 1 + y.numpy())


def test_a_refused_call_writes_nothing() -> None:
    m = compiled(added)
    x = torch.ones(4, 3)
    with pytest.raises(pliant.ShapeError):
        m(x, torch.rand(5, 3))
    assert torch.equal(x, torch.ones(4, 3))


def test_a_cache_is_written_where_it_is() -> None:
    """Of a cache that is passed in, only the new rows are touched."""

    def function(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[0]
        cache[3 : 3 + n] = x
        return cache.sum(0)

    example = torch.rand(64, 5), torch.rand(2, 5)
    m = pliant.compile(Calls(function), example, {"inputs": (None, {0: "n"})})
    for n in (2, 0, 1, 7):
        cache, x = torch.rand(64, 5), torch.rand(n, 5)
        own, version = cache.clone(), cache._version
        torch.testing.assert_close(m(cache, x), function(own, x))
        assert torch.equal(cache, own)
        assert cache._version == version + 1
        assert m.stats()["last_peak_bytes"] < cache.numel()
    turned = torch.rand(5, 64).t()
    want = turned.clone()
    torch.testing.assert_close(m(turned, x), function(want, x))
    assert torch.equal(turned, want)
    with pytest.raises(pliant.ShapeError):
        m(cache, torch.rand(62, 5))
    assert torch.equal(cache, own)


@pytest.mark.filterwarnings("ignore::pliant.GradientWarning")
def test_an_input_that_requires_a_gradient() -> None:
    m = compiled(added)
    x, y = torch.rand(4, 3), torch.rand(4, 3, requires_grad=True)
    want = x + y.detach()
    m(x, y)
    torch.testing.assert_close(x, want)
