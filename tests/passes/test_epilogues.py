"""What a product's kernel writes: as few bytes as can be, and the same numbers."""

from __future__ import annotations

import numpy as np
import pytest

from pliant.context import Context
from pliant.ir.graph import Graph, Module, Op
from pliant.ir.interp import run_graph
from pliant.ir.parse import parse_graph
from pliant.ir.spec import Stage, verify
from pliant.machine.target import avx512
from pliant.options import Options
from pliant.passes.fuse import fuse

HEAD = """graph @main(%x: f32[n, 8], %w: f32[8, 8], %v: f32[8, 8]) {
  %m: f32[n, 8] = matmul(%x, %w)
"""
# what follows the product -> what its kernel writes with the rule, and without it
GRAPHS: dict[str, tuple[str, set[str], set[str]]] = {
    "a square that is summed": (
        """  %r: f32[n, 8] = add(%m, %x)
  %q: f32[n, 8] = mul(%r, %r)
  %s: f32[n, 1] = reduce(%q) {op = "sum", axes = (1), keepdims = true}
  %b: f32[n, 8] = broadcast(%s) {shape = [n, 8], axes = (0, 1)}
  %y: f32[n, 8] = div(%r, %b)
  return %y
}
""",
        {"r"},
        {"r", "q"},
    ),
    "three products that are summed": (
        """  %p: f32[n, 8] = mul(%m, %x)
  %c: f32[8] = reduce(%p) {op = "sum", axes = (0), keepdims = false}
  %e: f32[n, 8] = exp(%m)
  %q: f32[n, 8] = mul(%e, %x)
  %s: f32[n, 1] = reduce(%q) {op = "sum", axes = (1), keepdims = true}
  %b: f32[n, 8] = broadcast(%s) {shape = [n, 8], axes = (0, 1)}
  %t: f32[n, 8] = tanh(%e)
  %y: f32[n, 8] = add(%t, %b)
  return %y, %c
}
""",
        {"m"},
        {"p", "q", "t"},
    ),
    "read by the next product's kernel": (
        """  %g: f32[n, 8] = sigmoid(%m)
  %a: f32[n, 8] = matmul(%x, %v)
  %y: f32[n, 8] = mul(%g, %a)
  return %y, %m
}
""",
        {"m"},
        {"m", "g"},
    ),
    "one is as good as the other": (
        """  %q: f32[n, 8] = mul(%m, %m)
  %s: f32[n] = reduce(%q) {op = "sum", axes = (1), keepdims = false}
  return %s
}
""",
        {"q"},
        {"q"},
    ),
    "needed in memory": (
        """  %h: f32[n, 8] = tanh(%m)
  %y: f32[n, 8] = matmul(%h, %v)
  return %y, %h, %m
}
""",
        {"m", "h"},
        {"m", "h"},
    ),
}


def fused(text: str, **options: bool) -> Graph:
    graph = fuse(parse_graph(text), Context(Options(**options), avx512()))
    verify(Module({"main": graph}), Stage.FUSED)
    return graph


def first_product(graph: Graph) -> Op:
    kernels = (op for op in graph.ops if op.name == "fusion")
    return next(op for op in kernels if op.str_attr("kind") == "matmul")


@pytest.mark.parametrize("name", GRAPHS)
def test_what_is_written(name: str) -> None:
    body, fewest, most = GRAPHS[name]
    for wanted, options in ((fewest, {}), (most, {"fewest": False})):
        written = first_product(fused(HEAD + body, **options)).results
        assert {v.name for v in written} == wanted


@pytest.mark.parametrize("n", [0, 1, 7, 131])
@pytest.mark.parametrize("name", GRAPHS)
def test_the_same_numbers(name: str, n: int) -> None:
    text = HEAD + GRAPHS[name][0]
    random = np.random.default_rng(n)
    given = [
        random.normal(size=shape).astype(np.float32)
        for shape in ((n, 8), (8, 8), (8, 8))
    ]
    before = run_graph(Module({"main": parse_graph(text)}), given, env={"n": n})
    after = run_graph(Module({"main": fused(text)}), given, env={"n": n})
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)
