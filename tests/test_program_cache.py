"""Compiled programs found again: they behave as those that were compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pliant
from pliant import cache, pipeline, program_cache
from pliant.ir.parse import parse_module
from pliant.ir.text import print_module
from tests.artifact.observed import observed
from tests.artifact.saved_models import saved_models

ROOT = Path(pliant.__file__).parent.parent
MODELS = saved_models()
TEXT = """
graph @main(%x: f32[n, m]) {
  %s: f32[n, m] = softmax(%x) {axis = 1}
  return %s
}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path / "kept"))
    monkeypatch.setenv("PLIANT_CACHE_PROGRAMS", "1")
    return tmp_path / "kept"


def was_found(model: pliant.CompiledModel) -> bool:
    """Whether no stage ran for it."""
    seconds = model.stats()["stage_seconds"]
    assert ("cache" in seconds) is not ("lower" in seconds)
    return "cache" in seconds


@pytest.mark.parametrize("name", MODELS)
def test_found_as_compiled(name: str, tmp_path: Path) -> None:
    """Answers, plans, errors, reports and files are the same."""
    made = []
    for number in range(2):
        saved = saved_models()[name]
        model = saved.compile()
        assert was_found(model) is bool(number)
        assert model.compile_count == 1
        digest = model.save(tmp_path / "m.pliant")
        told = observed(model, saved.asked, saved.arrays)
        made.append((digest, told, print_module(model.program.lowered)))
    assert made[0] == made[1]


@pytest.mark.parametrize("name", ["linear", "attention", "convolution", "branching"])
def test_values_of_weights_are_not_compiled_in(name: str) -> None:
    """What the key leaves out does not matter: other values give the same code."""
    found = []
    for seed in range(2):
        saved = saved_models()[name]
        torch.manual_seed(seed)
        for tensor in saved.model.parameters():
            nn.init.normal_(tensor.data)
        cache.disk().trim(0)  # type: ignore[union-attr]
        model = saved.compile()
        assert not was_found(model)
        program = model.program
        found.append((print_module(program.lowered), program.code.machine.images))
    assert found[0] == found[1]


def test_weights_are_those_of_the_module_given() -> None:
    def net(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))

    x = torch.randn(5, 8)
    for seed in range(3):
        model = net(seed).eval()
        compiled = pliant.compile(model, (x,), ({0: "n"},))
        assert was_found(compiled) is (seed > 0)
        torch.testing.assert_close(compiled(x), model(x))
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.mul_(1.5)
        torch.testing.assert_close(compiled(x), model(x))  # it follows them
        compiled.freeze()
        kept = model(x)
        with torch.no_grad():
            model[0].weight.zero_()
        torch.testing.assert_close(compiled(x), kept)


class Literal(nn.Module):
    def __init__(self, values: list[float]) -> None:
        super().__init__()
        self.values = values

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tensor(self.values)


def test_what_differs_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(text: str = TEXT, **how: Any) -> bool:
        return was_found(pliant.compile(parse_module(text), **how))

    assert not compiled()
    assert compiled()
    assert compiled(threads=1)
    assert compiled(memory_limit="1MiB")
    assert not compiled(TEXT.replace("axis = 1", "axis = 0"))
    assert not compiled(TEXT.replace("n, m", "n, k"))
    assert not compiled(options=pliant.Options(fuse=False))
    assert not compiled(instruments=pliant.Instruments(profile=True))
    monkeypatch.setenv("PLIANT_OPT_LEVEL", "1")
    assert not compiled()
    monkeypatch.setenv("PLIANT_OPT_LEVEL", "2")
    monkeypatch.setattr(program_cache, "_FILES", "other files")
    assert not compiled()
    assert compiled()
    monkeypatch.setattr(program_cache, "_FILES", None)
    assert not compiled()
    assert not compiled()


def test_literals_are_part_of_the_key() -> None:
    x = torch.ones(3, 2)
    for values in ([1.0, 2.0], [1.0, 3.0]):
        model = Literal(values)
        compiled = pliant.compile(model, (x,), ({0: "n"},))
        torch.testing.assert_close(compiled(x), model(x))


def test_a_training_step() -> None:
    def trained() -> tuple[bool, list[torch.Tensor], list[float]]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 3))
        x, y = torch.randn(7, 6), torch.randn(7, 3)
        step = pliant.compile_training(
            net,
            nn.functional.mse_loss,
            torch.optim.AdamW(net.parameters(), lr=1e-2),
            ((x,), (y,)),
            (({0: "n"},), ({0: "n"},)),
        )
        losses = [float(step((x,), (y,))) for _ in range(3)]
        losses.append(float(step.gradients((x,), (y,))[0]))
        return was_found(step), [p.detach().clone() for p in net.parameters()], losses

    (first, wanted, losses), (second, got, again) = trained(), trained()
    assert (first, second) == (False, True)
    assert losses == again
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other)


def test_other_updates_are_compiled() -> None:
    x, y = torch.randn(7, 6), torch.randn(7, 3)
    kinds = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
    for kind in kinds:
        net = nn.Linear(6, 3)
        step = pliant.compile_training(
            net, nn.functional.mse_loss, kind(net.parameters(), lr=1e-2), ((x,), (y,))
        )
        assert not was_found(step)


