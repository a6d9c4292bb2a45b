"""What is being done, in one line on standard error, where that is a terminal.

    with task("compiling bert", after=1.0):     shown once it takes longer than that
        ...
        step("fuse")                            compiling bert: fuse

A task inside another changes the same line and gives it back. Where standard error is
no terminal nothing is written, and `step` outside of a task does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock, Timer

from rich.console import Console
from rich.status import Status


class _Line:
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
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    line = _Line(console, after)
    line.say(text)
    token = _LINE.set(line)
    try:
        yield line.say
    finally:
        _LINE.reset(token)
        line.end()


def step(part: str) -> None:
    """Says which part of the task begins."""
    line = _LINE.get()
    if line is not None:
        line.say(line.text, part)
