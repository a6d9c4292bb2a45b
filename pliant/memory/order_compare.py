"""Whether one order never needs more memory than another, whatever the sizes.

The live bytes of an order are one sum per call. An order is no worse than another if
each of its sums is at most one of the other's, for all sizes. Terms common to both sums
cancel; the rest is matched buffer by buffer, or else given to the prover.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pliant.memory.order_search import Ints
from pliant.runtime.description import ALIGN
from pliant.sym import Expr, Facts, as_expr, ceildiv, le

_TRIES = 6  # sums of the other order that one sum is compared with


@dataclass(frozen=True, slots=True)
class PeakBound:
    """The live bytes of an order: how many buffers of each size, at each moment.

    A moment whose live buffers are a subset of another's is left out.
    """

    sizes: tuple[Expr, ...]  # distinct
    counts: Ints  # moments x sizes
    samples: Ints  # moments x assignments: bytes
    peaks: Ints  # at each assignment

    @staticmethod
    def of(rows: Ints, formulas: Sequence[Expr], table: Ints) -> PeakBound:
        """From rows of live buffers, their formulas and their bytes at samples."""
        sizes = tuple(dict.fromkeys(formulas))
        columns = np.array([sizes.index(e) for e in formulas], np.int64)
        counts: Ints = np.zeros((len(rows), len(sizes)), np.int64)
        bytes_of = np.zeros((len(sizes), table.shape[1]), np.int64)
        for b, column in enumerate(columns):
            counts[:, column] += rows[:, b]
            bytes_of[column] = table[b]
        counts = _maximal(counts)
        samples = counts @ bytes_of
        top = samples.max(axis=0) if len(samples) else np.zeros(table.shape[1])
        return PeakBound(sizes, counts, samples, top.astype(np.int64))


def _maximal(counts: Ints) -> Ints:
    rows = np.unique(counts, axis=0)
    kept: list[Ints] = []
    for row in rows[np.argsort(-rows.sum(axis=1), kind="stable")]:
        if not any((row <= other).all() for other in kept):
            kept.append(row)
    return np.array(kept, np.int64).reshape(len(kept), counts.shape[1])


def dominates(one: PeakBound, other: PeakBound, facts: Facts) -> bool:
    """Whether the first is proved to need no more than the second at any size."""
    assert one.sizes == other.sizes, "orders of different blocks"
    if (one.peaks > other.peaks).any():
        return False
    return all(_is_below(one, k, other, facts) for k in range(len(one.counts)))


def _is_below(one: PeakBound, k: int, other: PeakBound, facts: Facts) -> bool:
    """Whether moment k of the first is at most some moment of the second."""
    differences = one.counts[k] - other.counts
    if (differences <= 0).all(axis=1).any():
        return True
    possible = (one.samples[k] <= other.samples).all(axis=1)
    ranked = sorted(
        np.flatnonzero(possible), key=lambda q: int(np.abs(differences[q]).sum())
    )
    return any(
        nonpositive(one.sizes, differences[q].tolist(), facts) for q in ranked[:_TRIES]
    )


def nonpositive(sizes: Sequence[Expr], counts: Sequence[int], facts: Facts) -> bool:
    """Whether the sum of counts times sizes, in whole lines, is proved to be <= 0."""
    left = {size: -c for size, c in zip(sizes, counts, strict=True) if c < 0}
    more = {size: c for size, c in zip(sizes, counts, strict=True) if c > 0}
    total = sum((c * lines(size) for size, c in more.items()), as_expr(0))
    against = sum((c * lines(size) for size, c in left.items()), as_expr(0))
    for size in more:
        for other in left:
            taken = min(more[size], left[other])
            if taken and facts.prove(le(size, other)):
                more[size] -= taken
                left[other] -= taken
    if not any(more.values()):
        return True
    return facts.prove(le(total, against)) is True


def lines(size: Expr) -> Expr:
    """Bytes that a buffer takes in the arena."""
    return ALIGN * ceildiv(size, ALIGN)
