"""Indices, strides and predicated loads, compiled, against the interpreter."""

from __future__ import annotations

import numpy as np
import pytest
from compiled_loops import (
    F32,
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
    run,
    serial,
    vector,
)

from pliant.ir.loops import (
    Binary,
    Block,
    Cast,
    Check,
    Const,
    For,
    Index,
    Kind,
    Let,
    Load,
    LoopFunc,
    LoopValue,
    Role,
    Select,
    Store,
    buffer,
)
from pliant.ir.types import DType
from pliant.sym import Expr, as_expr, ceildiv, maximum, minimum, sym

INDICES = {
    "pairs": (i * 2 + 1, 0),
    "strided": (i * 3, 0),
    "fours": (i * 4 + 3, 0),
    "row_of_other": (i * m, 0),
    "reversed": (n - 1 - i, 0),
    "divided": (i // 3, 0),
    "divided_by_size": (i // maximum(m, 1), 0),
    "rest": (i % 5, 0),
    "rest_of_size": (i % (m + 1), 0),
    "power_of_two": (i // 4 + i % 8, 0),
    "clamped": (minimum(i, m), 0),
    "below": (maximum(i - 3, 0), 0),
    "ceiling": (ceildiv(i, 3), 0),
    "negative": ((i - 20) // 3 + 7, 0),
    "negative_rest": ((i - 20) % 7, 0),
    "square": (i * i, 0),
    "uniform": (m, 0),
    "mixed": (i // 2 * m + i % 2, 0),
}


@pytest.mark.parametrize("name", list(INDICES))
@pytest.mark.parametrize("dtype", [F32, DType.I8], ids=str)
def test_addresses(name: str, dtype: DType) -> None:
    at = INDICES[name][0]
    x = buffer("x", dtype, ((n + 8) * (n + m + 30),), Role.IN)
    y = buffer("y", dtype, (n,), Role.OUT)
    z = buffer("z", I64, (n,), Role.OUT)
    body = Block((Store(y, (i,), Load(x, (at,))), Store(z, (i,), Index(at))))
    func = LoopFunc(name, ("n", "m"), (x, y, z), vector("i", n, body))
    agree(func, sizes=[(s, 6) for s in SIZES])


def test_scatter() -> None:
    x, y = buffer("x", F32, (n,), Role.IN), buffer("y", F32, (n, 3), Role.OUT)
    body = Store(y, (n - 1 - i, as_expr(1)), Load(x, (i,)))
    agree(LoopFunc("scatter", ("n",), (x, y), vector("i", n, body)))


def test_transposing_store() -> None:
    x, y = buffer("x", F32, (m, n), Role.IN), buffer("y", F32, (n, m), Role.OUT)
    body = serial("i", m, vector("j", n, Store(y, (j, i), Load(x, (i, j)))))
    agree(LoopFunc("turn", ("m", "n"), (x, y), body), sizes=[(5, s) for s in SIZES])


def test_begin_and_step() -> None:
    x, y = buffer("x", F32, (n + 40,), Role.IN), buffer("y", F32, (n + 40,), Role.OUT)
    store = Store(y, (i,), Load(x, (i,)))
    for step in (1, 3):
        for kind in (Kind.SERIAL, Kind.VECTOR, Kind.PARALLEL):
            loop = For("i", m, n, store, kind, step)
            func = LoopFunc(f"step{step}_{kind.value}", ("n", "m"), (x, y), loop)
            agree(func, sizes=[(s, 5) for s in SIZES])
            fixed = For("i", as_expr(2), as_expr(19), store, kind, step)
            agree(LoopFunc("fixed", ("n",), (x, y), fixed), sizes=[9])


def test_let_gathers_with_check() -> None:
    """An embedding: row numbers from memory, clamped, out-of-range ones reported."""
    row, safe = sym("row"), sym("safe")
    ids = buffer("ids", I32, (m,), Role.IN)
    table = buffer("table", F32, (10, n), Role.IN)
    y = buffer("y", F32, (m, n), Role.OUT)
    flat = buffer("flat", F32, (m,), Role.OUT)
    clamped = minimum(maximum(row, 0), 9)
    body = Block(
        (
            serial(
                "i",
                m,
                Block(
                    (
                        Let("row", Cast(Load(ids, (i,)), I64)),
                        Let("safe", Index(clamped)),
                        vector("j", n, Store(y, (i, j), Load(table, (safe, j)))),
                    )
                ),
            ),
            vector(
                "i",
                m,
                Block(
                    (
                        Let("row", Cast(Load(ids, (i,)), I64)),
                        Check(Binary("lt", Index(row), Const(10, I64)), 41),
                        Store(flat, (i,), Load(table, (clamped, n // 2))),
                    )
                ),
            ),
        )
    )
    func = LoopFunc("embed", ("m", "n"), (ids, table, y, flat), body)
    for top in (10, 11):
        agree(
            func,
            sizes=[(s, 5) for s in SIZES if s],
            inputs={
                0: lambda sizes, rng, top=top: np.append(
                    rng.integers(0, 10, sizes["m"] - 1), top - 1
                )
            },
        )


def test_predicated_loads() -> None:
    """Padding: nothing is read outside, neither by lanes nor by all of them."""
    x = buffer("x", F32, (m, n), Role.IN)
    y = buffer("y", F32, (m + 2, n + 4), Role.OUT)
    r, c = sym("r"), sym("c")

    def inside(at: Expr, end: Expr) -> LoopValue:
        return Binary(
            "logical_and",
            Binary("ge", Index(at), Const(0, I64)),
            Binary("lt", Index(at), Index(end)),
        )

    both = Binary("logical_and", inside(r - 1, m), inside(c - 3, n))
    padded = Select(both, Load(x, (r - 1, c - 3), both), Const(9.0, F32))
    body = serial("r", m + 2, vector("c", n + 4, Store(y, (r, c), padded)))
    agree(LoopFunc("pad", ("m", "n"), (x, y), body), sizes=[(2, s) for s in SIZES])
    column = Load(x, (r - 1, ZERO), both)
    body = serial("r", m + 2, vector("c", n + 4, Store(y, (r, c), column)))
    agree(LoopFunc("column", ("m", "n"), (x, y), body), sizes=[(2, s) for s in SIZES])
    row = Load(x, (ZERO, c), inside(c, n))
    body = serial("r", m + 2, serial("c", n + 4, Store(y, (r, c), row)))
    agree(LoopFunc("row", ("m", "n"), (x, y), body), sizes=[(2, s) for s in SIZES if s])


def random_dim(rng: np.random.Generator, depth: int) -> Expr:
    if depth == 0:
        return [i, n, m, as_expr(int(rng.integers(-3, 9)))][rng.integers(0, 4)]
    left, right = random_dim(rng, depth - 1), random_dim(rng, depth - 1)
    size = [as_expr(int(rng.choice([1, 2, 3, 5, 8, 16]))), n + 1, m + 2][
        rng.integers(0, 3)
    ]
    makers = [
        lambda: left + right,
        lambda: left - right,
        lambda: left * right,
        lambda: left // size,
        lambda: left % size,
        lambda: ceildiv(left, size),
        lambda: minimum(left, right),
        lambda: maximum(left, right),
    ]
    return makers[rng.integers(0, len(makers))]()


@pytest.mark.parametrize(
    "kind", [Kind.VECTOR, Kind.SERIAL], ids=lambda kind: kind.value
)
def test_random_dims(kind: Kind) -> None:
    rng = np.random.default_rng(17)
    dims = [random_dim(rng, int(rng.integers(1, 4))) for _ in range(60)]
    out = buffer("out", I64, (len(dims), n), Role.OUT)
    stores = tuple(
        Store(out, (as_expr(row), i), Index(dim)) for row, dim in enumerate(dims)
    )
    loop = For("i", ZERO, n, Block(stores), kind)
    func = LoopFunc("dims", ("n", "m"), (out,), loop)
    for to in TARGETS:
        code = compiled([func], to)
        for size, other in ((1, 0), (5, 3), (19, 7)):
            got = np.zeros((len(dims), size), np.int64)
            run(code, "dims", (size, other), [got])
            for row, dim in enumerate(dims):
                wanted = [
                    dim.evaluate({"n": size, "m": other, "i": at}) for at in range(size)
                ]
                assert got[row].tolist() == wanted, (to.name, str(dim))
