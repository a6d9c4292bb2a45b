"""Gradients of random training steps: half a minute of them, always the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchgen
from gradients import judge_gradients
from random_models import Input, Line, Model, model

import pliant
from pliant.frontend.torch_ops import TABLE, without_derivative

SEEDS = range(0, 40, 10)  # the first of each test; it does ten


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("start", SEEDS)
def test_as_eager(start: int, whole: bool) -> None:
    for seed in range(start, start + 10):
        made = model(seed)
        found = judge_gradients(made, whole)
        assert not found.bad, f"seed {seed}: {found}\n{made.script()}"


@pytest.mark.parametrize("whole", [True, False])
def test_the_judge_finds_a_wrong_gradient(
    whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = Input("x0", ("n", 7), torch.float32)
    line = Line("v0", "aten.exp.default(x0)", "aten.exp.default")
    made = Model(0, (given,), (line,), (), ("v0",), ((1, 4, 1), (1, 9, 1)))
    assert judge_gradients(made, whole).kind == "fine"
    right = pliant.TrainingStep.gradients

    def wrong(self: pliant.TrainingStep, *args: Any) -> Any:
        found, gradients = right(self, *args)
        return found, {name: g * 1.02 for name, g in gradients.items()}

    monkeypatch.setattr(pliant.TrainingStep, "gradients", wrong)
    assert judge_gradients(made, whole).kind == "wrong"


def flat_functions() -> set[str]:
    """By torch's own table of derivatives: `- name: f(..)`, then `  x: formula`."""
    folder = Path(str(torchgen.__file__)).parent
    table = (folder / "packaged/autograd/derivatives.yaml").read_text()
    found = set()
    for block in table.split("- name: ")[1:]:
        name, *formulas = block.split("\n\n")[0].splitlines()
        given = [f.partition(": ")[2] for f in formulas if f.startswith("  ")]
        if given and all(f == "non_differentiable" for f in given):
            found.add(name.partition("(")[0])
    return found


def test_functions_that_torch_does_not_differentiate() -> None:
    flat = flat_functions()
    assert len(flat) > 50
    for overload in TABLE:
        name = str(overload).removeprefix("aten.").removesuffix(".default")
        if name.startswith("special_"):
            assert without_derivative(overload) == (name in flat), name
