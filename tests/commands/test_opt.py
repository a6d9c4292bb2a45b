"""`pliant opt`: stages on text, dumps that are read back, and what it refuses."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import pliant
import zoo
from pliant.cli import main
from pliant.codegen.host_checks import size_checks
from pliant.ir.dumps import read_module
from pliant.ir.graph import Module
from pliant.ir.text import print_module
from pliant.pipeline import STAGES

SOFTMAX = """graph @main(%x: f32[n, 8]) {
  %y: f32[n, 8] = softmax(%x) {axis = 1}
  return %y
}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "softmax.ir"
    path.write_text(SOFTMAX)
    return path


def test_any_stage(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = "decompose,plain,fuse,lower,order,inplace"
    assert main(["opt", str(file), "-p", names, "--dims", "n=5"]) == 0
    text = capsys.readouterr().out
    assert "call_loop(%x, " in text and "loop @row_0" in text
    file.write_text(text)  # what was printed is read back
    assert main(["opt", str(file), "-p", "inplace", "--dims", "n=7"]) == 0
    assert capsys.readouterr().out == text


def test_from_the_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(SOFTMAX))
    assert main(["opt", "-"]) == 0
    assert capsys.readouterr().out == SOFTMAX


def test_json_and_the_list(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["opt", str(file), "-p", "decompose", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["passes"] == ["decompose"] and "reduce" in told["text"]
    assert main(["opt", "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in listed] == [stage.name for stage in STAGES]


def test_switches(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["opt", str(file), "-p", "decompose,fuse"]
    assert main(command) == 0
    fused = capsys.readouterr().out.count("= fusion(")
    assert main([*command, "--off", "fuse"]) == 0
    assert capsys.readouterr().out.count("= fusion(") > fused == 1


def test_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "loss.ir"
    path.write_text(
        """graph @main(%x: f32[n]) {
          %y: f32[n] = mul(%x, %x)
          %l: f32[] = reduce(%y) {op = "sum", axes = (0), keepdims = false}
          return %l
        }"""
    )
    passes = "gradient,clean,fuse,lower"
    command = ["opt", str(path), "-p", passes, "--train", "x", "--dims", "n=3"]
    assert main(command) == 0
    assert "return %" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["-p", "nothing"], 2, "there is no stage 'nothing'"),
        (["--off", "nothing"], 2, "there is no switch nothing"),
        (["--dims", "n"], 2, "'n' is not NAME=SIZE"),
        (["--dims", "m=3"], 2, "--dims gives no size for n"),
    ],
)
def test_refused(
    file: Path,
    arguments: list[str],
    status: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["opt", str(file), *arguments]) == status
    assert message in capsys.readouterr().err


def test_no_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.ir"
    assert main(["opt", str(path)]) == 2
    path.write_text("graph @main(")
    assert main(["opt", str(path)]) == 1
    assert "is not a module: line 1" in capsys.readouterr().err
    path.write_text(SOFTMAX.replace("axis = 1", "axis = 7"))
    assert main(["opt", str(path)]) == 1  # legal text, no legal module
    assert "Traceback" not in capsys.readouterr().err


class Positive(torch.nn.Module):
    """A size of data inside a branch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def some(x: torch.Tensor) -> torch.Tensor:
            return x[x[:, 0] > 0].softmax(-1).sum(0)

        def every(x: torch.Tensor) -> torch.Tensor:
            return x.softmax(-1).sum(0)

        return torch.cond(x.sum() > 0, some, every, (x,))


def checks_of_regions(module: Module) -> list[str]:
    graphs = (graph for found in module.inside.values() for graph in found)
    return [str(check) for check in size_checks(graphs)]


@pytest.mark.parametrize(
    ("net", "shape", "dims"),
    [
        (nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32)), (3, 8), "n=3"),
        (nn.GRU(8, 4), (3, 2, 8), "n=3,m=2"),
        (Positive(), (3, 8), ""),  # rows of results that nobody reads are undefined
    ],
    ids=("layers in chunks", "loop", "sizes from data"),
)
def test_every_dump_is_read_back(
    net: torch.nn.Module,
    shape: tuple[int, ...],
    dims: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The rest of the stages on a dump give what the compiler made."""
    monkeypatch.setenv("PLIANT_DUMP", str(tmp_path))
    named = dict(enumerate("nm"[: len(shape) - 1]))
    model = pliant.compile(net.eval(), (torch.randn(shape),), (named,))
    wanted = checks_of_regions(model.program.lowered)
    assert bool(wanted) is isinstance(net, nn.GRU | Positive)
    assert model.program.lowered.versions or not isinstance(net, nn.Sequential)
    capsys.readouterr()
    paths = sorted(tmp_path.glob("*.ir"))
    for path in paths:
        text = fed_back(path, paths, dims, capsys)
        assert text == paths[-1].read_text()
        if "inside @" in path.read_text():
            assert checks_of_regions(read_module(path, text)) == wanted
    assert checks_of_regions(read_module(path)) == wanted


def fed_back(
    path: Path, paths: list[Path], dims: str, capsys: pytest.CaptureFixture[str]
) -> str:
    """What the rest of the stages make of one of the dumps."""
    rest = [other.stem.partition("_")[2] for other in paths if other > path]
    at = ["--dims", dims] if dims else []
    assert main(["opt", str(path), "-p", ",".join(rest), *at]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tinybert", "evoformer", "llama", "vit"])
def test_every_dump_of_a_large_model_is_read_back(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PLIANT_DUMP", str(tmp_path))
    model = zoo.build(name).compile()
    assert model.program.lowered.versions
    monkeypatch.delenv("PLIANT_DUMP")
    capsys.readouterr()
    paths = sorted(tmp_path.glob("*.ir"))
    for path in paths:
        assert fed_back(path, paths, "", capsys) == paths[-1].read_text(), path.name


class Parted(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x[:, 0] > 0].softmax(-1)


def test_dumps_of_parts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each part of a model has dumps of its own, which are read back."""
    monkeypatch.setenv("PLIANT_DUMP", str(tmp_path))
    model = pliant.compile(Parted(), (torch.randn(3, 8),), ({0: "n"},))
    capsys.readouterr()
    for number, part in enumerate(model.program.parts(), 1):
        paths = sorted(tmp_path.glob(f"*.{number}.ir"))
        names = [path.name.split("_")[1].split(".")[0] for path in paths]
        assert names[0] == "flow" and names[-1] == "unify"
        for at, path in enumerate(paths):
            assert main(["opt", str(path), "-p", ",".join(names[at + 1 :])]) == 0
            text = capsys.readouterr().out
            assert text == paths[-1].read_text() == print_module(part.lowered)
    # The whole, up to the parts.
    assert main(["opt", str(tmp_path / "00_import.ir"), "--dims", "n=5"]) == 0
