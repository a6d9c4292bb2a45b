"""Code of a model that makes a number of a size that varies.

    for t in range(x.shape[1]): ...
    height, width = int(x.shape[2]), int(x.shape[3])

torch.export runs such code and fixes the size to the example's. `keep_sizes` finds the
function that does so, rewrites its text (function_source.py) and traces the model again
with the new code: the loop is then a scan, and the number stays a size. A function
whose text shows no scan, and what torch refuses, are traced as they were written.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType, FrameType, FunctionType
from typing import TypeVar
from unittest import mock

from torch import SymFloat, SymInt

from pliant.frontend.function_source import is_rewritten, rewritten
from pliant.frontend.torch_builtins import in_model
from pliant.frontend.torch_rounds import is_size, truncated

T = TypeVar("T")
Codes = dict[FunctionType, CodeType]


class _FixesSize(Exception):
    """A function is about to fix a size, and there is another text of it."""

    def __init__(self, codes: Codes) -> None:
        super().__init__("a size would be a number")
        self.codes = codes


def keep_sizes(trace: Callable[[], T]) -> T:
    """The trace of a model, in which what varies stays a size where it can."""
    steps: list[Codes] = []
    tried: set[CodeType] = set()  # what has been rewritten, once
    while True:
        codes = {function: code for step in steps for function, code in step.items()}
        try:
            with _watched(tried), _replaced(codes):
                return trace()
        except Exception as error:
            found = _found(error)
            if found is not None:
                steps.append(found.codes)
            elif steps:
                steps.pop()  # what looked like a scan may be none
            else:
                raise


def _found(error: BaseException | None) -> _FixesSize | None:
    """What ended a trace, if it was that; torch may have wrapped it."""
    while error is not None and not isinstance(error, _FixesSize):
        error = error.__cause__ or error.__context__
    return error


@contextmanager
def _watched(tried: set[CodeType]) -> Iterator[None]:
    """While it lasts, code that makes a number of a size ends the trace, if there is
    another text of its function."""

    def ends(frame: FrameType, *names: str) -> None:
        called = {name for name in names if name in frame.f_code.co_names}
        if not called or not in_model(frame.f_globals.get("__name__", "")):
            return
        code = _around(frame).f_code
        if code not in tried:
            tried.add(code)
            if other := _others(code):
                raise _FixesSize(other)

    def index(size: SymInt) -> int:
        if is_size(size):
            ends(sys._getframe(1), "range", "float")
        return _index(size)

    def whole(size: SymInt) -> int:
        if is_size(size):
            ends(sys._getframe(1), "int")
        return _whole(size)

    def truncation(number: SymFloat) -> int:
        if truncated(number) is not None:
            ends(sys._getframe(1), "int")
        return _truncation(number)

    def real(number: SymFloat) -> float:
        if number.node.maybe_as_float() is None:
            ends(sys._getframe(1), "float")
        return _real(number)

    with ExitStack() as stack:
        for kind, name, function in (
            (SymInt, "__index__", index),
            (SymInt, "__int__", whole),
            (SymFloat, "__int__", truncation),
            (SymFloat, "__float__", real),
        ):
            stack.enter_context(mock.patch.object(kind, name, function))
        yield


_index: Callable[[SymInt], int] = SymInt.__index__
_whole: Callable[[SymInt], int] = SymInt.__int__
_truncation: Callable[[SymFloat], int] = SymFloat.__int__
_real: Callable[[SymFloat], float] = SymFloat.__float__


def _around(frame: FrameType) -> FrameType:
    """That of the outermost function whose text has this one, as a comprehension: it is
    made anew in every trace."""
    outer = frame.f_back
    while outer is not None and outer.f_code is not keep_sizes.__code__:
        if frame.f_code in outer.f_code.co_consts:
            frame = outer
        outer = outer.f_back
    return frame


def _others(code: CodeType) -> Codes:
    """The functions of this code, and their rewritten codes."""
    if is_rewritten(code):
        return {}  # it is the rewritten one: this is no scan, or has to be a number
    functions = [
        found
        for found in gc.get_referrers(code)
        if isinstance(found, FunctionType) and found.__code__ is code
    ]
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
