"""Profiled models: a record per kernel call, with the work that was really done."""

from __future__ import annotations

import itertools

import pytest
import torch

import pliant
from pliant.ir.build import Builder
from pliant.ir.types import DType, tensor
from pliant.ir.work import op_flops
from pliant.report.profile import totals
from pliant.sym import parse, sym


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(1000, 32)
        self.first, self.second = torch.nn.Linear(32, 48), torch.nn.Linear(48, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        return self.second(torch.relu(self.first(x))).softmax(-1)


def compiled(model: torch.nn.Module, *inputs: torch.Tensor) -> pliant.CompiledModel:
    dims = tuple({0: "batch", 1: "seq"} for _ in inputs)
    instruments = pliant.Instruments(profile=True)
    return pliant.compile(model, inputs, dims, threads=1, instruments=instruments)


@pytest.mark.parametrize("shape", [(1, 1), (2, 5), (3, 31)])
def test_flops_are_those_of_the_products(shape: tuple[int, int]) -> None:
    model = compiled(Block(), torch.randint(0, 1000, (2, 7)))
    times = model.profile(torch.randint(0, 1000, shape))
    assert len(times) == model.stats()["kernel_calls"]
    assert all(time.seconds >= 0 for time in times)
    rows = shape[0] * shape[1]
    assert sum(time.flops for time in times) == 2 * rows * (32 * 48 + 48 * 32)
    assert sum(total.calls for total in totals(times)) == len(times)
    assert sum(time.seconds for time in times) < 60  # nanoseconds, not seconds


def test_a_table_counts_where_it_is_read() -> None:
    model = compiled(torch.nn.Embedding(1000, 32), torch.randint(0, 1000, (2, 7)))
    (time,) = model.profile(torch.randint(0, 1000, (3, 5)))
    assert time.bytes == 15 * 8 + 2 * 15 * 32 * 4
    (time,) = model.profile(torch.randint(0, 1000, (100, 100)))
    assert time.bytes == 10**4 * 8 + 1000 * 32 * 4 + 10**4 * 32 * 4


class Attend(torch.nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (4, 16)).transpose(1, 2)
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(heads, heads, heads, is_causal=self.causal)


@pytest.mark.parametrize(("causal", "pairs"), [(False, 11 * 11), (True, 66)])
def test_attention(causal: bool, pairs: int) -> None:
    model = compiled(Attend(causal), torch.randn(2, 7, 64))
    times = model.profile(torch.randn(3, 11, 64))
    assert sum(time.flops for time in times) == 2 * 3 * 4 * pairs * (16 + 16)


@pytest.mark.parametrize("first", ["p", "p - 3", "t - s", "5"])
def test_attention_from_a_row(first: str) -> None:
    """No fewer than the visible pairs; no more where the last row sees the last key."""
    b = Builder()
    q, k = (b.param(name, tensor(DType.F32, 1, sym(n), 4)) for name, n in ("qs", "kt"))
    b.param("past", tensor(DType.BOOL, sym("p")))
    number = parse(first)
    b.emit("attention", q, k, k, causal=True, first=number)
    flops = op_flops(b.ops[-1])
    for p, s, t in itertools.product(*3 * [(0, 1, 3, 5, 13)]):
        env = {"p": p, "s": s, "t": t}
        begin = number.evaluate(env)
        pairs = sum(min(max(begin + row + 1, 0), t) for row in range(s))
        bound = flops.evaluate(env)
        assert bound >= 2 * pairs * (4 + 4)
        if begin >= 0 and begin + s == t:
            assert bound == 2 * pairs * (4 + 4)
        assert bound <= 2 * s * t * (4 + 4)


@pytest.mark.parametrize("transposed", [False, True])
def test_convolution(transposed: bool) -> None:
    kind = torch.nn.ConvTranspose2d if transposed else torch.nn.Conv2d
    layer = kind(6, 8, 3, padding=1, groups=2)
    dims = ({0: "batch", 2: "height", 3: "width"},)
    watch = pliant.Instruments(profile=True)
    example = (torch.randn(2, 6, 9, 11),)
    model = pliant.compile(layer, example, dims, instruments=watch)
    times = model.profile(torch.randn(1, 6, 7, 5))
    wanted = 2 * (7 * 5) * 3 * 3 * (6 * 8 // 2)
    assert sum(time.flops for time in times) == wanted


def test_profiling_is_asked_for() -> None:
    layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    model = pliant.compile(layer, (x,), ({0: "n"},))
    with pytest.raises(pliant.OptionError, match=r"Instruments\(profile=True\)"):
        model.profile(x)
    assert "plt_clock" not in model.program.code.machine.llvm_ir()


def test_results_are_the_same() -> None:
    block, ids = Block(), torch.randint(0, 1000, (2, 7))
    plain = pliant.compile(block, (ids,), ({0: "batch", 1: "seq"},), threads=1)
    assert torch.equal(plain(ids), compiled(block, ids)(ids))
