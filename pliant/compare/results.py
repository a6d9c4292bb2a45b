"""The one writer of results: every stored number says what it was measured with.

A result is NAME.json for programs and NAME.md for people. Both carry a stamp: the
commit of the code (and whether it had been changed since), the date, the rounds, the
machine and the versions. The commit is the last one that changed the compiler or the
benchmarks: results, pages and tests may be committed between two measurements.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pliant
from pliant.compare.tables import Report
from pliant.machine import target

PACKAGES = (
    *("pliant", "torch", "llvmlite", "numpy", "transformers"),
    *("onnxruntime", "openvino", "apache-tvm"),
)
NOTABLE = ("avx2", "fma", "avx512f", "avx512vnni", "avx512bf16", "amx-tile")
# What of the checkout a number depends on.
CODE = (
    *("pliant", "bench", "zoo", "setup.py", "pyproject.toml"),
    ":(exclude)bench/results",
)
LOAD = round(os.getloadavg()[0], 1)  # before anything is measured
UNKNOWN = "unknown"  # the commit of a package that is not in a checkout

Stamp = dict[str, Any]


def stamp(rounds: int) -> Stamp:
    """What a number measured now, in so many rounds, was measured with."""
    host = target.host()
    found = {name: _version(name) for name in PACKAGES}
    return {
        **commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "rounds": rounds,
        "cpu": _cpu_name(),
        "cores": host.cores,
        "caches": [cache.bytes for cache in host.caches],
        "features": [name for name in NOTABLE if host.has(name)] or ["sse2"],
        "versions": {name: text for name, text in found.items() if text}
        | {"python": platform.python_version()},
        "load": LOAD,
    }


def commit() -> Stamp:
    """The code that runs: its commit, and whether it was changed since."""
    last = _git("log", "-1", "--format=%h", "--", *CODE)
    if not last:
        return {"commit": UNKNOWN, "changed": False}
    return {
        "commit": last,
        "changed": bool(_git("status", "--porcelain", "--", *CODE)),
    }


def _git(*arguments: str) -> str:
    """What git says of this package's checkout; nothing where there is none."""
    root = Path(pliant.__file__).parents[1]
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


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


def stamp_line(about: Mapping[str, Any]) -> str:
    """The stamp as a line of text."""
    changed = " with uncommitted changes" if about["changed"] else ""
    caches = " + ".join(_size(count) for count in about["caches"])
    versions = ", ".join(f"{name} {text}" for name, text in about["versions"].items())
    parts = (
        f"Commit {about['commit']}{changed}",
        about["date"],
        f"{about['rounds']} rounds" if about["rounds"] else "nothing timed",
        f"{about['cpu']}, {about['cores']} cores, {caches} cache",
        ", ".join(about["features"]),
        versions,
        f"load {about['load']} before",
    )
    return "; ".join(parts)


def _size(count: int) -> str:
    unit = "MiB" if count >= 1 << 20 else "KiB"
    return f"{count / (1 << (20 if unit == 'MiB' else 10)):g} {unit}"


# ---- files


def write_json(
    path: Path, about: Mapping[str, Any], content: Mapping[str, Any]
) -> None:
    """A line for each row, numbers to four digits."""
    parts = [
        f" {json.dumps(key)}: {_lines(value)}"
        for key, value in {"stamp": about, **content}.items()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def write_page(
    path: Path,
    stamps: Sequence[Mapping[str, Any]],
    tables: Sequence[Report],
    notes: Sequence[str] = (),
) -> None:
    """Tables, paragraphs behind them, and the different stamps of what they tell."""
    lines = dict.fromkeys(map(stamp_line, stamps))
    parts = [*(table.markdown() for table in tables), *(f"{note}\n" for note in notes)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*parts, *(f"{line}\n" for line in lines)]))


def _lines(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return json.dumps(_short(value))
    rows = ",\n  ".join(json.dumps(_short(row)) for row in value)
    return f"[\n  {rows}\n ]"


def _short(value: Any) -> Any:
    match value:
        case float():
            return float(f"{value:.4g}")
        case Mapping():
            return {key: _short(held) for key, held in value.items()}
        case list() | tuple():
            return [_short(held) for held in value]
    return value
