"""RNN, GRU and LSTM: a product for all steps, then a scan over their rows.

    xs (T, B, I)  --product-->  (T, B, gates)
    scan: state (B, H) -> state, result of the step

A batch row that is shorter than T keeps its state behind its end, and its results there
are 0. The second direction of such rows begins at their own end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pliant.frontend.onnx_context import Node, OnnxContext
from pliant.frontend.onnx_ops_activation import Table, softplus
from pliant.frontend.onnx_ops_index import reversed_rows
from pliant.frontend.translate import as_index
from pliant.ir.graph import Value
from pliant.ir.types import DType
from pliant.sym import Expr, as_expr

State = tuple[Value, ...]
Step = Callable[[Value, State, Sequence[Value]], State]
Activation = Callable[[Value], Value]

RANKS = (3, 3, 3, 2, 1, 3, 3, 2)  # of the inputs, in order


class Layer:
    """A node's shapes, options and inputs."""

    inner = 2  # the axis of weights (D, gates, I) and (D, gates, H) that is summed over

    def __init__(self, cx: OnnxContext, n: Node, gates: int) -> None:
        self.cx, self.n, self.gates = cx, n, gates
        for place, rank in enumerate(RANKS):
            if n.has(place) and (found := n.tensor(place)).type.rank != rank:
                cx.unsupported(
                    f"its input {place} has rank {found.type.rank} and not {rank}"
                )
        self.first = bool(n.attr("layout", 0))  # the batch comes first
        xs = n.tensor(0)
        self.xs = cx.transpose(xs, (1, 0, 2)) if self.first else xs
        self.weight, self.hidden = n.tensor(1), n.tensor(2)
        self.bias, self.lengths = n.maybe(3), n.maybe(4)
        self.size = self.hidden.shape[self.inner]
        if "hidden_size" in n.attrs:
            cx.b.require_equal(
                self.size, as_expr(n.attrs["hidden_size"]), "the hidden size"
            )
        for weight in (self.weight, self.hidden):
            cx.b.require_equal(
                weight.shape[3 - self.inner],
                self.size * gates,
                "rows of all gates of a layer",
            )
        way = n.attr("direction", "forward")
        self.ways = {"forward": [False], "reverse": [True]}.get(way, [False, True])
        self.clip: float | None = n.attrs.get("clip")

    def state(self, place: int, number: int) -> Value:
        """The first state of a direction; zeros unless it is given."""
        cx, given = self.cx, self.n.maybe(place)
        shape = (self.xs.shape[1], self.size)
        if given is None:
            return cx.full(0.0, shape, self.xs.dtype)
        if self.first:
            given = cx.transpose(given, (1, 0, 2))
        # Sizes by one name before the scan, whose states keep theirs in every round.
        for want, have in zip(shape, given.shape[1:], strict=True):
            cx.b.require_equal(want, have, "the first state of a layer")
        return self.named(self.part(given, number), shape)

    def named(self, x: Value, shape: tuple[Expr, ...]) -> Value:
        """x with its sizes by these names: they are equal in a call."""
        return x if x.shape == shape else self.cx.b.emit("reshape", x, shape=shape)

    def part(self, x: Value, number: int) -> Value:
        return self.cx.reshape(self.cx.slice(x, 0, number, 1), x.shape[1:])

    def activations(
        self, number: int, defaults: list[str], clipped: bool = True
    ) -> list[Activation]:
        names = self.n.attrs.get("activations") or defaults * len(self.ways)
        count = len(defaults)
        alphas = list(self.n.attrs.get("activation_alpha") or [])
        betas = list(self.n.attrs.get("activation_beta") or [])
        made = []
        for k, name in enumerate(names):
            alpha = alphas.pop(0) if alphas and name.lower() in _WITH_ALPHA else None
            beta = betas.pop(0) if betas and name.lower() in _WITH_BETA else None
            if number * count <= k < (number + 1) * count:
                made.append(self.activation(name, alpha, beta, clipped))
        return made

    def activation(
        self, name: str, alpha: float | None, beta: float | None, clipped: bool
    ) -> Activation:
        cx = self.cx
        a = {
            "leakyrelu": 0.01,
            "thresholdedrelu": 1.0,
            "scaledtanh": 1.0,
            "hardsigmoid": 0.2,
            "elu": 1.0,
            "affine": 1.0,
        }.get(name.lower(), 1.0)
        a = a if alpha is None else alpha
        b = {"hardsigmoid": 0.5, "scaledtanh": 1.0}.get(name.lower(), 0.0)
        b = b if beta is None else beta
        table: dict[str, Activation] = {
            "tanh": lambda x: cx.unary("tanh", x),
            "sigmoid": lambda x: cx.unary("sigmoid", x),
            "relu": lambda x: cx.b.emit("relu", x),
            "affine": lambda x: cx.add(cx.mul(x, a), b),
            "leakyrelu": lambda x: cx.select(cx.arith("ge", x, 0.0), x, cx.mul(x, a)),
            "thresholdedrelu": lambda x: cx.select(cx.arith("ge", x, a), x, 0.0),
            "scaledtanh": lambda x: cx.mul(cx.unary("tanh", cx.mul(x, b)), a),
            "hardsigmoid": lambda x: cx.arith(
                "minimum", cx.arith("maximum", cx.add(cx.mul(x, a), b), 0.0), 1.0
            ),
            "elu": lambda x: cx.select(
                cx.arith("gt", x, 0.0), x, cx.mul(cx.unary("expm1", x), a)
            ),
            "softsign": lambda x: cx.div(x, cx.add(cx.unary("abs", x), 1.0)),
            "softplus": lambda x: softplus(cx, x),
        }
        found = table.get(name.lower())
        if found is None:
            cx.unsupported(f"the activation {name}")
        if self.clip is None or not clipped:
            return found
        most = self.clip
        return lambda x: found(cx.arith("minimum", cx.arith("maximum", x, -most), most))

    def split(self, x: Value, count: int) -> list[Value]:
        """The last axis in equal parts."""
        axis = x.type.rank - 1
        return [self.cx.slice(x, axis, self.size * k, self.size) for k in range(count)]

    def biases(self, number: int) -> tuple[Value, Value] | None:
        """Those of the input and of the state."""
        if self.bias is None:
            return None
        both = self.part(self.bias, number)
        half = self.size * self.gates
        return self.cx.slice(both, 0, 0, half), self.cx.slice(both, 0, half, half)

    def product(self, x: Value, weight: Value) -> Value:
        return self.cx.b.emit("linear", x, weight)

    def rows(self, number: int) -> Value:
        """The product of the inputs of all steps, (T, B, gates)."""
        return self.product(self.xs, self.part(self.weight, number))

    def held(self, number: int) -> list[Value]:
        """What the product of a state reads in every step."""
        return [self.part(self.hidden, number)]

    def step(self, state: Value, held: Sequence[Value]) -> Value:
        """The product of a state, (B, gates)."""
        return self.product(state, held[0])

    # ---- the whole

    def run(
        self, make: Callable[[int], tuple[Step, Value, list[Value], State]]
    ) -> tuple[Value, list[Value]]:
        """(results (T, D, B, H), the state after the last step (D, B, H) each)"""
        cx = self.cx
        results, ends = [], list[State]()
        for number, reverse in enumerate(self.ways):
            step, rows, held, begin = make(number)
            out, state = self.direction(step, rows, begin, held, reverse)
            results.append(cx.b.unsqueeze(out, 1))
            ends.append(state)
        every = cx.concat(results, 1)
        states = [
            cx.concat([cx.b.unsqueeze(v, 0) for v in column], 0)
            for column in zip(*ends, strict=True)
        ]
        if self.first:  # (B, T, D, H), (B, D, H)
            every = cx.transpose(every, (2, 0, 1, 3))
            states = [cx.transpose(v, (1, 0, 2)) for v in states]
        return every, states

    def direction(
        self, step: Step, rows: Value, begin: State, held: list[Value], reverse: bool
    ) -> tuple[Value, State]:
        cx = self.cx
        lengths = None if self.lengths is None else as_index(cx, self.lengths)
        if reverse and lengths is not None:
            rows = reversed_rows(cx, rows, lengths, 1, 0)
        flip = reverse and lengths is None
        outer = cx.b
        steps = cx.iota((rows.shape[0],), 0, DType.I64)
        cx.b = outer.child()
        try:
            before = tuple(cx.b.param("state", v.type) for v in begin)
            kept = [cx.b.param("weight", v.type) for v in held]
            size = [cx.b.param("lengths", lengths.type)] if lengths is not None else []
            row = cx.b.param("row", rows.type.with_shape(rows.shape[1:]))
            number = cx.b.param("step", steps.type.with_shape(()))
            pairs = zip(step(row, before, kept), before, strict=True)
            after = tuple(self.named(new, old.shape) for new, old in pairs)
            shown = after[0]
            if size:
                inside = cx.b.unsqueeze(cx.arith("gt", size[0], number), 1)
                after = tuple(
                    cx.select(inside, new, old)
                    for new, old in zip(after, before, strict=True)
                )
                shown = cx.select(inside, shown, 0.0)
            body = cx.b.finish("step", [*after, *kept, *size, shown])
        finally:
            cx.b = outer
        extra = [] if lengths is None else [lengths]
        made = cx.b.emit_multi(
            "scan",
            *(*begin, *held, *extra, rows, steps),
            regions=(body,),
            rounds=rows.shape[0],
            scanned=2,
            reverse=flip,
        )
        out = made[-1]
        if reverse and lengths is not None:
            out = reversed_rows(cx, out, lengths, 1, 0)
        return out, made[: len(begin)]


