"""T5: its encoder, whose attention adds a learned bias by distance."""

from __future__ import annotations

import transformers

from zoo.parts import Built, Encoder, masked_ids


def t5_encoder(layers: int = 2) -> Built:
    config = transformers.T5Config(num_layers=layers)
    model = transformers.T5EncoderModel(config)
    return Encoder(model), masked_ids(range(config.vocab_size))
