"""Memory of sizes that data decide: planned for all values, and exactly for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import pliant
from pliant.sym import parse

N = {0: "n"}
COUNTS = (0, 1, 7, 53, 61)  # of 61 rows: none, one, primes, all
ROWS = 61


class Kept(nn.Module):
    """What a mask keeps is wide, so that the peak is far below its bound."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 64)
        self.requires_grad_(False)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return self.layer(x[keep > 0]).relu() * 2


class Thinned(nn.Module):
    """A size of what another size left, and results of both."""

    def forward(self, x: Tensor, keep: Tensor) -> tuple[Tensor, ...]:
        rows = x[keep > 0]
        positive = rows[rows[:, 0] > 0]
        return rows.cumsum(0), positive @ positive.t(), positive.sum()


class Suppressed(nn.Module):
    """Boxes of a score, the overlaps of each pair, and those that none covers."""

    def forward(self, x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        chosen = torch.nonzero(keep > 0).squeeze(1)
        boxes = x[chosen]
        low = torch.maximum(boxes[:, None, :2], boxes[None, :, :2])
        high = torch.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
        overlap = (high - low).clamp(min=0).prod(-1)
        alone = overlap.triu(1).sum(0) < 0.5
        return boxes[alone], chosen[alone]


class Numbered(nn.Module):
    """A number of the data as a size, beside a count of true elements."""

    def forward(self, x: Tensor, keep: Tensor) -> tuple[Tensor, ...]:
        n = (keep > 0).sum().item()
        torch._check(n >= 0)
        torch._check(n <= x.shape[0])
        head = x[:n]
        return head * 2, x[n:].sum(0), torch.arange(n), torch.unique(head[:, 0])


class Repeated(nn.Module):
    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        times = (keep > 0).long() * 2
        out = torch.repeat_interleave(x, times, dim=0)
        torch._check(out.shape[0] <= 2 * x.shape[0])
        return out.sin()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "kept": Kept,
    "thinned": Thinned,
    "suppressed": Suppressed,
    "numbered": Numbered,
    "repeated": Repeated,
}


