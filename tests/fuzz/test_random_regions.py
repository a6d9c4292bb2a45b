"""Random nested regions with sizes of data: two interpreters and machine code agree.

The graph is interpreted as it is, and once more after every stage, as loop functions on
bytes. Numbers are whole, so results are equal to the last bit.
"""

from __future__ import annotations

import numpy as np
import pytest
from machines import machine
from regions import inputs, made

import pliant
from pliant.context import Context
from pliant.ir.interp import run_graph
from pliant.ir.parse import parse_module
from pliant.ir.spec import Stage, verify
from pliant.ir.text import print_module
from pliant.options import Options
from pliant.passes.bind import results_of
from pliant.pipeline import run_stages

SIZES = ((0, 0), (1, 1), (0, 3), (2, 1), (5, 3), (13, 2))
REGULAR = range(10)
SWEEP = range(1000, 1200)


def check(seed: int) -> None:
    module = made(seed)
    verify(module, Stage.IMPORTED)
    cx = Context(Options(), machine())
    bound = run_stages(module, cx, "bind")
    verify(bound, Stage.IMPORTED)
    results = results_of(module.main, bound.main)
    lowered = run_stages(bound, cx, "unify")
    verify(lowered, Stage.LOWERED)
    text = print_module(lowered)
    assert print_module(parse_module(text)) == text
    model = pliant.compile(module, threads=2)
    for n, m in SIZES:
        given = inputs(seed, n, m)
        want = run_graph(module, given)
        found = run_graph(lowered, given, workers=2)
        oracle = results.cut(found, {"n": n, "m": m})
        got = model(*given)
        native = list(got) if isinstance(got, tuple | list) else [got]
        for a, b, c in zip(native, oracle, want, strict=True):
            np.testing.assert_array_equal(b, c, f"interpreter, {n} x {m}")
            np.testing.assert_array_equal(a, c, f"machine code, {n} x {m}")
        plan = model.memory_plan(*given)
        metered = model.stats()["last_peak_bytes"]
        less = plan.is_bound and metered < plan.peak_bytes
        assert metered == plan.peak_bytes or less


@pytest.mark.parametrize("seed", REGULAR)
def test_regions(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SWEEP)
def test_many_regions(seed: int) -> None:
    check(seed)
