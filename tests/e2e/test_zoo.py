"""Every development model, compiled once, at sizes far from the example's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import pytest
import torch
from e2e_oracle import assert_close, double, tensors

import pliant
import zoo

Dims = tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """How to build a model small, the shapes it returns, the sizes to run it on.

    `attentions` is how many kernels of attention it has, however the model spells it.
    """

    options: dict[str, int]
    result: Callable[..., list[Dims]]
    sizes: list[Dims]
    slow: list[Dims]
    attentions: int
    inputs: Callable[..., tuple[torch.Tensor, ...]] | None = field(default=None)


# One, primes, batch 1 to 8, twenty times the example (2, 13), and nothing at all.
TEXT = [(1, 1), (2, 1), (1, 2), (3, 7), (8, 5), (1, 31), (5, 17), (1, 127)]
TEXT_EMPTY = [(0, 5), (2, 0), (0, 0)]
TEXT_MORE = [(8, 1), (3, 2), (1, 3), (4, 4), (6, 11), (7, 13), (8, 16), (2, 23)]
TEXT_MORE += [(3, 29), (1, 37), (2, 64), (1, 97), (2, 101), (1, 128), (40, 13)]
TEXT_MORE += [(1, 200), (1, 257), (1, 260)]

PLANS = {
    "bert": Plan(
        {"layers": 2},
        lambda b, s: [(b, s, 768)],
        TEXT + TEXT_EMPTY,
        [*TEXT_MORE, (2, 511), (1, 512)],
        2,
    ),
    "tinybert": Plan(
        {},
        lambda b, s: [(b, s, 128)],
        [*TEXT, *TEXT_EMPTY, (40, 13), (1, 260), (1, 512)],
        TEXT_MORE,
        4,
    ),
    "minilm": Plan(
        {}, lambda b, s: [(b, 384)], TEXT + TEXT_EMPTY, [*TEXT_MORE, (1, 509)], 6
    ),
    "gpt2": Plan(
        {"layers": 1},
        lambda b, s: [(b, s, 50257)],
        TEXT + TEXT_EMPTY,
        [*TEXT_MORE, (1, 1021)],
        1,
    ),
    "llama": Plan(
        {"layers": 1},
        lambda b, s: [(b, s, 32000)],
        TEXT + TEXT_EMPTY,
        [*TEXT_MORE, (1, 1021)],
        1,
    ),
    "t5_encoder": Plan(
        {"layers": 1},
        lambda b, s: [(b, s, 512)],
        TEXT + TEXT_EMPTY,
        [*TEXT_MORE, (1, 1021)],
        1,
    ),
    "vit": Plan(  # batch, then rows and columns of patches
        {"layers": 1},
        lambda b, p, q: [(b, p * q + 1, 768)],
        [
            (1, 1, 1),
            (3, 1, 1),
            (1, 2, 2),
            (2, 3, 3),
            (8, 2, 2),
            (1, 5, 5),
            (1, 7, 7),
            (2, 11, 11),
            (1, 14, 14),
            (0, 3, 3),
            (1, 2, 5),
        ],
        [(b, p, p) for b in (1, 2, 5) for p in (4, 6, 8, 13)]
        + [(7, 3, 3), (4, 9, 9), (1, 17, 17), (1, 40, 40), (1, 11, 3), (2, 1, 13)],
        1,
        lambda b, p, q: (torch.randn(b, 3, 16 * p, 16 * q),),
    ),
    "resnet": Plan(
        {},
        lambda b, h, w: [(b, 2048, -(-h // 32), -(-w // 32))],
        [
            (1, 1, 1),
            (2, 7, 7),
            (1, 32, 32),
            (3, 64, 31),
            (8, 32, 33),
            (1, 97, 101),
            (1, 31, 131),
            (2, 5, 2),
            (0, 64, 64),
        ],
        [(b, h, w) for b in (1, 4) for h in (2, 29, 63, 128) for w in (3, 61)]
        + [(1, 224, 224), (1, 1920, 80), (5, 96, 80), (7, 17, 17), (40, 48, 40)],
        0,
    ),
    "evoformer": Plan(
        {},
        lambda b, n: [(b, n, 1024), (b, n, n, 128)],
        [
            (1, 1),
            (2, 1),
            (1, 2),
            (2, 3),
            (3, 5),
            (8, 2),
            (1, 7),
            (1, 17),
            (2, 11),
            (0, 5),
            (1, 0),
        ],
        [(b, n) for b in (1, 3, 5) for n in (4, 8, 13, 19)]
        + [(1, 31), (2, 37), (1, 64), (1, 97), (1, 128), (1, 260)],
        3,
    ),
    "unet": Plan(  # batch, image side in eights, text length
        {},
        lambda b, n, s: [(b, 4, 8 * n, 8 * n)],
        [
            (1, 1, 1),
            (1, 1, 77),
            (2, 1, 3),
            (3, 1, 5),
            (1, 2, 2),
            (8, 1, 2),
            (1, 3, 11),
            (1, 1, 140),
            (0, 1, 3),
            (1, 1, 0),
        ],
        [(b, n, s) for b in (1, 2, 5) for n in (2, 3) for s in (1, 7, 31)]
        + [(2, 4, 7), (1, 5, 77), (1, 7, 13), (1, 12, 19)],
        8,
    ),
}

MASKED = {"bert", "tinybert", "minilm", "t5_encoder", "evoformer"}

CASES = [
    pytest.param(name, size, id=f"{name}-{'x'.join(map(str, size))}", marks=marks)
    for name, plan in PLANS.items()
    for sizes, marks in ((plan.sizes, ()), (plan.slow, pytest.mark.slow))
    for size in sizes
]


@dataclass(frozen=True)
class Subject:
    model: torch.nn.Module
    exact: torch.nn.Module
    compiled: pliant.CompiledModel
    inputs: Callable[..., tuple[torch.Tensor, ...]]
    plan: Plan


@lru_cache(maxsize=1)  # the cases of one model follow each other
def subject_of(name: str) -> Subject:
    plan = PLANS[name]
    case = zoo.build(name, **plan.options)
    exact = copy.deepcopy(case.model).double()
    inputs = plan.inputs or case.inputs
    return Subject(case.model, exact, case.compile(), inputs, plan)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Eager's threads would only get in each other's way here."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    subject_of.cache_clear()


@pytest.mark.parametrize(("name", "size"), CASES)
def test_size(name: str, size: Dims) -> None:
    subject = subject_of(name)
    torch.manual_seed(sum(size))
    inputs = subject.inputs(*size)
    if 0 in size:
        nothing(subject, size, inputs)
    else:
        compare(subject, size, inputs)
        memory(subject.compiled, inputs)
        if name in MASKED and 2 <= size[1] <= 64:
            compare(subject, size, padded(inputs))
    assert subject.compiled.compile_count == 1
    assert attentions(subject.compiled) == subject.plan.attentions


def attentions(compiled: pliant.CompiledModel) -> int:
    fused = compiled.program.fused.main
    kinds = [op.str_attr("kind") for op in fused.ops if op.name == "fusion"]
    return sum("attention" in kind for kind in kinds)


def compare(subject: Subject, size: Dims, inputs: tuple[torch.Tensor, ...]) -> None:
    with torch.no_grad():
        eager = subject.model(*inputs)
        truth = subject.exact(*double(inputs))
    compiled = subject.compiled
    got = compiled(*inputs)
    assert [tuple(x.shape) for x in tensors(got)] == subject.plan.result(*size)
    assert_close(got, eager, truth)
    for limit in limits(compiled, inputs):
        compiled.memory_limit = limit
        assert_close(compiled(*inputs), eager, truth)
        assert compiled.stats()["last_peak_bytes"] <= limit
    compiled.memory_limit = None
    compiled(*inputs)


def limits(
    compiled: pliant.CompiledModel, inputs: tuple[torch.Tensor, ...]
) -> tuple[int, int]:
    """The least limit on the memory of a call, and one half way to its peak."""
    peak = compiled.memory_plan(*inputs).peak_bytes
    try:
        compiled.memory_plan(*inputs, memory_limit=1)
    except pliant.MemoryLimitError as error:
        return error.least, (error.least + peak) // 2
    return peak, peak


def padded(inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The mask, which is the last input, hides the end of some rows."""
    *others, mask = inputs
    lengths = torch.randint(1, mask.shape[1] + 1, (mask.shape[0], 1))
    return *others, (torch.arange(mask.shape[1]) < lengths).to(mask.dtype)


def nothing(subject: Subject, size: Dims, inputs: tuple[torch.Tensor, ...]) -> None:
    """A dim of 0: eager's result, or the right shape, or an error of the user's."""
    try:
        with torch.no_grad():
            eager = subject.model(*inputs)
    except Exception:
        eager = None
    try:
        got = subject.compiled(*inputs)
    except pliant.ShapeError as error:
        assert eager is None or "0" in str(error)
        return
    assert [tuple(x.shape) for x in tensors(got)] == subject.plan.result(*size)
    if eager is not None:
        assert_close(got, eager, double(eager))
    memory(subject.compiled, inputs)


def memory(compiled: pliant.CompiledModel, inputs: tuple[torch.Tensor, ...]) -> None:
    """The plan is what the last call took, however it is asked; asking runs nothing."""
    before = compiled.stats()
    plan = compiled.memory_plan(*inputs)
    assert plan.peak_bytes == before["last_peak_bytes"]
    assert compiled.memory_plan(**plan.dims) == plan
    assert compiled.memory_plan(*(x.to("meta") for x in inputs)) == plan
    assert plan.output_bytes <= plan.peak_bytes
    assert compiled.stats()["calls"] == before["calls"]
