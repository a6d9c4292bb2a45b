"""Buffers that a model changes when it is called: as eager changes them."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pliant

DYNAMIC = torch.export.Dim.DYNAMIC


class Holds(nn.Module):
    """Buffers by name, and a function of (module, inputs)."""

    def __init__(self, function: Callable[..., Any], **buffers: Tensor) -> None:
        super().__init__()
        self.function = function
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


def same_calls(
    net: nn.Module, calls: list[tuple[Any, ...]], shapes: Any, **given: Any
) -> pliant.CompiledModel:
    """Compiled calls and eager ones: results and all buffers stay together."""
    other = copy.deepcopy(net)
    m = pliant.compile(net, calls[0], {"inputs": shapes}, **given)
    torch.testing.assert_close(net.state_dict(), other.state_dict(), rtol=0, atol=0)
    for inputs in calls:
        with torch.no_grad():
            want = other(*inputs)
        torch.testing.assert_close(m(*inputs), want)
        torch.testing.assert_close(net.state_dict(), other.state_dict())
    assert m.compile_count == 1
    return m


def peak(m: pliant.CompiledModel) -> int:
    return int(m.stats()["last_peak_bytes"])


# ---- what is written


def window(net: Any, x: Tensor, at: int) -> Tensor:
    net.cache[:, at : at + x.shape[1]] = x * 2
    return net.cache.sum(1)


def layer(net: Any, x: Tensor, at: int) -> Tensor:
    net.cache[1, :, at : at + x.shape[1]] = x
    return net.cache[1].sum(1)


def two_windows(net: Any, x: Tensor, at: int) -> Tensor:
    net.cache[:, at : at + x.shape[1]] = x
    before = net.cache.sum(1)
    net.cache[:, :1] += 1
    return before


def both(net: Any, x: Tensor, at: int) -> Tensor:
    """One kernel reads the old and the new values: they cannot share memory."""
    old = net.cache.clone()
    net.cache[:, at : at + x.shape[1]] = x
    return (net.cache * (old + 1)).sum(1)


CACHES = {"window": window, "layer": layer, "two windows": two_windows, "both": both}


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("update", [True, False])
def test_windows(name: str, update: bool) -> None:
    shape = (3, 2, 64, 5) if name == "layer" else (2, 64, 5)
    net = Holds(CACHES[name], cache=torch.rand(shape))
    calls: list[tuple[Any, ...]] = []
    at = 0
    for n in (3, 1, 0, 7, 2, 51):
        calls.append((torch.rand(2, n, 5), at))
        at += n
    options = pliant.Options(update=update)
    m = same_calls(net, calls, ({1: "n"}, DYNAMIC), options=options, threads=2)
    m(torch.rand(2, 1, 5), 3)
    whole = net.cache.numel() * 4
    if update and name != "both":
        assert peak(m) < whole // 8
    else:
        assert peak(m) >= whole


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_rows_at_computed_places(axis: int) -> None:
    def function(net: Any, x: Tensor, places: Tensor) -> Tensor:
        net.cache.index_copy_(axis, places, x)
        return net.cache.sum(axis)

    net = Holds(function, cache=torch.rand(16, 16, 16))

    def call(*places: int) -> tuple[Tensor, Tensor]:
        shape = [16, 16, 16]
        shape[axis] = len(places)
        return torch.rand(shape), torch.tensor(places, dtype=torch.int64)

    calls = [call(3, 5), call(), call(15), call(0, 7, 2, 9, 1)]
    m = same_calls(net, calls, ({axis: "n"}, {0: "n"}), threads=2)
    before = net.cache.clone()
    with pytest.raises(pliant.IndexRangeError):
        m(*call(2, 16))
    assert torch.equal(net.cache, before)
    m(*call(2))
    assert peak(m) < net.cache.numel() * 4 // 2


class Decoder(nn.Module):
    """Attention over a cache of 64 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 11)
        self.register_buffer("keys", torch.zeros(2, 4, 64, 8))
        self.register_buffer("values", torch.zeros(2, 4, 64, 8), persistent=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor, place: Tensor) -> Tensor:
        b, n = tokens.shape
        parts = self.qkv(self.embed(tokens)).view(b, n, 3, 4, 8).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        self.keys.index_copy_(2, place, k)
        self.values[:, :, place] = v
        self.seen += n
        mask = torch.arange(64)[None, :] <= place[:, None]
        y = nn.functional.scaled_dot_product_attention(q, self.keys, self.values, mask)
        return self.out(y.transpose(1, 2).reshape(b, n, 32))


