"""Attention's gradients, compiled, on guarded memory, against autograd in float64.

Every graph is compiled once for all sizes. `guarded.py` says how a read or write
outside a buffer is caught, and a value that was never written.
"""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest
from attention_gradients import Case, Sizes, arrays, check, inputs
from guarded import GuardedProgram, Side
from machines import TARGETS, machine

from pliant.ir.graph import Module
from pliant.ir.interp import run_graph
from pliant.ir.types import DType

any_target = pytest.mark.parametrize("target", TARGETS)
EDGES = (
    Sizes(1, 1, 1, 1),
    Sizes(2, 2, 7, 9),
    Sizes(1, 3, 33, 33),
    Sizes(1, 1, 0, 3),
    Sizes(1, 2, 3, 0),
    Sizes(0, 2, 5, 5),
    Sizes(2, 0, 5, 5),
    Sizes(1, 1, 97, 131),
    Sizes(1, 1, 5, 400),
    Sizes(1, 1, 400, 5),
)


@functools.cache
def program(case: Case, target: str) -> GuardedProgram:
    return GuardedProgram(Module({"main": case.graph()}), machine(target))


def run(case: Case, sizes: Sizes, target: str = "machine", threads: int = 1) -> None:
    given = inputs(case, sizes)
    for side in Side:
        found = program(case, target)(arrays(case, given), side, threads)
        check(case, given, found)


def kernels(case: Case) -> list[str]:
    fused = program(case, "machine").program.fused.main
    return [op.str_attr("kind") for op in fused.ops if op.name == "fusion"]


@any_target
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_lengths(target: str, causal: bool) -> None:
    case = Case(causal=causal, head=16)
    for sizes in EDGES:
        run(case, sizes, target)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_long(causal: bool) -> None:
    """Several blocks of keys and of rows, and a last one of each that is not full."""
    for s, t in ((500, 500), (257, 811), (811, 257)):
        run(Case(causal=causal, head=16), Sizes(1, 1, s, t))


@any_target
@pytest.mark.parametrize(
    "case",
    [
        Case(head=1),
        Case(head=3, value_head=5, causal=True),
        Case(head=40, value_head=24),
        Case(head=80, causal=True),
        Case(head=128, value_head=33),
    ],
    ids=lambda case: f"{case.head}-{case.value_head}",
)
def test_head_sizes(case: Case, target: str) -> None:
    for sizes in EDGES[:3]:
        run(case, sizes, target)


def test_head_size_of_the_call() -> None:
    case = Case(head=None, causal=True)
    for d in (0, 1, 7, 16, 33, 64, 70):
        run(case, Sizes(1, 2, 19, 19, d))


@pytest.mark.parametrize("mask", ["bool", "additive", "sliding", "hidden"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_masks(mask: str, causal: bool) -> None:
    case = Case(head=8, mask=mask, causal=causal)
    for sizes in EDGES:
        run(case, sizes)


@pytest.mark.parametrize("group", [2, 3, 8])
def test_grouped_heads(group: int) -> None:
    case = Case(head=8, group=group, causal=True, mask="additive", scale=-0.4)
    for sizes in EDGES:
        run(case, sizes)


@pytest.mark.parametrize("dtype", [DType.F64, DType.F16, DType.BF16], ids=str)
def test_types(dtype: DType) -> None:
    case = Case(dtype=dtype, head=24, group=2, causal=True)
    for sizes in (*EDGES[:4], Sizes(1, 1, 400, 400)):
        run(case, sizes)


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "sbhd", "bhds"])
def test_layouts(layout: str) -> None:
    case = Case(layout=layout, head=24, causal=True)
    for sizes in EDGES[:4]:
        run(case, sizes)
    if layout == "bshd":  # nothing is copied before or behind
        assert kernels(case) == ["attention_lse", "attention_backward"]


def test_threads() -> None:
    """Other thread counts compute the same, and each the same bits every time."""
    case = Case(head=16, group=2, causal=True)
    for sizes in (Sizes(2, 3, 129, 129), Sizes(1, 1, 500, 500)):
        given = inputs(case, sizes)
        for threads in (1, 2, 3, 7):
            made = program(case, "machine")
            twice = [
                [x.copy() for x in made(arrays(case, given), side, threads)]
                for side in Side
            ]
            check(case, given, twice[0])
            assert all(map(np.array_equal, *twice))


def test_sums_of_keys_split_between_threads() -> None:
    """The forward joins parts of a row's keys: its lse is of them all."""
    case = Case(head=16, mask="hidden")
    for threads in (1, 3):
        run(case, Sizes(1, 1, 3, 2100), threads=threads)


def test_random_cases() -> None:
    chosen = random.Random(5)
    for _ in range(6):
        case = Case(
            head=chosen.choice([4, 8, 20, 64]),
            group=chosen.choice([1, 1, 2, 4]),
            causal=chosen.random() < 0.5,
            mask=chosen.choice(["none", "bool", "additive", "sliding", "hidden"]),
            scale=chosen.choice([None, 0.2]),
        )
        for _ in range(4):
            b, h, s, t = (chosen.randint(1, most) for most in (2, 2, 150, 150))
            run(case, Sizes(b, h, s, t))


@pytest.mark.parametrize("which", [0, 1, 2, 3])
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_special_values(which: int, number: float) -> None:
    """Gradients that a NaN or Inf reaches are not finite, others are as without it."""
    case = Case(head=8)
    given = inputs(case, Sizes(1, 1, 40, 40))
    clean = [x.copy() for x in program(case, "machine")(arrays(case, given), Side.END)]
    given[which][0, 0, 30, 3] = number
    found = program(case, "machine")(arrays(case, given), Side.END)
    module = Module({"main": case.graph()})
    meant = run_graph(module, arrays(case, given))
    for mine, true, before in zip(found, meant, clean, strict=True):
        assert np.array_equal(np.isfinite(mine), np.isfinite(true))
        kept = np.isfinite(true) & (np.abs(true - before) < 1e-6)
        np.testing.assert_allclose(mine[kept], before[kept], rtol=1e-4, atol=1e-5)


def test_interpreted_loops() -> None:
    """The lowered program in the interpreter, which checks every access and race."""
    for case in (
        Case(head=3, value_head=2, causal=True, mask="bool"),
        Case(head=2, group=2, mask="hidden"),
    ):
        lowered = program(case, "machine").program.lowered
        for sizes in (Sizes(1, 1, 5, 3), Sizes(1, 2, 3, 6), Sizes(1, 1, 2, 0)):
            given = inputs(case, sizes)
            found = run_graph(
                lowered,
                arrays(case, given),
                env={"threads": 2},
                workers=2,
                check_races=True,
            )
            check(case, given, found)
