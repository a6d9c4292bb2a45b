"""Tensors that mean more than the bytes in their memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as forward
from torch import Tensor, nn

import pliant


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2.0


class Nested(nn.Module):
    """Arguments that need flattening: calls take another way."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"sum": pair[0] * 2.0 + pair[1] * 0.0}


ROWS = {0: "n"}
Call = Any


@pytest.fixture(params=["direct", "flattened", "mixed with NumPy", "no symbols"])
def twice(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Call]:
    """Gives twice its argument, by each way that a call may take."""
    if request.param == "no symbols":
        monkeypatch.setattr("pliant.runtime.binding.framework_of_torch", lambda: 0)
    if request.param in ("direct", "no symbols"):
        yield pliant.compile(Twice(), (torch.ones(3),), (ROWS,), threads=1)
        return
    pair = (torch.ones(3), torch.ones(3))
    model = pliant.compile(Nested(), (pair,), ((ROWS, ROWS),), threads=1)
    numpy = request.param == "mixed with NumPy"

    def call(x: Tensor) -> Tensor:
        other: Any = np.ones(len(x), np.float32) if numpy else torch.ones(len(x))
        return torch.as_tensor(model((x, other))["sum"])

    yield call


def test_lazily_negated_or_conjugated(twice: Call) -> None:
    negated = torch._neg_view(torch.ones(4))
    assert negated.is_contiguous() and negated.is_neg()
    assert twice(negated).tolist() == [-2.0] * 4
    imaginary = torch.tensor([1 + 2j]).conj().imag
    assert twice(imaginary).tolist() == [-4.0]
    assert twice(torch.tensor([1 + 2j, 3 + 4j]).conj().imag).tolist() == [-4.0, -8.0]
    assert negated.is_neg() and negated.tolist() == [-1.0] * 4


def test_weights_that_are_lazily_negated() -> None:
    class Plus(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch._neg_view(torch.arange(3.0)))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.shift

    model = pliant.compile(Plus(), (torch.ones(2, 3),), (ROWS,), threads=1)
    assert model(torch.zeros(1, 3)).tolist() == [[0.0, -1.0, -2.0]]


def test_a_gradient_that_is_lost_is_told_once(twice: Call) -> None:
    learned = torch.ones(3, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            assert twice(learned).tolist() == [2.0] * 3
        with torch.inference_mode():
            assert twice(learned).tolist() == [2.0] * 3
        assert twice(torch.ones(3)).tolist() == [2.0] * 3
    with pytest.warns(pliant.GradientWarning, match="requires a gradient") as told:
        (twice(learned * 1).sum() + learned.sum()).backward()
    if callable(getattr(twice, "stats", None)):
        assert told[0].filename == __file__
    assert learned.grad is not None and learned.grad.tolist() == [1.0] * 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not twice(learned).requires_grad
        assert not twice(nn.Parameter(torch.ones(2))).requires_grad


def test_a_gradient_that_is_lost_where_warnings_are_errors() -> None:
    model = pliant.compile(nn.Linear(3, 3), (torch.ones(2, 3),), (ROWS,), threads=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(pliant.GradientWarning, match="requires a gradient"):
            model(torch.ones(2, 3, requires_grad=True))


def test_parameters_that_need_gradients_do_not_count() -> None:
    model = pliant.compile(nn.Linear(3, 3), (torch.ones(2, 3),), (ROWS,), threads=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(2, 3))


def test_transforms_are_refused(twice: Call) -> None:
    ones = torch.ones(3)
    for transformed in (
        lambda: torch.func.grad(lambda v: twice(v).sum())(ones),
        lambda: torch.func.vmap(twice)(torch.ones(2, 3)),
        lambda: torch.func.jvp(twice, (ones,), (ones,)),
        lambda: torch.func.jacrev(twice)(ones),
    ):
        with pytest.raises(pliant.DTypeError, match=r"torch\.func|tangent"):
            transformed()
    with forward.dual_level():
        dual = forward.make_dual(ones, ones)
        with pytest.raises(pliant.DTypeError, match="tangent"):
            twice(dual)
        assert twice(ones).tolist() == [2.0] * 3
    assert twice(ones).tolist() == [2.0] * 3


class Logged(Tensor):
    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Named(Tensor):
    """A class that changes no operation."""


def test_classes_with_operations_of_their_own(twice: Call) -> None:
    with pytest.raises(pliant.DTypeError, match="Logged, a class with operations"):
        twice(torch.ones(3).as_subclass(Logged))
    assert twice(torch.ones(3).as_subclass(Named)).tolist() == [2.0] * 3
    with torch.no_grad():
        assert twice(nn.Parameter(torch.ones(3))).tolist() == [2.0] * 3


def test_storage_that_is_too_short(twice: Call) -> None:
    short = torch.ones(100_000)
    short.untyped_storage().resize_(64)
    with pytest.raises(pliant.DTypeError, match="399936 bytes beyond its storage"):
        twice(short)
    strided = torch.ones(100_000)[::2]
    strided.untyped_storage().resize_(64)
    with pytest.raises(pliant.DTypeError, match="beyond its storage"):
        twice(strided)
    whole = torch.ones(100)
    assert twice(whole[90:]).tolist() == [2.0] * 10


def test_many_arguments() -> None:
    """More than are read without an allocation."""

    class Many(nn.Module):
        def forward(self, *values: Tensor) -> Tensor:
            return torch.stack(values).sum(0)

    values = tuple(torch.full((3,), float(k)) for k in range(50))
    model = pliant.compile(Many(), values, None, threads=1)
    values = (*values[:-1], torch._neg_view(values[-1]))
    torch.testing.assert_close(model(*values), Many()(*values))


def test_bools_of_other_bytes() -> None:
    class Masks(nn.Module):
        def forward(self, b: Tensor, x: Tensor) -> tuple[Tensor, ...]:
            picked = torch.where(b, x, -x)
            return ~b, b.sum(), b & ~b, picked, x.masked_fill(b, 0.0), b.float()

    bools = torch.tensor([2, 0, 1, 255, 4], dtype=torch.uint8).view(torch.bool)
    x = torch.arange(5.0)
    example = (torch.ones(3, dtype=torch.bool), torch.ones(3))
    model = pliant.compile(Masks(), example, (ROWS, ROWS), threads=1)
    clean = torch.tensor([True, False, True, True, True])
    for got, wanted in zip(model(bools, x), Masks()(clean, x), strict=True):
        assert torch.equal(got, wanted)


def test_autocast() -> None:
    """A model is compiled as it computes where it is compiled."""
    linear, x = nn.Linear(8, 8), torch.randn(2, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = pliant.compile(linear, (x,), (ROWS,), threads=1)
        wanted = linear(x)
        assert inside(x).dtype is torch.bfloat16
    assert inside(x).dtype is torch.bfloat16
    torch.testing.assert_close(inside(x), wanted, rtol=1e-2, atol=1e-2)
    outside = pliant.compile(linear, (x,), (ROWS,), threads=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert outside(x).dtype is torch.float32