def test_a_decode_loop() -> None:
    torch.manual_seed(0)
    net = Decoder()
    start = torch.randint(11, (2, 5)), torch.arange(5)
    calls = [
        start,
        *((torch.randint(11, (2, 1)), torch.tensor([5 + k])) for k in range(20)),
    ]
    other = copy.deepcopy(net)
    m = pliant.compile(net, start, ({1: "n"}, {0: "n"}), threads=1)
    for tokens, place in calls:
        with torch.no_grad():
            want = other(tokens, place)
        torch.testing.assert_close(m(tokens, place), want)
    for name in ("keys", "values", "seen"):
        torch.testing.assert_close(getattr(net, name), getattr(other, name))
    assert int(net.seen) == 25
    assert peak(m) < 2 * net.keys.numel() * 4  # the rest is attention's own
    kept = copy.deepcopy(net.state_dict())
    with pytest.raises(pliant.IndexRangeError):
        m(torch.tensor([[0], [11]]), torch.tensor([25]))
    torch.testing.assert_close(net.state_dict(), kept, rtol=0, atol=0)


def test_swapped_and_shifted() -> None:
    def function(net: Any, x: Tensor) -> Tensor:
        old = net.a.clone()
        net.a.copy_(net.b)
        net.b.copy_(old)
        net.last.copy_(net.step)
        net.step.add_(1)
        net.line.copy_(torch.cat([net.line[1:], x[:1]]))
        return net.a - net.b

    net = Holds(
        function,
        a=torch.rand(3),
        b=torch.rand(3),
        last=torch.zeros(1, dtype=torch.int32),
        step=torch.ones(1, dtype=torch.int32),
        line=torch.rand(9),
    )
    same_calls(net, [(torch.rand(n),) for n in (4, 1, 7)], ({0: "n"},))


def test_counters_and_what_is_only_written() -> None:
    def function(net: Any, x: Tensor) -> Any:
        net.calls += 1
        net.rows += x.shape[0]
        net.largest.copy_(x.sum().abs() + 1)
        net.flag.fill_(True)
        net.empty.mul_(2)
        return None

    kinds = {"calls": torch.int64, "rows": torch.int16, "flag": torch.bool}
    buffers = {name: torch.zeros((), dtype=kind) for name, kind in kinds.items()}
    net = Holds(function, largest=torch.zeros(()), empty=torch.zeros(0), **buffers)
    same_calls(net, [(torch.rand(n, 3),) for n in (5, 0, 1, 13)], ({0: "n"},))


def test_the_buffer_as_a_result() -> None:
    def function(net: Any, x: Tensor) -> Any:
        net.total += x
        return net.total, net.total[:2]

    net = Holds(function, total=torch.zeros(4))
    m = same_calls(net, [(torch.rand(4),), (torch.rand(4),)], (None,))
    found, _ = m(torch.ones(4))
    kept = found.clone()
    m(torch.ones(4))
    assert torch.equal(found, kept)  # of its own, and no alias of the buffer


NORMS: dict[str, Callable[[], nn.Module]] = {
    "rows": lambda: nn.BatchNorm1d(3),
    "cumulative": lambda: nn.BatchNorm1d(3, momentum=None),
    "deep": lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU()),
}


