"""Whether a loop function may write one of its results over one of its inputs.

That is so if no element is read after it was written, by any iteration:

    for i parallel { for j { y[n*i + j] = f(x[n*i + j]) } }       yes
    for i parallel { s = sum of x[n*i + j]; for j { y[n*i + j] = x[n*i + j] / s } }  yes
    for i parallel { y[i] = x[n - 1 - i] }                        no

For each pair of a load and a store: in one iteration of the loops around both, the load
comes first; and what different iterations touch is disjoint. For that, addresses are
numbers of mixed radix with the variables of those loops as digits: each digit's weight
times its extent is at most the weight of the next. All is proved for every size, once
per function. Which variant runs (`Dispatch`) depends on sizes alone, so accesses of
different variants never meet; vector lanes and workers only permute iterations.

This proof takes nothing for granted of the kernel. `update_proof.py` is for kernels
whose addresses are too complex for it, and rests on what kernels have in common.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations

from pliant.ir.access import linear_coefficient
from pliant.ir.loop_walk import children, values
from pliant.ir.loops import (
    Block,
    Buffer,
    Call,
    CallLibrary,
    Dispatch,
    For,
    Index,
    Let,
    Load,
    LoopFunc,
    LoopValue,
    Stmt,
    Store,
    While,
)
from pliant.sym import (
    Expr,
    Facts,
    FloorDiv,
    Max,
    Min,
    Mod,
    as_expr,
    ceildiv,
    floordiv,
    ge,
    le,
    sym,
)
from pliant.sym.expr import lift

_MOST_DIGITS = 5


@dataclass(slots=True)
class Digit:
    """A variable from 0 to below its extent; None: only the loop's end bounds it."""

    name: str
    extents: tuple[Expr, ...]
    place: Expr  # the loop's variable has it at this weight


@dataclass(slots=True)
class _Loop:
    """A loop in the walk: its variable from 0, or the digits that it is split into."""

    variable: Digit
    total: Expr
    split: list[Digit] = field(default_factory=list)

    def digits(self) -> list[Digit] | None:
        """What determines the iteration; None if the parts are not all of it."""
        if not self.split:
            return [self.variable]
        place = as_expr(1)
        chain = sorted(self.split, key=lambda d: not d.extents)
        found: list[Digit] = []
        while chain:
            part = next((d for d in chain if d.place == place), None)
            if part is None:
                return None
            chain.remove(part)
            found.append(part)
            if not part.extents:
                return found if not chain else None
            place = place * part.extents[0]
        return None  # the highest digit is missing


@dataclass(frozen=True, slots=True)
class _Access:
    address: Expr
    loops: tuple[_Loop, ...]
    choices: Mapping[int, int]  # variants that it is in, by number of the dispatch
    number: int  # in the order of the text
    writes: bool


class _Opaque(Exception):
    """Something that the proof does not analyse."""


