"""Reads the text form of a module; the grammar heads `text.py`.

The text has every type, so nothing is inferred here: a printed module is read back
exactly, legal or not. `spec.verify` checks it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import numpy as np

from pliant.ir.graph import (
    Attr,
    ChunkLoop,
    Constant,
    DataCheck,
    Graph,
    Knob,
    Library,
    Module,
    Op,
    Value,
)
from pliant.ir.loops import (
    LoopFunc,
)
from pliant.ir.parse_loops import LoopParser
from pliant.ir.scanner import ParseError, Scanner
from pliant.ir.text import fingerprint
from pliant.ir.types import NUMPY, DType, TensorType
from pliant.sym import Expr, Guard

__all__ = ["ParseError", "parse_graph", "parse_loop", "parse_module"]


class _Named(Protocol):
    @property
    def name(self) -> str: ...


T = TypeVar("T")
NamedT = TypeVar("NamedT", bound=_Named)
_HASH = re.compile(r"[a-z0-9]+:[0-9a-f]+")

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


class _Parser(Scanner):
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
        knobs: dict[str, Knob] = {}
        chunks: dict[str, ChunkLoop] = {}
        while not self.at_end():
            start = self.position
            if self.peek("graph"):
                self.add(graphs, self.graph(), start)
            elif self.accept("inside"):
                name = self.name("@", "a region")
                inside[name] = (*inside.get(name, ()), self.body())
            elif self.accept("chunks"):
                name = self.name("@", "a loop function")
                chunks[name] = self.chunk_loop()
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
            elif self.accept("knob"):
                symbol = self.symbol()
                self.expect("of")
                extent = self.dim()
                self.expect("by")
                knobs[symbol] = Knob(extent, self.integer())
            else:
                raise self.error(
                    "expected 'graph', 'inside', 'chunks', 'loop', 'library', "
                    "'constant', 'check', 'order' or 'knob'"
                )
        return Module(
            graphs,
            loops,
            libraries,
            constants,
            tuple(checks),
            tuple(orders),
            inside=inside,
            knobs=knobs,
            chunks=chunks,
        )

    def chunk_loop(self) -> ChunkLoop:
        pairs: tuple[tuple[str, str], ...] = ()
        if self.accept("aligned"):
            self.expect("(")
            pairs = self.list(self.aligned, ")")
        start = self.position
        ops = self.body().ops
        if [op.name for op in ops] != ["chunk"]:
            raise self.error("expected a body with one op, `chunk`", start)
        return ChunkLoop(ops[0], frozenset(pairs))

    def aligned(self) -> tuple[str, str]:
        return self.name("%", "a buffer"), self.name("%", "a buffer")

    def add(self, table: dict[str, NamedT], item: NamedT, start: int) -> None:
        name = item.name
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
        storage = _storage(type_.dtype)
        if self.accept("dense"):
            self.expect("[")
            array = np.array(self.list(self.literal, "]"), storage)
        else:
            self.expect("bytes")
            array = np.frombuffer(bytes.fromhex(self.string()), storage).copy()
        return self.shaped(name, type_, array, start)

    def shaped(
        self, name: str, type_: TensorType, array: np.ndarray[Any, Any], start: int
    ) -> Constant:
        try:
            data = array.reshape([dim.value for dim in type_.shape])
        except ValueError:
            problem = f"@{name} has {array.size} elements, not {type_.numel}"
            raise self.error(problem, start) from None
        return Constant(name, type_, data)

    def data_of(self, name: str, type_: TensorType, start: int) -> Constant:
        self.skip()
        at = self.position
        wanted = self.need(_HASH, "a hash of the data")
        found = self.constants.get(name)
        if found is None and self.data is not None:
            array = self.data(wanted)
            if array is not None:
                # Constants of other types may have the same bytes: zeros, for example.
                data = array.reshape(-1).view(np.uint8).view(_storage(type_.dtype))
                found = self.shaped(name, type_, data, start)
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
        return LoopParser(self).function()


def _storage(dtype: DType) -> np.dtype[Any]:
    """The NumPy type that holds a constant's data; of bf16, its bits."""
    return np.dtype(np.uint16) if dtype is DType.BF16 else NUMPY[dtype]
