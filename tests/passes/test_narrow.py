"""A product of 8-bit integers that the model widens first is found, and stays exact."""

from __future__ import annotations

import numpy as np
import pytest

from pliant.context import Context
from pliant.ir.build import Builder
from pliant.ir.graph import Graph, Module, Value
from pliant.ir.interp import run_graph
from pliant.ir.spec import Stage, verify
from pliant.ir.types import NUMPY, DType, tensor
from pliant.machine.target import baseline
from pliant.options import Options
from pliant.passes.canonicalize import canonicalize
from pliant.passes.contractions import contractions
from pliant.sym import sym

I8, U8, I16, I32, I64 = DType.I8, DType.U8, DType.I16, DType.I32, DType.I64
M, N, K = sym("m"), sym("n"), sym("k")
CX = Context(Options(), baseline())


def contracted(b: Builder, result: Value) -> Graph:
    """The pass, and what is dead dropped; the same results as before."""
    graph = b.finish("main", [result])
    out = canonicalize(contractions(graph, CX), CX)
    verify(Module({"main": out}), Stage.DECOMPOSED)
    for env in ({"m": 0, "n": 3, "k": 2}, {"m": 1, "n": 1, "k": 1}):
        compare(graph, out, env)
    compare(graph, out, {"m": 5, "n": 7, "k": 13})
    return out


def compare(before: Graph, after: Graph, env: dict[str, int]) -> None:
    source = np.random.default_rng(0)
    inputs = []
    for p in before.params:
        shape = [d.evaluate(env) for d in p.shape]
        kind = np.iinfo(NUMPY[p.dtype])
        low, high = max(kind.min, -(2**15)), min(kind.max, 2**15)
        inputs.append(source.integers(low, high + 1, shape).astype(NUMPY[p.dtype]))
    got = run_graph(Module({"main": after}), inputs)
    want = run_graph(Module({"main": before}), inputs)
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y, err_msg=str(env))


def operand_types(graph: Graph) -> list[DType]:
    (root,) = (op for op in graph.ops if op.name == "matmul")
    return [v.dtype for v in root.operands]


def names(graph: Graph) -> list[str]:
    return [op.name for op in graph.ops]


@pytest.mark.parametrize("left", [I8, U8])
@pytest.mark.parametrize("right", [I8, U8])
@pytest.mark.parametrize("wide", [I16, I32])
def test_widened_first(left: DType, right: DType, wide: DType) -> None:
    b = Builder()
    x, y = b.param("x", tensor(left, M, K)), b.param("y", tensor(right, K, N))
    out = contracted(b, b.matmul(b.cast(x, wide), b.cast(y, wide)))
    assert operand_types(out) == [left, right]
    assert names(out) == (["matmul"] if wide is I32 else ["matmul", "cast"])


def test_through_views() -> None:
    b = Builder()
    x, y = b.param("x", tensor(I8, K, M)), b.param("y", tensor(I8, N, K))
    left = b.transpose(b.cast(x, I32), (1, 0))
    right = b.cast(b.transpose(y, (1, 0)), I32)
    out = contracted(b, b.matmul(left, right))
    assert operand_types(out) == [I8, I8]
    assert "cast" not in names(out)


@pytest.mark.parametrize(
    ("left", "right", "most"), [(I8, I8, 131071), (U8, I8, 65793), (U8, U8, 33025)]
)
def test_sums_that_need_64_bits(left: DType, right: DType, most: int) -> None:
    """i64 sums are taken in i32 as long as the largest one fits."""
    for terms in (7, most, most + 1):
        b = Builder()
        x = b.param("x", tensor(left, 1, terms))
        y = b.param("y", tensor(right, terms, 1))
        graph = b.finish("main", [b.matmul(b.cast(x, I64), b.cast(y, I64))])
        out = canonicalize(contractions(graph, CX), CX)
        narrow = terms <= most
        assert operand_types(out) == ([left, right] if narrow else [I64, I64])
        ends = [np.iinfo(NUMPY[d]) for d in (left, right)]
        pairs = [(end.min or end.max) for end in ends]
        given = [
            np.full([d.value for d in p.shape], value, NUMPY[p.dtype])
            for p, value in zip(graph.params, pairs, strict=True)
        ]
        (got,) = run_graph(Module({"main": out}), given)
        assert got.item() == pairs[0] * pairs[1] * terms


def test_unknown_number_of_terms_stays_wide() -> None:
    b = Builder()
    x, y = b.param("x", tensor(I8, M, K)), b.param("y", tensor(I8, K, N))
    out = contracted(b, b.matmul(b.cast(x, I64), b.cast(y, I64)))
    assert operand_types(out) == [I64, I64]


def test_other_products_stay() -> None:
    """One operand is wide itself; or what is cast is no integer of 8 bits."""
    b = Builder()
    x, y = b.param("x", tensor(I8, M, K)), b.param("y", tensor(I32, K, N))
    assert operand_types(contracted(b, b.matmul(b.cast(x, I32), y))) == [I32, I32]
    b = Builder()
    x, y = b.param("x", tensor(I16, M, K)), b.param("y", tensor(I8, K, N))
    product = b.matmul(b.cast(x, I32), b.cast(y, I32))
    assert operand_types(contracted(b, product)) == [I32, I32]


def test_torch_sums_wrap_in_their_own_type() -> None:
    """matmul of two int8 is an int8 in torch: the lowest byte of the sums."""
    b = Builder()
    x, y = b.param("x", tensor(I8, M, K)), b.param("y", tensor(I8, K, N))
    product = b.matmul(x, y)
    assert product.dtype is I8
    assert names(contracted(b, product)) == ["matmul", "cast"]
