"""Sizes that data decide: the graph before and after means the same."""

from __future__ import annotations

import numpy as np
import pytest

import pliant
from pliant.errors import ShapeError, UnsupportedOpError
from pliant.ir.interp import run_graph
from pliant.ir.parse import parse_module
from pliant.ir.spec import Stage, verify
from pliant.ir.text import print_module
from pliant.passes.bind import bind_sizes, results_of
from pliant.sym import le, parse, sym
from pliant.sym.monotone import direction, largest
from pliant.sym.prove import Facts

TEXT = """
graph @main(%x: bool[n, 3], %t: f32[n, 3]) {
  constraint u0 <= 3*n
  %i: i64[u0, 2] = nonzero(%x)
  %first: i64[u0, 1] = slice(%i) {starts = [0, 0], shape = [u0, 1], steps = (1, 1)}
  %row: i64[u0] = reshape(%first) {shape = [u0]}
  %picked: f32[u0, 3] = index(%t, %row)
  %sum: f32[3] = reduce(%picked) {op = "sum", axes = (0), keepdims = false}
  %other: f32[n, 3] = neg(%t)
  return %picked, %sum, %other
}
"""


@pytest.mark.parametrize("n", [0, 1, 5, 13])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_bind(n: int, share: float) -> None:
    module = parse_module(TEXT)
    verify(module, Stage.IMPORTED)
    bound = module.with_main(bind_sizes(module.main))
    found = results_of(module.main, bound.main)
    verify(bound, Stage.IMPORTED)
    text = print_module(bound)
    assert print_module(parse_module(text)) == text
    finders = [op.name for op in bound.main.ops if op.name in ("nonzero", "bind")]
    assert finders == ["bind"]
    generator = np.random.default_rng(n)
    mask = generator.random((n, 3)) < share
    table = generator.standard_normal((n, 3)).astype(np.float32)
    want = run_graph(module, [mask, table])
    got = run_graph(bound, [mask, table])
    assert got[found.counts["u0"]] == mask.sum()
    assert [value.cut for value in found.results] == [True, False, False]
    for array, expected in zip(found.cut(got, {"n": n}), want, strict=True):
        np.testing.assert_array_equal(array, expected)


def test_a_graph_without_such_sizes_is_kept() -> None:
    module = parse_module("graph @main(%x: f32[n]) { return %x }")
    assert bind_sizes(module.main) is module.main


@pytest.mark.parametrize(
    ("text", "way"),
    [
        ("n*u + 3", 1),
        ("n - u", -1),
        ("n + 1", 0),
        ("64*ceildiv(4*u, 64) + min(u, n)", 1),
        ("u - ceildiv(u, 2)", None),
        ("u % 2", None),
    ],
)
def test_direction(text: str, way: int | None) -> None:
    assert direction(parse(text), "u") == way


@pytest.mark.parametrize(
    ("text", "most"),
    [
        ("n*u + 3", "n**2 + 3"),
        ("2*n - u", "2*n"),
        ("64*ceildiv(4*u, 64) + n - u", "64*ceildiv(4*n, 64) + n"),
        ("5*ceildiv(n*min(max(9 - 3*u, 0), 1), 4)", "5*ceildiv(n, 4)"),
    ],
)
def test_largest(text: str, most: str) -> None:
    facts = Facts().assume(le(sym("u"), sym("n")))
    assert largest(parse(text), {"u": sym("n")}, facts) == parse(most)
    for n in (0, 1, 7):
        bound = parse(most).evaluate({"n": n})
        assert all(
            parse(text).evaluate({"n": n, "u": u}) <= bound for u in range(n + 1)
        )


def test_a_largest_that_is_proved() -> None:
    """A term of no direction, whose value at the end is proved to be the largest."""
    facts = Facts().assume(le(sym("u"), sym("n")))
    term = parse("32*u*min(max(-107*u - 576, 0), 1)*min(max(u - 7, 0), 1)")
    assert direction(term, "u") is None
    most = largest(term, {"u": sym("n")}, facts)
    assert most is not None and "u" not in most.symbols()
    for n in (0, 1, 9):
        bound = most.evaluate({"n": n})
        assert all(term.evaluate({"u": u}) <= bound for u in range(n + 1))


