"""Which rows of its operands an op needs for rows of its result: one rule each."""

from __future__ import annotations

import pytest

from pliant.ir.graph import Op
from pliant.ir.parse import parse_module
from pliant.passes.cuts import Cut, Cutter, Demand, RegionCuts
from pliant.sym import Facts, sym

N, B = sym("n"), sym("b")


def op_of(line: str, params: str) -> Op:
    text = f"graph @main({params}) {{\n  {line}\n  return %y\n}}"
    return parse_module(text).main.ops[-1]


def behind(line: str, params: str, cut: Cut) -> tuple[Demand, ...] | None:
    return Cutter(N, Facts()).behind(op_of(line, params), cut)


ROWS = Cut(0)
SHORT = Cut(1, short=True)  # of b runs of n - 1 rows
CUT = [
    ("%y: f32[n, 4] = add(%x, %x)", "%x: f32[n, 4]", ROWS, (ROWS, ROWS)),
    (
        "%y: f32[n, 4] = matmul(%x, %w)",
        "%x: f32[n, 8], %w: f32[8, 4]",
        ROWS,
        (ROWS, None),
    ),
    (
        "%y: f32[4, n] = matmul(%x, %w)",
        "%x: f32[4, 8], %w: f32[8, n]",
        Cut(1),
        (None, Cut(1)),
    ),
    (
        "%y: f32[n, 5, 4] = matmul(%x, %w)",
        "%x: f32[n, 5, 8], %w: f32[1, 8, 4]",
        ROWS,
        (ROWS, None),
    ),
    (
        '%y: f32[n, 1] = reduce(%x) {op = "sum", axes = (1), keepdims = true}',
        "%x: f32[n, 4]",
        ROWS,
        (ROWS,),
    ),
    (
        '%y: f32[n] = reduce(%x) {op = "sum", axes = (0), keepdims = false}',
        "%x: f32[4, n]",
        ROWS,
        (Cut(1),),
    ),
    (
        "%y: f32[4, n] = broadcast(%x) {shape = [4, n], axes = (1)}",
        "%x: f32[n]",
        Cut(1),
        (ROWS,),
    ),
    (
        "%y: f32[n, 4] = broadcast(%x) {shape = [n, 4], axes = (1)}",
        "%x: f32[4]",
        ROWS,
        (None,),
    ),
    (
        "%y: f32[4, n] = transpose(%x) {perm = (1, 0)}",
        "%x: f32[n, 4]",
        Cut(1),
        (ROWS,),
    ),
    # n is the inner factor of an axis: b runs of rows
    (
        "%y: f32[b*n, 4] = reshape(%x) {shape = [b*n, 4]}",
        "%x: f32[b, n, 4]",
        Cut(0, B),
        (Cut(1),),
    ),
    (
        "%y: f32[n, 2, 2] = reshape(%x) {shape = [n, 2, 2]}",
        "%x: f32[n, 4]",
        ROWS,
        (ROWS,),
    ),
    (
        "%y: f32[n, 4] = index(%x, %i)",
        "%x: f32[7, 4], %i: i64[n]",
        ROWS,
        (None, ROWS),
    ),
    (
        "%y: f32[n, 8] = concat(%x, %x) {axis = 1}",
        "%x: f32[n, 4]",
        ROWS,
        (ROWS, ROWS),
    ),
    # all rows but the last: the last round has one less
    (
        "%y: f32[b, n - 1] = slice(%x) "
        "{starts = [0, 0], shape = [b, n - 1], steps = (1, 1)}",
        "%x: f32[b, n]",
        SHORT,
        (Cut(1),),
    ),
    (
        "%y: f32[b*n - b] = reshape(%x) {shape = [b*n - b]}",
        "%x: f32[b, n - 1]",
        Cut(0, B, short=True),
        (SHORT,),
    ),
    (
        "%y: f32[b, n] = pad(%x) {low = [0, 0], high = [0, 1], value = 0.0}",
        "%x: f32[b, n - 1]",
        Cut(1),
        (SHORT,),
    ),
    # other rows than its own: a round reads them from the whole
    (
        "%y: f32[b, n - 1] = slice(%x) "
        "{starts = [0, 1], shape = [b, n - 1], steps = (1, 1)}",
        "%x: f32[b, n]",
        SHORT,
        (None,),
    ),
    (
        "%y: f32[n, 4] = slice(%x) {starts = [1, 0], shape = [n, 4], steps = (2, 1)}",
        "%x: f32[2*n, 4]",
        ROWS,
        (None,),
    ),
    # windows reach into the rows of the next chunk: a round reads them from the whole
    (
        "%y: f32[1, 3, n, 5] = conv(%x, %w) {stride = (1, 1), low = (1, 1), "
        "high = (1, 1), dilation = (1, 1), groups = 1}",
        "%x: f32[1, 2, n, 5], %w: f32[3, 2, 3, 3]",
        Cut(2),
        (None, None),
    ),
]


