"""What becomes one kernel, what must not, and that results stay the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import pliant
from pliant.context import Context
from pliant.frontend.torch_export import export_module, from_exported
from pliant.ir.graph import Module
from pliant.ir.interp import run_graph
from pliant.ir.parse import parse_module
from pliant.ir.spec import Stage, verify
from pliant.ir.text import print_module
from pliant.lower.lower import lower
from pliant.machine.target import avx512
from pliant.options import Options
from pliant.passes.fuse import fuse, kernel_count
from pliant.pipeline import run_stages

BS = {0: "b", 1: "s"}
IMAGE = {0: "b", 2: "h", 3: "w"}
SIZES = (0, 1, 3, 7)


class Apply(nn.Module):
    """A function of tensors and of modules that hold weights."""

    def __init__(self, function: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Any:
        return self.function(x, *self.parts)


def context(**options: bool) -> Context:
    return Context(Options(**options), avx512())


def unfused(
    model: nn.Module, example: tuple[Tensor, ...], dims: Any, cx: Context
) -> Module:
    program, info = export_module(model.eval(), example, dims)
    return run_stages(from_exported(program, info).module, cx, "fold")


def fused(
    model: nn.Module, example: tuple[Tensor, ...], dims: Any, **options: bool
) -> Module:
    cx = context(**options)
    before = unfused(model, example, dims, cx)
    module = before.with_main(fuse(before.main, cx))
    verify(module, Stage.FUSED)
    verify(lower(module, cx), Stage.LOWERED)
    inputs = [t.numpy() for t in example]
    pairs = zip(run_graph(module, inputs), run_graph(before, inputs), strict=True)
    for got, want in pairs:
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    return module


def kinds(module: Module) -> list[str]:
    return [op.str_attr("kind") for op in module.main.ops if op.name == "fusion"]


def tanh_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(0.79788 * (x + 0.044715 * x**3)))


def half_turned(x: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * 2 + torch.cat((-right, left), -1) * 3


def attend(x: Tensor, up: nn.Module, out: nn.Module) -> Tensor:
    q, k, v = up(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(q, k, v)
    return out(mixed.transpose(1, 2).flatten(2))


SEQUENCE = torch.randn(2, 5, 8)
PICTURE = torch.randn(2, 6, 5, 4)
WORDS = torch.randint(0, 9, (2, 5))
ONE_KERNEL: dict[str, tuple[nn.Module, Tensor, str]] = {
    "softmax": (Apply(lambda x: x.softmax(-1)), SEQUENCE, "row"),
    "softmax of columns": (Apply(lambda x: x.softmax(1)), SEQUENCE, "row"),
    "log softmax": (Apply(lambda x: x.log_softmax(-1)), SEQUENCE, "row"),
    "layer norm": (Apply(lambda x, f: f(x), nn.LayerNorm(8)), SEQUENCE, "row"),
    "rms norm": (Apply(lambda x, f: f(x), nn.RMSNorm(8)), SEQUENCE, "row"),
    "group norm": (Apply(lambda x, f: f(x), nn.GroupNorm(2, 6)), PICTURE, "row"),
    "group norm, silu": (
        Apply(lambda x, f: F.silu(f(x)), nn.GroupNorm(2, 6)),
        PICTURE,
        "row",
    ),
    "batch norm": (
        Apply(lambda x, f: F.relu(f(x)), nn.BatchNorm2d(6)),
        PICTURE,
        "map",
    ),
    "gelu": (Apply(tanh_gelu), SEQUENCE, "map"),
    "rotation": (Apply(half_turned), SEQUENCE, "map"),
    "transpose": (Apply(lambda x: x.transpose(0, 1) * 2 + 1), SEQUENCE, "map"),
    "linear, gelu": (
        Apply(lambda x, f: F.gelu(f(x)), nn.Linear(8, 9)),
        SEQUENCE,
        "matmul",
    ),
    "linear, residual": (
        Apply(lambda x, f: f(x) + x, nn.Linear(8, 8)),
        SEQUENCE,
        "matmul",
    ),
    "conv, batch norm, relu": (
        Apply(
            lambda x, f, g: F.relu(g(f(x))),
            nn.Conv2d(6, 5, 3, bias=False),
            nn.BatchNorm2d(5),
        ),
        PICTURE,
        "conv",
    ),
    "residual, layer norm": (
        Apply(lambda x, f: f(x + x.sin()), nn.LayerNorm(8)),
        SEQUENCE,
        "row",
    ),
    "embedding, layer norm": (
        Apply(lambda x, e, f: f(e(x) + 1), nn.Embedding(9, 8), nn.LayerNorm(8)),
        WORDS,
        "row",
    ),
    "mean pool": (Apply(lambda x: (x * 2).mean(1)), SEQUENCE, "row"),
    "two sums of one row": (
        Apply(lambda x: x.sum(-1) * (x * x).sum(-1)),
        SEQUENCE,
        "row",
    ),
    "masked mean": (
        Apply(lambda x: (x * (x > 0)).sum(-1) / (x > 0).sum(-1).clamp(min=1)),
        SEQUENCE,
        "row",
    ),
}


def dims_of(x: Tensor) -> Any:
    return (IMAGE if x.dim() == 4 else BS,)


@pytest.mark.parametrize("name", ONE_KERNEL)
def test_one_kernel(name: str) -> None:
    model, x, kind = ONE_KERNEL[name]
    assert kinds(fused(model, (x,), dims_of(x))) == [kind]


def test_positions_and_layer_norm_are_one_kernel() -> None:
    def embed(
        x: Tensor, words: nn.Module, places: nn.Module, norm: nn.Module
    ) -> Tensor:
        return norm(words(x) + places(torch.arange(x.shape[1])))

    parts = nn.Embedding(9, 8), nn.Embedding(64, 8), nn.LayerNorm(8)
    assert kinds(fused(Apply(embed, *parts), (WORDS,), (BS,))) == ["row"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_out = nn.LayerNorm(8), nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + attend(self.norm(x), self.qkv, self.out)
        return x + self.down(F.gelu(self.up(self.norm_out(x))))


BLOCK = ["row", "matmul", "attention", "matmul", "row", "matmul", "matmul"]


def test_transformer_block() -> None:
    assert kinds(fused(Block(), (SEQUENCE,), (BS,))) == BLOCK


def test_layers_share_their_kernels() -> None:
    cx = context()

    def loops(layers: int) -> int:
        model = nn.Sequential(*(Block() for _ in range(layers)))
        before = unfused(model, (SEQUENCE,), (BS,), cx)
        module = before.with_main(fuse(before.main, cx))
        assert kinds(module) == BLOCK * layers
        return len(lower(module, cx).loops)

    assert loops(12) == loops(2) == loops(1)


# ---- switches


@pytest.mark.parametrize("name", ["softmax", "layer norm", "residual, layer norm"])
def test_without_constraints_there_are_more_kernels(name: str) -> None:
    model, x, _ = ONE_KERNEL[name]
    alone = kernel_count(fused(model, (x,), dims_of(x), fuse=False).main)
    blind = kernel_count(fused(model, (x,), dims_of(x), constraints=False).main)
    assert 1 < blind < alone


def test_block_without_constraints() -> None:
    blind = fused(Block(), (SEQUENCE,), (BS,), constraints=False)
    assert kernel_count(blind.main) > len(BLOCK)


@pytest.mark.parametrize("name", ONE_KERNEL)
def test_without_fusion_every_op_is_a_kernel(name: str) -> None:
    model, x, _ = ONE_KERNEL[name]
    module = fused(model, (x,), dims_of(x), fuse=False)
    for op in module.main.ops:
        if op.name == "fusion":
            solid = [o for o in op.regions[0].ops if o.name not in FREE]
            assert len(solid) <= 1


FREE = {"broadcast", "reshape", "transpose", "slice", "flip", "full", "iota"} | {
    "dim_value"
}


@pytest.mark.parametrize(
    "options",
    [
        {"fuse": False},
        {"constraints": False},
        {"attention": False},
        {"share": False},
        {"fold": False},
    ],
    ids=lambda o: next(iter(o)),
)
def test_switches_change_no_result(options: dict[str, bool]) -> None:
    torch.manual_seed(0)
    block = Block().eval().requires_grad_(False)
    model = pliant.compile(
        block, (SEQUENCE,), (BS,), options=Options(**options), threads=2
    )
    for shape in itertools.product((0, 1, 3), (0, 1, 7)):
        x = torch.randn(*shape, 8)
        torch.testing.assert_close(model(x), block(x), rtol=2e-5, atol=2e-5)


# ---- what must stay apart

APART: dict[str, tuple[nn.Module, Tensor, int]] = {
    "rows and columns": (Apply(lambda x: (x.sum(1), x.sum(2))), SEQUENCE, 2),
    "a sum of sums": (
        Apply(lambda x: (x - x.mean(2, keepdim=True)).sum(1)),
        SEQUENCE,
        2,
    ),
    "exp of few, for many": (Apply(lambda x: x[:, :, :1].exp() * x), SEQUENCE, 2),
    "a scan and what it reads": (
        Apply(lambda x: (x * 2).cumsum(1) + x * 2),
        SEQUENCE,
        2,
    ),
    "two products": (
        Apply(lambda x, f, g: g(f(x)), nn.Linear(8, 6), nn.Linear(6, 4)),
        SEQUENCE,
        2,
    ),
    "a product and its norm": (
        Apply(lambda x, f, g: g(f(x)), nn.Linear(8, 8), nn.LayerNorm(8)),
        SEQUENCE,
        2,
    ),
    "a norm and its product": (
        Apply(lambda x, f, g: f(g(x)), nn.Linear(8, 8), nn.LayerNorm(8)),
        SEQUENCE,
        2,
    ),
    "a transposed sum": (
        Apply(lambda x: x + x.sum(2, keepdim=True).transpose(0, 1).transpose(1, 0)),
        SEQUENCE,
        1,
    ),
    "the row of another": (
        Apply(lambda x: x + x.sum(2).flip(1)[..., None]),
        SEQUENCE,
        2,
    ),
}


@pytest.mark.parametrize("name", APART)
def test_apart(name: str) -> None:
    model, x, least = APART[name]
    assert kernel_count(fused(model, (x,), dims_of(x)).main) >= least


def test_no_cycle() -> None:
    """exp feeds a product and, past it, the sum: they cannot be one kernel with exp."""

    def diamond(x: Tensor, f: nn.Module) -> tuple[Tensor, ...]:
        y = x.exp()
        z = f(y)
        total = (y + z).sum(-1, keepdim=True)
        return y * total, z - total

    module = fused(Apply(diamond, nn.Linear(8, 8)), (SEQUENCE,), (BS,))
    assert kinds(module)[:2] == ["map", "matmul"]


@pytest.mark.parametrize("name", [*ONE_KERNEL, *APART])
def test_native(name: str) -> None:
    model, x, _ = {**ONE_KERNEL, **APART}[name]
    model = model.eval().requires_grad_(False)
    compiled = pliant.compile(model, (x,), dims_of(x), threads=2)
    for batch, size in itertools.product(SIZES, SIZES):
        shape = (batch, size, 8)
        if x.dim() == 4:
            if "conv" in name and (size < 3 or batch == 0):
                continue
            shape = (batch, 6, size, size + 1)
        given = torch.randn(shape)
        if not x.is_floating_point():
            given = torch.randint(0, 9, (batch, size))
        got, want = compiled(given), model(given)
        for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
            torch.testing.assert_close(
                a,
                b,
                rtol=3e-5,
                atol=3e-5,
                equal_nan=True,
                msg=lambda m, at=tuple(given.shape): f"{name} {at}: {m}",
            )


# ---- text in, text out


def check(before: str, after: str, sizes: Sequence[dict[str, int]]) -> None:
    module = parse_module(before.strip() + "\n")
    verify(module, Stage.DECOMPOSED)
    out = module.with_main(fuse(module.main, context()))
    verify(out, Stage.FUSED)
    assert print_module(out).strip() == after.strip()
    for env in sizes:
        source = np.random.default_rng(0)
        inputs = [
            source.standard_normal([d.evaluate(env) for d in p.shape], np.float32)
            for p in module.main.params
        ]
        pairs = zip(run_graph(out, inputs), run_graph(module, inputs), strict=True)
        for got, want in pairs:
            np.testing.assert_array_equal(got, want)


def test_row() -> None:
    check(
        """
