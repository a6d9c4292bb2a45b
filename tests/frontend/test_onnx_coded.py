"""Weights of ONNX files in few bits: the numbers that they stand for are never kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import pliant
from tests.frontend.onnx_models import FLOAT, drawn, model

K, N, BLOCK = 64, 128, 32
TYPES = {
    "uint8": (TensorProto.UINT8, 0, 256),
    "int8": (TensorProto.INT8, -128, 128),
    "uint4": (TensorProto.UINT4, 0, 16),
    "int4": (TensorProto.INT4, -8, 8),
}


def codes(name: str, *shape: int) -> onnx.TensorProto:
    kind, low, high = TYPES[name]
    data = np.random.default_rng(3).integers(low, high, shape)
    return helper.make_tensor("", kind, shape, data.flatten())


def dequantized(name: str, how: str, zero: bool, transposed: bool) -> onnx.ModelProto:
    """x times a weight (K, N), or (N, K) that is transposed."""
    shape, own = ((N, K), 0) if transposed else ((K, N), 1)
    attributes: dict[str, int] = {}
    parts: tuple[int, ...] = ()
    if how == "row":
        parts, attributes = (N,), {"axis": own}
    elif how == "block":
        along = 1 - own
        parts = tuple(s // BLOCK if i == along else s for i, s in enumerate(shape))
        attributes = {"axis": along, "block_size": BLOCK}
    scale = np.abs(drawn(1, *parts)) / 8 + 0.01
    operands = ["w", "scale", *(["zero"] if zero else [])]
    nodes = [helper.make_node("DequantizeLinear", operands, ["f"], **attributes)]
    last = "f"
    if transposed:
        nodes.append(helper.make_node("Transpose", ["f"], ["t"], perm=[1, 0]))
        last = "t"
    nodes.append(helper.make_node("MatMul", ["x", last], ["y"]))
    made = model(nodes, {"x": (FLOAT, ["b", K])}, ["y"], {"scale": scale}, opset=21)
    for label, sizes in (("w", shape), *([("zero", parts)] if zero else [])):
        tensor = codes(name, *sizes)
        tensor.name = label
        made.graph.initializer.append(tensor)
    return made


def check(proto: onnx.ModelProto, most: int, want: Any) -> None:
    m = pliant.compile(proto, threads=1)
    assert m.compile_count == 1
    assert m.weight_bytes <= most
    for rows in (0, 1, 3, 17):
        x = drawn(rows, rows, K)
        np.testing.assert_allclose(m(x), want(x), 1e-4, 1e-3)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("how", ["tensor", "row", "block"])
@pytest.mark.parametrize("name", TYPES)
def test_dequantized_weights(name: str, how: str, zero: bool, transposed: bool) -> None:
    proto = dequantized(name, how, zero, transposed)
    evaluator = ReferenceEvaluator(proto)
    bits = 4 if name.endswith("4") else 8
    parts = 2 * 4 * N * (K // BLOCK if how == "block" else 1)
    check(proto, K * N * bits // 8 + parts, lambda x: evaluator.run(None, {"x": x})[0])


@pytest.mark.parametrize("zero", ["none", "codes", "floats"])
@pytest.mark.parametrize("bits", [4, 8])
def test_matmul_nbits(bits: int, zero: str) -> None:
    groups, per = K // BLOCK, 8 // bits
    source = np.random.default_rng(5)
    packed = source.integers(0, 256, (N, groups, BLOCK // per), np.uint8)
    scale = np.abs(drawn(1, N, groups)) / 8 + 0.01
    constants: dict[str, Any] = {"w": packed, "scale": scale}
    zeros = np.full((N, groups), float(1 << (bits - 1)), np.float32)
    if zero == "codes":
        constants["zero"] = source.integers(0, 256, (N, groups // per), np.uint8)
        zeros = unpacked(constants["zero"], bits).astype(np.float32)
    elif zero == "floats":
        constants["zero"] = zeros = drawn(2, N, groups) + 7
    operands = ["x", *constants]
    node = helper.make_node(
        "MatMulNBits",
        operands,
        ["y"],
        domain="com.microsoft",
        K=K,
        N=N,
        bits=bits,
        block_size=BLOCK,
    )
    inputs = {"x": (FLOAT, ["b", K])}
    proto = model([node], inputs, ["y"], constants, domains=["com.microsoft"])
    whole = unpacked(packed, bits).astype(np.float32)
    weight = ((whole - zeros[..., None]) * scale[..., None]).reshape(N, K)
    check(proto, K * N * bits // 8 + 2 * 4 * N * groups, lambda x: x @ weight.T)


def unpacked(packed: Any, bits: int) -> Any:
    """The numbers in bytes, the lowest bits first."""
    shifts = np.arange(0, 8, bits)
    parts = (packed[..., None] >> shifts) & ((1 << bits) - 1)
    return parts.reshape(*packed.shape[:-1], -1)


def test_weights_that_a_size_chooses() -> None:
    """They are no data before the call."""
    shape = helper.make_node("Shape", ["x"], ["first"], start=0, end=1)
    nodes = [
        shape,
        helper.make_node("Add", ["first", "k"], ["last"]),
        helper.make_node("Slice", ["w", "first", "last", "zero"], ["part"]),
        helper.make_node("DequantizeLinear", ["part", "scale"], ["f"]),
        helper.make_node("MatMul", ["x", "f"], ["y"]),
    ]
    w = np.random.default_rng(3).integers(-128, 128, (2 * K, N)).astype(np.int8)
    constants = {
        "w": w,
        "scale": np.float32(0.1),
        "k": np.array([K]),
        "zero": np.array([0]),
    }
    proto = model(nodes, {"x": (FLOAT, ["b", K])}, ["y"], constants)
    m = pliant.compile(proto, threads=1)
    for rows in (0, 1, 3, 17):
        x = drawn(rows, rows, K)
        want = x @ (w[rows : rows + K] * np.float32(0.1))
        np.testing.assert_allclose(m(x), want, 1e-4, 1e-3)
