"""Traces that share what they know of sizes are the traces that do not."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import sympy
import torch
from torch import nn
from torch.utils._sympy import interp, value_ranges
from torch.utils._sympy.functions import FloorDiv
from torch.utils._sympy.value_ranges import ValueRanges

from pliant.frontend import torch_trace
from pliant.frontend.torch_bounds import shared_bounds


class Padded(nn.Module):
    """Convolutions that pad as TensorFlow does: sizes are quotients of quotients."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(1, 1, 3, 2) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv in self.convs:
            high, wide = ((-(-n // 2) - 1) * 2 + 3 - n for n in x.shape[-2:])
            high, wide = max(high, 0), max(wide, 0)
            ends = [wide // 2, wide - wide // 2, high // 2, high - high // 2]
            x = conv(nn.functional.pad(x, ends))
        return x


def nested(depth: int) -> sympy.Expr:
    """Each level names the one below it three times."""
    size = sympy.Symbol("s", integer=True, positive=True)
    for _ in range(depth):
        size = FloorDiv(size + sympy.Max(0, 2 * FloorDiv(size + 1, 2) - size + 1), 2)
    return size


def bounded(expr: sympy.Expr) -> tuple[ValueRanges, int]:
    """The range that torch finds, and how many parts it looked at."""
    (symbol,) = expr.free_symbols
    handle, calls = interp._run_sympy_handler, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return handle(*args, **kwargs)

    with mock.patch.object(interp, "_run_sympy_handler", counted):
        found = value_ranges.bound_sympy(expr, {symbol: ValueRanges(2, 1000)})
    return found, len(calls)


@pytest.mark.parametrize("depth", [1, 3, 5])
def test_bounds_are_those_of_torch(depth: int) -> None:
    expr = nested(depth)
    wanted, _ = bounded(expr)
    with shared_bounds():
        assert bounded(expr)[0] == wanted
        assert bounded(expr) == (wanted, 0)  # known by now


def test_each_part_is_bounded_once() -> None:
    with shared_bounds():
        counts = [bounded(nested(depth))[1] for depth in (2, 4, 6)]
        first, *more = counts
    assert all(count <= first + 2 for count in more)


def test_symbols_are_a_set_of_the_callers_own() -> None:
    expr = nested(3)
    wanted = expr.free_symbols
    with shared_bounds():
        expr.free_symbols.clear()
        assert expr.free_symbols == wanted


def test_traces_are_the_same() -> None:
    torch.manual_seed(0)
    model, x = Padded(3).eval(), torch.randn(2, 1, 61, 44)
    dims = ({0: "batch", 2: "height", 3: "width"},)
    shared = torch_trace.trace(model, (x,), dims)
    with mock.patch.object(torch_trace, "shared_bounds", contextlib.nullcontext):
        alone = torch_trace.trace(model, (x,), dims)
    assert str(shared.program) == str(alone.program)
    assert shared.program.range_constraints == alone.program.range_constraints
    assert list(shared.info.asked.questions) == list(alone.info.asked.questions)
    assert shared.info.asked.sizes == alone.info.asked.sizes
