"""Ops become kernels: each fusion group is one.

    %1 = mul(%x, %x)                       %5 = fusion(%x, %w) { kind = "row" } {
    %2 = reduce(%1) {sum}          ->        ... the five ops ...
    %3 = rsqrt(%2)                         }
    %4 = broadcast(%3)
    %5 = mul(%x, %4)

Groups start as single ops and merge along producer-consumer edges, in program order,
whenever the merged group is still one loop nest. That is decided by shapes and proved
constraints (`ir/groups.py`), not by names of ops. Ops that only re-index (broadcast,
transpose, reshape, slice) are copied into every group that reads through them. A
matmul, convolution or attention reads its operands through strided views, which stay in
the graph between fusions.

kinds: map (elementwise), row (with reductions), and one per contraction or other root,
named as the op.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from pliant.context import Context
from pliant.ir.access import numel
from pliant.ir.graph import Graph, Names, Op, Value, names_of
from pliant.ir.groups import (
    Structure,
    is_transparent,
    structure,
)
from pliant.ir.ops import (
    IN_MEMORY,
    LOOKUPS,
    OPAQUE,
    OPS,
    Cost,
    Trait,
    has_trait,
    named,
)
from pliant.ir.types import NARROW
from pliant.ir.views import resolve
from pliant.passes.epilogues import Flow, left_to_readers
from pliant.passes.extra_row import at_most_a_row_larger
from pliant.passes.fuse_limits import (
    forget,
    multiplies,
    reads_view,
    repeats,
)
from pliant.passes.recompute import forward_values

# Roots whose kernel computes an epilogue while the tile is in cache.
EPILOGUE = named(Trait.CONTRACT) - {"grouped_matmul"}
_FREE = ("reshape", "rounded")  # of what a kernel has stored
MOST_OPS = 96


@dataclass(slots=True, eq=False)
class _Group:
    ops: list[int]  # positions in the graph, ascending
    members: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.members = set(self.ops)


class _Fuser:
    def __init__(
        self, graph: Graph, cx: Context, apart: frozenset[int] = frozenset()
    ) -> None:
        self.graph, self.cx = graph, cx
        self.apart = apart  # positions of ops that are not merged with others
        self.facts = cx.facts(graph)
        self.ops = graph.ops
        self.position = {v: k for k, op in enumerate(graph.ops) for v in op.results}
        self.producers = graph.producers()
        self.results = {self._stored(v) for v in graph.results}
        self.solid = self._solid()
        self.group: dict[int, _Group] = {
            k: _Group([k]) for k, op in enumerate(self.ops) if self._grouped(k, op)
        }
        self.readers = self._readers()
        # Ops that contractions' kernels leave to their readers.
        self.left: set[int] = set()

    # ---- computed and transparent ops

    def _grouped(self, k: int, op: Op) -> bool:
        if op.name == "constant":
            return False
        return k in self.solid or not is_transparent(op)

    def _stored(self, value: Value) -> Value:
        """What is in memory for a result: reshaping a kernel's result is free."""
        base = value
        while (op := self.producers.get(base)) is not None and op.name in _FREE:
            base = op.operands[0]
        op = self.producers.get(base)
        computed = op is not None and op.name != "constant" and not is_transparent(op)
        return base if computed else value

    def _solid(self) -> set[int]:
        """Transparent ops that must be in memory nevertheless.

        These are results of the graph, and operands of contractions that are no strided
        view. A view begins at the nearest value in memory: one through such an op has
        other strides from then on, and is looked at again.
        """
        solid: set[Value] = set()
        for value in self.graph.results:
            op = self.producers.get(self._stored(value))
            if op is not None and is_transparent(op):
                solid.add(self._stored(value))
        views = dict(self.producers)
        while True:
            for value in solid:
                views.pop(value, None)
            found = {
                base
                for op in self.ops
                if op.name in IN_MEMORY
                for which in range(len(op.operands))
                if (base := self._solidified(op, which, views)) is not None
            }
            if found <= solid:
                return {self.position[value] for value in solid}
            solid |= found

    def _solidified(
        self, op: Op, which: int, views: Mapping[Value, Op]
    ) -> Value | None:
        """The transparent value that must be in memory for this operand, if any."""
        value = op.operands[which]
        producer = views.get(value)
        if producer is None or not is_transparent(producer):
            return None
        view = resolve(value, views, self.facts)
        if view is None or not reads_view(op, which, view):
            return value
        base = views.get(view.base)
        return view.base if base is not None and is_transparent(base) else None

    def _readers(self) -> dict[int, list[int]]:
        """Grouped op -> grouped ops that read it, through views."""
        readers: dict[int, list[int]] = {k: [] for k in self.group}
        for k in self.group:
            for source in self.sources(k):
                readers[source].append(k)
        return readers

    def sources(self, k: int) -> list[int]:
        """The grouped ops that op k reads, through views, latest first."""
        found: dict[int, None] = {}
        stack = list(self.ops[k].operands)
        seen: set[Value] = set()
        while stack:
            value = stack.pop()
            if value in seen or value not in self.position:
                continue
            seen.add(value)
            at = self.position[value]
            if at in self.group:
                found[at] = None
            elif self.ops[at].name != "constant":
                stack.extend(self.ops[at].operands)
        return sorted(found, reverse=True)

    # ---- merging

    def run(self) -> None:
        if self.cx.options.fewest:
            self.left = self._left_to_readers()
        for k in list(self.group):
            for source in self.sources(k):
                self._merge(source, k)

    def _left_to_readers(self) -> set[int]:
        flow = Flow(
            self.ops,
            self.readers,
            self.sources,
            {self.position[v] for v in self.results if v in self.position},
            self.apart,
            self.facts,
        )
        roots = {k for k in self.group if self.ops[k].name in EPILOGUE}
        return left_to_readers(flow, roots)

    def adopt(self, other: _Fuser) -> None:
        """Takes over the groups that another fuser found for the same ops."""
        self.solid, self.group = other.solid, other.group
        self.readers = self._readers()

    def _merge(self, producer: int, consumer: int) -> None:
        a, b = self.group[producer], self.group[consumer]
        if a is b or len(a.ops) + len(b.ops) > MOST_OPS:
            return
        if (producer in self.apart) != (consumer in self.apart):
            return
        joined = _Group(sorted(a.ops + b.ops))
        if not self._kinds_allow(a, b) or self._cyclic(a, b, joined):
            return
        outputs = self.outputs(joined)
        ops = list(self.with_views(joined, outputs))
        if repeats(ops) or multiplies(ops):
            return
        shape = structure(ops, outputs, self.facts)
        if shape is None or self._recomputes(a, shape):
            return
        for k in joined.ops:
            self.group[k] = joined

    def _root(self, group: _Group) -> str | None:
        names = [self.ops[k].name for k in group.ops]
        return next((name for name in names if name in OPAQUE), None)

    def _kinds_allow(self, a: _Group, b: _Group) -> bool:
        """A root takes followers only if its kernel has an epilogue, and leaders only
        as its prologue."""
        if self._root(b) is not None:
            (at,) = (k for k in b.ops if self.ops[k].name in OPAQUE)
            if a.members & set(self.sources(at)):
                return self._is_prologue(a, at)
            if self._root(b) not in EPILOGUE:
                return False
        root = self._root(a)
        if root is None:
            return True
        return root in EPILOGUE and self._root(b) is None and not b.members & self.left

    def _is_prologue(self, a: _Group, root: int) -> bool:
        """Whether a matmul can compute its left operand itself: cheap, and for it
        alone."""
        op = self.ops[root]
        if op.name != "matmul" or not self.cx.options.prologue:
            return False
        if self._computed(op.operands[1], a) or op.operands[0].dtype in NARROW:
            return False
        for k in a.ops:
            if any(r != root and r not in a.members for r in self.readers[k]):
                return False
            leads = not has_trait(self.ops[k], Trait.ELEMENTWISE)
            if leads or any(v in self.results for v in self.ops[k].results):
                return False
        return True

    def _computed(self, value: Value, group: _Group) -> bool:
        """Whether a value is computed in the group, through views."""
        at = self.position.get(value)
        while at is not None and at not in self.group:
            if not self.ops[at].operands:
                return False
            at = self.position.get(self.ops[at].operands[0])
        return at in group.members

    def _cyclic(self, a: _Group, b: _Group, joined: _Group) -> bool:
        """Whether some path leaves the merged group and comes back."""
        stack = [
            self.group[r]
            for k in joined.ops
            for r in self.readers[k]
            if r not in joined.members
        ]
        last = joined.ops[-1]
        seen: set[int] = set()
        while stack:
            group = stack.pop()
            if id(group) in seen:
                continue
            seen.add(id(group))
            for k in group.ops:
                if k > last and min(self.readers[k], default=k) > last:
                    continue
                for r in self.readers[k]:
                    if r in joined.members:
                        return True
                    stack.append(self.group[r])
        return False

    def outputs(self, group: _Group) -> list[Value]:
        """Values of the group that something outside reads."""
        found: list[Value] = []
        for k in group.ops:
            outside = any(r not in group.members for r in self.readers[k])
            for value in self.ops[k].results:
                if outside or value in self.results:
                    found.append(value)
        return found

    def _expensive(self, op: Op) -> bool:
        """Whether recomputing the op costs more than reading its result."""
        if op.name in LOOKUPS:
            # A gather at computed positions is just a load.
            sources = (self.producers.get(v) for v in op.operands[1:])
            return any(o is None or not is_transparent(o) for o in sources)
        return OPS[op.name].cost >= Cost.DIVIDE or op.name == "concat"

    def _recomputes(self, a: _Group, shape: Structure) -> bool:
        """Whether `a` would compute something expensive once per broadcast copy."""
        if shape.reduced or self._root(a) is not None:
            sizes = {
                numel(shape.domain, self.facts),
                numel(shape.row_shape, self.facts),
            }
        else:
            sizes = {numel(shape.domain, self.facts)}
        for k in a.ops:
            op = self.ops[k]
            if not self._expensive(op) or numel(op.result.shape, self.facts) in sizes:
                continue
            if not at_most_a_row_larger(shape.domain, op.result.shape, self.facts):
                return True
        return False

    # ---- building

    def with_views(self, group: _Group, outputs: Iterable[Value]) -> Iterator[Op]:
        """The group's ops and the transparent ones between and before them."""
        needed: set[int] = set(group.ops)
        stack = [
            v
            for k in group.ops
            for v in self.ops[k].operands
            if self.ops[k].name not in IN_MEMORY or self._computed(v, group)
        ]
        while stack:
            at = self.position.get(stack.pop())
            if at is None or at in needed or at in self.group:
                continue
            if self.ops[at].name == "constant":
                continue
            needed.add(at)
            stack.extend(self.ops[at].operands)
        return (self.ops[k] for k in sorted(needed))

    def build(self) -> Graph:
        names = Names(names_of(self.graph))
        emitted: list[Op] = [op for op in self.ops if op.name == "constant"]
        mapping: dict[Value, Value] = {}
        views = _Views(self, mapping, emitted)
        for group in self._in_order():
            outputs = self.outputs(group)
            ops = list(self.with_views(group, outputs))
            ops = self._with_operands(group, ops, views, names)
            inside = {v for op in ops for v in op.results}
            params = list(
                dict.fromkeys(v for op in ops for v in op.operands if v not in inside)
            )
            for value in params:
                views.make(value)
            results = tuple(Value(v.name, v.type) for v in outputs)
            region = Graph(names.fresh("region"), tuple(params), tuple(ops), ())
            region = _renamed(region, outputs)
            kind = self._root(group)
            if kind is None:
                reduces = any(op.name == "reduce" for op in ops)
                kind = "row" if reduces else "map"
            loc = next((op.loc for op in ops if op.loc), "")
            emitted.append(
                Op(
                    "fusion",
                    tuple(mapping.get(v, v) for v in params),
                    (("kind", kind),),
                    results,
                    (region,),
                    loc,
                )
            )
            mapping.update(zip(outputs, results, strict=True))
        for value in self.graph.results:
            views.make(value)
        final = tuple(mapping.get(v, v) for v in self.graph.results)
        return self.graph.replace(ops=tuple(emitted), results=final)

    def _with_operands(
        self, group: _Group, ops: list[Op], views: _Views, names: Names
    ) -> list[Op]:
        """Splits a view that both the root and its epilogue read into two values.

        The root reads memory, so its operand stays a view in the graph.
        """
        made = {v for op in ops for v in op.results}
        out: list[Op] = []
        for op in ops:
            if op.name in IN_MEMORY and any(v in made for v in op.operands):
                operands = tuple(
                    views.twin(v, names)
                    if v in made and not self._computed(v, group)
                    else v
                    for v in op.operands
                )
                op = op.replace(operands=operands)
            out.append(op)
        return out

    def _in_order(self) -> list[_Group]:
        """Groups in dependency order; ties are broken by program order of last ops."""
        order: list[_Group] = []
        done: set[int] = set()
        for k in self.group:
            self._visit(self.group[k], done, order)
        return order

    def _visit(self, group: _Group, done: set[int], order: list[_Group]) -> None:
        stack = [(group, False)]
        while stack:
            current, ready = stack.pop()
            if ready:
                order.append(current)
                continue
            if id(current) in done:
                continue
            done.add(id(current))
            stack.append((current, True))
            for k in current.ops:
                for source in self.sources(k):
                    if id(self.group[source]) not in done:
                        stack.append((self.group[source], False))


