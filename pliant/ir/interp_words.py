"""What loops have and graphs do not, for NumPy scalars: fma, and dots of words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pliant.ir.loops import DOT_PARTS


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
