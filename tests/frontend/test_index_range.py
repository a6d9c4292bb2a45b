"""Every op that takes indices checks each against its own axis, as eager does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pliant
from pliant.ir.interp import run_graph
from pliant.ir.parse import parse_module

Function = Callable[[Tensor, Tensor], Tensor]

# x is (rows, 4), i has an index for each row: of the second axis, unless said.
CASES: dict[str, Function] = {
    "gather": lambda x, i: x.gather(1, i[:, None]),
    "scatter_add": lambda x, i: x.scatter_add(1, i[:, None], x[:, :1]),
    "scatter": lambda x, i: x.scatter(1, i[:, None], x[:, :1]),
    "scatter_value": lambda x, i: x.scatter(1, i[:, None], 2.0),
    "index_select": lambda x, i: x.index_select(1, i),
    "index_add": lambda x, i: x.index_add(1, i, torch.ones_like(x[:, :1]) * i),
    "index": lambda x, i: x[:, i],
    "index_pair": lambda x, i: x[i % 2, i],
    "index_put": lambda x, i: x.index_put((i * 0, i), x[:, 0], accumulate=True),
    "embedding": lambda x, i: F.embedding(i, x.mT.contiguous()),
    "nll": lambda x, i: F.nll_loss(x, i, reduction="sum"),
    "cross_entropy": lambda x, i: F.cross_entropy(x, i, ignore_index=-1),
    "one_hot": lambda x, i: F.one_hot(i, 4) * x,
    "take": lambda x, i: x[0].take(i),
    "take_along_dim": lambda x, i: x.take_along_dim(i[:, None], 1),
}
ONLY_LONG = frozenset(
    {"nll", "cross_entropy", "one_hot", "take", "take_along_dim", "index_pair"}
)
VALUES = (0, 3, -1, -4, -5, 4, 7, 11, 2**40, -(2**40), 2**62, -(2**63))


class Applied(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        return self.function(x, i)


def as_eager(name: str, kind: torch.dtype, values: tuple[int, ...]) -> None:
    function = CASES[name]
    x, i = torch.randn(3, 4), torch.tensor([1, 2, 3], dtype=kind)
    # A trace of take_along_dim has its sizes as constants.
    rows = None if name == "take_along_dim" else ({0: "rows"}, {0: "rows"})
    compiled = pliant.compile(Applied(function), (x, i), rows, threads=1)
    for value in values:
        for place in range(3):
            index = i.clone()
            index[place] = value
            try:
                want = function(x, index)
            except (RuntimeError, IndexError):
                with pytest.raises(pliant.IndexRangeError, match=f"index {value} is"):
                    compiled(x, index)
            else:
                torch.testing.assert_close(compiled(x, index), want)


@pytest.mark.parametrize("name", CASES)
def test_as_eager(name: str) -> None:
    torch.manual_seed(0)
    as_eager(name, torch.int64, VALUES)


@pytest.mark.parametrize("name", sorted(CASES.keys() - ONLY_LONG))
def test_int32_as_eager(name: str) -> None:
    torch.manual_seed(0)
    as_eager(name, torch.int32, (0, 3, -1, -4, -5, 4, 7, 2**31 - 1, -(2**31)))


@pytest.mark.parametrize("name", ["gather", "scatter_add", "index_select", "index_add"])
def test_no_rows_and_no_indices(name: str) -> None:
    x, i = torch.randn(3, 4), torch.tensor([1, 2, 3])
    rows = ({0: "rows"}, {0: "rows"})
    compiled = pliant.compile(Applied(CASES[name]), (x, i), rows, threads=1)
    torch.testing.assert_close(compiled(x[:0], i[:0]), CASES[name](x[:0], i[:0]))


def test_scalars_have_one_index() -> None:
    def function(x: Tensor, i: Tensor) -> Tensor:
        one = i.reshape(1)
        added = x.index_add(0, one, x) + x.scatter_add(0, i, x)
        picked = x.gather(0, i) + x.index_select(0, one) + x.scatter(0, i, 2.0)
        return added + picked

    x, i = torch.tensor(1.5), torch.tensor(0)
    compiled = pliant.compile(Applied(function), (x, i), threads=1)
    torch.testing.assert_close(compiled(x, i), function(x, i))
    with pytest.raises(pliant.IndexRangeError, match="index 1 is outside axis 0"):
        compiled(x, i + 1)


class Pairs(nn.Module):
    """A loss whose gradient adds up at places of two indices."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(12.0).reshape(3, 4))

    def forward(self, i: Tensor, j: Tensor) -> Tensor:
        rows = self.table.gather(1, j[:, None].expand(3, 2))
        return (self.table[i, j] ** 2).sum() + (rows**2).sum()


@pytest.mark.parametrize("bad", [(0, 4), (2, -5), (3, 0), (-4, 1)])
def test_training_checks_each_index(bad: tuple[int, int]) -> None:
    model = Pairs()
    i, j = torch.tensor([0, 1, 2]), torch.tensor([3, 2, 1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    example = ((i, j), ())
    step = pliant.compile_training(
        model, lambda loss: loss, optimizer, example, threads=1
    )
    i[1], j[1] = bad
    before = model.table.detach().clone()
    with pytest.raises(pliant.IndexRangeError, match="outside axis"):
        step((i, j), ())
    torch.testing.assert_close(model.table.detach(), before)


TEXT = """
graph @main(%i: i64[m]) {
  %y: i64[m] = in_range(%i) {size = <n>, wraps = true, of = "take", axis = 1}
  %z: i64[m] = in_range(%y) {size = <n>, wraps = false, of = "take", axis = 1}
  return %z
}
""".replace("<n>", "<5>")


def test_interpreted() -> None:
    module = parse_module(TEXT)
    (found,) = run_graph(module, [torch.tensor([-5, -1, 4]).numpy()])
    assert found.tolist() == [0, 4, 4]
    with pytest.raises(pliant.IndexRangeError, match="index -6 is outside axis 1 of"):
        run_graph(module, [torch.tensor([2, -6]).numpy()])
