"""Control flow as loop functions: the interpreter and machine code agree."""

from __future__ import annotations

import numpy as np
import pytest
from machines import machine

import pliant
from pliant.context import Context
from pliant.errors import InternalError
from pliant.ir.interp import run_graph
from pliant.ir.parse import parse_module
from pliant.ir.spec import Stage, verify
from pliant.ir.text import print_module
from pliant.options import Options
from pliant.pipeline import run_stages

WHILE = """
graph @main(%x: f32[n, m], %rounds: i64[]) {
  constraint n <= 4294967295
  %zero: i64[] = full() {value = 0, dtype = i64, shape = ()}
  %i: i64[], %y: f32[n, m], %last: i64[] =
    while(%zero, %x, %rounds)
  region @test(%i_1: i64[], %y_1: f32[n, m], %end: i64[]) {
    %less: bool[] = lt(%i_1, %end)
    return %less
  }
  region @body(%i_2: i64[], %y_2: f32[n, m], %end_1: i64[]) {
    %one: i64[] = full() {value = 1, dtype = i64, shape = ()}
    %next: i64[] = add(%i_2, %one)
    %sorted: f32[n, m], %places: i64[n, m] = sort(%y_2) {axis = 0, descending = true}
    %numbers: f32[n, m] = cast(%places) {dtype = f32}
    %sum: f32[n, m] = sub(%numbers, %sorted)
    return %next, %sum, %end_1
  }
  return %y
}
"""

SCAN = """
graph @main(%x: f32[n], %rows: f32[t, n]) {
  constraint 1 <= n
  constraint n <= 4294967295
  %y: f32[n], %all: i64[t, n] =
    scan(%x, %rows) {rounds = <t>, scanned = 1, reverse = false}
  region @body(%y_1: f32[n], %row: f32[n]) {
    %most: f32[n], %at: i64[n] = running_extreme(%row) {axis = 0, least = false}
    %sum: f32[n] = add(%y_1, %most)
    %ordered: f32[n], %places: i64[n] = sort(%sum) {axis = 0, descending = false}
    %whole: f32[1, n] = reshape(%ordered) {shape = [1, n]}
    %wanted: f32[1, n] = reshape(%row) {shape = [1, n]}
    %found: i64[1, n] = search(%whole, %wanted) {right = false}
    %flat: i64[n] = reshape(%found) {shape = [n]}
    return %sum, %flat
  }
  return %y, %all
}
"""

BRANCH = """
graph @main(%x: f32[n], %which: bool[]) {
  constraint 2 <= n
  constraint n <= 4294967295
  %y: f32[2] = if(%which, %x)
  region @then(%a: f32[n]) {
    %best: f32[2], %at: i64[2] = top(%a) {axis = 0, k = <2>, largest = true}
    return %best
  }
  region @else(%b: f32[n]) {
    %least: f32[2], %at_1: i64[2] = top(%b) {axis = 0, k = <2>, largest = false}
    %twice: f32[2] = add(%least, %least)
    return %twice
  }
  return %y
}
"""


def _while(n: int, m: int) -> list[np.ndarray]:
    x = np.random.default_rng(n).standard_normal((n, m)).astype(np.float32)
    return [x, np.array(3)]


def _scan(n: int, t: int) -> list[np.ndarray]:
    random = np.random.default_rng(n)
    x, rows = random.standard_normal(n), random.standard_normal((t, n))
    return [x.astype(np.float32), rows.astype(np.float32)]


def _branch(n: int, which: int) -> list[np.ndarray]:
    x = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    return [x, np.array(which == 1)]


CASES = {
    "while": (WHILE, _while, ((0, 3), (1, 1), (5, 0), (7, 3), (13, 2))),
    "scan": (SCAN, _scan, ((1, 1), (1, 0), (7, 4), (13, 3))),
    "branch": (BRANCH, _branch, ((2, 0), (2, 1), (13, 0), (13, 1))),
}


@pytest.mark.parametrize("name", CASES)
def test_library_functions_in_regions(name: str) -> None:
    text, inputs, sizes = CASES[name]
    module = parse_module(text)
    verify(module, Stage.IMPORTED)
    lowered = run_stages(module, Context(Options(), machine()), "unify")
    verify(lowered, Stage.LOWERED)
    assert not any(op.name == "call_library" for op in lowered.main.ops)
    printed = print_module(lowered)
    assert print_module(parse_module(printed)) == printed
    model = pliant.compile(module, threads=2)
    for size in sizes:
        given = inputs(*size)
        want = run_graph(module, given)
        got = model(*given)
        for oracle in (
            run_graph(lowered, given, workers=2, check_races=True),
            got if isinstance(got, tuple | list) else [got],
        ):
            for a, b in zip(oracle, want, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-6)
        assert model.stats()["last_peak_bytes"] == model.memory_plan(*given).peak_bytes


LOOP = """
graph @main(%x: f32[n, 4]) {
  %y: f32[n, 4], %p: i64[n, 4] = call_loop(%x) {callee = "sorts", sizes = [n]}
  return %y, %p
}
loop @sorts(n; in %a: f32[n, 4], out %b: f32[n, 4], out %c: i64[n, 4]) do
  library "plt_running_extreme" computes running_extreme {axis = 1, least = true}
    (1, 1, n, 4, 1; %a, %b, %c)
end
library @running_extreme symbol "plt_running_extreme"
"""


def test_the_statement() -> None:
    module = parse_module(LOOP)
    verify(module, Stage.IMPORTED)
    model = pliant.compile(module)
    for n in (0, 1, 7):
        x = np.random.default_rng(n).standard_normal((n, 4)).astype(np.float32)
        want = np.minimum.accumulate(x, 1)
        np.testing.assert_array_equal(run_graph(module, [x])[0], want)
        np.testing.assert_array_equal(model(x)[0], want)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('library "plt_running_extreme"', 'library "plt_none"', "no library function"),
        ("%a, %b, %c", "%b, %a, %c", "in, out, work, in this order"),
        ("(1, 1, n, 4, 1;", "(1, 1, k, 4, 1;", "k in the sizes"),
        ("in %a: f32[n, 4]", "in %a: f32[n, 4] strides [8, 1]", "has gaps"),
        (
            "do\n  library",
            "do\n  for i = 0 to n parallel do library",
            "a parallel or vector loop",
        ),
    ],
)
def test_an_illegal_statement(old: str, new: str, problem: str) -> None:
    text = LOOP.replace(old, new)
    if "parallel" in new:
        text = text.replace("\nend\n", " end\nend\n")
    with pytest.raises(InternalError, match=problem):
        verify(parse_module(text), Stage.IMPORTED)
