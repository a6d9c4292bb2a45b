"""Architectures of transformers, as small as their configurations allow.

One table for each kind of input: token numbers, an encoder's and a decoder's token
numbers, images, and sound. The rows give what a configuration needs beyond the sizes
that most share; None leaves the configuration's own. Batch and length are dynamic, of
images the batch, and their size where a model leaves it open.
"""

from __future__ import annotations

from typing import Any

import torch

from bench.coverage.architecture import Architecture, ids, image

_TEXT: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 16}
_GPT: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
_EXPERTS: dict[str, Any] = {
    **_GROUPED,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_XLM: dict[str, Any] = {"emb_dim": 64, "n_layers": 2, "n_heads": 4}
_LATENT: dict[str, Any] = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "num_key_value_heads": 4,
}
_MAMBA: dict[str, Any] = {"state_size": 8, "num_heads": 8, "head_dim": 16}

# Token numbers -> hidden states.
TEXT: dict[str, dict[str, Any]] = {
    "albert": {"embedding_size": 32},
    "apertus": _GROUPED,
    "arcee": _GROUPED,
    "bert": {},
    "bert-generation": {},
    "big_bird": {"attention_type": "original_full"},
    "biogpt": {},
    "bitnet": _GROUPED,
    "bloom": {"n_layer": 2, "n_head": 4},
    "camembert": {},
    "canine": {},
    "codegen": {**_GPT, "n_ctx": 128, "rotary_dim": 8},
    "cohere": _GROUPED,
    "cohere2": _GROUPED,
    "convbert": {"embedding_size": 64},
    "ctrl": {**_GPT, "dff": 96},
    "data2vec-text": {},
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "deepseek_v3": _LATENT,
    "distilbert": {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 96},
    "dots1": {**_LATENT, "head_dim": 16},
    "electra": {"embedding_size": 32},
    "ernie": {},
    "ernie4_5": _GROUPED,
    "ernie4_5_moe": {**_EXPERTS, "moe_num_experts": 4, "moe_k": 2},
    "esm": {"mask_token_id": 3, "position_embedding_type": "rotary"},
    "exaone4": {**_GROUPED, "sliding_window": 16, "sliding_window_pattern": 2},
    "falcon": {"num_kv_heads": 2},
    "falcon_mamba": _MAMBA,
    "flaubert": _XLM,
    "fnet": {},
    "gemma": _GROUPED,
    "gemma2": _GROUPED,
    "gemma3_text": {**_GROUPED, "sliding_window": 16},
    "glm": _GROUPED,
    "glm4": _GROUPED,
    "glm4_moe": {**_LATENT, "head_dim": 16},
    "gpt2": {**_GPT, "n_ctx": 128},
    "gpt_bigcode": _GPT,
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]},
    "gpt_neox": {},
    "gpt_neox_japanese": {"intermediate_multiple_size": 2},
    "gpt_oss": {**_EXPERTS, "sliding_window": 16},
    "gptj": {**_GPT, "rotary_dim": 8},
    "granite": _GROUPED,
    "granitemoe": _EXPERTS,
    "helium": _GROUPED,
    "ibert": {},
    "jamba": {**_EXPERTS, "mamba_d_state": 8, "use_mamba_kernels": False},
    "jetmoe": {**_EXPERTS, "kv_channels": 16, "num_key_value_heads": 4},
    "layoutlm": {},
    "lfm2": {**_GROUPED, "layer_types": ["conv", "full_attention"]},
    "llama": _GROUPED,
    "llama4_text": {**_EXPERTS, "intermediate_size_mlp": 96},
    "longformer": {"attention_window": 8},
    "luke": {"entity_vocab_size": 20, "entity_emb_size": 16},
    "mamba": _MAMBA,
    "mamba2": {**_MAMBA, "hidden_size": 64, "n_groups": 1, "chunk_size": 16},
    "markuplm": {},
    "megatron-bert": {},
    "minimax": {**_EXPERTS, "block_size": 16},
    "ministral": {**_GROUPED, "sliding_window": 16},
    "mistral": _GROUPED,
    "mixtral": _EXPERTS,
    "mobilebert": {"embedding_size": 32, "intra_bottleneck_size": 32},
    "modernbert": {"local_attention": 16},
    "mpnet": {},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
    "nanochat": _GROUPED,
    "nemotron": _GROUPED,
    "nystromformer": {"num_landmarks": 8, "segment_means_seq_len": 8},
    "olmo": _GROUPED,
    "olmo2": _GROUPED,
    "olmo3": {**_GROUPED, "sliding_window": 16},
    "olmoe": _EXPERTS,
    "openai-gpt": _GPT,
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "persimmon": {},
    "phi": {},
    "phi3": _GROUPED,
    "phimoe": _EXPERTS,
    "qwen2": _GROUPED,
    "qwen2_moe": _EXPERTS,
    "qwen3": _GROUPED,
    "qwen3_moe": _EXPERTS,
    "qwen3_next": {**_EXPERTS, "linear_num_value_heads": 4, "linear_num_key_heads": 2},
    "recurrent_gemma": {**_GROUPED, "lru_width": 64, "attention_window_size": 16},
    "reformer": {
        "attn_layers": ["local", "local"],
        "axial_pos_embds": False,
        "local_attn_chunk_length": 8,
        "is_decoder": True,
    },
    "rembert": {"input_embedding_size": 32},
    "roberta": {},
    "roberta-prelayernorm": {},
    "roc_bert": {"shape_embed_dim": 32, "pronunciation_embed_dim": 32},
    "roformer": {"embedding_size": 64},
    "rwkv": {"attention_hidden_size": 64, "context_length": 64},
    "seed_oss": _GROUPED,
    "smollm3": _GROUPED,
    "splinter": {},
    "squeezebert": {"embedding_size": 64},
    "stablelm": _GROUPED,
    "starcoder2": _GROUPED,
    "xglm": {"d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 96},
    "xlm": _XLM,
    "xlm-roberta": {},
    "xlm-roberta-xl": {},
    "xlnet": {
        "d_model": 64,
        "n_layer": 2,
        "n_head": 4,
        "d_inner": 96,
        "max_position_embeddings": None,
    },
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "yoso": {"use_expectation": True},
    "zamba2": {**_MAMBA, "mamba_d_state": 8, "layers_block_type": ["mamba", "hybrid"]},
}

