"""New values of parameters and buffers are written over the old ones.

    %new = alloc ..                                 %new = view(%p)
    call_loop(%p, %g, %new)                ->       call_loop(%p, %g, %new)
    ..                                              ..
    return %loss, %new                              return %loss

A kernel that computes the new value of a parameter, or of a buffer of the model, writes
it in place if its loops allow that (`update_proof.py`), or if it is a function in C
that does (`OVERWRITES`). It then runs after all other kernels that read the old value,
and after all that may fail: an index out of range is found before anything is changed.
Kernels that read the new value, such as attention over a cache, read it where it is
stored. If the loops do not allow it, or if one of the kernels before needs a result of
this one, the new value is copied at the end.

In a training step, the kernels that may fail are those of the forward part. Checks in
the backward part see the same indices again. Versions of `main` that run in chunks
(`passes/chunk.py`) store the same results, each in its own calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pliant.context import Context
from pliant.ir.access import is_one
from pliant.ir.callees import reached
from pliant.ir.calls import called_in, calls_in, roles_of
from pliant.ir.graph import Graph, Module, Op, Value
from pliant.ir.loop_walk import Node, map_buffers, rewrite
from pliant.ir.loops import Buffer, Call, LoopFunc, Role, Stmt
from pliant.ir.ops import CALLS
from pliant.ir.ops_library import OVERWRITES
from pliant.ir.types import contiguous_strides
from pliant.lower.to_loops import Lowering, lower_group
from pliant.memory.order_graph import call_may_fail, may_fail
from pliant.memory.update_proof import is_pointwise
from pliant.sym import as_expr, sym


@dataclass(slots=True)
class _Update:
    module: Module
    graph: Graph
    loops: dict[str, LoopFunc]
    calls: list[Op]
    bases: dict[Value, Value]  # a view -> what it is a view of
    views: dict[Value, Op]
    # Per call: the calls before it, as bits.
    waits: list[int] = field(default_factory=list)
    stored: dict[Value, Value] = field(default_factory=dict)  # alloc -> param
    # Call -> results written in place.
    made: dict[int, set[str]] = field(default_factory=dict)
    refusing: list[int] = field(default_factory=list)  # calls that may fail

    def base(self, value: Value) -> Value:
        return self.bases.get(value, value)

    def func(self, call: Op) -> LoopFunc:
        return self.loops[call.str_attr("callee")]

    def touches(self, call: Op, value: Value) -> bool:
        return any(self.base(v) is value for v in call.operands)

    # ---- order

    def depend(self) -> None:
        """Each call waits for all that wrote what it touches, or read what it writes.

        `waits` is transitively closed.
        """
        last_writer: dict[Value, int] = {}
        readers: dict[Value, list[int]] = {}
        for number, call in enumerate(self.calls):
            before: set[int] = set()
            for value, writes in self.accesses(call):
                if value in last_writer:
                    before.add(last_writer[value])
                if writes:
                    before.update(readers.get(value, ()))
            for value, writes in self.accesses(call):
                readers.setdefault(value, []).append(number)
                if writes:
                    last_writer[value] = number
            before.discard(number)
            self.waits.append(self.closed(before))

    def find_checks(self, ends: Sequence[Value]) -> None:
        """Finds the calls with a check that these values depend on."""
        roots = {self.base(v) for v in ends}
        makers = {
            number
            for number, call in enumerate(self.calls)
            if any(writes and v in roots for v, writes in self.accesses(call))
        }
        needed, failing = self.closed(makers), may_fail(self.module)
        self.refusing = [
            number
            for number, call in enumerate(self.calls)
            if needed >> number & 1 and call_may_fail(call, self.module, failing)
        ]

    def closed(self, before: set[int]) -> int:
        bits = 0
        for number in before:
            bits |= self.waits[number] | 1 << number
        return bits

    def accesses(self, call: Op) -> list[tuple[Value, bool]]:
        roles = roles_of(call, self.module)
        if roles is None:
            return [(self.base(v), True) for v in call.operands]
        return [
            (self.base(v), role is not Role.IN)
            for v, role in zip(call.operands, roles, strict=True)
        ]

    def wait_for(self, number: int, before: list[int]) -> bool:
        """Makes a call wait for others; False, and no change, if that is a cycle."""
        if any(self.waits[n] >> number & 1 for n in before):
            return False
        bits = self.waits[number] | self.closed(set(before))
        self.waits[number] = bits
        for other, waits in enumerate(self.waits):
            if waits >> number & 1:
                self.waits[other] = waits | bits
        return True

    def order(self) -> list[int]:
        """The original order wherever nothing requires another one."""
        done, out = 0, []
        pending = list(range(len(self.calls)))
        while pending:
            number = next(n for n in pending if self.waits[n] & ~done == 0)
            pending.remove(number)
            out.append(number)
            done |= 1 << number
        return out

    # ---- in place

    def store(self, new: Value, old: Value) -> bool:
        """Lets the kernel that makes `new` write it to `old`; False if it must not."""
        new = self.whole(new)
        users = [n for n, call in enumerate(self.calls) if self.touches(call, new)]
        makers = [n for n in users if (new, True) in self.accesses(self.calls[n])]
        if len(makers) != 1 or new in self.stored or new in self.bases:
            return False
        (number,) = makers
        source = self.calls[number].operands[0]
        if self.is_library(number) and self.is_between(source, old):
            self.store(source, old)  # the write before this one
        result = self.overwriting(self.calls[number], new, old)
        if number in self.refusing or result is None:
            return False
        others = [
            n
            for n, other in enumerate(self.calls)
            if n != number and self.touches(other, old)
        ]
        if not self.wait_for(number, [*others, *self.refusing]):
            return False
        self.stored[new] = old
        for value, base in [*self.bases.items(), (new, new)]:
            if base is new:
                self.bases[value] = old
        if result:
            self.made.setdefault(number, set()).add(result)
        return True

    def whole(self, value: Value) -> Value:
        """The buffer that a value is all of."""
        while value in self.views:
            op = self.views[value]
            (source,) = op.operands
            if source.type.bytes != value.type.bytes or not _is_row_major(op):
                break
            value = source
        return value

    def is_all(self, value: Value, old: Value) -> bool:
        """Whether a value is all of a parameter's memory."""
        whole = self.whole(value)
        return whole is old or self.stored.get(whole) is old

    def is_library(self, number: int) -> bool:
        call = self.calls[number]
        return call.name == "call_library" and call.str_attr("callee") in OVERWRITES

    def is_between(self, value: Value, old: Value) -> bool:
        """Whether a value is neither a parameter nor what is stored in one."""
        base = self.base(value)
        return base is not old and base not in self.graph.params

    def overwriting(self, call: Op, new: Value, old: Value) -> str | None:
        """The buffer by which a call may write `new` over `old`; None if it must not.

        A function in C that may be called so has no other name for it.
        """
        if call.name == "call_library":
            source, *rest = call.operands
            may = call.str_attr("callee") in OVERWRITES and (
                self.base(source) is not old
                or self.whole(source) in (old, *self.stored)
            )
            others = [v for v in rest if v is not new]
            apart = all(self.base(v) is not old for v in others)
            return "" if may and apart else None
        func = self.func(call)
        pairs = list(zip(call.operands, func.buffers, strict=True))
        results = [b.name for v, b in pairs if v is new and b.role is Role.OUT]
        if len(results) != 1:
            return None
        for value, buffer in pairs:
            if self.base(value) is not old:
                continue
            if not self.is_all(value, old) or buffer.role is not Role.IN:
                return None
            if not is_pointwise(func, buffer.name, results[0], self.loops):
                return None
        return results[0]

    def rewrite(self) -> None:
        """Calls the functions that allow for it, in place of those that do not."""
        for number, names in self.made.items():
            call = self.calls[number]
            func = with_inout(self.func(call), frozenset(names), self.loops)
            attrs = {**dict(call.attrs), "callee": func.name}
            self.calls[number] = call.replace(attrs=tuple(attrs.items()))

    def placed(self, op: Op) -> Op:
        """An alloc of what is stored in place becomes a view of where that is."""
        if op.name != "alloc" or op.result not in self.stored:
            return op
        where = self.stored[op.result]
        return Op("view", (where,), (("offset", as_expr(0)),), (op.result,))

    # ---- copies

    def copy(self, new: Value, old: Value, cx: Context) -> tuple[Op, Graph]:
        source, copied = Value("source", new.type), Value("copied", old.type)
        op = Op("reshape", (source,), (("shape", old.shape),), (copied,))
        name = f"store_{old.name}"
        region = Graph(name, (source,), (op,), (copied,))
        lowering = Lowering(cx.facts(self.graph), lambda _: 0, cx.target.lanes, False)
        step = lower_group(region, name, lowering)
        self.loops[step.func.name] = step.func
        given = {source: new, copied: old}
        arguments = tuple(given[a] for a in step.arguments if isinstance(a, Value))
        sizes = tuple(map(sym, step.func.sizes))
        attrs = (("callee", step.func.name), ("sizes", sizes), ("computes", name))
        return Op("call_loop", arguments, attrs, (), (), ""), region


