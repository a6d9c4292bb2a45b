"""Parts of graphs whose data decide sizes: together they mean what the whole does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pliant
from pliant.errors import ShapeError
from pliant.ir.graph import Module
from pliant.ir.interp import run_graph
from pliant.ir.parse import parse_module
from pliant.ir.spec import Stage, verify
from pliant.ir.text import print_module
from pliant.passes.split import Part, split

PICKED = """
graph @main(%x: f32[n, 3], %t: f32[n, 3]) {
  constraint u0 <= 3*n
  %zero: f32[n, 3] = full() {value = 0.0, dtype = f32, shape = [n, 3]}
  %flags: bool[n, 3] = gt(%x, %zero)
  %i: i64[u0, 2] = nonzero(%flags)
  %first: i64[u0, 1] = slice(%i) {starts = [0, 0], shape = [u0, 1], steps = (1, 1)}
  %row: i64[u0] = reshape(%first) {shape = [u0]}
  %picked: f32[u0, 3] = index(%t, %row)
  %sum: f32[3] = reduce(%picked) {op = "sum", axes = (0), keepdims = false}
  %other: f32[n, 3] = neg(%t)
  return %picked, %sum, %other, %zero
}
"""

# The first size is of rows of rank 3; the second one depends on the first.
NESTED = """
graph @main(%x: f32[n, 2, 3], %t: f32[n, 3]) {
  %zero: f32[n, 2, 3] = full() {value = 0.0, dtype = f32, shape = [n, 2, 3]}
  %flags: bool[n, 2, 3] = gt(%x, %zero)
  %i: i64[u0, 3] = nonzero(%flags)
  %first: i64[u0, 1] = slice(%i) {starts = [0, 0], shape = [u0, 1], steps = (1, 1)}
  %row: i64[u0] = reshape(%first) {shape = [u0]}
  %picked: f32[u0, 3] = index(%t, %row)
  %none: f32[u0, 3] = full() {value = 0.0, dtype = f32, shape = [u0, 3]}
  %more: bool[u0, 3] = gt(%picked, %none)
  %j: i64[u1, 2] = nonzero(%more)
  %twice: f32[u0, 3] = add(%picked, %picked)
  return %i, %j, %twice, %flags
}
"""

# Two sizes that do not depend on one another, and a relation of them.
BETWEEN = """
graph @main(%x: f32[n], %a: i64[], %b: i64[]) {
  constraint u0 <= u1
  %first: bool[u0] = extent(%a) {most = <n>, of = "a"}
  %last: bool[u1] = extent(%b) {most = <n>, of = "b"}
  %y: f32[u1 - u0] = slice(%x) {starts = [u0], shape = [u1 - u0], steps = (1)}
  return %y
}
"""


def interpreted(parts: tuple[Part, ...], module: Module, given: list[Any]) -> list[Any]:
    """The results of the parts, one run after the other."""
    values, env = list(given), dict[str, int]()
    for part in parts:
        alone = module.with_main(part.graph)
        verify(alone, Stage.IMPORTED)
        text = print_module(alone)
        assert print_module(parse_module(text)) == text
        made = run_graph(alone, values, env=env)
        for size, found in zip(part.finds, made, strict=False):
            env[size.name] = int(found)
        values += made[len(part.finds) :]
    return made


def drawn(module: Module, n: int, share: float) -> list[Any]:
    generator = np.random.default_rng(n)
    made: list[Any] = []
    for value in module.main.params:
        shape = [d.evaluate({"n": n}) for d in value.shape]
        numbers = generator.standard_normal(shape).astype(np.float32)
        if share in (0.0, 1.0):
            numbers = np.abs(numbers) * np.float32(2 * share - 1)
        made.append(numbers)
    return made


@pytest.mark.parametrize("n", [0, 1, 5, 13])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("text", "count"), [(PICKED, 2), (NESTED, 3)])
def test_parts(text: str, count: int, n: int, share: float) -> None:
    module = parse_module(text)
    verify(module, Stage.IMPORTED)
    parts = split(module.main)
    assert len(parts) == count
    given = drawn(module, n, share)
    want = run_graph(module, given)
    for a, b in zip(interpreted(parts, module, given), want, strict=True):
        np.testing.assert_array_equal(a, b)
    native = pliant.compile(module)(*given)
    for a, b in zip(native, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_what_is_handed_over() -> None:
    """The count and the mask; not what is filled, and nothing that needs no size."""
    first, rest = split(parse_module(PICKED).main)
    assert [size.name for size in first.finds] == ["u0"]
    assert [str(v.type) for v in first.graph.results] == ["i64[]", "bool[n, 3]"]
    assert not any(op.name == "neg" for op in first.graph.ops)
    assert [v.name for v in rest.graph.params] == ["x", "t", "flags"]
    assert rest.graph.sizes == ("u0",)
    assert "full" in [op.name for op in rest.graph.ops]


def test_sizes_that_are_found_together() -> None:
    module = parse_module(BETWEEN)
    parts = split(module.main)
    assert [[s.name for s in part.finds] for part in parts] == [["u0", "u1"], []]
    x = np.arange(7, dtype=np.float32)
    model = pliant.compile(module)
    assert model.dims == ("n", "u0", "u1")
    for a, b in ((2, 5), (3, 3), (0, 7), (7, 7)):
        given = [x, np.array(a), np.array(b)]
        np.testing.assert_array_equal(model(*given), x[a:b])
        (found,) = interpreted(parts, module, given)
        np.testing.assert_array_equal(found, x[a:b])
    with pytest.raises(ShapeError, match="u0=5, u1=2"):
        model(x, np.array(5), np.array(2))
    with pytest.raises(ShapeError, match="b is 8, must be 0 to n"):
        model(x, np.array(5), np.array(8))
    with pytest.raises(ShapeError, match="u0 <= u1"):
        model.memory_plan(n=7, u0=5, u1=2)


def test_a_graph_without_such_sizes_is_one_part() -> None:
    main = parse_module("graph @main(%x: f32[n]) { return %x }").main
    (part,) = split(main)
    assert part.graph is main and not part.finds
