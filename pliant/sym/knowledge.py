"""What is known about symbols, stored so that proofs can use it directly.

    equalities   solved for a symbol (n == 16*p) or kept as a rewrite (a*b -> c*d)
    multiples    16 divides n: n is 16*q for a fresh q, inside proofs only
    the rest     intervals of symbols, and expressions known to be nonnegative

Two questions are answered from that without any search: the interval of an expression
(`bounds`) and its canonical form, in which equalities are applied and a min, max,
quotient or remainder is replaced where the facts leave one value or one branch.
`stating.py` puts facts in; `prove.py` decides conditions.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from math import gcd
from typing import Any, TypeVar

from pliant.sym.bounding import (
    Interval,
    lower_bound,
    negated,
    quotient_interval,
    remainder_interval,
    tighter,
)
from pliant.sym.cond import Cond
from pliant.sym.equations import is_polynomial, line_of
from pliant.sym.expr import (
    ZERO,
    Atom,
    CeilDiv,
    DimLike,
    Expr,
    FloorDiv,
    Max,
    Min,
    Mod,
    Monomial,
    Symbol,
    as_expr,
    const,
    lift,
    monomial_quotient,
    operands,
    rebuild,
    sym,
)
from pliant.sym.samples import Sampler
from pliant.sym.search import without_quotients

T = TypeVar("T")
DEFAULT_RANGE: Interval = (0, None)


@dataclass(frozen=True, slots=True)
class _Parts:
    """Symbols with known divisors, as images over fresh symbols with ranges."""

    images: dict[str, Expr]
    ranges: dict[str, Interval]


@dataclass(slots=True)
class _ProofMemo:
    """Memoized results of proofs from some facts."""

    bounds: dict[Expr, Interval] = field(default_factory=dict)
    canonical: dict[Expr, Expr] = field(default_factory=dict)
    signs: dict[Expr, bool | None] = field(default_factory=dict)
    proved: dict[Cond, bool | None] = field(default_factory=dict)
    sampler: Sampler | None = None
    known: tuple[Expr, ...] | None = None
    forms: tuple[frozenset[Expr], frozenset[Expr]] | None = None
    parts: _Parts | None = None
    others: dict[tuple[Hashable, type], Any] = field(default_factory=dict)


class Knowledge:
    """The stored facts, and what they say of an expression without a search."""

    __slots__ = (
        "__weakref__",
        "_divisors",
        "_equal",
        "_memo",
        "_multiples",
        "_nonneg",
        "_ranges",
        "_rules",
        "_solved",
        "_unequal",
        "stated",
    )

    def __init__(self) -> None:
        self.stated: tuple[Cond, ...] = ()  # as given, for guards
        self._ranges: dict[str, Interval] = {}
        self._solved: dict[str, Expr] = {}
        self._rules: tuple[tuple[Monomial, Expr], ...] = ()
        self._equal: tuple[Expr, ...] = ()  # == 0, neither solved nor a rule
        self._nonneg: tuple[Expr, ...] = ()
        self._unequal: tuple[Expr, ...] = ()
        self._multiples: tuple[tuple[int, Expr], ...] = ()
        self._divisors: tuple[tuple[Expr, Expr], ...] = ()
        self._memo = _ProofMemo()

    def forget(self) -> None:
        """Drops memoized results; they are computed again when needed."""
        self._memo = _ProofMemo()

    def remembered(self, key: Hashable, make: type[T]) -> T:
        """The same object for a key each time: results that follow from these facts."""
        found: T = self._memo.others.setdefault((key, make), make())
        return found

    # --- intervals ----------------------------------------------------------------

    def _range(self, name: str) -> Interval:
        known = self._ranges.get(name)
        if known is None and self._memo.parts is not None:
            known = self._memo.parts.ranges.get(name)
        return DEFAULT_RANGE if known is None else known

    def bounds(self, e: DimLike) -> Interval:
        """A sound interval of `e`; None is an open side."""
        expr = as_expr(e)
        known = self._memo.bounds.get(expr)
        if known is None:
            form = self.canonical(expr)
            known = (self._lower(form), negated(self._lower(-form)))
            self._memo.bounds[expr] = known
        return known

    def _lower(self, expr: Expr) -> int | None:
        best = lower_bound(expr.terms, self.box)
        scaled, scale = without_quotients(expr)
        if scaled is not expr:
            other = lower_bound(scaled.terms, self.box)
            best = tighter(max, best, None if other is None else -(-other // scale))
        return best

    def box(self, atom: Atom) -> Interval:
        """The interval of one atom, taken by itself."""
        match atom:
            case Symbol(name):
                return self._range(name)
            case FloorDiv(num, den):
                return quotient_interval(self.bounds(num), self.bounds(den))
            case CeilDiv(num, den):
                low, high = self.bounds(-num)
                low, high = quotient_interval((low, high), self.bounds(den))
                return negated(high), negated(low)
            case Mod(num, den):
                return remainder_interval(self.bounds(num), self.bounds(den))
            case Min(args):
                ends = [self.bounds(arg) for arg in args]
                lows = [lo for lo, _ in ends if lo is not None]
                highs = [hi for _, hi in ends if hi is not None]
                low = min(lows) if len(lows) == len(ends) else None
                return low, min(highs, default=None)
            case Max(args):
                ends = [self.bounds(arg) for arg in args]
                lows = [lo for lo, _ in ends if lo is not None]
                highs = [hi for _, hi in ends if hi is not None]
                high = max(highs) if len(highs) == len(ends) else None
                return max(lows, default=None), high
            case _:
                raise TypeError(f"unknown atom {atom!r}")

    # --- canonical forms ----------------------------------------------------------

    def canonical(self, e: DimLike) -> Expr:
        """`e` with equalities applied and atoms reduced under the facts."""
        expr = as_expr(e)
        if expr.is_const:
            return expr
        known = self._memo.canonical.get(expr)
        if known is None:
            known = self._rewritten(expr.map_atoms(self._reduced_atom))
            self._memo.canonical[expr] = known
            self._memo.canonical.setdefault(known, known)
        return known

    def _reduced_atom(self, atom: Atom) -> Expr:
        if isinstance(atom, Symbol):
            return self._solved.get(atom.name, lift(atom))
        args = [self.canonical(arg) for arg in operands(atom)]
        try:
            built = rebuild(atom, args)
        except ZeroDivisionError:
            return lift(atom)  # the facts leave this quotient without a value
        same = built.atom
        if same is not None and type(same) is type(atom):
            return self._reduced_by_range(same)
        return built.map_atoms(
            lambda inner: (
                lift(inner)
                if isinstance(inner, Symbol)
                else self._reduced_by_range(inner)
            )
        )

    def _reduced_by_range(self, atom: Atom) -> Expr:
        match atom:
            case Min(args):
                kept = self._pruned(args, lambda kept, gone: gone - kept)
                return rebuild(atom, kept)
            case Max(args):
                kept = self._pruned(args, lambda kept, gone: kept - gone)
                return rebuild(atom, kept)
            case Mod(num, den):
                low = self.bounds(num)[0]
                if low is not None and low >= 0 and self._surely(den - num - 1):
                    return num
                if (
                    self._divides(den.value, num)
                    if den.is_const
                    else (self._known_multiple(den, num))
                ):
                    return ZERO
        low, high = self.box(atom)
        return const(low) if low is not None and low == high else lift(atom)

    def _pruned(
        self, args: tuple[Expr, ...], margin: Callable[[Expr, Expr], Expr]
    ) -> list[Expr]:
        kept = list(args)
        for arg in args:
            others = [other for other in kept if other is not arg]
            if any(self._surely(margin(other, arg)) for other in others):
                kept = others
        return kept

    def _rewritten(self, expr: Expr) -> Expr:
        """Apply the product rules, a*b -> c*d, until none matches."""
        changed = bool(self._rules)
        while changed:
            changed = False
            for lead, image in self._rules:
                for coefficient, mono in expr.terms:
                    factor = monomial_quotient(mono, lead)
                    if factor is not None:
                        term = Expr._of(((coefficient, mono),))
                        expr = expr - term + image * Expr._of(((coefficient, factor),))
                        changed = True
                        break
        return expr

    def _surely(self, expr: Expr) -> bool:
        """expr >= 0 by intervals and at most one inequality between symbols.

        Canonical forms rest on this alone: a search looks at canonical forms, so
        it must not be started from within one.
        """
        if self._quick(expr):
            return True
        return any(
            self._quick(expr - fact) for fact in self._nonneg if is_polynomial(fact)
        )

    def _quick(self, expr: Expr) -> bool:
        low = lower_bound(expr.terms, self.box)
        return low is not None and low >= 0

    # --- multiples ----------------------------------------------------------------

    def in_multiples(self, expr: Expr) -> Expr:
        """`expr` with n written 16*q where 16 is known to divide n; for proofs."""
        if not self._multiples:
            return expr
        return expr.substitute(self._in_parts().images)

    def _in_parts(self) -> _Parts:
        if self._memo.parts is None:
            ranges: dict[str, Interval] = {}
            images: dict[str, Expr] = {}
            for k, expr in self._multiples:
                expr = expr.substitute(images)
                line = line_of(expr) if len(expr.symbols()) == 1 else None
                if line is None:
                    continue
                # slope*s + offset == 0 modulo k  <=>  s == first modulo step
                slope, offset = line
                shared = gcd(slope, k)
                if shared == 0 or offset % shared:
                    continue
                step = k // shared
                first = -(offset // shared) * pow(slope // shared, -1, step) % step
                name = expr.symbols()[0]
                lo, hi = ranges.get(name) or self._ranges.get(name, DEFAULT_RANGE)
                part = f"{name} / {step}"
                ranges[part] = (
                    None if lo is None else -((first - lo) // step),
                    None if hi is None else (hi - first) // step,
                )
                image = {name: step * sym(part) + first}
                images = {n: e.substitute(image) for n, e in images.items()} | image
            self._memo.parts = _Parts(images, ranges)
        return self._memo.parts

    def _divides(self, k: int, expr: Expr) -> bool | None:
        form = self.in_multiples(expr)
        if all(c % k == 0 for c, _ in form.terms):
            return True
        if all(c % k == 0 for c, mono in form.terms if mono):
            return False
        for base, known in self._multiples:
            known = self.in_multiples(known)
            if not known.terms or base % k:
                continue
            scale, mono = known.terms[0]
            for coefficient, other in form.terms:
                factor = monomial_quotient(other, mono)
                if factor is None or coefficient % scale:
                    continue
                rest = form - known * Expr._of(((coefficient // scale, factor),))
                if all(c % k == 0 for c, _ in rest.terms):
                    return True
        return None

    def _known_multiple(self, divisor: Expr, expr: Expr) -> bool:
        """Whether expr is a multiple of something divisor is stated to divide."""
        return any(
            known is divisor and expr % base is ZERO for known, base in self._divisors
        )
