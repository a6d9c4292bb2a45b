"""Traces of a call, and what a notebook shows of a model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import pliant


@pytest.fixture(scope="module")
def model() -> pliant.CompiledModel:
    net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Softmax(-1), nn.Linear(64, 16))
    watch = pliant.Instruments(profile=True)
    shapes = ({0: "batch", 1: "seq"},)
    return pliant.compile(net, (torch.randn(2, 8, 16),), shapes, instruments=watch)


def test_a_trace(model: pliant.CompiledModel, tmp_path: Path) -> None:
    model.trace(torch.randn(3, 50, 16), path=tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    events = trace["traceEvents"]
    kernels = [event for event in events if event["ph"] == "X"]
    assert len(kernels) == model.stats()["kernel_calls"]
    ends = [event["ts"] + event["dur"] for event in kernels]
    begins = [event["ts"] for event in kernels]
    assert all(a <= b + 1e-3 for a, b in zip(ends, begins[1:], strict=False))
    live = [event["args"]["bytes"] for event in events if event["ph"] == "C"]
    told = model.memory_timeline(batch=3, seq=50)
    assert live == [*(moment.live_bytes for moment in told.moments), 0]
    assert "batch=3, seq=50" in events[0]["args"]["name"]


def test_a_trace_needs_times(tmp_path: Path) -> None:
    model = pliant.compile(nn.Linear(4, 4), (torch.randn(2, 4),), ({0: "n"},))
    with pytest.raises(pliant.OptionError, match="Instruments"):
        model.trace(torch.randn(2, 4), path=tmp_path / "trace.json")


def test_a_notebook_shows_the_peaks(model: pliant.CompiledModel) -> None:
    shown = model._repr_html_()
    peak = model.memory_plan(batch=1, seq=128).peak_bytes
    assert f"seq = 128: {peak / 2**20:.3f} MiB ({peak} bytes)" in shown
    assert model.peak_summary in shown and "batch, seq" in shown
    assert not re.search("https?:|src=", shown)


def test_of_a_model_without_dims() -> None:
    model = pliant.compile(nn.Linear(4, 4), (torch.randn(2, 4),))
    assert "every size is fixed" in model._repr_html_()


def test_the_report_of_a_saved_model(
    model: pliant.CompiledModel, tmp_path: Path
) -> None:
    model.save(tmp_path / "net.pliant")
    loaded = pliant.load(tmp_path / "net.pliant")
    loaded.report(tmp_path / "report.html", batch=2, seq=64)
    text = (tmp_path / "report.html").read_text()
    assert f"{loaded.memory_plan(batch=2, seq=64).peak_bytes} bytes" in text
