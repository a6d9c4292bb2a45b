"""Ops that pick their operands by position: concat, pad, gathers; and reductions."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import pliant
from pliant.lower.domain import Axis, sorted_breaks
from pliant.sym import Facts, as_expr, ge, sym

NS = ({0: "b", 1: "n"}, {0: "b", 1: "m"})


class Two(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.function(x, y)


def agree(
    function: Callable[[Tensor, Tensor], Any],
    example: tuple[Tensor, Tensor],
    dims: Any,
    calls: list[tuple[Tensor, Tensor]],
) -> pliant.CompiledModel:
    compiled = pliant.compile(Two(function), example, dims, threads=2)
    for inputs in (example, *calls):
        shapes = [tuple(t.shape) for t in inputs]
        got = pytree.tree_leaves(compiled(*inputs))
        want = pytree.tree_leaves(function(*inputs))
        for a, b in zip(got, want, strict=True):
            assert a.dtype is b.dtype
            torch.testing.assert_close(
                a,
                b,
                rtol=2e-5,
                atol=2e-5,
                equal_nan=True,
                msg=lambda m, at=shapes: f"{at}: {m}",
            )
    return compiled


def pairs(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return [
        (torch.randn(b, n), torch.randn(b, m))
        for b, n, m in itertools.product((0, 1, 2), sizes, sizes)
    ]


CONCATS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "along the last": lambda x, y: torch.cat([x, y], 1),
    "computed": lambda x, y: torch.cat([x.exp(), y * 2, x], 1) + 1,
    "along the first": lambda x, y: torch.cat([x.T, y.T * 2, x.T], 0),
    "both ways": lambda x, y: torch.cat(
        [torch.cat([x, y], 1), torch.cat([y, x], 1)], 0
    ),
    "flattened": lambda x, y: torch.cat([x, y], 1).flatten() * 2,
    "transposed": lambda x, y: torch.cat([x, y], 1).T + 1,
    "flipped": lambda x, y: torch.cat([x, y], 1).flip(1),
    "summed": lambda x, y: torch.cat([x, y], 1).sum(1),
    "softmax": lambda x, y: torch.cat([x, y], 1).softmax(1),
    "of a scalar column": lambda x, y: torch.cat([x, x.new_zeros(x.shape[0], 1)], 1),
    "stacked": lambda x, y: torch.stack([x, x * 2, x * 3], 2),
    "padded": lambda x, y: F.pad(torch.cat([x, y], 1), (2, 1), value=7.0),
    "of pads": lambda x, y: torch.cat([F.pad(x, (1, 0)), F.pad(y, (0, 2))], 1),
    "three": lambda x, y: torch.cat([x, y, x + 1, y - 1], 1).tanh(),
}


@pytest.mark.parametrize("name", CONCATS)
def test_concat(name: str) -> None:
    example = (torch.randn(2, 5), torch.randn(2, 6))
    agree(CONCATS[name], example, NS, pairs(0, 1, 3, 33))


@pytest.mark.parametrize("start", [1, 3, 7])
def test_slice_across_a_concat(start: int) -> None:
    """The slice may begin or end in either operand, or before the second begins."""

    def cut(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        whole = torch.cat([x, y], 1)
        return whole[:, start:] * 2, whole[:, :start].exp(), whole[:, 1:-1]

    example = (torch.randn(2, 5), torch.randn(2, 8))
    sizes = ((1, 9), (9, 1), (3, 7), (7, 3), (4, 40), (40, 4), (8, 8))
    calls = [(torch.randn(2, n), torch.randn(2, m)) for n, m in sizes]
    agree(cut, example, NS, calls)


def test_a_concat_of_a_concat_may_end_before_it() -> None:
    """Of one row there is no second one, at which the inner concat goes on."""

    def shifted(x: Tensor, y: Tensor) -> Tensor:
        zero = x.new_zeros(1, x.shape[1])
        once = torch.cat([zero, x.exp()[1:]])
        return torch.cat([once[:1], once[:-1]]) + y.sum()

    calls = [(torch.randn(b, 3), torch.randn(b, 2)) for b in (1, 2, 3, 17)]
    agree(shifted, (torch.randn(5, 3), torch.randn(5, 2)), NS, calls)


def test_segments_end_where_the_axis_does() -> None:
    b, n = sym("b"), sym("n")
    facts = Facts().assume(ge(b, 1))
    found = [as_expr(2), as_expr(1), b - 2]
    assert sorted_breaks(found, Axis("_d0", b), facts) == [as_expr(1)]
    assert sorted_breaks([n, b + 1], Axis("_d0", b + n), facts) == [n]
    facts = facts.assume(ge(b, 3))
    assert sorted_breaks(found, Axis("_d0", b), facts) == []  # b - 2 may be 1 or 2
    assert sorted_breaks(found[:2], Axis("_d0", b), facts) == found[1::-1]


PADS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "zeros": lambda x, y: F.pad(x, (1, 2)),
    "value": lambda x, y: F.pad(x, (0, 3, 2, 1), value=1.5) * 2,
    "of exp": lambda x, y: F.pad(x.exp(), (4, 4)).sum(1),
    "cut": lambda x, y: F.pad(F.pad(x, (3, 3)), (-2, -1)),
    "twice": lambda x, y: F.pad(F.pad(x, (1, 1), value=1.0) + 1, (1, 1), value=2.0),
    "added": lambda x, y: F.pad(x, (1, 0)) + F.pad(x, (0, 1)),
    "integers": lambda x, y: F.pad((x * 10).long(), (1, 1), value=-3),
    "bools": lambda x, y: F.pad(x > 0, (1, 1), value=True),
}


@pytest.mark.parametrize("name", PADS)
def test_pad(name: str) -> None:
    example = (torch.randn(2, 5), torch.randn(2, 6))
    agree(PADS[name], example, NS, pairs(0, 1, 3, 33))


@pytest.mark.parametrize("first", [0, 1])
def test_pad_of_a_part_that_was_flat(first: int) -> None:
    """What is read is known to lie inside the part, and so needs no division."""

    def padded(x: Tensor, y: Tensor) -> Tensor:
        part = x[:, first : x.shape[1] - 1 + first]
        return F.pad(part.flatten().exp().view(part.shape), (first, 1 - first))

    example = (torch.randn(2, 5), torch.randn(2, 6))
    agree(padded, example, NS, pairs(1, 3, 33))


GATHERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "rows": lambda x, i: x[i],
    "columns": lambda x, i: x.T[:, i] * 2,
    "pairs": lambda x, i: x[i, i % 5],
    "computed": lambda x, i: x.exp()[(i + 1) % 5] + 1,
    "from the end": lambda x, i: x[-1 - i],
    "summed": lambda x, i: x[i].sum(1),
    "normalised": lambda x, i: F.layer_norm(x[i], (5,)),
    "along": lambda x, i: x.gather(0, i[:, None].expand(-1, 5)),
    "select": lambda x, i: x.index_select(0, i).softmax(-1),
}


@pytest.mark.parametrize("name", GATHERS)
def test_gather(name: str) -> None:
    torch.manual_seed(0)
    example = (torch.randn(7, 5), torch.randint(0, 5, (4,)))
    calls = [
        (torch.randn(rows, 5), torch.randint(0, 5, (count,)))
        for rows, count in ((5, 0), (5, 1), (6, 33), (40, 3))
    ]
    agree(GATHERS[name], example, ({0: "rows"}, {0: "count"}), calls)


@pytest.mark.parametrize("bad", [-8, 7, 1 << 40])
@pytest.mark.parametrize("name", ["rows", "along", "normalised"])
def test_gather_out_of_range(name: str, bad: int) -> None:
    """A message instead of another's memory, and the model goes on."""
    function = GATHERS[name]
    example = (torch.randn(7, 5), torch.tensor([0, 3, 6, 1]))
    compiled = agree(function, example, ({0: "rows"}, {0: "count"}), [])
    with pytest.raises(pliant.PliantError, match=f"index {bad} is outside"):
        compiled(example[0], torch.tensor([0, 3, bad, 1]))
    torch.testing.assert_close(compiled(*example), function(*example))


