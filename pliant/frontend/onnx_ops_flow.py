"""If, Loop and Scan: their graphs become regions, or part of the graph around them.

    If      known condition: the branch that is taken; else `if`
    Loop    no condition and a known count: `scan` where it stacks results, else `loop`;
            else `while`, which stacks into rows for the most rounds there can be
    Scan    `scan`, with the scanned axis in front

What a region reads of the names around it is passed along. A loop whose values change
shape, or that carries a sequence, is unrolled if its count is a small constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pliant.frontend.onnx_context import Node, OnnxContext
from pliant.frontend.onnx_ops_activation import Table
from pliant.frontend.onnx_tensors import known_tensor
from pliant.frontend.onnx_types import BOOL, INT64
from pliant.frontend.onnx_values import Entry, Items, Known, tensors_in
from pliant.frontend.translate import Unsupported
from pliant.ir.graph import Graph, Value
from pliant.ir.types import DType, TensorType
from pliant.sym import Cond, Expr, as_expr, le

UNROLLED = 256  # rounds of a loop that is written out
MOST_ROUNDS = 1 << 20  # of a loop that stacks results, if nothing tells of a bound
SCALAR = TensorType(DType.I64, ())


def tensors_of(entries: dict[str, Entry]) -> list[Value]:
    return tensors_in(entries.values())


# ---- branches


def if_(cx: OnnxContext, n: Node) -> tuple[Entry, ...]:
    then, other = n.attrs["then_branch"], n.attrs["else_branch"]
    known = n.known(0)
    if known is not None and known.array.size == 1:
        taken = known.array.reshape(-1)[0]
        if not isinstance(taken, Cond):
            return tuple(n.walk.inlined(then if taken else other, []))
        return _on_sizes(cx, n, taken)
    before = len(cx.problems)
    try:
        return _branches(cx, n, cx.reshape(cx.to_bool(n.tensor(0)), ()))
    except Unsupported as reason:
        fixed_instead(n, 0, before)
        named = sorted(n.sources[0]) if n.sources else []
        if not named:
            raise
        advice = f"give example_inputs with values of {', '.join(named)}"
        raise _advised(reason, f"{advice}, which fix the branch") from None


def _advised(reason: Unsupported, advice: str) -> Unsupported:
    """Problems inside a branch are told already, and are no reason of their own."""
    return Unsupported(f"{reason}: {advice}" if str(reason) else advice)


def fixed_instead(n: Node, i: int, problems: int) -> None:
    """Fixes a condition to the example's value, where data cannot decide."""
    sources = n.sources[i] - n.cx.fixed if i < len(n.sources) else frozenset()
    if sources and sources <= n.cx.examples:
        del n.cx.problems[problems:]
        n.needed(i, "a condition")


def _on_sizes(cx: OnnxContext, n: Node, cond: Cond) -> tuple[Entry, ...]:
    """A condition on sizes: where branches differ in shape, the example's is taken."""
    try:
        return _branches(cx, n, cx.truth(cond))
    except Unsupported as reason:
        symbols = cond.symbols()
        if not symbols:
            raise
        if any(s not in cx.hints for s in symbols):
            advice = "give example_inputs, whose sizes fix the branch"
            raise _advised(reason, advice) from None
    holds = cond.holds(cx.hints)
    cx.require(cond if holds else cond.negated(), "the branch that the example takes")
    graph = n.attrs["then_branch" if holds else "else_branch"]
    return tuple(n.walk.inlined(graph, []))


def _branches(cx: OnnxContext, n: Node, condition: Value) -> tuple[Entry, ...]:
    graphs = n.attrs["then_branch"], n.attrs["else_branch"]
    around = n.walk.outside(*graphs)
    operands = tensors_of(around)
    regions: list[Graph] = []
    for graph in graphs:
        made = n.walk.region(graph, [], around, lambda _, results: _values(cx, results))
        own = made.results[: len(made.results) - len(operands)]
        regions.append(made.replace(results=own))
    for a, b in zip(regions[0].results, regions[1].results, strict=True):
        if a.dtype is not b.dtype or a.type.rank != b.type.rank:
            raise Unsupported(f"branches give {a.type} and {b.type}")
    return cx.b.emit_multi("if", condition, *operands, regions=regions)


def _values(cx: OnnxContext, entries: Sequence[Entry]) -> list[Value]:
    if any(isinstance(e, Items) for e in entries):
        raise Unsupported("a region that gives a sequence")
    return [cx.value(e) for e in entries]


# ---- loops


