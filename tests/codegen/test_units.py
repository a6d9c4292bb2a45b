"""Units of compilation: what runs rarely is compiled without optimisation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pliant
from pliant.codegen.units import program_units
from pliant.ir.callees import reached
from pliant.ir.loop_walk import walk
from pliant.ir.loops import Load, Store


class Pairs(nn.Module):
    """A table of pairs that is larger than what it is made of, and than its result."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 24), nn.Linear(4, 24)
        self.out = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.left(x).sigmoid(), self.right(x).tanh()
        pairs = torch.einsum("bikc,bjkc->bijc", a, b)
        return x + self.out(pairs.softmax(-1))


def compiled(**options: bool) -> pliant.CompiledModel:
    shapes = ({0: "batch", 1: "rows", 2: "rows"},)
    example = (torch.randn(2, 5, 5, 4),)
    return pliant.compile(Pairs(), example, shapes, options=pliant.Options(**options))


@pytest.mark.parametrize("chunk", [False, True])
def test_only_what_main_never_runs_is_not_optimised(chunk: bool) -> None:
    program = compiled(chunk=chunk).program
    host, loops = program.code.host, program.lowered.loops
    units = program_units(loops, host, program.code.machine.target, 2)
    assert bool(host.other_calls) == chunk
    assert (units.steps is not None) == chunk
    assert units.calls.opt_level == 2
    if units.steps is not None:
        assert units.steps.opt_level == 0
    often = reached((call.callee for call in host.own_calls), loops)
    quick = {name for name, unit in units.kernels.items() if unit.opt_level == 0}
    assert bool(quick) == chunk
    assert quick.isdisjoint(often)
    for name in quick:
        assert not any(isinstance(n, Load | Store) for n in walk(loops[name].body))
