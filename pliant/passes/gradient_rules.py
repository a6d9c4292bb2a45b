"""The table of gradient rules: op name -> rule."""

from __future__ import annotations

from pliant.passes.gradient_rules_conv import CONV
from pliant.passes.gradient_rules_math import MATH
from pliant.passes.gradient_rules_move import MOVE
from pliant.passes.gradient_rules_reduce import REDUCE
from pliant.passes.gradient_tape import Rule

RULES: dict[str, Rule] = {**MATH, **MOVE, **REDUCE, **CONV}

# Ops through which no gradient goes: their derivative is 0 wherever there is one.
WITHOUT = frozenset(
    [
        "sign",
        "floor",
        "ceil",
        "round",
        "trunc",
        "bitwise_not",
        "isnan",
        "isinf",
        "logical_not",
        "floordiv",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "logical_and",
        "logical_or",
        "logical_xor",
        "bitwise_and",
        "bitwise_or",
        "bitwise_xor",
        "shift_left",
        "shift_right",
        "constant",
        "full",
        "iota",
        "dim_value",
        "argreduce",
        "nonzero",
        "stop_gradient",
    ]
)
