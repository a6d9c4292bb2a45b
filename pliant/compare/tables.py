"""Tables for the terminal and for Markdown."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

PLAIN_WIDTH = 200  # of a table that no terminal limits


def console() -> Console:
    """Standard output; wide where it is not a terminal."""
    return Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)


@dataclass(frozen=True, slots=True)
class Report:
    """A table for the terminal and for Markdown."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def show(self, console: Console) -> None:
        console.print(self.title, style="bold", highlight=False, markup=False)
        table = Table()
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*row)
        console.print(table, markup=False)

    def markdown(self) -> str:
        rule = ("---", *("---:" for _ in self.columns[1:]))
        lines = [" | ".join(row) for row in (self.columns, rule, *self.rows)]
        return f"### {self.title}\n\n" + "\n".join(f"| {x} |" for x in lines) + "\n"


def mebibytes(count: int) -> str:
    return f"{count / 2**20:.2f}"


def small_mebibytes(count: int) -> str:
    """With enough digits for what is below one."""
    return mebibytes(count) if count >= 2**20 else f"{count / 2**20:.4f}"


def dims_text(shape: tuple[int, ...] | list[int]) -> str:
    return f"({', '.join(map(str, shape))})"