def _is_row_major(view: Op) -> bool:
    """From the start of what it is a view of; axes of one element aside."""
    shape, strides = view.result.shape, view.result.type.strides
    if view.dim_attr("offset") != as_expr(0):
        return False
    pairs = zip(shape, strides or contiguous_strides(shape), strict=True)
    wanted = contiguous_strides(shape)
    return all(
        is_one(dim) or have == want
        for (dim, have), want in zip(pairs, wanted, strict=True)
    )


# ---- the function in place


def with_inout(
    func: LoopFunc, names: frozenset[str], functions: dict[str, LoopFunc]
) -> LoopFunc:
    """The function with these results INOUT, so that its code allows for aliasing.

    Functions that it calls with them are changed likewise, and added to `functions`.
    """
    renamed = f"{func.name}_in_place"
    found = functions.get(renamed)
    mapping = {b: replace(b, role=Role.INOUT) for b in func.buffers if b.name in names}
    buffers = tuple(mapping.get(b, b) for b in func.buffers)
    if found is not None and found.buffers == buffers:
        return found
    while renamed in functions:
        renamed += "_"
    body = _with_results(func.body, mapping, functions)
    made = LoopFunc(renamed, func.sizes, buffers, body)
    functions[renamed] = made
    return made


def _with_results(
    body: Stmt, mapping: Mapping[Buffer, Buffer], functions: dict[str, LoopFunc]
) -> Stmt:
    """The body with other buffers, calling the functions made for those."""
    names = {buffer.name for buffer in mapping}

    def calling(node: Node) -> Node:
        if not isinstance(node, Call):
            return node
        callee = functions[node.function]
        passed = frozenset(
            b.name
            for b, (given, _) in zip(callee.buffers, node.arguments, strict=True)
            if given.name in names and b.role is Role.OUT
        )
        if not passed:
            return node
        return replace(node, function=with_inout(callee, passed, functions).name)

    return map_buffers(rewrite(body, calling), lambda b: mapping.get(b, b))


