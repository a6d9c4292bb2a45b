"""Symbols, bounds, pytrees, in-place ops and errors of the torch frontend."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim
from torch_oracle import imported_from, matches_eager, run, same

from pliant.errors import PliantError, ShapeError, UnsupportedOpError
from pliant.frontend.contract import Basis, Imported
from pliant.frontend.signature import FixedSlot, SizeSlot
from pliant.frontend.torch_dims import as_bound
from pliant.frontend.torch_export import export_module, from_exported
from pliant.frontend.torch_programs import programs
from pliant.ir.types import DType
from pliant.pipeline import simplified
from pliant.sym import eq, floordiv, ge, minimum, sym


class Call(nn.Module):
    def __init__(self, function: Any, **weights: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        for name, tensor in weights.items():
            self.register_buffer(name, tensor)

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


class Add(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


def params(imported: Any) -> list[str]:
    return [str(value.type) for value in imported.module.main.params]


# --- symbols --------------------------------------------------------------------


def test_names_come_from_strings_and_dims() -> None:
    batch = Dim("batch", max=64)
    shapes = ({0: batch, 1: "seq"}, {0: batch, 1: "seq"})
    imported = imported_from(Add(), (torch.ones(2, 5), torch.ones(2, 5)), shapes)
    assert params(imported) == ["f32[batch, seq]", "f32[batch, seq]"]
    declared = imported.guards(Basis.DECLARED)
    assert [str(g.cond) for g in declared] == ["batch <= 64"]
    assert {g.origin for g in declared} == {"declared by the user"}
    assert [slot.name for slot in imported.signature.arguments] == ["x", "y"]
    with pytest.raises(ShapeError, match="at most 64"):
        run(imported, (torch.ones(65, 1), torch.ones(65, 1)))


def test_unnamed_dims_are_numbered_in_order_of_appearance() -> None:
    hints = {0: Dim.DYNAMIC, 1: Dim.AUTO}
    model = Call(lambda x, y: (x * 2, y + 1))
    imported = imported_from(
        model, (torch.ones(2, 3), torch.ones(4, 5)), ((hints, hints),)
    )
    assert params(imported) == ["f32[s0, s1]", "f32[s2, s3]"]
    assert not imported.module.main.constraints


def test_dims_that_the_model_unifies_share_a_symbol() -> None:
    shapes = {"x": {0: "a"}, "y": {0: "b"}}
    imported = imported_from(Add(), (torch.ones(3, 2), torch.ones(3, 2)), shapes)
    assert params(imported) == ["f32[a, 2]", "f32[a, 2]"]


def test_derived_dims() -> None:
    half = Dim("half", min=1, max=9)
    model = Call(lambda x, y: torch.cat([x, y, y]))
    imported = imported_from(
        model, (torch.ones(8), torch.ones(4)), (({0: 2 * half}, {0: half}),)
    )
    assert params(imported) == ["f32[2*half]", "f32[half]"]
    same(run(imported, (torch.ones(6), torch.ones(3))), torch.ones(12))


def test_a_program_given_directly_is_good_for_the_sizes_it_states() -> None:
    seq = Dim("seq", max=9)
    ep = torch.export.export(
        Call(lambda x: x * 3 if x.shape[0] == 1 else x * 2),
        (torch.ones(3),),
        dynamic_shapes=(({0: seq},),),
    )
    imported = from_exported(ep)
    assert params(imported) == ["f32[s0]"] and not imported.guards(Basis.DECLARED)
    demands = [str(guard.cond) for guard in imported.module.main.constraints]
    assert demands == ["2 <= s0", "s0 <= 9"]  # nobody recorded what it does at 1
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        ep = torch.export.export(
            Call(lambda x: x * 3 if x.shape[0] == 1 else x * 2),
            (torch.ones(3),),
            dynamic_shapes=(({0: Dim.DYNAMIC},),),
        )
    imported = from_exported(ep)
    demands = [str(guard.cond) for guard in imported.module.main.constraints]
    assert demands == ["s0 != 1"]


def test_a_program_from_a_file_is_good_for_the_sizes_it_states(tmp_path: Path) -> None:
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 3 if x.shape[0] % 3 == 0 else x * 2

    shapes = ({0: Dim.DYNAMIC},)
    ep = torch.export.export(Branch(), (torch.ones(6),), dynamic_shapes=shapes)
    torch.export.save(ep, tmp_path / "branch.pt2")
    imported = from_exported(torch.export.load(tmp_path / "branch.pt2"))
    same(run(imported, (torch.ones(9),)), torch.full((9,), 3.0))
    for n in (0, 1, 7):
        with pytest.raises(ShapeError, match="the exported program"):
            run(imported, (torch.ones(n),))
    named = from_exported(ep, {next(iter(map(str, ep.range_constraints))): "length"})
    assert params(named) == ["f32[length]"]


def test_a_table_of_positions_bounds_the_length() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(1, 16, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.table[:, : x.shape[1]]

    shapes = ({0: "b", 1: "seq"},)
    calls = [(torch.randn(b, n, 4),) for b, n in ((1, 1), (2, 16), (3, 0))]
    imported = matches_eager(Positions(), (torch.randn(2, 5, 4),), shapes, *calls)
    (guard,) = imported.module.main.constraints
    assert "test_torch_export.py:" in guard.origin
    with pytest.raises(ShapeError, match="16"):
        run(imported, (torch.randn(1, 17, 4),))


@pytest.mark.parametrize("size", [(1, 1), (0, 3), (1, 7)])
def test_example_sizes_of_zero_and_one(size: tuple[int, int]) -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 3))
    example = (torch.full(size, 9),)
    calls = [(torch.randint(0, 10, s),) for s in ((1, 1), (5, 2), (2, 0))]
    imported = matches_eager(model, example, ({0: "b", 1: "n"},), *calls)
    assert params(imported) == ["i64[b, n]"]
    model = Call(lambda x, y: x.sum(1) @ y)  # unnamed dims that must agree
    pair = (torch.ones(1, 1, 1), torch.ones(1, 2))
    hints = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC, 2: Dim.DYNAMIC}
    imported_from(model, pair, ((hints, {0: Dim.DYNAMIC}),))


def test_one_element_slices_broadcast() -> None:
    model = Call(lambda x: x * x[:, :1] + x[:1])
    calls = [(torch.randn(1, 1),), (torch.randn(4, 1),), (torch.randn(7, 3),)]
    matches_eager(model, (torch.randn(2, 5),), (({0: "b", 1: "n"},),), *calls)


def test_slices_of_unknown_length() -> None:
    model = Call(lambda x: (x[:, 1:].exp(), x[::3], x[:, :-2], x[:, 2:3]))
    calls = [(torch.randn(b, n),) for b, n in ((1, 1), (3, 4), (2, 9), (0, 0), (5, 13))]
    shapes = (({0: "b", 1: "n"},),)
    matches_eager(model, (torch.randn(2, 8),), shapes, *calls)
    # torch takes x[:1] to have one row, and the code may have counted on it.
    model = Call(lambda x: x[:1])
    imported = matches_eager(model, (torch.randn(2, 8),), shapes, *calls[:3])
    with pytest.raises(ShapeError, match=r"took this size to be 1: 1 <= b \(=0\)"):
        run(imported, (torch.randn(0, 3),))


@pytest.mark.parametrize(
    ("part", "example"),
    [
        (slice(-3, None), 5),
        (slice(None, 5), 8),
        (slice(2, 7), 9),
        (slice(None, 5), 3),
        (slice(2, 7), 5),
        (slice(-5, None), 3),
    ],
)
def test_sizes_of_slices_at_every_size(part: slice, example: int) -> None:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        y = x[part]
        return y / (y.shape[0] + 1)

    calls = [(torch.randn(n),) for n in (0, 1, 2, 3, 4, 5, 6, 7, 8, 20)]
    imported = matches_eager(
        Call(scaled), (torch.randn(example),), (({0: "n"},),), *calls
    )
    assert not imported.module.main.constraints


def test_a_size_that_torch_knows_in_another_way_is_not_computed_with() -> None:
    """To torch x[1:] has n - 1 rows; at n = 0 it has none."""
    calls = [(torch.randn(n),) for n in (1, 2, 7)]

    def counted(x: torch.Tensor) -> torch.Tensor:
        return x.sum() + x[1:].shape[0]

    shapes = (({0: "n"},),)
    imported = matches_eager(Call(counted), (torch.randn(4),), shapes, *calls)
    with pytest.raises(ShapeError, match=r"took this size to be n - 1"):
        run(imported, (torch.randn(0),))
    plain = Call(lambda x: x[1:] * 2)
    imported = matches_eager(plain, (torch.randn(4),), shapes, (torch.randn(0),))
    assert not imported.module.main.constraints


def test_sizes_in_whole_windows() -> None:
    """A divisor that is 0 at small sizes asks for nothing there, as windows of Swin."""
    quotient = floordiv(sym("n"), floordiv(sym("n"), 4))
    assert as_bound(eq(quotient, 4)) == eq(quotient, 4)
    assert as_bound(eq(minimum(sym("n"), 7), 7)) == ge(sym("n"), 7)


def test_one_example_for_several_inputs() -> None:
    x = torch.randn(5)
    halves = torch.randn(10)
    for pair in ((x, x), (x, x.view(5)), (halves[:5], halves[5:])):
        calls = [(torch.randn(n), torch.randn(n)) for n in (3, 1)]
        matches_eager(
            Call(lambda x, y: x - 2 * y), pair, (({0: "n"}, {0: "n"}),), *calls
        )
    (x, y) = torch.randn(3), torch.randn(4)  # nor do their sizes have to be equal
    shapes = (({0: "n"}, {0: "m"}),)
    matches_eager(Call(lambda x, y: (x + 1, y.sum())), (x, x), shapes, (x, y))


# --- branches on sizes ----------------------------------------------------------


def traced(function: Any, size: int) -> Any:
    return imported_from(Call(function), (torch.randn(size),), (({0: "n"},),))


@pytest.mark.parametrize(
    ("test", "example", "told", "fitting", "others"),
    [
        (lambda n: n > 4, 5, "n > 4", [5, 99], [0, 1, 4]),
        (lambda n: n > 100, 4, "n <= 100", [0, 1, 100], [101]),
        (lambda n: n == 4, 5, "n != 4", [0, 3, 5], [4]),
        (lambda n: n % 3 == 0, 6, "3 divides n", [0, 9], [1, 7]),
        (lambda n: n / 2 > 4.5, 12, "2*n > 18", [10], [9]),
        (lambda n: n**0.5 > 2.5, 7, "the traced size 7", [7], [6, 8]),
        (lambda n: (n > 9) | (n < 4), 12, "n > 9", [10], [5, 9]),
        (lambda n: (n > 3) & (n < 9), 5, "n > 3", [4, 8], [3, 9]),
    ],
)
def test_branches_on_sizes_are_enforced(
    test: Any, example: int, told: str, fitting: list[int], others: list[int]
) -> None:
    def branch(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if test(x.shape[0]) else x + 1

    imported = traced(branch, example)
    guards = imported.module.main.constraints
    assert told in guards[0].render({}) and "branches on" in guards[0].render({})
    for n in fitting:
        x = torch.randn(n)
        same(run(imported, (x,)), branch(x))
    for n in others:
        with pytest.raises(ShapeError, match=r"test_torch_export\.py:\d+"):
            run(imported, (torch.randn(n),))


def ways(function: Any, size: int, *more: int) -> tuple[Imported, ...]:
    """The programs of a function of vectors, traced at the first size."""
    example = tuple(torch.randn(n) for n in (size, *more))
    dims = tuple({0: name} for name in "nm"[: len(example)])
    return programs(Call(function), example, (dims,), simplify=simplified)


def served(found: tuple[Imported, ...], *args: torch.Tensor) -> Any:
    """The result of the one program that takes these sizes."""
    results = []
    for imported in found:
        with suppress(ShapeError):
            results.append(run(imported, args))
    assert len(results) == 1
    return results[0]


def test_another_way_that_computes_the_same_is_no_other() -> None:
    def branch(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 1 and x.shape[0] != 1 else x.mul(2)

    (imported,) = ways(branch, 4)
    assert [str(g.cond) for g in imported.module.main.constraints] == ["1 <= n"]
    for n in (1, 2, 5):
        same(run(imported, (torch.ones(n),)), torch.full((n,), 2.0))


@pytest.mark.parametrize("example", [4, 1])
def test_a_way_for_one_size_is_a_program(example: int) -> None:
    def branch(x: torch.Tensor) -> torch.Tensor:
        return x * 3 if x.shape[0] == 1 else x * 2

    found = ways(branch, example)
    assert len(found) == 2
    for n in (0, 1, 2, 7):
        x = torch.randn(n)
        same(served(found, x), branch(x))


def test_ways_within_ways() -> None:
    def branch(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 1:
            return (x * 2 if y.shape[0] == 6 else x * 3) + y.sum()
        return (x * 4 if y.shape[0] > 1 else x * 5) + y.sum()

    found = ways(branch, 4, 3)
    assert len(found) == 4
    for n, m in itertools.product((1, 2, 5), (1, 2, 6)):
        args = torch.randn(n), torch.randn(m)
        same(served(found, *args), branch(*args))


def test_nothing_is_taken_from_1_to_0() -> None:
    """Only at n = 1 does the code ask whether m is above 1; m = 0 is not traced."""

    def branch(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 1 and y.shape[0] <= 1:
            return x * (2 if y.shape[0] == 1 else 3) + y.sum()
        return x * 2 + y.sum()

    found = ways(branch, 4, 3)
    for n, m in itertools.product((1, 2, 5), (0, 1, 2)):
        args = torch.randn(n), torch.randn(m)
        if (n, m) == (1, 0):
            for imported in found:
                with pytest.raises(ShapeError):
                    run(imported, args)
        else:
            same(served(found, *args), branch(*args))


def test_a_way_of_squeeze() -> None:
    found = ways(lambda x: x[:, None].squeeze(0), 4)
    for n in (1, 3):
        x = torch.randn(n)
        same(served(found, x), x[:, None].squeeze(0))


def test_a_question_that_an_op_answered_first_is_asked() -> None:
    """Broadcasting decides n != 1 inside of the op; the code's own question counts."""

    def branch(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = x.expand(x.shape[0]) + y.sum()
        return z * 3 if x.shape[0] == 1 else z * 2

    found = ways(branch, 4, 3)
    for n in (1, 2):
        args = torch.randn(n), torch.randn(2)
        same(served(found, *args), branch(*args))


@pytest.mark.parametrize("example", [13, 5])
def test_both_sides_of_a_bound(example: int) -> None:
    """Long rows are cut into eights, of whatever is left over; short ones are not."""

    def rows(x: torch.Tensor) -> torch.Tensor:
        n = x.shape[0]
        if n > 8:
            return F.pad(x, (0, -n % 8)).view(-1, 8).sum(0)
        return x * 2 if n >= 0 else x * 3

    found = ways(rows, example)
    assert len(found) == 2
    for n in (0, 1, 7, 8, 9, 16, 61):
        x = torch.randn(n)
        same(served(found, x), rows(x))


def test_an_example_with_one_element_left() -> None:
    """Rounded up, both sizes of the example are 1, and the product is compared."""

    def pooled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        places = -(-x.shape[0] // 8) * -(-y.shape[0] // 8)
        return x.sum() * y if places == 1 else x.sum() + y

    found = ways(pooled, 5, 6)
    assert len(found) == 2
    for n, m in itertools.product((1, 8, 9), (1, 8, 33)):
        args = torch.randn(n), torch.randn(m)
        same(served(found, *args), pooled(*args))


def test_a_bound_that_decides_nothing_is_none() -> None:
    (imported,) = ways(lambda x: x.contiguous() * 2 if x.shape[0] >= 64 else x * 2, 4)
    assert not imported.module.main.constraints


def test_an_example_at_the_shortcut() -> None:
    """The example has the one size that the code has a table for."""

    def positions(x: torch.Tensor) -> torch.Tensor:
        pairs = x.shape[0] // 2
        table = torch.ones(8) if pairs == 8 else torch.arange(pairs) * 0.5
        return x[: 2 * pairs].view(pairs, 2) + table[:, None]

    found = ways(positions, 17)
    assert len(found) == 2
    for n in (0, 1, 2, 15, 16, 17, 18, 61):
        x = torch.randn(n)
        same(served(found, x), positions(x))


def test_a_shortcut_for_one_size_is_a_program() -> None:
    def clamped(x: torch.Tensor) -> torch.Tensor:
        return x * 1.0 if x.shape[0] != 5 else x.clamp(max=100.0)

    found = ways(clamped, 3)
    for n in (0, 4, 5, 6):
        x = torch.full((n,), 500.0)
        same(served(found, x), clamped(x))


def test_code_of_torch_itself_that_fixes_a_size() -> None:
    def pooled(x: torch.Tensor) -> torch.Tensor:
        return F.adaptive_max_pool1d(x[None, None], x.shape[0] // 2)

    imported = traced(pooled, 4)
    for n in (4, 5):
        same(run(imported, (torch.arange(float(n)),)), pooled(torch.arange(float(n))))
    with pytest.raises(ShapeError, match=r"functional\.py:\d+"):
        run(imported, (torch.ones(6),))


def test_numbers_that_an_op_takes_fix_a_size() -> None:
    """The op is called in the model's code: torch's argument parser asks."""

    def shifted(x: torch.Tensor) -> torch.Tensor:
        return x.expand(3, x.shape[0]).diagonal(x.shape[0] // 2)

    imported = traced(shifted, 6)
    for n in (6, 7):
        same(run(imported, (torch.arange(float(n)),)), shifted(torch.arange(float(n))))
    for n in (0, 1, 5, 8):
        with pytest.raises(ShapeError, match=r"test_torch_export\.py:\d+"):
            run(imported, (torch.ones(n),))


WINDOWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "area": lambda x: F.interpolate(x, scale_factor=0.6, mode="area"),
    "adaptive": lambda x: F.adaptive_avg_pool1d(x, x.shape[-1] // 2),
    "largest": lambda x: F.max_pool1d(x, x.shape[-1]),
    "mean": lambda x: F.avg_pool1d(x, x.shape[-1], ceil_mode=True),
    "of torch": lambda x: torch.max_pool1d(x, x.shape[-1]),
    "plane": lambda x: F.avg_pool2d(x[:, None], (3, x.shape[-1])),
    "planes": lambda x: F.max_pool2d(x[:, None], x.shape[1:]),
    "power": lambda x: F.lp_pool1d(x.abs() + 1, 2, x.shape[-1]),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_that_are_sizes(name: str) -> None:
    function = WINDOWS[name]
    found = ways(lambda x: function(x.expand(2, 3, x.shape[0])), 10)
    for n in (1, 2, 7, 10, 33):
        x = torch.arange(float(n)).sin()
        row = x.expand(2, 3, n)
        if name not in ("area", "adaptive") or n > 1:
            same(served(found, x), function(row))
    for imported in found:
        with pytest.raises(ShapeError):
            run(imported, (torch.ones(0),))


ZEROS: dict[str, Callable[[torch.Tensor], Any]] = {
    "equal": lambda x: 7 if x.shape[0] == 0 else 2,
    "not": lambda x: 7 if not x.shape[0] else 2,
    "elements": lambda x: 7 if x.numel() == 0 else 2,
    "above": lambda x: 2 if x.shape[0] > 0 else 7,
    "at least": lambda x: 7 if x.shape[0] * 3 < 1 else 2,
    "all": lambda x: 2 if all(n != 0 for n in x.shape) else 7,
    "least": lambda x: max(1, x.shape[0]),
    "sym_max": lambda x: torch.sym_max(x.shape[0], 1),
    "several": lambda x: max(3, x.shape[0], 1),
    "a list": lambda x: max([4, x.shape[0]]),
    "sorted": lambda x: sorted([x.shape[0], 3, 6])[1],
}


@pytest.mark.parametrize("name", ZEROS)
def test_questions_about_0(name: str) -> None:
    """torch takes sizes to be positive, and sympy answers by that, unasked."""
    function = ZEROS[name]

    def model(x: torch.Tensor) -> torch.Tensor:
        return x.sum() + function(x)

    found = ways(model, 5)
    for n in (0, 1, 2, 3, 4, 5, 6, 9):
        x = torch.arange(float(n))
        same(served(found, x), model(x))


def test_a_branch_against_the_declared_bounds() -> None:
    def branch(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 4 else x * 3

    shapes = (({0: Dim("n", max=3)},),)
    with pytest.raises(ShapeError, match=r"at most 3, but the example has 6"):
        imported_from(Call(branch), (torch.ones(6),), shapes)
    shapes = (({0: Dim("n", min=5)},),)
    imported = imported_from(Call(branch), (torch.ones(6),), shapes)
    assert imported.module.main.constraints == imported.guards(Basis.DECLARED)


def test_checks_of_sizes_are_enforced() -> None:
    class Checks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.shape[0] < 50
            torch._check(x.shape[1] <= 10)
            if x.shape[1] % 2:
                raise ValueError("an even number of columns, please")
            return x.view(-1, 2).sum(1)

    model = Checks()
    calls = [(torch.randn(b, n),) for b, n in ((1, 2), (49, 10), (3, 0))]
    imported = matches_eager(model, (torch.randn(4, 6),), ({0: "b", 1: "n"},), *calls)
    for b, n in ((50, 2), (1, 12), (1, 3)):
        with pytest.raises(ShapeError, match=r"test_torch_export\.py:\d+"):
            run(imported, (torch.randn(b, n),))


# --- weights --------------------------------------------------------------------


def test_weights_share_memory_and_ties() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Embedding(8, 4)
            self.b = nn.Linear(4, 8, bias=False)
            self.b.weight = self.a.weight
            self.c = nn.Parameter(torch.randn(4, 4).to(torch.bfloat16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x) @ self.c.t().float())

    model = Tied()
    imported = imported_from(model, (torch.tensor([1, 2]),), ({0: "n"},))
    constants = imported.module.constants
    assert len(constants) == 2
    (table,) = (c for c in constants.values() if c.type.dtype is DType.F32)
    assert table.data.__array_interface__["data"][0] == model.a.weight.data_ptr()
    (bits,) = (c for c in constants.values() if c.type.dtype is DType.BF16)
    assert bits.data.dtype == "uint16"
    same(run(imported, (torch.tensor([3]),)), model(torch.tensor([3])))


# --- pytrees --------------------------------------------------------------------


@dataclass
class Answer:
    value: torch.Tensor
    size: int
    rest: Any


torch.export.register_dataclass(Answer, serialized_type_name="tests.Answer")


def test_nested_inputs_and_outputs() -> None:
    class Nested(nn.Module):
        def forward(
            self, data: dict[str, Any], n: int, *, flag: bool, scale: float
        ) -> Any:
            x, (y, z) = data["x"], data["pair"]
            out = x * scale + y if flag else x
            return Answer(out, x.shape[0] * 2, [z, None, 5, {"n": n + 1}, x])

    def inputs(b: int, n: int) -> Any:
        pair = (torch.randn(b, 3), torch.arange(b))
        return ({"x": torch.randn(b, 3), "pair": pair}, n), {"flag": True, "scale": 0.5}

    args, kwargs = inputs(4, 7)
    rows = {0: "b"}
    shapes = {
        "data": {"x": rows, "pair": (rows, rows)},
        "n": Dim.DYNAMIC,
        "flag": None,
        "scale": None,
    }
    model = Nested()
    imported = imported_from(model, args, shapes, example_kwargs=kwargs)
    assert [type(slot) for slot in imported.signature.arguments[3:]] == [
        SizeSlot,
        FixedSlot,
        FixedSlot,
    ]
    for b, n in ((4, 7), (1, 0), (0, 3), (9, 100)):
        args, kwargs = inputs(b, n)
        same(run(imported, args, kwargs), model(*args, **kwargs))


def test_integer_inputs_as_sizes() -> None:
    model = Call(lambda x, n: (x[:, :n] * n, torch.arange(n)))
    calls = [(torch.randn(2, 9), n) for n in (0, 1, 5, 9)]
    imported = matches_eager(
        model, (torch.randn(2, 8), 4), (({1: "width"}, "n"),), *calls
    )
    assert imported.module.main.sizes == ("n",)
    again = imported_from(model, (torch.randn(2, 8), 1), (({1: "width"}, "n"),))
    assert again.module.main.sizes == ("n",)


# --- in-place ops ---------------------------------------------------------------


def in_place_chain(x: torch.Tensor) -> Any:
    y = x * 1
    row = y[0]
    tail = y[:, 1:]
    tail += 1
    y[:, 0] = 5.0
    row.mul_(2)
    turned = y.t()
    turned[0].add_(x.sum())
    flat = y.view(-1)
    flat.clamp_(min=-1)
    return y, row, tail, turned, flat


def in_place_pieces(x: torch.Tensor) -> Any:
    y = torch.stack([x, x, x], 1).clone()
    a, b, c = y.unbind(1)
    b.zero_()
    first, second = y.chunk(2, dim=1)
    second.fill_(3)
    y[:, 0].copy_(x.exp())
    return a, b, c, first, second, y.masked_fill_(y > 4, 0.5)


def in_place_mask(x: torch.Tensor) -> Any:
    y = x.clone()
    y[y > 0] = -1.0
    z = y.transpose(0, 1).clone()
    z.relu_()
    return y, z.add_(1).sigmoid_(), nn.functional.relu(y + 1, inplace=True)


@pytest.mark.parametrize("function", [in_place_chain, in_place_pieces, in_place_mask])
def test_in_place(function: Any) -> None:
    calls = [(torch.randn(b, n),) for b, n in ((1, 1), (5, 2), (3, 7))]
    example = (torch.randn(3, 4),)
    matches_eager(Call(function), example, (({0: "b", 1: "n"},),), *calls)


def test_changing_what_is_no_buffer_is_refused() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = nn.Parameter(torch.zeros(3), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.add_(1)
            return x + self.seen

    with pytest.raises(UnsupportedOpError) as raised:
        imported_from(Counts(), (torch.ones(3),), None)
    assert len(raised.value.ops) == 1
    assert "registered as a buffer" in str(raised.value)


# --- control flow ---------------------------------------------------------------


def test_cond() -> None:
    def choose(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin() + 1, lambda x: x * 2, (x,))

    calls = [(torch.ones(3),), (-torch.ones(7),), (torch.ones(1),)]
    matches_eager(Call(choose), (torch.ones(4),), (({0: "n"},),), *calls)


def test_while_loop() -> None:
    from torch._higher_order_ops.while_loop import while_loop

    def double(x: torch.Tensor) -> Any:
        count = torch.tensor(0)
        return while_loop(
            lambda i, x: i < 5, lambda i, x: (i + 1, x * 2 + i), (count, x)
        )

    calls = [(torch.ones(3),), (torch.randn(7),), (torch.ones(1),)]
    matches_eager(Call(double), (torch.ones(4),), (({0: "n"},),), *calls)


def test_no_grad_inside() -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x.exp()
        return y + x

    matches_eager(Call(inner), (torch.ones(4),), (({0: "n"},),), (torch.ones(1),))
    ep = torch.export.export(Call(inner), (torch.ones(4, requires_grad=True),))
    same(run(from_exported(ep), (torch.ones(4),)), inner(torch.ones(4)))


# --- errors ---------------------------------------------------------------------


def unknown(name: str) -> Any:
    """An op that no table has."""

    def copied(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    op = torch.library.custom_op(f"pliant_export::{name}", copied, mutates_args=())
    op.register_fake(copied)
    return op


def test_every_unsupported_op_is_listed_once() -> None:
    first, second, third = map(unknown, ("first", "second", "third"))

    class Several(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            ordered = first(x)
            noise = second(ordered) + first(ordered)
            return third(ordered @ noise.t()), ordered.exp()

    with pytest.raises(UnsupportedOpError) as raised:
        imported_from(Several(), (torch.randn(4, 4),), None)
    ops = raised.value.ops
    names = [op.name.split(".")[1] for op in ops]
    assert names == ["first", "second", "first", "third"]
    for op in ops:
        assert "test_torch_export.py:" in op.loc and "in forward: " in op.loc
    assert "ordered = first(x)" in ops[0].loc


def test_failures_of_the_trace_are_ours_to_tell() -> None:
    with pytest.raises(PliantError, match="could not trace"):
        export_module(Call(lambda x: x if x.sum() > 0 else -x), (torch.ones(2),))
    with pytest.raises(ShapeError, match="2 entries for 1"):
        export_module(nn.Identity(), (torch.ones(2),), ({}, {}))
    with pytest.raises(ShapeError, match="names wrong"):
        export_module(nn.Identity(), (torch.ones(2),), {"wrong": None})


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_half_complex_inputs_are_refused() -> None:
    with pytest.raises(UnsupportedOpError, match="complex32"):
        imported_from(Call(lambda x: x), (torch.ones(2, dtype=torch.complex32),), None)


class Widened(nn.Module):
    """At a size of 0, which torch is asked about as well, there is no row to widen."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[None, :1].expand(1, 4) + 1


def test_attempts_that_fail_are_not_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    log = logging.getLogger("torch._subclasses.fake_tensor")
    monkeypatch.setattr(log, "handle", lambda record: said.append(record.getMessage()))
    programs(Widened(), (torch.randn(6),), ({0: "n"},), simplify=simplified)
    assert not said
