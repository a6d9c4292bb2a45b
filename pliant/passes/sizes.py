"""Whether a tensor is hardly larger than another: by one row of a long axis at most.

The logits of all tokens against those of all but the last are the common case: what
predicts the next token is shifted by one against what it is compared with.
"""

from __future__ import annotations

from collections.abc import Sequence

from pliant.ir.access import numel
from pliant.sym import Expr, Facts, le
from pliant.sym.expr import product

MANY_ROWS = 16  # one more of so many does not matter


def hardly_larger(whole: Sequence[Expr], part: Sequence[Expr], facts: Facts) -> bool:
    """Whether one shape has as many elements as another, or one row of an axis more.

    An axis of unknown extent counts as long; one that is known to be short does not.
    """
    more, fewer = numel(whole, facts), numel(part, facts)
    if more == fewer:
        return True
    if set(more.symbols()) != set(fewer.symbols()):
        return False  # a symbol alone in one of them: no bound by a single row
    if facts.prove(le(fewer, more)) is not True:
        return False
    for axis, extent in enumerate(whole):
        if extent.is_const and extent.value < MANY_ROWS:
            continue
        row = product(d for k, d in enumerate(whole) if k != axis)
        if facts.prove(le(more, fewer + row)) is True:
            return True
    return False
