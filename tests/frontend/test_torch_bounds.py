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

from pliant.frontend import torch_bounds, torch_questions, torch_trace
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


class Windows(nn.Module):
    """Windows of 7 x 7 and back: a size is a product divided by its factors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high, wide = x.shape[-2:]
        x = nn.functional.pad(x[:, 0], (0, -wide % 7, 0, -high % 7))
        batch, high, wide = x.shape
        x = x.view(batch, high // 7, 7, wide // 7, 7).transpose(2, 3).reshape(-1, 49)
        batch = x.shape[0] // (high * wide // 49)
        x = x.view(batch, high // 7, wide // 7, 7, 7).transpose(2, 3)
        return x.reshape(batch, high, wide)


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


def test_factors_cancel_term_by_term() -> None:
    a, b, c = sympy.symbols("a1 b1 c1", integer=True, positive=True)
    refused = mock.Mock(side_effect=AssertionError)
    with mock.patch.object(torch_bounds, "_simplify", refused), shared_bounds():
        assert FloorDiv(a * c + b * c, c) == a + b
        assert FloorDiv(6 * a * c + 4 * c, 4 * c) == FloorDiv(3 * a + 2, 2)
        assert FloorDiv(c * (a + 1) * (b + 2), c) == (a + 1) * (b + 2)


def test_a_quotient_that_stays_is_simplified_by_sympy() -> None:
    a, b = sympy.symbols("a2 b2", integer=True, positive=True)
    expr = (a * b + a) / (b + 1)
    with shared_bounds():
        assert sympy.simplify(expr) == a


@pytest.mark.parametrize("model", [Padded(3), Windows()], ids=["padded", "windows"])
def test_traces_are_the_same(model: nn.Module) -> None:
    torch.manual_seed(0)
    model, x = model.eval(), torch.randn(2, 1, 61, 44)
    dims = ({0: "batch", 2: "height", 3: "width"},)
    shared = torch_trace.trace(model, (x,), dims)
    with mock.patch.object(torch_trace, "shared_bounds", contextlib.nullcontext):
        alone = torch_trace.trace(model, (x,), dims)
    assert str(shared.program) == str(alone.program)
    assert shared.program.range_constraints == alone.program.range_constraints
    assert list(shared.info.asked.questions) == list(alone.info.asked.questions)
    assert shared.info.asked.sizes == alone.info.asked.sizes


def test_a_comparison_that_is_repeated_is_widened_once() -> None:
    def widened(rounds: int) -> int:
        class Rows(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = nn.functional.pad(x, (0, -x.shape[1] % 4)).clone()
                for i in range(1, rounds):
                    x[:, i] = x[:, i - 1].clone() + x[:, i]
                return x

        with mock.patch.object(
            torch_questions, "maybe_zero", side_effect=torch_questions.maybe_zero
        ) as counted:
            torch_trace.trace(Rows(), (torch.randn(2, 13),), ({0: "batch", 1: "n"},))
        return counted.call_count

    assert widened(12) < 2 * widened(3)
