"""Ops that give a view or a copy, as the strides of their operand have it.

    x[:, ::2].flatten()      of x: f32[n, m], row-major: the strides are m and 2, the
                             sizes n and (m + 1) // 2

A reshape is a view if it can step through the operand's memory. Between neighbouring
dims k and k + 1 of the operand (dims of size 1 do not count), either

    the two are merged     stride[k] == size[k + 1] * stride[k + 1], here for even m
    or the result has a boundary in the same place: the product of the sizes behind it
    is the same

One boundary with neither makes it a copy. `contiguous` and `ravel` give views if all
are merged, and the last stride is 1. Of a tensor without elements nothing can be told,
so all sizes are taken to be at least 1 here.

Where nothing proves the answer, it is the one of the trace's sizes, under conditions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node

from pliant.frontend.torch_dims import to_expr
from pliant.frontend.torch_views import RESHAPES, ROWS, name_of
from pliant.sym import Cond, Expr, Facts, as_expr, eq, ge

_CONVERSIONS = frozenset(["to", "type_as"])
# The dims from the outermost in memory to the innermost.
_ORDERS = {torch.channels_last: (0, 2, 3, 1), torch.channels_last_3d: (0, 2, 3, 4, 1)}


def depends_on_layout(node: Node) -> Node | None:
    """The operand that a node views or copies as its strides have it."""
    source = node.args[0] if node.args else None
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    if not isinstance(source, Node) or source.meta.get("val") is None:
        return None
    name = name_of(node.target)
    turns = name in _CONVERSIONS and _only_turns(node, source)
    layout = name in RESHAPES or name in ROWS or turns
    return source if layout else None


def _only_turns(node: Node, source: Node) -> bool:
    """Whether a conversion changes no more than the order of dims in memory."""
    same = node.meta["val"].dtype == source.meta["val"].dtype
    copies = node.kwargs.get("copy", False)
    return same and not copies and node.kwargs.get("memory_format") in _ORDERS


@dataclass(frozen=True, slots=True)
class Number:
    """A size or stride, and what it was in the trace."""

    expr: Expr
    traced: int

    def __mul__(self, other: Number) -> Number:
        return Number(self.expr * other.expr, self.traced * other.traced)


_ONE = Number(as_expr(1), 1)


@dataclass(frozen=True, slots=True)
class Answer:
    """Whether a node is a view, at all sizes with these conditions."""

    is_view: bool
    conds: tuple[Cond, ...] = ()
    by_strides: bool = True  # with other strides of the operand it may differ


@dataclass(frozen=True, slots=True)
class _Boundary:
    """Between a dim of more than one element and the dims inside of it.

    `behind` is the next of these, None if the boundary is that to a single element.
    """

    size: Number
    stride: Number
    below: Number  # the stride with which it is merged with what is inside
    behind: Number | None
    count: Number  # of elements inside


def answer(node: Node, source: Node, symbols: Any, facts: Facts) -> Answer | None:
    """Whether a node is a view of its operand; None if it cannot be told."""
    assert isinstance(node.target, torch._ops.OpOverload)
    read = _reader(source.meta["val"], symbols)
    given, made = source.meta["val"], node.meta["val"]
    if name_of(node.target) in _CONVERSIONS:
        return None
    try:
        shape, strides = [*map(read, given.shape)], [*map(read, given.stride())]
        result = [*map(read, made.shape)]
        for size in shape:
            facts = facts.assume(ge(size.expr, 1))
    except (KeyError, TypeError):
        return None
    except ValueError:  # no elements, whatever the sizes
        return Answer(True, by_strides=False)
    dims = list(zip(shape, strides, strict=True))
    if name_of(node.target) in ROWS:
        memory_format: Any = node.kwargs.get("memory_format")
        order = _ORDERS.get(memory_format, range(len(dims)))
        return _Strides([dims[axis] for axis in order], None, facts).answer()
    return _Strides(dims, result, facts).answer()


def _reader(given: torch.Tensor, symbols: Any) -> Callable[[Any], Number]:
    """Reads torch's sizes; a KeyError or TypeError for one that data decide."""
    mode = getattr(given, "fake_mode", None)
    hints = {} if mode is None else mode.shape_env.backed_var_to_val

    def read(size: Any) -> Number:
        if not isinstance(size, torch.SymInt):
            return Number(as_expr(int(size)), int(size))
        expr: sympy.Expr = size.node.expr
        return Number(to_expr(expr, symbols.__getitem__), int(expr.xreplace(hints)))

    return read


