"""Walking and rewriting loop IR: the one traversal of its grammar.

The parts of a node are read from the grammar itself, the type annotations in
`loops.py`: a part is a node (a statement or a value), a dimension expression, a buffer,
or plain data, and parts may be inside tuples, conditions and variants. So a new kind of
node is walked and rewritten without a change here.

    children(node)       the nodes directly inside it, in order of execution
    rebuild(node, new)   the same with other children
    rewrite(node, f)     with f applied to every node in it, innermost first
    rewrite_statements   the same, for statements alone

A value that several places share is visited once and stays shared, and what does not
change stays the same object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from operator import is_
from typing import Any, TypeVar, get_args, get_type_hints

from pliant.ir.loops import (
    WORKER,
    Accumulate,
    Accumulator,
    Block,
    Buffer,
    Call,
    CallLibrary,
    For,
    Let,
    Load,
    LoopFunc,
    LoopValue,
    Prefetch,
    Read,
    Stmt,
    Store,
    Variant,
)
from pliant.sym import ZERO, Cond, DimLike, Expr

Node = Stmt | LoopValue
N = TypeVar("N", bound=Node)
Access = tuple[Buffer, tuple[Expr, ...]]

VALUES: frozenset[type] = frozenset(get_args(LoopValue))
STATEMENTS: frozenset[type] = frozenset(get_args(Stmt))
NODES: frozenset[type] = STATEMENTS | VALUES
_DIMS: frozenset[type] = frozenset({Expr})
_BUFFERS: frozenset[type] = frozenset({Buffer})
# Parts that are no nodes of their own, but have nodes or expressions inside.
_HOLDERS: frozenset[type] = frozenset({Variant, Cond})


# ---- the parts of a kind of node


def _holds(hint: Any, wanted: frozenset[type]) -> bool:
    """Whether something of a wanted type may stand in a field annotated so."""
    if hint in _HOLDERS:
        return any(_holds(inner, wanted) for inner in get_type_hints(hint).values())
    return hint in wanted or any(_holds(part, wanted) for part in get_args(hint))


def _fields_with(wanted: frozenset[type]) -> dict[type, tuple[str, ...]]:
    found: dict[type, tuple[str, ...]] = {}
    for kind in NODES | _HOLDERS:
        hints = get_type_hints(kind)
        names = (field.name for field in fields(kind))
        found[kind] = tuple(name for name in names if _holds(hints[name], wanted))
    return found


_WANTED = (NODES, STATEMENTS, _DIMS, _BUFFERS)
_FIELDS = {wanted: _fields_with(wanted) for wanted in _WANTED}
_ALL = {kind: tuple(f.name for f in fields(kind)) for kind in NODES | _HOLDERS}


def _collect(part: Any, wanted: frozenset[type], found: list[Any]) -> None:
    """Adds what is of a wanted type in a part."""
    kind = type(part)
    if kind in wanted:
        found.append(part)
    elif kind is tuple:
        for inner in part:
            if type(inner) in wanted:
                found.append(inner)
            else:
                _collect(inner, wanted, found)
    elif kind in _HOLDERS:
        for name in _FIELDS[wanted][kind]:
            _collect(getattr(part, name), wanted, found)


def _parts(node: Node, wanted: frozenset[type]) -> list[Any]:
    found: list[Any] = []
    for name in _FIELDS[wanted][type(node)]:
        part = getattr(node, name)
        if type(part) in wanted:  # as most are
            found.append(part)
        elif part is not None:
            _collect(part, wanted, found)
    return found


def _replaced(part: Any, wanted: frozenset[type], f: Callable[[Any], Any]) -> Any:
    """A part with f applied to what is of a wanted type in it."""
    kind = type(part)
    if kind in wanted:
        return f(part)
    if kind is tuple:
        new = [
            f(inner) if type(inner) in wanted else _replaced(inner, wanted, f)
            for inner in part
        ]
        return part if all(map(is_, part, new)) else tuple(new)
    return _with_parts(part, wanted, f) if kind in _HOLDERS else part


def _with_parts(node: Any, wanted: frozenset[type], f: Callable[[Any], Any]) -> Any:
    """A node with f applied to the parts of a wanted type that it has itself."""
    changed: dict[str, Any] | None = None
    kind = type(node)
    for name in _FIELDS[wanted][kind]:
        old = getattr(node, name)
        if old is None:
            continue
        new = f(old) if type(old) in wanted else _replaced(old, wanted, f)
        if new is not old:
            changed = {} if changed is None else changed
            changed[name] = new
    if changed is None:
        return node
    return kind(*(changed.get(n, getattr(node, n)) for n in _ALL[kind]))


# ---- one node


def children(node: Node) -> tuple[Node, ...]:
    """The statements and values directly inside a node."""
    return tuple(_parts(node, NODES))


def rebuild(node: N, new: Iterable[Node]) -> N:
    """The node with other children: as many, in the order of `children`."""
    given = iter(new)
    made: N = _with_parts(node, NODES, lambda _: next(given))
    return made


def operands(value: LoopValue) -> tuple[LoopValue, ...]:
    """The values a value is computed from: there are no other nodes in one."""
    return tuple(_parts(value, NODES))


def dims(node: Node) -> tuple[Expr, ...]:
    """The dimension expressions of a node itself: indices, bounds, guards, sizes."""
    return tuple(_parts(node, _DIMS))


def buffers(node: Node) -> tuple[Buffer, ...]:
    """The buffers that a node itself names."""
    return tuple(_parts(node, _BUFFERS))


# ---- all inside one


def statements(stmt: Stmt) -> Iterator[Stmt]:
    """The statement and all inside it, in execution order."""
    pending: list[Any] = [stmt]
    while pending:
        inner = pending.pop()
        yield inner
        pending += reversed(_parts(inner, STATEMENTS))


def walk(node: Node) -> Iterator[Node]:
    """The node and all inside it, in execution order, each object once."""
    seen: set[int] = set()
    pending: list[Node] = [node]
    while pending:
        inner = pending.pop()
        if id(inner) not in seen:
            seen.add(id(inner))
            yield inner
            pending += reversed(_parts(inner, NODES))


def values(node: Node) -> Iterator[LoopValue]:
    """Every value in a node, each object once."""
    inside: Iterator[Any] = walk(node)
    return (inner for inner in inside if type(inner) in VALUES)


def accesses(node: Node) -> Iterator[Access]:
    """The elements of buffers that are read, written, prefetched or passed on."""
    for inner in walk(node):
        match inner:
            case Store(buffer, index, _) | Load(buffer, index, _):
                yield buffer, index
            case Prefetch(buffer, index):
                yield buffer, index
            case Call(_, _, arguments):
                yield from arguments
            case CallLibrary(_, _, held):
                yield from ((buf, tuple(ZERO for _ in buf.shape)) for buf in held)
            case _:
                pass


def dims_in(stmts: Iterable[Stmt]) -> Iterator[Expr]:
    """Every dimension expression of some statements and of what is in them."""
    for stmt in stmts:
        for inner in walk(stmt):
            yield from dims(inner)


def free_symbols(node: Node) -> set[str]:
    """The integers that a node is computed from and does not bind itself.

    These are sizes, variables of loops around it and `worker`; the address of an
    element is computed from its buffer's strides too.
    """
    found: set[str] = set()
    _find_free(node, frozenset(), found, set())
    return found


def size_symbols(body: Stmt, held: Sequence[Buffer]) -> tuple[str, ...]:
    """The symbols a program uses and does not bind: its integer parameters."""
    used = free_symbols(body)
    for b in held:
        used.update(s for e in (*b.shape, *b.strides) for s in e.symbols())
    return tuple(sorted(used - {WORKER}))


def _find_free(
    node: Node,
    bound: frozenset[str],
    found: set[str],
    seen: set[tuple[int, frozenset[str]]],
) -> None:
    if (id(node), bound) in seen:
        return
    seen.add((id(node), bound))
    used = [*dims(node), *(s for buffer in buffers(node) for s in buffer.strides)]
    found.update(s for dim in used for s in dim.symbols() if s not in bound)
    if isinstance(node, For):
        bound = bound | {node.var}
    for child in children(node):
        _find_free(child, bound, found, seen)
        if isinstance(node, Block) and isinstance(child, Let):
            bound = bound | {child.name}


# ---- names of scalars


def accumulated(stmt: Stmt) -> set[str]:
    """The accumulators that a statement adds to."""
    return {s.name for s in statements(stmt) if isinstance(s, Accumulate)}


def declared(stmt: Stmt) -> set[str]:
    """The accumulators that begin in a statement."""
    return {s.name for s in statements(stmt) if isinstance(s, Accumulator)}


def reads(stmt: Stmt) -> list[str]:
    """The scalars that a statement reads, in order of their names."""
    return sorted({v.name for v in values(stmt) if isinstance(v, Read)})


# ---- rewriting


class _Rewriting:
    """No closure that refers to itself: the garbage collector need not free it."""

    def __init__(self, f: Callable[[Any], Node], inside: frozenset[type]) -> None:
        self.f, self.inside = f, inside
        self.made: dict[int, tuple[Node, Node]] = {}  # by identity; keeps the key alive

    def new(self, old: Node) -> Node:
        found = self.made.get(id(old))
        if found is None:
            found = old, self.f(_with_parts(old, self.inside, self.new))
            self.made[id(old)] = found
        return found[1]


def rewrite(node: N, f: Callable[[Any], Node]) -> N:
    """The node with f applied to all nodes inside it, innermost first, and to it."""
    result: Any = _Rewriting(f, NODES).new(node)
    return result  # type: ignore[no-any-return]  # of the kind of `node`


def rewrite_statements(stmt: Stmt, f: Callable[[Any], Stmt]) -> Stmt:
    """The same for the statements alone; values stay as they are."""
    result: Any = _Rewriting(f, STATEMENTS).new(stmt)
    return result  # type: ignore[no-any-return]  # f makes statements of them


def replace_dims(node: N, f: Callable[[Expr], Expr]) -> N:
    """The node with the dimension expressions of its own replaced."""
    made: N = _with_parts(node, _DIMS, f)
    return made


def map_dims(node: N, f: Callable[[Expr], Expr]) -> N:
    """The node with every dimension expression in it replaced."""
    return rewrite(node, lambda inner: replace_dims(inner, f))


def map_buffers(node: N, f: Callable[[Buffer], Buffer]) -> N:
    """The node with every buffer in it replaced."""
    return rewrite(node, lambda inner: _with_parts(inner, _BUFFERS, f))


def substitute(node: N, env: Mapping[str, DimLike]) -> N:
    """The node with symbols replaced that it does not bind itself."""
    return map_dims(node, lambda dim: dim.substitute(env))


def calling(func: LoopFunc, names: Mapping[str, str]) -> LoopFunc:
    """The function with others in the place of those that it calls."""

    def called(stmt: Stmt) -> Stmt:
        if isinstance(stmt, Call) and stmt.function in names:
            return replace(stmt, function=names[stmt.function])
        return stmt

    return replace(func, body=rewrite_statements(func.body, called)) if names else func
