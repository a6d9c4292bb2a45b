"""Inputs that grow: rows are written behind those that are there.

    main(%past, %x)                           main(%past, %x, past)    # p <= capacity
    %new = concat(%past, %x)                  %rows = slice(%past, 0 .. p)
    %y = f(%new)                       ->     %end = slice(%past, p + n .. capacity)
    return %y, %new                           %whole = concat(%rows, %x, %end)
                                              %new = slice(%whole, 0 .. p + n)
                                              %y = f(%new)
                                              return %y, %whole

where the parameter %past: f32[p, ..] becomes the memory of all rows it may ever have,
f32[capacity, ..], and `p` an integer that the call gives. The last result is stored in
the parameter, so stage `overwrite` writes %x and nothing else, and kernels read all
rows where they are. A model that does not return such a concat cannot grow the input.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pliant.errors import OptionError
from pliant.frontend.contract import Imported
from pliant.frontend.signature import (
    FixedSlot,
    GrownResult,
    LengthSlot,
    Slot,
    TensorResult,
    TensorSlot,
)
from pliant.ir.build import Builder, symbols_of
from pliant.ir.graph import Graph, Names, Op, Value, substitute
from pliant.ir.types import TensorType
from pliant.sym import Expr, Guard, ge, le, sym


@dataclass(frozen=True, slots=True)
class _Growth:
    """A parameter that grows, and the result that is its new value."""

    argument: int  # of the signature, and its slot
    slot: int
    given: TensorSlot
    axis: int
    past: Value
    memory: Value  # the parameter instead
    length: str  # the symbol of its rows
    made: Op  # the concat
    result: int

    @property
    def capacity(self) -> Expr:
        return self.memory.shape[self.axis]

    @property
    def given_back(self) -> GrownResult:
        return GrownResult(self.slot, self.after, str(self.capacity))

    @property
    def after(self) -> Expr:
        return self.made.result.shape[self.axis]


def grown(imported: Imported, axes: Mapping[int, int]) -> Imported:
    """The program with some arguments (of its signature) that grow along an axis."""
    if not axes:
        return imported
    main, signature = imported.module.main, imported.signature
    growths = _growths(imported, axes)
    lengths = tuple(dict.fromkeys(g.length for g in growths))
    graph, order = _rewritten(main, growths, lengths)
    gone = {g.result: g for g in growths}
    results = tuple(
        gone[r.number].given_back
        if isinstance(r, TensorResult) and r.number in gone
        else replace(r, number=order[r.number])
        if isinstance(r, TensorResult)
        else r
        for r in signature.results
    )
    arguments = list(signature.arguments)
    for g in growths:
        arguments[g.argument] = replace(g.given, type=g.memory.type)
    stores = tuple((name, order[number]) for name, number in signature.stores)
    stores += tuple((g.memory.name, order[g.result]) for g in growths)
    made = replace(
        signature,
        arguments=(*arguments, *_slots(lengths, arguments)),
        results=results,
        positional=False,
        plain=False,
        example=(),
        stores=stores,
        written=(*signature.written, *(g.slot for g in growths)),
        grows=tuple((g.slot, g.length) for g in growths),
    )
    return Imported(imported.module.with_main(graph), made, imported.assumptions)


def _slots(lengths: Sequence[str], arguments: Sequence[Slot]) -> list[LengthSlot]:
    """What passes the lengths: no other argument has such a name."""
    names = Names(a.name for a in arguments)
    return [LengthSlot(names.fresh(name), name) for name in lengths]


def _growths(imported: Imported, axes: Mapping[int, int]) -> list[_Growth]:
    main, arguments = imported.module.main, imported.signature.arguments
    producers, taken = main.producers(), symbols_of(main)
    params, slots = iter(main.params), itertools.count()
    own = {r.number for r in imported.signature.results if isinstance(r, TensorResult)}
    capacities: dict[str, str] = {}
    found: list[_Growth] = []
    for number, argument in enumerate(arguments):
        past = next(params) if isinstance(argument, TensorSlot) else None
        slot = -1 if isinstance(argument, FixedSlot) else next(slots)
        if number not in axes:
            continue
        axis, name = axes[number], argument.name
        if past is None:
            raise OptionError(f"input '{name}' is no tensor: it cannot grow")
        assert isinstance(argument, TensorSlot)
        rows = past.shape[axis]
        if str(rows) not in rows.symbols():
            raise OptionError(
                f"input '{name}' grows along axis {axis}, whose size is {rows}: make "
                "it a dim of its own in dynamic_shapes"
            )
        results = [
            k
            for k, value in enumerate(main.results)
            if k in own and _appends(producers.get(value), past, axis)
        ]
        if len(results) != 1:
            raise OptionError(
                f"input '{name}' is to grow along axis {axis}, but {len(results)} "
                "results of the model are a concat of it and new rows; there has to "
                "be one, torch.cat([past, new], axis)"
            )
        length = str(rows)
        if length not in capacities:
            hint = "capacity" if not capacities else f"{length}_capacity"
            while hint in taken:
                hint += "_"
            taken.add(hint)
            capacities[length] = hint
        shape = list(past.shape)
        shape[axis] = sym(capacities[length])
        memory = Value(past.name, TensorType(past.dtype, tuple(shape)))
        made, names = producers[main.results[results[0]]], (past, memory, length)
        found.append(_Growth(number, slot, argument, axis, *names, made, results[0]))
    return found


def _appends(op: Op | None, past: Value, axis: int) -> bool:
    """Whether an op is the concat of an input's rows and others behind them."""
    if op is None or op.name != "concat" or op.int_attr("axis") != axis:
        return False
    return op.operands[0] is past and past not in op.operands[1:]


