"""PARALLEL loops: each is a function that plt_parallel of the runtime calls."""

from __future__ import annotations

import llvmlite.ir as ll

from pliant.codegen.builder import LLBuilder
from pliant.codegen.llvm_control import Control
from pliant.codegen.llvm_memory import mark_aliasing
from pliant.codegen.llvm_types import (
    I32,
    I64,
    PARALLEL_TYPE,
    TASK_TYPE,
    VOID,
    LLType,
    LLValue,
    Number,
    constant,
)
from pliant.codegen.sizes import NO_WRAP, as_value
from pliant.ir.loop_walk import accesses, free_symbols, reads
from pliant.ir.loops import WORKER, Buffer, For
from pliant.sym import ZERO


class Parallel(Control):
    """Emits loops whose iterations are divided among threads."""

    def trips(self, loop: For, begin: Number, end: Number) -> LLValue:
        """The trip count of a loop, at least 0."""
        b = self.b
        span = as_value(end)
        if begin != 0:
            span = b.sub(as_value(end), as_value(begin), flags=NO_WRAP)
        if loop.step != 1:
            span = b.add(span, constant(I64, loop.step - 1), flags=NO_WRAP)
            span = b.sdiv(span, constant(I64, loop.step))
        if begin == 0 and self.dims.is_nonnegative(loop.end):
            return span
        zero = constant(I64, 0)
        return b.select(b.icmp_signed(">", span, zero), span, zero)

    def first_lane(self, loop: For, begin: Number, at: LLValue) -> LLValue:
        """begin + at * step"""
        if loop.step != 1:
            at = self.b.mul(at, constant(I64, loop.step), flags=NO_WRAP)
        return at if begin == 0 else self.b.add(as_value(begin), at, flags=NO_WRAP)

    def parallel_loop(self, loop: For, begin: Number, end: Number) -> None:
        b = self.b
        start = as_value(begin)
        free = free_symbols(loop.body) - {WORKER}
        sizes = {n: v for n, v in self.dims.names.items() if n in free}
        scalars = {n: self.read(n) for n in reads(loop.body) if self.is_named(n)}
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
        sizes: dict[str, Number],
        scalars: dict[str, LLValue],
        buffers: list[Buffer],
    ) -> None:
        """Iterations first .. last; the arguments are those of `parallel_loop`."""
        first, last, worker, call, start, *rest = function.args
        inner = type(self)(self.unit, function, call)
        inner.memory.in_place = self.memory.in_place
        given = iter(rest)
        for name, value in sizes.items():
            bound = value if isinstance(value, int) else next(given)
            inner.dims.bind(name, bound, signed=self.dims.is_signed(name))
        inner.dims.bind(WORKER, worker)
        for name in scalars:
            inner.locals[name] = next(given)
        pointers = list(given)
        mark_aliasing(pointers, buffers)
        for pointer, buf in zip(pointers, buffers, strict=True):
            inner.memory.buffers[buf.name] = pointer
        signed = not self.dims.is_nonnegative(loop.begin)
        begin = 0 if loop.begin is ZERO else start
        with inner.loop(first, last, 1, loop.var) as unit:
            at = inner.first_lane(loop, begin, unit)
            inner.dims.bind(loop.var, at, signed=signed)
            inner.stmt(loop.body)
        inner.finish()

    def task_entry(self, body: ll.Function, struct: LLType) -> ll.Function:
        """The runtime's entry: unpacks the arguments, so `body` has them noalias."""
        name = self.unit.module.get_unique_name(f"{body.name}.task")
        task = ll.Function(self.unit.module, TASK_TYPE, name)
        task.linkage = "internal"
        task.attributes.add("nounwind")
        b = LLBuilder(task.append_basic_block("entry"))
        packed, first, last, worker = task.args
        handed = [
            b.load(_member(b, packed, struct, number), typ=kind)
            for number, kind in enumerate(struct.elements)
        ]
        b.call(body, [first, last, worker, *handed])
        b.ret_void()
        return task


def _member(b: LLBuilder, struct: LLValue, typ: LLType, number: int) -> LLValue:
    indices = [constant(I32, 0), constant(I32, number)]
    return b.gep(struct, indices, inbounds=True, source_etype=typ)
