"""Progress on standard error, where that is a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console


@contextmanager
def progress(text: str) -> Iterator[Callable[[str], None]]:
    """A line that says what is being done; gives the function that changes it."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status(text) as status:
        yield lambda new: status.update(new)
