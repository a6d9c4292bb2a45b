"""What is being done, in one line on standard error, where that is a terminal.

In a notebook the line is an output of the cell. The logger "pliant" is told as well:
each compile as INFO, each stage as DEBUG; nothing of it is printed unless logging is
set up.

    with task("compiling bert", after=1.0):     shown once it takes longer than that
        ...
        step("fuse")                            compiling bert: fuse

A task inside another changes the same line and gives it back. Where standard error is
no terminal nothing is written, and `step` outside of a task does nothing.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock, Timer
from time import perf_counter
from typing import Any, Protocol

from rich.console import Console
from rich.status import Status

LOG = logging.getLogger("pliant")
LOG.addHandler(logging.NullHandler())


class _Line(Protocol):
    """A line that says what is being done."""

    text: str
    part: str

    def say(self, text: str, part: str = "") -> None: ...

    def end(self) -> None: ...


class _NotebookLine:
    """An output of the cell that runs, from the first change after some time on."""

    def __init__(self, shell: Any, after: float) -> None:
        self.text, self.part = "", ""
        self.after, self.started = after, perf_counter()
        self.display = sys.modules["IPython"].display
        self.handle: Any = None

    def say(self, text: str, part: str = "") -> None:
        self.text, self.part = text, part
        spent = perf_counter() - self.started
        if spent >= self.after:
            self._show(f"{text}: {part}" if part else text, spent)

    def _show(self, words: str, spent: float) -> None:
        shown = {"text/plain": f"{words} ({spent:.1f} s)"}
        if self.handle is None:
            self.handle = self.display.display(shown, raw=True, display_id=True)
        else:
            self.handle.update(shown, raw=True)

    def end(self) -> None:
        if self.handle is not None:
            self._show(self.text, perf_counter() - self.started)


def _notebook() -> Any:
    """The shell of a notebook's kernel, where this runs in one."""
    module = sys.modules.get("IPython")
    shell = None if module is None else module.get_ipython()
    return shell if getattr(shell, "kernel", None) is not None else None


class _TerminalLine:
    """The line of a terminal, from some time on."""

    def __init__(self, console: Console, after: float) -> None:
        self.text, self.part = "", ""
        self.lock = Lock()
        self.console = console
        self.status: Status | None = None
        self.ended = False
        self.timer = Timer(after, self.show)
        self.timer.daemon = True
        self.timer.start()

    def line(self) -> str:
        return f"{self.text}: {self.part}" if self.part else self.text

    def show(self) -> None:
        with self.lock:
            if not self.ended:
                self.status = self.console.status(self.line())
                self.status.start()

    def say(self, text: str, part: str = "") -> None:
        with self.lock:
            self.text, self.part = text, part
            if self.status is not None:
                self.status.update(self.line())

    def end(self) -> None:
        self.timer.cancel()
        with self.lock:
            self.ended = True
            if self.status is not None:
                self.status.stop()


_LINE: ContextVar[_Line | None] = ContextVar("line", default=None)


@contextmanager
def task(text: str, after: float = 0.0) -> Iterator[Callable[[str], None]]:
    """Says what is being done; gives the function that changes the text."""
    outer = _LINE.get()
    if outer is not None:
        before, part = outer.text, outer.part
        outer.say(text)
        try:
            yield outer.say
        finally:
            outer.say(before, part)
        return
    line = _line(after)
    if line is None:
        yield lambda _: None
        return
    line.say(text)
    token = _LINE.set(line)
    try:
        yield line.say
    finally:
        _LINE.reset(token)
        line.end()


def _line(after: float) -> _Line | None:
    """Where progress is shown; None if nowhere."""
    shell = _notebook()
    if shell is not None:
        return _NotebookLine(shell, after)
    console = Console(stderr=True)
    return _TerminalLine(console, after) if console.is_terminal else None


def step(part: str) -> None:
    """Says which part of the task begins."""
    LOG.debug("stage %s", part)
    line = _LINE.get()
    if line is not None:
        line.say(line.text, part)
