"""Whether a kernel may write a result over one of its operands.

It may if every element of the operand is read only for the same element of the result,
and before that is written: then nothing is overwritten that is still needed. The loops
show this. Each innermost body that loads the operand also stores the result, after all
its loads and at the same index. A called loop function gets both buffers from their
start and has the same form. Kernels store each element once.

    for i { local $v = %p[i]   %out[i] = sub($v, %g[i]) }          may
    for i { %out[i] = sub(%p[i + 1], %g[i]) }                      may not
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pliant.ir.loop_walk import (
    VALUES,
    Node,
    children,
    map_buffers,
    rewrite,
    values,
)
from pliant.ir.loops import (
    Block,
    Buffer,
    Call,
    CallLibrary,
    Load,
    LoopFunc,
    Role,
    Stmt,
    Store,
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
            held = inner.buffers if isinstance(inner, CallLibrary) else ()
            if any(b.name in (source, result) for b in held):
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


# ---- the function in place


def with_inout(
    func: LoopFunc, names: frozenset[str], functions: dict[str, LoopFunc]
) -> LoopFunc:
    """The function with these results INOUT, so that its code allows for aliasing.

    Functions that it calls with them are changed likewise, and added to `functions`.
    """
    renamed = f"{func.name}_in_place"
    found = functions.get(renamed)
    mapping = {b: replace(b, role=Role.INOUT) for b in func.buffers if b.name in names}
    buffers = tuple(mapping.get(b, b) for b in func.buffers)
    if found is not None and found.buffers == buffers:
        return found
    while renamed in functions:
        renamed += "_"
    body = _with_results(func.body, mapping, functions)
    made = LoopFunc(renamed, func.sizes, buffers, body)
    functions[renamed] = made
    return made


def _with_results(
    body: Stmt, mapping: Mapping[Buffer, Buffer], functions: dict[str, LoopFunc]
) -> Stmt:
    """The body with other buffers, calling the functions made for those."""
    names = {buffer.name for buffer in mapping}

    def calling(node: Node) -> Node:
        if not isinstance(node, Call):
            return node
        callee = functions[node.function]
        passed = frozenset(
            b.name
            for b, (given, _) in zip(callee.buffers, node.arguments, strict=True)
            if given.name in names and b.role is Role.OUT
        )
        if not passed:
            return node
        return replace(node, function=with_inout(callee, passed, functions).name)

    return map_buffers(rewrite(body, calling), lambda b: mapping.get(b, b))