class _Walk:
    """Collects the accesses of two buffers."""

    def __init__(self, read: Buffer, written: Buffer) -> None:
        self.read, self.written = read, written
        self.found: list[_Access] = []
        self.fresh = 0
        self.loops: tuple[_Loop, ...] = ()
        self.names: dict[str, Expr] = {}  # loop variables and lets, in digits
        self.unknown: set[str] = set()
        self.choices: dict[int, int] = {}

    def stmt(self, stmt: Stmt) -> None:
        match stmt:
            case Block(body):
                before = dict(self.names)
                for part in body:
                    self.stmt(part)
                self.names = before
            case For():
                self.loop(stmt)
            case Let(name, value):
                self.value(value)
                self.let(name, value)
            case Store(buffer, index, value):
                self.value(value)
                if buffer.name == self.written.name:
                    self.access(index, buffer, writes=True)
            case Dispatch(variants):
                self.fresh += 1
                number, outer = self.fresh, self.choices
                for k, variant in enumerate(variants):
                    self.choices = {**outer, number: k}
                    self.stmt(variant.body)
                self.choices = outer
            case While(cond, body):
                count = len(self.found)
                self.value(cond)
                self.stmt(body)
                if len(self.found) > count:  # the next round does it again
                    raise _Opaque
            case Call(_, _, arguments):
                names = {self.read.name, self.written.name}
                if any(buffer.name in names for buffer, _ in arguments):
                    raise _Opaque
            case CallLibrary(_, _, buffers):
                if self.read in buffers or self.written in buffers:
                    raise _Opaque
            case _:  # touches neither buffer itself
                for inner in children(stmt):
                    if isinstance(inner, Stmt):
                        self.stmt(inner)
                    else:
                        self.value(inner)

    def value(self, value: LoopValue) -> None:
        for part in values(value):
            if isinstance(part, Load) and part.buffer.name == self.read.name:
                self.access(part.index, part.buffer, writes=False)

    def access(self, index: Sequence[Expr], buffer: Buffer, *, writes: bool) -> None:
        address = as_expr(0)
        for i, stride in zip(index, buffer.strides, strict=True):
            address = address + i.substitute(self.names) * stride
        if self.unknown & set(address.symbols()):
            raise _Opaque
        self.found.append(
            _Access(address, self.loops, self.choices, len(self.found), writes)
        )

    def loop(self, loop: For) -> None:
        self.fresh += 1
        begin, end = (e.substitute(self.names) for e in (loop.begin, loop.end))
        name = f"{loop.var}.{self.fresh}"
        lengths = tuple(
            sorted(
                (ceildiv(e - begin, loop.step) for e in _at_most(end)),
                key=lambda e: len(e.symbols()),
            )
        )
        variable = Digit(name, lengths, as_expr(1))
        outer, names = self.loops, dict(self.names)
        self.loops = (*outer, _Loop(variable, end - begin))
        self.names[loop.var] = begin + loop.step * sym(name)
        self.stmt(loop.body)
        self.loops, self.names = outer, names

    def let(self, name: str, value: LoopValue) -> None:
        self.fresh += 1
        own = f"{name}.{self.fresh}"
        if not isinstance(value, Index):
            self.unknown.add(own)
            self.names[name] = sym(own)
            return
        dim = value.dim.substitute(self.names)
        digit = self.digit(own, dim)
        if digit is None:
            self.names[name] = dim
        else:
            self.names[name] = sym(own)

    def digit(self, own: str, dim: Expr) -> Digit | None:
        """Registers a let that is a digit of a loop's variable: v // a % e."""
        for loop in self.loops:
            variable = sym(loop.variable.name)
            parts = _quotient(dim, variable)
            if parts is None:
                continue
            place, base = parts
            extents: tuple[Expr, ...] = ()
            if base is not None:
                # Inside the loop no factor of its number of iterations is 0.
                size = _without_floor(base)
                factor = floordiv(loop.total, size) * size == loop.total
                extents = (size if factor else base,)
            digit = Digit(own, extents, _plain_place(place, loop.total))
            loop.split.append(digit)
            return digit
        return None


def _at_most(end: Expr) -> tuple[Expr, ...]:
    return end.atom.args if isinstance(end.atom, Min) else (end,)


def _without_floor(size: Expr) -> Expr:
    """n of max(n, 1)."""
    match size.atom:
        case Max((a, b)):
            if a == as_expr(1):
                return b
            if b == as_expr(1):
                return a
        case _:
            pass
    return size


def _plain_place(place: Expr, total: Expr) -> Expr:
    """A product of extents, max(n, 1) being n where n divides the total."""
    if len(place.terms) != 1:
        return place
    ((coefficient, factors),) = place.terms
    found = as_expr(coefficient)
    for atom, power in factors:
        whole = lift(atom)
        plain = _without_floor(whole)
        divides = floordiv(total, plain) * plain == total
        found = found * (plain if divides else whole) ** power
    return found


def _quotient(dim: Expr, variable: Expr) -> tuple[Expr, Expr | None] | None:
    """(a, e) of v // a % e, with e None for v // a, if dim is that; v alone is not."""
    match dim.atom:
        case Mod(num, base):
            if num == variable:
                return as_expr(1), base
            inner = _quotient(num, variable)
            return None if inner is None or inner[1] is not None else (inner[0], base)
        case FloorDiv(num, den):
            if num == variable:
                return den, None
            inner = _quotient(num, variable)
            if inner is None or inner[1] is not None:
                return None
            return inner[0] * den, None
        case _:
            return None


# ---- the proof


def may_share(func: LoopFunc, read: Buffer, written: Buffer) -> bool:
    """Whether `written` may be the same memory as `read`, at the same strides."""
    walk = _Walk(read, written)
    try:
        walk.stmt(func.body)
    except _Opaque:
        return False
    loads = [a for a in walk.found if not a.writes]
    stores = [a for a in walk.found if a.writes]
    return all(
        _apart(load, store) or _never_late(load, store)
        for load in loads
        for store in stores
    )


