"""Whether a kernel may write the new value of a parameter over the old one.

It may if every element of the old value is read only for the same element of the new
one, and before that is written: then nothing is overwritten that is still needed. Each
body that loads the old value also stores the new one, after all its loads and at the
same index. A called loop function gets both buffers from their start and has the same
form.

    for i { local $v = %p[i]   %out[i] = sub($v, %g[i]) }          may
    for i { %out[i] = sub(%p[i + 1], %g[i]) }                      may not

This proof takes for granted that a kernel stores each element once, so it need not
compare the addresses of different iterations. `inplace_proof.py`, the proof for values
in between, does compare them; but the tiles of a matrix product, whose epilogue updates
a weight, are too complex for it.
"""

from __future__ import annotations

from collections.abc import Mapping

from pliant.ir.loop_walk import (
    VALUES,
    accesses,
    children,
    values,
)
from pliant.ir.loops import (
    Block,
    Call,
    CallLibrary,
    Load,
    LoopFunc,
    Stmt,
    Store,
    While,
)
from pliant.sym import Expr, as_expr


class _NotPointwise(Exception):
    """An access that is not pointwise."""


def _loads(stmt: Stmt, name: str) -> set[tuple[Expr, ...]]:
    """The indices at which a statement's own values load a buffer."""
    return {
        value.index
        for child in children(stmt)
        if type(child) in VALUES
        for value in values(child)
        if isinstance(value, Load) and value.buffer.name == name
    }


class _PointwiseWalk:
    """Checks one function, and those it calls."""

    def __init__(self, functions: Mapping[str, LoopFunc]) -> None:
        self.functions = functions

    def function(self, func: LoopFunc, source: str, result: str) -> None:
        self.block(func.body, source, result)

    def block(self, stmt: Stmt, source: str, result: str) -> None:
        """A body: its statements store at the indices they load, after the loads."""
        body = stmt.body if isinstance(stmt, Block) else (stmt,)
        loaded: set[tuple[Expr, ...]] = set()
        stored: tuple[Expr, ...] | None = None
        for inner in body:
            if isinstance(inner, Call):
                self.call(inner, source, result)
            # A function in C reads as it likes; a `while` stores again each round.
            if isinstance(inner, CallLibrary | While):
                touched = {buffer.name for buffer, _ in accesses(inner)}
                if touched & {source, result}:
                    raise _NotPointwise
            found = _loads(inner, source)
            if found and stored is not None:
                raise _NotPointwise
            loaded |= found
            if isinstance(inner, Store) and inner.buffer.name == result:
                if stored is not None or not loaded <= {inner.index}:
                    raise _NotPointwise
                stored = inner.index
            for nested in _nested(inner):
                self.block(nested, source, result)
        if loaded and stored is None:
            raise _NotPointwise
        if stored is not None and not loaded:
            raise _NotPointwise

    def call(self, call: Call, source: str, result: str) -> None:
        func = self.functions[call.function]
        given = {source: "", result: ""}
        for buffer, (passed, index) in zip(func.buffers, call.arguments, strict=True):
            if passed.name not in given:
                continue
            if given[passed.name] or any(i != as_expr(0) for i in index):
                raise _NotPointwise
            given[passed.name] = buffer.name
        if given[source] and given[result]:
            self.function(func, given[source], given[result])
        elif given[source] or given[result]:
            raise _NotPointwise


def _nested(stmt: Stmt) -> tuple[Stmt, ...]:
    """The bodies in a statement."""
    if isinstance(stmt, Block):
        return (stmt,)
    return tuple(child for child in children(stmt) if isinstance(child, Stmt))


def is_pointwise(
    func: LoopFunc, source: str, result: str, functions: Mapping[str, LoopFunc]
) -> bool:
    """Whether the buffer `result` may be the buffer `source`."""
    by_name = {b.name: b for b in func.buffers}
    if by_name[source].dtype is not by_name[result].dtype:
        return False
    try:
        _PointwiseWalk(functions).function(func, source, result)
    except _NotPointwise:
        return False
    return True
