"""What the system reports about this machine: cores and data caches."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pliant.machine import cgroup


@dataclass(frozen=True, slots=True)
class Cache:
    """A data cache as one core sees it."""

    bytes: int
    ways: int  # associativity
    line: int  # bytes of a cache line


# Assumed where the system does not report caches.
ASSUMED = (Cache(32 << 10, 8, 64), Cache(512 << 10, 8, 64), Cache(8 << 20, 16, 64))
# By level: the names in sysconf, and level and type in sysfs.
_SYSCONF = ("LEVEL1_DCACHE", "LEVEL2_CACHE", "LEVEL3_CACHE")
PROCESSORS = Path("/sys/devices/system/cpu")
SYSFS = PROCESSORS / "cpu0/cache"
_KINDS = (("1", "Data"), ("2", "Unified"), ("3", "Unified"))
_UNITS = {"K": 1 << 10, "M": 1 << 20}


def cores() -> int:
    """The number of threads to start: cores that affinity and quota leave to us."""
    allowed = _allowed()
    return min(len(allowed), cgroup.processors() or len(allowed))


def asked_threads() -> int | None:
    """The number of threads that the process was asked to use, or None.

    It is torch's number of threads, if somebody changed it, else OMP_NUM_THREADS. torch
    does not tell whether its number was set; its own default counts as not set.
    """
    asked = _first_number("OMP_NUM_THREADS")
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_num_threads"):  # not yet imported
        return asked
    now = int(torch.get_num_threads())
    own = asked or _first_number("MKL_NUM_THREADS")
    allowed = _allowed()
    unasked = {own} if own else {len(allowed), _whole_cores(allowed)}
    return asked if now in unasked else now


def _allowed() -> frozenset[int]:
    """The processors of the affinity mask."""
    try:
        return frozenset(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return frozenset(range(os.cpu_count() or 1))


def _whole_cores(processors: frozenset[int]) -> int:
    """Processors that share a core count once."""
    seen = {
        _read(PROCESSORS / f"cpu{number}/topology/core_cpus_list")
        or _read(PROCESSORS / f"cpu{number}/topology/thread_siblings_list")
        or str(number)
        for number in processors
    }
    return len(seen)


def _first_number(name: str) -> int | None:
    """The first number of a variable such as "8" or "8,2" (nested teams follow)."""
    text = os.environ.get(name, "").split(",")[0].strip()
    return int(text) if text.isdecimal() and int(text) > 0 else None


@lru_cache(maxsize=1)
def caches() -> tuple[Cache, Cache, Cache]:
    """L1, L2 and L3; what the system does not report is assumed."""
    first, second, third = (_cache(level) for level in range(3))
    return first, second, third


def _cache(level: int) -> Cache:
    listed = _from_sysfs(level)
    name, assumed = _SYSCONF[level], ASSUMED[level]
    size = _sysconf(f"SC_{name}_SIZE") or listed.bytes or assumed.bytes
    line = _sysconf(f"SC_{name}_LINESIZE") or listed.line or assumed.line
    ways = _sysconf(f"SC_{name}_ASSOC") or listed.ways or assumed.ways
    return Cache(size, ways, line)


def _sysconf(name: str) -> int:
    try:
        return max(os.sysconf(name), 0)
    except (ValueError, OSError):
        return 0


def _from_sysfs(level: int) -> Cache:
    """The cache of that level, zero where a file is missing or not understood."""
    for entry in SYSFS.glob("index*"):
        if (_read(entry / "level"), _read(entry / "type")) == _KINDS[level]:
            return Cache(
                _number(_read(entry / "size")),
                _number(_read(entry / "ways_of_associativity")),
                _number(_read(entry / "coherency_line_size")),
            )
    return Cache(0, 0, 0)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(text: str) -> int:
    unit = _UNITS.get(text[-1:], 1)
    digits = text[:-1] if text[-1:] in _UNITS else text
    return int(digits) * unit if digits.isdigit() else 0
