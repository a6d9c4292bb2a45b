"""The peak of a call as text: the whole formula, and what it amounts to.

    peak_text       1280*batch*seq + 3584            exact
    peak_summary    about 1.3 KB per batch*seq, 3.6 KB fixed

Where the whole formula is long, parts that it repeats get names:

    max(96*h1*w1 + 64, 24*h2*w2) where h1 = ceildiv(h, 2), h2 = ceildiv(h1, 2), ...
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pliant.image.parts import PeakTerms
from pliant.sym import (
    Atom,
    CeilDiv,
    Expr,
    FloorDiv,
    Max,
    Min,
    Mod,
    Symbol,
    as_expr,
    ceildiv,
    floordiv,
    maximum,
    minimum,
    mod,
    sym,
)

SHORT = 160  # characters of one size
LONG = 2000  # characters, from which on repeated parts get names
TYPICAL = 512  # a size of every dim, at which terms are compared
_SMALL = 0.01  # a share of the peak that the summary leaves out


def peak_text(peak: PeakTerms, threads: int) -> str:
    """Peak bytes over the dims: the largest of a few polynomials.

    Where calls have several orders, that of the order which needs least.
    """
    known = {"threads": as_expr(threads)}
    parts = [
        tuple(tuple(e.substitute(known) for e in terms) for terms in part)
        for part in peak
    ]
    every = list(dict.fromkeys(e for part in parts for terms in part for e in terms))
    if sum(map(_length, every)) <= LONG:
        return _whole(parts, {e: str(e) for e in every})
    names = _Names.of(every)
    text = _whole(parts, {e: str(names.shortened(e)) for e in every})
    said = ", ".join(f"{name} = {value}" for name, value in names.values.items())
    return f"{text} where {said}" if said else text


def size_text(size: Expr) -> str:
    """A size, as it is if that is short, else what it amounts to."""
    text = str(size)
    return text if len(text) <= SHORT else summary_of([size])


def _length(expr: Expr) -> int:
    return len(str(expr))


def _whole(
    parts: Sequence[tuple[tuple[Expr, ...], ...]], texts: Mapping[Expr, str]
) -> str:
    found: list[str] = []
    for part in parts:
        orders = dict.fromkeys(
            _joined("max", sorted({texts[e] for e in terms})) for terms in part
        )
        found.append(_joined("min", list(orders)))
    if len(found) == 1:
        return found[0]
    inner = [text[4:-1] if text.startswith("max(") else text for text in found]
    return f"max({', '.join(dict.fromkeys(inner))})"


def _joined(name: str, texts: list[str]) -> str:
    return texts[0] if len(texts) == 1 else f"{name}({', '.join(texts)})"


# --- repeated parts -------------------------------------------------------------


@dataclass(slots=True)
class _Names:
    """Names for the quotients, minima and maxima that expressions repeat."""

    repeated: frozenset[Atom]
    taken: frozenset[str]
    values: dict[str, Expr] = field(default_factory=dict)
    made: dict[Atom, Expr] = field(default_factory=dict)

    @classmethod
    def of(cls, exprs: Sequence[Expr]) -> _Names:
        uses: Counter[Atom] = Counter()
        for expr in exprs:
            _count(expr, uses)
        repeated = frozenset(a for a, count in uses.items() if count > 1)
        return cls(repeated, frozenset(s for e in exprs for s in e.symbols()))

    def shortened(self, expr: Expr) -> Expr:
        total = as_expr(0)
        for coefficient, mono in expr.terms:
            product = as_expr(coefficient)
            for atom, power in mono:
                for _ in range(power):
                    product = product * self._atom(atom)
            total = total + product
        return total

    def _atom(self, atom: Atom) -> Expr:
        if atom not in self.made:
            value = self._inside(atom)
            if atom in self.repeated:
                name = self._fresh(atom)
                self.values[name] = value
                value = sym(name)
            self.made[atom] = value
        return self.made[atom]

    def _inside(self, atom: Atom) -> Expr:
        """The atom over the names of what is in it."""
        match atom:
            case FloorDiv(num, den):
                return floordiv(self.shortened(num), self.shortened(den))
            case CeilDiv(num, den):
                return ceildiv(self.shortened(num), self.shortened(den))
            case Mod(num, den):
                return mod(self.shortened(num), self.shortened(den))
            case Min(args):
                return minimum(*map(self.shortened, args))
            case Max(args):
                return maximum(*map(self.shortened, args))
            case Symbol(name):
                return sym(name)
            case _:
                raise TypeError(f"no part of a formula: {atom}")

    def _fresh(self, atom: Atom) -> str:
        """After its dim, if there is one alone: h1, h2."""
        dims = {s for e in _operands(atom) for s in e.symbols()}
        stem = next(iter(dims)) if len(dims) == 1 else "part"
        number = 1
        while f"{stem}_{number}" in self.values or f"{stem}_{number}" in self.taken:
            number += 1
        return f"{stem}_{number}"


def _operands(atom: Atom) -> tuple[Expr, ...]:
    match atom:
        case FloorDiv(num, den) | CeilDiv(num, den) | Mod(num, den):
            return (num, den)
        case Min(args) | Max(args):
            return args
        case _:
            return ()


def _count(expr: Expr, uses: Counter[Atom]) -> None:
    """Counts each use of a part; what is in a part counts once."""
    for _, mono in expr.terms:
        for atom, _ in mono:
            if isinstance(atom, Symbol):
                continue
            uses[atom] += 1
            if uses[atom] == 1:
                for inner in _operands(atom):
                    _count(inner, uses)


# --- what it amounts to ---------------------------------------------------------

# Coefficients by the dims they are multiplied with: {("batch", "seq"): 1280.0}
_Polynomial = dict[tuple[str, ...], float]


def peak_summary(peak: PeakTerms, threads: int) -> str:
    """The largest terms of the peak, in words: "about 9.2 KB per seq, 0.3 MB fixed".

    Terms are compared where every dim is TYPICAL, and quotients taken as exact.
    """
    best: tuple[float, _Polynomial] = (-1.0, {})
    for part in peak:
        orders = [_largest(terms, threads) for terms in part]
        best = max(best, min(orders, key=_first), key=_first)
    return _summary(*best)


def summary_of(terms: Sequence[Expr]) -> str:
    return _summary(*_largest(terms, 1))


def _summary(total: float, found: _Polynomial) -> str:
    found = dict(found)
    fixed = found.pop((), 0.0)
    sizes = sorted(
        ((c * TYPICAL ** len(m), m, c) for m, c in found.items()), reverse=True
    )
    said = [
        f"{readable_bytes(c)} per {_product(m)}"
        for size, m, c in sizes
        if size >= _SMALL * total
    ]
    if not said:
        return f"{readable_bytes(fixed)}, whatever the sizes"
    rest = f", {readable_bytes(fixed)} fixed" if fixed > 0 else ""
    return f"about {' + '.join(said)}{rest}"


def _first(item: tuple[float, _Polynomial]) -> float:
    return item[0]


def _largest(terms: Sequence[Expr], threads: int) -> tuple[float, _Polynomial]:
    made = [_polynomial(e.substitute({"threads": as_expr(threads)})) for e in terms]
    return max(((_value(p), p) for p in made), key=_first)


def _value(polynomial: _Polynomial) -> float:
    return sum(c * float(TYPICAL) ** len(m) for m, c in polynomial.items())


def _polynomial(expr: Expr) -> _Polynomial:
    total: _Polynomial = {}
    for coefficient, mono in expr.terms:
        product: _Polynomial = {(): float(coefficient)}
        for atom, power in mono:
            for _ in range(power):
                product = _times(product, _of_atom(atom))
        for names, c in product.items():
            total[names] = total.get(names, 0.0) + c
    return total


def _of_atom(atom: Atom) -> _Polynomial:
    match atom:
        case Symbol(name):
            return {(name,): 1.0}
        case FloorDiv(num, den) | CeilDiv(num, den):
            return _quotient(_polynomial(num), _polynomial(den))
        case Min(args):
            return min(map(_polynomial, args), key=_value)
        case Max(args):
            return max(map(_polynomial, args), key=_value)
        case _:  # a remainder is small
            return {}


def _times(a: _Polynomial, b: _Polynomial) -> _Polynomial:
    out: _Polynomial = {}
    for left, x in a.items():
        for right, y in b.items():
            names = tuple(sorted((*left, *right)))
            out[names] = out.get(names, 0.0) + x * y
    return out


def _quotient(num: _Polynomial, den: _Polynomial) -> _Polynomial:
    """By the largest term of the denominator, where that divides; else its value."""
    if not den:
        return num
    names, c = max(den.items(), key=lambda item: abs(_value(dict([item]))))
    return dict(_divided(num, names, c))


def _divided(
    num: _Polynomial, by: tuple[str, ...], c: float
) -> Iterator[tuple[tuple[str, ...], float]]:
    for names, x in num.items():
        left = list(names)
        size = 1.0
        for name in by:
            if name in left:
                left.remove(name)
            else:
                size *= TYPICAL
        yield tuple(left), x / c / size


def _product(names: tuple[str, ...]) -> str:
    powers = Counter(names)
    return "*".join(n if k == 1 else f"{n}^{k}" for n, k in powers.items())


def readable_bytes(count: float) -> str:
    """ "9.2 KB", by thousands; for exact numbers there is the formula."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= 0.1 * size and count >= 1000:
            return f"{_two_digits(count / size)} {unit}"
    return f"{count:.0f} bytes" if count >= 10 else f"{count:.2g} bytes"


def _two_digits(number: float) -> str:
    digits = max(1 - math.floor(math.log10(number)), 0)
    return f"{number:.{digits}f}"
