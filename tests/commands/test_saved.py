"""`pliant compile`, `run` and `inspect` of saved models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pliant.cli import main

TINY = Path(__file__).with_name("tiny.py")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "tiny.pliant"
    assert main(["compile", f"{TINY}:net", "-o", str(path)]) == 0
    return path


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_inspect_and_run(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    told = answer(capsys, "inspect", str(saved))
    assert told["bytes"] == saved.stat().st_size and len(told["digest"]) == 64
    sizes = ",".join(f"{name}=3" for name in told["dims"])
    known = answer(capsys, "inspect", str(saved), "--memory", sizes)
    assert known["memory"]["peak_bytes"] > 0
    out = tmp_path / "out.npz"
    ran = answer(capsys, "run", str(saved), "--dims", sizes, "-o", str(out))
    arrays = np.load(out)
    assert {n: list(arrays[n].shape) for n in arrays} == {
        name: found["shape"] for name, found in ran["results"].items()
    }
    assert main(["inspect", str(saved)]) == 0 and "digest" in capsys.readouterr().out
    assert main(["run", str(saved), "--dims", sizes]) == 0


def test_what_is_wrong_is_told(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "bad.pliant"
    damaged.write_bytes(saved.read_bytes()[:-1])
    assert main(["run", str(damaged)]) == 1
    assert "is damaged" in capsys.readouterr().err
    assert main(["run", str(saved)]) == 2
    assert "--dims" in capsys.readouterr().err
    assert main(["run", str(saved), "-i", "missing.npy"]) == 2
    assert "cannot read" in capsys.readouterr().err
    assert main(["inspect", str(TINY)]) == 2
    assert "--memory is needed" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["compile", "x.onnx", "-o", "y", "--dynamic", "ids"])
