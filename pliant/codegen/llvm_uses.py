"""What statements use, and how a vector loop can run."""

from __future__ import annotations

from collections.abc import Iterable

from pliant.ir.loop_walk import accesses, statements, values
from pliant.ir.loops import (
    Accumulate,
    Accumulator,
    Binary,
    Block,
    Call,
    For,
    Load,
    Read,
    Role,
    Stmt,
    Store,
    Unary,
)
from pliant.machine.target import Target
from pliant.sym import Expr
from pliant.sym.expr import Max, Min

# ---- what a statement uses


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

# An op that LLVM expands to many instructions weighs as much as this many.
_HEAVY = frozenset(
    {
        "exp",
        "decay",
        "expm1",
        "log",
        "log1p",
        "sin",
        "cos",
        "tan",
        "tanh",
        "erf",
        "sigmoid",
    }
    | {"pow", "atan2", "floordiv", "mod"}
)
_HEAVY_WEIGHT = 12


def _weight(loop: For) -> int:
    return sum(
        _HEAVY_WEIGHT if isinstance(v, Unary | Binary) and v.op in _HEAVY else 1
        for v in values(loop.body)
    )


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
