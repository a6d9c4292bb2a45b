"""The numbers that a training step is given: they follow from options and steps taken.

A group of an optimizer has one row of them, in the order that its update rule reads
(training/optimizers.py). Computed in double precision, as torch does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

NumbersOf = Callable[[Mapping[str, Any], int], Sequence[float]]

SGD_OPTIONS = ("lr", "weight_decay", "momentum", "dampening")
ADAM_OPTIONS = ("lr", "weight_decay", "betas", "eps")


def sgd_numbers(group: Mapping[str, Any], before: int) -> Sequence[float]:
    # The first gradient is taken whole, as torch does.
    gain = 1.0 - group["dampening"] if before else 1.0
    return (
        float(group["lr"]),
        float(group["weight_decay"]),
        float(group["momentum"]),
        gain,
    )


def adam_numbers(decoupled: bool) -> NumbersOf:
    def numbers_of(group: Mapping[str, Any], before: int) -> list[float]:
        first, second = (float(beta) for beta in group["betas"])
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        step = before + 1
        return [
            lr / (1 - first**step),
            1 - lr * decay if decoupled else decay,
            1 - first,
            second,
            1 - second,
            math.sqrt(1 - second**step),
            float(group["eps"]),
        ]

    return numbers_of


# Of the rules that a file may name: how their numbers are made, of which options.
RULES: Mapping[str, tuple[NumbersOf, tuple[str, ...]]] = {
    "sgd": (sgd_numbers, SGD_OPTIONS),
    "adam": (adam_numbers(False), ADAM_OPTIONS),
    "adamw": (adam_numbers(True), ADAM_OPTIONS),
}
