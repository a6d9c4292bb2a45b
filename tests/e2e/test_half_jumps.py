"""Results that jump in half floats: they are eager's, however a kernel computes them.

The values are made by ops that round alike everywhere, many enough that kernels keep
them. So a comparison has to give eager's answer exactly. Behind products, whose sums
may be in another order, the answers have to agree with each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from e2e_oracle import same, tensors
from machines import TARGETS, machine
from torch import Tensor, nn

import pliant

HALVES = [torch.float16, torch.bfloat16]
COLUMNS = 61


class Fn(nn.Module):
    def __init__(self, call: Callable[..., object]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *args: Tensor) -> object:
        return self.call(*args)


def values(a: Tensor, b: Tensor) -> Tensor:
    """Half floats with digits to lose at each step; to compute again is expensive."""
    return (((a * b + a) * b - a) * b + a * b) * a - b


def inputs(dtype: torch.dtype, rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(2, rows, COLUMNS, generator=generator).to(dtype)
    return made[0].clone(), made[1].clone()


def most(y: Tensor, dim: int = -1) -> Tensor:
    return y.amax(dim, keepdim=True)


def equal_to_the_largest(a: Tensor, b: Tensor) -> object:
    y = values(a, b)
    return (y == most(y)).sum(-1), (y >= most(y)).sum(-1)


def equal_to_the_largest_of_all(a: Tensor, b: Tensor) -> object:
    y = values(a, b)
    return (y * 3 == y.amax() * 3).sum(), (y * 3 != y.amin() * 3).sum()


def chosen_places(a: Tensor, b: Tensor) -> object:
    y = values(a, b)
    at = y.argmax(-1, keepdim=True)
    return at, y.gather(-1, at) == most(y), F.one_hot(y.argmin(-1), COLUMNS) * most(y)


def of_a_number(a: Tensor, b: Tensor) -> object:
    y = values(a, b)
    return y > 0.5, y.floor(), y.round(), (y * 16).to(torch.int32), y.sign(), y


def below_a_mean(a: Tensor, b: Tensor) -> object:
    y = values(a, b)
    return torch.where(y <= most(y) * 0.5, y, -y), torch.isinf(y * 2000)


def scaled_alike(a: Tensor, b: Tensor) -> object:
    y = values(a, b)
    return (y * 3 == most(y) * 3).sum(-1), (y * 3 + 1 == most(y, 0) * 3 + 1).sum(0)


def above_the_third(a: Tensor, b: Tensor) -> object:
    y = values(a, b)
    third = y.topk(3, -1).values[:, 2:] * 3
    return (y * 3 >= third).sum(-1)


def in_f32(a: Tensor, b: Tensor) -> object:
    y = values(a, b)
    wide = y.float()
    near = torch.isclose(wide, most(y).float(), rtol=0, atol=0)
    return near.sum(-1), (wide == most(y, 0)).sum(0), (wide * 8).long(), most(y)


def at_their_edge(a: Tensor, b: Tensor) -> object:
    y = values(a, b)
    below = most(y) - y
    return below.sqrt(), torch.log(below), (1 / below).isinf(), below.sign()


def divided(a: Tensor, b: Tensor) -> object:
    y = values(a, b)
    # Of f16, eager computes floor divisions in another way.
    return torch.fmod(y, 0.25), (y - most(y)).bool(), F.hardshrink(y), F.relu(y) > 0


def of_a_part(a: Tensor, b: Tensor) -> object:
    t = a * b + a
    y, top = t * 3, most(t) * 3
    rows = torch.nonzero(t > 0.5)[:, 0]
    return (y == top).sum(-1)[rows], rows


def in_a_branch(a: Tensor, b: Tensor) -> object:
    t = a * b + a

    def equal(y: Tensor, top: Tensor) -> Tensor:
        return (y == top).sum(-1)

    def other(y: Tensor, top: Tensor) -> Tensor:
        return (y != top).sum(-1)

    return torch.cond(a.sum() < 1e9, equal, other, (t * 3, most(t) * 3))


def in_a_loop(a: Tensor, b: Tensor) -> object:
    def body(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * b + a
        return i + 1, torch.where(y >= most(y), -y, y)

    start = torch.tensor(0), a * b
    _, x = torch._higher_order_ops.while_loop(lambda i, x: i < 3, body, start)
    return x, (x * 3 == most(x) * 3).sum(-1)


CASES: Sequence[Callable[[Tensor, Tensor], object]] = [
    equal_to_the_largest,
    equal_to_the_largest_of_all,
    chosen_places,
    of_a_number,
    below_a_mean,
    scaled_alike,
    above_the_third,
    in_f32,
    at_their_edge,
    divided,
    of_a_part,
    in_a_branch,
    in_a_loop,
]
by_dtype = pytest.mark.parametrize(
    "dtype", HALVES, ids=lambda d: str(d).rpartition(".")[2]
)


@pytest.mark.parametrize("target", TARGETS)
@by_dtype
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_answers_are_eagers(
    case: Callable[[Tensor, Tensor], object], dtype: torch.dtype, target: str
) -> None:
    model = pliant.compile(
        Fn(case), inputs(dtype, 7), ({0: "n"}, {0: "n"}), target=machine(target)
    )
    for rows in (7, 1, 40):
        given = inputs(dtype, rows, seed=rows)
        found, wanted = tensors(model(*given)), tensors(case(*given))
        for got, want in zip(found, wanted, strict=True):
            assert got.dtype is want.dtype and got.shape == want.shape
            assert same(got, want).all(), (got != want).sum()


@by_dtype
def test_answers_do_not_depend_on_the_memory(dtype: torch.dtype) -> None:
    """In chunks of rows, what is before them is computed by other kernels."""

    def case(a: Tensor, b: Tensor) -> object:
        y = values(a, b)
        z = values(y - most(y, 0), b)
        alike = (z * 3 == most(z, 0) * 3).sum(-1), (y * 3 == most(y, 0) * 3).sum(0)
        scores = (z @ z.T) * 1.7
        return *alike, (scores == most(scores)).sum(-1) > 0, scores.argmax(-1)

    shapes = ({0: "n"}, {0: "n"})
    model = pliant.compile(Fn(case), inputs(dtype, 7), shapes, threads=1)
    given = inputs(dtype, 600, seed=1)
    wanted = tensors(case(*given))
    plan = model.memory_plan(*given)
    for share, chunked in ((1, False), (1.5, True), (2, True)):
        model.memory_limit = int(plan.peak_bytes / share)
        assert bool(model.memory_plan(*given).knobs["chunks"]) is chunked
        for got, want in zip(tensors(model(*given)), wanted, strict=True):
            assert torch.equal(got, want)


def jumps(y: Tensor) -> tuple[Tensor, ...]:
    """Of an activation: what eager tells of it."""
    top = most(y)
    wide = y.float()
    answers = y == top, y.argmax(-1), y > 0.25, (y * 4).floor(), wide == most(wide)
    return (*answers, (top - y).sqrt().isnan(), (top - y) > 0, wide.int())


class Epilogues(nn.Module):
    """What follows products and norms, and the scores that attention hides."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(COLUMNS, 33)
        self.convolution = nn.Conv1d(1, 4, 3)
        self.norm = nn.LayerNorm(33)

    def forward(self, x: Tensor, keys: Tensor, mask: Tensor) -> object:
        y = F.silu(self.linear(x)) * 1.7 + 0.3
        z = self.convolution(x[:, None]) * 1.7 + 0.3
        n = self.norm(y) * y
        m = mask * mask + mask
        seen = torch.eye(mask.shape[-1], dtype=x.dtype).expand(1, 1, *mask.shape)
        weights = F.scaled_dot_product_attention(keys, keys, seen, m > 0.25)
        return [(v, jumps(v)) for v in (y, z, n)], (m, m > 0.25, weights != 0)


@pytest.mark.parametrize("target", TARGETS)
@by_dtype
def test_answers_fit_the_results_of_kernels(dtype: torch.dtype, target: str) -> None:
    torch.manual_seed(0)
    model = Epilogues().to(dtype)
    given = inputs(dtype, 29)[0], 0.1 * torch.randn(1, 1, 48, 8), torch.randn(48, 48)
    given = tuple(x.to(dtype) for x in given)
    compiled = pliant.compile(model, given, target=machine(target))
    pairs, (m, hides, weights) = compiled(*given)
    for value, found in pairs:
        for number, (got, want) in enumerate(zip(found, jumps(value), strict=True)):
            assert same(got, want).all(), number
    assert torch.equal(hides, m > 0.25)
    assert torch.equal(weights[0, 0], hides)
