"""A product's micro-kernel: its registers in the assembly, and its results."""

from __future__ import annotations

import re

import numpy as np
import pytest
from compiled_loops import (
    F32,
    TARGETS,
    compiled,
    i,
    j,
    k,
    n,
    run,
    serial,
    unroll,
    vector,
)

from pliant.ir.loops import (
    Alloc,
    Block,
    Const,
    Fma,
    Load,
    LoopFunc,
    Role,
    Stmt,
    Store,
    buffer,
)
from pliant.kernels.tiles import gemm_tile
from pliant.machine.target import Target
from pliant.sym import Expr, sym


def gemm(rows: int, columns: int, edges: bool = False, packed: bool = True) -> LoopFunc:
    """C = A @ B for A (rows, K), packed as (K, rows) or not, and B (K, columns)."""
    depth, width = sym("K"), sym("ldc")
    strides = (1, rows) if packed else (depth, 1)
    a = buffer("a", F32, (rows, depth), Role.IN, strides=strides)
    b = buffer("b", F32, (depth, columns), Role.IN)
    c = buffer("c", F32, (rows, columns), Role.OUT, strides=(width, 1))
    acc = buffer("acc", F32, (rows, columns), Role.REGISTER)

    def tile(body: Stmt, end: Expr | int = columns) -> Stmt:
        return unroll("i", rows, vector("j", end, body))

    product = Fma(Load(a, (i, k)), Load(b, (k, j)), Load(acc, (i, j)))
    out = tile(Store(c, (i, j), Load(acc, (i, j))), n if edges else columns)
    body = Block(
        (
            Alloc(acc),
            tile(Store(acc, (i, j), Const(0.0, F32))),
            serial("k", depth, tile(Store(acc, (i, j), product))),
            out,
        )
    )
    name = f"gemm_{rows}x{columns}"
    return LoopFunc(name, ("K", "ldc", "n"), (a, b, c), body)


TILES = [(to, gemm_tile(F32, to)) for to in TARGETS]
MICRO = [(to, tile.MR, tile.NR) for to, tile in TILES]


def inner_loop(assembly: str) -> list[str]:
    """The instructions of the loop with the most multiplications."""
    best: list[str] = []
    lines = [line.strip() for line in assembly.splitlines()]
    for number, line in enumerate(lines):
        jump = re.match(r"j\w+\s+(\.LBB\w+)$", line)
        if jump and f"{jump[1]}:" in lines[:number]:
            body = lines[lines.index(f"{jump[1]}:") : number]
            if sum("mul" in x or "fmadd" in x for x in body) > sum(
                "mul" in x or "fmadd" in x for x in best
            ):
                best = body
    return best


@pytest.mark.parametrize(
    ("to", "rows", "columns"),
    MICRO,
    ids=lambda v: str(v.name if isinstance(v, Target) else v),
)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "rows"])
def test_micro_kernel_stays_in_registers(
    to: Target, rows: int, columns: int, packed: bool
) -> None:
    code = compiled([gemm(rows, columns, packed=packed)], to)
    loop = inner_loop(code.assembly())
    if to.fma:
        multiplies = [line for line in loop if line.startswith("vfmadd")]
        assert len(multiplies) == rows * columns // to.lanes
        moves = [line for line in loop if line.startswith("v") and "fmadd" not in line]
        assert len(moves) <= rows + columns // to.lanes
    assert not any("rsp" in line for line in loop), "\n".join(loop)


@pytest.mark.parametrize("edges", [False, True])
def test_micro_kernel_computes(edges: bool) -> None:
    for to, rows, columns in MICRO:
        code = compiled([gemm(rows, columns, edges)], to)
        rng = np.random.default_rng(1)
        for depth, cut in ((0, 1), (1, columns), (37, columns - 1), (256, 0)):
            width = columns + 3
            a = rng.standard_normal((depth, rows)).astype(np.float32)
            b = rng.standard_normal((depth, columns)).astype(np.float32)
            c = np.full((rows, width), 5, np.float32)
            run(code, f"gemm_{rows}x{columns}", (depth, width, cut), [a, b, c])
            kept = cut if edges else columns
            wanted = np.full((rows, width), 5, np.float32)
            wanted[:, :kept] = (a.T @ b)[:, :kept]
            np.testing.assert_allclose(c, wanted, 1e-4, 1e-4)
