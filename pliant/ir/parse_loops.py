"""Reads loop functions in text form; the grammar heads `text.py`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from pliant.ir.loops import (
    DOT_PARTS,
    Accumulate,
    Accumulator,
    Alloc,
    Binary,
    Bits,
    Block,
    Buffer,
    Call,
    CallLibrary,
    Cast,
    Check,
    Const,
    Dispatch,
    Dot,
    Fma,
    For,
    If,
    Index,
    Kind,
    Let,
    Load,
    Local,
    LoopFunc,
    LoopValue,
    Prefetch,
    Read,
    Rest,
    Select,
    Stmt,
    Store,
    Switch,
    Unary,
    Variant,
    Vectors,
    While,
    buffer,
)
from pliant.ir.scanner import Scanner
from pliant.ir.types import DType
from pliant.sym import Expr, as_expr

_FUNCTION = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?=\s*\()")
_KINDS = {kind.value: kind for kind in Kind}
_RESTS = {rest.value: rest for rest in Rest}


class LoopParser:
    """One loop function: the buffers and scalars named so far."""

    def __init__(self, scanner: Scanner) -> None:
        self.at = scanner
        self.buffers: dict[str, Buffer] = {}
        self.scalars: dict[str, DType] = {}

    def function(self) -> LoopFunc:
        at = self.at
        name = at.name("@", "a loop function")
        at.expect("(")
        sizes = at.list(at.symbol, ";")
        buffers = at.list(self.buffer, ")")
        return LoopFunc(name, sizes, buffers, self.inner())

    def buffer(self) -> Buffer:
        at = self.at
        role = at.role()
        name = at.name("%", "a buffer")
        at.expect(":")
        type_ = at.type()
        made = buffer(name, type_.dtype, type_.shape, role, type_.strides)
        self.buffers[name] = made
        return made

    def known(self) -> Buffer:
        at = self.at
        at.skip()
        start = at.position
        name = at.name("%", "a buffer")
        if name not in self.buffers:
            raise at.error(f"buffer %{name} is not defined here", start)
        return self.buffers[name]

    def access(self) -> tuple[Buffer, tuple[Expr, ...]]:
        return self.known(), self.at.dims()

    def inner(self) -> Stmt:
        if self.at.accept("do"):
            stmt = self.stmt()
            self.at.expect("end")
            return stmt
        if not self.at.peek("{"):
            raise self.at.error("expected '{' or 'do'")
        return self.stmt()

    def stmt(self) -> Stmt:
        at = self.at
        if at.accept("{"):
            body: list[Stmt] = []
            while not at.accept("}"):
                body.append(self.stmt())
            return Block(tuple(body))
        if at.peek("%"):
            target, index = self.access()
            at.expect("=")
            return Store(target, index, self.value())
        at.skip()
        start = at.position
        word = at.word("a statement")
        rule = _STATEMENTS.get(word)
        if rule is None:
            raise at.error(f"expected a statement: {', '.join(_STATEMENTS)}", start)
        return rule(self)

    def for_(self) -> For:
        at = self.at
        var = at.symbol()
        at.expect("=")
        begin = at.dim()
        at.expect("to")
        end = at.dim()
        step = at.integer() if at.accept("step") else 1
        kind = next((k for text, k in _KINDS.items() if at.accept(text)), Kind.SERIAL)
        grain = at.dim() if at.accept("grain") else as_expr(1)
        vectors = self.vectors() if at.accept("lanes") else None
        return For(var, begin, end, self.inner(), kind, step, grain, vectors)

    def vectors(self) -> Vectors:
        at = self.at
        lanes = at.integer()
        rest = next((r for text, r in _RESTS.items() if at.accept(text)), None)
        if rest is None:
            raise at.error(f"expected one of {', '.join(_RESTS)}")
        copies = at.integer() if at.accept("copies") else 1
        jam = at.integer() if at.accept("jam") else 1
        most = at.integer() if at.accept("most") else None
        return Vectors(lanes, rest, copies, jam, most)

    def let(self) -> Let:
        name = self.at.symbol()
        self.at.expect("=")
        return Let(name, self.value())

    def local(self) -> Local:
        name, dtype = self.declaration()
        value = self.value()
        self.scalars[name] = dtype
        return Local(name, dtype, value)

    def accumulator(self) -> Accumulator:
        name, dtype = self.declaration()
        self.scalars[name] = dtype
        return Accumulator(name, dtype, self.at.word("a reduction"))

    def declaration(self) -> tuple[str, DType]:
        name = self.at.name("$", "a scalar")
        self.at.expect(":")
        dtype = self.at.dtype()
        self.at.expect("=")
        return name, dtype

    def accumulate(self) -> Accumulate:
        name = self.at.name("$", "an accumulator")
        self.at.expect(",")
        return Accumulate(name, self.value())

    def if_(self) -> If:
        cond, then = self.value(), self.inner()
        return If(cond, then, self.inner() if self.at.accept("else") else None)

    def while_(self) -> While:
        return While(self.value(), self.inner())

    def switch(self) -> Switch:
        at = self.at
        selector = at.dim()
        at.expect("{")
        cases: list[tuple[int, Stmt]] = []
        while not at.accept("}"):
            at.expect("case")
            cases.append((at.integer(), self.inner()))
        return Switch(selector, tuple(cases))

    def dispatch(self) -> Dispatch:
        at = self.at
        at.expect("{")
        variants: list[Variant] = []
        while not at.accept("}"):
            at.expect("variant")
            name, guards = at.string(), []
            if at.accept("when"):
                guards.append(at.cond())
                while at.accept(","):
                    guards.append(at.cond())
            variants.append(Variant(name, tuple(guards), self.inner()))
        return Dispatch(tuple(variants))

    def check(self) -> Check:
        cond = self.value()
        self.at.expect("else")
        number = self.at.integer()
        return Check(cond, number, self.value() if self.at.accept("of") else None)

    def prefetch(self) -> Prefetch:
        return Prefetch(*self.access())

    def call(self) -> Call:
        at = self.at
        name = at.name("@", "a loop function")
        at.expect("(")
        sizes = at.list(at.dim, ";")
        return Call(name, sizes, at.list(self.access, ")"))

    def library(self) -> CallLibrary:
        at = self.at
        symbol = at.string()
        at.expect("computes")
        op = at.word("an op")
        at.expect("{")
        settings: Any = at.list(at.named_attr, "}")
        at.expect("(")
        sizes = at.list(at.dim, ";")
        return CallLibrary(symbol, sizes, at.list(self.known, ")"), op, settings)

    def value(self) -> LoopValue:
        at = self.at
        if at.peek("%"):
            source, index = self.access()
            return Load(source, index, self.value() if at.accept("where") else None)
        if at.peek("$"):
            return self.read()
        at.skip()
        start = at.position
        operator = at.find(_FUNCTION)
        if operator is None:
            number = at.literal()
            at.expect(":")
            return Const(number, at.dtype())
        at.expect("(")
        if operator == "index":
            dim = at.dim()
            at.expect(")")
            return Index(dim)
        if operator in ("cast", "bits"):
            x = self.value()
            at.expect(",")
            dtype = at.dtype()
            at.expect(")")
            return Cast(x, dtype) if operator == "cast" else Bits(x, dtype)
        match operator, at.list(self.value, ")"):
            case "fma", (x, y, z):
                return Fma(x, y, z)
            case _, (x, y, z) if operator.removeprefix("dot_") in DOT_PARTS:
                return Dot(operator.removeprefix("dot_"), x, y, z)
            case "select", (x, y, z):
                return Select(x, y, z)
            case _, (x,):
                return Unary(operator, x)
            case _, (x, y):
                return Binary(operator, x, y)
            case _, arguments:
                raise at.error(f"{operator} of {len(arguments)} operands", start)

    def read(self) -> Read:
        at = self.at
        at.skip()
        start = at.position
        name = at.name("$", "a scalar")
        if at.accept(":"):
            return Read(name, at.dtype())
        if name not in self.scalars:
            raise at.error(f"${name} is not defined here", start)
        return Read(name, self.scalars[name])


def _alloc(parser: LoopParser) -> Alloc:
    return Alloc(parser.buffer())


_STATEMENTS: dict[str, Callable[[LoopParser], Stmt]] = {
    "for": LoopParser.for_,
    "alloc": _alloc,
    "let": LoopParser.let,
    "local": LoopParser.local,
    "accumulator": LoopParser.accumulator,
    "accumulate": LoopParser.accumulate,
    "if": LoopParser.if_,
    "while": LoopParser.while_,
    "switch": LoopParser.switch,
    "dispatch": LoopParser.dispatch,
    "check": LoopParser.check,
    "prefetch": LoopParser.prefetch,
    "call": LoopParser.call,
    "library": LoopParser.library,
}