def loop(cx: OnnxContext, n: Node) -> tuple[Entry, ...]:
    """(most rounds, condition, carried..) -> carried.., stacked.."""
    body = n.attrs["body"]
    carried = [n.entry(i) for i in range(2, len(n.inputs))]
    count = len(carried)
    rounds = _rounds(n)
    go = _truth_of(n, 1)
    endless = _always(body) and (not n.has(1) or go is True)
    if go is False:
        rounds, endless = as_expr(0), True
    stacks = len(body.output) - 1 - count
    before = len(cx.problems)
    try:
        if any(isinstance(e, Items) for e in carried):
            return _unrolled(cx, n, carried, rounds, endless)
        if not endless or (rounds is None and n.has(0)):
            return _while(cx, n, carried, rounds, stacks)
        if rounds is None:
            raise Unsupported("a loop without a count and without a condition")
        return _counted(cx, n, carried, rounds, stacks)
    except Unsupported:
        fixed_instead(n, 1, before)
        if not endless or rounds is None or not rounds.is_const:
            raise
        if rounds.value > UNROLLED:
            raise
        del cx.problems[before:]
        return _unrolled(cx, n, carried, rounds, endless)


def _rounds(n: Node) -> Expr | None:
    if not n.has(0):
        return None
    known = n.known(0)
    if known is None:
        sources = n.sources[0] - n.cx.fixed
        if sources and sources <= n.cx.examples:
            return as_expr(n.sizes(0, "the number of rounds")[0])
        return None
    return as_expr(n.sizes(0, "the number of rounds")[0])


def _truth_of(n: Node, i: int) -> bool | None:
    known = n.known(i)
    if known is None:
        return None
    found = known.array.reshape(-1)[0]
    return None if isinstance(found, Cond) else bool(found)


def _always(body: Any) -> bool:
    """Whether a loop's condition stays what it was at first, or is constantly true."""
    name = body.output[0].name
    if len(body.input) > 1 and name == body.input[1].name:
        return True
    made = {o: node for node in body.node for o in node.output}
    constants = {t.name: t for t in body.initializer}
    while name in made and made[name].op_type == "Identity":
        name = made[name].input[0]
    if len(body.input) > 1 and name == body.input[1].name:
        return True
    if name in constants:
        return bool(known_tensor(constants[name]).array.all())
    node = made.get(name)
    if node is not None and node.op_type == "Constant":
        tensors = [a.t for a in node.attribute if a.name == "value"]
        return bool(tensors) and bool(known_tensor(tensors[0]).array.all())
    return False


TRUE = Known(np.array(True), BOOL)


def _counted(
    cx: OnnxContext, n: Node, carried: list[Entry], rounds: Expr, stacks: int
) -> tuple[Entry, ...]:
    """A loop with a known number of rounds, as `scan`."""
    body, count = n.attrs["body"], len(carried)
    around = n.walk.outside(body)
    held = tensors_of(around)
    start = [cx.value(e) for e in carried]
    types = [v.type for v in start]

    def build(params: list[Value], results: tuple[Entry, ...]) -> list[Value]:
        made = _values(cx, results[1:])
        after = [_as(cx, v, t) for v, t in zip(made, types, strict=False)]
        return [*after, *made[count:]]

    steps = cx.iota((rounds,), 0, DType.I64)
    region = n.walk.region(
        body,
        [*types, SCALAR],
        around,
        build,
        lambda params: [params[count], TRUE, *params[:count]],
    )
    _agreed(cx, types, region.results)
    region = _ordered(region, count, 1, len(held))
    made = cx.b.emit_multi(
        "scan", *start, *held, steps, regions=(region,), rounds=rounds, scanned=1
    )
    return (*made[:count], *made[count + len(held) :])


def _as(cx: OnnxContext, value: Value, wanted: TensorType) -> Value:
    """A carried value after a round, which has the type it had before."""
    if value.dtype is not wanted.dtype or value.type.rank != wanted.rank:
        raise Unsupported(
            f"a carried value is {wanted} before a round, {value.type} then"
        )
    for have, want in zip(value.shape, wanted.shape, strict=True):
        alike = cx.hint(have) is not None and cx.hint(have) == cx.hint(want)
        if not alike and not cx.b.same(have, want):
            raise Unsupported(f"a carried value changes from {wanted} to {value.type}")
    return value


def _agreed(
    cx: OnnxContext, types: Sequence[TensorType], results: Sequence[Value]
) -> None:
    """Sizes of carried values that are equal in the example must be in every call."""
    for wanted, value in zip(types, results, strict=False):
        for have, want in zip(value.shape, wanted.shape, strict=True):
            cx.b.require_equal(want, have, "a carried value keeps its shape")


def _ordered(region: Graph, carried: int, scanned: int, held: int) -> Graph:
    """From carried, scanned, held | results, held to the order that `scan` has."""
    params, results = region.params, region.results
    start, end = carried + scanned, carried + scanned + held
    own = results[: len(results) - held]
    kept = results[len(results) - held :]
    return region.replace(
        params=(*params[:carried], *params[start:end], *params[carried:start]),
        results=(*own[:carried], *kept, *own[carried:]),
    )


