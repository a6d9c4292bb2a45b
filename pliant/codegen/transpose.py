"""Transposes squares of registers: rows become columns.

    for d = 0 to depth { for j = 0 to 32 vector { %panel[d, j] = %k[first + j, d] } }

Vectors along j would be gathers, one element at a time. Such a nest is done in squares
of as many rows as a vector has lanes: loads along d, shuffles between registers, and
stores along j. For 16 lanes that is 64 shuffles for 256 elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import llvmlite.ir as ll

from pliant.codegen.builder import LLBuilder
from pliant.codegen.llvm_types import I32, LLValue, constant


def exchange(b: LLBuilder, rows: Sequence[LLValue]) -> list[LLValue]:
    """The columns of a square of registers.

    In each round, rows that differ in one bit of their number exchange the lanes that
    differ in it: lane l of row r ends as lane r of row l.
    """
    square, lanes = list(rows), len(rows)
    bit = lanes // 2
    while bit:
        lower = [
            lane if not lane & bit else lanes + lane - bit for lane in range(lanes)
        ]
        upper = [
            lane + bit if not lane & bit else lanes + lane for lane in range(lanes)
        ]
        for r in range(lanes):
            if not r & bit:
                pair = square[r], square[r + bit]
                square[r] = b.shuffle_vector(*pair, _order(lower))
                square[r + bit] = b.shuffle_vector(*pair, _order(upper))
        bit //= 2
    return square


def _order(lanes: Sequence[int]) -> LLValue:
    typ = ll.VectorType(I32, len(lanes))
    return ll.Constant(typ, [constant(I32, lane) for lane in lanes])