_WITH_ALPHA = {
    *("affine", "leakyrelu", "thresholdedrelu", "scaledtanh", "hardsigmoid", "elu")
}
_WITH_BETA = {"affine", "scaledtanh", "hardsigmoid"}


def rnn(cx: OnnxContext, n: Node) -> tuple[Value, ...]:
    layer = Layer(cx, n, 1)

    def make(number: int) -> tuple[Step, Value, list[Value], State]:
        rows = layer.rows(number)
        biases = layer.biases(number)
        if biases is not None:
            rows = cx.add(rows, cx.add(*biases))
        (f,) = layer.activations(number, ["Tanh"])

        def step(row: Value, state: State, held: Sequence[Value]) -> State:
            return (f(cx.add(row, layer.product(state[0], held[0]))),)

        held = [layer.part(layer.hidden, number)]
        return step, rows, held, (layer.state(5, number),)

    out, states = layer.run(make)
    return out, states[0]


def gru(cx: OnnxContext, n: Node) -> tuple[Value, ...]:
    layer = Layer(cx, n, 3)
    behind = bool(n.attr("linear_before_reset", 0))

    def make(number: int) -> tuple[Step, Value, list[Value], State]:
        rows = layer.rows(number)
        biases = layer.biases(number)
        held = [layer.part(layer.hidden, number)]
        if biases is not None:
            rows = cx.add(rows, biases[0])
            held.append(biases[1])
        f, g = layer.activations(number, ["Sigmoid", "Tanh"])

        def step(row: Value, state: State, held: Sequence[Value]) -> State:
            old = state[0]
            z, r, h = layer.split(row, 3)
            weights = cx.slice(held[0], 0, 0, layer.size * 2)
            last = cx.slice(held[0], 0, layer.size * 2, layer.size)
            own_z, own_r = layer.split(layer.product(old, weights), 2)
            more: list[Value | None] = [None] * 3
            if len(held) > 1:
                more = [
                    cx.slice(held[1], 0, layer.size * k, layer.size) for k in range(3)
                ]
            z, r = (
                f(_sum(cx, part, own, extra))
                for part, own, extra in ((z, own_z, more[0]), (r, own_r, more[1]))
            )
            if behind:
                inner = layer.product(old, last)
                inner = inner if more[2] is None else cx.add(inner, more[2])
                new = g(cx.add(h, cx.mul(r, inner)))
            else:
                new = g(_sum(cx, h, layer.product(cx.mul(r, old), last), more[2]))
            return (cx.add(cx.mul(cx.sub(1.0, z), new), cx.mul(z, old)),)

        return step, rows, held, (layer.state(5, number),)

    out, states = layer.run(make)
    return out, states[0]


