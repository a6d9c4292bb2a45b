"""The state of emitting one LLVM function: names in scope, blocks, loops.

Mutable state (accumulators, register buffers) lives in allocas of the entry block. What
must end up in registers is addressed at constant offsets, so that LLVM's SROA promotes
it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import llvmlite.ir as ll

from pliant.codegen.builder import LLBuilder
from pliant.codegen.llvm_dims import Dims
from pliant.codegen.llvm_memory import MemoryEmitter
from pliant.codegen.llvm_reductions import Reduction
from pliant.codegen.llvm_types import I64, PTR, LLType, LLValue, constant
from pliant.codegen.sizes import NO_WRAP
from pliant.ir.loops import Stmt
from pliant.machine.target import Target


@dataclass(slots=True)
class FrameUnit:
    """What the functions of one LLVM module share."""

    module: ll.Module
    target: Target
    functions: dict[str, ll.Function] = field(default_factory=dict)


class Frame(ABC):
    """Where code is emitted, and what is in scope there."""

    def __init__(self, unit: FrameUnit, function: ll.Function, call: LLValue) -> None:
        self.unit, self.target, self.function = unit, unit.target, function
        self.call = call
        self.entry = function.append_basic_block("entry")
        self.b = LLBuilder(function.append_basic_block("body"))
        self.first = self.b.block
        self.dims = Dims(self.b)
        self.memory = MemoryEmitter(self.dims)
        self.locals: dict[str, LLValue] = {}
        self.accumulators: dict[str, Reduction] = {}
        self.mask: LLValue | None = None  # active lanes; None: all of them
        self.copy = 0  # which copy of an unrolled vector loop's body this is
        self._values: dict[int, LLValue] = {}

    @abstractmethod
    def stmt(self, stmt: Stmt) -> None:
        """Emits a statement."""

    def finish(self) -> None:
        self.b.ret_void()
        LLBuilder(self.entry).branch(self.first)

    @contextmanager
    def region(self) -> Iterator[None]:
        """Names bound inside are forgotten afterwards."""
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
    def when(self, cond: LLValue, likely: bool | None = None) -> Iterator[None]:
        """Emits a branch: code emitted inside runs only if the scalar flag is set."""
        with self.b.if_then(cond, likely), self.region():
            yield

    @contextmanager
    def loop(
        self, begin: LLValue, end: LLValue, step: int, label: str
    ) -> Iterator[LLValue]:
        """A counted loop that is skipped if it has no iterations."""
        b = self.b
        names = (f"{label}.before", label, f"{label}.end")
        before, body, after = map(b.append_basic_block, names)
        b.cbranch(b.icmp_signed("<", begin, end), before, after)
        b.position_at_end(before)
        b.branch(body)
        b.position_at_end(body)
        counter = b.phi(I64, name=label)
        counter.add_incoming(begin, before)
        with self.region(), b.inside(before, counter):
            yield counter
        following = b.add(counter, constant(I64, step), flags=NO_WRAP)
        counter.add_incoming(following, b.block)
        b.cbranch(b.icmp_signed("<", following, end), body, after)
        b.position_at_end(after)

    def alloca(
        self, typ: LLType, count: int | None = None, align: int | None = None
    ) -> LLValue:
        builder = LLBuilder(self.entry)
        slot = builder.alloca(typ if count is None else ll.ArrayType(typ, count))
        slot.align = align
        slot.type = PTR
        return slot
