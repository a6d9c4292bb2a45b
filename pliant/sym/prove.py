"""What is known about symbols, and sound proofs from it.

`Facts.prove` answers True or False only if that holds for every assignment that
satisfies the facts, and None otherwise; None is an ordinary answer. A condition is
reduced to the sign of a polynomial, the difference of its sides:

    equalities   solved for a symbol (n == 16*p) or kept as a rewrite (a*b -> c*d)
    multiples    16 divides n: n is 16*q for a fresh q, inside proofs only
    the rest     intervals of symbols, and expressions known to be nonnegative

`bounding.py` bounds a polynomial over intervals; `search.py` adds case splits and
the nonnegative expressions. Contradictory facts raise ValueError if noticed.

Equal facts, stated in the same order, are one object as long as someone holds it, so
that one pass can reuse the memoized proofs of another.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from math import gcd
from typing import Any, Literal, TypeAlias, TypeVar
from weakref import WeakValueDictionary

from pliant.sym.bounding import (
    Interval,
    lower_bound,
    negated,
    quotient_interval,
    remainder_interval,
    tighter,
)
from pliant.sym.cond import Cond, divides, eq, ge, gt, le, lt, ne
from pliant.sym.equations import (
    is_comparison,
    is_polynomial,
    line_of,
    linear_terms,
    primitive,
    rewrites_outside,
    solution_of,
)
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
from pliant.sym.search import Search, tightened, without_quotients

__all__ = ["Cond", "Facts", "divides", "eq", "ge", "gt", "le", "lt", "ne"]

T = TypeVar("T")
Order: TypeAlias = Literal["lt", "le", "eq", "ge", "gt"]
# A condition, or a symbol's range: its name and ends.
_Statement: TypeAlias = Cond | tuple[str, int | None, int | None]
_DEFAULT: Interval = (0, None)
_PROPAGATION_ROUNDS = 3


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


class Facts:
    """Immutable knowledge about symbols; each `with_` returns a larger one.

    A symbol is at least 0 until `with_range` states another range, which must come
    before other facts about that symbol; later ranges only narrow.
    """

    __slots__ = (
        "__weakref__",
        "_before",
        "_divisors",
        "_equal",
        "_memo",
        "_multiples",
        "_nonneg",
        "_ranges",
        "_rules",
        "_solved",
        "_statements",
        "_unequal",
        "stated",
    )

    def __init__(self) -> None:
        self.stated: tuple[Cond, ...] = ()  # as given, for guards
        self._statements: tuple[_Statement, ...] = ()  # all, in order
        self._before: Facts | None = None  # the last one, kept to be found again
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

    def __repr__(self) -> str:
        return f"Facts({', '.join(map(str, self.stated))})"

    # --- building ---------------------------------------------------------------

    def with_range(self, name: str, lo: int | None, hi: int | None) -> Facts:
        """lo <= name <= hi; None leaves that side open."""
        return self._shared((name, lo, hi))

    def with_eq(self, a: DimLike, b: DimLike) -> Facts:
        return self.assume(eq(a, b))

    def with_divides(self, k: DimLike, e: DimLike) -> Facts:
        return self.assume(divides(k, e))

    def assume(self, cond: Cond) -> Facts:
        return self._shared(cond)

    def _shared(self, statement: _Statement) -> Facts:
        """These facts and one more statement; one object while someone holds it."""
        key = (*self._statements, statement)
        found = _SHARED.get(key)
        if found is None:
            new = self._extended(statement)
            new._statements, new._before = key, self
            found = _SHARED.setdefault(key, new)
        return found

    def _extended(self, statement: _Statement) -> Facts:
        new = Facts()
        new._ranges = dict(self._ranges)
        new._solved = self._solved
        new._rules, new._equal = self._rules, self._equal
        new._nonneg, new._unequal = self._nonneg, self._unequal
        new._multiples, new._divisors = self._multiples, self._divisors
        if isinstance(statement, Cond):
            new.stated = (*self.stated, statement)
            new._add(statement)
        else:
            name, lo, hi = statement
            low = [le(lo, sym(name))] if lo is not None else []
            high = [le(sym(name), hi)] if hi is not None else []
            new.stated = (*self.stated, *low, *high)
            if name not in new._ranges and name not in new._solved:
                new._ranges[name] = (None, None)
            new._narrow(sym(name), lo, hi)
        return new

    def _add(self, cond: Cond) -> None:
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
        lead, mono = terms[0]
        if abs(lead) == 1 and rewrites_outside(mono, expr):
            image = (Expr._of(((lead, mono),)) - expr) * lead
            self._rules += ((mono, image),)
            self._restate()
        else:
            self._equal += (expr,)
        self.forget()

    def _solve(self, name: str, image: Expr) -> None:
        lo, hi = self._ranges.pop(name, _DEFAULT)
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

    # --- asking -----------------------------------------------------------------

    def _range(self, name: str) -> Interval:
        known = self._ranges.get(name)
        if known is None and self._memo.parts is not None:
            known = self._memo.parts.ranges.get(name)
        return _DEFAULT if known is None else known

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
                lo, hi = ranges.get(name) or self._ranges.get(name, _DEFAULT)
                part = f"{name} / {step}"
                ranges[part] = (
                    None if lo is None else -((first - lo) // step),
                    None if hi is None else (hi - first) // step,
                )
                image = {name: step * sym(part) + first}
                images = {n: e.substitute(image) for n, e in images.items()} | image
            self._memo.parts = _Parts(images, ranges)
        return self._memo.parts

    def known_nonneg(self) -> tuple[Expr, ...]:
        """The stored inequalities and equalities, in the form proofs use."""
        if self._memo.known is None:
            both = (expr for pair in self._equal for expr in (pair, -pair))
            forms = (self.in_multiples(expr) for expr in (*self._nonneg, *both))
            self._memo.known = tuple(tightened(without_quotients(e)[0]) for e in forms)
        return self._memo.known

    def _stated_forms(self) -> tuple[frozenset[Expr], frozenset[Expr]]:
        """What is stated to be >= 0 and == 0, as questions about it now read."""
        if self._memo.forms is None:
            nonneg = (tightened(self.canonical(e)) for e in self._nonneg)
            zero = [self.canonical(e) for e in self._equal]
            parts = [primitive(e) for e in zero if not e.is_const]
            both = (*parts, *(-part for part in parts))
            self._memo.forms = frozenset(nonneg), frozenset(both)
        return self._memo.forms

    def samples(self) -> Sampler:
        if self._memo.sampler is None:
            conds = [le(0, expr) for expr in self._nonneg]
            conds += [eq(0, expr) for expr in self._equal]
            conds += [ne(0, expr) for expr in self._unequal]
            conds += [eq(Expr._of(((1, m),)), image) for m, image in self._rules]
            conds += [divides(k, expr) for k, expr in self._multiples]
            images = self._in_parts().images
            self._memo.sampler = Sampler(
                tuple(cond.substitute(images) for cond in conds), self._range
            )
        return self._memo.sampler

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

    def prove(self, cond: Cond) -> bool | None:
        """True or False if certain for every assignment of the facts, else None."""
        try:
            return self._memo.proved[cond]
        except KeyError:
            pass
        answer = self._decide(cond)
        self._memo.proved[cond] = answer
        return answer

    def _decide(self, cond: Cond) -> bool | None:
        if cond.kind == "divides":
            return self._decide_divides(cond)
        difference = self.canonical(cond.rhs - cond.lhs)
        match cond.kind:
            case "le" | "lt":
                strict = cond.kind == "lt"
                answer = self._sign(difference - strict)
                return self._decide_anyway(cond) if answer is None else answer
            case "eq":
                return self._is_zero(difference)
            case _:
                zero = self._is_zero(difference)
                return None if zero is None else not zero

    def _decide_anyway(self, cond: Cond) -> bool | None:
        """Whether it is so for all sizes, whatever else is known of them.

        min(2*k, n) <= n holds as it stands, and 2 % n <= n. Where min(2*k, n) is known
        to be 8, the search may get lost in what is known of 8.
        """
        parts = (*cond.lhs.atoms(), *cond.rhs.atoms())
        if not self._statements or not any(map(is_comparison, parts)):
            return None
        least = (self.bounds(sym(name))[0] for name in cond.symbols())
        if any(low is None or low < 0 for low in least):
            return None
        return _NOTHING_KNOWN.prove(cond)

    def _sign(self, expr: Expr) -> bool | None:
        """Whether expr >= 0; memoized by the strongest form of expr."""
        expr = tightened(expr)
        signs = self._memo.signs
        if expr not in signs:
            signs[expr] = self._decided_sign(expr)
        return signs[expr]

    def _decided_sign(self, expr: Expr) -> bool | None:
        if expr.is_const:
            return expr.value >= 0
        if self._quick(expr):
            return True
        if self._quick(-expr - 1):
            return False
        if expr in self._stated_forms()[0]:
            return True
        form = self.in_multiples(expr)
        flat, _ = without_quotients(form)
        if flat is not expr:
            if self._quick(flat):
                return True
            if self._quick(-flat - 1):
                return False
        maybe_negative, maybe_nonneg = self.samples().signs(form)
        if not maybe_negative and Search(self).nonneg(form):
            return True
        if not maybe_nonneg and Search(self).nonneg(-form - 1):
            return False
        return None

    def _quick(self, expr: Expr) -> bool:
        low = lower_bound(expr.terms, self.box)
        return low is not None and low >= 0

    def _is_zero(self, expr: Expr) -> bool | None:
        if expr.is_const:
            return expr.value == 0
        part = primitive(expr)
        if part in self._unequal:
            return False
        if part in self._stated_forms()[1]:
            return True
        divisor = gcd(*(c for c, mono in expr.terms if mono))
        if expr.constant % divisor:
            return False
        form = self.in_multiples(expr)
        flat, _ = without_quotients(form)
        if flat is ZERO:
            return True
        divisor = gcd(*(c for c, mono in form.terms if mono))
        if divisor and form.constant % divisor:
            return False
        signs = self.samples().values(form)
        if any(signs) and 0 in signs:
            return None
        if not any(signs):
            search = Search(self)
            if search.nonneg(form) and search.nonneg(-form):
                return True
        if 0 not in signs:
            if min(signs, default=1) > 0 and Search(self).nonneg(form - 1):
                return False
            if max(signs, default=-1) < 0 and Search(self).nonneg(-form - 1):
                return False
        return None

    def _decide_divides(self, cond: Cond) -> bool | None:
        divisor, expr = self.canonical(cond.lhs), self.canonical(cond.rhs)
        if divisor.is_const:
            if divisor.value == 0:
                return self.prove(eq(expr, 0))
            answer = self._divides(abs(divisor.value), expr)
            if answer is not None:
                return answer
            low, high = self.bounds(expr % divisor)
            if low is None or low <= 0:
                return True if low == high == 0 else None
            return False
        known = expr is ZERO or expr % divisor is ZERO
        return True if known or self._known_multiple(divisor, expr) else None

    def _known_multiple(self, divisor: Expr, expr: Expr) -> bool:
        """Whether expr is a multiple of something divisor is stated to divide."""
        return any(
            known is divisor and expr % base is ZERO for known, base in self._divisors
        )

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

    def compare(self, a: DimLike, b: DimLike) -> Order | None:
        """The strongest certain order of a and b."""
        left, right = as_expr(a), as_expr(b)
        if self.prove(eq(left, right)):
            return "eq"
        if self.prove(le(left, right)):
            return "lt" if self.prove(lt(left, right)) else "le"
        if self.prove(le(right, left)):
            return "gt" if self.prove(lt(right, left)) else "ge"
        return None


_SHARED: WeakValueDictionary[tuple[_Statement, ...], Facts] = WeakValueDictionary()


def _require(consistent: bool, facts: Facts) -> None:
    if not consistent:
        raise ValueError(f"contradictory facts: {', '.join(map(str, facts.stated))}")


_NOTHING_KNOWN = Facts()
