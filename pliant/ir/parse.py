"""Reads the text form of a module; the grammar heads `text.py`.

The text has every type, so nothing is inferred here: a printed module is read back
exactly, legal or not. `spec.verify` checks it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from pliant.ir.graph import (
    Attr,
    Constant,
    DataCheck,
    Graph,
    Library,
    Module,
    Op,
    Value,
)
from pliant.ir.loops import (
    DOT_PARTS,
    Accumulate,
    Accumulator,
    Alloc,
    Binary,
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
    Role,
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
from pliant.ir.text import fingerprint
from pliant.ir.types import DTYPES, NUMPY, DType, TensorType
from pliant.sym import Cond, Expr, Guard, as_expr
from pliant.sym import parse as parse_dim

T = TypeVar("T")


class ParseError(ValueError):
    """The text is not a module; says where, and what was expected there."""

    def __init__(self, message: str, line: int, column: int, near: str) -> None:
        self.line, self.column = line, column
        super().__init__(f"line {line}, column {column}: {message}\n  {near}")


# The data of a constant, from the hash that its text holds; None: unknown.
FindData = Callable[[str], np.ndarray | None]


def parse_module(
    text: str,
    constants: Mapping[str, Constant] | None = None,
    data: FindData | None = None,
) -> Module:
    """The module of a text.

    Data too large to print comes from `constants`, by name, or from `data`.
    """
    return _Parser(text, constants or {}, data).module()


def parse_graph(text: str) -> Graph:
    return _Parser(text, {}).only(_Parser.graph)


def parse_loop(text: str) -> LoopFunc:
    return _Parser(text, {}).only(_Parser.loop)


_SPACE = re.compile(r"(?:\s|#[^\n]*)*")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NAME = re.compile(r"[A-Za-z0-9_.]+")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_NUMBER = re.compile(r"-?(?:inf\b|nan\b|\d+(?:\.\d*)?(?:e[-+]?\d+)?)")
_LITERAL = re.compile(r"-?\d|-?inf\b|-?nan\b|true\b|false\b")
_FUNCTION = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?=\s*\()")
_SYMBOL = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*|`[^`]+`")
_HASH = re.compile(r"[a-z0-9]+:[0-9a-f]+")
_DIM_OPERAND = re.compile(r"\d+|[A-Za-z_][A-Za-z0-9_.]*|`[^`]+`")
_DIM_FUNCTION = re.compile(r"(?:min|max|ceildiv|floordiv|mod)\s*\(")
# A "%" that a name follows is a value; the operator prints with a space.
_DIM_OPERATOR = re.compile(r"\*\*|//|[-+*]|%(?=\s)")
_DIVIDES = re.compile(r"divides\b")
_SIGNS = {"==": "eq", "!=": "ne", "<=": "le", "<": "lt", "divides": "divides"}
_ROLES = {role.value: role for role in Role}
_KINDS = {kind.value: kind for kind in Kind}
_RESTS = {rest.value: rest for rest in Rest}


class _Scanner:
    """A position in the text, and the words it is made of."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0

    def error(self, message: str, at: int | None = None) -> ParseError:
        if at is None:
            self.skip()
            at = self.position
        line = self.text.count("\n", 0, at) + 1
        start = self.text.rfind("\n", 0, at) + 1
        stop = self.text.find("\n", start)
        near = self.text[start : stop if stop >= 0 else None]
        pointer = " " * (at - start) + "^"
        return ParseError(message, line, at - start + 1, f"{near}\n  {pointer}")

    def skip(self) -> None:
        match = _SPACE.match(self.text, self.position)
        assert match is not None
        self.position = match.end()

    def find(self, pattern: re.Pattern[str]) -> str | None:
        self.skip()
        match = pattern.match(self.text, self.position)
        if match is None:
            return None
        self.position = match.end()
        return match[0]

    def need(self, pattern: re.Pattern[str], what: str) -> str:
        found = self.find(pattern)
        if found is None:
            raise self.error(f"expected {what}")
        return found

    def peek(self, mark: str) -> bool:
        self.skip()
        if not self.text.startswith(mark, self.position):
            return False
        after = self.text[self.position + len(mark) : self.position + len(mark) + 1]
        return not (mark[-1].isalnum() and (after.isalnum() or after in ("_", ".")))

    def accept(self, mark: str) -> bool:
        if not self.peek(mark):
            return False
        self.position += len(mark)
        return True

    def expect(self, mark: str) -> None:
        if not self.accept(mark):
            raise self.error(f"expected '{mark}'")

    def list(self, item: Callable[[], T], closing: str) -> tuple[T, ...]:
        """Items between commas up to the closing mark, which is taken."""
        items: list[T] = []
        if self.accept(closing):
            return ()
        while True:
            items.append(item())
            if self.accept(closing):
                return tuple(items)
            if not self.accept(","):
                raise self.error(f"expected ',' or '{closing}'")

    def at_end(self) -> bool:
        self.skip()
        return self.position == len(self.text)

    def word(self, what: str) -> str:
        return self.need(_WORD, what)

    def name(self, sigil: str, what: str) -> str:
        if not self.accept(sigil):
            raise self.error(f"expected {what} ({sigil}name)")
        if self.text[self.position : self.position + 1] == '"':
            return self.string()
        return self.need(_NAME, what)

    def role(self) -> Role:
        self.skip()
        start = self.position
        role = _ROLES.get(self.word("a role"))
        if role is None:
            raise self.error(f"expected a role: {', '.join(_ROLES)}", start)
        return role

    def string(self) -> str:
        self.skip()
        start = self.position
        try:
            return str(json.loads(self.need(_STRING, "a string")))
        except json.JSONDecodeError as error:
            raise self.error(f"malformed string: {error}", start) from None

    def symbol(self) -> str:
        return self.need(_SYMBOL, "a symbol").strip("`")

    def integer(self) -> int:
        self.skip()
        start = self.position
        number = self.number()
        if isinstance(number, int):
            return number
        raise self.error(f"expected an integer, found {number!r}", start)

    def number(self) -> int | float:
        found = self.need(_NUMBER, "a number")
        if found.lstrip("-").isdigit():
            return int(found)
        return float(found)

    def literal(self) -> bool | int | float:
        """A number or a truth value."""
        if self.accept("true"):
            return True
        if self.accept("false"):
            return False
        return self.number()

    def dtype(self) -> DType:
        self.skip()
        start = self.position
        found = DTYPES.get(self.word("an element type"))
        if found is None:
            raise self.error(f"expected an element type: {', '.join(DTYPES)}", start)
        return found

    def dim(self) -> Expr:
        """The longest text that is an expression: operands between operators."""
        self.skip()
        start, depth = self.position, 0
        while True:
            while self.accept("-"):
                pass
            if self.find(_DIM_FUNCTION) is not None or self.accept("("):
                depth += 1
                continue
            self.need(_DIM_OPERAND, "a dimension")
            while depth and self.accept(")"):
                depth -= 1
            end = self.position
            if depth and self.accept(","):
                continue
            if self.find(_DIM_OPERATOR) is None:
                break
        if depth:
            raise self.error("expected ')'")
        self.position = end
        try:
            return parse_dim(self.text[start:end])
        except ValueError as error:
            raise self.error(f"malformed dimension: {error}", start) from None

    def dims(self) -> tuple[Expr, ...]:
        self.expect("[")
        return self.list(self.dim, "]")

    def cond(self) -> Cond:
        left = self.dim()
        if self.find(_DIVIDES):
            sign = "divides"
        else:
            self.skip()
            sign = next((s for s in _SIGNS if self.accept(s)), "")
            if not sign:
                raise self.error("expected '==', '!=', '<=', '<' or 'divides'")
        return Cond(_SIGNS[sign], left, self.dim())  # type: ignore[arg-type]

    def type(self) -> TensorType:
        dtype, shape = self.dtype(), self.dims()
        return TensorType(dtype, shape, self.dims() if self.accept("strides") else None)

    def named_attr(self) -> tuple[str, Attr]:
        name = self.word("an attribute")
        self.expect("=")
        return name, self.attr()

    def attr(self) -> Attr:
        if self.peek('"'):
            return self.string()
        if self.accept("<"):
            dim = self.dim()
            self.expect(">")
            return dim
        if self.peek("["):
            return self.dims()
        if self.accept("("):
            return self.list(self.attr, ")")
        if self.accept("none"):
            return None
        for text, dtype in DTYPES.items():
            if self.accept(text):
                return dtype
        self.skip()
        if _LITERAL.match(self.text, self.position):
            return self.literal()
        raise self.error("expected a number, string, dtype, <dim> or tuple")


