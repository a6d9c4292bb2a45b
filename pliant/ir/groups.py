"""What one kernel may compute: the shape of a fusion group.

A group of ops is one loop nest if it has a common *domain*: a shape F that every result
either fills (same number of elements, proved) or, where the group reduces, has one
element of per row (F without the reduced axes). `structure` finds that shape, or says
that there is none. Fusion asks it before it merges; lowering asks it for the loops.

    softmax over (b, h, s, s): F = (b, h, s, s), reduced = {3}
    bias + gelu after a matmul: F = the matmul's result, reduced = {}
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pliant.ir.access import Space, numel, pull, reshape_index
from pliant.ir.graph import Op, Value
from pliant.ir.ops import FORMULAS, GATHERS, OPAQUE, VIEWS
from pliant.sym import Expr, Facts, as_expr, sym


def is_transparent(op: Op) -> bool:
    """Free inside a kernel, so copied into every kernel that needs it."""
    return op.name in VIEWS or op.name in FORMULAS


@dataclass(frozen=True, slots=True)
class Structure:
    """The loops of a group."""

    domain: tuple[Expr, ...]
    reduced: tuple[int, ...]  # axes of the domain

    @property
    def kept(self) -> tuple[int, ...]:
        return tuple(k for k in range(len(self.domain)) if k not in self.reduced)

    @property
    def row_shape(self) -> tuple[Expr, ...]:
        return tuple(self.domain[k] for k in self.kept)


def domain_index(domain: Sequence[Expr]) -> tuple[Expr, ...]:
    """One variable per axis; an axis of one element needs none."""
    return tuple(
        as_expr(0) if extent.is_const and extent.value == 1 else sym(f"_d{k}")
        for k, extent in enumerate(domain)
    )


def domain_space(domain: Sequence[Expr], facts: Facts) -> Space:
    """0 <= d_k < F_k."""
    return Space(facts, {f"_d{k}": extent for k, extent in enumerate(domain)})


def result_index(
    value: Value, structure: Structure, space: Space
) -> tuple[Expr, ...] | None:
    """Where a result's element stands in terms of the domain, or None if nowhere."""
    variables = domain_index(structure.domain)
    if is_row(value, structure, space):
        kept = tuple(variables[k] for k in structure.kept)
        return reshape_index(kept, structure.row_shape, value.shape, space)
    if numel(value.shape, space) != numel(structure.domain, space):
        return None
    return reshape_index(variables, structure.domain, value.shape, space)


def is_row(value: Value, structure: Structure, facts: Facts | Space) -> bool:
    """Whether a result has one element per row rather than per domain element."""
    if not structure.reduced:
        return False
    return numel(value.shape, facts) == numel(structure.row_shape, facts)


def structure(
    ops: Collection[Op], results: Sequence[Value], facts: Facts
) -> Structure | None:
    """The group's loops, if `ops` (in order) can be one kernel with these results."""
    reduces = [op for op in ops if op.name == "reduce"]
    roots = [op for op in ops if op.name in OPAQUE]
    if len(roots) > 1 or (roots and reduces):
        return None
    reduced: tuple[int, ...] = ()
    if roots:
        domain = roots[0].results[0].shape
    elif reduces:
        domain, reduced = reduces[0].operands[0].shape, reduces[0].ints_attr("axes")
        for op in reduces[1:]:
            if not _same_shape(op.operands[0].shape, domain, facts):
                return None
            if op.ints_attr("axes") != reduced:
                return None
    else:
        domain = _widest(results)
    domain = tuple(facts.canonical(d) for d in domain)
    inner = domain_space(domain, facts)
    shape = Structure(domain, tuple(sorted(reduced)))
    walk = _GroupWalk(ops, shape, inner)
    for value in results:
        index = result_index(value, shape, inner)
        if index is None or not walk.reach(value, index):
            return None
    for op in reduces:
        if not walk.reach(op.operands[0], domain_index(domain)):
            return None
    return shape


def _widest(results: Sequence[Value]) -> tuple[Expr, ...]:
    """All results have one size; the one of highest rank names the axes."""
    return max((v.shape for v in results), key=len)


def _same_shape(a: Sequence[Expr], b: Sequence[Expr], facts: Facts) -> bool:
    return len(a) == len(b) and all(
        facts.canonical(x) == facts.canonical(y) for x, y in zip(a, b, strict=True)
    )


class _GroupWalk:
    """Follows every access from the results; fails if a row is accessed otherwise."""

    def __init__(self, ops: Collection[Op], shape: Structure, space: Space) -> None:
        self.producers = {v: op for op in ops for v in op.results}
        self.shape, self.space = shape, space
        self.seen: set[tuple[Value, tuple[Expr, ...]]] = set()
        self.plain: set[Value] = set()  # with nothing but elements behind it
        variables = domain_index(shape.domain)
        self.row = tuple(variables[k] for k in shape.kept)
        self.full = variables

    def reach(self, value: Value, index: tuple[Expr, ...]) -> bool:
        if (value, index) in self.seen:
            return True
        self.seen.add((value, index))
        op = self.producers.get(value)
        if op is None:
            return True
        if op.name == "reduce":
            return self._row_access(value, index)
        if op.name in OPAQUE:
            return self._full_access(value, index)
        if op.name in VIEWS:
            return self.reach(op.operands[0], pull(op, index, self.space))
        if op.name in GATHERS:
            # Computed positions: what is behind them must not need a row of its own.
            return self._elementwise_only(op)
        return all(self.reach(v, index) for v in op.operands)

    def _row_access(self, value: Value, index: tuple[Expr, ...]) -> bool:
        """The index must be the row's own position."""
        here = reshape_index(self.row, self.shape.row_shape, value.shape, self.space)
        return here == index

    def _full_access(self, value: Value, index: tuple[Expr, ...]) -> bool:
        here = reshape_index(self.full, self.shape.domain, value.shape, self.space)
        return here == index

    def _elementwise_only(self, op: Op) -> bool:
        stack = list(op.operands)
        while stack:
            value = stack.pop()
            producer = self.producers.get(value)
            if producer is None or value in self.plain:
                continue
            self.plain.add(value)
            if producer.name == "reduce" or producer.name in OPAQUE:
                return False
            stack.extend(producer.operands)
        return True
