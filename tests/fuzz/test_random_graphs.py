"""Random models, compiled once and run at many sizes, against eager in f64.

Memory is hostile: guard pages end every buffer, and what nothing has written is NaN.
A failure prints the model as a program; graphs.py makes the same one from its seed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from graphs import SIZES, BlockMaker, Program, compare, program, references

import pliant
from pliant import Options
from pliant.model import parts as model_code

REGULAR = range(25)
BLOCKS = (2, 6, 7, 10)  # seeds of BlockMaker with few lines, some of them heads
# Of blocks, so that their least memory needs chunks.
LONG = [(3, 5, 7), (1, 1, 1), (1, 13, 2), (0, 4, 3), (4, 33, 19), (1, 300, 9)]
SWEEP = range(1000, 1300)
VARIANTS = {
    "plain": Options(),
    "unfused": Options(fuse=False),
    "unconstrained": Options(constraints=False),
    "attention spelled out": Options(attention=False),
    "nothing folded or shared": Options(fold=False, share=False),
}


@pytest.fixture(autouse=True)
def hostile(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    spec = model_code.runtime_spec

    def guarded(*args: Any) -> Any:
        return dataclasses.replace(spec(*args), guard_pages=True, poison=True)

    monkeypatch.setattr(model_code, "runtime_spec", guarded)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def wrong(
    made: Program, options: Options, every: list[tuple[int, int, int]] = SIZES
) -> list[str]:
    """What differs from eager; empty where the model is refused, loudly."""
    model = made.module()
    answers = {sizes: references(made, model, sizes) for sizes in every}
    example = answers[every[0]]
    if example is None:
        return []
    try:
        ours = pliant.compile(
            model, example[0], made.dynamic(), options=options, threads=2
        )
    except pliant.PliantError as error:
        if "could not trace" in str(error):
            return []  # torch.export made a constant of a dim
        raise
    found: list[str] = []
    for sizes, answer in answers.items():
        if answer is None:
            continue
        args, eager, exact = answer
        try:
            got = ours(*args)
        except pliant.ShapeError:  # a size the trace ruled out
            assert sizes != every[0]
            continue
        for name, *values in zip(made.outputs, got, eager, exact, strict=True):
            problem = compare(*values)
            if problem:
                found.append(f"{name} at b, n, m = {sizes}: {problem}")
        found += limited(ours, args, got, sizes)
    return found


def limited(
    ours: pliant.CompiledModel, args: Any, want: Any, sizes: tuple[int, ...]
) -> list[str]:
    """What differs in a call that has as little memory as can be.

    Bit for bit, but where parts run in chunks: sums may be taken in another order.
    """
    try:
        ours.memory_plan(*args, memory_limit=0)
        return []
    except pliant.MemoryLimitError as error:
        ours.memory_limit = error.least
    got = ours(*args)
    chunks = ours.memory_plan(*args).knobs["chunks"]
    ours.memory_limit = None

    def same(a: torch.Tensor, b: torch.Tensor) -> bool:
        a, b = a.nan_to_num(7.0), b.nan_to_num(7.0)
        close = chunks and a.is_floating_point()
        return torch.allclose(a, b, 1e-4, 1e-4) if close else torch.equal(a, b)

    return [
        f"result {k} at b, n, m = {sizes} differs inside the least memory"
        for k, (a, b) in enumerate(zip(got, want, strict=True))
        if not same(a, b)
    ]


def check(made: Program, options: Options, long: bool = False) -> None:
    try:
        found = wrong(made, options, LONG if long else SIZES)
    except pliant.InternalError as error:
        found = [str(error)]
    assert not found, "\n".join([*found, made.source()])


@pytest.mark.parametrize("seed", REGULAR)
def test_regular(seed: int) -> None:
    check(program(seed), VARIANTS["plain"])


@pytest.mark.parametrize("seed", BLOCKS)
def test_blocks(seed: int) -> None:
    check(program(seed, BlockMaker), VARIANTS["plain"], long=True)


@pytest.mark.parametrize("variant", list(VARIANTS)[1:])
@pytest.mark.parametrize("seed", REGULAR[:5])
def test_variants(seed: int, variant: str) -> None:
    check(program(seed), VARIANTS[variant])


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("seed", SWEEP)
def test_sweep(seed: int, variant: str) -> None:
    check(program(seed), VARIANTS[variant])