INSIDE = """
graph @main(%x: f32[n], %which: bool[]) {
  %y: f32[] = if(%which, %x)
  region @then(%a: f32[n]) {
    %zero: f32[n] = full() {value = 0.0, dtype = f32, shape = [n]}
    %flags: bool[n] = gt(%a, %zero)
    %at: i64[u0, 1] = nonzero(%flags)
    %flat: i64[u0] = reshape(%at) {shape = [u0]}
    %kept: f32[u0] = index(%a, %flat)
    %sum: f32[] = reduce(%kept) {op = "sum", axes = (0), keepdims = false}
    return %sum
  }
  region @else(%b: f32[n]) {
    %all: f32[] = reduce(%b) {op = "sum", axes = (0), keepdims = false}
    return %all
  }
  return %y
}
"""


@pytest.mark.parametrize("n", [0, 1, 13])
def test_a_size_that_a_branch_finds(n: int) -> None:
    module = parse_module(INSIDE)
    verify(module, Stage.IMPORTED)
    bound = module.with_main(bind_sizes(module.main))
    found = results_of(module.main, bound.main)
    assert not found.counts
    assert not any(value.cut for value in found.results)
    verify(bound, Stage.IMPORTED)
    x = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    for which in (True, False):
        inputs = [x, np.array(which)]
        want = run_graph(module, inputs)
        np.testing.assert_allclose(run_graph(bound, inputs)[0], want[0], rtol=1e-5)


SIZED = INSIDE.replace("f32[] = if", "f32[u1] = if").replace(
    "return %sum", "return %kept"
)


@pytest.mark.parametrize("n", [0, 1, 13])
def test_a_branch_that_gives_a_size_it_finds(n: int) -> None:
    """Beside one that gives all: the result is as large as that of the side taken."""
    module = parse_module(SIZED.replace("return %all", "return %b"))
    verify(module, Stage.IMPORTED)
    bound = module.with_main(bind_sizes(module.main))
    found = results_of(module.main, bound.main)
    verify(bound, Stage.IMPORTED)
    model = pliant.compile(module)
    assert model.dims == ("n", "u1")
    x = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    for which in (True, False):
        inputs = [x, np.array(which)]
        want = run_graph(module, inputs)
        got = found.cut(run_graph(bound, inputs), {"n": n})
        np.testing.assert_array_equal(got[0], want[0])
        np.testing.assert_array_equal(model(*inputs), want[0])
        run = model.stats()
        plan = model.memory_plan(n=n, **run["last_sizes"])
        assert run["last_peak_bytes"] == plan.peak_bytes


def test_sides_of_other_bounds_are_refused() -> None:
    text = SIZED.replace(
        "    return %all",
        "    %twice: f32[2*n] = concat(%b, %b) {axis = 0}\n    return %twice",
    )
    with pytest.raises(UnsupportedOpError, match=r"at most n and 2\*n elements"):
        bind_sizes(parse_module(text).main)


TWO = """
graph @main(%x: f32[n], %a: i64[], %b: i64[]) {
  constraint u0 <= u1
  %first: bool[u0] = extent(%a) {most = <n>, of = "a"}
  %last: bool[u1] = extent(%b) {most = <n>, of = "b"}
  %y: f32[u1 - u0] = slice(%x) {starts = [u0], shape = [u1 - u0], steps = (1)}
  return %y
}
"""


def test_two_numbers_and_what_relates_them() -> None:
    """The second is found inside the first, and the relation tested there."""
    module = parse_module(TWO)
    bound = module.with_main(bind_sizes(module.main))
    assert results_of(module.main, bound.main).counts == {"u0": 1, "u1": 2}
    verify(bound, Stage.IMPORTED)
    x = np.arange(7, dtype=np.float32)
    model = pliant.compile(module)
    np.testing.assert_array_equal(model(x, np.array(2), np.array(5)), x[2:5])
    with pytest.raises(ShapeError, match="u0 <= u1"):
        model(x, np.array(5), np.array(2))
    with pytest.raises(ShapeError, match="b is 8, must be 0 to n"):
        model(x, np.array(5), np.array(8))
    np.testing.assert_array_equal(model(x, np.array(3), np.array(3)), x[3:3])
