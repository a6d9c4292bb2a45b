"""Compiling without Python's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collection() -> Iterator[None]:
    """Turns automatic collection off, and on again if it was on.

    What was made meanwhile and is garbage goes at the end: a trace of torch's leaves
    cycles that hold the module, whose weights would stay after the caller dropped it.

    A compilation makes many small objects, which sets off full collections, and each of
    these walks all that torch and the model hold: a fifth of a second for nothing.
    Should two threads compile, collection comes back when the first of them is done.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
            gc.collect(0)  # what is older is not looked at
