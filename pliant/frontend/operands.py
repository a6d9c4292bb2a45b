"""Operands of translations: tensors, and the numbers beside them, with their types.

Numbers take part in types as in torch: a tensor with dims decides over one without, and
that over a number, unless the other is of a higher kind (bool, integer, float).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from pliant.ir.graph import Value
from pliant.ir.interp_numbers import stored
from pliant.ir.types import DType
from pliant.sym import Expr

HALF = (DType.F16, DType.BF16)


@dataclass(frozen=True, slots=True)
class Real:
    """A float computed from sizes: a ratio of two sizes, or an f64 scalar."""

    ratio: tuple[Expr, Expr] | None = None
    value: Value | None = None


Number: TypeAlias = "bool | int | float | Expr | Real"
Operand: TypeAlias = "Value | Number"
Size: TypeAlias = "int | Expr"


def promote_types(a: DType, b: DType) -> DType:
    """The least type that both fit in, any float being above every integer."""
    if a is b:
        return a
    if a.is_float and b.is_float and a.bytes == b.bytes:
        return DType.F32  # f16 and bf16
    if a.is_float != b.is_float:
        return a if a.is_float else b
    if {a, b} == {DType.U8, DType.I8}:
        return DType.I16
    return max(a, b, key=_RANK.index)


# Among types of one kind, and bool below them.
_RANK = (
    *(DType.BOOL, DType.U8, DType.I8, DType.U16, DType.I16),
    *(DType.U32, DType.I32, DType.U64, DType.I64),
    *(DType.F16, DType.BF16, DType.F32, DType.F64),
)


def type_of(operand: Operand) -> tuple[int, DType]:
    match operand:
        case Value():
            return (0 if operand.type.rank else 1), operand.dtype
        case bool():
            return 2, DType.BOOL
        case float() | Real():
            return 2, DType.F32
        case _:
            return 2, DType.I64


def combined(higher: DType | None, lower: DType | None) -> DType | None:
    if higher is None or lower is None:
        return higher or lower
    if higher.is_float:
        return higher
    if higher is DType.BOOL or lower.is_float:
        return promote_types(higher, lower)
    return higher


def is_rounded(operand: Operand, dtype: DType) -> bool:
    """Whether a number may change when it is stored in this half type.

    A tensor without axes is a number, as in torch.
    """
    if isinstance(operand, Real | Expr):
        return True
    if isinstance(operand, Value):
        wider = operand.dtype.is_float and operand.dtype not in HALF
        return wider and operand.type.rank == 0
    return stored(float(operand), dtype) != float(operand)


def fitted(number: bool | int | float, dtype: DType) -> bool | int | float:
    """The number as an element of that type; integers wrap, as in C."""
    if dtype is DType.BOOL:
        return bool(number)
    if dtype.is_float:
        return stored(float(number), dtype)
    whole = int(number)
    if dtype is DType.U8 or dtype.is_int:
        bits = 8 * dtype.bytes
        whole &= (1 << bits) - 1
        if dtype.kind == "i" and whole >> (bits - 1):
            whole -= 1 << bits
    return whole
