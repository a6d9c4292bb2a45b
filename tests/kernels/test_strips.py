"""Products by strips of rows: where they run, and that they mean the same."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from machines import TARGETS, machine, with_caches
from programs import interpretable

import pliant
from pliant.ir import interp_loops
from pliant.ir.build import Builder
from pliant.ir.graph import Constant, Module
from pliant.ir.interp import run_graph
from pliant.ir.types import DType, tensor
from pliant.kernels.tiles import gemm_tile
from pliant.machine.target import Target
from pliant.sym import sym

SHAPES = [
    *((0, 3, 5), (3, 0, 5), (3, 5, 0), (1, 1, 1), (1, 300, 2), (13, 33, 7)),
    *((40, 130, 3), (29, 97, 11), (2, 16, 1), (15, 64, 4)),
]
LARGE = [(1, 2049, 300), (17, 701, 211), (530, 97, 5), (16, 640, 512)]
SMALL = (16, 64, 1024)  # KiB of caches that little is too much for


@pytest.fixture(params=[name for name in TARGETS if machine(name).has("avx2")])
def target(request: pytest.FixtureRequest) -> Target:
    """Every target that has masks, which strips need."""
    return machine(request.param)


def kind_of(m: int, n: int, k: int, target: Target) -> str:
    """The kernels that a product goes by."""
    tile = gemm_tile(DType.F32, target)
    if n <= tile.lanes:
        return "narrow"
    whole = m <= tile.MR and n <= tile.NR  # not cut at all
    return "outer" if k == 1 and not whole else "strip"


def product(batch: bool = False, absolute: bool = False) -> Module:
    b = Builder()
    outer = (sym("b"),) if batch else ()
    x = b.param("x", tensor(DType.F32, *outer, sym("m"), sym("k")))
    y = b.param("y", tensor(DType.F32, *outer, sym("k"), sym("n")))
    result = b.matmul(x, y)
    if absolute:
        result = b.unary("abs", result)
    return Module({"main": b.finish("main", [result])})


def operands(*shapes: tuple[int, ...]) -> list[np.ndarray[Any, Any]]:
    source = np.random.default_rng(len(shapes[0]))
    return [source.standard_normal(shape).astype(np.float32) for shape in shapes]


def allowed(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    terms = 2 * (x.shape[-1] + 1) * 2.0**-24
    return terms * (np.abs(x).astype(np.float64) @ np.abs(y))


def called(
    model: pliant.CompiledModel,
    inputs: list[np.ndarray[Any, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[Counter[str], np.ndarray[Any, Any]]:
    """The kinds of functions that the interpreter meets, and the result."""
    counts: Counter[str] = Counter()
    inside = interp_loops._Run.call

    def noted(self: Any, name: str, sizes: Any, memories: Any) -> None:
        counts[name.partition("_")[0]] += 1
        inside(self, name, sizes, memories)

    monkeypatch.setattr(interp_loops._Run, "call", noted)
    (result,) = run_graph(interpretable(model), inputs, workers=2)
    monkeypatch.undo()
    return counts, result


def test_interpreted(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    model = pliant.compile(product(), threads=2, target=target)
    for m, n, k in SHAPES:
        x, y = operands((m, k), (k, n))
        counts, got = called(model, [x, y], monkeypatch)
        want = x.astype(np.float64) @ y
        assert (np.abs(got - want) <= allowed(x, y)).all(), (m, n, k)
        assert counts["gemm"] == 0, (m, n, k)
        assert counts[kind_of(m, n, k, target)] > 0 or 0 in (m, n), (m, n, k)


@pytest.mark.parametrize("threads", [1, 2])
def test_compiled(threads: int, target: Target) -> None:
    model = pliant.compile(product(), threads=threads, target=target)
    for m, n, k in (*SHAPES, *LARGE):
        x, y = operands((m, k), (k, n))
        want = x.astype(np.float64) @ y
        assert (np.abs(model(x, y) - want) <= allowed(x, y)).all(), (m, n, k)


@pytest.mark.parametrize("threads", [1, 2])
def test_batches(threads: int, target: Target) -> None:
    model = pliant.compile(product(batch=True), threads=threads, target=target)
    for b, m, n, k in ((3, 5, 37, 4), (2, 40, 300, 70), (0, 4, 4, 4), (7, 15, 16, 1)):
        x, y = operands((b, m, k), (b, k, n))
        want = x.astype(np.float64) @ y
        assert (np.abs(model(x, y) - want) <= allowed(x, y)).all(), (b, m, n, k)


def test_switched_off(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    options = pliant.Options(strips=False)
    model = pliant.compile(product(), threads=2, target=target, options=options)
    x, y = operands((13, 7), (7, 33))
    counts, got = called(model, [x, y], monkeypatch)
    assert counts["strip"] == counts["narrow"] == 0 < counts["gemm"]
    assert (np.abs(got - x.astype(np.float64) @ y) <= allowed(x, y)).all()


def test_not_before_an_epilogue(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = pliant.compile(product(absolute=True), threads=2, target=target)
    counts, _ = called(model, operands((13, 7), (7, 33)), monkeypatch)
    assert counts["strip"] == counts["narrow"] == 0 < counts["gemm"]


@pytest.mark.parametrize("threads", [1, 2])
def test_far_away(threads: int, target: Target) -> None:
    """A few rows of B at a time, and results added up."""
    small = with_caches(target, *SMALL)
    tile = gemm_tile(DType.F32, small)
    model = pliant.compile(product(), threads=threads, target=small)
    ((plan,),) = model.program.lowered.plans.values()
    # More than L2 holds; and so long a K that the number of passes is what is bounded.
    far = [(1, 401, 317), (tile.keeping, 500, 211), (tile.few, 301, 300)]
    for m, n, k in (*far, (2, 300, 4101), (1, 137, 4103)):
        assert n * k * tile.bytes > 2 * tile.near * threads
        cut = plan.at({"m": m, "n": n, "k": k}, threads)
        assert cut.strips and cut.passes > 1, (m, n, k)
        x, y = operands((m, k), (k, n))
        want = x.astype(np.float64) @ y
        assert (np.abs(model(x, y) - want) <= allowed(x, y)).all(), (m, n, k)


def test_a_column_times_a_number(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Becomes a row: lanes along M."""
    model = pliant.compile(product(), threads=2, target=target)
    for m in (15, 33, 300):
        x, y = operands((m, 1), (1, 1))
        counts, got = called(model, [x, y], monkeypatch)
        assert counts["outer"] == 1 and counts["strip"] == counts["narrow"] == 0
        np.testing.assert_array_equal(got, x * y)
        np.testing.assert_array_equal(model(x, y), x * y)