class _Views:
    """Copies to the new graph the views that contractions read through."""

    def __init__(
        self, fuser: _Fuser, mapping: dict[Value, Value], emitted: list[Op]
    ) -> None:
        self.fuser, self.mapping, self.emitted = fuser, mapping, emitted

    def twin(self, value: Value, names: Names) -> Value:
        """A second name for a view, to be read from memory."""
        self.make(value)
        other = Value(names.fresh(value.name), value.type)
        self.mapping[other] = self.mapping[value]
        return other

    def make(self, value: Value) -> None:
        at = self.fuser.position.get(value)
        if value in self.mapping or at is None or at in self.fuser.group:
            return
        op = self.fuser.ops[at]
        if op.name == "constant":
            return
        for operand in op.operands:
            self.make(operand)
        result = Value(value.name, value.type)
        operands = tuple(self.mapping.get(v, v) for v in op.operands)
        self.emitted.append(op.replace(operands=operands, results=(result,)))
        self.mapping[value] = result


def _renamed(region: Graph, outputs: list[Value]) -> Graph:
    """The region with new values, so that no value has two definitions."""
    fresh: dict[Value, Value] = {v: Value(v.name, v.type) for v in region.params}
    ops: list[Op] = []
    for op in region.ops:
        results = tuple(Value(v.name, v.type) for v in op.results)
        ops.append(
            op.replace(operands=tuple(fresh[v] for v in op.operands), results=results)
        )
        fresh.update(zip(op.results, results, strict=True))
    return Graph(
        region.name,
        tuple(fresh[v] for v in region.params),
        tuple(ops),
        tuple(fresh[v] for v in outputs),
    )


def fuse(graph: Graph, cx: Context) -> Graph:
    """Groups every op of a decomposed graph into fusions.

    Ops of a training step's forward part share no fusion with the others: `recompute`
    decides which values are kept for the backward part.
    """
    apart: Collection[Value] = ()
    if cx.training is not None and cx.options.recompute:
        apart = forward_values(graph)
    places = frozenset(
        k for k, op in enumerate(graph.ops) if any(v in apart for v in op.results)
    )
    fuser = _Fuser(graph, cx, places)
    if cx.options.fuse and cx.options.constraints:
        fuser.run()
    elif cx.options.fuse:
        blind = _Fuser(forget(graph), cx, places)
        blind.run()
        fuser.adopt(blind)
    return fuser.build()


def kernel_count(graph: Graph) -> int:
    return sum(op.name == "fusion" for op in graph.ops)
