"""New parameters are written over the old ones.

    %new = alloc ..                                 call_loop(%p, %g, %p)
    call_loop(%p, %g, %new)                ->       ..
    ..                                              return %loss
    return %loss, %new

A kernel that computes the new value of a parameter writes it in place if its loops
allow that (`memory/pointwise.py`). It then runs after all other kernels that read the
old value, and after all that may fail: an index out of range is found before anything
is changed. If the loops do not allow it, or if one of those kernels needs a result of
this one, the new value is copied at the end.

The kernels that may fail are those of the forward part. Checks in the backward part see
the same indices again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pliant.context import Context
from pliant.ir.calls import calls_in, roles_of
from pliant.ir.graph import Graph, Module, Op, Value
from pliant.ir.loop_walk import statements
from pliant.ir.loops import Call, LoopFunc, Role
from pliant.ir.ops import CALLS
from pliant.lower.to_loops import Lowering, lower_group
from pliant.memory.order import call_may_fail, may_fail
from pliant.memory.pointwise import in_place, is_pointwise
from pliant.sym import sym


@dataclass(slots=True)
class _Update:
    module: Module
    graph: Graph
    loops: dict[str, LoopFunc]
    calls: list[Op]
    bases: dict[Value, Value]  # a view -> what it is a view of
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
        users = [n for n, call in enumerate(self.calls) if self.touches(call, new)]
        if len(users) != 1 or new in self.stored or new in self.bases:
            return False
        (number,) = users
        call = self.calls[number]
        if call.name != "call_loop" or number in self.refusing:
            return False
        func = self.func(call)
        pairs = list(zip(call.operands, func.buffers, strict=True))
        results = [b.name for v, b in pairs if v is new and b.role is Role.OUT]
        if len(results) != 1:
            return False
        for value, buffer in pairs:
            if self.base(value) is not old:
                continue
            if value is not old or buffer.role is not Role.IN:
                return False
            if not is_pointwise(func, buffer.name, results[0], self.loops):
                return False
        others = [
            n
            for n, other in enumerate(self.calls)
            if n != number and self.touches(other, old)
        ]
        if not self.wait_for(number, [*others, *self.refusing]):
            return False
        self.stored[new] = old
        self.made.setdefault(number, set()).add(results[0])
        return True

    def rewrite(self) -> None:
        for number, names in self.made.items():
            call = self.calls[number]
            func = in_place(self.func(call), frozenset(names), self.loops)
            operands = tuple(self.stored.get(v, v) for v in call.operands)
            attrs = {**dict(call.attrs), "callee": func.name}
            self.calls[number] = call.replace(
                operands=operands, attrs=tuple(attrs.items())
            )

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


def update(module: Module, cx: Context) -> Module:
    """The lowered module with all results after the first stored in parameters.

    The training step says which ones, and how many of them belong to the forward part,
    as the first result does.
    """
    assert cx.training is not None
    updates, changed = cx.training.updates, cx.training.changed
    if not updates:
        return module
    graph = module.main
    bases: dict[Value, Value] = {}
    for op in graph.ops:
        if op.name == "view":
            bases[op.result] = bases.get(op.operands[0], op.operands[0])
    state = _Update(module, graph, dict(module.loops), list(calls_in(graph)), bases)
    state.depend()
    state.find_checks(graph.results[: 1 + changed])
    params = {v.name: v for v in graph.params}
    loss, *news = graph.results
    copies: list[tuple[Op, Graph]] = []
    for new, name in zip(news, updates, strict=True):
        old = params[name]
        if not (cx.options.update and state.store(new, old)):
            copies.append(state.copy(new, old, cx))
    state.rewrite()
    order = state.order()
    gone = set(state.stored)
    first = [
        op
        for op in graph.ops
        if op.name not in CALLS and not (op.name == "alloc" and op.result in gone)
    ]
    ordered = [state.calls[n] for n in order]
    ops = (*first, *ordered, *(op for op, _ in copies))
    main = graph.replace(ops=ops, results=(loss,))
    used = _reached(main, state.loops)
    loops = {name: f for name, f in state.loops.items() if name in used}
    purposes = {region.name: region for _, region in copies}
    return module.replace(
        graphs={**module.graphs, "main": main, **purposes}, loops=loops
    )


def _reached(graph: Graph, loops: dict[str, LoopFunc]) -> set[str]:
    """Functions that are still called."""
    pending = [op.str_attr("callee") for op in graph.ops if op.name == "call_loop"]
    found: set[str] = set()
    while pending:
        name = pending.pop()
        if name in found:
            continue
        found.add(name)
        pending += [
            s.function for s in statements(loops[name].body) if isinstance(s, Call)
        ]
    return found