@pytest.mark.parametrize(("line", "params", "cut", "wanted"), CUT)
def test_what_rows_need(
    line: str, params: str, cut: Cut, wanted: tuple[Demand, ...]
) -> None:
    assert behind(line, params, cut) == wanted


NOT_CUT = [
    # every row is in each element
    (
        '%y: f32[n, 1] = reduce(%x) {op = "sum", axes = (1), keepdims = true}',
        "%x: f32[n, 4]",
        Cut(1),
    ),
    # a running sum needs the rows before
    ('%y: f32[n] = cumulate(%x) {op = "sum", axis = 0}', "%x: f32[n]", ROWS),
    # rows of another operand lie in between
    (
        "%y: f32[2*n, 4] = concat(%x, %x) {axis = 0}",
        "%x: f32[n, 4]",
        Cut(0, sym("n") * 0 + 2),
    ),
    # rows merge with columns in another order than the cut has
    (
        "%y: f32[4*n] = reshape(%x) {shape = [4*n]}",
        "%x: f32[2, 2*n]",
        Cut(0),
    ),
    ("%y: f32[n, 4] = flip(%x) {axes = (0)}", "%x: f32[n, 4]", ROWS),
    # a part of several runs is several parts
    (
        "%y: f32[2*n] = slice(%x) {starts = [1], shape = [2*n], steps = (1)}",
        "%x: f32[2*n + 1]",
        Cut(0, sym("n") * 0 + 2),
    ),
    # two rows are missing, not one
    (
        "%y: f32[b, n] = pad(%x) {low = [0, 0], high = [0, 2], value = 0.0}",
        "%x: f32[b, n - 2]",
        Cut(1),
    ),
    # the row that is missing is the first
    (
        "%y: f32[b, n] = pad(%x) {low = [0, 1], high = [0, 0], value = 0.0}",
        "%x: f32[b, n - 1]",
        Cut(1),
    ),
    # the last round might have no row, which no window is for
    (
        "%y: f32[1, 3, n - 1, 5] = conv(%x, %w) {stride = (1, 1), low = (1, 1), "
        "high = (1, 1), dilation = (1, 1), groups = 1}",
        "%x: f32[1, 2, n - 1, 5], %w: f32[3, 2, 3, 3]",
        Cut(2, short=True),
    ),
    (
        "%y: f32[n, 4] = pad(%x) {low = [1, 0], high = [0, 0], value = 0.0}",
        "%x: f32[n - 1, 4]",
        ROWS,
    ),
    # channels of the result are rows of the weight
    (
        "%y: f32[1, n, 5, 5] = conv(%x, %w) {stride = (1, 1), low = (1, 1), "
        "high = (1, 1), dilation = (1, 1), groups = 1}",
        "%x: f32[1, 2, 5, 5], %w: f32[n, 2, 3, 3]",
        Cut(1),
    ),
    # more zeros than a window is wide: a round might read nothing else
    (
        "%y: f32[1, 3, n, 5] = conv(%x, %w) {stride = (1, 1), low = (4, 1), "
        "high = (0, 1), dilation = (1, 1), groups = 1}",
        "%x: f32[1, 2, n - 2, 5], %w: f32[3, 2, 3, 3]",
        Cut(2),
    ),
    # only the call tells whether a dim is the result's or 1
    (
        "%y: f32[n, 4] = stretch(%x) {shape = [n, 4], axes = (0, 1)}",
        "%x: f32[m, 4]",
        ROWS,
    ),
]


@pytest.mark.parametrize(("line", "params", "cut"), NOT_CUT)
def test_what_cannot_be_cut(line: str, params: str, cut: Cut) -> None:
    assert behind(line, params, cut) is None


def region_cuts(text: str, cut: Cut) -> RegionCuts | None:
    graph = parse_module(f"graph @main({text}\n}}").main
    return Cutter(N, Facts()).region(graph, [cut])


def test_rows_of_what_is_also_needed_whole() -> None:
    """A mask of pairs: the rows of the one are cut, those of the other are all."""
    cuts = region_cuts(
        """%x: f32[n]) {
  %a: f32[n, n] = broadcast(%x) {shape = [n, n], axes = (0)}
  %b: f32[n, n] = broadcast(%x) {shape = [n, n], axes = (1)}
  %y: f32[n, n] = mul(%a, %b)
  return %y""",
        ROWS,
    )
    assert cuts is not None
    wanted = {"x": None, "a": ROWS, "b": ROWS, "y": ROWS}
    assert {v.name: cut for v, cut in cuts.demands.items()} == wanted


def test_one_operand_in_two_ways() -> None:
    cuts = region_cuts(
        """%x: f32[n, n]) {
  %y: f32[n, n] = matmul(%x, %x)
  return %y""",
        ROWS,
    )
    assert cuts is None


