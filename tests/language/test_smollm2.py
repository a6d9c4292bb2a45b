"""A real model: greedy text is what transformers writes with the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from tiny_gguf import in_file

import pliant
from pliant.commands.chat import smollm2
from pliant.language.sampling import TokenSampler

QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain gravity to a child.",
    "List three uses of a paper clip.",
    "What is 12 times 7?",
)
PROMPTS = (
    "Once upon a time",
    "The three laws of thermodynamics are",
    "def fibonacci(n):",
    "In 1969,",
    "Dear Sir or Madam,",
)
TOKENS = 64


def decoded(path: Path) -> Any:
    """The file's numbers in transformers' own model."""
    reader = gguf.GGUFReader(path)
    weights = {
        t.name: torch.from_numpy(gguf.dequantize(t.data, t.tensor_type).copy())
        for t in reader.tensors
    }
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        rope_theta=100000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    state = model.state_dict()
    with torch.no_grad():
        for name, weight in state.items():
            stored = "token_embd.weight" if name == "lm_head.weight" else in_file(name)
            data = weights[stored]
            if "q_proj" in name or "k_proj" in name:
                heads = data.reshape(-1, 32, 2, 576)
                data = heads.transpose(1, 2).reshape(data.shape)
            weight.copy_(data)
    return model


@pytest.mark.slow
def test_greedy_text() -> None:
    path = smollm2()
    lm = pliant.load_gguf(path, threads=2)
    model = decoded(path)
    asked = [lm.tokens.chat([{"role": "user", "content": q}]) for q in QUESTIONS]
    for prompt in (*asked, *PROMPTS):
        ids = lm.tokens.encode(prompt)
        with torch.no_grad():
            want = model.generate(
                torch.tensor([ids]),
                max_new_tokens=TOKENS,
                do_sample=False,
                eos_token_id=None,
                repetition_penalty=1.0,
            )[0, len(ids) :].tolist()
        assert list(lm.next_tokens(ids, TOKENS, TokenSampler())) == want, prompt
    assert lm.stats()["compiles"] == 1
