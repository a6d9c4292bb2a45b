"""Unsupported ops: all are listed at once, and what nothing reads is none of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pliant


def unknown(name: str) -> Callable[[Tensor], Tensor]:
    """An op that no table has."""

    def same(x: Tensor) -> Tensor:
        return x.clone()

    op = torch.library.custom_op(f"pliant_test::{name}", same, mutates_args=())
    op.register_fake(same)
    return op


NAMES = ("before", "behind", "chosen", "other")
before, behind, chosen, other = map(unknown, NAMES)


class Behind(nn.Module):
    """Unsupported ops, some of them known ones in a use that is not supported."""

    def forward(self, x: Tensor) -> Tensor:
        first = before(x)
        second = first * first.long().sum().item()  # behind the first
        third = behind(second * 2)
        return torch.cond(
            third.sum() > 0, lambda y: chosen(y), lambda y: other(y), (third,)
        )


def test_all_are_listed() -> None:
    with pytest.raises(pliant.UnsupportedOpError) as caught:
        pliant.compile(Behind(), (torch.rand(3, 4),), ({0: "n"},))
    assert {op.name.split(".")[1] for op in caught.value.ops} == {"item", *NAMES}


class Dead(nn.Module):
    """LayerDrop: a number is drawn, and in inference nothing reads it."""

    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.rand([])
        unused = before(x) + drawn
        return unused if self.training and drawn < 0.1 else x * 2


def test_what_nothing_reads_is_dropped() -> None:
    x = torch.rand(2, 3)
    compiled = pliant.compile(Dead().eval(), (x,), ({0: "n"},), threads=1)
    torch.testing.assert_close(compiled(x), x * 2)
