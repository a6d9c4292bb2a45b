"""Branches and loops over complex numbers, and with random numbers inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import scan, while_loop
from torch._higher_order_ops.map import map as map_rows

import pliant

SIZES = (0, 1, 2, 7)


class Calls(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def compiled(function: Callable[..., Any], example: Tensor) -> pliant.CompiledModel:
    return pliant.compile(Calls(function), (example,), ({0: "n"},))


# ---- complex numbers


def branches(x: Tensor) -> Any:
    return torch.cond(
        x.real.sum() > 0,
        lambda x: (x * 2j, x.abs()),
        lambda x: (x.conj() + 1, x.abs() + 1),
        (x,),
    )


def rounds(x: Tensor) -> Tensor:
    def body(i: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, z * z + x

    return while_loop(lambda i, z: i < 3, body, (torch.tensor(0), x.clone()))[1]


def rows(x: Tensor) -> Any:
    def step(z: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        return z * row, (z + row).real

    return scan(step, torch.ones(3, dtype=torch.complex64), x)


def mapped(x: Tensor) -> Tensor:
    return map_rows(lambda row, y: row * y.conj(), x, x.sum(0))


@pytest.mark.parametrize("function", [branches, rounds, rows, mapped])
def test_complex_numbers(function: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    make = [torch.randn(n, 3, dtype=torch.complex64) for n in SIZES]
    m = compiled(function, torch.randn(4, 3, dtype=torch.complex64))
    for x in (*make, *(-x for x in make)):
        if not x.shape[0] and function in (rows, mapped):
            continue  # not defined in torch
        torch.testing.assert_close(m(x), function(x))


# ---- random numbers


def same_seed(m: pliant.CompiledModel, *inputs: Tensor) -> Any:
    """A call's result, which torch.manual_seed alone decides."""
    torch.manual_seed(1)
    first = m(*inputs)
    other = m(*inputs)
    torch.manual_seed(1)
    torch.testing.assert_close(m(*inputs), first, rtol=0, atol=0)
    assert not torch.equal(first, other)
    return first


def check_uniform(numbers: Tensor) -> None:
    """In [0, 1), none of them twice, and about as many in each quarter."""
    flat = numbers.flatten()
    assert bool((flat >= 0).all()) and bool((flat < 1).all())
    assert flat.unique().numel() > 0.999 * flat.numel()
    quarters = torch.histc(flat, 4, 0.0, 1.0) / flat.numel()
    assert float((quarters - 0.25).abs().max()) < 0.05


def test_in_a_branch() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.cond(
            x.sum() > 0, lambda x: torch.rand_like(x), lambda x: x * 2, (x,)
        )

    m = compiled(function, torch.ones(4))
    check_uniform(same_seed(m, torch.ones(2000)))
    assert torch.equal(m(-torch.ones(5)), torch.full((5,), -2.0))


def test_in_rounds() -> None:
    def function(x: Tensor) -> Tensor:
        def step(total: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            drawn = torch.rand(64)
            return total + row.sum(), drawn

        return scan(step, torch.zeros(()), x)[1]

    m = compiled(function, torch.ones(4, 2))
    found = same_seed(m, torch.ones(40, 2))
    assert found.shape == (40, 64)
    check_uniform(found)


def test_a_length_that_another_model_fixed() -> None:
    """torch keeps traces of loops by the code of `scan` itself, whatever the model, and
    asks of each whether its sizes are the ones of the new trace."""

    def fixing(x: Tensor) -> Tensor:
        def step(total: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            return total + row.sum() * len(range(x.shape[0])), row * 3

        return scan(step, torch.zeros(()), x)[1]

    def free(x: Tensor) -> Tensor:
        step = lambda total, row: (total + row.sum(), row * 2 + total)  # noqa: E731
        return scan(step, torch.zeros(()), x)[1]

    for n in range(2, 9):  # one is what the front end takes as an example
        with torch.no_grad():
            torch.export.export(Calls(fixing), (torch.ones(n, 2),), strict=False)
    m = pliant.compile(Calls(free), (torch.ones(4, 2),), ({0: torch.export.Dim.AUTO},))
    for n in (1, 4, 9):
        x = torch.randn(n, 2)
        torch.testing.assert_close(m(x), free(x))


def test_in_loops_inside_loops() -> None:
    """Also beside a draw outside, and in a loop whose number of rounds is data."""

    def function(x: Tensor) -> Tensor:
        def inner(row: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
            return row + number, torch.rand(16)

        def outer(total: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            last, drawn = scan(inner, row[0].clone(), row)
            return total + last, torch.cat([drawn.flatten(), torch.rand(16)])

        every = scan(outer, torch.zeros(()), x)[1]
        return torch.cat([every.flatten(), torch.rand(16)])

    m = compiled(function, torch.ones(3, 8))
    check_uniform(same_seed(m, torch.ones(12, 8)))


def test_a_walk_until_it_is_far() -> None:
    def function(x: Tensor) -> Tensor:
        def body(at: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
            return at + torch.rand_like(at), steps + 1

        start = x.clone(), torch.zeros((), dtype=torch.int64)
        at, steps = while_loop(lambda at, steps: at.min() < 50, body, start)
        return at / steps

    m = compiled(function, torch.zeros(4))
    mean = same_seed(m, torch.zeros(100))
    assert float((mean.mean() - 0.5).abs()) < 0.02  # of some hundred rounds


def test_a_training_step_refuses_them() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return torch.cond(
                x.sum() > 0, lambda y: y * torch.rand(3), lambda y: y * 1, (y,)
            )

    example = (torch.ones(2, 3),), ()
    with pytest.raises(pliant.UnsupportedOpError, match="training step"):
        pliant.compile_training(
            Noisy(), lambda y: y.sum(), pliant.SGD(0.1), example, (({0: "n"},), ())
        )
