"""The front end for Pliant's own IR: parameters by position, results in a tuple."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from pliant.frontend.contract import Imported
from pliant.frontend.signature import (
    Parameters,
    Signature,
    SizeSlot,
    TensorResult,
    TensorSlot,
)
from pliant.ir.graph import Graph, Module


def import_module(module: Module) -> Imported:
    """The module with its signature; its constraints are its only assumptions."""
    return Imported(module, plain_signature(module.main))


def plain_signature(graph: Graph) -> Signature:
    """The parameters, then the sizes; a tuple of results unless there is one."""
    arguments: tuple[TensorSlot | SizeSlot, ...] = (
        *(TensorSlot(p.name, p.type) for p in graph.params),
        *(SizeSlot(name, name) for name in graph.sizes),
    )
    parameters = Parameters(tuple(a.name for a in arguments))

    def flatten(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        return list(parameters.bind(args, kwargs)[0])

    results = tuple(TensorResult(k) for k in range(len(graph.results)))
    around = itemgetter(0) if len(results) == 1 else tuple
    plain = len(results) > 0
    return Signature(arguments, results, flatten, around, True, plain)
