"""Inputs that grow in place: only new rows are written, at every length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pliant
from pliant.ir.build import Builder
from pliant.ir.types import DType, tensor
from pliant.sym import sym


class Decoder(nn.Module):
    """Two layers of causal attention, four heads over two of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 32)
        self.qkv = nn.ModuleList(nn.Linear(32, 64) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(
        self, ids: Tensor, caches: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        x, made = self.embed(ids), []
        b, n, _ = x.shape
        for number, (keys, values) in enumerate(caches):
            q, k, v = self.qkv[number](x).split([32, 16, 16], -1)
            q = q.view(b, n, 4, 8).transpose(1, 2)
            keys = torch.cat([keys, k.view(b, n, 2, 8).transpose(1, 2)], 2)
            values = torch.cat([values, v.view(b, n, 2, 8).transpose(1, 2)], 2)
            total = keys.shape[2]
            rows = torch.arange(n)[:, None] + (total - n)
            mask = torch.arange(total)[None, :] <= rows
            y = nn.functional.scaled_dot_product_attention(
                q, keys, values, mask, enable_gqa=True
            )
            x = x + self.out[number](y.transpose(1, 2).reshape(b, n, 32))
            made.append((keys, values))
        return x @ self.embed.weight.T, made


def growing(batch: int, length: int, capacity: int) -> pliant.Growing:
    return pliant.Growing(torch.rand(batch, 2, length, 8), 2, capacity)


def four(batch: int, length: int, capacity: int) -> list[Any]:
    return [tuple(growing(batch, length, capacity) for _ in "kv") for _ in range(2)]


CACHE = {0: "batch", 2: "past"}
SHAPES = ({0: "batch", 1: "new"}, [(CACHE, CACHE), (CACHE, CACHE)])


@pytest.fixture(scope="module")
def decoder() -> tuple[Decoder, pliant.CompiledModel]:
    torch.manual_seed(0)
    net = Decoder().eval()
    example = torch.randint(11, (2, 3)), four(2, 4, 16)
    return net, pliant.compile(net, example, SHAPES, threads=2)


def rows(caches: list[Any]) -> list[tuple[Tensor, Tensor]]:
    return [(k.tensor.clone(), v.tensor.clone()) for k, v in caches]


def test_prefill_and_decode(decoder: tuple[Decoder, pliant.CompiledModel]) -> None:
    net, m = decoder
    assert m.dims == ("batch", "new", "capacity", "past")
    for batch, steps in [(1, (5, 1, 1, 0, 3, 1)), (3, (1, 1, 17, 1)), (2, (0, 2))]:
        caches = four(batch, 0, 64)
        past = rows(caches)
        for n in steps:
            ids = torch.randint(11, (batch, n))
            with torch.no_grad():
                want, past = net(ids, past)
            got, back = m(ids, caches)
            torch.testing.assert_close(got, want)
            torch.testing.assert_close(rows(caches), past)
            assert back[1][0] is caches[1][0]
            assert back[0][1] is caches[0][1]
    assert m.compile_count == 1


def test_only_new_rows_are_touched(
    decoder: tuple[Decoder, pliant.CompiledModel],
) -> None:
    _, m = decoder
    caches = four(2, 900, 1024)
    before = [cache.memory.clone() for pair in caches for cache in pair]
    m(torch.randint(11, (2, 2)), caches)
    for cache, old in zip((c for pair in caches for c in pair), before, strict=True):
        assert torch.equal(cache.memory[:, :, :900], old[:, :, :900])
        assert torch.equal(cache.memory[:, :, 902:], old[:, :, 902:])
        assert not torch.equal(cache.memory[:, :, 900:902], old[:, :, 900:902])
    assert m.stats()["last_peak_bytes"] < caches[0][0].nbytes


def test_the_plan(decoder: tuple[Decoder, pliant.CompiledModel]) -> None:
    """Without a capacity: for exactly the rows that are there after the call."""
    _, m = decoder
    plan = m.memory_plan(batch=4, past=2000, new=1)
    assert plan.dims["capacity"] == 2001
    assert plan.grown_bytes == 4 * 4 * 2 * 2001 * 8 * 4
    assert m.memory_plan(batch=4, past=20, new=1, capacity=99).peak_bytes > 0
    caches = four(4, 2000, 2048)
    inputs = torch.randint(11, (4, 1)), caches
    assert m.memory_plan(*inputs).grown_bytes == 16 * caches[0][0].nbytes // 4
    planned = m.memory_plan(*inputs).peak_bytes
    m(*inputs)
    assert m.stats()["last_peak_bytes"] == planned
    with pytest.raises(pliant.ShapeError):
        m.memory_plan(batch=4, past=20, new=1, capacity=20)


def test_refused_calls_change_nothing(
    decoder: tuple[Decoder, pliant.CompiledModel],
) -> None:
    _, m = decoder
    caches = four(1, 6, 8)
    before = [cache.memory.clone() for pair in caches for cache in pair]

    def refused(error: type[Exception], match: str, *inputs: Any) -> None:
        with pytest.raises(error, match=match):
            m(*inputs)
        now = [cache.memory for pair in caches for cache in pair]
        assert all(map(torch.equal, now, before))
        assert all(cache.length == 6 for pair in caches for cache in pair)

    ids = torch.randint(11, (1, 2))
    refused(pliant.ShapeError, "room for", torch.randint(11, (1, 3)), caches)
    refused(pliant.IndexRangeError, "11", torch.tensor([[0, 11]]), caches)
    refused(pliant.DTypeError, "pliant.Growing", ids, rows(caches))
    refused(pliant.ShapeError, "rows", ids, [caches[0], four(1, 5, 8)[1]])
    twice = [caches[0], (caches[0][0], caches[1][1])]
    refused(pliant.DTypeError, "shares memory", ids, twice)
    m.memory_limit = 0
    refused(pliant.MemoryLimitError, "least", ids, caches)
    m.memory_limit = None
    for pair in caches:
        for cache in pair:
            cache.reserve(9)
    m(torch.randint(11, (1, 3)), caches)
    assert caches[0][0].length == 9


def test_rows_are_taken_back(decoder: tuple[Decoder, pliant.CompiledModel]) -> None:
    """A draft of several tokens, of which some are refused."""
    net, m = decoder
    caches = four(1, 0, 32)
    ids = torch.randint(11, (1, 9))
    m(ids[:, :5], caches)
    m(torch.randint(11, (1, 4)), caches)
    for pair in caches:
        for cache in pair:
            cache.length = 5
    got, _ = m(ids[:, 5:], caches)
    with torch.no_grad():
        want, _ = net(ids, rows(four(1, 0, 0)))
    torch.testing.assert_close(got, want[:, 5:])


def test_arrays(decoder: tuple[Decoder, pliant.CompiledModel]) -> None:
    net, m = decoder
    empty = np.zeros((1, 2, 0, 8), np.float32)
    caches = [tuple(pliant.Growing(empty, 2, 8) for _ in "kv") for _ in range(2)]
    ids = np.array([[1, 2, 3]])
    got, back = m(ids, caches)
    with torch.no_grad():
        want, past = net(torch.tensor(ids), rows(four(1, 0, 0)))
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-4, atol=1e-5)
    assert isinstance(back[0][0].tensor, np.ndarray)
    np.testing.assert_allclose(back[1][1].tensor, past[1][1].numpy(), 1e-4, 1e-5)


# ---- along other axes, and what cannot grow


class Appends(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, past: Tensor, x: Tensor) -> Any:
        return self.function(past, x)


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_axes(axis: int) -> None:
    def function(past: Tensor, x: Tensor) -> Any:
        whole = torch.cat([past, x * 2], axis)
        return whole.sum(axis), whole, past.mean()

    shape = [3, 4, 5]
    grows = pliant.Growing(torch.rand(shape), axis, 16)
    shapes = {axis % 3: "past"}, {axis % 3: "new"}
    m = pliant.compile(Appends(function), (grows, torch.rand(shape)), shapes)
    for past, new in [(3, 2), (1, 1), (9, 0), (0, 9)]:
        sizes = [*shape]
        sizes[axis] = past
        held = torch.rand(sizes)
        sizes[axis] = new
        x, grows = torch.rand(sizes), pliant.Growing(held, axis, 9)
        total, whole, mean = m(grows, x)
        assert whole is grows
        want = function(held, x)
        torch.testing.assert_close((total, whole.tensor, mean), want, equal_nan=True)


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "in front": (lambda past, x: torch.cat([x, past]), "0 results"),
    "changed": (lambda past, x: torch.cat([past, x]) + 1, "0 results"),
    "not returned": (lambda past, x: torch.cat([past, x]).sum(), "0 results"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_grow(name: str) -> None:
    function, match = REFUSED[name]
    example = pliant.Growing(torch.rand(3, 2), 0, 9), torch.rand(4, 2)
    with pytest.raises(pliant.OptionError, match=match):
        pliant.compile(Appends(function), example, ({0: "past"}, {0: "new"}))


def test_a_fixed_size_cannot_grow() -> None:
    example = pliant.Growing(torch.rand(3, 2), 0, 9), torch.rand(4, 2)
    with pytest.raises(pliant.OptionError, match="dynamic_shapes"):
        pliant.compile(
            Appends(lambda p, x: torch.cat([p, x])), example, (None, {0: "new"})
        )


def test_growing_itself() -> None:
    grows = pliant.Growing(torch.ones(2, 3), 1)
    assert (grows.length, grows.capacity, len(grows), grows.axis) == (3, 3, 3, 1)
    grows.reserve(7)
    assert (grows.length, grows.capacity, grows.nbytes) == (3, 7, 56)
    assert torch.equal(grows.tensor, torch.ones(2, 3))
    assert "capacity=7" in repr(grows)
    with pytest.raises(pliant.OptionError):
        grows.length = 8
    with pytest.raises(pliant.OptionError):
        pliant.Growing(torch.ones(2, 3), 2)
    with pytest.raises(pliant.OptionError):
        pliant.Growing(torch.ones(2, 3), 0, 1)


def test_an_ir_module_does_not_grow_by_itself() -> None:
    b = Builder()
    past = b.param("past", tensor(DType.F32, sym("p"), 3))
    graph = b.finish("main", [b.concat([past, past], 0)])
    from pliant.frontend.growing import grown
    from pliant.frontend.ir_module import import_module
    from pliant.ir.graph import Module

    with pytest.raises(pliant.OptionError, match="0 results"):
        grown(import_module(Module({"main": graph})), {0: 0})
