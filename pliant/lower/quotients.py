"""Divisions that can be multiplications: e / sum(e), e = exp(x - max(x)) along a row.

A division takes as long as a dozen multiplications, and its divisor is the same for a
whole row. x * (1/y) equals x / y up to the last bit if 1/y is a normal number. It is
here: the greatest element of a row adds exp(0) = 1 to y, and a row has fewer than 2^63
elements. (Where x holds an infinity or NaN, y is NaN, and so are both results.)
"""

from __future__ import annotations

from collections.abc import Mapping

from pliant.ir.graph import Op, Value


def is_share(op: Op, producers: Mapping[Value, Op]) -> bool:
    """Whether the op divides exponentials by a sum that is at least 1."""
    if op.name != "div":
        return False
    powers, total = op.operands
    sum_ = _of_rows(total, "sum", producers)
    exp = producers.get(powers)
    if sum_ is None or sum_.operands[0] is not powers:
        return False
    if exp is None or exp.name != "exp":
        return False
    shifted = producers.get(exp.operands[0])
    if shifted is None or shifted.name != "sub":
        return False
    top = _of_rows(shifted.operands[1], "max", producers)
    return (
        top is not None
        and top.operands[0] is shifted.operands[0]
        and top.ints_attr("axes") == sum_.ints_attr("axes")
        and _repeats(shifted, top, producers)
    )


def _of_rows(value: Value, kind: str, producers: Mapping[Value, Op]) -> Op | None:
    """The reduction whose result a value broadcasts along the row."""
    wide = producers.get(value)
    if wide is None or wide.name != "broadcast":
        return None
    found = producers.get(wide.operands[0])
    if found is None or found.name != "reduce" or found.str_attr("op") != kind:
        return None
    return found


def _repeats(shifted: Op, top: Op, producers: Mapping[Value, Op]) -> bool:
    """Whether each row is shifted by its own maximum."""
    axes = producers[shifted.operands[1]].ints_attr("axes")
    rank = shifted.result.type.rank
    if top.bool_attr("keepdims"):
        return axes == tuple(range(rank))
    reduced = top.ints_attr("axes")
    return axes == tuple(k for k in range(rank) if k not in reduced)
