"""Malformed and hostile ONNX files: typed errors, nothing read outside the folder."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import pliant
from pliant.errors import ModelError
from tests.frontend.onnx_models import FLOAT, model

node = helper.make_node


def _with_data(location: str, dims: tuple[int, ...] = (4,)) -> onnx.ModelProto:
    proto = model(
        [node("Add", ["x", "w"], ["y"])],
        {"x": (FLOAT, [4])},
        ["y"],
        {"w": np.ones(4, np.float32)},
    )
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.dims[:] = dims
    tensor.data_location = TensorProto.EXTERNAL
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", location
    return proto


def _saved(folder: Path, proto: onnx.ModelProto) -> str:
    folder.mkdir(exist_ok=True)
    path = folder / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    return str(path)


def test_external_data(tmp_path: Path) -> None:
    data = np.arange(4, dtype=np.float32)
    path = _saved(tmp_path / "m", _with_data("w.bin"))
    (tmp_path / "m" / "w.bin").write_bytes(data.tobytes())
    x = np.ones(4, np.float32)
    np.testing.assert_array_equal(pliant.compile(path)(x), x + data)


@pytest.mark.parametrize("location", ["../w.bin", "a/../../w.bin", "", "."])
def test_data_outside_the_folder(tmp_path: Path, location: str) -> None:
    (tmp_path / "w.bin").write_bytes(bytes(16))
    with pytest.raises(ModelError):
        pliant.compile(_saved(tmp_path / "m", _with_data(location)))


def test_absolute_and_linked_data(tmp_path: Path) -> None:
    secret = tmp_path / "secret.bin"
    secret.write_bytes(bytes(16))
    with pytest.raises(ModelError):
        pliant.compile(_saved(tmp_path / "m", _with_data(str(secret))))
    os.symlink(secret, tmp_path / "m" / "w.bin")
    with pytest.raises(ModelError):
        pliant.compile(_saved(tmp_path / "m", _with_data("w.bin")))


def test_data_of_another_length(tmp_path: Path) -> None:
    path = _saved(tmp_path / "m", _with_data("w.bin", (1 << 20, 1 << 20)))
    (tmp_path / "m" / "w.bin").write_bytes(bytes(16))
    with pytest.raises(ModelError):
        pliant.compile(path)


def test_damaged_files(tmp_path: Path) -> None:
    whole = model(
        [node("Relu", ["x"], ["y"])], {"x": (FLOAT, ["n"])}, ["y"]
    ).SerializeToString()
    path = tmp_path / "m.onnx"
    rng = np.random.default_rng(0)
    cases = [b"", b"\x00" * 64, b"not a model", whole[:-7]]
    for _ in range(60):
        changed = bytearray(whole)
        for place in rng.integers(0, len(whole), 3):
            changed[place] = rng.integers(0, 256)
        cases.append(bytes(changed))
    for content in cases:
        path.write_bytes(content)
        try:
            pliant.compile(str(path))
        except pliant.PliantError as error:
            assert not isinstance(error, pliant.InternalError), content
    with pytest.raises(ModelError, match="cannot be read"):
        pliant.compile(str(tmp_path / "missing.onnx"))


def test_sizes_that_no_tensor_has() -> None:
    proto = model([node("Relu", ["x"], ["y"])], {"x": (FLOAT, [2**40, 2**40])}, ["y"])
    with pytest.raises(ModelError, match="too large"):
        pliant.compile(proto)
    proto = model(
        [node("Add", ["x", "w"], ["y"])],
        {"x": (FLOAT, [4])},
        ["y"],
        {"w": np.ones(4, np.float32)},
    )
    proto.graph.initializer[0].dims[0] = -4
    with pytest.raises(ModelError, match="negative"):
        pliant.compile(proto)
    proto.graph.initializer[0].dims[0] = 5
    with pytest.raises(ModelError, match="bytes"):
        pliant.compile(proto)


def test_cycles() -> None:
    proto = model(
        [node("Add", ["x", "b"], ["a"]), node("Relu", ["a"], ["b"])],
        {"x": (FLOAT, [4])},
        ["b"],
    )
    with pytest.raises(ModelError):
        pliant.compile(proto)


def test_functions_that_call_themselves() -> None:
    body = helper.make_function(
        "my",
        "F",
        ["a"],
        ["b"],
        [node("F", ["a"], ["b"], domain="my")],
        [helper.make_opsetid("my", 1)],
    )
    proto = model(
        [node("F", ["x"], ["y"], domain="my")],
        {"x": (FLOAT, [4])},
        ["y"],
        functions=[body],
        domains=["my"],
    )
    with pytest.raises(pliant.PliantError):
        pliant.compile(proto)


def test_ops_of_wrong_types() -> None:
    proto = model(
        [node("Add", ["x", "w"], ["y"])],
        {"x": (FLOAT, [4])},
        ["y"],
        {"w": np.ones(4, np.int64)},
    )
    with pytest.raises(pliant.PliantError) as caught:
        pliant.compile(proto)
    assert not isinstance(caught.value, pliant.InternalError)


def test_data_without_a_folder() -> None:
    with pytest.raises(ModelError, match="beside the model"):
        pliant.compile(_with_data("w.bin"))
