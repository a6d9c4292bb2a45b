"""The lanes of vectors: shuffles, flags, and memory at one address per lane."""

from __future__ import annotations

from collections.abc import Sequence

import llvmlite.ir as ll

from pliant.codegen.builder import LLBuilder
from pliant.codegen.llvm_types import (
    I1,
    I8,
    I32,
    PTR,
    VOID,
    LLType,
    LLValue,
    call_intrinsic,
    constant,
    lanes_of,
    mangle,
    widen,
)
from pliant.ir.types import DType


def shuffled(b: LLBuilder, x: LLValue, y: LLValue, lanes: Sequence[int]) -> LLValue:
    """Lanes picked from two vectors, numbered consecutively through both."""
    mask = ll.Constant(ll.VectorType(I32, len(lanes)), list(lanes))
    return b.shuffle_vector(x, y, mask)


def any_lane(b: LLBuilder, mask: LLValue) -> LLValue:
    """Whether a flag is set in any lane."""
    if not isinstance(mask.type, ll.VectorType):
        return mask
    bits = b.bitcast(mask, ll.IntType(mask.type.count))
    return b.icmp_unsigned("!=", bits, constant(bits.type, 0))


def first_lane(b: LLBuilder, value: LLValue, mask: LLValue) -> LLValue:
    """The value in the first lane whose flag is set; at least one must be."""
    if not isinstance(value.type, ll.VectorType):
        return value
    if not isinstance(mask.type, ll.VectorType):
        return b.extract_element(value, constant(I32, 0))
    bits = b.bitcast(mask, ll.IntType(mask.type.count))
    one_is = constant(ll.IntType(1), 1)
    name = f"llvm.cttz.{mangle(bits.type)}"
    first = call_intrinsic(b, name, bits.type, [bits, one_is])
    return b.extract_element(value, first)


# ---- memory


def load_lanes(
    b: LLBuilder,
    ptr: LLValue,
    typ: LLType,
    align: int,
    mask: LLValue,
    *,
    shared: bool = False,
) -> LLValue:
    """Loads adjacent elements; lanes outside the mask are not read and are zero.

    `shared` is as `LLBuilder.load` has it.
    """
    if mask is None:
        return b.load(ptr, align=align, typ=typ)
    name = f"llvm.masked.load.{mangle(typ)}.p0"
    args = [ptr, mask, ll.Constant(typ, None)]
    return call_intrinsic(b, name, typ, args, (0, align), shared=shared)


def store_lanes(
    b: LLBuilder, value: LLValue, ptr: LLValue, align: int, mask: LLValue
) -> None:
    """Stores adjacent elements, those inside the mask."""
    if mask is None:
        b.store(value, ptr, align=align)
        return
    name = f"llvm.masked.store.{mangle(value.type)}.p0"
    call_intrinsic(b, name, VOID, [value, ptr, mask], (1, align))


def prefetch(b: LLBuilder, address: LLValue) -> None:
    """Prefetches a cache line into L2, for reading."""
    read, second_level, data = (constant(I32, n) for n in (0, 2, 1))
    call_intrinsic(b, "llvm.prefetch.p0", VOID, [address, read, second_level, data])


def pointers(b: LLBuilder, base: LLValue, element: LLType, offsets: LLValue) -> LLValue:
    """A vector of addresses: base + offsets, in elements."""
    instruction = b.gep(base, [offsets], source_etype=element)
    # llvmlite types a getelementptr by its base only; vector indices make it a vector.
    instruction.type = ll.VectorType(PTR, offsets.type.count)
    return instruction


def gather(
    b: LLBuilder, addresses: LLValue, typ: LLType, align: int, mask: LLValue
) -> LLValue:
    """An element from each address; lanes outside the mask are zero."""
    lanes = typ.count
    name = f"llvm.masked.gather.{mangle(typ)}.v{lanes}p0"
    mask = constant(widen(I1, lanes), 1) if mask is None else mask
    args = [addresses, mask, ll.Constant(typ, None)]
    return call_intrinsic(b, name, typ, args, (0, align))


def scatter(
    b: LLBuilder, value: LLValue, addresses: LLValue, align: int, mask: LLValue
) -> None:
    lanes = value.type.count
    name = f"llvm.masked.scatter.{mangle(value.type)}.v{lanes}p0"
    mask = constant(widen(I1, lanes), 1) if mask is None else mask
    call_intrinsic(b, name, VOID, [value, addresses, mask], (1, align))


def reverse_lanes(b: LLBuilder, x: LLValue) -> LLValue:
    lanes = x.type.count
    order = [constant(I32, lanes - 1 - lane) for lane in range(lanes)]
    mask = ll.Constant(ll.VectorType(I32, lanes), order)
    return b.shuffle_vector(x, ll.Constant(x.type, ll.Undefined), mask)


def from_storage(b: LLBuilder, x: LLValue, dtype: DType) -> LLValue:
    """A loaded value in its compute type: a bool byte becomes a flag."""
    return b.icmp_unsigned("!=", x, constant(x.type, 0)) if dtype is DType.BOOL else x


def to_storage(b: LLBuilder, x: LLValue, dtype: DType) -> LLValue:
    return b.zext(x, widen(I8, lanes_of(x))) if dtype is DType.BOOL else x
