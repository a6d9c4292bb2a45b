"""Small ONNX models for tests, and what the reference evaluator makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64

Shape = Sequence[int | str | None] | None


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: dict[str, tuple[int, Shape]],
    outputs: Sequence[str],
    constants: dict[str, Any] | None = None,
    opset: int = 17,
    functions: Sequence[onnx.FunctionProto] = (),
    domains: Sequence[str] = (),
) -> onnx.ModelProto:
    given = [
        helper.make_tensor_value_info(name, kind, shape)
        for name, (kind, shape) in inputs.items()
    ]
    made = [helper.make_empty_tensor_value_info(name) for name in outputs]
    for value in made:
        value.type.tensor_type.elem_type = FLOAT
    stored = [
        numpy_helper.from_array(np.asarray(array), name)
        for name, array in (constants or {}).items()
    ]
    graph = helper.make_graph(list(nodes), "g", given, made, stored)
    imports = [helper.make_opsetid("", opset)]
    imports += [helper.make_opsetid(domain, 1) for domain in domains]
    return helper.make_model(
        graph, opset_imports=imports, functions=list(functions), ir_version=10
    )


def reference(proto: onnx.ModelProto, *inputs: Any) -> list[Any]:
    names = [value.name for value in proto.graph.input]
    feeds = dict(zip(names, inputs, strict=True))
    return list(ReferenceEvaluator(proto).run(None, feeds))


def drawn(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
