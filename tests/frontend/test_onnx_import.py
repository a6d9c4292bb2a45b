"""ONNX models: symbols, shape subgraphs, signatures, control flow, element types."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import pliant
from pliant.errors import OptionError, ShapeError, UnsupportedOpError
from tests.frontend.onnx_models import FLOAT, INT64, drawn, model, reference

node = helper.make_node
SIZES = [(0, 3), (1, 1), (2, 5), (3, 7), (4, 64)]


def flattening() -> onnx.ModelProto:
    """Reshape(x, [Shape(x)[0], -1]), as exporters write it."""
    return model(
        [
            node("Shape", ["x"], ["s"]),
            node("Gather", ["s", "zero"], ["b"]),
            node("Unsqueeze", ["b", "axis"], ["row"]),
            node("Concat", ["row", "rest"], ["shape"], axis=0),
            node("Reshape", ["x", "shape"], ["y"]),
        ],
        {"x": (FLOAT, ["batch", "n", 3])},
        ["y"],
        {
            "zero": np.int64(0),
            "axis": np.array([0]),
            "rest": np.array([-1]),
        },
    )


def test_shape_subgraph_vanishes() -> None:
    m = pliant.compile(flattening())
    assert m.dims == ("batch", "n")
    for batch, n in SIZES:
        x = drawn(0, batch, n, 3)
        np.testing.assert_array_equal(m(x), x.reshape(batch, n * 3))
    assert m.compile_count == 1


def test_names_positions_and_torch() -> None:
    m = pliant.compile(flattening())
    x = drawn(1, 2, 5, 3)
    assert isinstance(m(x), np.ndarray)
    np.testing.assert_array_equal(m(x=x), m(x))
    assert isinstance(m(torch.from_numpy(x)), torch.Tensor)


def test_path(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(flattening(), path)
    x = drawn(2, 3, 4, 3)
    for given in (path, str(path)):
        assert pliant.compile(given)(x).shape == (3, 12)


def test_very_long_names_of_dims() -> None:
    """LLVM takes 1,024 characters; names that begin alike stay apart."""
    names = ["w" * 5000, "w" * 5001]
    made = [node("Tanh", ["x"], ["t"]), node("Softmax", ["t"], ["y"])]
    proto = model(made, {"x": (FLOAT, names)}, ["y"])
    m = pliant.compile(proto, threads=1)
    assert m.dims == tuple(names)
    for shape in SIZES:
        x = drawn(0, *shape)
        np.testing.assert_allclose(m(x), reference(proto, x)[0], 1e-5, 1e-6)


def test_dynamic_shapes_free_and_name_dims() -> None:
    fixed = model([node("Relu", ["x"], ["y"])], {"x": (FLOAT, [2, 3])}, ["y"])
    with pytest.raises(ShapeError):
        pliant.compile(fixed)(drawn(0, 4, 3))
    m = pliant.compile(fixed, dynamic_shapes={"x": {0: "rows"}})
    assert m.dims == ("rows",)
    assert m(drawn(0, 4, 3)).shape == (4, 3)
    with pytest.raises(OptionError, match="inputs are x"):
        pliant.compile(fixed, dynamic_shapes={"z": {0: "rows"}})


def test_sizes_in_floats() -> None:
    """Half of a height, computed in floats and cast back."""
    proto = model(
        [
            node("Shape", ["x"], ["s"]),
            node("Slice", ["s", "two", "four"], ["hw"]),
            node("Cast", ["hw"], ["f"], to=FLOAT),
            node("Mul", ["f", "half"], ["g"]),
            node("Floor", ["g"], ["fl"]),
            node("Cast", ["fl"], ["i"], to=INT64),
            node("Slice", ["s", "none", "two"], ["nc"]),
            node("Concat", ["nc", "i"], ["sizes"], axis=0),
            node(
                "Resize",
                ["x", "", "", "sizes"],
                ["y"],
                mode="nearest",
                coordinate_transformation_mode="asymmetric",
                nearest_mode="floor",
            ),
        ],
        {"x": (FLOAT, [1, 2, "h", "w"])},
        ["y"],
        {
            "two": np.array([2]),
            "four": np.array([4]),
            "none": np.array([0]),
            "half": np.array([0.5, 0.5], np.float32),
        },
    )
    m = pliant.compile(proto)
    for h, w in ((4, 6), (7, 9), (32, 31)):
        x = drawn(3, 1, 2, h, w)
        np.testing.assert_allclose(m(x), reference(proto, x)[0])


def test_expand_by_where() -> None:
    """torch's Expand: Where(shape == -1, 1, shape)."""
    proto = model(
        [
            node("Shape", ["y"], ["s"]),
            node("Equal", ["s", "minus"], ["open"]),
            node("Where", ["open", "one", "s"], ["shape"]),
            node("Expand", ["x", "shape"], ["z"]),
        ],
        {"x": (FLOAT, [1, 3]), "y": (FLOAT, ["n", 3])},
        ["z"],
        {"minus": np.array([-1, -1]), "one": np.array([1, 1])},
    )
    m = pliant.compile(proto)
    x = drawn(0, 1, 3)
    for n in (0, 1, 5):
        assert m(x, drawn(1, n, 3)).shape == (n, 3)


