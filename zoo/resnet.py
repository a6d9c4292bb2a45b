"""ResNet: convolutions with normalisation by fixed statistics, two blocks a stage."""

from __future__ import annotations

import torch
import transformers
from torch import Tensor

from zoo.parts import Built, Wrapped


class Features(Wrapped):
    def forward(self, image: Tensor) -> Tensor:
        states: Tensor = self.model(image).last_hidden_state
        return states


def resnet() -> Built:
    config = transformers.ResNetConfig(depths=[2, 2, 2, 2])
    return Features(transformers.ResNetModel(config)), images


def images(batch: int, height: int, width: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, 3, height, width),)
