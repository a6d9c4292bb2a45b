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


def _linear_cross_entropy(
    x: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    linear_bias: torch.Tensor | None,
    weight: torch.Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    *options: Any,
) -> list[torch.Tensor]:
    """The loss; of the gradients that the op can give beside it, none."""
    if any(options[-3:]):
        raise NotImplementedError("gradients computed beside the loss")
    loss = torch.nn.functional.cross_entropy(
        torch.nn.functional.linear(x, linear_weight, linear_bias),
        target,
        weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    return [loss, x.new_empty(0, 0), x.new_empty(0, 0), x.new_empty(0)]


def _each_linear_cross_entropy(
    x: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    linear_bias: torch.Tensor | None,
    weight: torch.Tensor | None,
    ignore_index: int,
    *_: Any,
) -> torch.Tensor:
    logits = torch.nn.functional.linear(x, linear_weight, linear_bias)
    return torch.nn.functional.cross_entropy(
        logits, target, weight, ignore_index=ignore_index, reduction="none"
    )


# Ops that fuse others without a rule of torch's, by name.
_COMPOSED: dict[str, Decomposition] = {
    "torch_nn._linear_cross_entropy_batch_chunked.default": _linear_cross_entropy,
    "torch_nn._linear_cross_entropy_batch_chunked_no_reduction.default": (
        _each_linear_cross_entropy
    ),
}


def rules_of(op: torch._ops.OpOverload) -> Iterator[Decomposition]:
    """The ways in which torch composes an op of others, the nearest to eager first."""
    if op in _LEFT_OUT:
        return
    if str(op) in _COMPOSED:
        yield _called(_COMPOSED[str(op)])
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
