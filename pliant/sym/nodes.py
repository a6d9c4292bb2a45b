"""Dimension expressions: canonical integer polynomials over atoms.

    expr = sum of coefficient * product(atom ** power)
    atom = Symbol(name)
         | FloorDiv(num, den) | CeilDiv(num, den)      rounding down, up
         | Mod(num, den)                               num - den * (num // den)
         | Min(args) | Max(args)

Expressions and atoms are interned: structurally equal means the same object, so `==`
is `is`, never a proof. The intern tables hold weak references, and the memo tables of
arithmetic are bounded (MEMO). `prove.py` decides everything that
depends on ranges; the canonical form holds for all integers and is free of context.
The one precondition: a denominator is positive (`n // n` is 1, although `n` may be 0
elsewhere).

A quotient has one spelling: a numerator whose constant is one short of a multiple is
rounded up (`(n + 15)//16` is `ceildiv(n, 16)`), every other one is rounded down
(`(4*n + 19)//16` is `n//4 + 1`).

One file, because nodes, constructors and canonical form call each other: a sum may
join a quotient with its remainder, and a quotient divides sums.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from math import gcd
from operator import index
from typing import Any, ClassVar, NoReturn, TypeAlias
from weakref import WeakValueDictionary

Monomial: TypeAlias = "tuple[tuple[Atom, int], ...]"
Term: TypeAlias = "tuple[int, Monomial]"
DimLike: TypeAlias = "Expr | int"

_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
# Results of arithmetic that are remembered: layers of a model ask for the same ones.
MEMO = 1 << 15


class Atom:
    """An indivisible factor of a monomial. Interned; `order` sorts atoms."""

    __slots__ = ("__weakref__", "order")
    order: tuple[int, str]
    _interned: ClassVar[WeakValueDictionary[tuple[Any, ...], Atom]] = (
        WeakValueDictionary()
    )

    def __new__(cls, *args: Any) -> Atom:
        key = (cls, *args)
        found = Atom._interned.get(key)
        # setdefault keeps one winner when two threads build the same atom.
        return found or Atom._interned.setdefault(key, object.__new__(cls))

    def __post_init__(self) -> None:
        if hasattr(self, "order"):  # found, not made
            return
        rank = 0 if isinstance(self, Symbol) else 1
        object.__setattr__(self, "order", (rank, str(self)))

    def evaluate(self, env: Mapping[str, int]) -> int:
        """The value under `env`; KeyError names a missing symbol."""
        raise NotImplementedError

    def __reduce__(self) -> tuple[Any, ...]:
        names = fields(self)  # type: ignore[arg-type]  # a subclass is a dataclass
        return type(self), tuple(getattr(self, field.name) for field in names)


@dataclass(frozen=True, slots=True, eq=False)
class Symbol(Atom):
    """A named size. Nonnegative unless `Facts` states another range."""

    name: str

    def __str__(self) -> str:
        plain = _PLAIN_NAME.fullmatch(self.name)
        return self.name if plain else f"`{self.name}`"

    def evaluate(self, env: Mapping[str, int]) -> int:
        return env[self.name]


@dataclass(frozen=True, slots=True, eq=False)
class FloorDiv(Atom):
    """`num // den`, rounded towards minus infinity; `den` > 0."""

    num: Expr
    den: Expr

    def __str__(self) -> str:
        return f"{_operand(self.num)}//{_operand(self.den)}"

    def evaluate(self, env: Mapping[str, int]) -> int:
        return self.num.evaluate(env) // self.den.evaluate(env)


@dataclass(frozen=True, slots=True, eq=False)
class CeilDiv(Atom):
    """`-(-num // den)`, rounded towards plus infinity; `den` > 0."""

    num: Expr
    den: Expr

    def __str__(self) -> str:
        return f"ceildiv({self.num}, {self.den})"

    def evaluate(self, env: Mapping[str, int]) -> int:
        return -(-self.num.evaluate(env) // self.den.evaluate(env))


@dataclass(frozen=True, slots=True, eq=False)
class Mod(Atom):
    """`num - den * (num // den)`, in 0 .. den - 1; `den` > 0."""

    num: Expr
    den: Expr

    def __str__(self) -> str:
        return f"{_operand(self.num)} % {_operand(self.den)}"

    def evaluate(self, env: Mapping[str, int]) -> int:
        return self.num.evaluate(env) % self.den.evaluate(env)


@dataclass(frozen=True, slots=True, eq=False)
class Min(Atom):
    """The least of two or more arguments."""

    args: tuple[Expr, ...]

    def __str__(self) -> str:
        return f"min({', '.join(map(str, self.args))})"

    def evaluate(self, env: Mapping[str, int]) -> int:
        return min(arg.evaluate(env) for arg in self.args)


@dataclass(frozen=True, slots=True, eq=False)
class Max(Atom):
    """The greatest of two or more arguments."""

    args: tuple[Expr, ...]

    def __str__(self) -> str:
        return f"max({', '.join(map(str, self.args))})"

    def evaluate(self, env: Mapping[str, int]) -> int:
        return max(arg.evaluate(env) for arg in self.args)


class Expr:
    """An immutable, interned polynomial; build one by `sym`, `const` and operators.

    `terms` holds (coefficient, ((atom, power), ...)) in graded lexicographic order,
    the constant last with an empty monomial; zero has no terms.
    """

    __slots__ = ("__weakref__", "_hash", "_symbols", "_text", "is_const", "terms")
    terms: tuple[Term, ...]
    is_const: bool
    _hash: int
    _symbols: tuple[str, ...] | None
    _text: str | None
    _interned: ClassVar[WeakValueDictionary[tuple[Term, ...], Expr]] = (
        WeakValueDictionary()
    )

    @staticmethod
    def _of(terms: tuple[Term, ...]) -> Expr:
        found = Expr._interned.get(terms)
        if found is not None:
            return found
        expr = object.__new__(Expr)
        store = object.__setattr__
        is_const = not terms or (len(terms) == 1 and not terms[0][1])
        store(expr, "terms", terms)
        store(expr, "is_const", is_const)
        # A constant equals its int, so it must hash like it.
        value = terms[0][0] if terms else 0
        store(expr, "_hash", hash(value) if is_const else hash(terms))
        store(expr, "_symbols", None)
        store(expr, "_text", None)
        return Expr._interned.setdefault(terms, expr)

    @property
    def value(self) -> int:
        if not self.is_const:
            raise TypeError(f"'{self}' is not a constant")
        return self.terms[0][0] if self.terms else 0

    @property
    def constant(self) -> int:
        """The constant term, 0 if there is none."""
        last = self.terms[-1] if self.terms else (0, ())
        return 0 if last[1] else last[0]

    @property
    def atom(self) -> Atom | None:
        """The atom, if the expression is a single one."""
        match self.terms:
            case ((1, ((atom, 1),)),):
                return atom
            case _:
                return None

    @property
    def symbol(self) -> str | None:
        """The name, if the expression is a single symbol."""
        atom = self.atom
        return atom.name if isinstance(atom, Symbol) else None

    def atoms(self) -> Iterator[Atom]:
        """Each distinct top-level atom, in order of first appearance."""
        seen = dict.fromkeys(atom for _, mono in self.terms for atom, _ in mono)
        return iter(seen)

    def symbols(self) -> tuple[str, ...]:
        """All free symbols, inside atoms too, sorted."""
        if self._symbols is None:
            names: set[str] = set()
            for atom in self.atoms():
                if isinstance(atom, Symbol):
                    names.add(atom.name)
                else:
                    names.update(*(arg.symbols() for arg in operands(atom)))
            object.__setattr__(self, "_symbols", tuple(sorted(names)))
        assert self._symbols is not None
        return self._symbols

    def evaluate(self, env: Mapping[str, int]) -> int:
        """The value under `env`; KeyError names a missing symbol."""
        total = 0
        for coefficient, mono in self.terms:
            for atom, power in mono:
                value = atom.evaluate(env)
                coefficient *= value if power == 1 else value**power
            total += coefficient
        return total

    def substitute(self, env: Mapping[str, DimLike]) -> Expr:
        """Replace symbols, all at once."""
        if env.keys().isdisjoint(self.symbols()):
            return self

        def replace(atom: Atom) -> Expr:
            if isinstance(atom, Symbol):
                return as_expr(env[atom.name]) if atom.name in env else lift(atom)
            return rebuild(atom, [arg.substitute(env) for arg in operands(atom)])

        return self.map_atoms(replace)

    def map_atoms(self, replace: Callable[[Atom], Expr]) -> Expr:
        """The same polynomial over replaced top-level atoms."""
        images = {atom: replace(atom) for atom in self.atoms()}
        if all(image is lift(atom) for atom, image in images.items()):
            return self
        parts: list[Expr] = []
        for coefficient, mono in self.terms:
            term = const(coefficient)
            for atom, power in mono:
                term = term * images[atom] ** power
            parts.append(term)
        return sum_of(parts)

    def __add__(self, other: DimLike) -> Expr:
        right = _coerce(other)
        if right is None:
            return NotImplemented
        if not right.terms:
            return self
        if not self.terms:
            return right
        return _sum(self, right, 1)

    def __sub__(self, other: DimLike) -> Expr:
        right = _coerce(other)
        if right is None:
            return NotImplemented
        if not right.terms:
            return self
        return _sum(self, right, -1)

    def __mul__(self, other: DimLike) -> Expr:
        if type(other) is int:
            return self._scaled(other)
        right = _coerce(other)
        if right is None:
            return NotImplemented
        if self.is_const:
            return right._scaled(self.value)
        if right.is_const:
            return self._scaled(right.value)
        return _product(self, right)

    def _scaled(self, factor: int) -> Expr:
        if factor == 1:
            return self
        if factor == 0:
            return ZERO
        # Scaling keeps the order of terms; only a new multiple of a modulus can
        # need the full build, and that pairing is invariant under scaling.
        return Expr._of(tuple([(c * factor, m) for c, m in self.terms]))

    def __pow__(self, power: int) -> Expr:
        if power < 0:
            raise ValueError(f"negative power {power} of '{self}'")
        if power == 1:
            return self
        out = ONE
        for _ in range(power):
            out = out * self
        return out

    def __neg__(self) -> Expr:
        return self._scaled(-1)

    def __pos__(self) -> Expr:
        return self

    def __radd__(self, other: int) -> Expr:
        return self + other

    def __rsub__(self, other: int) -> Expr:
        return -self + other

    def __rmul__(self, other: int) -> Expr:
        return self * other

    def __floordiv__(self, other: DimLike) -> Expr:
        right = _coerce(other)
        return NotImplemented if right is None else floordiv(self, right)

    def __rfloordiv__(self, other: int) -> Expr:
        return floordiv(other, self)

    def __mod__(self, other: DimLike) -> Expr:
        right = _coerce(other)
        return NotImplemented if right is None else mod(self, right)

    def __rmod__(self, other: int) -> Expr:
        return mod(other, self)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return self.is_const and isinstance(other, int) and self.value == other

    def __hash__(self) -> int:
        return self._hash

    def _no_order(self, other: object) -> NoReturn:
        raise TypeError(
            f"the order of '{self}' and '{other}' needs a proof: use Facts.prove"
        )

    __lt__ = __le__ = __gt__ = __ge__ = _no_order

    def __bool__(self) -> bool:
        return self.value != 0

    def __int__(self) -> int:
        return self.value

    def __index__(self) -> int:
        return self.value

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"Expr is immutable: cannot set {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return Expr._of, (self.terms,)

    def __str__(self) -> str:
        if self._text is None:
            object.__setattr__(self, "_text", _print(self))
        assert self._text is not None
        return self._text

    __repr__ = __str__


Dim = Expr
ZERO = Expr._of(())
ONE = Expr._of(((1, ()),))


# --- construction ---------------------------------------------------------------


@lru_cache(maxsize=MEMO)
def sym(name: str) -> Expr:
    """The symbol `name`; a name that is no plain word prints in backquotes."""
    if not name or "`" in name or not name.isprintable():
        raise ValueError(f"not a symbol name: {name!r}")
    return lift(Symbol(name))


def const(v: int) -> Expr:
    number = index(v)
    return Expr._of(((number, ()),)) if number else ZERO


def as_expr(v: DimLike) -> Expr:
    return v if isinstance(v, Expr) else const(v)


def product(dims: Iterable[DimLike]) -> Expr:
    out, number = ONE, 1
    for dim in dims:
        factor = as_expr(dim)
        if factor.is_const:
            number *= factor.value
        else:
            out = factor if out is ONE else out * factor
    return out._scaled(number)


def floordiv(a: DimLike, b: DimLike) -> Expr:
    """`a // b` for b > 0, reduced so that equal quotients are the same object."""
    return _quotient(as_expr(a), as_expr(b))


@lru_cache(maxsize=MEMO)
def _quotient(num: Expr, den: Expr) -> Expr:
    if den.is_const and den.value <= 0:
        _reject_zero(num, den)
        return floordiv(-num, -den)
    whole, num = long_division(num, den)  # (k*a + r)//k -> a + r//k
    if den.is_const:
        carry = num.constant // den.value
        whole, num = whole + carry, num - carry * den.value
    # The remaining constant is in 0 .. den - 1, so it alone adds nothing.
    if not num.terms or (num.is_const and (den.is_const or num.value == -1)):
        return whole + num.constant // _unit_or(den)
    divisor, shared = _common_factor(num, den)
    if divisor > 1 or shared:  # (4*a)//6 -> (2*a)//3
        return whole + floordiv(*_cancel(num, den, divisor, shared))
    inner = _lone_quotient(num)
    if inner is not None:  # (a//b + m)//c -> (a + m*b)//(b*c)
        return whole + floordiv(inner[0], inner[1] * den)
    if num.constant == (den.value - 1 if den.is_const else -1):
        up = num - num.constant
        # (a - 1)//b -> ceildiv(a, b) - 1
        return whole + lift(CeilDiv(up, den)) - (0 if den.is_const else 1)
    return whole + lift(FloorDiv(num, den))


def ceildiv(a: DimLike, b: DimLike) -> Expr:
    """`a / b` rounded up, for b > 0."""
    num, den = as_expr(a), as_expr(b)
    if den.is_const and den.value <= 0:
        _reject_zero(num, den)
        return ceildiv(-num, -den)
    return floordiv(num - 1, den) + 1


def mod(a: DimLike, b: DimLike) -> Expr:
    """`a % b` for b > 0, as Python defines it."""
    return _remainder(as_expr(a), as_expr(b))


@lru_cache(maxsize=MEMO)
def _remainder(num: Expr, den: Expr) -> Expr:
    if den.is_const and den.value <= 0:
        _reject_zero(num, den)
        return -mod(-num, -den)
    num = _strip_mods(num, den)
    _, num = long_division(num, den)  # (k*a + r) % k -> r % k
    if den.is_const:
        num = num - (num.constant - num.constant % den.value)
        if num.is_const:
            return num
    if not num.terms:
        return ZERO
    divisor, shared = _common_factor(num, den)
    if divisor > 1 or shared:  # (4*a + 3) % 6 -> 2*((2*a + 1) % 3) + 1
        reduced = mod(*_cancel(num, den, divisor, shared))
        scale = Expr._of(((divisor, shared),))
        return scale * reduced + num.constant % divisor
    down = floordiv(num, den)
    if down.is_const:  # (1//(n + 1)) % 2 -> 1//(n + 1)
        return num - den * down
    return lift(Mod(num, den))


def minimum(*a: DimLike) -> Expr:
    return _extremum(Min, min, tuple(map(as_expr, a)))


def maximum(*a: DimLike) -> Expr:
    return _extremum(Max, max, tuple(map(as_expr, a)))


def operands(atom: Atom) -> tuple[Expr, ...]:
    """The expressions directly inside an atom."""
    match atom:
        case FloorDiv(num, den) | CeilDiv(num, den) | Mod(num, den):
            return num, den
        case Min(args) | Max(args):
            return args
        case _:
            return ()


def rebuild(atom: Atom, args: Iterable[DimLike]) -> Expr:
    """The expression of `atom` over other operands, in canonical form."""
    if isinstance(atom, Symbol):
        return lift(atom)
    return _BUILDERS[type(atom)](*args)


_BUILDERS: dict[type[Atom], Callable[..., Expr]] = {
    FloorDiv: floordiv,
    CeilDiv: ceildiv,
    Mod: mod,
    Min: minimum,
    Max: maximum,
}


# --- canonical form -------------------------------------------------------------


@lru_cache(maxsize=MEMO)
def _order(mono: Monomial) -> tuple[int, tuple[tuple[tuple[int, str], int], ...], bool]:
    """Graded lexicographic sort key, and whether a Mod occurs."""
    degree = sum(power for _, power in mono)
    factors = tuple((atom.order, -power) for atom, power in mono)
    return -degree, factors, any(isinstance(atom, Mod) for atom, _ in mono)


@lru_cache(maxsize=MEMO)
def lift(atom: Atom) -> Expr:
    return Expr._of(((1, ((atom, 1),)),))


def _coerce(value: object) -> Expr | None:
    if isinstance(value, Expr):
        return value
    try:
        return const(value)  # type: ignore[arg-type]  # raises for others
    except TypeError:
        return None


def _add_into(
    out: dict[Monomial, int], terms: Iterable[Term], factor: int
) -> dict[Monomial, int]:
    for coefficient, mono in terms:
        total = out.get(mono, 0) + coefficient * factor
        if total:
            out[mono] = total
        else:
            del out[mono]
    return out


def sum_of(parts: Iterable[Expr]) -> Expr:
    """Their sum; cheaper than one addition after the other."""
    out: dict[Monomial, int] = {}
    for part in parts:
        _add_into(out, part.terms, 1)
    return _build(out)


@lru_cache(maxsize=MEMO)
def _sum(left: Expr, right: Expr, factor: int) -> Expr:
    return _build(_add_into({m: c for c, m in left.terms}, right.terms, factor))


@lru_cache(maxsize=MEMO)
def _product(left: Expr, right: Expr) -> Expr:
    out: dict[Monomial, int] = {}
    for coefficient, mono in left.terms:
        shifted = [(c, _multiply(m, mono)) for c, m in right.terms]
        _add_into(out, shifted, coefficient)
    return _build(out)


def _build(coefficients: dict[Monomial, int]) -> Expr:
    """Intern a polynomial; no coefficient is zero."""
    ordered = sorted(coefficients, key=_order)
    expr = Expr._of(tuple([(coefficients[mono], mono) for mono in ordered]))
    if any(_order(mono)[2] for mono in ordered):
        return _join_mods(expr)
    return expr


def _multiply(left: Monomial, right: Monomial) -> Monomial:
    if not left:
        return right
    if not right:
        return left
    powers = dict(left)
    for atom, power in right:
        powers[atom] = powers.get(atom, 0) + power
    return tuple(sorted(powers.items(), key=lambda item: item[0].order))


def monomial_quotient(mono: Monomial, by: Monomial) -> Monomial | None:
    """mono / by, None if it is no monomial."""
    if not by:
        return mono
    powers = dict(mono)
    for atom, power in by:
        left = powers.get(atom, 0) - power
        if left < 0:
            return None
        powers[atom] = left
    return tuple((atom, power) for atom, power in powers.items() if power)


def long_division(num: Expr, den: Expr) -> tuple[Expr, Expr]:
    """(q, r) with num == q*den + r; takes only terms that divide exactly.

    With several terms in `den`, polynomial division may trade one term for others
    (m//(m + n) -> 1 + (-n)//(m + n)); it is kept only if the remainder is shorter.
    """
    lead, lead_mono = den.terms[0]
    quotient: dict[Monomial, int] = {}
    rest = {mono: c for c, mono in num.terms}
    pending = list(rest)
    while pending:
        mono = pending.pop()
        coefficient = rest.get(mono, 0)
        factor = monomial_quotient(mono, lead_mono)
        if factor is None or coefficient % lead or not coefficient:
            continue
        _add_into(quotient, [(coefficient // lead, factor)], 1)
        taken = [(c, _multiply(m, factor)) for c, m in den.terms]
        _add_into(rest, taken, -(coefficient // lead))
        pending.extend(m for _, m in taken[1:])
    if not quotient or (len(den.terms) > 1 and len(rest) >= len(num.terms)):
        return ZERO, num
    return _build(quotient), _build(rest)


def _reject_zero(num: Expr, den: Expr) -> None:
    if den.value == 0:
        raise ZeroDivisionError(f"division of '{num}' by zero")


def _unit_or(den: Expr) -> int:
    # Only -1 and constants below the denominator come here; -1 // den is -1.
    return den.value if den.is_const else 1


def _common_factor(num: Expr, den: Expr) -> tuple[int, Monomial]:
    """What cancels in num // den: a positive integer, and a monomial.

    The integer ignores num's constant, because flooring the constant is exact:
    (g*a + c)//(g*k) == (a + c//g)//k.
    """
    divisor = gcd(*(c for c, m in num.terms if m), *(c for c, _ in den.terms))
    if den.is_const or num.constant or den.constant:
        return divisor, ()
    monomials = [m for expr in (num, den) for _, m in expr.terms]
    shared = dict(monomials[0])
    for mono in monomials[1:]:
        powers = dict(mono)
        shared = {a: min(p, powers[a]) for a, p in shared.items() if a in powers}
    return divisor, tuple(shared.items())


def _cancel(num: Expr, den: Expr, divisor: int, shared: Monomial) -> tuple[Expr, Expr]:
    def reduced(expr: Expr) -> Expr:
        pairs = ((c // divisor, monomial_quotient(m, shared)) for c, m in expr.terms)
        return _build({m: c for c, m in pairs if m is not None and c})

    return reduced(num), reduced(den)


def _lone_quotient(num: Expr) -> tuple[Expr, Expr] | None:
    """(x, b) if num is x // b for a larger x, i.e. one quotient plus a constant."""
    coefficient, mono = num.terms[0]
    if len(num.terms) - bool(num.constant) != 1 or coefficient != 1:
        return None
    match mono:
        case ((FloorDiv(top, den), 1),):
            return top + num.constant * den, den
        case ((CeilDiv(top, den), 1),):
            return top + den - 1 + num.constant * den, den
        case _:
            return None


def _strip_mods(num: Expr, den: Expr) -> Expr:
    """x % 12 inside (... ) % 4 is as good as x."""
    if not den.is_const or not any(_order(mono)[2] for _, mono in num.terms):
        return num
    total = ZERO
    for coefficient, mono in num.terms:
        term = const(coefficient)
        for atom, power in mono:
            if (
                isinstance(atom, Mod)
                and power == 1
                and atom.den.is_const
                and coefficient * atom.den.value % den.value == 0
            ):
                term = term * atom.num
            else:
                term = term * lift(atom) ** power
        total = total + term
    return total


def _join_mods(expr: Expr) -> Expr:
    """q*(a//q) + a % q -> a, times any common factor."""
    present = {m: c for c, m in expr.terms}
    for coefficient, mono in expr.terms:
        for atom, power in mono:
            if not isinstance(atom, Mod) or power != 1 or len(atom.den.terms) != 1:
                continue
            factor = tuple(item for item in mono if item[0] is not atom)
            pair = _counterpart(atom)
            # The quotient may be spelled ceildiv(..) - 1: compare its first term.
            scale, lead = pair.terms[0]
            if present.get(_multiply(lead, factor)) == scale * coefficient:
                whole = Expr._of(((coefficient, factor),))
                rest = _add_into(present, [(coefficient, mono)], -1)
                return _build(_subtract(rest, whole * pair)) + whole * atom.num
    return expr


@lru_cache(maxsize=MEMO)
def _counterpart(atom: Mod) -> Expr:
    """q*(a//q) of a % q."""
    return floordiv(atom.num, atom.den) * atom.den


def _subtract(out: dict[Monomial, int], expr: Expr) -> dict[Monomial, int]:
    return _add_into(out, expr.terms, -1)


@lru_cache(maxsize=MEMO)
def _extremum(
    kind: type[Min] | type[Max],
    choose: Callable[[int, int], int],
    args: tuple[Expr, ...],
) -> Expr:
    if not args:
        raise ValueError(f"{kind.__name__.lower()} of nothing")
    # Arguments that differ by a constant compare; one of each family survives.
    best: dict[Expr, int] = {}
    for arg in _flatten(kind, args):
        offset = arg.constant
        family = arg - offset
        best[family] = choose(best.get(family, offset), offset)
    kept = [family + offset for family, offset in best.items()]
    if len(kept) == 1:
        return kept[0]
    kept.sort(key=lambda arg: (arg.is_const, str(arg)))
    return lift(kind(tuple(kept)))


def _flatten(kind: type[Min] | type[Max], args: Iterable[Expr]) -> Iterator[Expr]:
    for arg in args:
        if isinstance(arg.atom, kind):
            yield from arg.atom.args
        else:
            yield arg


# --- text -----------------------------------------------------------------------


def _operand(expr: Expr) -> str:
    """Text that binds tighter than // and %."""
    if expr.is_const and expr.value >= 0:
        return str(expr)
    match expr.terms:
        case ((1, ((Symbol() | CeilDiv() | Min() | Max(), 1),)),):
            return str(expr)
        case _:
            return f"({expr})"


def _print(expr: Expr) -> str:
    text = ""
    for coefficient, mono in expr.terms:
        sign = "-" if coefficient < 0 else "+"
        text += f" {sign} " if text else sign.strip("+")
        size = abs(coefficient)
        if not mono:
            text += str(size)
        elif size == 1 and len(mono) == 1 and mono[0][1] == 1:
            # "-n//2" would read as (-n)//2, "m - n//2" reads well.
            bare = text != "-"
            text += str(mono[0][0]) if bare else _factor(mono[0][0], 1)
        else:
            factors = [str(size)] if size != 1 else []
            factors += [_factor(atom, power) for atom, power in mono]
            text += "*".join(factors)
    return text or "0"


def _factor(atom: Atom, power: int) -> str:
    text = f"({atom})" if isinstance(atom, FloorDiv | Mod) else str(atom)
    return text if power == 1 else f"{text}**{power}"
