"""What commands take as a model, and what they say of anything else."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_gguf import reference, write

import pliant
from pliant import cases
from pliant.cli import COMMANDS as COMMANDS_OF_CLI
from pliant.cli import main
from pliant.commands import bench
from pliant.compare.worker import Job
from pliant.errors import OptionError
from pliant.model import reporting

PLAIN = str(Path(__file__).with_name("plain.py"))
COMMANDS = ["bench", "compile", "explain", "inspect", "report", "run", "verify"]


def arguments(command: str, model: str, folder: Path) -> list[str]:
    more = {
        "compile": ["-o", str(folder / "out.pliant")],
        "inspect": ["--memory", "batch=2,seq=8"],
        "report": ["-o", str(folder / "report.html")],
        "verify": ["--against", PLAIN, "--random-shapes", "3", "--largest", "33"],
        "bench": ["--peers", "eager", "--rounds", "1", "--threads", "1"],
    }
    return [command, model, *more.get(command, [])]


@pytest.mark.parametrize("command", [c for c in COMMANDS if c != "bench"])
def test_a_file_with_a_model(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments(command, PLAIN, tmp_path), "--json"]) == 0
    json.loads(capsys.readouterr().out)


def test_its_inputs_are_like_the_example() -> None:
    case = cases.load(PLAIN)
    assert case.dims == ("batch", "seq") and case.example == (2, 4)
    (ids,) = case.at((3, 11))
    assert ids.shape == (3, 11) and ids.dtype == torch.int64
    assert int(ids.min()) >= 90 and int(ids.max()) < 100
    assert torch.equal(ids, case.at((3, 11))[0])


def test_shapes_are_chosen_and_those_that_the_model_refuses_left_out() -> None:
    assert cases.load(PLAIN).shapes == ((1, 4), (1, 16), (1, 64), (8, 16))
    job = Job(PLAIN, 1, ("pliant",), (), False, 1, False, "")
    assert job.case_and_shapes()[1] == [(1, 4), (1, 16), (8, 16)]  # 40 positions


def test_the_file_of_the_page(tmp_path: Path) -> None:
    """docs/command_line.md, which lists every command."""
    page = (Path(pliant.__file__).parents[1] / "docs" / "command_line.md").read_text()
    (source,) = re.findall(r"^```python\n(.*?)^```", page, re.S | re.M)
    (tmp_path / "of_page.py").write_text(source)
    assert cases.load(str(tmp_path / "of_page.py")).dims == ("batch", "seq")
    listed = set(re.findall(r"^\| `pliant (\w+)", page, re.M))
    assert listed == set(COMMANDS_OF_CLI) - {"completion"}


def of(source: str, folder: Path, name: str = "net") -> cases.Case:
    path = folder / f"{name}.py"
    head = (
        "import torch\nfrom torch.export import Dim\nnet = torch.nn.Bilinear(3, 4, 2)\n"
    )
    path.write_text(head + source)
    return cases.load(str(path))


def test_dims_by_name_of_bench() -> None:
    assert bench._by_name(PLAIN, [{"seq": 3, "batch": 2}]) == ((2, 3),)
    with pytest.raises(OptionError, match="needs every dim: batch, seq"):
        bench._by_name(PLAIN, [{"seq": 3}])


TWO = "torch.ones(6, 3), torch.ones(6, 4)"


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("build", f"def build(): return net, ({TWO}), ({{0: 'n'}}, {{0: 'n'}})"),
        (
            "by_name",
            "model = net\ndynamic_shapes = {'input1': {0: 'n'}, 'input2': {0: 'n'}}\n"
            f"inputs = dict(zip(('input2', 'input1'), ({TWO})[::-1]))",
        ),
        (
            "halves",
            f"half = Dim('half', max=20)\nmodel, inputs = net, ({TWO})\n"
            "dynamic_shapes = ({0: 2 * half}, {0: 2 * half})",
        ),
    ],
)
def test_forms_of_a_file(name: str, source: str, tmp_path: Path) -> None:
    case = of(source, tmp_path, name)
    (dim,) = case.dims
    size = 5 if dim == "n" else 10
    assert [tuple(x.shape) for x in case.at((5,))] == [(size, 3), (size, 4)]
    assert case.example == ((6,) if dim == "n" else (3,))
    assert case.shapes == (((1,), (8,), (64,)) if dim == "n" else ((1,), (8,), (20,)))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("inputs = ()", "has no model; expected `model`, `inputs`"),
        ("model = net", "has no inputs and no dynamic_shapes; expected"),
        (f"model, inputs = 3, ({TWO})\ndynamic_shapes = None", "model is a int, not"),
        ("def build(): return 3", "(int) has no model; expected"),
        ("import nothing_of_this_name", ".py:4: ModuleNotFoundError: No module named"),
        ("def build():\n    return net(3)", ".py:5: TypeError: "),
        ("model = (", ".py:4: SyntaxError: '(' was never closed"),
    ],
)
def test_a_file_of_another_form(source: str, said: str, tmp_path: Path) -> None:
    name = f"odd_{abs(hash(source))}"
    with pytest.raises(OptionError) as told:
        of(source, tmp_path, name)
    assert said in str(told.value)


@pytest.mark.parametrize("command", [*COMMANDS, "chat"])
@pytest.mark.parametrize("file", ["weights.pth", "net.txt", "net.h5", "a/net"])
def test_anything_else_is_refused(
    command: str, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if command == "chat" and file == "a/net":
        pytest.skip("may be a file without a suffix")
    (tmp_path / "net.txt").write_text("hello")
    assert main(arguments(command, str(tmp_path / file), tmp_path)[:]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"pliant {command}: ") and "Traceback" not in told
    assert ".gguf" in told and len(told.splitlines()) == 1


def test_commands_of_a_language_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, page = str(tmp_path / "tiny.gguf"), tmp_path / "report.html"
    write(Path(path), reference("llama", True), "q4_1", "llama")
    at = ["--dims", "batch=2,past=10,new=1"]
    assert main(["explain", path]) == 0
    capsys.readouterr()
    assert main(["inspect", path, *at, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    plan = pliant.load_gguf(path).memory_plan(batch=2, past=10, new=1, capacity=11)
    assert told["peak_bytes"] == plan.peak_bytes
    assert main(["report", path, *at, "-o", str(page)]) == 0
    assert "Memory over time" in page.read_text()
    few = ["--dims", "batch=1,new=8", "--rounds", "1"]
    capsys.readouterr()
    assert main(["bench", path, *few]) == 0
    assert "decoded tokens/s" in capsys.readouterr().out
    assert main(["inspect", path, "--dims", "seq=3"]) == 2
    assert "batch, new, and past" in capsys.readouterr().err


def test_a_language_model_where_none_belongs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("compile", "run"):
        assert main(arguments(command, "lm.gguf", tmp_path)) == 2
        assert "`pliant chat`" in capsys.readouterr().err


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from pliant.cli import main
sys.exit(main(sys.argv[1:]))
"""