class _Parser(_Scanner):
    def __init__(
        self,
        text: str,
        constants: Mapping[str, Constant],
        data: FindData | None = None,
    ) -> None:
        super().__init__(text)
        self.constants, self.data = constants, data

    def only(self, rule: Callable[[_Parser], T]) -> T:
        found = rule(self)
        if not self.at_end():
            raise self.error("expected the end of the text")
        return found

    def module(self) -> Module:
        graphs: dict[str, Graph] = {}
        loops: dict[str, LoopFunc] = {}
        libraries: dict[str, Library] = {}
        constants: dict[str, Constant] = {}
        checks: list[DataCheck] = []
        orders: list[tuple[int, ...]] = []
        inside: dict[str, tuple[Graph, ...]] = {}
        while not self.at_end():
            start = self.position
            if self.peek("graph"):
                self.add(graphs, self.graph(), start)
            elif self.accept("inside"):
                name = self.name("@", "a region")
                inside[name] = (*inside.get(name, ()), self.body())
            elif self.peek("loop"):
                self.add(loops, self.loop(), start)
            elif self.accept("library"):
                name = self.name("@", "a library function")
                self.expect("symbol")
                symbol = self.string()
                roles = self.list(self.role, ")") if self.accept("(") else None
                self.add(libraries, Library(name, symbol, roles), start)
            elif self.accept("constant"):
                self.add(constants, self.constant(), start)
            elif self.accept("check"):
                kind = self.word("the kind of a check")
                checks.append(DataCheck(kind, self.string()))
            elif self.accept("order"):
                self.expect("(")
                orders.append(self.list(self.integer, ")"))
            else:
                raise self.error(
                    "expected 'graph', 'inside', 'loop', 'library', 'constant', "
                    "'check' or 'order'"
                )
        return Module(
            graphs,
            loops,
            libraries,
            constants,
            tuple(checks),
            tuple(orders),
            inside=inside,
        )

    def add(self, table: dict[str, T], item: T, start: int) -> None:
        name = item.name  # type: ignore[attr-defined]
        if name in table:
            raise self.error(f"@{name} is defined twice", start)
        table[name] = item

    def constant(self) -> Constant:
        self.skip()
        start = self.position
        name = self.name("@", "a constant")
        self.expect(":")
        type_ = self.type()
        if not all(dim.is_const for dim in type_.shape):
            raise self.error(f"constant @{name} has a symbolic shape", start)
        if self.accept("data"):
            return self.data_of(name, type_, start)
        storage: np.dtype[Any] = NUMPY[type_.dtype]
        if type_.dtype is DType.BF16:
            storage = np.dtype(np.uint16)
        if self.accept("dense"):
            self.expect("[")
            array = np.array(self.list(self.literal, "]"), storage)
        else:
            self.expect("bytes")
            array = np.frombuffer(bytes.fromhex(self.string()), storage).copy()
        try:
            shaped = array.reshape([dim.value for dim in type_.shape])
        except ValueError:
            problem = f"@{name} has {array.size} elements, not {type_.numel}"
            raise self.error(problem, start) from None
        return Constant(name, type_, shaped)

    def data_of(self, name: str, type_: TensorType, start: int) -> Constant:
        self.skip()
        at = self.position
        wanted = self.need(_HASH, "a hash of the data")
        found = self.constants.get(name)
        if found is None and self.data is not None:
            array = self.data(wanted)
            found = None if array is None else Constant(name, type_, array)
        if found is None:
            raise self.error(f"the data of constant @{name} is not given", start)
        if found.type != type_:
            raise self.error(f"@{name} is given as {found.type}", start)
        if fingerprint(found) != wanted:
            raise self.error(f"@{name} is given with other data", at)
        return found

    # ---- graphs

    def graph(self) -> Graph:
        self.expect("graph")
        return self.body()

    def body(self) -> Graph:
        # A region captures no value, so each body starts its own scope.
        scope: dict[str, Value] = {}
        name = self.name("@", "a graph")
        self.expect("(")
        params = self.list(lambda: self.definition(scope), ")")
        sizes: tuple[str, ...] = ()
        if self.accept("sizes"):
            self.expect("(")
            sizes = self.list(self.symbol, ")")
        self.expect("{")
        constraints: list[Guard] = []
        while self.accept("constraint"):
            constraints.append(self.constraint())
        ops: list[Op] = []
        while not self.accept("return"):
            ops.append(self.op(scope))
        results = self.list(lambda: self.use(scope), "}")
        return Graph(name, params, tuple(ops), results, sizes, tuple(constraints))

    def definition(self, scope: dict[str, Value]) -> Value:
        self.skip()
        start = self.position
        name = self.name("%", "a value")
        self.expect(":")
        value = Value(name, self.type())
        if scope.setdefault(name, value) is not value:
            raise self.error(f"%{name} is defined twice", start)
        return value

    def use(self, scope: Mapping[str, Value]) -> Value:
        self.skip()
        start = self.position
        name = self.name("%", "a value")
        if name not in scope:
            raise self.error(f"%{name} is not defined here", start)
        return scope[name]

    def constraint(self) -> Guard:
        cond = self.cond()
        message = self.message() if self.accept("says") else ()
        origin = self.string() if self.accept("at") else ""
        return Guard(cond, message, origin)

    def message(self) -> tuple[str | Expr, ...]:
        self.skip()
        start = self.position
        pieces = self.attr()
        if not isinstance(pieces, tuple):
            raise self.error("expected a tuple of strings and <dim>s", start)
        kept = tuple(piece for piece in pieces if isinstance(piece, str | Expr))
        if len(kept) != len(pieces):
            raise self.error("expected only strings and <dim>s", start)
        return kept

    def op(self, scope: dict[str, Value]) -> Op:
        defined: dict[str, Value] = {}
        results: list[Value] = []
        self.skip()
        start = self.position
        while self.peek("%"):
            results.append(self.definition(defined))
            if not self.accept(","):
                self.expect("=")
                break
        name = self.word("an op, or 'return'")
        self.expect("(")
        operands = self.list(lambda: self.use(scope), ")")
        attrs: tuple[tuple[str, Attr], ...] = ()
        if self.accept("{"):
            attrs = self.list(self.named_attr, "}")
        loc = self.string() if self.accept("loc") else ""
        regions: list[Graph] = []
        while self.accept("region"):
            regions.append(self.body())
        for key, value in defined.items():
            if scope.setdefault(key, value) is not value:
                raise self.error(f"%{key} is defined twice", start)
        return Op(name, operands, attrs, tuple(results), tuple(regions), loc)

    # ---- loop functions

    def loop(self) -> LoopFunc:
        self.expect("loop")
        return _LoopParser(self).function()


class _LoopParser:
    """One loop function: the buffers and scalars named so far."""

    def __init__(self, scanner: _Scanner) -> None:
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
        if operator == "cast":
            x = self.value()
            at.expect(",")
            dtype = at.dtype()
            at.expect(")")
            return Cast(x, dtype)
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


def _alloc(parser: _LoopParser) -> Alloc:
    return Alloc(parser.buffer())


_STATEMENTS: dict[str, Callable[[_LoopParser], Stmt]] = {
    "for": _LoopParser.for_,
    "alloc": _alloc,
    "let": _LoopParser.let,
    "local": _LoopParser.local,
    "accumulator": _LoopParser.accumulator,
    "accumulate": _LoopParser.accumulate,
    "if": _LoopParser.if_,
    "while": _LoopParser.while_,
    "switch": _LoopParser.switch,
    "dispatch": _LoopParser.dispatch,
    "check": _LoopParser.check,
    "prefetch": _LoopParser.prefetch,
    "call": _LoopParser.call,
    "library": _LoopParser.library,
}
