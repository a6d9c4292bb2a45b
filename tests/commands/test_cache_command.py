"""`pliant cache`, completion scripts, and what the command line does with errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pliant
from pliant import cli
from pliant.backend import build
from pliant.cli import main
from pliant.ir.parse import parse_module

TEXT = """
graph @main(%x: f32[n, m]) {
  %s: f32[n, m] = softmax(%x) {axis = 1}
  return %s
}
"""


def test_show_and_clear(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path / "kept"))
    monkeypatch.setenv("PLIANT_CACHE_PROGRAMS", "1")
    build.memo.clear()
    model = pliant.compile(parse_module(TEXT), threads=1)
    assert main(["cache", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["folder"] == str(tmp_path / "kept")
    assert set(told["kinds"]) == {"object code", "program"}
    assert told["kinds"]["program"]["entries"] == 1
    assert told["bytes"] > 0
    (tmp_path / "kept" / "ab").mkdir(exist_ok=True)
    (tmp_path / "kept" / "ab" / ("ab" * 16)).write_bytes(b"something else")
    assert main(["cache"]) == 0
    assert "damaged" in capsys.readouterr().out
    assert main(["cache", "clear", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["entries"] == told["bytes"] == 0 and told["removed_bytes"] > 0
    np.testing.assert_allclose(model(np.ones((2, 4), np.float32)), 0.25)
    monkeypatch.setenv("PLIANT_CACHE", "off")
    assert main(["cache"]) == 0
    assert "off" in capsys.readouterr().out


def test_a_folder_that_others_can_write_to(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path))
    tmp_path.chmod(0o777)
    assert main(["cache"]) == 1
    assert "anyone may write" in capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for name in (*cli.COMMANDS, "--random-shapes", "--memory-limit", "clear"):
        assert name in script


def test_completion_in_bash(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    for words, wanted in (
        (["pliant", "ver"], "verify"),
        (["pliant", "verify", "--aga"], "--against"),
        (["pliant", "cache", "cl"], "clear"),
    ):
        line = " ".join(words)
        ask = f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _pliant; "
        ask += 'echo "${COMPREPLY[@]}"'
        done = subprocess.run(
            ["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True
        )
        assert done.stdout.split() == [wanted], done.stderr


def test_errors_have_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> int:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("pliant.commands.cache.run", broken)
    assert main(["cache"]) == 1
    told = capsys.readouterr().err
    assert "ZeroDivisionError: a bug" in told and "Traceback" not in told
    assert main(["cache", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_as_a_module() -> None:
    command = [sys.executable, "-m", "pliant"]
    done = subprocess.run([*command, "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and pliant.__version__ in done.stdout
    done = subprocess.run([*command, "dance"], capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
