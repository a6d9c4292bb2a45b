"""Contractions in the form their kernels take.

    matmul(a: bf16, b: bf16)        -> cast(matmul(cast(a), b))           half storage
    matmul(cast(a: i8), cast(b: i8)) -> cast(matmul(a, b))                8-bit integers
    transpose(attention(..), swap)  -> attention(..) {swapped}            no copy after
    .. of all of attention_backward's results                             likewise
    conv, conv_transpose            as matmul, for half storage
    matmul(transpose(a), w)         -> reshape(matmul(reshape(..), w))    copies rows

Products accumulate in f32 whatever type is stored. Products of 8-bit integers
accumulate in i32 even if the model widens them further first (as long as no sum can
overflow i32). Attention writes its result as (.., position, head, element) if the model
transposes it to that next, as all models do. Rows that no single stride reaches are
copied if one matrix is for all of them: otherwise every batch would be a product of its
own, which packs and reads the whole matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from pliant.context import Context
from pliant.ir.access import is_one
from pliant.ir.build import Builder
from pliant.ir.graph import Graph, Names, Op, Value, names_of
from pliant.ir.ops import ATTENTIONS, VIEWS, Trait, has_trait
from pliant.ir.types import NARROW, DType
from pliant.ir.views import resolve, row_stride
from pliant.sym import ONE, ZERO, Facts, le, product

MAGNITUDE = {DType.I8: 128, DType.U8: 255}


def _swaps(op: Op) -> bool:
    """Whether a transpose exchanges heads and positions and nothing else."""
    perm = op.ints_attr("perm")
    rank = len(perm)
    return perm == (*range(rank - 3), rank - 2, rank - 3, rank - 1)


def _emit(
    builder: Builder, op: Op, operands: Sequence[Value], **changes: object
) -> Value:
    """The op again with other operands and some attributes changed."""
    attrs: dict[str, Any] = {**dict(op.attrs), **changes}
    return builder.emit(op.name, *operands, regions=op.regions, **attrs)


def _is_half(op: Op) -> bool:
    """Whether a product is of half floats, which are a storage type only."""
    dtype = op.results[0].dtype if has_trait(op, Trait.CONTRACT) else DType.F32
    return dtype.compute is not dtype


def _narrow(value: Value, producers: Mapping[Value, Op]) -> DType | None:
    """The 8-bit type that a wider integer was cast from, through views."""
    op = producers.get(value)
    while op is not None and op.name in VIEWS:
        op = producers.get(op.operands[0])
    if op is None or op.name != "cast" or not value.dtype.is_int:
        return None
    dtype = op.operands[0].dtype
    return dtype if dtype in NARROW and value.dtype not in NARROW else None


def _is_narrow(op: Op, producers: Mapping[Value, Op], facts: Facts) -> bool:
    """Whether a product of casts equals one of 8-bit integers, bit for bit."""
    if op.name != "matmul":
        return False
    kinds = [_narrow(v, producers) for v in op.operands]
    if None in kinds:
        return False
    if op.result.dtype is not DType.I64:
        return True  # in i32 the same sums wrap, in i16 their lower halves do
    most = (2**31 - 1) // prod(MAGNITUDE[kind] for kind in kinds if kind is not None)
    return facts.prove(le(op.operands[0].shape[-1], most)) is True


def _apart(op: Op, producers: Mapping[Value, Op], facts: Facts) -> bool:
    """Whether one matrix is for rows that lie in memory at more than one stride."""
    if op.name != "matmul" or not op.result.dtype.is_float:
        return False
    left, right = op.operands
    if left.type.rank < 3 or not all(map(is_one, right.shape[:-2])):
        return False
    view = resolve(left, producers, facts)
    if view is None or view.strides[-1] != ONE or ZERO in view.strides:
        return False
    return row_stride(view.shape, view.strides) is None


def _joined(builder: Builder, op: Op, left: Value, right: Value) -> Value:
    """The product of all rows as one matrix."""
    *lead, columns = op.result.shape
    rows = builder.reshape(left, (product(lead), left.shape[-1]))
    made = builder.emit("matmul", rows, builder.reshape(right, right.shape[-2:]))
    return builder.reshape(made, (*lead, columns))


def _before_cast(
    builder: Builder,
    value: Value,
    producers: Mapping[Value, Op],
    replaced: Mapping[Value, Value],
) -> Value:
    """The value before the cast, with the views after the cast applied to it."""
    op = producers[value]
    if op.name == "cast":
        return replaced.get(op.operands[0], op.operands[0])
    inner = _before_cast(builder, op.operands[0], producers, replaced)
    return _emit(builder, op, (inner,))


def contractions(graph: Graph, cx: Context) -> Graph:
    users, producers = graph.users(), graph.producers()
    results = set(graph.results)
    facts = cx.facts(graph)
    builder = Builder(facts, Names(names_of(graph)))
    replaced: dict[Value, Value] = {}
    changed = False
    for op in graph.ops:
        operands = tuple(replaced.get(v, v) for v in op.operands)
        current = op.replace(operands=operands)
        if _is_half(op):
            wide = op.result.dtype.compute
            with builder.at(op.loc):
                parts = [builder.cast(v, wide) for v in operands]
                if op.name == "matmul":  # its kernel widens as it reads
                    parts[1] = operands[1]
                made = _emit(builder, op, parts)
                replaced[op.result] = builder.cast(made, op.result.dtype)
            changed = True
        elif _is_narrow(op, producers, facts):
            with builder.at(op.loc):
                parts = [
                    _before_cast(builder, v, producers, replaced) for v in op.operands
                ]
                made = _emit(builder, op, parts)
                replaced[op.result] = builder.cast(made, op.result.dtype)
            changed = True
        elif _apart(op, producers, facts):
            with builder.at(op.loc):
                replaced[op.result] = _joined(builder, op, *operands)
            changed = True
        elif op.name in ATTENTIONS and _swapped_after(op, users, results):
            with builder.at(op.loc):
                swapped = _swapped(builder, op, operands, users)
            replaced.update(swapped)
            changed = True
        elif op.results and op.results[0] in replaced:
            continue
        else:
            builder.append(current)
    if not changed:
        return graph
    final = tuple(replaced.get(v, v) for v in graph.results)
    return graph.replace(ops=tuple(builder.ops), results=final)


# The number of results that may be swapped; all of an op's are, or none.
_TURNED = {"attention": 1, "attention_lse": 1, "attention_backward": 3}


def _swapped_after(op: Op, users: dict[Value, list[Op]], results: set[Value]) -> bool:
    """Whether all readers of the results exchange their heads and positions.

    Gradients read the result too, but accept any strides.
    """
    if op.bool_attr("swapped"):
        return False
    for value in op.results[: _TURNED[op.name]]:
        readers = users.get(value, [])
        turns = [r for r in readers if r.name == "transpose" and _swaps(r)]
        others = [r for r in readers if not any(r is t for t in turns)]
        if value in results or any(r.name != "attention_backward" for r in others):
            return False
        if not turns and (readers or op.name != "attention_backward"):
            return False
    return True


def _swapped(
    builder: Builder,
    op: Op,
    operands: Sequence[Value],
    users: dict[Value, list[Op]],
) -> dict[Value, Value]:
    """The op with swapped results, and a mapping of replaced values."""
    attrs: dict[str, Any] = {**dict(op.attrs), "swapped": True}
    made = builder.emit_multi(op.name, *operands, regions=op.regions, **attrs)
    count = _TURNED[op.name]
    found = dict(zip(op.results[count:], made[count:], strict=True))
    for value, new in zip(op.results[:count], made[:count], strict=True):
        for reader in users.get(value, []):
            if reader.name == "transpose":
                found[reader.result] = new
            elif value not in found:
                found[value] = builder.swap(new, -2, -3)
    return found