def test_unused_indices_are_not_checked() -> None:
    """An index that only padding would read has no say."""

    def shifted(x: Tensor, i: Tensor) -> Tensor:
        return F.pad(x[i], (0, 0, 1, 1), value=3.0)

    example = (torch.randn(7, 5), torch.tensor([0, 3, 6, 1]))
    calls = [(torch.randn(7, 5), torch.zeros(0, dtype=torch.int64))]
    agree(shifted, example, ({0: "rows"}, {0: "count"}), calls)


REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "of everything": lambda x, y: x.sum(),
    "compared": lambda x, y: x.sum() > 0,
    "standardised": lambda x, y: (x - x.mean()) / (x.std() + 1),
    "scaled by the largest": lambda x, y: x / (x.abs().sum() + 1),
    "rows": lambda x, y: (x.sum(1), x.prod(1), (x * x).mean(1)),
    "columns": lambda x, y: (x.sum(0), x.prod(0), (x * x).mean(0)),
    "rows less columns": lambda x, y: x - x.sum(0) - x.sum(1, keepdim=True),
    "logic": lambda x, y: ((x > 0).any(1), (x > 0).all(0), (x > 2).any()),
    "integers": lambda x, y: ((x * 9).long().sum(1), (x > 0).sum(0)),
    "logsumexp": lambda x, y: F.pad(x, (0, 1)).logsumexp(1),
    "wide": lambda x, y: x.double().sum(1),
    "half": lambda x, y: x.half().float().sum(1),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name: str) -> None:
    example = (torch.randn(2, 5), torch.randn(2, 6))
    agree(REDUCTIONS[name], example, NS, pairs(0, 1, 3, 33))


