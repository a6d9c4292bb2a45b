"""How loop IR types map to LLVM.

Values are computed in `compute_type` and kept in memory in `storage_type`: a bool is
i1 in a register and i8 (0 or 1) in memory; half floats are their 16 bits in both, and
only `Cast` turns them into numbers.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

import llvmlite.ir as ll

from pliant.ir.types import DType

if TYPE_CHECKING:
    from pliant.codegen.builder import LLBuilder

# llvmlite has no annotations; these names document the intent.
LLType: TypeAlias = ll.Type
LLValue: TypeAlias = ll.Value
Number: TypeAlias = int | LLValue  # an integer known at compile time, or an i64

I1, I8, I16 = ll.IntType(1), ll.IntType(8), ll.IntType(16)
I32, I64 = ll.IntType(32), ll.IntType(64)
F16, F32, F64 = ll.HalfType(), ll.FloatType(), ll.DoubleType()
PTR = ll.PointerType()
VOID = ll.VoidType()

# struct plt_call of runtime/rt.h: fields of eight bytes, by number.
STATUS_FIELD = 8
VALUE_FIELD = 10
# void task(void* args, i64 begin, i64 end, i64 worker)
TASK_TYPE = ll.FunctionType(VOID, [PTR, I64, I64, I64])
# void plt_parallel(plt_call*, task, void* args, i64 units, i64 grain)
PARALLEL_TYPE = ll.FunctionType(VOID, [PTR, PTR, PTR, I64, I64])

_COMPUTE: dict[DType, LLType] = {
    DType.F64: F64,
    DType.F32: F32,
    DType.F16: I16,
    DType.BF16: I16,
    DType.I64: I64,
    DType.I32: I32,
    DType.I16: I16,
    DType.I8: I8,
    DType.U64: I64,
    DType.U32: I32,
    DType.U16: I16,
    DType.U8: I8,
    DType.BOOL: I1,
}


def compute_type(dtype: DType, lanes: int = 1) -> LLType:
    return widen(_COMPUTE[dtype], lanes)


def storage_type(dtype: DType, lanes: int = 1) -> LLType:
    return widen(I8 if dtype is DType.BOOL else _COMPUTE[dtype], lanes)


@lru_cache(maxsize=256)
def widen(scalar: LLType, lanes: int) -> LLType:
    """The vector of `lanes` such scalars; one lane is the scalar itself."""
    return scalar if lanes == 1 else ll.VectorType(scalar, lanes)


def scalar_of(typ: LLType) -> LLType:
    return typ.element if isinstance(typ, ll.VectorType) else typ


def lanes_of(value: LLValue) -> int:
    typ = value.type
    return int(typ.count) if isinstance(typ, ll.VectorType) else 1


class SplatConstant(ll.Constant):
    """A vector constant in LLVM's short form, for any number of lanes."""

    def __init__(self, typ: LLType, scalar: LLValue) -> None:
        self.type, self.constant = typ, scalar

    def _get_reference(self) -> str:
        return f"splat ({self.constant})"


class Poison(ll.Constant):
    """A value that nothing reads, in a short form for any number of lanes."""

    def __init__(self, typ: LLType) -> None:
        self.type, self.constant = typ, ll.Undefined

    def _get_reference(self) -> str:
        return "poison"


def constant(typ: LLType, number: float | int | bool) -> LLValue:
    """A constant, the same in every lane."""
    if isinstance(typ, ll.VectorType):
        return SplatConstant(typ, constant(typ.element, number))
    if isinstance(typ, ll.IntType):
        return _integer(typ, int(number))
    return ll.Constant(typ, _as_float(float(number)) if typ == F32 else float(number))


@lru_cache(maxsize=4096)
def _integer(typ: LLType, number: int) -> LLValue:
    bits = typ.width
    wrapped = number & ((1 << bits) - 1)
    signed = wrapped - (1 << bits) if bits > 1 and wrapped >> (bits - 1) else wrapped
    return ll.Constant(typ, signed)


def _as_float(number: float) -> float:
    """Rounded to f32; too large becomes infinite, as a cast does."""
    try:
        return float(struct.unpack("f", struct.pack("f", number))[0])
    except OverflowError:
        return float("inf") if number > 0 else float("-inf")


def half_bits(number: float, dtype: DType) -> int:
    """The 16 bits of a number in f16 or bf16, rounded to nearest even."""
    if dtype is DType.F16:
        try:
            return int(struct.unpack("H", struct.pack("e", number))[0])
        except OverflowError:
            return 0x7C00 if number > 0 else 0xFC00
    bits = int(struct.unpack("I", struct.pack("f", _as_float(number)))[0])
    if number != number:
        return (bits >> 16) | 0x40
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


def dtype_constant(number: float | int | bool, dtype: DType, lanes: int = 1) -> LLValue:
    """A literal of `dtype`; an integer literal wraps, a float one rounds."""
    typ = compute_type(dtype, lanes)
    if dtype in (DType.F16, DType.BF16):
        return constant(typ, half_bits(float(number), dtype))
    if dtype is DType.BOOL:
        return constant(typ, bool(number))
    return constant(typ, number)


@lru_cache(maxsize=256)
def iota(typ: LLType, lanes: int, step: int = 1) -> LLValue:
    """<0, step, 2*step, ...>"""
    if lanes == 1:
        return constant(typ, 0)
    return ll.Constant(
        ll.VectorType(typ, lanes), [constant(typ, lane * step) for lane in range(lanes)]
    )


def splat(builder: LLBuilder, value: LLValue, lanes: int) -> LLValue:
    """A scalar in every lane; a vector is returned as it is."""
    if lanes == 1 or isinstance(value.type, ll.VectorType):
        return value
    typ = widen(value.type, lanes)
    if isinstance(value, ll.Constant):
        return SplatConstant(typ, value)
    poison, zeros = _poison(typ), _zeros(lanes)
    one = builder.insert_element(poison, value, constant(I32, 0))
    return builder.shuffle_vector(one, poison, zeros)


@lru_cache(maxsize=256)
def _poison(typ: LLType) -> LLValue:
    return Poison(typ)


@lru_cache(maxsize=64)
def _zeros(lanes: int) -> LLValue:
    return ll.Constant(widen(I32, lanes), None)


def call_intrinsic(
    builder: LLBuilder,
    name: str,
    result: LLType,
    args: list[LLValue],
    align: tuple[int, int] | None = None,
    *,
    shared: bool = False,
) -> LLValue:
    """Calls an LLVM intrinsic by its full, mangled name.

    `align` and `shared` are as `call` has them.
    """
    module = builder.module
    function = module.globals.get(name)
    if function is None:
        function = ll.Function(
            module, ll.FunctionType(result, [a.type for a in args]), name
        )
    return builder.call(function, args, align, shared=shared)


def mangle(typ: LLType) -> str:
    """The suffix an intrinsic's name carries for a type."""
    if isinstance(typ, ll.VectorType):
        return f"v{typ.count}{mangle(typ.element)}"
    if isinstance(typ, ll.IntType):
        return f"i{typ.width}"
    return {F16: "f16", F32: "f32", F64: "f64", PTR: "p0"}[typ]
