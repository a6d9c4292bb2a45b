"""The U-Net of latent diffusion: an image made from noise, guided by a text."""

from __future__ import annotations

import diffusers
import torch
from torch import Tensor

from zoo.parts import Built, Wrapped

CHANNELS, TEXT_WIDTH = 4, 64
STEP = 8  # in which the side of a latent is counted
TIME = 3.0


class Denoiser(Wrapped):
    def forward(self, latent: Tensor, time: Tensor, text: Tensor) -> Tensor:
        made: Tensor = self.model(latent, time, text).sample
        return made


def unet() -> Built:
    model = diffusers.UNet2DConditionModel(
        sample_size=32,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        layers_per_block=1,
        block_out_channels=(128, 256),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=TEXT_WIDTH,
        attention_head_dim=8,
        norm_num_groups=32,
    )
    return Denoiser(model), inputs


def inputs(batch: int, side: int, text: int) -> tuple[Tensor, ...]:
    return (
        torch.randn(batch, CHANNELS, STEP * side, STEP * side),
        torch.tensor(TIME),
        torch.randn(batch, text, TEXT_WIDTH),
    )