graph @main(%x: f32[n, 8]) {
  %sum: f32[n] = reduce(%x) {op = "sum", axes = (1), keepdims = false}
  %wide: f32[n, 8] = broadcast(%sum) {shape = [n, 8], axes = (0)}
  %y: f32[n, 8] = sub(%x, %wide)
  return %y
}
""",
        """
graph @main(%x: f32[n, 8]) {
  %y: f32[n, 8] = fusion(%x) {kind = "row"}
    region @region(%x: f32[n, 8]) {
      %sum: f32[n] = reduce(%x) {op = "sum", axes = (1), keepdims = false}
      %wide: f32[n, 8] = broadcast(%sum) {shape = [n, 8], axes = (0)}
      %y: f32[n, 8] = sub(%x, %wide)
      return %y
    }
  return %y
}
""",
        [{"n": n} for n in (0, 1, 3, 17)],
    )


def test_epilogue_and_view() -> None:
    """The transpose is read through; bias and tanh are computed on the tile."""
    check(
        """
graph @main(%x: f32[n, 8], %w: f32[6, 8], %b: f32[6]) {
  %turned: f32[8, 6] = transpose(%w) {perm = (1, 0)}
  %p: f32[n, 6] = matmul(%x, %turned)
  %wide: f32[n, 6] = broadcast(%b) {shape = [n, 6], axes = (1)}
  %s: f32[n, 6] = add(%p, %wide)
  %y: f32[n, 6] = tanh(%s)
  return %y
}
""",
        """
