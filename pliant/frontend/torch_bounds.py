"""Memoizes torch.export's queries about sizes.

The sizes of a network that pads by its own rule are nested quotients. Each level uses
the one below several times, so an expression is a small graph but a large tree. torch
and sympy walk the tree for every query: to bound it, to list its symbols, to replace
some of them. torch also determines for every value of a trace whether its memory is
contiguous, for metadata that nobody reads. Within `shared_bounds` each part of an
expression is visited once, and that metadata is left out. The results are the same.

    (n + 7) // 8 * 8 * c // c      torch divides by the common factor c, and calls
                                   sympy.simplify on what is left

A general simplification takes seconds for such a size. Where the factor cancels in
each term, the terms are the result: an equal size, in expanded form, which is the form
that torch brings all sizes to anyway.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any
from unittest import mock

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx.experimental import proxy_tensor, symbolic_shapes
from torch.fx.passes.shape_prop import _extract_tensor_metadata
from torch.utils._sympy import interp, value_ranges


@contextlib.contextmanager
def shared_bounds() -> Iterator[None]:
    note = partial(_extract_tensor_metadata, include_contiguity=False)
    expand = _shared(symbolic_shapes._fast_expand)
    with (
        mock.patch.object(proxy_tensor, "_extract_tensor_metadata", note),
        mock.patch.object(value_ranges, "sympy_interp", _SharedInterp()),
        mock.patch.object(symbolic_shapes, "_fast_expand", expand),
        mock.patch.object(sympy.Basic, "free_symbols", _shared_symbols()),
        mock.patch.object(sympy.Expr, "is_number", _shared_number()),
        mock.patch.object(sympy.Basic, "atoms", _shared_atoms()),
        mock.patch.object(sympy.Basic, "xreplace", _xreplace),
        mock.patch.object(sympy.Basic, "_xreplace", _xreplace_part),
        mock.patch.object(sympy, "simplify", _simplifier()),
    ):
        yield


def _shared(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function of an expression that calls itself for its parts, by this name."""
    known: dict[Any, Any] = {}

    def value(expr: Any) -> Any:
        if expr not in known:
            known[expr] = function(expr)
        return known[expr]

    return value


def _shared_symbols() -> property:
    """As sympy's `free_symbols`, which asks every part for its own."""
    symbols = sympy.Basic.free_symbols.fget
    shared = _shared(lambda expr: frozenset(symbols(expr)))
    return property(lambda expr: set(shared(expr)))


def _shared_number() -> property:
    """As sympy's `is_number`, which asks every part."""
    return property(_shared(sympy.Expr.is_number.fget))


def _shared_atoms() -> Callable[..., set[Any]]:
    """As sympy's `atoms`, which walks the tree."""
    known: dict[Any, frozenset[Any]] = {}

    def found(expr: Any, types: tuple[type, ...]) -> frozenset[Any]:
        key = expr, types
        if key not in known:
            own = isinstance(expr, types) if types else not expr.args
            parts = [a for a in expr.args if isinstance(a, sympy.Basic)]
            below = (found(part, types) for part in parts)
            known[key] = frozenset({expr} if own else ()).union(*below)
        return known[key]

    def atoms(expr: Any, *types: Any) -> set[Any]:
        return set(
            found(expr, tuple(t if isinstance(t, type) else type(t) for t in types))
        )

    return atoms


class _Rule(dict[Any, Any]):
    """What `xreplace` replaces, and what it made of the parts that it has seen."""

    def __init__(self, rule: Mapping[Any, Any]) -> None:
        super().__init__(rule)
        self.known: dict[Any, tuple[Any, bool]] = {}


_replace_part = sympy.Basic._xreplace


def _xreplace(expr: Any, rule: Any) -> Any:
    """As sympy's `xreplace`, which walks the tree; a rule may also be code."""
    value, _ = expr._xreplace(_Rule(rule) if isinstance(rule, dict) else rule)
    return value


def _xreplace_part(expr: Any, rule: Any) -> tuple[Any, bool]:
    if not isinstance(rule, _Rule):
        return _replace_part(expr, rule)  # type: ignore[no-any-return]
    if expr not in rule.known:
        rule.known[expr] = _replace_part(expr, rule)
    return rule.known[expr]


def _simplifier() -> Callable[..., Any]:
    """As sympy's `simplify`, with a short way for a quotient without a rest."""
    simplify = sympy.simplify

    def simplest(expr: Any) -> Any:
        short = _cancelled(expr)
        return simplify(expr) if short is None else short

    shared = _shared(simplest)

    def simplified(expr: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not isinstance(expr, sympy.Expr):
            return simplify(expr, *args, **kwargs)
        return shared(expr)

    return simplified


def _cancelled(expr: Any) -> Any:
    """A quotient of products and sums without its denominators; None if one stays."""
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


class _SharedInterp:
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
