"""Small random language models as GGUF files, and the same model in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from tokenizers import pre_tokenizers

LAYERS, WIDTH, HEADS, KV_HEADS, SIZE, INNER = 2, 96, 6, 2, 32, 160
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def words() -> tuple[list[str], list[str]]:
    """Tokens for every byte and some pairs, special ones; and the merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["t h", "th e", "a n", "i n", "Ġ the", "o n"]
    made = ["".join(merge.split(" ")) for merge in merges]
    return [*alphabet, *made, "<|im_start|>", "<|im_end|>"], merges


def reference(family: str, tied: bool, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    kind = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }[family]
    config = kind[0](
        vocab_size=len(words()[0]),
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=SIZE,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        rope_theta=5000.0,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = kind[1](config).eval()
    with torch.no_grad():  # norms that matter, biases that are not 0
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.add_(torch.rand_like(weight) - ("bias" in name) * 0.5)
    return model


def write(path: Path, model: Any, kind: str, family: str) -> None:
    """Writes the model quantised, and gives it the weights that the file holds."""
    writer = gguf.GGUFWriter(path, family)
    config = model.config
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(SIZE)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(SIZE)
    names, merges = words()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(names)
    writer.add_token_types([1] * (len(names) - 2) + [3, 3])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(len(names) - 1)
    writer.add_bos_token_id(len(names) - 2)
    writer.add_chat_template(TEMPLATE)
    format = gguf.GGMLQuantizationType[kind.upper()]
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        data = weight.numpy()
        stored = gguf.GGMLQuantizationType.F32
        if data.ndim == 2 and data.shape[1] % 32 == 0:
            stored = format
            packed = gguf.quantize(data, format)
            with torch.no_grad():
                weight.copy_(torch.from_numpy(gguf.dequantize(packed, format)))
        else:
            packed = data
        if family == "llama" and ("q_proj" in name or "k_proj" in name):
            packed = _interleaved(packed)
        writer.add_tensor(in_file(name), packed, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(rows: np.ndarray) -> np.ndarray:
    """As llama.cpp's converter stores q and k: the halves of a head in turns."""
    heads = rows.reshape(-1, 2, SIZE // 2, *rows.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(rows.shape)


def in_file(name: str) -> str:
    plain = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in plain:
        return plain[name]
    _, _, layer, *middle, last = name.split(".")
    return f"blk.{layer}.{_NAMES['.'.join(middle)]}.{last}"
