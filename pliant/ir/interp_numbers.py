"""Numbers of the IR's types in NumPy: bf16, casts, literals, where reductions start."""

from __future__ import annotations

from typing import Any

import numpy as np

from pliant.ir.reductions import identity
from pliant.ir.types import NUMPY, DType


def bf16_bits(x: Any) -> Any:
    """The bits of f32 numbers rounded to bf16, half to even."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    quiet = (bits >> 16) | np.uint32(0x40)
    return np.where(np.isnan(x), quiet, rounded).astype(np.uint16)[()]


def bf16_value(bits: Any) -> Any:
    """The f32 numbers of bf16 bits."""
    wide = np.asarray(bits, np.uint16).astype(np.uint32) << 16
    return wide.view(np.float32)[()]


def convert(x: Any, dtype: DType) -> Any:
    """A cast, as C does it; bf16 is an f32 that bf16 can hold."""
    if dtype is DType.BOOL:
        return np.not_equal(x, 0)
    if dtype is DType.BF16:
        return bf16_value(bf16_bits(np.asarray(x).astype(np.float32)))
    return np.asarray(x).astype(NUMPY[dtype])[()]


def stored(number: bool | int | float, dtype: DType) -> bool | int | float:
    """A number as an element of a half type; wider ones round it where it is used."""
    if dtype in (DType.F16, DType.BF16):
        with np.errstate(over="ignore"):
            return float(convert(np.float32(number), dtype))
    return number


def reinterpret(x: Any, source: DType, dtype: DType) -> Any:
    """The bits of x, which has the type `source`, as another type of that size."""
    bits = bf16_bits(x) if source is DType.BF16 else np.asarray(x, NUMPY[source])
    if dtype is DType.BF16:
        return bf16_value(np.asarray(bits).view(np.uint16))
    if dtype is DType.BOOL:
        return (np.asarray(bits).view(np.uint8) & 1).astype(np.bool_)[()]
    return np.asarray(bits).view(NUMPY[dtype])[()]


def literal(number: float | int | bool, dtype: DType) -> Any:
    """The scalar of a number; an integer wraps."""
    return convert(np.asarray(number), dtype)


def start_of(op: str, dtype: DType) -> Any:
    """What a reduction starts from."""
    return literal(identity(op, dtype), dtype)
