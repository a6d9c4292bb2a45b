"""`pliant chat` on a tiny model."""

from __future__ import annotations

import io
import json

import pytest
from tiny_gguf import reference, write

from pliant.cli import main


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("chat") / "tiny.gguf"
    write(path, reference("llama", True), "q8_0", "llama")
    return str(path)


def test_chat(
    file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ["chat", file, "--max-new-tokens", "6", "--threads", "1"]
    assert main([*common, "--prompt", "the", "--system", "on"]) == 0
    assert capsys.readouterr().out.endswith("\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("the\n\nan\n"))
    assert main([*common, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["answers"]) == 2


def test_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "nowhere.gguf", "--prompt", "the"]) == 1
    assert "nowhere.gguf" in capsys.readouterr().err
