"""Chunks as loop functions that call the kernels of their region.

    %y = chunk(%x, %w) {extent = n, rows = r, outers = [b, 0, b]} region(..) {..}
    ->
    %y, %rows_0, %result_0, %memory = call_loop(%x, %w.packed) {callee = "chunk_0", ..}

    loop @chunk_0(b, n, r, threads; in %x, .., out %y, out %rows_0, .., out %memory) {
        for _chunk = 0 to ceildiv(n, r) {
            let first = r * _chunk,  let k = min(r, n - first)
            copy rows first .. first + k of each run of %x to %rows_0
            call @chunk_0.matmul_0(b, k; %rows_0, .., %result_0, %memory)
            copy %result_0 to rows first .. first + k of each run of %y
        }
    }

The region goes through the pipeline by itself, as those of control flow do
(`flow_regions.py`), and its temporaries share one memory, large enough for a whole
chunk. Nothing is allocated while the loop runs. Rows of an operand that are one run are
read where they are; rows of a result are collected, so that a result may be written
over an operand of which each round has read its rows.

A result that is a sum is set to its start value before the loop. A round reads it and
writes it, in place if the kernel's loops allow that (`sum_in_place`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from pliant.ir.callees import reached
from pliant.ir.graph import (
    ChunkLoop,
    Graph,
    Module,
    Names,
    Op,
    Value,
    chunk_rows,
    names_of,
)
from pliant.ir.loop_walk import calling, size_symbols, statements
from pliant.ir.loops import (
    Block,
    Buffer,
    Call,
    Check,
    For,
    Index,
    Kind,
    Let,
    Load,
    LoopFunc,
    Role,
    Stmt,
    Store,
    buffer,
)
from pliant.ir.packed import PackedConstants
from pliant.ir.reductions import COMBINES, identity
from pliant.ir.same import attr_key, form_of, places_of
from pliant.ir.types import DType, TensorType
from pliant.lower.nest import grain
from pliant.machine import pages
from pliant.memory.flow_function import FlowFunction, copy, filled, flat
from pliant.memory.flow_regions import CompileRegion, Flows, LoweredRegion, Place
from pliant.memory.sum_in_place import written_over
from pliant.sym import (
    ONE,
    Expr,
    Facts,
    as_expr,
    ceildiv,
    floordiv,
    maximum,
    minimum,
    mod,
    sym,
)
from pliant.sym.monotone import largest


class _UnboundedError(Exception):
    """No largest value of the memory of a chunk is known: it cannot be planned."""

    def __init__(self, op: Op, size: Expr) -> None:
        place = f" ({op.loc})" if op.loc else ""
        super().__init__(
            f"chunks along {op.dim_attr('extent')}{place}: "
            f"no largest value is proved of their memory, {size} bytes"
        )


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a value: `outer` runs of `extent` rows of `inner` elements.

    A round has `count` of each run.
    """

    value: Value  # in the region
    outer: Expr
    inner: Expr
    extent: Expr
    count: Expr

    def same(self, other: _Rows) -> bool:
        return replace(self, value=other.value) == other and (
            self.value.dtype is other.value.dtype
        )


@dataclass(frozen=True, slots=True)
class _RunningSum:
    """What rounds have in sum: by which reduction, and what a round is given."""

    combine: str
    before: Value


@dataclass(frozen=True, slots=True)
class _MadeChunk:
    """The function of a chunk, and what it takes."""

    op: Op
    callee: str
    sizes: tuple[Expr, ...]
    operands: tuple[int, ...]  # of the op: those that it reads
    weights: tuple[str, ...]  # constants
    extra: tuple[Buffer, ...]
    has_checks: bool


