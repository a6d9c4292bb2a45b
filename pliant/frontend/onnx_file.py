"""Reads and checks ONNX files; what is wrong with one is a ModelError."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from typing import Any

import onnx
from google.protobuf.message import DecodeError

from pliant.errors import ModelError
from pliant.frontend.onnx_tensors import checked_size
from pliant.frontend.onnx_walk import DEEPEST

_INT = onnx.AttributeProto.INT


def read_model(model: Any) -> tuple[onnx.ModelProto, str | None]:
    """The model, and the folder that its data may be in."""
    if isinstance(model, onnx.ModelProto):
        return check(model), None
    path = os.fspath(model)
    content = _content(path)
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(content)
    except (DecodeError, RecursionError, ValueError) as error:
        raise ModelError(f"{path} is no ONNX model: {error}") from error
    return check(proto), os.path.dirname(os.path.abspath(path))


def _content(path: str) -> bytes:
    """Of a plain file: a device or a pipe may have no end."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ModelError(f"{path} cannot be read: it is no plain file")
        with open(path, "rb") as file:
            return file.read()
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        reason = getattr(error, "strerror", None) or error
        raise ModelError(f"{path} cannot be read: {reason}") from error


def check(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model, which has the form that the format states."""
    if not model.HasField("graph") or not model.opset_import:
        raise ModelError("this is no ONNX model: it has no graph or no operator set")
    _check_graph(model.graph, 0)
    for opset in model.opset_import:
        if opset.domain in ("", "ai.onnx"):
            newest = onnx.defs.onnx_opset_version()
            if not 1 <= opset.version <= newest:
                raise ModelError(
                    f"the model uses operator set {opset.version}; the installed onnx "
                    f"package knows those up to {newest}"
                )
    for tensor in model.graph.initializer:
        checked_size(tensor.dims, tensor.name)
    try:
        onnx.checker.check_model(_outline(model), full_check=False)
    except onnx.checker.ValidationError as error:
        raise ModelError(f"the model is malformed: {_first(error)}") from error
    except ValueError as error:
        if "too large" not in str(error) and "2GB" not in str(error):
            raise ModelError(f"the model is malformed: {_first(error)}") from error
    return model


def check_types(model: onnx.ModelProto, cause: Exception) -> None:
    """ModelError if an op of the model has inputs that it does not take.

    Asked where a translation failed: a rule relies on what operator sets promise.
    """
    try:
        onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    except Exception as error:  # of the package, whatever it finds
        raise ModelError(f"the model is malformed: {_first(error)}") from cause


def _outline(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model for the checker: without weights, and with a shape for every type.

    Weights are checked when they are read. A rank that is not known is no fault.
    """
    light = onnx.ModelProto()
    light.ir_version = model.ir_version
    light.opset_import.extend(model.opset_import)
    light.functions.extend(model.functions)
    for function in light.functions:
        _for_checker(function.node, _core_of(function.opset_import))
    graph = light.graph
    graph.name = model.graph.name
    graph.node.extend(model.graph.node)
    _for_checker(graph.node, _core_of(model.opset_import))
    graph.input.extend(model.graph.input)
    graph.output.extend(model.graph.output)
    for value in (*graph.input, *graph.output):
        if value.type.WhichOneof("value") == "tensor_type":
            value.type.tensor_type.shape.SetInParent()
    for tensor in model.graph.initializer:
        stub = graph.initializer.add()
        stub.name, stub.data_type = tensor.name, tensor.data_type
        stub.dims.append(0)
    graph.sparse_initializer.extend(model.graph.sparse_initializer)
    return light


def _for_checker(nodes: Iterable[onnx.NodeProto], opset: int) -> None:
    """Changes nodes so that the checker takes them for what they are.

    Tensors in files beside the model, in attributes, become stubs: the checker would
    look for them in the process's folder. It refuses the first form of
    GroupNormalization, which a later operator set withdrew: it is shown another op of
    these inputs.
    """
    for node in nodes:
        withdrawn = node.op_type == "GroupNormalization" and 18 <= opset < 21
        if withdrawn and not node.domain:
            groups = [a for a in node.attribute if a.name != "epsilon"]
            if [(a.name, a.type) for a in groups] == [("num_groups", _INT)]:
                node.op_type = "InstanceNormalization"
                node.attribute.remove(groups[0])
        for attribute in node.attribute:
            for tensor in (attribute.t, *attribute.tensors):
                _make_stub(tensor)
            for graph in (attribute.g, *attribute.graphs):
                for tensor in graph.initializer:
                    _make_stub(tensor)
                _for_checker(graph.node, opset)


def _core_of(imports: Iterable[onnx.OperatorSetIdProto]) -> int:
    """The version of the default operator set; 0 if there is none."""
    return next((i.version for i in imports if i.domain in ("", "ai.onnx")), 0)


def _make_stub(tensor: onnx.TensorProto) -> None:
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        del tensor.external_data[:]
        tensor.ClearField("data_location")
        tensor.dims[:] = [0]


def _check_graph(graph: onnx.GraphProto, depth: int) -> None:
    """Not nested too deep, and every name is a text: protobuf also lets bytes pass."""
    if depth > DEEPEST:
        raise ModelError(f"graphs are nested more than {DEEPEST} deep")
    _check_texts(graph.name, *(t.name for t in graph.initializer))
    for value in (*graph.input, *graph.output):
        dims = value.type.tensor_type.shape.dim
        _check_texts(value.name, *(d.dim_param for d in dims))
    for node in graph.node:
        _check_texts(node.name, node.op_type, node.domain, *node.input, *node.output)
        for attribute in node.attribute:
            _check_texts(attribute.name, attribute.ref_attr_name)
            for inner in (attribute.g, *attribute.graphs):
                _check_graph(inner, depth + 1)


def _check_texts(*names: object) -> None:
    for name in names:
        if not isinstance(name, str):
            raise ModelError(f"the model is malformed: {name!r} is no UTF-8 text")


def _first(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
