"""What the elementwise ops of both IRs mean, for NumPy arrays and for scalars."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from pliant.ir.interp_memory import LoopFault
from pliant.ir.loops import DOT_PARTS
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


_ERF = np.frompyfunc(math.erf, 1, 1)


def _erf(x: Any) -> Any:
    return np.asarray(_ERF(x)).astype(x.dtype)[()]


def _sign(x: Any) -> Any:
    # As torch: 0 for NaN.
    return ((x > 0) * x.dtype.type(1) - (x < 0) * x.dtype.type(1)).astype(x.dtype)


def _round(x: Any) -> Any:
    return np.rint(x) if x.dtype.kind == "f" else x


def _power(x: Any, y: Any) -> Any:
    if x.dtype.kind == "f":
        return np.power(x, y)
    # 1/x**|y| towards zero: only 1 and -1 keep a magnitude.
    small = np.where(abs(x) == 1, np.power(x, np.abs(y) % 2), 0).astype(x.dtype)
    return np.where(y < 0, small, np.power(x, np.maximum(y, 0)))[()]


def _decay(x: Any) -> Any:
    return np.where(np.exp(x) < np.finfo(x.dtype).tiny, 0, np.exp(x)).astype(x.dtype)[
        ()
    ]


UNARY: dict[str, Callable[[Any], Any]] = {
    "neg": np.negative,
    "abs": np.abs,
    "sign": _sign,
    "exp": np.exp,
    "decay": _decay,
    "expm1": np.expm1,
    "log": np.log,
    "log1p": np.log1p,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "reciprocal": lambda x: 1 / x,
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "tanh": np.tanh,
    "erf": _erf,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "floor": np.floor,
    "ceil": np.ceil,
    "round": _round,
    "trunc": np.trunc,
    "bitwise_not": np.invert,
    "isnan": np.isnan,
    "isinf": np.isinf,
    "logical_not": np.logical_not,
}

BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.true_divide,
    "floordiv": np.floor_divide,
    "mod": np.remainder,
    "pow": _power,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "atan2": np.arctan2,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_xor": np.logical_xor,
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
    "shift_left": np.left_shift,
    "shift_right": np.right_shift,
}


def convert(x: Any, source: DType, target: DType) -> Any:
    """A cast, as C does it; bf16 is an f32 that bf16 can hold."""
    if target is DType.BOOL:
        return np.not_equal(x, 0)
    if target is DType.BF16:
        return bf16_value(bf16_bits(np.asarray(x).astype(np.float32)))
    return np.asarray(x).astype(NUMPY[target])[()]


def literal(number: float | int | bool, dtype: DType) -> Any:
    """The scalar of a number; an integer wraps."""
    return convert(np.asarray(number), DType.F64, dtype)


def identity(op: str, dtype: DType) -> Any:
    """What a reduction starts from."""
    match op, dtype.kind:
        case ("sum", _):
            return literal(0, dtype)
        case ("prod", _):
            return literal(1, dtype)
        case ("max", "f"):
            return literal(-math.inf, dtype)
        case ("min", "f"):
            return literal(math.inf, dtype)
        case ("max" | "min", "b"):
            return np.bool_(op == "min")
        case ("max", _):
            return np.iinfo(NUMPY[dtype]).min + literal(0, dtype)  # type: ignore[type-var]
        case ("min", _):
            return np.iinfo(NUMPY[dtype]).max + literal(0, dtype)  # type: ignore[type-var]
    raise LoopFault(f"no reduction is called '{op}'")


def fma(x: Any, y: Any, z: Any) -> Any:
    if x.dtype == np.float32:  # a product of two f32 is exact in f64
        return np.float32(np.float64(x) * np.float64(y) + np.float64(z))
    return x * y + z


def _parts(word: Any, count: int, signed: bool) -> list[int]:
    """The parts of an i32, the lowest bits first."""
    bits = 32 // count
    found = [int(word) >> bits * part & (1 << bits) - 1 for part in range(count)]
    return [p - (1 << bits) if signed and p >> bits - 1 else p for p in found]


def _dot(parts: str) -> Callable[[Any, Any, Any], Any]:
    count, x_signed, y_signed = DOT_PARTS[parts]

    def dot(x: Any, y: Any, z: Any) -> Any:
        pairs = zip(_parts(x, count, x_signed), _parts(y, count, y_signed), strict=True)
        total = (int(z) + sum(a * b for a, b in pairs)) & 0xFFFFFFFF
        return np.uint32(total).astype(np.int32)

    return dot


DOTS = {parts: _dot(parts) for parts in DOT_PARTS}
