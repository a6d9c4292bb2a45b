"""Which integers of a loop function are known once loops are unrolled.

    for u = 0 to 4 unroll { let first = index(8*u)   for j = first to 30 vector .. }

The variable of an unrolled loop is a constant in each copy of its body, and so is that
of a loop which runs once. Values computed from such variables alone are known too: the
vector loop has 30, 22, 14 and 6 iterations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, product

from pliant.ir.loops import For, Index, Kind, Let
from pliant.sym import Expr

MOST_TURNS = 4096  # that are looked at


@dataclass(frozen=True, slots=True)
class KnownSizes:
    """The known names at a statement."""

    turns: Mapping[str, range] = field(default_factory=dict)  # of unrolled loops
    lets: Mapping[str, Expr] = field(default_factory=dict)  # in terms of those

    def has(self, dim: Expr) -> bool:
        """Whether the code generator has a number for it: all of its names are known.

        That an unknown name would cancel, as in `u % 1`, is not looked for here either.
        """
        return all(map(self._names, dim.symbols()))

    def most_trips(self, loop: For) -> int | None:
        """The most iterations that a loop has in any turn, if its bounds are known."""
        if loop.begin.is_const and loop.end.is_const:
            return len(range(loop.begin.value, loop.end.value, loop.step))
        if not (self.has(loop.begin) and self.has(loop.end)):
            return None
        found = list(islice(self._trips(loop), MOST_TURNS + 1))
        return None if len(found) > MOST_TURNS else max(found, default=0)

    def _trips(self, loop: For) -> Iterator[int]:
        """The iterations of a loop with known bounds, turn by turn."""
        begin, end = (dim.substitute(self.lets) for dim in (loop.begin, loop.end))
        names = sorted({*begin.symbols(), *end.symbols()})
        for turn in product(*(self.turns[name] for name in names)):
            env = dict(zip(names, turn, strict=True))
            yield len(range(begin.evaluate(env), end.evaluate(env), loop.step))

    def inside(self, loop: For) -> KnownSizes:
        """In the body of a loop."""
        trips = self.most_trips(loop)
        once = trips is not None and trips <= 1
        static = loop.begin.is_const and loop.end.is_const
        copied = loop.kind is Kind.UNROLL and static
        if not once and not copied and not self._names(loop.var):
            return self
        turns, lets = self._without(loop.var)
        if once:
            lets[loop.var] = loop.begin.substitute(self.lets)
        elif copied:
            turns[loop.var] = range(loop.begin.value, loop.end.value, loop.step)
        return KnownSizes(turns, lets)

    def behind(self, let: Let) -> KnownSizes:
        """In the rest of the block of a let."""
        known = isinstance(let.value, Index) and self.has(let.value.dim)
        if not known and not self._names(let.name):
            return self
        turns, lets = self._without(let.name)
        if isinstance(let.value, Index) and known:
            lets[let.name] = let.value.dim.substitute(self.lets)
        return KnownSizes(turns, lets)

    def _names(self, name: str) -> bool:
        return name in self.turns or name in self.lets

    def _without(self, name: str) -> tuple[dict[str, range], dict[str, Expr]]:
        turns = {n: numbers for n, numbers in self.turns.items() if n != name}
        return turns, {n: dim for n, dim in self.lets.items() if n != name}
