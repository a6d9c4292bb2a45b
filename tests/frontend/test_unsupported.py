"""Unsupported ops: all are listed at once, and what nothing reads is none of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pliant


class Behind(nn.Module):
    """Unsupported ops, some of them known ones in a use that is not supported."""

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        first = torch.special.airy_ai(x)
        second = first * first.sum().item()  # behind the first
        third = torch.special.hermite_polynomial_h(second * 2, 3)

        def true(y: Tensor) -> Tensor:
            return torch.special.laguerre_polynomial_l(y, 2)

        def false(y: Tensor) -> Tensor:
            return torch.special.legendre_polynomial_p(y, 2)

        return torch.cond(third.sum() > 0, true, false, (third,))


def test_all_are_listed() -> None:
    example = (torch.rand(3, 4), torch.rand(3, 4) > 0.5)
    with pytest.raises(pliant.UnsupportedOpError) as caught:
        pliant.compile(Behind(), example, ({0: "n"}, {0: "n"}))
    names = {op.name.split(".")[1] for op in caught.value.ops}
    kinds = ("airy_ai", "hermite_polynomial_h", "laguerre_polynomial_l")
    special = {f"special_{name}" for name in (*kinds, "legendre_polynomial_p")}
    assert names == {"item", *special}


class Dead(nn.Module):
    """LayerDrop: a number is drawn, and in inference nothing reads it."""

    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.rand([])
        unused = torch.special.airy_ai(x) + drawn
        return unused if self.training and drawn < 0.1 else x * 2


def test_what_nothing_reads_is_dropped() -> None:
    x = torch.rand(2, 3)
    compiled = pliant.compile(Dead().eval(), (x,), ({0: "n"},), threads=1)
    torch.testing.assert_close(compiled(x), x * 2)
