"""Which bodies a kernel gets, and the guards on sizes that choose between them.

    dispatch {
      variant "split rows" when 2*rows <= threads, 131072 <= 3*columns { .. }
      variant "short rows" when columns <= 32 { .. }
      variant "any" { .. }
    }

A variant is the same group lowered again under an assumption. The assumption is either
about sizes ("no broadcast", "dense": symbols are replaced in the whole region, so that
index arithmetic folds and loads become vectors), or about how rows run
(`lower/rows.py`). If an assumption is proved true, its body is the only one. If it is
proved false, there is no such body. A kernel whose general body cannot gain anything
has no variants.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pliant.ir.access import is_one, linear_coefficient
from pliant.ir.graph import Attr, Graph, Op, Value
from pliant.ir.loop_walk import accesses, statements
from pliant.ir.loops import For, Kind, Stmt
from pliant.ir.types import TensorType
from pliant.lower.domain import Axis
from pliant.lower.nest import THREAD_WORK
from pliant.lower.rows import THREADS, RowPlan
from pliant.sym import (
    Cond,
    Expr,
    Facts,
    as_expr,
    divides,
    eq,
    le,
    operands,
    product,
    rebuild,
    sym,
)

# A row of up to this many vectors is unrolled: 1.1 to 1.25 times as fast up to here, no
# gain at twice that (softmax, sum, layer norm; AVX-512).
SHORT_VECTORS = 2


@dataclass(frozen=True, slots=True)
class VariantGuard:
    """The assumption of one variant; `guards` test whether it holds."""

    name: str
    guards: tuple[Cond, ...]
    symbols: Mapping[str, Expr] = field(default_factory=dict)
    # Replaced before symbols are.
    dims: Mapping[Expr, Expr] = field(default_factory=dict)
    plan: RowPlan = RowPlan.PLAIN
    multiple: int = 1  # the vector loop's trip count is a multiple of this


ANY = VariantGuard("any", ())


@dataclass(frozen=True, slots=True)
class Nest:
    """What the group's general body looks like."""

    kept: tuple[Axis, ...]
    reduced: tuple[Axis, ...]
    vector: Axis | None  # the axis of the vector loop, if it is not cut into blocks
    work: int  # cost of one element


def short_room(lanes: int) -> int:
    return SHORT_VECTORS * lanes


def row_assumptions(nest: Nest, facts: Facts, lanes: int) -> list[VariantGuard]:
    """The forms of a reduction's rows other than the plain one."""
    found: list[VariantGuard] = []
    rows = product(axis.extent for axis in nest.kept)
    extent = product(axis.extent for axis in nest.reduced)
    # Fewer rows than threads, and each long enough for two threads.
    few = (
        le(2 * rows, sym(THREADS)),
        le(2 * THREAD_WORK, extent * nest.work),
    )
    found.append(VariantGuard("split rows", few, plan=RowPlan.SPLIT))
    if len(nest.reduced) == 1:
        fits = (le(extent, short_room(lanes)),)
        found.append(VariantGuard("short rows", fits, plan=RowPlan.SHORT))
    return [a for a in found if possible(a, facts)]


def vector_assumptions(nest: Nest, facts: Facts, lanes: int) -> list[VariantGuard]:
    """Trip counts of a map's vector loop that leave no tail: one branch less per row.

    A reduction does more work per row, so the branch does not matter there.
    """
    if nest.reduced or nest.vector is None or nest.vector.extent.is_const:
        return []
    whole = (divides(lanes, nest.vector.extent),)
    found = VariantGuard("whole vectors", whole, multiple=lanes)
    return [found] if possible(found, facts) else []


def possible(assumption: VariantGuard, facts: Facts) -> bool:
    """Whether the assumption is not seen to be false.

    A form that no size takes would only be code that does not run, so comparisons are
    decided by bounds alone and not by a search for a proof.
    """
    return all(_possible(guard, facts) for guard in assumption.guards)


def _possible(guard: Cond, facts: Facts) -> bool:
    if guard.kind not in ("le", "lt"):
        return facts.prove(guard) is not False
    _, most = facts.bounds(guard.rhs - guard.lhs)
    return most is None or most >= (guard.kind == "lt")


# ---- sizes


