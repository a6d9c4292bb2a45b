"""The host flow as native code: three functions around the kernels.

    i64  pliant_bind(dims, symbols)     symbols from input sizes; 0, or 1 + failed guard
    void pliant_sizes(symbols, table)   every size, dim and offset the run needs
    void pliant_run(call)               the kernels, in order

`pliant_bind` runs at every call, `pliant_sizes` once per new shape, and `pliant_run` is
straight-line code over the plan's table: no shape is interpreted at run time.

Profiled code also reads the clock before and after each kernel. The times go to a
block that follows the weights, two words per kernel; other code has none of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import llvmlite.ir as ll

from pliant.codegen.llvm_dims import Dims
from pliant.codegen.llvm_types import I64, PTR, VOID
from pliant.ir.graph import Graph, Library, Op, Value
from pliant.passes.memory import Memory
from pliant.sym import Cond, Expr, Guard, Solution, sym

RUN, SIZES, BIND = "pliant_run", "pliant_sizes", "pliant_bind"
THREADS = "threads"
# Fields of plt_call, in order (runtime/rt.h).
ARENA, TABLE, OFFSETS, INPUTS, OUTPUTS, WEIGHTS = 1, 2, 3, 4, 5, 6


@dataclass(slots=True)
class Table:
    """Integer expressions evaluated once per shape; each has a slot."""

    slots: dict[Expr, int] = field(default_factory=dict)
    entries: list[Expr] = field(default_factory=list)

    def slot(self, e: Expr) -> int:
        if e not in self.slots:
            self.slots[e] = len(self.entries)
            self.entries.append(e)
        return self.slots[e]

    def run(self, dims: tuple[Expr, ...]) -> int:
        """Consecutive slots for the dims of a result."""
        first = len(self.entries)
        self.entries.extend(dims)
        return first


@dataclass(frozen=True, slots=True)
class HostPlan:
    """What the runtime is told of the host functions."""

    symbols: tuple[str, ...]
    guards: tuple[Guard, ...]
    table: Table
    buffer_slots: tuple[int, ...]  # table slot of each arena buffer's bytes
    output_slots: tuple[int, ...]  # first table slot of each result's dims
    constants: tuple[str, ...]  # weight number -> constant name
    stamps: int  # words of the block of times after the weights; 0: not profiled


def emit_host(
    module: ll.Module,
    graph: Graph,
    memory: Memory,
    solution: Solution,
    guards: tuple[Guard, ...],
    shapes: Sequence[tuple[str, tuple[Expr, ...]]],
    input_numbers: dict[Value, int],
    libraries: Mapping[str, Library],
    *,
    profile: bool = False,
) -> HostPlan:
    """Adds the three functions; `shapes` are the inputs' names and symbolic dims."""
    symbols = tuple(b.symbol for b in solution.bindings)
    table = Table()
    for name in (*symbols, THREADS):
        table.slot(sym(name))
    buffer_slots = tuple(table.slot(b.bytes) for b in memory.buffers)
    output_slots = tuple(table.run(v.shape) for v in graph.results)
    constants = _constants(graph)
    clock = _Clock(module, len(constants)) if profile else None
    _emit_run(module, graph, memory, table, input_numbers, libraries, clock)
    _emit_sizes(module, symbols, table)
    _emit_bind(module, solution, guards, shapes)
    stamps = 0 if clock is None else clock.stamps
    return HostPlan(
        symbols, guards, table, buffer_slots, output_slots, constants, stamps
    )


def _constants(graph: Graph) -> tuple[str, ...]:
    return tuple(op.str_attr("name") for op in graph.ops if op.name == "constant")


class _Clock:
    """Emits the reading of the clock around kernels."""

    def __init__(self, module: ll.Module, block: int) -> None:
        kind = ll.FunctionType(I64, [PTR])
        self.read = ll.Function(module, kind, "plt_clock")
        self.block = block  # its number among the weights
        self.stamps = 0

    def stamp(self, builder: Any, call: Any, weights: Any) -> None:
        now = builder.call(self.read, [call])
        block = _at(builder, weights, self.block, PTR)
        builder.store(now, _address(builder, block, self.stamps, I64))
        self.stamps += 1


def _function(module: ll.Module, name: str, result: Any, count: int) -> Any:
    function = ll.Function(module, ll.FunctionType(result, [PTR] * count), name)
    builder = ll.IRBuilder(function.append_basic_block("entry"))
    return function, builder


def _at(builder: Any, base: Any, k: int, kind: Any) -> Any:
    return builder.load(_address(builder, base, k, kind), typ=kind)


def _address(builder: Any, base: Any, k: int, kind: Any) -> Any:
    return builder.gep(base, [ll.Constant(I64, k)], source_etype=kind)


def _emit_sizes(module: ll.Module, symbols: tuple[str, ...], table: Table) -> None:
    function, builder = _function(module, SIZES, VOID, 2)
    source, target = function.args
    dims = Dims(builder)
    for k, name in enumerate((*symbols, THREADS)):
        dims.bind(name, _at(builder, source, k, I64), signed=True)
    for k, e in enumerate(table.entries):
        builder.store(dims.scalar(e), _address(builder, target, k, I64))
    builder.ret_void()


