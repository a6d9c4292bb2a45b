"""What a front end returns, and all that the compiler knows of it.

    Imported(module, signature, assumptions)

The module is graph IR, the signature says how a call's arguments and results map to its
`main` (signature.py), and the assumptions are what the front end took for granted of
sizes. None of them is left to luck: each is a guard that every call checks, because
`checked` makes it a constraint of `main` wherever it does not follow from those there.
Where a model's code goes several ways by size, a front end returns a program for each,
and the guards of one exclude the others'.
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
    CHECKED = "checked"  # the model's code says so itself, by an assert or a raise
    BRANCH = "branch"  # the model's code went this way, and not the other
    TRACED = "traced"  # the source's tracer took it so


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
        """What is assumed on these grounds, in the order in which it was found."""
        return tuple(a.guard for a in self.assumptions if a.basis in bases)

    def checked(self) -> Module:
        """The module, whose constraints imply every assumption on its inputs.

        One on sizes that data decides is checked by the op that they come from.
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
