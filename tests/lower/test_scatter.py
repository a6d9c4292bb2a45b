"""scatter: rows summed up where an index says, in machine code and interpreted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import pliant
from pliant.ir.interp import run_graph
from pliant.ir.parse import parse_module

TEXT = """
graph @main(%i: i64[m], %u: f32[m, c]) {
  %y: f32[11, c] = scatter(%i, %u) {op = "sum", rows = <11>}
  return %y
}
"""


@pytest.fixture(scope="module")
def compiled() -> pliant.CompiledModel:
    return pliant.compile(parse_module(TEXT), threads=2)


@pytest.mark.parametrize(
    "count, width", [(0, 3), (1, 1), (5, 0), (7, 13), (100, 64), (33, 129), (1000, 7)]
)
def test_sums_rows(compiled: pliant.CompiledModel, count: int, width: int) -> None:
    torch.manual_seed(count + width)
    index, rows = torch.randint(0, 11, (count,)), torch.randn(count, width)
    want = torch.zeros(11, width).index_add_(0, index, rows)
    assert torch.equal(compiled(index, rows), want)
    (told,) = run_graph(parse_module(TEXT), [index.numpy(), rows.numpy()])
    np.testing.assert_array_equal(told, want.numpy())


@pytest.mark.parametrize("bad", [-1, 11, 2**40])
def test_an_index_outside_is_an_error(compiled: pliant.CompiledModel, bad: int) -> None:
    with pytest.raises(pliant.IndexRangeError, match="size 11"):
        compiled(torch.tensor([3, bad]), torch.randn(2, 4))


MERGED = """
graph @main(%i: i64[m], %u: f32[m, c]) {
  %p: f32[11, c] = scatter(%i, %u) {op = "prod", rows = <11>}
  %x: f32[11, c] = scatter(%i, %u) {op = "max", rows = <11>}
  %n: f32[11, c] = scatter(%i, %u) {op = "min", rows = <11>}
  return %p, %x, %n
}
"""


def test_merges_rows() -> None:
    merged = pliant.compile(parse_module(MERGED), threads=2)
    for count, width in ((0, 3), (1, 1), (7, 13), (33, 129)):
        torch.manual_seed(count + width)
        index, rows = torch.randint(0, 11, (count,)), torch.randn(count, width)
        start = {"prod": 1.0, "amax": -torch.inf, "amin": torch.inf}
        want = [
            torch.full((11, width), begin).index_reduce_(0, index, rows, op)
            for op, begin in start.items()
        ]
        told = run_graph(parse_module(MERGED), [index.numpy(), rows.numpy()])
        got = merged(index, rows)
        for ours, theirs, said in zip(got, want, told, strict=True):
            assert torch.equal(ours, theirs)
            np.testing.assert_array_equal(said, theirs.numpy())
