"""The reductions: of `reduce`, of accumulators in loops, of native code."""

from __future__ import annotations

import math

from pliant.ir.types import DType

# The elementwise op that joins two elements.
COMBINES = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum"}


def identity(op: str, dtype: DType) -> bool | int | float:
    """The start value of a reduction: combining it with an element is a no-op."""
    match op, dtype.kind:
        case "sum", _:
            return 0
        case "prod", _:
            return 1
        case _, "f":
            return -math.inf if op == "max" else math.inf
        case _, "b":
            return op == "min"
        case _, "u":
            return 0 if op == "max" else 2 ** (8 * dtype.bytes) - 1
        case _:
            half: int = 2 ** (8 * dtype.bytes - 1)
            return -half if op == "max" else half - 1
