"""An index that a kernel has checked is not checked again by the next one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pliant
from pliant.ir.text import print_module


class Rows(nn.Module):
    """Places that are a result as well, so a kernel of their own computes them."""

    def forward(self, x: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
        places = (i * 3 + i.cumsum(0)).flip(0)
        rows = torch.arange(x.shape[0])
        return places, x[places] + x[rows].sum(0)


def checks(m: pliant.CompiledModel) -> int:
    """Those in loops, which say what they are else."""
    lines = print_module(m.program.lowered).splitlines()
    return sum("check " in line and " else " in line for line in lines)


def test_once() -> None:
    net = Rows()
    example = torch.randn(40, 4), torch.tensor([0, 1, 2])
    m = pliant.compile(net, example, ({0: "n"}, {0: "k"}))
    assert checks(m) == 1
    for n, k in ((40, 3), (1, 0), (1, 1), (60, 7)):
        x, i = torch.randn(n, 4), torch.arange(k)
        torch.testing.assert_close(m(x, i), net(x, i))
    with pytest.raises(pliant.ShapeError, match="no elements"):
        m(torch.randn(0, 4), torch.tensor([0]))
    for n, i in ((3, [1]), (5, [-9])):
        with pytest.raises(pliant.IndexRangeError):
            m(torch.randn(n, 4), torch.tensor(i))


def test_all_rows_need_no_check() -> None:
    def rows(x: Tensor) -> Tensor:
        return x[torch.arange(x.shape[0]).flip(0)] * 2

    class Net(nn.Module):
        forward = staticmethod(rows)

    m = pliant.compile(Net(), (torch.randn(5, 3),), ({0: "n"},))
    assert checks(m) == 0
    for n in (0, 1, 7):
        x = torch.randn(n, 3)
        torch.testing.assert_close(m(x), rows(x))
