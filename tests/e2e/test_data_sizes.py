"""Sizes that data decide, against eager: every number of hits, none and all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import pliant

SIZES = (0, 1, 2, 7, 61)


class Nonzero(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nonzero(x > 0)


class Kept(nn.Module):
    """Rows that a mask keeps, through a layer; a sum of them; what does not depend."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, keep: Tensor) -> tuple[Tensor, ...]:
        y = x[keep > 0]
        return self.layer(y).relu(), y.sum(), x + 1


class Twice(nn.Module):
    """A size that depends on another one."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.masked_select(x > 0)
        return y * 2, y[y > 1]


class Attend(nn.Module):
    def forward(self, x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        at = torch.nonzero(keep > 0).squeeze(1)
        return (x[at] @ x.t()).softmax(-1), at


class Written(nn.Module):
    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        x = x.clone()
        x[keep > 0] = 5.0
        return x


class Cut(nn.Module):
    """A number of the data as the end of one slice and the start of another."""

    def forward(self, x: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        n = k.item()
        torch._check(n >= 0)
        torch._check(n <= x.shape[0])
        return x[:n].sum(0), x[n:] * 2


class Made(nn.Module):
    def forward(self, x: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        n = k.item()
        torch._check(n >= 0)
        torch._check(n <= 50)
        return torch.zeros(n, 3) + x, torch.arange(n), torch.ones(n).sum()


class Branched(nn.Module):
    """Branches that give as many rows as they find, or all; and what follows."""

    def forward(self, x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        def some(x: Tensor, keep: Tensor) -> Tensor:
            return x[keep > 0] * 2

        def all_rows(x: Tensor, keep: Tensor) -> Tensor:
            return x.sin()

        y = torch.cond(keep.sum() > 0, some, all_rows, (x, keep))
        return y + 1, y[y[:, 0] > 0].sum(0)


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Tensor, ...]]
    dynamic: tuple[dict[int, str], ...]


N = {0: "n"}
CASES = {
    "nonzero": Case(
        Nonzero, lambda n: (torch.randn(n, 2 * n + 1, 3),), ({0: "n", 1: "m"},)
    ),
    "kept": Case(Kept, lambda n: (torch.randn(n, 4), torch.randn(n)), (N, N)),
    "all": Case(Kept, lambda n: (torch.randn(n, 4), torch.ones(n)), (N, N)),
    "none": Case(Kept, lambda n: (torch.randn(n, 4), torch.zeros(n)), (N, N)),
    "twice": Case(Twice, lambda n: (torch.randn(n),), (N,)),
    "attend": Case(Attend, lambda n: (torch.randn(n, 3), torch.randn(n)), (N, N)),
    "written": Case(Written, lambda n: (torch.randn(n, 3), torch.randn(n)), (N, N)),
    "branched": Case(Branched, lambda n: (torch.randn(n, 3), torch.randn(n)), (N, N)),
    "cut": Case(Cut, lambda n: (torch.randn(n, 3), torch.tensor(n // 2)), (N, {})),
    "made": Case(Made, lambda n: (torch.randn(3), torch.tensor(min(n, 50))), ({}, {})),
}


@pytest.mark.parametrize("name", CASES)
def test_sizes(name: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]
    model = case.make().requires_grad_(False)
    m = pliant.compile(model, case.inputs(6), case.dynamic)
    for n in SIZES:
        inputs = case.inputs(n)
        got: list[Any] = pytree.tree_leaves(m(*inputs))
        want: list[Any] = pytree.tree_leaves(model(*inputs))
        for a, b in zip(got, want, strict=True):
            assert a.shape == b.shape
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        # The plan without the sizes of the data holds for all; with them, it is exact.
        held = m.stats()["last_peak_bytes"]
        exact = m.memory_plan(*inputs, **m.stats()["last_sizes"])
        assert exact.peak_bytes == held and not exact.is_bound
        assert m.memory_plan(*inputs).peak_bytes >= held
    assert m.compile_count == 1


def test_numpy() -> None:
    case = CASES["kept"]
    model = case.make().requires_grad_(False)
    m = pliant.compile(model, case.inputs(6), case.dynamic)
    inputs = case.inputs(9)
    for a, b in zip(m(*(x.numpy() for x in inputs)), model(*inputs), strict=True):
        torch.testing.assert_close(torch.from_numpy(a), b)


@pytest.mark.parametrize("number", [-1, 6, 2**40])
def test_a_number_out_of_range_is_refused(number: int) -> None:
    m = pliant.compile(Cut(), CASES["cut"].inputs(6), CASES["cut"].dynamic)
    x = torch.randn(5, 3)
    with pytest.raises(pliant.PliantError, match=rf"item\(\) is {number}, must be"):
        m(x, torch.tensor(number))
    torch.testing.assert_close(m(x, torch.tensor(2))[1], x[2:] * 2)


def test_an_item_without_a_bound_is_refused() -> None:
    class Free(nn.Module):
        def forward(self, k: Tensor) -> Tensor:
            n = k.item()
            torch._check(n >= 0)
            return torch.zeros(n)

    with pytest.raises(pliant.UnsupportedOpError, match="without a bound"):
        pliant.compile(Free(), (torch.tensor(3),), ({},))


def test_a_bound_that_no_memory_holds_is_named_in_the_plan_alone() -> None:
    class Pairs(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            counts = torch.bincount(x)
            torch._check(counts.shape[0] <= 2**40)
            return (counts[:, None] * counts[None, :]).cumsum(0)

    x = torch.tensor([1, 2, 2, 5])
    m = pliant.compile(Pairs(), (x,), (N,))
    with pytest.raises(pliant.ShapeError, match="too large"):
        m.memory_plan(n=4)
    torch.testing.assert_close(m(x), Pairs()(x))
    assert m.stats()["last_peak_bytes"] == m.memory_plan(n=4, u0=6).peak_bytes


def test_sizes_as_results() -> None:
    class Told(nn.Module):
        def forward(self, x: Tensor, k: Tensor) -> tuple[Any, ...]:
            n = k.item()
            torch._check(n >= 0)
            torch._check(n <= x.shape[0])
            y = x[x > 0]
            return x[:n], n, y, 2 * y.shape[0], x.shape[0]

    model = Told()
    m = pliant.compile(model, (torch.randn(6), torch.tensor(3)), (N, {}))
    for n in (0, 1, 7, 31):
        inputs = torch.randn(n), torch.tensor(n // 2)
        for a, b in zip(m(*inputs), model(*inputs), strict=True):
            assert type(a) is type(b)
            assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))
