"""Weights in the formats of GGUF files, against the numbers that gguf makes of them."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest

import pliant
from pliant.ir.build import Builder
from pliant.ir.graph import Module, Value
from pliant.ir.types import DType, tensor
from pliant.language.blocks import FORMATS, Weight, from_blocks
from pliant.sym import sym

ROWS, COLUMNS = 19, 512
SCALES = {  # at which bytes of a block its f16 numbers are
    **dict.fromkeys(("q8_0", "q4_0", "q5_0"), (0,)),
    **dict.fromkeys(("q4_1", "q5_1", "q4_k", "q5_k"), (0, 2)),
    "q6_k": (208,),
}
FOUR_BITS = ("q4_0", "q4_1", "q4_k")


def stored(kind: str) -> tuple[Weight, np.ndarray]:
    """A weight of random blocks, and its numbers."""
    source = np.random.default_rng(len(kind) + ord(kind[-1]))
    format = gguf.GGMLQuantizationType[kind.upper()]
    if kind in ("f16", "bf16"):
        numbers = source.standard_normal((ROWS, COLUMNS), np.float32)
        data = gguf.quantize(numbers, format)
    else:
        per, size = gguf.GGML_QUANT_SIZES[format]
        blocks = source.integers(0, 256, (ROWS, COLUMNS // per, size), np.uint8)
        for at in SCALES[kind]:
            scales = source.uniform(0.001, 0.01, blocks.shape[:2]).astype(np.float16)
            blocks[:, :, at : at + 2] = scales[..., None].view(np.uint8)
        data = blocks.reshape(ROWS, -1)
    return from_blocks(f"w.{kind}", kind, data), gguf.dequantize(data, format)


def finished(b: Builder, results: list[Value]) -> Module:
    return Module({"main": b.finish("main", results)}, constants=dict(b.constants))


@pytest.fixture(scope="module")
def every() -> dict[str, tuple[Weight, np.ndarray]]:
    return {kind: stored(kind) for kind in sorted(FORMATS)}


def test_products(every: dict[str, tuple[Weight, np.ndarray]]) -> None:
    """Decoded in the product's kernel; the float matrix is never in memory."""
    b = Builder()
    x = b.param("x", tensor(DType.F32, sym("m"), COLUMNS))
    made = [weight.product(b, x, None) for weight, _ in every.values()]
    m = pliant.compile(finished(b, made), threads=2)
    kinds = [
        op.str_attr("kind") for op in m.program.fused.main.ops if op.name == "fusion"
    ]
    assert sum("coded_matmul" in kind for kind in kinds) == len(SCALES)
    for rows in (0, 1, 3, 7):
        x = np.random.default_rng(rows).standard_normal((rows, COLUMNS), np.float32)
        for got, (kind, (_, numbers)) in zip(m(x), every.items(), strict=True):
            np.testing.assert_allclose(got, x @ numbers.T, 1e-3, 1e-2, err_msg=kind)
    numbers = ROWS * COLUMNS
    packed = (len(FOUR_BITS) * 0.5 + (len(SCALES) - len(FOUR_BITS)) + 2 * 2) * numbers
    assert m.weight_bytes < 2.5 * packed  # with scales, and columns to whole panels


def test_picked_rows(every: dict[str, tuple[Weight, np.ndarray]]) -> None:
    b = Builder()
    index = b.param("index", tensor(DType.I64, sym("n"), sym("k")))
    made = [weight.picked(b, index) for weight, _ in every.values()]
    m = pliant.compile(finished(b, made), threads=1)
    where = np.array([[3, 0, 18], [18, 18, 7]])
    for got, (kind, (_, numbers)) in zip(m(where), every.items(), strict=True):
        np.testing.assert_array_equal(got, numbers[where], err_msg=kind)


def test_a_bias(every: dict[str, tuple[Weight, np.ndarray]]) -> None:
    weight, numbers = every["bf16"]
    b = Builder()
    x = b.param("x", tensor(DType.F32, sym("m"), COLUMNS))
    bias = b.param("bias", tensor(DType.F32, ROWS))
    m: Any = pliant.compile(finished(b, [weight.product(b, x, bias)]), threads=1)
    x, bias = np.ones((2, COLUMNS), np.float32), np.arange(ROWS, dtype=np.float32)
    np.testing.assert_allclose(m(x, bias), x @ numbers.T + bias, 1e-3, 1e-2)
