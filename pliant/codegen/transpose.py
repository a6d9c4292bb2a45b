"""Copies that exchange two axes, by blocks in registers.

    for d = 0 to depth { for j = 0 to 32 vector { %panel[d, j] = %k[first + j, d] } }

Vectors along j would be gathers, an element at a time. Such a nest is done in squares
of as many rows as a vector has lanes: loads along d, exchanges between registers, and
stores along j. For 16 lanes that is 64 exchanges for 256 elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import llvmlite.ir as ll

from pliant.codegen.builder import Builder
from pliant.codegen.llvm_dims import Lanes
from pliant.codegen.llvm_types import I32, I64, constant
from pliant.codegen.sizes import NO_WRAP, as_value
from pliant.ir.access import linear_coefficient
from pliant.ir.loop_walk import free_symbols
from pliant.ir.loops import (
    Block,
    Buffer,
    Cast,
    For,
    Kind,
    Load,
    Stmt,
    Store,
)
from pliant.machine.target import Target
from pliant.sym import ONE, Expr

UNROLLED = 4  # squares beside each other; with more there is a loop over them

Flat = Callable[[Buffer, tuple[Expr, ...]], Expr]


@dataclass(frozen=True, slots=True)
class Turned:
    """A serial loop `along` what is read, with a vector loop `across` in it."""

    along: For
    across: For
    store: Store


def _only(stmt: Stmt) -> Stmt:
    while isinstance(stmt, Block) and len(stmt.body) == 1:
        stmt = stmt.body[0]
    return stmt


def turned(loop: For, flat: Flat, target: Target) -> Turned | None:
    """The nest, if it copies rows to columns."""
    across = _only(loop.body)
    if loop.step != 1 or not isinstance(across, For) or across.kind is not Kind.VECTOR:
        return None
    store = _only(across.body)
    size = across.end - across.begin
    if across.step != 1 or not size.is_const or not isinstance(store, Store):
        return None
    if not across.begin.is_const or size.value % target.lanes or not size.value:
        return None
    value = store.value.x if isinstance(store.value, Cast) else store.value
    if not isinstance(value, Load) or store.buffer.dtype.bytes not in (4, 8):
        return None
    source, result = flat(value.buffer, value.index), flat(store.buffer, store.index)
    fits = (
        linear_coefficient(source, loop.var) == ONE
        and linear_coefficient(source, across.var) not in (None, ONE)
        and linear_coefficient(result, across.var) == ONE
        and linear_coefficient(result, loop.var) is not None
    )
    if not fits or value.buffer.name == store.buffer.name:
        return None
    if value.where is not None and (
        not target.has("avx2") or loop.var in free_symbols(value.where)
    ):
        return None
    return Turned(loop, across, store)


def exchange(b: Builder, rows: Sequence[Any]) -> list[Any]:
    """The columns of a square of registers.

    In each round, rows that differ in one bit of their number exchange the lanes that
    differ in it: lane l of row r ends as lane r of row l.
    """
    square, lanes = list(rows), len(rows)
    bit = lanes // 2
    while bit:
        lower = [
            lane if not lane & bit else lanes + lane - bit for lane in range(lanes)
        ]
        upper = [
            lane + bit if not lane & bit else lanes + lane for lane in range(lanes)
        ]
        for r in range(lanes):
            if not r & bit:
                pair = square[r], square[r + bit]
                square[r] = b.shuffle_vector(*pair, _order(lower))
                square[r + bit] = b.shuffle_vector(*pair, _order(upper))
        bit //= 2
    return square


def _order(lanes: Sequence[int]) -> Any:
    typ = ll.VectorType(I32, len(lanes))
    return ll.Constant(typ, [constant(I32, lane) for lane in lanes])


def emit_turned(body: Any, nest: Turned, begin: Any, end: Any) -> None:
    """Whole squares; what is left along the rows runs as it is written.

    `body` is the code generator's, at the loop; `begin` and `end` are its bounds.
    """
    b, lanes = body.b, body.target.lanes
    first = as_value(begin)
    span = body.trips(nest.along, begin, end)
    whole = b.add(first, b.and_(span, constant(I64, -lanes)), flags=NO_WRAP)
    low, high = nest.across.begin.value, nest.across.end.value
    with body.loop(first, whole, lanes, nest.along.var) as base:
        if high - low <= UNROLLED * lanes:
            for column in range(low, high, lanes):
                _emit_square(body, nest, base, constant(I64, column))
        else:
            ends = constant(I64, low), constant(I64, high)
            with body.loop(*ends, lanes, nest.across.var) as column:
                _emit_square(body, nest, base, column)
    with body.loop(whole, as_value(end), 1, f"{nest.along.var}.rest") as at:
        body.dims.bind(nest.along.var, at)
        body.stmt(nest.along.body)


def _emit_square(body: Any, nest: Turned, base: Any, column: Any) -> None:
    lanes, rows = body.target.lanes, []
    for r in range(lanes):
        with body.region():
            body.dims.lanes = lanes
            body.dims.bind(nest.along.var, Lanes(base, 1))
            across = body.b.add(column, constant(I64, r), flags=NO_WRAP)
            body.dims.bind(nest.across.var, across)
            rows.append(body.value(nest.store.value))
    buffer, index = nest.store.buffer, nest.store.index
    for r, value in enumerate(exchange(body.b, rows)):
        with body.region():
            body.dims.lanes = lanes
            at = body.b.add(base, constant(I64, r), flags=NO_WRAP)
            body.dims.bind(nest.along.var, at)
            body.dims.bind(nest.across.var, Lanes(column, 1))
            body.memory.store(buffer, index, value, None)
