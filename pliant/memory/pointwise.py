"""Whether a kernel may write a result over one of its operands.

It may if every element of the operand is read for the same element of the result, and
before that is written: then nothing is overwritten that is still to be read. This is
read off the loops. Each innermost body that loads the operand stores the result too,
behind all its loads and at the same index; a loop function that is called gets both
from their beginning and has the same form. Kernels store each element once.

    for i { local $v = %p[i]   %out[i] = sub($v, %g[i]) }          may
    for i { %out[i] = sub(%p[i + 1], %g[i]) }                      may not
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pliant.ir.loops import (
    Block,
    Buffer,
    Call,
    Dispatch,
    For,
    If,
    Load,
    LoopFunc,
    LoopValue,
    Role,
    Stmt,
    Store,
    Switch,
    Variant,
    operands,
)
from pliant.sym import Expr, as_expr


class _Breach(Exception):
    """An access that is not pointwise."""


def _loads(value: LoopValue, name: str) -> Iterator[tuple[Expr, ...]]:
    if isinstance(value, Load) and value.buffer.name == name:
        yield value.index
    for part in operands(value):
        yield from _loads(part, name)


def _values(stmt: Stmt) -> Iterator[LoopValue]:
    for field in ("value", "cond"):
        found = getattr(stmt, field, None)
        if found is not None:
            yield found


class _Walk:
    """One function, and those it calls."""

    def __init__(self, functions: Mapping[str, LoopFunc]) -> None:
        self.functions = functions

    def function(self, func: LoopFunc, source: str, result: str) -> None:
        self.block(func.body, source, result)

    def block(self, stmt: Stmt, source: str, result: str) -> None:
        """A body: what its own statements load, they store behind that."""
        body = stmt.body if isinstance(stmt, Block) else (stmt,)
        loaded: set[tuple[Expr, ...]] = set()
        stored: tuple[Expr, ...] | None = None
        for inner in body:
            if isinstance(inner, Call):
                self.call(inner, source, result)
            for value in _values(inner):
                found = set(_loads(value, source))
                if found and stored is not None:
                    raise _Breach
                loaded |= found
            if isinstance(inner, Store) and inner.buffer.name == result:
                if stored is not None or not loaded <= {inner.index}:
                    raise _Breach
                stored = inner.index
            for nested in _nested(inner):
                self.block(nested, source, result)
        if loaded and stored is None:
            raise _Breach
        if stored is not None and not loaded:
            raise _Breach

    def call(self, call: Call, source: str, result: str) -> None:
        func = self.functions[call.function]
        given = {source: "", result: ""}
        for buffer, (passed, index) in zip(func.buffers, call.arguments, strict=True):
            if passed.name not in given:
                continue
            if given[passed.name] or any(i != as_expr(0) for i in index):
                raise _Breach
            given[passed.name] = buffer.name
        if given[source] and given[result]:
            self.function(func, given[source], given[result])
        elif given[source] or given[result]:
            raise _Breach


def _nested(stmt: Stmt) -> tuple[Stmt, ...]:
    match stmt:
        case Block():
            return (stmt,)
        case For():
            return (stmt.body,)
        case If(_, then, otherwise):
            return (then,) if otherwise is None else (then, otherwise)
        case Switch(_, cases):
            return tuple(inner for _, inner in cases)
        case Dispatch(variants):
            return tuple(variant.body for variant in variants)
        case _:
            return ()


def is_pointwise(
    func: LoopFunc, source: str, result: str, functions: Mapping[str, LoopFunc]
) -> bool:
    """Whether the buffer `result` may be the buffer `source`."""
    by_name = {b.name: b for b in func.buffers}
    if by_name[source].dtype is not by_name[result].dtype:
        return False
    try:
        _Walk(functions).function(func, source, result)
    except _Breach:
        return False
    return True


# ---- the function that does so


def in_place(
    func: LoopFunc, names: frozenset[str], functions: dict[str, LoopFunc]
) -> LoopFunc:
    """The function with these results INOUT, so that code expects them elsewhere too.

    Those it calls with them are made the same way, and added to `functions`.
    """
    renamed = f"{func.name}_in_place"
    found = functions.get(renamed)
    mapping = {
        b: dataclasses.replace(b, role=Role.INOUT)
        for b in func.buffers
        if b.name in names
    }
    buffers = tuple(mapping.get(b, b) for b in func.buffers)
    if found is not None and found.buffers == buffers:
        return found
    while renamed in functions:
        renamed += "_"
    body = _rebuilt(func.body, mapping, names, functions)
    made = LoopFunc(renamed, func.sizes, buffers, body)
    functions[renamed] = made
    return made


def _rebuilt(
    node: Any,
    mapping: Mapping[Buffer, Buffer],
    names: frozenset[str],
    functions: dict[str, LoopFunc],
) -> Any:
    if isinstance(node, Buffer):
        return mapping.get(node, node)
    if isinstance(node, tuple):
        return tuple(_rebuilt(part, mapping, names, functions) for part in node)
    if isinstance(node, Call):
        callee = functions[node.function]
        passed = frozenset(
            b.name
            for b, (given, _) in zip(callee.buffers, node.arguments, strict=True)
            if given.name in names and b.role is Role.OUT
        )
        if passed:
            callee = in_place(callee, passed, functions)
        arguments = tuple((mapping.get(b, b), index) for b, index in node.arguments)
        return Call(callee.name, node.sizes, arguments)
    if isinstance(node, _KINDS):
        parts = {
            f.name: _rebuilt(getattr(node, f.name), mapping, names, functions)
            for f in dataclasses.fields(node)
        }
        return dataclasses.replace(node, **parts)
    return node


# Statements and values, and the variants of a Dispatch.
_KINDS = (*get_args(Stmt), *get_args(LoopValue), Variant)
