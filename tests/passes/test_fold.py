"""Weights are computed with at compile time; what a call brings never is."""

from __future__ import annotations

import numpy as np
import pytest

from pliant.context import Context
from pliant.ir.build import Builder
from pliant.ir.graph import Constant, Module, Value
from pliant.ir.interp import run_graph
from pliant.ir.spec import Stage, verify
from pliant.ir.types import DType, tensor
from pliant.machine.target import baseline
from pliant.options import Options
from pliant.passes.fold import SLACK, fold
from pliant.sym import sym

N = sym("n")
F32 = DType.F32
CX = Context(Options(), baseline())


def weight(b: Builder, name: str, *shape: int) -> Value:
    data = np.random.default_rng(len(name)).standard_normal(shape).astype(np.float32)
    return b.constant(Constant(name, tensor(F32, *shape), data))


def folded(b: Builder, *results: Value) -> Module:
    graph = b.finish("main", results)
    before = Module({"main": graph}, constants=dict(b.constants))
    after = fold(before, CX)
    verify(after, Stage.DECOMPOSED)
    for n in (0, 1, 3, 17):
        shapes = [[d.evaluate({"n": n}) for d in p.shape] for p in graph.params]
        inputs = [
            np.random.default_rng(n).standard_normal(s, np.float32) for s in shapes
        ]
        pairs = zip(run_graph(after, inputs), run_graph(before, inputs), strict=True)
        for got, want in pairs:
            np.testing.assert_allclose(got, want, rtol=1e-6)
    return after


def names(module: Module) -> list[str]:
    return [op.name for op in module.main.ops]


def test_arithmetic_of_weights() -> None:
    b = Builder()
    x = b.param("x", tensor(F32, N, 4))
    scale = b.unary("rsqrt", b.binary("mul", weight(b, "w", 4), weight(b, "w", 4)))
    module = folded(b, b.binary("mul", x, scale))
    assert names(module) == ["constant", "broadcast", "mul"]
    assert len(module.constants) == 1  # what it was made of is gone
    assert next(iter(module.constants)).endswith(".folded")


def test_a_weight_still_in_use_is_kept() -> None:
    b = Builder()
    x, w = b.param("x", tensor(F32, N, 4)), weight(b, "w", 4)
    module = folded(b, b.binary("add", b.binary("mul", x, w), b.unary("exp", w)))
    assert set(module.constants) > {"w"} and len(module.constants) == 2


def test_views_alone_are_left_to_kernels() -> None:
    b = Builder()
    x, w = b.param("x", tensor(F32, N, 4)), weight(b, "w", 5, 4)
    module = folded(b, b.matmul(x, b.transpose(w, (1, 0))))
    assert "transpose" in names(module) and set(module.constants) == {"w"}


def test_through_a_view() -> None:
    b = Builder()
    x, w = b.param("x", tensor(F32, N, 4)), weight(b, "w", 5, 4)
    module = folded(b, b.matmul(x, b.unary("exp", b.transpose(w, (1, 0)))))
    assert names(module) == ["constant", "matmul"]


def test_with_numbers() -> None:
    b = Builder()
    x, w = b.param("x", tensor(F32, N, 4)), weight(b, "w", 4)
    shifted = b.binary("add", w, b.scalar(1.0, F32))
    module = folded(b, b.binary("mul", x, shifted))
    assert names(module) == ["constant", "broadcast", "mul"]


def test_nothing_to_do() -> None:
    b = Builder()
    x, w = b.param("x", tensor(F32, N, 4)), weight(b, "w", 4)
    graph = b.finish("main", [b.binary("mul", x, w)])
    module = Module({"main": graph}, constants=dict(b.constants))
    assert fold(module, CX) is module


def test_inputs_and_their_sizes_are_not_weights() -> None:
    b = Builder()
    x, w = b.param("x", tensor(F32, N, 4)), weight(b, "w", 1, 4)
    wide = b.broadcast(w, (N, 4), (0, 1))
    module = folded(b, b.binary("add", x, b.unary("exp", wide)))
    assert "exp" in names(module)


def test_nothing_grows_much() -> None:
    b = Builder()
    rows, columns = weight(b, "rows", 1000, 1), weight(b, "columns", 1, 1000)
    assert 2000 + SLACK < 1000 * 1000
    x = b.param("x", tensor(F32, N))
    module = folded(b, b.matmul(rows, columns), x)
    assert "matmul" in names(module)


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16])
def test_half_weights(dtype: DType) -> None:
    """A bf16 weight is bits; cast and folded it is the same number."""
    b = Builder()
    x, w = b.param("x", tensor(F32, N, 4)), weight(b, "w", 4)
    narrow = b.cast(w, dtype)
    module = folded(b, b.binary("mul", x, b.cast(narrow, F32)))
    assert names(module) == ["constant", "broadcast", "mul"]
