"""Recurrent layers: LSTM, GRU and RNN, and their single cells.

    xs (T, B, I)  --linear-->  (T, B, gates)      one product for all steps
    scan over its rows: state (B, H) -> state, result of the step

Layers follow one another; a second direction scans from the last row to the first. The
input's product is outside the loop, so a step is the product with the state and an
elementwise kernel.

torch.export would fix the number of steps, because torch infers the shapes of these ops
by running them step by step: torch_shapes.py gives it the shapes instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pliant.frontend.torch_ops_context import Size, TorchContext
from pliant.frontend.torch_ops_math import Translate
from pliant.frontend.torch_ops_nn import linear
from pliant.frontend.torch_packed import CHECKED
from pliant.frontend.torch_packed import RECURRENT as PACKED
from pliant.ir.graph import Value
from pliant.sym import as_expr

aten = torch.ops.aten

State = tuple[Value, ...]
# The state after a step, from the input's part of the gates, the state, and the
# weights that it is multiplied by: hidden[, bias][, projection].
Step = Callable[[TorchContext, Value, State, Sequence[Value]], State]


def _gates(cx: TorchContext, x: Value, count: int) -> list[Value]:
    """The last axis in equal parts."""
    axis, size = x.type.rank - 1, x.shape[-1] // count
    return [cx.slice(x, axis, k * size, size) for k in range(count)]


# ---- one step


def _lstm_step(
    cx: TorchContext, row: Value, state: State, weights: Sequence[Value]
) -> State:
    hidden, cell = state
    biased = len(weights) > 1 and weights[1].type.rank == 1
    own = linear(cx, hidden, *weights[: 2 if biased else 1])
    i, f, g, o = _gates(cx, cx.add(row, own), 4)
    kept = cx.mul(cx.unary("sigmoid", f), cell)
    cell = cx.add(kept, cx.mul(cx.unary("sigmoid", i), cx.unary("tanh", g)))
    hidden = cx.mul(cx.unary("sigmoid", o), cx.unary("tanh", cell))
    if weights[-1] is not weights[0] and weights[-1].type.rank == 2:
        hidden = linear(cx, hidden, weights[-1])  # the projection
    return hidden, cell


def _gru_step(
    cx: TorchContext, row: Value, state: State, weights: Sequence[Value]
) -> State:
    (hidden,) = state
    reset, update, new = _gates(cx, row, 3)
    own_reset, own_update, own_new = _gates(cx, linear(cx, hidden, *weights), 3)
    reset = cx.unary("sigmoid", cx.add(reset, own_reset))
    update = cx.unary("sigmoid", cx.add(update, own_update))
    new = cx.unary("tanh", cx.add(new, cx.mul(reset, own_new)))
    return (cx.add(cx.mul(cx.sub(hidden, new), update), new),)


def _tanh_step(
    cx: TorchContext, row: Value, state: State, weights: Sequence[Value]
) -> State:
    return (cx.unary("tanh", cx.add(row, linear(cx, state[0], *weights))),)


def _relu_step(
    cx: TorchContext, row: Value, state: State, weights: Sequence[Value]
) -> State:
    return (cx.b.emit("relu", cx.add(row, linear(cx, state[0], *weights))),)


# ---- all steps of all layers


def _direction(
    cx: TorchContext,
    step: Step,
    rows: Value,
    state: State,
    weights: Sequence[Value],
    reverse: bool,
    live: Value | None,
) -> tuple[Value, State]:
    """The results (T, B, H) of all steps, and the state after the last.

    Of sequences that are not `live` (T, B, 1) in a step, the state stays as it is, and
    the result is 0.
    """
    scanned = [rows] if live is None else [rows, live]
    outer = cx.b
    cx.b = outer.child()
    try:
        before = tuple(cx.b.param("state", v.type) for v in state)
        held = [cx.b.param("weight", v.type) for v in weights]
        row = cx.b.param("row", rows.type.with_shape(rows.shape[1:]))
        after = step(cx, row, before, held)
        out = after[0]
        if live is not None:
            lives = cx.b.param("live", live.type.with_shape(live.shape[1:]))
            pairs = zip(after, before, strict=True)
            after = tuple(cx.select(lives, new, old) for new, old in pairs)
            out = cx.select(lives, out, 0.0)
        body = cx.b.finish("step", [*after, *held, out])
    finally:
        cx.b = outer
    made = cx.b.emit_multi(
        "scan",
        *state,
        *weights,
        *scanned,
        regions=(body,),
        rounds=rows.shape[0],
        scanned=len(scanned),
        reverse=reverse,
    )
    return made[-1], made[: len(state)]


def _layers(
    cx: TorchContext,
    step: Step,
    xs: Value,
    states: Sequence[Value],  # (layers * directions, B, H) each
    params: Sequence[Value],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    live: Value | None = None,  # (T, B, 1): whether a sequence has not ended
) -> list[Value]:
    if train and dropout > 0 and num_layers > 1:
        cx.unsupported("dropout between recurrent layers: set dropout=0")
    single = xs.type.rank == 2  # without a batch
    if single:
        xs = cx.b.unsqueeze(xs, 1)
        states = [cx.b.unsqueeze(s, 1) for s in states]
    elif batch_first:
        xs = cx.transpose(xs, (1, 0, 2))
    directions = 2 if bidirectional else 1
    each = len(params) // (num_layers * directions)
    ends: list[list[Value]] = [[] for _ in states]
    for layer in range(num_layers):
        results = []
        for direction in range(directions):
            number = layer * directions + direction
            weights = params[number * each : (number + 1) * each]
            bias = weights[2:3] if has_biases else []
            held = [weights[1], *weights[3:]] if has_biases else weights[1:]
            rows = linear(cx, xs, weights[0], *bias)
            begin = tuple(cx.b.squeeze(cx.slice(s, 0, number, 1), 0) for s in states)
            out, state = _direction(cx, step, rows, begin, held, direction == 1, live)
            results.append(out)
            for end, value in zip(ends, state, strict=True):
                end.append(cx.b.unsqueeze(value, 0))
        xs = results[0] if directions == 1 else cx.concat(results, 2)
    after = [end[0] if len(end) == 1 else cx.concat(end, 0) for end in ends]
    if single:
        return [cx.b.squeeze(v, 1) for v in (xs, *after)]
    return [cx.transpose(xs, (1, 0, 2)) if batch_first else xs, *after]


def _sequence(step: Step) -> Translate:
    def translate(
        cx: TorchContext, xs: Value, hx: Value | list[Value], *others: Any
    ) -> list[Value]:
        states = hx if isinstance(hx, list) else [hx]
        return _layers(cx, step, xs, states, *others)

    return translate


STEPS = {
    "lstm": _lstm_step,
    "gru": _gru_step,
    "rnn_tanh": _tanh_step,
    "rnn_relu": _relu_step,
}


def _packed(
    cx: TorchContext,
    kind: str,
    xs: Value,
    lengths: Value,
    *others: Any,
) -> list[Value]:
    """Of sequences (T, B, I) that end (torch_packed.py)."""
    shape = (*xs.shape[:2], as_expr(1))
    ends = cx.b.broadcast(lengths, shape, (1,))
    live = cx.arith("lt", cx.iota(shape, 0, lengths.dtype), ends)
    how = (*others, False, live)
    return _layers(cx, STEPS[kind], xs, *how)


def _lengths(cx: TorchContext, lengths: Value, steps: Size, sorted: bool) -> Value:
    """Lengths of sequences that have this many steps, checked in the run."""
    last = cx.in_range(cx.sub(lengths, 1), steps, 0)
    lengths = cx.add(last, 1)
    if not sorted:
        return lengths
    count = lengths.shape[0]
    before = cx.b.iota(lengths.shape, 0)
    before = cx.arith("maximum", cx.sub(before, 1), 0)
    before = cx.b.in_range(before, count, wraps=False, of="lengths", axis=0)
    rising = cx.arith("gt", lengths, cx.b.emit("index", lengths, before))
    none = cx.in_range(cx.cast(rising, lengths.dtype), as_expr(1), 0)
    return cx.add(lengths, none)


def _cell(step: Step) -> Translate:
    def translate(
        cx: TorchContext,
        x: Value,
        hx: Value | list[Value],
        w_input: Value,
        w_hidden: Value,
        b_input: Value | None = None,
        b_hidden: Value | None = None,
    ) -> Value | list[Value]:
        row = linear(cx, x, w_input, b_input)
        held = [w_hidden] if b_hidden is None else [w_hidden, b_hidden]
        state = tuple(hx) if isinstance(hx, list) else (hx,)
        after = step(cx, row, state, held)
        return list(after) if isinstance(hx, list) else after[0]

    return translate


RECURRENT: dict[Any, Translate] = {
    aten.lstm.input: _sequence(_lstm_step),
    aten.gru.input: _sequence(_gru_step),
    aten.rnn_tanh.input: _sequence(_tanh_step),
    aten.rnn_relu.input: _sequence(_relu_step),
    PACKED: _packed,
    CHECKED: _lengths,
    aten.lstm_cell.default: _cell(_lstm_step),
    aten.gru_cell.default: _cell(_gru_step),
    aten.rnn_tanh_cell.default: _cell(_tanh_step),
    aten.rnn_relu_cell.default: _cell(_relu_step),
}
