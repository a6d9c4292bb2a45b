"""Sound proofs from what is known about symbols.

`Facts.prove` answers True or False only if that holds for every assignment that
satisfies the facts, and None otherwise; None is an ordinary answer. A condition is
reduced to the sign of a polynomial, the difference of its sides. Then, cheapest first:

    knowledge.py  canonical forms; `bounding.py` bounds a polynomial over intervals
    samples.py    an assignment that satisfies the facts ends a hopeless proof
    search.py     case splits, and sums of expressions known to be nonnegative

`stating.py` adds facts. Contradictory facts raise ValueError if noticed.

Equal facts, stated in the same order, are one object as long as someone holds it, so
that one pass can reuse the memoized proofs of another.
"""

from __future__ import annotations

from math import gcd
from typing import Literal, TypeAlias
from weakref import WeakValueDictionary

from pliant.sym.cond import Cond, divides, eq, ge, gt, le, lt, ne
from pliant.sym.equations import is_comparison, primitive
from pliant.sym.expr import ZERO, DimLike, Expr, as_expr, sym
from pliant.sym.nodes import MEMO
from pliant.sym.samples import Sampler
from pliant.sym.search import Search, tightened, without_quotients
from pliant.sym.stating import GrowingKnowledge

__all__ = ["Cond", "Facts", "divides", "eq", "ge", "gt", "le", "lt", "ne"]

Order: TypeAlias = Literal["lt", "le", "eq", "ge", "gt"]
# A condition, or a symbol's range: its name and ends.
_Statement: TypeAlias = Cond | tuple[str, int | None, int | None]


class Facts(GrowingKnowledge):
    """Immutable knowledge about symbols; each `with_` returns a larger one.

    A symbol is at least 0 until `with_range` states another range, which must come
    before other facts about that symbol; later ranges only narrow.
    """

    __slots__ = ("_before", "_statements")

    def __init__(self) -> None:
        super().__init__()
        self._statements: tuple[_Statement, ...] = ()  # all, in order
        self._before: Facts | None = None  # the last one, kept to be found again

    def __repr__(self) -> str:
        return f"Facts({', '.join(map(str, self.stated))})"

    # --- building ---------------------------------------------------------------

    def with_range(self, name: str, lo: int | None, hi: int | None) -> Facts:
        """lo <= name <= hi; None leaves that side open."""
        return self._shared((name, lo, hi))

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
            new.add(statement)
        else:
            name, lo, hi = statement
            low = [le(lo, sym(name))] if lo is not None else []
            high = [le(sym(name), hi)] if hi is not None else []
            new.stated = (*self.stated, *low, *high)
            new.add_range(name, lo, hi)
        return new

    # --- asking -----------------------------------------------------------------

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
                return self._decide_without_facts(cond) if answer is None else answer
            case "eq":
                return self._is_zero(difference)
            case _:
                zero = self._is_zero(difference)
                return None if zero is None else not zero

    def _decide_without_facts(self, cond: Cond) -> bool | None:
        """The answer for all sizes, which holds for those of the facts too.

        min(2*k, n) <= n holds for all sizes, as does 2 % n <= n. Where the facts say
        that min(2*k, n) is 8, the search may not find 8 <= n in its budget. Nothing
        known still means sizes: each symbol must be at least 0 here as well.
        """
        parts = (*cond.lhs.atoms(), *cond.rhs.atoms())
        if not self._statements or not any(map(is_comparison, parts)):
            return None
        least = (self.bounds(sym(name))[0] for name in cond.symbols())
        if any(low is None or low < 0 for low in least):
            return None
        if len(_NOTHING_KNOWN._memo.proved) > MEMO:
            _NOTHING_KNOWN.forget()  # it outlives every model
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

    # --- what a search starts from ------------------------------------------------

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


_SHARED: WeakValueDictionary[tuple[_Statement, ...], Facts] = WeakValueDictionary()
_NOTHING_KNOWN = Facts()
