"""Models whose code asks for strides, or uses them: as eager, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from guarded_runs import Call
from torch import Tensor

import pliant

BOTH = ({0: "n", 1: "m"},)
ROWS = [(4, 3), (1, 5), (5, 1), (1, 1), (5, 2), (2, 2), (0, 3), (3, 0)]


def as_eager(function: Callable[..., Any], ours: Any, x: Tensor) -> bool:
    """Whether it answers; if it does, as eager."""
    try:
        got = ours(x)
    except pliant.ShapeError:
        return False
    torch.testing.assert_close(got, function(x))
    return True


BY_SIZES: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x * 2 if x.t().is_contiguous() else x * 3,
    "cut": lambda x: x * 2 if x[:, :2].is_contiguous() else x * 3,
    "rows": lambda x: x * 2 if x[1:].is_contiguous() else x * 3,
    "stride": lambda x: x * 2 if x.t().stride(0) == 1 else x * 3,
    "strides": lambda x: x * 2 if x.stride() == (1, 1) else x * 3,
    "channels": lambda x: (
        x * 2
        if x[None, None].is_contiguous(memory_format=torch.channels_last)
        else x * 3
    ),
}


@pytest.mark.parametrize("example", [(4, 3), (1, 5), (5, 1)], ids=str)
@pytest.mark.parametrize("function", BY_SIZES.values(), ids=BY_SIZES.keys())
def test_sizes_that_decide(
    function: Callable[[Tensor], Tensor], example: tuple[int, int]
) -> None:
    m = pliant.compile(Call(function), (torch.randn(example),), BOTH, threads=1)
    answered = [shape for shape in ROWS if as_eager(function, m, torch.randn(shape))]
    assert example in answered
    assert len(answered) >= 4


BY_STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "is_contiguous": lambda x: x * 2 if x.is_contiguous() else x * 3,
    "of_a_result": lambda x: x * 2 if (x + 1).is_contiguous() else x * 3,
    "stride": lambda x: x * x.stride(0),
    "as_strided": lambda x: x.as_strided((2, 2), (1, 2)) * 1,
    "as_strided_scatter": lambda x: torch.as_strided_scatter(
        x, torch.ones(2, 2), (2, 2), (1, 2)
    ),
    "complex": lambda x: (
        torch.view_as_complex(x.reshape(-1, 2)).real
        if x.is_contiguous()
        else x.reshape(-1, 2).sum(1)
    ),
}


@pytest.mark.parametrize("function", BY_STRIDES.values(), ids=BY_STRIDES.keys())
def test_inputs_in_another_layout(function: Callable[[Tensor], Tensor]) -> None:
    dims = ({0: "n"},)
    m = pliant.compile(Call(function), (torch.randn(4, 4),), dims, threads=1)
    for x in (torch.randn(4, 4), torch.randn(6, 4), torch.randn(9, 4)[3:]):
        torch.testing.assert_close(m(x), function(x))
    for x in (torch.randn(4, 6).t(), torch.randn(6, 8)[:, ::2]):
        with pytest.raises(pliant.DTypeError, match=r"has strides \["):
            m(x)
        torch.testing.assert_close(m(x.contiguous()), function(x.contiguous()))


def test_only_what_it_is_asked_of() -> None:
    """Other inputs may have any layout, and so may what a product was made of."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        product = torch.mm(y, y.t())
        assert product.stride(1) == 1
        return x.sum() + product if x.is_contiguous() else product

    dims = ({0: "n"}, {0: "m"})
    example = (torch.randn(4, 3), torch.randn(5, 3))
    m = pliant.compile(Call(function), example, dims, threads=1)
    given = (torch.randn(7, 3), torch.randn(3, 5).t())
    torch.testing.assert_close(m(*given), function(*given))
    with pytest.raises(pliant.DTypeError, match="'x_0' has strides"):
        m(torch.randn(3, 7).t(), given[1])


def test_an_example_in_another_layout() -> None:
    def function(x: Tensor) -> Tensor:
        return x * 2 if x.is_contiguous(memory_format=torch.channels_last) else x * 3

    rows = torch.randn(4, 3, 2, 2)
    last = rows.to(memory_format=torch.channels_last)
    dims = ({0: "n"},)
    m = pliant.compile(Call(function), (last,), dims, threads=1)
    for x in (last, last[:2]):
        torch.testing.assert_close(m(x), function(x))
    with pytest.raises(pliant.DTypeError, match="in the layout of the example"):
        m(rows)


def test_complex_inputs() -> None:
    def function(x: Tensor) -> Tensor:
        return x.real * 2 if x.is_contiguous() else x.imag

    x = torch.randn(4, 3, dtype=torch.complex64)
    m = pliant.compile(Call(function), (x,), BOTH, threads=1)
    torch.testing.assert_close(m(x), function(x))
    with pytest.raises(pliant.DTypeError, match="has strides"):
        m(torch.randn(3, 4, dtype=torch.complex64).t())


def inside_a_branch(x: Tensor) -> Tensor:
    def asks(x: Tensor) -> Tensor:
        return x * 2 if x.t().is_contiguous() else x * 3

    return torch.cond(x.sum() < 1e9, asks, lambda x: x * 5, (x,))


def inside_a_loop(x: Tensor) -> Tensor:
    def asks(k: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return k + 1, y * x.stride(0)

    return torch.while_loop(lambda k, y: k < 2, asks, (torch.tensor(0), x * 1))[1]


@pytest.mark.parametrize("function", [inside_a_branch, inside_a_loop])
def test_functions_inside_control_flow(function: Callable[[Tensor], Tensor]) -> None:
    m = pliant.compile(Call(function), (torch.randn(4, 3),), BOTH, threads=1)
    answered = [shape for shape in ROWS if as_eager(function, m, torch.randn(shape))]
    assert (4, 3) in answered
    for x in (torch.randn(3, 4).t(), torch.randn(8, 3)[::2]):
        with pytest.raises(pliant.DTypeError, match="has strides"):
            m(x)


def test_a_step_of_training() -> None:
    class Scaled(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * 2 if x.is_contiguous() else x * 3)

    net = Scaled(3, 2)
    step = pliant.compile_training(
        net,
        torch.nn.functional.mse_loss,
        torch.optim.SGD(net.parameters(), lr=0.1),
        ((torch.randn(4, 3),), (torch.randn(4, 2),)),
        (({0: "n"},), ({0: "n"},)),
        threads=1,
    )
    before = net.weight.detach().clone()
    with pytest.raises(pliant.DTypeError, match="has strides"):
        step((torch.randn(3, 4).t(),), (torch.randn(4, 2),))
    assert torch.equal(before, net.weight)
    step((torch.randn(4, 3),), (torch.randn(4, 2),))
    assert not torch.equal(before, net.weight)
