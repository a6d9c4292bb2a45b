"""Sums over chunks: versions give what `main` gives, for every number of chunks."""

from __future__ import annotations

import numpy as np
import pytest

from pliant.context import Context
from pliant.ir.graph import Module, Op
from pliant.ir.interp import run_graph
from pliant.ir.parse import parse_module
from pliant.ir.spec import verify
from pliant.ir.text import print_module
from pliant.machine.target import named
from pliant.options import Options
from pliant.passes.chunk_sums import rejoined, sums_apart
from pliant.pipeline import STAGES
from pliant.sym import as_expr, sym

CX = Context(Options(), named("avx2"))

# A wide value, of which sums are results: of rows, over rows, and with its operand.
WIDE = """
graph @main(%x: f32[b, n, 4], %w: f32[4, 96], %v: f32[96, 4]) {
  %a: f32[b, n, 4] = tanh(%x)
  %r: f32[b*n, 4] = reshape(%a) {shape = [b*n, 4]}
  %h: f32[b*n, 96] = matmul(%r, %w)
  %e: f32[b*n, 96] = tanh(%h)
  %t: f32[96] = reduce(%e) {op = "sum", axes = (0), keepdims = false}
  %mean: f32[96] = exp(%t)
  %l: f32[b, n, 96] = reshape(%e) {shape = [b, n, 96]}
  %most: f32[b, 96] = reduce(%l) {op = "max", axes = (1), keepdims = false}
  %rows: f32[b*n] = reduce(%e) {op = "min", axes = (1), keepdims = false}
  %c: f32[96, b*n] = transpose(%e) {perm = (1, 0)}
  %g: f32[96, 4] = matmul(%c, %r)
  %new: f32[96, 4] = sub(%v, %g)
  return %mean, %most, %rows, %new
}
"""
# A loss of all rows but the last, and the gradient of what it is computed from.
SHIFTED = """
graph @main(%x: f32[b, n, 4], %w: f32[4, 96], %labels: i64[b, n], %v: f32[96, 4]) {
  %a: f32[b, n, 4] = tanh(%x)
  %one: f32[1, 4, 96] = reshape(%w) {shape = [1, 4, 96]}
  %h: f32[b, n, 96] = matmul(%a, %one)
  %s: f32[b, n - 1, 96] = slice(%h)
    {starts = [0, 0, 0], shape = [b, n - 1, 96], steps = (1, 1, 1)}
  %r: f32[b*n - b, 96] = reshape(%s) {shape = [b*n - b, 96]}
  %next: i64[b, n - 1] = slice(%labels)
    {starts = [0, 1], shape = [b, n - 1], steps = (1, 1)}
  %m: f32[b*n - b, 1] = reduce(%r) {op = "max", axes = (1), keepdims = true}
  %most: f32[b*n - b, 96] = broadcast(%m) {shape = [b*n - b, 96], axes = (0, 1)}
  %d: f32[b*n - b, 96] = sub(%r, %most)
  %e: f32[b*n - b, 96] = exp(%d)
  %z: f32[b*n - b, 1] = reduce(%e) {op = "sum", axes = (1), keepdims = true}
  %log: f32[b*n - b, 1] = log(%z)
  %class: i64[b*n - b, 1] = reshape(%next) {shape = [b*n - b, 1]}
  %own: f32[b*n - b, 1] = take_along(%d, %class) {axis = 1}
  %l: f32[b*n - b, 1] = sub(%log, %own)
  %loss: f32[] = reduce(%l) {op = "sum", axes = (0, 1), keepdims = false}
  %worst: f32[] = reduce(%l) {op = "max", axes = (0, 1), keepdims = false}
  %wide: f32[b*n - b, 96] = broadcast(%z) {shape = [b*n - b, 96], axes = (0, 1)}
  %soft: f32[b*n - b, 96] = div(%e, %wide)
  %back: f32[b, n - 1, 96] = reshape(%soft) {shape = [b, n - 1, 96]}
  %g: f32[b, n, 96] = pad(%back) {low = [0, 0, 0], high = [0, 1, 0], value = 0.0}
  %flat: f32[b*n, 96] = reshape(%g) {shape = [b*n, 96]}
  %c: f32[96, b*n] = transpose(%flat) {perm = (1, 0)}
  %rows: f32[b*n, 4] = reshape(%a) {shape = [b*n, 4]}
  %dw: f32[96, 4] = matmul(%c, %rows)
  %new: f32[96, 4] = sub(%v, %dw)
  return %loss, %worst, %new, %l
}
""".replace("\n    {", " {")
DONE = ("fuse", "chunk", "chunk_loops", "lower", "update", "order", "inplace")


def stages(text: str) -> list[tuple[str, Module]]:
    module, found = parse_module(text), []
    for stage in STAGES:
        if stage.name in DONE:
            module = stage.run(module, CX)
            verify(module, stage.legal)
            found.append((stage.name, module))
    return found


