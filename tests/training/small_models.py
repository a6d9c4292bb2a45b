"""Small models of the kinds that people train."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS = 31, 16, 2
TOKENS = (({0: "batch", 1: "seq"},), ({0: "batch", 1: "seq"},))


def token_batch(
    batch: int, seq: int, seed: int = 0
) -> tuple[tuple[Tensor], tuple[Tensor]]:
    generator = torch.Generator().manual_seed(1000 * seed + 100 * batch + seq)
    ids = torch.randint(0, VOCABULARY, (batch, seq), generator=generator)
    return (ids,), (torch.randint(0, VOCABULARY, (batch, seq), generator=generator),)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class GPTBlock(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        # No bias: that of keys has a gradient of rounding errors only.
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.first(x)).split(WIDTH, -1)
        q, k, v = (p.unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(y.transpose(1, 2).flatten(2)))
        return x + self.down(F.gelu(self.up(self.second(x)), approximate="tanh"))


class GPT(nn.Module):
    """As GPT-2: learned positions, pre-norm, tied output layer."""

    def __init__(self, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(GPTBlock(dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LlamaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k = nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.v = nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, 40, bias=False)
        self.up = nn.Linear(WIDTH, 40, bias=False)
        self.down = nn.Linear(40, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        def heads(y: Tensor, turned: bool) -> Tensor:
            y = y.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            left, right = y.chunk(2, -1)
            other = torch.cat((-right, left), -1)
            return y * cos + other * sin if turned else y

        h = self.first(x)
        q, k, v = heads(self.q(h), True), heads(self.k(h), True), self.v(h)
        y = F.scaled_dot_product_attention(
            q, k, heads(v, False), is_causal=True, enable_gqa=True
        )
        x = x + self.out(y.transpose(1, 2).flatten(2))
        h = self.second(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """As llama: rotary positions, shared key heads, gated feed-forward."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(LlamaBlock() for _ in range(layers))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        steps = torch.arange(ids.shape[1], dtype=x.dtype)
        rates = 0.1 ** torch.arange(4, dtype=x.dtype)
        angles = (steps[:, None] * rates).repeat(1, 2)
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin())
        return self.head(self.norm(x))


class BertBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k = nn.Linear(WIDTH, WIDTH, bias=False)
        self.v = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for p in (self.q, self.k, self.v)
        )
        scores = q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5 + mask
        y = scores.softmax(-1) @ v
        x = self.first(x + self.out(y.transpose(1, 2).flatten(2)))
        return self.second(x + self.down(F.gelu(self.up(x))))


class Bert(nn.Module):
    """As BERT: spelled-out attention under a mask, post-norm, a class per text."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.places = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(BertBlock() for _ in range(layers))
        self.pool = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor, keep: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        mask = (1 - keep[:, None, None, :].to(x.dtype)) * -1e4
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.pool(x[:, 0]).tanh())


TEXTS = (({0: "batch", 1: "seq"}, {0: "batch", 1: "seq"}), ({0: "batch"},))


def text_batch(
    batch: int, seq: int, seed: int = 0
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor]]:
    (ids,), _ = token_batch(batch, seq, seed)
    lengths = torch.arange(batch) % seq + 1
    keep = (torch.arange(seq)[None, :] < lengths[:, None]).long()
    return (ids * keep, keep), (torch.arange(batch) % 3,)
