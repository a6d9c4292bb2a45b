"""What this machine tells of itself: cores and data caches."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Cache:
    """A data cache as one core sees it."""

    bytes: int
    ways: int  # lines that share an address's place
    line: int  # bytes fetched at once


# What to assume where the system does not tell.
ASSUMED = (Cache(32 << 10, 8, 64), Cache(512 << 10, 8, 64), Cache(8 << 20, 16, 64))
# By level: the names in sysconf, and level and type in files of the system.
_SYSCONF = ("LEVEL1_DCACHE", "LEVEL2_CACHE", "LEVEL3_CACHE")
SYSFS = Path("/sys/devices/system/cpu/cpu0/cache")
_KINDS = (("1", "Data"), ("2", "Unified"), ("3", "Unified"))
_UNITS = {"K": 1 << 10, "M": 1 << 20}


def cores() -> int:
    """Threads worth starting: the cores this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


@lru_cache(maxsize=1)
def caches() -> tuple[Cache, Cache, Cache]:
    """L1, L2 and L3; what is not told is assumed."""
    first, second, third = (_cache(level) for level in range(3))
    return first, second, third


def _cache(level: int) -> Cache:
    told = _from_sysfs(level)
    name, assumed = _SYSCONF[level], ASSUMED[level]
    size = _sysconf(f"SC_{name}_SIZE") or told.bytes or assumed.bytes
    line = _sysconf(f"SC_{name}_LINESIZE") or told.line or assumed.line
    ways = _sysconf(f"SC_{name}_ASSOC") or told.ways or assumed.ways
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
