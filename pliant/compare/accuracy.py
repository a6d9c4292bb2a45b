"""Whether an engine's results are right, against the model in double precision."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

FLOOR = 1e-5  # what pliant may be off beyond twice eager's error (docs/numerics.md)
# What a peer may be off, relative to the largest result: their fp32 approximations
# pass, lower precision does not.
PEER_TOLERANCE = 1e-3


def eager(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> Any:
    with torch.inference_mode():
        return model(*inputs)


def tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


class Reference:
    """The model in fp64, or in its own precision where it has fp32 built in."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.double: torch.nn.Module | None = copy.deepcopy(model).double()

    def __call__(self, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        if self.double is not None:
            wide = tuple(x.double() if x.is_floating_point() else x for x in inputs)
            try:
                return tensors(eager(self.double, wide))
            except RuntimeError:
                self.double = None
        return tensors(eager(self.model, inputs))


def error(result: Any, reference: Any) -> float:
    """Largest absolute difference over all tensors of two results."""
    got, wanted = tensors(result), tensors(reference)
    if len(got) != len(wanted):
        return math.inf
    pairs = zip(got, wanted, strict=True)
    return max((_difference(ours, theirs) for ours, theirs in pairs), default=0.0)


def _difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    if got.shape != wanted.shape:
        return math.inf
    if got.numel() == 0:
        return 0.0
    same = (got == wanted) | (got.isnan() & wanted.isnan())
    apart = (got.double() - wanted.double()).abs().masked_fill(same, 0.0)
    found = apart.max().item()
    return math.inf if math.isnan(found) else found


def allowed(exact: Sequence[torch.Tensor], eager_error: float, ours: bool) -> float:
    """The error that an engine may have: Pliant by eager's, peers by a loose bound."""
    if ours:
        return 2 * eager_error + FLOOR
    return PEER_TOLERANCE * scale(exact)


def scale(result: Any) -> float:
    """The largest finite number of a result, at least 1."""
    finite = [x[x.isfinite()].abs() for x in tensors(result)]
    return max([1.0, *(x.max().item() for x in finite if x.numel())])
