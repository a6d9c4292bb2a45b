"""Finds assignments of symbols that satisfy conditions.

`SampleSpace.points` tries the sizes that it is given; `points.py` gives it realistic
ones. `Sampler` uses small ones, to drop hopeless proofs early. A sample never proves
anything, but a negative value shows that expr >= 0 has no proof. So most conditions
that cannot be proved end here, after a few evaluations.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import product

from pliant.sym.bounding import Interval
from pliant.sym.cond import Cond
from pliant.sym.expr import Expr, sym

Point = dict[str, int]
_Forms = tuple[tuple[str, Expr], ...]

# Offset of the j-th symbol from its least value (or below its greatest).
_PATTERNS: tuple[Callable[[int], int], ...] = (
    lambda j: 0,
    lambda j: 1,
    lambda j: 2 + 3 * j,
    lambda j: 31 // (j + 1),
    lambda j: 1009 + 7 * j,
    lambda j: 0 if j % 2 else 97,
    lambda j: 97 if j % 2 else 0,
)
_CORNERS = (1, 4099)  # offsets of each symbol, in all combinations
_MOST_CORNERS = 5  # symbols that have both
_MOST_SCANNED = 4100  # values of one symbol, where its conditions leave few
_REMEMBERED = 256  # symbols alone, with the sizes that they may have
_NEAREST = 64  # how far above a wanted size an allowed one is looked for


class SampleSpace:
    """Symbols as expressions (`forms`) over those that are free to choose."""

    def __init__(
        self,
        forms: Mapping[str, Expr],
        conditions: Sequence[Cond],
        interval: Callable[[str], Interval],
    ) -> None:
        self.forms, self.conditions, self.interval = forms, conditions, interval
        self.free = sorted({s for form in forms.values() for s in form.symbols()})
        self._values: dict[str, list[int]] = {}  # of some free symbols, all allowed
        self._alone: dict[str, _Alone] = {}

    def points(self, wanted: Iterable[Callable[[str], int]]) -> Iterator[Point]:
        """Near the sizes that are wanted; those that the conditions allow."""
        for choose in wanted:
            base = {name: self._inside(name, choose(name)) for name in self.free}
            point = _evaluated(self.forms, base)
            if point is not None and _hold(self.conditions, point):
                yield point

    def narrow(self) -> None:
        """Finds the small values that the conditions of one symbol alone allow."""
        for name in self.free:
            alone = self._of_one(name)
            if alone.conditions:
                allowed = alone.small_sizes(self.interval(name))
                if allowed:
                    self._values[name] = allowed

    def allowed(self, name: str, size: int) -> int:
        """The least size from this one on that its own conditions allow, if near."""
        return self._of_one(name).next_size(size)

    def _of_one(self, name: str) -> _Alone:
        """The forms, and the conditions, over one free symbol alone."""
        if name not in self._alone:
            pairs = self.forms.items()
            forms = tuple((k, f) for k, f in pairs if f.symbols() == (name,))
            known = {k for k, _ in forms}
            conds = tuple(c for c in self.conditions if known.issuperset(c.symbols()))
            self._alone[name] = _alone(name, forms, conds)
        return self._alone[name]

    def _inside(self, name: str, size: int) -> int:
        size = _limited(size, self.interval(name))
        values = self._values.get(name)
        if values is None:
            return size
        at = bisect_left(values, size)
        return min(values[max(at - 1, 0) : at + 1], key=lambda v: abs(v - size))


def _limited(size: int, interval: Interval) -> int:
    low, high = interval
    size = size if low is None else max(size, low)
    return size if high is None else min(size, high)


class _Alone:
    """One free symbol, and which of its sizes the conditions on it alone allow."""

    def __init__(self, name: str, forms: _Forms, conditions: tuple[Cond, ...]) -> None:
        self.name, self.conditions = name, conditions
        self._forms = dict(forms)
        self._next: dict[int, int] = {}
        self._small: dict[Interval, list[int]] = {}

    def next_size(self, size: int) -> int:
        """The least size from this one on that is allowed, if near."""
        if not self.conditions:
            return size
        if size not in self._next:
            sizes = range(size, size + _NEAREST)
            self._next[size] = next(filter(self._allows, sizes), size)
        return self._next[size]

    def small_sizes(self, interval: Interval) -> list[int]:
        """The small sizes that are allowed, sorted."""
        if interval not in self._small:
            tried = {_limited(size, interval) for size in range(_MOST_SCANNED)}
            self._small[interval] = list(filter(self._allows, sorted(tried)))
        return self._small[interval]

    def _allows(self, size: int) -> bool:
        point = _evaluated(self._forms, {self.name: size})
        return point is not None and _hold(self.conditions, point)


# Proofs from different facts often share what restricts one symbol.
_alone = lru_cache(maxsize=_REMEMBERED)(_Alone)


def _hold(conds: Iterable[Cond], point: Point) -> bool:
    try:
        return all(cond.holds(point) for cond in conds)
    except ZeroDivisionError:
        return False  # outside the precondition of a quotient


def _evaluated(forms: Mapping[str, Expr], base: Mapping[str, int]) -> Point | None:
    try:
        return {name: form.evaluate(base) for name, form in forms.items()}
    except ZeroDivisionError:
        return None


class Sampler:
    """Values of expressions at small assignments that satisfy `conditions`."""

    def __init__(
        self, conditions: tuple[Cond, ...], interval: Callable[[str], Interval]
    ) -> None:
        self._conditions = [(cond, set(cond.symbols())) for cond in conditions]
        self._interval = interval
        self._known: dict[tuple[str, ...], list[Point]] = {}

    def values(self, expr: Expr) -> list[int]:
        return list(self._evaluated(expr))

    def signs(self, expr: Expr) -> tuple[bool, bool]:
        """Whether a negative value was seen, and whether another one was."""
        negative = nonneg = False
        for value in self._evaluated(expr):
            negative |= value < 0
            nonneg |= value >= 0
            if negative and nonneg:
                break
        return negative, nonneg

    def _evaluated(self, expr: Expr) -> Iterator[int]:
        symbols = expr.symbols()
        if symbols not in self._known:
            self._known[symbols] = self._points(set(symbols))
        for point in self._known[symbols]:
            try:
                yield expr.evaluate(point)
            except ZeroDivisionError:
                continue  # outside the precondition of a quotient

    def _points(self, symbols: set[str]) -> list[Point]:
        # A condition that shares a symbol restricts the others as well.
        conditions: list[Cond] = []
        waiting = self._conditions
        grown = True
        while grown:
            joined = [cond for cond, names in waiting if names & symbols]
            waiting = [pair for pair in waiting if not pair[1] & symbols]
            grown = bool(joined)
            conditions += joined
            symbols = symbols.union(*(cond.symbols() for cond in joined))
        space = SampleSpace(
            {name: sym(name) for name in symbols}, conditions, self._interval
        )
        offsets = [
            {name: pattern(j) for j, name in enumerate(space.free)}
            for pattern in _PATTERNS
        ]
        varied = space.free[:_MOST_CORNERS]
        corners = product(_CORNERS, repeat=len(varied))
        offsets += (dict(zip(varied, corner, strict=True)) for corner in corners)
        wanted = [partial(self._near, space, offset) for offset in offsets]
        found = list(space.points(wanted))
        if not found:
            space.narrow()
            found = list(space.points(wanted))
        return list({tuple(point.values()): point for point in found}.values())

    def _near(self, space: SampleSpace, offsets: Mapping[str, int], name: str) -> int:
        offset = offsets.get(name, 0)
        low, high = self._interval(name)
        if low is None:
            size = -offset if high is None else high - offset
        else:
            size = low + offset
        return space.allowed(name, size)
