"""Gradients of ops that move elements: each goes back where it came from."""

from __future__ import annotations

from pliant.ir.access import is_one
from pliant.ir.graph import Op, Value
from pliant.ir.types import DType
from pliant.passes.gradient_tape import GradientPart, Grads, Parts, Rule, Tape
from pliant.sym import Expr, as_expr, floordiv, maximum, product


def _of(grads: Grads) -> Value:
    (g,) = grads
    assert g is not None
    return g


def _broadcast(tape: Tape, op: Op, grads: Grads) -> Parts:
    """Sums over the repeated axes."""
    (x,), g, axes = op.operands, _of(grads), op.ints_attr("axes")
    own = {
        axis: k
        for k, axis in enumerate(axes)
        if not (is_one(x.shape[k]) and not is_one(g.shape[axis]))
    }
    summed = [axis for axis in range(g.type.rank) if axis not in own]
    out = tape.b.reduce("sum", g, summed) if summed else g
    # The remaining axes are in the result's order, which x's may differ from.
    left = [own[axis] for axis in sorted(own)]
    order = sorted(range(len(left)), key=left.__getitem__)
    yield x, GradientPart(tape.b.reshape(tape.b.transpose(out, order), x.shape))


def _stretch(tape: Tape, op: Op, grads: Grads) -> Parts:
    """Sums over an axis that was repeated at run time: dim d to n, n // d times."""
    (x,), g, axes = op.operands, _of(grads), op.ints_attr("axes")
    b, own = tape.b, dict(zip(axes, x.shape, strict=True))
    shape: list[Expr] = []
    summed: list[int] = []
    for axis, wide in enumerate(g.shape):
        dim = own.get(axis, as_expr(1))
        shape.append(dim)
        if not b.same(dim, wide):
            summed.append(len(shape))
            shape.append(floordiv(wide, maximum(dim, 1)))
    out = b.reduce("sum", b.reshape(g, shape), summed)
    yield x, GradientPart(b.reshape(out, x.shape))


def _reshape(tape: Tape, op: Op, grads: Grads) -> Parts:
    (x,) = op.operands
    yield x, GradientPart(tape.b.reshape(_of(grads), x.shape))


def _transpose(tape: Tape, op: Op, grads: Grads) -> Parts:
    perm = op.ints_attr("perm")
    back = sorted(range(len(perm)), key=perm.__getitem__)
    yield op.operands[0], GradientPart(tape.b.transpose(_of(grads), back))


def _flip(tape: Tape, op: Op, grads: Grads) -> Parts:
    g = tape.b.emit("flip", _of(grads), axes=op.ints_attr("axes"))
    yield op.operands[0], GradientPart(g)


def _spread(tape: Tape, g: Value, axis: int, step: int) -> Value:
    """Inserts step - 1 zeros between neighbours along an axis."""
    b, size = tape.b, g.shape[axis]
    lead, tail = g.shape[:axis], g.shape[axis + 1 :]
    split = b.reshape(g, (*lead, size, 1, *tail))
    none = [as_expr(0)] * split.type.rank
    high = list(none)
    high[axis + 1] = as_expr(step - 1)
    wide = b.emit("pad", split, low=tuple(none), high=tuple(high), value=0.0)
    flat = b.reshape(wide, (*lead, size * step, *tail))
    return b.slice_axis(flat, axis, 0, maximum((size - 1) * step + 1, 0))


def _slice(tape: Tape, op: Op, grads: Grads) -> Parts:
    (x,), g = op.operands, _of(grads)
    starts, steps = op.dims_attr("starts"), op.ints_attr("steps")
    for axis, step in enumerate(steps):
        if step != 1:
            g = _spread(tape, g, axis, step)
    cut = [k for k in range(x.type.rank) if not tape.b.same(g.shape[k], x.shape[k])]
    if not cut:
        yield x, GradientPart(tape.b.reshape(g, x.shape))
    elif len(cut) == 1:
        yield x, GradientPart(g, cut[0], starts[cut[0]])
    else:
        high = [
            dim - start - size
            for dim, start, size in zip(x.shape, starts, g.shape, strict=True)
        ]
        low = tuple(starts)
        yield (
            x,
            GradientPart(tape.b.emit("pad", g, low=low, high=tuple(high), value=0.0)),
        )


