"""Regions of control flow, each taken through the pipeline by itself.

A lowered region is a list of calls. Its temporaries share one memory: one of them takes
the place of another that is dead and proved to be no smaller.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from pliant.errors import UnsupportedOp, UnsupportedOpError
from pliant.ir.calls import computed, computed_by, roles_of
from pliant.ir.graph import Constant, DataCheck, Graph, Module, Names, Op, Value
from pliant.ir.loop_walk import size_symbols
from pliant.ir.loops import Buffer, Call, CallLibrary, LoopFunc, Stmt, buffer
from pliant.memory.liveness import ArenaBuffer, liveness
from pliant.runtime.description import ALIGN
from pliant.sym import Expr, Facts, Guard, as_expr, ceildiv, floordiv, ge, le, sym
from pliant.sym.monotone import largest
from pliant.sym.points import witnesses
from pliant.sym.signs import without_plain

_SAMPLES = 16  # assignments at which sizes are compared before a proof is tried

# Takes a region as the `main` of a module to ordered calls.
CompileRegion = Callable[[Module], Module]


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


def laid_out(graph: Graph, facts: Facts) -> tuple[dict[Value, Expr], Expr]:
    """Offsets of a region's temporaries, and the bytes of all.

    Temporaries that are never alive together may have one place, as large as the
    largest of them is proved to be. Large ones come first: small ones find a place.
    """
    found = liveness(graph).buffers
    names = {name for b in found for name in b.bytes.symbols()}
    points = witnesses(facts, names)[-_SAMPLES:]
    sizes = {b.bytes: [b.bytes.evaluate(point) for point in points] for b in found}
    places: list[tuple[Expr, Expr, list[ArenaBuffer]]] = []  # offset, bytes, whose
    offsets: dict[Value, Expr] = {}
    end = as_expr(0)
    for buf in sorted(found, key=lambda b: (-sum(sizes[b.bytes]), b.first)):
        # One of the same size needs no proof.
        for offset, size, held in sorted(places, key=lambda p: p[1] != buf.bytes):
            apart = all(b.last < buf.first or buf.last < b.first for b in held)
            if apart and _no_larger(buf.bytes, size, sizes, facts):
                held.append(buf)
                offsets[buf.value] = offset
                break
        else:
            places.append((end, buf.bytes, [buf]))
            offsets[buf.value] = end
            end = end + ALIGN * ceildiv(buf.bytes, ALIGN)
    return offsets, end


def _no_larger(
    size: Expr, room: Expr, known: Mapping[Expr, list[int]], facts: Facts
) -> bool:
    if any(map(operator.gt, known[size], known[room])):
        return False
    return size == room or facts.prove(le(size, room)) is True


@dataclass(slots=True)
class Flows:
    """A graph whose control flow is lowered, and the module that takes its parts."""

    module: Module
    graph: Graph
    compile: CompileRegion
    facts: Facts
    names: Names
    values: dict[Value, Value] = field(default_factory=dict)  # replaced results
    ops: list[Op] = field(default_factory=list)
    producers: dict[Value, Op] = field(default_factory=dict)

    def bounded(
        self, op: Op, name: str, region: LoweredRegion, most: Mapping[str, Expr]
    ) -> list[Guard]:
        """Replaces the sizes of what a region computes by the largest, for checks.

        What cannot be bounded is refused. The requirements on these sizes that are not
        proved are known from now on: they are to be tested, in this order.
        """
        tests: list[Guard] = []
        for guard in region.graph.constraints:
            data = any(s in most for s in guard.cond.symbols())
            if data and self.facts.prove(guard.cond) is not True:
                divides = guard.cond.kind == "divides" and not guard.cond.lhs.is_const
                facts = None if divides else self.assumed(guard)
                if facts is None:
                    self.refuse(op, f"{guard.cond} depends on data and never holds")
                self.facts = facts
                tests.append(guard)
        whole = dict(self.module.inside)
        for key in [k for k in whole if k.startswith(f"{name}.body")]:
            values = [
                Value(v.name, v.type.with_shape(self.largest_dims(op, v, most)))
                for graph in whole[key]
                for v in _values(graph)
            ]
            whole[key] = (Graph(key, tuple(values), (), ()),)
        self.module = self.module.replace(inside=whole)
        return tests

    def assumed(self, guard: Guard) -> Facts | None:
        try:
            return self.facts.assume(guard.cond)
        except ValueError:
            return None

    def number(self, guard: Guard, sizes: Sequence[str]) -> int:
        """The number of the run-time check of a guard."""
        what = guard.render({}) or str(guard.cond)
        message = f"{what}, {sizes[0]} is {{value}}"
        check = DataCheck.at("size", message, guard.origin)
        if check not in self.module.checks:
            self.module = self.module.replace(checks=(*self.module.checks, check))
        return self.module.checks.index(check) + 1

    def largest_dims(
        self, op: Op, value: Value, most: Mapping[str, Expr]
    ) -> tuple[Expr, ...]:
        dims = []
        for dim in value.shape:
            end = largest(dim, most, self.facts)
            if end is None or not self.is_size(dim):
                self.refuse(op, f"no range is known for the size {dim}")
            dims.append(end)
        return tuple(dims)

    def is_size(self, dim: Expr) -> bool:
        forms = (dim, without_plain(dim))
        return any(self.facts.prove(ge(form, 0)) is True for form in forms)

    def refuse(self, op: Op, why: str) -> NoReturn:
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
        known = (*self.graph_symbols(), *region.sizes)
        free = {s for s in known if s not in _param_symbols(params)}
        # A symbol that is passed as a number is no dim of a parameter, so nothing says
        # any more that it is not negative: that is stated here.
        dims = (ge(sym(s), 0) for s in free)
        signs = [Guard(c, (), "") for c in dims if self.facts.prove(c) is True]
        guards = (*self.graph.constraints, *region.constraints, *signs)
        graph = Graph(name, tuple(params), ops, region.results, (), guards)
        graph = graph.replace(sizes=tuple(sorted(free)))
        lowered = self.compile(self.module.replace(graphs={"main": graph}))
        lowered = self.with_libraries(lowered, name)
        return self.adopted(lowered, name), tuple(params)

    def with_libraries(self, lowered: Module, name: str) -> Module:
        """A lowered region that calls library functions from loop functions."""
        loops, ops = dict(lowered.loops), list[Op]()
        for op in lowered.main.ops:
            if op.name == "call_library":
                made = self.library(op, lowered, f"{name}.{len(loops)}")
                loops[made.name] = made
                sizes = tuple(sym(s) for s in made.sizes)
                new = {"callee": made.name, "sizes": sizes}
                attrs = tuple((k, new.get(k, v)) for k, v in op.attrs)
                op = op.replace(name="call_loop", attrs=attrs)
            ops.append(op)
        main = lowered.main.replace(ops=tuple(ops))
        return lowered.replace(loops=loops).with_main(main)

    def library(self, op: Op, lowered: Module, name: str) -> LoopFunc:
        """A function that calls a library function, on memory of any place."""
        roles, purpose = roles_of(op, lowered), computed_by(op, lowered)
        library = lowered.libraries[op.str_attr("callee")]
        if roles is None or purpose is None:
            self.refuse(op, f"{library.symbol} is not known well enough for a loop")
        (root,) = purpose.ops
        held = tuple(
            buffer(f"{role.value}_{k}", value.dtype, value.shape, role)
            for k, (value, role) in enumerate(zip(op.operands, roles, strict=True))
        )
        settings: Any = root.attrs
        sizes = op.dims_attr("sizes")
        body = CallLibrary(library.symbol, sizes, held, root.name, settings)
        return LoopFunc(f"{name}.{root.name}", size_symbols(body, held), held, body)

    def adopted(self, lowered: Module, name: str) -> LoweredRegion:
        """Moves a lowered region's functions, constants and guards to the module."""
        own = self.module
        constants = dict(own.constants)
        names: dict[str, str] = {}
        for key, constant in lowered.constants.items():
            known = constants.get(key)
            names[key] = key if known in (None, constant) else f"{name}.{key}"
            constants[names[key]] = _named(constant, names[key])
        known_guards = {guard.cond for guard in self.graph.constraints}
        sizes = set(self.graph_symbols())
        more = [
            guard
            for guard in lowered.main.constraints
            if guard.cond not in known_guards
            and sizes.issuperset(guard.cond.symbols())
            and self.facts.prove(guard.cond) is not True
        ]
        if more:
            guards = (*self.graph.constraints, *more)
            self.graph = self.graph.replace(constraints=guards)
        computes = tuple(computed(lowered))
        self.module = own.replace(
            # Those of the module may call others by now, which are equal.
            loops={**lowered.loops, **own.loops},
            libraries={**own.libraries, **lowered.libraries},
            constants=constants,
            checks=lowered.checks,
            inside={**own.inside, **lowered.inside, name: computes},
        )
        offsets, size = laid_out(lowered.main, self.facts)
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
