"""The front end for Pliant's own IR: parameters by position, results in a tuple."""

from __future__ import annotations

from pliant.frontend.contract import Imported
from pliant.frontend.signature import (
    Parameters,
    Signature,
    SizeSlot,
    StoredCall,
    TensorResult,
    TensorSlot,
)
from pliant.frontend.structure import LEAF, CallNesting, tuple_of, unflattener
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
    results = tuple(TensorResult(k) for k in range(len(graph.results)))
    around = LEAF if len(results) == 1 else tuple_of(len(results))
    call = StoredCall(parameters, CallNesting((LEAF,) * len(arguments), around))
    plain = len(results) > 0
    return Signature(
        arguments,
        results,
        call.flatten,
        unflattener(around),
        positional=True,
        plain=plain,
        stored=call,
    )