@dataclass(slots=True)
class _Functions:
    """Loop functions by what they do: layers that are alike share theirs."""

    known: dict[object, str] = field(default_factory=dict)
    made: dict[object, _MadeChunk] = field(default_factory=dict)  # by their form

    def copy(self) -> _Functions:
        return _Functions(dict(self.known), dict(self.made))

    def shared(self, module: Module, made: Collection[str]) -> tuple[Module, _Renamed]:
        """The module without those of the functions that it had already."""
        loops, names = dict(module.loops), dict[str, str]()
        own = {name: loops[name] for name in made}
        for name, func in reached(made, own).items():
            func = calling(func, names)
            key = func.sizes, func.buffers, func.body
            found = self.known.setdefault(key, name)
            if found == name:
                loops[name] = func
            else:
                names[name] = found
                del loops[name]
        return module.replace(loops=loops), names


_Renamed = dict[str, str]


@dataclass(slots=True)
class _Chunks:
    """Lowers the chunks of one version."""

    flows: Flows
    functions: _Functions
    packed: PackedConstants

    def version(self, graph: Graph) -> tuple[Op, ...]:
        """The ops of a version, its chunks as calls."""
        ops: list[Op] = []
        for op in graph.ops:
            if op.name == "chunk":
                called = self.lowered(op)
                ops += self.flows.ops  # weights that the call takes
                self.flows.ops = []
                op = called
            ops.append(op)
        return tuple(ops)

    def lowered(self, op: Op) -> Op:
        """A fusion that calls the loop function of a chunk."""
        form, known = self.form(op), self.functions.made
        # The check of an index tells its place in the source, which must be the same.
        placed = form, tuple(places_of(op.regions[0]))
        made = known.get(form) or known.get(placed)
        weights = None if made is None else self.weights_like(made, op)
        if made is None or weights is None:
            made = self.made(op)
            weights = made.weights
            known[placed if made.has_checks else form] = made
        taken = [op.operands[k] for k in made.operands]
        constants = [self.flows.constant(name) for name in weights]
        extra = [
            Value(self.flows.names.fresh(b.name), TensorType(b.dtype, b.shape))
            for b in made.extra
        ]
        return _called(made.callee, made.sizes, (*taken, *constants), op, extra)

    def form(self, op: Op) -> object:
        """Equal for chunks whose functions differ in arguments alone."""
        numbers: dict[object, int] = {}
        operands: list[object] = []
        for value in op.operands:
            constant = self.flows.is_constant(value)
            key = value if constant is None else constant
            number = numbers.setdefault(key, len(numbers))
            operands.append((number, constant is None, value.type))
        form = form_of(op.regions[0]), attr_key(op.attrs), self.flows.facts
        return form, tuple(operands)

    def weights_like(self, made: _MadeChunk, op: Op) -> tuple[str, ...] | None:
        """The constants of a chunk in the layouts that those of another have."""
        flows = self.flows
        other = {
            flows.is_constant(a): flows.is_constant(b)
            for a, b in zip(made.op.operands, op.operands, strict=True)
        }
        found: list[str] = []
        for name in made.weights:
            layout = self.packed.layouts.get(name)
            source = other.get(name if layout is None else layout.source.name)
            if source is None:
                return None
            constant = flows.module.constants[source]
            if layout is not None:
                known = flows.module.constants
                constant = self.packed.constant(layout.of(constant), known)
                constants = {**known, constant.name: constant}
                flows.module = flows.module.replace(constants=constants)
            found.append(constant.name)
        return tuple(found)

    def made(self, op: Op) -> _MadeChunk:
        """Adds the function of a chunk, and those of its kernels, to the module."""
        name = f"chunk_{len(self.flows.module.chunks)}"
        before = set(self.flows.module.loops)
        made = _ChunkFunction(self.flows, op, name)
        made.flow.forget_unread()
        func = made.flow.function(name)
        module = self.flows.module
        module = module.replace(loops={**module.loops, **made.copies, name: func})
        new = [n for n in module.loops if n not in before]
        checks = any(_has_check(module.loops[n]) for n in new)
        module, names = self.functions.shared(module, new)
        callee = names.get(name, name)
        loop = ChunkLoop(op, made.aligned, made.kernels, made.moved)
        self.flows.module = module.replace(
            # An equal function of another layer has the same sizes and buffers.
            chunks={callee: loop, **module.chunks, name: loop}
        )
        return _MadeChunk(
            op,
            callee,
            tuple(sym(s) for s in func.sizes),
            tuple(map(op.operands.index, made.flow.operands)),
            tuple(made.flow.weights),
            tuple(made.flow.extra),
            checks,
        )


