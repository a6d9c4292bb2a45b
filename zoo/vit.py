"""ViT: an image as patches, for which learned positions are resized."""

from __future__ import annotations

import torch
import transformers
from torch import Tensor

from zoo.parts import Built, Wrapped

PATCH = 16  # pixels along each side


class PatchEncoder(Wrapped):
    def forward(self, image: Tensor) -> Tensor:
        made = self.model(image, interpolate_pos_encoding=True)
        states: Tensor = made.last_hidden_state
        return states


def vit(layers: int = 4) -> Built:
    config = transformers.ViTConfig(num_hidden_layers=layers, patch_size=PATCH)
    model = transformers.ViTModel(config, add_pooling_layer=False)
    return PatchEncoder(model), images


def images(batch: int, patches: int) -> tuple[Tensor, ...]:
    side = PATCH * patches
    return (torch.randn(batch, 3, side, side),)