def test_what_is_computed_in_every_round() -> None:
    """A lookup may be, a sum over all rows may not."""
    text = """%x: f32[n, 4], %t: f32[9, 4], %i: i64[n]) {{
  {line}
  %b: f32[n, n, 4] = broadcast(%a) {{shape = [n, n, 4], axes = (1, 2)}}
  %w: f32[n, n, 4] = broadcast(%x) {{shape = [n, n, 4], axes = (0, 2)}}
  %y: f32[n, n, 4] = mul(%w, %b)
  return %y"""
    index = "%a: f32[n, 4] = index(%t, %i)"
    total = '%a: f32[n, 4] = cumulate(%x) {op = "sum", axis = 0}'
    assert region_cuts(text.format(line=index), ROWS) is not None
    assert region_cuts(text.format(line=total), ROWS) is None


SUMS = [
    (
        '%y: f32[4] = reduce(%x) {op = "sum", axes = (0), keepdims = false}',
        "%x: f32[n, 4]",
        "sum",
        (ROWS,),
    ),
    (
        '%y: i64[1, 1] = reduce(%x) {op = "max", axes = (0, 1), keepdims = true}',
        "%x: i64[3, n]",
        "max",
        (Cut(1),),
    ),
    # the product by which a weight gets its gradient; n is a factor of all rows
    (
        "%y: f32[4, 5] = matmul(%x, %w)",
        "%x: f32[4, b*n], %w: f32[b*n, 5]",
        "sum",
        (Cut(1, B), Cut(0, B)),
    ),
    # the largest is the same, however few bits it has
    (
        '%y: bf16[4] = reduce(%x) {op = "max", axes = (0), keepdims = false}',
        "%x: bf16[n, 4]",
        "max",
        (ROWS,),
    ),
]


def sums(lines: str, params: str) -> list[RegionCuts]:
    graph = parse_module(f"graph @main({params}) {{\n  {lines}\n  return %y\n}}").main
    return Cutter(N, Facts()).sums(graph)


@pytest.mark.parametrize(("line", "params", "combine", "wanted"), SUMS)
def test_sums_over_chunks(
    line: str, params: str, combine: str, wanted: tuple[Demand, ...]
) -> None:
    found = [cuts.total for cuts in sums(line, params)]
    ways = {(t.combine, t.behind) for t in found if t is not None}
    assert (combine, wanted) in ways


@pytest.mark.parametrize(
    ("lines", "params"),
    [
        # the axis that is reduced is not the one that is cut
        (
            '%y: f32[n] = reduce(%x) {op = "sum", axes = (1), keepdims = false}',
            "%x: f32[n, 4]",
        ),
        # a sum that is rounded to few bits after every chunk is another sum
        (
            '%y: bf16[4] = reduce(%x) {op = "sum", axes = (0), keepdims = false}',
            "%x: bf16[n, 4]",
        ),
        ("%y: bf16[4, 5] = matmul(%x, %w)", "%x: bf16[4, n], %w: bf16[n, 5]"),
        # what follows a sum is not for a part of it
        (
            '%s: f32[4] = reduce(%x) {op = "sum", axes = (0), keepdims = false}\n'
            "  %y: f32[4] = log(%s)",
            "%x: f32[n, 4]",
        ),
        # nor is a sum that another one needs
        (
            '%s: f32[4] = reduce(%x) {op = "max", axes = (0), keepdims = false}\n'
            "  %b: f32[n, 4] = broadcast(%s) {shape = [n, 4], axes = (1)}\n"
            "  %d: f32[n, 4] = sub(%x, %b)\n"
            '  %y: f32[4] = reduce(%d) {op = "sum", axes = (0), keepdims = false}',
            "%x: f32[n, 4]",
        ),
        # the rows of the two operands are not the same ones
        (
            "%t: f32[n, 4] = flip(%x) {axes = (0)}\n  %y: f32[5, 4] = matmul(%w, %t)",
            "%x: f32[n, 4], %w: f32[5, n]",
        ),
        # a logical reduction has no number to start from
        (
            '%y: bool[4] = reduce(%x) {op = "any", axes = (0), keepdims = false}',
            "%x: bool[n, 4]",
        ),
    ],
)
def test_what_is_no_sum_over_chunks(lines: str, params: str) -> None:
    assert sums(lines, params) == []


def test_ways_to_cut_a_shape() -> None:
    cutter = Cutter(N, Facts())
    assert cutter.cuts_of((B, N, sym("n") * 0 + 4)) == [Cut(1)]
    assert cutter.cuts_of((B * N,)) == [Cut(0, inner=B), Cut(0, B)]
    assert cutter.cuts_of((B,)) == []
    assert cutter.cuts_of((B, N - 1)) == [SHORT]
    short = Cut(0, inner=B, short=True), Cut(0, B, short=True)
    assert cutter.cuts_of((B * N - B,)) == [*short]
