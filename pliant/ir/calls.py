"""The calls of a lowered graph, and what each of them computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pliant.ir.graph import Graph, Module, Op
from pliant.ir.loops import Role
from pliant.ir.ops import CALLS


def calls_in(graph: Graph) -> tuple[Op, ...]:
    """The calls in order."""
    return tuple(op for op in graph.ops if op.name in CALLS)


def called_in(graph: Graph) -> Iterator[str]:
    """The loop functions that a lowered graph calls, in order."""
    for op in graph.ops:
        if op.name == "call_loop":
            yield op.str_attr("callee")


def roles_of(call: Op, module: Module) -> Sequence[Role] | None:
    """What a call in destination-passing form does to each operand, if known."""
    if call.name == "call_library":
        return module.libraries[call.str_attr("callee")].roles
    return [b.role for b in module.loops[call.str_attr("callee")].buffers]


def computed_by(call: Op, module: Module) -> Graph | None:
    """The graph that a call computes; None for one that only prepares a later call."""
    for name, value in call.attrs:
        if name == "computes":
            return module.graphs[str(value)]
    return None


def computed(module: Module, graph: Graph | None = None) -> Iterator[Graph]:
    """What the calls of `main`, or of another version, compute, in their order."""
    for call in calls_in(graph or module.main):
        purpose = computed_by(call, module)
        if purpose is not None:
            yield purpose