def test_one_step(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column times a row: row after row, in several threads if that is much."""
    model = pliant.compile(product(), threads=2, target=target)
    for m, n in ((15, 17), (1, 33), (61, 130), (300, 300), (23, 4096)):
        x, y = operands((m, 1), (1, n))
        counts, got = called(model, [x, y], monkeypatch)
        assert counts["outer"] > 0 == counts["strip"] + counts["narrow"], (m, n)
        np.testing.assert_array_equal(got, x * y)
        np.testing.assert_array_equal(model(x, y), x * y)
    ((plan,),) = model.program.lowered.plans.values()
    used = (plan.at({"m": m, "n": 300, "k": 1}, 2).threads for m in (100, 300))
    assert tuple(used) == (1, 2)


def test_a_short_column(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes by lanes along K from half a vector on."""
    model = pliant.compile(product(), threads=2, target=target)
    for m, k, dots in ((40, 12, True), (1465, 9, True), (40, 5, False)):
        x, y = operands((m, k), (k, 1))
        counts, got = called(model, [x, y], monkeypatch)
        assert (counts["dot"] > 0) is dots
        want = x.astype(np.float64) @ y
        for result in (got, model(x, y)):
            assert (np.abs(result - want) <= allowed(x, y)).all(), (m, k)


def constant(
    n: int, k: int, target: Target
) -> tuple[pliant.CompiledModel, np.ndarray[Any, Any]]:
    b = Builder()
    (weight,) = operands((k, n))
    held = b.constant(Constant("weight", tensor(DType.F32, k, n), weight))
    result = b.matmul(b.param("x", tensor(DType.F32, sym("m"), k)), held)
    module = Module({"main": b.finish("main", [result])}, constants=dict(b.constants))
    return pliant.compile(module, threads=2, target=target), weight


@pytest.mark.parametrize(
    ("vectors", "more", "k", "used"),
    [
        *((1, 0, 5, "narrow"), (1, -2, 401, "narrow"), (2, 1, 70, "strip")),
        *((5, 5, 3, "strip"), (18, 0, 12, "strip"), (25, 1, 300, "stream")),
    ],
)
def test_constants(
    vectors: int,
    more: int,
    k: int,
    used: str,
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tight rows, panels, and panels that come from memory."""
    target = with_caches(target, *SMALL)
    tile = gemm_tile(DType.F32, target)
    n = vectors * tile.lanes + more
    assert (n * k * tile.bytes > 2 * tile.near) is (used == "stream")
    model, weight = constant(n, k, target)
    for m in (0, 1, 4, 7, 13, 14, 15, 43):
        (x,) = operands((m, k))
        got = model(x)
        assert (np.abs(got - x.astype(np.float64) @ weight) <= allowed(x, weight)).all()
    (x,) = operands((tile.few, k))
    counts, got = called(model, [x], monkeypatch)
    assert counts[used] > 0 == counts["gemm"]
    assert (np.abs(got - x.astype(np.float64) @ weight) <= allowed(x, weight)).all()