def _has_check(func: LoopFunc) -> bool:
    return any(isinstance(stmt, Check) for stmt in statements(func.body))


class _ChunkFunction:
    """The function of one chunk, and which of its buffers may share memory."""

    def __init__(self, flows: Flows, op: Op, name: str) -> None:
        self.flows, self.op = flows, op
        (self.region,) = op.regions
        self.count, self.first, *_ = self.region.sizes
        self.extent, self.rows = op.dim_attr("extent"), op.dim_attr("rows")
        self.every = chunk_rows(self.region, self.extent)  # counts -> rows in all
        values = (*self.region.params, *self.region.results)
        self.runs = dict(zip(values, op.dims_attr("outers"), strict=True))
        outer = flows.facts
        for guard in self.region.constraints:
            flows.facts = flows.facts.assume(guard.cond)
        self.inputs = [
            flat(f"arg_{k}", v.type, Role.IN) for k, v in enumerate(op.operands)
        ]
        results = enumerate(op.results)
        self.flow = FlowFunction(
            op.operands,
            list(self.inputs),
            [flat(f"out_{k}", v.type, Role.OUT) for k, v in results],
        )
        self.name = name
        self.aligned: frozenset[tuple[str, str]] = frozenset()
        self.kernels: tuple[Graph, ...] = ()
        self.copies: dict[str, LoopFunc] = {}  # functions that copy rows
        self.moved = as_expr(0)  # bytes, by copies of rows
        self.build()
        flows.facts = outer

    def build(self) -> None:
        flow, region, name = self.flow, self.region, self.name
        given = dict(zip(region.params, self.op.operands, strict=True))
        sums = self.sums()
        lowered, params = self.flows.region(_adding(region, sums), given, name)
        own: dict[int, bool] = {}  # sums that are written where they are read
        for k in sums:
            lowered, own[k] = self.in_place(lowered, k, params.index(sums[k].before))
        module = self.flows.module
        # What a chunk computes is never larger than the whole, which is checked.
        inside = {k: v for k, v in module.inside.items() if not k.startswith(name)}
        self.kernels = module.inside[name]
        self.flows.module = module.replace(inside=inside)
        for constant in lowered.constants.values():
            if constant not in flow.weights:
                weight = f"weight_{len(flow.weights)}"
                type = module.constants[constant].type
                flow.weights[constant] = flat(weight, type, Role.IN)
        memory = flow.memory(self.largest(lowered.bytes))
        places, copies, cut = self.operands(set(params))
        results: list[Place] = []
        back: list[Stmt] = []
        pairs: set[tuple[str, str]] = set()
        for k, value in enumerate(region.results):
            whole = flow.outputs[k]
            if k in sums:
                places[sums[k].before] = Place(whole)
                flow.body.append(filled(whole, identity(sums[k].combine, whole.dtype)))
                results.append(Place(whole if own[k] else self.next_sum(k, back)))
                continue
            rows = self.rows_of(value)
            over = {(n, whole.name) for n, taken in cut.items() if taken.same(rows)}
            if rows.outer == ONE and not over:
                results.append(self.in_whole(whole, rows))
                continue
            held = self.scratch(f"result_{k}", rows)
            back.append(self.copied(whole, held, rows, back=True))
            results.append(Place(held))
            pairs |= over
        self.aligned = frozenset(pairs)
        given_places = [places[p] for p in params]
        calls = lowered.calls(memory, given_places, results, flow.weights)
        first = sym(self.first)
        head = (
            Let(self.first, Index(self.rows * sym("_chunk"))),
            *(
                Let(count, Index(minimum(self.rows, every - first)))
                for count, every in self.every.items()
            ),
        )
        body = Block((*head, *copies, *calls, *back))
        rounds = ceildiv(self.extent, self.rows)
        flow.body.append(For("_chunk", as_expr(0), rounds, body))

    def sums(self) -> dict[int, _RunningSum]:
        """The results that are sums, by number."""
        return {
            k: _RunningSum(combine, Value(f"sum_{k}", result.type))
            for k, (result, combine) in enumerate(
                zip(self.op.results, self.op.sums, strict=True)
            )
            if combine
        }

    def in_place(
        self, lowered: LoweredRegion, result: int, param: int
    ) -> tuple[LoweredRegion, bool]:
        """The region that writes a result over a parameter, if it may; and whether."""
        module = self.flows.module
        made = written_over(lowered.graph, result, param, module.loops)
        if made is None:
            return lowered, False
        graph, loops = made
        self.flows.module = module.replace(loops=loops)
        return replace(lowered, graph=graph), True

    def next_sum(self, k: int, back: list[Stmt]) -> Buffer:
        """Where a round writes a sum that it may not write over the one it reads."""
        whole = self.flow.outputs[k]
        (count,) = whole.shape
        held = self.flow.scratch(f"next_{k}", whole.dtype, count)
        back.append(copy(whole, held, count))
        rounds = ceildiv(self.extent, maximum(self.rows, 1))
        self.moved = self.moved + 2 * count * whole.dtype.bytes * rounds
        return held

    def operands(
        self, params: Collection[Value]
    ) -> tuple[dict[Value, Place], list[Stmt], dict[str, _Rows]]:
        """Where a round finds its operands, the copies it makes of rows, and those."""
        places: dict[Value, Place] = {}
        copies: list[Stmt] = []
        cut: dict[str, _Rows] = {}
        for param, whole in zip(self.region.params, self.inputs, strict=True):
            if param not in params:
                continue  # a constant, which is inside
            places[param] = Place(whole)
            if self.runs[param] == as_expr(0):
                continue
            rows = cut[whole.name] = self.rows_of(param)
            if rows.outer == ONE:
                places[param] = self.in_whole(whole, rows)
            else:
                held = self.scratch(f"rows_{len(copies)}", rows)
                copies.append(self.copied(held, whole, rows, back=False))
                places[param] = Place(held)
        return places, copies, cut

    def rows_of(self, value: Value) -> _Rows:
        facts = self.flows.facts
        runs = facts.canonical(self.runs[value])
        dims = [s for dim in value.shape for s in dim.symbols() if s in self.every]
        (count,) = set(dims)
        one = value.type.numel.substitute({count: as_expr(1)})
        inner = facts.canonical(floordiv(facts.canonical(one), runs))
        return _Rows(value, runs, inner, self.every[count], sym(count))

    def in_whole(self, whole: Buffer, rows: _Rows) -> Place:
        """The rows of a round where they are: they are one run."""
        return Place(whole, sym(self.first) * rows.inner * whole.dtype.bytes)

    def scratch(self, name: str, rows: _Rows) -> Buffer:
        count = rows.outer * self.rows * rows.inner
        return self.flow.scratch(name, rows.value.dtype, count)

    def largest(self, size: Expr) -> Expr:
        """Bytes for a chunk with all its rows."""
        found = largest(size, dict.fromkeys(self.every, self.rows), self.flows.facts)
        if found is None:
            raise _UnboundedError(self.op, size)
        return found

    def copied(self, to: Buffer, source: Buffer, rows: _Rows, *, back: bool) -> Stmt:
        """Copies rows out of all runs, or back into them."""
        row_bytes = rows.outer * rows.inner * rows.value.dtype.bytes
        self.moved = self.moved + 2 * row_bytes * rows.extent  # read and written
        name = f"{self.name}.rows_{len(self.copies)}"
        number, first, start = rows.count, sym(self.first), as_expr(0)
        if rows.outer == ONE:
            self.copies[name] = _run_function(name, rows.value.dtype)
            count, at = number * rows.inner, first * rows.inner
            return Call(name, (count,), ((source, (start,)), (to, (at,))))
        func = _rows_function(name, rows.value.dtype, rows.inner, back)
        self.copies[name] = func
        given = {"_runs": rows.outer, "_count": number, "_first": first}
        given["_extent"] = rows.extent
        sizes = tuple(given.get(size, sym(size)) for size in func.sizes)
        return Call(name, sizes, ((source, (start,)), (to, (start,))))