def inputs_of(count: int, rows: int = ROWS, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows, of which a mask keeps so many."""
    torch.manual_seed(seed)
    keep = torch.zeros(rows)
    keep[torch.randperm(rows)[:count]] = 1
    return torch.randn(rows, 4), keep


def compiled(model: nn.Module, **options: Any) -> pliant.CompiledModel:
    return pliant.compile(model, inputs_of(3, 6), (N, N), **options)


def same(got: Any, want: Any) -> None:
    for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        if b.numel():  # a result has no more memory than its elements need
            assert a.untyped_storage().nbytes() == b.numel() * b.itemsize


@pytest.mark.parametrize("name", MODELS)
def test_the_plan_is_exact_for_a_value_and_holds_for_all(name: str) -> None:
    model = MODELS[name]()
    m = compiled(model)
    bound = m.memory_plan(n=ROWS)
    assert bound.is_bound
    for count in COUNTS:
        inputs = inputs_of(count)
        same(m(*inputs), model(*inputs))
        stats = m.stats()
        plan = m.memory_plan(n=ROWS, **stats["last_sizes"])
        assert not plan.is_bound
        assert stats["last_peak_bytes"] == plan.peak_bytes
        assert stats["last_planned_bytes"] == plan.peak_bytes
        assert plan.peak_bytes <= bound.peak_bytes
        # By the shapes of inputs too; and what is not known yet is bounded.
        assert m.memory_plan(*inputs).peak_bytes == bound.peak_bytes
        first = dict(list(stats["last_sizes"].items())[:1])
        between = m.memory_plan(n=ROWS, **first).peak_bytes
        assert plan.peak_bytes <= between <= bound.peak_bytes
    assert m.compile_count == 1


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 8, 31])
def test_no_value_is_above_the_bound(rows: int) -> None:
    m = compiled(Thinned())
    bound = m.memory_plan(n=rows).peak_bytes
    for first in range(rows + 1):
        for second in range(first + 1):
            plan = m.memory_plan(n=rows, u0=first, u1=second)
            assert plan.peak_bytes <= bound


def test_what_names_the_size() -> None:
    m = compiled(Kept())
    assert m.dims == ("n", "u0")
    assert "u0           decided by data, 0 .. n" in m.explain()
    plan = m.memory_plan(n=ROWS, u0=7)
    assert dict(plan.dims) == {"n": ROWS, "u0": 7}
    terms = m.peak_formula.removeprefix("max(").removesuffix(")")
    assert "u0" in terms
    told = parse(m.peak_formula).evaluate({"n": ROWS, "u0": 7})
    assert told == plan.lower_bound
    assert m.memory_timeline(n=ROWS, u0=7).peak_bytes == told
    m.explain(n=ROWS)
    assert "M=7" in m.explain(n=ROWS, u0=7)
    with pytest.raises(pliant.ShapeError, match=r"takes the dims n, u0 \(optional\)"):
        m.memory_plan(u0=3)
    with pytest.raises(pliant.ShapeError, match="missing: u0"):
        m.memory_timeline(n=ROWS)
    with pytest.raises(pliant.ShapeError, match="u0 <= n"):
        m.memory_plan(n=3, u0=4)


def test_a_limit_between_a_value_and_the_bound() -> None:
    model = Kept()
    m = compiled(model)
    bound = m.memory_plan(n=ROWS).peak_bytes
    middle = m.memory_plan(n=ROWS, u0=53).peak_bytes
    assert middle < bound
    m.memory_limit = bound
    for count in COUNTS:
        same(m(*inputs_of(count)), model(*inputs_of(count)))
    m.memory_limit = middle
    with pytest.raises(pliant.MemoryLimitError):
        m.memory_plan(n=ROWS)
    for count in (0, 1, 53):
        same(m(*inputs_of(count)), model(*inputs_of(count)))
        assert m.stats()["last_peak_bytes"] <= middle
    with pytest.raises(pliant.MemoryLimitError) as caught:
        m(*inputs_of(ROWS))
    error = caught.value
    assert f"n={ROWS}, u0={ROWS}" in str(error) and str(middle) in str(error)
    assert error.limit == middle and middle < error.least <= bound
    assert 53 <= error.largest["u0"] < ROWS
    # Without room for the first part, nothing runs.
    m.memory_limit = 8
    with pytest.raises(pliant.MemoryLimitError, match=f"n={ROWS}\\)"):
        m(*inputs_of(0))


class Counting(nn.Module):
    """Writes an input and a buffer, beside a result of a size of data."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        self.total += 1
        x.add_(1)
        return (x[keep > 0] @ torch.ones(4, 64)) * 2


def test_a_call_that_does_not_fit_changes_nothing() -> None:
    model, eager = Counting(), Counting()
    m = pliant.compile(model, inputs_of(3, 6), (N, N))
    started = float(model.total)
    m.memory_limit = m.memory_plan(n=ROWS, u0=7).peak_bytes
    x, keep = inputs_of(53)
    before = x.clone()
    with pytest.raises(pliant.MemoryLimitError, match="u0=53"):
        m(x, keep)
    assert torch.equal(x, before) and float(model.total) == started
    x, keep = inputs_of(7)
    y = x.clone()
    same(m(x, keep), eager(y, keep))
    torch.testing.assert_close(x, y)
    assert float(model.total) == started + 1


def test_copies_of_inputs_count_once() -> None:
    model = Kept()
    m = compiled(model)
    x, keep = inputs_of(7)
    wide = torch.stack([x, x], 2)[:, :, 0]
    assert not wide.is_contiguous()
    same(m(wide, keep), model(x, keep))
    plan = m.memory_plan(wide, keep, u0=7)
    assert plan.copy_bytes == x.numel() * 4 == m.stats()["last_copied_bytes"]
    assert m.stats()["last_peak_bytes"] == plan.peak_bytes


class Drawn(nn.Module):
    """The numbers that decide the mask are those that are picked."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        drawn = torch.rand_like(x)
        return drawn[drawn > 0.5], torch.rand_like(x)


def test_all_parts_draw_from_one_seed() -> None:
    m = pliant.compile(Drawn(), (torch.zeros(6),), (N,))
    for n in (0, 1, 500):
        torch.manual_seed(n)
        picked, other = m(torch.zeros(n))
        torch.manual_seed(n)
        again, same_other = m(torch.zeros(n))
        assert torch.equal(picked, again) and torch.equal(other, same_other)
        assert (picked > 0.5).all()
        assert n < 500 or 150 < len(picked) < 350


def test_weights_are_those_of_one_moment() -> None:
    """A change of the module's weights reaches both parts."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(4, 1)
            self.layer = nn.Linear(4, 3)
            self.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x[self.gate(x)[:, 0] > 0])

    model = Gated()
    m = pliant.compile(model, (torch.randn(6, 4),), (N,))
    for _ in range(3):
        x = torch.randn(31, 4)
        same(m(x), model(x))
        for p in model.parameters():
            p.copy_(torch.randn_like(p))


@pytest.fixture
def budget() -> Iterator[Callable[[int], None]]:
    yield lambda limit: pliant.set_memory_budget(limit, wait=10.0)
    pliant.set_memory_budget(None)


def test_threads_share_a_budget(budget: Callable[[int], None]) -> None:
    """Calls of many sizes at once: each waits at its start, and none in between."""
    model = Thinned()
    m = compiled(model)
    m.trim()
    used = pliant.memory_budget().in_use
    budget(used + 3 * m.memory_plan(n=ROWS).peak_bytes // 2)

    def run(seed: int) -> None:
        inputs = inputs_of(seed * 7 % (ROWS + 1), seed=seed)
        same(m(*inputs), model(*inputs))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(run, range(120)))
    m.trim()
    # Idle arenas of other models may have made room.
    assert pliant.memory_budget().in_use <= used


def test_numpy_and_profile() -> None:
    model = Kept()
    m = compiled(model, instruments=pliant.Instruments(profile=True))
    x, keep = inputs_of(7)
    got = m(x.numpy(), keep.numpy())
    torch.testing.assert_close(torch.from_numpy(got), model(x, keep))
    times = m.profile(x, keep)
    product = next(t for t in times if t.name.startswith("matmul"))
    assert product.flops == 2 * 7 * 4 * 64
