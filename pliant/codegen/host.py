"""The host flow as native code: three functions around the kernels.

    i64  pliant_bind(dims, symbols)     symbols from input sizes; 0, or 1 + failed guard
    void pliant_sizes(symbols, table)   every size, dim and offset the run needs
    void pliant_run(call)               the kernels, as the plan's program says

`pliant_bind` runs at every call, `pliant_sizes` once per new shape. `pliant_run` goes
through the program: a list of steps, each a kernel on the plan's sizes and offsets. In
most plans that is each step once. A plan for little memory may run a step again, and
moves or files buffers in between, which `plt_special` of the runtime does. A check that
fails ends the run after its step: what writes an input comes later (passes/order.py).

Profiled code also reads the clock before and after each kernel. The times go to a
block that follows the weights, two words per kernel; other code has none of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import llvmlite.ir as ll

from pliant.codegen.builder import Builder
from pliant.codegen.host_plan import (
    THREADS,
    HostCall,
    HostPlan,
    Origin,
    Place,
    Size,
    Slot,
)
from pliant.codegen.llvm_dims import Dims
from pliant.codegen.llvm_types import I8, I64, PTR, VOID
from pliant.sym import Cond

RUN, SIZES, BIND = "pliant_run", "pliant_sizes", "pliant_bind"
# Fields of plt_call, in order (runtime/rt.h).
ARENA, TABLE, OFFSETS, STATUS, PROGRAM = 1, 2, 3, 8, 9
ADDRESSES = {Origin.INPUT: 4, Origin.OUTPUT: 5, Origin.WEIGHT: 6}


def emit_host(module: ll.Module, plan: HostPlan, symbols: Mapping[str, str]) -> None:
    """Adds the three functions; `symbols` are the names of the kernels in LLVM."""
    _Run(module, plan).emit(symbols)
    _emit_sizes(module, plan)
    _emit_bind(module, plan)


def _function(module: ll.Module, name: str, result: Any, count: int) -> Any:
    function = ll.Function(module, ll.FunctionType(result, [PTR] * count), name)
    builder = Builder(function.append_basic_block("entry"))
    return function, builder


def _at(builder: Any, base: Any, k: int, kind: Any) -> Any:
    return builder.load(_address(builder, base, k, kind), typ=kind)


def _address(builder: Any, base: Any, k: int, kind: Any) -> Any:
    return builder.gep(base, [ll.Constant(I64, k)], source_etype=kind)


def _emit_sizes(module: ll.Module, plan: HostPlan) -> None:
    function, builder = _function(module, SIZES, VOID, 2)
    source, target = function.args
    dims = Dims(builder)
    for k, name in enumerate((*plan.symbols, THREADS)):
        dims.bind(name, _at(builder, source, k, I64), signed=True)
    for k, e in enumerate(plan.table.entries):
        builder.store(dims.scalar(e), _address(builder, target, k, I64))
    builder.ret_void()


def _emit_bind(module: ll.Module, plan: HostPlan) -> None:
    function, builder = _function(module, BIND, I64, 2)
    source, target = function.args
    dims = Dims(builder)
    observed: dict[tuple[int, int], Any] = {}
    for number, (name, rank) in enumerate(plan.shapes):
        for axis in range(rank):
            size = _at(builder, source, len(observed), I64)
            observed[number, axis] = size
            dims.bind(f"{name}.{axis}", size, signed=True)
    found: dict[str, Any] = {}
    for k, binding in enumerate(plan.bindings):
        dims.bind("d", observed[binding.source, binding.axis], signed=True)
        value = dims.scalar(binding.value)
        builder.store(value, _address(builder, target, k, I64))
        dims.bind(binding.symbol, value, signed=True)
        found[binding.symbol] = value
    if "d" in found:  # in guards that is a dim of the model again
        dims.bind("d", found["d"], signed=True)
    for number, guard in enumerate(plan.guards):
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


class _Run:
    """Emits `pliant_run`: a loop around a switch with a case for each step."""

    def __init__(self, module: ll.Module, plan: HostPlan) -> None:
        self.module, self.plan = module, plan
        self.function, self.builder = _function(module, RUN, VOID, 1)
        (self.call,) = self.function.args
        numbers = (ARENA, TABLE, OFFSETS, PROGRAM, *ADDRESSES.values())
        self.fields = {n: _at(self.builder, self.call, n, PTR) for n in numbers}
        self.sizes: dict[Slot, Any] = {}
        self.places: dict[Place, Any] = {}

    def emit(self, symbols: Mapping[str, str]) -> None:
        entry = self.builder.block
        fetch, step = (self.function.append_basic_block(n) for n in ("fetch", "step"))
        special, done = (
            self.function.append_basic_block(n) for n in ("special", "done")
        )
        self.builder.branch(fetch)
        self.builder.position_at_end(fetch)
        at = self.builder.phi(PTR, "at")
        code = self.builder.load(at, typ=I64)
        switch = self.builder.switch(code, special)
        self.builder.position_at_end(step)
        following = _address(self.builder, at, 1, I64)
        status = _at(self.builder, self.call, STATUS, I64)
        failed = self.builder.icmp_signed("!=", status, ll.Constant(I64, 0))
        self.builder.cbranch(failed, done, fetch)
        at.add_incoming(self.fields[PROGRAM], entry)
        at.add_incoming(following, step)
        self.builder.position_at_end(special)
        kind = ll.FunctionType(I64, [PTR, I64])
        ended = self.builder.call(
            ll.Function(self.module, kind, "plt_special"), [self.call, code]
        )
        ended = self.builder.icmp_signed("!=", ended, ll.Constant(I64, 0))
        self.builder.cbranch(ended, done, step)
        self.builder.position_at_end(done)
        self.builder.ret_void()
        for number, call in enumerate(self.plan.calls):
            case = self.function.append_basic_block(f"step_{number}")
            switch.add_case(ll.Constant(I64, number), case)
            self.builder.position_at_end(case)
            # what one case loads is not there in another
            self.sizes, self.places = {}, {}
            name = call.callee if call.is_library else symbols[call.callee]
            self.run(number, call, name)
            self.builder.branch(step)

    def run(self, number: int, call: HostCall, name: str) -> None:
        arguments = [self.call, *map(self.size, call.sizes)]
        arguments += map(self.place, call.buffers)
        kinds = [value.type for value in arguments]
        callee = self.module.globals.get(name) or ll.Function(
            self.module, ll.FunctionType(VOID, kinds), name
        )
        self.stamp(2 * number)
        self.builder.call(callee, arguments)
        self.stamp(2 * number + 1)

    def size(self, size: Size) -> Any:
        if isinstance(size, int):
            return ll.Constant(I64, size)
        if size not in self.sizes:
            self.sizes[size] = _at(self.builder, self.fields[TABLE], size.number, I64)
        return self.sizes[size]

    def place(self, place: Place) -> Any:
        if place not in self.places:
            self.places[place] = self.address(place)
        return self.places[place]

    def address(self, place: Place) -> Any:
        if place.shifts:
            *others, shift = place.shifts
            base = self.place(Place(place.origin, place.number, tuple(others)))
            return self.builder.gep(base, [self.size(shift)], source_etype=I8)
        if place.origin is Origin.ARENA:
            offset = _at(self.builder, self.fields[OFFSETS], place.number, I64)
            return self.builder.gep(self.fields[ARENA], [offset], source_etype=I8)
        table = self.fields[ADDRESSES[place.origin]]
        return _at(self.builder, table, place.number, PTR)

    def stamp(self, word: int) -> None:
        """Where code is profiled, the time goes to a word of the block."""
        if self.plan.stamps is None:
            return
        kind = ll.FunctionType(I64, [PTR])
        name = "plt_clock"
        clock = self.module.globals.get(name) or ll.Function(self.module, kind, name)
        now = self.builder.call(clock, [self.call])
        weights = self.fields[ADDRESSES[Origin.WEIGHT]]
        block = _at(self.builder, weights, len(self.plan.constants), PTR)
        self.builder.store(now, _address(self.builder, block, word, I64))