def test_refused_examples_are_refused_again() -> None:
    model = parse_module(TEXT)
    inputs = (("x", model.main.params[0].shape), ("y", model.main.params[0].shape))

    def compile(sizes: list[list[int]]) -> None:
        made = parse_module(TEXT.replace("[n, m])", "[n, m], %y: f32[n, m])"))
        pipeline.compile_module(
            *(made, inputs, {"x": 0, "y": 1}, pliant.Options()),
            pliant.api._default_target(),  # type: ignore[attr-defined]
            example=sizes,
        )

    compile([[2, 3], [2, 3]])
    with pytest.raises(pliant.ShapeError):
        compile([[2, 3], [2, 4]])


def test_damaged_entries_are_compiled_again(folder: Path) -> None:
    def entries() -> list[Path]:
        return [p for p in folder.glob("*/*") if b"_KeptProgram" in p.read_bytes()]

    assert not was_found(pliant.compile(parse_module(TEXT)))
    (entry,) = entries()
    entry.write_bytes(entry.read_bytes()[:-9])
    assert not was_found(pliant.compile(parse_module(TEXT)))
    disk, found = cache.disk(), entries()
    assert disk is not None
    for contents in (b"", b"not a pickle", b"cos\nnothing\n."):
        assert disk.put(found[0].name, contents, "test")
        assert not was_found(pliant.compile(parse_module(TEXT)))
    assert was_found(pliant.compile(parse_module(TEXT)))


def test_off_and_dumps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pliant.compile(parse_module(TEXT))
    monkeypatch.setenv("PLIANT_DUMP", str(tmp_path / "dump"))
    assert not was_found(pliant.compile(parse_module(TEXT)))
    assert list((tmp_path / "dump").glob("*fuse*"))
    monkeypatch.delenv("PLIANT_DUMP")
    monkeypatch.setenv("PLIANT_CACHE_PROGRAMS", "0")
    assert not was_found(pliant.compile(parse_module(TEXT)))


SCRIPT = """
import sys, numpy as np, pliant
from pliant.ir.parse import parse_module
model = pliant.compile(parse_module(sys.argv[1]), threads=1)
x = np.arange(12, dtype=np.float32).reshape(3, 4)
print(model(x).tobytes().hex(), "cache" in model.stats()["stage_seconds"])
"""


def test_processes_that_start_together() -> None:
    """They write one entry; a later one finds it."""
    command = [sys.executable, "-c", SCRIPT, TEXT]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    how = {"stdout": subprocess.PIPE, "text": True, "env": environment}
    runs = [subprocess.Popen(command, **how) for _ in range(3)]  # type: ignore[call-overload]
    answers = [run.communicate()[0].split()[0] for run in runs]
    assert all(run.returncode == 0 for run in runs)
    late = subprocess.run(command, check=True, **how).stdout.split()  # type: ignore[call-overload]
    assert late == [answers[0], "True"]
    assert len(set(answers)) == 1
    x = np.frombuffer(bytes.fromhex(answers[0]), np.float32).reshape(3, 4)
    np.testing.assert_allclose(x.sum(1), 1.0, rtol=1e-6)


@pytest.mark.parametrize(
    ("model", "x", "shapes"),
    [
        (nn.ConvTranspose2d(4, 6, 3, 2, 1, groups=2), (2, 4, 7, 9), {0: "n", 2: "h"}),
        (nn.Conv1d(4, 6, 3), (2, 4, 17), {0: "n", 2: "w"}),
        (nn.Linear(300, 5), (3, 300), {0: "n"}),
        (nn.Linear(31, 2), (1, 31), {0: "n"}),
        (nn.LSTM(8, 16), (5, 2, 8), {0: "t", 1: "n"}),
    ],
)
def test_weights_of_every_layout(model: nn.Module, x: Any, shapes: Any) -> None:
    example = torch.randn(*x)
    wanted = model.eval()(example)
    for number in range(2):
        compiled = pliant.compile(model, (example,), (shapes,))
        assert was_found(compiled) is bool(number)
        torch.testing.assert_close(compiled(example), wanted)


def test_products_of_bytes() -> None:
    from pliant.ir.graph import Constant
    from pliant.ir.types import DType, TensorType
    from pliant.sym import as_expr

    text = """
    graph @main(%x: i8[n, 24]) {
      %w: i8[24, 10] = constant() {name = "w"}
      %y: i32[n, 10] = matmul(%x, %w)
      return %y
    }
    """
    random = np.random.default_rng(0)
    x = random.integers(-99, 99, (7, 24), np.int8)
    weights = random.integers(-99, 99, (2, 24, 10), np.int8)
    for weight, seen in ((weights[0], False), (weights[0], True), (weights[1], False)):
        kind = TensorType(DType.I8, (as_expr(24), as_expr(10)))
        module = parse_module(text).replace(
            constants={"w": Constant("w", kind, weight)}
        )
        model = pliant.compile(module)
        assert was_found(model) is seen
        wanted = x.astype(np.int32) @ weight.astype(np.int32)
        np.testing.assert_array_equal(model(x), wanted)
