"""Half-precision products compute in f32; attention writes what is asked for next."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pliant
from pliant.context import Context
from pliant.ir.build import Builder
from pliant.ir.graph import Graph, Module, Value
from pliant.ir.interp import run_graph
from pliant.ir.spec import Stage, verify
from pliant.ir.types import DType, tensor
from pliant.machine.target import baseline
from pliant.options import Options
from pliant.passes.contractions import contractions
from pliant.sym import sym

B, S = sym("b"), sym("s")
CX = Context(Options(), baseline())


def contracted(b: Builder, *results: Value, tolerance: float = 1e-6) -> Graph:
    graph = b.finish("main", results)
    out = contractions(graph, CX)
    verify(Module({"main": out}), Stage.DECOMPOSED)
    for env in ({"b": 0, "s": 3}, {"b": 1, "s": 1}, {"b": 2, "s": 7}):
        source = np.random.default_rng(0)
        inputs = []
        for p in graph.params:
            shape = [d.evaluate(env) for d in p.shape]
            kind = np.float16 if p.dtype is DType.F16 else np.float32
            data = source.standard_normal(shape).astype(kind)
            if p.dtype is DType.BF16:
                bits = data.view(np.uint32) & np.uint32(0xFFFF0000)
                data = bits.view(np.float32)
            inputs.append(data)
        got = run_graph(Module({"main": out}), inputs)
        want = run_graph(Module({"main": graph}), inputs)
        for a, c in zip(got, want, strict=True):
            assert a.shape == c.shape
            np.testing.assert_allclose(a, c, rtol=tolerance, atol=tolerance)
    return out


def names(graph: Graph) -> list[str]:
    return [op.name for op in graph.ops]


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
def test_half_products(dtype: DType) -> None:
    b = Builder()
    x, w = b.param("x", tensor(dtype, S, 5)), b.param("w", tensor(dtype, 5, 3))
    out = contracted(b, b.matmul(x, w), tolerance=2e-2)
    assert names(out) == ["cast", "cast", "matmul", "cast"]
    assert out.results[0].dtype is dtype
    assert out.ops[2].result.dtype is DType.F32


@pytest.mark.parametrize("dtype", [DType.F32, DType.F64, DType.I64])
def test_other_products_stay(dtype: DType) -> None:
    b = Builder()
    x, w = b.param("x", tensor(dtype, S, 5)), b.param("w", tensor(dtype, 5, 3))
    graph = b.finish("main", [b.matmul(x, w)])
    assert contractions(graph, CX) is graph


def attention(
    make: Callable[[Builder, Value], list[Value]],
) -> Graph:
    b = Builder()
    kind = tensor(DType.F32, B, 2, S, 4)
    q, k, v = (b.param(name, kind) for name in "qkv")
    mixed = b.emit("attention", q, k, v)
    return contracted(b, *make(b, mixed), tolerance=1e-5)


def swapped(b: Builder, x: Value) -> Value:
    return b.transpose(x, (0, 2, 1, 3))


def test_the_transpose_after_attention_is_taken_in() -> None:
    out = attention(lambda b, x: [swapped(b, x)])
    assert names(out) == ["attention"]
    assert out.ops[0].bool_attr("swapped")


def test_two_equal_transposes() -> None:
    out = attention(lambda b, x: [b.unary("exp", swapped(b, x)), swapped(b, x)])
    assert names(out) == ["attention", "exp"]


@pytest.mark.parametrize(
    "make",
    [
        lambda b, x: [x],
        lambda b, x: [x, swapped(b, x)],
        lambda b, x: [b.unary("exp", x), swapped(b, x)],
        lambda b, x: [b.transpose(x, (0, 1, 3, 2))],
        lambda b, x: [b.transpose(x, (1, 2, 0, 3))],
    ],
    ids=["none", "also a result", "also read", "another", "also moves the batch"],
)
def test_transposes_that_stay(
    make: Callable[[Builder, Value], list[Value]],
) -> None:
    out = attention(make)
    (found,) = (op for op in out.ops if op.name == "attention")
    assert not found.bool_attr("swapped")


@pytest.mark.parametrize("all_swapped", [True, False])
def test_transposes_after_attention_and_its_gradients(all_swapped: bool) -> None:
    """The result is read by gradients too; those are swapped if all of them are."""
    b = Builder()
    q, k, v, grad = (b.param(n, tensor(DType.F32, B, 2, S, 4)) for n in "qkvg")
    out, lse = b.emit_multi("attention_lse", q, k, v)
    grads = b.emit_multi("attention_backward", grad, out, lse, q, k, v)
    first = grads[0] if not all_swapped else swapped(b, grads[0])
    others = [swapped(b, x) for x in (out, *grads[1:])]
    made = contracted(b, first, *others, lse, tolerance=1e-5)
    flags = [op.bool_attr("swapped") for op in made.ops if "attention" in op.name]
    assert flags == [True, all_swapped]
    assert names(made).count("transpose") == (1 if all_swapped else 3)


@pytest.mark.parametrize("perm", [(1, 0, 2), (2, 0, 1, 3), (0, 2, 1, 3)])
def test_a_weight_is_packed_once_for_rows_of_two_strides(perm: tuple[int, ...]) -> None:
    """No buffer of a call holds panels of the weight: it is packed before the call."""
    torch.manual_seed(0)

    class Permuted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(24, 40).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(x.permute(perm))

    def given(*dims: int) -> Tensor:
        return torch.randn(*dims[: len(perm) - 1], 24)

    model = Permuted()
    dynamic = ({axis: f"d{axis}" for axis in range(len(perm) - 1)},)
    compiled = pliant.compile(model, (given(2, 3, 5),), dynamic)
    ops = compiled.program.lowered.main.ops
    (call,) = (op for op in ops if "matmul" in str(op.attrs))
    weights = [v for v in call.operands if "weight" in v.name]
    assert [v.name.partition(".weight.")[2][:6] for v in weights] == ["packed"]
    for dims in ((0, 3, 5), (1, 1, 1), (7, 13, 2), (64, 5, 3)):
        x = given(*dims)
        torch.testing.assert_close(compiled(x), model(x), rtol=2e-5, atol=2e-5)
