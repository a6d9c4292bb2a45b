"""Control flow as loop functions that call the kernels of their regions.

    %y = while(%x) region test(%x) {..} region body(%x) {..}
    ->
    %y, %next, %test, %memory = call_loop(%x) {callee = "while_0", sizes = [n, threads]}

    loop @while_0(n, threads; in %x: f32[n], out %y: f32[n], out %next: f32[n],
                  out %test: bool[], out %memory: u8[..]) {
        copy %x to %y
        call @while_0.test.map_0(n; %y[0], %test[0])
        while %test[0] {
            call @while_0.body.map_0(n; %y[0], %next[0])
            call @while_0.test.map_0(n; %next[0], %test[0])
            if %test[0] {
                call @while_0.body.map_0(n; %next[0], %y[0])
                call @while_0.test.map_0(n; %y[0], %test[0])
            } else { copy %next to %y }
        }
    }

Each region goes through the pipeline by itself, up to ordered calls that write in
place, and its kernels become loop functions of the module. So a kernel in a loop is
compiled once and nothing is allocated per iteration. To the rest of the program the
whole is one call. Its temporaries are in `%memory`: those of a region share it where
one is dead before the next is needed, and regions that never run at the same time
share all of it.

Constants are defined inside the region that reads them, so that products there have
packed weights. Values that a loop passes on unchanged are not carried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pliant.ir.graph import Module, Names, Op, Value, names_of
from pliant.ir.loops import Block, Check, If, Index, Let, Role, Stmt
from pliant.ir.types import TensorType
from pliant.memory.flow_function import FlowFunction, first, flat, inputs_of, tested
from pliant.memory.flow_loops import loop, scan, while_
from pliant.memory.flow_regions import CompileRegion, Flows, LoweredRegion, Place
from pliant.sym import Facts, Guard, le, maximum, minimum, sym
from pliant.sym.monotone import largest


def _if(flows: Flows, op: Op, name: str) -> FlowFunction:
    cond, *operands = op.operands
    made = FlowFunction(
        (cond, *operands),
        [flat("cond", cond.type, Role.IN)],
        [flat(v.name, v.type, Role.OUT) for v in op.results],
    )
    inputs = inputs_of(operands)
    made.operands = (cond, *inputs)
    made.inputs += inputs.values()
    branches: list[tuple[LoweredRegion, list[Place]]] = []
    for region, what in zip(op.regions, ("then", "else"), strict=True):
        given = dict(zip(region.params, operands, strict=True))
        lowered, params = flows.region(region, given, f"{name}.{what}")
        branches.append((lowered, [Place(inputs[given[p]]) for p in params]))
    made.read(flows, [lowered for lowered, _ in branches])
    memory = made.memory(*(lowered.bytes for lowered, _ in branches))
    results = [Place(b) for b in made.outputs]
    then, other = (
        Block(tuple(lowered.calls(memory, params, results, made.weights)))
        for lowered, params in branches
    )
    made.body.append(If(first(made.inputs[0]), then, other))
    return made


def _bind(flows: Flows, op: Op, name: str) -> FlowFunction:
    """The region at sizes that are read from memory."""
    (region,) = op.regions
    sizes = region.sizes
    counts, operands = op.operands[: len(sizes)], op.operands[len(sizes) :]
    most = dict(zip(sizes, op.dims_attr("most"), strict=True))
    limits = [Guard(le(sym(s), bound), (), op.loc) for s, bound in most.items()]
    outer = flows.facts
    for limit in limits:
        flows.facts = flows.facts.assume(limit.cond)
    region = region.replace(constraints=(*limits, *region.constraints))
    inputs = inputs_of(operands)
    numbers = [
        flat(f"size_{s}", v.type, Role.IN) for s, v in zip(sizes, counts, strict=True)
    ]
    made = FlowFunction(
        (*counts, *inputs),
        [*numbers, *inputs.values()],
        [flat(v.name, v.type, Role.OUT) for v in op.results],
    )
    given = dict(zip(region.params, operands, strict=True))
    lowered, params = flows.region(region, given, f"{name}.body")
    made.read(flows, [lowered])
    tests = flows.bounded(op, name, lowered, most)
    room = largest(lowered.bytes, most, flows.facts)
    if room is None:
        flows.refuse(op, "no largest size is known for what it takes")
    memory = made.memory(room)
    flows.facts = outer
    results = [Place(b) for b in made.outputs]
    places = [Place(inputs[given[p]]) for p in params]
    # A size out of range was reported as a failure by the kernel that computed it. It
    # is clamped here, because the memory is laid out for sizes up to the largest.
    read = [Let(f"_{s}", first(b)) for s, b in zip(sizes, numbers, strict=True)]
    bound = [Let(s, Index(minimum(maximum(sym(f"_{s}"), 0), most[s]))) for s in sizes]
    calls: list[Stmt] = list(lowered.calls(memory, places, results, made.weights))
    # What is required of the sizes is tested now that they are known.
    for guard in reversed(tests):
        holds, number = tested(guard.cond), flows.number(guard, sizes)
        told = Index(sym(sizes[0]))
        calls = [Check(holds, number, told), If(holds, Block(tuple(calls)))]
    made.body += [*read, *bound, *calls]
    return made


_FLOW: dict[str, Callable[[Flows, Op, str], FlowFunction]] = {
    "if": _if,
    "while": while_,
    "loop": loop,
    "scan": scan,
    "bind": _bind,
}


@dataclass(slots=True)
class _FlowRewriter:
    """Replaces the control ops of a graph by calls."""

    flows: Flows
    numbers: dict[str, int] = field(default_factory=dict)

    def rewritten(self) -> Module:
        for op in self.flows.graph.ops:
            operands = tuple(self.flows.values.get(v, v) for v in op.operands)
            op = op if operands == op.operands else op.replace(operands=operands)
            if op.name in _FLOW:
                self.flow(op)
            else:
                self.flows.ops.append(op)
                self.flows.producers.update((v, op) for v in op.results)
        results = tuple(self.flows.values.get(v, v) for v in self.flows.graph.results)
        graph = self.flows.graph.replace(ops=tuple(self.flows.ops), results=results)
        return self.flows.module.with_main(graph)

    def flow(self, op: Op) -> None:
        number = self.numbers.get(op.name, -1) + 1
        self.numbers[op.name] = number
        name = f"{op.name}_{number}"
        if self.flows.graph.name != "main":
            name = f"{self.flows.graph.name}.{name}"
        built = _FLOW[op.name](self.flows, op, name)
        built.forget_unread()
        loose = [s for v in op.results for d in v.shape for s in d.symbols()]
        known = {s for v in op.operands for d in v.shape for s in d.symbols()}
        if not known | set(self.flows.graph_symbols()) >= set(loose):
            self.flows.refuse(op, "its results have sizes that only the run tells")
        function = built.function(name)
        self.flows.module = self.flows.module.replace(
            loops={**self.flows.module.loops, name: function}
        )
        sizes = tuple(sym(s) for s in function.sizes)
        extra = [
            Value(self.flows.names.fresh(b.name), TensorType(b.dtype, b.shape))
            for b in built.extra
        ]
        weights = tuple(self.flows.constant(n) for n in built.weights)
        taken = {b.name for b in built.outputs}
        kept = [v for v in op.results if v.name in taken]
        attrs = (("callee", name), ("sizes", sizes))
        call = Op(
            "call_loop",
            (*built.operands, *weights),
            attrs,
            (*kept, *extra),
            (),
            op.loc,
        )
        self.flows.ops.append(call)


def lower_flows(module: Module, facts: Facts, compile_region: CompileRegion) -> Module:
    """`main` with its control flow as calls of loop functions."""
    graph = module.main
    if not any(op.name in _FLOW for op in graph.ops):
        return module
    names = Names(names_of(graph))
    flows = Flows(module, graph, compile_region, facts, names)
    return _FlowRewriter(flows).rewritten()