# ---- the pass


def update(module: Module, cx: Context) -> Module:
    """The lowered module with some of its results stored in parameters.

    In training, these are all but the first; the step says which ones, and how many of
    them belong to the forward part, as the first result does. So it is in each version
    of `main`.
    """
    stores, forward = cx.stores, len(module.main.results)
    if cx.training is not None:
        stores = tuple((name, 1 + k) for k, name in enumerate(cx.training.updates))
        forward = 1 + cx.training.changed
    if not stores:
        return module
    loops, graphs = dict(module.loops), dict(module.graphs)
    for version in (module.main, *module.versions):
        stored, purposes = _stored(module, version, loops, stores, forward, cx)
        graphs |= {region.name: region for region in purposes}
        graphs[version.name] = stored
    made = module.replace(graphs=graphs)
    called = {f for graph in (made.main, *made.versions) for f in called_in(graph)}
    used = reached(called, loops)
    return made.replace(loops={k: f for k, f in loops.items() if k in used})


def _stored(
    module: Module,
    graph: Graph,
    loops: dict[str, LoopFunc],
    stores: Sequence[tuple[str, int]],
    forward: int,
    cx: Context,
) -> tuple[Graph, list[Graph]]:
    """A version that stores results in parameters, and what its copies compute.

    Functions that it calls in addition are added to `loops`.
    """
    bases: dict[Value, Value] = {}
    views = {op.result: op for op in graph.ops if op.name == "view"}
    for op in graph.ops:
        if op.name == "view":
            bases[op.result] = bases.get(op.operands[0], op.operands[0])
    calls = list(calls_in(graph))
    state = _Update(module, graph, loops, calls, bases, views)
    state.depend()
    state.find_checks(graph.results[:forward])
    params = {v.name: v for v in graph.params}
    copies: list[tuple[Op, Graph]] = []
    for name, number in stores:
        new, old = graph.results[number], params[name]
        if not (cx.options.update and state.store(new, old)):
            copies.append(state.copy(new, old, cx))
    state.rewrite()
    first = [state.placed(op) for op in graph.ops if op.name not in CALLS]
    ordered = [state.calls[n] for n in state.order()]
    ops = (*first, *ordered, *(op for op, _ in copies))
    gone = {number for _, number in stores}
    results = tuple(v for k, v in enumerate(graph.results) if k not in gone)
    purposes = [region for _, region in copies]
    return graph.replace(ops=ops, results=results), purposes
