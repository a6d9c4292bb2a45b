"""Unsigned integers of 16 to 64 bits, and bits read as another type."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import pliant
from pliant.ir.build import Builder
from pliant.ir.graph import Module
from pliant.ir.types import NUMPY, DType, TensorType
from pliant.sym import sym

WIDE = (DType.U16, DType.U32, DType.U64)
N = (sym("n"),)


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("size", [1, 37])
def test_arithmetic(dtype: DType, size: int) -> None:
    b = Builder()
    x, y = (b.param(name, TensorType(dtype, N)) for name in "xy")
    f = b.param("f", TensorType(DType.F64, N))
    ops = {
        "add": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "floordiv": np.floor_divide,
        "mod": np.remainder,
        "maximum": np.maximum,
        "lt": np.less,
        "ge": np.greater_equal,
    }
    made = [b.binary(op, x, y) for op in ops]
    made += [b.cast(x, DType.F64), b.cast(x, DType.I64), b.cast(f, dtype)]
    made += [b.reduce("max", x), b.reduce("min", x)]
    compiled = pliant.compile(Module({"main": b.finish("main", made)}, constants={}))
    kind = NUMPY[dtype]
    most, rng = np.iinfo(kind).max, np.random.default_rng(size)
    left = rng.integers(0, most, size, dtype=kind, endpoint=True)
    right = rng.integers(1, most, size, dtype=kind, endpoint=True)
    floats = rng.uniform(0, float(most), size) * 0.99
    found = compiled(left, right, floats)
    with np.errstate(all="ignore"):
        wanted = [meaning(left, right) for meaning in ops.values()]
        wanted += [left.astype(np.float64), left.astype(np.int64), floats.astype(kind)]
        wanted += [left.max(), left.min()]
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_bitcast() -> None:
    b = Builder()
    x = b.param("x", TensorType(DType.F32, N))
    h = b.param("h", TensorType(DType.U16, N))
    made = [
        b.bitcast(x, DType.U32),
        b.bitcast(b.bitcast(x, DType.I32), DType.F32),
        b.cast(b.bitcast(h, DType.BF16), DType.F32),
        b.bitcast(b.cast(x, DType.BF16), DType.U16),
        b.bitcast(h, DType.F16),
    ]
    compiled = pliant.compile(Module({"main": b.finish("main", made)}, constants={}))
    rng = np.random.default_rng(0)
    floats = rng.standard_normal(11).astype(np.float32)
    halves = rng.standard_normal(11).astype(ml_dtypes.bfloat16)
    found = compiled(floats, halves.view(np.uint16))
    wanted = [
        floats.view(np.uint32),
        floats,
        halves.astype(np.float32),
        floats.astype(ml_dtypes.bfloat16).view(np.uint16),
        halves.view(np.float16),
    ]
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)
