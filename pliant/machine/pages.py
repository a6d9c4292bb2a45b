"""Arrays aligned to a cache line; large ones are on huge pages if available.

A vector that straddles two cache lines takes two reads; a product's panels are whole
lines. A product also reads its weights with a stride of pages, and with 4 KiB pages it
would wait for TLB misses. The system uses huge pages only for whole, aligned ones, so
an array of a few MiB starts at such a boundary.

The arrays are filled by threads while the caller goes on (`copying`), because the first
touch of each page takes most of the time.
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
LEAST = 1 << 20  # least bytes of an array for which pages of its own pay
PIECE = 4 << 20  # bytes that a thread copies at once


@dataclass(frozen=True, slots=True)
class _CopyThreads:
    """Threads that copy, and their pending work."""

    threads: ThreadPoolExecutor
    given: list[Future[None]] = field(default_factory=list)


_copies: ContextVar[_CopyThreads | None] = ContextVar("copies", default=None)


@contextmanager
def copying() -> Iterator[None]:
    """Inside, `copy` is done by threads; on leaving, all copies are complete."""
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
    """`to[...] = array`, maybe later: read `to` only after leaving `copying`."""
    copies = _copies.get()
    if copies is None or to.nbytes < PIECE or to.ndim == 0:
        to[...] = array
        return
    rows = max(PIECE * len(to) // to.nbytes, 1)
    for first in range(0, len(to), rows):
        part = slice(first, first + rows)
        copies.given.append(copies.threads.submit(np.copyto, to[part], array[part]))


def zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Like numpy.zeros, aligned to a cache line; large arrays are on huge pages."""
    size = int(np.prod(shape, dtype=object)) * dtype.itemsize
    if size < LEAST or not hasattr(mmap, "MADV_HUGEPAGE"):
        return _at_line(shape, dtype, size)
    pages = mmap.mmap(-1, size + HUGE)  # untouched pages cost nothing
    whole = np.frombuffer(pages, np.uint8)
    start = -whole.ctypes.data % HUGE
    try:
        pages.madvise(mmap.MADV_HUGEPAGE, start, size // HUGE * HUGE or size)
    except OSError:  # the kernel has none, or forbids them
        return _at_line(shape, dtype, size)
    return whole[start : start + size].view(dtype).reshape(shape)


def copied(array: np.ndarray) -> np.ndarray:
    """A row-major copy, aligned to a cache line."""
    made = zeros(array.shape, array.dtype)
    copy(made, array)
    return made


def _at_line(shape: tuple[int, ...], dtype: np.dtype[Any], size: int) -> np.ndarray:
    whole = np.zeros(size + LINE, np.uint8)
    start = -whole.ctypes.data % LINE
    return whole[start : start + size].view(dtype).reshape(shape)
