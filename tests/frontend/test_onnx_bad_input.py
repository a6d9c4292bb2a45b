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
from pliant.frontend import onnx_limits, onnx_walk
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


@pytest.mark.parametrize("location", ["../w.bin", "a/../../w.bin", "", ".", "w\0.bin"])
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


def test_data_of_attributes(tmp_path: Path) -> None:
    """Of a constant, also in a branch: by the same rules, beside the model."""
    data = np.arange(4, dtype=np.float32)

    def constant(location: str) -> onnx.ModelProto:
        stored = _with_data(location).graph.initializer[0]
        inner = model([node("Constant", [], ["b"], value=stored)], {}, ["b"])
        inner.graph.output[0].type.Clear()
        inner.graph.output[0].type.tensor_type.elem_type = FLOAT
        branches = {"then_branch": inner.graph, "else_branch": inner.graph}
        nodes = [
            node("Constant", [], ["a"], value=stored),
            node("If", ["go"], ["c"], **branches),
            node("Add", ["x", "a"], ["h"]),
            node("Add", ["h", "c"], ["y"]),
        ]
        inputs = {"x": (FLOAT, [4]), "go": (TensorProto.BOOL, [])}
        return model(nodes, inputs, ["y"])

    path = _saved(tmp_path / "m", constant("w.bin"))
    (tmp_path / "m" / "w.bin").write_bytes(data.tobytes())
    found = pliant.compile(path)(np.ones(4, np.float32), np.array(True))
    np.testing.assert_array_equal(found, 1 + 2 * data)
    (tmp_path / "w.bin").write_bytes(data.tobytes())
    with pytest.raises(ModelError, match="outside the model's folder"):
        pliant.compile(_saved(tmp_path / "m", constant("../w.bin")))


def test_files_that_are_none(tmp_path: Path) -> None:
    """A pipe without a writer would never answer."""
    os.mkfifo(tmp_path / "m.onnx")
    for path in (tmp_path / "m.onnx", tmp_path, "a\0.onnx"):
        with pytest.raises(pliant.PliantError, match="cannot be read"):
            pliant.compile(f"{path}")
        with pytest.raises(pliant.ArtifactError, match="cannot read"):
            pliant.load(f"{path}")
    m = pliant.compile(model([node("Relu", ["x"], ["y"])], {"x": (FLOAT, [4])}, ["y"]))
    with pytest.raises(pliant.ArtifactError, match="cannot write"):
        m.save(tmp_path / "a\0.pliant")


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


LARGE = np.int64(2**62)


def _refused(
    nodes: list[onnx.NodeProto],
    constants: dict[str, object] | None = None,
    shape: tuple[int | str, ...] = ("n",),
    opset: int = 18,
) -> None:
    proto = model(nodes, {"x": (FLOAT, shape)}, ["y"], constants, opset)
    with pytest.raises(pliant.PliantError) as caught:
        pliant.compile(proto)
    assert not isinstance(caught.value, pliant.InternalError), caught.value


@pytest.mark.parametrize(
    ("op", "shape", "attrs", "constants"),
    [
        ("Expand", ("n",), {}, {"s": np.array([LARGE, LARGE])}),
        ("Tile", ("n",), {}, {"s": np.array([LARGE])}),
        ("Unsqueeze", ("n",), {}, {"s": np.arange(5000)}),
        ("Pad", ("n",), {}, {"s": np.array([LARGE, LARGE])}),
        ("Reshape", ("n",), {}, {"s": np.array([LARGE, -1, LARGE])}),
        ("TopK", ("n",), {}, {"s": np.array([LARGE])}),
        ("Split", ("n",), {"num_outputs": 2**40}, {}),
        ("Softmax", ("n",), {"axis": 2**62}, {}),
        ("Transpose", ("n", "m"), {"perm": [0, 0]}, {}),
        ("DepthToSpace", ("n", 4, "h", "w"), {"blocksize": -2}, {}),
        ("Einsum", ("n", "m"), {"equation": "i" * 5000 + "->i"}, {}),
        ("Relu", tuple(f"d{k}" for k in range(200)), {}, {}),
    ],
)
def test_numbers_that_no_model_has(
    op: str,
    shape: tuple[int | str, ...],
    attrs: dict[str, object],
    constants: dict[str, object],
) -> None:
    _refused([node(op, ["x", *constants], ["y"], **attrs)], constants, shape)


@pytest.mark.parametrize("number", [0, -1])
def test_counts_below_one(number: int) -> None:
    """Rules divide by them."""
    plain = {"kernel_shape": [2, 2]}
    image: tuple[int | str, ...] = ("n", 4, "h", "w")
    weight = {"w": np.ones((4, 4, 3, 3), np.float32)}
    offset = {"o": np.ones((1, 18, 3, 3), np.float32)}
    for op in ("AveragePool", "LpPool", "MaxPool"):
        for change in ("dilations", "strides", "kernel_shape"):
            attrs = {**plain, change: [number, number]}
            _refused([node(op, ["x"], ["y"], **attrs)], None, image, 19)
    _refused([node("LpPool", ["x"], ["y"], **plain, p=number)], None, image)
    for op in ("Conv", "ConvTranspose"):
        _refused([node(op, ["x", "w"], ["y"], group=number)], weight, image)
    deformed = node("DeformConv", ["x", "w", "o"], ["y"], group=number)
    _refused([deformed], {**weight, **offset}, (1, 4, 5, 5), 19)
    frames = {"s": np.array(number), "w": np.ones(8, np.float32)}
    _refused([node("STFT", ["x", "s", "w"], ["y"])], frames, ("n", 32, 1))


