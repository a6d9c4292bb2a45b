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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pliant.errors import UnsupportedOp, UnsupportedOpError
from pliant.ir.calls import computed
from pliant.ir.graph import Constant, Graph, Module, Names, Op, Value, names_of
from pliant.ir.loop_walk import size_symbols
from pliant.ir.loops import (
    Binary,
    Block,
    Buffer,
    Call,
    For,
    If,
    Index,
    Kind,
    Let,
    Load,
    LoopFunc,
    Role,
    Stmt,
    Store,
    While,
    buffer,
)
from pliant.ir.types import DType, TensorType
from pliant.lower.nest import BLOCK, grain
from pliant.memory.liveness import ALIGN, liveness
from pliant.sym import (
    Expr,
    Facts,
    Guard,
    as_expr,
    ceildiv,
    floordiv,
    ge,
    le,
    maximum,
    minimum,
    mod,
    sym,
)
from pliant.sym.monotone import largest

FLOWS = frozenset({"if", "while", "loop", "scan", "bind"})
# Takes a region as the `main` of a module to ordered calls.
CompileRegion = Callable[[Module], Module]


# ---- a region, lowered


@dataclass(frozen=True, slots=True)
class Place:
    """An address: a buffer of the flow's function, and bytes into it."""

    buffer: Buffer
    offset: Expr = field(default_factory=lambda: as_expr(0))

    @property
    def argument(self) -> tuple[Buffer, tuple[Expr, ...]]:
        return self.buffer, (floordiv(self.offset, self.buffer.dtype.bytes),)


@dataclass(frozen=True, slots=True)
class LoweredRegion:
    """The calls of a region, its constants, and where its temporaries are."""

    graph: Graph
    offsets: Mapping[Value, Expr]  # of temporaries, in the memory
    bytes: Expr  # of the memory
    constants: Mapping[str, str]  # name in the graph -> name in the module

    def calls(
        self,
        memory: Buffer,
        params: Sequence[Place],
        results: Sequence[Place],
        weights: Mapping[str, Buffer],
    ) -> Iterator[Stmt]:
        """The calls, on these arguments; results are written where they are wanted."""
        places = dict(zip(self.graph.params, params, strict=True))
        bases = liveness(self.graph).outputs
        wanted = dict(zip(bases, results, strict=True))
        for op in self.graph.ops:
            match op.name:
                case "constant":
                    name = self.constants[op.str_attr("name")]
                    places[op.result] = Place(weights[name])
                case "alloc" if op.result in wanted:
                    places[op.result] = wanted[op.result]
                case "alloc" if op.result in self.offsets:
                    places[op.result] = Place(memory, self.offsets[op.result])
                case "alloc":
                    pass  # nothing reads or writes it
                case "view":
                    base = places[op.operands[0]]
                    offset = base.offset + op.dim_attr("offset")
                    places[op.result] = Place(base.buffer, offset)
                case _:
                    arguments = tuple(places[v].argument for v in op.operands)
                    yield Call(op.str_attr("callee"), op.dims_attr("sizes"), arguments)


def _laid_out(graph: Graph, facts: Facts) -> tuple[dict[Value, Expr], Expr]:
    """Offsets of a region's temporaries, and the bytes of all.

    A temporary takes the place of one that is dead and proved to be no smaller.
    """
    offsets: dict[Value, Expr] = {}
    slots: list[tuple[Expr, Expr, int]] = []  # offset, bytes, step of the last use
    end = as_expr(0)
    for temporary in sorted(liveness(graph).buffers, key=lambda b: b.first):
        wanted = temporary.bytes
        for k, (offset, size, last) in enumerate(slots):
            free = last < temporary.first
            if free and facts.prove(le(wanted, size)) is True:
                slots[k] = offset, size, temporary.last
                offsets[temporary.value] = offset
                break
        else:
            slots.append((end, wanted, temporary.last))
            offsets[temporary.value] = end
            end = end + ALIGN * ceildiv(wanted, ALIGN)
    return offsets, end


