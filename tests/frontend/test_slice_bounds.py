"""Bounds of slices, pads and places that depend on sizes, whatever their sign.

Each model is compiled once and compared with eager at sizes on both sides of every
sign: equal, refused by both, or refused by ours alone where the trace has fixed a size
that Python code may have read. Its own example is never refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pliant

SIZES = (0, 1, 2, 3, 5, 8, 9, 24)
EXAMPLES = ((4, 24), (9, 5))


class Apply(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.function(x, y)


def written_tail(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = y.clone()
    out[:, -x.shape[1] :] = x
    return out


def selected(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.select_scatter(x, x[:, 0] * 0, 1, -(x.shape[1] // 2)) + y.sum()


def window(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    begin = -(x.shape[1] // 2)
    return torch.slice_scatter(x, x[:, :2] * 0, 1, begin, begin + 2) + y.sum()


# (what is computed, whether sizes that eager takes may be refused)
MODELS: dict[str, tuple[Callable[..., Any], bool]] = {
    "tail": (lambda x, y: x + y[:, -x.shape[1] :], True),
    "tail alone": (lambda x, y: x.sum() + y[:, -x.shape[1] :], True),
    "tail but one": (lambda x, y: x.sum() + y[:, 1 - x.shape[1] :], True),
    "head": (lambda x, y: x.sum() + y[:, : -x.shape[1]], True),
    "stepped": (lambda x, y: x[:, 1 - x.shape[1] :: 2] + y.sum(), True),
    "both": (lambda x, y: x.sum() + y[:, 5 - x.shape[1] : -x.shape[1]], True),
    "one or none": (
        lambda x, y: x + torch.ones(1, 1)[:, max(0, 1 - x.shape[1]) :] + y.sum(),
        False,
    ),
    "place": (lambda x, y: x.sum() + y[:, x.shape[1] - y.shape[1]], False),
    "halves": (
        lambda x, y: (x[:, -(x.shape[1] // 2) :].sum(), y[:, -y.shape[1]]),
        True,
    ),
    "narrow": (lambda x, y: x.narrow(1, -2, 2) + y.sum(), False),
    "roll": (lambda x, y: torch.roll(x, -y.shape[1], 1) + y.sum(), False),
    "pad to 8": (lambda x, y: F.pad(x, (0, 8 - x.shape[1])) + y.sum(), False),
    "pad to other": (lambda x, y: F.pad(x, (y.shape[1] - x.shape[1], 0)) + y, False),
    "written tail": (written_tail, True),
    "select_scatter": (selected, False),
    "slice_scatter": (window, True),
}


def outcome(model: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    out = model(x, y)
    return out if isinstance(out, tuple) else (out,)


@pytest.mark.parametrize("name", MODELS)
def test_python_rules_hold_at_every_size(name: str) -> None:
    function, partial = MODELS[name]
    model = Apply(function)
    compiled_once = False
    for example in EXAMPLES:
        inputs = tuple(torch.randn(2, n) for n in example)
        try:
            model(*inputs)
        except (RuntimeError, IndexError):
            continue  # no example of this model
        dims = ({0: "batch", 1: "seq"}, {0: "batch", 1: "past"})
        ours = pliant.compile(model, inputs, dims, threads=1)
        ours(*inputs)
        compiled_once = True
        for n in SIZES:
            for m in SIZES:
                x, y = torch.randn(2, n), torch.randn(2, m)
                try:
                    wanted = outcome(model, x, y)
                except (RuntimeError, IndexError):
                    with pytest.raises(pliant.PliantError):
                        ours(x, y)
                    continue
                try:
                    got = outcome(ours, x, y)
                except pliant.ShapeError:
                    assert partial, (n, m)
                    continue
                for have, want in zip(got, wanted, strict=True):
                    assert have.shape == want.shape, (n, m)
                    torch.testing.assert_close(have, want)
    assert compiled_once