def _counted_first(
    cx: OnnxContext, n: Node, carried: list[Entry], stacks: int
) -> tuple[Entry, ...]:
    """A loop that stacks results, and whose rounds have no bound.

    It is run once for the number of its rounds, which is a size from then on. (No body
    draws random numbers, which would be others in the second run.)
    """
    (rounds,) = _while(cx, n, carried, None, 0, counting=True)
    assert isinstance(rounds, Value)
    most = as_expr(MOST_ROUNDS)
    size = cx.b.emit("extent", rounds, most=most, of="Loop").shape[0]
    return _counted(cx, n, carried, size, stacks)


def _while(
    cx: OnnxContext,
    n: Node,
    carried: list[Entry],
    rounds: Expr | None,
    stacks: int,
    counting: bool = False,
) -> tuple[Entry, ...]:
    """A loop with a condition of data; (round, condition, carried.., rows..)

    When `counting`, all it gives is the number of rounds.
    """
    body, count = n.attrs["body"], len(carried)
    around = n.walk.outside(body)
    held = tensors_of(around)
    start = [cx.value(e) for e in carried]
    types = [v.type for v in start]
    most = cx.reshape(cx.cast(n.tensor(0), DType.I64), ()) if n.has(0) else None
    first = (
        cx.reshape(cx.to_bool(n.tensor(1)), ())
        if n.has(1)
        else cx.full(True, (), DType.BOOL)
    )
    if stacks and rounds is None:
        return _counted_first(cx, n, carried, stacks)
    truth = TensorType(DType.BOOL, ())
    rows: list[TensorType] = []
    if stacks:
        rows = _stacked_types(cx, n, types, around, count)
        for type in rows:
            for dim in type.shape:
                if not cx.proves(le(0, dim)):
                    raise Unsupported("stacked results whose size changes")
    tables = [
        cx.full(0, (rounds, t.numel), t.dtype) for t in rows if rounds is not None
    ]
    limit = [] if most is None else [most]

    def build(params: list[Value], results: tuple[Entry, ...]) -> list[Value]:
        made = _values(cx, results)
        go = cx.reshape(made[0], ())
        after = [_as(cx, v, t) for v, t in zip(made[1:], types, strict=False)]
        step = params[0]
        full = []
        held_by = params[2 + count : 2 + count + len(tables)]
        for table, row in zip(held_by, made[1 + count :], strict=False):
            place = cx.in_range(cx.reshape(step, (1,)), table.shape[0], 0)
            line = cx.reshape(row, (1, row.type.numel))
            full.append(cx.b.emit("scatter_rows", table, place, line))
        return [cx.add(step, 1), go, *after, *full, *params[2 + count + len(full) :]]

    own = [SCALAR, truth, *types, *(t.type for t in tables), *(v.type for v in limit)]
    region = n.walk.region(
        body, own, around, build, lambda p: [p[0], p[1], *p[2 : 2 + count]]
    )
    outer = cx.b
    cx.b = outer.child()
    try:
        params = [cx.b.param("state", p.type) for p in region.params]
        go = params[1]
        if limit:
            below = cx.b.binary("lt", params[0], params[len(own) - 1])
            go = cx.b.binary("logical_and", go, below)
        test = cx.b.finish("test", [go])
    finally:
        cx.b = outer
    zero = cx.tensor(0, DType.I64)
    made = cx.b.emit_multi(
        "while", zero, first, *start, *tables, *limit, *held, regions=(test, region)
    )
    out: list[Entry] = list(made[2 : 2 + count])
    if counting:
        return (made[0],)
    if stacks:
        assert rounds is not None
        mask = cx.b.emit("extent", made[0], most=rounds, of="Loop")
        for table, type in zip(made[2 + count :], rows, strict=False):
            cut = cx.slice(table, 0, 0, mask.shape[0])
            out.append(cx.reshape(cut, (mask.shape[0], *type.shape)))
    return tuple(out)


def _stacked_types(
    cx: OnnxContext,
    n: Node,
    types: list[TensorType],
    around: dict[str, Entry],
    count: int,
) -> list[TensorType]:
    """The types of rows that a body gives, by translating it once."""
    found: list[TensorType] = []

    def build(params: list[Value], results: tuple[Entry, ...]) -> list[Value]:
        found.extend(v.type for v in _values(cx, results[1 + count :]))
        return []

    own = [SCALAR, TensorType(DType.BOOL, ()), *types]
    n.walk.region(n.attrs["body"], own, around, build)
    return found