# ---- a flow


@dataclass(slots=True)
class _Flows:
    """Replaces the control ops of a graph by calls; collects what those call."""

    module: Module
    graph: Graph
    compile: CompileRegion
    facts: Facts
    names: Names
    values: dict[Value, Value] = field(default_factory=dict)  # replaced results
    ops: list[Op] = field(default_factory=list)
    producers: dict[Value, Op] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)

    def rewritten(self) -> Module:
        for op in self.graph.ops:
            operands = tuple(self.values.get(v, v) for v in op.operands)
            op = op if operands == op.operands else op.replace(operands=operands)
            if op.name in FLOWS:
                self.flow(op)
            else:
                self.ops.append(op)
                self.producers.update((v, op) for v in op.results)
        results = tuple(self.values.get(v, v) for v in self.graph.results)
        graph = self.graph.replace(ops=tuple(self.ops), results=results)
        return self.module.with_main(graph)

    def flow(self, op: Op) -> None:
        number = self.numbers.get(op.name, -1) + 1
        self.numbers[op.name] = number
        name = f"{op.name}_{number}"
        if self.graph.name != "main":
            name = f"{self.graph.name}.{name}"
        built = _FLOW[op.name](self, op, name)
        loose = [s for v in op.results for d in v.shape for s in d.symbols()]
        known = {s for v in op.operands for d in v.shape for s in d.symbols()}
        if not known | set(self.graph_symbols()) >= set(loose):
            self.refuse(op, "its results have sizes that only the run tells")
        function = built.function(name)
        self.module = self.module.replace(
            loops={**self.module.loops, name: function},
            inside={**self.module.inside, name: tuple(built.computed)},
        )
        sizes = tuple(sym(s) for s in function.sizes)
        extra = [
            Value(self.names.fresh(b.name), TensorType(b.dtype, b.shape))
            for b in built.extra
        ]
        weights = tuple(self.constant(n) for n in built.weights)
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
        self.ops.append(call)

    def bounded(
        self, op: Op, name: str, region: LoweredRegion, most: Mapping[str, Expr]
    ) -> None:
        """Replaces the sizes of what a region computes by the largest, for checks.

        What cannot be bounded, or is not proved when it must hold, is refused.
        """
        for guard in region.graph.constraints:
            data = any(s in most for s in guard.cond.symbols())
            if data and self.facts.prove(guard.cond) is not True:
                self.refuse(op, f"{guard.cond} depends on data and is not proved")
        whole = dict(self.module.inside)
        for key in [k for k in whole if k.startswith(f"{name}.body")]:
            values = [
                Value(v.name, v.type.with_shape(self.largest_dims(op, v, most)))
                for graph in whole[key]
                for v in _values(graph)
            ]
            whole[key] = (Graph(key, tuple(values), (), ()),)
        self.module = self.module.replace(inside=whole)

    def largest_dims(
        self, op: Op, value: Value, most: Mapping[str, Expr]
    ) -> tuple[Expr, ...]:
        dims = []
        for dim in value.shape:
            end = largest(dim, most, self.facts)
            if end is None or self.facts.prove(ge(dim, 0)) is not True:
                self.refuse(op, f"no range is known for the size {dim}")
                raise AssertionError
            dims.append(end)
        return tuple(dims)

    def refuse(self, op: Op, why: str) -> None:
        raise UnsupportedOpError([UnsupportedOp(op.name, why, op.loc or "unknown")])

    def graph_symbols(self) -> Iterator[str]:
        yield from self.graph.sizes
        for value in self.graph.params:
            for dim in value.shape:
                yield from dim.symbols()

    def constant(self, name: str) -> Value:
        made = Value(self.names.fresh(name), self.module.constants[name].type)
        self.ops.append(Op("constant", (), (("name", name),), (made,)))
        return made

    def is_constant(self, value: Value) -> str | None:
        producer = self.producers.get(value)
        if producer is None or producer.name != "constant":
            return None
        return producer.str_attr("name")

    def region(
        self, region: Graph, given: Mapping[Value, Value], name: str
    ) -> tuple[LoweredRegion, tuple[Value, ...]]:
        """A region through the pipeline, and the params that it still takes.

        `given` are operands that never change: constants among them move inside.
        """
        inside: list[Op] = []
        params: list[Value] = []
        for param in region.params:
            constant = self.is_constant(given[param]) if param in given else None
            if constant is None:
                params.append(param)
            else:
                attrs = (("name", constant),)
                inside.append(Op("constant", (), attrs, (param,)))
        ops = (*inside, *region.ops)
        guards = (*self.graph.constraints, *region.constraints)
        graph = Graph(name, tuple(params), ops, region.results, (), guards)
        known = (*self.graph_symbols(), *region.sizes)
        free = {s for s in known if s not in _param_symbols(params)}
        graph = graph.replace(sizes=tuple(sorted(free)))
        lowered = self.compile(self.module.replace(graphs={"main": graph}))
        return self.adopted(lowered, name), tuple(params)

    def adopted(self, lowered: Module, name: str) -> LoweredRegion:
        """Moves a lowered region's functions, constants and guards to the module."""
        own = self.module
        constants = dict(own.constants)
        names: dict[str, str] = {}
        for key, constant in lowered.constants.items():
            known = constants.get(key)
            names[key] = key if known is constant else f"{name}.{key}"
            constants[names[key]] = _named(constant, names[key])
        known_guards = {guard.cond for guard in self.graph.constraints}
        sizes = set(self.graph_symbols())
        more = [
            guard
            for guard in lowered.main.constraints
            if guard.cond not in known_guards and sizes.issuperset(guard.cond.symbols())
        ]
        if more:
            guards = (*self.graph.constraints, *more)
            self.graph = self.graph.replace(constraints=guards)
        computes = tuple(computed(lowered))
        self.module = own.replace(
            loops={**own.loops, **lowered.loops},
            constants=constants,
            checks=lowered.checks,
            inside={**own.inside, **lowered.inside, name: computes},
        )
        offsets, size = _laid_out(lowered.main, self.facts)
        return LoweredRegion(lowered.main, offsets, size, names)


