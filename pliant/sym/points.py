"""Assignments of the symbols that satisfy the facts: to search with and to test on.

A condition over all sizes is first tested at a few of them and proved afterwards. The
samples are distributed like real sizes: all small, all large, one large among small
ones.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from functools import lru_cache, partial
from itertools import product

from pliant.sym.expr import Symbol, sym
from pliant.sym.prove import Facts
from pliant.sym.samples import Point, SampleSpace

__all__ = ["Point", "extremes", "random_points", "representatives", "witnesses"]

_EVEN = (1, 17, 64, 384, 4096)  # sizes that all symbols have at once
_UNEVEN = ((1024, 1), (1, 1024), (256, 4), (4, 256))  # of one symbol, of the others
_VALUES = (0, 1, 2, 3, 5, 16, 31, 64, 130, 513, 4099)  # for witnesses
_FAR = (1, 3000, 10**6, 10**9)  # for witnesses far out
_MOST_WITNESSES, _MOST_VARIED = 1500, 6
_MOST_SKEWED = 4  # symbols that are varied one by one
_REMEMBERED = 64  # layers that are alike ask again


def representatives(facts: Facts, names: Iterable[str]) -> list[Point]:
    """A few assignments that stand for the range; distinct, in a fixed order."""
    return list(_representatives(facts, frozenset(names)))


@lru_cache(maxsize=_REMEMBERED)
def _representatives(facts: Facts, names: frozenset[str]) -> list[Point]:
    space = _space(facts, names)
    wanted = [partial(_skewed, "", size, size) for size in _EVEN]
    for name in space.free[:_MOST_SKEWED]:
        wanted += [partial(_skewed, name, its, others) for its, others in _UNEVEN]
    found = _distinct(space.points(wanted))
    if found:
        return found
    # Conditions of one symbol may leave few of its values: height // 14 == 5.
    space.narrow()
    return _distinct(space.points(wanted))


def witnesses(facts: Facts, names: Iterable[str]) -> list[Point]:
    """Many assignments, small and large sizes in all combinations: to refute with."""
    return list(_combined(facts, frozenset(names), _VALUES))


def extremes(facts: Facts, names: Iterable[str]) -> list[Point]:
    """Assignments with sizes beyond all that is real, where the range allows them."""
    return list(_combined(facts, frozenset(names), _FAR))


@lru_cache(maxsize=_REMEMBERED)
def _combined(
    facts: Facts, names: frozenset[str], values: tuple[int, ...]
) -> list[Point]:
    space = _space(facts, names)
    while len(values) > 2 and len(values) ** len(space.free) > _MOST_WITNESSES:
        values = values[::2] if len(values) % 2 else values[1::2]
    chosen = product(values, repeat=min(len(space.free), _MOST_VARIED))
    wanted = (dict(zip(space.free, sizes, strict=False)) for sizes in chosen)
    return _distinct(
        space.points(partial(_given, sizes) for sizes in wanted),
    )


def _given(sizes: Mapping[str, int], name: str) -> int:
    return sizes.get(name, 1)


def _skewed(chosen: str, its: int, others: int, name: str) -> int:
    return its if name == chosen else others


def random_points(
    facts: Facts, names: Iterable[str], seed: int, count: int, most: int = 1024
) -> list[Point]:
    """Up to `count` assignments with log-uniform sizes up to `most`."""
    space = _space(facts, names)
    rng = random.Random(seed)

    def size(name: str) -> int:
        low, high = space.interval(name)
        least = max(low or 0, 1)
        top = max(least, min(most, most if high is None else high))
        return round(least * float((top / least) ** rng.random()))

    found: list[Point] = []
    for _ in range(8):  # constraints may reject some
        found = _distinct([*found, *space.points([size] * count)])
        if len(found) >= count:
            break
    return found[:count]


def _space(facts: Facts, names: Iterable[str]) -> SampleSpace:
    stated = (s for cond in facts.stated for s in cond.symbols())
    forms = {
        name: facts.in_multiples(facts.canonical(sym(name)))
        for name in sorted({*names, *stated})
    }
    return SampleSpace(forms, facts.stated, lambda name: facts.box(Symbol(name)))


def _distinct(points: Iterable[Point]) -> list[Point]:
    return list({tuple(sorted(p.items())): p for p in points}.values())
