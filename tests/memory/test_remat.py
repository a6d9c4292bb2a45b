"""Rematerialisation: what steps touch, and calls that keep a limit, bit for bit."""

from __future__ import annotations

import gc
import os
import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pliant
from pliant.ir.parse import parse_module
from pliant.memory.liveness import liveness
from pliant.memory.remat import Touch, steps
from pliant.model.spill import spill_place

STEPS = """graph @main(%x: f32[n], %p: f32[n]) {
  %a: f32[n] = alloc() {bytes = <4*n>, shape = [n], dtype = f32}
  call_loop(%x, %a) {callee = "f", sizes = [n]}
  %v: f32[1, n] = view(%a) {offset = <0>}
  call_loop(%v, %p) {callee = "f", sizes = [n]}
  call_loop(%a, %a) {callee = "f", sizes = [n]}
  %y: f32[n] = alloc() {bytes = <4*n>, shape = [n], dtype = f32}
  call_library(%a, %y) {callee = "g", sizes = []}
  return %y
}

loop @f(n; in %in: f32[n], out %out: f32[n]) do
  for i = 0 to n vector {
    %out[i] = %in[i]
  }
end

library @g symbol "g"
"""


def test_steps() -> None:
    """Views are their bases; what is written and not in the arena is pinned."""
    module = parse_module(STEPS)
    found = steps(module, liveness(module.main))
    assert [v.name for v in found.pinned] == ["p", "y"]
    a, p, y = 0, 1, 2
    assert [step.touches for step in found.steps] == [
        (Touch(a, False, True),),
        (Touch(a, True, False), Touch(p, False, True)),
        (Touch(a, True, True),),
        (Touch(a, True, True), Touch(y, True, True)),
    ]
    # an input's new value and a library's result are not made twice
    assert [step.repeatable for step in found.steps] == [True, False, True, False]


class ThereAndBack(nn.Module):
    """A chain whose values are all used again on the way back, as in training."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.there = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.back = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.there:
            x = nn.functional.gelu(layer(x))
            kept.append(x)
        for layer, h in zip(self.back, reversed(kept), strict=True):
            x = torch.tanh(layer(x * h))
        return x.sum(-1)


def compiled(model: nn.Module, width: int, **how: object) -> pliant.CompiledModel:
    torch.manual_seed(0)
    model = model.eval().requires_grad_(False)
    how.setdefault("options", pliant.Options(chunk=False))  # evictions alone
    return pliant.compile(model, (torch.randn(3, width),), ({0: "n"},), **how)


def actions(plan: pliant.MemoryPlan) -> set[str]:
    made = plan.knobs["rematerialised"]
    assert isinstance(made, tuple)
    return {r.action for r in made}


@pytest.mark.parametrize("threads", [1, 2])
def test_limits_are_kept_bit_for_bit(threads: int) -> None:
    model = compiled(ThereAndBack(16, 8), 16, threads=threads)
    evicted = 0
    for n in (0, 1, 7, 101, 1024):
        x = torch.randn(n, 16)
        model.memory_limit = None
        want = model(x)
        free = model.memory_plan(n=n)
        assert free.knobs["rematerialised"] == ()
        for percent in (100, 80, 60, 50, 40):
            model.memory_limit = limit = free.peak_bytes * percent // 100
            try:
                plan = model.memory_plan(n=n)
            except pliant.MemoryLimitError as error:
                assert error.least > limit
                model.memory_limit = error.least
                plan = model.memory_plan(n=n)
                assert plan.peak_bytes == error.least
            assert torch.equal(model(x), want)
            stats = model.stats()
            assert stats["last_peak_bytes"] == plan.peak_bytes <= model.memory_limit
            assert bool(actions(plan)) == bool(
                stats["recomputed_calls"] or stats["spilled_bytes"]
            )
            if percent == 100:
                assert not actions(plan)
            evicted += bool(actions(plan))
    assert evicted >= 10
    assert model.compile_count == 1


def test_the_cheaper_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long products are filed, cheap maps are computed again; it follows the dims."""
    monkeypatch.setenv("PLIANT_SPILL_MBS", "1000000")
    fast = compiled(ThereAndBack(64, 8), 64)
    half = fast.memory_plan(n=4096).peak_bytes * 2 // 3
    assert actions(fast.memory_plan(n=4096, memory_limit=half)) == {"spill"}
    tiny = fast.memory_plan(n=2).peak_bytes * 9 // 10
    assert actions(fast.memory_plan(n=2, memory_limit=tiny)) == {"recompute"}
    monkeypatch.setenv("PLIANT_SPILL_MBS", "1")
    slow = compiled(ThereAndBack(64, 8), 64)
    plan = slow.memory_plan(n=4096, memory_limit=half)
    assert actions(plan) == {"recompute"}
    (first, *_) = plan.knobs["rematerialised"]
    assert first.loc and first.bytes == 4 * 4096 * 64


