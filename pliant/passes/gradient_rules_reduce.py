"""Gradients of reductions and products."""

from __future__ import annotations

from typing import Any

from pliant.errors import UnsupportedOp, UnsupportedOpError
from pliant.ir.access import is_one
from pliant.ir.graph import Op, Value, copied
from pliant.ir.ops import first_row
from pliant.ir.types import DType
from pliant.passes.gradient_tape import GradientPart, Grads, Parts, Rule, Tape
from pliant.sym import as_expr, product


def _spread(tape: Tape, op: Op, value: Value) -> Value:
    """A reduction's result (or its gradient) broadcast over the reduced axes."""
    (x,), axes = op.operands, op.ints_attr("axes")
    kept = [as_expr(1) if k in axes else d for k, d in enumerate(x.shape)]
    return tape.b.broadcast_to(tape.b.reshape(value, kept), x.shape)


def _reduce(tape: Tape, op: Op, grads: Grads) -> Parts:
    (x,), (g,) = op.operands, grads
    assert g is not None
    wide = _spread(tape, op, g)
    match op.str_attr("op"):
        case "sum":
            yield x, GradientPart(wide)
        case "prod":
            yield x, GradientPart(tape.mul(wide, _others(tape, op)))
        case _:
            yield x, GradientPart(_shared(tape, op, g))


def _shared(tape: Tape, op: Op, g: Value) -> Value:
    """The extreme elements of each row share its gradient."""
    b, (x,) = tape.b, op.operands
    hit = b.emit("eq", x, _spread(tape, op, op.result))
    axes, keep = op.ints_attr("axes"), op.bool_attr("keepdims")
    count = b.reduce("sum", b.cast(hit, x.dtype), axes, keep)
    return tape.where(hit, _spread(tape, op, b.emit("div", g, count)))


def _others(tape: Tape, op: Op) -> Value:
    """The product of all other elements of the row; handles zeros."""
    b, (x,) = tape.b, op.operands
    axes, keep = op.ints_attr("axes"), op.bool_attr("keepdims")
    zero = tape.compare("eq", x, 0.0)
    nonzero = b.select(zero, b.scalar(1.0, x.dtype), x)
    rest = _spread(tape, op, b.reduce("prod", nonzero, axes, keep))
    zeros = _spread(tape, op, b.reduce("sum", b.cast(zero, x.dtype), axes, keep))
    single = b.emit("logical_and", zero, tape.compare("eq", zeros, 1.0))
    none = tape.compare("eq", zeros, 0.0)
    return b.select(none, b.emit("div", rest, nonzero), tape.where(single, rest))


def _cumulate(tape: Tape, op: Op, grads: Grads) -> Parts:
    """A running sum from the other end."""
    (x,), (g,), axis = op.operands, grads, op.int_attr("axis")
    assert g is not None
    if op.str_attr("op") == "sum":
        yield x, GradientPart(_from_end(tape, g, axis))
    else:
        yield x, GradientPart(_cumulated_product(tape, op, g))


def _cumulated_product(tape: Tape, op: Op, g: Value) -> Value:
    """Handles zeros: after the first zero of a row, no gradient flows."""
    b, (x,), axis = tape.b, op.operands, op.int_attr("axis")
    zero = tape.compare("eq", x, 0.0)
    zeros = b.emit("cumulate", b.cast(zero, x.dtype), op="sum", axis=axis)
    none = tape.compare("eq", zeros, 0.0)
    first = b.emit("logical_and", zero, tape.compare("eq", zeros, 1.0))
    one = b.scalar(1.0, x.dtype)
    before = _from_end(tape, tape.mul(g, op.result), axis)
    mended = b.emit("cumulate", b.select(first, one, x), op="prod", axis=axis)
    at = _from_end(tape, tape.mul(g, mended), axis)
    return b.select(
        none, b.emit("div", before, b.select(zero, one, x)), tape.where(first, at)
    )


def _from_end(tape: Tape, g: Value, axis: int) -> Value:
    reversed_g = tape.b.emit("flip", g, axes=(axis,))
    summed = tape.b.emit("cumulate", reversed_g, op="sum", axis=axis)
    return tape.b.emit("flip", summed, axes=(axis,))


# ---- products


def _single(value: Value) -> bool:
    """Whether every batch dim is 1: a weight that the whole batch uses."""
    return all(is_one(d) for d in value.shape[:-2])


def _rows(tape: Tape, value: Value) -> Value:
    """All batches as the rows of one matrix."""
    *lead, columns = value.shape
    return tape.b.reshape(value, (product(lead), columns))


