"""Ops without a translation, through torch's decomposition of just that op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pliant
from pliant.frontend.torch_expand import fixes_a_size
from pliant.frontend.torch_export import export_module, from_exported
from pliant.frontend.torch_ops import TABLE
from pliant.frontend.torch_questions import Question

aten = torch.ops.aten


class Apply(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(*tensors)


def every_dim(tensors: tuple[Tensor, ...], prefix: str = "d") -> Any:
    """Dims of one size have one name."""
    return tuple({i: f"{prefix}{n}" for i, n in enumerate(x.shape)} for x in tensors)


def at(size: dict[int, int], shape: tuple[int, ...]) -> Tensor:
    torch.manual_seed(sum(size.values()))
    return torch.randn([size[n] for n in shape])


CASES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "logaddexp2": (torch.logaddexp2, ((3, 5), (5,))),
    "im2col": (lambda x: F.unfold(x, (2, 2), padding=1), ((3, 5, 7, 11),)),
    "grid_sampler": (
        lambda x, y: F.grid_sample(
            x, y[..., :2].tanh(), "bilinear", "reflection", align_corners=False
        ),
        ((3, 5, 7, 11), (3, 13, 17, 4)),
    ),
    "tensordot": (lambda x, y: torch.tensordot(x, y, 1), ((3, 5), (5, 7))),
    "triplet": (F.triplet_margin_loss, ((3, 5), (3, 5), (3, 5))),
    "logaddexp": (torch.logaddexp, ((3, 5), (3, 5))),
    "trapezoid": (lambda x: torch.trapezoid(x, dim=1), ((3, 5),)),
    "nansum": (lambda x: torch.nansum(x, 1), ((3, 5),)),
}


@pytest.mark.parametrize("name", CASES)
def test_as_eager_at_other_sizes(name: str) -> None:
    function, shapes = CASES[name]
    sizes = sorted({n for shape in shapes for n in shape})
    same = {n: n for n in sizes}
    example = tuple(at(same, shape) for shape in shapes)
    dims = every_dim(example)
    compiled = pliant.compile(Apply(function), example, (dims,), threads=1)
    for other in (lambda n: n, lambda n: n + 1, lambda n: 2 * n, lambda n: 1):
        now = {n: n if n == 4 else other(n) for n in sizes}
        given = tuple(at(now, shape) for shape in shapes)
        try:
            answer = compiled(*given)
        except pliant.ShapeError:
            assert other(3) == 1
            continue
        torch.testing.assert_close(answer, function(*given), rtol=1e-5, atol=1e-5)


def test_the_program_that_was_given_stays_as_it_is() -> None:
    x = torch.randn(3, 4)
    ep, info = export_module(Apply(lambda x: x.xlogy(x)), (x,), (({0: "n"},),))
    before = [str(node) for node in ep.graph.nodes]
    assert aten.xlogy.Tensor not in TABLE
    first, again = from_exported(ep, info), from_exported(ep, info)
    assert [str(node) for node in ep.graph.nodes] == before
    assert str(first.module) == str(again.module)


def test_a_write_through_views_of_a_decomposition() -> None:
    def change(x: Tensor) -> Tensor:
        y = x * 2
        rows = torch.atleast_2d(y)
        rows += 1
        return y * rows.sum()

    assert aten.atleast_2d.default not in TABLE
    compiled = pliant.compile(Apply(change), (torch.randn(4),), (({0: "n"},),))
    for n in (1, 2, 5):
        x = torch.randn(n)
        torch.testing.assert_close(compiled(x), change(x))


def test_a_decomposition_that_changes_its_operand() -> None:
    def change(x: Tensor) -> Tensor:
        y = x * 1
        y.xlogy_(x.abs())
        return y + x

    assert aten.xlogy.Tensor not in TABLE
    compiled = pliant.compile(Apply(change), (torch.randn(3),), (({0: "n"},),))
    for n in (0, 1, 4):
        x = torch.randn(n)
        torch.testing.assert_close(compiled(x), change(x))


def test_a_branch_of_a_decomposition_is_a_branch_of_the_model() -> None:
    """Its guard is stated at the line of the model, or both sides are right."""
    function = torch.block_diag
    example = torch.randn(3, 5), torch.randn(2, 4)
    dims = every_dim(example)
    compiled = pliant.compile(Apply(function), example, (dims,), threads=1)
    for a, b in (((3, 5), (2, 4)), ((1, 1), (6, 1)), ((2, 0), (1, 3))):
        x, y = torch.randn(a), torch.randn(b)
        try:
            answer = compiled(x, y)
        except pliant.ShapeError as refusal:
            assert "test_expand.py" in str(refusal)
            continue
        torch.testing.assert_close(answer, function(x, y))


def test_a_decomposition_for_one_size_is_none() -> None:
    """A loop over a size asks for its value: that is no program for every size."""
    size = sympy.Symbol("s0")

    def asked(condition: Any) -> Question:
        return Question(condition, __file__, 1)

    assert fixes_a_size(asked(sympy.Eq(size, 5, evaluate=False)))
    assert fixes_a_size(asked(sympy.Ne(sympy.Symbol("u0"), 1)))
    assert not fixes_a_size(asked(sympy.Ne(size, 1)))
    assert not fixes_a_size(asked(sympy.Eq(size, sympy.Symbol("s1"))))


def test_what_is_missing_in_it_is_listed() -> None:
    x = torch.randn(3, 3, dtype=torch.complex64)
    with pytest.raises(pliant.UnsupportedOpError) as caught:
        pliant.compile(Apply(lambda x: torch.linalg.matrix_norm(x, "nuc")), (x,))
    (op, *_) = caught.value.ops
    assert op.name.startswith("aten.linalg_matrix_norm") and "in it" in op.reason
    assert "test_expand.py" in op.loc
