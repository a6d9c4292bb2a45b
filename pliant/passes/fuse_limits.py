"""What limits fusion, and is told from ops alone: work that a kernel would repeat,
views that a kernel cannot read, and what is left of shapes without constraints.
"""

from __future__ import annotations

from collections.abc import Sequence

from pliant.ir.access import is_one
from pliant.ir.graph import Graph, Op, Value
from pliant.ir.groups import is_transparent
from pliant.ir.ops import ATTENTIONS, CALLS, LIBRARY, Trait, has_trait, named
from pliant.ir.types import TensorType
from pliant.ir.views import View
from pliant.sym import as_expr, sym

CONVOLUTIONS = named(Trait.CONVOLUTION)


def repeats(ops: Sequence[Op]) -> bool:
    """Whether concats would cause much recomputation, once for each operand.

    What an operand is made of is computed where the operand is read. In a chain of
    steps that are all operands too, each would be computed from the start of the chain.
    """
    if not any(op.name == "concat" for op in ops):
        return False
    producers = {v: op for op in ops for v in op.results}
    left = 2 * len(ops) + 32
    stack = [list(op.operands) for op in ops if op.name == "concat"]
    while stack:
        for value in stack.pop():
            cone, seen = [value], set[Value]()
            while cone:
                v = cone.pop()
                op = producers.get(v)
                if op is None or v in seen:
                    continue
                seen.add(v)
                left -= 1
                if left < 0:
                    return True
                if op.name == "concat":
                    stack.append(list(op.operands))
                else:
                    cone.extend(op.operands)
    return False


def multiplies(ops: Sequence[Op]) -> bool:
    """Whether steps that read the one before at several places would multiply.

    x[1:] - x[:-1] needs two elements of x. In a chain of such steps, the first would be
    computed twice as often with each step.
    """
    if sum(op.name == "slice" for op in ops) < 2:
        return False
    left = 2 * len(ops) + 32
    read: dict[Value, int] = {}  # at the place of the reader
    elsewhere: dict[Value, int] = {}  # through views, each of which is another place
    for op in reversed(ops):
        often = max(1, *(read.get(v, 0) + elsewhere.get(v, 0) for v in op.results))
        if is_transparent(op):
            for v in op.operands:
                elsewhere[v] = elsewhere.get(v, 0) + often
            continue
        left -= often
        if left < 0:
            return True
        for v in op.operands:
            read[v] = max(read.get(v, 0), often)
    return False


def reads_view(op: Op, which: int, view: View) -> bool:
    """Whether a contraction's kernel can read this operand through these strides."""
    if op.name == "matmul":
        # Rows or columns have to be contiguous. Otherwise a transposing copy is faster
        # than reading every element from a cache line of its own.
        return as_expr(1) in view.strides[-2:] or is_one(view.shape[-1])
    if op.name == "coded_matmul":
        return view.is_contiguous()
    if op.name == "grouped_matmul":
        return which == 1 or view.is_contiguous()
    first = ATTENTIONS.get(op.name)
    if first is not None and (which == first or which < min(first, 2)):
        # The rows of queries, of results and of their gradients are read in place, so
        # their elements must be adjacent.
        return view.strides[-1] == as_expr(1)
    if first is not None and which > first + 2 and view.shape:
        # Read along the keys: the last axis is contiguous, or broadcast.
        return is_one(view.shape[-1]) or view.strides[-1] in (as_expr(0), as_expr(1))
    if op.name == "conv_last" and which == 0:
        # The pixels of an image row are contiguous, with all their channels.
        pixels, channels = view.strides[-2:]
        return channels == as_expr(1) and pixels == view.shape[-1]
    if op.name in CALLS | LIBRARY or (op.name in CONVOLUTIONS and which == 1):
        return view.is_contiguous()
    return True


def forget(graph: Graph) -> Graph:
    """The graph as it looks without constraints, op by op.

    Two symbolic dims are equal only if an elementwise op says so of its own operand and
    result; the symbolic dims of every other result are new symbols.
    """
    values: dict[Value, Value] = {}
    ops: list[Op] = []

    def strange(value: Value) -> Value:
        shape = tuple(
            d if d.is_const else sym(f"{value.name}?{k}")
            for k, d in enumerate(value.shape)
        )
        return Value(value.name, TensorType(value.dtype, shape))

    for param in graph.params:
        values[param] = strange(param)
    for op in graph.ops:
        operands = tuple(values[v] for v in op.operands)
        for value in op.results:
            values[value] = strange(value)
            if has_trait(op, Trait.ELEMENTWISE):
                kind = TensorType(value.dtype, operands[0].shape)
                values[value] = Value(value.name, kind)
        results = tuple(values[v] for v in op.results)
        ops.append(op.replace(operands=operands, results=results))
    params = tuple(values[v] for v in graph.params)
    outputs = tuple(values[v] for v in graph.results)
    return graph.replace(params=params, ops=tuple(ops), results=outputs)