def _sum(cx: OnnxContext, a: Value, b: Value, c: Value | None) -> Value:
    made = cx.add(a, b)
    return made if c is None else cx.add(made, c)


def lstm(cx: OnnxContext, n: Node) -> tuple[Value, ...]:
    return lstm_of(Layer(cx, n, 4))


def lstm_of(layer: Layer) -> tuple[Value, ...]:
    cx, n = layer.cx, layer.n
    peepholes, coupled = n.maybe(7), bool(n.attr("input_forget", 0))

    def make(number: int) -> tuple[Step, Value, list[Value], State]:
        rows = layer.rows(number)
        biases = layer.biases(number)
        if biases is not None:
            rows = cx.add(rows, cx.add(*biases))
        held = layer.held(number)
        count = len(held)
        if peepholes is not None:
            held.append(layer.part(peepholes, number))
        # A clip is of the gates, as ONNX Runtime and OpenVINO have it: not of the cell.
        names = ["Sigmoid", "Tanh", "Tanh"]
        f, g, _ = layer.activations(number, names)
        *_, h = layer.activations(number, names, clipped=False)

        def step(row: Value, state: State, held: Sequence[Value]) -> State:
            hidden, cell = state
            gates = cx.add(row, layer.step(hidden, held[:count]))
            i, o, forget, c = layer.split(gates, 4)
            peeks = None
            if len(held) > count:
                peep, size = held[count], layer.size
                peeks = [cx.slice(peep, 0, size * k, size) for k in range(3)]
                i = cx.add(i, cx.mul(cell, peeks[0]))
                forget = cx.add(forget, cx.mul(cell, peeks[2]))
            i = f(i)
            kept = cx.sub(1.0, i) if coupled else f(forget)
            cell = cx.add(cx.mul(kept, cell), cx.mul(i, g(c)))
            if peeks is not None:
                o = cx.add(o, cx.mul(cell, peeks[1]))
            return cx.mul(f(o), h(cell)), cell

        begin = (layer.state(5, number), layer.state(6, number))
        return step, rows, held, begin

    out, states = layer.run(make)
    return out, states[0], states[1]


RECURRENT: Table = {("RNN", 1): rnn, ("GRU", 1): gru, ("LSTM", 1): lstm}
