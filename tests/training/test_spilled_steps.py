"""Steps that spill: all or nothing, whatever the disk does; never to memory."""

from __future__ import annotations

import copy
import errno
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pliant
from pliant.model import spill
from pliant.runtime import binding
from pliant.runtime.description import RuntimeStatus, Status

ROWS = 512
SHAPES = (({0: "n"},), ({0: "n"},))


@pytest.fixture(autouse=True)
def cheap_spilling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLIANT_SPILL_MBS", "1000000")


def batch() -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(ROWS, 64, generator=generator) for _ in range(2))
    return (x,), (y,)


def spilling() -> tuple[pliant.TrainingStep, nn.Module]:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())]
    net = nn.Sequential(*layers, nn.BatchNorm1d(64))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return (
        pliant.compile_training(net, F.mse_loss, optimizer, batch(), SHAPES, threads=1),
        net,
    )


def least(step: pliant.TrainingStep) -> int:
    with pytest.raises(pliant.MemoryLimitError) as caught:
        step.memory_plan(*batch(), memory_limit=1)
    return caught.value.least


def everything(step: pliant.TrainingStep, net: nn.Module) -> Any:
    return copy.deepcopy((net.state_dict(), step.optimizer.state_dict()))


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_file_without_room_changes_nothing() -> None:
    step, net = spilling()
    step.memory_limit = least(step)
    assert "spill" in {
        r.action for r in step.memory_plan(*batch()).knobs["rematerialised"]
    }
    refused = taken = 0
    for kib in (16, 64, 128, 256, 384, 512, 4096):
        before = everything(step, net)
        with largest_file(kib * 1024):
            try:
                step(*batch())
            except pliant.SpillError as error:
                refused += 1
                assert error.errno == errno.EFBIG and not error.began
                torch.testing.assert_close(
                    everything(step, net), before, rtol=0, atol=0
                )
            else:
                taken += 1
    assert refused >= 3 and taken >= 1
    before, calls = everything(step, net), step.stats()["calls"]
    step(*batch())
    assert step.stats()["calls"] == calls + 1
    assert not torch.equal(before[0]["0.weight"], net.state_dict()["0.weight"])


def test_a_disk_that_fails_later_is_told_apart() -> None:
    step, _ = spilling()
    found = {}
    for began in (0, 1):
        status = RuntimeStatus(Status.SPILL, (errno.EIO, 4096, began))
        found[began] = step._refusals.of_call(status, [])
    assert isinstance(found[1], pliant.SpillError) and found[1].began
    assert not found[0].began
    assert "may be new in part" in str(found[1])
    assert "in part" not in str(found[0])


IN_MEMORY = Path("/dev/shm")
needs_memory_folder = pytest.mark.skipif(
    not (IN_MEMORY.is_dir() and os.access(IN_MEMORY, os.W_OK)),
    reason="no folder that is sure to be in memory",
)


@needs_memory_folder
def test_memory_is_no_place_to_spill_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is kept by computing again, or the call is refused; and it says why."""
    on_disk, _ = spilling()
    monkeypatch.setenv("PLIANT_SPILL_FOLDER", str(IN_MEMORY))
    assert binding.in_memory(str(IN_MEMORY))
    step, net = spilling()
    limit = (least(step) + step.memory_plan(*batch()).peak_bytes) // 2
    assert least(step) >= least(on_disk)
    step.memory_limit = limit
    plan = step.memory_plan(*batch())
    assert {r.action for r in plan.knobs["rematerialised"]} == {"recompute"}
    step(*batch())
    assert step.stats()["spilled_bytes"] == 0
    before = everything(step, net)
    step.memory_limit = 1
    with pytest.raises(pliant.MemoryLimitError, match="/dev/shm is in memory"):
        step(*batch())
    torch.testing.assert_close(everything(step, net), before, rtol=0, atol=0)


@needs_memory_folder
def test_temporary_folders_in_memory_are_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("PLIANT_SPILL_FOLDER", raising=False)
    monkeypatch.setattr(spill.tempfile, "gettempdir", lambda: str(IN_MEMORY))
    monkeypatch.setattr(spill, "_LASTING", str(Path(__file__).parent))
    if not binding.in_memory(spill._LASTING):
        assert spill.spill_place().folder == spill._LASTING
    monkeypatch.setattr(spill, "_LASTING", str(IN_MEMORY))
    assert "in memory" in spill.spill_place().problem
    monkeypatch.setattr(spill.tempfile, "gettempdir", lambda: str(tmp_path / "none"))
    monkeypatch.setattr(spill, "_LASTING", str(tmp_path / "none"))
    assert "no temporary folder" in spill.spill_place().problem
