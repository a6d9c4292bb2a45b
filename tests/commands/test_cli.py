"""The command line end to end: what it prints, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pliant.cli import main

TINY = str(Path(__file__).with_name("tiny.py"))
FAST = ["--threads", "1", "--rounds", "3"]


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    status = main([*arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["dance"],
        ["bench"],
        ["bench", "nowhere.py:net"],
        ["bench", "nowhere.pt2"],
        ["bench", f"{TINY}:missing"],
        ["bench", "missing"],
        ["explain", "missing"],
        ["explain", "nowhere.pt2"],
        ["bench", "--peers", "abacus", f"{TINY}:net"],
        ["bench", "--threads", "0", f"{TINY}:net"],
        ["bench", "--shape", "1xtwo", f"{TINY}:net"],
        ["explain"],
        ["explain", f"{TINY}:not_a_case"],
    ],
)
def test_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: object = main(arguments)
    except SystemExit as end:
        status = end.code
    assert status == 2
    told = capsys.readouterr()
    assert told.err and not told.out


@pytest.mark.parametrize(
    "command", [[], ["bench"], ["doctor"], ["explain"], ["inspect"]]
)
def test_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([*command, "--help"])
    assert end.value.code == 0
    assert "usage: pliant" in capsys.readouterr().out


def test_bench_json(capsys: pytest.CaptureFixture[str]) -> None:
    status, told = run_json(capsys, "bench", f"{TINY}:net", "--peers", "eager", *FAST)
    assert status == 0
    assert set(told) == {"stamp", "results", "summary"}
    (result,) = told["results"]
    assert result["threads"] == 1
    assert result["dims"] == ["batch", "seq"]
    assert [row["shape"] for row in result["rows"]] == [[1, 3], [2, 5]]
    for about in result["engines"].values():
        assert about["status"] == "ok"
        assert about["compile_seconds"] >= 0
    for row in result["rows"]:
        assert set(row["engines"]) == {"pliant", "eager"}
        assert row["best_peer"] == "eager"
        assert row["best"] == row["engines"]["eager"]["speedup"]
        assert row["rounds"] == 3
        for engine in row["engines"].values():
            spread = engine["ms"]
            assert 0 < spread["low"] <= spread["median"] <= spread["high"]
            assert engine["error"] < 1e-5
    assert set(told["summary"]["geomean"]) == {"eager"}


def test_bench_writes_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--peers", "eager", "--quick", "--output", str(tmp_path), *FAST]
    assert main(["bench", f"{TINY}:net", *arguments]) == 0
    assert "x torch eager" in capsys.readouterr().out
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")}
    assert found == {"models.md", "models/tiny.py_net_1t.json", "summary.md"}
    assert "| (2, 5) |" in (tmp_path / "models.md").read_text()
    summary = (tmp_path / "summary.md").read_text()
    assert "| all |" in summary and "| 0.0 M parameters |" in summary
    for page in tmp_path.glob("*.md"):
        assert page.read_text().splitlines()[-1].startswith("Commit ")


def test_a_model_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """Our failure is told, is the exit status, and does not stop the peers."""
    status, told = run_json(capsys, "bench", f"{TINY}:odd", "--peers", "eager", *FAST)
    assert status == 1
    (result,) = told["results"]
    assert result["engines"]["pliant"]["status"] == "failed"
    assert "svdvals" in result["engines"]["pliant"]["reason"]
    assert set(result["rows"][0]["engines"]) == {"eager"}
    assert len(told["summary"]["left_out"]) == 1


def test_a_model_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    status, told = run_json(
        capsys, "bench", f"{TINY}:not_a_case", "--peers", "eager", *FAST
    )
    assert status == 1
    assert "has no model" in told["results"][0]["error"]


def test_an_exported_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layer, dims = torch.nn.Embedding(50, 4), ({0: torch.export.Dim("n", max=999)},)
    ids = torch.randint(0, 50, (7,))
    program = torch.export.export(layer, (ids,), dynamic_shapes=dims)
    path = tmp_path / "table.pt2"
    torch.export.save(program, path)
    status, told = run_json(capsys, "bench", str(path), "--peers", "eager", *FAST)
    assert status == 0, told
    (result,) = told["results"]
    assert [row["shape"] for row in result["rows"]] == [[7], [14], [28], [56]]


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{TINY}:net"]) == 0
    assert "kernels: 2 calls" in capsys.readouterr().out
    status, told = run_json(capsys, "explain", f"{TINY}:net")
    assert status == 0
    assert told["dims"] == ["batch", "seq"]
    assert told["kernel_calls"] == 2
    assert "batch" in told["peak_formula"]


def test_explain_at_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{TINY}:net", "-d", "batch=2", "-d", "seq=3"]) == 0
    assert "matrix products at batch=2, seq=3" in capsys.readouterr().out
    assert main(["explain", f"{TINY}:net", "--dims", "batch=2"]) == 1
    assert "missing: seq" in capsys.readouterr().err
    with pytest.raises(SystemExit) as error:
        main(["explain", f"{TINY}:net", "--dims", "batch"])
    assert error.value.code == 2
