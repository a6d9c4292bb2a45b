"""Every stage keeps what a model computes: interpreted after each, then run natively.

Small models with different parts go through the pipeline one pass at a time. After each
pass the module is legal, prints and parses back exactly, and gives the results it gave
before, at sizes 0, 1, odd, prime and one larger. The loop functions run with one and
two workers, every access checked for races. The machine code is compared with eager.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops import while_loop
from torch._higher_order_ops.scan import scan
from torch.utils import _pytree as pytree

import pliant
from pliant.context import Context
from pliant.frontend.signature import TensorSlot
from pliant.frontend.torch_export import export_module, from_exported
from pliant.frontend.torch_tensors import to_numpy
from pliant.ir.graph import Module
from pliant.ir.interp import run_graph
from pliant.ir.parse import parse_module
from pliant.ir.spec import Stage, bare, verify
from pliant.ir.text import print_module
from pliant.machine.target import avx2, baseline, host, named, runs_here
from pliant.options import Instruments, Options
from pliant.passes.bind import results_of
from pliant.pipeline import Driver

SIZES = (0, 1, 5, 13, 34)


def randn(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(shape, generator=generator)


def integers(high: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(0, high, shape, generator=generator)


class Feedforward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(12), nn.Linear(12, 20)
        self.down = nn.Linear(20, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class MaskedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mask = keep[:, None, None, :] > 0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A layer of a decoder: parts of it run in chunks of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other = nn.LayerNorm(8), nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return (x + self.down(F.gelu(self.up(self.other(x))))).sin()


class Sums(nn.Module):
    """Sums over all rows of what is wide: in chunks, each round adds its part."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(4, 8), nn.Linear(8, 48)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        x = F.gelu(self.up(x))
        y = self.head(x)
        loss = F.cross_entropy(y.flatten(0, 1), labels.flatten(), reduction="sum")
        gram = y.flatten(0, 1).T @ x.flatten(0, 1)
        return loss, y.argmax(-1), y.square().sum((0, 1)).sqrt(), gram - 1


class SpelledOutAttention(nn.Module):
    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) / 2.0
        causal = torch.ones(q.shape[1], k.shape[1]).tril() == 0
        return scores.masked_fill(causal, -1e9).softmax(-1) @ k


class ConvNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5)
        self.norm.running_mean.copy_(randn(5))
        self.norm.running_var.copy_(randn(5).abs() + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(F.relu(self.norm(self.conv(x))), 2, padding=1)


class GroupNormSilu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, 6)
        nn.init.normal_(self.norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(x))


class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(11, 6), nn.Embedding(64, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1])
        return self.norm(self.words(ids) + self.places(positions))


