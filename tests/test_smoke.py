"""Run this first: one small model through the whole compiler, in seconds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pliant

SHAPES = [(1, 1), (0, 3), (2, 5), (3, 17), (1, 130)]


class Block(nn.Module):
    """Attention and a feed-forward layer, each with its norm and its shortcut."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm_out = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = parts.permute(2, 0, 3, 1, 4)  # (batch, heads, seq, head) each
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + mixed.transpose(1, 2).flatten(2)
        return x + self.down(nn.functional.gelu(self.up(self.norm_out(x))))


@pytest.fixture(scope="module")
def block() -> Block:
    torch.manual_seed(0)
    return Block().eval().requires_grad_(False)


@pytest.fixture(scope="module")
def compiled(block: Block) -> pliant.CompiledModel:
    shapes = ({0: "batch", 1: "seq"},)
    return pliant.compile(block, (torch.randn(2, 5, 16),), shapes, threads=2)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_result_and_memory(
    block: Block, compiled: pliant.CompiledModel, shape: tuple[int, int]
) -> None:
    x = torch.randn(*shape, 16)
    torch.testing.assert_close(compiled(x), block(x), rtol=1e-5, atol=1e-5)
    plan = compiled.memory_plan(batch=shape[0], seq=shape[1])
    assert plan.peak_bytes == compiled.stats()["last_peak_bytes"]
    assert plan.peak_bytes == compiled.memory_plan(x.to("meta")).peak_bytes
    assert plan.output_bytes == x.nbytes
    assert compiled.compile_count == 1


def test_numpy(block: Block, compiled: pliant.CompiledModel) -> None:
    x = torch.randn(2, 7, 16)
    torch.testing.assert_close(
        torch.from_numpy(compiled(x.numpy())), block(x), rtol=1e-5, atol=1e-5
    )


def test_names(compiled: pliant.CompiledModel) -> None:
    assert compiled.dims == ("batch", "seq")
    assert "batch" in compiled.peak_formula
    text = compiled.explain()
    assert "batch" in text
    assert "kernel functions" in text
    assert "()" not in text


def test_wrong_width(block: Block, compiled: pliant.CompiledModel) -> None:
    with pytest.raises(pliant.ShapeError, match=r"axis 2 must be 16.*17"):
        compiled(torch.randn(2, 5, 17))
    x = torch.randn(2, 5, 16)  # the model is as usable as before
    torch.testing.assert_close(compiled(x), block(x), rtol=1e-5, atol=1e-5)


def test_memory_limit(compiled: pliant.CompiledModel) -> None:
    x = torch.randn(1, 64, 16)
    try:
        compiled.memory_limit = 1
        with pytest.raises(pliant.MemoryLimitError) as caught:
            compiled(x)
        least = caught.value.least
        compiled.memory_limit = least
        compiled(x)
        compiled.memory_limit = least - 1
        with pytest.raises(pliant.MemoryLimitError) as caught:
            compiled(x)
        assert (caught.value.limit, caught.value.least) == (least - 1, least)
    finally:
        compiled.memory_limit = None
