"""Integer inputs: which of them may be negative.

Sizes are never negative, and proofs about a program rely on that. An integer argument
counts as a size if a size, a position or a bound of a slice is computed from it, or if
the model's code branches on it; then a guard checks that it is at least 0. An integer
that is only an operand beside elements of tensors, as in `x + max(n, 0)`, has no
bounds, and nothing is assumed about it.

torch.export assumes that every integer is at least 0: it decides conditions such as
`n > -3` itself and does not record them, so there the guard is always needed.
"""

from __future__ import annotations

import builtins
import operator
from typing import Any

import torch
from torch.fx import Node

from pliant.frontend.contract import Basis
from pliant.frontend.torch_ops_context import TorchContext
from pliant.sym import Guard, ge, sym

# Exact whatever the signs; a quotient or remainder is not among them.
_ARITHMETIC = frozenset(
    {
        *(operator.add, operator.sub, operator.mul, operator.neg, operator.abs),
        *(builtins.abs, torch.sym_max, torch.sym_min, torch.sym_sum),
    }
)
_NUMBERS = ("Tensor", "number", "Optional[Tensor]", "Optional[number]")
_SIGNED_OTHERWISE = ("pow", "shift")  # negative numbers are errors there


def open_integer(cx: TorchContext, symbol: str) -> None:
    """From here on nothing is known of an integer input; before facts about it."""
    cx.b.facts = cx.b.facts.with_range(symbol, None, None)


def bound_integer(cx: TorchContext, node: Node, symbol: str) -> None:
    """Guards an integer input to be a size, unless it is only ever a number."""
    if is_number(node):
        return
    value = sym(symbol)
    message = (
        f"integer input '{node.name}' must not be negative: it was traced as a size or "
        "a position (pass a tensor for a number that may be negative); got ",
        value,
    )
    cx.assume(Basis.TRACED, Guard(ge(value, 0), message, "an integer input"))


def is_number(node: Node) -> bool:
    """Whether the integer is only an operand of elementwise ops, or returned."""
    val = node.meta["val"]
    low = val.node.shape_env.bound_sympy(val.node.expr).lower
    if low >= 0 or _is_asked_about(val):
        return False
    reached, waiting = {node}, [node]
    while waiting:
        value = waiting.pop()
        for user in value.users:
            if user.op == "output" or _is_operand(value, user):
                continue
            if user.target not in _ARITHMETIC:
                return False
            if user not in reached:
                reached.add(user)
                waiting.append(user)
    return True


def _is_asked_about(val: Any) -> bool:
    """Whether code, the model's or torch's, branched on the integer's value."""
    free = val.node.expr.free_symbols
    return any(free & g.expr.free_symbols for g in val.node.shape_env.guards)


def _is_operand(value: Node, user: Node) -> bool:
    """Whether an elementwise op takes the value where it takes tensors or numbers."""
    target = user.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if torch.Tag.pointwise not in target.tags:
        return False
    if any(name in str(target) for name in _SIGNED_OTHERWISE):
        return False
    arguments = target._schema.arguments
    given = [*zip(arguments, user.args, strict=False)]
    given += [(a, user.kwargs[a.name]) for a in arguments if a.name in user.kwargs]
    return all(
        str(argument.type) in _NUMBERS
        for argument, passed in given
        if passed is value or (isinstance(passed, list | tuple) and value in passed)
    )
