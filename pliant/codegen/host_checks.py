"""Conditions on a program's sizes under which its kernels may compute with them.

Kernels index memory in 64 bits without overflow checks. They may, because every call at
a new shape is refused first unless

    every integer of the program (dims, offsets, numbers made from sizes) is exact;
    no dim is negative;
    every value, also one that only exists inside a kernel, has at most MOST bytes,
        where a dim of 0 counts as 1;
    no contraction takes more than MOST multiply-adds.

An index below its dim, times the stride of that dim, which is a product of other dims,
is then below MOST. This holds for an empty value too: shape (0, 2**62, 8) has strides
that no register holds, so a dim of 0 counts as 1. Rounding a dim up to a tile, adding a
window to it or scaling it in a cost comparison adds a factor far below the remaining
2**7 up to 2**63. Anything rounded up further has a buffer of its own, whose bytes are
checked.

MOST is more than any machine addresses, so only sizes are refused that cannot be
allocated, or that would take days to compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from pliant.ir.graph import Attr, Graph, Op, Value, walk
from pliant.ir.types import TensorType
from pliant.ir.work import op_flops
from pliant.sym import Expr, maximum, product
from pliant.sym.expr import Max
from pliant.sym.rules import SizeCheck
from pliant.sym.signs import plainly_nonnegative

MOST = 1 << 56


def size_checks(graphs: Iterable[Graph]) -> tuple[SizeCheck, ...]:
    """The checks of everything that the graphs compute, regions included."""
    extents: dict[Expr, SizeCheck] = {}
    others: dict[Expr, SizeCheck] = {}
    seen: set[TensorType] = set()
    for graph in dict.fromkeys(graphs):
        for value, op in _values(graph):
            if value.type in seen:
                continue
            seen.add(value.type)
            place = f" ({op.loc})" if op is not None and op.loc else ""
            what = f"{value.name}: {value.type}{place}"
            dims = [dim for dim in value.shape if not dim.is_const]
            for dim in dims:
                if not plainly_nonnegative(dim):
                    others[dim] = SizeCheck(dim, f"a dim of {what}", low=0)
            if dims:
                whole = product(maximum(dim, 1) for dim in value.shape)
                whole = whole * value.dtype.bytes
                whole_text = f"{what} in bytes"
                extents.setdefault(whole, SizeCheck(whole, whole_text, high=MOST))
        for op in walk(graph):
            for expr in _expressions(value for _, value in op.attrs):
                if not expr.is_const and expr not in others:
                    others[expr] = SizeCheck(expr, f"a number of {_name(op)}")
            flops = op_flops(op)
            if not flops.is_const:
                what = f"the operations of {_name(op)}"
                extents[flops] = SizeCheck(flops, what, high=2 * MOST)
    return (*_largest(list(extents.values())), *others.values())


def _values(graph: Graph) -> Iterator[tuple[Value, Op | None]]:
    for param in graph.params:
        yield param, None
    for op in graph.ops:
        for result in op.results:
            yield result, op
        for region in op.regions:
            yield from _values(region)


def _name(op: Op) -> str:
    return f"{op.name} ({op.loc})" if op.loc else op.name


def _expressions(attrs: Iterable[Attr]) -> Iterator[Expr]:
    for attr in attrs:
        if isinstance(attr, Expr):
            yield attr
        elif isinstance(attr, tuple):
            yield from _expressions(attr)


def _largest(checks: Sequence[SizeCheck]) -> list[SizeCheck]:
    """Drops checks whose factors, each at least 1, are all among another's."""
    kept: list[SizeCheck] = []
    for check in checks:
        if any(_implies(other, check) for other in kept):
            continue
        kept = [other for other in kept if not _implies(check, other)]
        kept.append(check)
    return kept


def _implies(check: SizeCheck, other: SizeCheck) -> bool:
    assert check.high is not None and other.high is not None
    if len(check.value.terms) != 1 or len(other.value.terms) != 1:
        return False
    ((many, mono),), ((few, part),) = check.value.terms, other.value.terms
    powers = dict(mono)
    if not all(isinstance(atom, Max) for atom in powers):  # a factor may be 0
        return False
    inside = all(powers.get(atom, 0) >= power for atom, power in part)
    return inside and few * check.high <= many * other.high
