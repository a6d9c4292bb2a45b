"""Small models of every kind that a file must hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

import pliant
from tests.artifact.observed import Questions


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Wide(nn.Module):
    """It runs in chunks, to stay within a limit."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 256), nn.Linear(256, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)))


class Kept(nn.Module):
    """Values are dropped and computed again, or spilled, to stay within a limit."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = torch.cumsum(x, 0)
        scores = torch.softmax(x @ x.transpose(0, 1) * early.mean(), -1)
        return torch.sort(scores @ x, 0).values + early


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.last = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x))).mean((2, 3)))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.few, self.many = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.few(x) if x.shape[0] < 4 else self.many(x).relu()


class Selected(nn.Module):
    """Its data decide a size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sort(x[x > 0] * 2).values


class Counting(nn.Module):
    """It changes buffers."""

    total: torch.Tensor
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.arange(4.0))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x.sum(0))
        self.calls.add_(1)
        return x * self.total + self.calls


class Gathering(nn.Module):
    """Its data may be refused."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids)


@dataclass
class Saved:
    """A model, and what is asked of it."""

    model: nn.Module
    example: tuple[Any, ...]
    shapes: Any
    asked: Questions
    arrays: dict[str, np.ndarray]
    options: pliant.Options | None = None

    def compile(self) -> pliant.CompiledModel:
        torch.manual_seed(0)
        model = self.model.eval()
        return pliant.compile(
            model, self.example, self.shapes, threads=2, options=self.options
        )


def random(*shape: int) -> np.ndarray:
    count = int(np.prod(shape))
    return np.sin(np.arange(count, dtype=np.float32) * 1.7).reshape(shape) * 2


def one(
    model: nn.Module,
    shapes: Any,
    arrays: list[np.ndarray],
    bad: list[np.ndarray],
    dims: list[dict[str, int]],
    limits: tuple[float, ...] = (),
) -> Saved:
    """A model of one input."""
    named = {f"x{k}": a for k, a in enumerate(arrays)}
    wrong = {f"bad{k}": a for k, a in enumerate(bad)}
    asked = Questions([[n] for n in named], dims, list(limits), [[n] for n in wrong])
    example = (torch.from_numpy(arrays[0].copy()),)
    return Saved(model, example, shapes, asked, {**named, **wrong})


def saved_models() -> dict[str, Saved]:
    torch.manual_seed(0)
    kept = one(Kept(), ({0: "n"},), [random(40, 16)], [], [{"n": 200}], (0.97,))
    kept.options = pliant.Options(chunk=False, attention=False, fuse=False)
    return {
        "linear": one(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)),
            ({0: "n"},),
            [random(5, 8), random(1, 8), random(0, 8), random(300, 8)],
            [random(5, 9), random(5), random(5, 8).astype(np.float64)],
            [{"n": 77}, {"n": 1}, {"m": 1}, {"n": 2**40}],
            (0.8, 0.01),
        ),
        "attention": one(
            Attention(),
            ({0: "batch", 1: "seq"},),
            [random(2, 7, 32), random(1, 65, 32)],
            [random(2, 7, 31)],
            [{"batch": 1, "seq": 512}, {"batch": 4, "seq": 33}],
            (0.99,),
        ),
        "wide": one(
            Wide(), ({0: "n"},), [random(64, 16)], [], [{"n": 4096}], (0.5, 0.1)
        ),
        "kept": kept,
        "convolution": one(
            Convolution(),
            ({0: "batch", 2: "height", 3: "width"},),
            [random(2, 3, 9, 8), random(1, 3, 17, 23)],
            [random(2, 4, 9, 8)],
            [{"batch": 1, "height": 64, "width": 48}],
        ),
        "branching": one(
            Branching(),
            ({0: "n"},),
            [random(5, 6), random(2, 6), random(1, 6), random(64, 6)],
            [random(5, 7)],
            [{"n": 2}, {"n": 9}],
        ),
        "selected": one(
            Selected(),
            ({0: "n"},),
            [random(50), random(3), -np.ones(4, np.float32)],
            [random(5, 7)],
            [{"n": 100}],
            (0.5,),
        ),
        "counting": one(
            Counting(),
            ({0: "n"},),
            [random(3, 4), random(2, 4), random(3, 4)],
            [random(3, 5)],
            [{"n": 10}],
        ),
        "gathering": one(
            Gathering(),
            ({0: "n"},),
            [np.arange(7), np.array([9, 0, 3])],
            [np.array([1, 10])],
            [{"n": 10}],
        ),
    }
