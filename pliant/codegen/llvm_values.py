"""Values of the loop IR: scalars until combined with one that varies by lane."""

from __future__ import annotations

from pliant.codegen.dot import emit_dot
from pliant.codegen.frame import Frame
from pliant.codegen.llvm_casts import emit_bits, emit_cast
from pliant.codegen.llvm_ops import emit_binary, emit_fma, emit_unary
from pliant.codegen.llvm_types import LLValue, dtype_constant, lanes_of, splat
from pliant.errors import InternalError
from pliant.ir.loops import (
    Binary,
    Bits,
    Cast,
    Const,
    Dot,
    Fma,
    Index,
    Load,
    LoopValue,
    Read,
    Select,
    Unary,
    dtype_of,
)
from pliant.ir.types import DType


class Values(Frame):
    """Emits the values of statements."""

    def value(self, value: LoopValue) -> LLValue:
        """Emits a value; a node shared within a statement is emitted once."""
        found = self._values.get(id(value))
        if found is None:
            found = self._values[id(value)] = self.emit(value)
        return found

    def emit(self, value: LoopValue) -> LLValue:
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
                return emit_unary(b, op, self.value(x), dtype_of(x), target)
            case Binary(op, x, y):
                left, right = self.level(x, y)
                return emit_binary(b, op, left, right, dtype_of(x), target)
            case Fma(x, y, z):
                first, second, third = self.level(x, y, z)
                return emit_fma(b, first, second, third, dtype_of(x), target)
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
            case Bits(x, dtype):
                return emit_bits(b, self.value(x), dtype)
            case _:
                raise InternalError("codegen", f"no LLVM for the value {value!r}")

    def level(self, *values: LoopValue) -> list[LLValue]:
        """Emits operands and widens them to a common width."""
        emitted = [self.value(value) for value in values]
        lanes = max(map(lanes_of, emitted))
        return [splat(self.b, value, lanes) for value in emitted]

    def cast(self, value: LLValue, source: DType, to: DType) -> LLValue:
        return emit_cast(self.b, value, source, to, self.target)

    def read(self, name: str) -> LLValue:
        """A local, or an accumulator's result."""
        if name in self.locals:
            return self.locals[name]
        accumulator = self.accumulators[name]
        return (
            accumulator.total(self.b)
            if accumulator.final is None
            else accumulator.final
        )
