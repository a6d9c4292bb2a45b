"""Index maps: which element of an operand an element of a result is made of.

`pull` answers for the ops that only move data. Fusion asks it whether two accesses are
the same; lowering asks it for the address to load. Everything is `sym.Expr` over the
iteration variables, simplified with what is known of their ranges, so that a reshape
between shapes of one size costs nothing and a transpose costs only its strides.
"""

from __future__ import annotations

from collections.abc import Sequence

from pliant.ir.graph import Op
from pliant.ir.types import contiguous_strides
from pliant.sym import (
    Expr,
    Facts,
    as_expr,
    floordiv,
    ge,
    lt,
    mod,
    operands,
    product,
    rebuild,
)

Index = tuple[Expr, ...]

# Ops whose result element is one operand element at an index known without data.
VIEWS = frozenset({"broadcast", "reshape", "transpose", "slice", "flip"})


def flatten(index: Sequence[Expr], shape: Sequence[Expr]) -> Expr:
    """The row-major position of an index."""
    total = as_expr(0)
    for i, step in zip(index, contiguous_strides(tuple(shape)), strict=True):
        total = total + i * step
    return total


def divide(e: Expr, by: Expr, facts: Facts) -> tuple[Expr, Expr]:
    """(e // by, e % by), with the part of `e` that is provably below `by` split off."""
    if by.is_const and by.value == 1:
        return e, as_expr(0)
    whole, rest = _multiples(e, by)
    if facts.prove(ge(rest, 0)) and facts.prove(lt(rest, by)):
        return whole, rest
    return whole + floordiv(rest, by), mod(rest, by)


def _multiples(e: Expr, by: Expr) -> tuple[Expr, Expr]:
    """e == whole*by + rest, with every term that `by` divides exactly in `whole`."""
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


def unflatten(position: Expr, shape: Sequence[Expr], facts: Facts) -> Index:
    """The index of a row-major position; the leading one is not wrapped."""
    index: list[Expr] = []
    for dim in reversed(shape[1:]):
        position, low = divide(position, dim, facts)
        index.append(low)
    if shape:
        index.append(position)
    return tuple(reversed(index))


def segments(
    a: Sequence[Expr], b: Sequence[Expr], facts: Facts
) -> list[tuple[range, range]]:
    """Cuts two shapes of one size into the smallest runs of equal product.

    (b, s, 12, 64) and (b, s, 768) give b|b, s|s, (12, 64)|(768).
    """
    out: list[tuple[range, range]] = []
    i = j = 0
    while i < len(a) or j < len(b):
        first_i, first_j = i, j
        pa = pb = as_expr(1)
        while True:
            if pa == pb and i > first_i and j > first_j:
                break
            if i == len(a) and j == len(b):
                break
            take_a = j == len(b) or (i < len(a) and _first(pa, pb, facts))
            if take_a:
                pa, i = pa * facts.canonical(a[i]), i + 1
            else:
                pb, j = pb * facts.canonical(b[j]), j + 1
        out.append((range(first_i, i), range(first_j, j)))
    return out


def _first(pa: Expr, pb: Expr, facts: Facts) -> bool:
    """Whether the a side should take its next dim: it is not the larger one so far."""
    if pa == pb:
        return True
    order = facts.compare(pa, pb)
    if order in ("lt", "le"):
        return True
    if order in ("gt", "ge"):
        return False
    # Undecided: the side whose product lacks a factor of the other takes the next.
    return len(pa.symbols()) <= len(pb.symbols())


def reshape_index(
    index: Index, shape: Sequence[Expr], to: Sequence[Expr], facts: Facts
) -> Index:
    """The index in `to` of the element at `index` of `shape` (row-major reshape)."""
    out: list[Expr] = []
    for here, there in segments(shape, to, facts):
        if len(here) == 1 and len(there) == 1:
            out.append(index[here.start])
            continue
        dims = [shape[k] for k in here]
        position = flatten([index[k] for k in here], dims)
        out.extend(unflatten(position, [to[k] for k in there], facts))
    return tuple(out)


def pull(op: Op, index: Index, facts: Facts) -> Index:
    """The operand index of one of VIEWS' ops at a result index."""
    x = op.operands[0]
    match op.name:
        case "broadcast":
            axes = op.ints_attr("axes")
            return tuple(
                as_expr(0) if _is_one(x.shape[k]) else index[axis]
                for k, axis in enumerate(axes)
            )
        case "reshape":
            return reshape_index(index, op.result.shape, x.shape, facts)
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
        case _:
            raise ValueError(f"{op.name} is not a view")


def _is_one(dim: Expr) -> bool:
    return dim.is_const and dim.value == 1


def numel(shape: Sequence[Expr], facts: Facts) -> Expr:
    """The number of elements, in canonical dims so that equal sizes are one object."""
    return product(facts.canonical(d) for d in shape)
