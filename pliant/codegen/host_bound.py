"""The most memory that a part of a model can take, before its sizes are known.

A part that runs at sizes which data decide (`passes/split.py`) has a host flow whose
table holds the bytes of its buffers and the dims of its results. Its bound is a host
flow that is planned and never run: it reads the sizes of the inputs, takes for each
size of data the most that it can be, and its table holds for every buffer the most
bytes that it has at any such size. That is not the bytes at the largest size: `x[u:]`
shrinks with u. Buffers, results and steps have the same numbers in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pliant.codegen.host_plan import HostPlan, Table
from pliant.sym import Binding, Expr, Facts, as_expr, le, sym
from pliant.sym.monotone import largest
from pliant.sym.rules import Found

_INPUT = "sizes"
_OBSERVED = "d"  # what a binding calls the size that it reads


def bound_host(
    host: HostPlan, first: Sequence[str], found: Sequence[Found], facts: Facts
) -> HostPlan | None:
    """The bound of a part's host flow; None if some buffer has no known largest size.

    `first` are the symbols of the first part, `found` the sizes that earlier parts
    find, and `facts` what is known of both.
    """
    observed = {name: sym(f"{_INPUT}.{k}") for k, name in enumerate(first)}
    bindings = [Binding(name, 0, k, sym(_OBSERVED)) for k, name in enumerate(first)]
    for size in found:
        bindings.append(Binding(size.name, 0, 0, size.end.substitute(observed)))
    entries = _entries(host, found, facts)
    if entries is None or tuple(b.symbol for b in bindings) != host.symbols:
        return None
    return replace(
        host,
        shapes=((_INPUT, observed_sizes(len(first))),),
        bindings=tuple(bindings),
        guards=(),
        table=Table(entries=entries),
        checks=(),
        constants=(),
        calls=(),
        stamps=None,
    )


def observed_sizes(first: int) -> int:
    """How many sizes a bound reads: those of the first part, and at least one."""
    return max(first, 1)


def _entries(host: HostPlan, found: Sequence[Found], facts: Facts) -> list[Expr] | None:
    """The table with the largest of all that is planned; sizes of kernels are 0."""
    ends = {size.name: sym(f"{size.name}.most") for size in found}
    for name, end in ends.items():
        facts = facts.assume(le(sym(name), end))
    back = {f"{name}.most": sym(name) for name in ends}
    planned = set(host.buffer_slots)
    for first, rank in zip(host.output_slots, host.output_ranks, strict=True):
        planned.update(range(first, first + rank))
    made: list[Expr] = []
    for number, entry in enumerate(host.table.entries):
        if number in planned:
            most = largest(entry, ends, facts)
            if most is None:
                return None
            made.append(most.substitute(back))
        else:
            made.append(entry if number >= host.n_exact else as_expr(0))
    return made