def _values(graph: Graph) -> Iterator[Value]:
    yield from graph.params
    for op in graph.ops:
        yield from op.results
        for region in op.regions:
            yield from _values(region)


def _param_symbols(params: Sequence[Value]) -> set[str]:
    return {s for v in params for d in v.shape for s in d.symbols()}


def _named(constant: Constant, name: str) -> Constant:
    return constant if constant.name == name else replace(constant, name=name)


@dataclass(slots=True)
class _Function:
    """The function of one flow, while it is made."""

    operands: tuple[Value, ...]
    inputs: list[Buffer]
    outputs: list[Buffer]
    weights: dict[str, Buffer] = field(default_factory=dict)  # by constant
    extra: list[Buffer] = field(default_factory=list)
    body: list[Stmt] = field(default_factory=list)
    computed: list[Graph] = field(default_factory=list)

    def function(self, name: str) -> LoopFunc:
        body = Block(tuple(self.body))
        held = (*self.inputs, *self.weights.values(), *self.outputs, *self.extra)
        return LoopFunc(name, size_symbols(body, held), held, body)

    def memory(self, *sizes: Expr) -> Buffer:
        """The memory of temporaries, large enough for each of some regions."""
        largest = sizes[0]
        for size in sizes[1:]:
            largest = maximum(largest, size)
        return self.scratch("memory", DType.U8, largest)

    def scratch(self, name: str, dtype: DType, count: Expr) -> Buffer:
        made = buffer(name, dtype, (count,), Role.OUT)
        self.extra.append(made)
        return made

    def read(self, flows: _Flows, regions: Sequence[LoweredRegion]) -> None:
        """Takes the constants of regions as inputs."""
        for region in regions:
            for name in region.constants.values():
                if name not in self.weights:
                    type = flows.module.constants[name].type
                    self.weights[name] = _flat(name, type, Role.IN)


