"""Whether a tensor is at most one row of a long axis larger than another.

The common case is the logits of all tokens and those of all but the last: predictions
of the next token are shifted by one against the labels.
"""

from __future__ import annotations

from collections.abc import Sequence

from pliant.ir.access import numel
from pliant.sym import Expr, Facts, le
from pliant.sym.expr import product

MANY_ROWS = 16  # one row more does not matter from this many rows on


def at_most_a_row_larger(
    whole: Sequence[Expr], part: Sequence[Expr], facts: Facts
) -> bool:
    """Whether one shape has as many elements as another, or one row of an axis more.

    An axis of unknown extent counts as long; one that is known to be short does not.
    """
    more, fewer = numel(whole, facts), numel(part, facts)
    if more == fewer:
        return True
    if set(more.symbols()) != set(fewer.symbols()):
        return False  # a symbol occurs in only one of them, so one row is no bound
    if facts.prove(le(fewer, more)) is not True:
        return False
    for axis, extent in enumerate(whole):
        if extent.is_const and extent.value < MANY_ROWS:
            continue
        row = product(d for k, d in enumerate(whole) if k != axis)
        if facts.prove(le(more, fewer + row)) is True:
            return True
    return False
