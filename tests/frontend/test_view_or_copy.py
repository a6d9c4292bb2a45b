"""Ops that view or copy by strides, beside in-place changes, against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_written_inputs import Calls
from torch import Tensor
from torch.fx.experimental import _config

import pliant


def flattened(x: Tensor) -> Tensor:
    x[..., ::2].flatten()[:2].fill_(1)
    return x * 2


def contiguous(x: Tensor) -> Tensor:
    x[..., : x.shape[2] // 2 * 2].contiguous().add_(1)
    return x * 2


def raveled(x: Tensor) -> Tensor:
    torch.ravel(x[..., : x.shape[2] // 2 * 2]).mul_(3)
    return x * 2


def base_is_written(x: Tensor) -> Tensor:
    base = x * 1
    y = base[..., ::2].reshape(-1)
    base.mul_(3)
    return y + 1


def through_a_second_view(x: Tensor) -> Tensor:
    base = x * 1
    base[..., ::2].reshape(-1).unsqueeze(0)[:, 1:].mul_(3)
    return base


def transposed(x: Tensor) -> Tensor:
    x[:, :4].transpose(1, 2).flatten(1).add_(1)
    return x * 2


def repeated(x: Tensor) -> Tensor:
    y = x[:1].expand(x.shape).reshape(-1)
    x.add_(1)
    return y * 2


MODELS = (
    flattened,
    contiguous,
    raveled,
    base_is_written,
    through_a_second_view,
    transposed,
    repeated,
)


def compiled(function: Callable[[Tensor], Any], x: Tensor) -> pliant.CompiledModel:
    return pliant.compile(Calls(function), (x,), {"inputs": ({0: "n", 2: "m"},)})


@pytest.mark.parametrize("example", [(7, 7), (8, 8)], ids=str)
@pytest.mark.parametrize("function", MODELS)
def test_as_eager(
    function: Callable[[Tensor], Tensor], example: tuple[int, int]
) -> None:
    m = compiled(function, torch.rand(example[0], 6, example[1]))
    for rows in (0, 1, 2, 3, 8):
        for columns in (0, 1, 2, 3, 8, 9):
            given = torch.rand(rows, 6, columns)
            own, its = given.clone(), given.clone()
            torch.testing.assert_close(m(own), function(its))
            torch.testing.assert_close(own, its)


def test_what_is_a_view_at_every_size_is_one_program() -> None:
    def function(x: Tensor) -> Tensor:
        x.reshape(x.shape[0], 2, 3, -1).mul_(2)
        x.contiguous().add_(1)
        return x.flatten(1)

    assert "programs" not in compiled(function, torch.rand(4, 6, 5)).stats()


def exported(oblivious: bool) -> torch.export.ExportedProgram:
    x = torch.rand(8, 6, 8)
    dims = {"inputs": ({0: torch.export.Dim.AUTO, 2: torch.export.Dim.AUTO},)}
    with _config.patch(backed_size_oblivious=oblivious):  # type: ignore[attr-defined]
        return torch.export.export(Calls(flattened), (x,), dynamic_shapes=dims)


def test_exported_programs() -> None:
    m = pliant.compile(exported(oblivious=False))
    given = torch.rand(3, 6, 4)
    own, its = given.clone(), given.clone()
    torch.testing.assert_close(m(own), flattened(its))
    torch.testing.assert_close(own, its)
    with pytest.raises(pliant.ShapeError):
        m(torch.rand(3, 6, 5))


def test_an_exported_copy_of_what_eager_views_is_refused() -> None:
    with pytest.raises(pliant.UnsupportedOpError, match="what flatten may copy"):
        pliant.compile(exported(oblivious=True))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.contiguous().mul_(2),
        lambda x: x.flatten().mul_(2),
        lambda x: x.transpose(0, 2).reshape(-1).mul_(2),
    ],
    ids=["contiguous", "flatten", "transposed"],
)
def test_inputs_have_the_strides_of_the_trace(change: Callable[[Tensor], Any]) -> None:
    m = compiled(change, torch.rand(4, 6, 5))
    given = torch.rand(3, 6, 7)
    own, its = given.clone(), given.clone()
    torch.testing.assert_close(m(own), change(its))
    torch.testing.assert_close(own, its)
    other = given.transpose(0, 2).contiguous().transpose(0, 2)
    with pytest.raises(pliant.DTypeError, match="strides"):
        m(other)
    torch.testing.assert_close(other, given)
    m(torch.rand(1, 6, 7).as_strided((1, 6, 7), (1, 7, 1)))
    m(torch.rand(0, 6, 7).transpose(0, 1).contiguous().transpose(0, 1))


def test_strides_that_decide_nothing_are_free() -> None:
    def function(x: Tensor) -> None:
        x.reshape(x.shape[0], 2, 3, -1).mul_(2)

    m = compiled(function, torch.rand(4, 6, 5))
    x = torch.rand(7, 6, 3).transpose(0, 2)
    want = x * 2
    m(x)
    torch.testing.assert_close(x, want)
