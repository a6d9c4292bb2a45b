"""The loops themselves: which axes become one, what is parallel, what is vector."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from pliant.context import Context
from pliant.ir.build import Builder
from pliant.ir.graph import Module, Value
from pliant.ir.loop_walk import statements
from pliant.ir.loops import For, Kind, LoopFunc
from pliant.ir.spec import Stage, verify
from pliant.ir.types import DType, tensor
from pliant.lower.domain import Axis, merge
from pliant.lower.lower import lower
from pliant.lower.nest import BLOCK
from pliant.lower.runs import PARTIALS, RUN
from pliant.machine.target import avx512
from pliant.options import Options
from pliant.passes.fuse import fuse
from pliant.sym import Expr, as_expr, ceildiv, minimum, sym

B, S, N = sym("b"), sym("s"), sym("n")
ROW_RUN = RUN * PARTIALS * avx512().lanes
F32 = DType.F32


def lowered(
    build: Callable[..., Value | Sequence[Value]], *shapes: tuple[int | Expr, ...]
) -> list[LoopFunc]:
    b = Builder()
    params = [b.param(f"x{k}", tensor(F32, *dims)) for k, dims in enumerate(shapes)]
    made = build(b, *params)
    graph = b.finish("main", [made] if isinstance(made, Value) else list(made))
    cx = Context(Options(variants=False), avx512())
    module = lower(Module({"main": fuse(graph, cx)}, constants=b.constants), cx)
    verify(module, Stage.LOWERED)
    return list(module.loops.values())


def loops(func: LoopFunc) -> list[tuple[Kind, Expr]]:
    """Kind and extent of each loop, outermost first; a block of a split axis is one."""
    found = [s for s in statements(func.body) if isinstance(s, For)]
    return [(s.kind, s.end - s.begin) for s in found]


def part_of(extent: Expr, run: int, number: str, kind: Kind) -> tuple[Kind, Expr]:
    begin = run * sym(number)
    return kind, minimum(extent, begin + run) - begin


def kinds(func: LoopFunc) -> list[Kind]:
    return [kind for kind, _ in loops(func)]


def test_elementwise_is_one_axis() -> None:
    (func,) = lowered(lambda b, x: b.unary("exp", x), (B, S, 768))
    assert kinds(func) == [Kind.PARALLEL, Kind.VECTOR]
    assert func.sizes == ("b", "s")
    (_, blocks), _ = loops(func)
    assert blocks == ceildiv(768 * B * S, BLOCK)


def test_bias_keeps_its_axis() -> None:
    (func,) = lowered(lambda b, x, y: b.binary("add", x, y), (B, S, 768), (768,))
    assert loops(func) == [(Kind.PARALLEL, B * S), (Kind.VECTOR, as_expr(768))]


def test_transpose_runs_over_tiles() -> None:
    def build(b: Builder, x: Value) -> Value:
        return b.unary("exp", b.transpose(x, (0, 2, 1)))

    (func,) = lowered(build, (B, S, N))
    (tiles, rows, columns) = loops(func)
    assert tiles == (Kind.PARALLEL, B * ceildiv(N, 16) * ceildiv(S, 16))
    assert (rows[0], columns[0]) == (Kind.SERIAL, Kind.VECTOR)
    assert [e.evaluate({"n": 40, "_tile_row": 2}) for e in (rows[1],)] == [8]


def test_swapped_leading_axes_keep_the_last() -> None:
    def build(b: Builder, x: Value) -> Value:
        return b.unary("exp", b.transpose(x, (1, 0, 2)))

    (func,) = lowered(build, (B, S, N))
    assert loops(func) == [(Kind.PARALLEL, B * S), (Kind.VECTOR, N)]


def test_reshape_costs_no_division() -> None:
    """(b, s, 12, 64) and (b, s, 768) meet in one loop over positions."""

    def build(b: Builder, x: Value, y: Value) -> Value:
        return b.binary("add", b.reshape(x, (B, S, 768)), y)

    (func,) = lowered(build, (B, S, 12, 64), (B, S, 768))
    assert kinds(func) == [Kind.PARALLEL, Kind.VECTOR]
    text = str(func.body)
    assert "Mod" not in text


def test_rows_are_parallel() -> None:
    def softmax(b: Builder, x: Value) -> Value:
        top = b.reduce("max", x, (2,), keepdims=True)
        e = b.unary("exp", b.binary("sub", x, top))
        return b.binary("div", e, b.reduce("sum", e, (2,), keepdims=True))

    (func,) = lowered(softmax, (B, S, N))
    (outer, largest, runs, run, last) = loops(func)
    assert outer == (Kind.PARALLEL, B * S)
    assert largest == last == (Kind.VECTOR, N)
    assert runs == (Kind.SERIAL, ceildiv(N, ROW_RUN))
    assert run == part_of(N, ROW_RUN, "_run_d2", Kind.VECTOR)


def test_columns_are_vector() -> None:
    (func,) = lowered(lambda b, x: b.reduce("sum", x, (1,)), (B, S, N))
    assert loops(func) == [
        (Kind.PARALLEL, B),
        (Kind.VECTOR, N),
        (Kind.SERIAL, ceildiv(S, RUN)),
        part_of(S, RUN, "_run_d1", Kind.SERIAL),
    ]


def test_reduced_axes_merge() -> None:
    (func,) = lowered(lambda b, x: b.reduce("sum", x, (1, 2)), (B, S, N))
    assert loops(func) == [
        (Kind.PARALLEL, B),
        (Kind.SERIAL, ceildiv(S * N, ROW_RUN)),
        part_of(S * N, ROW_RUN, "_run_d2", Kind.VECTOR),
    ]


@pytest.mark.parametrize("op", ["max", "min", "prod"])
def test_only_sums_run_in_runs(op: str) -> None:
    (func,) = lowered(lambda b, x: b.reduce(op, x, (0,)), (S, N))
    assert kinds(func) == [Kind.PARALLEL, Kind.VECTOR, Kind.SERIAL]


@pytest.mark.parametrize("rows, blocks", [(RUN, False), (RUN + 1, True)])
def test_one_run_is_a_plain_loop(rows: int, blocks: bool) -> None:
    (func,) = lowered(lambda b, x: b.reduce("sum", x, (0,)), (rows, N))
    assert kinds(func) == [Kind.PARALLEL, Kind.VECTOR, *[Kind.SERIAL] * (1 + blocks)]
    (func,) = lowered(lambda b, x: b.reduce("sum", x, (1,)), (S, ROW_RUN + blocks))
    assert kinds(func) == [Kind.PARALLEL, *[Kind.SERIAL] * blocks, Kind.VECTOR]


def test_a_run_goes_over_short_axes_together() -> None:
    """Of 5 elements for each channel, a run takes those of several images."""
    (func,) = lowered(lambda b, x: b.reduce("sum", x, (0, 2)), (B, S, 5))
    each = RUN // 3  # additions of 4 elements and of 1 element, after those of vectors
    assert loops(func) == [
        (Kind.PARALLEL, S),
        (Kind.SERIAL, ceildiv(B, each)),
        part_of(B, each, "_run_d0", Kind.SERIAL),
        (Kind.VECTOR, as_expr(5)),
    ]


def test_concat_is_cut_where_its_operands_meet() -> None:
    """Two nests, and no comparison in either."""
    (func,) = lowered(lambda b, x, y: b.concat([x, y], 1), (B, S), (B, N))
    assert loops(func) == [
        (Kind.PARALLEL, B),
        (Kind.VECTOR, S),
        (Kind.PARALLEL, B),
        (Kind.VECTOR, N),
    ]
    assert "Select" not in str(func.body)


@pytest.mark.parametrize("count", [1, 3])
def test_axes_of_one_element_are_no_loops(count: int) -> None:
    shape = (*(1,) * count, S, 1)
    (func,) = lowered(lambda b, x: b.unary("exp", x), shape)
    assert kinds(func) == [Kind.PARALLEL, Kind.VECTOR]


def test_no_loop_for_a_scalar() -> None:
    (func,) = lowered(lambda b, x: b.unary("exp", x), ())
    assert kinds(func) == []


def test_merge_keeps_kinds_apart() -> None:
    axes = [Axis("_d0", B), Axis("_d1", S, True), Axis("_d2", N, True)]
    merged, _ = merge(axes, [])
    assert [a.reduced for a in merged] == [False, True]
    assert merged[1].extent == S * N
