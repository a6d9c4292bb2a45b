"""Adding a fact to what is known.

A condition becomes the strongest stored form it fits: an equality solved for a symbol,
a rewrite of products, an interval of a symbol, or an expression that is nonnegative,
unequal to zero, or a multiple. A new equality brings every other fact to its canonical
form again. Contradictory facts raise ValueError if noticed.
"""

from __future__ import annotations

from math import gcd

from pliant.sym.bounding import tighter
from pliant.sym.cond import Cond
from pliant.sym.equations import (
    line_of,
    linear_terms,
    primitive,
    rewrites_outside,
    solution_of,
)
from pliant.sym.expr import ZERO, CeilDiv, Expr, FloorDiv, Symbol, const, lift, sym
from pliant.sym.knowledge import DEFAULT_RANGE, Knowledge
from pliant.sym.search import tightened

_PROPAGATION_ROUNDS = 3


class GrowingKnowledge(Knowledge):
    """Knowledge that facts are added to, one after the other."""

    __slots__ = ()

    def add_range(self, name: str, lo: int | None, hi: int | None) -> None:
        """lo <= name <= hi; a symbol's first range replaces the default."""
        if name not in self._ranges and name not in self._solved:
            self._ranges[name] = (None, None)
        self._narrow(sym(name), lo, hi)

    def add(self, cond: Cond) -> None:
        match cond.kind:
            case "eq":
                self._add_equal(cond.lhs - cond.rhs)
            case "ne":
                self._add_unequal(cond.lhs - cond.rhs)
            case "le":
                self._add_nonneg(cond.rhs - cond.lhs)
            case "lt":
                self._add_nonneg(cond.rhs - cond.lhs - 1)
            case "divides":
                self._add_divides(cond.lhs, cond.rhs)
        self._propagate()

    def _narrow(self, expr: Expr, lo: int | None, hi: int | None) -> None:
        if lo is not None:
            self._add_nonneg(expr - lo)
        if hi is not None:
            self._add_nonneg(hi - expr)
        self._propagate()

    def _add_nonneg(self, expr: Expr) -> None:
        expr = tightened(self.canonical(expr))
        if expr.is_const:
            _require(expr.value >= 0, self)
        elif len(expr.symbols()) == 1 and (line := line_of(expr)) is not None:
            slope, offset = line
            end = -(offset // slope) if slope > 0 else offset // -slope
            self._clip(expr.symbols()[0], *((end, None) if slope > 0 else (None, end)))
        elif expr not in self._nonneg:
            self._nonneg += (expr,)
            self.forget()
            self._add_numerator(expr)

    def _add_numerator(self, expr: Expr) -> None:
        """Of a quotient beside a number that is >= 0: what it says of the numerator.

        1 <= ceildiv(n, 8) is 1 <= n, and n // 8 <= 4 is n <= 39.
        """
        match expr.terms:
            case ((slope, ((FloorDiv() | CeilDiv() as atom, 1),)), *rest):
                pass
            case _:
                return
        if not atom.den.is_const or any(mono for _, mono in rest):
            return
        den, up = atom.den.value, isinstance(atom, CeilDiv)
        if slope > 0:
            low = -(expr.constant // slope)
            self._add_nonneg(atom.num - ((low - 1) * den + 1 if up else low * den))
        else:
            high = expr.constant // -slope
            self._add_nonneg((high * den if up else high * den + den - 1) - atom.num)

    def _clip(self, name: str, lo: int | None, hi: int | None) -> bool:
        """Narrow a symbol's interval; whether that changed anything."""
        old = self._range(name)
        new = (tighter(max, old[0], lo), tighter(min, old[1], hi))
        if new == old:
            if name not in self._ranges:
                self._ranges[name] = new
            return False
        self._ranges[name] = new
        self.forget()
        if new[0] is not None and new[1] is not None:
            _require(new[0] <= new[1], self)
            if new[0] == new[1]:
                self._solve(name, const(new[0]))
        return True

    def _add_equal(self, expr: Expr) -> None:
        expr = self.canonical(expr)
        divisor = gcd(*(c for c, mono in expr.terms if mono))
        if divisor == 0:
            _require(expr.value == 0, self)
            return
        _require(expr.constant % divisor == 0, self)
        terms = tuple((c // divisor, mono) for c, mono in expr.terms)
        expr = Expr._of(terms)
        solution = solution_of(expr)
        if solution is not None:
            self._solve(*solution)
            return
        root = self._root(expr)
        if root is not None:
            self._add_equal(root)
            return
        lead, mono = terms[0]
        if abs(lead) == 1 and rewrites_outside(mono, expr):
            image = (Expr._of(((lead, mono),)) - expr) * lead
            self._rules += ((mono, image),)
            self._restate()
        else:
            self._equal += (expr,)
        self.forget()
        self._add_numerator(expr)
        self._add_numerator(-expr)

    def _root(self, expr: Expr) -> Expr | None:
        """a - r where a power of one atom that is >= 0 is a number: a**2 == r*r."""
        match expr.terms:
            case ((1, ((atom, power),)), (_, ())) if power > 1:
                pass
            case _:
                return None
        low, _ = self.bounds(lift(atom))
        if low is None or low < 0:
            return None
        wanted = -expr.constant
        _require(wanted >= 0, self)
        near: int = round(wanted ** (1 / power))
        roots: list[int] = [r for r in (near - 1, near, near + 1) if r**power == wanted]
        _require(bool(roots), self)
        return lift(atom) - roots[0]

    def _solve(self, name: str, image: Expr) -> None:
        lo, hi = self._ranges.pop(name, DEFAULT_RANGE)
        step = {name: image}
        self._solved = {
            **{known: e.substitute(step) for known, e in self._solved.items()},
            name: image,
        }
        self._restate()
        self._narrow(image, lo, hi)

    def _restate(self) -> None:
        """Bring every stored fact to the canonical form of the new equalities."""
        rules, equal, self._equal = self._rules, self._equal, ()
        nonneg, self._nonneg = self._nonneg, ()
        unequal, self._unequal = self._unequal, ()
        multiples, self._multiples = self._multiples, ()
        divisors, self._divisors = self._divisors, ()
        self.forget()
        if any(set(image.symbols()) & self._solved.keys() for _, image in rules) or any(
            isinstance(atom, Symbol) and atom.name in self._solved
            for mono, _ in rules
            for atom, _ in mono
        ):
            self._rules = ()
            for mono, image in rules:
                self._add_equal(Expr._of(((1, mono),)) - image)
        for expr in equal:
            self._add_equal(expr)
        for expr in nonneg:
            self._add_nonneg(expr)
        for expr in unequal:
            self._add_unequal(expr)
        for divisor, expr in multiples:
            self._add_divides(const(divisor), expr)
        for by, expr in divisors:
            self._add_divides(by, expr)

    def _add_unequal(self, expr: Expr) -> None:
        expr = self.canonical(expr)
        _require(expr is not ZERO, self)
        if expr.is_const:
            return
        lo, hi = self.bounds(expr)
        if lo == 0:
            self._add_nonneg(expr - 1)
        elif hi == 0:
            self._add_nonneg(-expr - 1)
        expr = primitive(expr)
        if expr not in self._unequal:
            self._unequal += (expr, -expr)
        self.forget()

    def _add_divides(self, divisor: Expr, expr: Expr) -> None:
        expr = self.canonical(expr)
        divisor = self.canonical(divisor)
        if not divisor.is_const and expr.terms:
            self._divisors += ((divisor, expr),)
            self.forget()
        if not divisor.is_const or abs(divisor.value) < 2:
            return
        k = abs(divisor.value)
        shared = gcd(k, *(c for c, _ in expr.terms))
        k, expr = k // shared, Expr._of(tuple((c // shared, m) for c, m in expr.terms))
        if k > 1 and (k, expr) not in self._multiples:
            self._multiples += ((k, expr),)
        self.forget()

    def _propagate(self) -> None:
        """Carry intervals through inequalities: n <= m, m <= 8 gives n <= 8."""
        for _ in range(_PROPAGATION_ROUNDS):
            changed = False
            for expr in self._nonneg:
                for coefficient, name, rest in linear_terms(expr):
                    if name in self._solved:
                        continue
                    high = self.bounds(rest)[1]
                    if high is None:
                        continue
                    if coefficient > 0:
                        changed |= self._clip(name, -(high // coefficient), None)
                    else:
                        changed |= self._clip(name, None, high // -coefficient)
            if not changed:
                return


def _require(consistent: bool, known: Knowledge) -> None:
    if not consistent:
        raise ValueError(f"contradictory facts: {', '.join(map(str, known.stated))}")
