"""Loop functions -> LLVM IR.

A loop function becomes

    void @name(ptr call, i64 sizes.., ptr buffers..)

where `call` is the plt_call of runtime/rt.h. A PARALLEL loop is outlined to a function
of its own, handed to plt_parallel.

A VECTOR loop runs `target.lanes` iterations side by side, whatever the element types:

    for i in 0 .. n & -lanes step lanes     whole vectors
    if something is left                    once, under a mask; or a scalar loop where
                                            the target has no masked loads and stores

A value is a scalar until it meets one that differs by lane. Each address is a
polynomial in the vector variable: not in it -> one scalar load; coefficient 1 -> a
vector load; any other way -> a gather. What cannot run side by side (a call, a bound
that differs by lane) makes the loop serial, which means the same.

Mutable state (accumulators, register buffers) lives in allocas of the entry block, at
constant offsets wherever it must end up in registers: LLVM's SROA puts it there.
Accumulators of a vector loop are several partial vectors, combined in a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import llvmlite.ir as ll

from pliant.codegen import llvm_ops as ops
from pliant.codegen import llvm_uses as uses
from pliant.codegen.builder import Builder
from pliant.codegen.dot import emit_dot
from pliant.codegen.llvm_dims import Dims, LaneCheck, Lanes, Memory
from pliant.codegen.llvm_types import (
    I32,
    I64,
    PARALLEL_TYPE,
    PTR,
    STATUS_FIELD,
    TASK_TYPE,
    VALUE_FIELD,
    VOID,
    constant,
    dtype_constant,
    iota,
    lanes_of,
    splat,
    storage_type,
)
from pliant.codegen.sizes import NO_WRAP, as_value
from pliant.codegen.transpose import emit_turned, turned
from pliant.errors import InternalError
from pliant.ir.loop_walk import accesses, free_symbols, statements
from pliant.ir.loops import (
    WORKER,
    Accumulate,
    Accumulator,
    Alloc,
    Binary,
    Block,
    Buffer,
    Call,
    Cast,
    Check,
    Const,
    Dispatch,
    Dot,
    Fma,
    For,
    If,
    Index,
    Kind,
    Let,
    Load,
    Local,
    LoopFunc,
    LoopValue,
    Prefetch,
    Read,
    Role,
    Select,
    Stmt,
    Store,
    Switch,
    Unary,
    Variant,
    dtype_of,
    most,
)
from pliant.ir.types import DType
from pliant.machine.target import Target
from pliant.sym import ZERO, Expr

# A vector loop of a constant number of vectors up to this is written out.
MOST_WRITTEN_OUT = 8


def emit_loop_functions(
    module_ir: ll.Module, funcs: Iterable[LoopFunc], target: Target
) -> dict[str, ll.Function]:
    """Adds every loop function to the module; returns them by name."""
    todo = tuple(funcs)
    unit = _Unit(module_ir, target)
    for func in todo:
        unit.functions[func.name] = _declare(module_ir, func, func.name)
    for func in todo:
        _define(unit, func)
    return {func.name: unit.functions[func.name] for func in todo}


def emit_loop_function(
    func: LoopFunc,
    callees: Iterable[LoopFunc],
    symbols: Mapping[str, str],
    target: Target,
) -> ll.Module:
    """One loop function in a module of its own, what it calls being declared there.

    `symbols` are the names of the functions outside of this module.
    """
    module = ll.Module(symbols[func.name])
    unit = _Unit(module, target)
    for known in (func, *callees):
        unit.functions[known.name] = _declare(module, known, symbols[known.name])
    _define(unit, func)
    return module


@dataclass(slots=True)
class _Unit:
    """What the functions of one LLVM module share."""

    module: ll.Module
    target: Target
    functions: dict[str, ll.Function] = field(default_factory=dict)
    by_lanes: dict[int, bool] = field(default_factory=dict)  # by id of a For


def _declare(module: ll.Module, func: LoopFunc, symbol: str) -> ll.Function:
    args = [PTR, *(I64 for _ in func.sizes), *(PTR for _ in func.buffers)]
    existing = module.globals.get(symbol)
    function = existing or ll.Function(module, ll.FunctionType(VOID, args), symbol)
    function.attributes.add("nounwind")
    for arg, name in zip(
        function.args,
        ("call", *func.sizes, *(buf.name for buf in func.buffers)),
        strict=True,
    ):
        arg.name = name
    _mark_aliasing(function.args[1 + len(func.sizes) :], func.buffers)
    return function


def _mark_aliasing(args: Iterable[Any], buffers: Sequence[Buffer]) -> None:
    """Inputs may be one another but are not written; an INOUT may be an input too."""
    in_place = _in_place(buffers)
    for arg, buf in zip(args, buffers, strict=True):
        alone = buf.role in (Role.OUT, Role.WORK)
        if alone or (buf.role is Role.IN and not in_place):
            arg.add_attribute("noalias")


def _in_place(buffers: Iterable[Buffer]) -> bool:
    return any(buf.role is Role.INOUT for buf in buffers)


def _define(unit: _Unit, func: LoopFunc) -> None:
    function = unit.functions[func.name]
    body = _Body(unit, function, function.args[0])
    sizes = function.args[1 : 1 + len(func.sizes)]
    for name, arg in zip(func.sizes, sizes, strict=True):
        body.dims.bind(name, arg)
    body.dims.bind(WORKER, 0)
    body.memory.in_place = _in_place(func.buffers)
    for buf, arg in zip(func.buffers, function.args[1 + len(sizes) :], strict=True):
        body.memory.buffers[buf.name] = arg
    body.stmt(func.body)
    body.finish()


class _Body:
    """Emits the statements of one LLVM function."""

    def __init__(self, unit: _Unit, function: ll.Function, call: Any) -> None:
        self.unit, self.target, self.function = unit, unit.target, function
        self.call = call
        self.entry = function.append_basic_block("entry")
        self.b = Builder(function.append_basic_block("body"))
        self.first = self.b.block
        self.dims = Dims(self.b)
        self.memory = Memory(self.dims)
        self.locals: dict[str, Any] = {}
        self.accumulators: dict[str, ops.Reduction] = {}
        self.mask: Any = None  # lanes that run, None: all of them
        self.copy = 0  # which copy of an unrolled vector loop's body this is
        self.in_task = False
        self._values: dict[int, Any] = {}

    def finish(self) -> None:
        self.b.ret_void()
        Builder(self.entry).branch(self.first)

    # ---- scopes and blocks

    @contextmanager
    def region(self) -> Iterator[None]:
        """What is named inside is not seen behind it."""
        memory = self.memory
        saved = self.locals, self.accumulators, self.mask, self._values, memory.buffers
        self.locals, self.accumulators = dict(self.locals), dict(self.accumulators)
        memory.buffers, self._values = dict(memory.buffers), {}
        try:
            with self.dims.scope():
                yield
        finally:
            self.locals, self.accumulators, self.mask, self._values, memory.buffers = (
                saved
            )

    @contextmanager
    def when(self, cond: Any, likely: bool | None = None) -> Iterator[None]:
        """Runs what is emitted inside only if the scalar flag is set."""
        with self.b.if_then(cond, likely), self.region():
            yield

    @contextmanager
    def loop(self, begin: Any, end: Any, step: int, label: str) -> Iterator[Any]:
        """A counted loop, entered only if it has an iteration."""
        b = self.b
        body, after = b.append_basic_block(label), b.append_basic_block(f"{label}.end")
        before = b.block
        b.cbranch(b.icmp_signed("<", begin, end), body, after)
        b.position_at_end(body)
        counter = b.phi(I64, name=label)
        counter.add_incoming(begin, before)
        with self.region():
            yield counter
        following = b.add(counter, constant(I64, step), flags=NO_WRAP)
        counter.add_incoming(following, b.block)
        b.cbranch(b.icmp_signed("<", following, end), body, after)
        b.position_at_end(after)

    def alloca(
        self, typ: Any, count: int | None = None, align: int | None = None
    ) -> Any:
        builder = Builder(self.entry)
        slot = builder.alloca(typ if count is None else ll.ArrayType(typ, count))
        slot.align = align
        slot.type = PTR
        return slot

    # ---- statements

    def stmt(self, stmt: Stmt) -> None:
        self._values = {}
        match stmt:
            case Block(body):
                self.block(body)
            case For():
                self.for_(stmt)
            case Store(buf, index, value):
                self.memory.store(buf, index, self.value(value), self.mask)
            case Let(name, value):
                self.let(name, value)
            case Local(name, _, value):
                self.locals[name] = self.value(value)
            case Accumulator(name, dtype, op):
                self.accumulators[name] = ops.Reduction(
                    self.b, op, dtype, self.dims.lanes, self.alloca, self.target
                )
            case Accumulate(name, value):
                self.accumulators[name].add(
                    self.b, self.value(value), self.dims.lanes, self.mask, self.copy
                )
            case Alloc(buf):
                self.alloc(buf)
            case If():
                self.if_(stmt)
            case Switch():
                self.switch(stmt)
            case Dispatch(variants):
                self.dispatch(variants)
            case Check(cond, number, value):
                told = None if value is None else self.value(value)
                self.check(self.value(cond), number, told)
            case Prefetch(buf, index):
                address = self.memory.near(buf, index)
                if address is not None:
                    ops.prefetch(self.b, address)
            case Call():
                self.call_function(stmt)
            case _:
                raise InternalError("codegen", f"no LLVM for the statement {stmt!r}")

    def block(self, body: tuple[Stmt, ...]) -> None:
        named = [stmt.name for stmt in body if isinstance(stmt, Accumulator)]
        last = {
            name: number
            for number, stmt in enumerate(body)
            if named
            for name in uses.accumulated(stmt)
        }
        with self.region():
            for number, stmt in enumerate(body):
                self.stmt(stmt)
                ended = [n for n in named if last.get(n) == number]
                for first in range(0, len(ended), ops.TOGETHER):
                    names = ended[first : first + ops.TOGETHER]
                    sums = [self.accumulators[name] for name in names]
                    for each, total in zip(sums, ops.totals(self.b, sums), strict=True):
                        each.final = total

    def let(self, name: str, value: LoopValue) -> None:
        if isinstance(value, Index) and not self.dims.varies(value.dim):
            signed = not self.dims.is_nonnegative(value.dim)
            self.dims.bind(name, self.dims.evaluate(value.dim), signed=signed)
            return
        number = self.cast(self.value(value), dtype_of(value), DType.I64)
        self.dims.bind(name, number, signed=True)

    def alloc(self, buf: Buffer) -> None:
        count = 1 + sum(
            (dim.value - 1) * step.value
            for dim, step in zip(buf.shape, buf.strides, strict=True)
        )
        slot = self.alloca(storage_type(buf.dtype), count, align=64)
        self.memory.buffers[buf.name] = slot

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

    def masked(self, cond: Any, stmt: Stmt) -> None:
        """Runs the lanes whose flag is set; where none is, nothing at all."""
        mask = cond if self.mask is None else self.b.and_(self.mask, cond)
        if uses.only_stores_registers(stmt):
            with self.region():
                self.mask = mask
                self.stmt(stmt)
            return
        with self.when(ops.any_lane(self.b, mask)):
            self.mask = mask
            self.stmt(stmt)

    def switch(self, stmt: Switch) -> None:
        after = self.b.append_basic_block("switch.end")
        selector = self.dims.scalar(stmt.selector)
        switch = self.b.switch(selector, after)
        calls, others = uses.calls_alike(stmt.cases)
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

    def case(self, switch: Any, numbers: Iterable[int]) -> None:
        """Begins the block of these cases."""
        block = self.b.append_basic_block("case")
        for number in numbers:
            switch.add_case(constant(I64, number), block)
        self.b.position_at_end(block)

    def looked_up(self, selector: Any, calls: Mapping[int, Call]) -> Any:
        """The address of the function that the case of a number calls."""
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
        """The first variant whose guards hold; the last has none."""
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

    def check(self, cond: Any, number: int, value: Any) -> None:
        """The first failure of a call is told, with what it tells of."""
        b = self.b
        failed = b.not_(cond)
        if self.mask is not None:
            failed = b.and_(splat(b, failed, self.dims.lanes), self.mask)
        with b.if_then(ops.any_lane(b, failed), likely=False):
            status = b.gep(self.call, [constant(I64, STATUS_FIELD)], source_etype=I64)
            none, ours = constant(I64, 0), constant(I64, number)
            before = b.cmpxchg(status, none, ours, "monotonic", "monotonic")
            if value is not None:
                place = [constant(I64, VALUE_FIELD)]
                with b.if_then(b.extract_value(before, 1)):
                    told = ops.first_lane(b, value, failed)
                    b.store(told, b.gep(self.call, place, source_etype=I64))

    def call_function(self, stmt: Call) -> None:
        self.call_address(self.called(stmt), stmt)

    def called(self, stmt: Call) -> Any:
        function = self.unit.functions.get(stmt.function)
        if function is None:
            args = [PTR, *(I64 for _ in stmt.sizes), *(PTR for _ in stmt.arguments)]
            signature = ll.FunctionType(VOID, args)
            function = ll.Function(self.unit.module, signature, stmt.function)
            self.unit.functions[stmt.function] = function
        return function

    def call_address(self, function: Any, stmt: Call) -> None:
        """Calls a function, or its address, with the arguments of a statement."""
        sizes = [self.dims.scalar(size) for size in stmt.sizes]
        pointers = [self.memory.address(buf, index) for buf, index in stmt.arguments]
        self.b.call_void(function, [self.call, *sizes, *pointers])

    # ---- loops

    def for_(self, loop: For) -> None:
        begin, end = self.dims.evaluate(loop.begin), self.dims.evaluate(loop.end)
        if isinstance(begin, int) and isinstance(end, int):
            if end <= begin:
                return
            if loop.kind is Kind.UNROLL or begin + loop.step >= end:
                for number in range(begin, end, loop.step):
                    with self.region():
                        self.dims.bind(loop.var, number)
                        self.stmt(loop.body)
                return
        if (
            loop.kind is Kind.VECTOR
            and self.dims.lanes == 1
            and self.runs_by_lanes(loop)
        ):
            self.vector_loop(loop, begin, end)
        elif loop.kind is Kind.PARALLEL and self.can_outline(loop):
            self.parallel_loop(loop, begin, end)
        elif (
            self.dims.lanes == 1
            and loop.kind is Kind.SERIAL
            and (nest := turned(loop, self.memory.flat, self.target)) is not None
        ):
            emit_turned(self, nest, begin, end)
        else:
            self.serial_loop(loop, begin, end)

    def runs_by_lanes(self, loop: For) -> bool:
        known = self.unit.by_lanes
        if id(loop) not in known:
            check = LaneCheck(self.memory.flat, {loop.var})
            known[id(loop)] = check.allows(loop.body)
        return known[id(loop)]

    def serial_loop(self, loop: For, begin: Any, end: Any) -> None:
        signed = not self.dims.is_nonnegative(loop.begin)
        with self.loop(as_value(begin), as_value(end), loop.step, loop.var) as counter:
            self.dims.bind(loop.var, counter, signed=signed)
            self.stmt(loop.body)

    def trips(self, loop: For, begin: Any, end: Any) -> Any:
        """How often a loop runs, at least 0."""
        b = self.b
        span = as_value(end)
        if begin != 0:
            span = b.sub(as_value(end), as_value(begin), flags=NO_WRAP)
        if loop.step != 1:
            span = b.add(span, constant(I64, loop.step - 1), flags=NO_WRAP)
            span = b.sdiv(span, constant(I64, loop.step))
        if (
            isinstance(loop.end, Expr)
            and begin == 0
            and self.dims.is_nonnegative(loop.end)
        ):
            return span
        zero = constant(I64, 0)
        return b.select(b.icmp_signed(">", span, zero), span, zero)

    def vector_loop(self, loop: For, begin: Any, end: Any) -> None:
        lanes = self.target.lanes
        if isinstance(begin, int) and isinstance(end, int):
            trips = -(-(end - begin) // loop.step)
            if trips <= MOST_WRITTEN_OUT * lanes:
                self.written_out(loop, begin, trips)
                return
        room = self.room(loop)
        if isinstance(begin, int) and room is not None:
            self.written_out_masked(loop, begin, end, room)
            return
        trips = self.trips(loop, begin, end)
        copies, abreast = uses.copies(loop), uses.abreast(loop)
        together = lanes * copies * abreast
        whole = trips
        if not uses.is_multiple(loop, together):
            whole = self.b.and_(trips, constant(I64, -together))
        with self.loop(constant(I64, 0), whole, together, loop.var) as at:
            base = self.first_lane(loop, begin, at)
            for copy in range(copies):
                self.copy = copy
                var = Lanes(base, loop.step, copy * lanes * loop.step)
                self.lanes_body(loop, var, lanes=lanes * abreast)
            self.copy = 0
        if whole is trips:
            return
        if uses.has_masks(self.target, loop):
            self.masked_rest(loop, begin, whole, trips, copies * abreast)
        else:
            self.scalar_rest(loop, begin, whole, trips, copies * abreast)

    def first_lane(self, loop: For, begin: Any, at: Any) -> Any:
        """begin + at * step"""
        if loop.step != 1:
            at = self.b.mul(at, constant(I64, loop.step), flags=NO_WRAP)
        return at if begin == 0 else self.b.add(as_value(begin), at, flags=NO_WRAP)

    def lanes_body(
        self, loop: For, var: Any, lanes: int | None = None, mask: Any = None
    ) -> None:
        """The loop's body for one vector of iterations."""
        with self.region():
            self.dims.lanes = self.target.lanes if lanes is None else lanes
            signed = not self.dims.is_nonnegative(loop.begin)
            self.dims.bind(loop.var, var, signed=signed)
            self.mask = mask
            self.stmt(loop.body)

    def left_mask(self, left: Any) -> Any:
        """The lanes below a count."""
        lanes, b = self.target.lanes, self.b
        most = constant(I64, lanes)
        few = b.select(b.icmp_signed("<", left, most), left, most)
        count = splat(b, b.trunc(few, I32), lanes)
        return b.icmp_signed("<", iota(I32, lanes), count)

    def masked_rest(
        self, loop: For, begin: Any, whole: Any, trips: Any, copies: int
    ) -> None:
        def rest(at: Any) -> None:
            mask = self.left_mask(self.b.sub(trips, at, flags=NO_WRAP))
            base = self.first_lane(loop, begin, at)
            self.lanes_body(loop, Lanes(base, loop.step), mask=mask)

        if copies == 1:
            with self.when(self.b.icmp_signed("<", whole, trips)):
                rest(whole)
            return
        with self.loop(whole, trips, self.target.lanes, f"{loop.var}.rest") as at:
            rest(at)

    def scalar_rest(
        self, loop: For, begin: Any, whole: Any, trips: Any, copies: int
    ) -> None:
        lanes = self.target.lanes
        if copies > 1:
            vectors = self.b.and_(trips, constant(I64, -lanes))
            with self.loop(whole, vectors, lanes, f"{loop.var}.vector") as at:
                base = self.first_lane(loop, begin, at)
                self.lanes_body(loop, Lanes(base, loop.step))
            whole = vectors
        with self.loop(whole, trips, 1, f"{loop.var}.rest") as at:
            self.lanes_body(loop, self.first_lane(loop, begin, at), lanes=1)

    def written_out(self, loop: For, begin: int, trips: int) -> None:
        """Constant trips: whole vectors, then ever smaller powers of two."""
        at, lanes, number = begin, self.target.lanes, 0
        while trips > 0:
            while lanes > trips:
                lanes //= 2
            self.copy = number % 4
            var = Lanes(at, loop.step) if lanes > 1 else at
            self.lanes_body(loop, var, lanes=lanes)
            at, trips, number = at + lanes * loop.step, trips - lanes, number + 1
        self.copy = 0

    def written_out_masked(self, loop: For, begin: int, end: Any, room: int) -> None:
        """A run-time end over registers: every vector they can hold, under a mask."""
        lanes = self.target.lanes
        trips = self.trips(loop, begin, end)
        for first in range(0, room, lanes):
            left = self.b.sub(trips, constant(I64, first), flags=NO_WRAP)
            var = Lanes(begin + first * loop.step, loop.step)
            self.copy = first // lanes % 4
            with self.when(self.b.icmp_signed(">", left, constant(I64, 0))):
                self.lanes_body(loop, var, mask=self.left_mask(left))
        self.copy = 0

    def room(self, loop: For) -> int | None:
        """The most iterations there can be, if that is few enough to write them out.

        Registers that the loop's variable indexes say so, or the loop's own end.
        """
        rooms = [
            dim.value
            for buf, index in accesses(loop.body)
            if buf.role is Role.REGISTER
            for dim, at in zip(buf.shape, index, strict=True)
            if loop.var in at.symbols()
        ]
        bound = most(loop.end)
        if bound is not None and not loop.end.is_const:
            rooms.append(bound)
        if not rooms or loop.step != 1:
            return None
        room = min(rooms)
        fits = room % self.target.lanes == 0
        return room if fits and room <= MOST_WRITTEN_OUT * self.target.lanes else None

    # ---- parallel loops

    def can_outline(self, loop: For) -> bool:
        """Not inside a parallel loop already, and all it uses can be handed over."""
        if self.in_task or self.dims.lanes > 1:
            return False
        declared = {s.name for s in statements(loop.body) if isinstance(s, Accumulator)}
        if uses.accumulated(loop.body) - declared:
            return False
        own = {s.buffer.name for s in statements(loop.body) if isinstance(s, Alloc)}
        return all(
            buf.role is not Role.REGISTER or buf.name in own
            for buf, _ in accesses(loop.body)
        )

    def parallel_loop(self, loop: For, begin: Any, end: Any) -> None:
        b = self.b
        start = as_value(begin)
        free = free_symbols(loop.body) - {WORKER}
        sizes = {n: v for n, v in self.dims.names.items() if n in free}
        scalars = {n: self.read(n) for n in uses.reads(loop.body) if self.is_named(n)}
        outer = self.memory.buffers
        used = {buf.name: buf for buf, _ in accesses(loop.body)}
        buffers = [used[name] for name in outer if name in used]
        passed = [v for v in sizes.values() if not isinstance(v, int)]
        handed = [self.call, start, *passed, *scalars.values()]
        handed += [outer[buf.name] for buf in buffers]
        kinds = [value.type for value in handed]

        name = f"{self.function.name}.{loop.var}"
        body = ll.Function(
            self.unit.module,
            ll.FunctionType(VOID, [I64, I64, I64, *kinds]),
            self.unit.module.get_unique_name(name),
        )
        body.linkage = "internal"
        body.attributes.add("noinline")
        body.attributes.add("nounwind")
        self.task_body(body, loop, sizes, scalars, buffers)

        struct = ll.LiteralStructType(kinds)
        task = self.task_entry(body, struct)
        packed = self.alloca(struct, align=8)
        for number, value in enumerate(handed):
            b.store(value, _member(b, packed, struct, number))
        units = self.trips(loop, begin, end)
        run = self.unit.module.globals.get("plt_parallel") or ll.Function(
            self.unit.module, PARALLEL_TYPE, "plt_parallel"
        )
        grain = self.dims.scalar(loop.grain)
        b.call(run, [self.call, task, packed, units, grain])

    def is_named(self, name: str) -> bool:
        return name in self.locals or name in self.accumulators

    def task_body(
        self,
        function: ll.Function,
        loop: For,
        sizes: dict[str, Any],
        scalars: dict[str, Any],
        buffers: list[Buffer],
    ) -> None:
        """Units first .. last of the loop; arguments as `parallel_loop` hands them."""
        first, last, worker, call, start, *rest = function.args
        inner = _Body(self.unit, function, call)
        inner.in_task = True
        inner.memory.in_place = self.memory.in_place
        given = iter(rest)
        for name, value in sizes.items():
            bound = value if isinstance(value, int) else next(given)
            inner.dims.bind(name, bound, signed=self.dims.is_signed(name))
        inner.dims.bind(WORKER, worker)
        for name in scalars:
            inner.locals[name] = next(given)
        pointers = list(given)
        _mark_aliasing(pointers, buffers)
        for pointer, buf in zip(pointers, buffers, strict=True):
            inner.memory.buffers[buf.name] = pointer
        signed = not self.dims.is_nonnegative(loop.begin)
        begin = 0 if loop.begin is ZERO else start
        with inner.loop(first, last, 1, loop.var) as unit:
            at = inner.first_lane(loop, begin, unit)
            inner.dims.bind(loop.var, at, signed=signed)
            inner.stmt(loop.body)
        inner.finish()

    def task_entry(self, body: ll.Function, struct: Any) -> ll.Function:
        """What the runtime calls: unpacks the arguments, so `body` has them noalias."""
        name = self.unit.module.get_unique_name(f"{body.name}.task")
        task = ll.Function(self.unit.module, TASK_TYPE, name)
        task.linkage = "internal"
        task.attributes.add("nounwind")
        b = Builder(task.append_basic_block("entry"))
        packed, first, last, worker = task.args
        handed = [
            b.load(_member(b, packed, struct, number), typ=kind)
            for number, kind in enumerate(struct.elements)
        ]
        b.call(body, [first, last, worker, *handed])
        b.ret_void()
        return task

    def read(self, name: str) -> Any:
        """A local, or an accumulator's result."""
        if name in self.locals:
            return self.locals[name]
        accumulator = self.accumulators[name]
        return (
            accumulator.total(self.b)
            if accumulator.final is None
            else accumulator.final
        )

    # ---- values

    def value(self, value: LoopValue) -> Any:
        """Emits a value; a node shared within a statement is emitted once."""
        found = self._values.get(id(value))
        if found is None:
            found = self._values[id(value)] = self.emit(value)
        return found

    def emit(self, value: LoopValue) -> Any:
        b, target = self.b, self.target
        match value:
            case Const(number, dtype):
                return dtype_constant(number, dtype)
            case Index(dim):
                return self.dims.value(dim)
            case Load(buf, index, where):
                flag = None if where is None else self.value(where)
                return self.memory.load(buf, index, flag, self.mask)
            case Read(name, _):
                return self.read(name)
            case Unary(op, x):
                return ops.emit_unary(b, op, self.value(x), dtype_of(x), target)
            case Binary(op, x, y):
                left, right = self.level(x, y)
                return ops.emit_binary(b, op, left, right, dtype_of(x), target)
            case Fma(x, y, z):
                first, second, third = self.level(x, y, z)
                return ops.emit_fma(b, first, second, third, dtype_of(x), target)
            case Dot(parts, x, y, z):
                first, second, third = self.level(x, y, z)
                return emit_dot(b, parts, first, second, third, target)
            case Select(cond, x, y):
                flag = self.value(cond)
                left, right = self.level(x, y)
                lanes = max(lanes_of(flag), lanes_of(left))
                left, right = splat(b, left, lanes), splat(b, right, lanes)
                return b.select(flag, left, right)
            case Cast(x, dtype):
                return self.cast(self.value(x), dtype_of(x), dtype)
            case _:
                raise InternalError("codegen", f"no LLVM for the value {value!r}")

    def level(self, *values: LoopValue) -> list[Any]:
        """Emits operands and brings them to one width."""
        emitted = [self.value(value) for value in values]
        lanes = max(map(lanes_of, emitted))
        return [splat(self.b, value, lanes) for value in emitted]

    def cast(self, value: Any, source: DType, to: DType) -> Any:
        return ops.emit_cast(self.b, value, source, to, self.target)


def _member(b: Builder, struct: Any, typ: Any, number: int) -> Any:
    indices = [constant(I32, 0), constant(I32, number)]
    return b.gep(struct, indices, inbounds=True, source_etype=typ)