def test_constants_that_are_written_out() -> None:
    one = {"w": np.ones(1, np.float32)}
    _refused([node("Expand", ["w", "s"], ["y"])], {**one, "s": np.array([LARGE] * 2)})
    _refused([node("Tile", ["w", "s"], ["y"])], {**one, "s": np.array([LARGE])})
    _refused([node("ConstantOfShape", ["s"], ["y"])], {"s": np.array([LARGE] * 2)})
    numbers = [np.int64(2**40), np.int64(2**40), np.int64(8000)]
    mel = dict(zip("abc", map(np.array, numbers), strict=True))
    mel |= {"d": np.float32(0), "e": np.float32(4000)}
    _refused([node("MelWeightMatrix", list(mel), ["y"])], mel)
    _refused([node("RandomNormal", [], ["y"], shape=[2**40, 2**40])])


def test_resize_factors_that_are_none() -> None:
    for factor in (np.nan, np.inf, 0.0, -1.0):
        scales = np.array([1, factor], np.float32)
        _refused([node("Resize", ["x", "", "s"], ["y"])], {"s": scales}, ("n", "m"))


def test_functions_that_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 functions, each of which calls the one before it twice."""
    monkeypatch.setattr(onnx_walk, "NODES", 2000)
    core, own = helper.make_opsetid("", 17), helper.make_opsetid("my", 1)
    bodies = [
        helper.make_function(
            "my", "F0", ["a"], ["b"], [node("Relu", ["a"], ["b"])], [core]
        )
    ]
    for k in range(1, 40):
        calls = [
            node(f"F{k - 1}", ["a"], ["c"], domain="my"),
            node(f"F{k - 1}", ["c"], ["b"], domain="my"),
        ]
        bodies.append(helper.make_function("my", f"F{k}", ["a"], ["b"], calls, [own]))
    proto = model(
        [node("F39", ["x"], ["y"], domain="my")],
        {"x": (FLOAT, ["n"])},
        ["y"],
        functions=bodies,
        domains=["my"],
    )
    with pytest.raises(ModelError, match="more than 2000 nodes"):
        pliant.compile(proto)


@pytest.mark.parametrize("op", ["Mul", "Add"])
def test_sizes_that_grow_without_end(op: str) -> None:
    nodes = [node("Shape", ["x"], ["s"]), node("ReduceSum", ["s"], ["p0"])]
    nodes += [node(op, [f"p{k}", f"p{k}"], [f"p{k + 1}"]) for k in range(80)]
    nodes.append(node("Expand", ["w", "p80"], ["y"]))
    _refused(nodes, {"w": np.ones(1, np.float32)}, ("n", "m"))


def test_rules_that_write_out_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number in a small file, for each unit of which there is an op."""
    monkeypatch.setattr(onnx_limits, "OPS", 2000)
    lrn = node("LRN", ["x"], ["y"], size=2**40 + 1)
    _refused([lrn], None, ("n", "c", "h", "w"))
    blocks = {"i": np.array([4, 3]), "b": np.array([2**20, 2**20])}
    _refused([node("Col2Im", ["x", "i", "b"], ["y"])], blocks, ("n", 8, 6))
    # Where the channels are known, a window has no more of them.
    proto = model([lrn], {"x": (FLOAT, ("n", 4, "h", "w"))}, ["y"])
    x = np.ones((1, 4, 2, 2), np.float32)
    np.testing.assert_allclose(pliant.compile(proto)(x), x, rtol=1e-6)


def test_tensors_that_double() -> None:
    nodes = [node("Concat", ["x", "x"], ["v1"], axis=0)]
    for k in range(1, 70):
        nodes.append(node("Concat", [f"v{k}"] * 2, [f"v{k + 1}"], axis=0))
    _refused([*nodes, node("Relu", ["v70"], ["y"])])


def test_hidden_size_of_other_weights() -> None:
    weights = {
        "w": np.ones((1, 16, 3), np.float32),
        "r": np.ones((1, 16, 4), np.float32),
    }
    lstm = node("LSTM", ["x", "w", "r"], ["y"], hidden_size=2**40)
    _refused([lstm], weights, ("s", "b", 3))


def _part(field: int, content: bytes) -> bytes:
    """A message in a message, as protobuf writes it."""
    size, length = len(content), bytearray()
    while size > 127:
        length.append(size % 128 + 128)
        size //= 128
    return bytes([field * 8 + 2, *length, size]) + content


@pytest.mark.parametrize("depth", [20, 40, 20_000])
def test_graphs_in_graphs(tmp_path: Path, depth: int) -> None:
    """The graph of an attribute of a node of a graph, over and over."""
    graph = b""
    for _ in range(depth):
        attribute = _part(1, b"body") + _part(6, graph) + b"\xa0\x01\x05"
        graph = _part(1, _part(4, b"Loop") + _part(5, attribute))
    path = tmp_path / "m.onnx"
    path.write_bytes(b"\x08\x0a" + _part(8, b"\x10\x11") + _part(7, graph))
    with pytest.raises(ModelError):
        pliant.compile(str(path))
