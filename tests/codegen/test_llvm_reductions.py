"""Accumulators of the loop IR, compiled, against the interpreter."""

from __future__ import annotations

import numpy as np
import pytest
from compiled_loops import (
    F32,
    F64,
    I32,
    I64,
    SIZES,
    TARGETS,
    ZERO,
    agree,
    compiled,
    i,
    j,
    m,
    n,
    parallel,
    run,
    serial,
    vector,
)

from pliant.ir.loops import (
    Accumulate,
    Accumulator,
    Binary,
    Block,
    Const,
    If,
    Load,
    Local,
    LoopFunc,
    Read,
    Role,
    Store,
    Unary,
    buffer,
)
from pliant.ir.types import DType
from pliant.sym import as_expr


@pytest.mark.parametrize("op", ["sum", "prod", "max", "min"])
@pytest.mark.parametrize("dtype", [F32, F64, I32, I64, DType.U8], ids=str)
def test_reduce_rows(op: str, dtype: DType) -> None:
    x = buffer("x", dtype, (m, n), Role.IN)
    y = buffer("y", dtype, (m,), Role.OUT)
    body = Block(
        (
            Accumulator("a", dtype, op),
            vector("j", n, Accumulate("a", Load(x, (i, j)))),
            Store(y, (i,), Read("a", dtype)),
        )
    )
    func = LoopFunc(f"rows_{op}", ("m", "n"), (x, y), serial("i", m, body))
    shapes = [(3, size) for size in SIZES] + [(2, 517)]
    agree(func, sizes=shapes, tolerance=2e-5)


def test_max_keeps_nan() -> None:
    x, y = buffer("x", F32, (n,), Role.IN), buffer("y", F32, (1,), Role.OUT)
    body = Block(
        (
            Accumulator("a", F32, "max"),
            vector("i", n, Accumulate("a", Load(x, (i,)))),
            Store(y, (ZERO,), Read("a", F32)),
        )
    )
    func = LoopFunc("nan_max", ("n",), (x, y), body)
    for to in TARGETS:
        code = compiled([func], to)
        for at in (0, 5, 63, 64, 65, 70):
            data = np.arange(71, dtype=np.float32)
            data[at] = np.nan
            out = np.zeros(1, np.float32)
            run(code, "nan_max", (71,), [data, out])
            assert np.isnan(out[0]), (to.name, at)


def test_reduce_columns() -> None:
    """Lanes over the kept axis, serial over the reduced one."""
    x, y = buffer("x", F32, (m, n), Role.IN), buffer("y", F32, (n,), Role.OUT)
    body = Block(
        (
            Accumulator("a", F32, "sum"),
            serial("i", m, Accumulate("a", Load(x, (i, j)))),
            Local("mean", F32, Binary("mul", Read("a", F32), Const(0.5, F32))),
            Store(y, (j,), Read("mean", F32)),
        )
    )
    func = LoopFunc("columns", ("m", "n"), (x, y), vector("j", n, body))
    agree(func, sizes=[(m_, n_) for n_ in SIZES for m_ in (0, 5)], tolerance=1e-5)


def test_accumulate_over_blocks() -> None:
    """One accumulator over a vector loop inside a serial one, and masked by an If."""
    x, y = buffer("x", F32, (m, n), Role.IN), buffer("y", F32, (2,), Role.OUT)
    value = Load(x, (i, j))
    body = Block(
        (
            Accumulator("a", F32, "sum"),
            Accumulator("p", F32, "sum"),
            serial(
                "i",
                m,
                vector(
                    "j",
                    n,
                    Block(
                        (
                            Accumulate("a", value),
                            If(
                                Binary("gt", value, Const(0.0, F32)),
                                Accumulate("p", value),
                            ),
                        )
                    ),
                ),
            ),
            Store(y, (ZERO,), Read("a", F32)),
            Store(y, (as_expr(1),), Read("p", F32)),
        )
    )
    func = LoopFunc("blocks", ("m", "n"), (x, y), body)
    agree(func, sizes=[(3, size) for size in SIZES], tolerance=2e-5)


def test_reduce_constant_extent() -> None:
    """Trip counts known at compile time, whole and broken vectors."""
    for extent in (1, 2, 3, 5, 16, 24, 31, 64, 150):
        x, y = buffer("x", F32, (extent,), Role.IN), buffer("y", F32, (1,), Role.OUT)
        body = Block(
            (
                Accumulator("a", F32, "max"),
                vector("i", extent, Accumulate("a", Load(x, (i,)))),
                Store(y, (ZERO,), Read("a", F32)),
            )
        )
        agree(LoopFunc(f"constant_{extent}", (), (x, y), body), sizes=[()])


def softmax() -> LoopFunc:
    x, y = buffer("x", F32, (m, n), Role.IN), buffer("y", F32, (m, n), Role.OUT)
    shifted = Unary("exp", Binary("sub", Load(x, (i, j)), Read("top", F32)))
    body = Block(
        (
            Accumulator("top", F32, "max"),
            vector("j", n, Accumulate("top", Load(x, (i, j)))),
            Accumulator("total", F32, "sum"),
            vector(
                "j",
                n,
                Block(
                    (
                        Local("e", F32, shifted),
                        Store(y, (i, j), Read("e", F32)),
                        Accumulate("total", Read("e", F32)),
                    )
                ),
            ),
            Local("scale", F32, Binary("div", Const(1.0, F32), Read("total", F32))),
            vector(
                "j",
                n,
                Store(y, (i, j), Binary("mul", Load(y, (i, j)), Read("scale", F32))),
            ),
        )
    )
    return LoopFunc("softmax", ("m", "n"), (x, y), parallel("i", m, body))


@pytest.mark.parametrize("threads", [1, 3])
def test_softmax_in_parallel(threads: int) -> None:
    shapes = [(7, size) for size in SIZES] + [(0, 5)]
    agree(softmax(), sizes=shapes, threads=threads, tolerance=1e-6)


def test_same_bits_every_time() -> None:
    x = np.random.default_rng(3).standard_normal((6, 1001)).astype(np.float32)
    outs = []
    for threads in (1, 1, 3):
        y = np.zeros_like(x)
        run(compiled([softmax()], TARGETS[0]), "softmax", x.shape, [x, y], threads)
        outs.append(y)
    np.testing.assert_array_equal(outs[0], outs[1])
    np.testing.assert_array_equal(outs[0], outs[2])
