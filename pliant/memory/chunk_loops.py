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
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pliant.ir.graph import ChunkLoop, Graph, Module, Names, Op, Value, names_of
from pliant.ir.loops import Block, Buffer, For, Index, Kind, Let, Load, Role, Stmt, Store
from pliant.ir.types import TensorType
from pliant.lower.nest import grain
from pliant.memory.flow_function import FlowFunction, flat
from pliant.memory.flow_regions import CompileRegion, Flows, Place
from pliant.sym import (
    ONE,
    Expr,
    Facts,
    as_expr,
    ceildiv,
    floordiv,
    minimum,
    mod,
    sym,
)
from pliant.sym.monotone import largest


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a value: `outer` runs of `extent` rows of `inner` elements."""

    value: Value  # in the region
    outer: Expr
    inner: Expr

    def same(self, other: _Rows) -> bool:
        mine, others = (self.outer, self.inner), (other.outer, other.inner)
        return mine == others and self.value.dtype is other.value.dtype


@dataclass(slots=True)
class _Chunks:
    """Lowers the chunks of one version."""

    flows: Flows
    prefix: str
    known: dict[object, tuple[str, FlowFunction]] = field(default_factory=dict)

    def lowered(self, op: Op) -> Op:
        number = len(self.flows.module.chunks)
        name = f"chunk_{number}"
        made, aligned = self.function(op, name)
        made.forget_unread()
        func = made.function(name)
        module = self.flows.module
        self.flows.module = module.replace(
            loops={**module.loops, name: func},
            chunks={**module.chunks, name: ChunkLoop(op, aligned)},
        )
        sizes = tuple(sym(s) for s in func.sizes)
        weights = tuple(self.flows.constant(n) for n in made.weights)
        taken = {b.name for b in made.outputs}
        assert all(v.name in taken for v in op.results)
        extra = [
            Value(self.flows.names.fresh(b.name), TensorType(b.dtype, b.shape))
            for b in made.extra
        ]
        return _called(name, sizes, (*made.operands, *weights), op, extra)

    def function(
        self, op: Op, name: str
    ) -> tuple[FlowFunction, frozenset[tuple[str, str]]]:
        (region,) = op.regions
        count, first = region.sizes
        extent, rows = op.dim_attr("extent"), op.dim_attr("rows")
        outer = self.flows.facts
        for guard in region.constraints:
            self.flows.facts = self.flows.facts.assume(guard.cond)
        buffers = {
            (v, k): flat(f"arg_{k}", v.type, Role.IN) for k, v in enumerate(op.operands)
        }
        made = FlowFunction(
            op.operands,
            list(buffers.values()),
            [flat(v.name, v.type, Role.OUT) for v in op.results],
        )
        given = dict(zip(region.params, op.operands, strict=True))
        lowered, params = self.flows.region(region, given, name)
        made.read(self.flows, [lowered])
        room = self.most(lowered.bytes, count, rows, op)
        memory = made.memory(room)
        inside = dict(self.flows.module.inside)
        # What a chunk computes is never larger than the whole, which is checked.
        self.flows.module = self.flows.module.replace(
            inside={k: v for k, v in inside.items() if not k.startswith(name)}
        )
        runs = dict(zip((*region.params, *region.results), op.dims_attr("outers")))
        places: dict[Value, Place] = {}
        copies: list[Stmt] = []
        cut: dict[str, _Rows] = {}
        for param, buf in zip(region.params, buffers.values(), strict=True):
            if param not in params:
                continue
            places[param] = Place(buf)
            if runs[param] == as_expr(0):
                continue
            taken = self.rows_of(param, runs[param], count)
            cut[buf.name] = taken
            if taken.outer == ONE:
                offset = sym(first) * taken.inner * param.dtype.bytes
                places[param] = Place(buf, offset)
            else:
                held = made.scratch(
                    f"rows_{len(copies)}",
                    param.dtype,
                    taken.outer * rows * taken.inner,
                )
                copies.append(_copied(held, buf, taken, extent, count, first, False))
                places[param] = Place(held)
        back: list[Stmt] = []
        results: list[Place] = []
        aligned: set[tuple[str, str]] = set()
        for k, (value, buf) in enumerate(zip(region.results, made.outputs, strict=True)):
            given_rows = self.rows_of(value, runs[value], count)
            held = made.scratch(
                f"result_{k}",
                value.dtype,
                given_rows.outer * rows * given_rows.inner,
            )
            back.append(_copied(buf, held, given_rows, extent, count, first, True))
            results.append(Place(held))
            aligned |= {
                (source, buf.name)
                for source, taken in cut.items()
                if taken.same(given_rows)
            }
        self.flows.facts = outer
        given_places = [places[p] for p in params]
        calls = lowered.calls(memory, given_places, results, made.weights)
        head = (
            Let(first, Index(rows * sym("_chunk"))),
            Let(count, Index(minimum(rows, extent - sym(first)))),
        )
        body = Block((*head, *copies, *calls, *back))
        made.body.append(For("_chunk", as_expr(0), ceildiv(extent, rows), body))
        return made, frozenset(aligned)

    def rows_of(self, value: Value, outer: Expr, count: str) -> _Rows:
        facts = self.flows.facts
        runs = facts.canonical(outer)
        whole = value.type.numel.substitute({count: as_expr(1)})
        inner = floordiv(facts.canonical(whole), runs)
        return _Rows(value, runs, facts.canonical(inner))

    def most(self, size: Expr, count: str, rows: Expr, op: Op) -> Expr:
        facts = self.flows.facts
        found = largest(size, {count: rows}, facts)
        if found is None:
            self.flows.refuse(op, "no largest size is known for what a chunk takes")
        return found


def _copied(
    to: Buffer,
    source: Buffer,
    rows: _Rows,
    extent: Expr,
    count: str,
    first: str,
    back: bool,
) -> Stmt:
    """Copies rows out of all runs, or back into them."""
    row, element, number = sym("_row"), sym("_element"), sym(count)
    whole = (floordiv(row, number) * extent + sym(first) + mod(row, number)) * rows.inner
    packed = row * rows.inner
    target, origin = (whole, packed) if back else (packed, whole)
    store = Store(to, (target + element,), Load(source, (origin + element,)))
    inner = For("_element", as_expr(0), rows.inner, store, Kind.VECTOR)
    return For(
        "_row",
        as_expr(0),
        rows.outer * number,
        inner,
        Kind.PARALLEL,
        grain=grain(rows.inner),
    )


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


def lower_chunks(module: Module, facts: Facts, compile_region: CompileRegion) -> Module:
    """The versions of `main` with their chunks as calls of loop functions."""
    graphs = dict(module.graphs)
    made: dict[object, Op] = {}
    for version in module.versions:
        names = Names(names_of(version))
        flows = Flows(module, version, compile_region, facts, names)
        flows.producers = dict(version.producers())
        chunks = _Chunks(flows, version.name)
        ops: list[Op] = []
        for op in version.ops:
            if op.name == "chunk":
                ready = chunks.lowered(op)
                ops += flows.ops
                flows.ops = []
                op = ready
            ops.append(op)
        module = flows.module
        graphs[version.name] = version.replace(ops=tuple(ops))
    return module.replace(graphs=graphs)
