"""Gradients of Fourier transforms (ir/ops_fft.py).

A transform is linear, so the gradient goes through its conjugate transpose, which is a
transform the other way, with the same norm.
"""

from __future__ import annotations

from pliant.ir.graph import Op, Value
from pliant.passes.gradient_tape import GradientPart, Grads, Parts, Rule, Tape
from pliant.sym import as_expr


def _given(tape: Tape, op: Op, grads: Grads) -> tuple[Value, Value]:
    """The gradients of both parts; a part that nothing reads has none."""
    re, im = grads
    zeros = [
        tape.zeros(v) if g is None else g
        for v, g in zip(op.results, (re, im), strict=True)
    ]
    return zeros[0], zeros[1]


def _fft(tape: Tape, op: Op, grads: Grads) -> Parts:
    inverse, norm = not op.bool_attr("inverse"), op.str_attr("norm")
    axis = op.int_attr("axis")
    back = tape.b.emit_multi(
        "fft", *_given(tape, op, grads), axis=axis, inverse=inverse, norm=norm
    )
    for x, g in zip(op.operands, back, strict=True):
        yield x, GradientPart(g)


def _rfft(tape: Tape, op: Op, grads: Grads) -> Parts:
    """The other half of the spectrum has no gradient."""
    b, (x,), axis = tape.b, op.operands, op.int_attr("axis")
    rank, half = x.type.rank, op.results[0].shape[axis]
    none = tuple(as_expr(0) for _ in range(rank))
    more = tuple(x.shape[k] - half if k == axis else as_expr(0) for k in range(rank))
    whole = [
        b.emit("pad", g, low=none, high=more, value=0.0)
        for g in _given(tape, op, grads)
    ]
    norm = op.str_attr("norm")
    re, _ = b.emit_multi("fft", *whole, axis=axis, inverse=True, norm=norm)
    yield x, GradientPart(re)


def _irfft(tape: Tape, op: Op, grads: Grads) -> Parts:
    """Elements that stand for two count twice: all but the first, and of an even
    length the last."""
    b, (g,), axis, n = tape.b, grads, op.int_attr("axis"), op.dim_attr("n")
    assert g is not None
    parts = b.emit_multi("rfft", g, axis=axis, norm=op.str_attr("norm"))
    shape = op.operands[0].shape
    place = b.iota(shape, axis)
    first = b.emit("gt", place, b.broadcast_to(b.scalar(0, place.dtype), shape))
    mirror = b.emit("sub", b.broadcast_to(b.dim_value(n), shape), place)
    inner = b.emit("logical_and", first, b.emit("lt", place, mirror))
    for x, part in zip(op.operands, parts, strict=True):
        yield x, GradientPart(b.select(inner, tape.times(part, 2.0), part))


FFT: dict[str, Rule] = {"fft": _fft, "rfft": _rfft, "irfft": _irfft}
