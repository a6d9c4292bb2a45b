"""Segments, bins, parts and losses of several labels, against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from guarded_runs import Call, hostile
from torch import Tensor, nn

import pliant

__all__ = ["hostile"]

aten = torch.ops.aten
AUTO = torch.export.Dim.AUTO


def compiled(function: Callable[..., Any], *inputs: Tensor) -> Any:
    dims = tuple(dict.fromkeys(range(x.dim()), AUTO) for x in inputs)
    return pliant.compile(Call(function), inputs, {"x": dims})


def same(ours: Any, its: Any) -> None:
    for mine, eager in zip(ours, its, strict=True):
        torch.testing.assert_close(mine, eager, equal_nan=True)


KINDS = ("sum", "mean", "max", "min", "prod")


def segments(n: int, parts: int) -> Tensor:
    """Lengths that sum up to n, some of them 0."""
    ends = torch.randint(0, n + 1, (parts - 1,)).sort()[0]
    return torch.diff(ends, prepend=torch.zeros(1).long(), append=torch.tensor([n]))


@pytest.mark.parametrize("initial", [None, 0.5])
def test_segments(initial: float | None) -> None:
    def function(x: Tensor, lengths: Tensor) -> list[Tensor]:
        offsets = F.pad(lengths.cumsum(0), (1, 0))
        more: dict[str, Any] = {"initial": initial}
        return [
            torch.segment_reduce(x, kind, **where, **more)
            for kind in KINDS
            for where in ({"lengths": lengths}, {"offsets": offsets})
        ]

    m = compiled(function, torch.randn(5, 3), segments(5, 4))
    for n, parts in ((0, 3), (1, 2), (7, 5), (31, 7), (2, 9)):
        x, lengths = torch.randn(n, 3), segments(n, parts)
        x.view(-1)[::17] = torch.nan
        same(m(x, lengths), function(x, lengths))


def test_segments_of_rows() -> None:
    def function(x: Tensor, lengths: Tensor) -> list[Tensor]:
        given = {"lengths": lengths, "axis": 1, "unsafe": True}
        return [torch.segment_reduce(x, kind, **given) for kind in KINDS]

    def lengths(rows: int, n: int, parts: int) -> Tensor:
        return torch.stack([segments(n, parts) for _ in range(rows)])

    m = compiled(function, torch.randn(2, 5, 3), lengths(2, 5, 4))
    for rows, n, width, parts in ((1, 1, 1, 2), (3, 7, 5, 4), (5, 11, 1, 3)):
        x, some = torch.randn(rows, n, width), lengths(rows, n, parts)
        same(m(x, some), function(x, some))
    fewer = torch.ones(3, 4).long()  # what is behind the last segment is in none
    same(m(torch.ones(3, 7, 2), fewer), function(torch.ones(3, 7, 2), fewer))


def test_lengths_must_sum_up() -> None:
    m = compiled(
        lambda x, n: torch.segment_reduce(x, "sum", lengths=n),
        *(torch.randn(5), segments(5, 4)),
    )
    for lengths in ([1, 1, 1, 1], [3, -1, 2, 1], [2, 2, 2, 0]):
        with pytest.raises(pliant.PliantError, match="segment_reduce"):
            m(torch.randn(5), torch.tensor(lengths))


@pytest.mark.parametrize("density", [False, True])
def test_histogram(density: bool) -> None:
    """Which torch.export traces for sizes that are fixed."""

    def function(x: Tensor, weight: Tensor) -> list[Tensor]:
        return [
            *torch.histogram(x, 5, density=density),
            *torch.histogram(x, 4, range=(-1.0, 1.0), density=density),
            *torch.histogram(x, 1, weight=weight, density=density),
        ]

    for shape in ((0, 3), (1, 1), (7,), (61, 2)):
        x, weight = torch.randn(shape), torch.rand(shape)
        m = pliant.compile(Call(function), (x, weight))
        same(m(x, weight), function(x, weight))
        if shape == (7,):
            edges = torch.tensor([-1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 4.0])
            same(m(edges, edges), function(edges, edges))
            edges[3] = torch.nan
            with pytest.raises(pliant.PliantError, match="histogram"):
                m(edges, edges)


def test_places_in_a_given_number() -> None:
    def function(x: Tensor) -> list[Tensor]:
        found = [torch.nonzero_static(x, size=k) for k in (0, 1, 6)]
        return [*found, torch.nonzero_static(x[0] > 1, size=3, fill_value=7)]

    m = compiled(function, torch.randint(0, 3, (3, 4, 2)))
    for shape in ((1, 1, 1), (2, 0, 3), (7, 5, 3), (1, 11, 1)):
        x = torch.randint(0, 3, shape)
        same(m(x), function(x))


def test_parts_between_places() -> None:
    def function(x: Tensor, places: Tensor) -> list[Tensor]:
        return [part * 2 for part in torch.tensor_split(x, places, 1)]

    m = compiled(function, torch.randn(3, 5), torch.tensor([1, 3]))
    for rows, n in ((1, 1), (2, 0), (3, 7), (0, 4), (5, 31)):
        for places in ([0, 0], [1, 3], [2, 1], [-2, 99], [n, n], [-99, -1]):
            x, where = torch.randn(rows, n), torch.tensor(places)
            same(m(x, where), function(x, where))


def test_parts_from_a_place() -> None:
    def function(x: Tensor, place: Tensor) -> list[Tensor]:
        tail = torch.narrow(x, 1, place, x.shape[1] - 1)
        return [torch.narrow(x, 0, place, 1) + 1, tail * 2]

    m = compiled(function, torch.randn(3, 5), torch.tensor(1))
    for rows, n, place in ((1, 1, 0), (2, 3, 1), (7, 7, 0), (31, 11, -1)):
        x, where = torch.randn(rows, n), torch.tensor(place)
        if place < 0:
            with pytest.raises(pliant.PliantError, match="narrow"):
                m(x, where)
            where = torch.tensor(1)
        same(m(x, where), function(x, where))

    def changed(x: Tensor, place: Tensor) -> Tensor:
        x = x.clone()
        torch.narrow(x, 0, place, 1).add_(1)
        return x

    with pytest.raises(pliant.UnsupportedOpError, match="narrow"):
        compiled(changed, torch.randn(3, 5), torch.tensor(1))


def test_a_pad_that_cuts_and_goes_round() -> None:
    """Whose slices have sizes that torch makes symbols for."""

    def function(x: Tensor) -> Tensor:
        return F.pad(x, (-1, 1, -2, 1), "circular")

    m = compiled(function, torch.randn(2, 3, 4, 4))
    for shape in ((1, 1, 4, 3), (2, 3, 7, 5), (3, 1, 11, 31)):
        x = torch.randn(shape)
        same([m(x)], [function(x)])


def test_losses_of_several_labels() -> None:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        kinds = ("none", "sum", "mean")
        each = [F.multilabel_margin_loss(x, y, reduction=kind) for kind in kinds]
        return [*each, F.multilabel_margin_loss(x[0], y[0]), x[0].sum()]

    m = compiled(function, torch.randn(3, 4), torch.randint(-1, 4, (3, 4)))
    for n, classes in ((1, 1), (2, 7), (9, 3), (31, 11)):
        x, y = torch.randn(n, classes), torch.randint(-1, classes, (n, classes))
        same(m(x, y), function(x, y))
    with pytest.raises(pliant.PliantError):
        m(torch.randn(2, 3), torch.full((2, 3), 3))


def test_additions_that_a_mask_allows() -> None:
    def function(x: Tensor, mask: Tensor, i: Tensor, values: Tensor) -> list[Tensor]:
        rows = aten._unsafe_masked_index_put_accumulate(x, mask, [i], values)
        return [rows, aten._unsafe_masked_index(x, mask, [i], 0.5)]

    def inputs(n: int, count: int) -> tuple[Tensor, ...]:
        mask = torch.rand(count) > 0.5
        outside = torch.randint(-3 * n, 3 * n, (count,))
        i = torch.where(mask, torch.randint(0, n, (count,)), outside)
        return torch.randn(n), mask, i, torch.randn(count)

    m = compiled(function, *inputs(5, 7))
    for n, count in ((1, 1), (5, 0), (7, 31), (31, 7)):
        given = inputs(n, count)
        same(m(*given), function(*given))


def test_a_loss_of_a_layer() -> None:
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=2)

    def function(x: Tensor, weight: Tensor, bias: Tensor, y: Tensor) -> list[Tensor]:
        return [
            F.linear_cross_entropy(
                *(x, weight, y),
                linear_bias=bias,
                reduction=reduction,
                ignore_index=1,
                options=options,
            )
            for reduction in ("mean", "sum", "none")
        ]

    def inputs(width: int, classes: int) -> tuple[Tensor, ...]:
        layer = torch.randn(classes, width), torch.randn(classes)
        return torch.randn(5, width), *layer, torch.randint(0, classes, (5,)) % 3

    wide, many = {1: AUTO}, {0: AUTO, 1: AUTO}
    dims = {"x": (wide, many, {0: AUTO}, {})}
    m = pliant.compile(Call(function), inputs(3, 4), dims)
    with torch.no_grad():
        for sizes in ((1, 2), (5, 3), (2, 11)):
            given = inputs(*sizes)
            same(m(*given), function(*given))


def test_a_shape_changed_in_place() -> None:
    """Which torch.export traces for sizes that are fixed."""

    def function(x: Tensor) -> list[Tensor]:
        whole, part = x.clone(), x.clone()
        flat = whole.view(-1)
        whole.resize_(3, 2).add_(1)
        return [whole, flat, part.resize_(2, 2), x.clone().resize_as_(whole)]

    x = torch.randn(2, 3)
    m = pliant.compile(Call(function), (x,))
    same(m(x), function(x))

    def longer(x: Tensor) -> Tensor:
        return x.clone().resize_(9)

    def partly(x: Tensor) -> Tensor:
        whole = x.clone()
        whole.resize_(2).add_(1)
        return whole

    for each, why in ((longer, "unwritten"), (partly, "first elements")):
        with pytest.raises(pliant.UnsupportedOpError, match=why):
            pliant.compile(Call(each), (x,))
