"""A result of a lowered region that is written over one of its parameters.

A loop over chunks keeps sums: each round takes what the rounds before it have in sum,
and gives that with its own part. If one kernel reads the one and makes the other, and
reads each element only for the same element of the sum (`update_proof.py`), the two may
be one memory. Otherwise the loop needs a second one, and copies.
"""

from __future__ import annotations

from collections.abc import Mapping

from pliant.ir.calls import calls_in
from pliant.ir.graph import Graph, Op, Value
from pliant.ir.loops import LoopFunc, Role
from pliant.memory.liveness import liveness
from pliant.memory.update import with_inout
from pliant.memory.update_proof import is_pointwise
from pliant.sym import as_expr


def written_over(
    graph: Graph, result: int, param: int, functions: Mapping[str, LoopFunc]
) -> tuple[Graph, Mapping[str, LoopFunc]] | None:
    """The region in which a result may have the memory of a parameter, by number.

    And the functions, with one more that writes it. None if that is not proved.
    """
    old, new = graph.params[param], liveness(graph).outputs[result]
    bases = _bases(graph)
    calls = [
        op
        for op in calls_in(graph)
        if any(bases.get(v, v) in (old, new) for v in op.operands)
    ]
    if len(calls) != 1:
        return None
    (call,) = calls
    touched = [v for v in call.operands if bases.get(v, v) in (old, new)]
    func = functions[call.str_attr("callee")]
    pairs = dict(zip(call.operands, func.buffers, strict=True))
    if len(touched) != 2 or not all(_is_whole(v, graph) for v in touched):
        return None
    read, written = sorted(touched, key=lambda v: bases.get(v, v) is new)
    source, target = pairs[read], pairs[written]
    if (source.role, target.role) != (Role.IN, Role.OUT):
        return None
    if not is_pointwise(func, source.name, target.name, functions):
        return None
    known = dict(functions)
    made = with_inout(func, frozenset({target.name}), known)
    attrs = {**dict(call.attrs), "callee": made.name}
    changed = call.replace(attrs=tuple(attrs.items()))
    ops = tuple(changed if op is call else op for op in graph.ops)
    return graph.replace(ops=ops), known


def _bases(graph: Graph) -> dict[Value, Value]:
    """What each view is a view of."""
    found: dict[Value, Value] = {}
    for op in graph.ops:
        if op.name == "view":
            found[op.result] = found.get(op.operands[0], op.operands[0])
    return found


def _is_whole(value: Value, graph: Graph) -> bool:
    """Whether a value is all of its memory, from the start on, row-major."""
    views: dict[Value, Op] = {op.result: op for op in graph.ops if op.name == "view"}
    while value in views:
        op = views[value]
        (source,) = op.operands
        if op.dim_attr("offset") != as_expr(0) or value.type.strides is not None:
            return False
        if value.type.bytes != source.type.bytes:
            return False
        value = source
    return True