def test_values_that_decide_shapes_are_fixed_by_an_example() -> None:
    proto = model(
        [node("ReduceSum", ["x", "axes"], ["y"], keepdims=0)],
        {"x": (FLOAT, ["a", "b"]), "axes": (INT64, [1])},
        ["y"],
    )
    with pytest.raises(UnsupportedOpError, match="example_inputs with values of axes"):
        pliant.compile(proto)
    x, axes = drawn(0, 3, 4), np.array([1])
    m = pliant.compile(proto, (x, axes))
    np.testing.assert_allclose(m(drawn(1, 5, 2), axes), drawn(1, 5, 2).sum(1), 1e-5)
    with pytest.raises(ShapeError, match="was fixed to"):
        m(x, np.array([0]))


def test_unsupported_ops_are_all_listed() -> None:
    proto = model(
        [
            node("Foo", ["x"], ["a"], domain="my"),
            node("Bar", ["a"], ["b"], domain="my"),
            node("Foo", ["x"], ["unused"], domain="my"),
            node("Relu", ["b"], ["y"]),
        ],
        {"x": (FLOAT, [2])},
        ["y"],
        domains=["my"],
    )
    with pytest.raises(UnsupportedOpError) as caught:
        pliant.compile(proto)
    assert [op.name for op in caught.value.ops] == ["my.Foo"]


def test_functions() -> None:
    body = helper.make_function(
        "my",
        "Twice",
        ["a"],
        ["c"],
        [node("Add", ["a", "a"], ["b"]), node("LeakyRelu", ["b"], ["c"])],
        [helper.make_opsetid("", 17)],
    )
    proto = model(
        [node("Twice", ["x"], ["y"], domain="my")],
        {"x": (FLOAT, ["n"])},
        ["y"],
        functions=[body],
        domains=["my"],
    )
    x = drawn(0, 7)
    np.testing.assert_allclose(pliant.compile(proto)(x), reference(proto, x)[0])


