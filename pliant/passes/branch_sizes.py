"""Sizes that a branch decides: of a result that is not as large on both sides.

    %y: f32[u] = if(%c, %x)            %all: f32[n], %count = if(%c, %x)
    region then {.. f32[k] found}  ->  region then {.. flat, its size}
    region else {.. f32[n]}            region else {.. flat, its size}
                                       extent(%count) {most = n} -> u
                                       %y: f32[u] = the first of %all

Both sides give their elements in memory for the most there can be, and the size as a
number. From there on it is a size that data decide, like others (`passes/split.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from pliant.errors import UnsupportedOp, UnsupportedOpError
from pliant.ir.build import Builder
from pliant.ir.finders import FINDERS, most_of, size_of
from pliant.ir.graph import Graph, Op, Value
from pliant.ir.types import DType, TensorType
from pliant.sym import Expr, Facts, le, maximum, sym
from pliant.sym.monotone import largest


def loose_sizes(op: Op) -> dict[str, tuple[int, int]]:
    """The sizes that an `if` decides, and a result and axis that have each."""
    found: dict[str, tuple[int, int]] = {}
    if op.name != "if":
        return found
    for number, value in enumerate(op.results):
        for axis, dim in enumerate(value.shape):
            sides = (region.results[number].shape[axis] for region in op.regions)
            if dim.symbol is not None and any(side != dim for side in sides):
                found.setdefault(dim.symbol, (number, axis))
    return found


def _refuse(op: Op, why: str) -> UnsupportedOpError:
    return UnsupportedOpError([UnsupportedOp(op.name, why, op.loc or "unknown")])


def _end(region: Graph, dim: Expr, facts: Facts) -> Expr | None:
    """The largest that a dim of a region gets, over sizes outside it."""
    ends: dict[str, Expr] = {}
    for op in region.ops:
        if op.name not in FINDERS:
            continue
        end = largest(most_of(op), ends, facts)
        if end is None:
            return None
        facts = facts.assume(le(sym(size_of(op)), end))
        ends[size_of(op)] = end
    return largest(dim, ends, facts)


def _flattened(
    region: Graph, flat: set[int], sizes: dict[str, tuple[int, int]]
) -> Graph:
    """A region that gives some results flat, and sizes of them behind the others."""
    b = Builder.within(region)
    results = list(region.results)
    for number in flat:
        value = results[number]
        results[number] = b.reshape(value, (value.type.numel,))
    for number, axis in sizes.values():
        results.append(b.dim_value(region.results[number].shape[axis]))
    return region.replace(ops=(*region.ops, *b.ops), results=tuple(results))


def _sized(b: Builder, count: Value, name: str, most: Expr) -> None:
    """The number is the size of that name from here on."""
    b.emit("extent", count, most=most, of="the size of a branch's result")
    op = b.ops.pop()
    size = Value(op.result.name, TensorType(DType.BOOL, (sym(name),)))
    b.append(op.replace(results=(size,)))
    b.facts = b.facts.assume(le(sym(name), most))


def sized_branches(b: Builder, op: Op, bound: Callable[[Graph], Graph]) -> None:
    """Adds an `if` that decides sizes; `bound` binds the sizes that a region finds."""
    sizes = loose_sizes(op)
    flat = {
        number
        for number, value in enumerate(op.results)
        if any(s in sizes for dim in value.shape for s in dim.symbols())
    }
    made: list[Graph] = []
    for region in op.regions:
        changed = _flattened(region, flat, sizes)
        inner = bound(changed)
        made.append(inner.replace(results=inner.results[: len(changed.results)]))
    for number in flat:
        then, other = (region.results[number].shape[0] for region in made)
        if not b.same(then, other):
            why = f"its sides give at most {then} and {other} elements of one result"
            raise _refuse(op, why)
    with b.at(op.loc):
        results = b.emit_multi("if", *op.operands, regions=made)
        choice = b.ops.pop()
        kept = [
            new if number in flat else old
            for number, (old, new) in enumerate(zip(op.results, results, strict=False))
        ]
        counts = results[len(kept) :]
        b.append(choice.replace(results=(*kept, *counts)))
        for (name, (number, axis)), count in zip(sizes.items(), counts, strict=True):
            ends = [
                _end(region, region.results[number].shape[axis], b.facts)
                for region in op.regions
            ]
            known = [end for end in ends if end is not None]
            if len(known) < len(ends):
                raise _refuse(op, "no largest size is known of its result")
            _sized(b, count, name, maximum(*known))
        for number in flat:
            wanted = op.results[number]
            part = b.slice_axis(kept[number], 0, 0, wanted.type.numel)
            b.reshape(part, wanted.shape)
            last = b.ops.pop()
            b.append(last.replace(results=(wanted,)))