def _flat(name: str, type: TensorType, role: Role) -> Buffer:
    return buffer(name, type.dtype, (type.numel,), role)


def _inputs(values: Sequence[Value]) -> dict[Value, Buffer]:
    return {v: _flat(f"arg_{k}", v.type, Role.IN) for k, v in enumerate(values)}


def _copy(target: Buffer, source: Buffer, count: Expr) -> Stmt:
    """Copies elements, in blocks that threads share."""
    i, block = sym("_i"), sym("_block")
    first, end = block * BLOCK, minimum(count, (block + 1) * BLOCK)
    store = Store(target, (i,), Load(source, (i,)))
    inner = For("_i", first, end, store, Kind.VECTOR)
    blocks = ceildiv(count, BLOCK)
    each = grain(as_expr(BLOCK))
    return For("_block", as_expr(0), blocks, inner, Kind.PARALLEL, grain=each)


def _first(buf: Buffer) -> Load:
    return Load(buf, (as_expr(0),))


def _if(flows: _Flows, op: Op, name: str) -> _Function:
    cond, *operands = op.operands
    made = _Function(
        (cond, *operands),
        [_flat("cond", cond.type, Role.IN)],
        [_flat(v.name, v.type, Role.OUT) for v in op.results],
    )
    inputs = _inputs(operands)
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
    made.body.append(If(_first(made.inputs[0]), then, other))
    return made


@dataclass(frozen=True, slots=True)
class _Carried:
    """The values of a loop: those it only reads, and those it changes."""

    fixed: dict[int, Value]  # by position: what every round is given
    changing: tuple[int, ...]


def _carried(flows: _Flows, op: Op, body: Graph, values: Sequence[Value]) -> _Carried:
    """Splits a loop's values; results that are not carried are the operands."""
    own = 1 if op.name == "loop" else 0  # the number of the round
    fixed: dict[int, Value] = {}
    for k, value in enumerate(values):
        if body.results[k] is body.params[own + k]:
            fixed[k] = value
            flows.values[op.results[k]] = value
    changing = tuple(k for k in range(len(values)) if k not in fixed)
    return _Carried(fixed, changing)


@dataclass(frozen=True, slots=True)
class _Turn:
    """A region of a loop, to be called with the present values."""

    rounds: _Rounds
    region: LoweredRegion
    params: Mapping[Value, Place | int]  # a place, or the position of a carried value

    def calls(
        self, memory: Buffer, results: Sequence[Place | int], odd: bool
    ) -> Iterator[Stmt]:
        """An odd turn reads the second memory of what is carried, writes the first."""
        rounds = self.rounds

        def place(at: Place | int, second: bool) -> Place:
            return rounds.carried(at, second) if isinstance(at, int) else at

        given = [place(self.params[p], odd) for p in self.region.graph.params]
        written = [place(at, not odd) for at in results]
        return self.region.calls(memory, given, written, rounds.made.weights)


