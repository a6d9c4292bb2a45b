"""The work of a kernel: floating-point operations and memory traffic, as formulas.

They are counted on the region of its fusion, not on its code: `flops` are those of the
contraction, two per multiply-add, and `bytes` are all that must be read and written at
least once. A roofline compares the time with the larger of the two limits.

A loop over chunks does the work of its kernels in every round: what each round reads
whole, such as a weight, is read again, and each call takes time of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pliant.ir.calls import calls_in, computed_by
from pliant.ir.graph import ChunkLoop, Graph, Module, Op, Value, chunk_rows
from pliant.ir.ops import ATTENTIONS, LIBRARY, LOOKUPS, OPS, first_row
from pliant.machine.rates import ASSUMED_BYTES, ASSUMED_FLOPS, CALL_SECONDS
from pliant.sym import Expr, as_expr, ceildiv, maximum, minimum, product
from pliant.sym.nodes import sum_of
from pliant.sym.signs import plainly_nonnegative


@dataclass(frozen=True, slots=True)
class Work:
    """What one call of a kernel does, over the dims of the model."""

    flops: Expr
    bytes: Expr


def op_flops(op: Op) -> Expr:
    """Floating-point operations of a contraction, or an estimate for a C function.

    It is 0 for other ops.
    """
    match op.name:
        case "matmul":
            return 2 * op.result.type.numel * op.operands[0].shape[-1]
        case "coded_matmul":
            return 2 * op.result.type.numel * op.operands[0].shape[-1]
        case "grouped_matmul":
            return 2 * op.result.type.numel * op.operands[0].shape[-1]
        case "conv" | "conv_last":
            return 2 * op.result.type.numel * product(op.operands[1].shape[1:])
        case "conv_transpose":
            return 2 * op.operands[0].type.numel * product(op.operands[1].shape[1:])
        case "attention" | "attention_lse":
            return _attention_flops(op)
        case "attention_backward":  # five products of the sizes of two
            return _attention_flops(op) * 5 // 2
        case name if name in LIBRARY:
            return OPS[name].cost * op.operands[-1].type.numel
        case _:
            return as_expr(0)


def _attention_flops(op: Op) -> Expr:
    begin = ATTENTIONS[op.name]
    query, key, value = op.operands[begin : begin + 3]
    pairs = _seen_pairs(op, query.shape[-2], key.shape[-2])
    return 2 * product(query.shape[:-2]) * pairs * (query.shape[-1] + value.shape[-1])


def _seen_pairs(op: Op, rows: Expr, columns: Expr) -> Expr:
    """How many scores a head has.

    It is exact where the last row sees just the last column and each row sees one.
    Otherwise it is an upper bound.
    """
    if not op.bool_attr("causal"):
        return rows * columns
    first = first_row(op)
    if first + rows == columns and plainly_nonnegative(first):
        return rows * first + rows * (rows + 1) // 2
    if first == 0:
        return rows * columns
    before = minimum(maximum(first, 0), columns)
    return minimum(rows * before + rows * (rows + 1) // 2, rows * columns)


def region_work(region: Graph) -> Work:
    """What the whole region does, however many calls it takes."""
    flops = as_expr(0)
    for op in region.ops:
        flops = flops + op_flops(op)
    users = region.users()
    moved = as_expr(0)
    for param in region.params:
        moved = moved + _read_bytes(param, users.get(param, []))
    for result in dict.fromkeys(region.results):
        moved = moved + result.type.bytes
    return Work(flops, moved)


def _read_bytes(param: Value, users: Sequence[Op]) -> Expr:
    """Of a table that is only looked up, only the elements looked up are counted."""
    looked_up = as_expr(0)
    for op in users:
        if op.name not in LOOKUPS or param in op.operands[1:]:
            return param.type.bytes
        looked_up = looked_up + op.result.type.bytes
    return minimum(param.type.bytes, looked_up)


# What is done in the time that a call takes by itself.
_CALL = Work(
    as_expr(int(CALL_SECONDS * ASSUMED_FLOPS)),
    as_expr(int(CALL_SECONDS * ASSUMED_BYTES)),
)


def chunk_work(loop: ChunkLoop) -> Work:
    """What all rounds of a loop over chunks do.

    The bytes of a round grow linearly with its rows, so the sum over all rounds is that
    of one round with all rows, and for every other round what it moves without a row.
    """
    (region,) = loop.op.regions
    extent, rows = loop.op.dim_attr("extent"), loop.op.dim_attr("rows")
    first = {region.sizes[1]: as_expr(0)}
    whole = {**first, **chunk_rows(region, extent)}
    none = {**first, **dict.fromkeys(whole, as_expr(0))}
    flops, moved, again = as_expr(0), loop.copied, as_expr(0)
    for kernel in loop.kernels:
        work = region_work(kernel)
        flops = flops + work.flops.substitute(whole)
        moved = moved + work.bytes.substitute(whole)
        again = again + work.bytes.substitute(none)
    rounds = ceildiv(extent, maximum(rows, 1))
    calls = rounds * len(loop.kernels)
    others = maximum(rounds - 1, 0)
    return Work(
        flops + calls * _CALL.flops, moved + others * again + calls * _CALL.bytes
    )


def call_work(module: Module) -> list[Work]:
    """The work of every call of a lowered module.

    A call that only prepares another (a copy into panels) moves its operands.
    """
    known: dict[Graph, Work] = {}
    loops: dict[ChunkLoop, Work] = {}
    found: list[Work] = []
    for call in calls_in(module.main):
        chunks = module.chunks.get(call.str_attr("callee"))
        if chunks is not None:
            if chunks not in loops:
                loops[chunks] = chunk_work(chunks)
            found.append(loops[chunks])
            continue
        graph = computed_by(call, module)
        if graph is None:
            found.append(Work(as_expr(0), sum_of(v.type.bytes for v in call.operands)))
            continue
        if graph not in known:
            known[graph] = region_work(graph)
        found.append(known[graph])
    return found