_BART: dict[str, Any] = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "decoder_start_token_id": 2,
}
_T5: dict[str, Any] = {
    "d_model": 64,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "d_ff": 96,
    "d_kv": 16,
    "decoder_start_token_id": 0,
}

# Token numbers of an encoder and of a decoder -> hidden states.
PAIRS: dict[str, dict[str, Any]] = {
    "bart": _BART,
    "bigbird_pegasus": {**_BART, "attention_type": "original_full"},
    "blenderbot": _BART,
    "blenderbot-small": _BART,
    "led": {**_BART, "attention_window": 8},
    "longt5": {**_T5, "local_radius": 4},
    "m2m_100": _BART,
    "marian": _BART,
    "mbart": _BART,
    "mt5": _T5,
    "mvp": _BART,
    "nllb-moe": {**_BART, "num_experts": 4, "encoder_sparse_step": 2},
    "pegasus": _BART,
    "pegasus_x": {**_BART, "block_size": 8, "num_global_tokens": 4},
    "plbart": _BART,
    "prophetnet": {
        "num_hidden_layers": None,
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "num_encoder_attention_heads": 4,
        "num_decoder_attention_heads": 4,
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96,
        "hidden_size": 64,
    },
    "switch_transformers": {**_T5, "num_experts": 4},
    "t5": _T5,
    "umt5": _T5,
}

_VIT: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "image_size": 32,
    "patch_size": 8,
}
_STAGES: dict[str, Any] = {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 48, 64]}
_SWIN: dict[str, Any] = {
    "image_size": 64,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
    "patch_size": 4,
}
_DETR: dict[str, Any] = {
    "backbone_config": {
        "model_type": "resnet",
        "out_features": ["stage2", "stage3", "stage4"],
        "embedding_size": 16,
        **_STAGES,
    },
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "num_queries": 9,
}

# Images -> features; the side of the images is that of the configuration.
IMAGES: dict[str, dict[str, Any]] = {
    "beit": _VIT,
    "bit": {**_STAGES, "embedding_size": 16, "num_groups": 4},
    "conditional_detr": _DETR,
    "convnext": _STAGES,
    "convnextv2": _STAGES,
    "cvt": {},
    "data2vec-vision": _VIT,
    "deformable_detr": {**_DETR, "two_stage": False},
    "deit": _VIT,
    "detr": _DETR,
    "dinov2": _VIT,
    "dinov2_with_registers": _VIT,
    "dinov3_convnext": _STAGES,
    "dinov3_vit": _VIT,
    "efficientnet": {"depth_coefficient": 0.3},
    "focalnet": {**_SWIN, "focal_levels": [2, 2], "focal_windows": [3, 3]},
    "glpn": {**_STAGES, "num_attention_heads": [1, 2, 3, 4]},
    "hgnet_v2": {},
    "hiera": {"image_size": [64, 64], "embed_dim": 24, "depths": [1, 1, 1, 1]},
    "ijepa": _VIT,
    "levit": {"image_size": 64, "hidden_sizes": [32, 48, 64], "depths": [1, 1, 1]},
    "mobilenet_v1": {"depth_multiplier": 0.5},
    "mobilenet_v2": {"depth_multiplier": 0.5},
    "mobilevit": {"image_size": 64},
    "mobilevitv2": {"image_size": 64, "width_multiplier": 0.5},
    "poolformer": {**_STAGES, "patch_sizes": [7, 3, 3, 3]},
    "pvt": {**_STAGES, "image_size": 64, "num_attention_heads": [1, 2, 3, 4]},
    "pvt_v2": {**_STAGES, "image_size": 64, "num_attention_heads": [1, 2, 3, 4]},
    "regnet": {**_STAGES, "embedding_size": 16, "groups_width": 8},
    "resnet": {**_STAGES, "embedding_size": 16},
    "rt_detr": {"image_size": 64, "num_queries": 9},
    "segformer": {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 48, 64]},
    "siglip_vision_model": _VIT,
    "clip_vision_model": _VIT,
    "swiftformer": {"depths": [1, 1, 1, 1], "embed_dims": [16, 32, 48, 64]},
    "swin": _SWIN,
    "swinv2": _SWIN,
    "textnet": {},
    "vit": _VIT,
    "vit_mae": {**_VIT, "decoder_hidden_size": 32, "decoder_num_hidden_layers": 1},
    "vit_msn": _VIT,
    "vitdet": _VIT,
    "yolos": {**_VIT, "image_size": [32, 32], "num_detection_tokens": 5},
}

