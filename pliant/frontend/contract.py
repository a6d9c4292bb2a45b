"""The interface between a front end and the compiler.

    Imported(module, signature, assumptions)

The module is graph IR, the signature says how a call's arguments and results map to its
`main` (signature.py), and the assumptions are those that the front end made about
sizes. Every call checks them: `checked` adds each assumption to the constraints of
`main` unless these imply it. Where a model's code branches on sizes, a front end
returns a program for each path, and the guards of one exclude those of the others.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pliant.frontend.signature import Signature
from pliant.ir.build import facts_of
from pliant.ir.graph import Module, walk
from pliant.sym import Guard


class Basis(enum.Enum):
    """Why a program is right only where a guard holds."""

    DECLARED = "declared"  # the user bounds a dim
    CHECKED = "checked"  # the model's code checks it, by an assert or a raise
    BRANCH = "branch"  # the model's code took this branch in the trace
    LAYOUT = "layout"  # an op gave a view of its operand in the trace, or a copy
    TRACED = "traced"  # the source's tracer assumed it


@dataclass(frozen=True, slots=True)
class Assumption:
    basis: Basis
    guard: Guard


@dataclass(frozen=True, slots=True)
class Imported:
    """A program of a model."""

    module: Module
    signature: Signature
    assumptions: tuple[Assumption, ...] = ()

    def guards(self, *bases: Basis) -> tuple[Guard, ...]:
        """The assumptions with one of these origins, in the order they were found."""
        return tuple(a.guard for a in self.assumptions if a.basis in bases)

    def checked(self) -> Module:
        """The module, whose constraints imply every assumption on its inputs.

        An assumption on a data-dependent size is checked by the op that computes it.
        """
        main = self.module.main
        facts, more = facts_of(main), list[Guard]()
        regions = (region for op in walk(main) for region in op.regions)
        known = {g.cond for graph in (main, *regions) for g in graph.constraints}
        sizes = {s for p in main.params for d in p.shape for s in d.symbols()}
        sizes.update(main.sizes)
        for guard in self.guards(*Basis):
            cond = guard.cond
            if cond in known or not sizes.issuperset(cond.symbols()):
                continue
            known.add(cond)
            if facts.prove(cond) is not True:
                facts = facts.assume(cond)
                more.append(guard)
        if not more:
            return self.module
        return self.module.with_main(
            main.replace(constraints=(*main.constraints, *more))
        )
