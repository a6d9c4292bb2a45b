"""`python -m bench.coverage CARD [--only TEXT] [--processes N] [--limit SECONDS]`."""

from __future__ import annotations

import argparse
import datetime
import importlib
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from bench.coverage import pool, report

NOT_RUN: pool.Found = {"kind": "not_run", "text": ""}
LIMITS = {
    "opinfo": 90.0,
    "coreaten": 90.0,
    "architectures": 3600.0,
    "onnx_nodes": 90.0,
    "onnx_dynamic": 90.0,
    "onnx_wheels": 400.0,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.coverage", description=__doc__)
    parser.add_argument("card", choices=list(LIMITS))
    parser.add_argument(
        "--only", help="entries with this in their name; writes no page"
    )
    parser.add_argument("--every", type=int, default=1, help="a sample; writes no page")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--limit", type=float, help="seconds for an entry")
    parser.add_argument("--fresh", action="store_true", help="forget a run's beginning")
    parser.add_argument(
        "--again", action="store_true", help="run only what did not pass"
    )
    parser.add_argument(
        "--so-far",
        action="store_true",
        help="run nothing: the page of a run's beginning, the rest as not run",
    )
    arguments = parser.parse_args()
    card = arguments.card
    names = importlib.import_module(f"bench.coverage.{card}").names()
    whole = len(names)
    names = [n for n in names if not arguments.only or arguments.only in n]
    names = names[:: arguments.every]
    # Kept by commit: an interrupted run goes on, and results of other code do not mix.
    kept = Path(tempfile.gettempdir()) / "pliant_coverage" / f"{card}_{_commit()}.jsonl"
    if arguments.fresh:
        kept.unlink(missing_ok=True)
    limit = arguments.limit or LIMITS[card]
    about = {
        "torch": torch.__version__,
        "commit": _commit(),
        "machine": _machine(),
        "date": datetime.date.today().isoformat(),
    }
    before: dict[str, pool.Found] = {}
    if arguments.again:
        old, entries = report.saved(card)
        of = {"commit": old.get("passes of commit", old["commit"])}
        before = {n: {**of, **entries[n]} for n in names if _has_run(entries.get(n))}
    rest = [name for name in names if not _passes(before.get(name))]
    processes = 0 if arguments.so_far else arguments.processes
    found = pool.run(card, rest, kept, processes, limit)
    own = {n: {**entry, "commit": _commit()} for n, entry in found.items()}
    # What this run has not come to keeps the answer that it had.
    found = {n: own.get(n) or before.get(n) or NOT_RUN for n in names}
    print(", ".join(f"{n} {kind}" for kind, n in report.counts(found).items()))
    if len(names) == whole:
        report.save(card, found, about)
    return 0


def _machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = {line.partition(": ")[2] for line in lines if line.startswith("model name")}
    return f"{os.cpu_count()} cores of {', '.join(sorted(names)) or platform.machine()}"


def _has_run(entry: pool.Found | None) -> bool:
    return entry is not None and bool(entry["kind"] != "not_run")


def _passes(entry: pool.Found | None) -> bool:
    return entry is not None and bool(entry["kind"] == "pass")


def _commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
