"""The development models: imported, legal, and equal to eager on unseen sizes."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch_oracle import run, same

import zoo
from pliant.errors import ShapeError
from pliant.frontend.contract import Imported
from pliant.frontend.torch_programs import programs
from pliant.ir.spec import Stage, verify
from pliant.pipeline import simplified


@dataclass(frozen=True)
class Plan:
    """How to build a model small, and the sizes to run it on."""

    options: dict[str, int]
    params: list[str]
    sizes: list[tuple[int, ...]]


TEXT = [(1, 1), (3, 7)]
PLANS = {
    "bert": Plan({"layers": 1, "hidden": 128}, ["i64[s0, s1]", "i64[s2, s1]"], TEXT),
    "tinybert": Plan({}, ["i64[s0, s1]", "i64[s2, s1]"], TEXT),
    "minilm": Plan({}, ["i64[s0, s1]", "i64[s0, s1]"], TEXT),
    "gpt2": Plan({"layers": 1}, ["i64[s0, s1]"], TEXT),
    "llama": Plan({"layers": 1}, ["i64[s0, s1]"], TEXT),
    "t5_encoder": Plan({"layers": 1}, ["i64[s0, s1]", "i64[s2, s1]"], TEXT),
    "vit": Plan({"layers": 1}, ["f32[s0, 3, s1, s2]"], [(1, 1), (1, 14)]),
    "resnet": Plan({}, ["f32[s0, 3, s1, s2]"], [(1, 33, 64)]),
    "evoformer": Plan(
        {},
        ["f32[s0, s1, 1024]", "f32[s0, s1, s1, 128]", "f32[s0, s1]"],
        [(1, 1), (1, 5)],
    ),
    "unet": Plan({}, ["f32[s0, 4, s1, s2]", "f32[]", "f32[s0, s3, 64]"], [(1, 1, 3)]),
}


@pytest.fixture(scope="module", params=PLANS)
def model(request: Any) -> tuple[str, Any, tuple[Imported, ...]]:
    plan = PLANS[request.param]
    case = zoo.build(request.param, **plan.options)
    found = programs(
        case.model,
        case.inputs(*case.example),
        case.dynamic_shapes,
        simplify=simplified,
    )
    return request.param, case, found


def test_model(model: tuple[str, Any, tuple[Imported, ...]]) -> None:
    name, case, (imported, *others) = model
    for program in (imported, *others):
        verify(program.module, Stage.IMPORTED)
    assert [str(p.type) for p in imported.module.main.params] == PLANS[name].params
    for size in PLANS[name].sizes:
        args = case.inputs(*size)
        with torch.no_grad():
            want = case.model(*args)
        got = None
        for program in (imported, *others):
            with suppress(ShapeError):
                got = run(program, args)
        same(got, want, tolerance=1e-4)


def test_what_the_models_demand(model: tuple[str, Any, tuple[Imported, ...]]) -> None:
    name, case, (imported, *others) = model
    # Of no elements, eager neither infers a -1 of a view nor picks any: nor do we.
    nothing = re.compile(r"1 <= .*s0.*|min\(s0, 1\) <= s2")
    demands = [f"{g.cond}" for g in imported.module.main.constraints]
    demands = [demand for demand in demands if not nothing.fullmatch(demand[:200])]
    assert len(others) == (1 if name == "vit" else 0)
    if name == "evoformer":
        assert not demands
    if name in ("gpt2", "llama", "t5_encoder"):  # they ask whether a length is above 1
        assert demands == ["1 <= s1"]
    if name in ("bert", "tinybert", "minilm"):
        assert sorted(demands) == ["1 <= s1", "s1 <= 512"]
        with pytest.raises(ShapeError, match=r"modeling_bert\.py:\d+"):
            run(imported, case.inputs(1, 513))
    if name == "vit":  # at 14 * 14 patches it has a way around the resizing
        assert demands[0] == "(s1//16)*(s2//16) != 196"
        assert demands[-2:] == ["16 <= s1", "16 <= s2"]
    if name == "unet":
        # What it does from a batch of 64 on is proved to be the same.
        assert demands[:2] == ["2 divides s1", "2 divides s2"]
        assert "s0 < 64" not in demands
