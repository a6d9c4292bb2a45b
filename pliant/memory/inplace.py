"""Results that are written over inputs which nothing reads any more.

    %b = alloc f32[n]                          %b = view(%a)
    call_loop(%a, %b) {callee = "f"}     ->    call_loop(%a) {callee = "f_over_0_1"}
    ... %b                                     ... %b

After this pass the memory of %a holds first a's value, then b's. It is live from the
first call that touches %a to the last that touches %b, and a's value is gone after the
call, so recomputing it cannot rely on that memory. %a must be dead after the call in
every order that the calls may run in. The called function has one buffer less: the
input became the result, with role "inout". The pass applies where the function is
proved to read each element before it is written (`inplace_proof.py`), and where both
buffers have the same size, so that live memory never grows. If %b is a result of the
graph, %a is in its memory from the start: a chain of updates, such as the residual
stream of a transformer, needs no memory besides that of the result it ends in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pliant.context import Context
from pliant.ir.calls import called_in
from pliant.ir.graph import ChunkLoop, Graph, Module, Op, Value
from pliant.ir.loop_walk import map_buffers
from pliant.ir.loops import LoopFunc, Role
from pliant.ir.ops import CALLS
from pliant.memory.inplace_proof import may_share
from pliant.sym import Facts, as_expr, eq

Steps = tuple[int, ...]  # a position in each of the orders


@dataclass(frozen=True, slots=True)
class InPlace:
    """A graph after the pass, and the loop functions that the pass added."""

    graph: Graph
    loops: Mapping[str, LoopFunc]
    chunks: Mapping[str, ChunkLoop]


class _InPlacePass:
    def __init__(
        self,
        graph: Graph,
        module: Module,
        facts: Facts,
        sequences: Sequence[Sequence[int]],
    ) -> None:
        self.graph, self.module, self.facts = graph, module, facts
        self.bases: dict[Value, Value] = {}
        self.allocs: dict[Value, Op] = {}
        self.views: dict[Value, Op] = {}
        self.places: dict[Value, int] = {}  # position of each alloc
        self.first: dict[Value, Steps] = {}  # the steps that touch a buffer
        self.last: dict[Value, Steps] = {}
        self.known: dict[tuple[str, int, int], LoopFunc | None] = {}
        self.loops: dict[str, LoopFunc] = {}
        self.chunks = dict(module.chunks)
        count = sum(op.name in CALLS for op in graph.ops)
        own = tuple(range(count))
        steps = _steps([own, *sequences], count)
        number = 0
        for k, op in enumerate(graph.ops):
            if op.name == "alloc":
                self.allocs[op.result] = op
                self.places[op.result] = k
            elif op.name == "view":
                self.views[op.result] = op
                self.bases[op.result] = self.base(op.operands[0])
            elif op.name in CALLS:
                at = steps[number]
                number += 1
                for value in op.operands:
                    root = self.base(value)
                    self.first[root] = tuple(map(min, self.first.get(root, at), at))
                    self.last[root] = tuple(map(max, self.last.get(root, at), at))
        self.steps = steps
        self.end = tuple(count for _ in (own, *sequences))
        for value in graph.results:
            self.last[self.base(value)] = self.end

    def base(self, value: Value) -> Value:
        return self.bases.get(value, value)

    def run(self) -> InPlace:
        ops = list(self.graph.ops)
        steps = iter(self.steps)
        for k, op in enumerate(self.graph.ops):
            if op.name in CALLS:
                step = next(steps)
                if op.name == "call_loop":
                    ops[k] = self.call(op, step, ops)
        if not self.loops:
            return InPlace(self.graph, {}, {})
        return InPlace(self.graph.replace(ops=tuple(ops)), self.loops, self.chunks)

    def call(self, op: Op, step: Steps, ops: list[Op]) -> Op:
        """The call with as many results as possible written over its inputs.

        The allocs of these results become views in `ops`.
        """
        found = self.pair(op, step)
        while found is not None:
            read, written, func = found
            old, new = op.operands[read], op.operands[written]
            operands = list(op.operands)
            operands[written] = old
            del operands[read]
            attrs = {**dict(op.attrs), "callee": func.name}
            op = op.replace(operands=tuple(operands), attrs=tuple(attrs.items()))
            self.loops[func.name] = func
            root = self.base(old)
            offset = (("offset", as_expr(0)),)
            ops[self.places[new]] = Op("view", (root,), offset, (new,))
            # Readers of the new buffer now read the old one.
            self.last[root] = self.last[new]
            for value, base in [*self.bases.items(), (new, new)]:
                if base is new:
                    self.bases[value] = root
            found = self.pair(op, step)
        return op

    def pair(self, op: Op, step: Steps) -> tuple[int, int, LoopFunc] | None:
        """An input and a result that may share memory, by their positions."""
        func = self.function(op.str_attr("callee"))
        if len(func.buffers) != len(op.operands):
            return None
        for written, result in enumerate(op.operands):
            if func.buffers[written].role is not Role.OUT:
                continue
            if not self.is_fresh(result, step) or op.operands.count(result) != 1:
                continue
            for read, source in enumerate(op.operands):
                if func.buffers[read].role is not Role.IN:
                    continue
                if not self.dies(op, source, step) or not self.fits(source, result):
                    continue
                shared = self.shared(func, read, written)
                if shared is not None:
                    return read, written, shared
        return None

    def function(self, name: str) -> LoopFunc:
        return self.loops.get(name) or self.module.loops[name]

    def is_fresh(self, value: Value, step: Steps) -> bool:
        """Whether the step is the first that touches a whole buffer of the graph."""
        return value in self.allocs and self.first[value] == step

    def dies(self, op: Op, value: Value, step: Steps) -> bool:
        """Whether the step is the last to touch a value's buffer, and only reads."""
        root = self.base(value)
        others = sum(self.base(v) is root for v in op.operands)
        ends = root in self.allocs and self.last[root] == step
        return ends and others == 1 and self.is_start(value)

    def is_start(self, value: Value) -> bool:
        """Whether a value starts at the start of its buffer and is row-major."""
        while value in self.views:
            op = self.views[value]
            if op.dim_attr("offset") != as_expr(0) or value.type.strides is not None:
                return False
            value = op.operands[0]
        return True

    def fits(self, source: Value, result: Value) -> bool:
        """Whether a result fills a whole buffer that is allocated before it."""
        root = self.base(source)
        if self.places[root] > self.places[result]:
            return False
        old, new = self.allocs[root], self.allocs[result]
        same = eq(old.dim_attr("bytes"), new.dim_attr("bytes"))
        return source.dtype is result.dtype and self.facts.prove(same) is True

    def shared(self, func: LoopFunc, read: int, written: int) -> LoopFunc | None:
        key = func.name, read, written
        if key not in self.known:
            one, other = func.buffers[read], func.buffers[written]
            same = (one.dtype, one.shape, one.strides) == (
                other.dtype,
                other.shape,
                other.strides,
            )
            chunks = self.chunks.get(func.name)
            apart = chunks is not None and (one.name, other.name) in chunks.aligned
            good = same and (apart or may_share(func, one, other))
            made = merged(func, read, written) if good else None
            if made is not None and chunks is not None:
                gone = {one.name, other.name}
                left = (pair for pair in chunks.aligned if not gone & set(pair))
                self.chunks[made.name] = replace(chunks, aligned=frozenset(left))
            self.known[key] = made
        return self.known[key]


