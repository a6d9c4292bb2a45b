"""A sound lower bound of an integer polynomial over a box.

Every variable is first measured from a finite end of its interval, so that all
variables are nonnegative; then terms with positive coefficients need no care. What
remains is split into a polynomial in the bounded variables per monomial of the
unbounded ones, and each of these is bounded by its least Bernstein coefficient (on
a multilinear polynomial, its least vertex).

    3*m*n - 2*m*n - n,  m >= 1   ->   with m = 1 + m':  m'*n   ->   at least 0
    512*n - n*n,  n in 0..512    ->   Bernstein coefficients 0, 131072, 0
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product as cartesian
from math import comb, lcm, prod
from typing import TypeAlias

from pliant.sym.expr import Atom, Monomial, Term

Interval: TypeAlias = tuple[int | None, int | None]

# Above this many Bernstein coefficients plain interval arithmetic takes over.
_MOST_VERTICES = 64


def lower_bound(terms: Iterable[Term], box: Callable[[Atom], Interval]) -> int | None:
    """A number no value of the polynomial is below, or None if none was found."""
    shifted, widths = _from_finite_ends(terms, box)
    if shifted is None:
        return None
    if all(c > 0 for mono, c in shifted.items() if mono):
        return shifted.get((), 0)
    groups: dict[Monomial, dict[Monomial, int]] = {(): {}}
    for mono, coefficient in shifted.items():
        free = tuple(item for item in mono if widths[item[0]] is None)
        bounded = tuple(item for item in mono if widths[item[0]] is not None)
        groups.setdefault(free, {})[bounded] = coefficient
    base = _bounded_minimum(groups.pop(()), widths)
    if all(_bounded_minimum(group, widths) >= 0 for group in groups.values()):
        return base
    return None


def _from_finite_ends(
    terms: Iterable[Term], box: Callable[[Atom], Interval]
) -> tuple[dict[Monomial, int] | None, dict[Atom, int | None]]:
    """The polynomial over nonnegative variables, and the width of each."""
    ends: dict[Atom, tuple[int, int]] = {}  # start, direction
    widths: dict[Atom, int | None] = {}
    out: dict[Monomial, int] = {}
    for coefficient, mono in terms:
        for atom, _ in mono:
            if atom in widths:
                continue
            low, high = box(atom)
            if low is not None:
                ends[atom] = (low, 1)
                widths[atom] = None if high is None else max(high - low, 0)
            elif high is not None:
                ends[atom], widths[atom] = (high, -1), None
            else:
                return None, widths
        _add_expanded(out, coefficient, mono, ends, widths)
    return {mono: c for mono, c in out.items() if c or not mono}, widths


def _add_expanded(
    out: dict[Monomial, int],
    coefficient: int,
    mono: Monomial,
    ends: dict[Atom, tuple[int, int]],
    widths: dict[Atom, int | None],
) -> None:
    partial: list[Term] = [(coefficient, ())]
    for atom, power in mono:
        start, direction = ends[atom]
        fixed = widths[atom] == 0
        if start == 0 and direction == 1 and not fixed:
            partial = [(c, (*m, (atom, power))) for c, m in partial]
            continue
        # (start + direction * v) ** power; a variable of width 0 is its start.
        factors: list[tuple[int, Monomial]] = [(start**power, ())]
        if not fixed:
            factors += [
                (comb(power, k) * start ** (power - k) * direction**k, ((atom, k),))
                for k in range(1, power + 1)
            ]
        partial = [(c * f, m + v) for c, m in partial for f, v in factors if f]
    for c, m in partial:
        out[m] = out.get(m, 0) + c


def _bounded_minimum(poly: dict[Monomial, int], widths: dict[Atom, int | None]) -> int:
    """A lower bound over 0 <= v <= width for each variable."""
    constant = poly.get((), 0)
    if all(c >= 0 for mono, c in poly.items() if mono):
        return constant
    degrees: dict[Atom, int] = {}
    for mono in poly:
        for atom, power in mono:
            degrees[atom] = max(power, degrees.get(atom, 0))
    # Scaling each variable to 0..1 puts its width into the coefficients.
    unit = [(c * _volume(mono, widths), mono) for mono, c in poly.items()]
    if prod(degree + 1 for degree in degrees.values()) > _MOST_VERTICES:
        return constant + sum(c for c, mono in unit if mono and c < 0)
    return _least_bernstein(unit, degrees)


def _volume(mono: Monomial, widths: dict[Atom, int | None]) -> int:
    out = 1
    for atom, power in mono:
        width = widths[atom]
        assert width is not None, "an unbounded variable in a bounded group"
        for _ in range(power):
            out *= width
    return out


def _least_bernstein(unit: list[Term], degrees: dict[Atom, int]) -> int:
    # b_j = sum over k <= j of prod(C(j_i, k_i) / C(d_i, k_i)) * a_k; one common
    # denominator keeps the arithmetic in integers.
    scales = {a: lcm(*(comb(d, k) for k in range(d + 1))) for a, d in degrees.items()}
    common = prod(scales.values())
    least: int | None = None
    for corner in cartesian(*(range(degree + 1) for degree in degrees.values())):
        at = dict(zip(degrees, corner, strict=True))
        total = 0
        for coefficient, mono in unit:
            powers = dict(mono)
            for atom, scale in scales.items():
                k = powers.get(atom, 0)
                coefficient *= comb(at[atom], k) * scale // comb(degrees[atom], k)
                if not coefficient:
                    break
            total += coefficient
        least = total if least is None else min(least, total)
    assert least is not None
    return -(-least // common)  # values are integers, so the bound rounds up


def tighter(
    choose: Callable[[int, int], int], left: int | None, right: int | None
) -> int | None:
    if left is None or right is None:
        return right if left is None else left
    return choose(left, right)


def negated(bound: int | None) -> int | None:
    return None if bound is None else -bound


def quotient_interval(num: Interval, den: Interval) -> Interval:
    """num // den for den >= 1: far from zero with the least den, else the greatest."""
    least, greatest = max(den[0] or 1, 1), den[1]

    def towards_zero(end: int) -> int:
        if greatest is None or greatest < 1:
            return 0 if end >= 0 else -1
        return end // greatest

    low, high = num
    if low is not None:
        low = low // least if low < 0 else towards_zero(low)
    if high is not None:
        high = high // least if high >= 0 else towards_zero(high)
    return low, high


def remainder_interval(num: Interval, den: Interval) -> Interval:
    high = None if den[1] is None else max(den[1] - 1, 0)
    if num[0] is None or num[0] < 0:
        return 0, high
    # x % k is at most x for x >= 0, and is x below the least den.
    inside = num[1] is not None and num[1] < max(den[0] or 1, 1)
    return num[0] if inside else 0, tighter(min, high, num[1])
