"""Element types and tensor types."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from pliant.sym import Expr, as_expr, product
from pliant.sym.nodes import MEMO


class DType(enum.Enum):
    """An element type: (text, bytes, kind). Kinds: f float, i signed, u unsigned, b."""

    F64 = ("f64", 8, "f")
    F32 = ("f32", 4, "f")
    F16 = ("f16", 2, "f")
    BF16 = ("bf16", 2, "f")
    I64 = ("i64", 8, "i")
    I32 = ("i32", 4, "i")
    I16 = ("i16", 2, "i")
    I8 = ("i8", 1, "i")
    U64 = ("u64", 8, "u")
    U32 = ("u32", 4, "u")
    U16 = ("u16", 2, "u")
    U8 = ("u8", 1, "u")
    BOOL = ("bool", 1, "b")

    __hash__ = object.__hash__  # members are compared by identity; Enum's is slow

    @property
    def text(self) -> str:
        return self.value[0]

    @property
    def bytes(self) -> int:
        return self.value[1]

    @property
    def kind(self) -> str:
        return self.value[2]

    @property
    def is_float(self) -> bool:
        return self.kind == "f"

    @property
    def is_int(self) -> bool:
        return self.kind in "iu"

    @property
    def is_unsigned(self) -> bool:
        """Of integers without a sign, and of bool."""
        return self.kind in "ub"

    @property
    def compute(self) -> DType:
        """The type arithmetic happens in: half floats are storage only."""
        return DType.F32 if self in (DType.F16, DType.BF16) else self

    def __str__(self) -> str:
        return self.text


# Integers whose products are summed up in i32.
NARROW = frozenset({DType.I8, DType.U8})

DTYPES: dict[str, DType] = {d.text: d for d in DType}

# bf16 has no NumPy type: the interpreter holds it as f32, rounded after every op.
NUMPY: dict[DType, np.dtype[np.generic]] = {
    DType.F64: np.dtype(np.float64),
    DType.F32: np.dtype(np.float32),
    DType.F16: np.dtype(np.float16),
    DType.BF16: np.dtype(np.float32),
    DType.I64: np.dtype(np.int64),
    DType.I32: np.dtype(np.int32),
    DType.I16: np.dtype(np.int16),
    DType.I8: np.dtype(np.int8),
    DType.U64: np.dtype(np.uint64),
    DType.U32: np.dtype(np.uint32),
    DType.U16: np.dtype(np.uint16),
    DType.U8: np.dtype(np.uint8),
    DType.BOOL: np.dtype(np.bool_),
}


@lru_cache(maxsize=MEMO)
def contiguous_strides(shape: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """Row-major strides in elements."""
    strides: list[Expr] = []
    step = as_expr(1)
    for dim in reversed(shape):
        strides.append(step)
        step = step * dim
    return tuple(reversed(strides))


@lru_cache(maxsize=MEMO)
def _numel(shape: tuple[Expr, ...]) -> Expr:
    return product(shape)


@dataclass(frozen=True, slots=True)
class TensorType:
    """A tensor: element type, symbolic shape, and strides in elements.

    `strides` is None for row-major contiguous, the only layout before lowering.
    """

    dtype: DType
    shape: tuple[Expr, ...]
    strides: tuple[Expr, ...] | None = None

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> Expr:
        return _numel(self.shape)

    @property
    def bytes(self) -> Expr:
        return self.numel * self.dtype.bytes

    def layout(self) -> tuple[Expr, ...]:
        return contiguous_strides(self.shape) if self.strides is None else self.strides

    def with_shape(self, shape: tuple[Expr, ...]) -> TensorType:
        return TensorType(self.dtype, shape)

    def with_dtype(self, dtype: DType) -> TensorType:
        return TensorType(dtype, self.shape)

    def __str__(self) -> str:
        text = f"{self.dtype}[{', '.join(map(str, self.shape))}]"
        if self.strides is not None:
            text += f" strides [{', '.join(map(str, self.strides))}]"
        return text


def tensor(dtype: DType, *shape: Expr | int) -> TensorType:
    return TensorType(dtype, tuple(as_expr(d) for d in shape))