def _run_function(name: str, dtype: DType) -> LoopFunc:
    """Copies elements that are one run."""
    source, target = (
        buffer(side, dtype, (sym("_count"),), role)
        for side, role in (("rows", Role.IN), ("whole", Role.OUT))
    )
    body = copy(target, source, sym("_count"))
    return LoopFunc(name, ("_count",), (source, target), body)


def _rows_function(name: str, dtype: DType, inner: Expr, back: bool) -> LoopFunc:
    """Copies the rows of a chunk, out of `_runs` runs of `_extent` rows or back.

    A function of its own, which all chunks with such rows share.
    """
    names = ("_runs", "_count", "_first", "_extent", "_row", "_element")
    runs, count, first, extent, row, element = map(sym, names)
    number = runs * count
    sides = (("whole", runs * extent), ("rows", number))
    shapes = {side: (all_rows * inner,) for side, all_rows in sides}
    to, origin = ("whole", "rows") if back else ("rows", "whole")
    source = buffer(origin, dtype, shapes[origin], Role.IN)
    target = buffer(to, dtype, shapes[to], Role.OUT)
    at = floordiv(row, count) * extent + first + mod(row, count)
    places = {"whole": at * inner + element, "rows": row * inner + element}
    store = Store(target, (places[to],), Load(source, (places[origin],)))
    along = For("_element", as_expr(0), inner, store, Kind.VECTOR)
    body = For("_row", as_expr(0), number, along, Kind.PARALLEL, grain=grain(inner))
    buffers = (source, target)
    return LoopFunc(name, size_symbols(body, buffers), buffers, body)