def _rewritten(
    main: Graph, growths: Sequence[_Growth], lengths: Sequence[str]
) -> tuple[Graph, dict[int, int]]:
    """The graph, and the new number of each result."""
    memories = {g.past: g.memory for g in growths}
    params = tuple(memories.get(p, p) for p in main.params)
    sizes = tuple(dict.fromkeys([*main.sizes, *lengths]))
    constraints = list(main.constraints)
    for g in {g.length: g for g in growths}.values():
        constraints += _constraints(g)
    b = Builder.within(
        main.replace(params=params, sizes=sizes, constraints=tuple(constraints))
    )
    mapping = {
        g.past: b.slice_axis(g.memory, g.axis, 0, sym(g.length)) for g in growths
    }
    made = {g.made: g for g in growths}
    wholes: dict[int, Value] = {}
    for op in main.ops:
        growth = made.get(op)
        if growth is None:
            b.append(substitute(op, mapping))
            continue
        axis, after, capacity = growth.axis, growth.after, growth.capacity
        end = b.slice_axis(growth.memory, axis, after, capacity - after)
        parts = [mapping.get(v, v) for v in op.operands]
        whole = b.concat([*parts, end], axis)
        wholes[growth.result] = whole
        mapping[op.result] = b.slice_axis(whole, axis, 0, after)
    kept = [k for k in range(len(main.results)) if k not in wholes]
    numbers = [*kept, *wholes]
    results = [wholes.get(k) or mapping.get(v, v) for k, v in enumerate(main.results)]
    graph = main.replace(
        params=params,
        ops=tuple(b.ops),
        results=tuple(results[k] for k in numbers),
        sizes=sizes,
        constraints=(*constraints, *b.guards),
    )
    return graph, {old: new for new, old in enumerate(numbers)}


def _constraints(growth: _Growth) -> list[Guard]:
    """What holds of the rows that are there, and behind them."""
    length, after, capacity = sym(growth.length), growth.after, growth.capacity
    name = growth.past.name
    fits: tuple[str | Expr, ...] = (
        f"input '{name}' has ",
        after,
        " rows after this call, and room for ",
        capacity,
        ": give it a larger capacity (reserve)",
    )
    some: tuple[str | Expr, ...] = (f"input '{name}' has ", length, " rows")
    return [
        Guard(ge(length, 0), some, "growing"),
        Guard(le(after, capacity), fits, "growing"),
    ]
