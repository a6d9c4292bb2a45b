"""Memoizes torch.export's queries about sizes.

The sizes of a network that pads by its own rule are nested quotients. Each level uses
the one below several times, so an expression is a small graph but a large tree. torch
and sympy walk the tree for every query, to bound it and to list its symbols. torch also
determines for every value of a trace whether its memory is contiguous, for metadata
that nobody reads. Within `shared_bounds` each part of an expression is visited once,
and that metadata is left out. The results are the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx.experimental import proxy_tensor
from torch.fx.passes.shape_prop import _extract_tensor_metadata
from torch.utils._sympy import interp, value_ranges


@contextlib.contextmanager
def shared_bounds() -> Iterator[None]:
    note = partial(_extract_tensor_metadata, include_contiguity=False)
    with (
        mock.patch.object(proxy_tensor, "_extract_tensor_metadata", note),
        mock.patch.object(value_ranges, "sympy_interp", _Shared()),
        mock.patch.object(sympy.Basic, "free_symbols", _shared_symbols()),
    ):
        yield


def _shared_symbols() -> property:
    """As sympy's `free_symbols`, which asks every part for its own."""
    symbols = sympy.Basic.free_symbols.fget
    known: dict[Any, frozenset[Any]] = {}

    def free_symbols(expr: Any) -> set[Any]:
        if expr not in known:
            known[expr] = frozenset(symbols(expr))
        return set(known[expr])

    return property(free_symbols)


class _Shared:
    """As torch's `sympy_interp`; what it found is kept while it lives."""

    def __init__(self) -> None:
        # By what is known of the symbols: the value of each part of an expression.
        self.known: dict[object, dict[Any, Any]] = {}

    def __call__(
        self,
        analysis: Any,
        env: dict[Any, Any],
        expr: Any,
        *,
        index_dtype: torch.dtype = torch.int64,
        missing_handler: Callable[[Any], Any] | None = None,
    ) -> Any:
        key = analysis, index_dtype, frozenset(env.items())
        known = self.known.setdefault(key, {})

        def value(part: Any) -> Any:
            if not part.args:  # a number or a symbol
                return interp.sympy_interp(
                    analysis,
                    env,
                    part,
                    index_dtype=index_dtype,
                    missing_handler=missing_handler,
                )
            if part not in known:
                args = [value(arg) for arg in part.args]
                known[part] = interp._run_sympy_handler(  # type: ignore[no-untyped-call]
                    analysis, args, part, index_dtype=index_dtype
                )
            return known[part]

        return value(expr)
