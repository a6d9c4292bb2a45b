"""The host flow as native code: functions around the kernels.

    i64  pliant_bind(dims, symbols)     symbols from input sizes; 0, or an error code
    i64  pliant_sizes(symbols, table)   every size, dim and offset the run needs
    void pliant_run(call)               the kernels, in the order of the plan's program
    void pliant_step(call, number)      one kernel that `main` itself does not call

`pliant_bind` runs at every call, `pliant_sizes` once per new shape. Both use checked
arithmetic (`host_dims.py`). bind returns 1 + the number of a guard that fails, or -1 -
the number of a guard that 64-bit arithmetic cannot decide; symbols that overflow are
numbered after the guards. sizes returns 1 + the number of a table entry that overflows;
checks that fail are numbered after the table. If several fail it reports a check, which
has the better message. After that, `pliant_run` trusts the table. It executes the
program: a list of steps, each a kernel with the plan's sizes and offsets. Most plans
run each step once. A plan for little memory may run a step again, and moves or spills
buffers in between, which `plt_special` of the runtime does. What only versions of
`main` for little memory call are cases of `pliant_step`. These are most of the host
flow and run rarely, so they are compiled without optimisation. An index check that
fails ends the run after its step; steps that write an input come later
(memory/order.py).

Profiled code also reads the clock before and after each kernel. The times go to a block
after the weights, two words per kernel. Other code contains none of this.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce

import llvmlite.ir as ll

from pliant.codegen.builder import LLBuilder
from pliant.codegen.host_dims import CheckedDims
from pliant.codegen.host_plan import (
    THREADS,
    BufferOrigin,
    BufferPlace,
    HostCall,
    HostPlan,
    Size,
    TableSlot,
)
from pliant.codegen.llvm_types import I8, I64, PTR, VOID, LLType, LLValue
from pliant.codegen.sizes import as_value
from pliant.sym.rules import SizeCheck

RUN, SIZES, BIND = "pliant_run", "pliant_sizes", "pliant_bind"
STEP = "pliant_step"
# Fields of plt_call, in order (runtime/rt.h).
ARENA, TABLE, OFFSETS, STATUS, PROGRAM = 1, 2, 3, 8, 9
ADDRESSES = {BufferOrigin.INPUT: 4, BufferOrigin.OUTPUT: 5, BufferOrigin.WEIGHT: 6}


def emit_calls(module: ll.Module, plan: HostPlan, symbols: Mapping[str, str]) -> None:
    """Adds what every call runs; `symbols` are the names of the kernels in LLVM."""
    _emit_run(module, plan, symbols)
    _emit_bind(module, plan)


def emit_steps(module: ll.Module, plan: HostPlan, symbols: Mapping[str, str]) -> None:
    """Adds the steps that only other versions of `main` have."""
    function = _step_function(module)
    function.attributes.add("nounwind")
    builder = LLBuilder(function.append_basic_block("entry"))
    steps = _StepCases(module, plan, function, builder)
    done = function.append_basic_block("done")
    switch = builder.switch(function.args[1], done)
    builder.position_at_end(done)
    builder.ret_void()
    steps.emit(switch, range(len(plan.own_calls), len(plan.calls)), symbols, done)


def _step_function(module: ll.Module) -> ll.Function:
    known = module.globals.get(STEP)
    return known or ll.Function(module, ll.FunctionType(VOID, [PTR, I64]), STEP)


def _function(
    module: ll.Module, name: str, result: LLType, count: int
) -> tuple[ll.Function, LLBuilder]:
    function = ll.Function(module, ll.FunctionType(result, [PTR] * count), name)
    builder = LLBuilder(function.append_basic_block("entry"))
    return function, builder


def _at(builder: LLBuilder, base: LLValue, k: int, kind: LLType) -> LLValue:
    return builder.load(_address(builder, base, k, kind), typ=kind)


def _address(builder: LLBuilder, base: LLValue, k: int, kind: LLType) -> LLValue:
    return builder.gep(base, [ll.Constant(I64, k)], source_etype=kind)


def emit_sizes(module: ll.Module, plan: HostPlan) -> None:
    """Adds what a new shape runs."""
    function, builder = _function(module, SIZES, I64, 2)
    source, target = function.args
    dims = CheckedDims(builder)
    for k, name in enumerate((*plan.symbols, THREADS, *plan.knobs)):
        dims.bind(name, _at(builder, source, k, I64))
    failures = [
        (_fails(builder, dims, check), k + 1)
        for k, check in enumerate(plan.checks, len(plan.table.entries))
    ]
    for k, e in enumerate(plan.table.entries):
        found = dims.evaluate(e)
        value = as_value(found.value)
        if k < plan.n_exact:
            failures.append((found.overflowed, k + 1))
        # An amount of work that overflows is stored as -1.
        elif found.overflowed is not None:
            value = builder.select(found.overflowed, ll.Constant(I64, -1), value)
        builder.store(value, _address(builder, target, k, I64))
    builder.ret(_first(builder, failures))


def _emit_bind(module: ll.Module, plan: HostPlan) -> None:
    function, builder = _function(module, BIND, I64, 2)
    source, target = function.args
    dims = CheckedDims(builder)
    observed: dict[tuple[int, int], LLValue] = {}
    for number, (name, rank) in enumerate(plan.shapes):
        for axis in range(rank):
            size = _at(builder, source, len(observed), I64)
            observed[number, axis] = size
            dims.bind(f"{name}.{axis}", size)
    failures: list[_Failure] = []
    for k, binding in enumerate(plan.bindings):
        dims.bind("d", observed[binding.source, binding.axis])
        found = dims.evaluate(binding.value)
        value = as_value(found.value)
        builder.store(value, _address(builder, target, k, I64))
        dims.bind(binding.symbol, value)
        failures.append((found.overflowed, -1 - len(plan.guards) - k))
    for k, binding in enumerate(plan.bindings):
        if binding.symbol == "d":  # guards use the name for a dim of the model
            dims.bind("d", _at(builder, target, k, I64))
    for number, guard in enumerate(plan.guards):
        found = dims.holds(guard.cond)
        failures += [(found.overflowed, -1 - number), (found.undefined, -1 - number)]
        failures.append((builder.not_(found.value), number + 1))
    builder.ret(_first(builder, failures))


_Failure = tuple[LLValue | None, int]  # a flag, or None if it cannot fail; the code


def _first(builder: LLBuilder, failures: list[_Failure]) -> LLValue:
    """The code of the first failure, else 0; all flags are evaluated."""
    code = ll.Constant(I64, 0)
    for flag, number in reversed(failures):
        if flag is not None:
            code = builder.select(flag, ll.Constant(I64, number), code)
    return code


def _fails(builder: LLBuilder, dims: CheckedDims, check: SizeCheck) -> LLValue | None:
    found = dims.evaluate(check.value)
    value = as_value(found.value)
    flags = [] if found.overflowed is None else [found.overflowed]
    for sign, bound in (("<", check.low), (">", check.high)):
        if bound is not None:
            flags.append(builder.icmp_signed(sign, value, ll.Constant(I64, bound)))
    return reduce(builder.or_, flags) if flags else None


def _emit_run(module: ll.Module, plan: HostPlan, symbols: Mapping[str, str]) -> None:
    """Adds a loop around a switch with a case for each step of `main`."""
    function, builder = _function(module, RUN, VOID, 1)
    (call,) = function.args
    steps = _StepCases(module, plan, function, builder)
    entry = builder.block
    fetch, step, special, done = map(
        function.append_basic_block, ("fetch", "step", "special", "done")
    )
    others = function.append_basic_block("others") if plan.other_calls else special
    builder.branch(fetch)
    builder.position_at_end(fetch)
    at = builder.phi(PTR, "at")
    code = builder.load(at, typ=I64)
    switch = builder.switch(code, others)
    builder.position_at_end(step)
    following = _address(builder, at, 1, I64)
    status = _at(builder, call, STATUS, I64)
    failed = builder.icmp_signed("!=", status, ll.Constant(I64, 0))
    builder.cbranch(failed, done, fetch)
    at.add_incoming(steps.fields[PROGRAM], entry)
    at.add_incoming(following, step)
    if plan.other_calls:
        builder.position_at_end(others)
        count = ll.Constant(I64, len(plan.calls))
        other = function.append_basic_block("other")
        builder.cbranch(builder.icmp_unsigned("<", code, count), other, special)
        builder.position_at_end(other)
        builder.call(_step_function(module), [call, code])
        builder.branch(step)
    builder.position_at_end(special)
    kind = ll.FunctionType(I64, [PTR, I64])
    ended = builder.call(ll.Function(module, kind, "plt_special"), [call, code])
    ended = builder.icmp_signed("!=", ended, ll.Constant(I64, 0))
    builder.cbranch(ended, done, step)
    builder.position_at_end(done)
    builder.ret_void()
    steps.emit(switch, range(len(plan.own_calls)), symbols, step)


class _StepCases:
    """Emits steps of a plan in a function whose first argument is the call."""

    def __init__(
        self,
        module: ll.Module,
        plan: HostPlan,
        function: ll.Function,
        builder: LLBuilder,
    ) -> None:
        self.module, self.plan = module, plan
        self.function, self.builder = function, builder
        self.call = function.args[0]
        numbers = (ARENA, TABLE, OFFSETS, PROGRAM, *ADDRESSES.values())
        self.fields = {n: _at(self.builder, self.call, n, PTR) for n in numbers}
        self.sizes: dict[TableSlot, LLValue] = {}
        self.places: dict[BufferPlace, LLValue] = {}

    def emit(
        self,
        switch: ll.SwitchInstr,
        numbers: Iterable[int],
        symbols: Mapping[str, str],
        behind: ll.Block,
    ) -> None:
        """Adds a case for each of these steps; they go on at `behind`."""
        for number in numbers:
            call = self.plan.calls[number]
            case = self.function.append_basic_block(f"step_{number}")
            switch.add_case(ll.Constant(I64, number), case)
            self.builder.position_at_end(case)
            # What one case loads is not available in another.
            self.sizes, self.places = {}, {}
            name = call.callee if call.is_library else symbols[call.callee]
            self.run(number, call, name)
            self.builder.branch(behind)

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

    def size(self, size: Size) -> LLValue:
        if isinstance(size, int):
            return ll.Constant(I64, size)
        if size not in self.sizes:
            self.sizes[size] = _at(self.builder, self.fields[TABLE], size.number, I64)
        return self.sizes[size]

    def place(self, place: BufferPlace) -> LLValue:
        if place not in self.places:
            self.places[place] = self.address(place)
        return self.places[place]

    def address(self, place: BufferPlace) -> LLValue:
        if place.shifts:
            *others, shift = place.shifts
            base = self.place(BufferPlace(place.origin, place.number, tuple(others)))
            return self.builder.gep(base, [self.size(shift)], source_etype=I8)
        if place.origin is BufferOrigin.ARENA:
            offset = _at(self.builder, self.fields[OFFSETS], place.number, I64)
            return self.builder.gep(self.fields[ARENA], [offset], source_etype=I8)
        table = self.fields[ADDRESSES[place.origin]]
        return _at(self.builder, table, place.number, PTR)

    def stamp(self, word: int) -> None:
        """In profiled code, stores the time in a word of the block."""
        if self.plan.stamps is None:
            return
        kind = ll.FunctionType(I64, [PTR])
        name = "plt_clock"
        clock = self.module.globals.get(name) or ll.Function(self.module, kind, name)
        now = self.builder.call(clock, [self.call])
        weights = self.fields[ADDRESSES[BufferOrigin.WEIGHT]]
        block = _at(self.builder, weights, len(self.plan.constants), PTR)
        self.builder.store(now, _address(self.builder, block, word, I64))
