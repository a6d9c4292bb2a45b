"""Gradients of convolutions and pools, built from `ir/windows.py`."""

from __future__ import annotations

from pliant.errors import UnsupportedOp, UnsupportedOpError
from pliant.ir.graph import Op, Value
from pliant.ir.windows import (
    Window,
    conv_input,
    conv_transpose_input,
    conv_weight,
    max_pool_input,
    max_pool_places,
    mean_pool_input,
)
from pliant.passes.gradient_tape import GradientPart, Grads, Parts, Rule, Tape


def _of(grads: Grads) -> Value:
    (g,) = grads
    assert g is not None
    return g


def _kernel(op: Op) -> tuple[int, ...]:
    """The window of a convolution, whose weights may be computed."""
    sizes = op.operands[1].shape[2:]
    if not all(size.is_const for size in sizes):
        shown = ", ".join(map(str, sizes))
        reason = f"its gradient needs a window of constant size, not ({shown})"
        raise UnsupportedOpError(
            [UnsupportedOp(op.name, reason, op.loc or "unknown place")]
        )
    return tuple(size.value for size in sizes)


def _conv(tape: Tape, op: Op, grads: Grads) -> Parts:
    (x, w), g, groups = op.operands, _of(grads), op.int_attr("groups")
    window = Window.of(op, _kernel(op))
    if tape.wants(x):
        yield x, GradientPart(conv_input(tape.b, g, w, x.shape, window, groups))
    if tape.wants(w):
        yield w, GradientPart(conv_weight(tape.b, g, x, w, window, groups))


def _conv_transpose(tape: Tape, op: Op, grads: Grads) -> Parts:
    (x, w), g, groups = op.operands, _of(grads), op.int_attr("groups")
    window = Window.of(op, _kernel(op))
    if tape.wants(x):
        yield (
            x,
            GradientPart(conv_transpose_input(tape.b, g, w, x.shape, window, groups)),
        )
    if tape.wants(w):
        yield w, GradientPart(conv_weight(tape.b, x, g, w, window, groups))


def _pool(tape: Tape, op: Op, grads: Grads) -> Parts:
    (x,), g = op.operands, _of(grads)
    window = Window.of(op, op.ints_attr("window"))
    if op.str_attr("op") == "mean":
        whole = op.bool_attr("include_pad")
        yield x, GradientPart(mean_pool_input(tape.b, g, x.shape, window, whole))
    else:
        places = op.result.shape[-window.rank :]
        where = max_pool_places(tape.b, x, places, window)
        yield x, GradientPart(max_pool_input(tape.b, g, where, x.shape, window.rank))


CONV: dict[str, Rule] = {
    "conv": _conv,
    "conv_transpose": _conv_transpose,
    "pool": _pool,
}
