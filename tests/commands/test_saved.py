"""`pliant compile`, `run` and `inspect` of saved models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import pliant
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
    for name in ("out.npy", "out.safetensors"):
        again = tmp_path / name
        assert main(["run", str(saved), "--dims", sizes, "-o", str(again)]) == 0
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), arrays["result"])
    same = load_file(tmp_path / "out.safetensors")
    np.testing.assert_array_equal(same["result"], arrays["result"])
    capsys.readouterr()
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
    program = tmp_path / "bad.pt2"
    program.write_bytes(b"no archive")
    assert main(["compile", str(program), "-o", str(tmp_path / "x.pliant")]) == 1
    told = capsys.readouterr().err
    assert "is no program that torch.export.save wrote" in told
    assert "Traceback" not in told
    assert main(["run", str(saved), "-o", "out.txt"]) == 2
    assert "not to out.txt" in capsys.readouterr().err
    assert main(["inspect", str(TINY)]) == 2
    assert "--memory is needed" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["compile", "x.onnx", "-o", "y", "--dynamic", "ids"])


def test_a_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Signed when it is compiled, and checked when it is run."""
    path, key, other = (tmp_path / n for n in ("m.pliant", "key", "other"))
    key.write_bytes(bytes(range(32)))
    other.write_bytes(bytes(32))
    words = ["compile", f"{TINY}:net", "-o", str(path), "--key", str(key)]
    assert main(words) == 0
    dims = ",".join(f"{name}=2" for name in pliant.load(path).dims)
    words = ["run", str(path), "--dims", dims, "--key"]
    assert main([*words, str(key)]) == 0
    capsys.readouterr()
    assert main([*words, str(other)]) == 1
    assert "is not by this key" in capsys.readouterr().err
    assert main([*words, str(tmp_path / "none")]) == 2


# ---- verify


def test_verify_against_the_model(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["verify", str(saved), "--against", f"{TINY}:net", "--random-shapes", "12"]
    told = answer(capsys, *words)
    assert told["sizes"] == 12 and not told["wrong"]
    assert main(words) == 0
    assert "12 sizes, 0 wrong" in capsys.readouterr().out


def test_verify_finds_a_broken_kernel(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One whose erf is one percent off, in a saved model."""
    from pliant.backend import build
    from pliant.codegen import vector_math

    path = tmp_path / "broken.pliant"
    build.memo.clear()
    with monkeypatch.context() as broken:
        broken.setenv("PLIANT_CACHE", "off")
        broken.setitem(vector_math.UNARY, "erf", lambda x: x * 0.99)
        assert main(["compile", f"{TINY}:net", "-o", str(path)]) == 0
    build.memo.clear()
    capsys.readouterr()
    words = ["verify", str(path), "--against", f"{TINY}:net", "--random-shapes", "5"]
    assert main([*words, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert len(told["wrong"]) == 5 == told["sizes"]
    assert main(words) == 1
    assert "5 wrong" in capsys.readouterr().out


def test_onnx(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Compiled, explained, timed and compared from its file."""
    onnx = pytest.importorskip("onnx")
    from onnx import TensorProto, helper

    def value(name: str, *shape: object) -> object:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    weight = np.linspace(-1, 1, 24, dtype=np.float32).reshape(6, 4)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Softmax", ["h"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [value("x", "n", 6)],
        [value("y", "n", 4)],
        [onnx.numpy_helper.from_array(weight, "w")],
    )
    opset = [helper.make_opsetid("", 17)]
    path, out = tmp_path / "m.onnx", tmp_path / "m.pliant"
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)
    assert main(["compile", str(path), "-o", str(out)]) == 0
    capsys.readouterr()
    for model in (path, out):
        told = answer(
            capsys,
            *("verify", str(model), "--against", str(path), "--random-shapes", "10"),
        )
        assert told["sizes"] == 10 and not told["wrong"]
        explained = answer(capsys, "explain", str(model))
        assert explained["dims"] == ["n"]
        timed = answer(capsys, "bench", str(model), "--dims", "n=3", "--rounds", "2")
        (found,) = timed["results"]
        assert found["ms"]["pliant"] > 0
    assert main(["bench", str(out), "--shape", "3"]) == 2
    assert main(["explain", str(out), "--dynamic", "x:0=n"]) == 2


def test_pt2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    path, out = tmp_path / "m.pt2", tmp_path / "m.pliant"
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU())
    batch = torch.export.Dim("batch", min=1, max=4096)
    torch.export.save(
        torch.export.export(net, (torch.randn(3, 8),), dynamic_shapes=({0: batch},)),
        path,
    )
    assert main(["compile", str(path), "-o", str(out)]) == 0
    capsys.readouterr()
    told = answer(
        capsys, "verify", str(out), "--against", str(path), "--random-shapes", "10"
    )
    assert told["sizes"] == 10 and not told["wrong"]
    assert answer(capsys, "explain", str(path))["dims"]
    ran = answer(capsys, "run", str(out), "--dims", f"{told_dim(out)}=5")
    assert [found["shape"] for found in ran["results"].values()] == [[5, 16]]


def told_dim(path: Path) -> str:
    import pliant

    (name,) = pliant.load(path).dims
    return name
