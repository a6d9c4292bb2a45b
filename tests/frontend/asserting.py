"""A model that asserts something of its data; pytest rewrites the asserts of tests."""

from __future__ import annotations

import torch


def asserted(ids: torch.Tensor) -> torch.Tensor:
    """Every row must have an end, of zeros."""
    lengths = (ids != 0).sum(1)
    assert lengths.max().item() <= ids.shape[1] - 1
    return torch.arange(ids.shape[1]) < lengths[:, None]
