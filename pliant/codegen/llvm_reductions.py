"""Accumulators: partial vectors, and their reduction to one number.

Accumulators of a vector loop are several partial vectors, combined in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import llvmlite.ir as ll

from pliant.codegen.builder import LLBuilder
from pliant.codegen.llvm_lanes import shuffled
from pliant.codegen.llvm_ops import emit_binary, emit_fma
from pliant.codegen.llvm_types import (
    I32,
    LLType,
    LLValue,
    compute_type,
    constant,
    dtype_constant,
    lanes_of,
    splat,
)
from pliant.ir.reductions import COMBINES, identity
from pliant.ir.types import DType
from pliant.machine.target import Target


def combine(
    b: LLBuilder, op: str, new: LLValue, acc: LLValue, dtype: DType, target: Target
) -> LLValue:
    """One step of a reduction. `new` goes first: its NaN test is off the chain."""
    return emit_binary(b, COMBINES[op], new, acc, dtype, target)


def reduce_lanes(
    b: LLBuilder, op: str, x: LLValue, dtype: DType, target: Target
) -> LLValue:
    """The lanes of a vector combined by halves, always in the same order."""
    lanes = lanes_of(x)
    while lanes > 1:
        lanes //= 2
        undefined = ll.Constant(x.type, ll.Undefined)
        low, high = (
            b.shuffle_vector(
                x,
                undefined,
                ll.Constant(
                    ll.VectorType(I32, lanes),
                    [constant(I32, first + i) for i in range(lanes)],
                ),
            )
            for first in (0, lanes)
        )
        x = combine(b, op, high, low, dtype, target)
    return (
        b.extract_element(x, constant(I32, 0))
        if isinstance(x.type, ll.VectorType)
        else x
    )


class Reduction:
    """An accumulator: a slot in the entry block, and partial vectors where needed.

    `lanes` is the width it was declared at. Wider code that adds to it has one partial
    vector per copy of its body, so that copies do not wait for one another.
    """

    def __init__(
        self,
        b: LLBuilder,
        op: str,
        dtype: DType,
        lanes: int,
        alloca: Callable[[LLType], LLValue],
        target: Target,
    ) -> None:
        self.op, self.dtype, self.lanes, self.target = op, dtype, lanes, target
        self.alloca = alloca
        self.slot = alloca(compute_type(dtype, lanes))
        self.started = b.store(self.neutral(lanes), self.slot)
        self.partials: list[LLValue] = []
        self.final: LLValue = None  # the total, once it is complete

    def neutral(self, lanes: int) -> LLValue:
        return dtype_constant(identity(self.op, self.dtype), self.dtype, lanes)

    def _start(self, lanes: int) -> LLValue:
        """The initial value of a partial vector.

        A sum starts from -0.0, which LLVM can drop: x + 0.0 is not x for x = -0.0. The
        slot, which the partial vectors are added to, starts from 0.0.
        """
        if self.op == "sum" and self.dtype.is_float:
            return dtype_constant(-0.0, self.dtype, lanes)
        return self.neutral(lanes)

    def join(self, b: LLBuilder, new: LLValue, before: LLValue) -> LLValue:
        return combine(b, self.op, new, before, self.dtype, self.target)

    def add(
        self, b: LLBuilder, value: LLValue, lanes: int, mask: LLValue, copy: int
    ) -> None:
        """Adds one value per lane, or per lane of the mask."""
        new, slot = splat(b, value, lanes), self.slot
        factors = self._factors(value)
        self.final = None
        if lanes == self.target.lanes and self.lanes != lanes:
            slot = self._partial(b, copy)
        elif self.lanes != lanes:  # fewer lanes than a whole vector
            if mask is not None:
                new, mask = b.select(mask, new, self.neutral(lanes)), None
            new = reduce_lanes(b, self.op, new, self.dtype, self.target)
            factors = None
        before = b.load(slot, typ=new.type)
        if factors is not None:
            # A fused multiply-add: one instruction, and one rounding less.
            x, y = (splat(b, factor, lanes) for factor in factors)
            after = emit_fma(b, x, y, before, self.dtype, self.target)
        else:
            after = self.join(b, new, before)
        b.store(after if mask is None else b.select(mask, after, before), slot)

    def _factors(self, value: LLValue) -> tuple[LLValue, LLValue] | None:
        """x and y of a float product x*y that is summed."""
        if self.op != "sum" or getattr(value, "opname", "") != "fmul":
            return None
        x, y = value.operands
        return x, y

    def _partial(self, b: LLBuilder, copy: int) -> LLValue:
        lanes = self.target.lanes
        while len(self.partials) <= copy:
            slot = self.alloca(compute_type(self.dtype, lanes))
            behind = LLBuilder()
            behind.position_after(self.started)
            behind.store(self._start(lanes), slot)
            self.partials.append(slot)
            # If that was the current block, its end has moved.
            b.position_at_end(b.block)
        return self.partials[copy]

    def start(self, b: LLBuilder) -> LLValue:
        """The value that the partial vectors are added to."""
        return b.load(self.slot, typ=compute_type(self.dtype, self.lanes))

    def vector(self, b: LLBuilder) -> LLValue:
        """All partial vectors, combined pairwise in their order, if there are any."""
        wide = compute_type(self.dtype, self.target.lanes)
        parts = [b.load(slot, typ=wide) for slot in self.partials]
        while len(parts) > 1:
            pairs = zip(parts[1::2], parts[::2], strict=False)
            joined = [self.join(b, right, left) for right, left in pairs]
            parts = joined + parts[len(joined) * 2 :]
        return parts[0] if parts else None

    def total(self, b: LLBuilder) -> LLValue:
        """The slot and all partial vectors."""
        total, vector = self.start(b), self.vector(b)
        if vector is None:
            return total
        one = reduce_lanes(b, self.op, vector, self.dtype, self.target)
        return self.join(b, one, total)

    @property
    def is_sum_of_lanes(self) -> bool:
        """Whether its total can be computed together with others (`totals`)."""
        lanes = bool(self.partials) and self.lanes == 1
        return self.op == "sum" and self.dtype.is_float and lanes


TOGETHER = 4  # sums over lanes


def totals(b: LLBuilder, sums: Sequence[Reduction]) -> list[LLValue]:
    """The totals of some reductions, TOGETHER sums at a time.

    Halves of two vectors are added side by side, so that one shuffle serves both: four
    sums over sixteen lanes take nine shuffles instead of sixteen.
    """
    first = sums[0]
    lanes = first.target.lanes
    same = {(r.dtype, r.is_sum_of_lanes) for r in sums} == {(first.dtype, True)}
    if len(sums) != TOGETHER or not same or lanes < 2 * TOGETHER:
        return [r.total(b) for r in sums]
    vectors = [r.vector(b) for r in sums]

    def added(x: LLValue, y: LLValue, part: int) -> LLValue:
        """The halves of every `part` lanes of x, then of y, added."""
        starts = [*range(0, 2 * lanes, part)]
        low = [s + i for s in starts for i in range(part // 2)]
        high = [s + part // 2 + i for s in starts for i in range(part // 2)]
        return first.join(b, shuffled(b, x, y, high), shuffled(b, x, y, low))

    part = lanes
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [added(x, y, part) for x, y in pairs]
        part //= 2
    (both,) = vectors
    half = part // 2
    while half:
        other = [i ^ half for i in range(lanes)]
        both = first.join(b, shuffled(b, both, both, other), both)
        half //= 2
    found = shuffled(b, both, both, [*range(0, lanes, part)])
    starts = ll.Constant(found.type, ll.Undefined)
    for number, r in enumerate(sums):
        starts = b.insert_element(starts, r.start(b), constant(I32, number))
    found = first.join(b, found, starts)
    return [b.extract_element(found, constant(I32, n)) for n in range(TOGETHER)]
