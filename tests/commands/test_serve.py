"""`pliant serve` as a process: it says where it listens, answers, and stops."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from tiny_gguf import reference, write

from pliant.cli import main
from pliant.commands.serve import _listening
from pliant.errors import OptionError


def test_serve(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write(file, reference("llama", True), "q8_0", "llama")
    command = [sys.executable, "-m", "pliant", "serve", str(file), "--port", "0"]
    command += ["--memory-limit", "100MiB", "--threads", "1", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        assert (told["model"], told["memory_limit"]) == ("tiny", 100 << 20)
        body = {"prompt": "the", "max_tokens": 3}
        answer = httpx.post(f"{told['url']}/v1/completions", json=body, timeout=60)
        assert answer.json()["model"] == "tiny"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_what_serve_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tiny.gguf"
    assert main(["serve", "nowhere.gguf"]) == 1
    write(file, reference("llama", True), "q8_0", "llama")
    assert main(["serve", str(file), "--memory-limit", "10KB"]) == 1
    assert "weights" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", str(file), "--port", port]) == 2
    assert "cannot listen" in capsys.readouterr().err


def test_a_port_is_taken_before_the_model_is_loaded() -> None:
    with _listening("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with (
            pytest.raises(OptionError, match="cannot listen"),
            _listening("127.0.0.1", port),
        ):
            pass
