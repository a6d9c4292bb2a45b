"""Which half floats are rounded in registers: those that a jump depends on, no others.

That the results are right is in tests/e2e/test_half_jumps.py.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from pliant.context import Context
from pliant.ir.graph import Graph
from pliant.ir.ops import OPS, Trait
from pliant.ir.parse import parse_graph
from pliant.machine.target import named
from pliant.options import Options
from pliant.passes.bends import Bends
from pliant.passes.rounding import rounding

INFERENCE = Context(Options(), named("avx2"))
PART = Context(Options(), named("avx2"), is_part=True)


def graph_of(body: str, result: str, dtype: str = "bf16") -> Graph:
    """A graph of %a and %b; `#` in the text stands for its element type."""
    text = f"""
    graph @main(%a: #[n, 8], %b: #[n, 8]) {{
      {body}
      return {result}
    }}
    """
    return parse_graph(text.replace("#", dtype))


def rounded(body: str, result: str, cx: Context = INFERENCE) -> str:
    """The names of the values that are rounded."""
    made = rounding(graph_of(body, result), cx)
    return " ".join(op.operands[0].name for op in made.ops if op.name == "rounded")


# %y is computed of inputs, %m is the largest element of each row.
CHAIN = """
      %t: #[n, 8] = mul(%a, %b)
      %y: #[n, 8] = add(%t, %a)
"""
TOP = """
      %top: #[n, 1] = reduce(%y) {op = "max", axes = (1), keepdims = true}
      %m: #[n, 8] = broadcast(%top) {shape = [n, 8], axes = (0, 1)}