@pytest.mark.parametrize("name", NORMS)
def test_running_statistics(name: str) -> None:
    torch.manual_seed(0)
    net = NORMS[name]()
    other = copy.deepcopy(net)
    m = pliant.compile(net, (torch.rand(4, 3),), ({0: "n"},))
    for n in (4, 2, 17, 101):
        x = torch.rand(n, 3) + 5
        torch.testing.assert_close(m(x), other(x).detach(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(net.state_dict(), other.state_dict())


def test_a_buffer_that_is_not_row_major() -> None:
    def function(net: Any, x: Tensor) -> Tensor:
        net.turned[:, :2] += x
        return net.turned.sum()

    turned = torch.rand(5, 3).t()
    net = Holds(function, turned=turned)
    same_calls(net, [(torch.rand(3, 2),) for _ in range(3)], (None,))
    assert net.turned is turned
    assert not turned.is_contiguous()


def test_random_numbers_and_data_sizes() -> None:
    """A seed behind the buffers, and sizes that data decide beside them."""

    def function(net: Any, x: Tensor) -> Any:
        net.noise.copy_(torch.rand(3))
        net.count += (x > 0).sum()
        return x[x > 0] * 2, net.noise + 0

    net = Holds(
        function, noise=torch.zeros(3), count=torch.zeros((), dtype=torch.int64)
    )
    m = pliant.compile(net, (torch.rand(5),), {"inputs": ({0: "n"},)})
    for x in (torch.randn(9), torch.zeros(0), torch.ones(1)):
        kept, noise = m(x)
        torch.testing.assert_close(kept, x[x > 0] * 2)
        assert torch.equal(noise, net.noise)
        assert bool(noise.any())
    assert int(net.count) >= 1


# ---- whose buffers they are


def adding(net: Any, x: Tensor) -> Tensor:
    net.total += x.sum(0)
    return net.total * 1


def counting() -> Holds:
    return Holds(adding, total=torch.zeros(3))


def compiled(net: nn.Module) -> pliant.CompiledModel:
    return pliant.compile(net, (torch.rand(4, 3),), {"inputs": ({0: "n"},)})


def test_changes_from_outside_are_seen() -> None:
    net = counting()
    m, x = compiled(net), torch.ones(2, 3)
    net.total.fill_(5.0)
    assert torch.equal(m(x), torch.full((3,), 7.0))
    net.load_state_dict({"total": torch.full((3,), 1.0)})
    assert torch.equal(m(x), torch.full((3,), 3.0))
    net.total = torch.zeros(3)  # another tensor
    m(x)
    assert torch.equal(net.total, torch.full((3,), 2.0))
    net.total = torch.zeros(4)
    with pytest.raises(pliant.WeightError, match="total"):
        m(x)
    del net.total
    with pytest.raises(pliant.WeightError, match="total"):
        m(x)


def test_torch_counts_the_change() -> None:
    net = counting()
    m = compiled(net)
    before = net.total._version
    m(torch.ones(2, 3))
    assert net.total._version == before + 1


def test_two_models_agree() -> None:
    """One writes the buffer, another has it as a constant that it follows."""
    net = counting()
    one, two = compiled(net), compiled(net)
    reading = _Reads(net)
    reader = pliant.compile(reading, (torch.rand(4, 3),), ({0: "n"},))
    x = torch.ones(2, 3)
    for k, m in enumerate((one, two, two, one), 1):
        assert torch.equal(m(x), torch.full((3,), 2.0 * k))
        assert torch.equal(reader(x), x * 2 * k)


class _Reads(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x * self.inner.total


def test_weights_beside_are_not_taken_again() -> None:
    """A call's own writes are no change that the weights would have to follow."""
    net = NORMS["deep"]()
    m = compiled_norm(net)
    kept = list(m._weights.arrays)
    for _ in range(3):
        m(torch.rand(5, 3))
    assert all(a is b for a, b in zip(kept, m._weights.arrays, strict=True))
    with torch.no_grad():
        net[0].weight.zero_()
        net[0].bias.zero_()
    assert float(m(torch.rand(5, 3)).abs().max()) == 0


def compiled_norm(net: nn.Module) -> pliant.CompiledModel:
    return pliant.compile(net, (torch.rand(4, 3),), ({0: "n"},))


def test_frozen_and_without_a_module() -> None:
    net = counting()
    m, x = compiled(net), torch.ones(2, 3)
    m(x)
    m.freeze()
    assert torch.equal(m(x), torch.full((3,), 4.0))
    assert torch.equal(m(x), torch.full((3,), 6.0))
    assert torch.equal(net.total, torch.full((3,), 2.0))
    net = counting()
    m = compiled(net)
    m(x)
    del net
    gc.collect()
    assert torch.equal(m(x), torch.full((3,), 4.0))
    assert torch.equal(m(x), torch.full((3,), 6.0))


def test_arrays_and_shared_memory() -> None:
    net = counting()
    m = compiled(net)
    found = m(np.ones((2, 3), np.float32))
    assert isinstance(found, np.ndarray)
    assert np.array_equal(found, np.full(3, 2.0, np.float32))
    assert torch.equal(net.total, torch.full((3,), 2.0))
    with pytest.raises(pliant.DTypeError, match="total"):
        m(net.total[None])
    assert torch.equal(net.total, torch.full((3,), 2.0))


def test_buffers_that_share_memory_are_refused() -> None:
    whole = torch.zeros(6)
    net = Holds(adding, total=whole[:3], other=whole[3:])
    with pytest.raises(pliant.UnsupportedOpError, match="shares memory"):
        compiled(net)


def test_refused_calls_change_nothing() -> None:
    def function(net: Any, x: Tensor, table: Tensor, places: Tensor) -> Tensor:
        net.total += x.sum(0)
        return table[places] + net.total

    net = Holds(function, total=torch.zeros(3))
    example = torch.rand(4, 3), torch.rand(5, 3), torch.tensor([1, 2])
    shapes = {"inputs": ({0: "n"}, {0: "t"}, {0: "k"})}
    m = pliant.compile(net, example, shapes)
    with pytest.raises(pliant.IndexRangeError):
        m(*example[:2], torch.tensor([1, 5]))
    with pytest.raises(pliant.ShapeError):
        m(torch.rand(4, 2), *example[1:])
    m.memory_limit = 0
    with pytest.raises(pliant.MemoryLimitError):
        m(*example)
    assert torch.equal(net.total, torch.zeros(3))


def test_a_matrix_that_fails_changes_nothing() -> None:
    """A function in C finds it, and the counter is in front of it in the model."""

    def function(net: Any, x: Tensor) -> Tensor:
        net.total += 1
        return torch.linalg.cholesky(x)

    net = Holds(function, total=torch.zeros(3))
    m = pliant.compile(net, (torch.eye(3),), {"inputs": ({0: "n", 1: "n"},)})
    with pytest.raises(pliant.PliantError, match="definite"):
        m(-torch.eye(3))
    assert torch.equal(net.total, torch.zeros(3))
    m(torch.eye(2))
    assert torch.equal(net.total, torch.ones(3))


def test_the_least_memory() -> None:
    """What is recomputed is not computed from a buffer that was changed meanwhile."""

    def function(net: Any, x: Tensor) -> Tensor:
        first = (x @ net.state).relu()
        second = first @ first.t()
        net.state[1:] += first.sum(0)
        third = second.softmax(-1) @ first
        net.state *= 0.5
        return third @ net.state + second.sum() + first

    torch.manual_seed(0)
    net = Holds(function, state=torch.rand(16, 16))
    other, x = copy.deepcopy(net), torch.rand(100, 16)
    m = pliant.compile(net, (torch.rand(4, 16),), {"inputs": ({0: "n"},)})
    with pytest.raises(pliant.MemoryLimitError) as refused:
        m.memory_plan(x, memory_limit=0)
    m.memory_limit = refused.value.least
    for _ in range(3):
        torch.testing.assert_close(m(x), other(x))
        torch.testing.assert_close(net.state, other.state)
    assert peak(m) <= refused.value.least


def test_threads_take_turns() -> None:
    net = counting()
    m, x = compiled(net), torch.ones(1, 3)

    def work() -> None:
        for _ in range(200):
            m(x)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert torch.equal(net.total, torch.full((3,), 800.0))


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = counting()

    def forward(self, x: Tensor) -> dict[str, Any]:
        total = self.inner(x)
        return {"total": total, "both": [total * 2, x + 1]}


def test_later_calls_run_no_python(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Outer()
    m = pliant.compile(net, (torch.rand(4, 3),), ({0: "n"},))
    x = torch.ones(2, 3)
    m(x)
    slow: list[int] = []
    call = type(m)._call_other

    def counted(self: Any, args: Any, kwargs: Any) -> Any:
        slow.append(1)
        return call(self, args, kwargs)

    monkeypatch.setattr(type(m), "_call_other", counted)
    count = net.inner.total._version
    for k in (2, 3):
        found = m(x)
        total = torch.full((3,), 2.0 * k)
        want = {"total": total, "both": [total * 2, x + 1]}
        torch.testing.assert_close(found, want)
        assert net.inner.total._version == count + k - 1
    assert not slow
    # What is not as it was is left to Python, and seen.
    with pytest.raises(pliant.DTypeError, match="total"):
        m(net.inner.total[None])
    with pytest.raises(pliant.ShapeError):
        m(torch.ones(2, 4))
    assert len(slow) == 2 and torch.equal(net.inner.total, torch.full((3,), 6.0))
    net.inner = counting()
    assert torch.equal(m(x)["total"], torch.full((3,), 2.0)) and len(slow) == 3
    assert torch.equal(m(x)["total"], torch.full((3,), 4.0)) and len(slow) == 3
    part = weakref.ref(net.inner)
    del net
    gc.collect()
    assert part() is None
    assert torch.equal(m(x)["total"], torch.full((3,), 6.0)) and len(slow) == 4
    assert torch.equal(m(x)["total"], torch.full((3,), 8.0)) and len(slow) == 4


def test_an_exported_program() -> None:
    shapes = {"inputs": ({0: torch.export.Dim.AUTO},)}
    x = torch.ones(2, 3)
    for decomposed in (False, True):
        net = counting()
        program = torch.export.export(net, (torch.rand(4, 3),), dynamic_shapes=shapes)
        if decomposed:  # functional: new values of buffers are results
            program = program.run_decompositions()
        m = pliant.compile(program)
        assert torch.equal(m(x), torch.full((3,), 2.0))
        assert torch.equal(m(torch.ones(5, 3)), torch.full((3,), 7.0))
        assert torch.equal(program.state_dict["total"], torch.full((3,), 7.0))


def test_complex_numbers() -> None:
    """Of a functional program: an op of torch that writes them is not supported."""

    def function(net: Any, x: Tensor) -> Tensor:
        net.waves *= torch.complex(x, x + 1)
        return net.waves.real + 0

    net = Holds(function, waves=torch.randn(4, dtype=torch.complex64))
    other = copy.deepcopy(net)
    program = torch.export.export(net, (torch.rand(4),)).run_decompositions()
    m = pliant.compile(program)
    for _ in range(3):
        x = torch.rand(4)
        torch.testing.assert_close(m(x), other(x))
        torch.testing.assert_close(program.state_dict["waves"], other.waves)


def test_a_model_that_branches_on_sizes() -> None:
    """One program writes the buffer, and another only reads it."""

    def function(net: Any, x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            return x * net.total
        net.total += x.sum(0)
        return x + net.total

    net = Holds(function, total=torch.zeros(3))
    sizes = (4, 1, 2, 1, 7)
    m = same_calls(net, [(torch.rand(n, 3),) for n in sizes], ({0: "n"},))
    assert m.stats()["programs"] == 2
    m.freeze()
    m(torch.ones(2, 3))
    known = m(torch.ones(1, 3))
    m(torch.ones(2, 3))
    torch.testing.assert_close(m(torch.ones(1, 3)), known + 2)
