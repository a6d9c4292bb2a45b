"""Llama: rotary positions, heads that share keys and values, gated layers."""

from __future__ import annotations

import transformers

from zoo.parts import Built, LanguageModel, token_ids


def llama(layers: int = 4) -> Built:
    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=16384,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config)
    return LanguageModel(model), token_ids(range(config.vocab_size))