def _adding(region: Graph, sums: Mapping[int, _RunningSum]) -> Graph:
    """The region that takes what rounds have in sum so far, and adds to it."""
    ops, results = list(region.ops), list(region.results)
    for k, total in sums.items():
        part = results[k]
        results[k] = Value(f"{total.before.name}_next", total.before.type)
        operands = total.before, part
        ops.append(Op(COMBINES[total.combine], operands, (), (results[k],)))
    params = (*region.params, *(total.before for total in sums.values()))
    return region.replace(params=params, ops=tuple(ops), results=tuple(results))


def _called(
    name: str,
    sizes: tuple[Expr, ...],
    operands: tuple[Value, ...],
    op: Op,
    extra: list[Value],
) -> Op:
    """A fusion that is one call of a loop function."""
    params = {v: Value(v.name, v.type) for v in operands}
    results = (*op.results, *extra)
    given = tuple(Value(v.name, v.type) for v in results)
    attrs = (("callee", name), ("sizes", sizes))
    inner = tuple(params[v] for v in operands)
    call = Op("call_loop", inner, attrs, given, (), op.loc)
    region = Graph(name, tuple(params.values()), (call,), given)
    kind = (("kind", "call_loop"),)
    return Op("fusion", tuple(params), kind, results, (region,), op.loc)


def lower_chunks(
    module: Module,
    facts: Facts,
    compile_region: CompileRegion,
    packed: PackedConstants,
) -> Module:
    """The versions of `main` with their chunks as calls of loop functions."""
    graphs, functions = dict(module.graphs), _Functions()
    left_out = dict.fromkeys(module.left_out)
    for version in module.versions:
        names = Names(names_of(version))
        # No region depends on how many rows the chunks of others have.
        flows = Flows(module, module.main, compile_region, facts, names)
        flows.producers = dict(version.producers())
        own = functions.copy()
        try:
            with pages.copying():  # weights, into the layouts of alike chunks
                ops = _Chunks(flows, own, packed).version(version)
        except _UnboundedError as error:
            del graphs[version.name]
            left_out[str(error)] = None
            continue
        module, functions = flows.module, own
        graphs[version.name] = version.replace(ops=ops)
    return module.replace(graphs=graphs, left_out=tuple(left_out))