class _Rounds:
    """What loops share: values that are carried from round to round.

    Each has two memories, the result of the loop and another one. Rounds read one of
    them and write the other in turn, so that nothing is copied from round to round.
    """

    def __init__(
        self, flows: _Flows, op: Op, name: str, body: Graph, values: Sequence[Value]
    ) -> None:
        self.flows, self.name, self.values = flows, name, values
        self.split = _carried(flows, op, body, values)
        self.inputs = _inputs(values)
        self.changing = self.split.changing
        results = [op.results[k] for k in self.changing]
        made = self.made = _Function(
            tuple(self.inputs),
            list(self.inputs.values()),
            [_flat(v.name, v.type, Role.OUT) for v in results],
        )
        self.first = dict(zip(self.changing, made.outputs, strict=True))
        self.second = {
            k: made.scratch(f"next_{v.name}", v.dtype, v.type.numel)
            for k, v in zip(self.changing, results, strict=True)
        }

    def given(self, value: Value, name: str, first: bool = False) -> Buffer:
        """The buffer of an operand that is not carried."""
        made = _flat(name, value.type, Role.IN)
        place = 0 if first else len(self.made.operands)
        operands = self.made.operands
        self.made.operands = (*operands[:place], value, *operands[place:])
        self.made.inputs.insert(place, made)
        return made

    def lowered(
        self,
        region: Graph,
        what: str,
        results: Sequence[Value],
        before: Sequence[Place] = (),
        behind: Sequence[Place] = (),
    ) -> _Turn:
        """A region that gives these results.

        It takes the carried values, and other ones before and behind them.
        """
        places = [*before, *range(len(self.values)), *behind]
        params = dict(zip(region.params, places, strict=True))
        fixed = self.split.fixed.items()
        given = {region.params[len(before) + k]: value for k, value in fixed}
        region = region.replace(results=tuple(results))
        lowered, _ = self.flows.region(region, given, f"{self.name}.{what}")
        self.made.read(self.flows, [lowered])
        return _Turn(self, lowered, params)

    def carried(self, position: int, second: bool) -> Place:
        if position in self.split.fixed:
            return Place(self.inputs[self.values[position]])
        return Place((self.second if second else self.first)[position])

    def wanted(self, body: Graph) -> list[Value]:
        return [body.results[k] for k in self.changing]

    def start(self) -> list[Stmt]:
        return [
            _copy(target, self.inputs[self.values[k]], self.values[k].type.numel)
            for k, target in self.first.items()
        ]

    def settle(self) -> list[Stmt]:
        """After an odd number of rounds."""
        return [
            _copy(target, self.second[k], self.values[k].type.numel)
            for k, target in self.first.items()
        ]

    def counted(self, total: Expr, turn: Callable[[Expr, bool], list[Stmt]]) -> Stmt:
        """Rounds with the numbers 0 to total: two of them in each iteration."""
        pair = 2 * sym("_pair")
        both = Block((*turn(pair, False), *turn(pair + 1, True)))
        left = Binary("eq", Index(mod(total, 2)), Index(as_expr(1)))
        last = Block((*turn(total - 1, False), *self.settle()))
        pairs = For("_pair", as_expr(0), floordiv(total, 2), both)
        return Block((pairs, If(left, last)))


def _while(flows: _Flows, op: Op, name: str) -> _Function:
    condition, body = op.regions
    rounds = _Rounds(flows, op, name, body, op.operands)
    made = rounds.made
    test = rounds.lowered(condition, "test", condition.results)
    each = rounds.lowered(body, "body", rounds.wanted(body))
    flag = made.scratch("test", DType.BOOL, as_expr(1))
    memory = made.memory(test.region.bytes, each.region.bytes)
    ask, run = (
        [tuple(turn.calls(memory, results, odd)) for odd in (False, True)]
        for turn, results in ((test, [Place(flag)]), (each, rounds.changing))
    )
    # Rounds in pairs; after the first of one the values are in the second memory.
    even = Block((*run[1], *ask[0]))
    odd = Block(tuple(rounds.settle()))
    pair = Block((*run[0], *ask[1], If(_first(flag), even, odd)))
    made.body += [*rounds.start(), *ask[0], While(_first(flag), pair)]
    return made


