"""torch's own decompositions of single ops, called from here and from nowhere else.

torch_expand.py traces these calls. Conditions on sizes that are asked below a frame of
this file are those of a decomposition; see `asked_here`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._decomp import decomposition_table

from pliant.frontend.torch_alias import functional_twin, is_in_place
from pliant.frontend.torch_questions import Asked, Question

aten = torch.ops.aten
Decomposition = Callable[..., Any]

# Rules that torch has and that are no use: they run a loop over a size, or compute
# something less exactly than the op does.
_LEFT_OUT: frozenset[Any] = frozenset()


def rules_of(op: torch._ops.OpOverload) -> Iterator[Decomposition]:
    """The ways in which torch composes an op of others, the nearest to eager first."""
    if op in _LEFT_OUT:
        return
    if op._can_decompose():
        yield _composite(op)
    if op in decomposition_table:
        yield _called(decomposition_table[op])
    if op.namespace == "prims" and hasattr(op, "impl_aten"):
        yield _called(op.impl_aten)
    twin = functional_twin(op) if is_in_place(op) else None
    if twin is not None:
        yield from map(_written, rules_of(twin))


def asked_here(asked: Asked) -> Iterator[Question]:
    """The conditions that decided what a decomposition does.

    Others are asked by the tracer when it takes in the operands.
    """
    return (question for question in asked.questions if question.path == __file__)


def _composite(op: torch._ops.OpOverload) -> Decomposition:
    """What eager calls. The tracer's modes would take the call for one of the op."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return op.decompose(*args, **kwargs)

    return call


def _called(rule: Decomposition) -> Decomposition:
    def call(*args: Any, **kwargs: Any) -> Any:
        return rule(*args, **kwargs)

    return call


def _written(rule: Decomposition) -> Decomposition:
    """An in-place op: its functional twin, written over the operand."""

    def call(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return x.copy_(rule(x, *args, **kwargs))

    return call
