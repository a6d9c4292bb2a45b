"""Code that branches on a size: as eager at each size, or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from guarded_runs import Call
from torch import Tensor

import pliant

SIZES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 21)


def matched(x: Tensor) -> Tensor:
    match x.shape[0]:
        case 1:
            return x * 2
        case n if n > 8:
            return x * 5
        case _:
            return x * 7


def halved(x: Tensor) -> Tensor:
    while x.shape[0] > 2:
        x = x[: x.shape[0] // 2]
    return x * 2


def attended(x: Tensor) -> Tensor:
    q, causal = x[None, None], bool(x.shape[0] > 1)
    return F.scaled_dot_product_attention(q, q, q, is_causal=causal)


# Those answered at least, of SIZES, when traced at 4.
BRANCHES: dict[str, tuple[Callable[[Tensor], Tensor], set[int]]] = {
    "one": (lambda x: x * 3 if x.shape[0] == 1 else x * 2, set(SIZES)),
    "none": (lambda x: x * 3 if x.numel() == 0 else x * 2, set(SIZES)),
    "not": (lambda x: x * 3 if x.shape[0] else x.new_ones(2, 3), set(SIZES)),
    "another": (
        lambda x: x.clamp(max=0.1) if x.shape[0] == 5 else x * 1,
        set(SIZES),
    ),
    "above": (lambda x: x * 2 if x.shape[0] > 6 else x * 3, set(SIZES)),
    "repeated": (lambda x: x.repeat(3, 1) if x.shape[0] == 1 else x * 1, set(SIZES)),
    "squeezed": (lambda x: x.squeeze(0) * 2, set(SIZES)),
    "between": (lambda x: x * 2 if 2 < x.shape[0] < 6 else x * 3, {3, 4, 5}),
    "divided": (lambda x: x * 2 if x.shape[0] % 4 else x * 3, {4, 8, 16}),
    "matched": (matched, {2, 3, 4, 5}),
    "halved": (halved, {4, 5}),
    "attended": (attended, {1, 2, 4, 9}),
    "least": (lambda x: x[: min(x.shape[0], 5)] * 2, set(SIZES)),
    "area": (
        lambda x: F.interpolate(x.t()[None], scale_factor=0.6, mode="area"),
        {4, 8, 9},
    ),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_as_eager_or_refused(name: str) -> None:
    function, least = BRANCHES[name]
    m = pliant.compile(Call(function), (torch.randn(4, 3),), ({0: "n"},), threads=1)
    answered = set()
    for n in SIZES:
        x = torch.randn(n, 3)
        try:
            got = m(x)
        except pliant.ShapeError:
            continue
        answered.add(n)
        torch.testing.assert_close(got, function(x), rtol=1e-5, atol=1e-5)
    assert answered >= least