def _is_transposed(tape: Tape, value: Value) -> bool:
    """Whether a matrix is the transpose of what is in memory."""
    op = tape.producers.get(value)
    while op is not None and op.name == "reshape":
        value = op.operands[0]
        op = tape.producers.get(value)
    if op is None or op.name != "transpose":
        return False
    perm = op.ints_attr("perm")
    return perm[-2:] == (len(perm) - 1, len(perm) - 2)


def _over_batch(tape: Tape, like: Value, grad: Value) -> Value:
    """Sums over the batch dims that are 1 in the operand."""
    axes = [
        k
        for k, d in enumerate(like.shape[:-2])
        if is_one(d) and not is_one(grad.shape[k])
    ]
    return tape.b.reduce("sum", grad, axes, keepdims=True)


def _left(tape: Tape, op: Op, g: Value) -> Value:
    a, w = op.operands
    b = tape.b
    if _is_transposed(tape, a):
        # In the memory order of the operand.
        out = b.swap(b.emit("matmul", w, b.swap(g, -1, -2)), -1, -2)
    else:
        out = b.emit("matmul", g, b.swap(w, -1, -2))
    return _over_batch(tape, a, out)


def _right(tape: Tape, op: Op, g: Value) -> Value:
    a, w = op.operands
    b = tape.b
    whole = _single(w) and not _single(a)
    if whole:
        a, g = _rows(tape, a), _rows(tape, g)
    if _is_transposed(tape, w):
        out = b.swap(b.emit("matmul", b.swap(g, -1, -2), a), -1, -2)
    else:
        out = b.emit("matmul", b.swap(a, -1, -2), g)
    return b.reshape(out, w.shape) if whole else _over_batch(tape, w, out)


def _matmul(tape: Tape, op: Op, grads: Grads) -> Parts:
    (a, w), (g,) = op.operands, grads
    assert g is not None
    if tape.wants(a):
        yield a, GradientPart(tape.b.cast(_left(tape, op, g), a.dtype))
    if tape.wants(w):
        yield w, GradientPart(tape.b.cast(_right(tape, op, g), w.dtype))


def _grouped_matmul(tape: Tape, op: Op, grads: Grads) -> Parts:
    """Of a matrix: its rows of `a`, transposed, times their gradients.

    The matrices' products run over all rows, with those of other groups as zeros.
    """
    (a, w, ends), (g,) = op.operands, grads
    b = tape.b
    assert g is not None
    if tape.wants(a):
        back = b.emit("grouped_matmul", g, b.swap(w, -1, -2), ends)
        yield a, GradientPart(b.cast(back, a.dtype))
    if tape.wants(w):
        groups, rows = w.shape[0], a.shape[0]
        stops = b.reshape(b.cast(ends, DType.I64), (1, groups))
        places = b.iota((1, rows), 1, DType.I64)
        group = b.reshape(b.emit("search", stops, places, right=True), (rows,))
        shape = (groups, rows)
        wide = b.broadcast_to(b.reshape(group, (1, rows)), shape)
        own = b.emit("eq", wide, b.iota(shape, 0, DType.I64))
        part = (*shape, a.shape[1])
        mask = b.broadcast_to(b.reshape(own, (*shape, 1)), part)
        each = b.broadcast_to(b.reshape(a, (1, *a.shape)), part)
        each = tape.where(mask, each)
        summed = b.emit("matmul", b.swap(each, -1, -2), b.reshape(g, (1, *g.shape)))
        yield w, GradientPart(b.cast(summed, w.dtype))


def _attention(tape: Tape, op: Op, grads: Grads) -> Parts:
    """From its result and the logarithms of its sums; scores are recomputed."""
    g, out, attrs = grads[0], op.results[0], dict[str, Any](op.attrs)
    if g is None:  # as in torch, the logarithms have none
        return
    first, zero_nan = attrs.pop("first"), attrs.pop("zero_nan")
    if first != 0 or zero_nan:
        reason = f"its gradient needs all rows, not those from {first_row(op)} on"
        if zero_nan:
            reason = "its gradient needs weights that stay NaN"
        raise UnsupportedOpError(
            [UnsupportedOp(op.name, reason, op.loc or "unknown place")]
        )
    if op.bool_attr("swapped"):
        g, out = tape.b.swap(g, -2, -3), tape.b.swap(out, -2, -3)
        attrs["swapped"] = False
    found = tape.b.emit_multi(
        "attention_backward",
        *(g, out, op.results[1], *op.operands),
        regions=[copied(region) for region in op.regions],
        **attrs,
    )
    for operand, grad in zip(op.operands, found, strict=False):
        yield operand, GradientPart(grad)


REDUCE: dict[str, Rule] = {
    "attention_lse": _attention,
    "reduce": _reduce,
    "cumulate": _cumulate,
    "matmul": _matmul,
    "grouped_matmul": _grouped_matmul,
}