class Rotary(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        steps = torch.arange(x.shape[1], dtype=torch.float32)
        angles = steps[:, None] * torch.tensor([1.0, 0.1, 0.01, 1.0, 0.1, 0.01])
        left, right = x.chunk(2, -1)
        return x * angles.cos() + torch.cat((-right, left), -1) * angles.sin()


class Einsum(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        rows = torch.einsum("bsc,btc->s", x, y)
        return torch.einsum("bsc,btc->bst", x, y) + rows[:, None]


class Scans(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        best = torch.cat([x, torch.zeros(x.shape[0], 1, 3)], 1).argmax(1)
        return x.cumsum(1), (x * 2).cumsum(-1), best


class Movement(nn.Module):
    def forward(self, x: Tensor, picks: Tensor) -> tuple[Tensor, ...]:
        padded = F.pad(x, (1, 2, 0, 3), value=0.5)
        cut = padded.flip(1)[:, :, 1:6:2]
        return cut, x.gather(2, picks), torch.cat([padded, padded * 2], 1)[:, 3:]


class MeanPool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.normalize(x.mean(1) + x.amax(2).sum(1, keepdim=True), dim=1))


class Results(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = x.exp()
        return y, y.sum(-1), x, y.transpose(0, 1), y, y.flatten(), x[:, :2], y.sum() > 0


class Branch(nn.Module):
    """torch.cond on data, a size of another input inside a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        def then(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return F.gelu(self.one(x)).softmax(-1), y.sum(0) / y.shape[0]

        def other(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return self.two(self.one(x)) + x, y.amax(-1).sum() + y.mean(0)

        z, w = torch.cond(x.sum() > 0, then, other, (x, y))
        return z + 1, w


class Newton(nn.Module):
    """A while loop whose number of rounds depends on data, around a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        def going(i: Tensor, x: Tensor, total: Tensor) -> Tensor:
            return (i < 6) & (total < 40)

        def body(i: Tensor, x: Tensor, total: Tensor) -> tuple[Tensor, ...]:
            x = torch.cond(
                i % 2 == 0, lambda x: torch.tanh(self.step(x)), lambda x: x * 1.5, (x,)
            )
            return i + 1, x, total + x.abs().sum()

        start = torch.zeros((), dtype=torch.int64)
        return while_loop(going, body, (start, x, x.sum() * 0))


class Recurrence(nn.Module):
    """A scan that carries two values, reads a weight and stacks two."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(5, 5)

    def forward(self, h: Tensor, xs: Tensor) -> Any:
        def step(carry: tuple[Tensor, Tensor], x: Tensor) -> Any:
            h, count = carry
            h = torch.tanh(self.mix(h) + x)
            return (h, count + 1), (h * 2, (h.sum(-1) * 10).to(torch.int32))

        zero = torch.zeros((), dtype=torch.int64)
        return scan(step, (h, zero), xs, dim=1)


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.lstm(x)


class Selection(nn.Module):
    """Rows that data pick, and those of them that data pick again."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        some = x[x[..., 0] > 0]
        return some * 2, some[some[:, 1] > 0].exp(), some.sum(0), x.amax(-1)


def bf16_linear() -> nn.Module:
    model = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 4))
    return model.to(torch.bfloat16)


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    inputs: Callable[[int, int], tuple[Tensor, ...]]
    dynamic: tuple[dict[int, str], ...]
    sizes: tuple[int, ...] = SIZES
    tolerance: float = 2e-5


BS = {0: "batch", 1: "length"}
IMAGE = {0: "batch", 2: "high", 3: "wide"}
CASES = {
    "feedforward": Case(Feedforward, lambda b, s: (randn(b, s, 12),), (BS,)),
    "attention": Case(
        MaskedAttention,
        lambda b, s: (randn(b, s, 8), (randn(b, s) > -1).long()),
        (BS, BS),
    ),
    "block": Case(Block, lambda b, s: (randn(b, s, 8),), (BS,)),
    "sums": Case(Sums, lambda b, s: (randn(b, s, 4), integers(48, b, s)), (BS, BS)),
    "spelled out": Case(
        SpelledOutAttention, lambda b, s: (randn(b, s, 4), randn(b, s, 4)), (BS, BS)
    ),
    "conv": Case(ConvNorm, lambda b, s: (randn(b, 3, s, s + 2),), (IMAGE,), (1, 5, 13)),
    "group norm": Case(GroupNormSilu, lambda b, s: (randn(b, 6, s, 3),), (IMAGE,)),
    "embeddings": Case(Embeddings, lambda b, s: (integers(11, b, s),), (BS,)),
    "rotary": Case(Rotary, lambda b, s: (randn(b, s, 6),), (BS,)),
    "einsum": Case(
        Einsum,
        lambda b, s: (randn(b, s, 3), randn(b, 2 * s + 1, 3)),
        (BS, {0: "batch", 1: "other"}),
    ),
    "scans": Case(Scans, lambda b, s: (randn(b, s, 3),), (BS,)),
    "movement": Case(
        Movement, lambda b, s: (randn(b, s, 4), integers(4, b, s, 7)), (BS, BS)
    ),
    "mean pool": Case(MeanPool, lambda b, s: (randn(b, s, 5),), (BS,), (1, 5, 13, 34)),
    "results": Case(Results, lambda b, s: (randn(b, s),), (BS,)),
    "branch": Case(
        Branch,
        lambda b, s: (randn(b, s, 6) + s % 2 - 0.5, randn(b + 1, 3)),
        (BS, {0: "other"}),
    ),
    "while": Case(Newton, lambda b, s: (randn(b, s, 4),), (BS,)),
    "recurrence": Case(
        Recurrence,
        lambda b, s: (randn(b, 5), randn(b, s, 5)),
        ({0: "batch"}, BS),
        (1, 5, 13, 34),
    ),
    "lstm": Case(Lstm, lambda b, s: (randn(b, s, 3),), (BS,), (1, 5, 13, 34)),
    "selection": Case(Selection, lambda b, s: (randn(b, s, 3),), (BS,)),
    "bf16": Case(
        bf16_linear,
        lambda b, s: (randn(b * s, 7).to(torch.bfloat16),),
        ({0: "n"},),
        tolerance=3e-2,
    ),
}


@cache
def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return CASES[name].make().eval().requires_grad_(False)


def example_of(case: Case) -> tuple[Tensor, ...]:
    return case.inputs(2, 7)


def imported_from(name: str) -> Module:
    case = CASES[name]
    program, info = export_module(model_of(name), example_of(case), case.dynamic)
    made = from_exported(program, info)
    slots = made.signature.arguments
    assert all(isinstance(slot, TensorSlot) for slot in slots)
    return made.module


def stages(module: Module, cx: Context) -> Iterator[tuple[str, Module, Stage]]:
    """What `pipeline.compile_module` does before machine code."""
    yield "import", module, Stage.IMPORTED
    for stage, made in Driver(cx, Instruments(verify=False)).stages(module):
        yield stage.name, made, stage.legal


def sizes_of(module: Module, inputs: list[Any]) -> dict[str, int]:
    """The dims of inputs that are symbols by themselves."""
    pairs = zip(module.main.params, inputs, strict=True)
    dims = (d for v, x in pairs for d in zip(v.shape, x.shape, strict=True))
    return {s: size for d, size in dims for s in [bare(d)] if s is not None}


def round_trips(module: Module) -> None:
    text = print_module(module)
    assert print_module(parse_module(text, module.constants)) == text


def versions(
    module: Module, rows: tuple[int, ...]
) -> Iterator[tuple[str, dict[str, int]]]:
    """The versions that run in chunks of rows, with several numbers of them."""
    for version in module.versions:
        for number in dict.fromkeys(max(n, 1) for n in rows):
            yield version.name, dict.fromkeys(module.knobs, number)


def equal(got: list[Any], want: list[Any], tolerance: float, where: str) -> None:
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        message = f"{where}, result {number}"
        assert a.shape == b.shape, message
        assert a.dtype == b.dtype, message
        np.testing.assert_allclose(
            a, b, rtol=tolerance, atol=tolerance, equal_nan=True, err_msg=message
        )


@pytest.mark.parametrize("target", ["avx512", "baseline"])
@pytest.mark.parametrize("name", CASES)
def test_stages(name: str, target: str) -> None:
    case = CASES[name]
    cx = Context(Options(), named(target))
    before: dict[int, list[Any]] = {}
    imported = bound = imported_from(name)
    for stage_name, module, stage in stages(imported, cx):
        if stage_name == "bind":
            bound = module
        results = results_of(imported.main, bound.main)
        verify(module, stage)
        round_trips(module)
        for size in case.sizes:
            where = f"{stage_name}, size {size}"
            inputs = [to_numpy(t) for t in case.inputs(2, size)]
            dims = sizes_of(imported, inputs)
            if stage is not Stage.LOWERED:
                got = results.cut(run_graph(module, inputs), dims)
                equal(got, before.get(size, got), case.tolerance, where)
                before[size] = got
                for version, env in versions(module, (1, 3, size)):
                    got = run_graph(module, inputs, version, env)
                    got = results.cut(got, dims)
                    equal(got, before[size], case.tolerance, f"{where}, {version}")
                continue
            if size > 13:
                continue
            for workers in (1, 2):
                got = run_graph(module, inputs, workers=workers, check_races=True)
                got = results.cut(got, dims)
                equal(got, before[size], case.tolerance, f"{where}, {workers} workers")
            for version, env in versions(module, (2,)):
                got = run_graph(
                    module, inputs, version, env, workers=2, check_races=True
                )
                got = results.cut(got, dims)
                equal(got, before[size], case.tolerance, f"{where}, {version}")


@pytest.mark.parametrize(
    "make_target", [host, avx2, baseline], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("name", CASES)
def test_native(name: str, make_target: Callable[[], Any]) -> None:
    target = make_target()
    if not runs_here(target):
        pytest.skip(f"this machine does not run {target.name}")
    case, model = CASES[name], model_of(name)
    compiled = pliant.compile(
        model, example_of(case), case.dynamic, target=target, threads=2
    )
    for batch, size in [(2, s) for s in case.sizes] + [(0, 5), (1, 5), (3, 97)]:
        if name == "embeddings" and size > 64:
            continue
        if batch == 0 and 0 not in case.sizes:
            continue
        inputs = case.inputs(batch, size)
        got = pytree.tree_leaves(compiled(*inputs))
        want = pytree.tree_leaves(model(*inputs))
        for a, b in zip(got, want, strict=True):
            assert a.dtype is b.dtype
            torch.testing.assert_close(
                a,
                b,
                rtol=case.tolerance,
                atol=case.tolerance,
                equal_nan=True,
                msg=lambda m, at=(batch, size): f"{name} at {at}: {m}",
            )
