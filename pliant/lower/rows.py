"""How the rows of a reduction run: the three forms of a row kernel.

plain   parallel over rows; each stage of a row is a nest over it (`lower/runs.py`)

short   a row fits in a few vectors: its loops are unrolled under masks, and what
        later stages need again stays in registers

split   few, long rows: one row after another, each stage cut into one piece per
        thread; the pieces' results are combined in the order of the pieces

        for _t = 0 to threads parallel {      a stage that accumulates
          accumulator $part = max
          for _d1 = columns*_t//threads to columns*(_t + 1)//threads vector { .. }
          %pieces[_t, 0] = $part
        }
        accumulator $top = max
        for _t = 0 to threads { accumulate $top, %pieces[_t, 0] }
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pliant.ir.loop_walk import accumulated
from pliant.ir.loops import (
    Accumulate,
    Accumulator,
    Block,
    Buffer,
    For,
    Kind,
    Load,
    Read,
    Role,
    Stmt,
    Store,
    buffer,
)
from pliant.lower.domain import Axis
from pliant.lower.nest import block
from pliant.lower.runs import AxisSpan, Runs, in_place_of
from pliant.sym import Expr, as_expr, floordiv, maximum, minimum, sym

# The size symbol of every host function: the number of workers of a call.
THREADS = "threads"
INNER = "_inner"  # marks a stage's loop until the axes are merged
_PIECE = "_t"


class RowPlan(enum.Enum):
    PLAIN = "plain"
    SHORT = "short rows"
    SPLIT = "split rows"


def stage_loop(body: Sequence[Stmt]) -> Stmt:
    """A stage's loop over the row, before its axes are known."""
    return For(INNER, as_expr(0), as_expr(0), Block(tuple(body)))


def is_stage(stmt: Stmt) -> bool:
    return isinstance(stmt, For) and stmt.var == INNER


def _body(stage: Stmt) -> tuple[Stmt, ...]:
    assert isinstance(stage, For) and isinstance(stage.body, Block)
    return stage.body.body


def plain(row: Sequence[Stmt], reduced: Sequence[Axis], runs: Runs) -> list[Stmt]:
    """Every stage is a nest over the reduced axes that adds up in runs."""
    declared = {s.name: s for s in row if isinstance(s, Accumulator)}
    spans = [AxisSpan.whole(axis) for axis in reduced]
    out: list[Stmt] = []
    for stmt in row:
        if is_stage(stmt):
            here = [declared[name] for name in _accumulated(stmt, declared)]
            out += runs.nest(spans, _body(stmt), here)
        elif not isinstance(stmt, Accumulator):  # they are declared with their nest
            out.append(stmt)
    return out


def short(row: Sequence[Stmt], axis: Axis, room: int) -> list[Stmt]:
    """Every stage is a vector loop of at most `room` iterations."""
    end = minimum(axis.extent, room)
    return [
        For(axis.name, as_expr(0), end, block(_body(s)), Kind.VECTOR)
        if is_stage(s)
        else s
        for s in row
    ]


@dataclass(frozen=True, slots=True)
class RowSlot:
    """Where the partial results of an accumulator are kept: one element per thread."""

    buffer: Buffer
    number: int

    @property
    def index(self) -> tuple[Expr, ...]:
        return (sym(_PIECE), as_expr(self.number))


def slots(accumulators: Sequence[Accumulator]) -> dict[str, RowSlot]:
    """A slot for each accumulator; those of one type share a buffer."""
    found: dict[str, RowSlot] = {}
    for dtype in dict.fromkeys(a.dtype for a in accumulators):
        names = [a.name for a in accumulators if a.dtype is dtype]
        shape = (sym(THREADS), len(names))
        shared = buffer(f"pieces_{dtype}", dtype, shape, Role.WORK)
        found |= {name: RowSlot(shared, k) for k, name in enumerate(names)}
    return found


def split(
    row: Sequence[Stmt],
    reduced: Sequence[Axis],
    slots: Mapping[str, RowSlot],
    runs: Runs,
) -> list[Stmt]:
    """Every stage is a parallel loop over pieces; then their results are combined."""
    declared = {s.name: s for s in row if isinstance(s, Accumulator)}
    out: list[Stmt] = []
    for stmt in row:
        if isinstance(stmt, Accumulator):
            continue  # declared where its pieces are combined
        if not is_stage(stmt):
            out.append(stmt)
            continue
        here = [declared[name] for name in _accumulated(stmt, declared)]
        out.append(_in_pieces(_body(stmt), reduced, here, slots, runs))
        for accumulator in here:
            out += (accumulator, _combine(accumulator.name, slots[accumulator.name]))
    return out


def _accumulated(stmt: Stmt, declared: Mapping[str, Accumulator]) -> list[str]:
    found = accumulated(stmt)
    return [name for name in declared if name in found]


def _in_pieces(
    body: Sequence[Stmt],
    reduced: Sequence[Axis],
    accumulators: Sequence[Accumulator],
    slots: Mapping[str, RowSlot],
    runs: Runs,
) -> Stmt:
    piece, threads = sym(_PIECE), maximum(sym(THREADS), 1)
    first, *rest = reduced
    begin = floordiv(first.extent * piece, threads)
    end = floordiv(first.extent * (piece + 1), threads)
    spans = [AxisSpan(first.name, begin, end, first.extent), *map(AxisSpan.whole, rest)]
    parts = {a.name: replace(a, name=f"{a.name}_part") for a in accumulators}
    renamed = [in_place_of(s, parts) for s in body]
    inside = runs.nest(spans, renamed, list(parts.values()))
    for a in accumulators:
        part = Read(parts[a.name].name, a.dtype)
        inside.append(Store(slots[a.name].buffer, slots[a.name].index, part))
    return For(_PIECE, as_expr(0), sym(THREADS), block(inside), Kind.PARALLEL)


def _combine(name: str, slot: RowSlot) -> Stmt:
    one = Accumulate(name, Load(slot.buffer, slot.index))
    return For(_PIECE, as_expr(0), sym(THREADS), one)
