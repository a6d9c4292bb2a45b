"""Architectures of diffusers, small; batch, and image size or length, are dynamic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.coverage.architecture import Architecture, image

AUTO = torch.export.Dim.AUTO
_BLOCKS = (32, 64)
_UNET: dict[str, Any] = {"block_out_channels": _BLOCKS, "norm_num_groups": 8}


def entries() -> dict[str, Architecture]:
    return {f"diffusers/{name}": entry for name, entry in _ENTRIES.items()}


def _made(kind: str, **config: Any) -> Callable[[], torch.nn.Module]:
    def build() -> torch.nn.Module:
        import diffusers

        model: torch.nn.Module = getattr(diffusers, kind)(**config)
        return model

    return build


def _times(n: int) -> torch.Tensor:
    return torch.arange(3, 3 + n).float()


_PICTURE: Any = {0: "batch", 2: AUTO, 3: AUTO}
_PICTURES = [(2, 16, 16), (1, 16, 16), (3, 24, 16)]
_NAMED = ("hidden_states", "timestep", "encoder_hidden_states")


def _unet(build: Callable[[], torch.nn.Module], channels: int) -> Architecture:
    return Architecture(
        build,
        lambda n, h, w: (image(n, channels, h, w), _times(n)),
        (_PICTURE, {0: "batch"}),
        _PICTURES,
    )


def _guided(build: Callable[[], torch.nn.Module], width: int) -> Architecture:
    """A picture, times, and a text that it is made for."""
    return Architecture(
        build,
        lambda n, h, w: (image(n, 4, h, w), _times(n), image(n, 7, width)),
        (_PICTURE, {0: "batch"}, {0: "batch"}),
        _PICTURES,
    )


def _coder(build: Callable[[], torch.nn.Module], channels: int = 3) -> Architecture:
    return Architecture(
        build, lambda n, h, w: (image(n, channels, h, w),), (_PICTURE,), _PICTURES
    )


def _transformer(
    build: Callable[[], torch.nn.Module],
    inputs: Callable[..., tuple[torch.Tensor, ...]],
    dims: Any,
    names: tuple[str, ...] = _NAMED,
) -> Architecture:
    return Architecture(build, inputs, dims, _PICTURES, names)


_ROW, _TEXT = {0: "batch"}, {0: "batch"}

_ENTRIES: dict[str, Architecture] = {
    "UNet2DModel": _unet(
        _made(
            "UNet2DModel",
            sample_size=16,
            in_channels=3,
            out_channels=3,
            layers_per_block=1,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=8,
            **_UNET,
        ),
        3,
    ),
    "UNet2DConditionModel": _guided(
        _made(
            "UNet2DConditionModel",
            sample_size=16,
            layers_per_block=1,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=32,
            attention_head_dim=8,
            **_UNET,
        ),
        32,
    ),
    "AutoencoderKL": _coder(
        _made(
            "AutoencoderKL",
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            **_UNET,
        )
    ),
    "AutoencoderTiny": _coder(
        _made(
            "AutoencoderTiny",
            encoder_block_out_channels=(32, 32),
            decoder_block_out_channels=(32, 32),
            num_encoder_blocks=(1, 1),
            num_decoder_blocks=(1, 1),
        )
    ),
    "VQModel": _coder(
        _made(
            "VQModel",
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=3,
            num_vq_embeddings=16,
            **_UNET,
        )
    ),
    "DiTTransformer2DModel": _transformer(
        _made(
            "DiTTransformer2DModel",
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=2,
            sample_size=16,
            norm_num_groups=4,
            num_embeds_ada_norm=10,
        ),
        lambda n, h, w: (image(n, 4, 16, 16), torch.arange(n) % 9, torch.arange(n) % 9),
        (_ROW, _ROW, _ROW),
        ("hidden_states", "timestep", "class_labels"),
    ),
    "PixArtTransformer2DModel": _transformer(
        _made(
            "PixArtTransformer2DModel",
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=2,
            sample_size=16,
            cross_attention_dim=32,
            caption_channels=32,
            norm_num_groups=4,
            use_additional_conditions=False,
        ),
        lambda n, h, w: (image(n, 4, h, w), _times(n), image(n, 7, 32)),
        (_PICTURE, _ROW, _TEXT),
        ("hidden_states", "timestep", "encoder_hidden_states"),
    ),
    "SD3Transformer2DModel": _transformer(
        _made(
            "SD3Transformer2DModel",
            sample_size=16,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            caption_projection_dim=32,
            pooled_projection_dim=24,
            in_channels=4,
            out_channels=4,
        ),
        lambda n, h, w: (
            *(image(n, 4, h, w), _times(n), image(n, 7, 32)),
            image(n, 24),
        ),
        (_PICTURE, _ROW, _TEXT, _ROW),
        (*_NAMED, "pooled_projections"),
    ),
    "FluxTransformer2DModel": Architecture(
        _made(
            "FluxTransformer2DModel",
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=24,
            axes_dims_rope=(4, 4, 8),
        ),
        lambda n, s, t: (
            *(image(n, s, 16), image(n, t, 32), image(n, 24), _times(n)),
            *(torch.zeros(s, 3), torch.zeros(t, 3)),
        ),
        (
            *({0: "batch", 1: "places"}, {0: "batch", 1: "words"}, _ROW, _ROW),
            *({0: "places"}, {0: "words"}),
        ),
        [(2, 16, 7), (1, 9, 5), (3, 24, 8)],
        (
            *("hidden_states", "encoder_hidden_states", "pooled_projections"),
            *("timestep", "img_ids", "txt_ids"),
        ),
    ),
    "SanaTransformer2DModel": _transformer(
        _made(
            "SanaTransformer2DModel",
            in_channels=4,
            out_channels=4,
            num_layers=1,
            num_attention_heads=2,
            attention_head_dim=16,
            num_cross_attention_heads=2,
            cross_attention_head_dim=16,
            cross_attention_dim=32,
            caption_channels=32,
            sample_size=16,
        ),
        lambda n, h, w: (image(n, 4, h, w), _times(n), image(n, 7, 32)),
        (_PICTURE, _ROW, _TEXT),
        ("hidden_states", "timestep", "encoder_hidden_states"),
    ),
    "PriorTransformer": Architecture(
        _made(
            "PriorTransformer",
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=2,
            embedding_dim=32,
            num_embeddings=7,
            additional_embeddings=4,
        ),
        lambda n: (image(n, 32), _times(n), image(n, 32), image(n, 7, 32)),
        (_ROW, _ROW, _ROW, _ROW),
        [(2,), (1,), (3,)],
        ("hidden_states", "timestep", "proj_embedding", "encoder_hidden_states"),
    ),
    "UNet1DModel": Architecture(
        _made(
            "UNet1DModel",
            sample_size=32,
            in_channels=2,
            out_channels=2,
            extra_in_channels=64,
            down_block_types=("DownBlock1DNoSkip", "DownBlock1D"),
            up_block_types=("UpBlock1D", "UpBlock1DNoSkip"),
            block_out_channels=_BLOCKS,
        ),
        lambda n, s: (image(n, 2, s), _times(n)),
        ({0: "batch", 2: AUTO}, _ROW),
        [(2, 32), (1, 32), (3, 64)],
    ),
}
