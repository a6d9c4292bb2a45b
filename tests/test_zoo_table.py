"""The zoo: what its table says is true, and building is lazy and repeatable."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from pliant import cases
from pliant.errors import OptionError

DEPTHS: dict[str, Callable[[Any], int]] = {
    "bert": lambda model: len(model.encoder.layer),
    "tinybert": lambda model: len(model.encoder.layer),
    "minilm": lambda model: len(model.encoder.layer),
    "gpt2": lambda model: len(model.transformer.h),
    "llama": lambda model: len(model.model.layers),
    "t5_encoder": lambda model: len(model.encoder.block),
    "vit": lambda model: model.config.num_hidden_layers,
    "resnet": lambda model: sum(len(s.layers) for s in model.encoder.stages),
    "evoformer": lambda model: 1,
    "unet": lambda model: len(model.down_blocks) + 1 + len(model.up_blocks),
}


@pytest.mark.parametrize("name", zoo.MODELS)
def test_labels(name: str) -> None:
    told = zoo.MODELS[name]
    with torch.device("cpu" if told.weights == "real" else "meta"):
        case = zoo.build(name)
    parameters = sum(parameter.numel() for parameter in case.model.parameters())
    assert parameters == told.parameters
    assert int(told.depth.split()[0]) == DEPTHS[name](case.model.model)
    assert case.about() == (
        f"{told.depth}, {told.weights} weights, {parameters / 1e6:.1f} M parameters"
    )
    assert not case.model.training
    assert len(case.inputs(*case.example)) == len(case.dynamic_shapes)


def test_only_real_weights_are_called_real() -> None:
    assert [n for n, m in zoo.MODELS.items() if m.weights != "random"] == ["minilm"]


@pytest.mark.parametrize("name", zoo.MODELS)
def test_shapes(name: str) -> None:
    sizes = zoo.MODELS[name].sizes
    assert len(set(sizes.shapes)) == 8 and len(sizes.long) == 2
    for shape in (sizes.example, *sizes.shapes, *sizes.long):
        assert len(shape) == len(sizes.dims) and min(shape) >= 1


def test_weights_are_the_same_every_time() -> None:
    torch.manual_seed(7)
    first = zoo.build("bert", layers=1, hidden=128)
    here = torch.rand(1)
    second = zoo.build("bert", layers=1, hidden=128)
    for one, other in zip(
        first.model.parameters(), second.model.parameters(), strict=True
    ):
        assert torch.equal(one, other)
    torch.manual_seed(7)
    assert torch.equal(here, torch.rand(1))  # building draws nothing from the user's
    assert first.about().startswith("layers=1, hidden=128, random weights, ")


def test_nothing_is_imported_before_it_is_built() -> None:
    text = "import sys, zoo; print([m for m in sys.modules if 'transformers' in m])"
    done = subprocess.run(
        [sys.executable, "-c", text],
        cwd=Path(zoo.__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "zoo.unet", raising=False)
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(OptionError, match=r"'unet' needs the package 'diffusers'"):
        zoo.build("unet")


def test_names() -> None:
    assert cases.expand(["zoo", "bert"]) == list(zoo.MODELS)
    assert cases.load("tinybert").name == "tinybert"
    with pytest.raises(OptionError, match=r"no model 'tiny' in the zoo: bert, "):
        cases.load("tiny")


def test_names_where_pliant_is_installed_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cases, "ROOT", tmp_path)
    for names in (["bert"], ["zoo"]):
        with pytest.raises(OptionError, match=r"give a model as file\.py, file\.py:f"):
            cases.expand(names)
