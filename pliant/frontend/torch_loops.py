"""Loops of a model's Python code over a size that varies.

    for t in range(x.shape[1]): ...

torch.export runs such a loop and fixes the size to the example's. `keep_loops` finds
the function that does so, rewrites its text (loop_source.py) and traces the model again
with the new code: the loop is then a scan. A function whose text shows no scan, and a
scan that torch refuses, are traced as they were written.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import TypeVar

import torch

from pliant.frontend.loop_source import ROUNDS, rewritten
from pliant.frontend.torch_rounds import is_size

T = TypeVar("T")
Codes = dict[FunctionType, CodeType]


class _LoopOverSize(Exception):
    """A function is about to fix a size, and there is another text of it."""

    def __init__(self, codes: Codes) -> None:
        super().__init__("a loop over a size")
        self.codes = codes


def keep_loops(trace: Callable[[], T]) -> T:
    """The trace of a model, in which loops over sizes are scans where they can be."""
    codes: Codes = {}
    while True:
        try:
            with _watched(), _replaced(codes):
                return trace()
        except Exception as error:
            found = _found(error)
            if found is not None:
                codes |= found.codes
            elif codes:
                break  # what looked like a scan is none
            else:
                raise
    return trace()


def _found(error: BaseException | None) -> _LoopOverSize | None:
    """The loop that ended a trace; torch may have wrapped it."""
    while error is not None and not isinstance(error, _LoopOverSize):
        error = error.__cause__ or error.__context__
    return error


@contextmanager
def _watched() -> Iterator[None]:
    """While it lasts, a size that a loop makes a number ends the trace, if there is
    another text of the function with the loop."""
    number: Callable[[torch.SymInt], int] = torch.SymInt.__index__

    def watched(size: torch.SymInt) -> int:
        code = sys._getframe(1).f_code
        if "range" in code.co_names and is_size(size) and (other := _others(code)):
            raise _LoopOverSize(other)
        return number(size)

    torch.SymInt.__index__ = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.SymInt.__index__ = number  # type: ignore[method-assign]


def _others(code: CodeType) -> Codes:
    """The functions of this code, and their rewritten codes."""
    functions = [
        found
        for found in gc.get_referrers(code)
        if isinstance(found, FunctionType) and found.__code__ is code
    ]
    if ROUNDS in code.co_varnames + code.co_cellvars:
        return {}  # it is the rewritten one: this loop of it is no scan
    made = {function: rewritten(function) for function in functions}
    return {function: code for function, code in made.items() if code is not None}


@contextmanager
def _replaced(codes: Codes) -> Iterator[None]:
    kept = {function: function.__code__ for function in codes}
    try:
        for function, code in codes.items():
            function.__code__ = code
        yield
    finally:
        for function, code in kept.items():
            function.__code__ = code
