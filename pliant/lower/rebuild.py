"""Rewriting loop IR: one function over every dimension expression of a program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from pliant.ir.loops import (
    Accumulate,
    Binary,
    Block,
    Call,
    Cast,
    Check,
    Dispatch,
    Dot,
    Fma,
    For,
    If,
    Index,
    Let,
    Load,
    Local,
    LoopValue,
    Prefetch,
    Select,
    Stmt,
    Store,
    Switch,
    Unary,
    Variant,
    operands,
    statements,
)
from pliant.sym import Cond, Expr

MapDim = Callable[[Expr], Expr]


def map_value(value: LoopValue, f: MapDim) -> LoopValue:
    match value:
        case Index(dim):
            return Index(f(dim))
        case Load(buf, index, where):
            guard = None if where is None else map_value(where, f)
            return Load(buf, tuple(f(i) for i in index), guard)
        case Unary(op, x):
            return Unary(op, map_value(x, f))
        case Binary(op, x, y):
            return Binary(op, map_value(x, f), map_value(y, f))
        case Fma(x, y, z):
            return Fma(map_value(x, f), map_value(y, f), map_value(z, f))
        case Dot(parts, x, y, z):
            return Dot(parts, map_value(x, f), map_value(y, f), map_value(z, f))
        case Select(c, x, y):
            return Select(map_value(c, f), map_value(x, f), map_value(y, f))
        case Cast(x, dtype):
            return Cast(map_value(x, f), dtype)
        case _:
            return value


def map_stmt(stmt: Stmt, f: MapDim) -> Stmt:
    match stmt:
        case Block(body):
            return Block(tuple(map_stmt(s, f) for s in body))
        case For():
            return replace(
                stmt,
                begin=f(stmt.begin),
                end=f(stmt.end),
                grain=f(stmt.grain),
                body=map_stmt(stmt.body, f),
            )
        case Store(buf, index, value):
            return Store(buf, tuple(f(i) for i in index), map_value(value, f))
        case Let(name, value):
            return Let(name, map_value(value, f))
        case Local(name, dtype, value):
            return Local(name, dtype, map_value(value, f))
        case Accumulate(name, value):
            return Accumulate(name, map_value(value, f))
        case If(cond, then, otherwise):
            other = None if otherwise is None else map_stmt(otherwise, f)
            return If(map_value(cond, f), map_stmt(then, f), other)
        case Switch(selector, cases):
            return Switch(f(selector), tuple((n, map_stmt(s, f)) for n, s in cases))
        case Dispatch(variants):
            return Dispatch(tuple(_map_variant(v, f) for v in variants))
        case Check(cond, number, value):
            told = None if value is None else map_value(value, f)
            return Check(map_value(cond, f), number, told)
        case Prefetch(buf, index):
            return Prefetch(buf, tuple(f(i) for i in index))
        case Call(function, sizes, arguments):
            moved = tuple((b, tuple(f(i) for i in index)) for b, index in arguments)
            return Call(function, tuple(f(s) for s in sizes), moved)
        case _:
            return stmt


def _map_variant(variant: Variant, f: MapDim) -> Variant:
    guards = tuple(Cond(c.kind, f(c.lhs), f(c.rhs)) for c in variant.guards)
    return Variant(variant.name, guards, map_stmt(variant.body, f))


def calling(stmt: Stmt, old: str, new: str) -> Stmt:
    """The statement with calls of one function made calls of another."""
    match stmt:
        case Block(body):
            return Block(tuple(calling(s, old, new) for s in body))
        case For():
            return replace(stmt, body=calling(stmt.body, old, new))
        case If(cond, then, otherwise):
            other = None if otherwise is None else calling(otherwise, old, new)
            return If(cond, calling(then, old, new), other)
        case Call(function, sizes, arguments) if function == old:
            return Call(new, sizes, arguments)
        case _:
            return stmt


def values_in(stmt: Stmt) -> Iterator[LoopValue]:
    """Every value of a statement and of those inside it, parts included."""
    for inner in statements(stmt):
        match inner:
            case Store(_, _, value) | Let(_, value) | Local(_, _, value):
                yield from _parts(value)
            case Accumulate(_, value) | If(value, _, _):
                yield from _parts(value)
            case Check(cond, _, told):
                yield from _parts(cond)
                if told is not None:
                    yield from _parts(told)
            case _:
                pass


def _parts(value: LoopValue) -> Iterator[LoopValue]:
    yield value
    for part in operands(value):
        yield from _parts(part)


def dims_in(body: Sequence[Stmt]) -> Iterator[Expr]:
    """Every dimension expression of some statements: indices, bounds, conditions."""
    for stmt in body:
        for inner in statements(stmt):
            match inner:
                case For():
                    yield from (inner.begin, inner.end)
                case Store(_, index, _) | Prefetch(_, index):
                    yield from index
                case Switch(selector, _):
                    yield selector
                case Dispatch(variants):
                    for variant in variants:
                        for guard in variant.guards:
                            yield from (guard.lhs, guard.rhs)
                case Call(_, sizes, arguments):
                    yield from sizes
                    for _, index in arguments:
                        yield from index
                case _:
                    pass
        for value in values_in(stmt):
            match value:
                case Index(dim):
                    yield dim
                case Load(_, index, _):
                    yield from index
                case _:
                    pass