def _apart(load: _Access, store: _Access) -> bool:
    """Whether they are in different variants of one dispatch."""
    return any(store.choices.get(number, k) != k for number, k in load.choices.items())


def _never_late(load: _Access, store: _Access) -> bool:
    """Whether the load never reads what the store has written."""
    if load.number > store.number:
        return False
    common: list[_Loop] = []
    for a, b in zip(load.loops, store.loops, strict=False):
        if a is not b:
            break
        common.append(a)
    digits: list[Digit] = []
    for loop in common:
        parts = loop.digits()
        if parts is None:
            return False
        digits += parts
    return _disjoint(load, store, digits, common)


def _disjoint(
    load: _Access, store: _Access, digits: Sequence[Digit], common: Sequence[_Loop]
) -> bool:
    """Whether different digits mean different addresses."""
    weights: list[Expr] = []
    for digit in digits:
        mine = linear_coefficient(load.address, digit.name)
        other = linear_coefficient(store.address, digit.name)
        if mine is None or mine != other:
            return False
        weights.append(mine)
    zero = {digit.name: 0 for digit in digits}
    hidden = {loop.variable.name for loop in common} - zero.keys()
    facts = Facts()
    spans: list[Expr] = []
    bases: list[Expr] = []
    for access in (load, store):
        rest = access.address.substitute(zero)
        if hidden & set(rest.symbols()):
            return False  # besides its digits, the variable itself
        span = _span(rest, access.loops[len(common) :], facts)
        if span is None:
            return False
        bases.append(span[0])
        spans.append(span[1])
    if bases[0] != bases[1]:
        return False
    pairs = _unblocked(list(zip(digits, weights, strict=True)), facts)
    if len(pairs) > _MOST_DIGITS:
        return False
    return any(
        all(_ascends(span, order, facts) for span in spans)
        for order in permutations(pairs)
    )


def _unblocked(
    pairs: Sequence[tuple[Digit, Expr]], facts: Facts
) -> list[tuple[Digit, Expr]]:
    """A loop that runs through blocks of c, the last one shorter, as one digit.

    for p < ceildiv(n, c) { for i < min(c, n - c*p) }   ->   c*p + i < n
    """
    for block, far in pairs:
        for inner, near in pairs:
            whole = _whole(block, inner, facts)
            if whole is None or far != whole[0] * near:
                continue
            rest = [p for p in pairs if p[0] is not block and p[0] is not inner]
            joined = Digit(inner.name, (whole[1],), as_expr(1))
            return _unblocked([*rest, (joined, near)], facts)
    return list(pairs)


def _whole(block: Digit, inner: Digit, facts: Facts) -> tuple[Expr, Expr] | None:
    """(c, n) if a digit is below both c and n - c times another digit."""
    for end in inner.extents:
        step = linear_coefficient(end, block.name)
        if step is None or step == as_expr(0):
            continue
        total = end - step * sym(block.name)
        if any(facts.prove(le(e, -step)) for e in inner.extents if e is not end):
            return -step, total
    return None


def _span(rest: Expr, loops: Sequence[_Loop], facts: Facts) -> tuple[Expr, Expr] | None:
    """(base, length) such that base <= address < base + length over inner loops."""
    pairs: list[tuple[Digit, Expr]] = []
    for loop in loops:
        name = loop.variable.name
        if loop.split:
            return None
        weight = linear_coefficient(rest, name)
        if weight is None or not facts.prove(ge(weight, 0)):
            return None
        rest = rest.substitute({name: 0})
        if weight != as_expr(0):
            pairs.append((loop.variable, weight))
    length = as_expr(1)
    for digit, weight in _unblocked(pairs, facts):
        length = length + weight * (digit.extents[0] - 1)
    return rest, length


def _ascends(length: Expr, order: Sequence[tuple[Digit, Expr]], facts: Facts) -> bool:
    """Whether every weight is at least what all lower digits can add up to."""
    for k, (digit, weight) in enumerate(order):
        if not facts.prove(le(length, weight)):
            return False
        if k + 1 < len(order):
            if not digit.extents:
                return False
            length = _shortest(weight, digit, order[k + 1][1], facts)
    return True


def _shortest(weight: Expr, digit: Digit, wanted: Expr, facts: Facts) -> Expr:
    """Of the bounds of a digit, times its weight, one that fits if any does."""
    bounds = [weight * extent for extent in digit.extents]
    return next((b for b in bounds if facts.prove(le(b, wanted))), bounds[0])
