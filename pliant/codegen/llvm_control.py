"""Branches, checks and calls.

A condition that varies by lane masks its branches; any other is a jump. Cases that call
functions with the same arguments become one call of an address from a table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce

import llvmlite.ir as ll

from pliant.codegen.llvm_lanes import any_lane, first_lane
from pliant.codegen.llvm_types import (
    I64,
    PTR,
    STATUS_FIELD,
    VALUE_FIELD,
    VOID,
    LLValue,
    constant,
    splat,
)
from pliant.codegen.llvm_values import Values
from pliant.codegen.sizes import NO_WRAP
from pliant.ir.loop_walk import statements, values
from pliant.ir.loops import (
    Block,
    Call,
    CallLibrary,
    If,
    Load,
    LoopValue,
    Role,
    Stmt,
    Store,
    Switch,
    Variant,
)


class Control(Values):
    """Emits statements of control flow."""

    def if_(self, stmt: If) -> None:
        cond = self.value(stmt.cond)
        if isinstance(cond.type, ll.VectorType):
            self.masked(cond, stmt.then)
            if stmt.otherwise is not None:
                self.masked(self.b.not_(cond), stmt.otherwise)
        elif stmt.otherwise is None:
            with self.when(cond):
                self.stmt(stmt.then)
        else:
            with self.b.if_else(cond) as (then, otherwise):
                with then, self.region():
                    self.stmt(stmt.then)
                with otherwise, self.region():
                    self.stmt(stmt.otherwise)

    def while_(self, cond: LoopValue, body: Stmt) -> None:
        b = self.b
        names = ("while", "while.test", "while.body", "while.end")
        top, test, inside, end = map(b.append_basic_block, names)
        b.branch(top)
        b.position_at_end(top)
        place = b.gep(self.call, [constant(I64, STATUS_FIELD)], source_etype=I64)
        status = b.load(place, typ=I64)
        b.cbranch(b.icmp_signed("==", status, constant(I64, 0)), test, end)
        b.position_at_end(test)
        with self.region():
            b.cbranch(self.value(cond), inside, end)
        b.position_at_end(inside)
        with self.region():
            self.stmt(body)
        b.branch(top)
        b.position_at_end(end)

    def masked(self, cond: LLValue, stmt: Stmt) -> None:
        """Runs the lanes whose flag is set; skips the statement if there are none."""
        mask = cond if self.mask is None else self.b.and_(self.mask, cond)
        if _only_stores_registers(stmt):
            with self.region():
                self.mask = mask
                self.stmt(stmt)
            return
        with self.when(any_lane(self.b, mask)):
            self.mask = mask
            self.stmt(stmt)

    def switch(self, stmt: Switch) -> None:
        after = self.b.append_basic_block("switch.end")
        selector = self.dims.scalar(stmt.selector)
        switch = self.b.switch(selector, after)
        calls, others = _calls_alike(stmt.cases)
        for alike in calls:
            self.case(switch, alike)
            with self.region():
                function = self.looked_up(selector, alike)
                self.call_address(function, next(iter(alike.values())))
            self.b.branch(after)
        for number, body in others:
            self.case(switch, (number,))
            with self.region():
                self.stmt(body)
            self.b.branch(after)
        self.b.position_at_end(after)

    def case(self, switch: LLValue, numbers: Iterable[int]) -> None:
        """Starts the block of these cases."""
        block = self.b.append_basic_block("case")
        for number in numbers:
            switch.add_case(constant(I64, number), block)
        self.b.position_at_end(block)

    def looked_up(self, selector: LLValue, calls: Mapping[int, Call]) -> LLValue:
        """The address of the function that the selected case calls."""
        functions = {number: self.called(call) for number, call in calls.items()}
        first, *others = functions.values()
        if all(other is first for other in others):
            return first
        low, high = min(calls), max(calls)
        typ, module = ll.ArrayType(PTR, high - low + 1), self.unit.module
        name = module.get_unique_name(f"{self.function.name}.calls")
        table = ll.GlobalVariable(module, typ, name)
        table.linkage, table.global_constant = "internal", True
        nothing = ll.Constant(PTR, None)
        rows = [functions.get(number, nothing) for number in range(low, high + 1)]
        table.initializer = ll.Constant(typ, rows)
        row = self.b.sub(selector, constant(I64, low), flags=NO_WRAP)
        return self.b.load(self.b.gep(table, [row], source_etype=PTR), typ=PTR)

    def dispatch(self, variants: tuple[Variant, ...]) -> None:
        """Runs the first variant whose guards hold; the last has none."""
        first, *rest = variants
        if not rest:
            with self.region():
                self.stmt(first.body)
            return
        with self.region():
            holds = [self.dims.holds(guard) for guard in first.guards]
            cond = reduce(self.b.and_, holds)
        with self.b.if_else(cond) as (then, otherwise):
            with then, self.region():
                self.stmt(first.body)
            with otherwise:
                self.dispatch(tuple(rest))

    def check(self, cond: LLValue, number: int, value: LLValue) -> None:
        """Reports the first failure of a call, with the offending value."""
        b = self.b
        failed = b.not_(cond)
        if self.mask is not None:
            failed = b.and_(splat(b, failed, self.dims.lanes), self.mask)
        with b.if_then(any_lane(b, failed), likely=False):
            status = b.gep(self.call, [constant(I64, STATUS_FIELD)], source_etype=I64)
            none, ours = constant(I64, 0), constant(I64, number)
            before = b.cmpxchg(status, none, ours, "monotonic", "monotonic")
            if value is not None:
                place = [constant(I64, VALUE_FIELD)]
                with b.if_then(b.extract_value(before, 1)):
                    shown = first_lane(b, value, failed)
                    b.store(shown, b.gep(self.call, place, source_etype=I64))

    def call_function(self, stmt: Call) -> None:
        self.call_address(self.called(stmt), stmt)

    def called(self, stmt: Call) -> LLValue:
        return self.declared(stmt.function, len(stmt.sizes), len(stmt.arguments))

    def declared(self, name: str, sizes: int, buffers: int) -> LLValue:
        function = self.unit.functions.get(name)
        if function is None:
            args = [PTR, *(I64 for _ in range(sizes)), *(PTR for _ in range(buffers))]
            signature = ll.FunctionType(VOID, args)
            function = ll.Function(self.unit.module, signature, name)
            self.unit.functions[name] = function
        return function

    def call_library(self, stmt: CallLibrary) -> None:
        function = self.declared(stmt.symbol, len(stmt.sizes), len(stmt.buffers))
        sizes = [self.dims.scalar(size) for size in stmt.sizes]
        pointers = [self.memory.buffers[buf.name] for buf in stmt.buffers]
        self.b.call_void(function, [self.call, *sizes, *pointers])

    def call_address(self, function: LLValue, stmt: Call) -> None:
        """Calls a function, or its address, with the arguments of a statement."""
        sizes = [self.dims.scalar(size) for size in stmt.sizes]
        pointers = [self.memory.address(buf, index) for buf, index in stmt.arguments]
        self.b.call_void(function, [self.call, *sizes, *pointers])


def _only_stores_registers(stmt: Stmt) -> bool:
    """Whether a masked branch may run with no active lane.

    Nothing in it may read memory at one address for all lanes.
    """
    return all(isinstance(s, Block | Store) for s in statements(stmt)) and all(
        not isinstance(v, Load) or v.buffer.role is Role.REGISTER for v in values(stmt)
    )


def _calls_alike(
    cases: Iterable[tuple[int, Stmt]],
) -> tuple[list[dict[int, Call]], list[tuple[int, Stmt]]]:
    """Cases that are only a call, by their arguments; and the others."""
    calls: dict[object, dict[int, Call]] = {}
    others: list[tuple[int, Stmt]] = []
    for number, body in cases:
        call = body
        while isinstance(call, Block) and len(call.body) == 1:
            (call,) = call.body
        if isinstance(call, Call):
            key = (call.sizes, call.arguments)
            calls.setdefault(key, {})[number] = call
        else:
            others.append((number, body))
    return list(calls.values()), others
