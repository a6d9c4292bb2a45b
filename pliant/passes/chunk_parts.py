"""A fused graph in smaller kernels, so that fewer values must be whole at once.

Kernels are made for speed: one product computes queries, keys and values, one kernel a
sum and its norm, and a norm is computed once for all who read it. Where a part of the
model runs in chunks, that is in the way: attention needs all keys, but only a chunk of
the queries. So the versions that run in chunks (`chunk.py`) are made of another form of
the graph, which computes the same with

    one product for each part that is read      %qkv -> %q, %k, %v
    one kernel for each result                  %x, %norm -> %x and %norm from %x
    one copy for each reader, if it is cheap    %norm -> %norm_q, %norm_k, %norm_v

A copy is cheap if it has no product in it and what it reads lives as long anyway, or
can be made of inputs and weights by a few such kernels (a table of biases by distance).
The kernels stand in the order in which an operand that is likely needed whole (the last
ones: keys and values, a right operand) comes before the others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from pliant.ir.graph import Graph, Names, Op, Value, copied, names_of
from pliant.passes.chunk_heads import by_heads
from pliant.passes.chunk_sums import kernel_of, sums_apart
from pliant.passes.chunk_views import (
    PANEL_COLUMNS,
    Bases,
    cut_kernel,
    reads_part,
)
from pliant.passes.cuts import Chunk, Cut, Cutter, chunked, rows_of
from pliant.sym import ONE, Facts, as_expr

_PLAIN = ("map", "row")  # kinds of kernels without a product
_FEW_MAPS = 4  # that make a value anew


@dataclass(slots=True)
class Parts:
    """A graph of smaller kernels; `origin` tells which of them are copies of one."""

    graph: Graph
    origin: dict[Op, Op] = field(default_factory=dict)


def apart(
    graph: Graph, facts: Facts, *, heads: bool = False, flipped: Collection[Value] = ()
) -> Parts:
    """The graph in smaller kernels, in an order; see `arranged`."""
    smaller, _ = sums_apart(kernels_apart(graph, facts))
    return arranged(smaller, facts, heads=heads, flipped=flipped)


def kernels_apart(graph: Graph, facts: Facts) -> Graph:
    """One kernel for each result, and one product for each part that is read."""
    names = Names(names_of(graph))
    return _one_product_each(_one_result_each(graph), facts, names)


def arranged(
    graph: Graph,
    facts: Facts,
    *,
    heads: bool = False,
    flipped: Collection[Value] = (),
    settled: bool = False,
) -> Parts:
    """The kernels in an order, with a copy for each reader of what is cheap.

    With `heads`, attention is in groups of heads. The first operand of a kernel that
    gives a value in `flipped` comes first. If they are `settled`, they stand in the
    order in which they are.
    """
    if heads:
        graph = by_heads(graph, facts)
    ordered = _ordered(graph, flipped)
    if settled:
        needed = set(ordered.ops)
        ordered = graph.replace(ops=tuple(op for op in graph.ops if op in needed))
    return _one_copy_each(ordered, Names(names_of(graph)))


# ---- one kernel for each result


def _one_result_each(graph: Graph) -> Graph:
    ops: list[Op] = []
    for op in graph.ops:
        apart = op.name == "fusion" and op.str_attr("kind") in _PLAIN
        ops += _by_result(op) if apart and len(op.results) > 1 else [op]
    return graph.replace(ops=tuple(ops))


def _by_result(fusion: Op) -> list[Op]:
    """A kernel for each result; those that come later read those before."""
    region = fusion.regions[0]
    if len(set(region.results)) < len(region.results):
        return [fusion]
    outside = dict(zip(region.params, fusion.operands, strict=True))
    given = dict(zip(region.results, fusion.results, strict=True))
    made: list[Op] = []
    for op in region.ops:
        for result in op.results:
            if result in given:
                made.append(kernel_of(fusion, {result: given[result]}, outside))
                outside[result] = given[result]
    if len(made) < len(region.results):  # some result is an operand
        return [fusion]
    return made


# ---- one product for each part that is read


@dataclass(frozen=True, slots=True)
class _Columns:
    """Columns that somebody reads: from the first, so many."""

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class _Reader:
    """A slice of a product's columns, through views."""

    columns: _Columns
    slice: Op
    views: tuple[tuple[Op, Cut], ...]  # from the product on, and what is read of each
    chunk: Chunk  # what is read

    def read(self, product: Value, part: Value) -> tuple[list[Op], Value]:
        """The same views of the part, and what they give."""
        values = {product: part}
        ops: list[Op] = []
        value = part
        for view, cut in self.views:
            ops += chunked(view, cut, self.chunk, values)
            value = values[view.result]
        return ops, value