def _emit_bind(
    module: ll.Module,
    solution: Solution,
    guards: tuple[Guard, ...],
    shapes: Sequence[tuple[str, tuple[Expr, ...]]],
) -> None:
    function, builder = _function(module, BIND, I64, 2)
    source, target = function.args
    dims = Dims(builder)
    observed: dict[tuple[int, int], Any] = {}
    for number, (name, shape) in enumerate(shapes):
        for axis in range(len(shape)):
            size = _at(builder, source, len(observed), I64)
            observed[number, axis] = size
            dims.bind(f"{name}.{axis}", size, signed=True)
    for k, binding in enumerate(solution.bindings):
        dims.bind("d", observed[binding.source, binding.axis], signed=True)
        value = dims.scalar(binding.value)
        builder.store(value, _address(builder, target, k, I64))
        dims.bind(binding.symbol, value, signed=True)
    for number, guard in enumerate(guards):
        holds = _condition(builder, dims, guard.cond)
        with builder.if_then(builder.not_(holds), likely=False):
            builder.ret(ll.Constant(I64, number + 1))
    builder.ret(ll.Constant(I64, 0))


def _condition(builder: Any, dims: Dims, cond: Cond) -> Any:
    left, right = dims.scalar(cond.lhs), dims.scalar(cond.rhs)
    match cond.kind:
        case "eq":
            return builder.icmp_signed("==", left, right)
        case "ne":
            return builder.icmp_signed("!=", left, right)
        case "le":
            return builder.icmp_signed("<=", left, right)
        case "lt":
            return builder.icmp_signed("<", left, right)
        case "divides":
            zero = ll.Constant(I64, 0)
            safe = builder.select(
                builder.icmp_signed("==", left, zero), ll.Constant(I64, 1), left
            )
            whole = builder.icmp_signed("==", builder.srem(right, safe), zero)
            nothing = builder.icmp_signed("==", right, zero)
            divisor = builder.icmp_signed("!=", left, zero)
            return builder.or_(builder.and_(divisor, whole), nothing)


def _emit_run(
    module: ll.Module,
    graph: Graph,
    memory: Memory,
    table: Table,
    input_numbers: dict[Value, int],
    libraries: Mapping[str, Library],
    clock: _Clock | None,
) -> None:
    function, builder = _function(module, RUN, VOID, 1)
    (call,) = function.args
    arena, plan, offsets, inputs, outputs, weights = (
        _at(builder, call, k, PTR)
        for k in (ARENA, TABLE, OFFSETS, INPUTS, OUTPUTS, WEIGHTS)
    )
    pointers: dict[Value, Any] = {}
    constants = 0
    numbers = {b.value: k for k, b in enumerate(memory.buffers)}
    results = {v: k for k, v in enumerate(memory.outputs)}
    for param in graph.params:
        number = input_numbers[param]
        pointers[param] = _at(builder, inputs, number, PTR)
    sizes: dict[Expr, Any] = {}

    def size(e: Expr) -> Any:
        if e.is_const:
            return ll.Constant(I64, e.value)
        if e not in sizes:
            sizes[e] = _at(builder, plan, table.slot(e), I64)
        return sizes[e]

    def run(callee: Any, op: Op) -> None:
        arguments = [call, *(size(e) for e in op.dims_attr("sizes"))]
        arguments += [pointers[v] for v in op.operands]
        if callee is None:
            kinds = [value.type for value in arguments]
            symbol = libraries[op.str_attr("callee")].symbol
            callee = ll.Function(module, ll.FunctionType(VOID, kinds), symbol)
        if clock is not None:
            clock.stamp(builder, call, weights)
        builder.call(callee, arguments)
        if clock is not None:
            clock.stamp(builder, call, weights)

    for op in graph.ops:
        match op.name:
            case "constant":
                pointers[op.result] = _at(builder, weights, constants, PTR)
                constants += 1
            case "alloc" if op.result in results:
                at = _at(builder, outputs, results[op.result], PTR)
                pointers[op.result] = at
            case "alloc" if op.result in numbers:
                offset = _at(builder, offsets, numbers[op.result], I64)
                byte = ll.IntType(8)
                at = builder.gep(arena, [offset], source_etype=byte)
                pointers[op.result] = at
            case "alloc":
                pass  # nothing reads or writes it
            case "view":
                offset = size(op.dim_attr("offset"))
                byte = ll.IntType(8)
                base = pointers[op.operands[0]]
                pointers[op.result] = builder.gep(base, [offset], source_etype=byte)
            case "call_loop":
                run(module.globals[op.str_attr("callee")], op)
            case "call_library":
                symbol = libraries[op.str_attr("callee")].symbol
                run(module.globals.get(symbol), op)
            case name:
                raise NotImplementedError(f"host flow of op {name}")
    builder.ret_void()
