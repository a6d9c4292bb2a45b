"""Loop functions -> LLVM IR.

A loop function becomes

    void @name(ptr call, i64 sizes.., ptr buffers..)

where `call` is the plt_call of runtime/rt.h. The function already says how its loops
run (`lower/vectorize.py`); here every statement and value has one translation. The
emitter of a function is a class in layers, one file each:

    frame.py          where code goes, what is in scope, accumulators and registers
    llvm_values.py    values; llvm_dims.py has expressions, llvm_memory.py elements
    llvm_control.py   branches, checks, calls
    llvm_parallel.py  loops that become functions of their own
    llvm_loops.py     all other loops
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import llvmlite.ir as ll

from pliant.codegen.builder import DeclaredFunction
from pliant.codegen.frame import FrameUnit
from pliant.codegen.llvm_lanes import prefetch
from pliant.codegen.llvm_loops import Loops
from pliant.codegen.llvm_memory import are_alone, has_in_place, mark_aliasing
from pliant.codegen.llvm_reductions import TOGETHER, Reduction, totals
from pliant.codegen.llvm_types import I64, PTR, VOID, storage_type
from pliant.errors import InternalError
from pliant.ir.loop_walk import accumulated
from pliant.ir.loops import (
    WORKER,
    Accumulate,
    Accumulator,
    Alloc,
    Block,
    Buffer,
    Call,
    CallLibrary,
    Check,
    Dispatch,
    For,
    If,
    Index,
    Let,
    Local,
    LoopFunc,
    LoopValue,
    Prefetch,
    Stmt,
    Store,
    Switch,
    While,
    dtype_of,
)
from pliant.ir.types import DType
from pliant.machine.target import Target

LONGEST = 200  # characters of a name, which may be a user's


def emit_loop_functions(
    module_ir: ll.Module, funcs: Iterable[LoopFunc], target: Target
) -> dict[str, ll.Function]:
    """Adds every loop function to the module; returns them by name."""
    todo = tuple(funcs)
    unit = FrameUnit(module_ir, target)
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
    """One loop function in a module of its own, with its callees declared.

    `symbols` are the names of functions outside of this module.
    """
    module = ll.Module(symbols[func.name])
    unit = FrameUnit(module, target)
    unit.functions[func.name] = _declare(module, func, symbols[func.name])
    for known in callees:
        if known is not func:
            symbol = symbols[known.name]
            declared = DeclaredFunction(symbol, _type(known), _attributes(known))
            unit.functions[known.name] = module.globals.setdefault(symbol, declared)
    _define(unit, func)
    return module


def _type(func: LoopFunc) -> ll.FunctionType:
    args = [PTR, *(I64 for _ in func.sizes), *(PTR for _ in func.buffers)]
    return ll.FunctionType(VOID, args)


def _attributes(func: LoopFunc) -> list[str]:
    """Those of the parameters."""
    alone = ("noalias" if each else "" for each in are_alone(func.buffers))
    return ["", *("" for _ in func.sizes), *alone]


def _declare(module: ll.Module, func: LoopFunc, symbol: str) -> ll.Function:
    existing = module.globals.get(symbol)
    function = existing or ll.Function(module, _type(func), symbol)
    function.attributes.add("nounwind")
    for arg, name in zip(
        function.args,
        ("call", *func.sizes, *(buf.name for buf in func.buffers)),
        strict=True,
    ):
        arg.name = name[:LONGEST]  # LLVM cuts longer ones, and then misses them
    mark_aliasing(function.args[1 + len(func.sizes) :], func.buffers)
    return function


def _define(unit: FrameUnit, func: LoopFunc) -> None:
    function = unit.functions[func.name]
    body = _Body(unit, function, function.args[0])
    sizes = function.args[1 : 1 + len(func.sizes)]
    for name, arg in zip(func.sizes, sizes, strict=True):
        body.dims.bind(name, arg)
    body.dims.bind(WORKER, 0)
    body.memory.in_place = has_in_place(func.buffers)
    for buf, arg in zip(func.buffers, function.args[1 + len(sizes) :], strict=True):
        body.memory.buffers[buf.name] = arg
    body.stmt(func.body)
    body.finish()


class _Body(Loops):
    """Emits the statements of one LLVM function."""

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
                self.accumulators[name] = Reduction(
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
            case While(cond, body):
                self.while_(cond, body)
            case Switch():
                self.switch(stmt)
            case Dispatch(variants):
                self.dispatch(variants)
            case Check(cond, number, value):
                shown = None if value is None else self.value(value)
                self.check(self.value(cond), number, shown)
            case Prefetch(buf, index):
                address = self.memory.near(buf, index)
                if address is not None:
                    prefetch(self.b, address)
            case Call():
                self.call_function(stmt)
            case CallLibrary():
                self.call_library(stmt)
            case _:
                raise InternalError("codegen", f"no LLVM for the statement {stmt!r}")

    def block(self, body: tuple[Stmt, ...]) -> None:
        named = [stmt.name for stmt in body if isinstance(stmt, Accumulator)]
        last = {
            name: number
            for number, stmt in enumerate(body)
            if named
            for name in accumulated(stmt)
        }
        with self.region():
            for number, stmt in enumerate(body):
                self.stmt(stmt)
                ended = [n for n in named if last.get(n) == number]
                for first in range(0, len(ended), TOGETHER):
                    names = ended[first : first + TOGETHER]
                    sums = [self.accumulators[name] for name in names]
                    for each, total in zip(sums, totals(self.b, sums), strict=True):
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
