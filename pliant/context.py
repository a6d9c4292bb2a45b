"""What every pass is given: options, the target, and what is known of the symbols."""

from __future__ import annotations

from dataclasses import dataclass

from pliant.ir.build import facts_of
from pliant.ir.graph import Graph
from pliant.machine.target import Target
from pliant.options import Options
from pliant.sym import Facts


@dataclass(frozen=True, slots=True)
class Context:
    options: Options
    target: Target

    def facts(self, graph: Graph) -> Facts:
        """What the graph's constraints state of its symbols."""
        return facts_of(graph)