def _unrolled(
    cx: OnnxContext,
    n: Node,
    carried: list[Entry],
    rounds: Expr | None,
    endless: bool,
) -> tuple[Entry, ...]:
    """The rounds one after the other."""
    if rounds is None:
        rounds = as_expr(n.sizes(0, "the number of rounds")[0]) if n.has(0) else None
    if rounds is None or not rounds.is_const or rounds.value > UNROLLED:
        raise Unsupported(
            "a loop of values that change shape, or of sequences, whose number of "
            "rounds is no small constant"
        )
    body, count = n.attrs["body"], len(carried)
    state = list(carried)
    stacked: list[list[Value]] = [[] for _ in range(len(body.output) - 1 - count)]
    go: Entry = TRUE if endless or not n.has(1) else n.entry(1)
    for step in range(rounds.value):
        if not (isinstance(go, Known) and not go.is_symbolic):
            raise Unsupported("a loop of sequences whose condition depends on data")
        if not go.array.reshape(-1)[0]:
            break
        number = Known(np.array(step, np.int64), INT64)
        go, *made = n.walk.inlined(body, [number, go, *state])
        state = made[:count]
        for rows, row in zip(stacked, made[count:], strict=True):
            value = cx.value(row)
            rows.append(cx.reshape(value, (1, *value.shape)))
    out: list[Entry] = list(state)
    for rows in stacked:
        if not rows:
            raise Unsupported("a loop without rounds that stacks results")
        out.append(cx.concat(rows, 0))
    return tuple(out)


# ---- scans


def scan(cx: OnnxContext, n: Node) -> tuple[Entry, ...]:
    body, scanned = n.attrs["body"], n.attrs["num_scan_inputs"]
    if n.version < 9:
        return _batched_scan(cx, n)
    given = [n.tensor(i) for i in range(len(n.inputs))]
    count = len(given) - scanned
    start, rows = given[:count], given[count:]
    stacks = len(body.output) - count
    axes = n.attrs.get("scan_input_axes") or [0] * scanned
    out_axes = n.attrs.get("scan_output_axes") or [0] * stacks
    ways = n.attrs.get("scan_input_directions") or [0] * scanned
    out_ways = n.attrs.get("scan_output_directions") or [0] * stacks
    moved = []
    for row, axis, way in zip(rows, axes, ways, strict=True):
        front = cx.move_axis(row, n.axis(axis, row.type.rank), 0)
        moved.append(cx.b.emit("flip", front, axes=(0,)) if way else front)
    made = scanned_rows(cx, n, start, moved)
    out = list(made[:count])
    for value, axis, way in zip(made[count:], out_axes, out_ways, strict=True):
        found = cx.b.emit("flip", value, axes=(0,)) if way else value
        out.append(cx.move_axis(found, 0, n.axis(axis, found.type.rank)))
    return tuple(out)


def scanned_rows(
    cx: OnnxContext, n: Node, start: list[Value], rows: list[Value]
) -> tuple[Value, ...]:
    body, count = n.attrs["body"], len(start)
    around = n.walk.outside(body)
    held = tensors_of(around)
    types = [v.type for v in start]
    inner = [r.type.with_shape(r.shape[1:]) for r in rows]

    def build(params: list[Value], results: tuple[Entry, ...]) -> list[Value]:
        made = _values(cx, results)
        after = [_as(cx, v, t) for v, t in zip(made, types, strict=False)]
        return [*after, *made[count:]]

    region = n.walk.region(body, [*types, *inner], around, build)
    _agreed(cx, types, region.results)
    region = _ordered(region, count, len(rows), len(held))
    made = cx.b.emit_multi(
        "scan",
        *start,
        *held,
        *rows,
        regions=(region,),
        rounds=rows[0].shape[0],
        scanned=len(rows),
    )
    return (*made[:count], *made[count + len(held) :])


def _batched_scan(cx: OnnxContext, n: Node) -> tuple[Entry, ...]:
    """Operator set 8: a batch in front, each of which is scanned on its own."""
    if n.has(0):
        raise Unsupported("a Scan with lengths of its own")
    scanned = n.attrs["num_scan_inputs"]
    given = [n.tensor(i) for i in range(1, len(n.inputs))]
    count = len(given) - scanned
    size = cx.constant_int(given[0].shape[0], "the batch of a Scan of operator set 8")
    every: list[tuple[Value, ...]] = []
    for k in range(size):
        parts = [cx.reshape(cx.slice(v, 0, k, 1), v.shape[1:]) for v in given]
        every.append(scanned_rows(cx, n, parts[:count], parts[count:]))
    out = []
    for column in zip(*every, strict=True):
        out.append(cx.concat([cx.reshape(v, (1, *v.shape)) for v in column], 0))
    return tuple(out)


FLOW: Table = {
    ("If", 1): if_,
    ("Loop", 1): loop,
    ("Scan", 8): scan,
}
