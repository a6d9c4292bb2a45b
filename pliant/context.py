"""What every pass is given: options, the target, and what is known of the symbols."""

from __future__ import annotations

from dataclasses import dataclass, field

from pliant.ir.build import facts_of
from pliant.ir.graph import Graph
from pliant.machine.target import Target
from pliant.options import Options
from pliant.sym import Facts


@dataclass(frozen=True, slots=True)
class Context:
    options: Options
    target: Target
    held: dict[Facts, None] = field(default_factory=dict, repr=False, compare=False)

    def facts(self, graph: Graph) -> Facts:
        """What the graph's constraints state of its symbols.

        It is held as long as the context is: the next pass gets the same object, and
        with it what this one has worked out.
        """
        facts = facts_of(graph)
        self.held[facts] = None
        return facts
