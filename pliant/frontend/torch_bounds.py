"""Memoizes torch.export's queries about sizes.

The sizes of a network that pads by its own rule are nested quotients. Each level uses
the one below several times, so an expression is a small graph but a large tree. torch
and sympy walk the tree for every query, to bound it and to list its symbols. torch also
determines for every value of a trace whether its memory is contiguous, for metadata
that nobody reads. Within `shared_bounds` each part of an expression is visited once,
and that metadata is left out. The results are the same.

    (n + 7) // 8 * 8 * c // c      torch divides by the common factor c, and calls
                                   sympy.simplify on what is left

A general simplification takes seconds for such a size. If the factor cancels in each
term, the sum of the terms is the result: an equal size, in the expanded form that torch
brings all sizes to anyway.

torch also keeps the result of each op by the sizes of its operands. To keep and to
restore one asks more questions of its sizes than the op itself does, so this is left
out where a size is a quotient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import proxy_tensor
from torch.fx.passes.shape_prop import _extract_tensor_metadata
from torch.utils._pytree import tree_leaves
from torch.utils._sympy import interp, value_ranges


@contextlib.contextmanager
def shared_bounds() -> Iterator[None]:
    note = partial(_extract_tensor_metadata, include_contiguity=False)
    with (
        mock.patch.object(proxy_tensor, "_extract_tensor_metadata", note),
        mock.patch.object(value_ranges, "sympy_interp", _Shared()),
        mock.patch.object(sympy.Basic, "free_symbols", _shared_symbols()),
        mock.patch.object(sympy, "simplify", _simplified),
        mock.patch.object(FakeTensorMode, "_cached_dispatch_impl", _dispatched),
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


_simplify = sympy.simplify


def _simplified(expr: Any, *args: Any, **kwargs: Any) -> Any:
    """As sympy's `simplify`, with a short way for a quotient without a remainder."""
    plain = not args and not kwargs and isinstance(expr, sympy.Expr)
    short = _cancelled(expr) if plain else None
    return _simplify(expr, *args, **kwargs) if short is None else short


def _cancelled(expr: Any) -> Any:
    """A product of a sum and factors, multiplied out; None if a denominator stays."""
    if _is_whole(expr):
        return expr
    factors = sympy.Mul.make_args(expr)
    sums = [factor for factor in factors if factor.is_Add]
    if len(sums) != 1:
        return None
    others = sympy.Mul(*(factor for factor in factors if not factor.is_Add))
    terms = [term * others for term in sums[0].args]
    return sympy.Add(*terms) if all(map(_is_whole, terms)) else None


def _is_whole(product: Any) -> bool:
    """Whether each factor is an integer, and none is a denominator."""
    return all(
        factor.is_Integer
        or (factor.is_integer and not factor.is_Number and not factor.is_Pow)
        or (
            (factor.is_Pow and factor.base.is_integer and factor.exp.is_Integer)
            and factor.exp.is_positive
        )
        for factor in sympy.Mul.make_args(product)
    )


_dispatch = FakeTensorMode._cached_dispatch_impl


def _dispatched(
    self: FakeTensorMode, func: Any, types: Any, args: Any, kwargs: Any
) -> Any:
    """As torch does it, without its table for operands whose sizes are quotients."""
    leaves = tree_leaves((args, kwargs))
    tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    sizes: Iterator[Any] = (size for tensor in tensors for size in tensor.shape)
    varying = (size for size in sizes if isinstance(size, torch.SymInt))
    if any(_has_quotient(size.node._expr) for size in varying):
        return self._dispatch_impl(func, types, args, kwargs)
    return _dispatch(self, func, types, args, kwargs)


def _has_quotient(size: Any) -> bool:
    terms = sympy.Add.make_args(size)
    factors = (factor for term in terms for factor in sympy.Mul.make_args(term))
    return any(not factor.is_Symbol and not factor.is_Number for factor in factors)


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
                known[part] = interp._run_sympy_handler(
                    analysis, args, part, index_dtype=index_dtype
                )
            return known[part]

        return value(expr)
