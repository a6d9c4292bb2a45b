"""Attention by groups of heads, one group after the other.

    %y = attention(%q, %k, %v)  ->  %y_0 = attention(%q_0, %k_0, %v_0)
                                    %y_1 = attention(%q_1, %k_1, %v_1)
                                    %y = concat(%y_0, %y_1)

All keys and values of a layer are twice as large as what they are computed from. Those
of a group of heads are a part of that, and what computes them is cut as well: a product
by its columns. Versions that run in chunks (`chunk.py`) may be made of this form.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pliant.ir.graph import Graph, Names, Op, Value, names_of
from pliant.ir.ops import VIEWS
from pliant.passes.chunk_views import (
    PANEL_COLUMNS,
    Bases,
    cut_kernel,
    reads_part,
)
from pliant.passes.cuts import Chunk, Cut, Cutter, Demand, chunked, rows_of
from pliant.sym import ONE, Facts, as_expr

_MOST_GROUPS = 6


def has_groups(graph: Graph) -> bool:
    """Whether some attention may be in groups of heads."""
    return any(_layout(op) is not None for op in graph.ops)


def by_heads(graph: Graph, facts: Facts) -> Graph:
    """The graph with each attention, as far as possible, in groups of heads."""
    names = Names(names_of(graph))
    bases = Bases(graph)
    ops: list[Op] = []
    for op in graph.ops:
        made = _in_groups(op, bases, facts, names)
        ops += [op] if made is None else made
    return graph.replace(ops=tuple(ops))


def _in_groups(fusion: Op, bases: Bases, facts: Facts, names: Names) -> list[Op] | None:
    layout = _layout(fusion)
    if layout is None:
        return None
    axis, count = layout
    heads = fusion.result.shape[axis]
    cutter, each = Cutter(heads, facts), heads.value // count
    made: list[Op] = []
    parts: list[Value] = []
    for group in range(count):
        chunk = Chunk(cutter, as_expr(each), as_expr(group * each), names)
        builder = _HeadGroup(bases, chunk, fusion)
        part = builder.kernel(fusion, Cut(axis))
        if part is None:
            return None
        made += builder.ops
        parts.append(part)
    return [*made, _joined(fusion, parts, axis, names)]


def _layout(fusion: Op) -> tuple[int, int] | None:
    """The axis of the heads in the result of an attention, and how many groups."""
    if fusion.name != "fusion" or fusion.str_attr("kind") != "attention":
        return None
    region = fusion.regions[0]
    root = next((op for op in region.ops if op.name == "attention"), None)
    if root is None or region.results != root.results:
        return None
    axis = root.result.type.rank - (2 if root.bool_attr("swapped") else 3)
    heads, width = root.result.shape[axis], root.result.shape[-1]
    if not (heads.is_const and width.is_const):
        return None
    count = _groups(heads.value, width.value)
    return (axis, count) if count > 1 else None


def _groups(heads: int, width: int) -> int:
    """The most groups whose columns begin with a panel."""
    for count in range(min(_MOST_GROUPS, heads), 1, -1):
        if heads % count == 0 and heads // count * width % PANEL_COLUMNS == 0:
            return count
    return 1


def _joined(fusion: Op, parts: list[Value], axis: int, names: Names) -> Op:
    """The kernel that has the groups side by side."""
    params = tuple(Value(names.fresh(v.name), v.type) for v in parts)
    joined = Value(names.fresh(fusion.result.name), fusion.result.type)
    concat = Op("concat", params, (("axis", axis),), (joined,), (), fusion.loc)
    body = Graph("region", params, (concat,), (joined,))
    kind = (("kind", "map"),)
    return Op("fusion", tuple(parts), kind, fusion.results, (body,), fusion.loc)


@dataclass(slots=True)
class _HeadGroup:
    """The kernels of one group of heads, and what they read."""

    bases: Bases
    chunk: Chunk
    attention: Op
    ops: list[Op] = field(default_factory=list)
    known: dict[tuple[Value, Cut], Value] = field(default_factory=dict)

    def kernel(self, fusion: Op, cut: Cut) -> Value | None:
        """The heads of the group that a kernel gives, if it can be cut so."""
        if len(fusion.results) != 1:
            return None
        region = fusion.regions[0]
        cuts = self.chunk.cutter.region(region, [cut])
        if cuts is None:
            return None
        operands: dict[Value, Value] = {}
        for param, operand in zip(region.params, fusion.operands, strict=True):
            if param in cuts.demands:
                demand = cuts.demands[param]
                built = self.value(operand, demand)
                if built is None or not self._reads(fusion, param, demand, built):
                    return None
                operands[param] = built
        made = cut_kernel(fusion, cut, cuts, self.chunk, operands)
        self.ops.append(made)
        return made.result

    def _reads(self, fusion: Op, param: Value, cut: Demand, built: Value) -> bool:
        """Whether a kernel can read what was made for a parameter."""
        views = any(built in op.results for op in self.ops if op.name in VIEWS)
        return not views or cut is None or reads_part(fusion, param, cut)

    def value(self, value: Value, cut: Demand) -> Value | None:
        """The heads of the group of a value."""
        if cut is None:
            return value
        key = value, cut
        if key not in self.known:
            made = self._value(value, cut)
            if made is None:
                return None
            self.known[key] = made
        return self.known[key]

    def _value(self, value: Value, cut: Cut) -> Value | None:
        op = self.bases.producers.get(value)
        if op is not None and op.name in VIEWS:
            behind = self.chunk.cutter.behind(op, cut)
            if behind is not None:
                below = self.value(op.operands[0], behind[0])
                if below is None:
                    return None
                values = {op.operands[0]: below}
                self.ops += chunked(op, cut, self.chunk, values)
                return values[value]
        elif op is not None and op.name == "fusion" and self._is_own(value):
            made = self.kernel(op, cut)
            if made is not None:
                return made
        if cut.outer != ONE:
            return None
        self.ops.append(rows_of(value, cut, self.chunk))
        return self.ops[-1].result

    def _is_own(self, value: Value) -> bool:
        """Whether a value is computed for this attention alone."""
        readers = self.bases.readers.get(value, {})
        while len(readers) == 1:
            (op,) = readers
            if op is self.attention or op is None or len(op.results) != 1:
                return op is self.attention
            readers = self.bases.readers.get(op.result, {})
        return False
