"""Unsupported ops: all are listed at once, and what nothing reads is none of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pliant


class Behind(nn.Module):
    """Unsupported ops, some of them known ones in a use that is not supported."""

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        first = torch.special.bessel_j0(x)
        second = first.index_put((i,), x[0])  # behind the first
        third = torch.special.bessel_j1(second * 2)

        def true(y: Tensor) -> Tensor:
            return torch.special.bessel_y0(y)

        def false(y: Tensor) -> Tensor:
            return torch.special.bessel_y1(y)

        return torch.cond(third.sum() > 0, true, false, (third,))


def test_all_are_listed() -> None:
    example = (torch.rand(3, 4), torch.tensor([0, 1]))
    with pytest.raises(pliant.UnsupportedOpError) as caught:
        pliant.compile(Behind(), example, ({0: "n"}, None))
    names = {op.name.split(".")[1] for op in caught.value.ops}
    special = {f"special_bessel_{name}" for name in ("j0", "j1", "y0", "y1")}
    assert names == {"index_put", *special}


class Dead(nn.Module):
    """LayerDrop: a number is drawn, and in inference nothing reads it."""

    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.rand([])
        unused = torch.special.bessel_j0(x) + drawn
        return unused if self.training and drawn < 0.1 else x * 2


def test_what_nothing_reads_is_dropped() -> None:
    x = torch.rand(2, 3)
    compiled = pliant.compile(Dead().eval(), (x,), ({0: "n"},), threads=1)
    torch.testing.assert_close(compiled(x), x * 2)
