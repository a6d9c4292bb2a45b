"""Memory as the interpreter of loop functions sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pliant.errors import InternalError
from pliant.ir.types import NUMPY, DType
from pliant.sym import Expr

Array = np.ndarray[Any, np.dtype[Any]]
_POISON = 0xFF  # what fresh memory holds: NaN as a float, -1 as an integer


class LoopFault(InternalError):
    """A loop function did what no loop function may do."""

    def __init__(self, detail: str) -> None:
        super().__init__("interpreter", detail)


@dataclass(frozen=True, slots=True, eq=False)
class ByteRange:
    """An address: bytes, and an offset into them."""

    data: Array
    offset: int = 0
    shared: bool = True  # False for a worker's scratch, which iterations take over

    def at(self, distance: int) -> ByteRange:
        return ByteRange(self.data, self.offset + distance, self.shared)


def memory_of(array: Array) -> ByteRange:
    """The memory of a contiguous array; writes to it are seen in the array."""
    if not array.flags.c_contiguous:
        raise ValueError("a buffer must be contiguous; give a Memory for a strided one")
    return ByteRange(array.reshape(-1).view(np.uint8))


def storage(dtype: DType) -> np.dtype[Any]:
    """How an element lies in memory: bf16 as its bits."""
    return np.dtype(np.uint16) if dtype is DType.BF16 else NUMPY[dtype]


def poisoned(count: int) -> ByteRange:
    return ByteRange(np.full(count, _POISON, np.uint8))


def sizes_of(dims: Sequence[Expr], env: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(dim.evaluate(env) for dim in dims)
