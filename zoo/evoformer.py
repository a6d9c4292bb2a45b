"""A block of ESMFold's trunk: attention along the rows and columns of pairs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.esm.configuration_esm import TrunkConfig
from transformers.models.esm.modeling_esmfold import (
    EsmFoldTriangularSelfAttentionBlock,
)

from zoo.parts import Built, Wrapped


class EvoformerBlock(Wrapped):
    """States of residues and of their pairs to the same; nothing is cut into chunks."""

    def forward(self, states: Tensor, pairs: Tensor, mask: Tensor) -> Any:
        return self.model(states, pairs, mask=mask, chunk_size=None)


def evoformer() -> Built:
    config = TrunkConfig()

    def inputs(batch: int, residues: int) -> tuple[Tensor, ...]:
        grid = (batch, residues, residues)
        return (
            torch.randn(batch, residues, config.sequence_state_dim),
            torch.randn(*grid, config.pairwise_state_dim),
            torch.ones(batch, residues),
        )

    return EvoformerBlock(EsmFoldTriangularSelfAttentionBlock(config)), inputs
