"""The loop function of one flow while it is made, and the statements all flows use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pliant.ir.graph import Value
from pliant.ir.loop_walk import accesses, size_symbols
from pliant.ir.loops import (
    Binary,
    Block,
    Buffer,
    Const,
    For,
    Index,
    Kind,
    Load,
    LoopFunc,
    LoopValue,
    Role,
    Stmt,
    Store,
    buffer,
)
from pliant.ir.types import DType, TensorType
from pliant.lower.nest import BLOCK, grain
from pliant.memory.flow_regions import Flows, LoweredRegion
from pliant.sym import ZERO, Cond, Expr, as_expr, ceildiv, maximum, minimum, mod, sym


@dataclass(slots=True)
class FlowFunction:
    """The function of one flow, while it is made."""

    operands: tuple[Value, ...]
    inputs: list[Buffer]
    outputs: list[Buffer]
    weights: dict[str, Buffer] = field(default_factory=dict)  # by constant
    extra: list[Buffer] = field(default_factory=list)
    body: list[Stmt] = field(default_factory=list)

    def forget_unread(self) -> None:
        """Takes no operands that nothing reads: weights that a region has packed."""
        read = {buf.name for buf, _ in accesses(Block(tuple(self.body)))}
        pairs = zip(self.operands, self.inputs, strict=True)
        kept = [(value, buf) for value, buf in pairs if buf.name in read]
        self.operands = tuple(value for value, _ in kept)
        self.inputs = [buf for _, buf in kept]

    def function(self, name: str) -> LoopFunc:
        body = Block(tuple(self.body))
        held = (*self.inputs, *self.weights.values(), *self.outputs, *self.extra)
        return LoopFunc(name, size_symbols(body, held), held, body)

    def memory(self, *sizes: Expr) -> Buffer:
        """The memory of temporaries, large enough for each of some regions."""
        largest = sizes[0]
        for size in sizes[1:]:
            largest = maximum(largest, size)
        return self.scratch("memory", DType.U8, largest)

    def scratch(self, name: str, dtype: DType, count: Expr) -> Buffer:
        made = buffer(name, dtype, (count,), Role.OUT)
        self.extra.append(made)
        return made

    def read(self, flows: Flows, regions: Sequence[LoweredRegion]) -> None:
        """Takes the constants of regions as inputs."""
        for region in regions:
            for name in region.constants.values():
                if name not in self.weights:
                    type = flows.module.constants[name].type
                    self.weights[name] = flat(name, type, Role.IN)


def flat(name: str, type: TensorType, role: Role) -> Buffer:
    return buffer(name, type.dtype, (type.numel,), role)


def inputs_of(values: Sequence[Value]) -> dict[Value, Buffer]:
    return {v: flat(f"arg_{k}", v.type, Role.IN) for k, v in enumerate(values)}


def copy(target: Buffer, source: Buffer, count: Expr, at: Expr = ZERO) -> Stmt:
    """Copies elements, in blocks that threads share; to the target from `at` on."""
    i, block = sym("_i"), sym("_block")
    first, end = block * BLOCK, minimum(count, (block + 1) * BLOCK)
    store = Store(target, (at + i,), Load(source, (i,)))
    inner = For("_i", first, end, store, Kind.VECTOR)
    blocks = ceildiv(count, BLOCK)
    each = grain(as_expr(BLOCK))
    return For("_block", as_expr(0), blocks, inner, Kind.PARALLEL, grain=each)


def filled(target: Buffer, number: bool | int | float) -> Stmt:
    """Stores one number everywhere, in blocks that threads share."""
    (count,) = target.shape
    i, block = sym("_i"), sym("_block")
    first, end = block * BLOCK, minimum(count, (block + 1) * BLOCK)
    store = Store(target, (i,), Const(number, target.dtype))
    inner = For("_i", first, end, store, Kind.VECTOR)
    each = grain(as_expr(BLOCK))
    blocks = ceildiv(count, BLOCK)
    return For("_block", as_expr(0), blocks, inner, Kind.PARALLEL, grain=each)


def tested(cond: Cond) -> LoopValue:
    """A condition on sizes as a value."""
    if cond.kind == "divides":
        rest = Index(mod(cond.rhs, cond.lhs))
        return Binary("eq", rest, Index(as_expr(0)))
    return Binary(cond.kind, Index(cond.lhs), Index(cond.rhs))


def first(buf: Buffer) -> Load:
    return Load(buf, (as_expr(0),))
