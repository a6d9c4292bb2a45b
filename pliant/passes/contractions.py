"""Contractions in the form their kernels take.

    matmul(a: bf16, b: bf16)        -> cast(matmul(cast(a), cast(b)))     half storage
    transpose(attention(..), swap)  -> attention(..) {swapped}            no copy after
    conv, conv_transpose            as matmul, for half storage

Products accumulate in f32 whatever is stored, and attention writes its result as
(.., position, head, element) where the model asks for that next, as all do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pliant.ir.build import Builder
from pliant.ir.graph import Graph, Names, Op, Value, names_of
from pliant.passes.context import Context

WIDENED = frozenset({"matmul", "conv", "conv_transpose"})


def _swaps(op: Op) -> bool:
    """Whether a transpose exchanges heads and positions and nothing else."""
    perm = op.ints_attr("perm")
    rank = len(perm)
    return perm == (*range(rank - 3), rank - 2, rank - 3, rank - 1)


def _emit(
    builder: Builder, op: Op, operands: Sequence[Value], **changes: object
) -> Value:
    """The op again, on other operands and with some attributes changed."""
    attrs: dict[str, Any] = {**dict(op.attrs), **changes}
    return builder.emit(op.name, *operands, regions=op.regions, **attrs)


def contractions(graph: Graph, cx: Context) -> Graph:
    users = graph.users()
    results = set(graph.results)
    builder = Builder(cx.facts(graph), Names(names_of(graph)))
    replaced: dict[Value, Value] = {}
    changed = False
    for op in graph.ops:
        operands = tuple(replaced.get(v, v) for v in op.operands)
        current = op.replace(operands=operands)
        if op.name in WIDENED and op.result.dtype.compute is not op.result.dtype:
            wide = op.result.dtype.compute
            with builder.at(op.loc):
                parts = [builder.cast(v, wide) for v in operands]
                product = _emit(builder, op, parts)
                replaced[op.result] = builder.cast(product, op.result.dtype)
            changed = True
        elif op.name == "attention" and _swapped_after(op, users, results):
            with builder.at(op.loc):
                made = _emit(builder, op, operands, swapped=True)
            for transpose in users[op.result]:
                replaced[transpose.result] = made
            changed = True
        elif op.results and op.results[0] in replaced:
            continue
        else:
            builder.append(current)
    if not changed:
        return graph
    final = tuple(replaced.get(v, v) for v in graph.results)
    return graph.replace(ops=tuple(builder.ops), results=final)


def _swapped_after(op: Op, users: dict[Value, list[Op]], results: set[Value]) -> bool:
    if op.bool_attr("swapped") or op.result in results:
        return False
    readers = users.get(op.result, [])
    return bool(readers) and all(r.name == "transpose" and _swaps(r) for r in readers)