def _loop(flows: _Flows, op: Op, name: str) -> _Function:
    count, *values = op.operands
    (body,) = op.regions
    rounds = _Rounds(flows, op, name, body, values)
    made = rounds.made
    number = rounds.given(count, "count", first=True)
    counter = made.scratch("round", DType.I64, as_expr(1))
    each = rounds.lowered(body, "body", rounds.wanted(body), before=[Place(counter)])
    memory = made.memory(each.region.bytes)

    def turn(number: Expr, odd: bool) -> list[Stmt]:
        at = Store(counter, (as_expr(0),), Index(number))
        return [at, *each.calls(memory, rounds.changing, odd)]

    total = (
        Let("_given", _first(number)),
        Let("_rounds", Index(maximum(sym("_given"), 0))),
    )
    made.body += [*rounds.start(), *total, rounds.counted(sym("_rounds"), turn)]
    return made


def _scan(flows: _Flows, op: Op, name: str) -> _Function:
    """Rows are read and written where they are."""
    (body,) = op.regions
    count = len(op.operands) - op.int_attr("scanned")
    rounds = _Rounds(flows, op, name, body, op.operands[:count])
    made, total = rounds.made, op.dim_attr("rounds")
    stacks = [_flat(v.name, v.type, Role.OUT) for v in op.results[count:]]
    made.outputs += stacks
    rows = body.results[count:]

    def at_row(buf: Buffer, type: TensorType) -> Place:
        return Place(buf, sym("_row") * type.bytes)

    scanned = [
        at_row(rounds.given(value, f"rows_{k}"), param.type)
        for k, (value, param) in enumerate(
            zip(op.operands[count:], body.params[count:], strict=True)
        )
    ]
    wanted = [*rounds.wanted(body), *rows]
    each = rounds.lowered(body, "body", wanted, behind=scanned)
    memory = made.memory(each.region.bytes)
    stacked = [at_row(b, v.type) for b, v in zip(stacks, rows, strict=True)]

    def turn(number: Expr, odd: bool) -> list[Stmt]:
        at = total - 1 - number if op.bool_attr("reverse") else number
        calls = each.calls(memory, [*rounds.changing, *stacked], odd)
        return [Block((Let("_row", Index(at)), *calls))]

    made.body += [*rounds.start(), rounds.counted(total, turn)]
    return made


def _bind(flows: _Flows, op: Op, name: str) -> _Function:
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
    inputs = _inputs(operands)
    numbers = [
        _flat(f"size_{s}", v.type, Role.IN) for s, v in zip(sizes, counts, strict=True)
    ]
    made = _Function(
        (*counts, *inputs),
        [*numbers, *inputs.values()],
        [_flat(v.name, v.type, Role.OUT) for v in op.results],
    )
    given = dict(zip(region.params, operands, strict=True))
    lowered, params = flows.region(region, given, f"{name}.body")
    made.read(flows, [lowered])
    flows.bounded(op, name, lowered, most)
    room = largest(lowered.bytes, most, flows.facts)
    if room is None:
        flows.refuse(op, "no largest size is known for what it takes")
        raise AssertionError
    memory = made.memory(room)
    flows.facts = outer
    results = [Place(b) for b in made.outputs]
    places = [Place(inputs[given[p]]) for p in params]
    # A number out of range is a failure that was reported; memory holds most.
    read = [Let(f"_{s}", _first(b)) for s, b in zip(sizes, numbers, strict=True)]
    bound = [Let(s, Index(minimum(maximum(sym(f"_{s}"), 0), most[s]))) for s in sizes]
    calls = lowered.calls(memory, places, results, made.weights)
    made.body += [*read, *bound, *calls]
    return made


_FLOW: dict[str, Callable[[_Flows, Op, str], _Function]] = {
    "if": _if,
    "while": _while,
    "loop": _loop,
    "scan": _scan,
    "bind": _bind,
}


def lower_flows(module: Module, facts: Facts, compile_region: CompileRegion) -> Module:
    """`main` with its control flow as calls of loop functions."""
    graph = module.main
    if not any(op.name in FLOWS for op in graph.ops):
        return module
    names = Names(names_of(graph))
    return _Flows(module, graph, compile_region, facts, names).rewritten()
