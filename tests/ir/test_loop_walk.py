"""The traversal of loop IR: every kind of node that the grammar has, with every part.

Nodes are made from the annotations of `loops.py`, each leaf a new one, so a kind of
node or a part that the traversal forgets is found missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest

from pliant.ir import loops
from pliant.ir.loop_walk import (
    accesses,
    buffers,
    children,
    dims,
    dims_in,
    free_symbols,
    map_buffers,
    map_dims,
    operands,
    rebuild,
    rewrite,
    rewrite_statements,
    statements,
    substitute,
    values,
    walk,
)
from pliant.ir.loops import (
    Alloc,
    Binary,
    Block,
    Buffer,
    Call,
    Dispatch,
    For,
    If,
    Index,
    Kind,
    Let,
    Load,
    LoopValue,
    Prefetch,
    Read,
    Rest,
    Role,
    Stmt,
    Store,
    Switch,
    Variant,
    Vectors,
    buffer,
)
from pliant.ir.types import DType
from pliant.sym import Cond, Expr, as_expr, eq, sym

STATEMENTS, VALUES = get_args(Stmt), get_args(LoopValue)
KINDS = (*STATEMENTS, *VALUES)
F32 = DType.F32
n, i, j, k = (sym(name) for name in "nijk")
X = buffer("x", F32, (n, n), Role.IN, (sym("pitch"), 1))
Y = buffer("y", F32, (n,), Role.OUT)


@dataclass(slots=True)
class Maker:
    """Makes nodes whose leaves are all different, and lists those."""

    deep: int  # how many levels of nodes there are below the first
    number: int = 0
    nodes: list[Any] = field(default_factory=list)  # directly inside the first one
    dims: list[Expr] = field(default_factory=list)  # of the first one itself
    buffers: list[Buffer] = field(default_factory=list)

    def fresh(self, word: str) -> str:
        self.number += 1
        return f"{word}{self.number}"

    def node(self, kind: type, level: int = 0) -> Any:
        hints = get_type_hints(kind)
        return kind(*(self.part(hints[name], level) for name in hints))

    def part(self, hint: Any, level: int) -> Any:
        if set(get_args(hint)) >= set(VALUES) or set(get_args(hint)) >= set(STATEMENTS):
            return self.child(hint, level)
        if get_origin(hint) in (UnionType, Union):
            return self.part(next(h for h in get_args(hint) if h is not NoneType), 0)
        if get_origin(hint) is tuple:
            kinds = get_args(hint)
            if kinds[-1] is ...:
                return tuple(self.part(kinds[0], level) for _ in range(2))
            return tuple(self.part(each, level) for each in kinds)
        return self.leaf(hint, level)

    def child(self, hint: Any, level: int) -> Any:
        kinds = VALUES if set(get_args(hint)) >= set(VALUES) else STATEMENTS
        self.number += 1
        inner: Any = Read(self.fresh("r"), F32)
        if level < self.deep:
            inner = self.node(kinds[self.number % len(kinds)], level + 1)
        elif kinds is STATEMENTS:
            inner = loops.Accumulator(self.fresh("a"), F32, "sum")
        if level == 0:
            self.nodes.append(inner)
        return inner

    def leaf(self, hint: Any, level: int) -> Any:
        if hint is Expr:
            made = sym(self.fresh("d"))
            if level == 0:
                self.dims.append(made)
            return made
        if hint is Buffer:
            some = buffer(self.fresh("b"), F32, (4,), Role.OUT, (sym(self.fresh("s")),))
            if level == 0:
                self.buffers.append(some)
            return some
        if hint in (Variant, Cond):
            return self.node(hint, level)
        if hint in (DType, Kind):
            return next(iter(hint))
        if hint is Vectors:
            return Vectors(4, Rest.MASKED)
        self.number += 1
        plain: dict[Any, Callable[[], Any]] = {
            int: lambda: self.number,
            float: lambda: float(self.number),
            str: lambda: self.fresh("w"),
        }
        return plain[hint]() if hint in plain else get_args(hint)[0]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_part_of_every_kind_is_found(kind: type) -> None:
    maker = Maker(deep=0)
    node = maker.node(kind)
    assert [id(c) for c in children(node)] == [id(c) for c in maker.nodes]
    assert list(dims(node)) == maker.dims
    assert list(buffers(node)) == maker.buffers
    if kind is not Alloc:
        assert [buf for buf, _ in accesses(node)] == maker.buffers
    assert all(index for _, index in accesses(node))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_is_rebuilt_with_other_children(kind: type) -> None:
    node = Maker(deep=0).node(kind)
    old = children(node)
    assert rebuild(node, old) is node
    other = Maker(deep=0, number=1000)
    other.node(kind)
    made = rebuild(node, other.nodes)
    assert type(made) is kind
    assert [id(c) for c in children(made)] == [id(c) for c in other.nodes]
    assert dims(made) == dims(node)
    assert rebuild(made, old) == node


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_deep_programs_are_walked_and_rewritten_everywhere(kind: type) -> None:
    for number in range(len(KINDS)):
        check_deep(Maker(deep=3, number=number).node(kind))


def check_deep(node: Any) -> None:
    inside = list(walk(node))
    assert inside[0] is node
    for inner in inside:
        assert all(any(c is w for w in inside) for c in children(inner))
    # Nothing to change: the same object.
    assert rewrite(node, lambda inner: inner) is node
    assert map_dims(node, lambda dim: dim) is node
    # All names changed: no old one is left, and as many.
    text = {s for inner in inside for d in dims(inner) for s in d.symbols()}
    moved = substitute(node, {name: sym(f"{name}_new") for name in text})
    left = [s for inner in walk(moved) for d in dims(inner) for s in d.symbols()]
    assert {f"{name}_new" for name in text} == set(left)
    back = substitute(moved, {f"{name}_new": sym(name) for name in text})
    assert back == node
    named = {b.name for inner in inside for b in buffers(inner)}
    swapped = map_buffers(node, lambda b: buffer(f"{b.name}_new", F32, (4,), b.role))
    found = {b.name for inner in walk(swapped) for b in buffers(inner)}
    assert found == {f"{name}_new" for name in named}


def test_the_grammar_names_every_kind() -> None:
    grammar = loops.__doc__ or ""
    for kind in KINDS:
        assert f"{kind.__name__}(" in grammar or f"{kind.__name__}((" in grammar, kind


def test_statements_and_values_are_in_execution_order() -> None:
    first, second = Load(X, (i, j)), Load(X, (j, i))
    store = Store(Y, (i,), Binary("add", first, second))
    guard = Read("flag", DType.BOOL)
    body = Block((If(guard, store), Prefetch(X, (i, i))))
    assert [type(s).__name__ for s in statements(body)] == [
        *("Block", "If", "Store", "Prefetch"),
    ]
    assert list(values(body)) == [guard, store.value, first, second]
    assert operands(store.value) == (first, second)
    assert list(accesses(body)) == [
        *((Y, (i,)), (X, (i, j)), (X, (j, i)), (X, (i, i))),
    ]


def test_a_shared_value_is_visited_once_and_stays_shared() -> None:
    shared = Load(X, (i, j))
    store = Store(Y, (i,), Binary("mul", shared, shared))
    assert list(values(store)) == [store.value, shared]
    moved = substitute(store, {"j": k})
    assert isinstance(moved.value, Binary)
    assert moved.value.x is moved.value.y
    assert moved.value.x == Load(X, (i, k))


def test_rewriting_goes_into_switches_and_variants() -> None:
    call = Call("old", (n,), ((Y, (as_expr(0),)),))
    variants = (Variant("one", (eq(n, 1),), call), Variant("any", (), call))
    body = Block((Switch(n, ((1, call), (2, call))), Dispatch(variants)))

    def renamed(node: Any) -> Any:
        return Call("new", node.sizes, node.arguments) if node == call else node

    made = rewrite(body, renamed)
    calls = [s.function for s in statements(made) if isinstance(s, Call)]
    assert calls == ["new"] * 4
    assert as_expr(7) in dims_in([substitute(body, {"n": 7})])


def test_rewriting_statements_visits_all_of_them_and_no_value() -> None:
    inner = Let("i", Index(sym("n")))
    body = Block(
        (If(Index(sym("c")), Block((inner,)), None), Let("j", Index(sym("m"))))
    )
    seen: list[Stmt] = []

    def renamed(stmt: Stmt) -> Stmt:
        seen.append(stmt)
        return Let("k", stmt.value) if stmt is inner else stmt

    made = rewrite_statements(body, renamed)
    assert {type(stmt) for stmt in seen} == {Let, Block, If}
    assert len(seen) == len(list(statements(body)))
    names = [stmt.name for stmt in statements(made) if isinstance(stmt, Let)]
    assert names == ["k", "j"]
    assert rewrite_statements(body, lambda stmt: stmt) is body


def test_free_symbols_end_where_a_name_is_bound() -> None:
    store = Store(Y, (i,), Load(X, (i, j)))
    loop = For("i", as_expr(0), sym("end"), store, Kind.PARALLEL, grain=sym("least"))
    assert free_symbols(store) == {"i", "j", "pitch"}
    assert free_symbols(loop) == {"j", "pitch", "end", "least"}
    let = Let("j", Index(sym("given")))
    assert free_symbols(Block((let, loop))) == {"given", "pitch", "end", "least"}
    # In front of it, the name is another's.
    assert "j" in free_symbols(Block((store, let)))
    # One object in two places: bound in the first only.
    assert "i" in free_symbols(Block((loop, store)))
