"""Saved models, loaded where neither torch nor LLVM is, answer as the compiled ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import namedtuple
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pliant
from pliant.artifact.read import open_artifact
from pliant.frontend.structure import Record
from pliant.machine import features
from tests.artifact.observed import observed
from tests.artifact.saved_models import saved_models

ROOT = Path(pliant.__file__).parent.parent
MODELS = saved_models()


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    """What the compiled models and the loaded ones answer, by name."""
    folder = tmp_path_factory.mktemp("saved")
    compiled = {}
    for name, saved in MODELS.items():
        model = saved.compile()
        path = folder / f"{name}.pliant"
        model.save(path)  # before calls change its buffers
        path.with_suffix(".json").write_text(json.dumps(asdict(saved.asked)))
        np.savez(path.with_suffix(".npz"), **saved.arrays)
        compiled[name] = observed(model, saved.asked, saved.arrays)
    script = [sys.executable, "-m", "tests.artifact.observed", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(script, capture_output=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr.decode()
    loaded = json.loads(done.stdout)
    return {name: (compiled[name], loaded[name]) for name in compiled}


@pytest.mark.parametrize("name", MODELS)
def test_answers_are_the_same(answers: dict[str, tuple[Any, Any]], name: str) -> None:
    compiled, loaded = answers[name]
    for what in compiled:
        assert loaded[what] == compiled[what], what


def test_what_is_asked_is_answered(answers: dict[str, tuple[Any, Any]]) -> None:
    """The cases reach what they are for."""
    got = {name: found for name, (found, _) in answers.items()}
    assert [error for error, _ in got["linear"]["bad"]] == [
        *("ShapeError", "ShapeError", "DTypeError")
    ]
    assert got["linear"]["limited"][-1][0] == "MemoryLimitError"
    assert got["wide"]["plans"][-1]["knobs"]["chunks"]
    assert got["kept"]["plans"][-1]["knobs"]["rematerialised"]
    assert "program 2 of" in got["branching"]["explain"]
    assert "decided by data" in got["selected"]["explain"]
    assert got["counting"]["calls"][0] != got["counting"]["calls"][2]
    assert got["gathering"]["bad"][0][0] == "IndexRangeError"


# ---- in this process


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, str]:
    model = MODELS["linear"].compile()
    path = tmp_path_factory.mktemp("one") / "linear.pliant"
    return model, path, model.save(path)


def test_torch_in_torch_out(linear: tuple[Any, Path, str]) -> None:
    model, path, digest = linear
    loaded = pliant.load(path, threads=2, digest=digest)
    x = torch.randn(9, 8)
    result = loaded(x)
    assert isinstance(result, torch.Tensor) and torch.equal(result, model(x))
    with pytest.raises(pliant.ShapeError, match="input"):
        loaded(torch.randn(9, 7))


def test_arrays_of_any_layout(linear: tuple[Any, Path, str]) -> None:
    loaded = pliant.load(linear[1], threads=1)
    x = np.arange(48, dtype=np.float32).reshape(6, 8)
    wanted = loaded(x)
    wide = np.zeros((6, 16), np.float32)
    wide[:, ::2] = x
    packed = np.zeros(6, [("flag", np.int8), ("row", np.float32, 8)])
    packed["row"] = x
    fixed = x.copy()
    fixed.flags.writeable = False
    for other in (wide[:, ::2], np.asfortranarray(x), packed["row"], fixed, x[::-1]):
        flip = other.strides[0] < 0
        got = loaded(other)
        np.testing.assert_array_equal(got, wanted[::-1] if flip else wanted)
    with pytest.raises(pliant.DTypeError, match="must be f32, got >f4"):
        loaded(x.astype(">f4"))
    with pytest.raises(pliant.DTypeError, match="dense tensor"):
        loaded(b"12345678")
    with pytest.raises(pliant.DTypeError, match="got complex64"):
        loaded(x.astype(np.complex64))


def test_a_file_that_is_loaded_again(linear: tuple[Any, Path, str]) -> None:
    """Models of one file do not share what they change; code goes with the last one."""
    _, path, _ = linear
    models = [pliant.load(path, threads=1) for _ in range(3)]
    x = np.ones((2, 8), np.float32)
    first = models[0](x)
    del models[0]
    assert all(np.array_equal(model(x), first) for model in models)


def test_limits_and_threads_of_a_file(tmp_path: Path) -> None:
    model = MODELS["linear"].compile()
    model.memory_limit = "1MiB"
    model.save(tmp_path / "m.pliant")
    assert pliant.load(tmp_path / "m.pliant").memory_limit == 1 << 20
    loaded = pliant.load(tmp_path / "m.pliant", memory_limit=5000, threads=1)
    assert loaded.memory_limit == 5000 and loaded.stats()["threads"] == 1
    with pytest.raises(pliant.MemoryLimitError):
        loaded(np.zeros((1000, 8), np.float32))


def test_digest_of_another_model(linear: tuple[Any, Path, str]) -> None:
    _, path, digest = linear
    with pytest.raises(pliant.ArtifactError, match="another model"):
        pliant.load(path, digest="0" * len(digest))


def test_what_a_loaded_model_is_not(
    linear: tuple[Any, Path, str], tmp_path: Path
) -> None:
    loaded = pliant.load(linear[1])
    with pytest.raises(pliant.ArtifactError, match="copy that file"):
        loaded.save(tmp_path / "again.pliant")
    with pytest.raises(pliant.PliantError, match="has no program"):
        _ = loaded.program
    with pytest.raises(pliant.PliantError, match="follows no module"):
        loaded.refresh()
    with pytest.raises(pliant.OptionError, match="without dims"):
        loaded.explain(n=3)
    loaded.freeze()


Pair = namedtuple("Pair", "best others")


class Nested(nn.Module):
    def forward(self, x: torch.Tensor, more: dict[str, Any], scale: float = 2.0) -> Any:
        y = x * scale + more["add"]
        best = Pair(y.amax(1), [y, more["items"][0] + 1])
        return {"best": best, "size": x.shape[0], "none": None}


def test_structures_and_names(tmp_path: Path) -> None:
    x, add, item = torch.randn(3, 4), torch.randn(4), torch.randn(2)
    more = {"add": add, "items": [item]}
    shapes = ({0: "n"}, {"add": None, "items": [None]})
    model = pliant.compile(Nested(), (x, more), shapes, threads=1)
    model.save(tmp_path / "m.pliant")
    loaded = pliant.load(tmp_path / "m.pliant", threads=1)
    arrays = {"add": add.numpy(), "items": [item.numpy()]}
    got = loaded(more=arrays, x=x.numpy())
    wanted = model(x, more)
    assert list(got) == list(wanted) and got["size"] == 3 and got["none"] is None
    assert type(got["best"]).__name__ == "Pair" and got["best"]._fields == Pair._fields
    np.testing.assert_array_equal(got["best"].best, wanted["best"].best.numpy())
    np.testing.assert_array_equal(got["best"].others[1], item.numpy() + 1)
    with pytest.raises(pliant.ShapeError, match="input 'more' has another structure"):
        loaded(x.numpy(), {"add": add.numpy(), "items": (item.numpy(),)})
    with pytest.raises(pliant.ShapeError, match="missing: more"):
        loaded(x.numpy())


class Halves(nn.Module):
    """It changes a buffer of bf16, which NumPy has not."""

    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.arange(4.0).bfloat16())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x.sum(0).bfloat16())
        return x * self.total.float()


def test_buffers_of_bf16(tmp_path: Path) -> None:
    shapes = ({0: "n"},)
    model = pliant.compile(Halves(), (torch.ones(3, 4),), shapes, threads=1)
    model.save(tmp_path / "m.pliant")
    loaded = pliant.load(tmp_path / "m.pliant", threads=1)
    for number in range(6):
        x = torch.randn(1 + number % 3, 4)
        wanted = model(x)
        got = loaded(x if number % 2 else x.numpy())
        np.testing.assert_array_equal(np.asarray(got), wanted.numpy())
    assert loaded.memory_plan(n=3) == model.memory_plan(n=3)


class Cached(nn.Module):
    def forward(self, x: torch.Tensor, cache: torch.Tensor) -> Any:
        cache = torch.cat([cache, x], 0)
        return cache.cumsum(0)[-1:] * 2, cache


def test_inputs_that_grow(tmp_path: Path) -> None:
    example = torch.ones(1, 4), pliant.Growing(torch.zeros(2, 4), 0, 8)
    shapes = {0: "n"}, {0: "old"}
    model = pliant.compile(Cached(), example, shapes, threads=1)
    model.save(tmp_path / "m.pliant")
    loaded = pliant.load(tmp_path / "m.pliant", threads=1)
    ours = pliant.Growing(torch.zeros(0, 4), 0, 8)
    theirs = pliant.Growing(np.zeros((0, 4), np.float32), 0, 8)
    for rows in (1, 3, 2):
        x = torch.randn(rows, 4)
        wanted, _ = model(x, ours)
        got, same = loaded(x.numpy(), theirs)
        assert same is theirs and len(theirs) == len(ours)
        np.testing.assert_array_equal(got, wanted.numpy())
        np.testing.assert_array_equal(theirs.tensor, ours.tensor.numpy())
    with pytest.raises(pliant.DTypeError, match="grows"):
        loaded(x.numpy(), theirs.tensor)
    assert loaded.memory_plan(n=1, old=3) == model.memory_plan(n=1, old=3)


def test_a_record_has_its_fields_in_three_ways() -> None:
    record = Record(logits=1, hidden=2)
    assert record.logits == record["logits"] == record[0] == 1
    assert record[1:] == (2,) and list(record) == ["logits", "hidden"]
    with pytest.raises(AttributeError):
        _ = record.other


class Unknown:
    """A container that only this process knows."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Wrapped(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return Unknown(x + 1)


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    torch.utils._pytree.register_pytree_node(
        Unknown, lambda u: ([u.value], None), lambda items, _: Unknown(*items)
    )
    model = pliant.compile(Wrapped(), (torch.randn(2),), ({0: "n"},), threads=1)
    with pytest.raises(pliant.ArtifactError, match="cannot be saved"):
        model.save(tmp_path / "m.pliant")
    with pytest.raises(pliant.ArtifactError, match="cannot write"):
        MODELS["linear"].compile().save(tmp_path / "missing" / "m.pliant")
    assert not list(tmp_path.iterdir())


