"""Training steps that go on in another process, to the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pliant
from tests.artifact.observed import shown
from tests.artifact.resumed_steps import COUNT, batch

ROOT = Path(pliant.__file__).parent.parent
AXES = (({0: "n"},), ({0: "n"},))
Make = Callable[[nn.Module], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.05),
    "momentum": lambda net: torch.optim.SGD(
        net.parameters(), lr=0.05, momentum=0.9, dampening=0.3, weight_decay=0.01
    ),
    "adam": lambda net: torch.optim.Adam(net.parameters(), lr=0.01, amsgrad=True),
    "groups": lambda net: torch.optim.AdamW(
        [
            {"params": net[0].parameters(), "lr": 0.02},  # type: ignore[index]
            {"params": net[4].parameters(), "betas": (0.8, 0.99)},  # type: ignore[index]
        ],
        lr=0.01,
    ),
}


def net() -> nn.Sequential:
    torch.manual_seed(1)
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.GELU()
    return nn.Sequential(*layers, nn.Linear(8, 3))


def compiled(make: Make, **how: Any) -> tuple[nn.Sequential, Any]:
    model = net()
    x, y = map(torch.from_numpy, batch(0))
    loss = nn.functional.mse_loss
    step = pliant.compile_training(
        model, loss, make(model), ((x,), (y,)), AXES, threads=2, **how
    )
    return model, step


def run(step: Any, number: int) -> Any:
    x, y = map(torch.from_numpy, batch(number))
    return step((x,), (y,))


def test_parameters_of_bf16(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def loss(y: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return (y.float() - wanted).square().mean()

    x, y = torch.randn(4, 6).bfloat16(), torch.randn(4, 3)
    step = pliant.compile_training(model, loss, optimizer, ((x,), (y,)), AXES)
    step((x,), (y,))
    step.save(tmp_path / "step.pliant")
    loaded = pliant.load(tmp_path / "step.pliant")
    for _ in range(3):
        assert torch.equal(step((x,), (y,)), loaded((x,), (y,)))
    bits = loaded.state["weight"]
    wanted = model.weight.detach().view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(bits, wanted)
    loaded.save(tmp_path / "later.pliant")
    later = pliant.load(tmp_path / "later.pliant")
    assert torch.equal(step((x,), (y,)), later((x,), (y,)))


def test_going_on_in_another_process(tmp_path: Path) -> None:
    wanted = {}
    for name, make in OPTIMIZERS.items():
        clip = {"clip_grad_norm": 0.5} if name == "groups" else {}
        model, step = compiled(make, **clip)
        if name != "adam":  # whose state is still to be made
            for number in range(3):
                run(step, number)
        step.save(tmp_path / f"{name}.pliant")
        losses = [shown(run(step, number).numpy()) for number in range(COUNT)]
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        state = {key: shown(t.detach().numpy()) for key, t in tensors.items()}
        wanted[name] = losses, state
    script = [sys.executable, "-m", "tests.artifact.resumed_steps", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(script, capture_output=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr.decode()
    got = json.loads(done.stdout)
    assert got.keys() == wanted.keys()
    for name, (losses, state) in wanted.items():
        assert got[name]["losses"] == losses, name
        for key, value in state.items():
            assert got[name]["state"][key] == value, (name, key)
    assert got["groups"]["steps"] == 3 + COUNT


def test_a_loaded_step(tmp_path: Path) -> None:
    """Has options, plans and a limit; a refused call changes nothing."""
    _, step = compiled(OPTIMIZERS["groups"])
    path = tmp_path / "m.pliant"
    step.save(path)
    loaded, other = pliant.load(path), pliant.load(path)
    asked = {"n": 50}
    assert (
        loaded.memory_plan(**asked).peak_bytes == step.memory_plan(**asked).peak_bytes
    )
    before = loaded.state  # type: ignore[attr-defined]
    x, y = batch(0)
    with pytest.raises(pliant.ShapeError):
        loaded((x[:, :5],), (y,))
    for name, array in loaded.state.items():  # type: ignore[attr-defined]
        np.testing.assert_array_equal(array, before[name])
    assert loaded((x,), (y,)).tobytes() == other((x,), (y,)).tobytes()
    for options in loaded.options:  # type: ignore[attr-defined]
        options["lr"] = 0.0
        options["weight_decay"] = 0.0
    kept = loaded.state["0.weight"]  # type: ignore[attr-defined]
    loaded((x,), (y,))
    np.testing.assert_array_equal(loaded.state["0.weight"], kept)  # type: ignore[attr-defined]
    other((x,), (y,))
    assert not np.array_equal(other.state["0.weight"], kept)  # type: ignore[attr-defined]
