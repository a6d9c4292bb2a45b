"""What statements use, and how a vector loop can run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pliant.ir.loops import (
    WORKER,
    Accumulate,
    Accumulator,
    Binary,
    Block,
    Buffer,
    Call,
    Check,
    Dispatch,
    For,
    If,
    Index,
    Let,
    Load,
    Local,
    LoopValue,
    Prefetch,
    Read,
    Role,
    Stmt,
    Store,
    Switch,
    Unary,
    operands,
    statements,
)
from pliant.ir.opdef import Cost
from pliant.ir.ops_elementwise import SCALARS
from pliant.machine.target import Target
from pliant.sym import Expr
from pliant.sym.expr import Max, Min

# ---- what a statement uses


def roots(stmt: Stmt) -> tuple[LoopValue, ...]:
    match stmt:
        case Store(_, _, value) | Let(_, value) | Local(_, _, value):
            return (value,)
        case Accumulate(_, value) | If(value, _, _):
            return (value,)
        case Check(cond, _, value):
            return (cond,) if value is None else (cond, value)
        case _:
            return ()


def values(stmt: Stmt) -> Iterator[LoopValue]:
    """Every value in a statement, once per object."""
    seen: set[int] = set()
    for inner in statements(stmt):
        pending = list(roots(inner))
        while pending:
            value = pending.pop()
            if id(value) not in seen:
                seen.add(id(value))
                yield value
                pending += operands(value)


def accesses(stmt: Stmt) -> Iterator[tuple[Buffer, tuple[Expr, ...]]]:
    for inner in statements(stmt):
        if isinstance(inner, Store | Prefetch):
            yield inner.buffer, inner.index
        elif isinstance(inner, Call):
            yield from inner.arguments
    for value in values(stmt):
        if isinstance(value, Load):
            yield value.buffer, value.index


def symbols(loop: For) -> set[str]:
    """Names that the indices, bounds and selectors of a loop's body use."""
    dims: list[Expr] = []
    for inner in statements(loop.body):
        match inner:
            case For():
                dims += (inner.begin, inner.end, inner.grain)
            case Switch(selector, _):
                dims.append(selector)
            case Dispatch(variants):
                guards = (guard for variant in variants for guard in variant.guards)
                dims += (side for guard in guards for side in (guard.lhs, guard.rhs))
            case Call(_, sizes, _):
                dims += sizes
            case _:
                pass
    for buf, index in accesses(loop.body):
        dims += (*index, *buf.strides)
    dims += (v.dim for v in values(loop.body) if isinstance(v, Index))
    return {name for dim in dims for name in dim.symbols()} - {WORKER}


def reads(stmt: Stmt) -> list[str]:
    return sorted({v.name for v in values(stmt) if isinstance(v, Read)})


def accumulated(stmt: Stmt) -> set[str]:
    return {s.name for s in statements(stmt) if isinstance(s, Accumulate)}


def only_stores_registers(stmt: Stmt) -> bool:
    """Whether a masked branch may run with no lane set: nothing in it reads memory at
    one address for all lanes."""
    return all(isinstance(s, Block | Store) for s in statements(stmt)) and all(
        not isinstance(v, Load) or v.buffer.role is Role.REGISTER for v in values(stmt)
    )


# ---- what a vector loop can do

# An op that is many instructions weighs as much as this many.
_HEAVY_WEIGHT = 12


def _is_heavy(value: LoopValue) -> bool:
    return isinstance(value, Unary | Binary) and SCALARS[value.op].cost >= Cost.EXPANDED


def _weight(loop: For) -> int:
    return sum(_HEAVY_WEIGHT if _is_heavy(v) else 1 for v in values(loop.body))


def abreast(loop: For) -> int:
    """How many vectors each op of the body computes at once.

    Where a serial loop stands inside, several vectors walk it together: independent
    chains, and whole cache lines of every row that it passes.
    """
    declared = {s.name for s in statements(loop.body) if isinstance(s, Accumulator)}
    if not any(isinstance(s, For) for s in statements(loop.body)):
        return 1
    if accumulated(loop.body) - declared or _weight(loop) > 24:
        return 1
    return 4 if len(declared) <= 2 else 2


def is_multiple(loop: For, number: int) -> bool:
    """Whether the trips are plainly a multiple of a power of two."""
    whole = number * loop.step
    return _divides(whole, loop.begin) and _divides(whole, loop.end)


def _divides(number: int, expr: Expr) -> bool:
    for coefficient, mono in expr.terms:
        if coefficient % number == 0:
            continue
        match mono:
            case ((Min(args) | Max(args), 1),) if all(
                _divides(number, coefficient * arg) for arg in args
            ):
                continue
            case _:
                return False
    return True


def copies(loop: For) -> int:
    """How many vectors one iteration of the main loop handles.

    An accumulator's chain of dependent additions (4 cycles each, two can start per
    cycle) binds only while the rest of the body is short.
    """
    declared = {s.name for s in statements(loop.body) if isinstance(s, Accumulator)}
    if not accumulated(loop.body) - declared:
        return 1
    if any(isinstance(s, For) for s in statements(loop.body)):
        return 1
    weight = _weight(loop)
    return 4 if weight <= 8 else 2 if weight <= 24 else 1


def has_masks(target: Target, loop: For) -> bool:
    """AVX-512 masks every element size, AVX2 those of 4 and 8 bytes."""
    if target.has("avx512bw"):
        return True
    sizes = {buf.dtype.bytes for buf, _ in accesses(loop.body)}
    return target.has("avx2") and min(sizes, default=4) >= 4


# ---- cases


def calls_alike(
    cases: Iterable[tuple[int, Stmt]],
) -> tuple[list[dict[int, Call]], list[tuple[int, Stmt]]]:
    """Cases that do nothing but call, by what they hand over; and the others."""
    calls: dict[object, dict[int, Call]] = {}
    others: list[tuple[int, Stmt]] = []
    for number, body in cases:
        call = body
        while isinstance(call, Block) and len(call.body) == 1:
            (call,) = call.body
        if isinstance(call, Call):
            key = (call.sizes, call.arguments)
            calls.setdefault(key, {})[number] = call
        else:
            others.append((number, body))
    return list(calls.values()), others
