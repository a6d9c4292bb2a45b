"""Gradients and steps of ours against torch's, judged by fp64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import pliant

FLOOR = 1e-6  # of an fp32 gradient, in units of its largest element
Loss = Callable[..., Tensor]
Batch = tuple[tuple[Any, ...], tuple[Any, ...]]


def wide(value: Any) -> Any:
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.double() if is_float else value


def eager(model: nn.Module, loss: Loss, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
    """The loss and the gradients that torch computes."""
    model.zero_grad()
    out = loss(model(*batch[0]), *batch[1])
    out.backward()
    return out.detach(), {
        name: None if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }


def judge(
    ours: Tensor, theirs: Tensor, exact: Tensor, what: str, largest: float = 0.0
) -> None:
    """Our error against fp64 is at most twice eager's, plus the floor.

    The floor counts from the largest gradient of the model too: one that is 0 by
    symmetry is a difference of larger terms.
    """
    assert ours.shape == theirs.shape and ours.dtype is theirs.dtype, what
    if not ours.numel():
        return
    scale = max(float(exact.abs().max()), 1e-30)
    error = float((ours.double() - exact).abs().max())
    limit = 2 * float((theirs.double() - exact).abs().max())
    limit += FLOOR * max(scale, largest / 10)
    assert error <= limit, f"{what}: error {error}, limit {limit}, scale {scale}"


def check_gradients(
    model: nn.Module,
    loss: Loss,
    example: Batch,
    shapes: Any,
    batches: Sequence[Batch],
    **settings: Any,
) -> pliant.TrainingStep:
    """Gradients at every batch, from one compile."""
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    step = pliant.compile_training(
        model, loss, pliant.SGD(0.1), example, shapes, threads=2, **settings
    )
    exact = copy.deepcopy(model).double()
    for batch in (example, *batches):
        found, ours = step.gradients(*batch)
        told, theirs = eager(model, loss, batch)
        best, truth = eager(exact, loss, (tuple(map(wide, batch[0])), batch[1]))
        sizes = [tuple(t.shape) for part in batch for t in part]
        judge(found, told, best.double(), f"loss at {sizes}")
        given = {name for name, g in theirs.items() if g is not None}
        assert set(ours) >= given and not set(ours) & frozen
        largest = max(float(truth[n].abs().max()) for n in given if truth[n].numel())
        for name in given:
            what = f"{name} at {sizes}"
            judge(ours[name], theirs[name], truth[name], what, largest)
    return step


def follow(
    model: nn.Module,
    loss: Loss,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    shapes: Any,
    batches: Sequence[Batch],
    tolerance: float = 1e-4,
    **settings: Any,
) -> pliant.TrainingStep:
    """Steps on the batches give torch's losses, and end at torch's parameters."""
    other = copy.deepcopy(model)
    theirs = optimizer(other.parameters())
    mine = optimizer(model.parameters())
    step = pliant.compile_training(
        model, loss, mine, batches[0], shapes, threads=2, **settings
    )
    for number, batch in enumerate(batches):
        got = step(*batch)
        theirs.zero_grad()
        want = loss(other(*batch[0]), *batch[1])
        want.backward()
        clip = settings.get("clip_grad_norm")
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(other.parameters(), clip)
        theirs.step()
        torch.testing.assert_close(
            got,
            want.detach(),
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m, number=number: f"loss of step {number}: {m}",
        )
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(
            a, b, rtol=10 * tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert step.compile_count == 1
    return step
