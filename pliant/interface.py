"""What a model asks of its inputs: how symbols are read, and which guards must hold.

Guards come from many places: the spec of the dims, the model's own code, the rules of
shape of every op. Whatever they say together, they hold for the example that a model
is compiled with, or compiling ends with the guard that does not, and where it is from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pliant.errors import OptionError, ShapeError
from pliant.ir.build import facts_of
from pliant.ir.graph import Graph
from pliant.sym import Facts, Guard, Solution, solve
from pliant.sym.names import is_reserved
from pliant.sym.rules import InputDims, SizeRules


@dataclass(frozen=True, slots=True)
class Interface:
    """The inputs' symbolic sizes, how symbols are read from them, what must hold."""

    inputs: InputDims
    solution: Solution
    guards: tuple[Guard, ...]
    facts: Facts

    @property
    def rules(self) -> SizeRules:
        """What of it a call is checked by."""
        return SizeRules(self.inputs, self.solution.bindings, self.guards)

    def check_example(self, sizes: Sequence[Sequence[int]]) -> None:
        """ShapeError if a guard refuses the sizes of the example."""
        rules = self.rules
        env = rules.observed(sizes)
        guard = rules.failing(env)
        if guard is None:
            return
        found = rules.refusal(guard, env)
        raise ShapeError(
            f"the example itself would be refused: {found}. The sizes of "
            "example_inputs, dynamic_shapes and the model's code do not fit "
            "together: compile with other sizes, or leave this dim out of "
            "dynamic_shapes",
            input=found.input,
            dim=found.dim,
            expected=found.expected,
            got=found.got,
        )


def interface_of(graph: Graph, inputs: InputDims) -> Interface:
    """What a graph asks of the runtime's inputs."""
    facts = facts_of(graph)
    try:
        solution = solve(inputs, facts)
    except ValueError as error:
        raise ShapeError(f"{error}: give the dims names of their own") from None
    # Facts are the graph's constraints, which know where they come from.
    seen = [guard for guard in solution.guards if guard.origin != "facts"]
    guards = _distinct((*seen, *graph.constraints))
    return Interface(inputs, solution, guards, facts)


def reject_reserved(inputs: InputDims) -> None:
    for name, dims in inputs:
        for symbol in (s for d in dims for s in d.symbols()):
            if is_reserved(symbol):
                raise OptionError(
                    f"dim name '{symbol}' of input '{name}' is reserved: choose another"
                )


def _distinct(guards: Iterable[Guard]) -> tuple[Guard, ...]:
    """Guards with different conditions; the first stated wins."""
    seen: dict[object, Guard] = {}
    for guard in guards:
        seen.setdefault(guard.cond, guard)
    return tuple(seen.values())
