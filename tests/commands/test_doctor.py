"""`pliant doctor`: what it says, and its exit status."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pliant.commands import doctor
from pliant.machine import target
from pliant.measure import probes
from pliant.measure.probes import Level, Measured

LIMITS = Measured(
    cores=2,
    fma_gflops_1=90.0,
    fma_gflops_all=180.5,
    read_gbs_1=20.25,
    read_gbs_all=31.0,
    levels=(
        Level("L1", 16384, 300.0, 600.0),
        Level("L2", 1 << 19, 150.0, 300.0),
        Level("L3", 1 << 22, 40.0, 80.0),
        Level("memory", 1 << 27, 20.25, 31.0),
    ),
    beyond_l3=False,
)


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("PLIANT_TARGET", "PLIANT_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path / "kept"))
    monkeypatch.setattr(probes, "_memo", {})


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    doctor.add_arguments(parser)
    return doctor.run(parser.parse_args(words))


def report(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    status = run("--json", *words)
    return status, json.loads(capsys.readouterr().out)


def test_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run() == 0
    text = capsys.readouterr().out
    for word in ("llvmlite", "host-", "share with torch", "not measured yet"):
        assert word in text
    assert text.count("  OK  ") == 5
    assert "problem" not in text
    assert (tmp_path / "kept").is_dir()


def test_json_is_a_target(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, data = report(capsys)
    assert (status, data["ok"], data["measured"]) == (0, True, None)
    assert data["versions"]["pliant"]
    assert data["cache"]["folder"] == str(tmp_path / "kept")
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(data))
    monkeypatch.setenv("PLIANT_TARGET", str(path))
    assert target.named(str(path)) == target.host()
    assert report(capsys)[1]["target"] == data["target"]


def test_measured_once_and_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[target.Target] = []

    def measured(to: target.Target) -> Measured:
        asked.append(to)
        return LIMITS

    monkeypatch.setattr(probes, "_measure", measured)
    assert run("--measure") == 0
    text = capsys.readouterr().out
    assert "90.0 GFLOP/s on one core, 180.5 on 2" in text
    assert "20.2 GB/s on one core, 31.0 on 2 (128 MiB each; L3 is too large" in text
    monkeypatch.setattr(probes, "_memo", {})  # as in another process
    assert report(capsys)[1]["measured"] == json.loads(json.dumps(LIMITS.to_json()))
    assert len(asked) == 1
    run("--measure")
    assert len(asked) == 2


def test_problems(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path / "file" / "folder"))
    monkeypatch.setenv("PLIANT_TARGET", "neon")
    if target.runs_here(target.neon()):
        monkeypatch.setenv("PLIANT_TARGET", "baseline")
    status, data = report(capsys, "--measure")
    assert (status, data["ok"], data["measured"]) == (1, False, None)
    problems = {c["what"]: c["problem"] for c in data["checks"] if c["problem"]}
    assert set(problems) == {"features of the target", "cache folder"}
    assert "does not run here" in problems["features of the target"]
    assert "cannot make the folder" in problems["cache folder"]
    assert "set PLIANT_CACHE to another, or to 'off'" in problems["cache folder"]
    assert run() == 1
    assert "problem" in capsys.readouterr().out


def test_cache_off(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLIANT_CACHE", "off")
    status, data = report(capsys)
    assert (status, data["cache"]) == (0, None)


def test_a_runtime_that_does_not_load(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pliant.runtime import binding

    def load() -> None:
        raise OSError("no such library")

    monkeypatch.setattr(binding, "load", load)
    status, data = report(capsys)
    assert status == 1
    assert data["checks"][0]["problem"] == "no such library"


def test_masked_features() -> None:
    if not target.host().triple.startswith("x86_64"):
        pytest.skip("names of x86-64 CPUs")
    wide = replace(target.avx512(), cpu="skylake-avx512")
    assert doctor.masked(wide) is None
    assert doctor.masked(replace(target.avx2(), cpu="skylake-avx512")) == "avx512f"
    assert doctor.masked(replace(target.avx2(), cpu="haswell")) is None
    assert doctor.masked(replace(target.baseline(), cpu="haswell")) == "avx2"
