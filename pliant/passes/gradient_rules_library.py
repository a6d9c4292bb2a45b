"""Gradients of ops whose kernels are C functions (ir/ops_library.py)."""

from __future__ import annotations

from pliant.ir.graph import Op, Value
from pliant.passes.gradient_rules_move import taken_back
from pliant.passes.gradient_tape import GradientPart, Grads, Parts, Rule, Tape


def _chosen(tape: Tape, op: Op, grads: Grads) -> Parts:
    """Values that were taken from places along an axis."""
    g, (x,) = grads[0], op.operands
    if g is not None:
        yield from taken_back(tape, x, op.results[1], op.int_attr("axis"), g)


def _logsumexp(tape: Tape, op: Op, grads: Grads) -> Parts:
    """dx[j] = sum over i >= j of g[i] * exp(x[j] - y[i]), summed up as logarithms.

    The sums of positive and of negative g are apart: only those have logarithms.
    """
    b, (g,), (x,), y = tape.b, grads, op.operands, op.result
    assert g is not None
    axis = op.int_attr("axis")

    def back(part: Value) -> Value:
        terms = b.emit("sub", b.unary("log", part), y)
        reversed_terms = b.emit("flip", terms, axes=(axis,))
        summed = b.emit("running_logsumexp", reversed_terms, axis=axis)
        total = b.emit("flip", summed, axes=(axis,))
        return b.unary("exp", b.emit("add", total, x))

    zero = b.broadcast_to(b.scalar(0.0, g.dtype), g.shape)
    above = back(b.emit("maximum", g, zero))
    below = back(b.emit("maximum", b.unary("neg", g), zero))
    yield x, GradientPart(b.emit("sub", above, below))


def _scatter_rows(tape: Tape, op: Op, grads: Grads) -> Parts:
    """Replaced rows give nothing to x; a row has the gradient of where it went."""
    b, (g,), (x, places, updates) = tape.b, grads, op.operands
    assert g is not None
    if tape.wants(x):
        nothing = b.broadcast_to(b.scalar(0.0, g.dtype), updates.shape)
        yield x, GradientPart(b.emit("scatter_rows", g, places, nothing))
    if tape.wants(updates):
        yield updates, GradientPart(b.emit("index", g, places))


LIBRARY: dict[str, Rule] = {
    "scatter_rows": _scatter_rows,
    "sort": _chosen,
    "top": _chosen,
    "running_extreme": _chosen,
    "running_logsumexp": _logsumexp,
}