def without_torch(*given: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_TORCH, *given]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def saved_onnx(path: Path, ir_version: int) -> None:
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    weight = np.ones((8, 4), np.float32)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "seq", 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", "seq", 4])
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    graph = helper.make_graph(
        [node], "net", [x], [y], [numpy_helper.from_array(weight, "w")]
    )
    opset = helper.make_opsetid("", 21)
    model = helper.make_model(graph, opset_imports=[opset], ir_version=ir_version)
    onnx.save(model, path)


@pytest.mark.parametrize("command", COMMANDS)
def test_where_torch_is_missing(command: str, tmp_path: Path) -> None:
    done = without_torch(*arguments(command, PLAIN, tmp_path))
    assert done.returncode in (1, 2)
    assert "pip install 'pliant[torch]'" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_onnx_where_torch_is_missing(tmp_path: Path) -> None:
    """And of a version that ONNX Runtime does not read, which is left out then."""
    path = tmp_path / "net.onnx"
    saved_onnx(path, 14)
    for command, more in (
        ("bench", ["--rounds", "1"]),
        ("inspect", ["--memory", "batch=2,seq=8"]),
        ("report", ["--dims", "batch=2,seq=8", "-o", str(tmp_path / "report.html")]),
    ):
        done = without_torch(command, str(path), *more, "--threads", "1")
        assert done.returncode == 0, done.stderr
        assert ("left out: ONNX Runtime" in done.stderr) == (command == "bench")
    page = (tmp_path / "report.html").read_text()
    assert "Memory over time" in page and "speed is assumed" not in page


def test_bench_chooses_sizes_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "net.onnx"
    saved_onnx(path, 10)
    assert main(["bench", str(path), "--rounds", "1", "--threads", "1"]) == 0
    shown = capsys.readouterr().out
    assert "batch=1, seq=256" in shown and "peak MiB" in shown
    assert main(["bench", str(path), "--rounds", "1", "--threads", "1", "--json"]) == 0
    told: Any = json.loads(capsys.readouterr().out)
    model = pliant.compile(path, threads=1)
    for found in told["results"]:
        assert found["peak_bytes"] == model.memory_plan(**found["dims"]).peak_bytes


def test_an_unnamed_axis_keeps_its_size(tmp_path: Path) -> None:
    case = of(
        f"model, inputs = net, ({TWO})\nauto = Dim.AUTO\n"
        "dynamic_shapes = ({0: auto}, {0: auto})",
        tmp_path,
        "auto",
    )
    assert case.dims == () and case.shapes == ((),)


def test_run_is_read_with_numpy_alone() -> None:
    """Where a saved model runs, nothing else need be installed."""
    script = "import sys, pliant.cli; pliant.cli.parser(['run']); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    found = {name.partition(".")[0] for name in done.stdout.split()}
    assert not found & {"rich", "torch", "llvmlite", "onnx", "safetensors"}


def test_a_report_says_that_the_speed_of_the_machine_is_assumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = torch.nn.Linear(3, 4)
    model = pliant.compile(layer, (torch.ones(2, 3),), ({0: "n"},), threads=1)
    page = tmp_path / "report.html"
    for known in (None, object()):
        monkeypatch.setattr(reporting, "known", lambda _, known=known: known)
        model.report(page, n=7)
        assert ("speed is assumed" in page.read_text()) == (known is None)
