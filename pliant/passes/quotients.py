"""Divisions that can be multiplications: e / sum(e), e = exp(x - max(x)) along a row.

    %w = broadcast(%sum)                %i = reciprocal(%sum)
    %y = div(%e, %w)             ->     %w = broadcast(%i)
                                        %y = mul(%e, %w)

A division takes as long as a dozen multiplications, and its divisor is the same for a
whole row. x * (1/y) equals x / y up to the last bit if 1/y is a normal number. It is
here: the greatest element of a row adds exp(0) = 1 to y, and a row has fewer than 2^63
elements. (Where x holds an infinity or NaN, y is NaN, and so are both results.)

Half floats are divided: 1/y would be rounded to few digits.
"""

from __future__ import annotations

from pliant.context import Context
from pliant.ir.graph import Graph, Op, Value
from pliant.ir.rewrite import Rewriter, RuleSet, rewrite


def _share(cx: Rewriter, op: Op) -> Value | None:
    """exp(x - max) / sum(exp(x - max)), a sum that is at least 1."""
    powers, total = op.operands
    sum_ = _of_rows(cx, total, "sum")
    exp = cx.producer(powers, "exp")
    if sum_ is None or sum_.operands[0] is not powers or exp is None:
        return None
    shifted = cx.producer(exp.operands[0], "sub")
    if shifted is None or op.result.dtype.compute is not op.result.dtype:
        return None
    top = _of_rows(cx, shifted.operands[1], "max")
    if top is None or top.operands[0] is not shifted.operands[0]:
        return None
    if top.ints_attr("axes") != sum_.ints_attr("axes"):
        return None
    if not _repeats(cx, shifted, top):
        return None
    wide = cx.producer(total)
    assert wide is not None
    inverse = cx.unary("reciprocal", sum_.result)
    axes = wide.ints_attr("axes")
    return cx.emit("mul", powers, cx.broadcast(inverse, wide.result.shape, axes))


def _of_rows(cx: Rewriter, value: Value, kind: str) -> Op | None:
    """The reduction whose result a value broadcasts along the row."""
    wide = cx.producer(value, "broadcast")
    found = None if wide is None else cx.producer(wide.operands[0], "reduce")
    return found if found is not None and found.str_attr("op") == kind else None


def _repeats(cx: Rewriter, shifted: Op, top: Op) -> bool:
    """Whether each row is shifted by its own maximum."""
    wide = cx.producer(shifted.operands[1])
    assert wide is not None
    axes = wide.ints_attr("axes")
    rank = shifted.result.type.rank
    if top.bool_attr("keepdims"):
        return axes == tuple(range(rank))
    reduced = top.ints_attr("axes")
    return axes == tuple(k for k in range(rank) if k not in reduced)


_RULES: RuleSet = {"div": (_share,)}


def quotients(graph: Graph, cx: Context) -> Graph:
    return rewrite(graph, _RULES, cx.facts(graph))
