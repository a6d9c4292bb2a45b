"""The table of gradient rules: op name -> rule."""

from __future__ import annotations

from pliant.ir.ops import Trait, named
from pliant.passes.gradient_rules_conv import CONV
from pliant.passes.gradient_rules_fft import FFT
from pliant.passes.gradient_rules_flow import FLOW
from pliant.passes.gradient_rules_library import LIBRARY
from pliant.passes.gradient_rules_linalg import LINALG
from pliant.passes.gradient_rules_math import MATH
from pliant.passes.gradient_rules_move import MOVE
from pliant.passes.gradient_rules_reduce import REDUCE
from pliant.passes.gradient_tape import Rule

RULES: dict[str, Rule] = {
    **MATH,
    **MOVE,
    **REDUCE,
    **CONV,
    **FLOW,
    **LIBRARY,
    **FFT,
    **LINALG,
}

# Ops that pass on no gradient: their derivative is 0 wherever it exists, they have no
# operand, or the model says so.
WITHOUT = named(Trait.FLAT, Trait.CREATE) | {"stop_gradient"}
