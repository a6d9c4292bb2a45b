"""What a product's plan packs and copies fits its buffers, whatever the caches are."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
from guarded import GuardedProgram, Side
from machines import TARGETS, machine, with_caches
from many_sizes import Array, evaluated

from pliant.ir.build import Builder
from pliant.ir.graph import Module
from pliant.ir.types import DType, tensor
from pliant.kernels.choose import FIELDS, Choice, choose
from pliant.kernels.tiles import gemm_tile
from pliant.machine.target import avx2, avx512, baseline, neon
from pliant.sym import as_expr, sym

ROWS = [1, 7, 13, 15, 24, 29, 60, 127, 130, 169, 513, 1025, 3000]
COLUMNS = [1, 8, 17, 33, 130, 300, 1000, 4100]
STEPS = [1, 40, 129, 257, 520, 1030, 4101, 9000]
KIBIBYTES = [16, 64, 128, 512, 2048, 16384]


def sizes() -> dict[str, Array]:
    grid = np.meshgrid(ROWS, COLUMNS, STEPS, [1, 2, 16], indexing="ij")
    names = ("m", "n", "k", "threads")
    return dict(zip(names, (axis.ravel() for axis in grid), strict=True))


def choices() -> Iterator[Choice]:
    for constant, adjacent, steps, computed, alone in product((False, True), repeat=5):
        if not (constant and not adjacent) and not (steps and computed):
            rows = {"rows_in_k": False, "packs_rows": False}
            copied = {"steps": steps, "computed": computed}
            yield Choice(constant, adjacent, **rows, **copied, alone=alone)


@pytest.mark.parametrize("made", [avx512, avx2, baseline, neon])
@pytest.mark.parametrize("dtype", [DType.F32, DType.F64])
def test_plans_fit_their_buffers(made: Any, dtype: DType) -> None:
    m, n, k = (sym(name) for name in "mnk")
    for second, what in product(KIBIBYTES, choices()):
        tile = gemm_tile(dtype, with_caches(made(), 32, second, 32 << 10))
        plan = choose(m, n, k, as_expr(1), tile, what)
        known = sizes()
        for name, value in plan.lets:
            known[name] = evaluated(value, known)
        cut = {name: evaluated(getattr(plan, name), known) for name in FIELDS}
        deepest = np.minimum(known["k"], tile.depth)
        panels = -(-known["n"] // tile.NR)
        cells = np.minimum(panels * deepest, tile.cells)
        copied = np.minimum(cut["rows"], cut["swath"] * tile.MR)
        kept = (cut["passes"] > 1) * (0 if what.alone else 1)
        about = f"{what}, L2 of {second} KiB"
        assert (cut["packed"] * cut["panels"] * cut["depth"] <= cells).all(), about
        assert (cut["copied"] * cut["depth"] <= deepest).all(), about
        assert (cut["copied"] * copied <= tile.deep_rows).all(), about
        assert (kept * cut["rows"] <= tile.deep_rows).all(), about


@pytest.mark.parametrize("target", TARGETS)
def test_small_caches(target: str) -> None:
    """More steps of K than a cache of 16 KiB holds of one panel."""
    b = Builder()
    x = b.param("x", tensor(DType.F32, sym("m"), sym("k")))
    y = b.param("y", tensor(DType.F32, sym("n"), sym("k")))
    result = b.matmul(x, b.transpose(y, (1, 0)))
    module = Module({"main": b.finish("main", [result])})
    program = GuardedProgram(module, with_caches(machine(target), 8, 16, 64))
    source = np.random.default_rng(0)
    for m, n, k in ((29, 33, 1030), (60, 17, 4101), (200, 40, 300)):
        left = source.standard_normal((m, k)).astype(np.float32)
        right = source.standard_normal((n, k)).astype(np.float32)
        exact = left.astype(np.float64) @ right.T
        most = 2.0**-23 * (k + 1) * (np.abs(left).astype(np.float64) @ np.abs(right).T)
        for side in Side:
            (got,) = program([left, right], side)
            assert (np.abs(got - exact) <= most).all(), (m, n, k)
