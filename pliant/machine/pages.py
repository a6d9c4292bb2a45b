"""Arrays that start at a cache line, large ones on huge pages where there are any.

A vector that lies across two lines takes two reads; a product's panels are whole lines.
And it walks over its weights with a stride of pages; with pages of 4 KiB it waits
for their addresses. The system backs whole, aligned huge pages only, so an array of a
few MiB starts at one.

What goes into them is copied by threads while the caller goes on (`copying`): pages
that are touched for the first time are most of what it takes.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pliant.machine.processor import cores

HUGE = 2 << 20
LINE = 64  # bytes
LEAST = 1 << 20  # bytes of an array that is worth pages of its own
PIECE = 4 << 20  # bytes that a thread copies at a time


@dataclass(frozen=True, slots=True)
class _CopyThreads:
    """Threads that copy, and what they were given."""

    threads: ThreadPoolExecutor
    given: list[Future[None]] = field(default_factory=list)


_copies: ContextVar[_CopyThreads | None] = ContextVar("copies", default=None)


@contextmanager
def copying() -> Iterator[None]:
    """What `copy` is asked for inside is done by threads; all of it is behind it."""
    with ThreadPoolExecutor(cores(), "pliant-copy") as threads:
        copies = _CopyThreads(threads)
        before = _copies.set(copies)
        try:
            yield
        finally:
            _copies.reset(before)
        for future in copies.given:
            future.result()


def copy(to: np.ndarray, array: np.ndarray) -> None:
    """`to[...] = array`, perhaps later: whoever reads `to` is outside of `copying`."""
    copies = _copies.get()
    if copies is None or to.nbytes < PIECE or to.ndim == 0:
        to[...] = array
        return
    rows = max(PIECE * len(to) // to.nbytes, 1)
    for first in range(0, len(to), rows):
        part = slice(first, first + rows)
        copies.given.append(copies.threads.submit(np.copyto, to[part], array[part]))


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
    made = zeros(array.shape, array.dtype)
    copy(made, array)
    return made


def _at_line(shape: tuple[int, ...], dtype: np.dtype[Any], size: int) -> np.ndarray:
    whole = np.zeros(size + LINE, np.uint8)
    start = -whole.ctypes.data % LINE
    return whole[start : start + size].view(dtype).reshape(shape)
