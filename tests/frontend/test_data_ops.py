"""Ops whose results have sizes of the data, and checks of such sizes, against eager."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from asserting import asserted
from torch import Tensor, nn
from torch._higher_order_ops import scan, while_loop
from torch.utils import _pytree as pytree
from torch_oracle import imported_from, run

import pliant

SIZES = (0, 1, 2, 7, 61)
N = {0: "n"}
Function = Callable[..., Any]
Inputs = Callable[[int], tuple[Tensor, ...]]


class Apply(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


@dataclass(frozen=True)
class Case:
    function: Function
    inputs: Inputs
    dynamic: tuple[dict[int, str], ...]
    sizes: tuple[int, ...] = SIZES


def few(n: int) -> Tensor:
    return torch.randint(0, 4, (n,))


def masked(*tail: int, more: int = 1) -> Inputs:
    """A tensor, a mask of its first dims, and a value for each place of the mask."""

    def made(n: int) -> tuple[Tensor, ...]:
        mask = torch.rand((n,) if more == 1 else (n, more)) > 0.5
        return (
            torch.randn(*mask.shape, *tail),
            mask,
            torch.randn(int(mask.sum()), *tail),
        )

    return made


def repeated(x: Tensor, repeats: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.repeat_interleave(x, repeats, dim=0)
    torch._check(y.shape[0] <= 4 * x.shape[0])
    return y * 2, y.sum(0)


def places(repeats: Tensor) -> Tensor:
    y = torch.repeat_interleave(repeats)
    torch._check(y.shape[0] <= 3 * repeats.shape[0] + 100)
    return y


def counted(x: Tensor) -> Tensor:
    y = torch.bincount(x)
    torch._check(y.shape[0] <= 9)
    return y


def weighed(x: Tensor, weights: Tensor) -> Tensor:
    y = torch.bincount(x, weights, minlength=3)
    torch._check(y.shape[0] <= x.shape[0] + 10)
    return y


def written(x: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    x = x.clone()
    x[mask] = values
    return x


def doubled(x: Tensor, keep: Tensor) -> Tensor:
    x = x.clone()
    x[keep > 0] = x[keep > 0] * 2
    return x


def columns(x: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    x = x.clone()
    x[:, mask] = values
    return x


def column_inputs(n: int) -> tuple[Tensor, ...]:
    mask = torch.rand(n) > 0.5
    return torch.randn(2, n, 3), mask, torch.randn(2, int(mask.sum()), 3)


def sizes_as_tensors(x: Tensor) -> Tensor:
    """Numbers that tensors hold, but that sizes alone decide."""
    reach = torch.tensor(min(x.shape[0], 20))
    ends = torch.stack([20 - reach, (20 + reach * 2).clamp(max=45)])
    table = torch.arange(60.0)
    return table[(20 - reach).item() : (20 + reach).item()] + ends.amax()


def split(x: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    a, b = sizes.tolist()
    torch._check(a >= 0)
    torch._check(b >= 0)
    torch._check(a + b == x.shape[0])
    front, back = torch.split(x, [a, b])
    return front.sum(0), back * 2


def padded(x: Tensor, k: Tensor) -> Tensor:
    n = k.item()
    torch._check(n >= 0)
    torch._check(n <= 20)
    return F.pad(x, (0, 0, n, 1))


def between(x: Tensor, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    a, b = first.item(), last.item()
    torch._check(a >= 0)
    torch._check(b >= a)
    torch._check(b <= x.shape[0])
    return x[a:b], x[a:b].sum(0)


def largest(x: Tensor, k: Tensor) -> Tensor:
    n = k.item()
    torch._check(n >= 2)
    torch._check(n < x.shape[0])
    return x[:n].max(0).values


def ranges(k: Tensor) -> tuple[Tensor, Tensor]:
    n = k.item()
    torch._check(n >= 0)
    torch._check(n <= 30)
    return torch.arange(n) * 2, torch.arange(2, n + 3)


def best(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    y = x[mask]
    torch._check(y.shape[0] >= 2)
    return y.topk(2).values, y.sort().values


def in_branch(x: Tensor, mask: Tensor) -> Tensor:
    return torch.cond(
        x.sum() > 0,
        lambda x, mask: x[mask].sum(0),
        lambda x, mask: x.sum(0) * 2,
        (x, mask),
    )


def in_scan(x: Tensor) -> tuple[Tensor, Tensor]:
    def step(total: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        kept = row[row > 0]
        return total + kept.sum(), kept.exp().sum()

    return scan(step, torch.zeros(()), x)


def in_while(x: Tensor, lengths: Tensor) -> Tensor:
    def step(i: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        n = lengths.gather(0, i[None])[0].item()
        torch._check(n >= 0)
        torch._check(n <= x.shape[0])
        return i + 1, total + x[:n].sum(0)

    start = torch.zeros((), dtype=torch.int64), torch.zeros(3)
    return while_loop(lambda i, total: i < 4, step, start)[1]


def on_found(x: Tensor, mask: Tensor) -> Tensor:
    kept = x[mask]
    return torch.cond(kept.sum() > 0, lambda y: y * 2, lambda y: y - 1, (kept,))


def every(function: Function, **more: Any) -> Function:
    flags = {"return_inverse": True, "return_counts": True, **more}
    return lambda x: function(x, **flags)


CASES = {
    "unique": Case(torch.unique, lambda n: (few(n),), (N,)),
    "unique, all": Case(
        every(torch.unique), lambda n: (torch.randint(0, 4, (n, 3)).float(),), (N,)
    ),
    "unique bools": Case(every(torch.unique), lambda n: (few(n) > 1,), (N,)),
    "unique rows": Case(
        every(torch.unique, dim=1),
        lambda n: (torch.randint(0, 2, (3, n)),),
        ({1: "n"},),
    ),
    "runs": Case(every(torch.unique_consecutive), lambda n: (few(n),), (N,)),
    "runs of rows": Case(
        every(torch.unique_consecutive, dim=1),
        lambda n: (torch.randint(0, 2, (2, n)),),
        ({1: "n"},),
    ),
    "repeated": Case(repeated, lambda n: (torch.randn(n, 3), few(n)), (N, N)),
    "repeated, sized": Case(
        lambda x, r: x.repeat_interleave(r, 0, output_size=2 * x.shape[0]),
        lambda n: (torch.randn(n, 3), torch.full((n,), 2)),
        (N, N),
    ),
    "places": Case(places, lambda n: (few(n),), (N,)),
    "counted": Case(counted, lambda n: (few(n),), (N,)),
    # Eager gives integers where there is nothing to weigh.
    "weighed": Case(
        weighed, lambda n: (few(n), torch.rand(n)), (N, N), sizes=(1, 2, 7, 61)
    ),
    "written": Case(written, masked(3), (N, N, {0: "k"})),
    "written in two dims": Case(written, masked(2, more=4), (N, N, {0: "k"})),
    "one row for all": Case(
        written,
        lambda n: (torch.randn(n, 3), torch.rand(n) > 0.5, torch.randn(1, 3)),
        (N, N, {0: "k"}),
    ),
    "doubled": Case(doubled, lambda n: (torch.randn(n, 3), torch.randn(n)), (N, N)),
    "columns": Case(columns, column_inputs, ({1: "n"}, N, {1: "k"})),
    "added": Case(
        lambda x, mask, values: x.index_put((mask,), values, accumulate=True),
        masked(3),
        (N, N, {0: "k"}),
    ),
    "sizes as tensors": Case(sizes_as_tensors, lambda n: (torch.randn(n),), (N,)),
    "asserted": Case(
        asserted, lambda n: (torch.arange(4 * n).view(n, 4) % 4,), (N,), (1, 2, 7, 61)
    ),
    "split": Case(
        split,
        lambda n: (torch.randn(n, 3), torch.tensor([n // 3, n - n // 3])),
        (N, {}),
    ),
    "padded": Case(
        padded, lambda n: (torch.randn(n, 3), torch.tensor(min(n, 20))), (N, {})
    ),
    "between": Case(
        between,
        lambda n: (torch.randn(n, 3), torch.tensor(n // 3), torch.tensor(n - n // 4)),
        (N, {}, {}),
    ),
    "largest": Case(
        largest,
        lambda n: (torch.randn(n, 3), torch.tensor(max(n // 2, 2))),
        (N, {}),
        sizes=(3, 7, 61),
    ),
    "ranges": Case(ranges, lambda n: (torch.tensor(min(n, 30)),), ({},)),
    "best": Case(
        best,
        lambda n: (torch.randn(n), torch.arange(n) % 3 < 2),
        (N, N),
        sizes=(2, 7, 61),
    ),
    "in a branch": Case(
        in_branch, lambda n: (torch.randn(n, 3), torch.rand(n) > 0.5), (N, N)
    ),
    "in a scan": Case(in_scan, lambda n: (torch.randn(4, n),), ({1: "n"},)),
    "in a while": Case(
        in_while, lambda n: (torch.randn(n, 3), torch.randint(0, n + 1, (4,))), (N, {})
    ),
    "a branch on what was found": Case(
        on_found, lambda n: (torch.randn(n, 3), torch.rand(n) > 0.5), (N, N)
    ),
}


def same(got: Any, want: Any) -> None:
    pairs = zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True)
    for a, b in pairs:
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_ops(name: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]
    model, example = Apply(case.function), case.inputs(5)
    m = pliant.compile(model, example, (case.dynamic,))
    for n in case.sizes:
        inputs = case.inputs(n)
        same(m(*inputs), model(*inputs))
        run = m.stats()
        exact = m.memory_plan(*inputs, **run["last_sizes"])
        assert run["last_peak_bytes"] == exact.peak_bytes
        assert exact.peak_bytes <= m.memory_plan(*inputs).peak_bytes


@pytest.mark.parametrize("name", ["unique rows", "repeated", "added", "between"])
def test_the_interpreter_agrees(name: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]
    imported = imported_from(Apply(case.function), case.inputs(5), (case.dynamic,))
    for n in (0, 1, 7):
        inputs = case.inputs(n)
        same(run(imported, inputs), case.function(*inputs))


def refused(function: Function, example: Any, dynamic: Any, bad: Any, why: str) -> None:
    m = pliant.compile(Apply(function), example, (dynamic,))
    with pytest.raises(pliant.PliantError, match=why):
        m(*bad)
    same(m(*example), function(*example))


def test_a_lower_bound_is_tested() -> None:
    x = torch.randn(5, 3)
    for k, why in (
        (1, "u0 must be at least 2, got 1"),
        (5, "is 5, must be 0 to"),
        (-1, "is -1"),
    ):
        refused(largest, (x, torch.tensor(3)), (N, {}), (x, torch.tensor(k)), why)


def test_a_relation_is_tested() -> None:
    x = torch.randn(5, 3)
    good, bad = ((x, *map(torch.tensor, ends)) for ends in ((1, 4), (3, 2)))
    refused(between, good, (N, {}, {}), bad, r"u0 \(=3\) <= u1 \(=2\)")


def test_an_assertion_about_data_is_tested() -> None:
    good, bad = torch.tensor([[1, 0], [0, 2]]), torch.tensor([[1, 0], [1, 2]])
    why = "the model checks this of its data"
    refused(asserted, (good,), ({0: "n", 1: "k"},), (bad,), why)


def test_a_bound_of_all_sizes_is_not_tested() -> None:
    """Torch has it that a part of 2 * u0 places is at most 2 * (2**63 - 2)."""

    def part(x: Tensor, kept: Tensor) -> Tensor:
        return x.nonzero().masked_select(kept)

    kept = torch.tensor([True, False])
    m = pliant.compile(Apply(part), (torch.randn(1, 7), kept), (({1: "n"}, {}),))
    for n in (7, 0, 3):
        same(m(x := torch.randn(1, n), kept), part(x, kept))


def test_a_size_that_a_tensor_holds_is_a_size() -> None:
    def rows(x: Tensor) -> Tensor:
        k = torch.div(x.shape[0], 8, rounding_mode="trunc")
        return x.view(k, 8)

    m = pliant.compile(Apply(rows), (torch.randn(16),), ((N,),))
    for n in (0, 8, 40):
        same(m(x := torch.randn(n)), rows(x))
    with pytest.raises(pliant.ShapeError, match="number of elements must stay"):
        m(torch.randn(17))


@pytest.mark.parametrize("repeats", [[1, 2], [2, 3], [5, -1]])
def test_repeats_must_have_the_stated_sum(repeats: list[int]) -> None:
    def function(x: Tensor, repeats: Tensor) -> Tensor:
        return x.repeat_interleave(repeats, 0, output_size=4)

    x = torch.randn(2, 3)
    good, bad = (x, torch.tensor([1, 3])), (x, torch.tensor(repeats))
    refused(function, good, (N, N), bad, "repeat_interleave")


def test_a_mask_must_have_as_many_places_as_there_are_values() -> None:
    x, values = torch.randn(3), torch.randn(2)
    good = x, torch.tensor([True, False, True]), values
    for flags in ([True, True, True], [True, False, False]):
        bad = x, torch.tensor(flags), values
        refused(written, good, (N, N, {0: "k"}), bad, "places of the mask less values")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_floats_of_data(dtype: torch.dtype) -> None:
    """As numbers beside tensors, and as results, with one that sizes decide."""

    def function(x: Tensor, k: Tensor) -> tuple[Any, ...]:
        number, first = k.item(), x.sum().item()
        ratio = x.shape[0] / 3
        return number, x * number, number * 2 - first, x + first, ratio

    close = 1e-2 if dtype is torch.bfloat16 else 1e-5
    x, k = torch.randn(5).to(dtype), torch.randn(1).to(dtype)
    m = pliant.compile(Apply(function), (x, k), {"args": ({0: "n"}, {})})
    for n in SIZES:
        x, k = torch.randn(n).to(dtype), torch.randn(1).to(dtype)
        found = m(x, k)
        assert [type(each) for each in found[::2]] == [float] * 3
        assert found[0] == k.item()
        for ours, its in zip(found, function(x, k), strict=True):
            torch.testing.assert_close(ours, its, rtol=close, atol=close)


def test_a_dim_that_torch_mistakes_is_refused() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.unique_consecutive(x, dim=-1)

    with pytest.raises(pliant.UnsupportedOpError, match="from the front"):
        pliant.compile(Apply(function), (torch.ones(3, 4),), {"args": (N,)})


def test_what_has_no_bound_is_refused() -> None:
    for function, inputs, why in (
        (lambda r: torch.repeat_interleave(r), (few(4),), "repeats without a bound"),
        (lambda x: torch.bincount(x), (few(4),), "bincount without a bound"),
    ):
        with pytest.raises(pliant.UnsupportedOpError, match=why) as caught:
            pliant.compile(Apply(function), inputs, ((N,),))
        assert "test_data_ops.py" in str(caught.value)


class Asserts(torch.nn.Module):
    def __init__(self, *message: str) -> None:
        super().__init__()
        self.message = message

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._assert_async((x > 0).all(), *self.message)
        return x.log()


@pytest.mark.parametrize("message", [("x must be positive",), ()])
def test_an_assertion_about_data_is_checked(message: tuple[str, ...]) -> None:
    x = torch.rand(4, 3) + 1
    model = pliant.compile(Asserts(*message), (x,), ({0: "n"},), threads=1)
    for n in (0, 1, 5):
        x = torch.rand(n, 3) + 1
        torch.testing.assert_close(model(x), x.log())
    x[2, 1] = -1
    said = message[0] if message else "asserts this of its data"
    with pytest.raises(pliant.ShapeError, match=said):
        model(x)


class Selects(torch.nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.masked_select(x, mask)


def test_a_single_element_is_selected_or_not() -> None:
    x, yes, no = torch.tensor(3.0), torch.tensor(True), torch.tensor(False)
    model = pliant.compile(Selects(), (x, yes), (None, None), threads=1)
    assert torch.equal(model(x, yes), x[None])
    assert model(x, no).shape == (0,)
