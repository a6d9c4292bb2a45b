"""A user's file: a model, its inputs, and which of their axes vary."""

import torch
from torch import nn


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(100, 8)
        self.register_buffer("positions", torch.randn(1, 40, 8))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.words(ids) + self.positions[:, : ids.shape[1]]


model = Words()
inputs = (torch.randint(90, 100, (2, 4)),)
dynamic_shapes = ({0: "batch", 1: "seq"},)
