"""Every environment knob: typed, defaulted, one docstring each.

A knob is read when asked for, never at import, so tests may set it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EnvironmentKnob(Generic[T]):
    """One environment variable: how to parse it, and its value when unset."""

    name: str
    parse: Callable[[str], T]
    default: T
    doc: str

    def get(self) -> T:
        text = os.environ.get(self.name, "")
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise ValueError(f"{self.name}={text!r}: {error}; {self.doc}") from None


def _optional_path(text: str) -> Path | None:
    return Path(text)


def _switch(text: str) -> bool:
    return text not in ("0", "false", "no")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError("must be at least 1")
    return number


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 <= number <= 1e9:
        raise ValueError("must be a time in seconds, or 0")
    return number


DUMP: EnvironmentKnob[Path | None] = EnvironmentKnob(
    "PLIANT_DUMP",
    _optional_path,
    None,
    "Folder that receives the IR after every stage, LLVM IR and assembly.",
)
THREADS: EnvironmentKnob[int | None] = EnvironmentKnob(
    "PLIANT_THREADS",
    _positive,
    None,
    "Worker threads of a call where the caller does not say; unset: what torch or "
    "OMP_NUM_THREADS were set to, else the cores that affinity mask and quota leave.",
)
SHARE_THREADS: EnvironmentKnob[bool] = EnvironmentKnob(
    "PLIANT_SHARE_THREADS",
    _switch,
    True,
    "Run parallel regions on torch's OpenMP threads where torch is loaded (default 1).",
)
TARGET: EnvironmentKnob[str] = EnvironmentKnob(
    "PLIANT_TARGET",
    str,
    "host",
    "The machine to generate code for: host, avx512, avx2, baseline, neon, or a JSON "
    "file that `pliant doctor --json` wrote.",
)
OPT_LEVEL: EnvironmentKnob[int] = EnvironmentKnob(
    "PLIANT_OPT_LEVEL",
    int,
    2,
    "LLVM effort from 0 to 3; 0 skips the optimiser, for bisecting miscompiles.",
)

CACHE: EnvironmentKnob[str | None] = EnvironmentKnob(
    "PLIANT_CACHE",
    str,
    None,
    "Folder that keeps compiled kernels and measurements between processes; off: none "
    "(default: pliant in the user's cache folder).",
)
CACHE_MIB: EnvironmentKnob[int] = EnvironmentKnob(
    "PLIANT_CACHE_MIB",
    _positive,
    256,
    "MiB that PLIANT_CACHE may hold; what was used longest ago is removed first.",
)
CACHE_PROGRAMS: EnvironmentKnob[bool] = EnvironmentKnob(
    "PLIANT_CACHE_PROGRAMS",
    _switch,
    True,
    "Keep whole compiled programs in PLIANT_CACHE, not only their kernels (default 1).",
)

IDLE_SECONDS: EnvironmentKnob[float] = EnvironmentKnob(
    "PLIANT_IDLE_SECONDS",
    _seconds,
    10.0,
    "An arena that no call has used for so long is given back to the system, without "
    "another call; 0: it is kept (default 10).",
)
GUARD_PAGES: EnvironmentKnob[bool] = EnvironmentKnob(
    "PLIANT_GUARD_PAGES",
    _switch,
    False,
    "Put the end of every arena against a page that traps: code that writes more than "
    "its plan says ends the process (default 0; for tests).",
)
SPILL_FOLDER: EnvironmentKnob[str | None] = EnvironmentKnob(
    "PLIANT_SPILL_FOLDER",
    str,
    None,
    "Folder of the nameless file that takes buffers which a memory limit leaves no "
    "room for (default: the system's temporary folder, or /var/tmp if that is in "
    "memory). Nothing is spilled to a folder in memory.",
)
SPILL_MBS: EnvironmentKnob[int] = EnvironmentKnob(
    "PLIANT_SPILL_MBS",
    _positive,
    1000,
    "MB that the spill file takes or gives per second: what spilling is weighed by "
    "against computing again.",
)

KNOBS: tuple[EnvironmentKnob[Any], ...] = (
    *(DUMP, THREADS, SHARE_THREADS, TARGET, OPT_LEVEL),
    *(CACHE, CACHE_MIB, CACHE_PROGRAMS),
    *(IDLE_SECONDS, GUARD_PAGES, SPILL_FOLDER, SPILL_MBS),
)
