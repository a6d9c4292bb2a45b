"""A user's file with models for the command line."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Given:
    model: torch.nn.Module
    inputs: Any
    dynamic_shapes: Any
    dims: tuple[str, ...]
    example: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...] = ((1, 3), (2, 5))


def net() -> Given:
    layers = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)
    )
    return Given(
        layers,
        lambda batch, seq: (torch.randn(batch, seq, 8),),
        ({0: "batch", 1: "seq"},),
        ("batch", "seq"),
        (2, 7),
    )


def unnamed() -> Given:
    dynamic = torch.export.Dim.DYNAMIC
    return replace(net(), dynamic_shapes=({0: dynamic, 1: dynamic},))


class Odd(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.svdvals(torch.complex(x, x))  # nothing compiles this


def odd() -> Given:
    return Given(
        Odd(),
        lambda batch, seq: (torch.randn(batch, seq, 8),),
        ({0: "batch", 1: "seq"},),
        ("batch", "seq"),
        (2, 7),
    )


def not_a_case() -> int:
    return 3
