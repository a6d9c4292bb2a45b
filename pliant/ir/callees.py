"""Which loop functions are called, by others and through others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pliant.ir.calls import called_in
from pliant.ir.graph import Module
from pliant.ir.identity import PerObject
from pliant.ir.loop_walk import statements
from pliant.ir.loops import Call, LoopFunc


def _called(func: LoopFunc) -> tuple[str, ...]:
    inside = statements(func.body)
    return tuple(dict.fromkeys(s.function for s in inside if isinstance(s, Call)))


# The names of the functions that a function calls itself, in order, each once.
callees = PerObject(_called)


def reached(names: Iterable[str], loops: Mapping[str, LoopFunc]) -> dict[str, LoopFunc]:
    """The functions of these names and all that they call, callees first.

    A name that `loops` does not have is passed over, so that the verifier can ask too.
    """
    visited: set[str] = set()
    ordered: dict[str, LoopFunc] = {}

    def visit(name: str) -> None:
        if name in visited or name not in loops:
            return
        visited.add(name)
        for callee in callees(loops[name]):
            visit(callee)
        ordered[name] = loops[name]

    for name in names:
        visit(name)
    return ordered


def with_called_loops(module: Module) -> Module:
    """The module without the functions that no version of `main` calls."""
    versions = (module.main, *module.versions)
    names = (name for graph in versions for name in called_in(graph))
    called = reached(names, module.loops)
    if len(called) == len(module.loops):
        return module
    loops = {name: func for name, func in module.loops.items() if name in called}
    return module.replace(loops=loops)
