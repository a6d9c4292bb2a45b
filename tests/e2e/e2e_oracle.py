"""What right means: as close to double precision as eager is, with a small floor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

import pliant

# Added to twice eager's own error: absolute, or relative to the output's scale for the
# half types, whose last bit is that large.
FLOOR = {torch.float64: 1e-12, torch.float32: 1e-5}
HALF_FLOOR = {torch.float16: 1e-3, torch.bfloat16: 8e-3}


def tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def double(tree: Any) -> Any:
    """The floating-point tensors of a tree in double precision."""
    return pytree.tree_map(
        lambda x: (
            x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        ),
        tree,
    )


def floor(exact: torch.Tensor, dtype: torch.dtype) -> float:
    if dtype in FLOOR:
        return FLOOR[dtype]
    finite = exact[exact.isfinite()]
    scale = finite.abs().max().item() if finite.numel() else 0.0
    return HALF_FLOOR[dtype] * max(scale, 1.0)


def same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a == b) | (a.isnan() & b.isnan())


def assert_close(got: Any, eager: Any, exact: Any) -> None:
    """The same structure; floats within twice eager's error, the rest equal."""
    assert pytree.tree_structure(got) == pytree.tree_structure(eager)
    for ours, theirs, truth in zip(
        tensors(got), tensors(eager), tensors(exact), strict=True
    ):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        if not ours.is_floating_point():
            assert torch.equal(ours, theirs)
            continue
        # Where eager overflows on the way, the exact result is as good.
        odd = ~(theirs.isfinite() & ours.isfinite())
        fits = same(ours, theirs) | same(ours, truth.to(ours.dtype))
        assert fits[odd].all(), (ours[odd], theirs[odd])
        kept = ~odd & truth.isfinite()
        if not kept.any():
            continue
        mine = (ours.double() - truth)[kept].abs().max().item()
        eagers = (theirs.double() - truth)[kept].abs().max().item()
        bound = 2 * eagers + floor(truth, ours.dtype)
        assert mine <= bound, f"error {mine:.3g}, eager's {eagers:.3g}: {ours.shape}"


def check(
    compiled: pliant.CompiledModel,
    model: Callable[..., Any],
    inputs: Sequence[Any],
    exact: Callable[..., Any] | None = None,
) -> Any:
    """Runs both and compares; `exact` is the model in double precision."""
    with torch.no_grad():
        eager = model(*inputs)
        truth = (exact or model)(*double(tuple(inputs)))
    got = compiled(*inputs)
    assert_close(got, eager, truth)
    return got