def _loop(carried: int, cond: str) -> onnx.ModelProto:
    """y = 2 y + x while `cond`; each y is stacked."""
    body = helper.make_graph(
        [
            node("Add", ["y", "y"], ["twice"]),
            node("Add", ["twice", "x"], ["after"]),
            node("ReduceMax", ["after"], ["top"], keepdims=0),
            node("Less", ["top", "limit"], ["small"]),
            node("Identity", ["go"], ["same"]),
            node("Identity", ["after"], ["row"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("y", FLOAT, None),
        ],
        [helper.make_empty_tensor_value_info(n) for n in (cond, "after", "row")],
    )
    return model(
        [node("Loop", ["count", "true", "x"], ["last", "rows"], body=body)],
        {"x": (FLOAT, ["n"])},
        ["last", "rows"],
        {
            "count": np.int64(carried),
            "true": np.array(True),
            "limit": np.float32(20),
        },
    )


@pytest.mark.parametrize("cond", ["same", "small"])
def test_loops(cond: str) -> None:
    proto = _loop(6, cond)
    m = pliant.compile(proto)
    for n in (1, 3, 8):
        x = np.abs(drawn(n, n)) + 0.1
        for found, wanted in zip(m(x), reference(proto, x), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-5)


def until_large() -> onnx.GraphProto:
    """v -> v + v, as long as that is below the limit; every v is a row."""
    kinds = (("i", INT64, []), ("go", TensorProto.BOOL, []), ("v", FLOAT, ["n"]))
    given = [helper.make_tensor_value_info(*kind) for kind in kinds]
    names = "more", "w", "row"
    made = [helper.make_empty_tensor_value_info(name) for name in names]
    nodes = [
        node("Add", ["v", "v"], ["w"]),
        node("ReduceMax", ["w"], ["top"], keepdims=0),
        node("Less", ["top", "limit"], ["more"]),
        node("Identity", ["v"], ["row"]),
    ]
    return helper.make_graph(nodes, "body", given, made)


@pytest.mark.parametrize("most", ["", "most"])
def test_loops_whose_rounds_are_data_stack_results(most: str) -> None:
    loop = node("Loop", [most, "first", "x"], ["last", "rows"], body=until_large())
    first = node("Less", ["zero", "limit"], ["first"])
    inputs = {"x": (FLOAT, ["n"]), "limit": (FLOAT, []), "most": (INT64, [])}
    if not most:
        del inputs["most"]
    proto = model([first, loop], inputs, ["last", "rows"], {"zero": np.float32(0)})
    m = pliant.compile(proto, threads=1)
    for n, limit in ((1, 9.0), (3, 1000.0), (2, -1.0), (4, 3.0), (1, 1e9)):
        given = [np.ones(n, np.float32), np.float32(limit)]
        if most:
            given.append(np.int64(4))
        last, rows = m(*given)
        want = []
        value, go = 1.0, limit > 0
        while go and len(want) < (4 if most else 99):
            want.append(np.full(n, value, np.float32))
            value, go = 2 * value, 2 * value < limit
        np.testing.assert_array_equal(last, np.full(n, value, np.float32))
        np.testing.assert_array_equal(rows, np.reshape(want, (len(want), n)))
    assert m.compile_count == 1


def test_if_on_data_and_on_sizes() -> None:
    def branch(op: str) -> onnx.GraphProto:
        out = helper.make_empty_tensor_value_info(f"{op}_out")
        return helper.make_graph([node(op, ["x"], [f"{op}_out"])], op, [], [out])

    branches = {"then_branch": branch("Exp"), "else_branch": branch("Neg")}
    proto = model(
        [
            node("ReduceSum", ["x"], ["t"], keepdims=0),
            node("Greater", ["t", "zero"], ["c"]),
            node("If", ["c"], ["y"], **branches),
            node("Size", ["x"], ["n"]),
            node("Less", ["n", "four"], ["few"]),
            node("If", ["few"], ["z"], **branches),
        ],
        {"x": (FLOAT, ["n"])},
        ["y", "z"],
        {"zero": np.float32(0), "four": np.int64(4)},
    )
    m = pliant.compile(proto)
    for n in (1, 3, 4, 9):
        for sign in (1, -1):
            x = (sign * np.abs(drawn(n, n))).astype(np.float32)
            for found, wanted in zip(m(x), reference(proto, x), strict=True):
                np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_data_dependent_sizes() -> None:
    proto = model([node("NonZero", ["x"], ["y"])], {"x": (FLOAT, ["a", "b"])}, ["y"])
    proto.graph.output[0].type.tensor_type.elem_type = INT64
    m = pliant.compile(proto)
    for shape in ((1, 1), (3, 4), (5, 2)):
        x = np.maximum(drawn(7, *shape), 0)
        np.testing.assert_array_equal(m(x), np.array(np.nonzero(x)))


def _typed(kind: int, op: str, **attrs: Any) -> onnx.ModelProto:
    made = [node(op, ["x"], ["y"], **attrs)]
    proto = model(made, {"x": (kind, ["n"])}, ["y"], {}, 24)
    proto.graph.output[0].type.tensor_type.elem_type = attrs.get("to", kind)
    return proto


def test_element_types() -> None:
    x = np.array([0.3, -1.7, 250.0, 1e-6, 3.49], np.float32)
    for name in ("float8_e4m3fn", "float8_e5m2", "bfloat16", "float16"):
        kind = {
            "float8_e4m3fn": TensorProto.FLOAT8E4M3FN,
            "float8_e5m2": TensorProto.FLOAT8E5M2,
            "bfloat16": TensorProto.BFLOAT16,
            "float16": TensorProto.FLOAT16,
        }[name]
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        small = pliant.compile(_typed(FLOAT, "Cast", to=kind))(x)
        assert small.dtype == dtype
        np.testing.assert_array_equal(small, x.astype(dtype))
        back = pliant.compile(_typed(kind, "Cast", to=FLOAT))(small)
        np.testing.assert_array_equal(back, small.astype(np.float32))


def test_half_floats_of_torch() -> None:
    m = pliant.compile(_typed(TensorProto.BFLOAT16, "Neg"))
    x = torch.arange(5).to(torch.bfloat16)
    assert torch.equal(m(x), -x)


def test_without_torch(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(flattening(), path)
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "import numpy as np, pliant\n"
        f"m = pliant.compile({str(path)!r})\n"
        "x = np.ones((2, 5, 3), np.float32)\n"
        "assert m(x).shape == (2, 15)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_without_onnx() -> None:
    code = (
        "import sys\n"
        "sys.modules['onnx'] = None\n"
        "import pliant\n"
        "try:\n"
        "    pliant.compile('m.onnx')\n"
        "except pliant.PliantError as error:\n"
        "    assert 'pliant[onnx]' in str(error)\n"
        "else:\n"
        "    raise AssertionError\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