_WAVE: dict[str, Any] = {
    **_TEXT,
    "conv_dim": [16, 16, 16],
    "conv_stride": [5, 2, 2],
    "conv_kernel": [10, 3, 3],
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}

# Sound as numbers (batch, length) -> hidden states.
SOUND: dict[str, dict[str, Any]] = {
    "data2vec-audio": _WAVE,
    "hubert": _WAVE,
    "sew": {**_WAVE, "squeeze_factor": 2},
    "sew-d": {**_WAVE, "squeeze_factor": 2, "feature_layer_norm_eps": 1e-5},
    "unispeech": _WAVE,
    "unispeech-sat": _WAVE,
    "wav2vec2": _WAVE,
    "wav2vec2-conformer": _WAVE,
    "wavlm": _WAVE,
}


def entries() -> dict[str, Architecture]:
    made: dict[str, Architecture] = {}
    for name, more in TEXT.items():
        made[f"transformers/{name}"] = _text(name, {**_TEXT, **more})
    for name, more in PAIRS.items():
        made[f"transformers/{name}"] = _pair(name, {**_TEXT, **more})
    for name, more in IMAGES.items():
        made[f"transformers/{name}"] = _image(name, more)
    for name, more in SOUND.items():
        made[f"transformers/{name}"] = _sound(name, more)
    return made


def _model(name: str, config: dict[str, Any]) -> torch.nn.Module:
    """With those of the settings that the configuration knows."""
    from transformers import AutoConfig, AutoModel

    made = AutoConfig.for_model(name)
    known = {k: v for k, v in config.items() if v is not None and hasattr(made, k)}
    model: torch.nn.Module = AutoModel.from_config(AutoConfig.for_model(name, **known))
    return model


_ROWS: Any = {0: "batch", 1: "length"}


def _text(name: str, config: dict[str, Any]) -> Architecture:
    return Architecture(
        lambda: _model(name, config),
        lambda batch, length: (ids(batch, length),),
        (_ROWS,),
        [(2, 13), (1, 1), (1, 7), (3, 16), (2, 33)],
        ("input_ids",),
        () if name in _NO_CACHE else (("use_cache", False),),
    )


# Models whose forward takes no such argument.
_WITHOUT = """
albert canine convbert deberta deberta-v2 distilbert fnet funnel ibert layoutlm
longformer luke markuplm megatron-bert mobilebert modernbert mpnet nystromformer
splinter squeezebert yoso esm flaubert xlm
"""
_NO_CACHE = frozenset(_WITHOUT.split())


# Models that make a mask themselves, but not while they are exported.
_MASKED = frozenset({"longt5", "switch_transformers"})


def _pair(name: str, config: dict[str, Any]) -> Architecture:
    masks = 1 if name in _MASKED else 0

    def inputs(batch: int, length: int, rest: int) -> tuple[torch.Tensor, ...]:
        words = ids(batch, length), ids(batch, rest)
        return (*words, *[torch.ones(batch, length, dtype=torch.int64)] * masks)

    return Architecture(
        lambda: _model(name, config),
        inputs,
        (_ROWS, {0: "batch", 1: "rest"}, *[_ROWS] * masks),
        [(2, 13, 5), (1, 7, 1), (3, 16, 9), (1, 33, 4)],
        ("input_ids", "decoder_input_ids", *["attention_mask"] * masks),
        (("use_cache", False),),
    )


def _image(name: str, config: dict[str, Any]) -> Architecture:
    side = config.get("image_size", 64)
    side = side[0] if isinstance(side, list) else side
    auto = torch.export.Dim.AUTO
    return Architecture(
        lambda: _model(name, config),
        lambda n, h, w: (image(n, 3, h, w),),
        ({0: "batch", 2: auto, 3: auto},),
        [(2, side, side), (1, side, side), (3, side, side), (1, side + 32, side)],
        ("pixel_values",),
    )


def _sound(name: str, config: dict[str, Any]) -> Architecture:
    return Architecture(
        lambda: _model(name, config),
        lambda batch, length: (image(batch, length),),
        (_ROWS,),
        [(2, 800), (1, 640), (3, 1003)],
        ("input_values",),
    )
