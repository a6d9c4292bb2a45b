"""The garbage collector while a model is compiled."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest

import pliant
from pliant import pipeline
from pliant.collection import paused_collection
from pliant.context import Context
from pliant.ir.graph import Module
from pliant.ir.parse import parse_module

MODEL = "graph @main(%x: f32[n]) {\n  %y: f32[n] = exp(%x)\n  return %y\n}\n"


@pytest.mark.parametrize("on", [True, False])
def test_setting_is_kept(on: bool) -> None:
    (gc.enable if on else gc.disable)()
    try:
        with paused_collection():
            assert not gc.isenabled()
        assert gc.isenabled() == on
        with pytest.raises(KeyError), paused_collection():
            raise KeyError
        assert gc.isenabled() == on
    finally:
        gc.enable()


def test_paused_while_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def watched(module: Module, cx: Context) -> Module:
        seen.append(gc.isenabled())
        return module

    stage = replace(pipeline.STAGES[0], name="watched", run=watched)
    monkeypatch.setattr(pipeline, "_WHOLE", (stage, *pipeline._WHOLE))
    module: Module = parse_module(MODEL)
    pliant.compile(module)
    assert seen == [False]
    assert gc.isenabled()
