"""Weights in blocks of few bits, decoded by ordinary graph ops.

A matrix of a GGUF file is rows of blocks. Its parts are constants, each with the rows
first: integers (R, blocks, bytes) and scales (R, blocks, 1). `decoded` emits the ops
that compute the numbers from them, for all rows or for those that an index picks.

    q8_0    32 numbers: d, 32 x i8                   q * d
    q4_0    32 numbers: d, 16 bytes of two nibbles   (q - 8) * d
    q4_1    32 numbers: d, m, 16 bytes               q * d + m

Low nibbles are the first half of a block, high ones the second. Other formats of a file
are decoded when it is read, and are f32 here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from pliant.ir.build import Builder
from pliant.ir.graph import Constant, Value
from pliant.ir.types import NUMPY, DType, tensor

F32 = DType.F32
BLOCK = 32
_DTYPES = {theirs: ours for ours, theirs in NUMPY.items() if ours is not DType.BF16}


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A matrix (rows, columns), or a vector, in the format of its file."""

    name: str
    kind: str  # "f32", or a format of the table above
    parts: Mapping[str, np.ndarray]
    columns: int

    @property
    def rows(self) -> int:
        return int(next(iter(self.parts.values())).shape[0])

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    def permuted(self, rows: np.ndarray) -> Weight:
        """The same with other rows, or in another order."""
        parts = {name: np.ascontiguousarray(p[rows]) for name, p in self.parts.items()}
        return Weight(self.name, self.kind, parts, self.columns)

    def value(self, b: Builder) -> Value:
        """The numbers, (rows, columns)."""
        parts = self._loaded(b)
        return b.reshape(self._decoded(b, parts), (self.rows, self.columns))

    def vector(self, b: Builder) -> Value:
        return b.reshape(self.value(b), (self.columns,))

    def picked(self, b: Builder, index: Value) -> Value:
        """The numbers of some rows: only these are read and decoded."""
        parts = {k: b.emit("index", v, index) for k, v in self._loaded(b).items()}
        return b.reshape(self._decoded(b, parts), (*index.shape, self.columns))

    def _loaded(self, b: Builder) -> dict[str, Value]:
        made: dict[str, Value] = {}
        for part, data in self.parts.items():
            kind = tensor(_DTYPES[data.dtype], *data.shape)
            made[part] = b.constant(Constant(f"{self.name}.{part}", kind, data))
        return made

    def _decoded(self, b: Builder, parts: dict[str, Value]) -> Value:
        return _DECODED[self.kind](b, parts)


def _plain(b: Builder, parts: dict[str, Value]) -> Value:
    return parts["numbers"]


def _scaled(b: Builder, numbers: Value, parts: dict[str, Value]) -> Value:
    return b.binary("mul", numbers, b.cast(parts["scale"], F32))


def _nibbles(b: Builder, parts: dict[str, Value]) -> Value:
    """(.., 16) bytes -> (.., 32) numbers of 0..15."""
    packed = parts["bytes"]
    low = b.binary("bitwise_and", packed, b.scalar(15, DType.U8))
    high = b.binary("shift_right", packed, b.scalar(4, DType.U8))
    return b.cast(b.concat([low, high], packed.type.rank - 1), F32)


def _q8_0(b: Builder, parts: dict[str, Value]) -> Value:
    return _scaled(b, b.cast(parts["numbers"], F32), parts)


def _q4_0(b: Builder, parts: dict[str, Value]) -> Value:
    numbers = b.binary("sub", _nibbles(b, parts), b.scalar(8.0, F32))
    return _scaled(b, numbers, parts)


def _q4_1(b: Builder, parts: dict[str, Value]) -> Value:
    made = _scaled(b, _nibbles(b, parts), parts)
    return b.binary("add", made, b.cast(parts["least"], F32))


_DECODED: dict[str, Callable[[Builder, dict[str, Value]], Value]] = {
    "f32": _plain,
    "q8_0": _q8_0,
    "q4_0": _q4_0,
    "q4_1": _q4_1,
}


# ---- from the bytes of a file


def _half(blocks: np.ndarray, start: int) -> np.ndarray:
    """An f16 at this byte of each block, (R, blocks, 1)."""
    return np.ascontiguousarray(blocks[:, :, start : start + 2]).view(np.float16)


def _rest(blocks: np.ndarray, start: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, :, start:])


_SPLIT: dict[str, tuple[int, Callable[[np.ndarray], dict[str, np.ndarray]]]] = {
    "q8_0": (
        34,
        lambda x: {"numbers": _rest(x, 2).view(np.int8), "scale": _half(x, 0)},
    ),
    "q4_0": (18, lambda x: {"bytes": _rest(x, 2), "scale": _half(x, 0)}),
    "q4_1": (
        20,
        lambda x: {"bytes": _rest(x, 4), "scale": _half(x, 0), "least": _half(x, 2)},
    ),
}
FORMATS = frozenset(_SPLIT)


def from_blocks(name: str, kind: str, data: np.ndarray) -> Weight:
    """A matrix from rows of blocks as bytes, (R, bytes of a row)."""
    size, split = _SPLIT[kind]
    blocks = data.reshape(data.shape[0], -1, size)
    return Weight(name, kind, split(blocks), blocks.shape[1] * BLOCK)


def from_numbers(name: str, data: np.ndarray) -> Weight:
    numbers = np.ascontiguousarray(data, np.float32)
    rows = numbers.reshape(1, -1) if numbers.ndim == 1 else numbers
    return Weight(name, "f32", {"numbers": rows}, rows.shape[1])
