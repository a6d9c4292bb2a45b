"""Arrays that start at a cache line, large ones on huge pages where there are any.

A vector that lies across two lines takes two reads; a product's panels are whole lines.
And it walks over its weights with a stride of pages; with pages of 4 KiB it waits
for their addresses. The system backs whole, aligned huge pages only, so an array of a
few MiB starts at one.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

HUGE = 2 << 20
LINE = 64  # bytes
LEAST = 1 << 20  # bytes of an array that is worth pages of its own


def zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """As numpy.zeros, at the start of a line; a large array is on huge pages."""
    size = int(np.prod(shape, dtype=object)) * dtype.itemsize
    if size < LEAST or not hasattr(mmap, "MADV_HUGEPAGE"):
        return _at_line(shape, dtype, size)
    pages = mmap.mmap(-1, size + HUGE)  # what is not touched costs nothing
    whole = np.frombuffer(pages, np.uint8)
    start = -whole.ctypes.data % HUGE
    try:
        pages.madvise(mmap.MADV_HUGEPAGE, start, size // HUGE * HUGE or size)
    except OSError:  # built without them, or not allowed
        return _at_line(shape, dtype, size)
    return whole[start : start + size].view(dtype).reshape(shape)


def copied(array: np.ndarray) -> np.ndarray:
    """A copy, row-major, that starts at a line."""
    copy = zeros(array.shape, array.dtype)
    copy[...] = array
    return copy


def _at_line(shape: tuple[int, ...], dtype: np.dtype[Any], size: int) -> np.ndarray:
    whole = np.zeros(size + LINE, np.uint8)
    start = -whole.ctypes.data % LINE
    return whole[start : start + size].view(dtype).reshape(shape)
