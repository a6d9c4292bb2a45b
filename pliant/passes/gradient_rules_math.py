"""Gradients of elementwise ops.

A unary rule returns the derivative at x, with result y, times the gradient g.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from pliant.ir.graph import Op, Value
from pliant.passes.gradient_tape import GradientPart, Grads, Parts, Rule, Tape

Derivative = Callable[[Tape, Value, Value, Value], Value]  # (tape, x, y, g)


def _div(tape: Tape, x: Value, y: Value) -> Value:
    return tape.b.emit("div", x, y)


def _square(tape: Tape, x: Value) -> Value:
    return tape.mul(x, x)


def _erf(t: Tape, x: Value, y: Value, g: Value) -> Value:
    bell = t.b.unary("exp", t.neg(_square(t, x)))
    return t.mul(g, t.times(bell, 2 / math.sqrt(math.pi)))


def _erfc(t: Tape, x: Value, y: Value, g: Value) -> Value:
    return t.neg(_erf(t, x, y, g))


def _logit(t: Tape, x: Value, y: Value, g: Value) -> Value:
    """g / (x (1-x)); NaN where the result is NaN: outside of 0..1."""
    slope = _div(t, g, t.mul(x, t.plus(t.neg(x), 1.0)))
    return t.b.select(t.b.unary("isnan", y), y, slope)


_UNARY: dict[str, Derivative] = {
    "neg": lambda t, x, y, g: t.neg(g),
    "abs": lambda t, x, y, g: t.mul(g, t.b.unary("sign", x)),
    "exp": lambda t, x, y, g: t.mul(g, y),
    "expm1": lambda t, x, y, g: t.mul(g, t.plus(y, 1.0)),
    "log": lambda t, x, y, g: _div(t, g, x),
    "log1p": lambda t, x, y, g: _div(t, g, t.plus(x, 1.0)),
    "logit": _logit,
    "sqrt": lambda t, x, y, g: _div(t, g, t.times(y, 2.0)),
    "rsqrt": lambda t, x, y, g: t.mul(t.times(g, -0.5), t.mul(_square(t, y), y)),
    "reciprocal": lambda t, x, y, g: t.mul(t.neg(g), _square(t, y)),
    "sin": lambda t, x, y, g: t.mul(g, t.b.unary("cos", x)),
    "cos": lambda t, x, y, g: t.mul(g, t.neg(t.b.unary("sin", x))),
    "tan": lambda t, x, y, g: t.mul(g, t.plus(_square(t, y), 1.0)),
    "tanh": lambda t, x, y, g: t.mul(g, t.plus(t.neg(_square(t, y)), 1.0)),
    "erf": _erf,
    "erfc": _erfc,
    "sigmoid": lambda t, x, y, g: t.mul(g, t.mul(y, t.plus(t.neg(y), 1.0))),
}


def _unary(derivative: Derivative) -> Rule:
    def rule(tape: Tape, op: Op, grads: Grads) -> Parts:
        (x,), (g,) = op.operands, grads
        assert g is not None
        yield x, GradientPart(derivative(tape, x, op.result, g))

    return rule


def _binary(
    left: Callable[[Tape, Op, Value], Value], right: Callable[[Tape, Op, Value], Value]
) -> Rule:
    def rule(tape: Tape, op: Op, grads: Grads) -> Parts:
        (g,) = grads
        assert g is not None
        for operand, side in zip(op.operands, (left, right), strict=True):
            if tape.wants(operand):
                yield operand, GradientPart(side(tape, op, g))

    return rule


def _same(t: Tape, op: Op, g: Value) -> Value:
    return g


def _divisor(t: Tape, op: Op, g: Value) -> Value:
    """-g * (x / y) / y."""
    return t.neg(_div(t, t.mul(g, op.result), op.operands[1]))


def _base(t: Tape, op: Op, g: Value) -> Value:
    """y * x^(y - 1); 0 where y is 0, for any x."""
    x, y = op.operands
    slope = t.mul(y, t.b.emit("pow", x, t.plus(y, -1.0)))
    return t.where(t.compare("ne", y, 0.0), t.mul(g, slope))


def _exponent(t: Tape, op: Op, g: Value) -> Value:
    """x^y * log x; 0 for a base of 0 and an exponent that is not negative."""
    x, y = op.operands
    hole = t.b.emit("logical_and", t.compare("eq", x, 0.0), t.compare("ge", y, 0.0))
    slope = t.mul(g, t.mul(op.result, t.b.unary("log", x)))
    return t.where(t.b.unary("logical_not", hole), slope)


def _remainder(t: Tape, op: Op, g: Value) -> Value:
    """d(x - y*floor(x / y)) / dy."""
    return t.neg(t.mul(g, t.b.emit("floordiv", *op.operands)))


def _angle(which: int) -> Callable[[Tape, Op, Value], Value]:
    """x / (x^2 + y^2), or -y; 0 where both are 0."""

    def side(t: Tape, op: Op, g: Value) -> Value:
        y, x = op.operands
        norm = t.b.emit("add", _square(t, x), _square(t, y))
        slope = _div(t, x if which == 0 else t.neg(y), norm)
        return t.where(t.compare("ne", norm, 0.0), t.mul(g, slope))

    return side


def _extreme(beats: str) -> Rule:
    """The larger (or smaller) operand gets the gradient; equal ones share it.

    With a constant it is a clamp, which passes the gradient at its bound.
    """

    def rule(tape: Tape, op: Op, grads: Grads) -> Parts:
        (g,) = grads
        assert g is not None
        a, b = op.operands
        for x, other in ((a, b), (b, a)):
            if not tape.wants(x):
                continue
            if tape.number(other) is not None:
                near = tape.b.emit(f"{beats[0]}e", x, other)
                yield x, GradientPart(tape.where(near, g))
                continue
            share = tape.b.select(tape.b.emit("eq", x, other), tape.times(g, 0.5), g)
            loses = tape.b.emit("lt" if beats == "gt" else "gt", x, other)
            yield x, GradientPart(tape.where(tape.b.unary("logical_not", loses), share))

    return rule


def _select(tape: Tape, op: Op, grads: Grads) -> Parts:
    cond, x, y = op.operands
    (g,) = grads
    assert g is not None
    if tape.wants(x):
        yield x, GradientPart(tape.where(cond, g))
    if tape.wants(y):
        yield y, GradientPart(tape.b.select(cond, tape.zeros(g), g))


def _slope(tape: Tape, op: Op, grads: Grads) -> Parts:
    """A slope of 0 gives 0, also of a gradient that is infinite."""
    (y, x, s), (g,) = op.operands, grads
    assert g is not None
    if tape.wants(y):
        yield y, GradientPart(g)
    if tape.wants(x):
        yield x, GradientPart(tape.where(tape.compare("ne", s, 0.0), tape.mul(g, s)))


def _cast(tape: Tape, op: Op, grads: Grads) -> Parts:
    (x,), (g,) = op.operands, grads
    assert g is not None
    yield x, GradientPart(tape.b.cast(g, x.dtype))


def _with_sign(tape: Tape, op: Op, grads: Grads) -> Parts:
    """The magnitude's gradient turns with the sign; of 0 it has none, as in torch."""
    (x, _), (g,) = op.operands, grads
    assert g is not None
    if tape.wants(x):
        ratio = _div(tape, op.result, x)
        scaled = tape.where(tape.compare("ne", x, 0.0), tape.mul(g, ratio))
        yield x, GradientPart(scaled)


MATH: dict[str, Rule] = {
    **{name: _unary(derivative) for name, derivative in _UNARY.items()},
    "add": _binary(_same, _same),
    "sub": _binary(_same, lambda t, op, g: t.neg(g)),
    "mul": _binary(
        lambda t, op, g: t.mul(g, op.operands[1]),
        lambda t, op, g: t.mul(g, op.operands[0]),
    ),
    "div": _binary(lambda t, op, g: _div(t, g, op.operands[1]), _divisor),
    "pow": _binary(_base, _exponent),
    "mod": _binary(_same, _remainder),
    "atan2": _binary(_angle(0), _angle(1)),
    "copysign": _with_sign,
    "maximum": _extreme("gt"),
    "minimum": _extreme("lt"),
    "select": _select,
    "slope": _slope,
    "cast": _cast,
}