Dims = Sequence[tuple[Number, Number]]


@dataclass(slots=True)
class _Strides:
    """Sizes and strides, and the sizes of the reshaped result (None: contiguous)."""

    dims: Dims
    result: Sequence[Number] | None
    facts: Facts

    def answer(self) -> Answer:
        self.dims = [d for d in self.dims if not self.proves(eq(d[0].expr, 1))]
        boundaries = self.boundaries()
        open_ones = [b for b in boundaries if not self.is_aligned(b)]
        by_strides = bool(open_ones)
        open_ones = [b for b in open_ones if not self.is_merged(b)]
        if not open_ones:
            return Answer(True, by_strides=by_strides)
        single = [size.expr for size, _ in self.dims if size.traced == 1]
        if single:
            return self.without(single)
        copied = [b for b in open_ones if not self.holds_in_trace(b)]
        if copied:
            reasons = (self.reasons_for_copy(b) for b in copied)
            return Answer(False, min(reasons, key=len))
        return Answer(True, tuple(map(self.reason_for_view, open_ones)))

    def without(self, single: Sequence[Expr]) -> Answer:
        """The answer where these sizes are 1, as they are in the trace."""
        conds = tuple(eq(size, 1) for size in single)
        dims = [dim for dim in self.dims if dim[0].traced != 1]
        found = _Strides(dims, self.result, self.facts).answer()
        return Answer(found.is_view, (*conds, *found.conds))

    def boundaries(self) -> list[_Boundary]:
        found: list[_Boundary] = []
        behind, below, count = None, _ONE, _ONE
        for size, stride in reversed(self.dims):
            if behind is not None or self.result is None:
                found.append(_Boundary(size, stride, below, behind, count))
            behind, below, count = size, size * stride, count * size
        return found

    def proves(self, cond: Cond) -> bool:
        return self.facts.prove(cond) is True

    def is_merged(self, at: _Boundary) -> bool:
        return self.proves(eq(at.stride.expr, at.below.expr))

    def is_aligned(self, at: _Boundary) -> bool:
        return any(self.proves(eq(n.expr, at.count.expr)) for n in self.counts())

    def counts(self) -> list[Number]:
        """The elements inside of each boundary of the result."""
        sizes = self.result or ()
        return [math.prod(sizes[k:], start=_ONE) for k in range(1, len(sizes))]

    def holds_in_trace(self, at: _Boundary) -> bool:
        merged = at.stride.traced == at.below.traced
        return merged or any(n.traced == at.count.traced for n in self.counts())

    def reason_for_view(self, at: _Boundary) -> Cond:
        if at.stride.traced == at.below.traced:
            return _equal(at.stride, at.below)
        same = (n for n in self.counts() if n.traced == at.count.traced)
        return _equal(next(same), at.count)

    def reasons_for_copy(self, at: _Boundary) -> tuple[Cond, ...]:
        conds = [_equal(at.size, _ONE).negated()]
        if at.behind is not None:
            conds.append(_equal(at.behind, _ONE).negated())
        conds.append(_equal(at.stride, at.below).negated())
        others = filter(self.is_new, self.counts())
        conds += [_equal(n, at.count).negated() for n in others]
        return tuple(cond for cond in conds if not self.proves(cond))

    def is_new(self, count: Number) -> bool:
        """Whether no other boundary of the operand has as many elements inside: if one
        has, this one has not, as its two dims are not of size 1."""
        sizes = [size for size, _ in self.dims]
        inside = [math.prod(sizes[k:], start=_ONE) for k in range(len(sizes) + 1)]
        return not any(self.proves(eq(count.expr, n.expr)) for n in inside)


def _equal(one: Number, other: Number) -> Cond:
    return eq(one.expr, other.expr).plain()
