"""Gradients through control flow: a region that goes back, recomputing what it needs.

    %y = if(%c, %x) region then(%x) {..} region else(%x) {..}
    -> %dx = if(%c, %x, %dy) region then_back(%x, %dy) {..} region else_back(..) {..}

    %h, %ys = scan(%h0, %w, %xs) region step(%h, %w, %x) -> (%h, %w, %y)
    -> %h, %ys, %before = scan(..)               also stacks what each round began with
       %dh0, %dw, %dxs = scan(%dh, 0, %w, %before, %xs, %dys) {reverse}
                                                  region step_back

A scan is walked from its last round to its first. The gradient of a carried value is
carried, those of rows are stacked, and that of a value which every round reads is
summed up. The number of rounds of `while` and `loop` is data, so nothing can be stacked
and they have no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

from pliant.ir.graph import Graph, Names, Op, Value
from pliant.passes.gradient_tape import GradientPart, Grads, Parts, Rule, Tape


def _known(tape: Tape, values: Sequence[Value], grads: Grads) -> list[Value]:
    """The gradients of float values, zeros where there is none."""
    pairs = zip(values, grads, strict=True)
    return [tape.zeros(v) if g is None else g for v, g in pairs if v.dtype.is_float]


def _if(tape: Tape, op: Op, grads: Grads) -> Parts:
    cond, *args = op.operands
    wanted = [k for k, v in enumerate(args) if tape.wants(v)]
    seeds = _known(tape, op.results, grads)
    back = [tape.backward(region, wanted) for region in op.regions]
    found = tape.b.emit_multi("if", cond, *args, *seeds, regions=back)
    for k, grad in zip(wanted, found, strict=True):
        yield args[k], GradientPart(grad)


def changing(body: Graph, count: int) -> list[int]:
    """Which of the first `count` values, the carried ones, a round changes."""
    pairs = zip(body.params, body.results, strict=False)
    same = [after is before for before, after in pairs]
    return [k for k in range(count) if not same[k]]


def with_history(op: Op, names: Names) -> Op:
    """A scan that also stacks what each round began with, behind its results."""
    (body,) = op.regions
    before = [
        body.params[k]
        for k in changing(body, len(op.operands) - op.int_attr("scanned"))
    ]
    rounds = op.dim_attr("rounds")
    more = [
        Value(names.fresh(f"{v.name}_before"), v.type.with_shape((rounds, *v.shape)))
        for v in before
    ]
    body = body.replace(results=(*body.results, *before))
    return op.replace(regions=(body,), results=(*op.results, *more))


def _scan(tape: Tape, op: Op, grads: Grads) -> Parts:
    (body,) = op.regions
    rows = op.int_attr("scanned")
    count = len(op.operands) - rows
    moving = changing(body, count)
    fixed = [k for k in range(count) if k not in moving]
    stacked = range(count, len(body.results) - len(moving))
    history = op.results[len(op.results) - len(moving) :]

    # The body without what it passes on unchanged, and its way back.
    results = [body.results[k] for k in (*moving, *stacked)]
    summed = [k for k in fixed if tape.wants(op.operands[k])]
    scanned = range(count, count + rows)
    wanted_rows = [k for k in scanned if tape.wants(op.operands[k])]
    floats = [k for k in moving if body.params[k].dtype.is_float]
    wanted = [*floats, *summed, *wanted_rows]
    back = tape.backward(body.replace(results=tuple(results)), wanted)
    taken, seeds = back.params[: len(body.params)], back.params[len(body.params) :]
    own, later = seeds[: len(floats)], seeds[len(floats) :]

    # What each round adds to the sums.
    inner = tape.b.child()
    sums = [inner.param("sum", taken[k].type) for k in summed]
    found = back.results
    added = found[len(floats) : len(floats) + len(summed)]
    row_grads = found[len(floats) + len(summed) :]
    totals = [inner.emit("add", s, g) for s, g in zip(sums, added, strict=True)]
    held = [taken[k] for k in fixed]
    region = back.replace(
        params=(
            *own,
            *sums,
            *held,
            *(taken[k] for k in moving),
            *(taken[k] for k in scanned),
            *later,
        ),
        ops=(*back.ops, *inner.ops),
        results=(*found[: len(floats)], *totals, *held, *row_grads),
    )
    given = [
        *_known(tape, [op.results[k] for k in floats], [grads[k] for k in floats]),
        *(tape.zeros(op.operands[k]) for k in summed),
        *(op.operands[k] for k in fixed),
    ]
    behind = [
        *history,
        *(op.operands[k] for k in scanned),
        *_known(tape, [op.results[k] for k in stacked], [grads[k] for k in stacked]),
    ]
    made = tape.b.emit_multi(
        "scan",
        *given,
        *behind,
        regions=[region],
        rounds=op.dim_attr("rounds"),
        scanned=len(behind),
        reverse=not op.bool_attr("reverse"),
    )
    ends = (*made[: len(floats) + len(summed)], *made[len(given) :])
    for k, end in zip(wanted, ends, strict=True):
        yield op.operands[k], GradientPart(end)
    for k in fixed:
        unchanged = grads[k]
        if unchanged is not None:
            yield op.operands[k], GradientPart(unchanged)


FLOW: dict[str, Rule] = {"if": _if, "scan": _scan}