def _steps(sequences: Sequence[Sequence[int]], count: int) -> list[Steps]:
    """The position of each call in each order."""
    places = [{call: k for k, call in enumerate(order)} for order in sequences]
    return [tuple(place[call] for place in places) for call in range(count)]


def in_place(
    graph: Graph, module: Module, facts: Facts, sequences: Sequence[Sequence[int]] = ()
) -> InPlace:
    """A lowered graph whose calls write over inputs that die, where that is proved.

    `sequences`: other orders that the calls may run in, by their numbers.
    """
    return _InPlacePass(graph, module, facts, sequences).run()


def inplace(module: Module, cx: Context) -> Module:
    """The pass over `main`; functions that are no longer called are dropped."""
    graph = module.main
    found = in_place(graph, module, cx.facts(graph), module.orders)
    if found.graph is graph:
        return module
    idle = set(called_in(graph)) - set(called_in(found.graph))
    kept = {name: func for name, func in module.loops.items() if name not in idle}
    loops = {**kept, **found.loops}
    return module.replace(loops=loops, chunks=found.chunks).with_main(found.graph)


# ---- a function with two buffers merged


def merged(func: LoopFunc, read: int, written: int) -> LoopFunc:
    """The function with an input and a result as one buffer, in the result's place."""
    one, other = func.buffers[read], func.buffers[written]
    both = replace(other, role=Role.INOUT)
    images = {one.name: both, other.name: both}
    buffers = [images.get(buffer.name, buffer) for buffer in func.buffers]
    del buffers[read]
    body = map_buffers(func.body, lambda buffer: images.get(buffer.name, buffer))
    name = f"{func.name}_over_{read}_{written}"
    return LoopFunc(name, func.sizes, tuple(buffers), body)
