"""The most memory that a call holds, as the system counts it (Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # proc(5): resets the high-water mark to what is resident now


def high_water(call: Callable[[], object]) -> int | None:
    """Resident bytes at the peak of a call, above those before it.

    What was resident before (weights, inputs, what the engine keeps) is not counted,
    results are. None if the system does not tell.
    """
    gc.collect()
    _return_free_heap()
    try:
        _CLEAR.write_text(RESET_PEAK)
        before = _kibibytes("VmRSS")
    except (OSError, KeyError):
        return None
    kept = call()
    most = _kibibytes("VmHWM")
    del kept  # the results count, so they are kept alive until here
    return max(most - before, 0) * 1024


def resident() -> int | None:
    """Resident bytes now, or None if the system does not tell."""
    _return_free_heap()
    try:
        return _kibibytes("VmRSS") * 1024
    except (OSError, KeyError):
        return None


def _return_free_heap() -> None:
    """Trims the heap: allocations in pages freed earlier would not be counted."""
    with contextlib.suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _kibibytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0])
    raise KeyError(field)
