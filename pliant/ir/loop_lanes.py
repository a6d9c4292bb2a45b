"""Whether iterations of a loop can run side by side, one in each lane of a vector.

A value is uniform over the lanes, or varies by lane because it is computed from the
loop's variable. Values that decide control flow (bounds of inner loops, selectors) must
be uniform. A body cannot run by lanes if it has a call, registers of its own, another
vector or parallel loop, or a store to a uniform address.
"""

from __future__ import annotations

from dataclasses import dataclass

from pliant.ir.loop_walk import accumulated, declared, operands
from pliant.ir.loops import (
    Accumulator,
    Alloc,
    Block,
    Call,
    CallLibrary,
    Cast,
    Dispatch,
    For,
    If,
    Index,
    Kind,
    Let,
    Load,
    Local,
    LoopValue,
    Read,
    Stmt,
    Store,
    Switch,
    While,
    address,
)
from pliant.sym import Expr
from pliant.sym.expr import Max, Min


def runs_by_lanes(loop: For) -> bool:
    """Whether the iterations of a VECTOR loop can run side by side."""
    return _Lanes({loop.var}).allow(loop.body)


@dataclass(slots=True)
class _Lanes:
    varying: set[str]  # names whose value differs by lane

    def differs(self, expr: Expr) -> bool:
        return not self.varying.isdisjoint(expr.symbols())

    def value_differs(self, value: LoopValue) -> bool:
        match value:
            case Index(dim):
                return self.differs(dim)
            case Load(_, index, _) if any(map(self.differs, index)):
                return True
            case Read(name, _):
                return name in self.varying
            case _:
                return any(map(self.value_differs, operands(value)))

    def allow(self, stmt: Stmt) -> bool:
        match stmt:
            case Block(body):
                return all(map(self.allow, body))
            case For():
                alike = not (self.differs(stmt.begin) or self.differs(stmt.end))
                plain = stmt.kind in (Kind.SERIAL, Kind.UNROLL)
                return alike and plain and self.allow(stmt.body)
            case Store(buf, index, _):
                return self.differs(address(buf, index))
            case Let(name, value) | Local(name, _, value):
                if self.value_differs(value):
                    self.varying.add(name)
                return True
            case Accumulator(name, _, _):
                self.varying.add(name)
                return True
            case If(_, then, otherwise):
                return self.allow(then) and (otherwise is None or self.allow(otherwise))
            case Switch(selector, cases):
                inside = all(self.allow(body) for _, body in cases)
                return inside and not self.differs(selector)
            case Alloc() | Call() | CallLibrary() | Dispatch() | While():
                return False
            case _:
                return True


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


def outer_accumulators(loop: For) -> set[str]:
    """The accumulators from outside that a loop adds to."""
    return accumulated(loop.body) - declared(loop.body)


# ---- copies of rows to columns


@dataclass(frozen=True, slots=True)
class Copy:
    """A loop around another, both around nothing but a store of what is loaded."""

    across: For
    store: Store
    load: Load


def copy_in(loop: For) -> Copy | None:
    """The copy that a loop nest performs, one element per pair of indices, or None."""
    across = _only(loop.body)
    if not isinstance(across, For):
        return None
    store = _only(across.body)
    if not isinstance(store, Store):
        return None
    value = store.value.x if isinstance(store.value, Cast) else store.value
    return Copy(across, store, value) if isinstance(value, Load) else None


def _only(stmt: Stmt) -> Stmt:
    while isinstance(stmt, Block) and len(stmt.body) == 1:
        stmt = stmt.body[0]
    return stmt