def _one_product_each(graph: Graph, facts: Facts, names: Names) -> Graph:
    users = graph.users()
    parts: dict[Op, list[Op]] = {}  # what takes the place of a product
    replaced: dict[Value, Value] = {}
    for op in graph.ops:
        readers = _readers_of(op, users, graph.results, facts, names)
        columns = sorted({r.columns for r in readers}, key=lambda c: c.first)
        made = _products(op, columns, facts, names) if _are_panels(columns) else []
        if not made:
            continue
        products = (m.result for m in made if m.name == "fusion")
        by_columns = dict(zip(columns, products, strict=True))
        for reader in readers:
            views, value = reader.read(op.result, by_columns[reader.columns])
            made += views
            replaced[reader.slice.result] = value
        parts[op] = made
    ops: list[Op] = []
    for op in graph.ops:
        operands = tuple(replaced.get(v, v) for v in op.operands)
        ops += parts.get(op, [op.replace(operands=operands)])
    return graph.replace(ops=tuple(ops))  # `_ordered` drops those that nobody reads


def _readers_of(
    op: Op,
    users: Mapping[Value, Sequence[Op]],
    results: Sequence[Value],
    facts: Facts,
    names: Names,
) -> list[_Reader]:
    """Those who read a product, if each of them reads some columns."""
    if op.name != "fusion" or op.str_attr("kind") != "matmul" or len(op.results) != 1:
        return []
    found: list[_Reader] = []
    pending: list[tuple[Op, ...]] = [()]
    while pending:
        views = pending.pop()
        value = views[-1].result if views else op.result
        if value in results:
            return []
        for user in users.get(value, ()):
            if user.name in ("reshape", "transpose"):
                pending.append((*views, user))
                continue
            reader = None
            if user.name == "slice":
                reader = _reader(op.result, views, user, facts, names)
            if reader is None:
                return []
            found.append(reader)
    return found


def _reader(
    product: Value, views: Sequence[Op], op: Op, facts: Facts, names: Names
) -> _Reader | None:
    """A slice that takes columns of the product, seen through the views."""
    starts, shape = op.dims_attr("starts"), op.dims_attr("shape")
    whole = op.operands[0].shape
    axes = [k for k, (a, b) in enumerate(zip(shape, whole, strict=True)) if a != b]
    if len(axes) != 1 or set(op.ints_attr("steps")) != {1}:
        return None
    first, count = starts[axes[0]], shape[axes[0]]
    if not (first.is_const and count.is_const and whole[axes[0]].is_const):
        return None
    cutter = Cutter(whole[axes[0]], facts)
    cut = Cut(axes[0])
    cuts: list[tuple[Op, Cut]] = []
    for view in reversed(views):
        cuts.append((view, cut))
        behind = cutter.behind(view, cut)
        if behind is None or behind[0] is None:
            return None
        cut = behind[0]
    if cut.axis != product.type.rank - 1 or cut.outer != ONE or not cut.inner.is_const:
        return None
    width = cut.inner.value
    columns = _Columns(first.value * width, count.value * width)
    return _Reader(columns, op, tuple(cuts[::-1]), Chunk(cutter, count, first, names))


def _are_panels(columns: Sequence[_Columns]) -> bool:
    """Whether they are several parts that do not overlap, each of whole panels."""
    aligned = all(part.first % PANEL_COLUMNS == 0 for part in columns)
    apart = all(a.first + a.count <= b.first for a, b in pairwise(columns))
    return len(columns) > 1 and aligned and apart


def _products(
    fusion: Op, columns: Sequence[_Columns], facts: Facts, names: Names
) -> list[Op]:
    """A product for each of these columns, and the views that it reads."""
    region = fusion.regions[0]
    last = fusion.result.type.rank - 1
    cutter = Cutter(fusion.result.shape[last], facts)
    cuts = cutter.region(region, [Cut(last)])
    if cuts is None:
        return []
    given = {p: cuts.demands[p] for p in region.params if p in cuts.demands}
    cut_params = [(p, cut) for p, cut in given.items() if cut is not None]
    if not all(cut.is_plain and reads_part(fusion, p, cut) for p, cut in cut_params):
        return []
    made: list[Op] = []
    for part in columns:
        chunk = Chunk(cutter, as_expr(part.count), as_expr(part.first), names)
        operands: dict[Value, Value] = {}
        for param, operand in zip(region.params, fusion.operands, strict=True):
            if param in given:
                cut = given[param]
                if cut is not None:
                    made.append(rows_of(operand, cut, chunk))
                    operand = made[-1].result
                operands[param] = operand
        made.append(cut_kernel(fusion, Cut(last), cuts, chunk, operands))
    return made