def _concat(tape: Tape, op: Op, grads: Grads) -> Parts:
    g, axis, start = _of(grads), op.int_attr("axis"), as_expr(0)
    for operand in op.operands:
        size = operand.shape[axis]
        if tape.wants(operand):
            yield operand, GradientPart(tape.b.slice_axis(g, axis, start, size))
        start = start + size


def _pad(tape: Tape, op: Op, grads: Grads) -> Parts:
    (x,), g = op.operands, _of(grads)
    inside = tape.b.emit(
        "slice",
        g,
        starts=op.dims_attr("low"),
        shape=x.shape,
        steps=(1,) * x.type.rank,
    )
    yield x, GradientPart(inside)


def scatter(tape: Tape, index: Value, rows: Value, count: Expr) -> Value:
    """Sums rows by index, in the compute type."""
    wide = tape.b.cast(rows, rows.dtype.compute)
    return tape.b.cast(
        tape.b.emit("scatter", index, wide, op="sum", rows=count), rows.dtype
    )


def _index(tape: Tape, op: Op, grads: Grads) -> Parts:
    """One row of the operand for each index; the trailing axes are flattened."""
    b, g = tape.b, _of(grads)
    x, *indices = op.operands
    lead, rest = x.shape[: len(indices)], x.shape[len(indices) :]
    if len(indices) > 1:
        indices = [
            b.in_range(i, dim, wraps=False, of="index", axis=axis)
            for axis, (i, dim) in enumerate(zip(indices, lead, strict=True))
        ]
    place = b.flat_place([b.cast(i, DType.I64) for i in indices], lead)
    count = place.type.numel
    rows = b.reshape(g, (count, product(rest)))
    made = scatter(tape, b.reshape(place, (count,)), rows, product(lead))
    yield x, GradientPart(b.reshape(made, x.shape))


def _take_along(tape: Tape, op: Op, grads: Grads) -> Parts:
    x, i = op.operands
    yield from taken_back(tape, x, i, op.int_attr("axis"), _of(grads))


def taken_back(tape: Tape, x: Value, i: Value, axis: int, g: Value) -> Parts:
    """The gradient of x, of which elements i along an axis were taken."""
    b = tape.b
    others = [k for k in range(x.type.rank) if k != axis]
    aligned = all(b.same(x.shape[k], i.shape[k]) for k in others)
    if is_one(i.shape[axis]) and aligned:
        # One element of each row: a comparison instead of a scatter.
        place = b.iota(x.shape, axis, i.dtype)
        hit = b.emit("eq", place, b.broadcast_to(i, x.shape))
        yield x, GradientPart(tape.where(hit, b.broadcast_to(g, x.shape)))
        return
    inside = b.in_range(i, x.shape[axis], wraps=False, of="gather", axis=axis)
    places = [inside if k == axis else b.iota(i.shape, k) for k in range(x.type.rank)]
    flat = b.flat_place(places, x.shape)
    count = flat.type.numel
    made = scatter(
        tape, b.reshape(flat, (count,)), b.reshape(g, (count, 1)), x.type.numel
    )
    yield x, GradientPart(b.reshape(made, x.shape))


def _scatter(tape: Tape, op: Op, grads: Grads) -> Parts:
    """Each row gets the gradient of the sum that it was added to.

    Of a max or min, as torch has it: those that are equal to it share its gradient.
    """
    (i, rows), b = op.operands, tape.b
    mine = b.emit("index", _of(grads), i)
    if op.str_attr("op") == "sum":
        yield rows, GradientPart(mine)
        return
    found = b.emit("index", op.result, i)
    hit = b.cast(b.emit("eq", rows, found), rows.dtype)
    count = scatter(tape, i, hit, op.dim_attr("rows"))
    shared = b.emit("div", tape.mul(mine, hit), b.emit("index", count, i))
    # A row that is not the largest has none to share, if all are NaN.
    yield rows, GradientPart(tape.where(b.emit("eq", rows, found), shared))


MOVE: dict[str, Rule] = {
    "broadcast": _broadcast,
    "stretch": _stretch,
    "reshape": _reshape,
    "transpose": _transpose,
    "flip": _flip,
    "slice": _slice,
    "concat": _concat,
    "pad": _pad,
    "index": _index,
    "take_along": _take_along,
    "scatter": _scatter,
}
