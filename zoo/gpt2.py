"""GPT-2: causal attention, learned positions."""

from __future__ import annotations

import transformers

from zoo.parts import Built, LanguageModel, token_ids

POSITIONS = 16384  # more than any benchmark asks for


def gpt2(layers: int = 4) -> Built:
    config = transformers.GPT2Config(
        n_layer=layers, n_positions=POSITIONS, use_cache=False
    )
    model = transformers.GPT2LMHeadModel(config)
    return LanguageModel(model), token_ids(range(config.vocab_size))