def test_a_limit_that_cannot_be_met() -> None:
    model = compiled(ThereAndBack(16, 8), 16)
    x = torch.randn(1000, 16)
    model.memory_limit = 100_000
    with pytest.raises(pliant.MemoryLimitError) as caught:
        model(x)
    error = caught.value
    assert error.limit == 100_000 < error.least
    assert f"{error.least} bytes" in str(error)
    fitting = error.largest["n"]
    assert f"n <= {fitting}" in str(error)
    assert model.memory_plan(n=fitting).peak_bytes <= 100_000
    with pytest.raises(pliant.MemoryLimitError):
        model.memory_plan(n=fitting + 1)
    model(x[:fitting])
    model.memory_limit = error.least
    model(x)


def test_a_plan_of_another_limit_is_not_used() -> None:
    model = compiled(ThereAndBack(16, 8), 16)
    x = torch.randn(500, 16)
    want, peak = model(x), model.stats()["last_peak_bytes"]
    for share in (0.6, 1.0, 0.8, 0.6):
        model.memory_limit = int(peak * share)
        assert torch.equal(model(x), want)
        assert model.stats()["last_peak_bytes"] <= peak * share
    model.memory_limit = None
    assert torch.equal(model(x), want)
    assert model.stats()["last_peak_bytes"] == peak


def test_off() -> None:
    off = pliant.Options(remat=False, chunk=False)
    model = compiled(ThereAndBack(16, 8), 16, options=off)
    peak = model.memory_plan(n=500).peak_bytes
    with pytest.raises(pliant.MemoryLimitError) as caught:
        model.memory_plan(n=500, memory_limit=peak - 1)
    assert caught.value.least == peak


def files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_the_spill_file_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = Path(tempfile.mkdtemp(dir=spill_place().folder))
    monkeypatch.setenv("PLIANT_SPILL_MBS", "1000000")
    monkeypatch.setenv("PLIANT_SPILL_FOLDER", str(folder))
    model = compiled(ThereAndBack(256, 8), 256)
    x = torch.randn(512, 256)
    want = model(x)
    model.memory_limit = model.stats()["last_peak_bytes"] * 2 // 3
    before = files()
    for _ in range(3):
        assert torch.equal(model(x), want)
        assert model.stats()["spilled_bytes"] > 0
    assert files() == before
    assert not list(folder.iterdir())
    folder.rmdir()
    with pytest.raises(pliant.PliantError, match="PLIANT_SPILL_FOLDER") as caught:
        model(x)
    assert isinstance(caught.value, OSError)
    assert files() == before
    model.memory_limit = None
    assert torch.equal(model(x), want)


def trained(limit: float | None) -> tuple[list[Tensor], set[str]]:
    """Losses and parameters after a few steps with dropout, and what was evicted."""
    torch.manual_seed(3)
    layers = [
        nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.3)) for _ in range(6)
    ]
    model = nn.Sequential(*layers, nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    example = (torch.randn(5, 32),), (torch.randn(5, 4),)
    dims = ({0: "n"},), ({0: "n"},)
    loss = nn.functional.mse_loss
    step = pliant.compile_training(model, loss, optimizer, example, dims)
    seen: set[str] = set()
    losses = []
    for n in (300, 97, 300):
        given = (torch.randn(n, 32),), (torch.randn(n, 4),)
        step.memory_limit = None
        if limit is not None:
            step.memory_limit = int(step.memory_plan(*given).peak_bytes * limit)
            seen |= actions(step.memory_plan(*given))
        losses.append(step(*given))
    return [*losses, *model.state_dict().values()], seen


def test_training_inside_a_limit() -> None:
    """Dropout that is computed again drops the same."""
    want, nothing = trained(None)
    got, seen = trained(0.75)
    assert not nothing and "recompute" in seen
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
