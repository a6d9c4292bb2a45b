"""Forms of a graph in smaller kernels: the same results, and what is apart then."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pliant.context import Context
from pliant.frontend.torch_export import export_module, from_exported
from pliant.frontend.torch_tensors import to_numpy
from pliant.ir.graph import Graph, Module, Op
from pliant.ir.interp import run_graph
from pliant.ir.spec import Stage, verify
from pliant.machine.target import named
from pliant.options import Options
from pliant.passes.chunk_heads import has_groups
from pliant.passes.chunk_parts import apart, with_two_sides
from pliant.pipeline import run_stages
from pliant.sym import as_expr

WIDTH, HEADS = 128, 4
TOKENS = ({0: "batch", 1: "length"},)
SIZES = (1, 2, 7, 13)
CX = Context(Options(), named("avx512"))


class Attention(nn.Module):
    """Queries, keys and values of one product, split in one of two ways."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style = style
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x.cos()
        made = self.qkv(self.norm(x))
        if self.style == "split":
            parts = (p.unflatten(-1, (HEADS, -1)) for p in made.split(WIDTH, -1))
            q, k, v = (p.transpose(1, 2) for p in parts)
        else:
            q, k, v = made.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.style == "split")
        return x + self.out(y.transpose(1, 2).flatten(2))


class Pairs(nn.Module):
    """Both operands of a product are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.both = nn.LayerNorm(8), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x.sin())
        a, b = self.both(y).chunk(2, -1)
        return (a.tanh() @ b.exp().transpose(1, 2)) @ y


class Distances(nn.Module):
    """Two attentions that read one table of biases, which depends on the size alone."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.out = nn.Embedding(16, 2), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1])
        apart = (at[None] - at[:, None]).abs().clamp(max=15)
        bias = self.bias(apart).permute(2, 0, 1)
        for _ in range(2):
            y = self.out(x).unflatten(-1, (2, 4)).transpose(1, 2)
            z = F.scaled_dot_product_attention(y, y, y, attn_mask=bias)
            x = x + z.transpose(1, 2).flatten(2)
        return x


MODELS: dict[str, tuple[Any, int]] = {
    "distances": (Distances, 8),
    "split": (lambda: Attention("split"), WIDTH),
    "permute": (lambda: Attention("permute"), WIDTH),
    "pairs": (Pairs, 8),
}


def fused(name: str) -> Module:
    make, width = MODELS[name]
    torch.manual_seed(0)
    model = make().eval().requires_grad_(False)
    program, info = export_module(model, (torch.randn(2, 7, width),), TOKENS)
    return run_stages(from_exported(program, info).module, CX, "fuse")


def kernels(graph: Graph, kind: str) -> list[Op]:
    found = (op for op in graph.ops if op.name == "fusion")
    return [op for op in found if op.str_attr("kind") == kind]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("heads", [False, True])
def test_same_results(name: str, heads: bool) -> None:
    module = fused(name)
    facts = CX.facts(module.main)
    for flipped in ((), with_two_sides(module.main)):
        parts = apart(module.main, facts, heads=heads, flipped=flipped)
        other = module.with_main(parts.graph)
        verify(other, Stage.FUSED)
        for size in SIZES:
            x = to_numpy(torch.randn(2, size, MODELS[name][1]))
            (want,), (got,) = run_graph(module, [x]), run_graph(other, [x])
            np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["split", "permute"])
def test_queries_are_apart(name: str) -> None:
    module = fused(name)
    facts = CX.facts(module.main)
    assert len(kernels(module.main, "matmul")) == 2
    parts = apart(module.main, facts)
    assert len(kernels(parts.graph, "matmul")) == 4
    # Each of the three has a norm of its own, and all are copies of one.
    norms = kernels(parts.graph, "row")
    assert len(norms) == 3
    assert len({parts.origin[op] for op in norms}) == 1


def test_tables_are_made_anew() -> None:
    """What inputs and weights alone give need not stay in memory for its readers."""
    module = fused("distances")
    tables = kernels(apart(module.main, CX.facts(module.main)).graph, "map")
    biases = [op for op in tables if op.result.shape[0] == as_expr(2)]
    readers = kernels(module.main, "attention")
    assert len(readers) == len(biases) == 2


def test_heads_in_groups() -> None:
    module = fused("split")
    assert has_groups(module.main)
    parts = apart(module.main, CX.facts(module.main), heads=True)
    groups = kernels(parts.graph, "attention")
    assert [op.result.shape[2].value for op in groups] == [2, 2]
    assert len(kernels(parts.graph, "matmul")) == 3 * len(groups) + 1


def test_no_groups() -> None:
    assert not has_groups(fused("pairs").main)


def test_either_operand_first() -> None:
    module = fused("pairs")
    sides = with_two_sides(module.main)
    assert sides
    facts = CX.facts(module.main)
    orders = {
        tuple(
            op.str_attr("kind") + op.results[0].name
            for op in apart(module.main, facts, flipped=flipped).graph.ops
            if op.name == "fusion"
        )
        for flipped in ((), sides)
    }
    assert len(orders) == 2
