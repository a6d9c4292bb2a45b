"""What families share: models of transformers behind plain tensors, and token ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Inputs = Callable[..., tuple[Tensor, ...]]  # of concrete dims
Built = tuple[nn.Module, Inputs]


class Wrapped(nn.Module):
    """A model of a library; the classes of families say how it is called."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model


class Encoder(Wrapped):
    """Token ids, and a mask of those that count, to the last hidden states."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        states: Tensor = self.model(ids, attention_mask=mask).last_hidden_state
        return states


class LanguageModel(Wrapped):
    """Token ids to the scores of the token behind each."""

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.model(ids, use_cache=False).logits
        return scores


def token_ids(vocabulary: range) -> Inputs:
    def inputs(batch: int, seq: int) -> tuple[Tensor, ...]:
        return (torch.randint(vocabulary.start, vocabulary.stop, (batch, seq)),)

    return inputs


def masked_ids(vocabulary: range) -> Inputs:
    """With a mask that hides none of them."""
    ids = token_ids(vocabulary)

    def inputs(batch: int, seq: int) -> tuple[Tensor, ...]:
        return *ids(batch, seq), torch.ones(batch, seq, dtype=torch.int64)

    return inputs