"""
ZERO = "%z: #[n, 8] = full() {value = 0.0, dtype = #, shape = [n, 8]}\n"
ONE = "%i: #[n, 8] = full() {value = 1.0, dtype = #, shape = [n, 8]}\n"


@pytest.mark.parametrize(
    "jump",
    [
        "%r: bool[n, 8] = eq(%y, %m)",
        "%r: bool[n, 8] = ge(%y, %m)",
        "%d: #[n, 8] = abs(%y)\n%r: bool[n, 8] = lt(%d, %m)",
        "%r: #[n, 8] = floor(%y)",
        "%r: #[n, 8] = sign(%y)",
        "%r: #[n, 8] = mod(%a, %y)",
        "%r: bool[n, 8] = isinf(%y)",
        "%r: i32[n, 8] = cast(%y) {dtype = i32}",
        "%r: bool[n, 8] = cast(%y) {dtype = bool}",
        "%w: f32[n, 8] = cast(%y) {dtype = f32}\n%r: f32[n, 8] = round(%w)",
        "%s: #[n, 8] = select(%c, %y, %a)\n%r: bool[n, 8] = eq(%s, %a)",
        "%v: #[n, 8], %r: i64[n, 8] = sort(%y) {axis = 1, descending = false}",
    ],
)
def test_what_a_jump_depends_on_is_rounded(jump: str) -> None:
    given = "%c: bool[n, 8] = lt(%a, %b)\n"
    assert rounded(CHAIN + TOP + given + jump, "%r") == "t y"


@pytest.mark.parametrize(
    ("edge", "also"),
    [
        ("%r: #[n, 8] = sqrt(%d)", " d"),
        ("%r: #[n, 8] = log(%d)", " d"),
        ("%r: #[n, 8] = div(%a, %d)", " d"),
        ("%r: #[n, 8] = pow(%d, %a)", " d"),
        ("%q: #[n, 8] = abs(%d)\n%r: #[n, 8] = sqrt(%q)", None),
        ("%q: #[n, 8] = mul(%d, %d)\n%r: #[n, 8] = rsqrt(%q)", None),
        ("%q: #[n, 8] = exp(%d)\n%s: #[n, 8] = add(%q, %i)\n"
         "%r: #[n, 8] = div(%y, %s)", None),
        ("%q: #[n, 8] = abs(%d)\n%r: #[n, 8] = div(%y, %q)", " d"),
        ("%q: #[n, 8] = abs(%d)\n%s: #[n, 8] = maximum(%q, %i)\n"
         "%r: #[n, 8] = div(%y, %s)", None),
        ("%q: #[n, 8] = neg(%d)\n%r: #[n, 8] = sqrt(%q)", " d"),
    ],
)  # fmt: skip
def test_edges_count_where_a_sign_may_change(edge: str, also: str | None) -> None:
    less = "%d: #[n, 8] = sub(%m, %y)\n"
    found = rounded(CHAIN + TOP + ONE + less + edge, "%r")
    assert found == ("" if also is None else "t y" + also)


@pytest.mark.parametrize(
    "smooth",
    [
        "%r: #[n, 8] = exp(%y)",
        "%r: #[n, 8] = maximum(%y, %a)",
        "%r: #[n, 8] = sub(%y, %m)",
        "%c: bool[n, 8] = lt(%y, %z)\n%r: #[n, 8] = select(%c, %z, %y)",
        "%c: bool[n, 8] = gt(%y, %m)\n%r: #[n, 8] = select(%c, %y, %m)",
        "%c: bool[n, 8] = gt(%y, %z)\n%s: #[n, 8] = expm1(%y)\n"
        "%r: #[n, 8] = select(%c, %y, %s)",
        "%w: f32[n, 8] = cast(%y) {dtype = f32}\n%r: f32[n, 8] = sin(%w)",
        "%c: bool[n, 8] = lt(%a, %b)\n%r: #[n, 8] = select(%c, %y, %a)",
    ],
)
def test_what_only_bends_is_not_rounded(smooth: str) -> None:
    body = CHAIN + TOP + ZERO + smooth
    graph = graph_of(body, "%r")
    assert rounding(graph, INFERENCE) is graph


@pytest.mark.parametrize(
    "choice",
    [
        "%r: #[n, 8] = select(%c, %y, %i)",  # 0 or 1
        "%r: #[n, 8] = select(%c, %a, %z)",  # another value
        "%s: #[n, 8] = log(%y)\n%r: #[n, 8] = select(%c, %s, %z)",  # -inf or 0
        "%s: #[n, 8] = select(%c, %z, %y)\n%r: bool[n, 8] = logical_not(%c)",
    ],
)
def test_a_choice_between_values_that_differ_jumps(choice: str) -> None:
    test = "%c: bool[n, 8] = lt(%y, %z)\n"
    assert "y" in rounded(CHAIN + ZERO + ONE + test + choice, "%r").split()


def test_nothing_is_rounded_behind_sums_and_products() -> None:
    body = """
      %t: #[n, 8] = mul(%a, %b)
      %u: #[8, n] = transpose(%t) {perm = (1, 0)}
      %p: #[n, n] = matmul(%a, %u)
      %s: #[n] = reduce(%p) {op = "sum", axes = (1), keepdims = false}
      %q: #[n] = mul(%s, %s)
      %r: #[n] = floor(%q)
    """
    assert rounded(body, "%r") == "s q"


def test_f32_is_left_alone() -> None:
    graph = graph_of(CHAIN + TOP + "%r: bool[n, 8] = eq(%y, %m)", "%r", "f32")
    assert rounding(graph, INFERENCE) is graph


def test_what_a_part_hands_on_is_rounded() -> None:
    assert rounded(CHAIN, "%y") == ""
    assert rounded(CHAIN, "%y", PART) == "t y"


def test_padding_and_counting_are_rounded_where_the_type_needs_it() -> None:
    for number, found in ((0.1, "p"), (0.5, "")):
        body = f"""
          %p: #[n, 9] = pad(%a) {{low = [0, 0], high = [0, 1], value = {number}}}
          %r: #[n, 9] = floor(%p)
        """
        assert rounded(body, "%r") == found
    body = """
      %p: #[n, 8] = iota() {axis = 0, dtype = #, shape = [n, 8]}
      %r: #[n, 8] = floor(%p)
    """
    assert rounded(body, "%r") == "p"


SCORES = """
graph @main(%q: bf16[1, 2, s, 8], %k: bf16[1, 2, s, 8], %a: bf16[s, s]) {
  %t: bf16[s, s] = mul(%a, %a)
  %x: bf16[s, s] = neg(%t)
  %y: bf16[1, 2, s, 8] = attention(%q, %k, %k, %a, %x) {masked = false}
    region @score(%score: bf16[1, 2, s, s], %u: bf16[s, s], %v: bf16[s, s]) {
      %w: bf16[s, s] = mul(%u, %v)
      %f: bf16[s, s] = floor(%w)
      %g: bf16[1, 2, s, s] = broadcast(%f) {shape = [1, 2, s, s], axes = (2, 3)}
      %h: bf16[1, 2, s, s] = add(%score, %g)
      %i: bf16[1, 2, s, s] = round(%h)
      return %i
    }
  return %y
}
"""


def test_the_scores_of_attention_jump_too() -> None:
    made = rounding(parse_graph(SCORES), INFERENCE)
    (attention,) = (op for op in made.ops if op.name == "attention")
    found = [
        [op.operands[0].name for op in graph.ops if op.name == "rounded"]
        for graph in (made, *attention.regions)
    ]
    assert found == [["t"], ["score", "w", "h"]]


# ---- the table

STEPS = [x for step in (-4.0, -1.0, 0.0, 1.0, 2.0) for x in (step, step + 0.5)]
MOST_SLOPE = 1e4


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, row in OPS.items()
        if Trait.ELEMENTWISE in row.traits and row.meaning and not row.attrs
    ],
)
def test_the_table_says_which_ops_jump(name: str) -> None:
    """Ops that nothing is said of do not differ much for operands that hardly do."""
    row = OPS[name]
    if name == "slope" or not _takes_floats(name):
        return
    worst = 0.0
    near = 1e-9
    with np.errstate(all="ignore"):
        for x in STEPS:
            for y in STEPS:
                operands = [np.float64(x), np.float64(y)][: row.arity[0]]
                if name == "select":
                    operands = [np.bool_(True), *operands]
                for k in range(int(name == "select"), len(operands)):
                    here = [_value(row, operands, k, d) for d in (-near, 0.0, near)]
                    worst = max(worst, *(_apart(here[1], v) for v in here))
    if worst > MOST_SLOPE * near:
        assert {Trait.JUMPS, Trait.EDGE} & row.traits, (name, worst)
    else:
        assert not {Trait.JUMPS, Trait.EDGE} & row.traits - _elsewhere(name), name


def _takes_floats(name: str) -> bool:
    return not name.startswith(("bitwise", "logical", "shift"))


def _value(row: object, operands: list[object], k: int, change: float) -> float:
    moved = [x + change if i == k else x for i, x in enumerate(operands)]  # type: ignore[operator]
    return float(row.meaning(*moved))  # type: ignore[attr-defined]


def _apart(a: float, b: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return math.inf if not (math.isfinite(a) and math.isfinite(b)) else abs(a - b)


def _elsewhere(name: str) -> set[Trait]:
    """Jumps that the numbers above do not show: the smallest steps, infinities."""
    hidden = name in ("nextafter", "isinf", "isnan")
    return {Trait.JUMPS} if hidden else set()


@pytest.mark.parametrize("c", [-1.0, 0.0, 2.0])
def test_a_bend_is_where_both_sides_agree(c: float) -> None:
    """select(y > c, f, g): only if f(c) is g(c)."""
    for f, g, agree in (
        ("%y", "%k", True),
        ("%y", "%z", c == 0),
        ("%p", "%z", c == 0),
        ("%p", "%q", c in (0, 1)),
        ("%b", "%z", False),
    ):
        body = f"""
          %y: #[n, 8] = neg(%a)
          %k: #[n, 8] = full() {{value = {c}, dtype = #, shape = [n, 8]}}
          {ZERO}
          %p: #[n, 8] = mul(%y, %y)
          %q: #[n, 8] = mul(%p, %y)
          %c: bool[n, 8] = gt(%y, %k)
          %r: #[n, 8] = select(%c, {f}, {g})
        """  # %b is not known there
        graph = graph_of(body, "%r")
        (compare,) = (op for op in graph.ops if op.name == "gt")
        assert Bends(graph).is_bend(compare) is agree, (f, g)