def size_assumptions(region: Graph, body: Stmt, facts: Facts) -> Iterator[VariantGuard]:
    """Sizes under which the region's index arithmetic folds."""
    stretched = dict.fromkeys(_stretched(region.ops))
    if stretched:
        yield from _stretch_assumptions(list(stretched))
    found = {name for pair in stretched for name in pair.names}
    for name in dict.fromkeys(_strides(body)):
        if name not in found and possible(unit := _unit(name), facts):
            yield unit


@dataclass(frozen=True, slots=True)
class _Stretched:
    """A dim whose operands either have it or are 1 there, which only the call tells."""

    wide: Expr
    names: tuple[str, ...]

    def where_equal(self) -> tuple[tuple[Cond, ...], dict[str, Expr], dict[Expr, Expr]]:
        first, *rest = map(sym, self.names)
        same = dict.fromkeys(self.names[1:], first)
        return tuple(eq(name, first) for name in rest), same, {self.wide: first}


def _stretch_assumptions(stretched: Sequence[_Stretched]) -> Iterator[VariantGuard]:
    guards: list[Cond] = []
    symbols: dict[str, Expr] = {}
    dims: dict[Expr, Expr] = {}
    for one in stretched:
        conds, same, wide = one.where_equal()
        guards += conds
        symbols |= same
        dims |= wide
    yield VariantGuard("no broadcast", tuple(guards), symbols, dims)
    if len(stretched) > 1:
        return
    (one,) = stretched
    for name in one.names:
        others = [sym(other) for other in one.names if other != name]
        if len(others) == 1:
            unit = {name: as_expr(1)}
            said = (eq(sym(name), 1),)
            yield VariantGuard(f"{name} is 1", said, unit, {one.wide: others[0]})


def _unit(name: str) -> VariantGuard:
    return VariantGuard("dense", (eq(sym(name), 1),), {name: as_expr(1)})


def _stretched(ops: Sequence[Op]) -> Iterator[_Stretched]:
    """Dims of broadcast results whose expression is one of two symbols."""
    for op in ops:
        if op.name != "stretch":
            continue
        (x,), shape = op.operands, op.result.shape
        for dim, axis in zip(x.shape, op.ints_attr("axes"), strict=True):
            wide = shape[axis]
            if not is_one(dim) and dim != wide and len(wide.symbols()) == 2:
                yield _Stretched(wide, wide.symbols())


def _strides(body: Stmt) -> Iterator[str]:
    """Sizes that are the stride of a vector loop's addresses."""
    for loop in statements(body):
        if not isinstance(loop, For) or loop.kind is not Kind.VECTOR:
            continue
        for _, index in accesses(loop.body):
            step = linear_coefficient(index[0], loop.var) if len(index) == 1 else None
            name = None if step is None else step.symbol
            if name is not None:
                yield name


# ---- a region under an assumption


def _replaced(e: Expr, dims: Mapping[Expr, Expr]) -> Expr:
    """The expression with some of its subexpressions replaced."""
    if not dims or e in dims:
        return dims.get(e, e)
    total = as_expr(0)
    for coefficient, monomial in e.terms:
        term = as_expr(coefficient)
        for atom, power in monomial:
            whole = rebuild(atom, operands(atom))
            if whole in dims:
                part = dims[whole]
            else:
                part = rebuild(atom, [_replaced(arg, dims) for arg in operands(atom)])
            term = term * part**power
        total = total + term
    return total


def specialised(region: Graph, given: VariantGuard, facts: Facts) -> Graph:
    """The region with sizes replaced everywhere."""
    known: dict[Value, Value] = {}

    def there(dim: Expr) -> Expr:
        return facts.canonical(_replaced(dim, given.dims)).substitute(given.symbols)

    def typed(value: Value) -> Value:
        if value not in known:
            shape = tuple(map(there, value.shape))
            known[value] = Value(value.name, TensorType(value.dtype, shape))
        return known[value]

    def replaced(attr: Attr) -> Attr:
        if isinstance(attr, Expr):
            return there(attr)
        if isinstance(attr, tuple):
            return tuple(replaced(a) for a in attr)
        return attr

    ops = tuple(
        op.replace(
            operands=tuple(map(typed, op.operands)),
            results=tuple(map(typed, op.results)),
            attrs=tuple((name, replaced(attr)) for name, attr in op.attrs),
        )
        for op in region.ops
    )
    return region.replace(
        params=tuple(map(typed, region.params)),
        ops=ops,
        results=tuple(map(typed, region.results)),
    )
