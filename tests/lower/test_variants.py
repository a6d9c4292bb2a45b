"""Kernel variants: each is reached, by the sizes it is for and by no others.

To prove that machine code took a variant, a model is compiled in which that variant
stores a mark instead of its results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pliant
from pliant.context import Context
from pliant.ir.build import Builder
from pliant.ir.graph import Module, Value
from pliant.ir.interp import run_graph
from pliant.ir.loop_walk import statements
from pliant.ir.loops import (
    Block,
    Const,
    Dispatch,
    For,
    LoopFunc,
    Role,
    Stmt,
    Store,
    Variant,
)
from pliant.ir.spec import Stage, verify
from pliant.ir.types import DType, tensor
from pliant.lower import to_loops
from pliant.lower.lower import lower
from pliant.machine.target import avx2, avx512
from pliant.options import Options
from pliant.passes.fuse import fuse
from pliant.sym import Expr, maximum, minimum, sym

MARK = 42
R, C = sym("r"), sym("c")


class Apply(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: Tensor) -> Any:
        return self.function(*given)


def marked(stmt: Stmt) -> Stmt:
    """The statement, with a mark for every result."""
    match stmt:
        case Block(body):
            return Block(tuple(map(marked, body)))
        case For(var, begin, end, body, kind, step, grain):
            return For(var, begin, end, marked(body), kind, step, grain)
        case Dispatch(variants):
            inner = (Variant(v.name, v.guards, marked(v.body)) for v in variants)
            return Dispatch(tuple(inner))
        case Store(buffer, index, _) if buffer.role is Role.OUT:
            return Store(buffer, index, Const(MARK, buffer.dtype))
        case _:
            return stmt


def mark(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def make(called: str, guards: Any, body: Stmt) -> Variant:
        return Variant(called, guards, marked(body) if called == name else body)

    monkeypatch.setattr(to_loops, "Variant", make)


def softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


def norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


@dataclass(frozen=True, slots=True)
class Case:
    """Shapes that take a variant, and shapes that do not."""

    variant: str
    function: Callable[..., Tensor]
    dims: tuple[dict[int, str], ...]
    inside: tuple[tuple[tuple[int, ...], ...], ...]
    outside: tuple[tuple[tuple[int, ...], ...], ...]


ROWS = ({0: "r", 1: "c"},)
LONG = 150_001
CASES = {
    "softmax of short rows": Case(
        "short rows",
        softmax,
        ROWS,
        (((3, 1),), ((7, 2),), ((1, 7),), ((300, 8),)),
        (((3, 65),), ((2, 1000),), ((1, LONG),)),
    ),
    "norm of short rows": Case(
        "short rows",
        norm,
        ROWS,
        (((3, 2),), ((7, 5),), ((64, 8),)),
        (((3, 66),), ((2, 1000),)),
    ),
    "softmax of a long row": Case(
        "split rows",
        softmax,
        ROWS,
        (((1, LONG),),),
        (((2, LONG),), ((1, 1000),), ((1, 3),)),
    ),
    "sum of everything": Case(
        "split rows",
        lambda x: x.sum(),
        ROWS,
        (((331, 1009),), ((1, 1_000_000),)),
        (((5, 7),), ((1, 1),), ((0, 3),)),
    ),
    "argmax of everything": Case(
        "split rows",
        lambda x: x.argmax(),
        ROWS,
        (((331, 1009),),),
        (((5, 7),), ((1, 1),)),
    ),
    "whole vectors": Case(
        "whole vectors",
        lambda x, y: x + y,
        ({0: "r", 1: "c"}, {0: "c"}),
        (((3, 16), (16,)), ((5, 64), (64,)), ((1, 128), (128,))),
        (((3, 7), (7,)), ((3, 17), (17,)), ((5, 101), (101,))),
    ),
    "dense": Case(
        "dense",
        lambda x: x.transpose(1, 2) * 2,
        ({0: "b", 1: "s", 2: "n"},),
        (((3, 5, 1),), ((2, 100, 1),)),
        (((3, 1, 5),), ((3, 5, 7),), ((2, 33, 65),)),
    ),
}


def inputs(shapes: tuple[tuple[int, ...], ...]) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(shape) for shape in shapes)


def compiled(case: Case, threads: int = 2, **options: Any) -> pliant.CompiledModel:
    example = tuple(torch.randn(*(3 + k for k in d)) for d in case.dims)
    if len(case.dims) == 2:
        example = (torch.randn(3, 4), torch.randn(4))
    return pliant.compile(
        Apply(case.function),
        example,
        (case.dims,),
        threads=threads,
        options=Options(**options),
    )


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5 * want.numel() ** 0.5)


@pytest.mark.parametrize("name", CASES)
def test_variant_is_taken_where_it_should_be(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    with monkeypatch.context() as patch:
        mark(patch, case.variant)
        model = compiled(case)
    for shapes in case.inside:
        got = model(*inputs(shapes))
        assert (got == MARK).all(), f"{shapes} did not take {case.variant!r}"
    for shapes in case.outside:
        given = inputs(shapes)
        close(model(*given), case.function(*given))


@pytest.mark.parametrize("name", CASES)
def test_results(name: str) -> None:
    case = CASES[name]
    for threads in (1, 2, 3):
        model = compiled(case, threads)
        for shapes in (*case.inside, *case.outside):
            given = inputs(shapes)
            close(model(*given), case.function(*given))


@pytest.mark.parametrize("name", CASES)
def test_switched_off(name: str) -> None:
    case = CASES[name]
    model = compiled(case, variants=False)
    assert "guards hold" not in model.explain()
    for shapes in (*case.inside, *case.outside):
        given = inputs(shapes)
        close(model(*given), case.function(*given))


def test_explained() -> None:
    text = compiled(CASES["softmax of a long row"]).explain()
    assert "split rows" in text and "2*r <= threads" in text
    assert "any" in text and "otherwise" in text


def test_same_bits_for_a_thread_count() -> None:
    x = inputs(((1, LONG),))
    for name in ("softmax of a long row", "sum of everything"):
        for threads in (1, 2, 3):
            model = compiled(CASES[name], threads)
            first = model(*x)
            assert all(torch.equal(model(*x), first) for _ in range(20))
            again = compiled(CASES[name], threads)
            assert torch.equal(again(*x), first)


def test_split_reductions_keep_nan() -> None:
    x = torch.randn(1, LONG)
    x[0, LONG - 3] = torch.nan
    model = pliant.compile(
        Apply(lambda x: (x.amax(), x.amin(), x.argmax(), x.sum())),
        (torch.randn(3, 4),),
        (ROWS,),
        threads=2,
    )
    top, low, where, total = model(x)
    assert top.isnan() and low.isnan() and total.isnan()
    assert where.item() == LONG - 3


def test_kernels_at_two_resolutions_share_their_variants() -> None:
    """Guards are sizes as well: norms of groups of channels are one function."""

    def norm(x: Tensor) -> Tensor:
        variance = x.var((1, 3), keepdim=True, correction=0)
        return (x - x.mean((1, 3), keepdim=True)) / (variance + 1e-5).sqrt()

    model = pliant.compile(
        Apply(lambda x, y: (norm(x), norm(y))),
        (torch.randn(3, 5, 2, 4), torch.randn(4, 6, 2, 4)),
        ({0: "n", 1: "w"}, {0: "m", 1: "v"}),
        threads=2,
    )
    rows = [
        func
        for func in model.program.lowered.loops.values()
        if any(isinstance(stmt, Dispatch) for stmt in statements(func.body))
    ]
    assert len(rows) == 1
    # `explain` has the guards of both, in the model's sizes.
    text = model.explain()
    text = text[text.index("\nvariants") : text.index("\nmemory")]
    assert "*w" in text and "*v" in text and "_size" not in text
    sizes = ((1, 1), (1, LONG), (2, 16), (0, 3), (5, 31), (1, 70001))
    for (n, w), (m, v) in zip(sizes, sizes[::-1], strict=True):
        given = torch.randn(n, w, 2, 4), torch.randn(m, v, 2, 4)
        for got, x in zip(model(*given), given, strict=True):
            close(got, norm(x))


# ---- the interpreter


def lowered(
    build: Callable[..., Value], *shapes: tuple[Expr | int, ...], wide: bool = True
) -> Module:
    b = Builder()
    params = [b.param(f"x{k}", tensor(DType.F32, *s)) for k, s in enumerate(shapes)]
    graph = b.finish("main", [build(b, *params)])
    cx = Context(Options(), avx512() if wide else avx2())
    module = lower(Module({"main": fuse(graph, cx)}, constants=b.constants), cx)
    verify(module, Stage.LOWERED)
    return module


def only(module: Module, name: str) -> Module:
    """The module with one variant for all sizes."""
    loops = dict(module.loops)
    for key, func in loops.items():
        for stmt in statements(func.body):
            if isinstance(stmt, Dispatch):
                (body,) = (v.body for v in stmt.variants if v.name == name)
                loops[key] = LoopFunc(func.name, func.sizes, func.buffers, body)
                break
    return module.replace(loops=loops)


def names(module: Module) -> list[str]:
    (func,) = module.loops.values()
    found = [s for s in statements(func.body) if isinstance(s, Dispatch)]
    return [v.name for s in found for v in s.variants]


def built_softmax(b: Builder, x: Value) -> Value:
    top = b.reduce("max", x, (1,), keepdims=True)
    e = b.unary("exp", b.binary("sub", x, top))
    return b.binary("div", e, b.reduce("sum", e, (1,), keepdims=True))


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("columns", [1, 2, 5, 7, 13, 16])
def test_every_variant_means_the_same(columns: int, wide: bool) -> None:
    module = lowered(built_softmax, (R, C), wide=wide)
    assert names(module) == ["split rows", "short rows", "any"]
    x = np.random.default_rng(0).standard_normal((3, columns)).astype(np.float32)
    want = torch.from_numpy(x).softmax(-1).numpy()
    for name in names(module):
        for workers in (1, 2, 3):
            (got,) = run_graph(
                only(module, name), [x], workers=workers, check_races=True
            )
            np.testing.assert_allclose(got, want, rtol=1e-6)


def test_what_is_proved_is_not_asked() -> None:
    def rows(b: Builder, x: Value) -> Value:
        return b.reduce("sum", x, (1,))

    assert names(lowered(rows, (R, 8))) == []
    assert names(lowered(rows, (R, 768))) == []
    assert names(lowered(rows, (R, C))) == ["split rows", "short rows", "any"]
    assert names(lowered(lambda b, x: b.unary("exp", x), (R, C))) == []


# ---- dims that may be 1


def stretched_sum() -> Module:
    b = Builder()
    x = b.param("x", tensor(DType.F32, sym("a"), sym("n")))
    y = b.param("y", tensor(DType.F32, sym("b"), sym("n")))
    rows = minimum(maximum(sym("a"), sym("b")), sym("a") * sym("b"))
    shape = (rows, sym("n"))
    total = b.binary("add", b.stretch_to(x, shape), b.stretch_to(y, shape))
    return Module({"main": b.finish("main", [total])})


STRETCHED = {
    "no broadcast": (((3, 5), (3, 5)), ((1, 5), (1, 5)), ((40, 33), (40, 33))),
    "a is 1": (((1, 5), (3, 5)), ((1, 7), (0, 7)), ((1, 33), (40, 33))),
    "b is 1": (((3, 5), (1, 5)), ((0, 7), (1, 7)), ((40, 33), (1, 33))),
}


@pytest.mark.parametrize("name", STRETCHED)
def test_broadcasts_decided_at_the_call(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = pliant.compile(stretched_sum(), threads=2)
    general = pliant.compile(
        stretched_sum(), threads=2, options=Options(variants=False)
    )
    with monkeypatch.context() as patch:
        mark(patch, name)
        poisoned = pliant.compile(stretched_sum(), threads=2)
    assert name in plain.explain()
    for other, pairs in STRETCHED.items():
        for shapes in pairs:
            x, y = inputs(shapes)
            for model in (plain, general):
                assert torch.equal(model(x, y), x + y)
            if other == name and x.numel() and y.numel():
                assert (poisoned(x, y) == MARK).all()
            elif other != name:
                assert torch.equal(poisoned(x, y), x + y)


def test_operands_that_do_not_fit_are_refused() -> None:
    model = pliant.compile(stretched_sum())
    for shapes in (((2, 5), (3, 5)), ((0, 5), (3, 5))):
        with pytest.raises(pliant.ShapeError):
            model(*inputs(shapes))


@pytest.mark.parametrize("shapes", [p for pairs in STRETCHED.values() for p in pairs])
def test_stretched_in_the_interpreter(shapes: tuple[tuple[int, ...], ...]) -> None:
    module = stretched_sum()
    cx = Context(Options(), avx512())
    fused = module.with_main(fuse(module.main, cx))
    x, y = (t.numpy() for t in inputs(shapes))
    for stage in (module, fused, lower(fused, cx)):
        (got,) = run_graph(stage, [x, y], workers=2, check_races=True)
        np.testing.assert_array_equal(got, x + y)