def test_variants_for_several_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best one that runs is taken; a machine with less gets another."""
    from pliant.machine import target

    net, x = nn.Linear(8, 4), torch.randn(3, 8)
    models = [
        pliant.compile(net, (x,), ({0: "n"},), threads=1, target=target.named(name))
        for name in ("baseline", "x86-64-v2", "x86-64-v3", "x86-64-v4")
        if target.runs_here(target.named(name))
    ]
    path = tmp_path / "m.pliant"
    models[0].save(path, variants=models[1:])
    assert torch.equal(pliant.load(path, threads=1)(x), models[-1](x))
    taken = open_artifact(path, None, check_weights=True).variant.target
    assert taken == ("avx512", "avx2", "sse4", "baseline")[-len(models)]
    plain = frozenset({"lm", "sse", "sse2"})
    second = {"pni", "ssse3", "sse4_1", "sse4_2", "popcnt", "cx16", "lahf_lm"}
    known = (("baseline", plain), ("sse4", plain | second))
    for (name, present), model in zip(known, models, strict=False):
        monkeypatch.setattr(features, "_present", lambda flags=present: flags)
        assert open_artifact(path, None, check_weights=True).variant.target == name
        assert torch.equal(pliant.load(path, threads=1)(x), model(x))
    other = pliant.compile(nn.Linear(7, 4), (x[:, :7],), ({0: "n"},), threads=1)
    with pytest.raises(pliant.ArtifactError, match="must be one model"):
        models[0].save(path, variants=[other])
