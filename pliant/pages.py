"""Arrays on huge pages, where the system has them.

A product walks over its weights with a stride of pages; with pages of 4 KiB it waits
for their addresses. The system backs whole, aligned huge pages only, so an array of a
few MiB starts at one.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

HUGE = 2 << 20
LEAST = 1 << 20  # bytes of an array that is worth pages of its own


def zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """As numpy.zeros; a large array is on huge pages."""
    size = int(np.prod(shape, dtype=object)) * dtype.itemsize
    if size < LEAST or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.zeros(shape, dtype)
    pages = mmap.mmap(-1, size + HUGE)  # what is not touched costs nothing
    whole = np.frombuffer(pages, np.uint8)
    start = -whole.ctypes.data % HUGE
    try:
        pages.madvise(mmap.MADV_HUGEPAGE, start, size // HUGE * HUGE or size)
    except OSError:  # built without them, or not allowed
        return np.zeros(shape, dtype)
    return whole[start : start + size].view(dtype).reshape(shape)
