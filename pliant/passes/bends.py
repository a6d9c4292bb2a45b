"""Where comparisons and functions with an edge do no harm: the function only bends.

%c = gt(%x, 0)                      relu, leaky relu, elu: both sides are 0 at 0,
%y = select(%c, %x, f(%x))          so it does not matter which is taken about there

%d = add(exp(%x), 1)                a divisor that no rounding makes 0
%y = div(%x, %d)
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pliant.ir.graph import Graph, Op, Value
from pliant.ir.ops import OPS, VIEWS, Trait, has_trait
from pliant.sym.signs import plainly_nonnegative

_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
_MOST_OPS = 32  # of a function that is looked at
_SAME = 2.0**-22  # as close as two roundings of f32
_NEVER_NEGATIVE = frozenset({"exp", "abs", "sigmoid", "erfc"})
_KEEP_SIGN = frozenset(
    {"add", "mul", "div", "minimum", "sqrt", "rsqrt", "reciprocal", "expm1", "log1p"}
) | {"reduce"}


class _UnknownError(Exception):
    """The value of a function that depends on more than the number it is given."""


def _is_function(op: Op) -> bool:
    """Whether an element is a function of elements; casts are between floats."""
    if op.name == "cast":
        return op.result.dtype.is_float and op.operands[0].dtype.is_float
    return has_trait(op, Trait.ELEMENTWISE) and not op.attrs


def _number_of(full: Op) -> float:
    number = full.attr("value")
    assert isinstance(number, (bool, int, float))
    return number


class Bends:
    """What is known of the functions that a graph computes of single elements."""

    def __init__(self, graph: Graph) -> None:
        self.producers, self.users = graph.producers(), graph.users()
        self.results = frozenset(graph.results)
        self._nonnegative: dict[Value, bool] = {}
        self._positive: dict[Value, bool] = {}

    # ---- comparisons

    def is_bend(self, op: Op) -> bool:
        """Whether a comparison chooses between values that agree at its border."""
        if op.name not in _COMPARISONS or op.result in self.results:
            return False
        return all(self._agrees(op, user) for user in self.users.get(op.result, ()))

    def _agrees(self, compare: Op, chosen: Op) -> bool:
        if chosen.name != "select" or chosen.operands[0] is not compare.result:
            return False
        _, first, second = chosen.operands
        if {first, second} <= set(compare.operands):
            return True
        x, y = compare.operands
        for value, other in ((x, y), (y, x)):
            border = self._number(other)
            if border is not None:
                a, b = (self._at(v, value, border) for v in (first, second))
                return a == b or math.isclose(a, b, rel_tol=_SAME)
        return False

    def _number(self, value: Value) -> float | None:
        """The number that all elements of a float value are."""
        op = self.producers.get(value)
        while op is not None and op.name in VIEWS:
            op = self.producers.get(op.operands[0])
        return op.float_attr("value") if op is not None and op.name == "full" else None

    def _at(self, value: Value, x: Value, number: float) -> float:
        """The value where x is the number; NaN if that does not tell it."""
        known: dict[Value, Any] = {x: np.float64(number)}

        def find(v: Value) -> Any:
            if v not in known:
                known[v] = compute(v)
            return known[v]

        def compute(v: Value) -> Any:
            constant = self._number(v) if v.dtype.is_float else None
            if constant is not None:
                return np.float64(constant)
            op = self.producers.get(v)
            if op is None or not _is_function(op) or len(known) > _MOST_OPS:
                raise _UnknownError
            operands = [find(operand) for operand in op.operands]
            meaning = OPS[op.name].meaning
            if op.name == "cast" or meaning is None:
                return operands[0]
            return meaning(*operands)

        try:
            with np.errstate(all="ignore"):
                return float(find(value))
        except _UnknownError:
            return math.nan

    # ---- signs

    def is_off_edge(self, op: Op) -> bool:
        """Whether an op with an edge is always on one side: 0 / 0 is on none."""
        last = op.operands[-1]
        if op.name != "div":
            return self.is_nonnegative(last)
        return bool(self._number(last)) or self.is_positive(last)

    def is_positive(self, value: Value, depth: int = _MOST_OPS) -> bool:
        """Whether all elements are above 0, however their operands are rounded."""
        if value not in self._positive:
            self._positive[value] = depth > 0 and self._is_positive(value, depth - 1)
        return self._positive[value]

    def _is_positive(self, value: Value, depth: int) -> bool:
        op = self.producers.get(value)
        if op is None:
            return False

        def is_above(operand: Value) -> bool:
            return self.is_positive(operand, depth)

        operands = op.operands
        match op.name:
            case "full":
                return _number_of(op) > 0
            case "dim_value":  # it is no rounding that makes it 0
                return plainly_nonnegative(op.dim_attr("value"))
            case "add":
                signs = map(self.is_nonnegative, operands)
                return all(signs) and any(map(is_above, operands))
            case "maximum":
                return any(map(is_above, operands))
            case "minimum" | "sqrt":
                return all(map(is_above, operands))
            case "select":
                return all(map(is_above, operands[1:]))
            case "cast":  # to fewer bits, it may become 0
                wider = value.dtype.bytes >= operands[0].dtype.bytes
                return wider and is_above(operands[0])
            case name:
                return name in VIEWS and is_above(operands[0])

    def is_nonnegative(self, value: Value, depth: int = _MOST_OPS) -> bool:
        """Whether no element is below 0, or -0, however its operands are rounded."""
        if value not in self._nonnegative:
            self._nonnegative[value] = depth > 0 and self._has_no_sign(value, depth - 1)
        return self._nonnegative[value]

    def _has_no_sign(self, value: Value, depth: int) -> bool:
        op = self.producers.get(value)
        if op is None:
            return value.dtype.is_unsigned

        def has_none(operand: Value) -> bool:
            return self.is_nonnegative(operand, depth)

        operands = op.operands
        match op.name:
            case "full":
                return math.copysign(1.0, _number_of(op)) > 0
            case "dim_value":
                return plainly_nonnegative(op.dim_attr("value"))
            case "iota":
                return True
            case "mul" if operands[0] is operands[1]:
                return True
            case "maximum":
                return any(map(has_none, operands))
            case "select":
                return all(map(has_none, operands[1:]))
            case "cast":
                return has_none(operands[0])
            case name if name in _NEVER_NEGATIVE:
                return True
            case name if name in _KEEP_SIGN or name in VIEWS:
                return all(map(has_none, operands))
            case _:
                return value.dtype.is_unsigned
