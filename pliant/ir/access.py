"""Index maps: which element of an operand an element of a result is read from.

`pull` computes them for the ops that only move data. Fusion uses it to decide whether
two accesses are the same, lowering to compute the address to load. Indices are
`sym.Expr` over the iteration variables, simplified by the known ranges, so that a
reshape between shapes of one size costs nothing and a transpose costs only its strides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from pliant.ir.graph import Op
from pliant.ir.types import contiguous_strides
from pliant.sym import (
    Expr,
    Facts,
    as_expr,
    floordiv,
    ge,
    minimum,
    mod,
    operands,
    product,
    rebuild,
)
from pliant.sym.monotone import linear_coefficient as linear_coefficient
from pliant.sym.nodes import long_division
from pliant.sym.signs import plainly_nonnegative

Index = tuple[Expr, ...]


def flatten(index: Sequence[Expr], shape: Sequence[Expr]) -> Expr:
    """The row-major position of an index."""
    total = as_expr(0)
    for i, step in zip(index, contiguous_strides(tuple(shape)), strict=True):
        total = total + i * step
    return total


@dataclass(slots=True)
class _Answers:
    """What was asked about a space; the layers of a model ask the same."""

    known: dict[Expr, bool | None] = field(default_factory=dict)
    reshaped: dict[tuple[Index, Index, Index], Index] = field(default_factory=dict)


class Space:
    """What is known inside a loop nest: the facts, and 0 <= variable < extent.

    A condition on variables is decided at the corners of their ranges. This is fast,
    and enough for the mixed-radix arithmetic of reshapes. A condition on sizes alone
    goes to the prover. Inside the nest no extent is 0.
    """

    def __init__(self, facts: Facts, extents: Mapping[str, Expr]) -> None:
        self.facts = facts
        self.extents = {v: facts.canonical(e) for v, e in extents.items()}
        found = facts.remembered(tuple(self.extents.items()), _Answers)
        self._known, self.reshaped = found.known, found.reshaped

    def narrowed(self, extents: Mapping[str, Expr]) -> Space:
        """The part of the space in which some variables have smaller extents."""
        return Space(self.facts, {**self.extents, **extents}) if extents else self

    def canonical(self, e: Expr) -> Expr:
        return self.facts.canonical(e)

    def at_least(self, e: Expr, low: Expr) -> bool | None:
        """Whether e >= low: True everywhere, False nowhere, None if not decided."""
        difference = self.canonical(e - low)
        if difference not in self._known:
            self._known[difference] = self._sign(difference)
        return self._known[difference]

    def _sign(self, difference: Expr) -> bool | None:
        if not any(name in self.extents for name in difference.symbols()):
            return self.facts.prove(ge(difference, 0))
        if plainly_nonnegative(self._corner(difference)):
            return True
        if plainly_nonnegative(self._corner(-difference - 1)):
            return False
        return None

    def _corner(self, e: Expr) -> Expr:
        """The least value over the variables, where each is linear and one-signed."""
        for name, extent in self.extents.items():
            if name not in e.symbols():
                continue
            low, step = e.substitute({name: 0}), linear_coefficient(e, name)
            if step is None:
                return as_expr(-1)
            if plainly_nonnegative(step):
                e = low
            elif plainly_nonnegative(-step):
                e = self.canonical(low + step * (extent - 1))
            else:
                return as_expr(-1)
        return e


def divide(e: Expr, by: Expr, space: Space) -> tuple[Expr, Expr]:
    """(e // by, e % by), with the part of `e` that is provably below `by` split off."""
    if by.is_const and by.value == 1:
        return e, as_expr(0)
    if by.is_const and by.value == 0:  # an axis without elements: no index is read
        return as_expr(0), as_expr(0)
    whole, rest = _multiples(e, by)
    if space.at_least(rest, as_expr(0)) and space.at_least(by - 1, rest):
        return whole, rest
    return whole + floordiv(rest, by), mod(rest, by)


def _multiples(e: Expr, by: Expr) -> tuple[Expr, Expr]:
    """e == whole*by + rest, with every term that `by` divides exactly in `whole`."""
    if len(by.terms) > 1:  # d*n - d + i is d*(n - 1) + i
        return long_division(e, by)
    whole, rest = as_expr(0), as_expr(0)
    for coefficient, monomial in e.terms:
        term = as_expr(coefficient)
        for atom, power in monomial:
            term = term * rebuild(atom, operands(atom)) ** power
        quotient = floordiv(term, by)
        # Exact only if multiplying back gives the term: a structural question.
        if quotient * by == term and not (quotient.is_const and quotient.value == 0):
            whole = whole + quotient
        else:
            rest = rest + term
    return whole, rest


def unflatten(position: Expr, shape: Sequence[Expr], space: Space) -> Index:
    """The index of a row-major position; the leading one is not wrapped."""
    index: list[Expr] = []
    for dim in reversed(shape[1:]):
        position, low = divide(position, dim, space)
        index.append(low)
    if shape:
        index.append(position)
    return tuple(reversed(index))


def segments(
    a: Sequence[Expr], b: Sequence[Expr], facts: Facts | Space
) -> list[tuple[range, range]]:
    """Splits two shapes of one size into the shortest runs of equal product.

    (b, s, 12, 64) and (b, s, 768) give b|b, s|s, (12, 64)|(768). A cut is where the
    products of all dims before it are equal; axes of one element are paired in order.
    """
    cuts: list[tuple[int, int]] = []
    left, right = _prefixes(a, facts), _prefixes(b, facts)
    for size, i in left.items():
        cuts.extend(zip(i, right.get(size, ()), strict=False))
    if (len(a), len(b)) not in cuts:
        cuts.append((len(a), len(b)))
    return [
        (range(i, next_i), range(j, next_j))
        for (i, j), (next_i, next_j) in pairwise(cuts)
    ]


def _prefixes(shape: Sequence[Expr], facts: Facts | Space) -> dict[Expr, list[int]]:
    """Product of leading dims -> how many dims it is the product of."""
    table: dict[Expr, list[int]] = {}
    size = as_expr(1)
    table[size] = [0]
    for k, dim in enumerate(shape):
        size = size * facts.canonical(dim)
        table.setdefault(size, []).append(k + 1)
    return table


def reshape_index(
    index: Index, shape: Sequence[Expr], to: Sequence[Expr], space: Space
) -> Index:
    """The index in `to` of the element at `index` of `shape` (row-major reshape)."""
    key = tuple(index), tuple(shape), tuple(to)
    if key not in space.reshaped:
        space.reshaped[key] = _reshaped(*key, space)
    return space.reshaped[key]


def _reshaped(index: Index, shape: Index, to: Index, space: Space) -> Index:
    out: list[Expr] = []
    for here, there in segments(shape, to, space):
        if len(here) == 1 and len(there) == 1:
            out.append(index[here.start])
            continue
        dims = [shape[k] for k in here]
        position = flatten([index[k] for k in here], dims)
        out.extend(unflatten(position, [to[k] for k in there], space))
    return tuple(out)


def pull(op: Op, index: Index, space: Space) -> Index:
    """The operand index of a view (ir/ops.py: VIEWS) at a result index."""
    x = op.operands[0]
    match op.name:
        case "broadcast":
            axes = op.ints_attr("axes")
            return tuple(
                as_expr(0) if is_one(x.shape[k]) else index[axis]
                for k, axis in enumerate(axes)
            )
        case "stretch":
            pairs = zip(x.shape, op.ints_attr("axes"), strict=True)
            return tuple(
                index[axis] * stretched(dim, op.result.shape[axis])
                for dim, axis in pairs
            )
        case "reshape":
            return reshape_index(index, op.result.shape, x.shape, space)
        case "transpose":
            perm = op.ints_attr("perm")
            out = [as_expr(0)] * len(perm)
            for k, axis in enumerate(perm):
                out[axis] = index[k]
            return tuple(out)
        case "slice":
            starts, steps = op.dims_attr("starts"), op.ints_attr("steps")
            return tuple(
                s + i * step for s, i, step in zip(starts, index, steps, strict=True)
            )
        case "flip":
            axes = op.ints_attr("axes")
            return tuple(
                x.shape[k] - 1 - i if k in axes else i for k, i in enumerate(index)
            )
        case "rounded":
            return index
        case _:
            raise ValueError(f"{op.name} is not a view")


def stretched(dim: Expr, wide: Expr) -> Expr:
    """By how much an index into `dim` moves per element of `wide`: 0 if dim is 1."""
    if is_one(dim):
        return as_expr(0)
    return as_expr(1) if dim == wide else minimum(dim - 1, 1)


def is_one(dim: Expr) -> bool:
    return dim.is_const and dim.value == 1


def numel(shape: Sequence[Expr], facts: Facts | Space) -> Expr:
    """The number of elements, in canonical dims so that equal sizes are one object."""
    return product(facts.canonical(d) for d in shape)