def test_reductions_of_several_axes() -> None:
    def sums(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (
            x.sum((0, 2)),
            x.sum((1, 2)),
            x.sum((0, 1)),
            x.mean((1, 2), keepdim=True) * x,
            x.sum((0, 2), keepdim=True) + x,
            x.amax((0, 1, 2)),
            F.layer_norm(x, x.shape[1:]) if x.shape[2] == 3 else x,
        )

    dims = ({0: "a", 1: "b", 2: "c"}, {0: "n"})
    calls = [
        (torch.randn(shape), torch.randn(3))
        for shape in ((1, 1, 1), (2, 17, 33), (5, 1, 9), (1, 40, 2))
    ]
    agree(sums, (torch.randn(2, 4, 5), torch.randn(3)), dims, calls)


def test_results_that_are_not_computed() -> None:
    """Inputs, views of inputs, constants, one value twice: a buffer for each."""

    def results(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        z = x * 2
        return x, x.T, x[:, :1], z, z, z.flatten(), z.T, torch.ones(3), y, y.flip(1)

    compiled = agree(results, (torch.randn(2, 5), torch.randn(2, 6)), NS, pairs(1, 33))
    given = torch.randn(2, 3), torch.randn(2, 4)
    made = compiled(*given)
    owners = {t.untyped_storage().data_ptr() for t in made}
    assert len(owners) == len(made)
    assert not owners & {t.untyped_storage().data_ptr() for t in given}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64], ids=str)
def test_nothing_is_read_of_what_has_no_elements(dtype: torch.dtype) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = x.transpose(1, 2).flatten(0, 1)
            y[:, ::2] = 4
            return y, x.sum(2), (x + 1).amax(1)

    x = torch.zeros(1, 6, 0, dtype=dtype)
    for got, want in zip(pliant.compile(Model(), (x,))(x), Model()(x), strict=True):
        assert torch.equal(got, want)