graph @main(%x: f32[n, 8], %w: f32[6, 8], %b: f32[6]) {
  %turned: f32[8, 6] = transpose(%w) {perm = (1, 0)}
  %y: f32[n, 6] = fusion(%x, %turned, %b) {kind = "matmul"}
    region @region(%x: f32[n, 8], %turned: f32[8, 6], %b: f32[6]) {
      %p: f32[n, 6] = matmul(%x, %turned)
      %wide: f32[n, 6] = broadcast(%b) {shape = [n, 6], axes = (1)}
      %s: f32[n, 6] = add(%p, %wide)
      %y: f32[n, 6] = tanh(%s)
      return %y
    }
  return %y
}
""",
        [{"n": n} for n in (0, 1, 3, 17)],
    )


def test_rows_and_columns() -> None:
    """exp joins the first sum and is stored for the second."""
    check(
        """
graph @main(%x: f32[n, m]) {
  %e: f32[n, m] = exp(%x)
  %rows: f32[n] = reduce(%e) {op = "sum", axes = (1), keepdims = false}
  %columns: f32[m] = reduce(%e) {op = "sum", axes = (0), keepdims = false}
  return %rows, %columns
}
""",
        """
graph @main(%x: f32[n, m]) {
  %e: f32[n, m], %rows: f32[n] = fusion(%x) {kind = "row"}
    region @region(%x: f32[n, m]) {
      %e: f32[n, m] = exp(%x)
      %rows: f32[n] = reduce(%e) {op = "sum", axes = (1), keepdims = false}
      return %e, %rows
    }
  %columns: f32[m] = fusion(%e) {kind = "row"}
    region @region_1(%e: f32[n, m]) {
      %columns: f32[m] = reduce(%e) {op = "sum", axes = (0), keepdims = false}
      return %columns
    }
  return %rows, %columns
}
""",
        [{"n": n, "m": m} for n, m in ((0, 3), (3, 0), (1, 1), (5, 7))],
    )
