"""The number of threads of a model's calls."""

from __future__ import annotations

from typing import Any

from pliant import knobs
from pliant.errors import OptionError
from pliant.machine.processor import asked_threads, cores
from pliant.model.arguments import is_integer, shown

MOST_THREADS = 1024


def workers(threads: int | None) -> int:
    """What the caller says, the knob, the process, the machine.

    The cores are this machine's, whichever one the code is generated for.
    """
    count = threads or knobs.THREADS.get() or asked_threads() or cores()
    return min(count, MOST_THREADS)


def check_threads(threads: Any) -> None:
    if threads is None:
        return
    if not is_integer(threads) or not 1 <= threads <= MOST_THREADS:
        raise OptionError(
            f"threads must be an int from 1 to {MOST_THREADS}, or None for every core; "
            f"not {shown(threads)}"
        )
