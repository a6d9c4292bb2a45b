"""Gradients of every development model against fp64, by the norm of each parameter."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from training_oracle import FLOOR, eager, wide

import pliant
import zoo

SIZES: dict[str, tuple[tuple[int, ...], ...]] = {
    "bert": ((1, 1), (3, 37)),
    "tinybert": ((1, 1), (5, 61)),
    "minilm": ((1, 2), (3, 37)),
    "gpt2": ((1, 1), (3, 17)),
    "llama": ((1, 1), (3, 17)),
    "t5_encoder": ((1, 1), (3, 37)),
    "vit": ((1, 3), (1, 7)),
    "resnet": ((1, 64, 33), (3, 37, 96)),
    "evoformer": ((1, 3), (1, 17)),
    "unet": ((1, 2, 3), (1, 3, 11)),
}

pytestmark = pytest.mark.slow


def mean_of_squares(out: Any) -> Tensor:
    """Of the distance to a wave: that to 0 has no gradient behind a norm."""
    loss = torch.zeros(())
    for part in out if isinstance(out, tuple) else (out,):
        wave = torch.arange(part.shape[-1], dtype=part.dtype).cos()
        loss = loss + (part - wave).square().mean()
    return loss


def norm(x: Tensor) -> float:
    return float(x.double().norm())


@pytest.mark.parametrize("name", SIZES)
def test_gradients(name: str) -> None:
    case = zoo.build(name)
    torch.manual_seed(0)
    example = (case.inputs(*case.example), ())
    step = pliant.compile_training(
        case.model, mean_of_squares, pliant.SGD(0.1), example, (case.dynamic_shapes, ())
    )
    exact = copy.deepcopy(case.model).double()
    for sizes in (case.example, *SIZES[name]):
        batch = (case.inputs(*sizes), ())
        _, ours = step.gradients(*batch)
        _, theirs = eager(case.model, mean_of_squares, batch)
        _, truth = eager(exact, mean_of_squares, (tuple(map(wide, batch[0])), ()))
        known = {key: g for key, g in truth.items() if g is not None}
        # A gradient that is 0 by symmetry is a difference of larger terms.
        typical = max(norm(g) / math.sqrt(g.numel()) for g in known.values())
        worst = []
        for key, g in known.items():
            floor = FLOOR * max(norm(g), typical * math.sqrt(g.numel()) / 10)
            limit = 2 * norm(theirs[key].double() - g) + floor
            worst.append((norm(ours[key].double() - g) / limit, key))
        share, key = max(worst)
        assert share <= 1, f"{key} at {sizes}: {share:.2f} of the allowed error"