def inputs(b: int, n: int) -> list[np.ndarray]:
    draw = np.random.default_rng(b * 100 + n)
    shapes = ((b, n, 4), (4, 96), (96, 4))
    return [draw.standard_normal(s).astype(np.float32) for s in shapes]


def chunks(module: Module) -> list[Op]:
    return [op for g in module.versions for op in g.ops if op.name == "chunk"]


@pytest.fixture(scope="module")
def made() -> dict[str, Module]:
    return dict(stages(WIDE))


def test_what_is_added_up(made: dict[str, Module]) -> None:
    """All readers of the wide value are in one loop, so none needs it whole."""
    found = chunks(made["chunk"])
    assert {"sum", ""} <= {combine for op in found for combine in op.sums}
    wide = [v for op in found for v in op.results if v.shape[-1:] == (as_expr(96),)]
    assert all(v.name.startswith(("t", "most")) for v in wide)
    text = print_module(made["chunk"])
    assert print_module(parse_module(text)) == text


@pytest.mark.parametrize("b,n", [(1, 0), (0, 3), (1, 1), (2, 5), (1, 13), (7, 2)])
def test_every_number_of_chunks(made: dict[str, Module], b: int, n: int) -> None:
    given = inputs(b, n)
    want = run_graph(made["fuse"], given)
    for stage in ("chunk", "inplace"):
        module = made[stage]
        assert module.versions
        for rows in sorted({1, 2, 3, max(n - 1, 1), max(n, 1)}):
            env = dict.fromkeys(module.knobs, rows)
            for version in module.versions:
                got = run_graph(
                    module, given, version.name, env, workers=2, check_races=True
                )
                for a, w in zip(got, want, strict=True):
                    np.testing.assert_allclose(a, w, rtol=2e-5, atol=2e-5)


def test_rows_without_the_last() -> None:
    """Logits of all rows are cut where the loss is shifted by one."""
    made = dict(stages(SHIFTED))
    cut = [op for op in chunks(made["chunk"]) if op.dim_attr("extent") == sym("n")]
    assert any(len(op.regions[0].sizes) == 3 for op in cut)
    wide = {v for op in cut for v in op.results if v.shape[-1:] == (as_expr(96),)}
    assert not wide
    text = print_module(made["chunk"])
    assert print_module(parse_module(text)) == text
    for b, n in [(1, 1), (2, 2), (2, 5), (1, 13)]:
        draw = np.random.default_rng(b * 100 + n)
        x, w, _ = inputs(b, n)
        given = [x, w, draw.integers(0, 96, (b, n)), inputs(b, n)[2]]
        want = run_graph(made["fuse"], given)
        for stage in ("chunk", "inplace"):
            module = made[stage]
            for rows in sorted({1, 2, 3, max(n - 1, 1), n}):
                env = dict.fromkeys(module.knobs, rows)
                for version in module.versions:
                    got = run_graph(
                        module, given, version.name, env, workers=2, check_races=True
                    )
                    for a, expected in zip(got, want, strict=True):
                        np.testing.assert_allclose(a, expected, rtol=2e-5, atol=2e-5)


def test_sums_are_written_in_place(made: dict[str, Module]) -> None:
    """No loop has a second memory for a sum."""
    loops = made["chunk_loops"].loops
    names = {b.name for f in loops.values() for b in f.buffers}
    assert any(name.endswith("_in_place") for name in loops)
    assert not any(name.startswith("next_") for name in names)


def test_kernels_apart_and_joined_again(made: dict[str, Module]) -> None:
    graph = made["fuse"].main
    apart, splits = sums_apart(graph)
    assert len(splits) == 2  # the exponential of a sum, and the update
    assert len(apart.ops) == len(graph.ops) + 2
    joined = rejoined(apart, splits, ())
    assert [op.results for op in joined.ops] == [op.results for op in graph.ops]
    # A part that a chunk has stays apart.
    kept = next(op for op in apart.ops if op is splits[0].parts[0])
    assert len(rejoined(apart, splits, {kept}).ops) == len(graph.ops) + 1


@pytest.mark.parametrize(
    "after",
    [
        # what follows reads what is summed up: a norm over the rows
        '%s: f32[4] = reduce(%a) {op = "sum", axes = (0), keepdims = false}\n'
        "  %b: f32[n, 4] = broadcast(%s) {shape = [n, 4], axes = (1)}\n"
        "  %y: f32[n, 4] = div(%a, %b)",
        # how many there are is known
        '%s: f32[n] = reduce(%a) {op = "sum", axes = (1), keepdims = false}\n'
        "  %y: f32[n] = exp(%s)",
    ],
)
def test_kernels_that_stay_as_they_are(after: str) -> None:
    text = f"graph @main(%a: f32[n, 4]) {{\n  {after}\n  return %y\n}}\n"
    graph = dict(stages(text))["fuse"].main
    assert sums_apart(graph) == (graph, [])
