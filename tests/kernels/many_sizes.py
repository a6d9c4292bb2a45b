"""Expressions at many sizes at once, for what must hold at all of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from pliant.sym import Expr

Array = np.ndarray[Any, Any]


def evaluated(dim: Expr, known: dict[str, Array]) -> Array:
    """The expression at each of the sizes in the arrays, all of one length."""

    def joined(function: np.ufunc) -> Any:
        return lambda *args: function.reduce(np.broadcast_arrays(*args))

    functions = {
        "max": joined(np.maximum),
        "min": joined(np.minimum),
        "ceildiv": lambda a, b: -(-a // b),
    }
    return eval(str(dim), functions, known) + np.zeros_like(next(iter(known.values())))