# ---- order


def with_two_sides(graph: Graph) -> list[Value]:
    """Products of which both operands are computed: either may be needed whole."""
    bases = Bases(graph)

    def is_computed(value: Value) -> bool:
        op = bases.producers.get(bases.base(value))
        return op is not None and op.name == "fusion"

    found: list[Value] = []
    for op in graph.ops:
        if op.name == "fusion" and op.str_attr("kind") == "matmul":
            region = op.regions[0]
            given = dict(zip(region.params, op.operands, strict=True))
            (root,) = (o for o in region.ops if o.name == "matmul")
            if all(v in given and is_computed(given[v]) for v in root.operands):
                found.append(op.results[0])
    return found


def _ordered(graph: Graph, flipped: Collection[Value]) -> Graph:
    """The ops that results need, the last operands of each first."""
    producers = graph.producers()
    ops: dict[Op, None] = {}
    stack = [producers[v] for v in reversed(graph.results) if v in producers]
    while stack:
        op = stack[-1]
        if op in ops:
            stack.pop()
            continue
        before = (producers[v] for v in op.operands if v in producers)
        waiting = [p for p in before if p not in ops]
        if waiting:
            is_flipped = bool(op.results) and op.results[0] in flipped
            stack += reversed(waiting) if is_flipped else waiting
        else:
            ops[stack.pop()] = None
    return graph.replace(ops=tuple(ops))


# ---- one copy for each reader


def _one_copy_each(graph: Graph, names: Names) -> Parts:
    bases = Bases(graph)
    place = {op: k for k, op in enumerate(graph.ops)}

    def last(value: Value) -> int:
        """The place of the last who reads a value."""
        readers = bases.readers.get(value, {})
        return max((place[op] if op else len(place) for op in readers), default=-1)

    def lives_as_long(value: Value, end: int) -> bool:
        op = bases.producers.get(value)
        return op is None or op.name != "fusion" or last(value) >= end

    cheap: set[Value] = set()
    given = _from_inputs(bases)
    for op in graph.ops:
        if op.name != "fusion" or op.str_attr("kind") not in _PLAIN:
            continue
        value = op.results[0]
        readers = bases.readers.get(value, {})
        if len(op.results) > 1 or len(readers) < 2 or None in readers:
            continue
        if value in given:
            cheap |= given[value]
        elif all(lives_as_long(bases.base(v), last(value)) for v in op.operands):
            cheap.add(value)
    return _with_copies(bases, cheap, names)


def _from_inputs(bases: Bases) -> dict[Value, frozenset[Value]]:
    """Values that a few maps make of inputs and weights; each with all on its way."""
    found: dict[Value, frozenset[Value]] = {}
    for op in bases.graph.ops:
        if op.name != "fusion" or op.str_attr("kind") != "map" or len(op.results) > 1:
            continue
        (value,) = op.results
        operands = map(bases.base, op.operands)
        made = [v for v in operands if _is_computed(v, bases)]
        if all(v in found for v in made) and None not in bases.readers.get(value, {}):
            own = frozenset({value}).union(*(found[v] for v in made))
            if len(own) <= _FEW_MAPS:
                found[value] = own
    return found


def _is_computed(value: Value, bases: Bases) -> bool:
    op = bases.producers.get(value)
    return op is not None and op.name != "constant"


def _with_copies(bases: Bases, cheap: Collection[Value], names: Names) -> Parts:
    """The graph in which every reader of these values computes them for itself."""
    ops: list[Op] = []
    origin: dict[Op, Op] = {}

    def own(value: Value, made: dict[Value, Value]) -> Value:
        op = bases.producers.get(value)
        if op is None or bases.base(value) not in cheap:
            return value
        if value not in made:
            operands = tuple(own(v, made) for v in op.operands)
            made[value] = Value(names.fresh(value.name), value.type)
            regions = tuple(map(copied, op.regions))
            results = (made[value],)
            ops.append(op.replace(operands=operands, results=results, regions=regions))
            if op.name == "fusion":
                origin[ops[-1]] = op
        return made[value]

    for op in bases.graph.ops:
        if op.results and bases.base(op.results[0]) in cheap:
            continue
        made: dict[Value, Value] = {}
        given = {v: own(v, made) for v in reversed(op.operands)}
        ops.append(op.replace(operands=tuple(given[v] for v in op.operands)))
    return Parts(bases.graph.replace(ops=tuple(ops)), origin)
