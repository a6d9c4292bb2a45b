"""How much processor time the control groups of this process leave it (Linux).

A container that may use two of 64 processors often sees all 64: its affinity mask is
full, and a quota of processor time per period limits it. Threads beyond the quota only
wait for each other. Groups nest, and each may have a quota; the smallest one applies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

PROC = Path("/proc/self")


@dataclass(frozen=True, slots=True)
class _Mount:
    """A file system of control groups: which group is seen at which folder."""

    point: Path
    root: str
    unified: bool  # version 2: one tree for all controllers


def processors(proc: Path = PROC) -> int | None:
    """Whole processors that the quotas amount to, rounded up; None: no quota."""
    found = [
        quota
        for mount in _mounts(proc)
        if (group := _group(proc, mount.unified)) is not None
        for folder in _folders(mount, group)
        if (quota := _quota(folder, mount.unified)) is not None
    ]
    return min(found, default=None)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def _mounts(proc: Path) -> Iterator[_Mount]:
    """The mounts of the cpu controller, from mountinfo (proc(5)):

    number parent device root point options [tags] - type source options
    """
    for line in _lines(proc / "mountinfo"):
        left, _, right = line.partition(" - ")
        where, what = left.split(), right.split()
        if len(where) < 5 or len(what) < 3:
            continue
        unified = what[0] == "cgroup2"
        if unified or (what[0] == "cgroup" and "cpu" in what[2].split(",")):
            yield _Mount(Path(_unescaped(where[4])), _unescaped(where[3]), unified)


def _unescaped(text: str) -> str:
    for code, character in (("040", " "), ("011", "\t"), ("012", "\n"), ("134", "\\")):
        text = text.replace(f"\\{code}", character)
    return text


def _group(proc: Path, unified: bool) -> str | None:
    """This process's group, from lines "number:controllers:path"."""
    for line in _lines(proc / "cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if unified and number == "0" and not controllers:
            return path
        if not unified and "cpu" in controllers.split(","):
            return path
    return None


def _folders(mount: _Mount, group: str) -> Iterator[Path]:
    """The folders of the group and of its visible ancestors."""
    try:
        inside = PurePosixPath(group).relative_to(mount.root)
    except ValueError:  # the group is outside this mount
        inside = PurePosixPath()
    if ".." in inside.parts:
        inside = PurePosixPath()
    yield mount.point / inside
    for parent in inside.parents:
        yield mount.point / parent


def _quota(folder: Path, unified: bool) -> int | None:
    """Time per period, both in microseconds, rounded up to whole processors."""
    if unified:
        words = " ".join(_lines(folder / "cpu.max")).split()
    else:
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = [word for name in names for word in _lines(folder / name)]
    if len(words) != 2 or not all(word.isdecimal() for word in words):
        return None  # "max", "-1", or no such file
    time, period = map(int, words)
    return max(-(-time // period), 1) if period else None
