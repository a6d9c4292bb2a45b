"""Tables for the terminal and for Markdown, and what they say of the machine."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pliant import target

PACKAGES = ("pliant", "torch", "llvmlite", "onnxruntime", "openvino", "apache-tvm")
NOTABLE = ("avx2", "fma", "avx512f", "avx512vnni", "avx512bf16", "amx-tile")
PLAIN_WIDTH = 200  # of a table that no terminal limits


def console() -> Console:
    """Standard output; wide where it is not a terminal."""
    return Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)


def machine() -> dict[str, str]:
    """The CPU and the versions that a number was measured with."""
    host = target.host()
    found = {name: _version(name) for name in PACKAGES}
    texts = [f"{name} {number}" for name, number in found.items() if number]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpu": f"{_cpu_name()}, {host.cores} cores",
        "features": ", ".join(f for f in NOTABLE if host.has(f)) or "sse2",
        "versions": f"{', '.join(texts)}, Python {platform.python_version()}",
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2] for line in lines if line.startswith("model name"))
    return next(names, platform.machine()).strip()


def machine_line(about: Mapping[str, str]) -> str:
    return "; ".join(about.values())


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


def dims_text(shape: tuple[int, ...] | list[int]) -> str:
    return f"({', '.join(map(str, shape))})"
