"""Memory of training steps: one tensor of logits, and no more for having fused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from small_models import GPT, TOKENS, Llama, token_batch, token_loss
from torch import Tensor, nn
from training_oracle import check_gradients

import pliant

WIDTH, CLASSES = 8, 4099
SHAPES = (({0: "batch", 1: "seq"},), ({0: "batch", 1: "seq"},))


def batch(b: int, s: int) -> tuple[tuple[Tensor], tuple[Tensor]]:
    generator = torch.Generator().manual_seed(b * 1000 + s)
    x = torch.randn(b, s, WIDTH, generator=generator)
    return (x,), (torch.randint(0, CLASSES, (b, s), generator=generator),)


def same(logits: Tensor, labels: Tensor, **how: str) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **how)


def shifted(logits: Tensor, labels: Tensor, **how: str) -> Tensor:
    short = logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(short, labels[:, 1:].flatten(), **how)


@pytest.mark.parametrize("loss", [same, shifted], ids=["same", "shifted"])
def test_gradient_is_written_over_the_logits(loss: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    batches = [batch(b, s) for b, s in ((1, 2), (3, 7), (1, 67), (5, 31))]
    step = check_gradients(
        nn.Linear(WIDTH, CLASSES), loss, batch(2, 5), SHAPES, batches
    )
    for b, s in ((4, 256), (1, 2048)):
        (x,), (labels,) = batch(b, s)
        logits = 4 * b * s * CLASSES
        plan = step.memory_plan((x,), (labels,))
        assert logits <= plan.peak_bytes < 1.25 * logits


def test_one_token_predicts_nothing() -> None:
    """A shift of one leaves no row of the logits, and gradients of 0."""
    loss = partial(shifted, reduction="sum")
    step = pliant.compile_training(
        nn.Linear(WIDTH, CLASSES), loss, pliant.SGD(0.1), batch(2, 5), SHAPES
    )
    for b in (0, 1, 3):
        told, found = step.gradients(*batch(b, 1))
        assert told == 0 and all(not g.any() for g in found.values())


@pytest.mark.parametrize(
    "kind, off",
    [(GPT, {"fewest": False}), (Llama, {"fewest": False}), (Llama, {"fuse": False})],
)
def test_fusion_costs_no_memory(kind: type[nn.Module], off: dict[str, bool]) -> None:
    torch.manual_seed(0)
    steps = [
        pliant.compile_training(
            kind(),
            token_loss,
            pliant.SGD(0.1),
            token_batch(2, 5),
            TOKENS,
            options=pliant.Options(**options),
        )
        for options in ({}, off)
    ]
    for b, s in ((1, 1), (1, 64), (4, 64), (3, 61)):
        with_it, without = (step.memory_plan(*token_batch(b, s)) for step in steps)
        # the search for an order may miss one percent, in either
        assert with_it.peak_bytes <= 1.01 * without.peak_bytes, (b, s)
