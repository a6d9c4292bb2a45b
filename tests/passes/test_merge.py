"""Which products become one, which must not, and that results stay the same."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pliant
import zoo
from pliant.context import Context
from pliant.frontend.torch_export import export_module, from_exported
from pliant.ir.graph import Constant, Module
from pliant.ir.interp import run_graph
from pliant.ir.parse import parse_module
from pliant.ir.spec import Stage, verify
from pliant.ir.text import print_module
from pliant.ir.types import DType, tensor
from pliant.machine.target import avx512
from pliant.options import Options
from pliant.passes.fold import fold
from pliant.passes.fuse import fuse
from pliant.passes.lifetimes import Kernels
from pliant.passes.merge import merge
from pliant.pipeline import STAGES, run_stages
from pliant.sym import Facts, sym

BS = {0: "b", 1: "s"}
SIZES = ((0, 1, 3), (0, 1, 7, 33))
CONTEXT = Context(Options(), avx512())


class Apply(nn.Module):
    """A function of a tensor and of modules that hold weights."""

    def __init__(self, function: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Any:
        return self.function(x, *self.parts)


def attend(x: Tensor, q: nn.Module, k: nn.Module, v: nn.Module) -> Tensor:
    parts = (f(x).unflatten(-1, (-1, 16)).transpose(1, 2) for f in (q, k, v))
    mixed = F.scaled_dot_product_attention(*parts, enable_gqa=True)
    return mixed.transpose(1, 2).flatten(2)


def turned(x: Tensor, q: nn.Module, k: nn.Module, v: nn.Module) -> Tensor:
    """Queries and keys pass through a kernel of their own, values do not."""

    def turn(y: Tensor) -> Tensor:
        left, right = y.chunk(2, -1)
        return y * 2 + torch.cat((-right, left), -1)

    given = (f(x).unflatten(-1, (-1, 16)).transpose(1, 2) for f in (q, k, v))
    a, b, c = given
    mixed = F.scaled_dot_product_attention(turn(a), turn(b), c)
    return mixed.transpose(1, 2).flatten(2)


def scaled(x: Tensor, q: nn.Module, k: nn.Module, v: nn.Module) -> Tensor:
    return attend(x, lambda y: q(y) * 0.5, k, v)


def linears(*columns: int, bias: tuple[bool, ...] = ()) -> list[Any]:
    which = bias or (True,) * len(columns)
    return [nn.Linear(32, n, bias=b) for n, b in zip(columns, which, strict=True)]


def layered(x: Tensor, q: nn.Module, k: nn.Module, v: nn.Module) -> Tensor:
    """The same weights twice, as models that share layers have them."""
    return attend(attend(x, q, k, v), q, k, v)


def wide_mlp(x: Tensor, *parts: nn.Module) -> Tensor:
    """More is live in the middle of the MLP than in the attention before it."""
    *heads, up, down = parts
    return down(F.relu(up(turned(x, *heads))))


X = torch.randn(2, 5, 32)
MERGED: dict[str, tuple[nn.Module, list[list[int]]]] = {
    "attention": (Apply(attend, *linears(32, 32, 32)), [[96]]),
    "fewer keys than queries": (Apply(attend, *linears(64, 32, 32)), [[128]]),
    "some without bias": (
        Apply(attend, *linears(32, 32, 32, bias=(True, False, True))),
        [[96]],
    ),
    "none with bias": (
        Apply(attend, *linears(32, 32, 32, bias=(False, False, False))),
        [[96]],
    ),
    "one scaled": (Apply(scaled, *linears(32, 32, 32)), [[96]]),
    "shared layers": (Apply(layered, *linears(32, 32, 32)), [[96], [96]]),
    "read as they die": (
        Apply(wide_mlp, *linears(32, 32, 32), nn.Linear(32, 256), nn.Linear(256, 32)),
        [[64], [32], [256], [32]],
    ),
    "a gate stays": (
        Apply(
            lambda x, g, *heads: torch.sigmoid(g(x)) * attend(x, *heads),
            nn.Linear(32, 32),
            *linears(32, 32, 32),
        ),
        [[32], [96]],
    ),
}


def tied(x: Tensor, q: nn.Linear, k: nn.Module, v: nn.Module) -> Tensor:
    return attend(x, q, k, v) @ q.weight + q.weight[3]


MERGED["a weight with another reader stays"] = (
    Apply(tied, *linears(32, 32, 32)),
    [[32], [64], [32]],
)


def gated(x: Tensor, gate: nn.Module, up: nn.Module, down: nn.Module) -> Tensor:
    return down(F.silu(gate(x)) * up(x))


def flat(x: Tensor, a: nn.Module, b: nn.Module, c: nn.Module) -> Tensor:
    """Rows of one value that products read without a copy only if it is whole."""
    first, second = a(x).flatten(1), b(x).flatten(1)
    return first @ second.T


STAYS: dict[str, nn.Module] = {
    "gate and up": Apply(gated, *linears(64, 64), nn.Linear(64, 32)),
    "results": Apply(lambda x, f, g: (f(x), g(x).transpose(0, 1)), *linears(32, 32)),
    "no whole cache lines": Apply(
        lambda x, f, g: f(x).transpose(1, 2) @ g(x), *linears(8, 8)
    ),
    "rows that are one": Apply(flat, *linears(32, 32, 32)),
    "values kept for long": Apply(turned, *linears(32, 32, 32)),
}


def imported(model: nn.Module) -> Module:
    program, info = export_module(model.eval().requires_grad_(False), (X,), (BS,))
    module = from_exported(program, info).module
    unmerged = Context(Options(merge=False), CONTEXT.target)
    return run_stages(module, unmerged, "layout")


def widths(module: Module) -> list[list[int]]:
    """Columns of the products by constants."""
    producers = module.main.producers()
    found: list[list[int]] = []
    for op in module.main.ops:
        right = producers.get(op.operands[1]) if op.name == "matmul" else None
        while right is not None and right.name in ("reshape", "transpose"):
            right = producers.get(right.operands[0])
        if right is not None and right.name == "constant":
            found.append([op.result.shape[-1].value])
    return found


def sampled(module: Module, out: Module) -> None:
    source = np.random.default_rng(0)
    for batch, rows in itertools.product(*SIZES):
        x = source.standard_normal((batch, rows, 32), np.float32)
        pairs = zip(run_graph(out, [x]), run_graph(module, [x]), strict=True)
        for got, want in pairs:
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MERGED)
def test_merged(name: str) -> None:
    model, columns = MERGED[name]
    module = imported(model)
    out = module.with_main(merge(module.main, CONTEXT))
    verify(out, Stage.DECOMPOSED)
    folded = fold(out, CONTEXT)
    assert widths(folded) == columns
    names = {op.name for op in folded.main.ops}
    assert "concat" not in names or name == "read as they die"
    sampled(module, folded)


@pytest.mark.parametrize("name", STAYS)
def test_stays(name: str) -> None:
    module = imported(STAYS[name])
    assert merge(module.main, CONTEXT) is module.main


@pytest.mark.parametrize("name", [*MERGED, *STAYS])
def test_native(name: str) -> None:
    model = STAYS[name] if name in STAYS else MERGED[name][0]
    model = model.eval().requires_grad_(False)
    compiled = pliant.compile(model, (X,), (BS,), threads=2)
    apart = pliant.compile(model, (X,), (BS,), threads=2, options=Options(merge=False))
    for batch, rows in itertools.product(*SIZES):
        x = torch.randn(batch, rows, 32)
        torch.testing.assert_close(compiled(x), model(x), rtol=3e-5, atol=3e-5)
        peaks = [m.memory_plan(x).peak_bytes for m in (compiled, apart)]
        assert peaks[0] <= 1.01 * peaks[1]
        weights = [m.memory_plan(x).weight_bytes for m in (compiled, apart)]
        assert weights[0] <= weights[1] + 512  # a bias where there was none
    calls = [m.stats()["kernel_calls"] for m in (compiled, apart)]
    assert calls[0] < calls[1] if name in MERGED else calls[0] == calls[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_storage(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    heads = linears(32, 32, 32, bias=(True, False, True))
    model = Apply(attend, *heads).to(dtype).eval().requires_grad_(False)
    x = X.to(dtype)
    compiled = pliant.compile(model, (x,), (BS,), threads=1)
    assert compiled.stats()["kernel_calls"] == 2
    want = copy.deepcopy(model).double()(x.double())
    error = (compiled(x).double() - want).abs().max()
    assert error <= 2 * (model(x).double() - want).abs().max() + 1e-3


def test_without_fold_nothing_is_merged() -> None:
    """The weights would be joined at every call."""
    (stage,) = (each for each in STAGES if each.name == "merge")
    for options in (Options(merge=False), Options(fold=False)):
        assert not stage.applies(Context(options, avx512()))
    assert stage.applies(CONTEXT)


# ---- models


@pytest.mark.parametrize(("name", "fewer"), [("bert", 2), ("llama", 1)])
def test_calls_and_memory_of_models(name: str, fewer: int) -> None:
    """Fewer calls per layer, at no price in memory."""
    case = zoo.build(name, layers=2)
    merged, apart = (
        case.compile(threads=2, options=Options(merge=on)) for on in (True, False)
    )
    calls = [m.stats()["kernel_calls"] for m in (merged, apart)]
    assert calls[1] - calls[0] == 2 * fewer
    for size in ((1, 1), (1, 7), (1, 32), (3, 33), (8, 128)):
        plans = [m.memory_plan(*case.inputs(*size)) for m in (merged, apart)]
        assert plans[0].peak_bytes <= 1.01 * plans[1].peak_bytes
        assert plans[0].weight_bytes == plans[1].weight_bytes
    x = case.inputs(2, 11)
    torch.testing.assert_close(merged(*x), case.model(*x), rtol=1e-4, atol=1e-4)


# ---- text in, text out

BEFORE = """
graph @main(%x: f32[n, 4]) {
  %wq: f32[4, 16] = constant() {name = "q"}
  %bq: f32[16] = constant() {name = "b"}
  %q: f32[n, 16] = matmul(%x, %wq)
  %wide: f32[n, 16] = broadcast(%bq) {shape = [n, 16], axes = (1)}
  %a: f32[n, 16] = add(%q, %wide)
  %wk: f32[4, 16] = constant() {name = "k"}
  %k: f32[n, 16] = matmul(%x, %wk)
  %turned: f32[16, n] = transpose(%k) {perm = (1, 0)}
  %s: f32[n, n] = matmul(%a, %turned)
  return %s
}
"""
AFTER = """
graph @main(%x: f32[n, 4]) {
  %wq: f32[4, 16] = constant() {name = "q"}
  %bq: f32[16] = constant() {name = "b"}
  %wk: f32[4, 16] = constant() {name = "k"}
  %concat: f32[4, 32] = concat(%wq, %wk) {axis = 1}
  %matmul: f32[n, 32] = matmul(%x, %concat)
  %full: f32[16] = full() {value = -0.0, dtype = f32, shape = [16]}
  %concat_1: f32[32] = concat(%bq, %full) {axis = 0}
  %broadcast: f32[n, 32] = broadcast(%concat_1) {shape = [n, 32], axes = (1)}
  %add: f32[n, 32] = add(%matmul, %broadcast)
  %slice: f32[n, 16] = slice(%add) {starts = [0, 0], shape = [n, 16], steps = (1, 1)}
  %slice_1: f32[n, 16] = slice(%add) {starts = [0, 16], shape = [n, 16], steps = (1, 1)}
  %turned: f32[16, n] = transpose(%slice_1) {perm = (1, 0)}
  %s: f32[n, n] = matmul(%slice, %turned)
  return %s
}
"""


def test_text() -> None:
    module = parse_module(BEFORE.strip() + "\n")
    source = np.random.default_rng(0)
    shapes = {"q": (4, 16), "k": (4, 16), "b": (16,)}
    constants = {
        name: Constant(
            name, tensor(DType.F32, *shape), source.standard_normal(shape, np.float32)
        )
        for name, shape in shapes.items()
    }
    module = module.replace(constants=constants)
    out = module.with_main(merge(module.main, CONTEXT))
    verify(out, Stage.DECOMPOSED)
    text = print_module(out)
    assert text[: text.index("constant @")].strip() == AFTER.strip()
    for n in (0, 1, 3, 17):
        x = source.standard_normal((n, 4), np.float32)
        (got,), (want,) = run_graph(out, [x]), run_graph(module, [x])
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


# ---- lifetimes

CHAIN = """
graph @main(%x: f32[n, 16], %w: f32[16, 16]) {
  %a: f32[n, 16] = matmul(%x, %w)
  %b: f32[n, 16] = matmul(%a, %w)
  %c: f32[n, 16] = matmul(%b, %w)
  %d: f32[n, 16] = matmul(%c, %w)
  return %d
}
"""


def test_one_buffer_lives_as_long_as_its_parts() -> None:
    module = parse_module(CHAIN.strip() + "\n")
    kernels = Kernels(fuse(module.main, CONTEXT))
    size = 64 * sym("n")
    assert set(kernels.before) == {size, 2 * size}
    assert not kernels.join(
        ["a", "d"], {0, 3}, Facts()
    )  # a result has storage of its own
    # Both would be held while c is made, which takes its scratch and one more size.
    assert not kernels.join(["a", "b"], {0, 1}, Facts())
    assert kernels.spans["b"].bytes == size


def test_values_that_die_together_share_a_buffer() -> None:
    module = imported(MERGED["attention"][0])
    kernels = Kernels(fuse(module.main, CONTEXT))
    q, k, v = (kernels.fusions[n].results[0].name for n in range(3))
    part = kernels.spans[q].bytes
    assert kernels.join([q, k], {0, 1}, Facts())
    assert kernels.join([q, v], {0, 1, 2}, Facts())
    whole = kernels.spans[q]
    assert (whole.bytes, whole.first, whole.last) == (3 * part, 0, 3)
    assert k not in kernels.spans
