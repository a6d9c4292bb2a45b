"""Calls served in C: what they give, what they leave to Python, what they leak."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import pliant
from pliant.runtime import caller
from pliant.runtime.description import Framework


class Norm(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x - y).abs() + 1


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, x.sum(-1)


class Named(NamedTuple):
    more: Tensor
    total: Tensor


NESTINGS: dict[str, Callable[[Tensor], Any]] = {
    "a tuple of one": lambda x: (x + 1,),
    "a list": lambda x: [x + 1, x.sum(-1)],
    "a dict": lambda x: {"more": x + 1, "inner": (x.sum(-1), None)},
    "a named tuple": lambda x: Named(x + 1, x.sum(-1)),
    "one twice": lambda x: (y := x + 1, y),
    "with a size": lambda x: (x + 1, x.shape[0]),
    "nested": lambda x: (x + 1, (x.sum(-1),)),
}


class Nested(nn.Module):
    def __init__(self, nesting: str) -> None:
        super().__init__()
        self.nesting = nesting

    def forward(self, x: Tensor) -> Any:
        return NESTINGS[self.nesting](x)


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return (x + 1).to(self.dtype)


ROWS = {0: "rows", 1: "columns"}


@pytest.fixture(scope="module")
def norm() -> pliant.CompiledModel:
    example = (torch.randn(3, 4), torch.randn(3, 4))
    return pliant.compile(Norm(), example, (ROWS, ROWS))


@pytest.fixture(params=["torch's own", "exchange table", "tvm-ffi"])
def way(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """The three ways by which a torch tensor comes in and goes out."""
    whole = Framework.from_address(caller.framework_of_torch())
    table = Framework.from_buffer_copy(whole)
    table.empty = table.release = table.wrap = None
    if request.param == "exchange table":
        address = ctypes.addressof(table)
        monkeypatch.setattr(
            "pliant.runtime.binding.framework_of_torch", lambda: address
        )
    if request.param == "tvm-ffi":
        monkeypatch.setattr("pliant.runtime.binding.framework_of_torch", lambda: 0)
    yield request.param


DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.bool)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_way_gives_the_same(way: str, dtype: torch.dtype) -> None:
    model = pliant.compile(Cast(dtype), (torch.randn(3, 4),), (ROWS,))
    for shape in ((3, 4), (1, 1), (0, 5), (5, 0), (17, 23)):
        x = torch.randn(shape)
        wanted = (x + 1).to(dtype)
        got = model(x)
        assert type(got) is Tensor
        assert got.dtype is dtype and got.stride() == wanted.stride()
        torch.testing.assert_close(got, wanted)


def test_several_results(way: str) -> None:
    model = pliant.compile(Pair(), (torch.randn(3, 4),), (ROWS,))
    x = torch.randn(5, 6)
    more, total = model(x)
    torch.testing.assert_close(more, x + 1)
    torch.testing.assert_close(total, x.sum(-1))


@pytest.mark.parametrize("nesting", NESTINGS)
def test_structures_of_results(way: str, nesting: str) -> None:
    model = pliant.compile(Nested(nesting), (torch.randn(3, 4),), (ROWS,))
    for shape in ((3, 4), (1, 1), (0, 5), (5, 7)):
        x = torch.randn(shape)
        wanted = Nested(nesting)(x)
        # as it is, through keywords, and with an argument that is copied first
        for got in (model(x), model(x=x), model(x.t().contiguous().t())):
            assert type(got) is type(wanted)
            torch.testing.assert_close(got, wanted)
        arrays = model(x.numpy())
        got = pytree.tree_map_only(np.ndarray, torch.from_numpy, arrays)
        torch.testing.assert_close(got, wanted)


def test_results_belong_to_the_caller() -> None:
    """Nothing holds them, nor those of a call whose results cannot be nested."""
    x = torch.randn(3, 4)
    for kind in (Pair(), Nested("a dict")):
        model = pliant.compile(kind, (x,), (ROWS,))
        leaves = pytree.tree_leaves(model(x))
        counts = [sys.getrefcount(leaf) for leaf in leaves if leaf is not None]
        assert len(set(counts)) == 1 and counts[0] <= 3  # the list, the loop, the call
    seen: list[Any] = []

    def refuse(results: Any) -> None:
        seen.append(weakref.ref(results[0]))
        raise ValueError("no structure")

    model._delegate(model._runtime, refuse)
    for _ in range(3):
        with pytest.raises(ValueError, match="no structure"):
            model(x)
    assert [ref() for ref in seen] == [None] * 3
    assert model.stats()["calls"] == 4


def test_no_python_runs(
    norm: pliant.CompiledModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("Python was asked")

    x = torch.randn(3, 4)
    pair = pliant.compile(Pair(), (x,), (ROWS,))
    with monkeypatch.context() as patch:
        patch.setattr(pliant.CompiledModel, "_call_other", refuse)
        assert torch.equal(norm(x, x), torch.ones(3, 4))
        assert torch.equal(pair(x)[0], x + 1)
        with pytest.raises(AssertionError, match="asked"):
            norm(x.numpy(), x.numpy())
        with pytest.raises(AssertionError, match="asked"):
            norm(x, y=x)


@pytest.mark.parametrize("shape", [(3, 4), (0, 3), (1, 1)])
def test_what_python_mends(norm: pliant.CompiledModel, shape: tuple[int, int]) -> None:
    x, y = torch.randn(shape), torch.randn(shape)
    wanted = Norm()(x, y)
    turned = y.t().contiguous().t()
    for args in ((x, turned), (nn.Parameter(x), y), (x.numpy(), y.numpy())):
        with torch.no_grad():
            np.testing.assert_array_equal(np.asarray(norm(*args)), wanted.numpy())
    np.testing.assert_array_equal(norm(y=y, x=x), wanted)
    with pytest.raises(pliant.ShapeError):
        norm(x)
    with pytest.raises(pliant.DTypeError):
        norm(x, y.double())
    with pytest.raises(pliant.DTypeError):
        norm(x, y.to("meta"))
    assert torch.equal(norm(x, y), wanted)


def test_results_are_ordinary_tensors(norm: pliant.CompiledModel) -> None:
    x = torch.randn(3, 4)
    assert not norm(x, x).is_inference()
    with torch.inference_mode():
        assert norm(x, x).is_inference()
    got = norm(x, x)
    got.resize_(7, 7)
    learned = nn.Parameter(torch.ones(3, 4))
    (norm(x, x) * learned).sum().backward()
    assert torch.equal(learned.grad, torch.ones(3, 4))


def test_a_failed_run_is_not_repeated() -> None:
    class Pick(nn.Module):
        def forward(self, x: Tensor, at: Tensor) -> Tensor:
            return x[at]

    example = (torch.randn(5), torch.tensor([1, 2]))
    model = pliant.compile(Pick(), example, ({0: "n"}, {0: "m"}))
    with pytest.raises(pliant.IndexRangeError):
        model(torch.randn(5), torch.tensor([9]))
    stats = model.stats()
    assert (stats["calls"], stats["failures"]) == (0, 1)


def test_nothing_leaks(norm: pliant.CompiledModel) -> None:
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    turned = y.t().contiguous().t()
    for _ in range(3):
        norm(x, y)
    gc.collect()
    before, types = (sys.getrefcount(x), sys.getrefcount(norm)), sys.getrefcount(Tensor)
    blocks = sys.getallocatedblocks()
    for _ in range(1000):
        norm(x, y)
        norm(x, turned)
        norm(x, y=y)
        with pytest.raises(pliant.DTypeError):
            norm(x, y.double())
    gc.collect()
    assert (sys.getrefcount(x), sys.getrefcount(norm)) == before
    # Half of one a round, as other tests' garbage may go meanwhile.
    assert sys.getrefcount(Tensor) - types < 500
    assert sys.getallocatedblocks() - blocks < 500
    result = norm(x, y)
    gone = weakref.ref(result)
    del result
    assert gone() is None


def test_a_model_is_freed() -> None:
    model = pliant.compile(Pair(), (torch.randn(3, 4),), (ROWS,))
    direct = pliant.compile(nn.ReLU(), (torch.randn(3, 4),), (ROWS,))
    nested = pliant.compile(Nested("a dict"), (torch.randn(3, 4),), (ROWS,))
    for made in (model, direct, nested):
        made(torch.randn(3, 4))
    gone = [weakref.ref(made._runtime) for made in (model, direct, nested)]
    del model, direct, nested, made
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3


def test_misuse() -> None:
    plain = caller.Caller()
    with pytest.raises(AttributeError, match="_call_other"):
        plain(1)
    with pytest.raises(TypeError, match="Caller"):
        plain._delegate(len, None)
