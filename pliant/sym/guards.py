"""From observed shapes to symbol values, and what must hold of them.

`solve` reads each symbol from one dim of one input, and turns every other dim, and
every stated fact, into a Guard. Example:

    x: (n, 2*m + 3), y: (m, n)      n = x.0,  m = y.0
                                    guards: x.1 == 2*m + 3,  y.1 == n

Conditions are over the solved symbols and the observed sizes, which are symbols
named "input.axis". A guard that fails renders its message with the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pliant.sym.cond import Cond, divides, eq, le, lt
from pliant.sym.expr import ZERO, Expr, Monomial, Symbol, floordiv, maximum, sym
from pliant.sym.prove import Facts

_OBSERVED = "d"


@dataclass(frozen=True, slots=True)
class Guard:
    """A condition to check at run time; `message` mixes text and expressions."""

    cond: Cond
    message: tuple[str | Expr, ...]
    origin: str

    def render(self, env: Mapping[str, int]) -> str:
        """The message, each expression as "text (=value)"."""
        return "".join(_shown(piece, env) for piece in self.message)


def _shown(piece: str | Expr, env: Mapping[str, int]) -> str:
    if isinstance(piece, str) or piece.is_const:
        return str(piece)
    name = piece.symbol or ""
    if "." in name and name in env:  # an observed size, whose place the text names
        return str(env[name])
    if not all(name in env for name in piece.symbols()):
        return str(piece)
    try:
        return f"{piece} (={piece.evaluate(env)})"
    except ZeroDivisionError:
        return f"{piece} (undefined)"


@dataclass(frozen=True, slots=True)
class Binding:
    """`symbol` is `value`, where "d" is the size of axis `axis` of input `source`.

    `value` may also use symbols that earlier bindings define.
    """

    symbol: str
    source: int
    axis: int
    value: Expr


@dataclass(frozen=True, slots=True)
class Solution:
    """Bindings in the order to evaluate them; then every guard must hold."""

    bindings: tuple[Binding, ...]
    guards: tuple[Guard, ...]


@dataclass(frozen=True, slots=True)
class _DimPlace:
    """One dim of one input."""

    source: int
    axis: int
    input: str
    dim: Expr

    @property
    def observed(self) -> Expr:
        return sym(f"{self.input}.{self.axis}")


def solve(shapes: Sequence[tuple[str, tuple[Expr, ...]]], facts: Facts) -> Solution:
    """Where each symbol is read, and the guards; ValueError names an unsolved one."""
    places = [
        _DimPlace(source, axis, name, dim)
        for source, (name, dims) in enumerate(shapes)
        for axis, dim in enumerate(dims)
    ]
    bindings: dict[str, Binding] = {}
    guards: list[Guard] = []
    read: set[_DimPlace] = set()
    for place in places:
        name = place.dim.symbol
        if name is not None and name not in bindings:
            read.add(place)
            value = sym(_OBSERVED)
            bindings[name] = Binding(name, place.source, place.axis, value)
    while _solve_next(places, facts, bindings, guards, read):
        pass
    wanted = dict.fromkeys(name for place in places for name in place.dim.symbols())
    missing = [name for name in wanted if name not in bindings]
    if missing:
        dims = [str(p.dim) for p in places if set(missing) & set(p.dim.symbols())]
        raise ValueError(
            f"cannot solve {', '.join(missing)} from the input shapes: no dim gives "
            f"it alone or as a*s + b (dims: {', '.join(dims)})"
        )
    guards += [_agreement(place) for place in places if place not in read]
    guards += _stated(facts, set(bindings), guards)
    return Solution(tuple(bindings.values()), tuple(guards))


def _solve_next(
    places: Sequence[_DimPlace],
    facts: Facts,
    bindings: dict[str, Binding],
    guards: list[Guard],
    read: set[_DimPlace],
) -> bool:
    """Read one more symbol out of an affine dim, if there is one."""
    for place in places:
        unknown = [name for name in place.dim.symbols() if name not in bindings]
        affine = _affine(place.dim, unknown[0]) if len(unknown) == 1 else None
        if affine is None:
            continue
        slope, offset = affine
        if _OBSERVED in slope.symbols() or _OBSERVED in offset.symbols():
            continue  # "d" means the observed size in a binding
        name = unknown[0]
        if slope.is_const and slope.value < 0:
            value = floordiv(offset - sym(_OBSERVED), -slope)
        else:
            # The guard slope >= 1 runs after the bindings, which must not trap.
            safe = slope if slope.is_const else maximum(slope, 1)
            value = floordiv(sym(_OBSERVED) - offset, safe)
        bindings[name] = Binding(name, place.source, place.axis, value)
        guards += _exactness(place, bindings[name], slope, offset, facts)
        read.add(place)
        return True
    return False


def _affine(dim: Expr, name: str) -> tuple[Expr, Expr] | None:
    """(a, b) with dim == a*name + b, neither of them about `name`."""
    slope = offset = ZERO
    for coefficient, mono in dim.terms:
        rest: Monomial = tuple(item for item in mono if item[0] is not Symbol(name))
        if rest == mono:
            offset = offset + Expr._of(((coefficient, mono),))
        elif dict(mono)[Symbol(name)] == 1:
            slope = slope + Expr._of(((coefficient, rest),))
        else:
            return None
    inside = name in slope.symbols() or name in offset.symbols()
    return None if inside or slope is ZERO else (slope, offset)


def _exactness(
    place: _DimPlace, binding: Binding, slope: Expr, offset: Expr, facts: Facts
) -> Iterator[Guard]:
    """What makes the value read for the symbol the right one."""
    name, value = binding.symbol, binding.value
    origin = f"{place.input}.{place.axis}"
    observed, symbol = place.observed, sym(name)
    size = f"input '{place.input}', axis {place.axis}, "
    message: tuple[str | Expr, ...]
    if not slope.is_const:
        message = (size, observed, f", gives {name} only if ", slope, " is positive")
        yield Guard(lt(0, slope), message, origin)
        message = (size, observed, f", must be {place.dim}: nearest is ", place.dim)
        yield Guard(eq(observed, place.dim), message, origin)
    elif abs(slope.value) != 1:
        rest = observed - offset
        message = (size, observed, f", must be {place.dim} for a whole {name}: ")
        message += (rest, f" is not a multiple of {slope}")
        yield Guard(divides(slope, rest), message, origin)
    low = facts.bounds(symbol)[0]
    if low is None or le(low, symbol) in facts.stated:
        return
    if Facts().prove(le(low, value)) is not True:
        message = (size, observed, f", makes {name} less than {low}: ", symbol)
        yield Guard(le(low, symbol), message, origin)


def _agreement(place: _DimPlace) -> Guard:
    """The observed size is what the dim says."""
    fixed = (
        ": only axes that dynamic_shapes names may vary" if place.dim.is_const else ""
    )
    message = (
        f"input '{place.input}', axis {place.axis} must be ",
        place.dim,
        ", got ",
        place.observed,
        fixed,
    )
    cond = eq(place.observed, place.dim)
    return Guard(cond, message, f"{place.input}.{place.axis}")


def _stated(facts: Facts, solved: set[str], guards: Sequence[Guard]) -> Iterator[Guard]:
    """Facts that proofs relied on and that sizes alone do not imply."""
    seen = {guard.cond for guard in guards}
    trivial = Facts()
    for cond in facts.stated:
        known = set(cond.symbols()) <= solved
        if known and cond not in seen and trivial.prove(cond) is not True:
            seen.add(cond)
            message = (f"the model requires {cond}: got ", cond.lhs, " and ", cond.rhs)
            yield Guard(cond, message, "facts")
