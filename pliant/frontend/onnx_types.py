"""Element types of ONNX, and what stands for them in the IR.

A type that the IR has is its DType. Of the others, integers and floats of 8 bits or
fewer, the IR sees codes: one byte for each element, the low bits of it, as ml_dtypes
keeps them in NumPy arrays. onnx_codes.py computes what codes mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pliant.ir.types import NUMPY, DType


@dataclass(frozen=True, slots=True)
class Element:
    """An element type: its number in TensorProto.DataType, its name, what holds it."""

    number: int
    name: str
    dtype: DType | None  # of the IR; None: the type has none
    bits: int = 0  # of a code

    @property
    def numpy(self) -> np.dtype[Any]:
        """The type of a NumPy array that has these elements."""
        if self.dtype is None or self.dtype is DType.BF16:
            return small_dtype(self.name)
        return NUMPY[self.dtype]

    @property
    def is_float(self) -> bool:
        return "FLOAT" in self.name or self.name == "DOUBLE"


def small_dtype(name: str) -> np.dtype[Any]:
    """The NumPy type that ml_dtypes has for an ONNX name."""
    import ml_dtypes

    found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, _SMALL[name]))
    return found


_SMALL = {
    "BFLOAT16": "bfloat16",
    "FLOAT8E4M3FN": "float8_e4m3fn",
    "FLOAT8E4M3FNUZ": "float8_e4m3fnuz",
    "FLOAT8E5M2": "float8_e5m2",
    "FLOAT8E5M2FNUZ": "float8_e5m2fnuz",
    "FLOAT8E8M0": "float8_e8m0fnu",
    "FLOAT4E2M1": "float4_e2m1fn",
    "UINT4": "uint4",
    "INT4": "int4",
    "UINT2": "uint2",
    "INT2": "int2",
}

ELEMENTS: dict[int, Element] = {
    e.number: e
    for e in (
        Element(1, "FLOAT", DType.F32),
        Element(2, "UINT8", DType.U8),
        Element(3, "INT8", DType.I8),
        Element(4, "UINT16", DType.U16),
        Element(5, "INT16", DType.I16),
        Element(6, "INT32", DType.I32),
        Element(7, "INT64", DType.I64),
        Element(9, "BOOL", DType.BOOL),
        Element(10, "FLOAT16", DType.F16),
        Element(11, "DOUBLE", DType.F64),
        Element(12, "UINT32", DType.U32),
        Element(13, "UINT64", DType.U64),
        Element(16, "BFLOAT16", DType.BF16),
        Element(17, "FLOAT8E4M3FN", None, 8),
        Element(18, "FLOAT8E4M3FNUZ", None, 8),
        Element(19, "FLOAT8E5M2", None, 8),
        Element(20, "FLOAT8E5M2FNUZ", None, 8),
        Element(21, "UINT4", None, 4),
        Element(22, "INT4", None, 4),
        Element(23, "FLOAT4E2M1", None, 4),
        Element(24, "FLOAT8E8M0", None, 8),
        Element(25, "UINT2", None, 2),
        Element(26, "INT2", None, 2),
    )
}
NAMES = {
    **{number: e.name for number, e in ELEMENTS.items()},
    0: "UNDEFINED",
    8: "STRING",
    14: "COMPLEX64",
    15: "COMPLEX128",
}
OF_DTYPE = {e.dtype: e for e in ELEMENTS.values() if e.dtype is not None}
INT64, BOOL, FLOAT = ELEMENTS[7], ELEMENTS[9], ELEMENTS[1]
