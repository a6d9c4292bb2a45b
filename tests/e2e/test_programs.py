"""Whole programs with loops and branches, against eager: every size, no Python."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import scan, while_loop
from torch.utils import _pytree as pytree

import pliant
from zoo.programs import PROGRAMS, python_loops

SIZES = (0, 1, 2, 7, 31)


def same(got: Any, want: Any) -> None:
    pairs = zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True)
    for a, b in pairs:
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str) -> None:
    """One compilation serves every size, and the plan is what a call takes."""
    torch.manual_seed(0)
    program = PROGRAMS[name]
    model = program.make().eval().requires_grad_(False)
    m = pliant.compile(model, program.inputs(6), program.dynamic)
    for n in SIZES:
        inputs = program.inputs(n)
        if n < program.smallest:
            continue
        got = m(*inputs)
        assert m.stats()["last_peak_bytes"] == m.memory_plan(*inputs).peak_bytes
        with python_loops():
            same(got, model(*inputs))
    assert m.compile_count == 1


def test_rounds_run_no_python() -> None:
    """What Python does for a call, taking and giving tensors, is not per round."""
    torch.manual_seed(0)
    program = PROGRAMS["beam search"]
    model = program.make().eval().requires_grad_(False)
    m = pliant.compile(model, program.inputs(6), program.dynamic)
    state, _ = program.inputs(3)
    called: list[list[str]] = []
    for rounds in (1, 1, 20):
        called.append([])
        limit = torch.tensor(rounds)
        sys.setprofile(lambda frame, event, _: called[-1].append(f"{event} {frame}"))
        try:
            done = m(state, limit)[0]
        finally:
            sys.setprofile(None)
        assert int(done) == rounds
    assert len(called[1]) == len(called[2])


class Sorts(nn.Module):
    """Each of the kernels in C, in a loop."""

    def forward(self, x: Tensor, at: Tensor) -> tuple[Tensor, ...]:
        def step(
            i: Tensor, x: Tensor, y: Tensor, found: Tensor, top: Tensor
        ) -> tuple[Tensor, ...]:
            values, order = x.sort(dim=1)
            found = found + torch.searchsorted(values, y)
            y = y.index_copy(0, at, y.flip(0)[: at.shape[0]]) * 0.5
            top = top + x.topk(1, dim=0).values.sum() + y.cummax(1).values.sum()
            return i + 1, values * -1.5 + order, y, found, top + y.logcumsumexp(0).sum()

        start = torch.zeros((), dtype=torch.int64)
        zero = torch.zeros_like(x, dtype=torch.int64)
        carried = (start, x, x * 0.7, zero, torch.zeros(()))
        return while_loop(lambda i, *others: i < 3, step, carried)


def test_kernels_in_c_in_a_loop() -> None:
    torch.manual_seed(0)
    dynamic = ({0: "n", 1: "m"}, {0: "k"})
    example = torch.randn(4, 5), torch.tensor([2, 0])
    m = pliant.compile(Sorts(), example, dynamic)
    for n, width in ((1, 1), (2, 7), (5, 300), (61, 3), (3, 0)):
        inputs = torch.randn(n, width), torch.randperm(n)[: (n + 1) // 2]
        same(m(*inputs), Sorts()(*inputs))
        assert m.stats()["last_peak_bytes"] == m.memory_plan(*inputs).peak_bytes


class Nested(nn.Module):
    """A branch in a scan in a branch, with a sort in each branch."""

    def forward(self, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        def step(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            carry = torch.cond(
                row.sum() > 0,
                lambda c, r: c + r.sort().values,
                lambda c, r: c - r.topk(1).values,
                (carry, row),
            )
            return carry, carry.sum()

        return torch.cond(
            x.sum() > 0,
            lambda x, rows: scan(step, x, rows),
            lambda x, rows: (x.sort(descending=True).values, rows.sum(1)),
            (x, rows),
        )


def test_kernels_in_c_in_nested_branches() -> None:
    torch.manual_seed(0)
    dynamic = ({0: "n"}, {0: "t", 1: "n"})
    m = pliant.compile(Nested(), (torch.randn(5), torch.randn(3, 5)), dynamic)
    for n, rounds in ((1, 1), (2, 6), (7, 3), (61, 1), (13, 8)):
        for sign in (1.0, -1.0):
            inputs = torch.rand(n) * sign, torch.randn(rounds, n)
            same(m(*inputs), Nested()(*inputs))
            assert m.stats()["last_peak_bytes"] == m.memory_plan(*inputs).peak_bytes


def test_a_branch_on_a_size_inside_a_loop_is_a_guard() -> None:
    """What the loop's function asks of a size is no question of an op's."""

    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            def step(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
                return i + 1, x * 2 if x.shape[0] > 4 else x * 3

            start = torch.zeros((), dtype=torch.int64)
            return while_loop(lambda i, x: i < 2, step, (start, x))[1]

    m = pliant.compile(Asks(), (torch.randn(6),), ({0: "n"},))
    for n in (1, 4, 5, 9):
        x = torch.randn(n)
        try:
            got = m(x)
        except pliant.ShapeError:
            assert n <= 4
        else:
            same(got, Asks()(x))
