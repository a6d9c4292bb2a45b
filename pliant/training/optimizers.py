"""How parameters are updated: the optimizers that a training step compiles.

A step takes an optimizer of torch's (SGD, Adam, AdamW), or a description of one:

    pliant.compile_training(model, loss, pliant.AdamW(lr=3e-4), ...)

Its state is the optimizer's own, with torch's names, so it saves and loads as ever,
and one can go on in torch. What varies from step to step (learning rate, weight decay,
bias corrections) are numbers handed to the compiled step, read from the optimizer's
parameter groups each time: torch's schedulers work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pliant.errors import OptionError
from pliant.ir.build import Builder
from pliant.ir.graph import Value
from pliant.ir.types import DType
from pliant.model.step_numbers import RULES


@dataclass(frozen=True, slots=True)
class SGD:
    """torch.optim.SGD over all trained parameters."""

    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def build(self, parameters: Iterable[Any]) -> Any:
        import torch

        return torch.optim.SGD(parameters, **asdict(self))


@dataclass(frozen=True, slots=True)
class AdamW:
    """torch.optim.AdamW over all trained parameters."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    amsgrad: bool = False

    def build(self, parameters: Iterable[Any]) -> Any:
        import torch

        return torch.optim.AdamW(parameters, **asdict(self))


Numbers = Mapping[str, Value]
Emit = Callable[["Arithmetic", Value, Value, Sequence[Value], Numbers], list[Value]]


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """A builder, with the operators that update rules are written in."""

    b: Builder

    def add(self, x: Value, y: Value) -> Value:
        return self.b.binary("add", x, y)

    def sub(self, x: Value, y: Value) -> Value:
        return self.b.binary("sub", x, y)

    def mul(self, x: Value, y: Value) -> Value:
        return self.b.binary("mul", x, y)

    def div(self, x: Value, y: Value) -> Value:
        return self.b.binary("div", x, y)

    def sqrt(self, x: Value) -> Value:
        return self.b.unary("sqrt", x)


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """One parameter's update: its state, its numbers, and the ops.

    `emit` gives the new parameter and the new state.
    """

    state: tuple[str, ...]
    numbers: tuple[str, ...]
    kind: str  # of its numbers: a key of RULES
    emit: Emit
    counts: bool = False  # the state has a `step`
    maximize: bool = False

    def numbers_of(self, group: Mapping[str, Any], before: int) -> Sequence[float]:
        """Of a step, from the group's options and how many steps went before."""
        return RULES[self.kind][0](group, before)


# ---- SGD


def _sgd(momentum: bool, nesterov: bool) -> Emit:
    def emit(
        a: Arithmetic, p: Value, g: Value, state: Sequence[Value], n: Numbers
    ) -> list[Value]:
        g = a.add(g, a.mul(p, n["decay"]))
        if not momentum:
            return [a.sub(p, a.mul(g, n["lr"]))]
        moved = a.add(a.mul(state[0], n["momentum"]), a.mul(g, n["gain"]))
        step = a.add(g, a.mul(moved, n["momentum"])) if nesterov else moved
        return [a.sub(p, a.mul(step, n["lr"])), moved]

    return emit


# ---- Adam


def _adam(decoupled: bool, amsgrad: bool) -> Emit:
    def emit(
        a: Arithmetic, p: Value, g: Value, state: Sequence[Value], n: Numbers
    ) -> list[Value]:
        if decoupled:
            p = a.mul(p, n["decay"])
        else:
            g = a.add(g, a.mul(p, n["decay"]))
        mean = a.add(state[0], a.mul(a.sub(g, state[0]), n["mean_gain"]))
        square = a.add(
            a.mul(state[1], n["square_kept"]), a.mul(a.mul(g, g), n["square_gain"])
        )
        most = a.b.binary("maximum", state[2], square) if amsgrad else square
        below = a.add(a.div(a.sqrt(most), n["square_correction"]), n["eps"])
        new = a.sub(p, a.mul(a.div(mean, below), n["lr"]))
        return [new, mean, square, most] if amsgrad else [new, mean, square]

    return emit


_ADAM_NUMBERS = (
    "lr",
    "decay",
    "mean_gain",
    "square_kept",
    "square_gain",
    "square_correction",
    "eps",
)


# ---- whichever


def rule_of(optimizer: Any, group: Mapping[str, Any]) -> UpdateRule:
    """The update rule of a torch optimizer's parameter group."""
    import torch

    kind = type(optimizer)
    if kind is torch.optim.SGD:
        momentum = bool(group["momentum"])
        return UpdateRule(
            ("momentum_buffer",) if momentum else (),
            ("lr", "decay", "momentum", "gain"),
            "sgd",
            _sgd(momentum, bool(group["nesterov"])),
            maximize=bool(group["maximize"]),
        )
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        amsgrad = bool(group["amsgrad"])
        decoupled = kind is torch.optim.AdamW or bool(
            group.get("decoupled_weight_decay")
        )
        more = ("max_exp_avg_sq",) if amsgrad else ()
        return UpdateRule(
            ("exp_avg", "exp_avg_sq", *more),
            _ADAM_NUMBERS,
            "adamw" if decoupled else "adam",
            _adam(decoupled, amsgrad),
            counts=True,
            maximize=bool(group["maximize"]),
        )
    raise OptionError(
        f"no update rule for {kind.__module__}.{kind.__name__}: use torch.optim.SGD, "
        "Adam or AdamW, or pliant.SGD or pliant.AdamW"
    )


def structure_of(optimizer: Any, group: Mapping[str, Any]) -> tuple[object, ...]:
    """The options of a group that are compiled in: a change needs another compile."""
    import torch

    if isinstance(optimizer, torch.optim.SGD):
        return (bool(group["momentum"]), bool(group["nesterov"]), group["maximize"])
    return (
        bool(group["amsgrad"]),
        group["maximize"],
        bool(group.get("decoupled_weight_decay")),
    )


# ---- on parameters


def clipped(b: Builder, grads: dict[str, Value], most: Value) -> dict[str, Value]:
    """All gradients times min(1, most / (norm + 1e-6)), as torch clips them."""
    squares: Value | None = None
    for g in grads.values():
        wide = b.cast(g, g.dtype.compute)
        part = b.reduce("sum", b.emit("mul", wide, wide))
        part = b.cast(part, DType.F64)
        squares = part if squares is None else b.emit("add", squares, part)
    assert squares is not None
    below = b.binary("add", b.unary("sqrt", squares), b.scalar(1e-6, DType.F64))
    ratio = b.emit("div", most, below)
    factor = b.binary("minimum", ratio, b.scalar(1.0, DType.F64))
    return {
        name: b.binary("mul", g, b.cast(factor, g.dtype)) for name, g in grads.items()
    }


def updated(
    b: Builder,
    rule: UpdateRule,
    p: Value,
    g: Value,
    state: Sequence[Value],
    numbers: Value,
    row: int,
) -> list[Value]:
    """The new parameter and state; computed in the type that arithmetic happens in."""
    wide = p.dtype.compute

    def number(column: int) -> Value:
        one = b.emit("slice", numbers, starts=(row, column), shape=(1, 1), steps=(1, 1))
        return b.cast(b.reshape(one, ()), wide)

    values = {name: number(k) for k, name in enumerate(rule.numbers)}
    g = b.cast(g, wide)
    if rule.maximize:
        g = b.unary("neg", g)
    held = [b.cast(s, wide) for s in state]
    made = rule.emit(Arithmetic(b), b.cast(p, wide), g, held, values)
    return [b.cast(v, p.dtype) for v in made]
